"""What a search starts from: configurations that its config names, and templates' defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.config.run_config import RunConfig
from tuner.errors import ConfigError, did_you_mean
from tuner.kernel.family import Family
from tuner.space.constraints import Constraint, is_obeyed
from tuner.space.search_space import SearchSpace
from tuner.trial import Params, Value

__all__ = ["Start", "started_from"]

MAX_LOOKED_AT = 500_000  # configurations of a space without a list, for the nearest to defaults


@dataclass(frozen=True, slots=True)
class Start:
    """Feasible configurations that a search starts from.

    `named` are those of the config's `search.first`, by their place there; `defaults` are for each
    template the one nearest to its defaults.
    """

    named: Mapping[int, Params]
    defaults: Sequence[Params]

    @property
    def all(self) -> list[Params]:
        """Each of them once, those that are named first."""
        named = [*self.named.values()]
        return [*named, *(params for params in self.defaults if params not in named)]


def started_from(
    config: RunConfig,
    space: SearchSpace,
    family: Family,
    facts: Mapping[str, Value],
    constraints: Sequence[Constraint],
) -> tuple[Start, list[str]]:
    """Return what a search starts from, and which named configurations cannot exist here, and why.

    Args:
        config: as read.
        space: the feasible configurations.
        family: whose templates they are of.
        facts: of the device, and the problem's sizes.
        constraints: that the space obeys.

    Raises:
        ConfigError: `search.first` names a parameter that the space does not have.
    """
    start = Start({}, _nearest_defaults(space, family, facts))
    values = space.values
    problems: list[str] = []
    impossible: list[str] = []
    named: dict[int, Params] = {}
    for number, wanted in enumerate(config.search.first):
        place = f"search.first[{number}]"
        asked = {"template": start.defaults[0]["template"], **wanted}
        found, why = _completed(space, family, facts, constraints, asked)
        is_of_space = asked["template"] in values["template"]
        problems += [
            config.problem_at(
                f"{place}.{name}", f"no parameter of this space is called {name!r}",
                known=[*values], hint=did_you_mean(name, [*values]),
            )
            for name in wanted
            if is_of_space and name not in values
        ]  # fmt: skip
        if found is None:
            impossible.append(config.problem_at(place, f"it is not tried: {why}"))
        elif found not in named.values():
            named[number] = found
    if problems:
        raise ConfigError(problems)
    return Start(named, start.defaults), impossible


def _completed(
    space: SearchSpace,
    family: Family,
    facts: Mapping[str, Value],
    constraints: Sequence[Constraint],
    asked: Params,
) -> tuple[Params | None, str]:
    """Return the feasible configuration that is asked for, beside defaults; or why none is."""
    values = space.values
    for name, value in asked.items():
        if value not in values.get(name, (value,)):
            return None, f"the space has {name} = {', '.join(map(str, values[name]))}, not {value}"
    defaults = family.templates[str(asked["template"])].filled({}, facts)
    usual = {n: v for n, v in defaults.items() if v in values.get(n, ())}
    found = space.complete({**usual, **asked}) or space.complete(asked)
    if found is None:
        broken = (c.why for c in constraints if not is_obeyed(c, {**facts, **asked}))
        return None, next(broken, "no feasible configuration has all of these")
    dropped = [name for name, value in asked.items() if found.get(name) != value]
    if dropped:
        return None, f"beside the others there is no {' and no '.join(dropped)}"
    return found, ""


def _nearest_defaults(
    space: SearchSpace, family: Family, facts: Mapping[str, Value]
) -> list[Params]:
    """Return, for each template with a feasible configuration, that nearest to its defaults.

    A search starts from them: their authors chose them, and every template gets its turn.
    """
    (column,) = (i for i, p in enumerate(space.parameters) if p.name == "template")
    nearest: dict[int, Params] = {}
    far: dict[int, Params] = {}  # defaults that are not feasible
    for name in space.count_by("template"):
        place = space.parameters[column].values.index(name)
        defaults = family.templates[str(name)].filled({}, facts)
        found = space.complete({**defaults, "template": name})
        if found is None:
            far[place] = defaults
        else:
            nearest[place] = found
    if far:
        looked_at = None
        if not space.is_listed:
            looked_at = space.sample(MAX_LOOKED_AT, np.random.default_rng(0))
        rows = space.rows(looked_at)
        for place, defaults in far.items():
            own = rows[rows[:, column] == place]
            distances = np.zeros(len(own), dtype=np.int64)
            for parameter, value_indices in zip(space.parameters, own.T, strict=True):
                wanted = [defaults.get(parameter.name, value) for value in parameter.values]
                differs = [a != b for a, b in zip(wanted, parameter.values, strict=True)]
                distances += np.array([*differs, False])[value_indices]  # the last: absent
            if len(own):
                nearest[place] = space.params_of(own[int(distances.argmin())])
    return [nearest[place] for place in sorted(nearest)]
