"""Say where the time of a full check goes: by job of its processes, and by probe.

    python -m benchmarks.check_time REFERENCE.py [FILE.py] [--device cuda] [--accuracy pytorch]

`ask` is the judge's work on a question (inputs, the reference, float64), `answer` the contender's,
`judge` the verdict; `fill`, `weights` and `make_rooms` hand tensors over, and wait for a process
that is busy. Seconds are summed over pairs of processes, which work side by side. Without FILE the
reference is put to its own check.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tuner.evaluate.contender import Contender
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.verifier import Answered, Verifier
from tuner.evaluate.worker import Worker

OWN = "\n\nclass ModelNew(Model):\n    pass\n"
MOST_SHOWN = 10


def main() -> int:
    """Parse the command line, check, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0")
    parser.add_argument("--accuracy", default="pytorch")
    options = parser.parse_args()
    file = options.file or Path(tempfile.mkdtemp()) / "own.py"
    if options.file is None:
        file.write_text(options.reference.read_text() + OWN)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    call = Worker.call

    def timed(worker: Worker, job: str, *args: Any, **named: Any) -> Any:
        start_s = time.monotonic()
        try:
            return call(worker, job, *args, **named)
        finally:
            seconds[job].append(time.monotonic() - start_s)

    Worker.call = timed  # type: ignore[method-assign, assignment]
    probes: list[tuple[float, str]] = []
    last_s = time.monotonic()

    def answered(answer: Answered) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        probes.append((now_s - last_s, answer.result.probe))
        last_s = now_s

    reference = str(options.reference.resolve())
    task = JobSpec.of_any_file(reference, {}, options.device, options.accuracy)
    with Verifier(task, seed=7) as verifier:
        start_s = time.monotonic()
        check = verifier.check(Contender.of_file(file, is_deterministic=True), answered)
        verdict = "accepted" if check.is_accepted else check.reason
        print(f"{options.reference.name}: {verdict}, {len(probes)} probes,", end=" ")
        print(
            f"{time.monotonic() - start_s:.1f} s with starting, {verifier.seconds:.1f} s without"
        )
    for job, each in sorted(seconds.items(), key=lambda item: -sum(item[1])):
        print(f"  {job:14} {len(each):5} times {sum(each):8.2f} s")
    for taken_s, name in sorted(probes, reverse=True)[:MOST_SHOWN]:
        print(f"  {taken_s:6.2f} s until the answer to: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
