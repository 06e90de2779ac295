"""What cannot share a nest: windows, scans and reductions, each beside some others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tuner.capture.graph import Node
from tuner.capture.index_space import REDUCTIONS, refusal

__all__ = ["refuse_mixtures"]

_REDUCING = REDUCTIONS | {"gather"}


def refuse_mixtures(nodes: Sequence[Node], is_made_here: Callable[[str], bool]) -> None:
    """Raise where nodes cannot be of one nest.

    Taps cannot share one with what makes their source, nor with reductions; scans cannot with
    reductions, nor with scans the other way.

    Args:
        nodes: of the nest.
        is_made_here: whether a value, by its name, is computed by one of them.

    Raises:
        NotOneNest: `node` is the first that does not fit.
    """
    for node in nodes:
        if node.op == "tap" and is_made_here(node.refs[0]):
            raise refusal(node, "windows of what is computed here")
    if any(node.op == "tap" for node in nodes):
        for node in nodes:
            if node.op in _REDUCING:
                raise refusal(node, f"{node.op} beside windows")
    first: str | None = None
    for node in nodes:
        if node.op == "scan":
            kind = "backwards" if node.attrs["backwards"] else "forwards"
        elif node.op in _REDUCING:
            kind = "reducing"
        else:
            continue
        first = first or kind
        if kind != first:
            raise refusal(node, f"{node.op} beside a scan")
