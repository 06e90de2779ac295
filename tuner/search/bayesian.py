"""The configuration that promises most, by a Gaussian process over all of them or over a pool."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from functools import cache

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from threadpoolctl import ThreadpoolController

from tuner.search.covariance import Encoding
from tuner.search.drawn import CENSORED, decoded, params_of
from tuner.search.proposers import Random
from tuner.search.surrogate import Known, Remaining, Surrogate
from tuner.search.transfer import Expectation, Informed, Source
from tuner.space.search_space import SearchSpace

__all__ = ["JUDGE_EVERY", "Bayesian"]

NUM_FIRST = 12  # trials that are spread over the space before the model is asked
NUM_WARM = 5  # the fastest elsewhere, tried first
NUM_AGAINST = 2  # merely spread, tried between the first of them, to see whether these are fast
NUM_CONTEST = 3  # of the fastest elsewhere that must beat the spread ones
POOL = 20_000  # configurations judged at every suggestion: all, or a pool of a larger space
JUDGE_EVERY = 10  # trials from one judgement of what is left to the next
NUM_JUDGED = 2  # judgements that must agree; one was right in 78 % where it said 90 %
MAX_STEPS = 6  # from neighbour to neighbour, at one suggestion
BEAM = 10  # configurations that are walked from at once
NEAR_SHARE = 0.3  # of a pool that is drawn anew: one or two changes away from the fastest trials
KEPT_SHARE = 0.2  # what promised most in the pool before
NUM_CENTRES = 3  # fastest trials that a pool is drawn near
PATIENCE = 8  # trials without a better one, after which every second is chosen in doubt
DOUBT = 2.5  # times the deviation that the model claims
DOUBT_WIDE = 1.5  # the same of the model that remembers the first trials' spread
PROGRESS = 0.002  # by which a time must be less to be better


@cache
def _blas() -> ThreadpoolController:
    import scipy.linalg  # noqa: F401  # it brings a BLAS of its own, which is to be found

    return ThreadpoolController()


def _one_thread() -> AbstractContextManager[object]:
    """Keep linear algebra on one core.

    The others compile meanwhile, and threads that wait for busy cores made a suggestion ten times
    slower; nor do sums then depend on the number of cores.
    """
    limit: AbstractContextManager[object] = _blas().limit(limits=1, user_api="blas")
    return limit


class Bayesian:
    """The configuration with the largest expected improvement, by a Gaussian process.

    Every untried configuration is judged. Where there are more than `POOL`, a pool of as many
    stands for them, which is drawn anew whenever the model is fitted, a part of it near the
    fastest trials, and the search climbs from its best, and from the best trial, to better
    neighbours.

    A model that has mostly seen one family may be sure that no other is better. So when nothing
    better was found for some trials, every second one is chosen in doubt: by turns by the model
    with larger deviations, and by one that remembers how families compared at the start.
    """

    def __init__(self, space: SearchSpace, seed: int, sources: Sequence[Source] = ()) -> None:
        self._space = space
        self._sources = sources
        self._rng = np.random.default_rng([seed, 2])
        self._random = Random(space, seed)
        self._encoding = Encoding(
            [parameter.values for parameter in space.parameters],
            [parameter.when is not None for parameter in space.parameters],
        )
        self._is_whole = space.is_listed and space.num_feasible <= POOL
        self._model: Surrogate | Informed | None = None  # made at the first question
        self._wide: Surrogate | None = None  # made when the search is stuck
        self._pool = np.empty(0, dtype=np.int64)
        self._first: list[int] = []
        self._spread: list[int] = []  # what comes first where the sources mislead
        self._contest: tuple[list[int], list[int]] | None = None  # the sources' best, the others
        self._seen: dict[int, int] = {}  # position and number of its trial, as first seen
        self._is_told = False  # whether the model knows anything
        self._judged: list[tuple[int, Remaining]] = []  # trials, and what was left then
        self._numbers: set[int] = set()  # of the trials that were looked at for good
        self._neighbours: dict[int, np.ndarray] = {}  # of positions that were climbed from

    def propose(self, study: Study, trial: FrozenTrial, tried: Set[int]) -> int:
        """Return the position to try next."""
        with _one_thread():
            return self._proposed(study, trial, tried)

    def _proposed(self, study: Study, trial: FrozenTrial, tried: Set[int]) -> int:
        if self._model is None:
            self._model = self._made(tried)
        is_known = self._observed(study, trial)
        self._judge_sources(study)
        for position in self._first:
            if position not in tried:
                return position
        if not is_known:
            return self._random.propose(study, trial, tried)
        if not self._is_whole and self._model.is_fit_due(len(self._seen)):
            self._look_around(study, tried)
        model, doubt = self._model, 1.0
        self._tell(model, study)
        since = self._since_progress(study)
        if since >= PATIENCE and since % 4 == 0:
            model, doubt = self._second_opinion(), DOUBT_WIDE
            self._tell(model, study)
        elif since >= PATIENCE and since % 4 == 2:
            doubt = DOUBT
        is_tried = np.isin(self._pool, np.fromiter(tried, dtype=np.int64, count=len(tried)))
        if is_tried.all():
            return self._random.propose(study, trial, tried)
        merit = np.where(is_tried, -np.inf, model.log_improvement(doubt=doubt))
        if self._is_whole:
            return int(self._pool[np.argmax(merit)])
        return self._climbed(model, doubt, merit, study, tried)

    def _made(self, tried: Set[int]) -> Surrogate | Informed:
        if self._is_whole:
            self._pool = np.arange(self._space.num_feasible)
        else:
            self._pool = np.sort(self._space.sample(POOL, self._rng))
        codes = self._codes(self._pool)
        before = self._codes(np.array(sorted(tried), dtype=np.int64))
        cold = Surrogate(self._encoding, codes)
        spread = [int(self._pool[i]) for i in cold.first(NUM_FIRST, self._rng, before)]
        if not self._sources:
            self._first = spread
            return cold
        expectation = Expectation(self._space, self._encoding, self._sources)
        best = [int(self._pool[i]) for i in expectation.best(codes, NUM_WARM)]
        others = [position for position in spread if position not in best]
        rivals = others[:NUM_AGAINST]
        # By turns: where the sources mislead, the first spread one is known after two trials.
        pairs = [*zip(best, rivals, strict=False)]
        self._first = [position for pair in pairs for position in pair] + best[len(pairs) :]
        self._spread = others[NUM_AGAINST:]  # then as many as without sources
        self._contest = best[:NUM_CONTEST], rivals
        return Informed(self._encoding, codes, expectation)

    def _codes(self, positions: np.ndarray) -> np.ndarray:
        return self._encoding.codes(self._space.rows(positions))

    def _judge_sources(self, study: Study) -> None:
        """Start as if without sources where their best are slower here than the spread ones."""
        if self._contest is None:
            return
        trials = study.get_trials(deepcopy=False)
        best_us: list[float] = []
        for side in self._contest:
            told = [trials[self._seen[p]] for p in side if p in self._seen]
            if len(told) < len(side) or not all(t.state.is_finished() for t in told):
                return
            best_us.append(min((t.value for t in told if t.value is not None), default=math.inf))
        self._contest = None
        if best_us[0] > best_us[1]:
            assert isinstance(self._model, Informed)
            self._model.distrust()
            self._first = self._spread

    def _look_around(self, study: Study, tried: Set[int]) -> None:
        """Draw the pool anew: near the fastest trials, what promised most, and anything."""
        assert self._model is not None
        near = [self._near(at) for at in self._centres(study)]
        near += [self._near(int(at)) for ring in near[:1] for at in ring]  # two changes away
        around = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *near]))
        around = self._rng.permutation(around)[: int(POOL * NEAR_SHARE)]
        kept = np.empty(0, dtype=np.int64)
        if self._is_told:
            order = np.argsort(-self._model.log_improvement(), kind="stable")
            kept = self._pool[order[: int(POOL * KEPT_SHARE)]]
        fresh = self._space.sample(POOL - len(around) - len(kept), self._rng)
        self._pool = np.unique(np.concatenate([around, kept, fresh]))
        self._model.look_at(self._codes(self._pool))
        if self._wide is not None:
            self._wide.look_at(self._codes(self._pool))

    def _near(self, position: int) -> np.ndarray:
        if position not in self._neighbours:
            self._neighbours[position] = self._space.neighbour_positions(position)
        return self._neighbours[position]

    def _since_progress(self, study: Study) -> int:
        """Return how many trials came after the last that was better than those before."""
        trials = study.get_trials(deepcopy=False)
        best_us, since = math.inf, 0
        for number in self._seen.values():
            value_us = trials[number].value
            since += 1
            if value_us is not None and value_us < best_us * (1.0 - PROGRESS):
                best_us, since = value_us, 0
        return since

    def _second_opinion(self) -> Surrogate:
        """Return the model that remembers how other families compared at the start."""
        if self._wide is None:
            self._wide = Surrogate(self._encoding, self._codes(self._pool), is_wide=True)
        return self._wide

    def remaining(self, study: Study, shares: Sequence[float]) -> Remaining | None:
        """Judge what is left; see `FeasibleSampler.remaining`.

        A single judgement is too sure of itself while the model has not seen what it does not
        expect, so that the least hopeful of the last `NUM_JUDGED` counts, at least
        `JUDGE_EVERY` trials from each other.
        """
        if self._model is None or not self._observed(study, None):
            return None
        with _one_thread():
            return self._remaining(self._model, study, shares)

    def _remaining(
        self, model: Surrogate | Informed, study: Study, shares: Sequence[float]
    ) -> Remaining | None:
        self._tell(model, study)
        tried = list(self._seen)
        if len(tried) <= NUM_FIRST:
            return None
        # Random numbers of their own: asking this must draw none of the suggestions'.
        rng = np.random.default_rng(len(tried))
        now = model.remaining(~np.isin(self._pool, tried), shares, rng)
        if not self._judged or len(tried) >= self._judged[-1][0] + JUDGE_EVERY:
            self._judged.append((len(tried), now))
        last = [judgement for _, judgement in self._judged[-NUM_JUDGED:]]
        if len(last) < NUM_JUDGED:
            return None
        last.append(now)
        within = {share: min(j.within.get(share, 0.0) for j in last) for share in shares}
        return Remaining(max(judgement.improvement for judgement in last), within)

    def _observed(self, study: Study, current: FrozenTrial | None) -> bool:
        """Find the trials' positions; False where nothing has a time yet."""
        trials = study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.number in self._numbers:
                continue
            if current is not None and trial.number == current.number:
                continue
            drawn = trial.params or trial.system_attrs.get("fixed_params", {})  # enqueued
            position = self._space.index(decoded(drawn, self._space))
            if position is not None:
                self._seen.setdefault(position, trial.number)
            if position is not None or trial.state.is_finished():
                self._numbers.add(trial.number)
        return any(_known(trials[number])[0] is Known.TIME for number in self._seen.values())

    def _tell(self, model: Surrogate | Informed, study: Study) -> None:
        """Tell the model what is known; something has a time."""
        trials = study.get_trials(deepcopy=False)
        known = [_known(trials[number]) for number in self._seen.values()]
        kinds, logs = zip(*known, strict=True)
        names = list(self._seen)
        model.observe(names, self._codes(np.array(names)), kinds, logs)
        self._is_told = True

    def _climbed(
        self,
        model: Surrogate | Informed,
        doubt: float,
        merit: np.ndarray,
        study: Study,
        tried: Set[int],
    ) -> int:
        """Walk from the best of the pool and of the trials to neighbours that promise more.

        Args:
            model: what judges.
            doubt: see `Surrogate.log_improvement`.
            merit: of the pool's columns.
            study: whose fastest trials are starts, too.
            tried: where not to end.
        """
        is_tried = np.fromiter(tried, np.int64, len(tried))
        top = np.argsort(-merit, kind="stable")[:BEAM]
        at, merits = self._pool[top], merit[top]
        centres = self._centres(study)
        for _ in range(MAX_STEPS):
            near = np.unique(np.concatenate([self._near(int(p)) for p in [*at, *centres]]))
            near = near[~np.isin(near, is_tried) & ~np.isin(near, at)]
            if not len(near):
                break
            all_at = np.concatenate([at, near])
            found = model.log_improvement(self._codes(near), doubt)
            all_merits = np.concatenate([merits, found])
            top = np.argsort(-all_merits, kind="stable")[:BEAM]
            has_risen = top.max() >= len(at)
            at, merits, centres = all_at[top], all_merits[top], []
            if not has_risen:
                break
        return int(at[0])

    def _centres(self, study: Study) -> list[int]:
        """Return the positions of the fastest trials."""
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        fastest = sorted(done, key=lambda trial: trial.value)[:NUM_CENTRES]
        found = [self._space.index(params_of(trial, self._space)) for trial in fastest]
        return [position for position in found if position is not None]


def _known(trial: FrozenTrial) -> tuple[Known, float]:
    """Return what is known of a trial's configuration, and the logarithm of its latency."""
    if trial.state is TrialState.COMPLETE:
        kind = Known.BOUND if trial.user_attrs.get(CENSORED) else Known.TIME
        return kind, math.log(max(trial.value, 1e-9))
    return (Known.FAILED if trial.state is TrialState.PRUNED else Known.PENDING), 0.0
