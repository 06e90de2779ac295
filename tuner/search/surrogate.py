"""A Gaussian process over a finite space: how fast is each configuration, and does it work.

    Surrogate    observe(what is known of some) -> log_improvement() of each
                                                -> remaining() of the search

Times are modelled as the logarithm of the latency, with the slow ones brought near the others
(`levels`). How alike two configurations are says `covariance`.

A configuration that failed is as good as the slowest, and lowers the probability that similar
ones work. One that was stopped early is known to be slower than a bound, and one in flight is
believed to be what is expected of it, so that a second suggestion goes elsewhere.

Everything that grows with the space is kept from one suggestion to the next: with L the Cholesky
factor of the rows' covariance, `V = L^-1 K(rows, columns)` gets one row more at each trial, and is
made anew when the hyperparameters are fitted again, which happens ever more rarely.

Sources: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, chapters 2 and 5;
Jones, Schonlau and Welch, "Efficient global optimization of expensive black-box functions", 1998
(expected improvement); Ginsbourger et al., "Kriging is well-suited to parallelize optimization",
2010 (the believer); Hutter et al., "Bayesian optimization with censored response data", 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

from tuner.search.covariance import DENSE_UNTIL, Array, Encoding, Kernel
from tuner.search.firsts import first_columns
from tuner.search.levels import levelled

__all__ = ["Known", "Prior", "Remaining", "Surrogate"]

MAX_FIT_ROWS = 250  # rows that hyperparameters are fitted to; a likelihood takes 5 ms there
MAX_ELEMENTS = 60_000_000  # of V, in float32: 240 MB
MAX_ROWS = 800  # of V, however few the columns
REFIT_GROWTH = 1.15  # after that, when there are so many times more
MAX_JOINT = 300  # columns whose posterior is drawn jointly; all others are worth less
NUM_DRAWS = 400
CAUTION = 1.22  # times the posterior's deviation: with 1.16, right in 86 % where 90 % was said
PRIOR_TRIALS = 20  # that the spread of a prior counts for


class Known(IntEnum):
    """What is known of a column."""

    TIME = 0  # its latency
    BOUND = 1  # it is slower than this
    FAILED = 2  # it gives no latency
    PENDING = 3  # nothing yet, or never (it was dropped)


# ---- the process ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remaining:
    """What the rest of a search is expected to bring.

    Attributes:
        improvement: expected share by which the best time would fall if all were tried.
        within: probability that the best so far is within each given share of the optimum.
    """

    improvement: float
    within: dict[float, float]


class Prior(Protocol):
    """What is expected before anything is known.

    Attributes:
        num_features: how many features there are.
        spread: deviation of the logarithm of latency, clipped as targets are.
    """

    num_features: int
    spread: float

    def features(self, codes: Array) -> Array:
        """Return [features, configurations], each about N(0, 1); the first is the expectation."""


class Surrogate:
    """What is believed of every column of a pool, given what is known of some configurations.

    Args:
        encoding: of the space.
        pool: [columns, parameters] codes of the configurations to choose from.
        prior: expectations from elsewhere; small is fast.
        is_wide: clip no lower than at the quantile of the first times. A search that stays in
            one family otherwise soon clips all others to the level of that family's own slow
            ones, and forgets which of them were nearly as good.

    Attributes:
        log_evidence: logarithm of how probable the latencies seen are, at the most probable
            hyperparameters, up to a constant that is the same for any prior.
    """

    def __init__(
        self,
        encoding: Encoding,
        pool: Array,
        prior: Prior | None = None,
        is_wide: bool = False,
    ) -> None:
        self._is_wide = is_wide
        self.pool = pool
        self._encoding = encoding
        self._prior = prior
        self._pool_priors = self._features(pool)
        self._kernel = Kernel(encoding, len(self._pool_priors))
        self._max_rows = int(np.clip(MAX_ELEMENTS // len(pool), 300, MAX_ROWS))
        self._rows: list[int] = []  # what names the configurations that L and V have, in order
        self._codes = pool[:0]
        self._priors = self._pool_priors[:, :0]
        self._lower = np.zeros((0, 0))
        self._v = np.zeros((0, len(pool)), dtype=np.float32)
        self._explained = np.zeros(len(pool))  # of each column's variance
        self.log_evidence = 0.0
        self._next_fit = 0
        self._dropped = 0  # how many of those observed are no rows
        self._shift, self._scale, self._best = 0.0, 1.0, 0.0
        self._weights = np.zeros(0)  # of the rows of V in the mean
        self._fail_weights: Array | None = None
        self._fail_share = 0.0

    def is_fit_due(self, num: int) -> bool:
        """Whether everything is computed anew when `num` configurations are observed."""
        return num >= self._next_fit or num - self._dropped > len(self._v)

    def look_at(self, pool: Array) -> None:
        """Take other columns to choose from; all is computed anew at the next `observe`."""
        self.pool, self._pool_priors = pool, self._features(pool)
        self._next_fit = 0

    def _features(self, codes: Array) -> Array:
        """Return [priors, configurations]; with a prior the last is 1, for the level."""
        if self._prior is None:
            return np.zeros((0, len(codes)))
        return np.concatenate([self._prior.features(codes), np.ones((1, len(codes)))])

    def first(
        self, count: int, rng: np.random.Generator, before: Array | None = None
    ) -> list[int]:
        """Return columns to try first, as `firsts` chooses them.

        Args:
            count: with those tried before.
            rng: where to look among many columns.
            before: [configurations, parameters], the codes of what was tried already.
        """
        before = self.pool[:0] if before is None else before
        pool = self.pool, self._pool_priors
        return first_columns(pool, self._encoding, self._kernel, count, rng, before)

    # ---- learning -------------------------------------------------------------------------------

    def observe(
        self, names: Sequence[int], codes: Array, kinds: Sequence[Known], logs: Sequence[float]
    ) -> None:
        """Take what is known now; it may only grow, and a pending one may become known.

        Args:
            names: a number for each configuration, in the order of asking, each once.
            codes: [configurations, parameters].
            kinds: what is known of each; there is a time among them.
            logs: natural logarithm of latency or bound; ignored for the other kinds.
        """
        kind = np.array(kinds)
        target = self._scaled_targets(kind, np.array(logs, dtype=float))
        if self.is_fit_due(len(names)):
            known = np.flatnonzero(kind != Known.PENDING)
            some = known[_spread_of(target[known], MAX_FIT_ROWS)]
            features = self._features(codes[some])
            self._kernel.fit(codes[some], features, target[some] - _mean_of(features))
            self.log_evidence = self._kernel.log_probability - len(some) * math.log(self._scale)
            grown = math.ceil(len(names) * REFIT_GROWTH)
            self._next_fit = len(names) + 1 if len(names) < DENSE_UNTIL else grown
            rows = _spread_of(np.where(kind == Known.PENDING, -np.inf, target), self._max_rows)
            self._dropped = len(names) - len(rows)
            self._rebuild([names[i] for i in rows], codes[rows])
        held = set(self._rows)
        at = {name: i for i, name in enumerate(names)}
        newest = names[len(self._rows) + self._dropped :]
        for name in newest:
            if name not in held:
                self._add(name, codes[at[name]])
        inside = np.array([at[name] for name in self._rows])
        self._solve(kind[inside], target[inside] - _mean_of(self._priors))

    def _scaled_targets(self, kind: Array, log: Array) -> Array:
        """Return targets of mean 0 and variance 1, clipped or bent; failures are the slowest."""
        is_timed, is_known = kind == Known.TIME, kind != Known.PENDING
        if not is_timed.any():
            raise ValueError("nothing has a time yet")
        log, cap = levelled(log, is_timed, self._is_wide)
        target = np.where(is_timed | (kind == Known.BOUND), np.minimum(log, cap), cap)
        self._shift = float(target[is_known].mean())
        self._scale = float(target[is_known].std()) + 1e-6
        if self._prior is not None:  # the first trials are all among the best: of little spread
            num, trust = int(is_known.sum()), PRIOR_TRIALS
            mixed = trust * self._prior.spread**2 + num * self._scale**2
            self._scale = math.sqrt(mixed / (trust + num))
        target = (target - self._shift) / self._scale
        self._best = float(target[is_timed].min())
        return target

    def _rebuild(self, rows: list[int], codes: Array) -> None:
        """Factorise the rows' covariance under the hyperparameters of now."""
        from scipy.linalg import solve_triangular

        count = len(rows)
        capacity = math.ceil(count * REFIT_GROWTH) + 64
        self._rows, self._codes, self._priors = list(rows), codes, self._features(codes)
        own = self._kernel.covariance(codes, codes, (self._priors, self._priors)).astype(float)
        own[np.arange(count), np.arange(count)] += self._nugget
        self._lower = np.zeros((capacity, capacity))
        self._lower[:count, :count] = np.linalg.cholesky(own)
        self._v = np.zeros((capacity, len(self.pool)), dtype=np.float32)
        factor = self._lower[:count, :count].astype(np.float32)
        step = max(1, 4_000_000 // count)  # columns at a time: 16 MB
        for start in range(0, len(self.pool), step):
            part = slice(start, start + step)
            cross = self._kernel.covariance(
                self.pool[part], codes, (self._pool_priors[:, part], self._priors)
            )
            self._v[:count, part] = solve_triangular(
                factor, cross.T, lower=True, check_finite=False
            )
        self._explained = np.einsum("rc,rc->c", self._v[:count], self._v[:count]).astype(float)

    @property
    def _nugget(self) -> float:
        return self._kernel.noise + 1e-5  # covariances are float32

    def _along(self, codes: Array, priors: Array) -> Array:
        """Return `L^-1 K(rows, codes)`, float64."""
        from scipy.linalg import solve_triangular

        count = len(self._rows)
        cross = self._kernel.covariance(self._codes, codes, (self._priors, priors))
        found: Array = solve_triangular(
            self._lower[:count, :count], cross.astype(float), lower=True, check_finite=False
        )
        return found

    def _add(self, name: int, code: Array) -> None:
        """Append a row."""
        codes, t = code[None], len(self._rows)
        priors = self._features(codes)
        along = self._along(codes, priors)[:, 0]
        own = float(self._kernel.variance(priors)[0] + self._nugget - along @ along)
        pivot = math.sqrt(max(own, self._nugget / 2))
        cross = self._kernel.covariance(codes, self.pool, (priors, self._pool_priors))[0]
        row = (cross - along.astype(np.float32) @ self._v[:t]) / np.float32(pivot)
        self._v[t] = row
        self._lower[t, :t], self._lower[t, t] = along, pivot
        self._explained += row.astype(float) ** 2
        self._rows.append(name)
        self._codes = np.concatenate([self._codes, codes])
        self._priors = np.concatenate([self._priors, priors], axis=1)

    def _solve(self, kind: Array, target: Array) -> None:
        """Compute the weights of the rows of V in the mean and in the share that fails."""
        from scipy.linalg import solve_triangular

        count = len(self._rows)
        lower = self._lower[:count, :count]
        unsure = (kind == Known.PENDING) | (kind == Known.BOUND)
        if unsure.any():
            target = target.copy()
            target[unsure] = _imputed(lower @ lower.T, kind, target, unsure)
        self._weights = solve_triangular(lower, target, lower=True, check_finite=False)
        self._fail_weights = None
        if (kind == Known.FAILED).any():
            failed = (kind == Known.FAILED).astype(float)
            self._fail_share = float(failed[kind != Known.PENDING].mean())
            label = np.where(kind == Known.PENDING, 0.0, failed - self._fail_share)
            self._fail_weights = solve_triangular(lower, label, lower=True, check_finite=False)

    # ---- asking ---------------------------------------------------------------------------------

    def log_improvement(self, codes: Array | None = None, doubt: float = 1.0) -> Array:
        """Return the logarithm of the expected improvement, which is in logarithms of latency.

        Args:
            codes: of which configurations; None for the columns of the pool.
            doubt: by what deviations are multiplied; above 1 it leads further away.
        """
        from scipy.special import ndtr

        mean, deviation, fails = self._belief(codes)
        deviation = deviation * doubt
        z = (self._best - mean) / deviation
        density = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
        gain = deviation * (z * ndtr(z) + density)
        # Far below zero the two terms cancel; what is left is about density / z^2.
        far = np.log(deviation) - 0.5 * z * z - 2.0 * np.log(np.maximum(-z, 1.0)) - 0.919
        near = np.log(np.maximum(gain, 1e-300))
        log_gain: Array = np.where(z > -5.0, near, far) + np.log1p(-fails)
        return log_gain + math.log(self._scale)

    def expected(self) -> Array:
        """Return the expected logarithm of every column's latency, up to the clip."""
        found: Array = self._belief(None)[0] * self._scale + self._shift
        return found

    def _belief(self, codes: Array | None) -> tuple[Array, Array, Array]:
        """Return mean, deviation and probability of failing."""
        if codes is None:
            v: Array = self._v[: len(self._rows)]
            priors = self._pool_priors
            variance = self._kernel.variance(self._pool_priors) - self._explained
        else:
            priors = self._features(codes)
            v = self._along(codes, priors)
            variance = self._kernel.variance(priors) - (v**2).sum(axis=0)
        mean = (self._weights.astype(v.dtype) @ v).astype(float) + _mean_of(priors)
        fails = np.zeros(len(mean))
        if self._fail_weights is not None:
            share = self._fail_share + (self._fail_weights.astype(v.dtype) @ v).astype(float)
            fails = np.clip(share, 0.0, 0.99)
        return mean, np.sqrt(np.maximum(variance, 1e-8)), fails

    def remaining(
        self, untried: Array, shares: Sequence[float], rng: np.random.Generator
    ) -> Remaining:
        """Judge by draws from the posterior what the untried columns may still bring.

        Args:
            untried: [columns], bool.
            shares: 0.01 for "within 1 % of the optimum".
            rng: draws from the posterior.
        """
        mean, _, fails = self._belief(None)
        with np.errstate(divide="ignore"):
            hope = np.where(untried, self.log_improvement(), -np.inf)
        few = min(MAX_JOINT, int(untried.sum()))
        if few == 0:
            return Remaining(0.0, dict.fromkeys(shares, 1.0))
        top = np.argpartition(-hope, few - 1)[:few]
        priors = self._pool_priors[:, top]
        v = self._v[: len(self._rows), top].astype(float)
        own = self._kernel.covariance(self.pool[top], self.pool[top], (priors, priors)).astype(
            float
        )
        own -= v.T @ v
        own[np.arange(few), np.arange(few)] += self._kernel.noise + 1e-4
        factor = np.linalg.cholesky(own)
        draws = factor @ rng.standard_normal((few, NUM_DRAWS)) * CAUTION
        works = rng.random((few, NUM_DRAWS)) >= fails[top, None]
        least = np.where(works, mean[top, None] + draws, np.inf).min(axis=0)
        gain = np.maximum(self._best - least, 0.0) * self._scale  # of the logarithm
        within = {share: float(np.mean(gain <= math.log1p(share))) for share in shares}
        return Remaining(float(np.mean(-np.expm1(-gain))), within)


def _mean_of(priors: Array) -> Array | float:
    """Return the mean of the process before anything is known: the first prior, if any."""
    found: Array | float = priors[0] if len(priors) else 0.0
    return found


def _imputed(own: Array, kind: Array, target: Array, unsure: Array) -> Array:
    """Return what is expected at the unsure rows given the sure ones; a bound lies below it."""
    from scipy.linalg import solve_triangular
    from scipy.special import log_ndtr

    sure = ~unsure
    factor = np.linalg.cholesky(own[np.ix_(sure, sure)])
    cross = solve_triangular(factor, own[np.ix_(sure, unsure)], lower=True)
    mean = cross.T @ solve_triangular(factor, target[sure], lower=True)
    deviation = np.sqrt(np.maximum(np.diag(own)[unsure] - (cross**2).sum(axis=0), 1e-8))
    bound = np.where(kind[unsure] == Known.BOUND, target[unsure], -np.inf)
    z = np.clip((bound - mean) / deviation, -30.0, 30.0)
    hazard = np.exp(-0.5 * z * z - 0.5 * math.log(2.0 * math.pi) - log_ndtr(-z))
    return np.asarray(np.maximum(mean + deviation * hazard, bound))


def _spread_of(target: Array, count: int) -> Array:
    """Return at most `count` positions in order: the smallest half, and others evenly."""
    if len(target) <= count:
        return np.arange(len(target))
    by_target = np.argsort(target, kind="stable")
    best, rest = by_target[: count // 2], np.sort(by_target[count // 2 :])
    even = rest[np.linspace(0, len(rest) - 1, count - len(best)).astype(int)]
    return np.sort(np.concatenate([best, even]))
