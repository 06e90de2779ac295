"""What cannot share a nest: windows, scans and reductions beside others; inexact numbers."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from tuner.capture.graph.graph import Graph, Node, Ref, Tensor
from tuner.capture.nests.index_space import AS_INT64, REDUCTIONS, refusal
from tuner.capture.nests.nest import DTYPES
from tuner.capture.nests.precision import EXACT, FLOATS, HALVES, WHOLE, Precision, are_told_apart

__all__ = ["refuse_inexact", "refuse_mixtures", "refuse_unread"]

_REDUCING = REDUCTIONS | {"gather"}


def refuse_inexact(
    graph: Graph, node: Node, numbers: Container[str], precision: Precision
) -> None:
    """Raise NotOneNest where floats might not tell a node's whole numbers apart.

    `numbers` are names of what is one number everywhere.
    """
    if node.dtype not in DTYPES or (precision == "float64" and node.dtype in HALVES):
        raise refusal(node, f"{node.op} gives {node.dtype}, which is not computed yet")
    tensors = [graph.value(a.name) for a in node.args if isinstance(a, Ref)]
    whole = [t for t in tensors if t.dtype in WHOLE and t.name not in numbers]
    wide = [t for t in whole if not are_told_apart(t.dtype)]
    is_select = node.op == "where" and len(wide) <= 1
    is_compared = node.dtype == "bool" and len(wide) <= 1
    is_cast = node.op == "cast" and node.dtype in FLOATS
    is_small = all(abs(float(a)) < EXACT for a in node.args if not isinstance(a, Ref))
    if (whole or node.dtype == "int64") and not (
        (is_select or is_compared or is_cast) and is_small
    ):
        raise refusal(node, f"{node.op} of whole numbers")


def refuse_unread(user: Node, value: Tensor | Node, precision: Precision) -> None:
    """Raise NotOneNest where a nest cannot read a value, which `user` is the first to do."""
    if isinstance(value, Tensor) and value.value is not None:
        raise refusal(user, f"the constant {value.name} has several values")
    if value.dtype not in DTYPES | WHOLE:
        then = AS_INT64 if value.dtype.startswith("uint") else ""
        raise refusal(user, f"{value.name} is {value.dtype}, which is not read yet", then=then)
    if precision == "float64" and value.dtype in HALVES:
        raise refusal(user, f"{value.name} is {value.dtype}, beside float64")


def refuse_mixtures(nodes: Sequence[Node], real: Callable[[str], str]) -> None:
    """Raise where nodes cannot be of one nest.

    Taps cannot share one with what makes their source, nor, but for parts, with reductions; scans
    cannot with reductions, nor with scans the other way.

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
    taps = [node for node in nodes if node.op == "tap" and node.attrs["kind"] != "inside"]
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
