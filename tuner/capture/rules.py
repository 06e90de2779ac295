"""PyTorch's operators in terms of the vocabulary: one rule for each name.

A rule gets the operator's arguments by their names in PyTorch's schema, tensors as `Ref`. It
returns the result, or all results in order; None where it leaves the operator as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tuner.capture.graph import Operand, Ref
from tuner.capture.lowering import Lowering
from tuner.capture.rules_reducing import REDUCING, Results, Rule, axes_in_order
from tuner.capture.vocabulary import VOCABULARY

__all__ = ["lowered"]


def lowered(low: Lowering, name: str, overload: str, arguments: dict[str, Any]) -> Results:
    """Write the nodes of PyTorch's operator `name`; what no rule knows is a call of it."""
    rule = _RULES.get(name)
    found = rule(low, arguments) if rule is not None else None
    return low.call(name, overload, arguments) if found is None else found


def _same(low: Lowering, a: dict[str, Any]) -> Results:
    found: Operand = next(iter(a.values()))
    return found


def _by_table(op: str) -> Rule:
    """Operands are the arguments, as many as the vocabulary names."""
    count = len(VOCABULARY[op].operands.split(","))
    return lambda low, a: low.pointwise(op, *list(a.values())[:count])


def _library(op: str) -> Rule:
    return lambda low, a: low.library(op, a, VOCABULARY[op].attrs)


def _scaled(low: Lowering, x: Operand, factor: Operand) -> Operand:
    if factor == 1:
        return x
    shape = low.shape_of(x)
    return low.pointwise("mul", x, factor, shape=shape) if isinstance(x, Ref) else x * factor  # type: ignore[operator]


def _add(op: str) -> Rule:
    return lambda low, a: low.pointwise(op, a["self"], _scaled(low, a["other"], a.get("alpha", 1)))


def _rsub(low: Lowering, a: dict[str, Any]) -> Results:
    return low.pointwise("sub", a["other"], _scaled(low, a["self"], a.get("alpha", 1)))


def _div(low: Lowering, a: dict[str, Any]) -> Results:
    mode = a.get("rounding_mode")
    if mode is not None and not low.dtype.startswith(("float", "bfloat")):
        return None  # whole numbers: a quotient in floating point would not be exact
    found = low.pointwise("div", a["self"], a["other"])
    return found if mode is None else low.pointwise(mode, found)


def _clamp(low: Lowering, a: dict[str, Any]) -> Results:
    bounds = list(a.values())[1:3]
    if None not in bounds:
        return low.pointwise("clamp", a["self"], *bounds)
    low_bound, high_bound = bounds
    if low_bound is not None:
        return low.pointwise("maximum", a["self"], low_bound)
    return low.pointwise("minimum", a["self"], high_bound)


def _gelu(low: Lowering, a: dict[str, Any]) -> Results:
    return low.pointwise("gelu_tanh" if a["approximate"] == "tanh" else "gelu", a["self"])


def _elu(low: Lowering, a: dict[str, Any]) -> Results:
    if a["input_scale"] != 1 or a["scale"] != 1:
        return None
    return low.pointwise("elu", a["self"], a["alpha"])


def _bitwise(op: str) -> Rule:
    """Of truths they are the logical ones; of numbers no rule knows them."""

    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        return low.pointwise(op, *list(a.values())[:2]) if low.dtype == "bool" else None

    return rule


def _masked_fill(low: Lowering, a: dict[str, Any]) -> Results:
    return low.pointwise("where", a["mask"], a["value"], a["self"])


def _cast(low: Lowering, a: dict[str, Any]) -> Results:
    return low.cast(next(iter(a.values())), low.dtype)


# ---- index maps and new tensors -------------------------------------------------------------


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
    if before is not None and before.op == "permute":  # einsum moves dimensions there and back
        earlier: Any = before.attrs["axes"]
        x, axes = before.args[0], [earlier[axis] for axis in axes]
    sizes = low.shape_of(x)
    moved = [axis for axis in axes if sizes[axis] != 1]
    if moved == sorted(moved):  # nothing but dimensions of one element
        return low.view(x, low.shape)
    order: Any = axes
    return low.emit("permute", x, axes=order)


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
    if not low.shape:
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
    return low.emit("arange", start=a.get("start", 0), step=a.get("step", 1))


# ---- products -------------------------------------------------------------------------------


def _bmm(low: Lowering, a: dict[str, Any]) -> Results:
    x, y = a.values()
    if low.shape[0] != 1:
        return low.emit("bmm", x, y)
    x, y = (low.view(each, low.shape_of(each)[1:]) for each in (x, y))
    return low.view(low.emit("matmul", x, y, shape=low.shape[1:]), low.shape)


