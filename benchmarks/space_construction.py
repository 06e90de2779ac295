"""How long it takes to find the feasible configurations of a space; beside Kernel Tuner.

    python -m benchmarks.space_construction [--kernel-tuner /path/to/its/python] [--repeats 3]

The published spaces are those of the Kernel Tuner authors' benchmark hub (kernels/*.json of
AutoTuningAssociation/benchmark_hub, DOI 10.5281/zenodo.15364124). Kernel Tuner runs in an
environment of its own; each construction is a fresh process there and here, so that its peak
memory is its own; the time is of the construction alone, without imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Space:
    """Parameters and constraints, in words that both tuners understand."""

    name: str
    parameters: dict[str, list[int]]
    constraints: list[str]


def _steps(first: int, last: int, step: int = 1) -> list[int]:
    return list(range(first, last + 1, step))


def _powers(first: int, last: int) -> list[int]:
    return [2**exponent for exponent in range(first, last + 1)]


SPACES = [
    Space(
        "convolution_milo",
        {
            "block_size_x": _steps(16, 256, 16),
            "block_size_y": _powers(0, 4),
            "tile_size_x": _steps(1, 4),
            "tile_size_y": _steps(1, 4),
            "read_only": [0, 1],
            "use_padding": [0, 1],
            "use_shmem": [0, 1],
            "filter_height": [15],
            "filter_width": [15],
        },
        [
            "use_padding == 0 or block_size_x % 32 != 0",
            "block_size_x * block_size_y <= 1024",
            "use_padding == 0 or use_shmem != 0",
            "use_shmem == 0 or (block_size_x * tile_size_x + filter_width - 1)"
            " * (block_size_y * tile_size_y + filter_height - 1) < 12 * 1024",
        ],
    ),
    Space(
        "dedispersion_milo",
        {
            "block_size_x": _powers(0, 5),
            "block_size_y": _steps(32, 256, 8),
            "tile_size_x": _steps(1, 4),
            "tile_size_y": _steps(1, 8),
            "tile_stride_x": [0, 1],
            "tile_stride_y": [0, 1],
        },
        [
            "32 <= block_size_x * block_size_y <= 1024",
            "tile_size_x > 1 or tile_stride_x == 0",
            "tile_size_y > 1 or tile_stride_y == 0",
        ],
    ),
    Space(
        "gemm_milo",
        {
            "MWG": _powers(4, 7),
            "NWG": _powers(4, 7),
            "KWG": _powers(4, 5),
            "MDIMC": _powers(3, 5),
            "NDIMC": _powers(3, 5),
            "MDIMA": _powers(3, 5),
            "NDIMB": _powers(3, 5),
            "KWI": [2],
            "VWM": _powers(0, 3),
            "VWN": _powers(0, 3),
            "STRM": [0, 1],
            "STRN": [0, 1],
            "SA": [0, 1],
            "SB": [0, 1],
        },
        [
            "KWG % KWI == 0",
            "MWG % (MDIMC * VWM) == 0",
            "NWG % (NDIMC * VWN) == 0",
            "MWG % (MDIMA * VWM) == 0",
            "NWG % (NDIMB * VWN) == 0",
            "KWG % ((MDIMC * NDIMC) / MDIMA) == 0",
            "KWG % ((MDIMC * NDIMC) / NDIMB) == 0",
            "not (MWG == 128 and NWG == 128 and MDIMC == 8 and NDIMC == 8)",
        ],
    ),
    Space(
        "hotspot_milo",
        {
            "block_size_x": [*_powers(0, 4), *_steps(32, 1024, 32)],
            "block_size_y": _powers(0, 5),
            "tile_size_x": _steps(1, 10),
            "tile_size_y": _steps(1, 10),
            "temporal_tiling_factor": _steps(1, 10),
            "loop_unroll_factor_t": _steps(1, 10),
            "sh_power": [0, 1],
        },
        [
            "block_size_x * block_size_y >= 32",
            "temporal_tiling_factor % loop_unroll_factor_t == 0",
            "block_size_x * block_size_y <= 1024",
            "(block_size_x * tile_size_x + temporal_tiling_factor * 2)"
            " * (block_size_y * tile_size_y + temporal_tiling_factor * 2)"
            " * (2 + sh_power) * 4 <= 49152",
        ],
    ),
    Space(
        "7 parameters of 10 values",
        {f"p{index}": _steps(1, 10) for index in range(7)},
        [
            "p0 * p1 <= 30",
            "p2 * p3 * p4 <= 90",
            "p5 % p6 == 0 and p0 != p5",
            "p1 + p3 + p6 <= 12",
        ],
    ),
]

# Too large for a list: counted, sampled and looked up, not listed. Ours alone.
LARGE = [
    Space(
        f"{length} parameters of 10 values, neighbours in order",
        {f"p{index}": _steps(1, 10) for index in range(length)},
        [f"p{index} * p{index + 1} <= 60" for index in range(length - 1)],
    )
    for length in (12, 15)
]

OURS = """
import json, resource, sys, time
from tuner.space.constraints import Constraint, Parameter
from tuner.space.expression import Expression
from tuner.space.search_space import SearchSpace
data = json.load(sys.stdin)
if "config" in data:
    from pathlib import Path
    from tuner import load_config, plan
    planned = plan(load_config(Path(data["config"]), {}), may_assume=True).space
    given = planned.parameters, planned.constraints, planned.facts
