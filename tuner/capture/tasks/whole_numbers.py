"""Whole numbers that floats would not compute exactly: calls of PyTorch's own operations.

A nest computes in floats, which are exact below 2^24. It may read whole numbers, compare them with
small ones, choose among them for what it reads at that place, and count truths; all else is
PyTorch's, in between.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import JsonValue

from tuner.capture.graph.graph import Graph, Node, Operand, Ref
from tuner.capture.graph.vocabulary import COMMUTING, COMPARISONS
from tuner.capture.nests.precision import EXACT, WHOLE, are_told_apart
from tuner.capture.nests.viewing import real_name
from tuner.capture.tasks.library import is_call

__all__ = ["counters_of", "with_whole_numbers_called"]

_CALLED = {"add", "sub", "mul", "maximum", "minimum", "clamp", "abs", "neg", "sign", "where"}
_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "sub": "rsub"}
_CASTS = {
    "float32": "_cast_Float", "float64": "_cast_Double", "int64": "_cast_Long",
    "int32": "_cast_Int", "int16": "_cast_Short", "int8": "_cast_Char", "uint8": "_cast_Byte",
}  # fmt: skip
_PICKING = {"amax", "amin", "argmax", "argmin"}
_OF_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}  # the second operand is no tensor


def counters_of(graph: Graph) -> dict[str, tuple[int, set[str]]]:
    """Return what a call adds to buffers of whole numbers that nothing reads, and by which nodes.

    A BatchNorm that is called twice adds one twice.
    """
    found = {}
    for buffer, name in graph.buffer_updates.items():
        total, steps, readers = 0, set[str](), set[str]()
        while isinstance(node := graph.value(name), Node) and node.dtype == "int64":
            is_read = (
                name in graph.outputs or {n.name for n in graph.users.get(name, ())} - readers
            )
            first, more = node.args if node.op == "add" and len(node.args) == 2 else (None, None)
            if is_read or not isinstance(first, Ref) or type(more) is not int:
                break
            total, steps, readers, name = total + more, {*steps, name}, {name}, first.name
        if steps and name == buffer:
            found[buffer] = total, steps
    return found


def with_whole_numbers_called(graph: Graph) -> Graph:
    """Return the graph with such operations as calls; counters of buffers stay as they are."""
    numbers = {n.name: n.args[0] for n in graph.nodes if n.op == "full" and not n.refs}
    kept = {*graph.buffer_updates.values()}
    kept = kept.union(*(steps for _, steps in counters_of(graph).values()))
    truths = {n.name for n in graph.nodes if n.op == "cast" and _of_truths(graph, n)}
    stored = {*graph.outputs, *kept, *(ref for n in graph.nodes if is_call(n) for ref in n.refs)}
    stored = {real_name(graph, name) for name in stored}

    def known(operand: Operand) -> Operand:
        return numbers.get(operand.name, operand) if isinstance(operand, Ref) else operand

    def called(node: Node) -> Node:
        args = tuple(map(known, node.args))
        dtypes = {a.name: graph.value(a.name).dtype for a in args if isinstance(a, Ref)}
        whole = [name for name, dtype in dtypes.items() if dtype in WHOLE]
        wide = [name for name in whole if not are_told_apart(dtypes[name])]
        is_narrow = node.dtype in WHOLE - {"int64"}  # which no nest makes
        if node.op == "sum" and node.dtype == "int64" and whole and whole[0] not in truths:
            return _call(node, "sum", args, {k: node.attrs[k] for k in ("axes", "keepdim")})
        if node.op in _PICKING and (wide or is_narrow):
            return _call(node, node.op, args, _picked(node, graph))
        if node.op == "cast" and (is_narrow or (node.dtype == "int64" and wide)):
            return _call(node, _CASTS[node.dtype], args, {})
        numbers_of = [a for a in args if not isinstance(a, Ref)]
        is_exact = len(wide) <= 1 and all(abs(float(a)) < EXACT for a in numbers_of)
        is_called = node.dtype in WHOLE and node.op in _CALLED
        is_truth = node.dtype == "bool" and node.op in COMPARISONS
        if not whole or not (is_called or is_truth):
            return node
        if is_exact and (
            is_truth or (node.op == "where" and not is_narrow and node.name not in stored)
        ):
            return node  # which a nest does
        op = node.op
        if op != "where" and not isinstance(args[0], Ref):
            if op not in _TURNED and op not in COMMUTING:
                return node
            op, args = _TURNED.get(op, op), (args[1], args[0])
        if op in _OF_NUMBERS and not isinstance(args[1], Ref):
            op = _OF_NUMBERS[op]
        return _call(node, op, args, {})

    nodes = tuple(n if n.name in kept else called(n) for n in graph.nodes)
    return _with_results_cast(replace(graph, nodes=nodes))


def _with_results_cast(graph: Graph) -> Graph:
    """Cast what a call gives by a call where it is returned as another type."""
    nodes = []
    for node in graph.nodes:
        cast = _CASTS.get(node.dtype) if node.op == "cast" and node.name in graph.outputs else None
        of = graph.value(real_name(graph, node.refs[0])) if cast else node
        is_called = isinstance(of, Node) and is_call(of) and of.dtype in {*WHOLE, "bool"}
        nodes.append(_call(node, cast, node.args, {}) if cast and is_called else node)
    return replace(graph, nodes=tuple(nodes))


def _picked(node: Node, graph: Graph) -> dict[str, JsonValue]:
    """Return the dimensions of a largest or least element as PyTorch's operators take them."""
    axes, keeps = node.attrs["axes"], node.attrs["keepdim"]
    if node.op in ("amax", "amin"):
        return {"axes": axes, "keepdim": keeps}
    assert isinstance(axes, list)
    is_one_of = len(axes) == 1 and len(graph.value(node.refs[0]).shape) > 1
    return {"axes": axes[0] if is_one_of else None, "keepdim": keeps}


def _of_truths(graph: Graph, node: Node) -> bool:
    return graph.value(node.refs[0]).dtype == "bool"


def _call(node: Node, op: str, args: tuple[Operand, ...], more: dict[str, JsonValue]) -> Node:
    """Return a node as a call of PyTorch's operator, as its record would have it."""
    tensors = tuple(a for a in args if isinstance(a, Ref))
    places = iter(range(len(tensors)))
    attrs: dict[str, JsonValue] = {
        f"argument_{i}": {"ref": next(places)} if isinstance(a, Ref) else a
        for i, a in enumerate(args)
    }
    return replace(node, op=f"aten.{op}", args=tensors, attrs={**attrs, **more})
