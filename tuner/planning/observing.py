"""What happens during a run, reported to whoever shows it, and to a file of the run.

`progress.json` says what a run is at (`underway`): the dashboard reads it meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from tuner.at_work import AtWork
from tuner.evaluate.verifier import Answered
from tuner.planning.planning import Planned
from tuner.planning.schedule import Schedule
from tuner.run import LOG_NAME, Run
from tuner.trial import Finalist, Measurement, Trial
from tuner.underway import Phase, Underway, write_underway

__all__ = ["Observer", "Progress", "Recorder"]

WRITE_EVERY_S = 1.0
RATE_S = 60.0  # of which trials a minute are reported


@dataclass(frozen=True, slots=True)
class Progress:
    """How far something that takes a while is: `done` of `total`, about `left_s` to go.

    `total` is None where nobody knows; `done` are then seconds.
    """

    what: str
    done: int
    total: int | None
    left_s: float


class Observer:
    """What happens during a run, reported to whoever shows it; every method may be overridden."""

    def on_plan(self, planned: Planned) -> None:
        """The space is enumerated; nothing was compiled yet."""

    def on_run(self, run: Run, baseline: Measurement, trials: Sequence[Trial]) -> None:
        """The run directory exists, the baseline was timed; `trials` is what a resumed run has."""

    def on_trial(self, trial: Trial, num_building: int) -> None:
        """One more outcome is on disk."""

    def on_remaining(self, improvement: float, within: Mapping[float, float]) -> None:
        """What the rest of the search is expected to bring, where its sampler knows.

        Args:
            improvement: expected share by which the best time would fall if all were tried.
            within: probability that the best is within each share of the optimum.
        """

    def on_schedule(self, schedule: Schedule) -> None:
        """How the time is shared is known, or known anew."""

    def on_stage(self, text: str) -> None:
        """Something that takes a while begins."""

    def on_probe(self, answered: Answered) -> None:
        """A finalist or an export answered a probe."""

    def on_progress(self, progress: Progress) -> None:
        """Something that takes a while goes on."""

    def on_finalist(self, entry: Finalist) -> None:
        """A finalist was checked, or checked and raced."""


class Recorder(Observer):
    """Passes all on to another observer, and keeps `progress.json` of the run up to date.

    Args:
        observer: all is reported to it.
        run: whose file it is.
        clock: counts seconds.
    """

    def __init__(
        self, observer: Observer, run: Run, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._observer = observer
        self._run = run
        self._clock = clock
        self._now = Underway("", datetime.now(UTC))
        self._budget = (0, 0.0)
        self._written_s = 0.0
        self._ends_s: deque[float] = deque()  # of the last trials

    def on_plan(self, planned: Planned) -> None:
        """Pass it on."""
        self._observer.on_plan(planned)

    def on_run(self, run: Run, baseline: Measurement, trials: Sequence[Trial]) -> None:
        """Pass it on."""
        self._observer.on_run(run, baseline, trials)

    def on_budget(self, num_trials: int, search_s: float) -> None:
        """Note that the search begins: how many trials and seconds it has, all sessions together.

        Unlike the others this one ends here: the terminal counts by the plan and the config.
        """
        self._budget = num_trials, search_s
        self._begin("trying configurations", phase="searching")

    def on_trial(self, trial: Trial, num_building: int) -> None:
        """Pass it on, and note how far the search is: by what will end it, trials or time."""
        self._observer.on_trial(trial, num_building)
        self._count()
        (num_trials, search_s), done = self._budget, trial.number + 1
        time_left_s = max(0.0, search_s - trial.elapsed_s)
        trials_left_s = max(0, num_trials - done) * trial.elapsed_s / done
        if trials_left_s <= time_left_s:
            self._note(done, num_trials, "trials", trials_left_s)
        else:
            self._note(round(trial.elapsed_s), round(search_s), "s", time_left_s)

    def on_work(self, at_work: Sequence[AtWork]) -> None:
        """Note what devices and builders are at; it is written with the next count.

        This one ends here, too.
        """
        self._now = replace(self._now, at_work=tuple(at_work))

    def on_remaining(self, improvement: float, within: Mapping[float, float]) -> None:
        """Pass it on."""
        self._observer.on_remaining(improvement, within)

    def on_schedule(self, schedule: Schedule) -> None:
        """Pass it on, and note the plan; one that has no search left is of the verification."""
        self._observer.on_schedule(schedule)
        phase: Phase = self._now.phase if schedule.search_s else "verifying"
        reported: dict[str, Any] = {"plan": schedule.words, "wanted": schedule.num_finalists}
        if phase == "verifying":
            reported |= {"at_work": (), "per_minute": None}
        self._begin(self._now.stage, phase=phase, **reported)

    def on_stage(self, text: str) -> None:
        """Pass it on, and note it; also in the run's log."""
        self._observer.on_stage(text)
        self._begin(text.strip())
        line = f"{datetime.now(UTC):%H:%M:%S}  {text}\n".encode("utf-8", "replace")
        with suppress(OSError), (self._run.path / LOG_NAME).open("ab") as log:
            log.write(line)

    def on_probe(self, answered: Answered) -> None:
        """Pass it on, and note how far the check is."""
        self._observer.on_probe(answered)
        self._note(answered.number, answered.total, "probes", answered.left_s)

    def on_progress(self, progress: Progress) -> None:
        """Pass it on, and note it: a share of something as a percentage."""
        self._observer.on_progress(progress)
        if progress.total is None:
            self._note(progress.done, None, "s", progress.left_s)
        else:
            share = 100 * progress.done // max(1, progress.total)
            self._note(share, 100, "%", progress.left_s)

    def on_finalist(self, entry: Finalist) -> None:
        """Pass it on, and note whose verdict it is; the verdicts are a file of their own."""
        self._observer.on_finalist(entry)
        had = dict.fromkeys([*self._now.finalists, entry.trial])
        self._now = replace(self._now, finalists=tuple(had))

    def _count(self) -> None:
        """Take the end of a trial into account."""
        now_s, ends_s = self._clock(), self._ends_s
        ends_s.append(now_s)
        while ends_s[0] < now_s - RATE_S:
            ends_s.popleft()
        if now_s > ends_s[0]:
            rate = 60.0 * (len(ends_s) - 1) / (now_s - ends_s[0])
            self._now = replace(self._now, per_minute=round(rate, 1))

    def _begin(self, stage: str, **changes: Any) -> None:
        no_count: dict[str, Any] = {"done": None, "total": None, "unit": "", "left_s": None}
        self._now = replace(self._now, stage=stage, **no_count, **changes)
        self._write()

    def _note(self, done: int, total: int | None, unit: str, left_s: float) -> None:
        is_first = self._now.done is None  # of this stage: there is an estimate now
        if is_first or self._clock() - self._written_s >= WRITE_EVERY_S:
            left_s = round(max(0.0, left_s), 1)
            self._now = replace(self._now, done=done, total=total, unit=unit, left_s=left_s)
            self._write()

    def _write(self) -> None:
        self._written_s = self._clock()
        self._now = replace(self._now, at=datetime.now(UTC))
        write_underway(self._run, self._now)
