"""What happens during a run, reported to whoever shows it, and to a file of the run.

`progress.json` says what a run is at: the dashboard reads it while another process works.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tuner.errors import StorageError
from tuner.evaluate.verifier import Answered
from tuner.planning import Planned
from tuner.run import Run
from tuner.schedule import Schedule
from tuner.storage import write_whole
from tuner.trial import Finalist, Measurement, Trial

__all__ = ["Observer", "Progress", "Recorder"]

WRITE_EVERY_S = 1.0


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
    """What happens during a run, told to whoever shows it; every method may be overridden."""

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
    """Passes all on to another observer, and keeps `progress.json` of the run up to date."""

    def __init__(self, observer: Observer, run: Run) -> None:
        self._observer = observer
        self._run = run
        self._stage = ""
        self._written_s = 0.0

    def on_plan(self, planned: Planned) -> None:
        """Pass it on."""
        self._observer.on_plan(planned)

    def on_run(self, run: Run, baseline: Measurement, trials: Sequence[Trial]) -> None:
        """Pass it on."""
        self._observer.on_run(run, baseline, trials)

    def on_trial(self, trial: Trial, num_building: int) -> None:
        """Pass it on; the trials are a file of their own."""
        self._observer.on_trial(trial, num_building)

    def on_remaining(self, improvement: float, within: Mapping[float, float]) -> None:
        """Pass it on."""
        self._observer.on_remaining(improvement, within)

    def on_schedule(self, schedule: Schedule) -> None:
        """Pass it on, and note the plan."""
        self._observer.on_schedule(schedule)
        self._write(plan=schedule.words)

    def on_stage(self, text: str) -> None:
        """Pass it on, and note it."""
        self._observer.on_stage(text)
        self._stage = text
        self._write()

    def on_probe(self, answered: Answered) -> None:
        """Pass it on, and note how far the check is."""
        self._observer.on_probe(answered)
        self._note(answered.number, answered.total, answered.left_s)

    def on_progress(self, progress: Progress) -> None:
        """Pass it on, and note it."""
        self._observer.on_progress(progress)
        self._note(progress.done, progress.total, progress.left_s)

    def on_finalist(self, entry: Finalist) -> None:
        """Pass it on; the checks are a file of their own."""
        self._observer.on_finalist(entry)

    def _note(self, done: int, total: int | None, left_s: float) -> None:
        if time.monotonic() - self._written_s >= WRITE_EVERY_S:
            self._write(done=done, total=total, left_s=round(left_s, 1))

    def _write(self, **more: Any) -> None:
        self._written_s = time.monotonic()
        at = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({"stage": self._stage, "at": at, **more})
        with suppress(StorageError):  # a full disk is reported where something is lost by it
            write_whole(self._run.path / "progress.json", text)
