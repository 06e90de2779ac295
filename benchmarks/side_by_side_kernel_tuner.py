"""Kernel Tuner's half of `benchmarks.side_by_side`, run by its own Python; knows nothing of ours.

Reads a job as JSON from stdin, searches, and prints what it did as JSON, on the last line.
"""

import json
import random
import sys
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

import numpy as np

ITERATIONS = 7  # Kernel Tuner's own default
ATOL = 1e-4  # of numpy.allclose, beside its relative 1e-5


def main() -> None:
    """Search for as long as the job says."""
    job = json.load(sys.stdin)
    kernel_tuner = import_module("kernel_tuner")  # not among our requirements
    searchspace = import_module("kernel_tuner.searchspace")

    names, sizes = job["names"], job["sizes"]
    rows, columns, length = sizes["batch"], sizes["out_features"], sizes["in_features"]
    feasible = {tuple(values) for values in job["feasible"]}
    begun: list[datetime] = []
    wrong: list[int] = []

    def threads(params: dict[str, Any]) -> int:
        return int(
            params["block_m"] * params["block_n"] // (params["thread_m"] * params["thread_n"])
        )

    def is_feasible(params: dict[str, Any]) -> bool:
        return tuple(params[name] for name in names) in feasible and params[
            "block_size_x"
        ] == threads(params)

    def grid(params: dict[str, Any]) -> tuple[int]:
        begun.append(datetime.now(UTC))  # asked once a configuration, before it is compiled
        return (-(-rows // params["block_m"]) * -(-columns // params["block_n"]),)

    def verify(answer: list[Any], result: list[Any], atol: float) -> bool:
        pairs = [(a, r) for a, r in zip(answer, result, strict=True) if a is not None]
        if not all(np.allclose(a, r, atol=atol) for a, r in pairs):
            wrong.append(1)  # counted; Kernel Tuner itself would end here
        return True

    rng = np.random.default_rng(job["seed"])
    x = rng.uniform(-1, 1, (rows, length)).astype(np.float32)
    weight = (rng.uniform(-1, 1, (columns, length)) / np.sqrt(length)).astype(np.float32)
    h = x.astype(np.float64) @ weight.astype(np.float64).T
    sums = np.stack([h.sum(0), (h * h).sum(0)])
    numbers = [np.int64(number) for number in (rows, columns, length)]
    outputs = [np.zeros((rows, columns), np.float32), np.zeros((2, columns), np.float64)]
    answer = [None, None, h.astype(np.float32), sums, None, None, None]

    values = dict(job["values"])
    counts = {threads(dict(zip(names, row, strict=True))) for row in job["feasible"]}
    values["block_size_x"] = sorted(counts)
    random.seed(job["seed"])
    np.random.seed(job["seed"])
    results, environment = kernel_tuner.tune_kernel(
        job["kernel"],
        job["text"],
        grid,
        [x, weight, *outputs, *numbers],
        values,
        grid_div_x=[],
        restrictions=is_feasible,
        answer=answer,
        atol=ATOL,
        verify=verify,
        lang="CUDA",
        compiler_options=["--std=c++17", "--device-as-default-execution-space"],
        iterations=ITERATIONS,
        strategy="random_sample",
        strategy_options={"fraction": 1.0, "time_limit": job["seconds"]},
        quiet=True,
    )
    results = [result for result in results if result]
    measured = [result for result in results if "__error__" not in result]
    stages = ("compile", "verification", "benchmark", "strategy", "framework")
    # The first configuration is run once more at the start, to warm up.
    start, end = begun[1], max(datetime.fromisoformat(r["timestamp"]) for r in results)
    found = {
        "tuner": f"Kernel Tuner {kernel_tuner.__version__}",
        "seconds": (end - start).total_seconds(),
        "tried": len(results),
        "checked": len(measured),
        "wrong": len(wrong),
        "best_us": min(result["time"] for result in measured) * 1e3,
        "stages": {
            stage: round(sum(result[f"{stage}_time"] for result in results) / 1e3, 2)
            for stage in stages
        },
        "backend": f"{environment['device_name']}, CUDA {environment['cuda_version']}",
        "size": searchspace.Searchspace(values, is_feasible, 1024).size,
    }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