else:
    given = (
        [Parameter(name, tuple(values)) for name, values in data["parameters"].items()],
        [Constraint(Expression.parse(text), text) for text in data["constraints"]],
        {},
    )
start_s = time.perf_counter()
space = SearchSpace.build(*given)
seconds = time.perf_counter() - start_s
peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([space.num_cartesian, space.num_feasible, seconds, peak_mib]))
"""

KERNEL_TUNER = """
import json, math, resource, sys, time
from kernel_tuner.searchspace import Searchspace
data = json.load(sys.stdin)
start_s = time.perf_counter()
space = Searchspace(data["parameters"], data["constraints"], 1024)
seconds = time.perf_counter() - start_s
peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
product = math.prod(len(values) for values in data["parameters"].values())
print(json.dumps([product, space.size, seconds, peak_mib]))
"""


def measure(python: str, script: str, data: object, repeats: int) -> tuple[int, int, float, float]:
    """Return combinations, feasible configurations, best seconds and its process's peak MiB."""
    best: tuple[int, int, float, float] | None = None
    for _ in range(repeats):
        done = subprocess.run(
            [python, "-c", script],
            input=json.dumps(data),
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        if done.returncode:
            sys.exit(f"{python}: {done.stderr.strip()}")
        product, size, seconds, peak_mib = json.loads(done.stdout.splitlines()[-1])
        if best is None or seconds < best[2]:
            best = (product, size, seconds, peak_mib)
    assert best is not None
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel-tuner", help="a Python that has kernel_tuner; left out if none")
    parser.add_argument(
        "--configs", nargs="*", default=["search_spaces/gemm_scale_batchnorm_33.yaml"]
    )
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print("| space | combinations | feasible | ours | Kernel Tuner |\n|---|---|---|---|---|")
    rows: list[tuple[str, object, bool]] = [
        (space.name, {"parameters": space.parameters, "constraints": space.constraints}, is_small)
        for spaces, is_small in ((SPACES, True), (LARGE, False))
        for space in spaces
    ]
    rows += [(f"`{config}`", {"config": config}, False) for config in arguments.configs]
    for name, data, is_common in rows:
        product, size, *ours = measure(sys.executable, OURS, data, arguments.repeats)
        cells = [name, _count(product), _count(size), _cost(*ours), ""]
        if is_common and arguments.kernel_tuner:
            theirs = measure(arguments.kernel_tuner, KERNEL_TUNER, data, arguments.repeats)
            assert theirs[:2] == (product, size), f"{name}: {theirs[:2]} is not {(product, size)}"
            cells[-1] = _cost(*theirs[2:])
        print(f"| {' | '.join(cells)} |", flush=True)


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**9 else f"{number:.2e}"


def _cost(seconds: float, peak_mib: float) -> str:
    return f"{seconds:.3f} s, {peak_mib:.0f} MiB"


if __name__ == "__main__":
    main()
