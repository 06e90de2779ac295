"""Make one small file of runs that recorded the same space: a fixture to search again.

    tune --config benchmarks/recording_33.yaml --sampler random --record --timeout 7m
    tune --resume RUN --record --timeout 14m        # 7 minutes more
    python -m benchmarks.recording RUN [RUN|FILE ...] --out recording.json.gz
    tune replay recording.json.gz --sampler surrogate --sampler tpe --sampler random

The runs are sessions or seeds of one recording: the same operator, sizes, accuracy class and kind
of device. A file that this script wrote may stand for a run. Of a configuration that several have,
the first one's outcome counts. The file is T4 (`tuner.search.recorded`), without what a search
does not look at: samples, reasons, parameters that never vary. Times have four digits, which is
finer than their noise.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner.errors import InputError, TunerError
from tuner.run import open_run
from tuner.search.recorded import read_recording
from tuner.search.t4 import LOWER_BOUND, to_t4

SAME = ("kernel_name", "sizes", "accuracy", "device_name")  # of all that become one recording


def session(path: Path) -> dict[str, Any]:
    """Return what a run recorded, or an earlier recording, as a T4 document.

    Args:
        path: a run's folder, or a file that this script wrote.

    Raises:
        InputError: it is a file, but no recording.
        StorageError: the run cannot be read.
    """
    if path.is_dir():
        run = open_run(path)
        document: dict[str, Any] = json.loads(to_t4(path.name, run.trials(), run.environment()))
        document["metadata"].pop("command", None)  # may name folders of the machine
        results = [_small(result) for result in document["results"]]
        return {**document, "results": results}
    try:
        document = json.loads(gzip.decompress(path.read_bytes()))
        fixed = document["metadata"]["fixed"]
        for result in document["results"]:
            result["configuration"] |= fixed
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: no recording: {error!r}\n  expected: a run, or what this script wrote"
        ) from error
    return document


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """Return runs and recordings as one T4 document, each configuration once.

    Raises:
        InputError: they are not of the same problem and device, or no recordings.
        StorageError: a run cannot be read.
    """
    sessions = [session(path) for path in paths]
    first = sessions[0]
    results: dict[str, dict[str, Any]] = {}
    for path, document in zip(paths, sessions, strict=True):
        for name in SAME:
            got, expected = document["metadata"].get(name), first["metadata"].get(name)
            if got != expected:
                raise InputError(
                    f"{path}: {name} is {got!r}, but {expected!r} in {paths[0]}\n"
                    "  expected runs of one problem on one kind of device"
                )
        for result in document["results"]:
            key = json.dumps(result["configuration"], sort_keys=True)
            results.setdefault(key, result)
    fixed = _fixed([result["configuration"] for result in results.values()])
    for result in results.values():
        for name in fixed:
            del result["configuration"][name]
    metadata = {**first["metadata"], "fixed": fixed}
    return {**first, "metadata": metadata, "results": list(results.values())}


def _fixed(configurations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the parameters that all configurations have, with one and the same value."""
    common = dict(configurations[0]) if configurations else {}
    for params in configurations:
        common = {k: v for k, v in common.items() if k in params and params[k] == v}
    return common


def _small(result: dict[str, Any]) -> dict[str, Any]:
    times = {name: round(ms) for name, ms in result["times"].items() if name != "runtimes"}
    measurements = [
        {**entry, "value": float(f"{entry['value']:.4g}")}
        for entry in result["measurements"]
        if entry["name"] == "time" or (entry["name"] == LOWER_BOUND and entry["value"])
    ]
    small = {name: result[name] for name in ("timestamp", "configuration", "objectives")}
    return {
        **small,
        "times": {**times, "runtimes": []},
        "invalidity": result["invalidity"],
        "correctness": result["correctness"],
        "measurements": measurements,
    }


def write(document: dict[str, Any], path: Path) -> None:
    """Write it compressed; equal documents give equal files."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json.gz")
    options = parser.parse_args()
    try:
        write(merged(options.runs), options.out)
        found = read_recording(options.out)
    except TunerError as error:
        sys.exit(f"error: {error}")
    num_right = int((found.known_us > 0).sum())
    print(
        f"{options.out}: {found.space.num_feasible} configurations, {num_right} with a time, "
        f"{options.out.stat().st_size / 1000:.0f} kB"
    )


if __name__ == "__main__":
    main()
