"""Start, stop and resume runs: real `tune` processes, for configs of one folder only.

A run is the machine's own while it measures, so that one at a time is started. What a process
prints goes to a file; it is asked to stop as by Ctrl-C, and what it found is still verified.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import IO

from tuner.errors import InputError, RunLockedError
from tuner.review.listing import WORKING
from tuner.review.run_index import RunIndex

__all__ = ["Job", "Launcher"]

MAX_OUTPUT_BYTES = 8_000  # of what a process printed: its last lines
MAX_CONFIGS = 500

# Totals that may be given at the start: `50`, `10m`, `1.5h`.
_OVERRIDES = {
    "trials": re.compile(r"[1-9]\d{0,6}"),
    "timeout": re.compile(r"\d+(\.\d+)?\s?(ms|s|m|h)"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A process that was started here. `run` is the run's name, once its folder is there."""

    what: str
    run: str
    is_alive: bool
    num_stops: int
    exit_code: int | None
    output: str


@dataclass(slots=True)
class _Process:
    what: str
    child: subprocess.Popen[bytes]
    log: IO[bytes]
    run: str
    num_stops: int = 0


class Launcher:
    """The processes of one dashboard; safe to use from several threads.

    Args:
        run_index: the runs.
        configs: the folder whose configs may be run; None if nothing may be.
    """

    def __init__(self, run_index: RunIndex, configs: Path | None) -> None:
        self._run_index = run_index
        self._configs = configs.resolve() if configs else None
        self._processes: list[_Process] = []
        self._lock = RLock()

    def configs(self) -> list[str]:
        """Return the names of the configs that may be run: the folder's own `*.yaml` files."""
        if self._configs is None:
            return []
        found = [*self._configs.glob("*.yaml"), *self._configs.glob("*.yml")]
        return sorted(p.name for p in found if p.is_file() and not p.is_symlink())[:MAX_CONFIGS]

    def start(self, config: str, overrides: Mapping[str, str]) -> Job:
        """Start a run of a config.

        Args:
            config: a name that `configs()` gives.
            overrides: `trials` and `timeout`, as the command line takes them.

        Raises:
            InputError: no such config, or an override of another form.
            RunLockedError: a run is going on.
        """
        if config not in self.configs():
            raise InputError(f"{config[:80]!r}: not a config of the folder given by --configs")
        options = []
        for name, value in overrides.items():
            if name not in _OVERRIDES or not _OVERRIDES[name].fullmatch(value):
                raise InputError(f"{name[:20]}: expected 50 trials or a timeout such as 10m")
            options.append(f"--{name}={value}")
        assert self._configs is not None
        path = str(self._configs / config)
        folder = str(self._run_index.folder.resolve())
        return self._run(config, "", ["--config", path, "--runs-dir", folder, *options])

    def resume(self, name: str) -> Job:
        """Go on with a run that stopped.

        Raises:
            InputError: no such run, or its config is none of the folder's as it is now.
            RunLockedError: a run is going on.
        """
        if not self.may_resume(name):
            raise InputError(
                f"{name[:80]!r}: its config is none of the folder given by --configs\n"
                "  next: tune --resume in a terminal, if you trust it"
            )
        path = self._run_index.run(name).path.resolve()
        return self._run(f"resume {name}", name, ["--resume", str(path)])

    def may_resume(self, name: str) -> bool:
        """Whether a run's config is, byte for byte, one of the folder's, and was read there."""
        if self._configs is None:
            return False
        run = self._run_index.run(name)
        try:
            folder = run.environment().config_folder
            text = run.config_path.read_bytes()
        except OSError:
            return False
        if not folder or Path(folder) != self._configs:
            return False
        return any((self._configs / config).read_bytes() == text for config in self.configs())

    def stop(self, name: str) -> Job:
        """Ask a run that was started here to stop; asked twice, it ends at once.

        Raises:
            InputError: it was not started here, or has ended.
        """
        with self._lock:
            for process in self._processes:
                if process.child.poll() is None and self._name_of(process) == name:
                    process.child.send_signal(signal.SIGINT)
                    process.num_stops += 1
                    return self._job(process)
        raise InputError(
            f"{name[:80]!r}: not started from this dashboard\n  next: Ctrl-C where it was started"
        )

    def jobs(self) -> list[Job]:
        """Return what was started here, the latest first."""
        with self._lock:
            return [self._job(process) for process in reversed(self._processes)]

    def close(self) -> int:
        """Ask what still runs to stop; return how many. They verify what they found and end."""
        with self._lock:
            alive = [p for p in self._processes if p.child.poll() is None]
            for process in alive:
                if not process.num_stops:
                    process.child.send_signal(signal.SIGINT)
                    process.num_stops += 1
            return len(alive)

    def _run(self, what: str, run: str, args: list[str]) -> Job:
        with self._lock:
            self._refuse_a_second()
            log = tempfile.TemporaryFile()  # noqa: SIM115  # kept open while it is shown
            child = subprocess.Popen(
                [sys.executable, "-m", "tuner", *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the dashboard's terminal is not for it
            )
            process = _Process(what, child, log, run)
            self._processes.append(process)
            return self._job(process)

    def _refuse_a_second(self) -> None:
        busy = [p.what for p in self._processes if p.child.poll() is None]
        busy += [shown.name for shown in self._run_index.runs() if shown.state in WORKING]
        if busy:
            raise RunLockedError(
                f"{busy[0]} is running: two at once would disturb each other's times\n"
                "  next: wait for it, or stop it"
            )

    def _job(self, process: _Process) -> Job:
        code = process.child.poll()
        return Job(
            process.what,
            self._name_of(process),
            code is None,
            process.num_stops,
            code,
            _tail(process.log),
        )

    def _name_of(self, process: _Process) -> str:
        """Return the run of a process, from the line `run PATH` that it prints first."""
        if not process.run:
            found = re.search(rb"s  run (.+)\n", _head(process.log))
            if found:
                process.run = Path(found[1].decode(errors="replace")).name
        return process.run


def _head(log: IO[bytes]) -> bytes:
    return os.pread(log.fileno(), 64_000, 0)


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    start = max(0, size - MAX_OUTPUT_BYTES)
    data = os.pread(log.fileno(), MAX_OUTPUT_BYTES, start)
    return data.decode(errors="replace")
