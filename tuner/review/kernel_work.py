"""What each kernel of one call moves and computes, for modules whose graph was captured.

A generated kernel carries the number of its task in its name. Kernels of PyTorch and of products
carry none: those that ran between two named ones belong to the tasks between these two. Where the
two disagree, or a template cuts the graph in another way than the outline, nothing is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tuner.capture.nests.index_space import ALIASES
from tuner.capture.outline import KernelTask, Outline
from tuner.machine.datasheets import bandwidth_gbps, peak_tflops
from tuner.profiled import KernelTime, busy_us
from tuner.review.formatting import NONE, percent_words, three_digits, time_unit, us_in
from tuner.review.gain import bytes_words
from tuner.review.run_data import UNITS, RunData

__all__ = [
    "NEAR", "Work", "is_cut_otherwise", "makers_words", "works_of", "works_table", "works_words",
]  # fmt: skip

NEAR = 0.6  # of a rate: below, it is not what bounds
NUM_SHOWN = 2  # of the tasks, in the sentence
MUCH = 1.25  # times the least traffic: more is worth a word
_PLAIN = "fp32"  # what generated loops compute in
# A template of another partition is nest_<how>_triton; its nests have other numbers.
_OTHER_CUT = re.compile(r"nest_\w+_triton")


@dataclass(frozen=True, slots=True)
class Work:
    """What some kernels of one call did, or all of a call.

    `num_bytes` and `flops` are those that the work needs at the least, None where they are not
    known; in `time_us` any of the kernels runs. `most_gbps` and `most_tflops` are the device's
    rates, the latter of `units`; None where no datasheet's are recorded. `is_whole`: it is all of
    a call, with what lies between kernels.
    """

    words: str
    num_kernels: int
    time_us: float
    num_bytes: int | None
    flops: float | None
    units: str
    most_gbps: float | None
    most_tflops: float | None
    is_whole: bool = False

    @property
    def gbps(self) -> float | None:
        """Bytes over the time, in GB/s."""
        return self.num_bytes / self.time_us / 1e3 if self.num_bytes else None

    @property
    def tflops(self) -> float | None:
        """Operations over the time, in TFLOPS."""
        return self.flops / self.time_us / 1e6 if self.flops else None

    @property
    def of_memory(self) -> float | None:
        """The share of the memory's rate, above 1 where the L2 still holds operands."""
        return self.gbps / self.most_gbps if self.gbps and self.most_gbps else None

    @property
    def of_arithmetic(self) -> float | None:
        """The share of the rate of `units`."""
        return self.tflops / self.most_tflops if self.tflops and self.most_tflops else None

    @property
    def nearest(self) -> tuple[str, float] | None:
        """The roof that is nearest, and the share of it."""
        known = [("memory", self.of_memory), (self.units, self.of_arithmetic)]
        shares = [(what, share) for what, share in known if share is not None]
        return max(shares, key=lambda pair: pair[1], default=None)


def works_of(run_data: RunData) -> list[Work]:
    """Return what the winner's kernels do, task by task, then both calls as wholes.

    Empty where the run has no profile of a GPU, or is of no captured module.
    """
    profiles, module = run_data.profiles, run_data.module
    if profiles is None or not profiles.is_gpu or module is None:
        return []
    outline, kernels = module.outline, profiles.winner.kernels
    is_own = run_data.result is not None and not run_data.result.is_fallback
    found: list[Work] = []
    if is_own and not is_cut_otherwise(run_data) and outline.tasks:
        op = run_data.environment.op
        for numbers, group in _by_tasks(kernels, outline.tasks, op):
            found.append(_work(run_data, outline, numbers, group))
    flops = run_data.environment.flops
    for words, call, units in (
        ("all of the exported file's call", profiles.winner, _fastest(run_data)),
        ("all of PyTorch's call", profiles.baseline, run_data.baseline_precision),
    ):
        amounts = (len(call.kernels), call.call_us, outline.num_bytes, flops)
        found.append(_against(run_data, words, *amounts, units, is_whole=True))
    return [work for work in found if work.time_us > 0]


