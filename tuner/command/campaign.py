"""A campaign: many problems, each tuned by a `tune` of its own, side by side on several devices.

It may be killed at any moment, and so may each of its processes: what is done, and what goes on,
is read from the run directories when it begins again.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tuner.command.problems import Ended, Problem, State, append_ended, states_of
from tuner.errors import says_no_memory
from tuner.fleet.chosen import Chosen
from tuner.machine.forkserver import die_with
from tuner.machine.platforms import VISIBLE, visible_as
from tuner.run import Run
from tuner.storage import storage_errors, write_whole
from tuner.wording import one_line

__all__ = ["Campaign", "format_table"]

LOOK_EVERY_S = 0.2  # whether a process has ended
AGAIN = ("--trials", "--timeout", "--time", "--effort", "--cluster", "--certificate")
ATTEMPTS = 3  # of a process that is killed, or fails for the machine's sake
NOTHING_CORRECT, INPUT = 1, 2  # exit codes of `tune`
TUNE = "import sys; sys.argv[0] = 'tune'; from tuner.command.cli import main; main()"
OVER = ("done", "nothing to gain", "nothing correct", "refused")


@dataclass(slots=True, eq=False)
class _Process:
    """A `tune` at work on a problem; `is_late` once it took longer than it may.

    `places` are those of its devices that it takes, several of one where it has that alone.
    `has_company`: others have been at work on its device meanwhile.
    """

    problem: Problem
    devices: tuple[str, ...]
    places: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: Path
    began_s: float
    is_late: bool = False
    has_company: bool = False


@dataclass(slots=True, eq=False)
class Campaign:
    """Problems, and where and how they are tuned.

    Args:
        problems: in the order in which they begin.
        runs_dir: of their runs, logs, exports and summary.
        options: of `tune`, for all of them.
        chosen: the devices of this host that are shared out, None where each problem has the
            one that its config names, or all of a cluster: then one is tuned after the other.
        jobs: problems that share a device, a GPU, which one has alone while it times.
        limit_s: of one problem; then it is ended. Another call of `work` goes on with it.
        on_change: called with what happened, in words.
        on_end: called with a problem that is over, what it ended with, and its seconds here.
    """

    problems: Sequence[Problem]
    runs_dir: Path
    options: Sequence[str] = ()
    chosen: Chosen | None = None
    jobs: int = 1
    limit_s: float | None = None
    on_change: Callable[[str], None] = lambda words: None
    on_end: Callable[[Problem, State, float], None] = lambda problem, state, seconds: None
    _num_tried: dict[str, int] = field(default_factory=dict)
    _alone: list[Problem] = field(default_factory=list)  # which wait for a device of their own

    def states(self) -> dict[str, State]:
        """Return what each problem is at."""
        return states_of(self.problems, self.runs_dir, self.options)

    def work(self) -> dict[str, State]:
        """Tune all that is not done; return what each problem ended with."""
        with storage_errors(self.runs_dir):
            (self.runs_dir / "logs").mkdir(parents=True, exist_ok=True)
        states = self.states()
        waiting = [p for p in self.problems if states[p.name].status not in OVER]
        num_over = len(self.problems) - len(waiting)
        if num_over:
            self.on_change(f"{num_over} of {len(self.problems)} problems are done already")
        free = self.jobs * (list(self.chosen.names) if self.chosen is not None else [""])
        running: list[_Process] = []
        began_s, num_here = time.monotonic(), len(waiting)
        try:
            while waiting or running or self._alone:
                while waiting and free:
                    count = max(1, len(free) // len(waiting)) if self.jobs == 1 else 1
                    devices, free = tuple(free[:count]), free[count:]
                    running.append(self._started(waiting.pop(0), devices))
                whole = [name for name in dict.fromkeys(free) if free.count(name) == self.jobs]
                for name in whole[: len(self._alone)]:  # there are such once nobody waits
                    free = [other for other in free if other != name]
                    running.append(self._started(self._alone.pop(0), (name,), self.jobs))
                for one in running:
                    one.has_company |= sum(one.devices[0] in o.devices for o in running) > 1
                self._end_late(running)
                ended = [one for one in running if one.process.poll() is not None]
                for one in ended:
                    running.remove(one)
                    free += one.places
                    if self._waits_to_be_alone(one):
                        self._alone.append(one.problem)
                    elif self._is_over(one):
                        left = len(waiting) + len(running) + len(self._alone)
                        spent_s = time.monotonic() - began_s
                        self._tell(one, left, spent_s / max(1, num_here - left) * left)
                    else:
                        waiting.insert(0, one.problem)
                if not ended:
                    time.sleep(LOOK_EVERY_S)
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()
        states = self.states()
        self._write(states, states)
        return states

    def _end_late(self, running: Sequence[_Process]) -> None:
        for one in running:
            spent_s = time.monotonic() - one.began_s
            is_late = self.limit_s is not None and spent_s > self.limit_s
            if is_late and one.process.poll() is None:
                one.is_late = True
                one.process.kill()
                one.process.wait()
                self._end(one, "no file in time", _last_words(one.log))

    # ---- one problem -------------------------------------------------------------------------

    def _started(
        self, problem: Problem, devices: tuple[str, ...], num_places: int = 1
    ) -> _Process:
        state = self.states()[problem.name]
        if state.run is not None:
            command = ["--resume", str(state.run)]
            command += self._resumable()
        else:
            command = [problem.option, str(problem.path), "--runs-dir", str(self.runs_dir)]
            command += self.options
        env, cores = dict(os.environ), None
        if self.chosen is not None and self.chosen.cores:
            cores = [core for name in devices for core in self.chosen.cores[name]]
            env["OMP_NUM_THREADS"] = str(len(cores) // len(devices))
        elif self.chosen is not None:
            env[VISIBLE] = visible_as(devices, env)
        if self.chosen is not None and (len(devices) > 1 or not cores):
            command += ["--devices", ",".join(str(n) for n in range(len(devices)))]
        log = self.runs_dir / "logs" / f"{problem.name}.txt"
        with storage_errors(log), log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", TUNE, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=env,
                start_new_session=True,  # Ctrl-C is the campaign's
                preexec_fn=functools.partial(_settle, os.getpid(), cores),
            )
        self._num_tried[problem.name] = self._num_tried.get(problem.name, 0) + 1
        where = f" on {', '.join(devices)}" if any(devices) else ""
        what = "goes on" if state.run is not None else "begins"
        self.on_change(f"{problem.name}: {what}{where}")
        return _Process(problem, devices, devices * num_places, process, log, time.monotonic())

    def _resumable(self) -> list[str]:
        """Return those of the options that may be given again to a run."""
        found: list[str] = []
        for option, value in itertools.pairwise(self.options):
            if option in AGAIN:
                found += [option, value]
        return found

    def _waits_to_be_alone(self, one: _Process) -> bool:
        """Whether a problem that has ended lacked memory that others on its device have had."""
        is_over = one.is_late or self.states()[one.problem.name].status in OVER
        if is_over or one.process.returncode == 0 or not one.has_company:
            return False
        lacks = says_no_memory(_last_message(one.log))
        if lacks:
            words = "memory ran out beside others; it begins again with a device of its own"
            self.on_change(f"{one.problem.name}: {words}")
        return lacks

    def _is_over(self, one: _Process) -> bool:
        """Whether a problem whose process has ended is not to be tried again."""
        if one.is_late or self.states()[one.problem.name].status in OVER:
            return True
        code, said = one.process.returncode, _last_words(one.log)
        if code == 0:
            self._end(one, "nothing to gain", said)
        elif code == NOTHING_CORRECT:
            self._end(one, "nothing correct", said)
        elif code == INPUT:
            self._end(one, "refused", said)
        elif self._num_tried[one.problem.name] < ATTEMPTS:
            self.on_change(f"{one.problem.name}: its process ended with {code}; it goes on")
            return False
        else:
            self._end(one, "failed", said or f"its process ended with {code}")
        return True

    def _end(self, one: _Process, status: str, reason: str) -> None:
        spent_s = time.monotonic() - one.began_s
        digest = one.problem.digest(self.options)
        append_ended(
            self.runs_dir,
            Ended(str(one.problem.path), digest, status, reason, spent_s),  # type: ignore[arg-type]
        )

    def _tell(self, one: _Process, num_left: int, left_s: float) -> None:
        states = self.states()
        state = states[one.problem.name]
        self._write(states, [one.problem.name])
        self.on_end(one.problem, state, time.monotonic() - one.began_s)
        words = f"{state.speedup:.2f}x" if state.speedup is not None else state.status
        words += f", {state.verdict}" if state.verdict else ""
        reason = f": {one_line(state.reason, 100)}" if state.reason else ""
        left = f"; {num_left} left, about {left_s / 60:.0f} min" if num_left else ""
        self.on_change(f"{one.problem.name}: {words}{reason}{left}")

    # ---- what is left of it ------------------------------------------------------------------

    def _write(self, states: dict[str, State], names: Iterable[str]) -> None:
        """Write the table, and the exported files of some problems, each under its name."""
        exports = self.runs_dir / "exports"
        with storage_errors(exports):
            exports.mkdir(exist_ok=True)
            for name in names:
                state = states[name]
                if state.status == "done" and state.run is not None:
                    shutil.copyfile(Run(state.run).export_path, exports / f"{name}.py")
        rows = [{"problem": name, **asdict(state)} for name, state in states.items()]
        text = json.dumps(rows, indent=1, default=str)  # paths
        write_whole(self.runs_dir / "summary.json", text)
        write_whole(self.runs_dir / "summary.txt", format_table(states) + "\n")


def _settle(parent_pid: int, cores: Sequence[int] | None) -> None:
    die_with(parent_pid)
    if cores is not None:
        os.sched_setaffinity(0, cores)


def _last_message(log: Path) -> str:
    """Return the last message of `tune`: why it ended."""
    lines = log.read_text(errors="replace").splitlines()[-40:]
    starts = [n for n, line in enumerate(lines) if line.startswith("error: ")]
    chosen = lines[starts[-1] :] if starts else lines[-1:]
    return "\n".join(chosen).removeprefix("error: ")


def _last_words(log: Path) -> str:
    return one_line(_last_message(log))


def format_table(states: dict[str, State]) -> str:
    """Return a campaign's problems as a table, and what they ended with in sum."""
    width = max(map(len, states), default=0)
    lines = []
    for name, state in states.items():
        speed = f"{state.speedup:7.2f}x" if state.speedup is not None else ""
        speed += f"  {state.verdict}" if state.verdict else ""
        run = f"  {state.run.name}" if state.run is not None else ""
        reason = f"  {one_line(state.reason, 120)}" if state.reason else ""
        lines.append(f"{name:{width}}  {state.status:15} {speed}{run}{reason}".rstrip())
    counts = {s.status: 0 for s in states.values()}
    for state in states.values():
        counts[state.status] += 1
    lines.append(", ".join(f"{number} {status}" for status, number in counts.items()))
    return "\n".join(lines)
