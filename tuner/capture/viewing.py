"""Values that are others, seen in another way: views, and casts that change no number."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.capture.graph import Graph, Node, in_order
from tuner.capture.index_space import SAME_ORDER, name_of
from tuner.capture.nest import DTYPES
from tuner.capture.precision import FLOATS, is_wider, rounding_of

__all__ = ["is_same", "real_name", "views_read"]


def real_name(graph: Graph, name: str) -> str:
    """Return the value of which `name` is a view."""
    value = graph.value(name)
    while isinstance(value, Node) and (value.op in SAME_ORDER or is_same(graph, value)):
        value = graph.value(name_of(value.args[0]))
    return value.name


def is_same(graph: Graph, node: Node) -> bool:
    """Whether a cast changes no value: what reads it converts where it must."""
    if node.op != "cast":
        return False
    before = graph.value(name_of(node.args[0])).dtype
    if before == node.dtype or (before == "bool" and node.dtype in DTYPES):
        return True
    is_float = before in FLOATS and node.dtype in FLOATS
    return rounding_of(graph, node) is None if is_float else is_wider(before, node.dtype)


def views_read(graph: Graph, nodes: Sequence[Node]) -> dict[str, Node]:
    """Return the views that some nodes read, by name, constants that fill a tensor, indices."""
    own = {n.name for n in nodes}
    every = [n for n in graph.nodes if n.name not in own]
    views = {
        n.name: n for n in every if n.name != real_name(graph, n.name) or n.op in ("full", "index")
    }
    read = [r for n in nodes if n.op != "tap" for r in n.refs]
    found = in_order(read, lambda name: views[name].refs if name in views else ())
    return {name: views[name] for name in found if name in views}
