"""Which of the untried feasible configurations is next, without a model of our own.

    Random    any of them
    Grid      the first of them
    Inner     what an Optuna sampler draws, or the nearest

Another one is a class and a line in `PROPOSERS`, both here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from tuner.search.optuna_codec import decoded, distributions
from tuner.space.search_space import SearchSpace
from tuner.trial import Value

__all__ = ["PROPOSERS", "Grid", "Inner", "Proposer", "Random", "Tried"]

MAX_DRAWS = 10  # of the inner sampler, before the nearest feasible configuration is taken
MAX_NEAR = 100_000  # configurations looked at for the nearest; 0.3 s to unpack, once

Tried = Mapping[int, FrozenTrial]  # by config id, the first trial that has it


class Proposer(Protocol):
    """Chooses the next configuration."""

    def propose(self, study: Study, trial: FrozenTrial, tried: Tried) -> int:
        """Return a config id of the space that is not in `tried`; there is one."""


class Random:
    """Any untried configuration: of any kind, and of its kind any, all equally likely."""

    def __init__(self, space: SearchSpace, seed: int) -> None:
        self._num_feasible = space.num_feasible
        self._kinds = space.kinds
        self._rng = np.random.default_rng(seed)

    def propose(self, study: Study, trial: FrozenTrial, tried: Tried) -> int:
        """Return the config id to try next."""
        if len(tried) * 2 > self._num_feasible:
            left = [i for i in range(self._num_feasible) if i not in tried]
            return left[int(self._rng.integers(len(left)))]
        while True:  # of a kind that is small all may be tried: soon another one is drawn
            kind = self._kinds[int(self._rng.integers(len(self._kinds)))]
            config_id = kind[int(self._rng.integers(len(kind)))]
            if config_id not in tried:
                return config_id


class Grid:
    """The first untried configuration, in the order of declaration."""

    def __init__(self, space: SearchSpace) -> None:
        self._num_feasible = space.num_feasible

    def propose(self, study: Study, trial: FrozenTrial, tried: Tried) -> int:
        """Return the config id to try next."""
        return next(config_id for config_id in range(self._num_feasible) if config_id not in tried)


class Inner:
    """What an Optuna sampler draws jointly; a random configuration while it draws nothing.

    A draw that is infeasible or tried is drawn again, `MAX_DRAWS` times; then the untried
    feasible configuration with the fewest parameters different from the last draw is taken,
    a random one of several.
    """

    def __init__(self, space: SearchSpace, inner: BaseSampler, seed: int) -> None:
        self._space = space
        self._inner = inner
        self._random = Random(space, seed)
        self._rng = np.random.default_rng([seed, 1])
        self._drawable = {
            name: distribution
            for name, distribution in distributions(space).items()
            if not distribution.single()
        }
        self._near: tuple[np.ndarray, np.ndarray] | None = None

    def propose(self, study: Study, trial: FrozenTrial, tried: Tried) -> int:
        """Return the config id to try next."""
        drawn: dict[str, Value] = {}
        for _ in range(MAX_DRAWS):
            draw = self._inner.sample_relative(study, trial, self._drawable)
            if not draw:
                return self._random.propose(study, trial, tried)
            drawn = {p.name: draw.get(p.name, p.values[0]) for p in self._space.parameters}
            params = self._space.complete(decoded(drawn, self._space))
            config_id = None if params is None else self._space.index(params)
            if config_id is not None and config_id not in tried:
                return config_id
        return self._nearest(drawn, tried)

    def _nearest(self, drawn: Mapping[str, Value], tried: Tried) -> int:
        """Return the untried config id with the smallest Hamming distance from `drawn`."""
        if self._near is None:
            config_ids = np.sort(self._space.sample(MAX_NEAR, self._rng))
            self._near = config_ids, self._space.rows(config_ids)
        config_ids, rows = self._near
        is_untried = ~np.isin(config_ids, list(tried))
        if not is_untried.any():  # all that is looked at is tried, but not all there is
            return next(i for i in range(self._space.num_feasible) if i not in tried)
        point = [
            p.values.index(drawn[p.name]) if drawn[p.name] in p.values else len(p.values)
            for p in self._space.parameters
        ]
        distances = np.where(is_untried, (rows != np.array(point)).sum(axis=1), len(point) + 1)
        nearest = np.flatnonzero(distances == distances.min())
        return int(config_ids[nearest[int(self._rng.integers(len(nearest)))]])


PROPOSERS: Mapping[str, Callable[[SearchSpace, int], Proposer]] = {  # by the sampler's name
    "tpe": lambda space, seed: Inner(space, TPESampler(seed=seed), seed),  # Optuna's defaults
    "random": Random,
    "grid": lambda space, seed: Grid(space),
}
