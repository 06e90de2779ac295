"""Rules that the record of a step of training has besides those of forwards."""

from __future__ import annotations

import math
from typing import Any

from tuner.capture.graph.graph import Operand, Ref
from tuner.capture.graph.lowering import Lowering
from tuner.capture.graph.rules_pooling import POOLING
from tuner.capture.graph.rules_reducing import Results, Rule, axes_in_order

__all__ = ["NOT_OPENED", "OF_STEPS"]


def _sum(low: Lowering, a: dict[str, Any]) -> Results:
    """Sum what is spread before it is spread: the gradient of what was added to many numbers.

    Where no dimension of the result is spread, or no sum is left, the usual rule does.
    """
    x = a["self"]
    node = low.node_of(x) if isinstance(x, Ref) else None
    if node is None or node.op != "expand" or node.dtype != low.dtype:
        return None
    (source,) = node.args
    assert isinstance(source, Ref)
    axes = axes_in_order(low, x, a.get("dim"))
    given = low.shape_of(source)
    given = (*[1] * (len(node.shape) - len(given)), *given)
    kept = [axis for axis in range(len(given)) if axis not in axes]
    is_spread = any(given[axis] == 1 < node.shape[axis] for axis in kept)
    if not is_spread or all(node.shape[axis] == 1 for axis in axes):
        return None
    shape = [node.shape[axis] if axis in axes else size for axis, size in enumerate(given)]
    narrow = low.view(source, given)
    narrow = narrow if [*given] == shape else low.emit("expand", narrow, shape=shape)
    sums = [1 if axis in axes else size for axis, size in enumerate(shape)]
    attrs: dict[str, Any] = {"axes": axes, "keepdim": True}
    found = low.emit("sum", narrow, shape=sums, **attrs)
    wide = [1 if axis in axes else size for axis, size in enumerate(node.shape)]
    # A value of its own: what is expanded is no tensor that could be returned.
    made = low.pointwise("mul", low.emit("expand", found, shape=wide), 1.0, shape=wide)
    return low.view(made, low.shape)


# ---- attention ------------------------------------------------------------------------------

# The weights of all keys are stored in a backward, whatever PyTorch's own does: up to so many keys
# for each number of a head these are no more than a few of the queries.
MOST_KEYS = 8


def _attention(low: Lowering, a: dict[str, Any]) -> Results:
    """Write the forward as the call that it is without gradients."""
    if a["dropout_p"]:
        return None
    given = {name: a[name] for name in ("query", "key", "value", "attn_mask")}
    attrs = {"is_causal": a["is_causal"], "scale": a["scale"], "enable_gqa": False}
    return low.library("attention", {**given, **attrs}, [*attrs]), None


def _of_attention(low: Lowering, a: dict[str, Any]) -> Results:
    """Write the gradients of queries, keys and values: five products around two softmaxes.

    Not of halves, whose products would be rounded where PyTorch's are not.
    """
    query, key, value, grad = a["query"], a["key"], a["value"], a["grad_out"]
    shape, num_keys = low.shape_of(query), low.shape_of(key)[-2]
    is_large = num_keys > MOST_KEYS * shape[-1]
    if a["dropout_p"] or is_large or low.dtype not in ("float32", "float64"):
        return None
    scores, rows = (*shape[:-1], num_keys), (*shape[:-1], 1)

    def product(x: Ref, y: Ref, of: Ref | None = None) -> Ref:
        form = scores if of is None else low.shape_of(of)
        return low.emit("matmul", x, y, shape=form)

    def turned(x: Ref) -> Ref:
        given = low.shape_of(x)
        axes: Any = [*range(len(given) - 2), len(given) - 1, len(given) - 2]
        return low.emit("permute", x, shape=[given[axis] for axis in axes], axes=axes)

    def pointwise(op: str, *operands: Operand) -> Ref:
        return low.pointwise(op, *operands, shape=scores)

    def of_rows(op: str, x: Ref) -> Ref:
        axes: Any = [len(shape) - 1]
        return low.emit(op, x, shape=rows, axes=axes, keepdim=True)

    scale = float(a["scale"] if a["scale"] is not None else shape[-1] ** -0.5)
    made = pointwise("mul", product(query, turned(key)), scale)
    if a["is_causal"]:
        places = [
            low.view(low.emit("arange", shape=(n,), dtype="int64", start=0, step=1), form)
            for n, form in ((num_keys, (1, num_keys)), (shape[-2], (shape[-2], 1)))
        ]
        is_seen = low.pointwise("le", *places, shape=(shape[-2], num_keys), dtype="bool")
        made = pointwise("where", is_seen, made, -math.inf)
    if a["attn_mask"] is not None:
        made = pointwise("add", made, a["attn_mask"])
    largest = of_rows("amax", made)
    weights = pointwise("exp", pointwise("sub", made, largest))
    weights = pointwise("div", weights, of_rows("sum", weights))
    if a["attn_mask"] is not None:  # which may leave no key at all
        is_none = low.pointwise("eq", largest, -math.inf, shape=rows, dtype="bool")
        weights = pointwise("where", is_none, 0.0, weights)
    of_weights = product(grad, turned(value))
    mean = of_rows("sum", pointwise("mul", weights, of_weights))
    less = pointwise("mul", weights, pointwise("sub", of_weights, mean))
    of_scores = pointwise("mul", less, scale)
    return (
        product(of_scores, key, query),
        product(turned(of_scores), query, key),
        product(turned(weights), grad, value),
    )


