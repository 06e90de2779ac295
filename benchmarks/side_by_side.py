"""Candidates a minute, ours and Kernel Tuner's: one kernel, one space, one machine, one run.

    python -m benchmarks.side_by_side --kernel-tuner /path/to/its/python [--seconds 60]

The kernel is the template `simt`'s own: a float32 GEMM with the sums of its columns. Both tuners
draw from the same configurations (`side_by_side.yaml`) at random for the same time, one after the
other. What they do with each:

- Kernel Tuner compiles that one kernel with NVRTC, compares one output with float64, and times 7
  launches, one configuration after the other.
- We compile the whole candidate (the kernel for other strides and sizes as well, the one that
  finishes the statistics, the one that normalises), compare all its outputs with float64 on every
  screening probe, time it with a cold L2 until the time is known, and check once more.

A candidate counts if it was compiled, checked and, if right, measured; ours only once for the same
machine code. The time is that of the search alone: to the last outcome from its start, or for
Kernel Tuner from its first configuration, after its warm-up. Neither finds anything built before.

Kernel Tuner is not among our requirements. It runs in a Python of its own, or in this one with
`--kernel-tuner-path DIR`, into which its wheels were unpacked
(`pip install --no-deps --target DIR WHEELS`); it needs cuda-bindings, CuPy or PyCUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shapes import Progress, table
from tuner import RunConfig, TunerError, load_config, plan, tune
from tuner.planning.planning import Planned
from tuner.run import Run
from tuner.trial import Status

CONFIG = Path(__file__).with_suffix(".yaml")
KERNEL_TUNER = Path(__file__).with_name("side_by_side_kernel_tuner.py")
NUMBERS = {  # what the text calls a parameter
    "block_m": "kBlockM",
    "block_n": "kBlockN",
    "block_k": "kBlockK",
    "thread_m": "kThreadM",
    "thread_n": "kThreadN",
    "stages": "kStages",
    "min_blocks": "kMinBlocks",
    "group_m": "kGroupM",
}
LOADS = ("async", "registers")
# The parts of the text that the kernel shares with others: where each begins, and ends.
STATISTICS = ("// Statistics of the columns", "// Kernels that follow each other on a stream.")
COEFFICIENTS = (
    "// The coefficients of a strip of kColumns columns,",
    "// Every row tile is complete",
)
KERNEL = "gemm_stats"

# NVRTC has no headers of the standard library; words that Kernel Tuner defines become numbers.
PRELUDE = """\
#ifdef __CUDACC_RTC__
typedef signed long int64_t;
#else
#include <cstdint>
#endif
#define async 1
#define registers 2
"""
LAUNCHED = """
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    gemm_stats(const float* __restrict__ x, const float* __restrict__ weight,
               float* __restrict__ y, double* sums, int64_t rows, int64_t columns,
               int64_t length) {
  ColumnStats stats = ColumnStats();
  stats.sums = sums;
  stats.rows = rows;
  stats.columns = columns;
  stats.tile_rows = kBlockM;
  stats.tiles = (rows + kBlockM - 1) / kBlockM;
  fused_gemm_scale_bn_gemm_kernel<load == registers, true>(
      stats, x, weight, y, length, unsigned((columns + kBlockN - 1) / kBlockN));
}
"""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a tuner did.

    Attributes:
        seconds: from the start of the search to its last outcome.
        tried: configurations.
        checked: of these, compiled and compared with float64, and measured if right.
        wrong: of those, rejected.
        best_us: the least time found; of the whole forward for us, of the kernel for Kernel Tuner.
        stages: seconds by stage, added up over whatever ran at once.
        backend: what compiled and launched.
    """

    tuner: str
    seconds: float
    tried: int
    checked: int
    wrong: int
    best_us: float
    stages: Mapping[str, float] = field(default_factory=dict)
    backend: str = ""

    @property
    def per_minute(self) -> float:
        """Candidates compiled and checked, and measured if right."""
        return 60 * self.checked / self.seconds if self.seconds else 0.0


# ---- the kernel in Kernel Tuner's way ---------------------------------------------------------


def kernel_text(planned: Planned) -> str:
    """Return the kernel alone, with the parameters as macros, as Kernel Tuner wants it.

    Raises:
        ValueError: the template's text is not as expected.
    """
    bodies = {}
    for load in LOADS:
        params = next(
            p
            for p in map(planned.space.at, range(planned.space.num_feasible))
            if p["load"] == load
        )
        text = planned.family.render(params, planned.facts).source
        is_scaled = _between(text, "constexpr bool kIsScaled = ", ";\n")
        common = f"constexpr bool kIsScaled = {is_scaled};\n\n"
        common += STATISTICS[0] + _between(text, *STATISTICS)
        common += "constexpr Stats kStats = Stats::kAtomics;\n\n"
        common += COEFFICIENTS[0] + _between(text, *COEFFICIENTS)
        body = "constexpr int kBlockM = " + _between(
            text,
            "constexpr int kBlockM = ",
            "template <bool kIsVectorK, bool kIsVectorN>\nstatic const char* launch_gemm",
        )
        for name, constant in NUMBERS.items():
            given = f"constexpr int {constant} = {params[name]};"
            body = _replaced(body, given, f"constexpr int {constant} = {name};")
        # Called by a kernel whose arguments are pointers and numbers; its memory has a size.
        body = _replaced(
            body,
            "__global__ void __launch_bounds__(kThreads, kMinBlocks)\n    fused",
            "__device__ __forceinline__ void fused",
        )
        body = _replaced(
            body,
            "extern __shared__ __align__(16) float shared[];",
            "__shared__ __align__(16) float shared[kSharedFloats];",
        )
        bodies[load] = body
    either = f"#if load == async\n{bodies['async']}#else\n{bodies['registers']}#endif\n"
    return PRELUDE + common + either + LAUNCHED


