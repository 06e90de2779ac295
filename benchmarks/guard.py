"""Time a guarded kernel on inputs that its guard lets through, and on inputs that it does not.

    python -m benchmarks.guard [--sizes batch=1024,in_features=8192,out_features=8192] [--out G.md]

Prints a markdown table: the `fp16_fp8x2` GEMM with and without its guard, `fp16_int8x2` prepared
before the GEMM and behind it, and three float16 products, on the reference's own weights and
inputs, with one gamma of 2, with one row of x 8 times as long, and with a normal x. Of each: the
time of the operator (cold L2, median), the ratio to PyTorch eager float32 in the same process, and
the largest share of 1e-4 + 1e-4 |y| that an element uses. Needs an NVIDIA GPU of compute
capability 9.0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ablation import WARM_UPS, Bench
from benchmarks.candidates import build_all, label, this_device
from benchmarks.shapes import sizes_of, table
from tuner.errors import TunerError
from tuner.trial import Params

OP = "gemm_scale_batchnorm"
FLOAT8: Params = {
    "template": "wgmma", "precision": "fp16_fp8x2", "order": "sweeps", "block_n": 256,
    "promote_k": 0, "stages": 4, "centre": True, "prepare": "behind", "ahead": 100,
}  # fmt: skip
INT8: Params = {
    **FLOAT8, "precision": "fp16_int8x2", "promote_k": 1024, "promote_into": "float8",
}  # fmt: skip
CONFIGURATIONS: Sequence[Params] = (
    FLOAT8,
    {**FLOAT8, "guard": False},
    INT8,
    {**INT8, "prepare": "before"},
    {
        "template": "wgmma",
        "precision": "fp16x3",
        "centre": True,
        "prepare": "behind",
        "ahead": 100,
    },
)
COLUMNS = ("configuration", "inputs", "time", "of eager float32", "use of 1e-4")


def questions(arguments: Sequence[Any]) -> list[tuple[str, tuple[Any, ...]]]:
    """Return inputs by name: as given, and such as corrections in 8 bits are too coarse for."""
    import torch

    x, weight, bias, scale, gamma, beta, eps = arguments
    large, long = gamma.clone(), x.clone()
    large[5] = 2.0
    long[7] *= 8.0
    normal = torch.empty_like(x).normal_(generator=torch.Generator(x.device).manual_seed(0))
    return [
        ("as given", (x, weight, bias, scale, gamma, beta, eps)),
        ("one gamma of 2", (x, weight, bias, scale, large, beta, eps)),
        ("one row 8 times as long", (long, weight, bias, scale, gamma, beta, eps)),
        ("a normal x", (normal, weight, bias, scale, gamma, beta, eps)),
    ]


def guarded(bench: Bench, name: str, call: Callable[..., Any], base_us: float) -> list[Any]:
    """Return a configuration's rows of the table."""
    rows = []
    for what, arguments in questions(bench.inputs[0][1]):
        exact = bench.oracle(arguments)
        off = (call(*arguments)[0].double() - exact).abs()
        use = float((off / (1e-4 + 1e-4 * exact.abs())).max())
        del exact, off
        timed = lambda _, given=arguments: call(*given)  # noqa: E731
        bench.timer.samples(timed, WARM_UPS)
        time_us = statistics.median(bench.timer.samples(timed, bench.num_samples))
        rows.append((name, what, f"{time_us:.0f} us", f"{base_us / time_us:.2f}x", f"{use:.2f}"))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, build, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    usual = "batch=1024,in_features=8192,out_features=8192"
    parser.add_argument("--sizes", type=sizes_of, default=usual)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="write the table here, too")
    options = parser.parse_args(arguments)
    try:
        device = this_device(options.device)
        built, environment = build_all(OP, CONFIGURATIONS, device, [options.sizes])
    except TunerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    os.environ.update(environment)
    import torch

    from tuner.kernel.binding import bind

    rows: list[Any] = []
    with torch.no_grad():
        bench = Bench(OP, options.sizes, options.device, options.samples)
        base_us = bench.whole_us(bench.eager("float32"))
        for found in built:
            name = f"{found.params['template']}: {label(found.params)}"
            if found.candidate is None or found.artefact is None:
                rows.append((name, "", "", "", found.note))
                continue
            call = bind(found.candidate.plan, found.candidate.language, found.artefact)
            rows += guarded(bench, name, call, base_us)
    text = f"{table(rows, COLUMNS)}\n\nPyTorch eager float32: {base_us:.0f} us ({device.name}).\n"
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
