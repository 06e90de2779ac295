"""What a list of runs says of each: state, speed-up and what is less than that, age."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, get_args

from tuner.environment import Environment
from tuner.review.formatting import ratio_words, sizes_words
from tuner.review.notes import Note
from tuner.review.workloads import (
    Tone,
    Workload,
    caveat_of,
    finalist_of,
    headline_of,
    least_of,
    tone_of,
    workloads_of,
)
from tuner.run import Run, is_locked
from tuner.trial import Interval, Result
from tuner.underway import underway

__all__ = [
    "STATES",
    "WORKING",
    "WRITTEN",
    "Shown",
    "State",
    "Tally",
    "age_words",
    "put_in_words",
    "shown",
]

WRITTEN = ("environment.json", "trials.jsonl", "result.json", "checks.jsonl")  # the first stamps
State = Literal["running", "verifying", "finished", "rejected", "stopped", "unreadable"]
STATES: tuple[State, ...] = get_args(State)
WORKING: tuple[State, ...] = ("running", "verifying")  # a process is at it


@dataclass(frozen=True, slots=True)
class Shown:
    """One run in a list of runs.

    `state` is `verifying` once the search is over and a process still works on it. `speedup` is
    the exported file's, or the winner's, raced in fresh processes (`is_verified`, with `low` and
    `high`); of a run that was not verified the best at screening. `least` is
    the least speed-up of all that was timed of the file, `caveat` what is materially less than
    `speedup`, `tone` the colour of both. `age_s` counts from the start as it was recorded, of a
    folder that records none from the last thing written. `note` is what somebody noted, with its
    `tags`. `problem` says why a run is unreadable, or was rejected by the check, or that its
    records disagree or are not whole.
    """

    name: str
    path: str
    op: str
    title: str
    sizes: str
    device: str
    accuracy: str
    state: State
    num_trials: int
    speedup: float | None
    low: float | None
    high: float | None
    least: float | None
    caveat: str
    tone: Tone
    is_verified: bool
    started_at: str
    age_s: float
    problem: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()

    @property
    def doubt(self) -> str:
        """Say what a verified speed-up is worth whose interval holds 1; empty of others."""
        if not self.is_verified or (self.low or 0.0) > 1.0 or (self.high or math.inf) < 1.0:
            return ""
        if self.low is None or self.high is None:
            return "not distinguished from PyTorch"
        if Interval(1.0, self.low, self.high, 0.95, 2).is_vague:
            return "not distinguished from PyTorch: its processes differ too much for bounds"
        ends = f"{ratio_words(self.low)} to {ratio_words(self.high)}"
        return f"not distinguished from PyTorch: another process would find {ends}"


@dataclass(slots=True)
class Tally:
    """What was read of one run, and up to where."""

    stamps: tuple[tuple[int, int, int], ...] = ()
    environment: Environment = field(default_factory=Environment)
    result: Result | None = None
    sizes: str = ""
    least: Workload | None = None
    caveat: str = ""
    tone: Tone = "even"
    has_config: bool = True
    rejection: str = ""  # why nothing that was put to the full check was accepted
    offset: int = 0  # of `trials.jsonl`: the end of the last whole line that was read
    inode: int = 0
    num_trials: int = 0
    best_us: float = math.inf  # of the trials so far, and its speed over PyTorch just before
    best_ratio: float = 0.0
    problem: str = ""
    note: Note = field(default_factory=Note)


def put_in_words(tally: Tally) -> None:
    """Say what a run's records amount to, once they are read: a list is shown again and again."""
    workloads = workloads_of(tally.result)
    interval, is_rejected, has_samples = _worth(tally.result)
    verdict = "rejected" if is_rejected else interval.verdict if interval else "open"
    tally.sizes = sizes_words(tally.environment.sizes)
    tally.least, tally.caveat = least_of(workloads), caveat_of(workloads)
    tally.tone = tone_of(workloads, verdict) if has_samples else "even"


def shown(run: Run, tally: Tally) -> Shown:
    """Return one run as a list shows it, from what was read of it."""
    environment, result = tally.environment, tally.result
    interval, is_rejected, has_samples = _worth(result)
    state: State = "stopped"
    if is_locked(run):
        now = underway(run)
        state = "verifying" if now is not None and now.phase == "verifying" else "running"
    elif tally.problem:
        state = "unreadable"
    elif result is not None:
        state = "rejected" if is_rejected else "finished"
    elif tally.rejection:
        state = "rejected"
    is_open = state in (*WORKING, "stopped")
    speedup = interval.speedup if interval else (tally.best_ratio if is_open else 0.0) or None
    found = result.disagreements if result is not None else ()
    disagreement = f"its records disagree: {found[0]}" if found else ""
    if result is not None and not tally.num_trials:
        disagreement = "its trials are gone: trials.jsonl is missing or empty"
    elif not tally.has_config and not tally.problem:
        disagreement = "config.yaml is missing: it can be neither resumed nor exported again"
    op = environment.op or run.path.name
    return Shown(
        name=run.path.name,
        path=str(run.path),
        op=op,
        title=environment.title or op,
        sizes=tally.sizes,
        device=environment.named_device or "unknown",
        accuracy=environment.accuracy or "unknown",
        state=state,
        num_trials=tally.num_trials,
        speedup=speedup,
        low=interval.low if interval and math.isfinite(interval.low) else None,
        high=interval.high if interval and math.isfinite(interval.high) else None,
        least=tally.least.interval.speedup if tally.least else None,
        caveat=tally.caveat,
        tone=tally.tone,
        is_verified=interval is not None and not is_rejected and has_samples,
        started_at=environment.started_at,
        age_s=_age_s(run.path.name, tally),
        problem=tally.problem or (tally.rejection if state == "rejected" else disagreement),
        note=tally.note.text,
        tags=tally.note.tags,
    )


def _worth(result: Result | None) -> tuple[Interval | None, bool, bool]:
    """Return the headline's interval, of the exported file or the winner, and what it is worth.

    That is whether the file was rejected, and whether there are samples that give the interval,
    of a file that has kernels of its own.
    """
    finalist = finalist_of(result)
    if finalist is None:
        return None, False, False
    is_rejected = bool(finalist.error) or not finalist.check.is_accepted
    interval, _ = headline_of(finalist)
    return interval, is_rejected, bool(finalist.samples_us) and not finalist.falls_back


def _age_s(name: str, tally: Tally) -> float:
    """Return the seconds since it started as it said; else since its name or its files say."""
    last_s = max((time_ns for _, _, time_ns in tally.stamps[: len(WRITTEN)]), default=0) / 1e9
    try:
        started = datetime.fromisoformat(tally.environment.started_at)
    except ValueError:  # none was recorded, or somebody's own words
        with suppress(ValueError):  # called otherwise
            last_s = datetime.strptime(name[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    else:
        last_s = (started if started.tzinfo else started.replace(tzinfo=UTC)).timestamp()
    return max(0.0, datetime.now(UTC).timestamp() - last_s)


def age_words(age_s: float) -> str:
    """Return an age in its largest unit."""
    for unit, seconds in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if age_s >= seconds:
            return f"{int(age_s / seconds)} {unit}"
    return f"{int(age_s)} s"
