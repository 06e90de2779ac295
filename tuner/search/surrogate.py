"""A Gaussian process over a finite space: how fast is each configuration, and does it work.

    Surrogate    observe(what is known of some) -> log_improvement() of each
                                                -> remaining() of the search

Times are modelled as the logarithm of the latency, with the slow ones brought near the others
(`levels`). How alike two configurations are says `covariance`.

A configuration that failed is as good as the slowest, and lowers the probability that similar
ones work. One that was stopped early is known to be slower than a bound, and one in flight is
believed to be what is expected of it, so that a second suggestion goes elsewhere.

Sources: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, chapters 2 and 5;
Jones, Schonlau and Welch, "Efficient global optimization of expensive black-box functions", 1998
(expected improvement); Ginsbourger et al., "Kriging is well-suited to parallelize optimization",
2010 (the believer); Hutter et al., "Bayesian optimization with censored response data", 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.search.covariance import Kernel
from tuner.search.encoding import Array, Encoding, Prior
from tuner.search.levels import Known, levelled
from tuner.search.rows import ROOM, Rows

__all__ = ["Remaining", "Surrogate"]

MAX_FIT_ROWS = 250  # rows that hyperparameters are fitted to; a likelihood takes 5 ms there
MAX_ELEMENTS = 60_000_000  # of V, in float32: 240 MB
MAX_ROWS = 800  # of V, however few the columns
BOOST = 2.0  # of exploration: times the deviation that the model claims, when it looks far away
MAX_JOINT = 300  # columns whose posterior is drawn jointly; all others are worth less
NUM_DRAWS = 400
CAUTION = 1.3  # times the deviation: with 1.22, right in 89 % where 90 % was said
PRIOR_TRIALS = 20  # that the spread of a prior counts for
UNALIGNED = 0.5  # of the targets' deviation: slower, until shown otherwise


@dataclass(frozen=True, slots=True)
class Remaining:
    """What the rest of a search is expected to bring.

    Attributes:
        improvement: expected share by which the best time would fall if all were tried.
        within: probability that the best so far is within each given share of the optimum.
    """

    improvement: float
    within: dict[float, float]


class Surrogate:
    """What is believed of every column of a pool, given what is known of some configurations.

    Args:
        encoding: of the space.
        pool: [columns, parameters] codes of the configurations to choose from.
        prior: expectations from elsewhere; small is fast.

    Attributes:
        log_evidence: logarithm of how probable the latencies seen are, at the most probable
            hyperparameters, up to a constant that is the same for any prior.
    """

    def __init__(self, encoding: Encoding, pool: Array, prior: Prior | None = None) -> None:
        self._encoding = encoding
        self._prior = prior
        self._kernel = Kernel(encoding, 0 if prior is None else prior.num_features + 1)
        self._rows: Rows | None = None  # until something is observed
        self._boost = 1.0  # times the deviation
        self._dropped = 0  # how many of those observed are no rows
        self.log_evidence = 0.0
        self._shift, self._scale, self._best = 0.0, 1.0, 0.0
        self._weights = np.zeros(0)  # of the rows of V in the mean
        self._fail_weights: Array | None = None
        self._fail_share = 0.0
        self.look_at(pool)

    def is_fit_due(self, num: int) -> bool:
        """Whether everything is computed anew when `num` configurations are observed."""
        if self._rows is None or num >= self._next_fit:
            return True
        return num - self._dropped > self._rows.capacity

    def look_at(self, pool: Array) -> None:
        """Take other columns to choose from; all is computed anew at the next `observe`."""
        self._columns = self._points(pool).astype(np.float32)
        self._max_rows = int(np.clip(MAX_ELEMENTS // len(pool), 300, MAX_ROWS))
        self._next_fit = 0

    def _points(self, codes: Array) -> Array:
        """Return what the kernel compares; with a prior the last column is 1, for the level."""
        points = self._encoding.points(codes)
        if self._prior is None:
            return points
        return np.column_stack([points, self._prior.features(codes).T, np.ones(len(codes))])

    def _mean_of(self, points: Array) -> Array | float:
        """Return the mean before anything is known: the first prior, if any."""
        if self._prior is None:
            return UNALIGNED * points[:, -1] if self._encoding.num_linear else 0.0
        first: Array = points[:, -1 - self._prior.num_features]
        return first

    # ---- learning -------------------------------------------------------------------------------

    def observe(
        self,
        names: Sequence[int],
        codes: Array,
        kinds: Sequence[Known],
        logs: Sequence[float],
        is_wide: bool = False,
    ) -> None:
        """Take what is known now; it may only grow, and a pending one may become known.

        Args:
            names: a number for each configuration, in the order of asking, each once.
            codes: [configurations, parameters].
            kinds: what is known of each; there is a time among them.
            logs: natural logarithm of latency or bound; ignored for the other kinds.
            is_wide: look further away: with larger deviations, and with times clipped no lower
                than the first ones were. A search that stays in one family otherwise clips all
                others to that family's own slow ones, and forgets which were nearly as good.
        """
        kind = np.array(kinds)
        target = self._scaled_targets(kind, np.array(logs, dtype=float), is_wide)
        self._boost = BOOST if is_wide else 1.0
        if self.is_fit_due(len(names)):
            self._fit(codes, target, kind == Known.PENDING)
            rows = _spread_of(np.where(kind == Known.PENDING, -np.inf, target), self._max_rows)
            self._dropped = len(names) - len(rows)
            points = self._points(codes[rows])
            self._rows = Rows(self._kernel, self._columns, [names[i] for i in rows], points)
        held = self._held
        for i in range(len(held.names) + self._dropped, len(names)):
            if names[i] not in held.names:
                held.add(names[i], self._points(codes[i : i + 1]))
        at = {name: i for i, name in enumerate(names)}
        inside = np.array([at[name] for name in held.names])
        self._solve(kind[inside], target[inside] - self._mean_of(held.points))

    def _fit(self, codes: Array, target: Array, is_pending: Array) -> None:
        known = np.flatnonzero(~is_pending)
        some = known[_spread_of(target[known], MAX_FIT_ROWS)]
        points = self._points(codes[some])
        self._kernel.fit(points, target[some] - self._mean_of(points))
        self.log_evidence = self._kernel.log_probability - len(some) * math.log(self._scale)
        self._next_fit = max(len(codes) + 1, int(len(codes) * ROOM))

    @property
    def _held(self) -> Rows:
        assert self._rows is not None  # something was observed
        return self._rows

    def _scaled_targets(self, kind: Array, log: Array, is_wide: bool) -> Array:
        """Return targets of mean 0 and variance 1, clipped or bent; failures are the slowest."""
        target, is_known = levelled(kind, log, is_wide), kind != Known.PENDING
        self._shift = float(target[is_known].mean())
        self._scale = float(target[is_known].std()) + 1e-6
        if self._prior is not None:  # the first trials are all among the best: of little spread
            num, trust = int(is_known.sum()), PRIOR_TRIALS
            mixed = trust * self._prior.spread**2 + num * self._scale**2
            self._scale = math.sqrt(mixed / (trust + num))
        target = (target - self._shift) / self._scale
        self._best = float(target[kind == Known.TIME].min())
        return target

    def _solve(self, kind: Array, target: Array) -> None:
        """Compute the weights of the rows of V in the mean and in the share that fails."""
        held = self._held
        unsure = (kind == Known.PENDING) | (kind == Known.BOUND)
        if unsure.any():
            bound = np.where(kind == Known.BOUND, target, -np.inf)
            target = held.imputed(target, unsure, bound)
        self._weights = held.solved(target)
        self._fail_weights = None
        if (kind == Known.FAILED).any():
            failed = (kind == Known.FAILED).astype(float)
            self._fail_share = float(failed[kind != Known.PENDING].mean())
            self._fail_weights = held.solved(
                np.where(kind == Known.PENDING, 0.0, failed - self._fail_share)
            )

    # ---- asking ---------------------------------------------------------------------------------

    def log_improvement(self, codes: Array | None = None) -> Array:
        """Return the logarithm of the expected improvement, which is in logarithms of latency.

        Args:
            codes: of which configurations; None for the columns of the pool.
        """
        from scipy.special import ndtr

        mean, deviation, fails = self._belief(codes)
        deviation *= self._boost
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
            points, v, explained = self._columns, self._held.v, self._held.explained
        else:
            points = self._points(codes)
            v = self._held.along(points)
            explained = (v**2).sum(axis=0)
        variance = self._kernel.variance(points) - explained
        mean = (self._weights.astype(v.dtype) @ v).astype(float) + self._mean_of(points)
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
        v, points = self._held.v[:, top].astype(float), self._columns[top].astype(float)
        own = self._kernel.covariance(points, points)
        own -= v.T @ v
        own[np.arange(few), np.arange(few)] += self._kernel.noise + 1e-4
        # V is float32: where the rows explain nearly all, what is left may be a little negative
        # in some direction, of which there is no Cholesky factor.
        values, vectors = np.linalg.eigh(own)
        factor = vectors * np.sqrt(np.maximum(values, 0.0))
        draws = factor @ rng.standard_normal((few, NUM_DRAWS)) * CAUTION
        works = rng.random((few, NUM_DRAWS)) >= fails[top, None]
        least = np.where(works, mean[top, None] + draws, np.inf).min(axis=0)
        gain = np.maximum(self._best - least, 0.0) * self._scale  # of the logarithm
        within = {share: float(np.mean(gain <= math.log1p(share))) for share in shares}
        return Remaining(float(np.mean(-np.expm1(-gain))), within)


def _spread_of(target: Array, count: int) -> Array:
    """Return at most `count` config ids in order: the smallest half, and others evenly."""
    if len(target) <= count:
        return np.arange(len(target))
    by_target = np.argsort(target, kind="stable")
    best, rest = by_target[: count // 2], np.sort(by_target[count // 2 :])
    even = rest[np.linspace(0, len(rest) - 1, count - len(best)).astype(int)]
    return np.sort(np.concatenate([best, even]))
