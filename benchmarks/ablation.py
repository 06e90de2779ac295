"""Time configurations that differ from the best in one idea each: what each idea bought.

    python -m benchmarks.ablation [--config benchmarks/ablation.yaml] [--problems 33] [--out A.md]

Prints a markdown table for each study of the config. Of each configuration: the operator's time
(cold L2, median), its kernels' times by torch.profiler (cold L2, median), the GEMM kernel's rate
as a share of PyTorch's own float16 product of the same shape in the same process, and errors
against float64 on KernelBench's input and on that input + 100: rms relative to the output's, and
the largest share of 1e-4 + 1e-4 |y| that an element uses (above 1 is outside that class). Needs an
NVIDIA GPU; `--list` prints the configurations and which of them an H200 can run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.candidates import Built, build_all, label, refusal, this_device
from benchmarks.shapes import table
from tuner.errors import TunerError
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device
from tuner.trial import Params

COLUMNS = (
    "idea",
    "configuration",
    "whole",
    "of the base's",
    "preparation",
    "GEMM",
    "statistics",
    "normalise",
    "GEMM's rate of fp16 mm",
    "rms; use of 1e-4",
    "x + 100: rms; use of 1e-4",
    "note",
)
# Of the products of a strategy, in float16 products of the same shape: 8 bits are twice as fast,
# TF32 half as fast.
WORK = {
    "fp16": 1, "bf16": 1, "tf32": 2, "fp16_fp8x2": 2, "fp16_int8x2": 2, "fp16x3": 3, "bf16x3": 3,
    "tf32x3": 6,
}  # fmt: skip
# A kernel's stage, by the first of these words in its name once the operator's own is taken out.
STAGES = {
    "normalise": "normalise",
    "finalise": "statistics",
    "gram": "statistics",
    "merge": "statistics",
    "stats": "statistics",
    "prepare": "preparation",
    "prescale": "preparation",
    "split": "preparation",
    "centre": "preparation",
    "range": "preparation",
    "mean": "preparation",
}
PREFIX = "fused_gemm_scale_bn_"
FLUSH = "bitwise_not"  # in the name of the kernel that overwrites the L2; in no candidate's
WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration of a study."""

    idea: str
    params: Params


def rows_of(study: Mapping[str, Any]) -> list[Row]:
    """Return a study's configurations, its base first."""
    rows = [Row("the base", study["base"])]
    for entry in study["ideas"]:
        params = entry.get("instead") or {**study["base"], **entry["change"]}
        rows.append(Row(entry["idea"], params))
    return rows


def stage_of(kernel: str) -> str:
    """Return the stage of the operator that a kernel is, by its name; other products are GEMM."""
    own = kernel.replace(PREFIX, "") if PREFIX in kernel else ""
    found = next((stage for word, stage in STAGES.items() if word in own), "")
    if found or own:
        return found or "GEMM"
    return "other" if "mem" in kernel.lower() or "elementwise" in kernel else "GEMM"


