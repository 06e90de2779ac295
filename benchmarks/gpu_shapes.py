"""Tune the flagship operator on shapes other than KernelBench's two, and print what was gained.

    python -m benchmarks.gpu_shapes [--accuracy float32] [--timeout 60s] [--out shapes.md]

The search space of a shape is that of KernelBench's problem 33 in the same accuracy class, from
`search_spaces/`, at the shape's sizes. Where every kernel is slower than PyTorch, the row says so,
and PyTorch's own modules are what was exported. Needs an NVIDIA GPU; two to three minutes a shape
with the defaults. `--shapes 0 3` picks some, by number; runs are kept in `--runs-dir`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from benchmarks.shapes import Shape, arguments, tune_all
from tuner import RunConfig, parse_config
from tuner.kernel.family import load_family

SPACES = Path(__file__).parent.parent / "search_spaces"
CLASSES = {"float32": "", "1e-4": "_1e-4", "tf32": "_tf32"}

SHAPES = (
    Shape(64, 512, 512, "the cost of a call"),
    Shape(64, 8192, 8192, "a small batch: reading the weight is all"),
    Shape(256, 2048, 2048, "fewer tiles than multiprocessors"),
    Shape(1000, 1000, 1000, "no tile divides it"),
    Shape(4097, 4099, 4101, "odd: no tile divides it, and rows are aligned to 4 bytes"),
    Shape(3000, 5000, 7000, "no tile divides it, and it is large"),
    Shape(2048, 1024, 8192, "N = 8K"),
    Shape(16384, 512, 4096, "N = 8K, and tall: the sweeps over the output"),
    Shape(65536, 512, 512, "the largest batch, the fewest features"),
    Shape(65536, 1024, 4096, "the largest batch: the output is 1 GB"),
    Shape(8192, 2048, 2048, "a usual layer"),
    Shape(2048, 16384, 2048, "the longest sums"),
    Shape(4096, 4096, 16384, "the most features out"),
    Shape(16384, 8192, 512, "few features out: reading x is most"),
)


def main() -> int:
    """Parse the command line and tune."""
    parser = arguments(__doc__.split("\n", maxsplit=1)[0], trials=3000, timeout="60s")
    parser.add_argument("--accuracy", choices=CLASSES, default="float32")
    parser.add_argument("--templates", help="only these, comma between; all of the space")
    parser.add_argument("--finalists", type=int, help="verified and raced for each shape")
    parser.add_argument("--processes", type=int, help="sets of processes that race")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    path = SPACES / f"gemm_scale_batchnorm_33{CLASSES[options.accuracy]}.yaml"
    return tune_all(SHAPES, lambda shape: config_of(shape, path, options), options)


def config_of(shape: Shape, path: Path, options: argparse.Namespace) -> RunConfig:
    """Return the config of a shape: that of a file, with what the options change."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    space = config["space"]
    config["problem"]["sizes"] = shape.sizes
    config["device"] = options.device
    if shape.in_features <= 2048:  # a template may take statistics from the covariance of x
        space["stats"].append("gram")
    if options.templates:
        space["template"] = options.templates.split(",")
        family = load_family(config["problem"]["op"])
        used = {name for each in space["template"] for name in family.template(each).parameters}
        config["space"] = {k: v for k, v in space.items() if k in used | {"template"}}
    given = {"num_finalists": options.finalists, "num_processes": options.processes}
    config["measure"] |= {name: number for name, number in given.items() if number}
    config["search"] |= {"trials": options.trials, "timeout": options.timeout}
    return parse_config(yaml.safe_dump(config, sort_keys=False), path)


if __name__ == "__main__":
    sys.exit(main())