def _addmm(op: str) -> Rule:
    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        left, right = list(a.values())[1:3]
        product = _scaled(low, low.emit(op, left, right), a.get("alpha", 1))
        if a.get("beta", 1) == 0:
            return product
        return low.pointwise("add", _scaled(low, a["self"], a.get("beta", 1)), product)

    return rule


def _convolution(low: Lowering, a: dict[str, Any]) -> Results:
    rank = len(low.shape_of(a["input"])) - 2
    op = f"conv_transpose{rank}d" if a["transposed"] else f"conv{rank}d"
    return low.library(op, a, VOCABULARY[op].attrs)


def _whole_convolution(op: str) -> Rule:
    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        if isinstance(a["padding"], str):
            return _convolution_with_words(low, op, a)
        return low.library(op, a, VOCABULARY[op].attrs)

    return rule


def _convolution_with_words(low: Lowering, op: str, a: dict[str, Any]) -> Results:
    """Write `padding="same"` or "valid" as numbers; an odd total needs a `pad` before."""
    x, rank = a["input"], len(a["stride"])
    totals = [0] * rank
    if a["padding"] == "same":
        kernel = low.shape_of(a["weight"])[2:]
        totals = [d * (k - 1) for d, k in zip(a["dilation"], kernel, strict=True)]
    odd = [n % 2 for n in totals]
    if any(odd):
        shape = [*low.shape_of(x)[:-rank]]
        shape += [n + more for n, more in zip(low.shape_of(x)[-rank:], odd, strict=True)]
        lead = [0] * (len(shape) - rank)
        attrs: dict[str, Any] = {"low": [0] * len(shape), "high": lead + odd}
        x = low.emit("pad", x, 0.0, shape=shape, **attrs)
    numbers = {**a, "input": x, "padding": [n // 2 for n in totals]}
    return low.library(op, numbers, VOCABULARY[op].attrs)


def _attention(low: Lowering, a: dict[str, Any]) -> Results:
    if a.get("dropout_p"):
        return None  # random: refused by the caller
    return low.library("attention", a, VOCABULARY["attention"].attrs)


_SAME = "alias clone detach detach_ lift_fresh lift_fresh_copy contiguous lift"
_POOLS = """max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d linear"""
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME.split(), _same),
    # As the vocabulary has them; below are those whose arguments differ.
    **{name: _by_table(name) for name, op in VOCABULARY.items() if op.kind == "pointwise"},
    **{name: _library(name) for name in _POOLS.split()},
    **{f"conv{n}d": _whole_convolution(f"conv{n}d") for n in (1, 2, 3)},
    "convolution": _convolution,
    "conv_transpose1d": _library("conv_transpose1d"),
    "conv_transpose2d": _library("conv_transpose2d"),
    "conv_transpose3d": _library("conv_transpose3d"),
    "scaled_dot_product_attention": _attention,
    "log_sigmoid": _by_table("logsigmoid"),
    "add": _add("add"),
    "sub": _add("sub"),
    "rsub": _rsub,
    "div": _div,
    "clamp": _clamp,
    "hardtanh": _clamp,
    "clamp_min": lambda low, a: low.pointwise("maximum", *a.values()),
    "clamp_max": lambda low, a: low.pointwise("minimum", *a.values()),
    "gelu": _gelu,
    "elu": _elu,
    "masked_fill": _masked_fill,
    "_to_copy": _cast,
    "convert_element_type": _cast,
    **REDUCING,
    **dict.fromkeys(["view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "view_of"], _view),
    **dict.fromkeys(["permute", "transpose", "t"], _permute),
    "expand": _expand,
    "copy": _copy,
    "repeat": _repeat,
    "slice": _slice,
    "select": _select,
    **dict.fromkeys(["split", "split_with_sizes"], _split),
    "unbind": _unbind,
    "cat": _cat,
    "flip": _flip,
    "roll": _roll,
    "bitwise_not": _bitwise("logical_not"),
    "bitwise_and": _bitwise("logical_and"),
    "bitwise_or": _bitwise("logical_or"),
    "gather": _gather,
    "scatter": _scatter,
    "constant_pad_nd": _pad,
    **dict.fromkeys(["full", "full_like", "new_full", "scalar_tensor"], _full()),
    **dict.fromkeys(["zeros", "zeros_like", "new_zeros"], _full(0)),
    **dict.fromkeys(["ones", "ones_like", "new_ones"], _full(1)),
    "arange": _arange,
    **dict.fromkeys(["mm", "matmul"], lambda low, a: low.emit("matmul", *a.values())),
    "bmm": _bmm,
    "addmm": _addmm("matmul"),
    "baddbmm": _addmm("bmm"),
}
