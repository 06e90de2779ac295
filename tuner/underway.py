"""What a run is at while a process works on it: `progress.json`, written by that process.

It is no truth of the run: one that a killed process left says nothing, so it is read only while
a process has the run's lock, and whoever takes the lock removes that of the last holder.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pydantic import ValidationError

from tuner.at_work import AtWork
from tuner.errors import StorageError
from tuner.run import PROGRESS_NAME, Run, is_locked
from tuner.storage import write_whole
from tuner.trial import from_json, to_json

__all__ = ["Phase", "Underway", "underway", "write_underway"]

Phase = Literal["preparing", "searching", "verifying"]

MAX_BYTES = 64_000


@dataclass(frozen=True, slots=True)
class Underway:
    """What a run is at: `stage` in words, and how far it is where that is known.

    `done` of `total` are counted in `unit`; `total` is None where nobody knows, `done` are then
    seconds. `left_s` is what was left of the stage at `at`. `plan` says how the time is shared.
    `finalists` are the trials whose files had their verdict in this session, and `wanted` is how
    many are to be accepted. `at_work` are devices and builders of a search, and `per_minute` is
    how many outcomes they had in the last minute.
    """

    stage: str
    at: datetime
    phase: Phase = "preparing"
    done: int | None = None
    total: int | None = None
    unit: str = ""
    left_s: float | None = None
    plan: str = ""
    wanted: int = 0
    finalists: tuple[int, ...] = ()
    at_work: tuple[AtWork, ...] = ()
    per_minute: float | None = None

    @property
    def counted(self) -> str:
        """How far the stage is, in words; empty where it is not known."""
        if self.done is None:
            return ""
        if self.total is None:
            return f"{self.done:,} s so far"
        if self.unit == "%":
            return f"{self.done} %"
        return f"{self.done:,} of {self.total:,} {self.unit}".rstrip()

    @property
    def age_s(self) -> float:
        """Seconds since it was written."""
        at = self.at if self.at.tzinfo else self.at.replace(tzinfo=UTC)
        return max(0.0, (datetime.now(UTC) - at).total_seconds())


def underway(run: Run) -> Underway | None:
    """Return what a run is at; None where no process works on it, or it has not said."""
    if not is_locked(run):
        return None
    path = run.path / PROGRESS_NAME
    try:
        # Neither a link nor a pipe is what a tuner wrote.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            found = from_json(Underway, file.read(MAX_BYTES))
    except (OSError, ValidationError):
        return None
    is_reported = found.left_s is None or math.isfinite(found.left_s)
    return found if is_reported else None


def write_underway(run: Run, now: Underway) -> None:
    """Write what a run is at; where it cannot be written, nothing is lost by it."""
    with suppress(StorageError):
        write_whole(run.path / PROGRESS_NAME, to_json(now))
