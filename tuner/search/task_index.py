"""What the runs of a folder found for their tasks: an index, so that no start reads them all.

    <cache>/tuner/index/<key of the folder>.json

The run directories are the truth. For each of them the index keeps what was read from it, with the
times and sizes of the files that it was read from; what differs from these is read anew. An index
that is lost, damaged or of another tuner is made again, and where two processes write it at once,
what one of them lacks is read once more. Nothing in it is a result: it says what to try.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.capture.outline import MODULE_FILE, KernelTask
from tuner.environment import Environment
from tuner.errors import TunerError
from tuner.machine.host import cache_folder
from tuner.run import Run, is_locked, open_run
from tuner.storage import write_whole
from tuner.trial import Params, content_key, from_json, to_json

__all__ = ["KnownRun", "known_runs", "operator_task", "versions_of"]

FORMAT = 2  # of the index
# Of trials that the index lacks, the latest runs first: some 0.1 s. Later starts read the others.
READ_AT_ONCE_BYTES = 16e6
_FILES = ("environment.json", MODULE_FILE, "trials.jsonl", "result.json")


@dataclass(frozen=True, slots=True)
class KnownRun:
    """What a run found.

    Attributes:
        name: of its folder.
        device: on which it was.
        versions: of PyTorch and the compilers, as `versions_of` gives them.
        tasks: of its module, without their steps; the operator as a whole where it is no module.
        params: its fastest correct configuration, the verified winner where there is one.
        ranked_us: of that trial; it orders runs of the same tasks, and is reported to nobody.
    """

    name: str
    device: str
    versions: str
    tasks: tuple[KernelTask, ...]
    params: Params
    ranked_us: float


def known_runs(folder: Path) -> list[KnownRun]:
    """Return what the runs of a folder found, the latest first.

    Runs without a correct trial, folders that are none, and what cannot be read are left out.
    """
    path = cache_folder() / "index" / f"{content_key(folder.resolve())}.json"
    before = _read_index(path)
    now: dict[str, _Entry] = {}
    num_bytes, is_changed = 0, False
    for name in sorted(_names(folder), reverse=True):
        files = _stamps(folder / name)
        entry = before.get(name)
        is_news = files and (entry is None or entry.files != files)
        # What changes all the time is read when it is over.
        if is_news and num_bytes < READ_AT_ONCE_BYTES and not is_locked(Run(folder / name)):
            entry, is_changed = _Entry(files, _read_run(folder / name)), True
            num_bytes += max(files[_FILES.index("trials.jsonl")][1], 0)
        if files and entry is not None:
            now[name] = entry
    if is_changed or now.keys() != before.keys():
        with suppress(TunerError, OSError, ValueError):  # what cannot be written is no cache
            write_whole(path, to_json(_Index(FORMAT, now)))
    return [entry.found for entry in now.values() if entry.found is not None]


def versions_of(machine: Mapping[str, str], toolchain: str) -> str:
    """Return the versions that decide how fast a configuration is, as one text.

    Args:
        machine: as a run's environment has it.
        toolchain: the label of its compilers.
    """
    return "; ".join(
        [f"torch {machine.get('torch')}", f"triton {machine.get('triton')}", toolchain]
    )


def operator_task(
    op: str, sizes: Mapping[str, int], accuracy: str, mode: str, num_bytes: int = 0
) -> KernelTask:
    """Return the one task of an operator that was written by hand, known by its name."""
    key = content_key(op, sorted(sizes.items()), accuracy, mode)
    return KernelTask("operator", (), op, key, content_key(op, accuracy, mode), num_bytes)


# ---- the index ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """A run as it was read; `files` are time (ns) and size (bytes) of each, -1 where absent."""

    files: tuple[tuple[int, int], ...]
    found: KnownRun | None


@dataclass(frozen=True, slots=True)
class _Index:
    format: int
    runs: dict[str, _Entry]


def _read_index(path: Path) -> dict[str, _Entry]:
    try:
        index = from_json(_Index, path.read_bytes())
    except (OSError, ValueError):  # absent or damaged: it is made again
        return {}
    return index.runs if index.format == FORMAT else {}


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _stamps(run: Path) -> tuple[tuple[int, int], ...]:
    """Return what tells whether a run's files changed; nothing where the folder is no run."""
    found = []
    for name in _FILES:
        try:
            about = os.stat(run / name)
        except OSError:
            found.append((-1, -1))
        else:
            found.append((about.st_mtime_ns, about.st_size))
    has_trials = found[0][0] >= 0 and found[2][0] >= 0
    return tuple(found) if has_trials else ()


# ---- a run ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tasks:
    tasks: tuple[KernelTask, ...]


@dataclass(frozen=True, slots=True)
class _Module:
    """What is read of `module.json`."""

    outline: _Tasks


@dataclass(frozen=True, slots=True)
class _Result:
    """What is read of `result.json`."""

    winner: int | None


def _read_run(path: Path) -> KnownRun | None:
    """Return what a run found; None where that is nothing, or not to be read."""
    try:
        run = open_run(path)
        trials, environment = run.trials(), run.environment()
        tasks = _tasks_of(path, environment)
        winner = None
        if (path / "result.json").exists():
            winner = from_json(_Result, (path / "result.json").read_bytes()).winner
    except (TunerError, OSError, ValueError):
        return None
    timed = [(t.outcome.ranked_us, t) for t in trials if t.outcome.ranked_us is not None]
    if not timed or not tasks:
        return None
    ranked_us, best = min(timed, key=lambda pair: (pair[1].number != winner, pair[0]))
    versions = versions_of(environment.machine, environment.toolchain)
    return KnownRun(path.name, environment.device_name, versions, tasks, best.params, ranked_us)


def _tasks_of(path: Path, environment: Environment) -> tuple[KernelTask, ...]:
    """Return a run's tasks; none of a module whose record is older than the keys of tasks."""
    if not (path / MODULE_FILE).exists():
        e = environment
        return (operator_task(e.op, e.sizes, e.accuracy, e.mode or "as_given"),) if e.op else ()
    tasks = from_json(_Module, (path / MODULE_FILE).read_bytes()).outline.tasks
    return tuple(replace(task, steps=()) for task in tasks if task.key)
