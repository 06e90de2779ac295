"""Both calls kernel by kernel: names as one reads them, bars on one axis of time, the longest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tuner.errors import DeviceError
from tuner.machine.ceilings import occupancy
from tuner.machine.device import Device
from tuner.profiled import KernelTime, Launch, Profiled, Profiles, busy_us
from tuner.review.formatting import count_words, percent_words, time_unit, us_words
from tuner.review.run_data import RunData

__all__ = ["NUM_COLOURS", "kernel_name", "kernels_brief", "kernels_view", "launch_words"]

NUM_COLOURS = 8  # of kernels, as the style sheet has them; the last is of all that are short
MOST_LETTERS = 40  # of a kernel's name
LEAST_BAR = 0.4  # % of a figure's width: less could not be seen
# What PyTorch's pointwise kernels are of: their function objects, but for those that wrap others.
_OF = re.compile(r"\b(?!gpu_kernel_impl|[AB]UnaryFunctor|BinaryFunctor)(\w*(?:Functor|KernelImpl|"
                 r"_kernel_cuda|_kernel)\w*|launch_\w+)")  # fmt: skip


def kernel_name(name: str, op: str = "") -> str:
    """Return a kernel's name without its C++ namespaces, types and arguments, cut if it is long.

    Args:
        name: as a profiler gives it.
        op: the operator that a generated kernel's name begins with, which is left out.
    """
    whole = (
        name.removeprefix("void ").replace("(anonymous namespace)", "").replace("<unnamed>", "")
    )
    outer, inner = _outer(whole)
    short = outer.rpartition("::")[2].strip() or name
    if "elementwise_kernel" in short and (of := _OF.search(inner)):
        short = f"{short}: {of[1]}"
    short = short.removeprefix(f"fused_{op}_") if op else short
    return short if len(short) <= MOST_LETTERS else f"{short[:MOST_LETTERS]}…"


def _outer(text: str) -> tuple[str, str]:
    """Return what stands before a name's types and arguments, and these."""
    for place, letter in enumerate(text):
        if letter in "<(" and place and (text[place - 1].isalnum() or text[place - 1] in "_>"):
            return text[:place], text[place:]
    return text, ""


def _short(names: Iterable[str], op: str) -> dict[str, str]:
    """Return short names by whole ones; of those that would be the same each has its number."""
    seen: Counter[str] = Counter()
    found = {}
    for name in dict.fromkeys(names):
        short = kernel_name(name, op)
        seen[short] += 1
        found[name] = short if seen[short] == 1 else f"{short}, {seen[short]}"
    return found


def kernels_brief(run_data: RunData) -> str:
    """Return how many kernels became how many, and the longest of either; empty off a GPU."""
    profiles = run_data.profiles
    if profiles is None or not profiles.is_gpu:
        return ""
    before, after = (
        _call_words(call, run_data.environment.op) for call in (profiles.baseline, profiles.winner)
    )
    return (
        f"PyTorch's call is {before}; the exported file's call is {after} "
        "(one profiled call of each; latencies are medians of the race)"
    )


def _call_words(call: Profiled, op: str) -> str:
    words = f"{count_words(len(call.kernels), 'kernel')}, {us_words(call.call_us)} in all"
    longest = max(call.kernels, key=lambda kernel: kernel.duration_us, default=None)
    if longest is None:
        return words
    name = kernel_name(longest.name, op)
    return f"{words}, the longest {name} with {us_words(longest.duration_us)}"


def kernels_view(run_data: RunData) -> dict[str, Any] | None:
    """Return both calls as bars on one axis of time, and each kernel's time in both."""
    profiles = run_data.profiles
    if profiles is None:
        return None
    calls = [("PyTorch", profiles.baseline), ("exported file", profiles.winner)]
    longest_us = max(call.call_us for _, call in calls) or 1.0
    kernels = [k for _, call in calls[::-1] for k in call.kernels]
    op = run_data.environment.op
    short = _short((k.name for k in kernels), op) if profiles.is_gpu else {}
    colours = _colours(profiles)
    rows = []
    for name in dict.fromkeys(k.name for k in kernels):
        mine = [[k.duration_us for k in call.kernels if k.name == name] for _, call in calls]
        launches = [k.launch for k in profiles.winner.kernels if k.name == name and k.launch]
        row = {
            "name": short.get(name, name),
            "whole": name,
            "launch": launch_words(launches[0], run_data.device) if launches else "",
            "colour": colours[name],
            "counts": list(map(len, mine)),
            "times": [sum(times) if times else None for times in mine],
        }
        rows.append(row)
    return {
        "is_gpu": profiles.is_gpu,
        "bars": [
            {
                "name": name,
                "call_us": call.call_us,
                "spans": _spans(call, longest_us, short, colours),
            }
            for name, call in calls
        ],
        "rows": rows,
        "between": [max(0.0, call.call_us - busy_us(call.kernels)) for _, call in calls],
        "overlaps": any(_overlaps(call.kernels) for _, call in calls),
        "unit": time_unit(k.duration_us for k in kernels),
    }


def _colours(profiles: Profiles) -> dict[str, int]:
    """Return a colour for each kernel: the longest in their calls have one of their own."""
    shares: dict[str, float] = {}
    for call in (profiles.winner, profiles.baseline):
        for name, group in groupby(sorted(call.kernels, key=_name), key=_name):
            share = sum(kernel.duration_us for kernel in group) / (call.call_us or 1.0)
            shares[name] = max(share, shares.get(name, 0.0))
    longest = sorted(shares, key=lambda name: -shares[name])
    return {name: min(place, NUM_COLOURS - 1) for place, name in enumerate(longest)}


def _name(kernel: KernelTime) -> str:
    return kernel.name


def _spans(
    call: Profiled, longest_us: float, short: Mapping[str, str], colours: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return kernels as bars, in % of the longer call; `is_over`: beside one that still runs."""
    spans = []
    end_us = 0.0
    for kernel in sorted(call.kernels, key=lambda kernel: kernel.start_us):
        over_us = min(end_us, kernel.start_us + kernel.duration_us) - kernel.start_us
        end_us = max(end_us, kernel.start_us + kernel.duration_us)
        spans.append(
            {
                "name": short.get(kernel.name, kernel.name),
                "us": kernel.duration_us,
                "left": round(100 * kernel.start_us / longest_us, 3),
                "width": max(LEAST_BAR, round(100 * kernel.duration_us / longest_us, 3)),
                "colour": colours[kernel.name],
                "is_over": over_us > 0.01 * call.call_us,
            }
        )
    return spans


def _overlaps(kernels: Sequence[KernelTime]) -> bool:
    """Whether kernels run side by side for more than a rounding of their times."""
    return sum(k.duration_us for k in kernels) > 1.01 * busy_us(kernels)


def launch_words(launch: Launch, device: Device | None) -> str:
    """Return how a kernel was launched, and how many warps that lets a multiprocessor hold."""
    words = f"{launch.num_blocks:,} x {launch.threads} threads, {launch.registers} registers, "
    words += f"{launch.smem_bytes:,} bytes of shared memory"
    if launch.occupancy:
        return f"{words}, occupancy {percent_words(launch.occupancy)}"
    # The profiler gives none, or 0 where a kernel asked for more shared memory than is usual.
    try:
        most = device and occupancy(device, launch.threads, launch.registers, launch.smem_bytes)
    except DeviceError:
        most = None
    return f"{words}, occupancy at most {percent_words(most)}" if most else words
