"""Read the GPU's counters for each kernel of a configuration: what the time goes into, and why.

    python -m benchmarks.counters [--config benchmarks/ablation.yaml] [--problems 33] [--out C.md]

Prints a markdown table for the base of each study of the config, the best configuration known. Of
each kernel of one forward, by Nsight Compute (`ncu`; each kernel alone, clocks as they are, caches
flushed before each): its time, how busy tensor cores, device memory and L2 were, what was moved,
L2's hit rate, resident warps, registers, and the clock. Needs an NVIDIA GPU, `ncu` on the PATH,
and the permission to read counters.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from benchmarks.ablation import PREFIX, Bench, rows_of
from benchmarks.candidates import build_all, label, this_device
from benchmarks.shapes import table
from tuner.errors import DeviceError, InputError, TunerError
from tuner.trial import Params

# A counter of ncu, and its column. What this ncu does not know is left out.
METRICS: Mapping[str, str] = {
    "gpu__time_duration.sum": "time, us",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor cores, %",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory, %",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2, %",
    "dram__bytes_read.sum": "read, MB",
    "dram__bytes_write.sum": "written, MB",
    "lts__t_sector_hit_rate.pct": "L2 hits, %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "resident warps, %",
    "launch__registers_per_thread": "registers",
    "sm__cycles_elapsed.avg.per_second": "clock, MHz",
}
# Units are ncu's base ones: ns, bytes, cycles a second.
FACTORS = {"time, us": 1e-3, "read, MB": 1e-6, "written, MB": 1e-6, "clock, MHz": 1e-6}


def known_metrics(ncu: str) -> list[str]:
    """Return those of `METRICS` that this ncu can read on this GPU."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    names = {line.split()[0] for line in done.stdout.splitlines() if line.split()}
    return [name for name in METRICS if name.split(".")[0] in names or name.startswith("launch_")]


def rows_of_report(text: str, metrics: Sequence[str]) -> list[list[str]]:
    """Return one row a kernel from ncu's raw page as CSV: its name, then the metrics' values.

    Raises:
        DeviceError: there is no report in the text: ncu said why.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = [line for line in lines if line.startswith("==")] or lines
        raise DeviceError("ncu gave no report\n  " + "\n  ".join(said[-5:]))
    rows = []
    for kernel in csv.DictReader(lines[start:]):
        if not kernel["ID"]:  # the line of units
            continue
        name = kernel["Kernel Name"].split("(")[0].split("<")[0].split("::")[-1]
        row = [name.replace(PREFIX, "").removesuffix("_kernel").split()[-1]]
        for metric in metrics:
            value = (kernel.get(metric) or "").replace(",", "")
            number = float(value) * FACTORS.get(METRICS[metric], 1.0) if value else None
            row.append(
                "" if number is None else f"{number:.1f}" if number < 1000 else f"{number:.0f}"
            )
        rows.append(row)
    return rows


def counted(ncu: str, metrics: Sequence[str], options: argparse.Namespace, place: str) -> str:
    """Return the table of one study's base; `place` is `problem/study`."""
    command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page"]
    command += ["raw", "--print-units", "base", "--metrics", ",".join(metrics)]
    command += [sys.executable, "-m", "benchmarks.counters", "--config", str(options.config)]
    command += ["--device", options.device, "--child", place]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    columns = ("kernel", *(METRICS[metric] for metric in metrics))
    return table(rows_of_report(done.stdout + done.stderr, metrics), columns)


def child(place: str, options: argparse.Namespace) -> int:
    """Call one study's base once while counters are read."""
    name, number = place.split("/")
    config = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    problem = config["problems"][name]
    params: Params = rows_of(problem["studies"][int(number)])[0].params
    (built,), environment = build_all(
        config["op"], [params], this_device(options.device), [problem["sizes"]]
    )
    if built.candidate is None or built.artefact is None:
        raise InputError(f"{label(params)}: {built.note}")
    os.environ.update(environment)
    import torch

    from tuner.kernel.binding import bind

    with torch.no_grad():
        bench = Bench(config["op"], problem["sizes"], options.device, 1)
        call = bind(built.candidate.plan, built.candidate.language, built.artefact)
        arguments = bench.inputs[0][1]
        call(*arguments)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call(*arguments)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return 0


def main() -> int:
    """Parse the command line; build and count study by study."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    usual = Path(__file__).with_name("ablation.yaml")
    parser.add_argument("--config", type=Path, default=usual)
    parser.add_argument("--problems", nargs="*", help="only these, by name")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="write the tables here, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        return child(options.child, options) if options.child else _all(options)
    except TunerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _all(options: argparse.Namespace) -> int:
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DeviceError("ncu is not on the PATH\n  next: install Nsight Compute")
    metrics = known_metrics(ncu)
    config = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    device, text = this_device(options.device), ""
    for name, problem in config["problems"].items():
        if name not in (options.problems or [name]):
            continue
        for number, study in enumerate(problem["studies"]):
            found = counted(ncu, metrics, options, f"{name}/{number}")
            base = rows_of(study)[0].params
            said = f"{study['study']}: {base['template']}, {label(base)}; {device.name}"
            text += f"### #{name}, {said}\n\n{found}\n\n"
            if options.out is not None:
                options.out.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
