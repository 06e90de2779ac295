"""PyTorch's operators in terms of the vocabulary: one rule for each name.

A rule gets the operator's arguments by their names in PyTorch's schema, tensors as `Ref`. It
returns the result, or all results in order; None where it leaves the operator as it is.
"""

from __future__ import annotations

from typing import Any

from tuner.capture.graph.graph import Operand, Ref
from tuner.capture.graph.lowering import Lowering
from tuner.capture.graph.rules_moving import MOVING
from tuner.capture.graph.rules_reducing import REDUCING, Results, Rule
from tuner.capture.graph.vocabulary import VOCABULARY

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
    if mode == "floor":
        return None  # 1.0 // 0.1 is 9, but the quotient rounds to 10
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


def _index_put(low: Lowering, a: dict[str, Any]) -> Results:
    """`y[mask] = number`; whatever else is put somewhere is no rule's."""
    indices, number = a["indices"], a["values"]
    mask = indices[0] if len(indices) == 1 else None
    if a.get("accumulate") or not isinstance(mask, Ref) or low.shape_of(number) != ():
        return None
    shape, dtype = low.forms[mask.name]
    if dtype != "bool" or shape != low.shape[: len(shape)]:
        return None
    whole = low.view(mask, (*shape, *(1,) * (len(low.shape) - len(shape))))
    return low.pointwise("where", whole, number, a["self"])


def _cast(low: Lowering, a: dict[str, Any]) -> Results:
    return low.cast(next(iter(a.values())), low.dtype)


# ---- products -------------------------------------------------------------------------------


def _bmm(low: Lowering, a: dict[str, Any]) -> Results:
    x, y = a.values()
    if low.shape[0] != 1:
        return low.emit("bmm", x, y)
    x, y = (low.view(each, low.shape_of(each)[1:]) for each in (x, y))
    return low.view(low.emit("matmul", x, y, shape=low.shape[1:]), low.shape)


def _weight_of_linear(low: Lowering, bias: Operand, left: Ref, right: Ref) -> Ref | None:
    """Return the weight of a linear layer that is written as a product with its transpose."""
    turned = low.node_of(right)
    if turned is None or turned.op != "permute" or turned.attrs["axes"] != [1, 0]:
        return None
    is_row = low.shape_of(bias) == low.shape[-1:] and len(low.shape) == 2
    forms = [low.forms[each.name][1] for each in (bias, left, right) if isinstance(each, Ref)]
    weight = turned.args[0]
    is_plain = is_row and forms == [low.dtype] * 3 and isinstance(weight, Ref)
    return weight if is_plain and isinstance(weight, Ref) else None


def _addmm(op: str) -> Rule:
    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        left, right = list(a.values())[1:3]
        is_sum = op == "matmul" and a.get("alpha", 1) == a.get("beta", 1) == 1
        if is_sum and (weight := _weight_of_linear(low, a["self"], left, right)):
            given = {"input": left, "weight": weight, "bias": a["self"]}
            return low.library("linear", given, VOCABULARY["linear"].attrs)
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
    "index_put": _index_put,
    "_to_copy": _cast,
    "convert_element_type": _cast,
    **REDUCING,
    **MOVING,
    "bitwise_not": _bitwise("logical_not"),
    "bitwise_and": _bitwise("logical_and"),
    "bitwise_or": _bitwise("logical_or"),
    **dict.fromkeys(["mm", "matmul"], lambda low, a: low.emit("matmul", *a.values())),
    "bmm": _bmm,
    "addmm": _addmm("matmul"),
    "baddbmm": _addmm("bmm"),
}
