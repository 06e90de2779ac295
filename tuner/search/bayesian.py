"""The configuration that promises most, by a Gaussian process over all of them or over a pool."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence, Set
from functools import cache

import numpy as np
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from threadpoolctl import ThreadpoolController

from tuner.search.drawn import CENSORED, decoded
from tuner.search.encoding import Encoding
from tuner.search.firsts import Opening, first_columns
from tuner.search.levels import Known
from tuner.search.pools import Pool
from tuner.search.proposers import Random
from tuner.search.surrogate import Remaining, Surrogate
from tuner.search.transfer import Expectation, Informed, Source
from tuner.space.search_space import SearchSpace

__all__ = ["JUDGE_EVERY", "Bayesian"]

NUM_FIRST = 12  # trials that are spread over the space before the model is asked
FEWEST_FIRST = 2  # of them of each kind
NUM_WARM = 5  # the fastest elsewhere, tried first
JUDGE_EVERY = 10  # trials from one judgement of what is left to the next
NUM_JUDGED = 4  # judgements that must agree; two were right in 75 % where they said 90 %
FEWEST_JUDGED = 2  # while there are no more
PATIENCE = 8  # trials without a better one, after which every second one looks wider
HOPELESS = 3  # trials of a kind, all failed, after which the others come first
PROGRESS = 0.002  # by which the logarithm of a time must be less to be better
NUM_CENTRES = 3  # fastest trials that a pool is drawn near


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

    Where there are too many to judge, a pool stands for them, which is drawn anew whenever the
    model is fitted, and the search climbs from its best, and from the best trials, to better
    neighbours.

    A model that has mostly seen one family may be sure that no other is better. So when nothing
    better was found for some trials, every second one is chosen by how families compared at the
    start (`Surrogate.observe`).

    A template that is wrong by its values is so with all of its parameters. So a kind of which
    `HOPELESS` trials failed and none did not is asked for when nothing else is left.
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
        self._is_told = False  # whether the model knows anything
        self._seen: dict[int, int] = {}  # position and number of its trial, as first seen
        self._known: list[tuple[Known, float]] = []  # of each of them: what, the logarithm
        self._numbers: set[int] = set()  # of the trials that were looked at for good
        self._judged: list[tuple[int, Remaining]] = []  # trials, and what was left then

    def propose(self, study: Study, trial: FrozenTrial, tried: Set[int]) -> int:
        """Return the position to try next."""
        with _blas().limit(limits=1, user_api="blas"):
            return self._proposed(study, trial, tried)

    def _proposed(self, study: Study, trial: FrozenTrial, tried: Set[int]) -> int:
        if self._model is None:
            self._model = self._made(tried)
        model, pool = self._model, self._pool
        is_known = self._observed(study, trial)
        if self._opening.is_misled(dict(zip(self._seen, self._known, strict=True))):
            assert isinstance(model, Informed)
            model.distrust()
        aside = self._hopeless()
        for position in self._opening.positions:
            if position not in tried and not any(position in kind for kind in aside):
                return position
        if not is_known:
            return self._random.propose(study, trial, tried)
        fastest = np.argsort(self._logs(), kind="stable")[:NUM_CENTRES]
        centres = [list(self._seen)[i] for i in fastest]
        if not pool.is_whole and model.is_fit_due(len(self._seen)):
            pool.draw_anew(centres, model.log_improvement() if self._is_told else None)
            model.look_at(self._codes(pool.positions))
        since = self._since_progress()
        self._tell(model, is_wide=since >= PATIENCE and since % 2 == 0)
        is_tried = np.isin(pool.positions, list(tried))
        if is_tried.all():
            return self._random.propose(study, trial, tried)
        is_out = is_tried | _is_within(pool.positions, aside)
        if is_out.all():
            aside, is_out = [], is_tried
        merit = np.where(is_out, -np.inf, model.log_improvement())
        if pool.is_whole:
            return int(pool.positions[np.argmax(merit)])

        def merit_of(near: np.ndarray) -> np.ndarray:
            promised = model.log_improvement(self._codes(near))
            return np.where(_is_within(near, aside), -np.inf, promised)

        return pool.climbed(merit, merit_of, centres, tried)

    def _hopeless(self) -> list[range]:
        """Return the kinds of which all that is known failed, unless all kinds are such."""
        found = []
        for kind in self._kinds:
            known = zip(self._seen, self._known, strict=True)
            own = [what for position, (what, _) in known if position in kind]
            own = [what for what in own if what is not Known.PENDING]
            if len(own) >= HOPELESS and all(what is Known.FAILED for what in own):
                found.append(kind)
        return found if len(found) < len(self._kinds) else []

    def _made(self, tried: Set[int]) -> Surrogate | Informed:
        positions = self._pool.positions
        codes = self._codes(positions)
        before = self._codes(np.array(sorted(tried), dtype=np.int64))
        spread = [int(positions[i]) for i in self._spread(codes, before)]
        if not self._sources:
            self._opening = Opening(spread)
            return Surrogate(self._encoding, codes)
        expectation = Expectation(self._space, self._encoding, self._sources)
        best = [int(positions[i]) for i in expectation.best(codes, NUM_WARM)]
        self._opening = Opening(spread, best)
        return Informed(self._encoding, codes, expectation)

    def _spread(self, codes: np.ndarray, before: np.ndarray) -> list[int]:
        """Return columns to try first, by turns of each kind."""
        kinds, positions = self._kinds, self._pool.positions
        found = []
        for kind in kinds:
            inside = _is_within(positions, [kind])
            count = max(FEWEST_FIRST, NUM_FIRST // len(kinds))
            own = before if len(kinds) == 1 else before[before[:, 0] == codes[inside][0, 0]]
            first = first_columns(codes[inside], self._encoding, count, self._rng, own)
            found.append([int(i) for i in np.flatnonzero(inside)[first]])
        turns = itertools.zip_longest(*found)
        return [column for turn in turns for column in turn if column is not None]

    def _codes(self, positions: np.ndarray) -> np.ndarray:
        return self._encoding.codes(self._space.rows(positions))

    def _logs(self) -> np.ndarray:
        """Return the logarithms of times, infinite where there is none."""
        return np.array([log if kind is Known.TIME else math.inf for kind, log in self._known])

    def _since_progress(self) -> int:
        """Return how many trials came after the last that was better than those before."""
        least = np.minimum.accumulate(np.append(math.inf, self._logs()))
        better = np.flatnonzero(least[1:] < least[:-1] - PROGRESS)
        return int(len(self._known) - 1 - better[-1])

    def remaining(self, study: Study, shares: Sequence[float]) -> Remaining | None:
        """Judge what is left; see `FeasibleSampler.remaining`.

        A single judgement is too sure of itself while the model has not seen what it does not
        expect, so that the least hopeful of the last `NUM_JUDGED` counts, at least
        `JUDGE_EVERY` trials from each other.
        """
        if self._model is None or not self._observed(study, None):
            return None
        with _blas().limit(limits=1, user_api="blas"):
            return self._remaining(self._model, shares)

    def _remaining(self, model: Surrogate | Informed, shares: Sequence[float]) -> Remaining | None:
        self._tell(model)
        tried = list(self._seen)
        if len(tried) <= NUM_FIRST:
            return None
        # Random numbers of their own: asking this must draw none of the suggestions'.
        rng = np.random.default_rng(len(tried))
        now = model.remaining(~np.isin(self._pool.positions, tried), shares, rng)
        if not self._judged or len(tried) >= self._judged[-1][0] + JUDGE_EVERY:
            self._judged.append((len(tried), now))
        last = [judgement for _, judgement in self._judged[-NUM_JUDGED:]]
        if len(last) < FEWEST_JUDGED:
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
        self._known = [_known(trials[number]) for number in self._seen.values()]
        return any(kind is Known.TIME for kind, _ in self._known)

    def _tell(self, model: Surrogate | Informed, is_wide: bool = False) -> None:
        """Tell the model what is known; something has a time."""
        kinds, logs = zip(*self._known, strict=True)
        names = list(self._seen)
        model.observe(names, self._codes(np.array(names)), kinds, logs, is_wide)
        self._is_told = True


def _is_within(positions: np.ndarray, kinds: Sequence[range]) -> np.ndarray:
    is_within = np.zeros(len(positions), dtype=bool)
    for kind in kinds:
        is_within |= (positions >= kind.start) & (positions < kind.stop)
    return is_within


def _known(trial: FrozenTrial) -> tuple[Known, float]:
    """Return what is known of a trial's configuration, and the logarithm of its latency."""
    if trial.state is TrialState.COMPLETE:
        kind = Known.BOUND if trial.user_attrs.get(CENSORED) else Known.TIME
        return kind, math.log(max(trial.value, 1e-9))
    return (Known.FAILED if trial.state is TrialState.PRUNED else Known.PENDING), 0.0
