"""Values that are others, seen in another way: views, and casts that change no number."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

from tuner.capture.graph.graph import Graph, Node, Ref, Tensor, free_name, in_order
from tuner.capture.nests.index_space import ALIASES, SAME_ORDER, name_of, viewed
from tuner.capture.nests.nest import DTYPES
from tuner.capture.nests.precision import FLOATS, is_wider, rounding_of

__all__ = [
    "is_given_otherwise",
    "is_read_by",
    "is_same",
    "real_name",
    "views_read",
    "with_rows_copied",
    "without_turns",
]


def real_name(graph: Graph, name: str) -> str:
    """Return the value of which `name` is a view."""
    value = graph.value(name)
    while isinstance(value, Node) and (value.op in SAME_ORDER or is_same(graph, value)):
        value = graph.value(name_of(value.args[0]))
    return value.name


def is_read_by(
    graph: Graph,
    name: str,
    ops: Container[str],
    results: Container[str],
    through: Container[str] = SAME_ORDER,
) -> bool:
    """Whether some operations alone read a value, as it is or through others; it is no result.

    Args:
        graph: that it is of.
        name: of the value.
        ops: that may read it.
        results: values that are given to whoever calls, by name.
        through: operations whose own readers are asked instead.
    """
    if name in results or not graph.users[name]:
        return False
    return all(
        is_read_by(graph, user.name, ops, results, through)
        if user.op in through
        else user.op in ops
        for user in graph.users[name]
    )


def is_given_otherwise(graph: Graph, node: Node) -> bool:
    """Whether a result is given whole numbers or truths in another type: it has to be made."""
    if node.op != "cast" or node.dtype not in {*FLOATS, "int64"}:
        return False
    given = viewed(graph, node.refs[0])
    is_given = isinstance(given, Tensor) and given.dtype not in {*FLOATS, node.dtype}
    return is_given and node in (viewed(graph, name) for name in graph.outputs)


def is_same(graph: Graph, node: Node) -> bool:
    """Whether a cast changes no value: what reads it converts where it must."""
    if node.op != "cast":
        return False
    before = graph.value(name_of(node.args[0])).dtype
    if is_given_otherwise(graph, node):
        return False
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


def with_rows_copied(graph: Graph) -> Graph:
    """Return the graph with a copy of what is the same in each row of a batch, for calls.

    So of a parameter that is a token, or queries. A nest writes the copy, for any number of rows;
    a view of PyTorch's own would be of as many as the graph has. Of what `cat` joins, which copies
    it as well, and of rows of a matrix that is multiplied, beside which a copy takes little.
    """
    nodes: list[Node] = []
    copies: dict[str, str] = {}
    taken = {t.name for t in graph.given} | {n.name for n in graph.nodes}

    def copied(name: str) -> str:
        """Return the name of a value, or of the same behind a copy."""
        value = graph.value(name)
        if name in copies or not isinstance(value, Node) or value.op not in ALIASES:
            return copies.get(name, name)
        if _is_of_rows(graph, value):
            copy = replace(value, op="mul", args=(Ref(name), 1.0), attrs={})
        else:
            before = name_of(value.args[0])
            behind = copied(before)
            if behind == before:
                return name
            copy = replace(value, args=(Ref(behind), *value.args[1:]))
        copies[name] = free_name(f"{name}_copy", taken)
        nodes.append(replace(copy, name=copies[name]))
        return copies[name]

    for node in graph.nodes:
        read = set(node.refs if node.op == "cat" else ())
        read |= {node.refs[0]} if node.op == "linear" else set()
        if node.op == "matmul":
            read = {name for name in node.refs if len(graph.value(name).shape) == 2}
        args = (
            Ref(copied(a.name)) if isinstance(a, Ref) and a.name in read else a for a in node.args
        )
        nodes.append(replace(node, args=tuple(args)))
    return replace(graph, nodes=tuple(nodes)) if copies else graph


def _is_of_rows(graph: Graph, value: Node) -> bool:
    """Whether a view of floats spreads one row, or none, over those of a batch."""
    if value.op != "expand" or value.dtype not in FLOATS:
        return False
    shape = graph.value(name_of(value.args[0])).shape
    before = [1] * (len(value.shape) - len(shape)) + [*shape]
    pairs = zip(before, value.shape, strict=True)
    return any(old == 1 != new and new == graph.batch for old, new in pairs)


def without_turns(nodes: Sequence[Node]) -> tuple[list[Node], dict[str, str]]:
    """Join permutations of permutations; say what those are that change nothing."""
    source: dict[str, str] = {}
    turned: dict[str, Node] = {}
    found: list[Node] = []
    for node in nodes:
        args = tuple(
            Ref(source.get(a.name, a.name)) if isinstance(a, Ref) else a for a in node.args
        )
        node = replace(node, args=args)
        if node.op == "permute":
            axes: Any = node.attrs["axes"]
            inner = turned.get(node.refs[0])
            if inner is not None:
                before: Any = inner.attrs["axes"]
                axes = [before[axis] for axis in axes]
                node = replace(node, args=inner.args, attrs={"axes": axes})
            if axes == sorted(axes):
                source[node.name] = source.get(node.refs[0], node.refs[0])
                continue
            turned[node.name] = node
        found.append(node)
    return found, source
