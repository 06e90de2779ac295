"""The configuration that promises most, by a Gaussian process over all of them or over a pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from threadpoolctl import ThreadpoolController

from tuner.search.encoding import Encoding
from tuner.search.firsts import Opening, first_by_turns
from tuner.search.levels import Known
from tuner.search.optuna_codec import CENSORED
from tuner.search.pools import Pool
from tuner.search.proposers import Random, Tried
from tuner.search.surrogate import Remaining, Surrogate
from tuner.search.transfer import Expectation, Informed, Source
from tuner.space.search_space import SearchSpace

__all__ = ["JUDGE_EVERY", "NUM_FIRST", "Bayesian"]

NUM_FIRST = 12  # trials that are spread over the space before the model is asked
NUM_WARM = 5  # the fastest elsewhere, tried first
JUDGE_EVERY = 10  # trials from one judgement of what is left to the next
NUM_JUDGED = 4  # judgements that must agree; two were right in 75 % where they said 90 %
FEWEST_JUDGED = 2  # while there are no more
PATIENCE = 8  # trials without a better one, after which every second one looks wider
HOPELESS = 3  # trials of a kind, all failed, after which the others come first
PROGRESS = 0.002  # by which the logarithm of a time must be less to be better
NUM_CENTRES = 3  # fastest trials that a pool is drawn near

Seen = Mapping[int, tuple[Known, float]]  # by config_id: what is known, the logarithm of the time


@cache
def _blas() -> ThreadpoolController:
    """Return what keeps linear algebra on one core.

    The others compile meanwhile, and threads that wait for busy cores made a suggestion ten times
    slower; nor do sums then depend on the number of cores.
    """
    import scipy.linalg  # noqa: F401  # it brings a BLAS of its own, which is to be found

    return ThreadpoolController()


class Bayesian:
    """The untried configuration with the largest expected improvement, by a Gaussian process.

    Where there are too many to judge, a pool stands for them (`pools`). A model that has mostly
    seen one family may be sure that no other is better: when nothing better was found for some
    trials, every second one is chosen by how families compared at the start. A template that is
    wrong by its values is so with all of its parameters: a kind of which `HOPELESS` trials failed
    and none did not is asked for when nothing else is left.
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
        self._kinds = space.kinds
        self._pool = Pool(space, self._rng)
        self._model: Surrogate | Informed | None = None  # made at the first question
        self._opening = Opening([])
        self._is_reported = False  # whether the model knows anything
        self._judged: list[tuple[int, Remaining]] = []  # trials, and what was left then

    def propose(self, study: Study, trial: FrozenTrial, tried: Tried) -> int:
        """Return the config id to try next."""
        with _blas().limit(limits=1, user_api="blas"):
            found = self._proposed(_seen(tried))
        return self._random.propose(study, trial, tried) if found is None else found

    def _proposed(self, known: Seen) -> int | None:
        """Return the config id that promises most, or None where nothing can tell."""
        if self._model is None:
            self._model = self._made(list(known))
        model, pool = self._model, self._pool
        if self._opening.is_misled(known):
            assert isinstance(model, Informed)
            model.distrust()
        aside = self._hopeless(known)
        for config_id in self._opening.config_ids:
            if config_id not in known and not any(config_id in kind for kind in aside):
                return config_id
        logs = _logs(known)
        if np.isinf(logs).all():
            return None
        tried = list(known)
        centres = [tried[i] for i in np.argsort(logs, kind="stable")[:NUM_CENTRES]]
        if not pool.is_whole and model.is_fit_due(len(known)):
            pool.draw_anew(centres, model.log_improvement() if self._is_reported else None)
            model.look_at(self._codes(pool.config_ids))
        since = _since_progress(logs)
        self._tell(model, known, is_wide=since >= PATIENCE and since % 2 == 0)
        is_tried = np.isin(pool.config_ids, tried)
        if is_tried.all():
            return None
        is_out = is_tried | _is_within(pool.config_ids, aside)
        if is_out.all():
            aside, is_out = [], is_tried
        merit = np.where(is_out, -np.inf, model.log_improvement())
        if pool.is_whole:
            return int(pool.config_ids[np.argmax(merit)])

        def merit_of(near: np.ndarray) -> np.ndarray:
            promised = model.log_improvement(self._codes(near))
            return np.where(_is_within(near, aside), -np.inf, promised)

        return pool.climbed(merit, merit_of, centres, tried)

    def _hopeless(self, known: Seen) -> list[range]:
        """Return the kinds of which all that is known failed, unless all kinds are such."""
        found = []
        for kind in self._kinds:
            own = [what for config_id, (what, _) in known.items() if config_id in kind]
            own = [what for what in own if what is not Known.PENDING]
            if len(own) >= HOPELESS and set(own) == {Known.FAILED}:
                found.append(kind)
        return found if len(found) < len(self._kinds) else []

    def _made(self, tried: Sequence[int]) -> Surrogate | Informed:
        config_ids = self._pool.config_ids
        codes = self._codes(config_ids)
        before = self._codes(np.array(sorted(tried), dtype=np.int64))
        kinds = [np.flatnonzero(_is_within(config_ids, [kind])) for kind in self._kinds]
        first = first_by_turns(codes, kinds, self._encoding, NUM_FIRST, self._rng, before)
        spread = [int(config_ids[i]) for i in first]
        if not self._sources:
            self._opening = Opening(spread)
            return Surrogate(self._encoding, codes)
        expectation = Expectation(self._space, self._encoding, self._sources)
        best = [int(config_ids[i]) for i in expectation.best(codes, NUM_WARM)]
        self._opening = Opening(spread, best)
        return Informed(self._encoding, codes, expectation)

    def _codes(self, config_ids: np.ndarray) -> np.ndarray:
        return self._encoding.codes(self._space.rows(config_ids))

    def remaining(self, tried: Tried, shares: Sequence[float]) -> Remaining | None:
        """Judge what is left; see `FeasibleSampler.remaining`."""
        known = _seen(tried)
        if self._model is None or len(known) <= NUM_FIRST or np.isinf(_logs(known)).all():
            return None
        is_untried = ~np.isin(self._pool.config_ids, list(known))
        # Random numbers of their own: asking this must draw none of the suggestions'.
        rng = np.random.default_rng(len(known))
        with _blas().limit(limits=1, user_api="blas"):
            self._tell(self._model, known)
            now = self._model.remaining(is_untried, shares, rng)
        if not self._judged or len(known) >= self._judged[-1][0] + JUDGE_EVERY:
            self._judged.append((len(known), now))
        # One is too sure of itself while the model has not seen what it does not expect.
        last = [judgement for _, judgement in self._judged[-NUM_JUDGED:]]
        if len(last) < FEWEST_JUDGED:
            return None
        last.append(now)
        within = {share: min(j.within.get(share, 0.0) for j in last) for share in shares}
        return Remaining(max(judgement.improvement for judgement in last), within)

    def _tell(self, model: Surrogate | Informed, known: Seen, is_wide: bool = False) -> None:
        """Tell the model what is known; something has a time."""
        kinds, logs = zip(*known.values(), strict=True)
        names = list(known)
        model.observe(names, self._codes(np.array(names)), kinds, logs, is_wide)
        self._is_reported = True


def _is_within(config_ids: np.ndarray, kinds: Sequence[range]) -> np.ndarray:
    is_within = np.zeros(len(config_ids), dtype=bool)
    for kind in kinds:
        is_within |= (config_ids >= kind.start) & (config_ids < kind.stop)
    return is_within


def _logs(known: Seen) -> np.ndarray:
    """Return the logarithms of times, infinite where there is none."""
    return np.array([log if kind is Known.TIME else math.inf for kind, log in known.values()])


def _since_progress(logs: np.ndarray) -> int:
    """Return how many trials came after the last that was better than those before."""
    least = np.minimum.accumulate(np.append(math.inf, logs))
    better = np.flatnonzero(least[1:] < least[:-1] - PROGRESS)
    return int(len(logs) - 1 - better[-1])


def _seen(tried: Tried) -> Seen:
    def known(trial: FrozenTrial) -> tuple[Known, float]:
        if trial.state is TrialState.COMPLETE:
            kind = Known.BOUND if trial.user_attrs.get(CENSORED) else Known.TIME
            return kind, math.log(max(trial.value, 1e-9))
        return (Known.FAILED if trial.state is TrialState.PRUNED else Known.PENDING), 0.0

    return {config_id: known(trial) for config_id, trial in tried.items()}
