"""Tune the flagship operator on eight CPU shapes and print what was gained, or that nothing was.

    python -m benchmarks.cpu_shapes [--trials 24] [--timeout 40s] [--out docs/cpu_shapes.md]

Four shapes are tall and light per output, where the sweeps over y cost as much as the GEMM; four
are there because little can be gained: tiny calls, few features out, and shapes that are all GEMM.
Each row is the exported file's own race against PyTorch eager, in fresh processes, and its errors
against float64 on KernelBench's own input. Runs are kept in `--runs-dir`. Wants a quiet machine:
about two minutes a shape with the defaults.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tuner import Observer, Run, TunerError, parse_config, tune

CONFIG = """
problem:
  op: gemm_scale_batchnorm
  sizes: {{batch: {batch}, in_features: {in_features}, out_features: {out_features}}}
device: cpu
accuracy: float32
space:
  template: [cpu]
  stats: [gram, shared_memory, two_pass, atomics]
  gemm: [library, own]
  width: [8, 16]
  rows_per_block: [32, 64, 128, 256]
  col_tile: [32, 64, 128]
  tile_rows: [6, 8, 12, 14]
  tile_vectors: [1, 2, 3, 4]
  huge_pages: [true, false]
constraints:
  - {{expr: "stats != 'gram' or in_features <= 2048", why: "stats=gram refuses more features"}}
search: {{sampler: tpe, trials: {trials}, timeout: {timeout}, seed: 0}}
measure: {{num_finalists: 1, num_processes: 4}}
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """One problem size, and why it is in the table."""

    batch: int
    in_features: int
    out_features: int
    why: str

    @property
    def label(self) -> str:
        """Return it as `batch x in_features -> out_features`."""
        return f"{self.batch} x {self.in_features} -> {self.out_features}"


SHAPES = (
    Shape(8192, 64, 1024, "the quickstart: output-bound"),
    Shape(16384, 128, 512, "tall"),
    Shape(4096, 512, 1024, "a usual layer"),
    Shape(1024, 2048, 1024, "mostly GEMM"),
    Shape(512, 4096, 1024, "all GEMM"),
    Shape(128, 256, 256, "a small batch"),
    Shape(16, 64, 64, "tiny: the cost of a call"),
    Shape(2048, 4096, 8, "few features out: reading x is all"),
)
COLUMNS = (
    "shape (batch x in -> out)",
    "why it is here",
    "winner",
    "PyTorch eager",
    "ours",
    "speed-up [interval]",
    "verdict",
    "rms error (PyTorch's own)",
    "max error (PyTorch's own)",
)


class Progress(Observer):
    """One line on stderr for each thing that takes a while."""

    def on_stage(self, text: str) -> None:
        """Print the stage."""
        print(f"  {text}", file=sys.stderr, flush=True)


def measure(shape: Shape, trials: int, timeout: str, runs_dir: Path) -> Run:
    """Tune one shape through the public API."""
    text = CONFIG.format(
        batch=shape.batch,
        in_features=shape.in_features,
        out_features=shape.out_features,
        trials=trials,
        timeout=timeout,
    )
    config = parse_config(text, Path("cpu_shapes.yaml"))
    return tune(config, runs_dir=runs_dir, observer=Progress())


def row(shape: Shape, run: Run) -> Sequence[str]:
    """Return one line of the table from a finished run."""
    result = run.result()
    assert result is not None  # `tune` raises where there is none
    params = next(t.params for t in run.trials() if t.number == result.winner)
    words = [f"{params['template']}, {params['stats']}"]
    words += [f"{params['gemm']} GEMM"] if "gemm" in params else []
    proof = result.exported
    if proof is None or proof.interval is None or proof.latency_us is None:
        reason = proof.error if proof else "no export"
        return (shape.label, shape.why, ", ".join(words), "", "", "", reason, "", "")
    interval, probe = proof.interval, proof.check.probes[0]
    return (
        shape.label,
        shape.why,
        ", ".join(words),
        _time(proof.baseline_us or 0.0),
        _time(proof.latency_us),
        f"{interval.speedup:.2f}x [{interval.low:.2f}, {interval.high:.2f}]",
        interval.verdict,
        f"{probe.rms_rel:.1e} ({probe.baseline_rms_rel:.1e})",
        f"{probe.max_abs:.1e} ({probe.baseline_max_abs:.1e})",
    )


def _time(latency_us: float) -> str:
    return f"{latency_us / 1e3:.2f} ms" if latency_us >= 1e3 else f"{latency_us:.0f} us"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as a markdown table."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def conditions(run: Run, options: argparse.Namespace) -> str:
    """Say on what and how the table was made."""
    facts = run.environment()
    return (
        f"{facts['device_name']}, {len(os.sched_getaffinity(0))} cores; {facts['toolchain']}; "
        f"PyTorch {version('torch')}; at most {options.trials} trials or {options.timeout} a "
        "shape; cold caches; float32 accuracy class."
    )


def main() -> int:
    """Tune the shapes, print the table; exit status 1 where a shape has no result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trials", type=int, default=24, help="at most, for one shape")
    parser.add_argument("--timeout", default="40s", help="of the search, for one shape")
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of shapes, from 0; all")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, help="write the table here, too")
    options = parser.parse_args()
    chosen = [SHAPES[i] for i in options.shapes] if options.shapes else SHAPES
    rows, text, is_complete = [], "", True
    for number, shape in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {shape.label}", file=sys.stderr, flush=True)
        try:
            run = measure(shape, options.trials, options.timeout, options.runs_dir)
        except TunerError as error:
            print(f"error: {shape.label}: {error}", file=sys.stderr)
            is_complete = False
            continue
        rows.append(row(shape, run))
        text = f"{table(rows)}\n\n{conditions(run, options)}\n"
        if options.out is not None:  # after each shape: an interrupted run keeps what it has
            options.out.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
