"""From some values of a configuration to what the others may be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from tuner.errors import ExpressionError
from tuner.space.constraints import Constraint, Parameter, condition_holds, is_obeyed
from tuner.trial import Params, Value

__all__ = ["Step", "completions", "steps_of"]

MAX_COMPLETIONS = 1000  # that are looked up, to find what missing values may be
MAX_LOOKED_AT = 20_000  # values, on the way to these

Step = tuple[Parameter, Sequence[Constraint]]  # what gets a value, and what is judged then


def completions(
    wanted: Mapping[str, Value],
    parameters: Sequence[Parameter],
    steps: Sequence[Step],
    facts: Mapping[str, Value],
) -> Iterator[Params]:
    """Give what may be the configurations that `wanted` describes, until that takes too long.

    What cannot exist beside the rest is dropped; what is missing takes its values in the order of
    declaration.

    Args:
        wanted: values by name.
        parameters: in the order of declaration.
        steps: `steps_of` the same parameters and their constraints.
        facts: the named values that are not tuned.
    """
    left = iter(range(MAX_LOOKED_AT))

    def is_possible(constraint: Constraint, given: dict[str, Value]) -> bool:
        try:
            return is_obeyed(constraint, given)
        except ExpressionError:  # what excludes these values comes later; the space decides
            return True

    def complete(depth: int, env: dict[str, Value]) -> Iterator[Params]:
        if depth == len(steps):
            yield {p.name: env[p.name] for p in parameters if p.name in env}
            return
        parameter, judges = steps[depth]
        name = parameter.name
        if not condition_holds(parameter.when, env):
            tries = [env]
        elif name in wanted:
            tries = [{**env, name: wanted[name]}]
        else:
            tries = [{**env, name: value} for value in parameter.values]
        for given in tries:
            if next(left, None) is None:
                return
            if all(is_possible(constraint, given) for constraint in judges):
                yield from complete(depth + 1, given)

    names = {parameter.name for parameter in parameters}
    known = {name: value for name, value in facts.items() if name not in names}
    return itertools.islice(complete(0, known), MAX_COMPLETIONS)


def steps_of(parameters: Sequence[Parameter], constraints: Sequence[Constraint]) -> list[Step]:
    """Return parameters in the order in which values can be given, and what is judged then.

    A constraint is judged at the last of its names: before that, it does not hold for certain.
    """
    order = _by_condition(parameters)
    places = {parameter.name: place for place, parameter in enumerate(order)}
    judges: list[list[Constraint]] = [[] for _ in order]
    for constraint in constraints:
        names = constraint.names | (constraint.when.names if constraint.when else frozenset())
        used = [places[name] for name in names if name in places]
        if used:
            judges[max(used)].append(constraint)
    return list(zip(order, judges, strict=True))


def _by_condition(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Order the parameters so that what a `when` needs comes before the one that has it."""
    left, order, known = list(parameters), list[Parameter](), {p.name for p in parameters}
    while left:
        done = {parameter.name for parameter in order}
        ready = [p for p in left if p.when is None or p.when.names & known <= done]
        order += ready or left
        left = [p for p in left if p not in order]
    return order
