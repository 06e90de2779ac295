"""Time the kernels that make float32 products from float16 halves, by way and tile, beside eager.

    python -m benchmarks.products [--sizes 1024x8192x8192] [--files A.py,B.py]
        [--tiles split:256:64:1,converted:256:64:1] [--wide 0.01] [--limit-s 300] [--json OUT]

Sizes are rows x columns x terms of each sum; each product is a Linear with a ReLU behind it. Files
are modules in KernelBench's format with products of float32.
Device times are of a call, the mean of a few that wait for nothing of the host, and of each
kernel, by PyTorch's profiler (they may overlap: one that waits for another counts that, too); the
host's are of a call whose kernels are not waited for. Errors are rms against float64, of 64 rows,
relative to the result's. The weight is split in memory before, or converted by the product's own
kernel; tiles are `product_n`, `product_k` and `product_cluster`.
With `--wide`, that share of the rows of a size's input has numbers over 60 powers of two, and half
of the weight is zero: what float16 loses of such rows would show, so they are computed in float32.
Configurations are compiled side by side first. Needs an NVIDIA GPU of capability 9.0 and nvcc.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.generated import derived_from, device_ms, host_ms, kernels_ms, module_with, rms
from tuner.capture.tasks.half_products import WGMMA_TEMPLATE
from tuner.machine.host import usable_cores

NUM_ROWS = 64  # whose errors are computed
TEXT = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear({terms}, {columns})

    def forward(self, x):
        return torch.relu(self.linear(x))


def get_inputs():
    return [torch.randn({rows}, {terms})]


def get_init_inputs():
    return []
"""
SIZES = "1024x8192x8192,16384x4096x4096,1024x32768x8192,2048x2048x8192,128x16384x16384"
NAMES = ("product_weight", "product_n", "product_k", "product_cluster")
TILES = [
    *itertools.product(["split"], [128, 256], [64], [1, 2]),
    *itertools.product(["converted"], [128, 192, 256], [32, 64], [1, 2]),
]
TILES.remove(("converted", 256, 64, 2))  # which has no registers


@functools.cache
def derived(size: str) -> tuple[Any, Any]:
    """Return a problem, and the family that was derived from its file, or from that of a size."""
    if size.endswith(".py"):
        return derived_from(Path(size).read_text(), "product")
    rows, columns, terms = map(int, size.split("x"))
    text = TEXT.format(rows=rows, columns=columns, terms=terms)
    return derived_from(text, "product")  # one name: what is compiled is the same


def model_of(size: str, place: int) -> Any:
    """Return the module with the kernels of a configuration, on the GPU."""
    _, family = derived(size)
    params = {"template": WGMMA_TEMPLATE, **dict(zip(NAMES, TILES[place], strict=True))}
    return module_with(family, params)


def reported(size: str, what: str, found: dict[str, Any]) -> dict[str, Any]:
    """Print one line, and return the record."""
    numbers = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in found.items()
        if name != "kernels"
    ]
    kernels = sorted(found.get("kernels", {}).items(), key=lambda each: -each[1])
    numbers += [f"{name} {taken_ms:.3f}" for name, taken_ms in kernels]
    print(f"{Path(size).stem}: {what}: {', '.join(numbers)}", flush=True)
    return {"what": what, **found}


def widen(own: Any, x: Any, share: float) -> None:
    """Give a share of the rows numbers that lie far apart, and the weight zeros in their way."""
    import torch

    rows = x[torch.rand(len(x), device=x.device) < share]
    x[: len(rows)] = rows * torch.exp2(-60 * torch.rand_like(rows))
    own.linear.weight.data *= torch.rand_like(own.linear.weight) < 0.5


def timed(size: str, places: list[int], until_s: float, wide: float) -> list[dict[str, Any]]:
    """Time one product in some configurations, and print."""
    import torch

    problem, _ = derived(size)
    own, inputs = problem.make_model(0).cuda(), problem.make_inputs(1, device="cuda")
    rows = (
        None if size.endswith(".py") else NUM_ROWS
    )  # of a file's inputs all: rows may lie across
    if wide:
        widen(own, inputs[0], wide)

    def record(model: Any) -> dict[str, Any]:
        call = functools.partial(model, *inputs)
        error = rms(call()[:NUM_ROWS], exact)
        times = {"ms": device_ms(call), "host_ms": host_ms(call)}
        return {**times, "rms": error, "kernels": kernels_ms(call)}

    with torch.no_grad():
        exactly = copy.deepcopy(own).double()
        exact = exactly(*(x[:rows].double() for x in inputs))[:NUM_ROWS].clone()
        found = [reported(size, "eager", record(own))]
        for place in places:
            if time.monotonic() > until_s:
                break
            what = " ".join(map(str, TILES[place]))
            try:
                model = model_of(size, place)
                model.load_state_dict(own.state_dict())
                found.append(reported(size, what, record(model)))
            except (RuntimeError, ValueError) as failure:
                found.append(reported(size, what, {"failure": str(failure)[:200]}))
            torch.cuda.empty_cache()
    return found


def main() -> int:
    """Parse the command line; compile side by side, then time one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", help="as 1024x8192x8192, several after commas")
    parser.add_argument("--files", default="", help="modules, several after commas")
    parser.add_argument(
        "--tiles", help="as split:256:64:1, several after commas; all if not given"
    )
    parser.add_argument("--wide", type=float, default=0.0, help="share of rows so wide, of sizes")
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--build", nargs=2, metavar=("SIZE", "PLACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        size, place = options.build
        model_of(size, int(place))
        return 0
    until_s = time.monotonic() + options.limit_s
    files = [file for file in options.files.split(",") if file]
    sizes = (options.sizes or ("" if files else SIZES)).split(",")
    sizes = [size for size in sizes if size]
    known = {":".join(map(str, tile)): place for place, tile in enumerate(TILES)}
    places = [known[name] for name in (options.tiles or ",".join(known)).split(",")]
    command = [sys.executable, "-m", "benchmarks.products", "--build"]
    with ThreadPoolExecutor(max(1, usable_cores() - 1)) as pool:
        for size in (*sizes[:1], *files):  # what is compiled for one size is for all
            for place in places:
                pool.submit(subprocess.run, [*command, size, str(place)], check=False)
    found = {size: timed(size, places, until_s, options.wide) for size in sizes}
    found |= {file: timed(file, places, until_s, 0.0) for file in files}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
