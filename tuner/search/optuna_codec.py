"""Configurations as a study holds them, and back.

A study holds one categorical distribution per parameter; a parameter that is absent has the
choice `ABSENT`, which no word of a config can be.
"""

from __future__ import annotations

from collections.abc import Mapping

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import BaseTrial

from tuner.space.search_space import SearchSpace
from tuner.trial import Params, Value

__all__ = ["ABSENT", "CENSORED", "decoded", "distributions", "encoded", "params_of"]

CENSORED = "is_censored"  # user attribute of a trial whose value is a lower bound
ABSENT = "(absent)"  # parentheses: never a word of a config


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
    return decoded(trial.params, space)


def decoded(drawn: Mapping[str, Value], space: SearchSpace) -> Params:
    """Return a configuration from parameters as drawn, without what is absent."""
    names = [parameter.name for parameter in space.parameters]
    return {name: drawn[name] for name in names if drawn.get(name, ABSENT) != ABSENT}