class Bench:
    """One problem on one device: its inputs, its oracle, and what measures a call.

    Args:
        op: the operator's family.
        sizes: of the problem.
        device: `cuda:0` or `cpu`, where there are no kernels to profile.
        num_samples: of a call.
    """

    def __init__(self, op: str, sizes: Mapping[str, int], device: str, num_samples: int) -> None:
        import torch

        from tuner.evaluate.timers import CpuTimer, CudaTimer
        from tuner.problem.reference import load_problem

        self.device, self.num_samples = device, num_samples
        problem = load_problem(load_family(op).reference, dict(sizes))
        self.model = problem.make_model(0, device)
        (x,) = problem.make_inputs(0, device=device)
        self.timer = CudaTimer(0) if device != "cpu" else CpuTimer()
        with torch.no_grad():
            self.inputs = [(offset, self._arguments(x + offset)) for offset in (0.0, 100.0)]
            self.exact = [self.oracle(arguments) for _, arguments in self.inputs]

    def _arguments(self, x: Any) -> tuple[Any, ...]:
        linear, bn = self.model.gemm, self.model.bn
        scale = self.model.scale.detach()
        weights = (linear.weight, linear.bias, scale, bn.weight, bn.bias)
        return (x, *(w.detach() for w in weights), float(bn.eps))

    @staticmethod
    def oracle(arguments: Sequence[Any]) -> Any:
        """Return y in float64."""
        x, weight, bias, scale, gamma, beta = (a.double() for a in arguments[:-1])
        z = (x @ weight.T + bias) * scale
        var, mean = z.var(0, correction=0), z.mean(0)
        return (z - mean) / (var + arguments[-1]).sqrt() * gamma + beta

    def errors(self, call: Callable[..., Any]) -> list[str]:
        """Return the errors of y on each input, in words."""
        found = []
        for (_, arguments), exact in zip(self.inputs, self.exact, strict=True):
            off = (call(*arguments)[0].double() - exact).abs()
            rms = float(off.square().mean().sqrt() / exact.square().mean().sqrt())
            use = float((off / (1e-4 + 1e-4 * exact.abs())).max())
            found.append(f"{rms:.1e}; {use:.2f}")
        return found

    def whole_us(self, call: Callable[..., Any]) -> float:
        """Return the median time of one call of the operator, in us."""
        arguments = self.inputs[0][1]
        self.timer.samples(lambda _: call(*arguments), WARM_UPS)
        return statistics.median(self.timer.samples(lambda _: call(*arguments), self.num_samples))

    def kernels_us(self, call: Callable[[], Any]) -> dict[str, float]:
        """Return the time of each kernel in one call, by name, in us; nothing on a CPU."""
        if self.device == "cpu":
            return {}
        import torch
        from torch.profiler import ProfilerActivity, profile

        size = 2 * torch.cuda.get_device_properties(0).L2_cache_size
        buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
        for _ in range(WARM_UPS):
            call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(self.num_samples):
                buffer.bitwise_not_()
                call()
            torch.cuda.synchronize()
        # A kernel may be launched, and wait, while the one before it runs: it counts from its end.
        events = [event for event in profiled.events() if event.device_type.name == "CUDA"]
        times: dict[str, list[float]] = {}
        last_end = 0.0
        for event in sorted(events, key=lambda event: event.time_range.start):
            start, end = event.time_range.start, event.time_range.end
            if FLUSH not in event.name:
                times.setdefault(event.name, []).append(max(0.0, end - max(start, last_end)))
            last_end = max(last_end, end)
        return {
            name: statistics.median(each) * len(each) / self.num_samples
            for name, each in times.items()
        }

    def fp16_mm_us(self) -> float:
        """Return the kernel time of PyTorch's float16 product of the same shape, in us."""
        import torch

        x, weight = (tensor.half() for tensor in self.inputs[0][1][:2])
        out = torch.mm(x, weight.T)
        kernels = self.kernels_us(lambda: torch.mm(x, weight.T, out=out))
        return sum(kernels.values())

    def eager(self, accuracy: str) -> Callable[..., Any]:
        """Return PyTorch's own operations in the math mode of an accuracy class."""
        import torch

        from tuner.problem.accuracy import Accuracy, math_mode

        def call(
            x: Any, weight: Any, bias: Any, scale: Any, gamma: Any, beta: Any, eps: float
        ) -> Any:
            with math_mode(Accuracy.parse(accuracy)):
                z = torch.nn.functional.linear(x, weight, bias) * scale
                return (
                    torch.nn.functional.batch_norm(z, None, None, gamma, beta, True, 0.1, eps),
                )

        return call


def measured(
    bench: Bench, row: Row, call: Callable[..., Any], base_us: float, fp16_us: float, note: str
) -> tuple[Sequence[str], float]:
    """Return a row of the table, and the whole time in us."""
    errors = bench.errors(call)
    whole_us = bench.whole_us(call)
    stages: dict[str, float] = {}
    for name, time_us in bench.kernels_us(lambda: call(*bench.inputs[0][1])).items():
        stage = stage_of(name)
        stages[stage] = stages.get(stage, 0.0) + time_us
    work = WORK.get(str(row.params.get("precision", "")), 0)
    gemm_us = stages.get("GEMM", 0.0)
    rate = f"{work * fp16_us / gemm_us:.2f}" if work and gemm_us and fp16_us else ""
    if "other" in stages:
        note = f"{note}; other kernels {stages['other']:.1f} us".lstrip("; ")
    cells = [f"{stages[s]:.1f} us" if s in stages else "" for s in COLUMNS[4:8]]
    share = f"{whole_us / (base_us or whole_us):.3f}"
    said = label(row.params) if row.params else ""
    name = f"{row.params['template']}: {said}" if row.params else ""
    return (row.idea, name, f"{whole_us:.1f} us", share, *cells, rate, *errors, note), whole_us


