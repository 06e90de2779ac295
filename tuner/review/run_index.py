"""A folder of runs: what each one is at, read cheaply and again and again.

A `RunIndex` remembers what it has read of each run and looks at what was added since: a list of
hundreds of runs, and a page that follows a run of 10,000 trials, cost what is new in them. It
opens nothing that lies outside of its folder, whatever links a run holds.
"""

from __future__ import annotations

import math
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import RLock

from tuner.capture.outline import MODULE_FILE
from tuner.errors import InputError, TunerError
from tuner.profiled import COUNTERS_NAME, PROFILE_NAME
from tuner.review.formatting import rejection_words
from tuner.review.listing import WRITTEN, Shown, Tally, put_in_words, shown
from tuner.review.notes import NOTES_NAME, Note, note_of
from tuner.review.run_data import (
    RunData,
    is_all_rejected,
    latency_us_of,
    rejected_of,
    speedup_over,
)
from tuner.run import LOG_NAME, PROGRESS_NAME, Run, is_locked, parsed_trials
from tuner.storage import storage_errors
from tuner.trial import Trial
from tuner.underway import Underway, underway
from tuner.wording import one_line

__all__ = ["RunIndex"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,254}")
_FILES = (
    "config.yaml",
    "environment.json",
    "trials.jsonl",
    "search.jsonl",
    "checks.jsonl",
    "result.json",
    "study.journal",
    "lock",
    PROGRESS_NAME,
    "candidates",
    "export",
    "export/model_new.py",
    COUNTERS_NAME,
    PROFILE_NAME,
    LOG_NAME,
    MODULE_FILE,
    NOTES_NAME,
    "report.html",
)
_STAMPED = (*WRITTEN, "search.jsonl", NOTES_NAME, "report.html")
_ABSENT = (0, 0, 0)  # the stamp of a file that is not there
_STARTED = re.compile(r"\d{8}-\d{6}-")  # how the name of a run begins
_KEPT_RUNS = 6  # whose trials stay in memory: about 10 kB a trial


