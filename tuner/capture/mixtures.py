"""What cannot share a nest: windows, scans and reductions, each beside some others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tuner.capture.graph import Node
from tuner.capture.index_space import REDUCTIONS, refusal

__all__ = ["refuse_mixtures"]

_REDUCING = REDUCTIONS | {"gather"}


def refuse_mixtures(nodes: Sequence[Node], real: Callable[[str], str]) -> None:
    """Raise where nodes cannot be of one nest.

    Taps cannot share one with what makes their source, nor with reductions; scans cannot with
    reductions, nor with scans the other way.

    Args:
        nodes: of the nest, in order.
        real: gives the value, by its name, of which another one is a view.

    Raises:
        NotOneNest: `node` is the first that does not fit.
    """
    own = {node.name for node in nodes}
    for node in nodes:
        if node.op == "tap" and real(node.refs[0]) in own:
            raise refusal(node, "windows of what is computed here")
    taps = [node for node in nodes if node.op == "tap"]
    reducing = [node for node in nodes if node.op in _REDUCING]
    if taps and reducing:
        of_taps = _behind(nodes, taps, real)
        before = [node for node in reducing if node.name not in of_taps]
        if of_taps & _behind(nodes, before, real):
            raise refusal(taps[0], "windows of what is reduced here")
        raise refusal(reducing[0], f"{reducing[0].op} beside windows")
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


def _behind(nodes: Sequence[Node], first: Sequence[Node], real: Callable[[str], str]) -> set[str]:
    """Return the names of some nodes and of those that depend on them."""
    found = {node.name for node in first}
    for node in nodes:
        if any(real(ref) in found for ref in node.refs):
            found.add(node.name)
    return found
