"""The file of several tuned sizes: the kernel of each, and which of them is for how many rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote

from tuner.by_batch import ByBatch, Way
from tuner.capture.modules.rows_text import has_rows, with_rows
from tuner.choosing import Kernels
from tuner.errors import InputError, WorkerError
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.race import finalist
from tuner.evaluate.racing import Racer
from tuner.export.several import Dispatch, way_of
from tuner.kernel.toolchain import Toolchain
from tuner.planning.planning import Planned
from tuner.planning.schedule import Schedule
from tuner.trial import Candidate, Check, Finalist, Trial, content_key
from tuner.verification.exporting import ExportFile, provenance, rewrites_of, text_maker, ways_of

__all__ = ["Tuned", "file_of", "raced_at", "require_rows"]

NAME = "several_sizes"  # of the file until it is accepted


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a search of one size found; `trial` is None where no kernel was faster than PyTorch.

    `run` is the name of its run directory; `is_faster` says that its race was won.
    """

    planned: Planned
    trial: Trial | None
    run: str = ""
    is_faster: bool = False

    @property
    def rows(self) -> int:
        """The tuned number of rows."""
        return self.planned.num_rows or 1

    @property
    def words(self) -> str:
        """The size, as `batch = 64`."""
        listed = self.planned.config.listed
        assert listed is not None
        return listed.words(self.planned.config.problem.sizes[listed.name])

    @property
    def candidate(self) -> Candidate | None:
        """Render what was found."""
        if self.trial is None:
            return None
        return self.planned.family.render(self.trial.params, self.planned.facts)


def _rows_size(plans: Sequence[Planned]) -> tuple[str, int] | None:
    """Return which size of the operator counts rows, and how many of it one row is.

    That is the first dimension of an argument which grows as the rows do; None where none does.
    """
    for argument in plans[-1].family.op.arguments:
        name = argument.shape[0] if argument.shape else ""
        each = {planned.sizes[name] / (planned.num_rows or 1) for planned in plans if name}
        if len(each) == 1 and (one := each.pop()) >= 1 and one == int(one):
            return name, int(one)
    return None


def require_rows(plans: Sequence[Planned]) -> None:
    """Refuse several values of a size that are no numbers of rows, or that no file could have.

    Raises:
        InputError: with the place in the config.
    """
    config = plans[-1].config
    listed = config.listed
    assert listed is not None
    rows = [planned.num_rows for planned in plans]
    message = ""
    if rows != [*listed.values]:
        message = (
            f"{listed.name} is no number of rows: inputs have {', '.join(map(str, rows))}\n"
            "  hint: several sizes are tuned of the rows (dim 0) of the first input alone"
        )
    elif not has_rows(plans[-1].family.model_new) or _rows_size(plans) is None:
        message = (
            "the operator is for one number of rows alone\n"
            "  hint: give one value, or tune each in a run of its own"
        )
    if message:
        raise InputError(config.problem_at(f"problem.sizes.{listed.name}", message))


