r"""Ask whether a time told by some processes holds in others, and what can be told apart.

    python -m benchmarks.repeatability EXPORT.py --reference REF.py --processes 10 \
        [--sizes batch=1024,in_features=512] [--device cuda:0] [--seconds 2]

Three questions, each in fresh processes:

1. The stated interval of the speed-up over the reference comes from --first processes (5); then
   the file is raced in --processes others. How many fall inside, and how wide is it?
2. The file and a copy of it are raced against each other: "no difference" is expected.
3. The file and a copy that does 2 % more work are raced: they are to be told apart. The copy calls
   the file's module, then waits on the device for 2 % of its median time.

Prints one line a question; exit status 1 when fewer than 9 of 10 fall inside, or a wrong one is
told. Numbers are for the machine at that moment: leave it alone meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shapes import sizes_of
from tuner.evaluate.contender import Contender
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.measure import ratio_interval
from tuner.evaluate.race import Race
from tuner.evaluate.racing import Racer
from tuner.problem.accuracy import Accuracy
from tuner.trial import Interval

EXTRA = 0.02  # of work, that is to be told apart
SHARE = 0.9  # of the processes that must fall into the interval

SLOWER = """
import importlib.util, time
import torch
_spec = importlib.util.spec_from_file_location("original", {path!r})
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_wait_us = {wait_us!r}


class ModelNew(_module.ModelNew):
    def forward(self, *args):
        y = super().forward(*args)
        if args[0].device.type == "cuda":
            torch.cuda._sleep(int(_wait_us * {cycles_per_us!r}))
        else:
            end = time.perf_counter_ns() + _wait_us * 1e3
            while time.perf_counter_ns() < end:
                pass
        return y
"""


def interval_of(race: Race, over: int, lane: int) -> Interval:
    """Return the interval of lane `over`'s time over lane `lane`'s."""
    processes = zip(race[over], race[lane], strict=True)
    return ratio_interval([list(zip(a, b, strict=True)) for a, b in processes])


def reported(interval: Interval) -> str:
    return f"{interval.speedup:.4f}x [{interval.low:.4f}, {interval.high:.4f}]"


def ratios(race: Race) -> list[float]:
    """Return the speed-up over the baseline that each process told."""
    return [
        statistics.median(b / c for b, c in zip(base, mine, strict=True))
        for base, mine in zip(race[0], race[1], strict=True)
    ]


def cycles_per_us(device: str) -> float:
    """Return the rate of the spin kernel's clock, measured: it is not a fixed number."""
    if not device.startswith("cuda"):
        return 0.0
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(100_000_000)  # until the clock is up
    start.record()
    torch.cuda._sleep(100_000_000)
    stop.record()
    torch.cuda.synchronize()
    elapsed_us: float = start.elapsed_time(stop) * 1e3
    return 100_000_000 / elapsed_us


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, race, print three lines; 0 when all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("export", type=Path)
    parser.add_argument("--reference", type=Path, required=True, help="a KernelBench-format file")
    parser.add_argument("--processes", type=int, default=10, help="fresh ones, to compare with")
    parser.add_argument("--first", type=int, default=5, help="those that state the interval")
    parser.add_argument("--seconds", type=float, default=2.0, help="of samples a process")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--accuracy", default="float32", help="the math mode of the reference")
    parser.add_argument(
        "--sizes", type=sizes_of, default="", help="a=1,b=2: sizes of the reference in force"
    )
    options = parser.parse_args(arguments)
    accuracy = Accuracy.parse(options.accuracy).label
    reference = str(options.reference)
    task = JobSpec.of_any_file(reference, options.sizes, options.device, accuracy)
    racer = Racer(task)
    own = Contender.of_file(options.export, is_deterministic=False)

    def race(others: Sequence[Contender], num_processes: int) -> Race:
        return racer.race(others, num_processes=num_processes, seconds=options.seconds)

    first = race([own], options.first)
    stated = interval_of(first, 0, 1)
    later = ratios(race([own], options.processes))
    num_inside = sum(stated.low <= ratio <= stated.high for ratio in later)
    width = max(stated.high / stated.speedup, stated.speedup / stated.low) - 1
    print(
        f"repeated: {num_inside} of {len(later)} processes inside the stated {reported(stated)}, "
        f"{100 * width:.2f} % to either side; they told {min(later):.4f}x to {max(later):.4f}x",
        flush=True,
    )
    latency_us = statistics.median(us for process in first[1] for us in process)
    with tempfile.TemporaryDirectory() as folder:
        slower = Path(folder) / "slower.py"
        text = SLOWER.format(
            path=str(options.export.resolve()),
            wait_us=EXTRA * latency_us,
            cycles_per_us=cycles_per_us(options.device),
        )
        slower.write_text(text, encoding="utf-8")
        both = race([own, own, Contender.of_file(slower, is_deterministic=False)], options.first)
    same, different = interval_of(both, 1, 2), interval_of(both, 3, 1)
    print(f"identical: {reported(same)}: {same.verdict}", flush=True)
    print(f"{EXTRA:.0%} more work: {reported(different)}: {different.verdict}", flush=True)
    is_right = same.verdict == "no difference" and different.verdict == "faster"
    return 0 if is_right and num_inside >= SHARE * len(later) else 1


if __name__ == "__main__":
    sys.exit(main())
