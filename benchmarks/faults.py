"""Kill the tuner again and again, and count what that costs.

python -m benchmarks.faults                     50 kills of a search, 50 of whole tunings: 15 min
python -m benchmarks.faults --kills 5           fewer of each
python -m benchmarks.faults --only search       the first half alone: a minute
python -m benchmarks.faults --devices 4         searches that several devices answer, out of order

A search has a deterministic evaluator, so its sequence must be that of an uninterrupted run; of
several devices, which answer in an order of chance, that of one in which they answer so. A
tuning is `tune` itself on the CPU: real compilers, workers and timings. Each is killed with
SIGKILL at a random moment, its start and its replay of earlier trials included, and resumed.
Exit code 0 when nothing was lost, doubled or left behind.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO
from unittest.mock import patch

import psutil

from tuner.environment import Environment
from tuner.fleet.dispatch import QUEUED
from tuner.run import Run, create_run, open_run
from tuner.search import study
from tuner.search.samplers import SAMPLERS
from tuner.search.study import SearchBudget, search
from tuner.space.constraints import Constraint, Parameter
from tuner.space.expression import Expression
from tuner.space.search_space import SearchSpace
from tuner.trial import Check, Measurement, Outcome, Params, Status, Trial

ROOT = Path(__file__).parent.parent
STEP_S = 0.02  # an answer of the deterministic evaluator
SEARCH_TRIALS = 120
KILL_WITHIN_S = 0.05  # of a search's first sign of life: two or three answers
STARTING_S = 10.0  # of a tuning: PyTorch takes some seconds to import
SEARCHING_S = 4.0  # after a sign of life: about twenty trials on a quiet machine
SIGNS = ("", "baseline: ", " #", " #", " #")  # of life, one of which is waited for: "" is none
GONE_WITHIN_S = 30.0  # its processes, after the tuner was killed

TUNING = """
problem: {op: layer_norm, sizes: {rows: 64, cols: 96}}
device: cpu
space:
  template: [cpu]
  stats: [shared_memory, two_pass, atomics]
  split: [1, 2, 8, 64]
  width: [4, 8, 16]
  piece: [512, 1024, 2048, 4096]
  stream_output: [true, false]
  huge_pages: [true, false]
  max_threads: [0, 1, 2, 3, 4, 5]
