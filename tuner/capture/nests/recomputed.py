"""Pointwise work before pooling, computed at the places of each window and never stored.

That is no more work where windows do not overlap: each element is in one of them at most.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from tuner.capture.graph.graph import Graph, Node, Operand, Ref
from tuner.capture.nests.operations import OPERATIONS
from tuner.capture.nests.windows import is_spread, tap_of

__all__ = ["with_windows_of_operands"]


def with_windows_of_operands(graph: Graph, results: Collection[str]) -> Graph:
    """Return the graph with windows of what pointwise work reads, in place of what it gives.

    Args:
        graph: with taps in place of pooling.
        results: values that are stored anyhow.
    """
    taps: dict[str, list[Node]] = {}  # of each pooled tensor
    for node in graph.nodes:
        if node.op == "tap" and node.attrs["kind"] in ("max", "avg"):
            taps.setdefault(_pooled(node), []).append(node)
    apart = {name for name, own in taps.items() if _are_apart(graph, own)}
    pooled: set[str] = set()  # which would be pooled again for each place
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "tap" or any(name in pooled for name in node.refs):
            pooled.add(node.name)
        if node.op == "tap" and _pooled(node) in apart:
            nodes += _Place(graph, node, pooled.union(results)).nodes()
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _pooled(tap: Node) -> str:
    return tap.name.rpartition("_tap_")[0]


def _are_apart(graph: Graph, taps: Sequence[Node]) -> bool:
    """Whether windows do not overlap, nor go beyond an edge."""
    axes = [tap_of(graph, tap, tap.refs[0]).axes for tap in taps]
    is_inside = all(axis.is_inside for own in axes for axis in own)
    return is_inside and len(taps) <= math.prod(axis.stride for axis in axes[0])


class _Place:
    """What a tap stands for, as pointwise work on taps of what that reads."""

    def __init__(self, graph: Graph, tap: Node, stored: Collection[str]) -> None:
        self.graph, self.tap, self.stored = graph, tap, stored
        self.num_axes = len(tap_of(graph, tap, tap.refs[0]).axes)
        self.found: dict[str, Node] = {}  # what has been read at that place, in order

    def nodes(self) -> list[Node]:
        """Return the nodes; the last one has the tap's name."""
        self._at(self.tap.refs[0])
        *others, last = self.found.values()
        return [*others, replace(last, name=self.tap.name)]

    def _at(self, name: str) -> Operand:
        value = self.graph.value(name)
        if isinstance(value, Node) and value.op == "full":
            return Ref(name)
        if name in self.found:
            return Ref(self.found[name].name)
        own = f"{name}_of_{self.tap.name}"
        if isinstance(value, Node) and self._is_pointwise(value):
            shape = value.shape
            args = tuple(
                self._at(a.name) if isinstance(a, Ref) and self._shape(a) == shape else a
                for a in value.args
            )
            self.found[name] = replace(value, name=own, args=args, shape=self.tap.shape)
        else:
            self.found[name] = replace(self.tap, name=own, args=(Ref(name),), dtype=value.dtype)
        return Ref(own)

    def _is_pointwise(self, value: Node) -> bool:
        """Whether a value is computed from others at the same place, or the same at all places."""
        if value.name in self.stored or value.op not in {*OPERATIONS, "cast"}:
            return False
        if any(is_spread(self.graph, name) for name in value.refs):
            return False
        shapes = [self._shape(arg) for arg in value.args if isinstance(arg, Ref)]
        same = [shape == value.shape for shape in shapes]
        others = [shape[-self.num_axes :] for shape in shapes if shape != value.shape]
        return any(same) and all(set(ends) <= {1} for ends in others)

    def _shape(self, operand: Operand) -> Sequence[int]:
        assert isinstance(operand, Ref)
        return self.graph.value(operand.name).shape
