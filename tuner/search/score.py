"""How good a search was: its best so far against random search's, on a space known in full.

Source: Willemsen et al., "A methodology for comparing optimization algorithms for auto-tuning",
Future Generation Computer Systems 159, 2024. At k evaluations the search has found `f(k)` and
random search without replacement would on average have found `b(k)`; `(b(k) - f(k)) /
(b(k) - optimum)` is 0 where they are equal and 1 where the search has found the optimum. The
score is the mean over the evaluations from where random search has come 1 % of the way from the
median to the optimum until it has come 95 % of it, or until the budget ends ("X300" for 300).

Where the paper takes for `b(k)` the entry at the expected rank, this takes the exact mean, so
that random search scores 0 on average. A failed configuration counts as an evaluation; before
the first that runs, the median stands for what was found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Yardstick"]

Latencies = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Yardstick:
    """What searches of one recorded space are measured against.

    Attributes:
        latency_us: float64 (n,), of every configuration; NaN for those that failed.
        budget: evaluations that count.
        optimum_us: the least latency.
        median_us: of the configurations that run.
        points: int64 (m,), the numbers of evaluations at which searches are compared.
        random_us: float64 (m,), what random search has found by then, on average.
    """

    latency_us: Latencies
    budget: int
    optimum_us: float
    median_us: float
    points: NDArray[np.int64]
    random_us: Latencies

    @classmethod
    def of(cls, latency_us: Latencies, budget: int = 300) -> Yardstick:
        """Prepare to measure searches; at least one configuration runs."""
        fastest_first = np.sort(latency_us[~np.isnan(latency_us)])
        optimum_us, median_us = float(fastest_first[0]), float(np.median(fastest_first))
        first = max(1, _evaluations_until(0.01, fastest_first))
        last = min(_evaluations_until(0.95, fastest_first), budget)
        points = np.arange(first, max(last, first + 1))
        random_us = _random_best_us(fastest_first, int(points[-1]))[points - 1]
        return cls(latency_us, budget, optimum_us, median_us, points, random_us)

    def best_us(self, order: Sequence[int], num: int) -> Latencies:
        """Return the best found after 1 to `num` evaluations; it stays when a search ends early.

        Args:
            order: the config ids that a search evaluated, in order.
            num: how many evaluations.
        """
        seen_us = np.full(num, np.inf)
        given = self.latency_us[np.asarray(order[:num], dtype=np.int64)]
        seen_us[: len(given)] = np.where(np.isnan(given), np.inf, given)
        best_us = np.minimum.accumulate(seen_us)
        return np.where(np.isinf(best_us), self.median_us, best_us)

    def score(self, order: Sequence[int]) -> float:
        """Return the score of a search: 0 as random search, 1 the optimum at once.

        NaN where random search finds the optimum at once as well: all are equally fast.
        """
        found_us = self.best_us(order, int(self.points[-1]))[self.points - 1]
        gap_us = self.random_us - self.optimum_us
        if not (gap_us > 0).all():
            return math.nan
        return float(np.mean((self.random_us - found_us) / gap_us))

    def evaluations_within(self, share: float, order: Sequence[int]) -> int | None:
        """Return after how many evaluations a search was within `share` of the optimum.

        None where it was not, within the budget.
        """
        given = self.latency_us[np.asarray(order[: self.budget], dtype=np.int64)]
        hits = np.flatnonzero(given <= self.optimum_us * (1 + share))
        return int(hits[0]) + 1 if len(hits) else None


def _evaluations_until(share: float, fastest_first: Latencies) -> int:
    """Return when random search has come `share` of the way from the median to the optimum.

    After k draws of n, its best is expected at rank k (n + 1) / (k + 1) from the slowest; this is
    the least k with which that rank is among those fast enough.
    """
    num = len(fastest_first)
    optimum_us, median_us = fastest_first[0], np.median(fastest_first)
    target_us = optimum_us + (median_us - optimum_us) * (1 - share)
    num_slower = num - int(np.searchsorted(fastest_first, target_us, side="right"))
    return math.ceil(num_slower / (num + 1 - num_slower))


def _random_best_us(fastest_first: Latencies, num_draws: int) -> Latencies:
    """Return the mean best of 1 to `num_draws` draws without replacement.

    With t_0 <= t_1 <= ... the latencies and P_r(k) the probability that none of the r fastest is
    among k draws, the mean is t_0 + sum over r >= 1 of (t_r - t_(r-1)) P_r(k). P_r(0) is 1, and
    the next draw misses them with the probability (n - r - k) / (n - k).
    """
    num = len(fastest_first)
    steps_us = np.diff(fastest_first)
    ranks = np.arange(1, num)
    missed = np.ones(num - 1)
    means_us = np.full(num_draws, fastest_first[0])
    for drawn in range(min(num_draws, num)):
        missed = missed * (np.maximum(num - ranks - drawn, 0) / (num - drawn))
        means_us[drawn] += float(missed @ steps_us)
    return means_us
