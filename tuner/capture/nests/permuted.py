"""Permutations that loops take part in: what is permuted is read, or stored, at its own strides.

A `permuted` is a permutation that copies nothing: the nest that has it reads what stands before
it in one order of memory and what stands behind it in another (`index_space`). So heads of
attention are split, patches cut from images, channels put last for a norm.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from tuner.capture.graph.graph import Graph, Node, Ref, free_name
from tuner.capture.nests.index_space import REDUCTIONS
from tuner.capture.nests.operations import OPERATIONS
from tuner.capture.nests.precision import FLOATS
from tuner.capture.nests.viewing import is_read_by
from tuner.capture.nests.windows import is_spread

__all__ = ["with_permuted"]

_OF_NESTS = {*OPERATIONS, *REDUCTIONS, "cast"} - {"argmax", "argmin"}


def with_permuted(graph: Graph) -> Graph:
    """Return the graph with permutations that copy nothing in place of those that nests read."""
    graph = _with_slices_first(graph)
    results = {*graph.outputs, *graph.buffer_updates.values()}
    nodes = [
        replace(node, op="permuted") if _is_calm(graph, node, results) else node
        for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


def _is_calm(graph: Graph, node: Node, results: Container[str]) -> bool:
    if node.op != "permute" or node.dtype not in FLOATS or is_spread(graph, node.refs[0]):
        return False
    return is_read_by(graph, node.name, _OF_NESTS, results)


def _with_slices_first(graph: Graph) -> Graph:
    """Return the graph with parts of permutations as permutations of parts, which are fewer."""
    taken = {t.name for t in graph.given} | {n.name for n in graph.nodes}
    permuted: dict[str, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        source = permuted.get(node.refs[0]) if node.op == "slice" else None
        if source is not None:
            axes = source.attrs["axes"]
            assert isinstance(axes, list)
            axis = int(str(axes[int(str(node.attrs["axis"]))]))
            shape = tuple(node.shape[axes.index(at)] for at in range(len(axes)))
            part = replace(
                node, name=free_name(f"{node.name}_part", taken), args=source.args, shape=shape,
                attrs={**node.attrs, "axis": axis},
            )  # fmt: skip
            nodes.append(part)
            node = replace(node, op="permute", args=(Ref(part.name),), attrs=source.attrs)
        if node.op == "permute":
            permuted[node.name] = node
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
