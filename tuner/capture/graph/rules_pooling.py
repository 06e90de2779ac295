"""Pooling in a step of training: maxima with their places, and gradients gathered by windows.

    place       a float: which element of its plane (all pixels of one channel) a maximum is of
    gradient    each element adds up what comes to it from the windows that hold it

A plane's elements are counted in row-major order, without dimensions before its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuner.capture.graph.graph import Operand, Ref
from tuner.capture.graph.lowering import Lowering
from tuner.capture.graph.rules_reducing import Results, Rule

__all__ = ["MOST_TAPS", "POOLING", "by_axis"]

# Floats count the elements of a plane, and find lines of them: (n + 0.5) / size is rounded by less
# than it is away from a whole number where n has so few values.
MOST_PLACES = 2**21
MOST_TAPS = 32  # places of a window that is taken as a whole, here and by a nest
Sizes = Sequence[int]


def by_axis(value: Any, num_axes: int, default: Sizes) -> list[int]:
    """Return one number for each axis, as PyTorch reads one for all, or none."""
    found = [value] if isinstance(value, int) else [*(value or default)]
    return found * num_axes if len(found) == 1 else found


def _geometry(a: Mapping[str, Any], num_axes: int) -> dict[str, Any]:
    """Return the attributes of windows, each with one number for each axis."""
    kernel = by_axis(a["kernel_size"], num_axes, ())
    return {
        "kernel_size": kernel,
        "stride": by_axis(a["stride"], num_axes, kernel),
        "padding": by_axis(a["padding"], num_axes, [0]),
        "dilation": by_axis(a.get("dilation"), num_axes, [1]),
    }


def _even(low: Lowering, x: Ref, pooled: Sizes, num_axes: int) -> dict[str, Any] | None:
    """Return the windows of adaptive pooling where all have one size; None where they do not."""
    given = low.shape_of(x)[-num_axes:]
    made = pooled[-num_axes:]
    if any(size % count for size, count in zip(given, made, strict=True)):
        return None
    kernel = [size // count for size, count in zip(given, made, strict=True)]
    return _geometry({"kernel_size": kernel, "stride": kernel, "padding": 0}, num_axes)


# ---- maxima ---------------------------------------------------------------------------------


def _counted(low: Lowering, sizes: Sizes, lead: int, dtype: str) -> Ref:
    """Return the number of each element of a plane, in a shape that broadcasts."""
    shape = [*[1] * lead, *sizes]
    if math.prod(sizes) == 1:
        return low.emit("full", 0.0, shape=shape, dtype=dtype)
    numbers = low.emit("arange", shape=(math.prod(sizes),), dtype=dtype, start=0, step=1)
    return low.view(numbers, shape)


def _corners(
    low: Lowering, a: Mapping[str, Any], given: Sizes, made: Sizes, lead: int, dtype: str
) -> tuple[Ref, Ref]:
    """Return of each window the place of its first element, and that of the first inside.

    The former is counted like the others where it lies before an edge.
    """
    shape = [*[1] * lead, *made]
    if math.prod(made) == 1:
        units = [math.prod(given[axis + 1 :]) for axis in range(len(given))]
        ahead = [n * pad for n, pad in zip(units, a["padding"], strict=True)]
        skipped = [-pad % step for pad, step in zip(a["padding"], a["dilation"], strict=True)]
        after = [n * step for n, step in zip(units, skipped, strict=True)]
        places = (-float(sum(ahead)), float(sum(after)))
        ends = [low.emit("full", place, shape=shape, dtype=dtype) for place in places]
        return ends[0], ends[1]

    def pointwise(op: str, *operands: Operand) -> Ref:
        return low.pointwise(op, *operands, shape=shape, dtype=dtype)

    left = _counted(low, made, lead, dtype)
    corner: Ref | None = None
    first: Ref | None = None
    inner = 1
    for axis in reversed(range(len(made))):
        if axis and made[axis] > 1:  # floats have no remainder that is exact in all languages
            middle = pointwise("mul", pointwise("add", left, 0.5), 1.0 / made[axis])
            above = pointwise("floor", middle)
            here = pointwise("sub", left, pointwise("mul", above, float(made[axis])))
        else:
            above, here = left, left if axis == 0 else pointwise("mul", left, 0.0)
        begin = pointwise("mul", here, float(a["stride"][axis] * inner))
        apart, before = a["dilation"][axis] * inner, a["padding"][axis] * inner
        inside = begin = pointwise("sub", begin, float(before)) if before else begin
        for step in range(0, before, apart):
            is_before = low.pointwise("lt", begin, float(-step), shape=shape, dtype="bool")
            inside = pointwise("add", inside, pointwise("where", is_before, float(apart), 0.0))
        corner = begin if corner is None else pointwise("add", corner, begin)
        first = inside if first is None else pointwise("add", first, inside)
        left, inner = above, inner * given[axis]
    assert corner is not None and first is not None
    return corner, first


def _maxima(low: Lowering, x: Ref, a: Mapping[str, Any], num_axes: int) -> Results:
    """Write maxima and their places; None where floats do not count as many places.

    Large windows are taken along one axis after the other, the last one first: each of these has
    places of its own. The first of equal maxima, and the last NaN, are the same ones then.
    """
    given = low.shape_of(x)[-num_axes:]
    if math.prod(given) > MOST_PLACES:
        return None
    lead, made = low.shape[:-num_axes], low.shape[-num_axes:]
    if math.prod(a["kernel_size"]) <= MOST_TAPS:
        return _maxima_of(low, x, a, (*lead, *made))
    found: Results = None
    for axis in reversed(range(num_axes)):
        alone = {name: [n if at == axis else 1 for at, n in enumerate(a[name])] for name in a}
        alone["padding"] = [n if at == axis else 0 for at, n in enumerate(a["padding"])]
        shape = (*lead, *given[:axis], *made[axis:])
        if alone["kernel_size"][axis] > 1 or shape != low.shape_of(x):
            found = _maxima_of(low, x, alone, shape)
            x = found[0]
    return found


def _maxima_of(
    low: Lowering, x: Ref, a: Mapping[str, Any], shape: Sequence[int]
) -> tuple[Ref, Ref]:
    """Write maxima of windows, in a shape, and their places."""
    num_axes = len(a["kernel_size"])
    dtype = "float64" if low.dtype == "float64" else "float32"
    sizes = low.shape_of(x)[-num_axes:], shape[-num_axes:]
    corner, first = _corners(low, a, *sizes, len(shape) - num_axes, dtype)
    values = low.emit(f"max_pool{num_axes}d", x, shape=shape, **a, ceil_mode=False)
    return values, low.emit("max_place", x, corner, first, shape=shape, dtype=dtype, **a)


def _max_pool(num_axes: int, *, is_adaptive: bool) -> Rule:
    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        x = a["self"]
        attrs = _even(low, x, low.shape, num_axes) if is_adaptive else _geometry(a, num_axes)
        return None if attrs is None else _maxima(low, x, attrs, num_axes)

    return rule


def _of_maxima(num_axes: int) -> Rule:
    """Gradients go to the element whose place a window kept."""

    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        grad, node = a["grad_output"], low.node_of(a["indices"])
        while node is not None and node.op == "max_place":
            source = node.args[0]
            assert isinstance(source, Ref)
            shape, attrs = low.shape_of(source), dict[str, Any](node.attrs)
            own = _counted(low, shape[-num_axes:], len(shape) - num_axes, node.dtype)
            grad = low.emit("max_pool_grad", grad, Ref(node.name), own, shape=shape, **attrs)
            if source == a["self"]:
                return grad
            pooled = low.node_of(source)  # along another axis; its places are the next node
            node = low.nodes[low.nodes.index(pooled) + 1] if pooled is not None else None
        return None  # PyTorch's own places

    return rule


# ---- means ----------------------------------------------------------------------------------


def _adaptive_avg_pool(num_axes: int) -> Rule:
    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        attrs = _even(low, a["self"], low.shape, num_axes)
        if attrs is None:
            return None
        attrs.pop("dilation")
        attrs |= {"ceil_mode": False, "count_include_pad": True}
        return low.emit(f"avg_pool{num_axes}d", a["self"], **attrs)

    return rule


def _of_means(num_axes: int, windows: Callable[..., dict[str, Any] | None]) -> Rule:
    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        attrs = windows(low, a, num_axes)
        if attrs is None:
            return None
        divisor = a.get("divisor_override") or math.prod(attrs["kernel_size"])
        return low.emit("avg_pool_grad", a["grad_output"], **attrs, divisor=divisor)

    return rule


def _of_equal_counts(low: Lowering, a: dict[str, Any], num_axes: int) -> dict[str, Any] | None:
    """Return the windows of average pooling where each divides by the same number."""
    attrs = _geometry(a, num_axes)
    is_uneven = a["ceil_mode"] or (any(attrs["padding"]) and not a["count_include_pad"])
    return None if is_uneven else attrs


def _adaptive(low: Lowering, a: dict[str, Any], num_axes: int) -> dict[str, Any] | None:
    return _even(low, a["self"], low.shape_of(a["grad_output"]), num_axes)


POOLING: dict[str, Rule] = {
    **{f"max_pool{n}d_with_indices": _max_pool(n, is_adaptive=False) for n in (2, 3)},
    **{f"max_pool{n}d_with_indices_backward": _of_maxima(n) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": _max_pool(n, is_adaptive=True) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d_backward": _of_maxima(n) for n in (2, 3)},
    **{f"avg_pool{n}d_backward": _of_means(n, _of_equal_counts) for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d": _adaptive_avg_pool(n) for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d_backward": _of_means(n, _adaptive) for n in (2, 3)},
}
