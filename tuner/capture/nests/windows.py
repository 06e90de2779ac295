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
from typing import Any

from pydantic import JsonValue

from tuner.capture.graph.graph import Graph, Node, Operand, Ref
from tuner.capture.graph.rules_pooling import MOST_TAPS, by_axis
from tuner.capture.graph.vocabulary import WINDOW
from tuner.capture.nests.index_space import SAME_ORDER
from tuner.capture.nests.nest import Axis, Tap
from tuner.capture.nests.precision import FLOATS

__all__ = [
    "cpp_tap", "cpp_window", "is_spread", "sliced_from", "tap_of", "triton_tap", "with_windows",
]  # fmt: skip

_POOLS = ("max", "avg")
# What lies beyond the edges.
_FILLS = {"max": -math.inf, "avg": 0.0, "zeros": 0.0, "inside": 0.0, "ones": 1.0, "nowhere": -1.0}


def with_windows(graph: Graph) -> Graph:
    """Return the graph with taps in place of small windows: of pooling, and of its gradients."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "max_place":
            found = _places(graph, node, nodes)
        elif node.op in ("max_pool_grad", "avg_pool_grad"):
            found = _gathered(graph, node)
        else:
            found = _unrolled(graph, node)
        nodes += found or [node]
    return replace(graph, nodes=tuple(nodes))


def _unrolled(graph: Graph, node: Node) -> list[Node]:
    """Return the nodes that stand for one of pooling; none for any other, or where it stays."""
    kind, _, rest = node.op.partition("_pool")
    if kind not in _POOLS or node.dtype not in FLOATS or is_spread(graph, node.refs[0]):
        return []
    num_axes = int(rest[0])
    kernel = by_axis(node.attrs.get("kernel_size"), num_axes, [1])
    stride = by_axis(node.attrs.get("stride"), num_axes, kernel)
    padding = by_axis(node.attrs.get("padding"), num_axes, [0])
    dilation = by_axis(node.attrs.get("dilation"), num_axes, [1])
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


# ---- of a step of training ------------------------------------------------------------------


def _places(graph: Graph, node: Node, before: Sequence[Node]) -> list[Node]:
    """Write where each window's maximum lies, beside the taps and maxima of the pooling itself."""
    source, corner, first = node.args
    assert isinstance(source, Ref)
    kernel = _integers(node.attrs["kernel_size"])
    num_axes, value = len(kernel), graph.value(source.name)
    of_axes: dict[str, JsonValue] = {n: node.attrs[n] for n in (*WINDOW, "dilation")}
    made: list[Node] = []
    pooled = next(
        (
            n
            for n in graph.nodes
            if n.op == f"max_pool{num_axes}d"
            and n.refs[0] == source.name
            and {name: n.attrs.get(name) for name in of_axes} == of_axes
            and any(done.name == n.name for done in before)
        ),
        None,
    )
    if pooled is None:
        name, op = f"{node.name}_of", f"max_pool{num_axes}d"
        pooled = replace(node, name=name, op=op, args=(source,), attrs=of_axes, dtype=value.dtype)
        made = _unrolled(graph, pooled)
    count = math.prod(kernel)
    known = {n.name for n in (*before, *made)}
    if f"{pooled.name}_tap_{count - 1}" not in known:
        return []
    dilation = _integers(node.attrs["dilation"])
    inner = [math.prod(value.shape[-num_axes:][axis + 1 :]) for axis in range(num_axes)]
    place: Ref = first  # type: ignore[assignment]

    def add(word: str, op: str, *args: Operand, dtype: str = node.dtype, name: str = "") -> Ref:
        found = replace(node, name=name or f"{node.name}_{word}", op=op, args=args, attrs={})
        made.append(replace(found, dtype=dtype))
        return Ref(found.name)

    for number, steps in enumerate(itertools.product(*map(range, kernel))):
        if not number:
            continue
        tap = Ref(f"{pooled.name}_tap_{number}")
        largest = Ref(f"{pooled.name}_{'tap_0' if number == 1 else f'of_{number}'}")
        more = sum(n * step * d for n, step, d in zip(inner, steps, dilation, strict=True))
        is_more = add(f"more_{number}", "gt", tap, largest, dtype="bool")
        is_nan = add(f"nan_{number}", "isnan", tap, dtype="bool")
        is_it = add(f"it_{number}", "logical_or", is_more, is_nan, dtype="bool")
        here = add(f"at_{number}", "add", corner, float(more))
        name = node.name if number == count - 1 else ""
        place = add(f"of_{number}", "where", is_it, here, place, name=name)
    if count == 1:
        add("", "mul", place, 1.0, name=node.name)
    return made


