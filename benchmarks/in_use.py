"""Time an exported file beside eager as it is used: any batch, mode and data, the host's time too.

    python -m benchmarks.in_use FILE --reference REF [--device cuda] [--rows 2,64,4096]
        [--modes train,eval] [--inputs given,normal,ordinary] [--tuned 1024] [--kernels]
        [--json OUT]

Both are in one process and take turns. `ordinary` is normal inputs, and weights as after training.
Numbers of rows are powers of two up to four times the reference's own, or `--tuned`. Each is timed
without gradients and as a step of training, and

- `exposed`: calls back to back, by the host's clock;
- `idle`: the device is idle before each call, by the host's clock (on a GPU);
- `hidden`: by the device's clock behind a queue that hides the host's launches, cold caches; on a
  CPU, which hides nothing, calls on cold caches.

`host_us` is what launching takes, on a GPU. The file takes its kernels where it says so; with
`--kernels` wherever it can. A speed-up below 0.97 whose interval holds no 1 is marked, and so is
what other programs disturbed.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.generated import host_ms
from tuner.by_batch import WORST, AtBatch, batches_of
from tuner.capture.modules.rows_text import ROWS_NAME
from tuner.errors import ProblemError
from tuner.evaluate.batch_times import BatchTimes
from tuner.evaluate.in_turns import FEW_ROUNDS, InTurns
from tuner.evaluate.measure import interleave
from tuner.evaluate.modules import constructed, imported
from tuner.evaluate.timers import CpuTimer, CudaTimer, Timer
from tuner.intervals import median_interval
from tuner.machine.device import describe
from tuner.problem.accuracy import Accuracy
from tuner.problem.draws import Distribution
from tuner.problem.reference import load_problem

ROUNDS = {"cpu": 7, "cuda": 15}  # of a sample each, on cold caches
SLOW_S = 0.2  # of a call, of which few are timed
LEAST_ROUNDS = 3
MOST_S = 3.0  # for one line's turns by the host's clock
INPUTS: dict[str, Distribution] = {
    "given": "as_given",
    "normal": "normal",
    "ordinary": "normal",  # with weights as after training
}


def cold_timer(device: str) -> Timer:
    """Return the clock that hides the host's work."""
    if device.startswith("cuda"):
        return CudaTimer(int(device.partition(":")[2] or 0))
    return CpuTimer(l3_bytes=describe(device).l3_bytes)


def hidden(calls: Sequence[Callable[[], object]], timer: Timer, rounds: int) -> dict[str, float]:
    """Return the speed-up of the second call over the first, by that clock."""
    first, second = calls
    turns = interleave([lambda _: first(), lambda _: second()], timer, rounds)
    interval = median_interval(list(zip(*turns, strict=True)))
    baseline_us, latency_us = map(statistics.median, turns)
    found = {"speedup": interval.speedup, "low": interval.low, "high": interval.high}
    return {**found, "baseline_us": baseline_us, "latency_us": latency_us}


def record_of(at: AtBatch) -> dict[str, float]:
    """Return what both kinds of records have."""
    names = ("speedup", "low", "high", "baseline_us", "latency_us", "is_disturbed")
    return {name: getattr(at, name) for name in names}


