"""A graph whose neighbouring dimensions are one where no value tells them apart.

So a norm of rows is the same in any number of dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tuner.capture.graph import Graph, Node, Tensor

__all__ = ["flattened"]


def flattened(graph: Graph) -> Graph | None:
    """Return a graph with fewer dimensions; None where there is none.

    That is of pointwise work and reductions with one result of the largest shape, which update no
    buffer. The names stay; all shapes are of fewer dimensions.
    """
    values: list[Tensor | Node] = [*graph.given, *graph.nodes]
    rank = max((len(v.shape) for v in values), default=0)
    result, *more = [graph.value(name) for name in graph.outputs]
    if more or rank < 2 or len(result.shape) != rank or graph.buffer_updates or 1 in result.shape:
        return None
    for node in graph.nodes:
        is_kept = node.kind == "reduction" and node.attrs["keepdim"] is True
        is_kept &= all(len(graph.value(name).shape) == rank for name in node.refs)
        if not (is_kept or node.kind == "pointwise"):
            return None
    aligned = [_aligned(v.shape, rank, result.shape) for v in values]
    known = [varies for varies in aligned if varies is not None]
    if len(known) < len(aligned):
        return None
    runs: list[list[int]] = [[0]]
    for dim in range(1, rank):
        told_apart = any(varies[dim] != varies[dim - 1] for varies in known)
        told_apart |= any((dim in axes) != (dim - 1 in axes) for axes in map(_axes, graph.nodes))
        if told_apart:
            runs.append([dim])
        else:
            runs[-1].append(dim)
    if len(runs) == rank:
        return None
    return replace(
        graph,
        inputs=tuple(_tensor(t, rank, runs) for t in graph.inputs),
        parameters=tuple(_tensor(t, rank, runs) for t in graph.parameters),
        buffers=tuple(_tensor(t, rank, runs) for t in graph.buffers),
        constants=tuple(_tensor(t, rank, runs) for t in graph.constants),
        nodes=tuple(_node(node, rank, runs) for node in graph.nodes),
    )


def _aligned(shape: Sequence[int], rank: int, full: Sequence[int]) -> tuple[bool, ...] | None:
    """Return over which dimensions a value varies; None where its sizes are others."""
    sizes = (1,) * (rank - len(shape)) + tuple(shape)
    if any(size not in (1, other) for size, other in zip(sizes, full, strict=True)):
        return None
    return tuple(size != 1 for size in sizes)


def _axes(node: Node) -> list[int]:
    """Return the dimensions that a step reduces; its operand has all of them."""
    axes = node.attrs.get("axes", [])
    return [int(str(axis)) for axis in axes] if isinstance(axes, list) else []


def _shape(shape: Sequence[int], rank: int, runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    found = []
    for run in runs:
        own = [dim - rank + len(shape) for dim in run if dim - rank + len(shape) >= 0]
        if own:
            size = 1
            for dim in own:
                size *= shape[dim]
            found.append(size)
    return tuple(found)


def _tensor(tensor: Tensor, rank: int, runs: Sequence[Sequence[int]]) -> Tensor:
    return replace(tensor, shape=_shape(tensor.shape, rank, runs))


def _node(node: Node, rank: int, runs: Sequence[Sequence[int]]) -> Node:
    attrs = node.attrs
    if node.kind == "reduction":
        reduced = _axes(node)
        attrs = {**attrs, "axes": [i for i, run in enumerate(runs) if run[0] in reduced]}
    return replace(node, attrs=attrs, shape=_shape(node.shape, rank, runs))
