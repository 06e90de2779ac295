"""Optuna samplers that draw only feasible configurations, each of them once.

    study -> FeasibleSampler -> Proposer: which of the untried feasible positions next?
                                   |-- Surrogate the one that promises most, by a model
                                   |-- Random    any of them
                                   |-- Grid      the first of them
                                   '-- Inner     what an Optuna sampler draws, or the nearest

A study holds one categorical distribution per parameter; a parameter that is absent has the
choice `ABSENT`, which no word of a config can be. A sampler of our own is one more `Proposer`
and one more line in `SAMPLERS`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import BaseTrial, FrozenTrial, TrialState

from tuner.errors import InputError, did_you_mean
from tuner.search.surrogate import Encoding, Known, Remaining, Surrogate
from tuner.search.transfer import Expectation, Source
from tuner.space.search_space import SearchSpace
from tuner.trial import Params, Value

__all__ = [
    "ABSENT",
    "CENSORED",
    "JUDGE_EVERY",
    "SAMPLERS",
    "FeasibleSampler",
    "Proposer",
    "SpaceExhausted",
    "distributions",
    "encoded",
    "make_sampler",
    "params_of",
]

CENSORED = "is_censored"  # user attribute of a trial whose value is a lower bound
ABSENT = "(absent)"  # parentheses: never a word of a config
MAX_DRAWS = 10  # of the inner sampler, before the nearest feasible configuration is taken
NUM_FIRST = 12  # trials that are spread over the space before the model is asked
NUM_FIRST_WARM = 3  # the fastest elsewhere, against as many that are merely spread
MAX_WHOLE = 100_000  # configurations that are all judged at every suggestion
POOL = 20_000  # drawn for a space with more; what is near the best is judged besides
JUDGE_EVERY = 10  # trials from one judgement of what is left to the next
NUM_JUDGED = 3  # judgements that must agree; one was right in 78 % where it said 90 %
MAX_STEPS = 3  # from neighbour to neighbour, at one suggestion
MAX_NEAR = 100_000  # configurations looked at for the nearest; 0.3 s to unpack, once


class SpaceExhausted(Exception):
    """Every feasible configuration has been tried; the search is complete."""


class Proposer(Protocol):
    """Chooses the next configuration."""

    def propose(self, study: Study, trial: FrozenTrial, tried: Set[int]) -> int:
        """Return a position in `space.feasible` that is not in `tried`; there is one."""


# ---- configurations as a study holds them ---------------------------------------------------


def distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    """Return the study's search space: a categorical distribution per parameter."""
    return {
        parameter.name: CategoricalDistribution(
            parameter.values if parameter.when is None else (*parameter.values, ABSENT)
        )
        for parameter in space.parameters
    }


def encoded(params: Mapping[str, Value], space: SearchSpace) -> dict[str, Value]:
    """Return `params` with `ABSENT` for each parameter that they do not have."""
    return {parameter.name: params.get(parameter.name, ABSENT) for parameter in space.parameters}


def params_of(trial: BaseTrial, space: SearchSpace) -> Params:
    """Return a trial's configuration, without what is absent."""
    return _decoded(trial.params, space)


def _decoded(drawn: Mapping[str, Value], space: SearchSpace) -> Params:
    names = [parameter.name for parameter in space.parameters]
    return {name: drawn[name] for name in names if drawn.get(name, ABSENT) != ABSENT}


# ---- the sampler that a study is given ------------------------------------------------------


