"""Sums and products of all elements up to each one, as nodes that a nest computes.

A node `scan` has `axes` (one of them), its `fold` (sum or prod), and whether it goes `backwards`:
from the last element to the first. What is moved before it is read where it lies: of slices, flips
and what is padded with zeros (ones, for a product) a tap says where each element comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pydantic import JsonValue

from tuner.capture.graph import Graph, Node, Ref
from tuner.capture.windows import is_spread

__all__ = ["with_scans"]

_FOLDS = {"cumsum": "sum", "cumprod": "prod"}
_NEUTRAL = {"sum": 0.0, "prod": 1.0}
_FILLS = {"sum": "zeros", "prod": "ones"}  # kinds of taps


def with_scans(graph: Graph) -> Graph:
    """Return the graph with scans in place of cumulative sums and products of float32."""
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _taken(graph, node) or [node]
    return replace(graph, nodes=tuple(nodes))


def _taken(graph: Graph, node: Node) -> list[Node]:
    """Return the nodes that stand for a scan that ends at a node; none where it ends no scan."""
    found = _scan(graph, node)
    if found is not None:
        return list(_scanned(node, found, _read(graph, found.refs[0], found)))
    if node.op == "flip":
        found = _scan(graph, _node(graph, node.refs[0]))
        first = _node(graph, found.refs[0]) if found is not None else None
        if found is not None and first is not None and first.op == "flip":
            if node.attrs["axes"] == first.attrs["axes"] == [found.attrs["axis"]]:
                source = _Read(first.refs[0], ())
                return list(_scanned(node, found, source, is_backwards=True))
    if node.op == "cat" and len(node.refs) == 2:
        # Zeros before a sum are the sum of zeros before.
        found = _scan(graph, _node(graph, node.refs[1]))
        if found is not None and found.attrs["axis"] == node.attrs["axis"]:
            if _is_full(graph, node.refs[0], _NEUTRAL[_FOLDS[found.op]]):
                joined = replace(node, args=(node.args[0], found.args[0]))
                read = _read(graph, node.name, found, joined)
                if read is not None and read.axes:
                    return list(_scanned(node, found, read))
    return []


def _node(graph: Graph, name: str) -> Node | None:
    value = graph.value(name)
    return value if isinstance(value, Node) else None


def _scan(graph: Graph, node: Node | None) -> Node | None:
    """Return a node if it is a scan of which loops are generated."""
    if node is None or node.op not in _FOLDS or node.dtype != "float32":
        return None
    is_one = node.shape[int(str(node.attrs["axis"]))] == 1
    is_number = isinstance(source := graph.value(node.refs[0]), Node) and source.op == "full"
    return None if is_one or is_number or 0 in node.shape else node


def _is_full(graph: Graph, name: str, value: float) -> bool:
    node = _node(graph, name)
    return node is not None and node.op == "full" and node.args == (value,)


@dataclass(frozen=True, slots=True)
class _Read:
    """What a scan reads: all of a value, or as `axes` of a tap say."""

    name: str
    axes: tuple[tuple[int, int, int, int], ...]


def _scanned(
    node: Node, scan: Node, read: _Read | None, *, is_backwards: bool = False
) -> Iterator[Node]:
    """Write a scan under the name of the node that it ends at, and the tap that it reads."""
    source, fold = scan.refs[0] if read is None else read.name, _FOLDS[scan.op]
    if read is not None and read.axes:
        axes: JsonValue = [list(axis) for axis in read.axes]
        attrs: dict[str, JsonValue] = {"axes": axes, "kind": _FILLS[fold]}
        tap = replace(node, name=f"{node.name}_read", op="tap", args=(Ref(source),), attrs=attrs)
        source = tap.name
        yield tap
    about: dict[str, JsonValue] = {
        "axes": [scan.attrs["axis"]],
        "fold": fold,
        "backwards": is_backwards,
    }
    yield replace(node, op="scan", args=(Ref(source),), attrs=about)


# ---- where what was moved lies --------------------------------------------------------------


@dataclass(slots=True)
class _Way:
    """Place p along an axis is place `p * step + first` of what it comes from, for low <= p < high.

    Elsewhere it is what was padded with.
    """

    step: int
    first: int
    low: int
    high: int

    def within(self, begin: int, end: int) -> tuple[int, int]:
        """Return which places come from begin up to end."""
        if self.step > 0:
            low, high = -((self.first - begin) // self.step), -((self.first - end) // self.step)
        else:
            low = (self.first - end) // -self.step + 1
            high = (self.first - begin) // -self.step + 1
        return max(self.low, low), max(self.low, min(self.high, high))


def _read(graph: Graph, name: str, scan: Node, node: Node | None = None) -> _Read | None:
    """Follow moves down to what they read; None where a tap cannot say what comes from where.

    `node` stands for the value of that name.
    """
    made = (node or graph.value(name)).shape
    ways = [_Way(1, 0, 0, size) for size in made]
    value = node or graph.value(name)
    while isinstance(value, Node):
        source = _step(graph, value, ways, _NEUTRAL[_FOLDS[scan.op]])
        if source is None:
            break
        value = graph.value(source)
    given = value.shape
    axes = []
    for size, has, way in zip(made, given, ways, strict=True):
        if _Way(way.step, way.first, 0, size).within(0, has) != (way.low, way.high):
            return None  # what was cut off would be read instead of what was padded
        axes.append((size, has, way.step, way.first))
    moved = [at for at, axis in enumerate(axes) if axis != (axis[0], axis[0], 1, 0)]
    if moved and is_spread(graph, value.name):
        return None
    return _Read(value.name, tuple(axes[moved[0] :]) if moved else ())


def _step(graph: Graph, node: Node, ways: list[_Way], fill: float) -> str | None:
    """Take one move into account; return what it reads, None where it is no such move."""
    if node.op == "slice":
        way = ways[int(str(node.attrs["axis"]))]
        step = int(str(node.attrs["step"]))
        way.step, way.first = way.step * step, way.first * step + int(str(node.attrs["start"]))
        return node.refs[0]
    if node.op == "flip":
        axes = node.attrs["axes"]
        assert isinstance(axes, list)
        for axis in map(int, map(str, axes)):
            way = ways[axis]
            way.step, way.first = -way.step, node.shape[axis] - 1 - way.first
        return node.refs[0]
    if node.op == "cat" and len(node.refs) == len(node.args):
        axis = int(str(node.attrs["axis"]))
        own = [name for name in node.refs if not _is_full(graph, name, fill)]
        if len(own) != 1:
            return None
        before = node.refs[: node.refs.index(own[0])]
        begin = sum(graph.value(name).shape[axis] for name in before)
        way = ways[axis]
        way.low, way.high = way.within(begin, begin + graph.value(own[0]).shape[axis])
        way.first -= begin
        return own[0]
    return None