# ---- parts ----------------------------------------------------------------------------------


def _of_part(low: Lowering, a: dict[str, Any]) -> Results:
    """Write the gradient of a part of a tensor: zeros around it, and between what was apart."""
    rank, size = len(low.shape), low.shape[a["dim"]]
    axis = a["dim"] % rank
    if "index" in a:
        start, stop, step = a["index"] % size, a["index"] % size + 1, 1
    else:
        start, stop, step = slice(a["start"], a["end"], a["step"]).indices(size)
    count = len(range(start, stop, step))
    if not count:
        return None
    lead, rest = low.shape[:axis], low.shape[axis + 1 :]
    part = low.view(a["grad_output"], [*lead, count, *rest])
    if step > 1:
        shape = [*lead, count, step, *rest]
        ends: dict[str, Any] = {"low": [0] * len(shape), "high": [0] * len(shape)}
        ends["high"][axis + 1] = step - 1
        part = low.view(part, [*lead, count, 1, *rest])
        part = low.view(
            low.emit("pad", part, 0.0, shape=shape, **ends), [*lead, count * step, *rest]
        )
    return _with_zeros(low, part, axis, start)


def _with_zeros(low: Lowering, part: Ref, axis: int, start: int) -> Ref:
    before, after = [0] * len(low.shape), [0] * len(low.shape)
    before[axis], after[axis] = start, low.shape[axis] - start - low.shape_of(part)[axis]
    if not any(before) and not any(after):
        return part
    ends: dict[str, Any] = {"low": before, "high": after}
    return low.emit("pad", part, 0.0, **ends)


def _add(low: Lowering, a: dict[str, Any]) -> Results:
    """Put parts beside each other whose gradients are added with zeros around both."""
    parts = [_part_of(low, a["self"]), _part_of(low, a["other"])]
    if a.get("alpha", 1) != 1 or None in parts:
        return None
    first, second = sorted((p for p in parts if p is not None), key=lambda part: part[1:])
    (one, axis, start), (other, other_axis, begin) = first, second
    is_beside = axis == other_axis and start + low.shape_of(one)[axis] == begin
    if not is_beside or low.forms[one.name][1] != low.forms[other.name][1]:
        return None
    shape = [*low.shape_of(one)]
    shape[axis] += low.shape_of(other)[axis]
    both = low.emit("cat", one, other, shape=shape, dtype=low.forms[one.name][1], axis=axis)
    return _with_zeros(low, both, axis, start)


def _part_of(low: Lowering, x: Operand) -> tuple[Ref, int, int] | None:
    """Return what a value is besides zeros along one axis, the axis, and where it begins."""
    node = low.node_of(x) if isinstance(x, Ref) else None
    if node is None or node.op != "pad" or node.args[1] != 0.0 or node.shape != low.shape:
        return None
    before, after = node.attrs["low"], node.attrs["high"]
    (part, _) = node.args
    assert isinstance(before, list) and isinstance(after, list) and isinstance(part, Ref)
    moved = [at for at, ends in enumerate(zip(before, after, strict=True)) if any(ends)]
    is_whole = all(int(str(n)) >= 0 for n in (*before, *after))
    return (part, moved[0], int(str(before[moved[0]]))) if len(moved) == 1 and is_whole else None


# ---- images made larger ---------------------------------------------------------------------


def _of_nearest(low: Lowering, a: dict[str, Any]) -> Results:
    """Sum over the pixels that each one became, where all became as many; None where not."""
    num_axes = len(a["output_size"])
    given, made = low.shape[-num_axes:], low.shape_of(a["grad_output"])[-num_axes:]
    if any(large % small for large, small in zip(made, given, strict=True)):
        return None
    shape = [*low.shape[:-num_axes]]
    for large, small in zip(made, given, strict=True):
        shape += [small, large // small]
    axes: Any = [len(low.shape) - num_axes + 1 + 2 * axis for axis in range(num_axes)]
    apart = low.view(a["grad_output"], shape)
    return low.emit("sum", apart, axes=axes, keepdim=False)


# PyTorch records attention so on a CPU, on which all is recorded.
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
OF_STEPS: dict[str, Rule] = {
    **POOLING,
    "sum": _sum,
    "add": _add,
    "select_backward": _of_part,
    "slice_backward": _of_part,
    **{f"upsample_nearest{n}d_backward": _of_nearest for n in (1, 2, 3)},
    _ATTENTION: _attention,
    f"{_ATTENTION}_backward": _of_attention,
}
# What a record of a step has as it is, by PyTorch's names.
NOT_OPENED = {
    *("select_backward", "slice_backward", "embedding_dense_backward", _ATTENTION),
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
}
