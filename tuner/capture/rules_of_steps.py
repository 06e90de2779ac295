"""Rules that the record of a step of training has besides those of forwards."""

from __future__ import annotations

from typing import Any

from tuner.capture.graph import Ref
from tuner.capture.lowering import Lowering
from tuner.capture.rules_pooling import POOLING
from tuner.capture.rules_reducing import Results, Rule, axes_in_order

__all__ = ["OF_STEPS"]


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


OF_STEPS: dict[str, Rule] = {**POOLING, "sum": _sum}
