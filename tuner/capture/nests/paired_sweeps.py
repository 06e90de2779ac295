"""Two reductions in one sweep, of which the second is about what the first one finds.

exponentials  the sum of exp(x - m) beside the largest x, m: a lane scales its sum down when it
              meets a larger x (Milakov and Gimelshein, "Online normalizer calculation for
              softmax", 2018)
moments       the sum of (x - m)^2 beside the mean, m, by Welford's update
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tuner.capture.nests.nest import Nest, Pass, Reduction, Statement

__all__ = ["SweepPair", "paired_sweeps"]


@dataclass(frozen=True, slots=True)
class SweepPair:
    """What one pass finds, and the next one about it."""

    kind: Literal["exponentials", "moments"]
    first: Reduction
    second: Reduction


def paired_sweeps(nest: Nest) -> dict[int, SweepPair]:
    """Return the pairs that one sweep can find, by the number of the first one's pass."""
    found: dict[int, SweepPair] = {}
    if nest.is_wide:  # a kernel takes numbers, the scale among them, as float32
        return found
    for number, (each, following) in enumerate(zip(nest.passes, nest.passes[1:], strict=False)):
        if len(each.reductions) != 1 or len(following.reductions) != 1 or following.writes:
            continue
        first, second = each.reductions[0], following.reductions[0]
        value = _statement(following, second.value)
        if second.fold != "sum" or value is None or first.value in nest.kinds:
            continue
        apart = _statement(following, str(value.operands[0]))
        if apart is None or apart.op != "sub" or apart.operands != (first.value, first.name):
            continue
        if first.fold == "amax" and value.op == "exp":
            found[number] = SweepPair("exponentials", first, second)
        elif first.is_wide and value.op == "square":
            found[number] = SweepPair("moments", first, second)
    return found


def _statement(each: Pass, name: str) -> Statement | None:
    return next((s for s in each.statements if s.name == name), None)
