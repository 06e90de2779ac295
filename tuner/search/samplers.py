"""Optuna samplers that draw only feasible configurations, each of them once.

study -> FeasibleSampler -> Proposer: which of the untried feasible config ids next?
                               |-- Bayesian    the one that promises most, by a model
                               '-- PROPOSERS   without a model of our own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from tuner.errors import InputError, did_you_mean
from tuner.search.bayesian import Bayesian
from tuner.search.optuna_codec import decoded, distributions, encoded
from tuner.search.proposers import PROPOSERS, Proposer
from tuner.search.surrogate import Remaining
from tuner.search.transfer import Source
from tuner.space.search_space import SearchSpace

__all__ = ["SAMPLERS", "FeasibleSampler", "SpaceExhausted", "make_sampler"]


class SpaceExhausted(Exception):
    """Every feasible configuration has been tried; the search is complete."""


class FeasibleSampler(BaseSampler):  # type: ignore[misc]  # optuna is not followed
    """Draws what a proposer chooses among the feasible configurations that no trial has.

    Trials of every state count as tried, running ones too.

    Raises (when asked for a trial):
        SpaceExhausted: nothing is left; the trial that was asked for is reported as failed.
    """

    def __init__(self, space: SearchSpace, proposer: Proposer) -> None:
        self._space = space
        self._proposer = proposer
        self._first: dict[int, int] = {}  # by config id, the number of the first trial that has it
        self._placed: set[int] = set()  # numbers of trials whose config id is known for good

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
        if self._space.index(decoded(enqueued, self._space)) is not None:
            return enqueued
        tried = self._tried(study, trial)
        if len(tried) == self._space.num_feasible:
            study.tell(trial.number, state=TrialState.FAIL)  # not left running for ever
            raise SpaceExhausted
        config_id = self._proposer.propose(study, trial, tried)
        return encoded(self._space.at(config_id), self._space)

    def remaining(self, study: Study, shares: Sequence[float]) -> Remaining | None:
        """Judge what the untried configurations may still bring.

        Args:
            study: as it is now.
            shares: 0.01 for the probability that the best is within 1 % of the optimum.

        Returns:
            None where the sampler has no model, or was not asked twice yet, some ten trials apart:
            the least of the last four probabilities is given.
        """
        if isinstance(self._proposer, Bayesian):
            return self._proposer.remaining(self._tried(study), shares)
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

    def _tried(self, study: Study, current: FrozenTrial | None = None) -> dict[int, FrozenTrial]:
        trials = study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.number in self._placed or (current and trial.number == current.number):
                continue
            drawn = trial.params or trial.system_attrs.get("fixed_params", {})  # enqueued
            config_id = self._space.index(decoded(drawn, self._space))
            if config_id is not None:
                self._first.setdefault(config_id, trial.number)
            if config_id is not None or trial.state.is_finished():  # or it may yet get parameters
                self._placed.add(trial.number)
        return {config_id: trials[number] for config_id, number in self._first.items()}


SAMPLERS: Mapping[str, Callable[[SearchSpace, int], Proposer]]  # by name
SAMPLERS = {"surrogate": Bayesian, **PROPOSERS}


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
        lines = [f"unknown sampler {name!r}", f"known: {', '.join(SAMPLERS)}"]
        hint = did_you_mean(name, list(SAMPLERS))
        raise InputError("\n  ".join([*lines, hint] if hint else lines))
    warm = sources and name == "surrogate"
    proposer = Bayesian(space, seed, sources) if warm else SAMPLERS[name](space, seed)
    return FeasibleSampler(space, proposer)
