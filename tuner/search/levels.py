"""Slow times brought near the others, before a model learns from them.

Everything slower than a quantile of what was seen is clipped to it: how slow the slow ones are
teaches nothing about the fast ones, and spends the model's flexibility. Where many are next to
the best, what is left to learn is their order: then all but the fastest are bent towards the
level of these.
"""

from __future__ import annotations

import numpy as np

from tuner.search.covariance import Array

__all__ = ["levelled"]

CLIP_QUANTILE = 0.7  # of the times seen; from 0.5 to 0.9 the score is flat, without clipping worse
CROWDED = 0.1  # share of the times seen that are next to the best; then slower ones are bent, too
NEXT_TO = 0.01  # from the best, in the logarithm
CROWDED_FROM = 40  # times; fewer do not show it
BEND_QUANTILE = 0.3  # of the times seen; what is slower is bent
BEND = 0.3  # slope where the bend begins; ever less beyond
EARLY = 12  # times that a wide clip is taken from


def levelled(log: Array, is_timed: Array, is_wide: bool) -> tuple[Array, float]:
    """Return logarithms of latencies, bent where that helps, and where to clip them.

    Args:
        log: of what is known, in the order of asking; some may mean nothing.
        is_timed: which of them were measured to the end, at least one.
        is_wide: clip no lower than at the quantile of the first times.
    """
    times = log[is_timed]
    if is_wide:
        early = float(np.quantile(times[:EARLY], CLIP_QUANTILE))
        return log, max(float(np.quantile(times, CLIP_QUANTILE)), early)
    if _is_crowded(times):
        bent = _bent(log, times)
        return bent, float(bent[is_timed].max())
    return log, float(np.quantile(times, CLIP_QUANTILE))


def _is_crowded(times: Array) -> bool:
    """Whether many of these logarithms are next to the least."""
    near = np.count_nonzero(times <= times.min() + NEXT_TO)
    return len(times) >= CROWDED_FROM and bool(near >= CROWDED * len(times))


def _bent(log: Array, times: Array) -> Array:
    """Return `log` with what is above a quantile of `times` ever less far above it."""
    bend = float(np.quantile(times, BEND_QUANTILE))
    width = bend - float(times.min()) + 1e-9
    beyond = np.maximum(log - bend, 0.0)
    return np.asarray(np.minimum(log, bend) + BEND * width * np.log1p(beyond / width))
