"""The finite set of feasible configurations: look one up, walk to its neighbours, encode it.

A configuration is a row of *value indices*: by parameter, the place of its value, or the place
after the last value where the parameter is absent. A *config id* is the place of a feasible
configuration in the set. Whatever works on many configurations at once (samplers) works on
NumPy arrays of value indices and config ids, and need not know what the parameters are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tuner.errors import InputError
from tuner.space.constraints import (
    Bools,
    Constraint,
    Parameter,
    ValueIndices,
    base_of,
    check_declared,
    index_type,
)
from tuner.space.diagram import Diagram, Listed
from tuner.space.enumeration import Walk, explain_nothing
from tuner.trial import Params, Value

__all__ = ["SearchSpace"]

MAX_LISTED = 2_000_000  # configurations held as a list; more are found through the diagram

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Parameters, constraints, and every configuration that obeys them.

    Below `MAX_LISTED` configurations the config ids are in the order of declaration (the first
    parameter varies slowest); above, in an order of their own.

    Attributes:
        rejections: for each constraint, how many combinations of values it was the first to
            reject; its sum with `num_feasible` is `num_cartesian` where nothing is conditional.
    """

    parameters: tuple[Parameter, ...]
    rejections: Mapping[str, int]
    _set: Diagram | Listed = field(repr=False)

    @classmethod
    def build(
        cls,
        parameters: Sequence[Parameter],
        constraints: Sequence[Constraint],
        facts: Mapping[str, Value],
    ) -> SearchSpace:
        """Find the feasible configurations.

        Raises:
            ExpressionError: a `when` or constraint uses an unknown name or cannot be computed.
            InputError: two parameters share a name, a parameter has no values or one of them
                twice, conditions go round in a circle, nothing is feasible (with what each
                constraint rejects), or it would take too long (with what to constrain).
        """
        check_declared(parameters, constraints, facts)
        walk = Walk(parameters, constraints, facts)
        diagram = walk.run()
        if diagram is None:
            raise InputError(explain_nothing(walk))
        rejections: dict[str, int] = {}
        for constraint, count in zip(constraints, walk.rejected, strict=True):
            rejections[constraint.why] = rejections.get(constraint.why, 0) + round(count)
        found: Diagram | Listed = diagram
        if diagram.num_feasible <= MAX_LISTED:
            bases = [base_of(parameter) for parameter in parameters]
            found = Listed(diagram.all_rows(), bases)
        return cls(tuple(parameters), rejections, found)

    @classmethod
    def listed(cls, parameters: Sequence[Parameter], rows: Ints) -> SearchSpace:
        """Make the space in which exactly the given configurations are feasible.

        Args:
            parameters: as declared; one with `when` may be absent.
            rows: int (n, d), each row different: the value indices of the configurations.
        """
        bases = [base_of(parameter) for parameter in parameters]
        held = Listed(rows.astype(index_type(bases)), bases)
        return cls(tuple(parameters), {}, held)

    @property
    def num_cartesian(self) -> int:
        """How many combinations of values there are before conditions and constraints."""
        return math.prod(len(parameter.values) for parameter in self.parameters)

    @property
    def num_feasible(self) -> int:
        """How many configurations are feasible; at least 1."""
        return self._set.num_feasible

    @property
    def is_listed(self) -> bool:
        """Whether `rows()` may be asked for all configurations at once."""
        return isinstance(self._set, Listed)

    @property
    def values(self) -> dict[str, tuple[Value, ...]]:
        """The values of each parameter, by its name."""
        return {parameter.name: parameter.values for parameter in self.parameters}

    # ---- many at once: value indices and config ids -----------------------------------------

    def rows(self, config_ids: NDArray[np.integer] | None = None) -> ValueIndices:
        """Return the value indices of configurations, as signed integers (n, d).

        Args:
            config_ids: int (n,), each below `num_feasible`; all of them when None.

        Raises:
            InputError: all are asked for, of a space that is too large to list.
        """
        if config_ids is not None:
            return self._set.rows(np.asarray(config_ids, dtype=np.int64))
        if isinstance(self._set, Listed):
            return self._set.value_indices
        raise InputError(
            f"{self.num_feasible:,} feasible configurations are too many to list "
            f"(at most {MAX_LISTED:,})\n  hint: add a constraint, or use a sampler that draws"
        )

    def config_ids(self, rows: NDArray[np.integer]) -> Ints:
        """Return the config ids (n,) of rows of value indices, -1 for none."""
        rows = np.asarray(rows, dtype=np.int64)
        bases = np.array([base_of(parameter) for parameter in self.parameters])
        is_index: Bools = np.all((rows >= 0) & (rows < bases), axis=1)
        found = self._set.config_ids(np.where(is_index[:, None], rows, 0))
        return np.where(is_index, found, -1)

    @property
    def kinds(self) -> list[range]:
        """The config ids by what the first parameter is, where that decides which others exist.

        Templates, say: one with more parameters has a thousand times as many configurations, and
        is not a thousand times as likely to have the best one. Else all are of one kind.
        """
        whole = [range(self.num_feasible)]
        if not self._decides(0):
            return whole
        ends = [int(end) for end in np.cumsum(self._set.counts(0)) if end]
        found = [range(a, b) for a, b in itertools.pairwise([0, *dict.fromkeys(ends)])]
        edges = self.rows(np.array([[kind[0], kind[-1]] for kind in found]).ravel())[:, 0]
        # A space that is too large to list may have another order.
        is_in_order = bool((edges[::2] == edges[1::2]).all())
        return found if is_in_order else whole

    def sample(self, num: int, rng: np.random.Generator) -> Ints:
        """Draw different config ids, as many of each kind; fewer where there are fewer."""
        drawn: list[Ints] = []
        for left, kind in zip(itertools.count(len(self.kinds), -1), sorted(self.kinds, key=len)):
            share = -(-(num - sum(map(len, drawn))) // left)  # of what smaller kinds leave
            drawn.append(kind.start + _distinct(len(kind), share, rng))
        return rng.permutation(np.concatenate(drawn))[:num]

    def neighbour_ids(self, config_id: int) -> Ints:
        """Return the config ids of the feasible configurations one change away, ascending.

        A change gives one parameter another value. What cannot exist beside the rest then
        vanishes; what appears takes the first values that are feasible.
        """
        row = self.rows(np.array([config_id]))[0].astype(np.int64)
        changed = []
        for column, parameter in enumerate(self.parameters):
            here, num = int(row[column]), len(parameter.values)
            if here == num:  # absent
                continue
            for value_index in range(num):
                if value_index != here:
                    other = row.copy()
                    other[column] = value_index
                    changed.append((column, other))
        if not changed:
            return np.empty(0, dtype=np.int64)
        found = self.config_ids(np.stack([other for _, other in changed]))
        missing = [i for i in np.flatnonzero(found < 0) if self._decides(changed[i][0])]
        for i in missing:  # the change may make others vanish or appear
            params = self.complete(self.params_of(changed[i][1]))
            place = None if params is None else self.index(params)
            found[i] = -1 if place is None else place
        return np.unique(found[found >= 0])

    def _decides(self, column: int) -> bool:
        """Whether the existence of another parameter depends on this one."""
        name = self.parameters[column].name
        return any(p.when is not None and name in p.when.names for p in self.parameters)

    def count_by(self, name: str) -> dict[Value, int]:
        """Return how many feasible configurations have each value of a parameter, if any."""
        column = [parameter.name for parameter in self.parameters].index(name)
        counts = self._set.counts(column).tolist()
        values = self.parameters[column].values  # the count of those without it may follow
        return {value: count for value, count in zip(values, counts, strict=False) if count}

    # ---- one at a time: params --------------------------------------------------------------

    def coordinates(self, config_id: int) -> tuple[int, ...]:
        """Return the value indices of a feasible configuration."""
        if not 0 <= config_id < self.num_feasible:
            raise IndexError(config_id)
        return tuple(self._set.rows(np.array([config_id]))[0].tolist())

    def at(self, config_id: int) -> Params:
        """Return the feasible configuration of that config id."""
        return self.params_of(self.coordinates(config_id))

    def params_of(self, value_indices: Sequence[int] | ValueIndices) -> Params:
        """Return the configuration with the given value indices, whether it is feasible or not."""
        pairs = zip(self.parameters, value_indices, strict=True)
        return {
            p.name: p.values[value_index]
            for p, value_index in pairs
            if value_index < len(p.values)
        }

    def index(self, params: Mapping[str, Value]) -> int | None:
        """Return the config id of `params`, None where they are not feasible."""
        value_indices = []
        for parameter in self.parameters:
            value_index = len(parameter.values)
            if parameter.name in params:
                if params[parameter.name] not in parameter.values:
                    return None
                value_index = parameter.values.index(params[parameter.name])
            elif parameter.when is None:
                return None
            value_indices.append(value_index)
        if len(params) > sum(
            d < len(p.values) for p, d in zip(self.parameters, value_indices, strict=True)
        ):
            return None  # it has names that are no parameters
        config_id = int(self._set.config_ids(np.array([value_indices]))[0])
        return None if config_id < 0 else config_id

    def complete(self, wanted: Mapping[str, Value]) -> Params | None:
        """Return the feasible configuration that `wanted` describes, None when there is none.

        What cannot exist beside the rest is dropped; what is missing takes the first values that
        are feasible, in the order of the config ids.
        """
        allowed = []
        for parameter in self.parameters:
            value_indices = set(range(base_of(parameter)))
            if parameter.name in wanted:
                value_indices &= {len(parameter.values)}
                if wanted[parameter.name] in parameter.values:
                    value_indices.add(parameter.values.index(wanted[parameter.name]))
            allowed.append(value_indices)
        config_id = self._set.first(allowed)
        return None if config_id is None else self.at(config_id)


def _distinct(count: int, num: int, rng: np.random.Generator) -> Ints:
    """Draw different numbers below `count`, all equally likely; fewer where there are fewer."""
    if num * 2 >= count:
        return rng.permutation(count)[:num]
    drawn = np.unique(rng.integers(count, size=2 * num))
    while len(drawn) < num:
        drawn = np.unique(np.concatenate([drawn, rng.integers(count, size=num)]))
    return rng.permutation(drawn)[:num]
