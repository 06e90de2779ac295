"""Sums and products of all elements up to each one, as nodes that a nest computes.

A node `scan` has `axes` (one of them), its `fold` (sum or prod), and whether it goes `backwards`:
from the last element to the first. What is moved before it is read where it lies: of slices, flips
and what is padded with zeros (ones, for a product) a tap says where each element comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import JsonValue

from tuner.capture.graph.graph import Graph, Node, Operand, Ref
from tuner.capture.nests.index_space import name_of
from tuner.capture.nests.nest import Scan
from tuner.capture.nests.windows import is_spread, sliced_from

__all__ = ["scan_of", "with_scans"]

_FOLDS = {"cumsum": "sum", "cumprod": "prod"}
_NEUTRAL = {"sum": 0.0, "prod": 1.0}
_FILLS = {"sum": "zeros", "prod": "ones"}  # kinds of taps


def with_scans(graph: Graph) -> Graph:
    """Return the graph with scans in place of cumulative sums and products of float32.

    Where zeros are put around a tensor and no scan reads them, that becomes padding.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _taken(graph, node) or [node]
    return replace(graph, nodes=tuple(nodes))


def scan_of(node: Node, source: str | float | bool) -> Scan:
    """Return a node `scan` as a statement; `source` is what it is of."""
    fold: Literal["sum", "prod"] = "sum" if node.attrs["fold"] == "sum" else "prod"
    return Scan(node.name, node.op, (source,), {}, fold, bool(node.attrs["backwards"]))


def _taken(graph: Graph, node: Node) -> list[Node]:
    """Return the nodes that stand for a scan that ends at a node; none where it ends no scan."""
    if node.op == "flip":
        return _backwards(graph, node)
    if node.op == "cat":
        return _behind_neutral(graph, node) or _padded(graph, node)
    scan = _scan(graph, node)
    return [] if scan is None else _scanned(node, scan, _read(graph, scan.args[0], scan))


def _backwards(graph: Graph, node: Node) -> list[Node]:
    """Take what is flipped, scanned, and flipped again."""
    scan = _scan(graph, _node(graph, node.refs[0]))
    first = None if scan is None else _node(graph, scan.refs[0])
    if scan is None or first is None or first.op != "flip":
        return []
    if not node.attrs["axes"] == first.attrs["axes"] == [scan.attrs["axis"]]:
        return []
    read = _read(graph, first.args[0], scan) or _Read(first.refs[0], ())
    return _scanned(node, scan, read, is_backwards=True)


def _behind_neutral(graph: Graph, node: Node) -> list[Node]:
    """Take a scan that zeros are put before: it is the scan of what zeros are put before."""
    scan = _scan(graph, _node(graph, node.refs[-1]))
    if len(node.refs) != 2 or scan is None or scan.attrs["axis"] != node.attrs["axis"]:
        return []
    if not _is_full(graph, node.refs[0], _NEUTRAL[_FOLDS[scan.op]]):
        return []
    read = _read(graph, replace(node, args=(node.args[0], scan.args[0])), scan)
    return [] if read is None else _scanned(node, scan, read)


def _padded(graph: Graph, node: Node) -> list[Node]:
    """Take a tensor that is joined with a number many times: a call that pads does as much."""
    axis = int(str(node.attrs["axis"]))
    parts = [graph.value(name) for name in node.refs]
    fulls = [p for p in parts if isinstance(p, Node) and p.op == "full"]
    numbers = {p.args[0] for p in fulls if not isinstance(p.args[0], Ref)}
    if len(numbers) != 1 or len(parts) != len(fulls) + 1:
        return []
    if any(p.dtype != node.dtype for p in parts):
        return []
    (own,) = (at for at, part in enumerate(parts) if part not in fulls)
    ends: dict[str, JsonValue] = {
        name: [
            sum(p.shape[axis] for p in some) if a == axis else 0 for a in range(len(node.shape))
        ]
        for name, some in (("low", parts[:own]), ("high", parts[own + 1 :]))
    }
    return [replace(node, op="pad", args=(Ref(parts[own].name), *numbers), attrs=ends)]


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
) -> list[Node]:
    """Return a scan under the name of the node that it ends at, behind the tap that it reads."""
    taps: list[Node] = []
    source, fold = scan.refs[0] if read is None else read.name, _FOLDS[scan.op]
    if read is not None and read.axes:
        axes: JsonValue = [list(axis) for axis in read.axes]
        attrs: dict[str, JsonValue] = {"axes": axes, "kind": _FILLS[fold]}
        tap = replace(node, name=f"{node.name}_read", op="tap", args=(Ref(source),), attrs=attrs)
        taps, source = [tap], tap.name
    about: dict[str, JsonValue] = {
        "axes": [scan.attrs["axis"]],
        "fold": fold,
        "backwards": is_backwards,
    }
    return [*taps, replace(node, op="scan", args=(Ref(source),), attrs=about)]


# ---- where what was moved lies --------------------------------------------------------------


@dataclass(slots=True)
class _Way:
    """Where places along an axis come from: p from `p * step + first`, for low <= p < high.

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


def _read(graph: Graph, moved: Operand | Node, scan: Node) -> _Read | None:
    """Follow moves down to what they read; None where a tap cannot say what comes from where."""
    value = graph.value(name_of(moved)) if not isinstance(moved, Node) else moved
    made = value.shape
    ways = [_Way(1, 0, 0, size) for size in made]
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
    own = [at for at, axis in enumerate(axes) if axis != (axis[0], axis[0], 1, 0)]
    if own and is_spread(graph, value.name):
        return None
    return _Read(value.name, tuple(axes[own[0] :]) if own else ())


def _step(graph: Graph, node: Node, ways: list[_Way], fill: float) -> str | None:
    """Take one move into account; return what it reads, None where it is no such move."""
    if node.op == "slice":
        way = ways[int(str(node.attrs["axis"]))]
        way.step, way.first = sliced_from(node, way.step, way.first)
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
