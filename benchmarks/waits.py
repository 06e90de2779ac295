"""Say what tuners that share a GPU wait for while a command runs: turn by turn, summed.

    python -m benchmarks.waits [--notes FOLDER] -- python -m benchmarks.kernelbench_suite \
        --kernelbench KernelBench --level 2 --jobs 7 --json OUT

Each process of the command, and those that they start, notes the turns (`tuner.machine.turns`)
that it takes: a `sitecustomize` of this file's comes first on their PYTHONPATH. Seconds are summed
over processes: of seven tuners that work for 100 s there are 700. A turn that is not over when its
process ends is not noted; a command that is interrupted has its table all the same.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fcntl import LOCK_EX
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

NOTED = "tuner.machine.turns"
NOTES = "TUNER_WAITS"  # environment variable: the folder of the notes
HOOK = "from benchmarks.waits import note_turns\nnote_turns()\n"
MOST_SHOWN = 30
FRAMES = 2  # of tuner's functions that name a turn: who takes it, and who calls that


@dataclass(frozen=True, slots=True)
class Noted:
    """A turn: `parts` of what was taken, when it was asked for, and seconds."""

    what: str
    parts: int
    asked_s: float
    waited_s: float
    held_s: float
    place: str


class Hook(importlib.abc.MetaPathFinder):
    """Changes the room of turns as it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the room's own spec, whose turns are noted; None of any other module."""
        if name != NOTED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            change(module, Path(os.environ[NOTES]))

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def note_turns() -> None:
    """Note this process's turns from now on, if it ever imports their room."""
    if os.environ.get(NOTES):
        sys.meta_path.insert(0, Hook())


def change(turns: ModuleType, folder: Path) -> None:
    """Let the turns of a process be noted in a file of `folder`."""
    take = turns.Turns._take

    def noted(self: Any, stack: ExitStack, what: str, how: int, *args: Any, **places: Any) -> None:
        kind = what if how == LOCK_EX else f"{what}, shared"
        asked_s, begun_s, place = time.time(), list[float](), place_of(turns)

        def note() -> None:
            with suppress(OSError, IndexError), (folder / f"{os.getpid()}.tsv").open("a") as file:
                seconds = asked_s, begun_s[0] - asked_s, time.time() - begun_s[0]
                print(kind, places.get("num_wanted", 1), *seconds, place, sep="\t", file=file)

        stack.callback(note)  # behind the locks, which are let go first
        take(self, stack, what, how, *args, **places)
        begun_s.append(time.time())

    turns.Turns._take = noted


def place_of(turns: ModuleType) -> str:
    """Return the functions of tuner that take a turn, the innermost first."""
    others = {turns.__file__, __file__}
    root = Path(str(turns.__file__)).parents[1]
    frames = [
        f"{Path(frame.filename).stem}.{frame.name}"
        for frame in reversed(traceback.extract_stack())
        if frame.filename not in others and root in Path(frame.filename).parents
    ]
    return " < ".join(frames[:FRAMES])


def noted_in(folder: Path) -> list[Noted]:
    """Read the notes of all processes."""
    lines = [line for file in folder.glob("*.tsv") for line in file.read_text().splitlines()]
    fields = (line.split("\t") for line in lines)
    return [
        Noted(w, int(n), float(a), float(b), float(c), place) for w, n, a, b, c, place in fields
    ]


def table(noted: Sequence[Noted]) -> list[str]:
    """Return lines: what was taken, how often, seconds waited and held; the longest first."""
    sums: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for turn in noted:
        parts = f" ({turn.parts})" if turn.parts > 1 else ""
        for key in ((turn.what + parts, turn.place), (turn.what, "all")):
            row = sums[key]
            row[0] += 1
            row[1] += turn.waited_s
            row[2] += turn.held_s
            row[3] = max(row[3], turn.held_s)
    longest = sorted(sums.items(), key=lambda item: -item[1][1] - item[1][2])[:MOST_SHOWN]
    head = f"{'turn':>20} {'times':>7} {'waited, s':>10} {'held, s':>10} {'longest':>8}  where"
    return [
        head,
        *(
            f"{what:>20} {number:7.0f} {waited:10.1f} {held:10.1f} {most:8.1f}  {place}"
            for (what, place), (number, waited, held, most) in longest
        ),
    ]


def main() -> int:
    """Run the command, print what was waited for; the exit code is the command's."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--notes", type=Path, help="a folder that is kept; else a temporary one")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="behind --")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command\n  next: python -m benchmarks.waits -- python -m ...")
    with tempfile.TemporaryDirectory() as temporary:
        hook, notes = Path(temporary, "hook"), options.notes or Path(temporary, "notes")
        for folder in (hook, notes):
            folder.mkdir(parents=True, exist_ok=True)
        (hook / "sitecustomize.py").write_text(HOOK)
        paths = [str(hook), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, NOTES: str(notes), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with subprocess.Popen(command, env=env) as process:
            while True:
                try:
                    code = process.wait()
                    break
                except KeyboardInterrupt:
                    continue  # the command got it as well, and ends
        print(*table(noted_in(notes)), sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
