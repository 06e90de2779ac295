"""From parameters and constraints to every feasible configuration, without the product.

Parameters are given their values one after the other, breadth first, for all partial
configurations at once (NumPy); each constraint is judged as soon as its last name has a value.
Of a partial configuration only the values are kept that something later still asks for, so that
those which cannot differ in what may follow become one *state*. What remains is a decision
diagram: states in layers, and choices between them. It counts the feasible configurations
without listing them, finds any one by its config id, and is far smaller than the list wherever
parts of the space are independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.errors import ExpressionError, InputError
from tuner.space.constraints import (
    Constraint,
    Judge,
    Parameter,
    ValueIndices,
    base_of,
    index_type,
    is_obeyed,
    pack,
)
from tuner.space.diagram import Diagram, Layer
from tuner.space.grammar import Env

__all__ = ["Walk", "explain_nothing"]

CHUNK = 2**20  # partial configurations judged at once: 8 MiB a column
MAX_VISITED = 150_000_000  # partial configurations judged; about 10 s
MAX_CHOICES = 16_000_000  # of the diagram, kept; about 400 MB
MAX_FEASIBLE = 2**62  # config ids are int64, and so are sums of two

MAX_COUNT = 10**300  # combinations; beyond, float64 ends

Ints = NDArray[np.int64]


# ---- in which order -------------------------------------------------------------------------


def _enumeration_order(
    parameters: Sequence[Parameter], constraints: Sequence[Constraint]
) -> tuple[Parameter, ...]:
    """Order the parameters so that constraints can be judged early.

    Again and again, the constraint with the fewest combinations of values left to choose is
    completed. What a `when` needs comes before the parameter that has it.

    Raises:
        InputError: conditions go round in a circle.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    needs = {name: _needs(name, by_name, ()) for name in by_name}
    order: dict[str, None] = {}
    pending = [_with_needs(constraint.names, needs) for constraint in constraints]
    while pending := [left for names in pending if (left := names - order.keys())]:
        easiest = min(pending, key=lambda left: math.prod(len(by_name[n].values) for n in left))
        for name in sorted(easiest, key=lambda n: (len(needs[n]), len(by_name[n].values), n)):
            order[name] = None
    for name in sorted(by_name, key=lambda n: len(needs[n])):
        order[name] = None
    return tuple(by_name[name] for name in order)


def _with_needs(names: frozenset[str], needs: Mapping[str, frozenset[str]]) -> frozenset[str]:
    tuned = names & needs.keys()
    return tuned.union(*(needs[name] for name in tuned))


def _needs(name: str, by_name: Mapping[str, Parameter], path: tuple[str, ...]) -> frozenset[str]:
    """Return the parameters that `name` exists by, and what they exist by."""
    if name in path:
        circle = " -> ".join([*path[path.index(name) :], name])
        raise InputError(f"the conditions of parameters go round in a circle: {circle}")
    when = by_name[name].when
    direct = when.names & by_name.keys() if when else frozenset()
    return direct.union(*(_needs(other, by_name, (*path, name)) for other in direct))


# ---- the walk that builds it ----------------------------------------------------------------