def study_table(bench: Bench, rows: Sequence[Row], built: Sequence[Built]) -> str:
    """Measure a study's configurations, PyTorch's own beside them; return the table."""
    from tuner.kernel.binding import bind

    fp16_us, base_us = bench.fp16_mm_us(), 0.0
    lines: list[Sequence[str]] = []
    for row, found in zip(rows, built, strict=True):
        name = f"{row.params['template']}: {label(row.params)}"
        blank = ("",) * (len(COLUMNS) - 3)
        if found.candidate is None or found.artefact is None:
            lines.append((row.idea, name, *blank, found.note))
            continue
        try:
            call = bind(found.candidate.plan, found.candidate.language, found.artefact)
            line, whole_us = measured(bench, row, call, base_us, fp16_us, found.note)
        except RuntimeError as error:  # a step's message; after a CUDA error all others fail, too
            lines.append((row.idea, name, *blank, " ".join(str(error).split())[:200]))
            continue
        base_us = base_us or whole_us
        lines.append(line)
        print(" | ".join(line), file=sys.stderr, flush=True)
    for accuracy in ("float32", "tf32"):
        eager = Row(f"PyTorch eager, {accuracy}", {})
        lines.append(measured(bench, eager, bench.eager(accuracy), base_us, fp16_us, "")[0])
    mm = f"PyTorch's float16 product alone: {fp16_us:.1f} us.\n" if fp16_us else ""
    return f"{table(lines, COLUMNS)}\n\n{mm}"


def _listed(config: Mapping[str, Any]) -> str:
    device, family, lines = known_device("NVIDIA H200"), load_family(config["op"]), []
    for name, problem in config["problems"].items():
        for study in problem["studies"]:
            for row in rows_of(study):
                why = refusal(family, row.params, device, [problem["sizes"]])
                said = f"{row.params['template']}: {label(row.params)}"
                lines.append((name, study["study"], row.idea, said, why or "feasible"))
    return table(lines, ("problem", "study", "idea", "configuration", "on an H200"))


def main() -> int:
    """Parse the command line, build everything, then measure study by study."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--problems", nargs="*", help="only these, by name")
    parser.add_argument("--studies", nargs="*", help="only those with one of these in their name")
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--list", action="store_true", help="what would be timed; needs no GPU")
    parser.add_argument("--out", type=Path, help="write the tables here, too")
    options = parser.parse_args()
    config = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    if options.list:
        print(_listed(config))
        return 0
    try:
        text = _ablation(config, options)
    except TunerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(text, end="")
    return 0


def _ablation(config: Mapping[str, Any], options: argparse.Namespace) -> str:
    device, text = this_device(options.device), ""
    for name, problem in config["problems"].items():
        if name not in (options.problems or [name]):
            continue
        studies = [
            study
            for study in problem["studies"]
            if any(word in study["study"] for word in options.studies or [""])
        ]
        rows = [rows_of(study) for study in studies]
        flat = [row.params for each in rows for row in each]
        built, environment = build_all(config["op"], flat, device, [problem["sizes"]])
        os.environ.update(environment)  # before Triton is imported
        import torch

        with torch.no_grad():
            bench = Bench(config["op"], problem["sizes"], options.device, options.samples)
            for study, each in zip(studies, rows, strict=True):
                mine, built = built[: len(each)], built[len(each) :]
                found = study_table(bench, each, mine)
                sizes = ", ".join(f"{k} = {v}" for k, v in problem["sizes"].items())
                text += f"### #{name}, {study['study']} ({sizes}; {device.name})\n\n{found}\n"
                if options.out is not None:  # after each study: an interrupted run keeps them
                    options.out.write_text(text, encoding="utf-8")
    return text


if __name__ == "__main__":
    sys.exit(main())
