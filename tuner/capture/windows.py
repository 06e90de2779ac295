"""Pooling as taps: for each place in a window one read of the input, joined by maximum or sum.

A tap is a value like one that is read from memory, of the pooled tensor's shape: where each
element lies in the input follows from its place. A nest that reads taps reduces nothing. What a
scan reads of something moved is a tap too (`scans`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pydantic import JsonValue

from tuner.capture.graph import Graph, Node, Ref
from tuner.capture.index_space import SAME_ORDER
from tuner.capture.nest import Axis, Tap
from tuner.capture.precision import FLOATS

__all__ = ["cpp_tap", "cpp_window", "is_spread", "tap_of", "triton_tap", "with_windows"]

MOST_TAPS = 32  # of one window; larger ones stay a call of PyTorch
_POOLS = ("max", "avg")
# What lies beyond the edges.
_FILLS = {"max": -math.inf, "avg": 0.0, "zeros": 0.0, "ones": 1.0}


def with_windows(graph: Graph) -> Graph:
    """Return the graph with taps in place of pooling, where a window is small."""
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _unrolled(graph, node) or [node]
    return replace(graph, nodes=tuple(nodes))


def _unrolled(graph: Graph, node: Node) -> list[Node]:
    """Return the nodes that stand for one of pooling; none for any other, or where it stays."""
    kind, _, rest = node.op.partition("_pool")
    if kind not in _POOLS or node.dtype not in FLOATS or is_spread(graph, node.refs[0]):
        return []
    num_axes = int(rest[0])
    kernel = _numbers(node.attrs.get("kernel_size"), num_axes, 1)
    stride = _numbers(node.attrs.get("stride"), num_axes, kernel)
    padding = _numbers(node.attrs.get("padding"), num_axes, 0)
    dilation = _numbers(node.attrs.get("dilation"), num_axes, 1)
    is_uneven = node.attrs.get("ceil_mode") or (
        any(padding) and node.attrs.get("count_include_pad") is False
    )
    if math.prod(kernel) > MOST_TAPS or (kind == "avg" and is_uneven):
        return []
    given = graph.value(node.refs[0]).shape[-num_axes:]
    made = node.shape[-num_axes:]
    taps = []
    for number, places in enumerate(itertools.product(*map(range, kernel))):
        axes: JsonValue = [
            [made[a], given[a], stride[a], place * dilation[a] - padding[a]]
            for a, place in enumerate(places)
        ]
        attrs: dict[str, JsonValue] = {"axes": axes, "kind": kind}
        taps.append(replace(node, name=f"{node.name}_tap_{number}", op="tap", attrs=attrs))
    return [*taps, *_joined(node, kind, taps)]


def is_spread(graph: Graph, name: str) -> bool:
    """Whether a value is a view of fewer elements, which nothing stores."""
    value = graph.value(name)
    while isinstance(value, Node) and value.op in SAME_ORDER:
        if value.op == "expand":
            return True
        value = graph.value(value.refs[0])
    return False


def _joined(node: Node, kind: str, taps: Sequence[Node]) -> Iterator[Node]:
    """Write the maximum, or the mean, of taps; the last node has the name of the pooled tensor."""
    steps: list[tuple[str, tuple[Ref | float, ...]]] = []
    before = taps[0].name
    for number, tap in enumerate(taps[1:]):
        join = "maximum" if kind == "max" else "add"
        steps.append((join, (Ref(before), Ref(tap.name))))
        before = f"{node.name}_of_{number + 2}"
    count = node.attrs.get("divisor_override") or len(taps)
    if kind == "avg" or not steps:
        steps.append(("div", (Ref(before), float(str(count)) if kind == "avg" else 1.0)))
    for number, (op, args) in enumerate(steps):
        name = node.name if number + 1 == len(steps) else f"{node.name}_of_{number + 2}"
        yield replace(node, name=name, op=op, args=args, attrs={})


def _numbers(value: JsonValue, count: int, default: int | Sequence[int]) -> list[int]:
    """Return one number for each axis, as PyTorch reads one for all, or none."""
    if value is None or value == []:
        return [default] * count if isinstance(default, int) else list(default)
    found = [int(str(v)) for v in value] if isinstance(value, list) else [int(str(value))]
    return found * count if len(found) == 1 else found


def tap_of(graph: Graph, node: Node, source: str, *, is_last: bool = False) -> Tap:
    """Return what a node of the graph reads of `source`; `is_last` where that is channels last."""
    axes = node.attrs["axes"]
    assert isinstance(axes, list)
    found = tuple(Axis(*(int(str(n)) for n in axis)) for axis in axes if isinstance(axis, list))
    most = max(math.prod(node.shape), math.prod(graph.value(node.refs[0]).shape))
    channels = node.shape[1] if is_last else 1
    return Tap(source, found, _FILLS[str(node.attrs["kind"])], most < 2**31, channels)


def triton_tap(tap: Tap, name: str, source: str, at: str) -> Iterator[str]:
    """Write the read of a block of a tap.

    Args:
        tap: what is read.
        name: of the block.
        source: the pointer to the input.
        at: where the block's elements lie in the pooled tensor.
    """
    yield f"{name}_at = ({at}).to(tl.int32)" if tap.is_narrow else f"{name}_at = {at}"
    inner, mask = tap.channels, "present"
    places = []
    for number, axis in reversed(list(enumerate(tap.axes))):
        place = f"{name}_at // {inner} % {axis.made}" if inner > 1 else f"{name}_at % {axis.made}"
        yield f"{name}_{number} = ({place}) * {axis.stride} + {axis.first}"
        if not axis.is_inside:
            mask += f" & ({name}_{number} >= 0) & ({name}_{number} < {axis.given})"
        places.append((f"{name}_{number}", axis.given))
        inner *= axis.made
    where = f"{name}_at // {inner}"
    if tap.channels > 1:
        places.insert(0, (f"{name}_at % {tap.channels}", tap.channels))
    for place_name, size in reversed(places):
        where = f"({where}) * {size} + {place_name}"
    other = 'float("-inf")' if math.isinf(tap.fill) else repr(tap.fill)
    value = f"tl.load({source} + {where}, mask={mask}, other={other})"
    yield f"{name} = {value}.to(tl.float32)"


def cpp_window(tap: Tap, name: str) -> str:
    """Write what a tap reads, as a constant."""
    columns = [
        "{" + ", ".join(str(getattr(axis, field)) for axis in tap.axes) + "}"
        for field in ("made", "given", "stride", "first")
    ]
    fill = "-INFINITY" if math.isinf(tap.fill) else f"{tap.fill}f"
    kind = f"windows::Window<{len(tap.axes)}>"
    # Not two braces side by side, which are Jinja2's.
    values = ", ".join([*columns, fill, str(tap.channels)])
    return f"static constexpr {kind} {name}_window = {{ {values} }};"


def cpp_tap(name: str, source: str, at: str, lane: str, apart: int) -> str:
    """Write the read of a vector of a tap.

    Args:
        name: of the tap.
        source: a pointer to what it is of.
        at: where the first element of the tail lies in the pooled tensor.
        lane: the number of the vector's first element in the tail.
        apart: how far such elements lie apart, in elements.
    """
    window = f"{source}, {name}_window, {at} + {lane}"
    if apart == 1:
        return f"const simd::Floats {name} = windows::tap<kPart>({window}, n);"
    return (
        f"const simd::Floats {name} = windows::tap_apart<kPart>({window} * {apart}, {apart}, n);"
    )