search: {sampler: random, trials: 100000, seed: 5, timeout: 10h}
measure: {screen: 2ms, finalists: 20ms, num_finalists: 1, num_processes: 2}
"""


# ---- a search whose answers depend on the question alone ------------------------------------


def small_space() -> SearchSpace:
    """Return a space of 160 configurations, with a conditional parameter and a constraint."""
    return SearchSpace.build(
        [
            Parameter("template", ("mma", "library")),
            Parameter("block", (16, 32, 64, 128, 256)),
            Parameter("stages", (1, 2, 3, 4, 5, 6), Expression.parse("template == 'mma'")),
            Parameter("vector", (1, 2, 4, 8, 16)),
        ],
        [Constraint(Expression.parse("block * stages <= 1024"), "fits")],
        {},
    )


@dataclass
class Flying:
    """A configuration on its way."""

    params: Params
    candidate_key: str


class Deterministic:
    """An evaluator whose answers are a hash of the question: times and every kind of failure."""

    overlaps = True

    def __init__(self, *, ahead: int = 3, step_s: float = 0.0, devices: int = 1) -> None:
        self.ahead = ahead if devices == 1 else QUEUED * devices
        self.devices = devices
        self._step_s = step_s

    def submit(self, params: Params) -> Flying:
        """Take a configuration."""
        return Flying(params, hashlib.sha256(repr(sorted(params.items())).encode()).hexdigest())

    def first_ready(self, pending: Sequence[Flying], timeout_s: float | None = None) -> int:
        """All are: the first."""
        return 0

    def finish(self, pending: Flying, number: int, best_us: float | None) -> Outcome:
        """Answer it."""
        is_one = self.devices == 1
        time.sleep(self._step_s * (1.0 if is_one else random.expovariate(1.0 / self.devices)))
        digest = bytes.fromhex(pending.candidate_key)
        kinds = [status for status in Status if status is not Status.CORRECT]
        if digest[0] < 80:
            status = kinds[digest[1] % len(kinds)]
            return Outcome(status, f"it is {status.value}")
        us = 10.0 + digest[2] + digest[3] / 256
        measured = Measurement(us, 0.01, (us,), is_cold=True)
        return Outcome(Status.CORRECT, "", check=Check(True, "float32"), measurement=measured)


def searched(run: Run, evaluator: Deterministic, sampler: str, *, seed: int, trials: int) -> str:
    """Search `small_space` in a run, from where it stands; return why it ended."""
    with run.locked() as writer:
        return search(
            small_space(),
            evaluator,
            sampler=sampler,
            seed=seed,
            budget=SearchBudget(trials, 1e9),
            journal=run.journal_path,
            previous=run.trials(),
            record=writer.append,
            at_once=evaluator.devices,
        )


def is_one_search(trials: Sequence[Trial], sampler: str, *, seed: int, devices: int) -> bool:
    """Whether one uninterrupted search asks all of these, where it is answered in their order."""

    class OtherQuestions(Exception):
        pass

    def diverged(*_: object) -> None:
        raise OtherQuestions

    try:
        with patch.object(study, "add_previous", diverged):
            search(
                small_space(),
                Deterministic(devices=devices),
                sampler=sampler,
                seed=seed,
                budget=SearchBudget(len(trials), 1e9),
                journal=None,
                previous=trials,
                record=diverged,
                at_once=devices,
            )
    except OtherQuestions:
        return False
    return True


@dataclass(frozen=True)
class Seen:
    """What came of a killed program."""

    kills: int
    num_trials: int


def killed_search(
    path: Path,
    sampler: str,
    *,
    seed: int,
    trials: int,
    kills: int,
    draw: random.Random,
    devices: int = 1,
) -> Seen:
    """Search in a process of its own that is killed `kills` times, then let it end."""
    program = [sys.executable, "-m", "benchmarks.faults", "search", str(path), sampler]
    done = 0
    while True:
        command = [*program, str(seed), str(trials), str(devices)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process, process.stdout as pipe:
            if done == kills:
                process.communicate()
                assert process.returncode == 0, process.returncode
                return Seen(done, len(open_run(path).trials()))
            pipe.readline()
            time.sleep(draw.uniform(0, KILL_WITHIN_S))
            process.kill()
        if process.returncode == -signal.SIGKILL:
            done += 1
        else:
            return Seen(done, len(open_run(path).trials()))


def compared(trials: list[Trial]) -> list[object]:
    """Return what two runs must share: all but the clock's readings."""
    return [(t.number, t.params, t.candidate_key, replace(t.outcome, seconds={})) for t in trials]


def kill_searches(folder: Path, kills: int, draw: random.Random, devices: int) -> bool:
    """Kill searches of every sampler; return whether each was as if nothing had happened."""
    names = list(SAMPLERS)
    is_right = True
    for place, sampler in enumerate(names):
        share = kills // len(names) + (place < kills % len(names))
        run = create_run(folder, f"killed-{sampler}", "cpu", "x", Environment())
        seen = killed_search(
            run.path, sampler, seed=3, trials=SEARCH_TRIALS, kills=share, draw=draw,
            devices=devices,
        )  # fmt: skip
        trials = run.trials()
        is_same = is_one_search(trials, sampler, seed=3, devices=devices)
        is_same &= sorted(t.question for t in trials) == list(range(SEARCH_TRIALS))
        if devices == 1:
            whole = create_run(folder, f"whole-{sampler}", "cpu", "x", Environment())
            searched(whole, Deterministic(), sampler, seed=3, trials=SEARCH_TRIALS)
            is_same &= compared(trials) == compared(whole.trials())
        is_right &= is_same and seen.kills == share
        print(
            f"search, sampler {sampler}: {seen.kills} kills, {seen.num_trials} trials, "
            f"{'the sequence' if is_same else 'NOT the sequence'} of an uninterrupted run",
            flush=True,
        )
    return is_right