def makers_words(run_data: RunData) -> list[str]:
    """Return what runs each task of the graph in the winner's file, as far as it is known."""
    if run_data.module is None:
        return []
    tasks = run_data.module.outline.tasks
    if run_data.result is not None and run_data.result.is_fallback:
        return ["PyTorch's own operations"] * len(tasks)
    kernels = run_data.profiles.winner.kernels if run_data.profiles is not None else ()
    op = run_data.environment.op
    groups = list(_by_tasks(kernels, tasks, op)) if not is_cut_otherwise(run_data) else []
    found = []
    for number, task in enumerate(tasks):
        behind = next((numbers for numbers, _ in groups if number in numbers[1:]), None)
        if task.kind != "nest":
            ours = "the template's kernels" if run_data.makes(task) else "PyTorch's own call"
            found.append(ours if task.kind == "library" else task.kind)
        elif behind and run_data.makes(tasks[number - 1]):
            found.append(f"at the end of {number}'s kernel")
        else:
            found.append("a generated kernel")
    return found


def is_cut_otherwise(run_data: RunData) -> bool:
    """Whether the winner's template cuts the graph in another way than the outline."""
    best = run_data.best
    return best is not None and _OTHER_CUT.fullmatch(best.template) is not None


def works_words(works: Sequence[Work]) -> str:
    """Return what bounds the kernels that take longest; empty where no task has a roof."""
    parts = [work for work in works if not work.is_whole]
    total_us = sum(work.time_us for work in parts)
    longest = sorted(parts, key=lambda work: -work.time_us)[:NUM_SHOWN]
    words = [
        f"task {work.words} takes {percent_words(work.time_us / total_us)} of the kernels' time, "
        f"at {_share_words(*work.nearest)}"
        for work in longest
        if work.nearest is not None
    ]
    return f"{'; '.join(words)}{_stored_words(works)}" if words else ""


def _share_words(what: str, share: float) -> str:
    of = "the memory's rate" if what == "memory" else f"the rate of {what}"
    return f"{percent_words(share)} of {of}"


def _stored_words(works: Sequence[Work]) -> str:
    """Say how much is moved only since it is stored between kernels; empty if it is not known."""
    parts, wholes = (
        [work.num_bytes for work in works if work.is_whole is whole] for whole in (False, True)
    )
    if None in parts or not wholes or not (least := wholes[0]):
        return ""
    moved = sum(number or 0 for number in parts)
    if len(parts) < 2 or moved < MUCH * least:
        return ""
    return (
        f". They move {bytes_words(moved)}, where {bytes_words(least)} would do if nothing were "
        "stored between them"
    )


def works_table(works: Sequence[Work]) -> dict[str, Any] | None:
    """Return work as a table: head, which of its columns are numbers, rows; None of no work."""
    if not works:
        return None
    unit = time_unit(work.time_us for work in works)
    columns = ["kernels", unit, "GB/s", "of memory rate", "TFLOPS", "of arithmetic rate"]
    return {
        "head": ["task of the graph", *columns, "rate of"],
        "numeric": columns,
        "rows": [
            [
                work.words,
                work.num_kernels,
                us_in(work.time_us, unit),
                three_digits(work.gbps),
                percent_words(work.of_memory),
                three_digits(work.tflops),
                percent_words(work.of_arithmetic),
                work.units if work.tflops else NONE,
            ]
            for work in works
        ],
    }


def _against(
    run_data: RunData,
    words: str,
    num_kernels: int,
    time_us: float,
    num_bytes: int | None = None,
    flops: float | None = None,
    units: str = "",
    *,
    is_whole: bool = False,
) -> Work:
    """Return work beside the device's rates; `units` of `UNITS`, empty where none bound it."""
    device = run_data.device
    gbps = bandwidth_gbps(device) if device is not None else None
    tflops = peak_tflops(device, units) if device is not None and units else None
    found = UNITS.get(units, "")
    return Work(words, num_kernels, time_us, num_bytes, flops, found, gbps, tflops, is_whole)


