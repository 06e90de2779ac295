"""Run compute-sanitizer over each GPU template at small sizes and print what it found.

    python -m benchmarks.sanitize [--templates wgmma mma] [--tools memcheck racecheck] [--out T.md]

Each configuration is built here, and called by a child process under each tool: on two small
shapes, twice each, with PyTorch's caching allocator off so that an access outside a tensor is
outside its allocation. A row is one (template, configuration, tool): how many errors, and the
first message. Exit status 1 where any row is not clean. Needs an NVIDIA GPU and compute-sanitizer
(of the CUDA toolkit); `--device cpu` runs the CPU template's children without it, to try the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.candidates import Built, build_all, label, this_device
from benchmarks.shapes import table
from tuner.errors import TunerError
from tuner.trial import Params, to_json

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
OPTIONS = {
    "memcheck": ["--leak-check", "no"],
    "racecheck": ["--racecheck-report", "all"],
}
COLUMNS = ("template", "configuration", "tool", "errors", "first message")
Rows = Iterator[Sequence[str]]

# Small, since a tool slows kernels down by 10 to 1000 times. No tile divides the first; the second
# has several tiles in each direction and more than one stage of k. A guarded wgmma wants
# in_features to be a multiple of 8.
SIZES: Mapping[str, Sequence[Mapping[str, int]]] = {
    "gemm_scale_batchnorm": (
        {"batch": 77, "in_features": 104, "out_features": 45},
        {"batch": 300, "in_features": 264, "out_features": 520},
    ),
    "layer_norm": ({"rows": 5, "cols": 77}, {"rows": 130, "cols": 2050}),
}

# Together they use every strategy of each template.
CONFIGURATIONS: Mapping[str, Sequence[Params]] = {
    "gemm_scale_batchnorm": (
        {"template": "library"},
        {"template": "library", "stats": "shared_memory", "scale_mode": "prescaled"},
        {"template": "library", "stats": "atomics", "finalise": "fused"},
        {"template": "simt"},
        {"template": "simt", "stats": "shared_memory", "load": "registers", "stages": 2},
        {"template": "simt", "stats": "atomics", "scale_mode": "epilogue", "block_m": 64},
        {"template": "mma", "precision": "fp16x3"},
        {"template": "mma", "precision": "tf32x3", "stats": "shared_memory", "stages": 3},
        {"template": "mma", "precision": "bf16x3", "stats": "atomics", "promote_k": 32},
        {"template": "mma", "precision": "fp16", "finalise": "fused", "promote_k": 0},
        {"template": "wgmma", "precision": "fp16x3"},
        {"template": "wgmma", "precision": "fp16x3", "cluster_m": 2, "cluster_n": 2},
        {"template": "wgmma", "precision": "bf16x3", "order": "sweeps", "promote_k": 0},
        {"template": "wgmma", "precision": "fp16_fp8x2", "promote_k": 64, "centre": True},
        {"template": "wgmma", "precision": "fp16", "promote_k": 0, "stats": "atomics"},
        {"template": "wgmma", "precision": "tf32", "prepare": "behind", "promote_k": 0},
        {"template": "wgmma", "precision": "fp16x3", "finalise": "fused", "group_m": 0},
        {
            "template": "wgmma",
            "precision": "fp16_fp8x2",
            "order": "sweeps",
            "block_n": 256,
            "promote_k": 0,
            "stages": 4,
            "centre": True,
            "prepare": "behind",
        },
        {
            "template": "wgmma",
            "precision": "fp16_int8x2",
            "order": "sweeps",
            "promote_k": 64,
            "promote_into": "float8",
            "centre": True,
            "prepare": "behind",
        },
        {
            "template": "wgmma",
            "precision": "fp16x3",
            "stats": "cluster",
            "cluster_m": 2,
            "block_m": 64,
            "consumers": 1,
            "min_blocks": 2,
            "block_k": 32,
        },
        {"template": "wgmma", "precision": "fp16x3", "stats": "gram", "centre": True},
        {"template": "wgmma_convert", "precision": "fp16x3"},
        {"template": "wgmma_convert", "precision": "fp16x3", "cluster_n": 2, "load": "after"},
        {"template": "wgmma_convert", "precision": "fp16_fp8x2", "stats": "atomics"},
        {"template": "wgmma_convert", "precision": "fp16", "finalise": "fused"},
        {"template": "wgmma_convert", "precision": "fp16", "rescale": "row"},
        {"template": "triton", "precision": "fp16x3"},
        {"template": "triton", "precision": "tf32x3", "stats": "shared_memory"},
        {"template": "triton", "precision": "fp16_fp8x2", "load": "descriptors"},
        {"template": "triton", "precision": "ieee", "stats": "atomics", "persistent": True},
        {"template": "cpu"},
        {"template": "cpu", "stats": "gram", "gemm": "own"},
    ),
    "layer_norm": (
        {"template": "cuda"},
        {"template": "cuda", "stats": "shared_memory"},
        {"template": "cuda", "stats": "atomics"},
        {"template": "triton"},
        {"template": "triton", "stats": "atomics"},
        {"template": "cpu"},
    ),
}


def summed_up(text: str) -> tuple[int | None, str]:
    """Return the number of errors that a tool's output tells, and its first message.

    None where there is no summary: the child did not get that far.
    """
    found = re.findall(
        r"^={9} (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text, re.M
    )
    said = [line[9:].strip() for line in text.splitlines() if line.startswith("=========")]
    reported = re.compile(r"COMPUTE-SANITIZER$|\S* ?SUMMARY:|Target application returned")
    messages = [line for line in said if line and not reported.match(line)]
    if not found:
        return None, messages[0] if messages else ""
    return sum(int(number) for pair in found for number in pair if number), " ".join(messages[:2])


def checked(built: Built, op: str, tool: str, options: argparse.Namespace) -> tuple[str, str]:
    """Run one configuration under one tool in a child; return what the table's last cells say."""
    if built.candidate is None:
        return "not run", built.note
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        asked = {
            "plan": to_json(built.candidate.plan),
            "language": built.candidate.language,
            "artefact": str(built.artefact),
            "shapes": SIZES[op],
            "device": options.device,
        }
        job.write_text(json.dumps(asked), encoding="utf-8")
        return found_by(tool, "benchmarks.sanitize", job, options, options.environment)