# ---- whole tunings --------------------------------------------------------------------------


def kill_tunings(folder: Path, kills: int, draw: random.Random, devices: int) -> bool:
    """Kill `tune` and resume it; return whether nothing was lost, doubled or left behind."""
    (folder / "tuning.yaml").write_text(TUNING)
    runs = folder / "runs"
    lost = doubled = stray = done = torn = 0
    known: list[Trial] = []
    while done < kills:
        made = sorted(runs.iterdir()) if runs.is_dir() else []
        given = ["--resume", str(made[0])] if made else ["--config", "tuning.yaml"]
        if devices > 1:
            given += ["--devices", ",".join(map(str, range(devices)))]
        with (folder / "out.txt").open("w") as out:
            process = _tuner([*given], folder, out)
            # Never before the run exists: there would be nothing to resume.
            while not (runs.is_dir() and any(runs.glob("*/environment.json"))):
                if process.poll() is not None:
                    sys.exit(f"it ended by itself: {(folder / 'err.txt').read_text()}")
                time.sleep(0.05)
            sign = draw.choice(SIGNS)
            while sign not in (folder / "out.txt").read_text():
                if process.poll() is not None:
                    sys.exit(f"it ended by itself: {(folder / 'err.txt').read_text()}")
                time.sleep(0.05)
            time.sleep(draw.uniform(0, SEARCHING_S if sign else STARTING_S))
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
        done += process.returncode == -signal.SIGKILL
        (path,) = runs.iterdir()
        content = (path / "trials.jsonl").read_bytes() if (path / "trials.jsonl").exists() else b""
        torn += bool(content) and not content.endswith(b"\n")
        trials = open_run(path).trials()
        reported = sum(" #" in line for line in (folder / "out.txt").read_text().splitlines())
        lost += max(0, len(known) + reported - len(trials)) + (trials[: len(known)] != known)
        doubled += len(trials) - len({tuple(t.params.items()) for t in trials})
        doubled += [t.number for t in trials] != list(range(len(trials)))
        known = trials
        _, alive = psutil.wait_procs([p for p in family if p.is_running()], GONE_WITHIN_S)
        stray += len(alive)
        if done % 10 == 0:
            print(f"tuning: {done} kills so far, {len(known)} trials", file=sys.stderr, flush=True)
        for process_left in alive:
            process_left.kill()
    with (folder / "out.txt").open("w") as out:
        last = _tuner(["--resume", str(path), "--trials", str(len(known) + 2)], folder, out)
    code = last.wait()
    result = open_run(path).result()
    is_verified = bool(result and result.exported and result.exported.check.is_accepted)
    print(
        f"tuning: {done} kills, {len(known)} trials: {lost} lost, {doubled} doubled, "
        f"{torn} half-written lines dropped, {stray} processes left after {GONE_WITHIN_S:.0f} s; "
        f"then resumed to its end: exit code {code}, "
        f"export {'' if is_verified else 'NOT '}verified",
        flush=True,
    )
    return not lost and not doubled and not stray and code == 0 and is_verified


def _tuner(given: list[str], folder: Path, out: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tuner", *given],
        cwd=folder,
        stdout=out,
        stderr=(folder / "err.txt").open("wb"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def main() -> None:
    if sys.argv[1:2] == ["search"]:  # the program that is killed
        path, sampler, seed, trials, devices = sys.argv[2:]
        print("here", flush=True)
        evaluator = Deterministic(step_s=STEP_S, devices=int(devices))
        searched(open_run(Path(path)), evaluator, sampler, seed=int(seed), trials=int(trials))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--only", choices=["search", "tuning"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--devices", type=int, default=1, help="of a tuning: parts of the processor"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tuner-faults-"))
    is_right = True
    try:
        for name, kill in (("search", kill_searches), ("tuning", kill_tunings)):
            if options.only in (None, name):
                place = folder / name
                place.mkdir()
                draw = random.Random(options.seed)
                is_right &= kill(place, options.kills, draw, options.devices)
    finally:
        shutil.rmtree(folder)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