def _gathered(graph: Graph, node: Node) -> list[Node]:
    """Write a gradient of pooling: of each element what comes from the windows that hold it."""
    kernel, stride, padding, dilation = (
        _integers(node.attrs[name]) for name in (*WINDOW, "dilation")
    )
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    # Windows that hold an element, or places of a window where those are fewer, as if dilated.
    counts = [-(-span // apart) for span, apart in zip(spans, stride, strict=True)]
    is_by_place = [k < count for k, count in zip(kernel, counts, strict=True)]
    counts = [*map(min, kernel, counts)]
    if math.prod(counts) > MOST_TAPS or node.dtype not in FLOATS:
        return []
    is_max = node.op == "max_pool_grad"
    made: list[Node] = []
    source = node.args[0]
    same = _same_in_planes(graph, node, len(kernel), made) if is_max else None
    if same is None and is_spread(graph, node.refs[0]):  # of which there is no memory to read
        value = graph.value(node.refs[0])
        form = replace(node, shape=value.shape, dtype=value.dtype, attrs={})
        made.append(replace(form, name=f"{node.name}_of", op="mul", args=(source, 1.0)))
        source = Ref(made[0].name)
    pooled = graph.value(node.refs[0]).shape[-len(kernel) :]
    terms: list[Ref] = []

    def add(word: str, op: str, *args: Operand, **form: Any) -> Ref:
        found = replace(node, name=f"{node.name}_{word}", op=op, args=args, attrs={})
        made.append(replace(found, **form))
        return Ref(found.name)

    for number, backs in enumerate(itertools.product(*map(range, counts))):
        axes: list[JsonValue] = []
        for axis, back in enumerate(backs):
            apart = dilation[axis] if is_by_place[axis] else stride[axis]
            reach = 1 if is_by_place[axis] else min(stride[axis], spans[axis] - back * apart)
            sizes = (node.shape[axis - len(kernel)], pooled[axis], 1)
            axes.append([*sizes, padding[axis] - back * apart, stride[axis], reach])
        attrs: dict[str, JsonValue] = {"axes": axes, "kind": "zeros"}
        term = same or add(f"tap_{number}", "tap", source, attrs=attrs)
        if is_max:
            dtype, attrs = graph.value(node.refs[1]).dtype, attrs | {"kind": "nowhere"}
            place = add(f"place_{number}", "tap", node.args[1], attrs=attrs, dtype=dtype)
            is_it = add(f"it_{number}", "eq", place, node.args[2], dtype="bool")
            term = add(f"own_{number}", "where", is_it, term, 0.0)
        terms.append(term)
    total = terms[0]
    for number, term in enumerate(terms[1:], 1):
        total = add(f"sum_{number}", "add", total, term)
    divisor = 1.0 if is_max else float(str(node.attrs["divisor"]))
    if divisor != 1.0 or made[-1].op == "tap":
        add("mean", "div", total, divisor)
    made[-1] = replace(made[-1], name=node.name)
    return made


def _same_in_planes(graph: Graph, node: Node, num_axes: int, made: list[Node]) -> Ref | None:
    """Return what comes to all windows of a plane, where that is one number; nodes go to `made`.

    Behind a mean it is divided after it was spread, and is here before.
    """
    value, scales = graph.value(node.refs[0]), list[Node]()
    while isinstance(value, Node) and value.op in ("div", "mul") and len(value.refs) == 1:
        if not isinstance(value.args[0], Ref):
            return None
        scales.append(value)
        value = graph.value(value.refs[0])
    if not isinstance(value, Node) or value.op != "expand":
        return None
    while isinstance(value, Node) and value.op == "expand":
        value = graph.value(value.refs[0])
    if set(value.shape[-num_axes:]) != {1}:
        return None
    found = Ref(value.name)
    for number, scale in enumerate(reversed(scales)):
        name, args = f"{node.name}_same_{number}", (found, *scale.args[1:])
        made.append(replace(scale, name=name, args=args, shape=value.shape))
        found = Ref(name)
    return found


def _integers(value: JsonValue) -> list[int]:
    return [int(str(n)) for n in value] if isinstance(value, list) else []


def is_spread(graph: Graph, name: str) -> bool:
    """Whether a value is a view of fewer elements, which nothing stores."""
    value = graph.value(name)
    while isinstance(value, Node) and value.op in SAME_ORDER:
        if value.op == "expand":
            return True
        value = graph.value(value.refs[0])
    return False


def sliced_from(node: Node, step: int, first: int) -> tuple[int, int]:
    """Return step and first place in what is sliced, for those along the axis of the slice."""
    own_step, start = (int(str(node.attrs[name])) for name in ("step", "start"))
    return step * own_step, first * own_step + start


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
            mask += f" & ({name}_{number} >= 0) & ({name}_{number} < {axis.given * axis.every})"
        if axis.reach < axis.every:
            mask += f" & ({name}_{number} % {axis.every} < {axis.reach})"
        if axis.every > 1:
            yield f"{name}_{number}_in = {name}_{number} // {axis.every}"
        places.append((f"{name}_{number}{'_in' * (axis.every > 1)}", axis.given))
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
        for field in ("made", "given", "stride", "first", "every", "reach")
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
