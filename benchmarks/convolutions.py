"""Time the kernels that make float32 convolutions from float16 halves, beside cuDNN's.

    python -m benchmarks.convolutions [--problems 2/57,2/1] [--limit-s 300] [--json OUT]

Each is the convolution of a problem of KernelBench (`level/number`), with what stands behind it
here. Device times are of a call, the mean of a few that wait for nothing of the host; the host's
are of a call whose kernels are not waited for. Errors are rms against float64, of two samples,
relative to the result's. Eager is timed with the image as given and channels last, both with
PyTorch's settings as installed, where cuDNN may take TF32. Configurations are compiled side by
side first. Needs an NVIDIA GPU of capability 9.0 and nvcc.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.generated import derived_from, device_ms, host_ms, module_with, rms
from tuner.capture.tasks.convolutions import CONVOLUTION_WGMMA_TEMPLATE, ROUNDED_WGMMA_TEMPLATE
from tuner.machine.host import usable_cores

TEXT = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.{init}

    def forward(self, x):
        return {forward}


def get_inputs():
    return [torch.rand({shape})]


def get_init_inputs():
    return []
"""
RELU, TWICE = "torch.relu(self.convolution(x))", "self.convolution(x) * 2"
TRANSPOSED = "ConvTranspose2d(64, 64, 3, stride=2, padding=1, output_padding=1)"
PROBLEMS = {
    "2/57": ("Conv2d(8, 64, 3)", RELU, "128, 8, 128, 128"),
    "2/1": ("Conv2d(64, 128, 3)", RELU, "128, 64, 128, 128"),
    "2/2": (TRANSPOSED, RELU, "128, 64, 128, 128"),
    "1/70": ("ConvTranspose3d(48, 24, 3, bias=False)", TWICE, "8, 48, 96, 96, 96"),
    "2/78": (
        "ConvTranspose3d(32, 64, 5, stride=2, padding=2)", TWICE, "16, 32, 32, 32, 32"
    ),
    "1/87": ("Conv2d(64, 128, 1, bias=False)", TWICE, "16, 64, 1024, 1024"),
}  # fmt: skip
# Consumers, groups, channels of a part, blocks of a multiprocessor; of three products and of one.
THREE = [(2, 1, 64, 2), (2, 2, 64, 1), (2, 1, 128, 1), (3, 1, 64, 1), (2, 2, 32, 1)]
ONE = [(2, 1, 64, 2), (2, 2, 128, 1), (2, 1, 128, 1), (2, 2, 32, 1), (4, 1, 32, 1)]
TILES = [(CONVOLUTION_WGMMA_TEMPLATE, tile) for tile in THREE] + [
    (ROUNDED_WGMMA_TEMPLATE, tile) for tile in ONE
]
NAMES = ("image_consumers", "image_groups", "image_part", "image_blocks")


@functools.cache
def derived(key: str) -> tuple[Any, Any]:
    """Return a problem, and the family that was derived from its file."""
    init, forward, shape = PROBLEMS[key]
    text = TEXT.format(init=init, forward=forward, shape=shape)
    return derived_from(text, f"convolution_{key.replace('/', '_')}")


def model_of(key: str, place: int) -> Any:
    """Return the module with the kernels of a configuration, on the GPU."""
    template, tile = TILES[place]
    _, family = derived(key)
    params = {"template": template, **dict(zip(NAMES, tile, strict=True))}
    return module_with(family, params)


def last_ms(problem: Any, x: Any) -> float:
    """Return the device time of the reference with image and filters channels last."""
    import torch

    layout = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    model = problem.make_model(0).cuda().to(memory_format=layout)
    return device_ms(functools.partial(model, x.contiguous(memory_format=layout)))


def timed(key: str, until_s: float) -> list[dict[str, Any]]:
    """Time one convolution in all configurations, and print."""
    import torch

    problem, _ = derived(key)
    own, x = problem.make_model(0).cuda(), problem.make_inputs(1, device="cuda")[0]
    with torch.no_grad():
        exact = problem.make_model(0).double().cuda()(x[:2].double())
        found = [{"what": "eager", "ms": device_ms(lambda: own(x)), "rms": rms(own(x[:2]), exact)}]
        found.append({"what": "eager, channels last", "ms": last_ms(problem, x)})
        for place, (template, tile) in enumerate(TILES):
            if time.monotonic() > until_s:
                break
            try:
                model = model_of(key, place)
                model.load_state_dict(own.state_dict())
                error = rms(model(x[:2]), exact)
                call = functools.partial(model, x)
                times = {"ms": device_ms(call), "host_ms": host_ms(call)}
                found.append({"what": f"{template} {tile}", **times, "rms": error})
            except (RuntimeError, ValueError) as failure:
                found.append({"what": f"{template} {tile}", "failure": str(failure)[:200]})
            torch.cuda.empty_cache()
    for each in found:
        numbers = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else str(value)
            for name, value in each.items()
            if name != "what"
        )
        print(f"{key}: {each['what']}: {numbers}", flush=True)
    return found


def main() -> int:
    """Parse the command line; compile side by side, then time one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--problems", default=",".join(PROBLEMS), help="as 2/57,2/1")
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--build", nargs=2, metavar=("KEY", "PLACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        key, place = options.build
        model_of(key, int(place))
        return 0
    until_s = time.monotonic() + options.limit_s
    keys = options.problems.split(",")
    command = [sys.executable, "-m", "benchmarks.convolutions", "--build"]
    with ThreadPoolExecutor(max(1, usable_cores() - 1)) as pool:
        for key in keys:
            for place in range(len(TILES)):
                pool.submit(subprocess.run, [*command, key, str(place)], check=False)
    found = {key: timed(key, until_s) for key in keys}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