class Walk:
    """Builds the diagram of the feasible configurations.

    `rejected` counts by constraint the combinations of values that it was the first to reject;
    beyond 2^53 combinations the counts are rounded.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        constraints: Sequence[Constraint],
        facts: Env,
    ) -> None:
        self.parameters = tuple(parameters)
        self.constraints = tuple(constraints)
        self.facts = facts
        self.order = _enumeration_order(parameters, constraints)
        self.num_cartesian = math.prod(len(parameter.values) for parameter in parameters)
        self.num_visited = 0
        self.num_choices = 0
        self.rejected = [0.0] * len(self.constraints)
        depths = {parameter.name: depth for depth, parameter in enumerate(self.order)}
        self._judged: list[list[int]] = [[] for _ in self.order]  # constraints, by depth
        self._first: list[int] = []  # those of facts alone
        self._needed = [-1] * len(self.order)  # by depth: the last depth that asks for the value
        for number, constraint in enumerate(self.constraints):
            tuned = [depths[name] for name in constraint.names if name in depths]
            (self._judged[max(tuned)] if tuned else self._first).append(number)
            self._need(tuned)
        for depth, parameter in enumerate(self.order):
            if parameter.when is not None:
                names = parameter.when.names & depths.keys()
                self._need([depth, *[depths[name] for name in names]], depth)
        by_name = {parameter.name: parameter for parameter in self.parameters}
        self._judges = [
            Judge(c.expression, c.when, by_name, facts, where_absent=True)
            for c in self.constraints
        ]
        self._conditions = {
            p.name: Judge(p.when, None, by_name, facts, where_absent=False)
            for p in self.order
            if p.when is not None
        }
        self._depths, self._bases = depths, {p.name: base_of(p) for p in self.order}
        self._kind = index_type(self._bases.values())

    def _need(self, depths: Sequence[int], until: int | None = None) -> None:
        last = max(depths, default=-1) if until is None else until
        for depth in depths:
            self._needed[depth] = max(self._needed[depth], last)

    def run(self) -> Diagram | None:
        """Build it; None when nothing is feasible.

        Raises:
            ExpressionError: a constraint or condition cannot be computed; it says where.
            InputError: that would take too long, or too much memory.
        """
        for number in self._first:
            if not is_obeyed(self.constraints[number], self.facts):
                self.rejected[number] += float(min(self.num_cartesian, MAX_COUNT))
                return None
        states: dict[
            str, ValueIndices
        ] = {}  # the value indices that are still needed, by parameter
        weights = np.ones(1)  # how many combinations each state stands for; never empty
        grown = []
        for depth, parameter in enumerate(self.order):
            sources, value_indices = self._choices(depth, states, weights)
            self.num_choices += len(sources)
            if not len(sources):
                return None
            kept = {
                name: value_indices if name == parameter.name else states[name][sources]
                for name in (*states, parameter.name)
                if self._needed[self._depths[name]] > depth
            }
            targets: ValueIndices
            if len(kept) == len(states) + 1:  # nothing is forgotten: all differ
                targets = examples = np.arange(len(sources), dtype=np.int32)
            else:
                targets, examples = _merge(kept, self._bases, len(sources))
            states = {name: column[examples] for name, column in kept.items()}
            weights = np.bincount(targets, weights[sources], len(examples)).astype(np.float64)
            grown.append((sources, value_indices, targets))
        return self._counted(grown)

    def _choices(
        self, depth: int, states: dict[str, ValueIndices], weights: NDArray[np.float64]
    ) -> tuple[ValueIndices, ValueIndices]:
        """Return the choices that all constraints judged here allow: states, value indices."""
        parameter = self.order[depth]
        num_values = len(parameter.values)
        below = float(min(math.prod(len(p.values) for p in self.order[depth + 1 :]), MAX_COUNT))
        exists = np.ones(len(weights), dtype=bool)
        if parameter.when is not None:
            exists = self._conditions[parameter.name].verdicts(states, len(weights))
        step = max(1, CHUNK // num_values)
        found = []
        for start in range(0, len(weights), step):
            here = np.arange(start, min(start + step, len(weights)), dtype=np.int32)
            there, gone = here[exists[here]], here[~exists[here]]
            sources = np.repeat(there, num_values)
            value_indices = np.tile(np.arange(num_values, dtype=self._kind), len(there))
            if len(gone):
                sources = np.concatenate([sources, gone])
                value_indices = np.concatenate(
                    [value_indices, np.full(len(gone), num_values, self._kind)]
                )
                by_source = np.argsort(sources, kind="stable")
                sources, value_indices = sources[by_source], value_indices[by_source]
            self.num_visited += len(sources)
            for number in self._judged[depth]:
                if not len(sources):
                    break
                judge = self._judges[number]
                columns = {
                    name: value_indices if name == parameter.name else states[name][sources]
                    for name in judge.tuned
                }
                allowed = judge.verdicts(columns, len(sources))
                self.rejected[number] += float(weights[sources[~allowed]].sum()) * below
                sources, value_indices = sources[allowed], value_indices[allowed]
            found.append((sources, value_indices))
            num_choices = self.num_choices + sum(len(s) for s, _ in found)
            if self.num_visited > MAX_VISITED or num_choices > MAX_CHOICES:
                raise InputError(self._explain_too_much(depth))
        return np.concatenate([s for s, _ in found]), np.concatenate([d for _, d in found])

    def _counted(
        self, grown: Sequence[tuple[ValueIndices, ValueIndices, ValueIndices]]
    ) -> Diagram | None:
        """Count the completions of every choice, last layer first, and drop the dead ends."""
        counts = np.ones(1, dtype=np.int64)
        layers = []
        columns = {parameter.name: column for column, parameter in enumerate(self.parameters)}
        for depth in reversed(range(len(self.order))):
            parameter = self.order[depth]
            sources, value_indices, targets = grown[depth]
            completions = counts[targets]
            if completions.sum(dtype=np.float64) > MAX_FEASIBLE:
                raise InputError(self._explain_too_many())
            is_alive = completions > 0
            sources, value_indices, targets = (
                sources[is_alive],
                value_indices[is_alive],
                targets[is_alive],
            )
            below = np.concatenate([[0], np.cumsum(completions[is_alive])])
            keys = sources.astype(np.int64) * base_of(parameter) + value_indices
            num_states = 1 if depth == 0 else int(grown[depth - 1][2].max()) + 1
            first = np.searchsorted(sources, np.arange(num_states + 1))
            counts = below[first[1:]] - below[first[:-1]]
            layers.append(
                Layer(
                    columns[parameter.name],
                    base_of(parameter),
                    keys,
                    targets,
                    below,
                    first,
                )
            )
        num_feasible = int(counts[0])
        return Diagram(num_feasible, tuple(reversed(layers))) if num_feasible else None

    # ---- why it is too much -----------------------------------------------------------------

    def _explain_too_much(self, depth: int) -> str:
        bound = {parameter.name for parameter in self.order[: depth + 1]}
        late = [
            constraint
            for number in {n for judged in self._judged[depth:] for n in judged}
            if (constraint := self.constraints[number]).names & bound
        ]
        lines = [
            f"gave up after looking at {self.num_visited:,} partial configurations of "
            f"{self.num_cartesian:,} combinations, at {self.order[depth].name}"
        ]
        most = sorted(self.order[: depth + 1], key=lambda p: -len(p.values))
        if late:
            largest = max(late, key=lambda constraint: len(constraint.names & bound))
            lines.append(f"  the latest to judge: {largest.expression.text}")
            most = [parameter for parameter in most if parameter.name in largest.names]
        names = [f"{p.name} ({len(p.values)} values)" for p in most if len(p.values) > 1]
        lines.append(
            f"  hint: add a constraint over fewer parameters, such as {' and '.join(names[:2])}, "
            "or give fewer values"
        )
        return "\n".join(lines)

    def _explain_too_many(self) -> str:
        used = frozenset[str]().union(*(constraint.names for constraint in self.constraints))
        by_size = sorted(self.parameters, key=lambda parameter: -len(parameter.values))
        free = [f"{p.name} ({len(p.values)} values)" for p in by_size if p.name not in used]
        most = [f"{p.name} ({len(p.values)} values)" for p in by_size]
        over = (
            f"{', '.join(free[:3])}, which no constraint mentions" if free else ", ".join(most[:3])
        )
        return (
            f"more than {MAX_FEASIBLE:.1e} configurations are feasible, of "
            f"{self.num_cartesian:.1e} combinations\n"
            f"  hint: add a constraint over {over}, or give fewer values"
        )


def _merge(
    kept: Mapping[str, ValueIndices], bases: Mapping[str, int], num: int
) -> tuple[ValueIndices, ValueIndices]:
    """Give equal rows one number; return it by row, and a row of each number."""
    packed, size = pack(list(kept.values()), [bases[name] for name in kept], num)
    if size > 4 * num + 2**16:
        _, examples, inverse = np.unique(packed, return_index=True, return_inverse=True)
        return inverse.astype(np.int32), examples
    is_there = np.zeros(size, dtype=bool)  # sparse enough for a table: no sorting
    is_there[packed] = True
    numbers = np.cumsum(is_there, dtype=np.int32) - 1
    targets = numbers[packed]
    examples = np.empty(int(is_there.sum()), dtype=np.int64)
    examples[targets] = np.arange(num)
    return targets, examples


# ---- why nothing is feasible ----------------------------------------------------------------


def explain_nothing(walk: Walk) -> str:
    """Return the message for a space in which nothing is feasible.

    Args:
        walk: as it ended; walks without one of its constraints tell which of them is the cause.
    """
    lines = [f"no configuration is feasible: all {walk.num_cartesian:,} are rejected"]
    for constraint, count in zip(walk.constraints, walk.rejected, strict=True):
        if not count:
            continue
        origin = f", {constraint.origin}" if constraint.origin else ""
        rule = f"({constraint.expression.text}{origin})"
        lines.append(f"  {round(count):,} by: {constraint.why} {rule}")
        facts = sorted(constraint.names & walk.facts.keys())
        if facts:
            lines.append("    with " + ", ".join(f"{n} = {walk.facts[n]}" for n in facts))
    lines.append("  " + _hint_to_loosen(walk))
    return "\n".join(lines)


def _hint_to_loosen(walk: Walk) -> str:
    """Find the constraints any one of which, left out, would leave something feasible."""
    alone = []
    for number, constraint in enumerate(walk.constraints):
        if walk.rejected[number] and walk.num_visited < 1_000_000:  # each try costs as much again
            rest = (*walk.constraints[:number], *walk.constraints[number + 1 :])
            try:
                if Walk(walk.parameters, rest, walk.facts).run() is not None:
                    alone.append(repr(constraint.why))
            except ExpressionError:  # it guarded another one
                continue
            except InputError:  # too many, so not nothing
                alone.append(repr(constraint.why))
    if alone:
        return f"hint: loosen {' or '.join(alone)}, or give other values to its parameters"
    return "hint: no single constraint is the cause: loosen more than one, or give other values"
