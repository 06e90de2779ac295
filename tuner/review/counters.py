"""What a GPU's counters say of a call: each kernel in words, with advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.profiled import CountedCalls, Counters
from tuner.review.formatting import NONE, percent_words, three_digits, time_unit, us_in
from tuner.review.kernel_times import kernel_name

__all__ = ["counter_words", "counters_brief", "counters_table"]

BUSY = 0.6  # of a unit's rate: NVIDIA's own rules call what is below it latency (Speed Of Light)
SMALL = 0.02  # of a call's time: a kernel that nobody needs to read about
SLOWED = 0.95  # of the others' clock: below, a kernel is slowed
_UNITS = {"tensor": "tensor cores", "memory": "memory", "issue": "issue"}
# What bounds a kernel that keeps a unit busy, and what would help.
_BUSY_WORDS = {
    "tensor": ("the tensor cores are busy", "only less arithmetic, or a cheaper precision, helps"),
    "memory": (
        "the memory is busy",
        "fewer bytes help: fuse what reads them again, or store them in fewer bits",
    ),
    "issue": (
        "the schedulers issue nearly all the time",
        "fewer instructions help: wider loads, less work on indices, tensor cores",
    ),
}
# By the Profiling Guide's "Warp Stall Reasons": what warps wait for, and what would help.
_STALL_WORDS = {
    "long_scoreboard": (
        "data from global memory or the L2",
        "more loads under way: more stages, larger tiles, or more warps",
    ),
    "short_scoreboard": (
        "shared memory",
        "fewer bank conflicts, or wider accesses to shared memory",
    ),
    "barrier": ("other warps of their block", "smaller blocks, or fewer barriers"),
    "math_pipe_throttle": ("a pipe of arithmetic", "less arithmetic on that pipe"),
    "mio_throttle": ("the queue to shared memory", "fewer, wider accesses to shared memory"),
    "lg_throttle": ("the queue to global memory", "fewer, wider accesses to global memory"),
    "wait": ("a fixed delay of their own instruction", "more independent work in each thread"),
    "not_selected": ("their turn: others can issue", "nothing: there are warps enough"),
    "gmma": ("a product of the tensor cores", "more products under way, or more consumer warps"),
}


def counter_words(calls: CountedCalls, op: str = "") -> list[str]:
    """Return a sentence for each kernel of the winner's call that takes time, longest first.

    Args:
        calls: that were counted.
        op: the operator that a generated kernel's name begins with, which is left out.
    """
    total_us = sum(kernel.duration_us for kernel in calls.winner) or 1.0
    kernels = sorted(calls.winner, key=lambda kernel: -kernel.duration_us)
    return [
        f"{kernel_name(kernel.name, op)} ({percent_words(kernel.duration_us / total_us)} of the "
        f"kernels' time): {_words(kernel, calls)}."
        for kernel in kernels
        if kernel.duration_us >= SMALL * total_us
    ]


def counters_brief(calls: CountedCalls, op: str = "", *, follows: bool = False) -> str:
    """Return the same of the longest kernel without advice; empty where nothing was counted.

    Args:
        calls: that were counted.
        op: as `counter_words` takes it.
        follows: a share of the rate stands before it, which is another one where a clock is low.
    """
    longest = max(calls.winner, key=lambda kernel: kernel.duration_us, default=None)
    if longest is None or not (known := _shares(longest)):
        return ""
    total_us = sum(kernel.duration_us for kernel in calls.winner) or 1.0
    unit = max(known, key=lambda name: known[name])
    what = _BUSY_WORDS[unit][0] if known[unit] >= BUSY else f"no unit is busy, most {_UNITS[unit]}"
    slowed = _clock_words(longest, calls)
    return (
        f"By the GPU's counters, in {kernel_name(longest.name, op)} "
        f"({percent_words(longest.duration_us / total_us)} of the kernels' time) {what}, "
        f"{_share_words(unit, known[unit])}"
        + (
            f"{slowed}: less of their rate, which is at full clock"
            if slowed and follows
            else slowed
        )
    )


def _shares(kernel: Counters) -> dict[str, float]:
    shares = {"tensor": kernel.tensor, "memory": kernel.memory, "issue": kernel.issue}
    return {name: share for name, share in shares.items() if share is not None}


def _share_words(unit: str, share: float) -> str:
    words = percent_words(share)
    return f"at {words} of its rate" if unit == "memory" else f"in {words} of the cycles"


def _clock_words(kernel: Counters, calls: CountedCalls) -> str:
    """Say where a kernel's clock is below that of others, as it is where power is at its limit."""
    clocks = [k.clock_mhz for k in (*calls.winner, *calls.baseline) if k.clock_mhz]
    if not kernel.clock_mhz or kernel.clock_mhz > SLOWED * max(clocks):
        return ""
    return (
        f", at a clock of {kernel.clock_mhz:,.0f} MHz, as a power limit makes it (other kernels "
        f"of the two calls reach {max(clocks):,.0f})"
    )


def _words(kernel: Counters, calls: CountedCalls) -> str:
    known = _shares(kernel)
    if not known:
        return "its counters are not known on this GPU"
    unit = max(known, key=lambda name: known[name])
    if known[unit] >= BUSY:
        what, advice = _BUSY_WORDS[unit]
        slowed = _clock_words(kernel, calls)
        return f"{what}, {_share_words(unit, known[unit])}{slowed}; {advice}"
    said = "no unit is busy: " + ", ".join(
        f"{words} {percent_words(known[name])}" for name, words in _UNITS.items() if name in known
    )
    reason = max(kernel.stalls, key=lambda name: kernel.stalls[name], default=None)
    if reason is None or not kernel.stalls[reason]:
        return said
    what, advice = _STALL_WORDS[reason]
    return f"{said}; warps wait mostly for {what}; next: {advice}"


def counters_table(calls: CountedCalls, op: str = "") -> dict[str, Any]:
    """Return all counters as a table: head, which of its columns are numbers, rows."""
    whole: Sequence[tuple[str, Counters]] = [
        *(("exported file", kernel) for kernel in calls.winner),
        *(("PyTorch", kernel) for kernel in calls.baseline),
    ]
    unit = time_unit(kernel.duration_us for _, kernel in whole)
    columns = [unit, "tensor pipe", "memory", "issue", "warps", "MB moved", "MHz"]
    return {
        "head": ["of", "kernel", *columns, "warps wait for"],
        "numeric": columns,
        "rows": [
            [
                of,
                kernel_name(kernel.name, op),
                us_in(kernel.duration_us, unit),
                *map(percent_words, (kernel.tensor, kernel.memory, kernel.issue, kernel.warps)),
                three_digits(kernel.dram_bytes and kernel.dram_bytes / 1e6),
                NONE if kernel.clock_mhz is None else f"{kernel.clock_mhz:,.0f}",
                _stalls(kernel),
            ]
            for of, kernel in whole
        ],
    }


def _stalls(kernel: Counters) -> str:
    """Return the reasons of three quarters of the waiting, the two most frequent at most."""
    total = sum(kernel.stalls.values())
    reasons: list[str] = []
    covered = 0.0
    for name, warps in sorted(kernel.stalls.items(), key=lambda pair: -pair[1]):
        if not total or covered >= 0.75 * total or len(reasons) == 2:
            break
        reasons.append(f"{_STALL_WORDS[name][0]} {percent_words(warps / total)}")
        covered += warps
    return ", ".join(reasons) or NONE
