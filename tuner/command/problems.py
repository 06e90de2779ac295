"""A campaign's problems, and what the run directories say of each.

Nothing else is kept of a campaign, but for one line a problem that ended without a result, of
which there may be no run: `ended.jsonl`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from tuner.config.document import read_document, shown
from tuner.errors import InputError, StorageError
from tuner.run import Run, open_run
from tuner.storage import append_line, read_lines, storage_errors

__all__ = ["Ended", "Problem", "State", "append_ended", "problems_of", "states_of"]

ENDED_NAME = "ended.jsonl"
Status = Literal[
    "waiting", "begun", "done", "nothing to gain", "nothing correct", "refused", "no file in time",
    "failed",
]  # fmt: skip
KINDS = {".py": "--module", ".yaml": "--config", ".yml": "--config"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One module or config of a campaign.

    Attributes:
        name: unlike that of any other of the campaign.
        path: of the file, absolute.
    """

    name: str
    path: Path

    @property
    def option(self) -> str:
        """The option of `tune` that takes the file."""
        return KINDS[self.path.suffix]

    def digest(self, options: Sequence[str]) -> str:
        """Return what tells whether the file, or what is asked for it, is another one now."""
        return hashlib.sha256(self.path.read_bytes() + repr(list(options)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Ended:
    """A problem that ended without a result, as `tune` said."""

    problem: str  # path of the file
    digest: str
    status: Status
    reason: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class State:
    """What a problem is at.

    Attributes:
        status: `begun` where there is a run without a result, `failed` where its process ended
            again and again: another call tries it once more.
        run: the run, None where there is none.
        speedup: of the exported file; 1 where that holds PyTorch's own modules.
        reason: in words, where there is no result.
        verdict: on that file: faster, no difference, slower, or that it holds PyTorch's modules.
    """

    status: Status
    run: Path | None = None
    speedup: float | None = None
    reason: str = ""
    verdict: str = ""


# ---- what there is to do --------------------------------------------------------------------


def problems_of(path: Path) -> list[Problem]:
    """Return a campaign's problems, in order.

    Args:
        path: a folder of modules and configs, or a YAML file with a list `problems` of modules,
            configs and folders, relative to it.

    Raises:
        InputError: something of it is not there, or is neither.
    """
    if path.is_dir():
        files = _files_of(path)
    elif path.is_file():
        files = _listed(path)
    else:
        raise InputError(f"{path}: no such file or folder")
    files = list(dict.fromkeys(file.resolve() for file in files))
    if not files:
        raise InputError(f"{path}: no modules (.py) or configs (.yaml) in it")
    stems = [file.stem for file in files]
    names: list[str] = []
    for file in files:
        name = file.stem if stems.count(file.stem) == 1 else f"{file.parent.name}_{file.stem}"
        while name in names:
            name += "_"
        names.append(name)
    return [Problem(name, file) for name, file in zip(names, files, strict=True)]


def _files_of(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if file.suffix in KINDS and file.is_file()]


def _listed(path: Path) -> list[Path]:
    with storage_errors(path):
        text = path.read_text(errors="replace")
    document = read_document(path, text)
    data = document.data if isinstance(document.data, dict) else {}
    entries = data.get("problems")
    is_list = isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)
    if not document.problems and not (is_list and set(data) == {"problems"}):
        document.report("", "expected `problems: [a.py, b.yaml, a_folder]`, and nothing else")
    found: list[Path] = []
    for place, entry in enumerate(entries if isinstance(entries, list) and is_list else []):
        file = path.parent / entry
        if file.is_dir():
            found += _files_of(file)
        elif file.is_file() and file.suffix in KINDS:
            found.append(file)
        else:
            expected = f"expected a module, a config or a folder, got {shown(entry)}"
            document.report(f"problems[{place}]", expected)
    if document.problems:
        raise document.error()
    return found


# ---- what became of it ----------------------------------------------------------------------


def states_of(
    problems: Sequence[Problem], runs_dir: Path, options: Sequence[str]
) -> dict[str, State]:
    """Return what each problem is at, by its name, as the run directories say.

    Args:
        problems: of the campaign.
        runs_dir: where its runs are.
        options: of `tune`, for all of them.
    """
    runs = _runs_of(runs_dir)
    ended = {(entry.problem, entry.digest): entry for entry in _ended(runs_dir)}
    found = {}
    for problem in problems:
        run = runs.get(str(problem.path))
        if run is not None and _is_edited(problem, run):
            run = None
        found[problem.name] = _state(run)
        entry = ended.get((str(problem.path), problem.digest(options)))
        if found[problem.name].status != "done" and entry is not None:
            path = None if run is None else run.path
            found[problem.name] = State(entry.status, path, None, entry.reason)
    return found


def _state(run: Run | None) -> State:
    if run is None:
        return State("waiting")
    result = run.result()
    if result is None:
        return State("begun", run.path)
    exported = result.exported
    if exported is None or not exported.check.is_accepted:
        reason = "" if exported is None else exported.check.reason
        return State("nothing correct", run.path, None, reason)
    if result.is_fallback:
        return State("done", run.path, 1.0, verdict="PyTorch's own modules")
    speedup = exported.least.speedup if exported.least is not None else None
    return State("done", run.path, speedup, verdict=exported.verdict or "not raced")


def _is_edited(problem: Problem, run: Run) -> bool:
    """Whether a problem's file was written after its run began, which is of another one then."""
    began = datetime.fromisoformat(run.environment().started_at)
    return int(problem.path.stat().st_mtime) > began.timestamp()


def _runs_of(runs_dir: Path) -> dict[str, Run]:
    """Return the latest run of each file that a command named, by the file's path."""
    found: dict[str, Run] = {}
    for path in sorted(runs_dir.glob("*/environment.json")):
        with suppress(StorageError, ValueError):  # a run that was killed while it was made
            run = open_run(path.parent)
            words = shlex.split(run.environment().command)
            for option, value in itertools.pairwise(words):
                if option in KINDS.values():
                    found[value] = run
    return found


def _ended(runs_dir: Path) -> list[Ended]:
    found = []
    for line in read_lines(runs_dir / ENDED_NAME):
        with suppress(ValueError, TypeError):  # a line that cannot be read is done again
            fields: Mapping[str, Any] = json.loads(line)
            found.append(Ended(**fields))
    return found


def append_ended(runs_dir: Path, ended: Ended) -> None:
    """Note that a problem ended without a result, and see it on disk."""
    path = runs_dir / ENDED_NAME
    with storage_errors(path):
        runs_dir.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps(asdict(ended)))
