"""Inputs that say which elements are picked, and the numbers that they may hold."""

from __future__ import annotations

from tuner.capture.graph.graph import Graph, Node, Ref
from tuner.capture.nests.index_space import viewed
from tuner.capture.nests.viewing import real_name

__all__ = ["picking_inputs"]


def picking_inputs(graph: Graph) -> dict[str, tuple[int, int | None]]:
    """Return inputs that pick places of something, with its size, and the number that picks none.

    That number is a loss's `ignore_index`. With other numbers outside a loop would find nothing
    where PyTorch refuses the place. What is computed of an input in another way than by a choice
    or by a bound is not followed.
    """
    found: dict[str, tuple[int, int | None]] = {}
    for node in graph.nodes:
        if node.op != "gather":
            continue
        size = graph.value(node.refs[0]).shape[int(str(node.attrs["axis"]))]
        for name, ignored in _origins(graph, node.refs[1], size).items():
            smallest, before = found.get(name, (size, ignored))
            found[name] = min(smallest, size), ignored if before == ignored else None
    return found


def _origins(graph: Graph, name: str, size: int) -> dict[str, int | None]:
    """Return the inputs that are the places `name` as they are, with the number that is left out.

    A place of theirs that is inside is inside there, too.
    """
    value = viewed(graph, name)
    if not isinstance(value, Node):
        return {value.name: None} if value in graph.inputs else {}
    if value.op in ("maximum", "minimum", "clamp"):
        return _merged([_origins(graph, ref, size) for ref in value.refs])
    if value.op != "where":
        return {}
    branches = [arg.name if isinstance(arg, Ref) else arg for arg in value.args[1:]]
    found = [_origins(graph, b, size) if isinstance(b, str) else {} for b in branches]
    left_out = _left_out(graph, value.refs[0])
    if left_out is not None:
        asked, number, place = left_out
        kept, other = branches[place], _number(graph, branches[1 - place])
        is_inside = other is not None and 0 <= other < size
        if isinstance(kept, str) and _is_same(graph, kept, asked) and is_inside:
            found[place] = dict.fromkeys(found[place], number)
    return _merged(found)


def _is_same(graph: Graph, first: str, second: str) -> bool:
    """Whether two values are one, or made alike of one, as the same slice that is taken twice."""
    one, other = (graph.value(real_name(graph, name)) for name in (first, second))
    if not isinstance(one, Node) or not isinstance(other, Node) or one.name == other.name:
        return one.name == other.name
    alike = one.op == other.op == "slice" and one.attrs == other.attrs
    return alike and _is_same(graph, one.refs[0], other.refs[0])


def _merged(found: list[dict[str, int | None]]) -> dict[str, int | None]:
    made: dict[str, int | None] = {}
    for each in found:
        made |= {n: i if made.get(n, i) == i else None for n, i in each.items()}
    return made


def _left_out(graph: Graph, condition: str) -> tuple[str, int, int] | None:
    """Return of a comparison what it asks, the number, and the branch where it is another."""
    node, place = graph.value(real_name(graph, condition)), 0
    while isinstance(node, Node) and node.op == "logical_not":
        node, place = graph.value(real_name(graph, node.refs[0])), 1 - place
    if not isinstance(node, Node) or node.op not in ("ne", "eq") or len(node.refs) != 1:
        return None
    number = node.args[1]
    if type(number) is not int:
        return None
    return node.refs[0], number, place if node.op == "ne" else 1 - place


def _number(graph: Graph, branch: object) -> float | None:
    """Return the number that a branch is everywhere, if it is one."""
    if isinstance(branch, str):
        value = graph.value(real_name(graph, branch))
        branch = value.args[0] if isinstance(value, Node) and value.op == "full" else None
    return branch if isinstance(branch, int | float) else None