def _fastest(run_data: RunData) -> str:
    """Return the units of products: those named, else the fastest that the accuracy allows."""
    bounds = run_data.bounds()
    fastest = min(bounds, key=lambda bound: bound.latency_us, default=None)
    return run_data.precision or (fastest.precision if fastest else "")


def _by_tasks(
    kernels: Sequence[KernelTime], tasks: Sequence[KernelTask], op: str
) -> Iterator[tuple[list[int], list[KernelTime]]]:
    """Return the kernels with the numbers of their tasks, from 0; none where they have no task.

    Several tasks share kernels where nothing tells these apart, or one kernel does them all. A
    product with pointwise work at its end has the name of that as its epilogue's, and no own one.
    """
    name = re.compile(rf"^(?!.*_epilogue\b).*\bfused_{re.escape(op)}_rows(?:_(\d+))?_[a-z]")
    nests = [number for number, task in enumerate(tasks) if task.kind == "nest"]

    def task_of(kernel: KernelTime) -> int | None:
        match = name.search(kernel.name)
        count = int(match[1] or 0) if match else len(nests)
        return nests[count] if count < len(nests) else None

    ordered = sorted(kernels, key=lambda kernel: kernel.start_us)
    runs = [(task, list(group)) for task, group in groupby(ordered, task_of)]
    named = [task for task, _ in runs if task is not None]
    is_in_order = named == sorted(named)
    for place, (task, group) in enumerate(runs):
        if task is not None:
            yield [task], group
            continue
        before = [t for t, _ in runs[:place] if t is not None]
        after = [t for t, _ in runs[place + 1 :] if t is not None]
        first = before[-1] + 1 if before else 0
        last = after[0] if after else len(tasks)
        yield list(range(first, last)) if is_in_order else [], group


def _work(
    run_data: RunData, outline: Outline, numbers: Sequence[int], kernels: Sequence[KernelTime]
) -> Work:
    tasks = [outline.tasks[number] for number in numbers]
    time_us = busy_us(kernels)
    if not tasks:
        return _against(run_data, "of no task", len(kernels), time_us)
    ops = {step.name: step.text.partition("(")[0] for step in outline.steps}
    words = ", ".join(
        f"{n + 1}: {_ends_words([ops.get(name, name) for name in t.steps] or [t.name])}"
        for n, t in zip(numbers, tasks, strict=True)
    )
    flops = sum(task.flops for task in tasks) or None
    amounts = (len(kernels), time_us, _bytes_of(outline, tasks), flops)
    return _against(run_data, words, *amounts, _units_of(run_data, outline, tasks))


def _ends_words(ops: Sequence[str]) -> str:
    return ops[0] if len(ops) == 1 else f"{ops[0]} to {ops[-1]}"


def _bytes_of(outline: Outline, tasks: Sequence[KernelTask]) -> int | None:
    """Return what must be moved; None where a kernel may keep what lies between tasks."""
    if len(tasks) == len(outline.tasks):
        return outline.num_bytes
    if len(tasks) > 1 and any(task.kind == "nest" for task in tasks):
        return None
    ops = {step.name: step.text.partition("(")[0] for step in outline.steps}
    return sum(t.num_bytes for t in tasks if ops.get(t.name) not in ALIASES) or None


def _units_of(run_data: RunData, outline: Outline, tasks: Sequence[KernelTask]) -> str:
    """Return the units whose rate bounds the tasks; empty where none of `UNITS` does."""
    calls = [task for task in tasks if task.kind != "nest" and task.flops]
    if calls:
        is_ours = any(run_data.makes(task) for task in calls)
        return run_data.precision if is_ours else run_data.baseline_precision
    own = {name for task in tasks for name in task.steps}
    is_wide = any(step.dtype == "float64" for step in outline.steps if step.name in own)
    return "" if is_wide else _PLAIN