def file_of(
    tuned: Sequence[Tuned],
    toolchain: Toolchain,
    path: Path,
    run_path: Path,
    by_batch: ByBatch | None = None,
    *,
    has_steps: bool = True,
) -> ExportFile:
    """Return the file of several sizes; nothing is written yet.

    Kernels that are the same stand once. `by_batch` says which kernel is taken at which rows,
    where that was measured; until then it is that of the nearest size.

    Args:
        tuned: the sizes, the smallest first, one at least with a kernel.
        toolchain: of the kernels.
        path: where it goes once it is accepted.
        run_path: the run in which it is verified.
        by_batch: what was measured.
        has_steps: whether it takes steps of training by kernels where these have any.
    """
    planned = tuned[-1].planned
    stepping = planned if has_steps else planned.with_pytorchs_steps or planned
    model_new = stepping.family.model_new
    found = [each.candidate for each in tuned]
    by_key = {each.key: each for each in found if each is not None}
    places = {key: place for place, key in enumerate(by_key)}
    candidates = [*by_key.values()]
    each_ways = [ways_of(model_new, candidate) for candidate in candidates]
    ways: dict[Way, tuple[int, ...]] = {
        way: tuple(place for place, its in enumerate(each_ways) if way in its)
        for way in dict.fromkeys(way for its in each_ways for way in its)
    }
    kernels = Kernels(
        tuple(
            (each.rows, None if candidate is None else places[candidate.key])
            for each, candidate in zip(tuned, found, strict=True)
        ),
        ways,
        frozenset(map(way_of, ("op", *candidates[0].plan.extra))),
        frozenset(one.rows for one in tuned if one.is_faster),
    )
    ranges = by_batch.kernels if by_batch else {way: kernels.by_nearest(way) for way in ways}
    size, each = _rows_size([one.planned for one in tuned]) or ("", 1)
    dispatch = Dispatch(ranges, size, each) if len(candidates) > 1 else None
    rows = None if by_batch is None else by_batch.stated
    family = replace(planned.family, model_new=with_rows(model_new, rows))
    first = next(one.trial for one in reversed(tuned) if one.trial is not None)

    def head(entry: Finalist | None) -> list[str]:
        return [
            *_sizes_words(tuned, kernels, entry),
            *provenance(planned, toolchain, first.number, entry, run_path)[:-1],
            f"  to reproduce: tune --resume {quote(str(run_path))}",
        ]

    of_file = replace(planned, family=family)
    text_of = text_maker(of_file, toolchain, candidates, head, by_batch, dispatch)

    again = partial(file_of, tuned, toolchain, path, run_path, has_steps=has_steps)
    glue = with_rows(model_new, None)
    return ExportFile(
        planned, run_path, NAME, first.number, path,
        all(candidate.is_deterministic for candidate in candidates), text_of,
        rewrites_of(planned),
        with_batches=again if by_batch is None else None,
        ways=tuple(ways),
        by_batch=by_batch,
        compiled_as=content_key(*by_key, glue),
        kernels=kernels,
    )  # fmt: skip


def raced_at(
    file: ExportFile, spec: JobSpec, schedule: Schedule, until_s: float | None
) -> Finalist:
    """Race a file at another size; what fails there is its error.

    Args:
        file: which was checked.
        spec: the problem of that size.
        schedule: how long the race is.
        until_s: when it should be over, by `time.monotonic`.
    """
    check = Check(True, "", "", ())
    try:
        race = Racer(spec).race(
            [file.contender],
            num_processes=schedule.num_processes,
            seconds=schedule.samples_s,
            others=file.planned.config.others,
            has_steps=True,
            until_s=until_s,
        )
    except WorkerError as error:
        return Finalist(file.trial, check, error=str(error))
    return finalist(file.trial, check, race, 1)


def _sizes_words(tuned: Sequence[Tuned], kernels: Kernels, entry: Finalist | None) -> list[str]:
    """Say what each size has, and how fast it is; the least first."""
    lines = [f"Tuned for {len(tuned)} sizes:"]
    races = entry.at_sizes if entry is not None else {}
    speeds = {words: race.least for words, race in races.items() if race.least is not None}
    if speeds:
        words, least = min(speeds.items(), key=lambda pair: pair[1].speedup)
        lines.append(f"  least speed-up over PyTorch eager: {least.speedup:.3f}x, at {words}")
    for one, (_, kernel) in zip(tuned, kernels.tuned, strict=True):
        which = "PyTorch's own" if kernel is None else f"kernel {kernel + 1}"
        where = f"run {one.run}" + (f", trial {one.trial.number}" if one.trial else "")
        speed = ""
        if (i := speeds.get(one.words)) is not None:
            speed = f": {i.words}"
        lines.append(f"  {one.words}: {which} ({where}){speed}")
    return [*lines, ""]
