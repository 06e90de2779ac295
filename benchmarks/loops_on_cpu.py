"""Generated C++ loops beside PyTorch on a CPU: forward and a step of training, by kind of loop.

    python -m benchmarks.loops_on_cpu [NAME ...] [--json OUT]

Each module is derived as `tune FILE` does, exported with its default configuration, unverified and
not searched, and called in turns with the reference in one process, whose memory is kept. It tells
which kind of loop is slow, where a search is for how fast one module gets. Wants a quiet machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.generated import module_text
from tuner.evaluate.modules import imported
from tuner.evaluate.steps import step_of
from tuner.export.module import export_text
from tuner.kernel.family import load_family
from tuner.kernel.toolchain import Toolchain
from tuner.machine.device import describe
from tuner.planning.deriving import derive_operator

NUM_TURNS = 21
# By name: the constructor's lines, forward of x, and the shape of x.
MODULES = {
    "BatchNorm1d": ("self.m = nn.BatchNorm1d(1024)", "self.m(x)", "4096, 1024"),
    "BatchNorm1d_narrow": ("self.m = nn.BatchNorm1d(64)", "self.m(x)", "65536, 64"),
    "sum_of_rows": (
        "self.w = nn.Parameter(torch.ones(2048))",
        "(x * self.w).sum(0)",
        "4096, 2048",
    ),
    "softmax_of_channels": ("pass", "torch.softmax(x, 1)", "8, 256, 64, 64"),
    "norm_of_channels": (
        "pass",
        "(x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, keepdim=True) + 1e-6)",
        "16, 96, 56, 56",
    ),
    "argmax_of_channels": ("pass", "x.argmax(1)", "64, 512, 256"),
    "Linear_BatchNorm_ReLU": (
        "self.a, self.m = nn.Linear(64, 512), nn.BatchNorm1d(512)",
        "torch.relu(self.m(self.a(x)))",
        "8192, 64",
    ),
    "GroupNorm_SiLU": ("self.m = nn.GroupNorm(8, 64)", "F.silu(self.m(x))", "8, 64, 56, 56"),
    "convolution_BatchNorm_SiLU": (
        "self.a, self.m = nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)",
        "F.silu(self.m(self.a(x)))",
        "8, 32, 56, 56",
    ),
    "LayerNorm": ("self.m = nn.LayerNorm(768)", "self.m(x)", "8192, 768"),
    "RMSNorm": (
        "self.w = nn.Parameter(torch.ones(2048))",
        "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.w",
        "4096, 2048",
    ),
    "softmax": ("pass", "torch.softmax(x, -1)", "2048, 2048"),
    "GELU": ("pass", "F.gelu(x)", "4096, 2048"),
}


def compared(name: str, folder: Path) -> dict[str, float]:
    """Return times in ms of a module and of its generated loops, and the ratios."""
    import torch

    made, result, shape = MODULES[name]
    path = folder / f"{name}.py"
    path.write_text(module_text(made, result, shape))
    derived = derive_operator(path)
    family = load_family(derived.name, [derived.folder])
    device = describe("cpu")
    candidate = family.render({"template": "nest"}, device.facts())
    flags = Toolchain.find("cpu", device.capability, ["cpp"]).flags("cpp")
    exported = folder / f"{name}_new.py"
    exported.write_text(
        export_text(
            family, candidate, reference=path.read_text(), sizes={}, flags=flags, provenance=[]
        )
    )
    theirs, mine = imported(path), imported(exported)
    reference, module = theirs.Model(), mine.ModelNew()
    module.load_state_dict(reference.state_dict())
    inputs = theirs.get_inputs()
    found: dict[str, float] = {}
    with torch.no_grad():
        calls = [partial(call, *inputs) for call in (reference, module)]
        found |= timed("forward", calls)
    with suppress(RuntimeError):  # nothing has a gradient
        found |= timed("step", [partial(step_of(m), inputs) for m in (reference, module)])
    return found


def timed(way: str, calls: Sequence[Callable[[], Any]]) -> dict[str, float]:
    """Return the medians of two calls, the reference's first, which take turns."""
    turns: list[list[float]] = [[], []]
    for call in calls:
        call()
    for _ in range(NUM_TURNS):
        for times, call in zip(turns, calls, strict=True):
            begun_s = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begun_s))
    baseline_ms, latency_ms = map(statistics.median, turns)
    return {
        f"{way}_baseline_ms": round(baseline_ms, 3),
        f"{way}_ms": round(latency_ms, 3),
        f"{way}_speedup": round(baseline_ms / latency_ms, 3),
    }


def main(arguments: list[str]) -> None:
    """Compare the modules that are named, or all, and print a line for each."""
    out = arguments.index("--json") if "--json" in arguments else None
    names = arguments[:out] or list(MODULES)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found[name] = compared(name, Path(folder))
            ratios = [f"{k} {v:.2f}" for k, v in found[name].items()]
            print(f"{name:28}", ", ".join(ratios), flush=True)
    if out is not None:
        Path(arguments[out + 1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
