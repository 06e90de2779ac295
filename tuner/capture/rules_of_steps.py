"""Rules that the record of a step of training has besides those of forwards."""

from __future__ import annotations

import math
from typing import Any

from tuner.capture.graph import Operand, Ref
from tuner.capture.lowering import Lowering
from tuner.capture.rules_pooling import POOLING
from tuner.capture.rules_reducing import Results, Rule, axes_in_order

__all__ = ["ATTENTION", "OF_STEPS"]


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


# PyTorch records attention so on a CPU, on which all is recorded.
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
OF_STEPS: dict[str, Rule] = {
    **POOLING,
    "sum": _sum,
    ATTENTION: _attention,
    f"{ATTENTION}_backward": _of_attention,
}
