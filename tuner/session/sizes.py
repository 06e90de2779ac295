"""Several sizes for one file: a run of each, the smallest first, each begun from those before.

Every run is one like any, with a file of its own. The last one, of the largest size, exports the
file of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tuner.config.run_config import RunConfig
from tuner.errors import StorageError
from tuner.planning.earlier import Earlier, Suggestion
from tuner.planning.planning import Planned
from tuner.run import Run, open_run
from tuner.search.transfer import Source
from tuner.space.search_space import SearchSpace
from tuner.trial import Outcome
from tuner.verification.together import Tuned, require_rows

__all__ = [
    "beside_of", "followed", "planned_sizes", "sources_beside", "suggested", "tuned_of",
    "with_share",
]  # fmt: skip

SHARE_OF_LAST = 1.5  # of the time of a run: the file of all sizes is checked and raced as well


def planned_sizes(config: RunConfig, planned: Callable[[RunConfig], Planned]) -> list[Planned]:
    """Return a plan for each size, the smallest first; one for a config without several.

    Raises:
        InputError: as `plan`; or the size is no number of rows.
    """
    if config.listed is None:
        return [planned(config)]
    plans = [planned(config.at(size)) for size in config.listed.values]
    require_rows(plans)
    return plans


def with_share(planned: Planned, deadline_s: float | None, num_left: int) -> Planned:
    """Return a plan with its share of the time, of so many runs that are left.

    Args:
        planned: of the next run.
        deadline_s: when all should be over, by `time.monotonic`; None without a limit.
        num_left: how many runs there are to go, this one among them.
    """
    if deadline_s is None:
        return planned
    left_s = max(1.0, deadline_s - time.monotonic())
    share_s = left_s if num_left == 1 else left_s / (num_left - 1 + SHARE_OF_LAST)
    return replace(planned, config=planned.config.model_copy(update={"time_s": share_s}))


def sources_beside(planned: Planned, beside: Sequence[Tuned], runs_dir: Path) -> list[Source]:
    """Return what the runs of other sizes tell a search's model, as far as they tell enough."""
    return [
        source
        for one in beside
        if (source := _source(planned.space, open_run(runs_dir / one.run))) is not None
    ]


def suggested(planned: Planned, beside: Sequence[Tuned], earlier: Earlier) -> Earlier:
    """Return what a search tries first: what is best at other sizes, the nearest first."""
    first: list[Suggestion] = []
    for one in sorted(beside, key=lambda one: -one.rows):
        params = one.trial.params if one.trial is not None else None
        is_known = any(known.params == params for known in first)
        if params is not None and not is_known and planned.space.index(params) is not None:
            first.append(Suggestion(params, f"the best at {one.words}, of run {one.run}", False))
    others = (each for each in earlier.first if all(each.params != own.params for own in first))
    return replace(earlier, first=(*first, *others))


def tuned_of(run: Run, planned: Planned) -> Tuned:
    """Return what a run of one size found."""
    result = run.result()
    exported = None if result is None or result.is_fallback else result.exported
    if result is None or exported is None or not exported.check.is_accepted:
        return Tuned(planned, None, run.path.name)
    trial = next((trial for trial in run.trials() if trial.number == result.winner), None)
    return Tuned(planned, trial, run.path.name, exported.verdict == "faster")


def beside_of(names: Sequence[str], plans: Sequence[Planned], runs_dir: Path) -> list[Tuned]:
    """Return what the runs of smaller sizes found.

    Raises:
        StorageError: one of them is not there any more.
    """
    found = []
    for name, planned in zip(names, plans, strict=False):
        try:
            found.append(tuned_of(open_run(runs_dir / name), planned))
        except StorageError as error:
            raise StorageError(
                f"{runs_dir / name}: needed for the file of several sizes\n  {error}"
            ) from error
    return found


def followed(run: Run) -> str:
    """Return the name of a run of the next size that was begun after this one; empty if none."""
    for path in sorted(run.path.parent.glob("*/environment.json")):
        try:
            beside = open_run(path.parent).environment().beside
        except StorageError:
            continue
        if run.path.name in beside:
            return path.parent.name
    return ""


def _source(space: SearchSpace, run: Run) -> Source | None:
    """Return all that a run tried of the same space, None where that is too little."""
    known: dict[int, Outcome] = {}
    for trial in run.trials():
        config_id = space.index(trial.params)
        if config_id is not None:
            known.setdefault(config_id, trial.outcome)
    return Source.of_outcomes(run.path.name, space, known)