def found_by(
    tool: str,
    module: str,
    job: Path,
    options: argparse.Namespace,
    environment: Mapping[str, str],
) -> tuple[str, str]:
    """Run `python -m module --child job` under a tool; return how many errors, and the first.

    With "none" as the tool it runs by itself. `options` has the sanitizer and the seconds.
    """
    command = [sys.executable, "-m", module, "--child", str(job)]
    if tool != "none":
        under = [options.sanitizer, "--tool", tool, *OPTIONS.get(tool, []), "--print-limit"]
        command = [*under, "5", *command]
    code, text = _run(command, options.timeout, environment)
    if code is None:
        return "timeout", f"more than {options.timeout:g} s"
    errors, message = summed_up(text) if tool != "none" else (0, "")
    if errors == 0 and code == 0:
        return "0", ""
    if errors:
        return str(errors), message
    last = text.strip().splitlines()[-1:] or ["no output"]
    return f"exit code {code}", message or last[0]


def _run(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """Run a command in a process group of its own; None as the code is a timeout."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, **environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    return process.returncode, text


def child(job: Path) -> int:
    """Call what the job names on each of its shapes, on large and small numbers; wait for it."""
    import torch

    from tuner.kernel.binding import bind
    from tuner.plans import Plan
    from tuner.space.expression import Expression
    from tuner.trial import from_json

    asked = json.loads(job.read_text(encoding="utf-8"))
    plan = from_json(Plan, asked["plan"])
    operator = bind(plan, asked["language"], Path(asked["artefact"]))
    calls = list(zip(plan.calls, operator.calls, strict=True))
    generator = torch.Generator().manual_seed(0)
    for sizes, (called, call) in product(asked["shapes"], calls):
        inputs: list[Any] = []
        for argument in called.arguments:
            if argument.shape is None:
                inputs.append(1e-5)  # eps
                continue
            shape = [int(Expression.parse(size).evaluate(sizes)) for size in argument.shape]
            given = torch.randn(shape, generator=generator)
            inputs.append(given.abs() if argument.name == "running_var" else given)
        for factor in (1.0, 0.25):  # a guard may compute other things on larger numbers
            # Scaled on the host: no kernel but the template's own runs under the tool.
            scaled = (factor * given for given in inputs)
            sent = (x.to(asked["device"]) if isinstance(x, torch.Tensor) else x for x in scaled)
            outputs = [output.cpu() for output in call(*sent)]  # waits
            assert all(bool(output.isfinite().all()) for output in outputs), "not finite"
    return 0


def main() -> int:
    """Parse the command line, build, run every tool, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ops", nargs="*", choices=SIZES, default=list(SIZES))
    return run_main(parser, child, _sanitized)


def run_main(
    parser: argparse.ArgumentParser,
    child: Callable[[Path], int],
    sanitized: Callable[[argparse.Namespace], Rows],
) -> int:
    """Parse the command line, and print a row of `sanitized` after the other; an exit code.

    Adds the options of who runs children under a tool. A row's first cells say what was called,
    the last three by what tool, how many errors it found, and the first message.
    """
    parser.add_argument("--templates", nargs="*", help="only these")
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one child")
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu without any tool")
    parser.add_argument("--sanitizer", help="the program; the one on the PATH, or CUDA's")
    parser.add_argument("--out", type=Path, help="write the table here, too")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child)
    is_cpu = options.device == "cpu"
    options.tools = ["none"] if is_cpu else options.tools
    usual = "/usr/local/cuda/bin/compute-sanitizer"
    options.sanitizer = options.sanitizer or shutil.which("compute-sanitizer") or usual
    if not is_cpu and not shutil.which(options.sanitizer):
        print(f"error: {options.sanitizer}: no such program; next: --sanitizer", file=sys.stderr)
        return 3
    rows: list[Sequence[str]] = []
    text, is_clean = "", True
    try:
        for row in sanitized(options):
            is_clean = is_clean and row[-2] == "0"
            rows.append(row)
            print(" | ".join(row), file=sys.stderr, flush=True)
            text = table(rows, COLUMNS) + "\n"
            if options.out is not None:  # after each row: an interrupted run keeps what it has
                options.out.write_text(text, encoding="utf-8")
    except TunerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(text, end="")
    return 0 if is_clean and rows else 1


def _sanitized(options: argparse.Namespace) -> Rows:
    device = this_device(options.device)
    for op in options.ops:
        chosen = [
            params
            for params in CONFIGURATIONS[op]
            if (params["template"] == "cpu") == (device.kind == "cpu")
            and params["template"] in (options.templates or [params["template"]])
        ]
        results, options.environment = build_all(op, chosen, device, SIZES[op])
        asked = list(product(results, options.tools))
        ask = partial(checked, op=op, options=options)
        with ThreadPoolExecutor(options.jobs) as pool:
            answers = pool.map(lambda one, ask=ask: ask(one[0], tool=one[1]), asked)
            for (built, tool), said in zip(asked, answers, strict=True):
                name = f"{op}/{built.params['template']}"
                yield (name, label(built.params), tool, *said)


if __name__ == "__main__":
    sys.exit(main())