class RunIndex:
    """The runs of one folder; safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._root = folder.resolve()
        self._tallies: dict[str, Tally] = {}
        self._trials: OrderedDict[str, _Reader] = OrderedDict()
        self._lock = RLock()

    def names(self) -> list[str]:
        """Return the names of all runs, the latest first; none where the folder is missing.

        Raises:
            StorageError: the folder cannot be read.
        """
        return [name for name, is_whole in self._folders() if is_whole]

    def runs(self) -> list[Shown]:
        """Return every run as a list shows it, the latest first; also what is left of one."""
        return [self.shown(name) for name, _ in self._folders()]

    def _folders(self) -> list[tuple[str, bool]]:
        """Return what is a run or is called like one, and whether it says what it is of."""
        if not self.folder.exists():
            return []
        found = []
        with storage_errors(self.folder), os.scandir(self.folder) as entries:
            for entry in entries:
                if not _NAME.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
                    continue
                is_whole = os.path.isfile(os.path.join(entry.path, "environment.json"))
                if is_whole or _STARTED.match(entry.name):
                    found.append((entry.name, is_whole))
        return sorted(found, reverse=True)

    def shown(self, name: str) -> Shown:
        """Return one run as a list shows it.

        Raises:
            InputError: there is no such run.
        """
        run = self._named(name)
        with self._lock:
            tally = self._tallies.setdefault(name, Tally())
            self._look(run, tally)
            return shown(run, tally)

    def run(self, name: str) -> Run:
        """Return a run by its name, once it is known that nothing of it lies outside.

        Raises:
            InputError: there is no such run, or a link in it leads out of the folder.
        """
        run = self._named(name)
        stray = self._stray(run.path)
        if stray:
            raise InputError(
                f"{name}: {stray} leads out of the run's folder\n"
                "  next: replace the link by the file, if you trust it"
            )
        return run

    def run_data(self, name: str) -> RunData:
        """Return all that is known of a run; of its trials only new ones are read again.

        Raises:
            InputError: as for `run`.
            StorageError: a file of the run cannot be read.
        """
        run = self.run(name)
        with self._lock:
            reader = self._trials.pop(name, None) or _Reader(run)
            self._trials[name] = reader
            while len(self._trials) > _KEPT_RUNS:
                self._trials.popitem(last=False)
            trials = reader.read()
        return replace(RunData.of(run, trials), is_running=is_locked(run))

    def underway(self, name: str) -> Underway | None:
        """Return what a run is at; None where no process works on it, or it has not said.

        Raises:
            InputError: there is no such run.
        """
        return underway(self._named(name))

    def stamp(self, name: str) -> str:
        """Return a word that changes whenever a run does; empty when it is gone."""
        try:
            run = self._named(name)
        except InputError:
            return ""
        parts = [f"{size}.{time_ns}" for _, size, time_ns in _stamps(run.path)]
        return "-".join([*parts, "running" if is_locked(run) else ""])

    def _named(self, name: str) -> Run:
        path = self.folder / name
        if not _NAME.fullmatch(name) or path.is_symlink() or not path.is_dir():
            raise InputError(f"{name[:80]!r}: no run of that name in {self.folder}")
        return Run(path)

    def _stray(self, path: Path) -> str:
        """Return what of a run lies elsewhere, by its name in the run; empty if nothing does."""
        root = self._root / path.name
        for name in _FILES:
            if (path / name).resolve() != root / name:
                return name
        return ""

    def _look(self, run: Run, tally: Tally) -> None:
        stamps = _stamps(run.path)
        if stamps == tally.stamps:
            return
        tally.stamps, tally.problem = stamps, ""
        try:
            stray = self._stray(run.path)
            if stray:
                raise InputError(f"{stray} leads out of the run's folder")
            has_note = stamps[_STAMPED.index(NOTES_NAME)] != _ABSENT
            tally.note = note_of(run.path) if has_note else Note()
            if stamps[0] == _ABSENT and (missing := _missing(run.path)):
                raise InputError(missing)
            tally.has_config = run.config_path.is_file()
            tally.environment = run.environment()
            tally.result = run.result()
            put_in_words(tally)
            checks = run.checks() if tally.result is None else []
            is_rejected = is_all_rejected(checks)
            tally.rejection = rejection_words(rejected_of(checks)) if is_rejected else ""
            _count(run.path / "trials.jsonl", tally)
        except TunerError as error:
            tally.problem = one_line(str(error))


def _missing(path: Path) -> str:
    """Return what a folder lacks that makes it a run; empty where nothing is."""
    try:
        held = sorted(os.listdir(path))
    except OSError as error:
        return f"the folder cannot be read: {error.strerror}"
    if not held:
        return "the folder is empty: nothing of a run is in it"
    if "environment.json" not in held:
        return f"the folder is no whole run: environment.json is missing beside {', '.join(held)}"
    return ""


class _Reader:
    """The trials of one run, read on from where it last stopped."""

    def __init__(self, run: Run) -> None:
        self._path = run.path / "trials.jsonl"
        self._trials: list[Trial] = []
        self._offset = 0
        self._inode = 0

    def read(self) -> Sequence[Trial]:
        data, offset, inode = _newer(self._path, self._offset, self._inode)
        if data is None:
            self._trials = []
            data, offset, inode = _newer(self._path, 0, 0)
        if data:  # another list only where there is more in it
            newer = parsed_trials(self._path, data.split(b"\n")[:-1], len(self._trials))
            self._trials = [*self._trials, *newer]
        self._offset, self._inode = offset, inode
        return self._trials


def _newer(path: Path, offset: int, inode: int) -> tuple[bytes | None, int, int]:
    """Return the whole lines after an offset, and where they end; None if the file is another."""
    if not path.exists():
        return b"", 0, 0
    with storage_errors(path), path.open("rb") as file:
        status = os.fstat(file.fileno())
        if offset and (status.st_ino != inode or status.st_size < offset):
            return None, 0, 0
        file.seek(offset)
        data = file.read()
    end = data.rfind(b"\n") + 1
    return data[:end], offset + end, status.st_ino


def _stamps(path: Path) -> tuple[tuple[int, int, int], ...]:
    found = []
    for name in _STAMPED:
        try:
            status = os.stat(path / name)
        except OSError:
            found.append(_ABSENT)
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _count(path: Path, tally: Tally) -> None:
    """Count the trials; of a run without a result, also find the best of them."""
    data, offset, inode = _newer(path, tally.offset, tally.inode)
    if data is None:
        tally.num_trials, tally.best_us, tally.best_ratio = 0, math.inf, 0.0
        data, offset, inode = _newer(path, 0, 0)
    data = data or b""
    if tally.result is None:
        baseline_us = tally.environment.baseline_us
        for trial in parsed_trials(path, data.split(b"\n")[:-1], tally.num_trials):
            ratio = speedup_over(trial, baseline_us)
            if ratio and latency_us_of(trial) < tally.best_us:
                tally.best_us, tally.best_ratio = latency_us_of(trial), ratio
    tally.offset, tally.inode = offset, inode
    tally.num_trials += data.count(b"\n")
