"""Sums of exponentials beside their maximum, in one sweep: softmax needs one read less.

A lane keeps the largest value so far, and the sum relative to it; a larger value scales that sum
down (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

from tuner.capture.nest import Nest, Pass, Reduction

__all__ = ["online_sums"]


def online_sums(nest: Nest) -> dict[int, Reduction]:
    """Return the sums that can be found a pass earlier, by the number of that pass.

    That pass finds the largest of a value, and the next one nothing but the sum of `exp` of what
    the value is less than that.
    """
    found = {}
    for number, (each, following) in enumerate(zip(nest.passes, nest.passes[1:], strict=False)):
        maximum, total = _only(each, "amax"), _only(following, "sum")
        is_between = not each.after and not following.writes
        if maximum is None or total is None or not is_between or maximum.value in nest.kinds:
            continue
        by_name = {s.name: s for s in following.statements}
        exponential = by_name.get(total.value)
        if exponential is None or exponential.op != "exp":
            continue
        less = by_name.get(str(exponential.operands[0]))
        if (
            less is not None
            and less.op == "sub"
            and less.operands == (maximum.value, maximum.name)
        ):
            found[number] = total
    return found


def _only(each: Pass, fold: str) -> Reduction | None:
    """Return a pass's only reduction, if it is of that kind."""
    is_one = len(each.reductions) == 1 and each.reductions[0].fold == fold
    return each.reductions[0] if is_one else None
