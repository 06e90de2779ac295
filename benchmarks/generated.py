"""A module's text with generated kernels on the GPU, and what a call of it takes."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tuner.evaluate.modules import fused, module_of
from tuner.kernel.binding import bind
from tuner.kernel.family import load_family
from tuner.machine.device import describe
from tuner.planning.deriving import derive_operator
from tuner.problem.reference import load_problem

__all__ = [
    "derived_from", "device_ms", "host_ms", "kernels_ms", "module_text", "module_with", "rms",
]  # fmt: skip

NUM_CALLS = 6
HOST_CALLS = 20
HEAD_START_CYCLES = 40_000_000  # of the device: 20 ms, in which the host starts all calls


TEXT = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {made}

    def forward(self, x):
        return {result}


def get_inputs():
    return [torch.randn({shape})]


def get_init_inputs():
    return []
"""


def module_text(made: str, result: str, shape: str) -> str:
    """Return a module's file: the constructor's lines, forward of x, and the shape of x."""
    return TEXT.format(made=made, result=result, shape=shape)


def derived_from(text: str, name: str) -> tuple[Any, Any]:
    """Return the problem of a file of that text, and the family that is derived from it."""
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(text)
    made = derive_operator(path)
    return load_problem(path), load_family(made.name, [made.folder])


def module_with(family: Any, params: Mapping[str, Any]) -> Any:
    """Return the family's module with the kernels of a configuration in Triton, on the GPU."""
    candidate = family.render(params, describe("cuda").facts())
    source = Path(tempfile.mkdtemp()) / "source.py"
    source.write_text(candidate.source)
    module = module_of(family.model_new)
    module |= {**fused(bind(candidate.plan, "triton", source)), "fused_device": "cuda"}
    return module["ModelNew"]().cuda()


def device_ms(call: Callable[[], Any]) -> float:
    """Return the device time of a call, the mean of a few that wait for nothing of the host.

    Kernels of a call may overlap, so this may be less than the sum of what each took.
    """
    import torch

    call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)
    begin.record()
    for _ in range(NUM_CALLS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / NUM_CALLS


def kernels_ms(call: Callable[[], Any]) -> dict[str, float]:
    """Return the device time of each kernel of a call, by its name without its arguments."""
    import torch

    call()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as seen:
        for _ in range(NUM_CALLS):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in seen.key_averages():
        if event.device_type.name == "CUDA":
            name = re.sub(r"^void |[<(].*", "", event.key)
            taken_ms = float(event.self_device_time_total) / NUM_CALLS / 1e3
            found[name] = found.get(name, 0.0) + taken_ms
    return found


def host_ms(call: Callable[[], Any]) -> float:
    """Return the host's time of a call."""
    import torch

    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    taken_s = time.perf_counter() - start_s
    torch.cuda.synchronize()
    return taken_s / HOST_CALLS * 1e3


def rms(found: Any, exact: Any) -> float:
    """Return an rms error, relative to the result's."""
    return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