class FeasibleSampler(BaseSampler):  # type: ignore[misc]  # optuna is not followed
    """Draws what a proposer chooses among the feasible configurations that no trial has.

    Trials of every state count as tried, running ones too.

    Raises (when asked for a trial):
        SpaceExhausted: nothing is left; the trial that was asked for is told as failed.
    """

    def __init__(self, space: SearchSpace, proposer: Proposer) -> None:
        self._space = space
        self._proposer = proposer
        self._positions: dict[int, int | None] = {}  # of the finished trials, by number

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the whole space: it is always sampled jointly."""
        return distributions(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Choose a feasible configuration that no trial has, or take the one enqueued."""
        enqueued: dict[str, Any] = trial.system_attrs.get("fixed_params", {})
        if self._space.index(_decoded(enqueued, self._space)) is not None:
            return enqueued
        tried = self._tried(study, trial)
        if len(tried) == self._space.num_feasible:
            study.tell(trial.number, state=TrialState.FAIL)  # not left running for ever
            raise SpaceExhausted
        position = self._proposer.propose(study, trial, tried)
        return encoded(self._space.feasible[position], self._space)

    def remaining(self, study: Study, shares: Sequence[float]) -> Remaining | None:
        """Judge what the untried configurations may still bring.

        Args:
            study: as it is now.
            shares: 0.01 for the probability that the best is within 1 % of the optimum.

        Returns:
            None where the sampler has no model, or was not asked three times yet, each some
            ten trials after the other: the least of three probabilities is given.
        """
        if isinstance(self._proposer, _Surrogate):
            return self._proposer.remaining(study, shares)
        return None

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Refuse: a parameter that is not in the space has no feasible values."""
        raise InputError(f"{param_name} is not a parameter of the search space")

    def _tried(self, study: Study, current: FrozenTrial) -> set[int]:
        tried = set()
        for trial in study.get_trials(deepcopy=False):
            if trial.number == current.number:
                continue
            if trial.number not in self._positions:
                drawn = trial.params or trial.system_attrs.get("fixed_params", {})  # enqueued
                position = self._space.index(_decoded(drawn, self._space))
                if not trial.state.is_finished():  # it may yet get its parameters
                    tried.add(position)
                    continue
                self._positions[trial.number] = position
            tried.add(self._positions[trial.number])
        return {position for position in tried if position is not None}


# ---- proposers ------------------------------------------------------------------------------


class _Surrogate:
    """The configuration with the largest expected improvement, by a Gaussian process.

    Every untried configuration is judged. Where there are more than `MAX_WHOLE`, a pool of `POOL`
    stands for them, and the search climbs from its best, and from the best trial, to better
    neighbours.
    """

    def __init__(self, space: SearchSpace, seed: int, sources: Sequence[Source] = ()) -> None:
        self._space = space
        self._sources = sources
        self._rng = np.random.default_rng([seed, 2])
        self._random = _Random(space, seed)
        self._encoding = Encoding(
            [parameter.values for parameter in space.parameters],
            [parameter.when is not None for parameter in space.parameters],
        )
        self._is_whole = space.is_listed and space.num_feasible <= MAX_WHOLE
        self._model: Surrogate | None = None  # made at the first question
        self._pool = np.empty(0, dtype=np.int64)
        self._first: list[int] = []
        self._seen: dict[int, int] = {}  # position and number of its trial, as first seen
        self._judged: list[tuple[int, Remaining]] = []  # trials, and what was left then
        self._numbers: set[int] = set()  # of the trials that were looked at for good
        self._neighbours: dict[int, np.ndarray] = {}  # of positions that were climbed from

    def propose(self, study: Study, trial: FrozenTrial, tried: Set[int]) -> int:
        if self._model is None:
            self._model = self._made()
        if len(tried) < len(self._first):
            for position in self._first:
                if position not in tried:
                    return position
        if not self._observe(self._model, study, trial):
            return self._random.propose(study, trial, tried)
        if self._sources and self._is_misled(study):
            self._sources, self._model = (), None
            return self.propose(study, trial, tried)
        is_tried = np.isin(self._pool, np.fromiter(tried, dtype=np.int64, count=len(tried)))
        if is_tried.all():
            return self._random.propose(study, trial, tried)
        merit = np.where(is_tried, -np.inf, self._model.log_improvement())
        best = int(np.argmax(merit))
        if self._is_whole:
            return int(self._pool[best])
        return self._climbed(int(self._pool[best]), float(merit[best]), study, tried)

    def _made(self) -> Surrogate:
        if self._is_whole:
            self._pool = np.arange(self._space.num_feasible)
        else:
            self._pool = np.sort(self._space.sample(POOL, self._rng))
        codes = self._encoding.codes(self._space.rows(self._pool))
        if not self._sources:
            model = Surrogate(self._encoding, codes)
            first = model.first(NUM_FIRST, self._rng)
        else:
            expectation = Expectation(self._space, self._encoding, self._sources)
            model = Surrogate(self._encoding, codes, expectation)
            first = expectation.best(codes, NUM_FIRST_WARM)
            # Against as many that are merely spread it shows whether the sources mean anything.
            spread = Surrogate(self._encoding, codes).first(NUM_FIRST, self._rng)
            first += [column for column in spread if column not in first][:NUM_FIRST_WARM]
        self._first = [int(self._pool[column]) for column in first]
        return model

    def _is_misled(self, study: Study) -> bool:
        """Whether the sources' best are slower here than the spread ones, all being known."""
        trials = study.get_trials(deepcopy=False)
        told = [trials[self._seen[p]] for p in self._first if p in self._seen]
        if len(told) < len(self._first) or not all(t.state.is_finished() for t in told):
            return False
        taken_us = [math.inf if t.value is None else t.value for t in told]
        return min(taken_us[:NUM_FIRST_WARM]) > min(taken_us[NUM_FIRST_WARM:])

    def remaining(self, study: Study, shares: Sequence[float]) -> Remaining | None:
        """Judge what is left; see `FeasibleSampler.remaining`.

        A single judgement is too sure of itself while the model has not seen what it does not
        expect, so that the least hopeful of the last `NUM_JUDGED` counts, at least
        `JUDGE_EVERY` trials from each other.
        """
        if self._model is None or not self._observe(self._model, study, None):
            return None
        tried = list(self._seen)
        if len(tried) <= NUM_FIRST:
            return None
        # Random numbers of their own: asking this must draw none of the suggestions'.
        rng = np.random.default_rng(len(tried))
        now = self._model.remaining(~np.isin(self._pool, tried), shares, rng)
        if not self._judged or len(tried) >= self._judged[-1][0] + JUDGE_EVERY:
            self._judged.append((len(tried), now))
        last = [judgement for _, judgement in self._judged[-NUM_JUDGED:]]
        if len(last) < NUM_JUDGED:
            return None
        last.append(now)
        within = {share: min(j.within.get(share, 0.0) for j in last) for share in shares}
        return Remaining(max(judgement.improvement for judgement in last), within)

    def _observe(self, model: Surrogate, study: Study, current: FrozenTrial | None) -> bool:
        """Tell the model what is known; False where nothing has a time yet."""
        trials = study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.number in self._numbers:
                continue
            if current is not None and trial.number == current.number:
                continue
            drawn = trial.params or trial.system_attrs.get("fixed_params", {})  # enqueued
            position = self._space.index(_decoded(drawn, self._space))
            if position is not None:
                self._seen.setdefault(position, trial.number)
            if position is not None or trial.state.is_finished():
                self._numbers.add(trial.number)
        if not self._seen:
            return False
        known = [_known(trials[number]) for number in self._seen.values()]
        kinds, logs = zip(*known, strict=True)
        if Known.TIME not in kinds:
            return False
        names = list(self._seen)
        model.observe(names, self._encoding.codes(self._space.rows(np.array(names))), kinds, logs)
        return True

    def _climbed(self, start: int, merit: float, study: Study, tried: Set[int]) -> int:
        """Walk from the best of the pool, or of the trials, to neighbours that promise more."""
        assert self._model is not None
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        fastest = min(done, key=lambda trial: trial.value)
        here = self._space.index(params_of(fastest, self._space))
        at, best = start, (start, merit)
        for origin in (here, start):
            at = origin if origin is not None else start
            for _ in range(MAX_STEPS):
                if at not in self._neighbours:
                    self._neighbours[at] = self._space.neighbour_positions(at)
                near = self._neighbours[at]
                near = near[~np.isin(near, np.fromiter(tried, np.int64, len(tried)))]
                if not len(near):
                    break
                merits = self._model.log_improvement(self._encoding.codes(self._space.rows(near)))
                at = int(near[np.argmax(merits)])
                if merits.max() <= best[1]:
                    break
                best = at, float(merits.max())
        return best[0]


