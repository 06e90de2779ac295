"""Kill a tuner with -9 at random moments of its verification, resume it, and look at what is left.

    python -m benchmarks.kills [--kills 50] [--seed 0] [--json OUT]

After each kill: no file claims what was not verified. At the end of each run: nothing that was
verified was verified again. The operator is the smallest there is, so that a kill costs seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tuner.export.module import VERIFIED
from tuner.run import Run, open_run

OP = """
name: doubled
title: Doubled values
function: fused_doubled
replaces: [addition]
sizes: {rows: 64, cols: 100}
arguments:
  - {name: x, shape: [rows, cols]}
outputs:
  - {name: y, shape: [rows, cols]}
flops: rows * cols
bytes: 8 * rows * cols
"""
REFERENCE = """
import torch
import torch.nn as nn

rows = 64
cols = 100


class Model(nn.Module):
    def forward(self, x):
        for _ in range(200):
            x = x + 0.0
        return x * 2.0


def get_inputs():
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
"""
MODEL_NEW = """
class ModelNew(nn.Module):
    def forward(self, x):
        if x.dtype != torch.float32 or x.dim() != 2:
            return (x + 0.0) * 2.0
        return fused_op(x)[0]


def setup_context(ctx, inputs, output):
    return None


def backward(ctx, grad):
    return grad * 2.0
"""
TEMPLATE = """---
title: One sweep
language: cpp
parameters:
  step: {about: "elements an iteration", default: 1}
steps:
  - {call: fused_doubled_sweep, args: [x, y, rows, cols]}
---
#include <cstdint>
extern "C" const char* fused_doubled_sweep(const float* x, float* y, int64_t rows, int64_t cols) {
  const int64_t n = rows * cols;
  int64_t i = 0;
  for (; i + {{ step }} <= n; i += {{ step }})
    for (int64_t j = 0; j < {{ step }}; ++j) y[i + j] = x[i + j] + x[i + j];
  for (; i < n; ++i) y[i] = x[i] + x[i];
  return nullptr;
}
"""
CONFIG = {
    "problem": {"op": "doubled", "templates": ["kernels"]},
    "device": "cpu",
    "space": {"step": [1, 4]},
    "search": {"sampler": "grid", "trials": 2},
    "measure": {"finalists": "20ms", "num_finalists": 2, "num_processes": 2},
}
LONGEST_S = 12.0  # of a verification, from which the moments are drawn
MOST_S = 240.0  # of a session that is not killed


def write_problem(folder: Path) -> None:
    """Write operator and config into `folder`."""
    family = folder / "kernels" / "doubled"
    family.mkdir(parents=True)
    texts = {
        "op.yaml": OP,
        "reference.py": REFERENCE,
        "model_new.py": MODEL_NEW,
        "sweep.cpp.j2": TEMPLATE,
    }
    for name, text in texts.items():
        (family / name).write_text(text)
    (folder / "config.yaml").write_text(json.dumps(CONFIG))


def killed(
    command: list[str], folder: Path, is_due: Callable[[], bool], wait_s: float = 0.0
) -> int | None:
    """Start a tuner, and kill it that long after it is due; its exit code, None if killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tuner", *command],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + MOST_S
    while process.poll() is None and not is_due():
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    try:
        return process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def is_searched(folder: Path) -> bool:
    """Whether the one run in `folder` has all its trials."""
    found = list((folder / "runs").glob("*/trials.jsonl"))
    return bool(found) and found[0].read_bytes().count(b"\n") >= CONFIG["search"]["trials"]  # type: ignore[index]


def false_claims(run: Run) -> list[str]:
    """Return which files say that they are verified though nothing on disk says so."""
    verified = {e.trial for e in run.checks() if e.check.is_accepted and e.interval is not None}
    claims = []
    for path in sorted((run.path / "export").glob("*.py")):
        first = path.read_text().splitlines()[0]
        claims_it = VERIFIED in first
        if claims_it and (not verified or ".unverified" in path.name):
            claims.append(f"{path.name}: {first}")
        if not claims_it and path.name == "model_new.py":
            claims.append(f"{path.name} is there, and not verified: {first}")
    return claims


def repeated(run: Run) -> list[str]:
    """Return which checks were made again though their verdict was on disk."""
    checks = Counter(e.key for e in run.checks() if e.interval is None and e.check.is_accepted)
    return [f"{key}: checked {count} times" for key, count in checks.items() if count > 1]


def stress(num_kills: int, seed: int, longest_s: float = LONGEST_S) -> dict[str, object]:
    """Kill that often, over as many runs as it takes; return what was found wrong."""
    rng = random.Random(seed)
    kills, num_runs, problems = list[float](), 0, list[str]()
    while len(kills) < num_kills:
        num_runs += 1
        with tempfile.TemporaryDirectory(prefix="tuner-kills-") as name:
            folder = Path(name)
            write_problem(folder)
            command = ["--config", "config.yaml"]
            while True:
                is_last = len(kills) >= num_kills
                wait_s = MOST_S if is_last else rng.uniform(0.0, longest_s)
                code = killed(command, folder, lambda: is_searched(folder), wait_s)  # noqa: B023
                runs = list((folder / "runs").iterdir()) if (folder / "runs").is_dir() else []
                if code is not None:
                    problems += [] if code == 0 else [f"exit code {code}"]
                    break
                run = open_run(runs[0])
                kills.append(round(wait_s, 2))
                problems += false_claims(run)
                command = ["--resume", str(run.path)]
            run = open_run(runs[0])
            problems += [*false_claims(run), *repeated(run)]
            if run.result() is None:
                problems.append("no result")
    return {"kills": kills, "num_runs": num_runs, "problems": problems}


def main() -> None:
    """Run the stress and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = stress(options.kills, options.seed)
    text = json.dumps(found, indent=1)
    if options.json:
        options.json.write_text(text)
    print(text)
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
