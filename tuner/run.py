"""One run directory: create it, lock it, append outcomes, read them back.

`trials.jsonl` is the truth: append-only, one outcome a line, on disk before the next ask.
A half-written last line (the process was killed, the disk was full) is dropped when the run
is opened again; nothing else of the run is ever rewritten in place.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tuner.by_batch import ByBatch
from tuner.environment import ENVIRONMENT_NAME, Environment, read_environment
from tuner.errors import NoRunError, RunLockedError, StorageError
from tuner.records import recomputed, recomputed_result, set_aside
from tuner.storage import append_line, read_lines, storage_errors, whole_lines, write_whole
from tuner.trial import Finalist, Measurement, Result, Trial, from_json, to_json

__all__ = [
    "FAILURE_NAME",
    "LOG_NAME",
    "PROGRESS_NAME",
    "Outlook",
    "Refereed",
    "Run",
    "RunWriter",
    "create_run",
    "is_locked",
    "open_run",
    "parsed_trials",
]


R = TypeVar("R")

PROGRESS_NAME = "progress.json"  # see `underway`
LOG_NAME = "log.txt"  # what each session was at, a line each
FAILURE_NAME = "failure.txt"  # of the last session, where the machine or the tuner failed


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a search expected of the rest of its space after `number` trials.

    `improvement` is the expected share by which the best time would fall if all were tried,
    `within` the probability that the best so far is within each share of the optimum, as in
    {"0.01": 0.93}.
    """

    number: int
    improvement: float
    within: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refereed:
    """A trial that was timed again, on the device where finalists are raced."""

    trial: int
    measurement: Measurement


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory, open for reading; `locked()` opens it for writing."""

    path: Path

    @property
    def config_path(self) -> Path:
        """The config as it was given."""
        return self.path / "config.yaml"

    @property
    def journal_path(self) -> Path:
        """Optuna's own journal, for Optuna's tools."""
        return self.path / "study.journal"

    @property
    def export_path(self) -> Path:
        """Where the winner is written."""
        return self.path / "export" / "model_new.py"

    @property
    def report_path(self) -> Path:
        """Where the report is written."""
        return self.path / "report.html"

    def environment(self) -> Environment:
        """Return what the run recorded of the machine and of how it was started."""
        return read_environment(self.path)

    def trials(self) -> list[Trial]:
        """Read every whole line of `trials.jsonl`.

        Raises:
            StorageError: a line other than the last cannot be read.
        """
        path = self.path / "trials.jsonl"
        return parsed_trials(path, read_lines(path))

    def outlooks(self) -> list[Outlook]:
        """Return what the search expected of the rest, from time to time; empty if it never did.

        A line that cannot be read is left out: nothing but what is shown depends on them.
        """
        return self._records("search.jsonl", Outlook)

    def checks(self) -> list[Finalist]:
        """Return every finalist that was checked or raced, in that order; a later line counts.

        A line that cannot be read is left out: what it said is done again.
        """
        return [recomputed(entry)[0] for entry in self._records("checks.jsonl", Finalist)]

    def refereed(self) -> list[Refereed]:
        """Return what was timed again after a search on several devices."""
        return self._records("referee.jsonl", Refereed)

    def batches(self) -> list[ByBatch]:
        """Return what was measured of files at many numbers of rows; a later line counts."""
        return self._records("batches.jsonl", ByBatch)

    def _records(self, name: str, kind: type[R]) -> list[R]:
        found = []
        for line in read_lines(self.path / name):
            with suppress(ValidationError):
                found.append(from_json(kind, line))
        return found

    def result(self) -> Result | None:
        """Return what the run ended with, None when it has not; its figures from its samples.

        Raises:
            StorageError: the file cannot be read.
        """
        path = self.path / "result.json"
        if not path.exists():
            return None
        with storage_errors(path):
            text = path.read_bytes()
        try:
            found = from_json(Result, text)
        except ValidationError as error:
            raise StorageError(
                f"{path}: not a result: {error.errors()[0]['msg']}\n"
                "  next: move the file away, then `tune --resume`"
            ) from error
        return recomputed_result(found)

    def best(self) -> Trial | None:
        """Return the fastest correct trial by screening, in the least over what was timed."""
        correct = [t for t in self.trials() if t.outcome.ranked_us is not None]
        return min(correct, key=lambda t: t.outcome.ranked_us or 0.0, default=None)

    @contextmanager
    def locked(self) -> Iterator[RunWriter]:
        """Open for writing, for one process at a time.

        Raises:
            RunLockedError: another process has it.
        """
        path = self.path / "lock"
        with storage_errors(path):
            lock = path.open("a")
        with lock:  # outside of storage_errors: the caller's own OSErrors are none of the lock's
            with storage_errors(path):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise RunLockedError(
                        f"{self.path}: another process works on this run\n"
                        "  next: wait for it, or stop it"
                    ) from error
            with whole_lines(self.path / "trials.jsonl"):
                pass  # what another process left half written goes
            with suppress(OSError):  # of who had the lock before, and may have been killed
                for name in (PROGRESS_NAME, FAILURE_NAME):
                    (self.path / name).unlink(missing_ok=True)
            yield RunWriter(self)


class RunWriter:
    """The one writer of a run directory."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def append(self, trial: Trial) -> None:
        """Append one outcome and see it on disk."""
        self._append_to("trials.jsonl", trial)

    def append_outlook(self, outlook: Outlook) -> None:
        """Append what the search expects of the rest, to `search.jsonl`."""
        self._append_to("search.jsonl", outlook)

    def append_check(self, entry: Finalist) -> None:
        """Append a finalist that was checked or raced, to `checks.jsonl`, and see it on disk."""
        self._append_to("checks.jsonl", entry)

    def append_refereed(self, found: Refereed) -> None:
        """Append a time that was taken again, to `referee.jsonl`."""
        self._append_to("referee.jsonl", found)

    def append_batches(self, found: ByBatch) -> None:
        """Append what was measured at many numbers of rows, to `batches.jsonl`."""
        self._append_to("batches.jsonl", found)

    def _append_to(self, name: str, record: Any) -> None:
        append_line(self.run.path / name, to_json(record))

    def write_result(self, result: Result) -> None:
        """Write what the run ended with."""
        self.write_text("result.json", to_json(result))

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of the run, whole or not at all; return its path."""
        path = self.run.path / name
        write_whole(path, text)
        return path


def create_run(
    runs_dir: Path, op: str, device: str, config_text: str, environment: Environment
) -> Run:
    """Make a new run directory, `<time>-<op>-<device>`, and write what was asked into it."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    safe = "".join(c if c.isalnum() else "-" for c in device.lower()).strip("-")
    with storage_errors(runs_dir):
        runs_dir.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            path = runs_dir / f"{stamp}-{op}-{safe}{f'-{attempt}' if attempt else ''}"
            try:
                path.mkdir()
                break
            except FileExistsError:
                continue
        else:
            raise FileExistsError(errno.EEXIST, "all names are taken", str(path))
        for folder in ("candidates", "export"):
            (path / folder).mkdir()
    run = Run(path)
    write_whole(run.config_path, config_text)
    environment.write(path)
    return run