def _known(trial: FrozenTrial) -> tuple[Known, float]:
    """Return what is known of a trial's configuration, and the logarithm of its latency."""
    if trial.state is TrialState.COMPLETE:
        kind = Known.BOUND if trial.user_attrs.get(CENSORED) else Known.TIME
        return kind, math.log(max(trial.value, 1e-9))
    return (Known.FAILED if trial.state is TrialState.PRUNED else Known.PENDING), 0.0


class _Random:
    """Any untried configuration, all of them equally likely."""

    def __init__(self, space: SearchSpace, seed: int) -> None:
        self._num_feasible = space.num_feasible
        self._rng = np.random.default_rng(seed)

    def propose(self, study: Study, trial: FrozenTrial, tried: Set[int]) -> int:
        if len(tried) * 2 > self._num_feasible:
            left = [i for i in range(self._num_feasible) if i not in tried]
            return left[int(self._rng.integers(len(left)))]
        while (position := int(self._rng.integers(self._num_feasible))) in tried:
            pass
        return position


class _Grid:
    """The first untried configuration, in the order of declaration."""

    def __init__(self, space: SearchSpace) -> None:
        self._num_feasible = space.num_feasible

    def propose(self, study: Study, trial: FrozenTrial, tried: Set[int]) -> int:
        return next(position for position in range(self._num_feasible) if position not in tried)


