"""Time what PyTorch itself offers, beside exported files, interleaved in one process.

    python -m benchmarks.baselines --op gemm_scale_batchnorm \
        --sizes batch=1024,in_features=8192,out_features=8192 [--rounds 60] [EXPORT.py ...]
    python -m benchmarks.baselines --module MODULE.py [--module ...]

Of an operator float32 and TF32, in both of torch.compile's modes; of modules, files in
KernelBench's format, eager and torch.compile as they are called and configured by default.

Whole forward in training mode (or `--eval`), cold L2, CUDA events, under `no_grad` as KernelBench
times it. Prints a line a contender: median, noise, and the ratio to eager float32 of the same
round (its median), with a 95 % interval for one more round. Of an operator the compiled lines are
left out on a CPU, or with `--eager`, on a CPU TF32 as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.shapes import sizes_of
from tuner.evaluate.measure import interleave, ratio_interval
from tuner.evaluate.timers import CpuTimer, CudaTimer
from tuner.kernel.family import load_family
from tuner.problem.accuracy import Accuracy, math_mode
from tuner.problem.reference import load_problem

NUM_INPUT_SETS = 3


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _contenders(
    problem: Any, model: Any, device: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Return (module, math mode) by name, eager float32 first."""
    import torch

    highest, tf32 = Accuracy("float32"), Accuracy("tf32")
    found: dict[str, Any] = {"eager float32": (model, highest)}
    if device != "cpu":
        found["eager TF32"] = (model, tf32)
        for mode in () if options.eager else ("default", "max-autotune-no-cudagraphs"):
            for name, accuracy in (("float32", highest), ("TF32", tf32)):
                torch._dynamo.reset()
                with math_mode(accuracy):
                    compiled = torch.compile(model, mode=mode)
                    compiled(*problem.make_inputs(0, device=device))
                found[f"torch.compile {mode} {name}"] = (compiled, accuracy)
    for file in options.exports:
        candidate = _imported(file).ModelNew(*problem.init_inputs(0)).to(device)
        candidate.train(not options.eval)
        candidate.load_state_dict(model.state_dict())
        found[f"exported {file.name}"] = (candidate, highest)
    return found


def _as_called(problem: Any, model: Any, device: str) -> dict[str, Any]:
    """Return eager and torch.compile, with PyTorch's settings as they are."""
    import torch

    own = Accuracy("pytorch")
    torch._dynamo.reset()
    with math_mode(own):
        compiled = torch.compile(model)
        compiled(*problem.make_inputs(0, device=device))
    return {"eager": (model, own), "torch.compile": (compiled, own)}


def main() -> None:
    """Parse the command line, time the contenders of each problem in turn, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--op", default="gemm_scale_batchnorm")
    parser.add_argument("--module", type=Path, action="append", help="a file, instead of --op")
    parser.add_argument("--sizes", type=sizes_of, default="", help="name=number,...")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default=None)
    parser.add_argument("--eval", action="store_true", help="eval mode, not training")
    parser.add_argument("--eager", action="store_true", help="leave out torch.compile")
    parser.add_argument("exports", type=Path, nargs="*")
    options = parser.parse_args()
    if options.module and (options.eager or options.exports):
        parser.error("--module: eager and torch.compile alone; leave out --eager and files")
    for path in options.module or [load_family(options.op).reference]:
        _report(load_problem(path, options.sizes), path, options)


def _report(problem: Any, path: Path, options: argparse.Namespace) -> None:
    import torch

    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    timer = CudaTimer(0) if device != "cpu" else CpuTimer()
    sets = [problem.make_inputs(seed, device=device) for seed in range(NUM_INPUT_SETS)]
    with torch.no_grad():
        model = problem.make_model(0, device)
        model.train(not options.eval)
        contenders = (
            _as_called(problem, model, device)
            if options.module
            else _contenders(problem, model, device, options)
        )

        def call_of(module: Any, accuracy: Accuracy) -> Callable[[int], Any]:
            def call(number: int) -> Any:
                with math_mode(accuracy):
                    return module(*sets[number % len(sets)])

            return call

        calls = [call_of(*contender) for contender in contenders.values()]
        for call in calls:
            timer.samples(call, 3)
        times = interleave(calls, timer, options.rounds)
    name = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    mode = "eval" if options.eval else "training"
    print(f"{path.name} on {name}, {dict(problem.sizes)}, {mode} mode")
    for name, samples in zip(contenders, times, strict=True):
        ratio = ratio_interval([list(zip(times[0], samples, strict=True))])
        centre = statistics.median(samples)
        noise = 1.4826 * statistics.median(abs(s - centre) for s in samples) / centre
        print(
            f"| {name} | {centre / 1e3:.3f} ms | {noise:.2%} | {ratio.speedup:.3f}x "
            f"[{ratio.low:.3f}, {ratio.high:.3f}] |"
        )


if __name__ == "__main__":
    main()