def timed(
    times: BatchTimes, timer: Timer, device: str, at: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the records of one number of rows, one way and one kind of inputs."""
    rows, way, is_gpu = at["num_rows"], at["way"], device.startswith("cuda")
    calls = times.calls(rows, way, INPUTS[at["inputs"]])
    found = []
    with times.arithmetic(way):
        for kind in ("exposed", "idle") if is_gpu else ("exposed",):
            is_idle = kind == "idle"
            turns = InTurns(calls, device, num_rows=rows, way=way, is_idle=is_idle)
            one = turns.take(FEW_ROUNDS)
            until_s = time.monotonic() + MOST_S
            while turns.may_learn and time.monotonic() < until_s:
                one = turns.take(FEW_ROUNDS)
            found.append({**at, "host": kind, **record_of(one)})
        is_slow = found[0]["baseline_us"] > SLOW_S * 1e6
        rounds = LEAST_ROUNDS if is_slow else ROUNDS[device.partition(":")[0]]
        found.append({**at, "host": "hidden", **hidden(calls, timer, rounds)})
        if is_gpu:
            theirs_us, mine_us = (1e3 * host_ms(call) for call in calls)
            found[0] |= {"baseline_host_us": theirs_us, "host_us": mine_us}
    return found


def made(module: ModuleType, init_inputs: list[Any], device: str) -> Any:
    """Return the file's module."""
    return constructed(module.ModelNew, init_inputs, device)


def line_of(records: Sequence[dict[str, Any]]) -> str:
    """Return one line of the table."""
    first = records[0]
    name = f"{first['mode']:5} {first['inputs']:8} {first['way']:4} {first['num_rows']:>8}"
    numbers = [
        f"{r['host']} {r['speedup']:.2f}x [{r['low']:.2f}, {r['high']:.2f}]"
        f"{' SLOWER' if is_slower(r) else ' (disturbed)' if r.get('is_disturbed') else ''}"
        for r in records
    ]
    times = f"{first['baseline_us']:.1f} us, {first['latency_us']:.1f} us"
    return f"{name}  {times:>24}  {'  '.join(numbers)}"


def is_slower(record: dict[str, Any]) -> bool:
    """Whether a file is slower than eager there, and it is no noise."""
    is_known = not record.get("is_disturbed", False)
    return bool(record["speedup"] < WORST and record["high"] < 1.0 and is_known)


def main() -> int:
    """Parse the command line; time, print a line for each, write all of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--rows", help="as 1,64,1024")
    parser.add_argument("--tuned", type=int, help="rows of the size that was tuned")
    parser.add_argument("--modes", default="train,eval")
    parser.add_argument("--inputs", default="given,normal,ordinary")
    parser.add_argument("--ways", default="call,step")
    parser.add_argument("--accuracy", default="pytorch", help="whose arithmetic eager is run in")
    parser.add_argument("--kernels", action="store_true", help="wherever the file can take them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, accuracy = options.device, Accuracy.parse(options.accuracy)
    timer = cold_timer(device)  # before the file is imported
    module = imported(options.file)
    taken = getattr(module, ROWS_NAME, None)
    if options.kernels:
        setattr(module, ROWS_NAME, None)
    found: list[dict[str, Any]] = []
    about = {"file": options.file.name, "device": describe(device).name, "rows_taken": taken}

    def keep() -> None:
        """Write what is known, so that who ends this has it."""
        if options.json:
            options.json.write_text(json.dumps({**about, "records": found}, indent=1) + "\n")

    for mode in options.modes.split(","):
        problem = load_problem(options.reference, mode=mode)
        tuned = options.tuned or problem.num_rows() or 1
        batches = [int(n) for n in options.rows.split(",")] if options.rows else batches_of(tuned)
        new = functools.partial(made, module, problem.init_inputs(0), device)
        for inputs in options.inputs.split(","):
            times = BatchTimes(problem, new, device, accuracy)
            if inputs == "ordinary":
                times.become_trained()
            for way in options.ways.split(","):
                for rows in batches:
                    at = {"mode": mode, "inputs": inputs, "way": way, "num_rows": rows}
                    try:
                        records = timed(times, timer, device, at)
                    except (RuntimeError, ValueError, ProblemError) as error:
                        why = str(error).split("\n")[0] or "nothing has gradients"
                        found.append({**at, "failure": why})
                        print(f"{mode} {inputs} {way} {rows}: {why}", flush=True)
                    else:
                        found += records
                        print(line_of(records), flush=True)
                    keep()
    usable = [r for r in found if "speedup" in r]
    least = min(usable, key=lambda r: float(r["speedup"]), default=None)
    if least is not None:
        name = f"{least['mode']} {least['inputs']} {least['way']} {least['num_rows']}"
        slower = sum(map(is_slower, usable))
        print(f"least: {least['speedup']:.3f}x ({name} rows, {least['host']}); slower: {slower}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
