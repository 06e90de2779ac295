"""One call of the reference, or of an exported file on its values, as a program of its own.

    python -m tuner.evaluate.counted_call TASK [FILE]

TASK is a `Task` as JSON. Nsight Compute starts it and counts what runs between its marks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tuner.evaluate.baseline import Baseline
from tuner.evaluate.oracle import Oracle
from tuner.evaluate.producing import Producer

__all__ = ["main"]


def main(spec: str, file: str = "") -> None:
    """Load what is asked for, warm it up, and make the call."""
    about: dict[str, Any] = json.loads(spec)
    names = ("reference", "sizes", "device", "accuracy", "mode")
    oracle = Oracle(**{name: about[name] for name in names})
    baseline = Baseline(oracle)
    if not file:
        baseline.counted()
        return
    known = oracle.about()
    producer = Producer(
        about["device"], about["accuracy"], known["init_inputs"], file=file, sizes=known["sizes"]
    )
    answer, blobs = baseline.timing_set()
    producer.take_timing_set(answer["question"], [memoryview(blob) for blob in blobs])
    producer.counted()


if __name__ == "__main__":
    main(*sys.argv[1:])
