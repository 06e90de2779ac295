"""The rules of what moves elements, and of new tensors: views, slices, parts put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tuner.capture.graph.graph import Operand, Ref
from tuner.capture.graph.lowering import Lowering
from tuner.capture.graph.rules_reducing import Results, Rule, axes_in_order

__all__ = ["MOVING"]


def _view(low: Lowering, a: dict[str, Any]) -> Results:
    x = next(iter(a.values()))
    return None if "dtype" in a else low.view(x, low.shape)


def _permute(low: Lowering, a: dict[str, Any]) -> Results:
    rank = len(low.shape)
    if "dims" in a:
        axes = [d % rank for d in a["dims"]]
    else:
        axes = list(range(rank))
        i, j = (a["dim0"], a["dim1"]) if "dim0" in a else (0, -1)
        if rank:
            axes[i], axes[j] = axes[j], axes[i]
    x = a["self"]
    before = low.node_of(x)
    if before is not None and before.op == "cast" and _is_truth(low, before.args[0]):
        # A byte is moved instead of what it becomes, as of one_hot.
        form: dict[str, Any] = {"axes": axes, "dtype": "bool"}
        return low.cast(low.emit("permute", before.args[0], **form), low.dtype)
    if before is not None and before.op == "permute":  # einsum moves dimensions there and back
        earlier: Any = before.attrs["axes"]
        x, axes = before.args[0], [earlier[axis] for axis in axes]
    sizes = low.shape_of(x)
    moved = [axis for axis in axes if sizes[axis] != 1]
    if moved == sorted(moved):  # nothing but dimensions of one element
        return low.view(x, low.shape)
    order: Any = axes
    return low.emit("permute", x, axes=order)


def _is_truth(low: Lowering, operand: Operand) -> bool:
    return isinstance(operand, Ref) and low.forms[operand.name][1] == "bool"


def _expand(low: Lowering, a: dict[str, Any]) -> Results:
    return a["self"] if low.shape_of(a["self"]) == low.shape else low.emit("expand", a["self"])


def _copy(low: Lowering, a: dict[str, Any]) -> Results:
    moved = low.cast(a["src"], low.dtype)
    return low.emit("expand", moved) if low.shape_of(moved) != low.shape else moved


def _repeat(low: Lowering, a: dict[str, Any]) -> Results:
    x = a["self"]
    times = list(a["repeats"])
    shape = [1] * (len(times) - len(low.shape_of(x))) + list(low.shape_of(x))
    apart = [n for size in shape for n in (1, size)]
    spread = [n for pair in zip(times, shape, strict=True) for n in pair]
    wide = low.emit("expand", low.view(x, apart), shape=spread)
    return low.view(wide, low.shape)


def _part(low: Lowering, x: Ref, axis: int, start: int, stop: int, step: int = 1) -> Ref:
    shape = list(low.shape_of(x))
    if (start, step) == (0, 1) and stop >= shape[axis]:
        return x
    shape[axis] = len(range(start, stop, step))
    form: dict[str, Any] = {"shape": shape, "dtype": low.forms[x.name][1]}
    return low.emit("slice", x, axis=axis, start=start, stop=stop, step=step, **form)


def _slice(low: Lowering, a: dict[str, Any]) -> Results:
    shape = low.shape_of(a["self"])
    axis = a["dim"] % len(shape)
    start, stop, step = slice(a["start"], a["end"], a["step"]).indices(shape[axis])
    return _part(low, a["self"], axis, start, max(start, stop), step)


def _slice_scatter(low: Lowering, a: dict[str, Any]) -> Results:
    x, axis = a["self"], a["dim"] % len(low.shape)
    size = low.shape[axis]
    start, stop, step = slice(a["start"], a["end"], a["step"]).indices(size)
    if step != 1 or start >= stop:
        return None
    part = low.cast(a["src"], low.dtype)
    if (start, stop) == (0, size):
        return part
    parts: list[Operand] = [_part(low, x, axis, 0, start)] if start else []
    parts += [part]
    parts += [_part(low, x, axis, stop, size)] if stop < size else []
    return low.emit("cat", *parts, axis=axis)


def _select(low: Lowering, a: dict[str, Any]) -> Results:
    shape = low.shape_of(a["self"])
    axis = a["dim"] % len(shape)
    start = a["index"] % shape[axis]
    return low.view(_part(low, a["self"], axis, start, start + 1), low.shape)


def _split(low: Lowering, a: dict[str, Any]) -> Results:
    x = a["self"]
    size = low.shape_of(x)[axis := a["dim"] % len(low.shape_of(x))]
    sizes: Any = a.get("split_sizes", a.get("split_size"))
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, max(sizes, 1))]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        _part(low, x, axis, start, start + n) for start, n in zip(starts, sizes, strict=True)
    )


def _unbind(low: Lowering, a: dict[str, Any]) -> Results:
    x = a["self"]
    axis = a["dim"] % len(low.shape_of(x))
    parts = [_part(low, x, axis, i, i + 1) for i in range(low.shape_of(x)[axis])]
    return tuple(low.view(part, low.shape) for part in parts)


def _cat(low: Lowering, a: dict[str, Any]) -> Results:
    # An empty tensor of shape (0,) may stand beside any other; it adds nothing.
    tensors = [x for x in a["tensors"] if low.shape_of(x) != (0,)]
    if not tensors:
        return None
    return low.emit(
        "cat", *(low.cast(x, low.dtype) for x in tensors), axis=a["dim"] % len(low.shape)
    )


def _flip(low: Lowering, a: dict[str, Any]) -> Results:
    axes: Any = axes_in_order(low, a["self"], a["dims"]) if a["dims"] else []
    return low.emit("flip", a["self"], axes=axes)


def _roll(low: Lowering, a: dict[str, Any]) -> Results:
    x, dims = a["self"], a["dims"]
    shape = low.shape_of(x)
    if not dims:  # as one long row
        x, dims = low.view(x, (math.prod(shape),)), [0]
    for shift, dim in zip(a["shifts"], dims, strict=True):
        axis, sizes = dim % len(low.shape_of(x)), low.shape_of(x)
        size = sizes[axis]
        if size and (first := -shift % size):
            parts = _part(low, x, axis, first, size), _part(low, x, axis, 0, first)
            x = low.emit("cat", *parts, axis=axis, shape=sizes)
    return low.view(x, shape) if low.shape_of(x) != shape else x


def _gather(low: Lowering, a: dict[str, Any]) -> Results:
    if not low.shape or low.shape[a["dim"] % len(low.shape)] != 1:
        return None
    return low.emit("gather", a["self"], a["index"], axis=a["dim"] % len(low.shape))


def _scatter(low: Lowering, a: dict[str, Any]) -> Results:
    """Write one number of each row into zeros: the gradient of what was gathered, or largest."""
    source: Any = a.get("src", a.get("value"))
    is_number = "src" not in a and isinstance(source, (int, float))
    if not low.shape or "reduce" in a or not (is_number or "src" in a):
        return None
    axis = a["dim"] % len(low.shape)
    zeros = next((n for n in low.nodes if n.name == a["self"].name), None)
    is_one = low.shape_of(a["index"]) == (*low.shape[:axis], 1, *low.shape[axis + 1 :])
    if zeros is None or zeros.op != "full" or zeros.args[0] != 0 or not is_one:
        return None
    if is_number:
        return low.emit("placed", a["index"], axis=axis, value=float(source))
    if low.shape_of(source) != low.shape_of(a["index"]):
        return None
    size = low.shape[axis]
    if size == 1:
        return low.cast(source, low.dtype)
    places = low.emit("arange", shape=(size,), dtype="int64", start=0, step=1)
    places = low.view(places, [size if i == axis else 1 for i in range(len(low.shape))])
    here = low.pointwise("eq", places, a["index"], dtype="bool")
    return low.pointwise("where", here, source, 0.0)


def _pad(low: Lowering, a: dict[str, Any]) -> Results:
    rank, pairs = len(low.shape), list(a["pad"])
    ends: list[Sequence[int]] = [[0] * rank, [0] * rank]
    for place, n in enumerate(pairs):  # PyTorch's list begins with the last axis
        ends[place % 2][rank - 1 - place // 2] = n  # type: ignore[index]
    lows, highs = (list(side) for side in ends)
    attrs: dict[str, Any] = {"low": lows, "high": highs}
    return low.emit("pad", a["self"], a["value"], **attrs)


def _full(value: float | None = None) -> Rule:
    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        given: Any = value if value is not None else a.get("fill_value", a.get("s"))
        return low.emit("full", given) if not isinstance(given, Ref) else None

    return rule


def _arange(low: Lowering, a: dict[str, Any]) -> Results:
    # Of few bits are those of `torch.eye`, which are compared alone.
    dtype = "int64" if low.dtype in ("uint8", "int8", "int16") else low.dtype
    return low.emit("arange", dtype=dtype, start=a.get("start", 0), step=a.get("step", 1))


MOVING: dict[str, Rule] = {
    **dict.fromkeys(["view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "view_of"], _view),
    **dict.fromkeys(["permute", "transpose", "t"], _permute),
    "expand": _expand,
    "copy": _copy,
    "repeat": _repeat,
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "select": _select,
    **dict.fromkeys(["split", "split_with_sizes"], _split),
    "unbind": _unbind,
    "cat": _cat,
    "flip": _flip,
    "roll": _roll,
    "gather": _gather,
    "scatter": _scatter,
    "constant_pad_nd": _pad,
    **dict.fromkeys(["full", "full_like", "new_full", "scalar_tensor"], _full()),
    **dict.fromkeys(["zeros", "zeros_like", "new_zeros"], _full(0)),
    **dict.fromkeys(["ones", "ones_like", "new_ones"], _full(1)),
    "arange": _arange,
}
