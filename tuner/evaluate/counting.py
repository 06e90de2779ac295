"""A GPU's counters of one call, as Nsight Compute's command line (`ncu`) reports them.

Its CSV has a line for each metric of each kernel, under a header that begins with "ID"; lines
of its own, which begin with ==, may stand before it. Source: Nsight Compute CLI, "Output Pages"
and "Console Output" (docs.nvidia.com/nsight-compute/NsightComputeCli).
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tuner.errors import ToolchainError, WorkerError
from tuner.evaluate.job_spec import JobSpec
from tuner.machine.host import find_gpu_program
from tuner.profiled import CountedCalls, Counters
from tuner.wording import one_line

__all__ = ["counted", "find_ncu", "ncu_command", "read_counters"]

TIMEOUT_S = 600.0  # each kernel runs once for every few counters
DURATION = "gpu__time_duration.sum"
DRAM_BYTES = "dram__bytes.sum"
CLOCK = "sm__cycles_elapsed.avg.per_second"
SHARES = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# Reasons, as the Profiling Guide's "Warp Stall Reasons" has them; the last on Hopper alone.
REASONS = (
    "long_scoreboard", "short_scoreboard", "barrier", "math_pipe_throttle", "mio_throttle",
    "lg_throttle", "wait", "not_selected",
)  # fmt: skip
HOPPER_REASON = "gmma"
# What --print-units base prints, in older versions and in newer ones.
_US = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
_US |= {"s": 1e6, "second": 1e6}
_NO_RIGHTS = "ERR_NVGPUCTRPERM"


def find_ncu() -> str:
    """Return the path of Nsight Compute's command line.

    Raises:
        ToolchainError: it is not installed; the message says what to install.
    """
    if found := find_gpu_program("ncu"):
        return found
    raise ToolchainError(
        "ncu is not installed: no counters\n"
        "  looked: in $CUDA_HOME/bin, $CUDA_PATH/bin, on PATH and in /usr/local/cuda/bin\n"
        "  next: install Nsight Compute, part of the CUDA toolkit, with ncu on the "
        "PATH, e.g. apt-get install nsight-compute"
    )


def ncu_command(
    ncu: str, spec: JobSpec, file: Path | None, log: Path, capability: int | None
) -> list[str]:
    """Return the command that counts one call of a file, or of the reference where it is None.

    Clocks and caches are left as they are in a run: warm, and not held to the base clock.
    """
    reasons = [*REASONS, *[HOPPER_REASON] * (capability is not None and capability // 10 == 9)]
    metrics = [DURATION, DRAM_BYTES, CLOCK, *SHARES.values(), *map(STALL.format, reasons)]
    program = [sys.executable, "-m", "tuner.evaluate.counted_call", json.dumps(spec.payload())]
    return [
        ncu, "--csv", "--print-units", "base", "--profile-from-start", "off",
        "--clock-control", "none", "--cache-control", "none", "--target-processes", "all",
        "--metrics", ",".join(metrics), "--log-file", str(log),
        *program, *([str(file)] if file is not None else []),
    ]  # fmt: skip


def counted(ncu: str, spec: JobSpec, file: Path, capability: int | None = None) -> CountedCalls:
    """Count one call of the reference and one of an exported file, in a process each.

    Raises:
        WorkerError: a program failed, or nothing was counted; the message says what to do.
    """
    return CountedCalls(
        _counted(ncu, spec, None, capability), _counted(ncu, spec, file, capability)
    )


def _counted(
    ncu: str, spec: JobSpec, file: Path | None, capability: int | None
) -> tuple[Counters, ...]:
    what = file.name if file is not None else "PyTorch's call"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counters.csv"
        command = ncu_command(ncu, spec, file, log, capability)
        # A decimal comma would be read as one of thousands.
        environment = {**os.environ, "LC_ALL": "C"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
                env=environment,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise WorkerError(f"{what}: ncu: {error}") from error
        text = log.read_text(errors="replace") if log.is_file() else ""
    if _NO_RIGHTS in text + done.stdout + done.stderr:
        raise WorkerError(
            f"{what}: ncu: this user may not read the GPU's counters ({_NO_RIGHTS})\n"
            "  next: let an administrator allow it, as described at "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
    found = read_counters(text)
    if done.returncode or not found:
        errors = re.findall(r"==ERROR== (.*)", text + done.stdout)
        said = "; ".join(errors) or done.stderr.strip()[-2000:] or "no kernel was counted"
        raise WorkerError(f"{what}: ncu ended with {done.returncode}: {said}")
    return found


def read_counters(text: str) -> tuple[Counters, ...]:
    """Return the kernels of ncu's CSV, in the order of their launch.

    Raises:
        WorkerError: the CSV has not the columns that ncu writes.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(lines[start:])
    kernels: dict[str, tuple[str, dict[str, float]]] = {}
    for row in rows:
        try:
            name, metric, unit = row["Kernel Name"], row["Metric Name"], row["Metric Unit"]
            _, values = kernels.setdefault(row["ID"], (name, {}))
            value = float(row["Metric Value"].replace(",", ""))
        except KeyError as error:
            columns = one_line(", ".join(map(str, row)))
            raise WorkerError(
                f"ncu's CSV: no column {error}\n  got: {columns}\n"
                "  next: report it with the version of ncu (ncu --version)"
            ) from error
        except (AttributeError, ValueError):  # "n/a": not on this GPU; or a line cut short
            continue
        if math.isfinite(value):
            values[metric] = value * _US.get(unit, 1.0) if metric == DURATION else value
    return tuple(_counters(name, values) for name, values in kernels.values())


def _counters(name: str, values: Mapping[str, float]) -> Counters:
    shares = {key: values.get(metric) for key, metric in SHARES.items()}
    clock = values.get(CLOCK)
    stalls = {r: values[STALL.format(r)] for r in (*REASONS, HOPPER_REASON)
              if STALL.format(r) in values}  # fmt: skip
    return Counters(
        name,
        values.get(DURATION, 0.0),
        **{key: None if share is None else share / 100 for key, share in shares.items()},
        dram_bytes=values.get(DRAM_BYTES),
        clock_mhz=None if clock is None else clock / 1e6,
        stalls=stalls,
    )
