"""Small runs with known times, as many and as long as a test wants; `full_runs` has one of all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from full_runs import REASONS, environment, probe

from tuner.environment import Environment
from tuner.evaluate.race import Race, finalist
from tuner.run import Run, create_run
from tuner.trial import (
    Build,
    Check,
    Finalist,
    Interval,
    KernelResources,
    Measurement,
    Outcome,
    Result,
    Status,
    Trial,
    to_json,
)

CONFIG = "problem: {op: gemm}\nspace: {block_m: [64, 128]}\nmeasure: {max_noise: 0.5%}\n"
BASELINE_US = 3000.0
REASON = REASONS[Status.COMPILE]


def facts(**changes: object) -> dict[str, object]:
    """An `environment.json`: that of the full runs, of a smaller operator."""
    small = {
        "machine": {"driver": "580.1", "torch": "2.13"},
        "toolchain": "nvcc 13.0",
        "op": "gemm",
        "title": "Gemm + Scale",
        "sizes": {"batch": 1024, "features": 8192},
        "flops": 2e9,
        "bytes": 1e8,
        "num_feasible": 20_000,
        "baseline_us": BASELINE_US,
        "config_folder": "/nowhere",
        "overrides": {},
        "command": "tune --config gemm.yaml",
    }
    return environment(**{**small, **changes})


def accepted() -> Check:
    return Check(True, "float32", "", (probe("as given"),), is_thorough=True)


def trial(number: int, latency_us: float | None = None, **params: object) -> Trial:
    """A trial; without a latency it did not compile."""
    params = {"template": "mma", "block_m": 64 << number % 2, "stages": number % 4, **params}
    key = f"{number:016x}"
    if latency_us is None:
        outcome = Outcome(Status.COMPILE, REASON, seconds={"build": 1.5})
    else:
        kernels = (KernelResources("k", 128, 65536, 0, 0),)
        outcome = Outcome(
            Status.CORRECT,
            "",
            Build(key, Status.CORRECT, "x.so", "log.txt", kernels=kernels, seconds=1.5),
            accepted(),
            Measurement(latency_us, 0.003, (latency_us,) * 20, True, anchor_us=BASELINE_US),
            {"build": 1.5, "check": 0.02, "measure": 0.05, "device": 0.1},
        )
    return Trial(number, "mma", params, key, outcome, elapsed_s=0.5 * number + 1)  # type: ignore[arg-type]


def trials(count: int) -> list[Trial]:
    """Every tenth does not compile; the last of the others is the fastest, at 1500 us."""
    return [trial(n, None if n % 10 == 9 else 1500.0 + 3 * (count - n)) for n in range(count)]


def result(made: Sequence[Trial], interval: Interval | None = None) -> Result:
    winner = min(
        (t for t in made if t.outcome.latency_us), key=lambda t: t.outcome.latency_us or 0.0
    )
    interval = interval or Interval(2.0, 1.9, 2.1, 0.95, 5)
    verified = Finalist(winner.number, accepted(), interval, 1500.0, BASELINE_US, 0.002)
    return Result(winner.number, (verified,), (winner.number,), verified, "export/model_new.py")


def raced(trial_number: int, speedup: float) -> Finalist:
    """A finalist as the racer summarises it, with the samples of three processes."""
    bursts = [[[us, us + 1.0, us - 1.0] for us in (1500.0 + p, 1502.0, 1501.0)] for p in range(3)]
    baseline = [[[us * speedup for us in b] for b in rounds] for rounds in bursts]
    return finalist(trial_number, accepted(), Race([baseline, bursts]), 1)


def raced_result(made: Sequence[Trial], speedup: float) -> Result:
    """A result whose figures are those of its samples."""
    usual = result(made)
    verified = raced(usual.winner, speedup)
    return replace(usual, finalists=(verified,), exported=verified)


def made_run(
    folder: Path,
    made: Sequence[Trial],
    ended: Result | None = None,
    *,
    config: str = CONFIG,
    environment: Mapping[str, object] | None = None,
    num_sources: int = 40,
) -> Run:
    """Write a run into a folder of runs; the first few candidates have a source."""
    run = create_run(
        folder, "gemm", "NVIDIA H200", config, Environment.of(facts(**(environment or {})))
    )
    with (run.path / "trials.jsonl").open("w") as file:
        file.writelines(to_json(one) + "\n" for one in made)
    if ended is not None:
        (run.path / "result.json").write_text(to_json(ended))
    for one in made[:num_sources]:
        keep = run.path / "candidates" / one.candidate_key
        keep.mkdir()
        (keep / "source.cu").write_text(f"__global__ void k() {{}}  // trial {one.number}\n")
        (keep / "log.txt").write_text(f"the log of {one.number}\n")
    return run


def append(run: Run, *made: Trial) -> None:
    """Add trials as a running `tune` does."""
    with (run.path / "trials.jsonl").open("a") as file:
        file.writelines(to_json(one) + "\n" for one in made)


def environment_of(run: Run) -> dict[str, object]:
    data: dict[str, object] = json.loads((run.path / "environment.json").read_text())
    return data
