"""Slow times brought near the others, before a model learns from them.

Everything slower than a quantile of what was seen is clipped to it: how slow the slow ones are
teaches nothing about the fast ones, and spends the model's flexibility. Where many are next to
the best, what is left to learn is their order: then all but the fastest are bent towards the
level of these.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from tuner.search.encoding import Array

__all__ = ["Known", "levelled"]

CLIP_QUANTILE = 0.7  # of the times seen; from 0.5 to 0.9 the score is flat, without clipping worse
CROWDED = 0.1  # share of the times seen that are next to the best; then slower ones are bent, too
NEXT_TO = 0.01  # from the best, in the logarithm
CROWDED_FROM = 40  # times; fewer do not show it
BEND_QUANTILE = 0.3  # of the times seen; what is slower is bent
BEND = 0.3  # slope where the bend begins; ever less beyond
EARLY = 12  # times that a wide clip is taken from


class Known(IntEnum):
    """What is known of a configuration."""

    TIME = 0  # its latency
    BOUND = 1  # it is slower than this
    FAILED = 2  # it gives no latency
    PENDING = 3  # nothing yet, or never (it was dropped)


def levelled(kind: Array, log: Array, is_wide: bool) -> Array:
    """Return logarithms of latencies, clipped or bent; what has none is as good as the slowest.

    Args:
        kind: what is known of each, in the order of asking; of one at least its time.
        log: of latencies and bounds; the others mean nothing.
        is_wide: clip no lower than at the quantile of the first times.
    """
    log, cap = _bent(log, log[kind == Known.TIME], is_wide)
    return np.where((kind == Known.TIME) | (kind == Known.BOUND), np.minimum(log, cap), cap)


def _bent(log: Array, times: Array, is_wide: bool) -> tuple[Array, float]:
    """Return logarithms, bent where that helps, and where to clip them."""
    cap = float(np.quantile(times, CLIP_QUANTILE))
    if is_wide:
        return log, max(cap, float(np.quantile(times[:EARLY], CLIP_QUANTILE)))
    near = np.count_nonzero(times <= times.min() + NEXT_TO)
    if len(times) < CROWDED_FROM or near < CROWDED * len(times):
        return log, cap
    bend = float(np.quantile(times, BEND_QUANTILE))
    width = bend - float(times.min()) + 1e-9

    def bent(x: Array) -> Array:
        return np.minimum(x, bend) + BEND * width * np.log1p(np.maximum(x - bend, 0.0) / width)

    return bent(log), float(bent(times).max())
