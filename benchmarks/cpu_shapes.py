"""Tune the flagship operator on nine CPU shapes and print what was gained, or that nothing was.

    python -m benchmarks.cpu_shapes [--trials 24] [--timeout 40s] [--out docs/cpu_shapes.md]

Four shapes are tall and light per output, where the sweeps over y cost as much as the GEMM; five
are there because little can be gained: tiny calls, few features out, and shapes that are all GEMM.
Runs are kept in `--runs-dir`. Wants a quiet machine: about two minutes a shape with the defaults.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.shapes import Shape, arguments, tune_all
from tuner import RunConfig, parse_config

CONFIG = """
problem:
  op: gemm_scale_batchnorm
  sizes: {{batch: {batch}, in_features: {in_features}, out_features: {out_features}}}
device: cpu
accuracy: float32
space:
  template: [cpu]
  stats: [gram, per_thread, two_pass, atomics]
  gemm: [library, own]
  width: [4, 8, 16]
  block_rows: [32, 64, 128, 256]
  stats_columns: [32, 64, 128]
  tile_rows: [6, 8, 12, 14]
  tile_vectors: [1, 2, 3, 4]
  huge_pages: [true, false]
constraints:
  - {{expr: "width >= min(8, device.simd_bits // 32)", why: "4 are for 128-bit registers"}}
  - {{expr: "stats != 'gram' or in_features <= 2048", why: "stats=gram refuses more features"}}
search: {{trials: {trials}, timeout: {timeout}, seed: 0}}
measure: {{num_finalists: 1, num_processes: 4}}
"""

SHAPES = (
    Shape(4096, 64, 1024, "the quickstart: output-bound"),
    Shape(8192, 64, 1024, "tall: page faults of fresh outputs"),
    Shape(16384, 128, 512, "tall"),
    Shape(4096, 512, 1024, "a usual layer"),
    Shape(1024, 2048, 1024, "mostly GEMM"),
    Shape(512, 4096, 1024, "all GEMM"),
    Shape(128, 256, 256, "a small batch"),
    Shape(16, 64, 64, "tiny: the cost of a call"),
    Shape(2048, 4096, 8, "few features out: reading x is all"),
)


def main() -> int:
    """Parse the command line and tune."""
    parser = arguments(__doc__.split("\n", maxsplit=1)[0], trials=24, timeout="40s")
    options = parser.parse_args()

    def config_of(shape: Shape) -> RunConfig:
        text = CONFIG.format(**shape.sizes, trials=options.trials, timeout=options.timeout)
        return parse_config(text, Path("cpu_shapes.yaml"))

    return tune_all(SHAPES, config_of, options)


if __name__ == "__main__":
    sys.exit(main())