def _between(text: str, start: str, end: str) -> str:
    """Return what is between the only `start` and the first `end` behind it."""
    behind = text.split(start)
    if len(behind) != 2 or end not in behind[1]:
        raise ValueError(f"the template `simt` no longer has one {start!r} before a {end!r}")
    return behind[1].split(end)[0]


def _replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"the template `simt` no longer has one {old!r}")
    return text.replace(old, new)


def job(planned: Planned, seconds: float, seed: int) -> dict[str, Any]:
    """Return all that the other Python is told, JSON-able."""
    names = [*NUMBERS, "load"]
    feasible = [
        [params[name] for name in names]
        for params in map(planned.space.at, range(planned.space.num_feasible))
    ]
    values = {p.name: list(p.values) for p in planned.space.parameters if p.name in names}
    return {
        "kernel": KERNEL,
        "text": kernel_text(planned),
        "sizes": dict(planned.sizes),
        "names": names,
        "values": {name: values[name] for name in names},
        "feasible": feasible,
        "seconds": seconds,
        "seed": seed,
    }


def theirs(python: str, path: Path | None, task: Mapping[str, Any]) -> Rate:
    """Let Kernel Tuner search; `path` is a folder that holds it, if it is not `python`'s own.

    Raises:
        RuntimeError: it did not end well; with what it said last.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The driver keeps what it compiles; nothing may be there from another run.
        env = {**os.environ, "CUDA_CACHE_PATH": folder}
        if path is not None:
            rest = env.get("PYTHONPATH", "")
            env["PYTHONPATH"] = f"{path.resolve()}{os.pathsep}{rest}".rstrip(os.pathsep)
        done = subprocess.run(
            [python, str(KERNEL_TUNER)],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            cwd=folder,
            env=env,
        )
    if done.returncode:
        raise RuntimeError(f"{python}: {(done.stderr + done.stdout).strip()[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if found.pop("size") != len(task["feasible"]):
        raise RuntimeError("Kernel Tuner found another number of configurations")
    return Rate(**found)


# ---- ours -------------------------------------------------------------------------------------


def ours(config: RunConfig, runs_dir: Path) -> Rate:
    """Search with an empty build cache, and prove nothing."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            run = tune(config, runs_dir=runs_dir, observer=Progress(), verifies=False)
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before
    return rate_of(run)


def rate_of(run: Run) -> Rate:
    """Count what a run of ours did."""
    trials = run.trials()
    stages: dict[str, float] = {}
    for trial in trials:
        for stage, seconds in trial.outcome.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    distinct = [trial.outcome for trial in trials if trial.outcome.same_as is None]
    right = [outcome for outcome in distinct if outcome.status is Status.CORRECT]
    wrong = [outcome for outcome in distinct if outcome.status is Status.CORRECTNESS]
    return Rate(
        tuner="ours",
        seconds=trials[-1].elapsed_s if trials else 0.0,
        tried=len(trials),
        checked=len(right) + len(wrong),
        wrong=len(wrong),
        best_us=min((o.latency_us for o in right if o.latency_us), default=float("nan")),
        stages={name: round(seconds, 2) for name, seconds in stages.items()},
        backend=run.environment().toolchain,
    )


# ---- both -------------------------------------------------------------------------------------

COLUMNS = (
    "tuner",
    "seconds",
    "configurations",
    "compiled and checked",
    "wrong",
    "a minute",
    "best",
    "seconds by stage",
    "backend",
)


def row(rate: Rate) -> tuple[str, ...]:
    """Return a line of the table."""
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in rate.stages.items())
    return (
        rate.tuner,
        f"{rate.seconds:.1f}",
        f"{rate.tried}",
        f"{rate.checked}",
        f"{rate.wrong}",
        f"**{rate.per_minute:.0f}**",
        f"{rate.best_us:.0f} us",
        stages,
        re.sub(r"\s+", " ", rate.backend),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--kernel-tuner", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--kernel-tuner-path", type=Path, metavar="DIR")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["ours", "theirs"])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the numbers, too")
    options = parser.parse_args()
    rates, failure = [], ""
    try:
        config = load_config(options.config, {"timeout": options.seconds, "seed": options.seed})
        if options.only != "ours":
            task = job(plan(config), options.seconds, options.seed)
            try:
                rates.append(theirs(options.kernel_tuner, options.kernel_tuner_path, task))
            except RuntimeError as error:  # ours is worth its time all the same
                failure = f"error: Kernel Tuner: {error}"
                print(failure, file=sys.stderr, flush=True)
        if options.only != "theirs":
            rates.append(ours(config, options.runs_dir))
    except TunerError as error:
        sys.exit(f"error: {error}")
    print(table([row(rate) for rate in rates], COLUMNS))
    if len(rates) == 2:
        print(f"\nours over Kernel Tuner's: {rates[1].per_minute / rates[0].per_minute:.2f}")
    if options.out is not None:
        found = [{**asdict(rate), "per_minute": rate.per_minute} for rate in rates]
        options.out.write_text(json.dumps(found, indent=1))
    if failure:
        sys.exit(failure)


if __name__ == "__main__":
    main()
