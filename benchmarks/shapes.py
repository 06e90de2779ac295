"""Tune one operator on a list of shapes and print what was gained: what the tables share.

`cpu_shapes` and `gpu_shapes` say which shapes, and with which config; each row of their tables is
the exported file's own race against PyTorch eager, in fresh processes, and its errors against
float64 on KernelBench's own input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tuner import Observer, Run, RunConfig, TunerError, tune

COLUMNS = (
    "shape (batch x in -> out)",
    "why it is here",
    "class",
    "winner",
    "PyTorch eager",
    "ours",
    "speed-up [interval]",
    "verdict",
    "rms error (PyTorch's own)",
    "max error (PyTorch's own)",
)


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

    @property
    def sizes(self) -> dict[str, int]:
        """Return it as `problem.sizes` of a config."""
        return {
            "batch": self.batch,
            "in_features": self.in_features,
            "out_features": self.out_features,
        }


class Progress(Observer):
    """One line on stderr for each thing that takes a while."""

    def on_stage(self, text: str) -> None:
        """Print the stage."""
        print(f"  {text}", file=sys.stderr, flush=True)


def row(shape: Shape, run: Run) -> Sequence[str]:
    """Return one line of the table from a finished run."""
    result = run.result()
    assert result is not None  # `tune` raises where there is none
    first = (shape.label, shape.why, run.environment().accuracy)
    winner = "PyTorch's own" if result.is_fallback else _winner(run, result.winner)
    verified = result.exported
    if verified is None or verified.interval is None or verified.latency_us is None:
        reason = (verified.error or verified.check.reason) if verified else "no export"
        return (*first, winner, "", "", "", f"rejected: {reason}", "", "")
    interval, probe = verified.interval, verified.check.probes[0]
    verdict: str = interval.verdict
    if result.is_fallback:
        best = next(f for f in result.finalists if f.trial == result.winner).interval
        assert best is not None  # what did not race cannot be found slower
        verdict = f"no kernel is faster (best {best.speedup:.2f}x): PyTorch's own is exported"
    return (
        *first,
        winner,
        _time(verified.baseline_us or 0.0),
        _time(verified.latency_us),
        f"{interval.speedup:.2f}x [{interval.low:.2f}, {interval.high:.2f}]",
        verdict,
        f"{probe.rms_rel:.1e} ({probe.baseline_rms_rel:.1e})",
        f"{probe.max_abs:.1e} ({probe.baseline_max_abs:.1e})",
    )


def _winner(run: Run, number: int) -> str:
    params = next(t.params for t in run.trials() if t.number == number)
    words = [params[name] for name in ("template", "precision", "stats") if name in params]
    words += [f"{params['gemm']} GEMM"] if "gemm" in params else []
    return ", ".join(str(word) for word in words)


def _time(latency_us: float) -> str:
    return f"{latency_us / 1e3:.2f} ms" if latency_us >= 1e3 else f"{latency_us:.0f} us"


def sizes_of(text: str) -> dict[str, int]:
    """Return the sizes that an option gives as `name=number,...`; none where it is empty."""
    pairs = [item.split("=") for item in text.split(",") if item]
    return {name: int(number) for name, number in pairs}


def table(rows: Sequence[Sequence[str]], columns: Sequence[str] = COLUMNS) -> str:
    """Return the rows as a markdown table; a bar or a line's end in a cell is replaced."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    cells = [[" ".join(cell.replace("|", "/").split()) for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def arguments(description: str, *, trials: int, timeout: str) -> argparse.ArgumentParser:
    """Return the command line that both tables have, with these defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--trials", type=int, default=trials, help="at most, for one shape")
    parser.add_argument("--timeout", default=timeout, help="of the search, for one shape")
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of shapes, from 0; all")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, help="write the table here, too")
    return parser


def tune_all(
    shapes: Sequence[Shape],
    config_of: Callable[[Shape], RunConfig],
    options: argparse.Namespace,
) -> int:
    """Tune the shapes, print the table; return 1 where a shape has no result, else 0.

    Args:
        shapes: all that there are; `options.shapes` picks some.
        config_of: the config for a shape.
        options: what `arguments` parses.
    """
    chosen = [shapes[i] for i in options.shapes] if options.shapes else shapes
    rows, text, is_complete = [], "", True
    for number, shape in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {shape.label}", file=sys.stderr, flush=True)
        try:
            run = tune(config_of(shape), runs_dir=options.runs_dir, observer=Progress())
        except TunerError as error:
            print(f"error: {shape.label}: {error}", file=sys.stderr)
            is_complete = False
            continue
        rows.append(row(shape, run))
        text = f"{table(rows)}\n\n{_conditions(run, options)}\n"
        if options.out is not None:  # after each shape: an interrupted run keeps what it has
            options.out.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0 if is_complete else 1


def _conditions(run: Run, options: argparse.Namespace) -> str:
    """Say on what and how the table was made."""
    facts = run.environment()
    return (
        f"{facts.device_name}, {len(os.sched_getaffinity(0))} cores; {facts.toolchain}; "
        f"PyTorch {version('torch')}; at most {options.trials} trials or {options.timeout} a "
        "shape; cold caches."
    )