def open_run(path: Path) -> Run:
    """Open an existing run directory.

    Raises:
        NoRunError: there is none at `path`.
        StorageError: what is there is damaged.
    """
    names = ("config.yaml", ENVIRONMENT_NAME)
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        near = sorted(p.parent.name for p in path.parent.glob("*/config.yaml"))[-5:]
        advice = f"runs there: {', '.join(near)}" if near else "next: name a folder of runs/"
        kind = NoRunError if len(missing) == len(names) else StorageError
        raise kind(f"{path}: not a run directory (no {', no '.join(missing)})\n  {advice}")
    return Run(path)


def is_locked(run: Run, *, by_another: bool = False) -> bool:
    """Whether a process works on a run now; asked without touching the lock.

    Trying the lock would be seen by a `tune` that starts at the same instant, so Linux's own
    list of locks is read. Elsewhere the lock is tried.

    Args:
        run: in question.
        by_another: this very process does not count; elsewhere than on Linux none then does.
    """
    path = run.path / "lock"
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return not by_another and path.exists() and not _may_lock(path)
    # "1: FLOCK  ADVISORY  WRITE 4711 08:01:123456 0 EOF"; a file system's device number there
    # may differ from what stat says of it, the inode does not.
    fields = (line.split() for line in lines)
    owners = {f[-4] for f in fields if f[1] == "FLOCK" and f[-3].split(":")[-1] == str(inode)}
    return bool(owners - ({str(os.getpid())} if by_another else set()))


def _may_lock(path: Path) -> bool:
    try:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def parsed_trials(path: Path, lines: Sequence[bytes], num_before: int = 0) -> list[Trial]:
    """Return the trials of whole lines of a `trials.jsonl`.

    A latency that is not the median of its samples is left out (`records.set_aside`).

    Args:
        path: of the file, for what an error says.
        lines: of the file, without their newlines.
        num_before: how many lines stand before these.

    Raises:
        StorageError: a line cannot be read.
    """
    trials = []
    for number, line in enumerate(lines, num_before + 1):
        try:
            trials.append(set_aside(from_json(Trial, line)))
        except ValidationError as error:
            raise StorageError(
                f"{path}:{number}: not a trial: {error.errors()[0]['msg']}\n"
                f"  next: move the line away; the other {num_before + len(lines) - 1} are kept"
            ) from error
    return trials
