"""What differs between runs: config, environment, winners, and the tasks of captured modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tuner.capture.outline import KernelTask, Outline
from tuner.review.formatting import flat
from tuner.review.run_data import RunData
from tuner.trial import Trial

__all__ = [
    "Difference",
    "config_differences",
    "machine_differences",
    "tasks",
    "winner_differences",
]

# Of the environment: what is measured or said elsewhere, or never the same.
_OMITTED = (
    *("started_at", "baseline_us", "baseline_noise", "sessions", "command", "facts", "title"),
    *("overrides", "earlier"),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that is not the same in all runs; `values` in their order, empty where absent."""

    key: str
    values: tuple[str, ...]


def config_differences(runs: Sequence[RunData]) -> tuple[Difference, ...]:
    """Return what differs between the configs, and what was given beside them."""
    return _differences([_flat(_config(run_data)) for run_data in runs])


def machine_differences(runs: Sequence[RunData]) -> tuple[Difference, ...]:
    """Return what differs between the environments."""
    kept = [{k: v for k, v in f.environment.entries().items() if k not in _OMITTED} for f in runs]
    return _differences([_flat(run_data) for run_data in kept])


def winner_differences(runs: Sequence[RunData]) -> tuple[Difference, ...]:
    """Return what differs between the parameters of the winners."""
    return _differences([_params(run_data.best) for run_data in runs])


def tasks(runs: Sequence[RunData]) -> tuple[Difference, ...]:
    """Return every task of modules that were captured, with each winner's parameters of it.

    A task has the same key wherever the same work is done, in any module; older runs have none.
    """
    sides = []
    for run_data in runs:
        outline = run_data.module.outline if run_data.module is not None else None
        params = _params(run_data.best)
        of_run = {}
        for task in outline.tasks if outline is not None else ():
            assert outline is not None
            if task.key:
                chosen = _of_task(task, outline, params)
                of_run[task.label] = " ".join([task.name, *chosen])
        sides.append(of_run)
    labels = dict.fromkeys(label for side in sides for label in side)
    return tuple(Difference(label, tuple(s.get(label, "") for s in sides)) for label in labels)


def _of_task(task: KernelTask, outline: Outline, params: Mapping[str, str]) -> list[str]:
    """Return the parameters that a task is made with: a call's own, or a nest's by its suffix."""
    if task.kind != "nest":
        return [f"{name}={params[name]}" for name in task.parameters if name in params]
    others = {name for other in outline.tasks for name in other.parameters}
    suffixes = [other.suffix for other in outline.tasks if other.suffix]
    return [
        f"{name}={value}"
        for name, value in params.items()
        if name not in others
        if (name.endswith(task.suffix) if task.suffix else not name.endswith(tuple(suffixes)))
    ]


def _config(run_data: RunData) -> Mapping[str, Any]:
    try:
        data = yaml.safe_load(run_data.config)
    except yaml.YAMLError:
        data = None
    found: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {"text": run_data.config}
    found["overrides"] = run_data.environment.overrides
    return found


def _params(best: Trial | None) -> dict[str, str]:
    if best is None:
        return {}
    return {"template": best.template, **{k: str(v) for k, v in best.params.items()}}


def _flat(data: Mapping[str, Any]) -> dict[str, str]:
    """Return nested facts by their dotted keys, as text."""
    return {
        key: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for key, value in flat(data).items()
    }


def _differences(sides: Sequence[Mapping[str, str]]) -> tuple[Difference, ...]:
    keys = dict.fromkeys(key for side in sides for key in side)
    rows = (Difference(key, tuple(side.get(key, "") for side in sides)) for key in keys)
    return tuple(row for row in rows if len(set(row.values)) > 1)