class _Inner:
    """What an Optuna sampler draws jointly; a random configuration while it draws nothing.

    A draw that is infeasible or tried is drawn again, `MAX_DRAWS` times; then the untried
    feasible configuration with the fewest parameters different from the last draw is taken,
    a random one of several.
    """

    def __init__(self, space: SearchSpace, inner: BaseSampler, seed: int) -> None:
        self._space = space
        self._inner = inner
        self._random = _Random(space, seed)
        self._rng = np.random.default_rng([seed, 1])
        self._drawable = {
            name: distribution
            for name, distribution in distributions(space).items()
            if not distribution.single()
        }
        self._near: tuple[np.ndarray, np.ndarray] | None = None

    def propose(self, study: Study, trial: FrozenTrial, tried: Set[int]) -> int:
        fixed = {p.name: p.values[0] for p in self._space.parameters if len(p.values) == 1}
        drawn: dict[str, Value] = {}
        for _ in range(MAX_DRAWS):
            draw = self._inner.sample_relative(study, trial, self._drawable)
            if not draw:
                return self._random.propose(study, trial, tried)
            drawn = {**fixed, **draw}
            params = self._space.complete(_decoded(drawn, self._space))
            position = None if params is None else self._space.index(params)
            if position is not None and position not in tried:
                return position
        return self._nearest(drawn, tried)

    def _nearest(self, drawn: Mapping[str, Value], tried: Set[int]) -> int:
        """Return the untried position with the smallest Hamming distance from `drawn`."""
        positions, rows = self._candidates()
        is_untried = ~np.isin(positions, list(tried))
        if not is_untried.any():  # all that is looked at is tried, but not all there is
            return next(i for i in range(self._space.num_feasible) if i not in tried)
        point = [
            p.values.index(drawn[p.name]) if drawn[p.name] in p.values else len(p.values)
            for p in self._space.parameters
        ]
        distances = np.where(is_untried, (rows != np.array(point)).sum(axis=1), len(point) + 1)
        nearest = np.flatnonzero(distances == distances.min())
        return int(positions[nearest[int(self._rng.integers(len(nearest)))]])

    def _candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """Return positions and, a row each, the coordinates of their configurations."""
        if self._near is None:
            positions = np.arange(self._space.num_feasible)
            if len(positions) > MAX_NEAR:
                positions = np.sort(self._rng.choice(positions, MAX_NEAR, replace=False))
            rows = np.array([self._space.coordinates(int(i)) for i in positions], dtype=np.int32)
            self._near = positions, rows
        return self._near


# ---- the samplers by name -------------------------------------------------------------------


def _tpe(space: SearchSpace, seed: int) -> Proposer:
    # constant_liar: several trials run at once, and TPE should not propose beside them again.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        inner = TPESampler(seed=seed, multivariate=True, constant_liar=True)
    return _Inner(space, inner, seed)


SAMPLERS: Mapping[str, Callable[[SearchSpace, int], Proposer]] = {
    "surrogate": _Surrogate,
    "tpe": _tpe,
    "random": _Random,
    "grid": lambda space, seed: _Grid(space),
}


def make_sampler(
    name: str, space: SearchSpace, seed: int, sources: Sequence[Source] = ()
) -> BaseSampler:
    """Return the sampler of that name; equal seeds and outcomes give equal sequences.

    Args:
        name: one of `SAMPLERS`.
        space: what to draw from.
        seed: of its random numbers.
        sources: what `surrogate` starts from; the others cannot use it.

    Raises:
        InputError: there is no such sampler, or a source does not fit the space.
    """
    if name not in SAMPLERS:
        hint = did_you_mean(name, list(SAMPLERS))
        known = f"unknown sampler {name!r}\n  known: {', '.join(SAMPLERS)}"
        raise InputError(known + (f"\n  {hint}" if hint else ""))
    if sources and name == "surrogate":
        return FeasibleSampler(space, _Surrogate(space, seed, sources))
    return FeasibleSampler(space, SAMPLERS[name](space, seed))
