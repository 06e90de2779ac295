"""Of several kernels in one file, the one for each number of rows, by what was measured.

Between two numbers of rows that were measured, the nearer one decides, by the logarithm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.by_batch import ANY_ROWS, MOST, NO_ROWS, AtBatch, ByBatch, Way, rows_taken

__all__ = ["Kernels", "chosen_at", "decided", "ranges_of"]

CLEARLY = 1.02  # times as fast, before a kernel is taken that was tuned for a size further away


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a file's kernels were tuned for.

    `tuned` has each tuned number of rows, few first, and the kernel for it, None where every
    kernel was slower than PyTorch there; `offers` which kernels there are in each way to call it.
    `apart` are the ways in which kernels have operators of their own: in others they are called
    as in calls. `faster` are the rows at which a race in fresh processes found a kernel faster.
    """

    tuned: tuple[tuple[int, int | None], ...]
    offers: Mapping[Way, tuple[int, ...]]
    apart: frozenset[Way] = frozenset({"call"})
    faster: frozenset[int] = frozenset()

    @property
    def num_kernels(self) -> int:
        """How many different kernels stand in the file."""
        return len({kernel for _, kernel in self.tuned if kernel is not None})

    @property
    def rows(self) -> tuple[int, ...]:
        """The tuned numbers of rows, few first."""
        return tuple(rows for rows, _ in self.tuned)

    def by_nearest(self, way: Way) -> tuple[tuple[int, int], ...]:
        """Return ranges for a way before anything was measured: each tuned size has its own."""
        return ranges_of({rows: _nearest(rows, self, way) for rows in self.rows})


def _nearest(rows: int, kernels: Kernels, way: Way) -> int:
    """Return the kernel, of those that offer a way, whose tuned size is nearest."""
    offered = [(n, k) for n, k in kernels.tuned if k is not None and k in kernels.offers[way]]
    return min(offered, key=lambda at: (abs(math.log(at[0] / max(1, rows))), -at[0]))[1]


def ranges_of(chosen: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Return the most rows of each range and the kernel for them, from single numbers of rows."""
    found: list[tuple[int, int]] = []
    ordered = sorted(chosen.items())
    for (rows, kernel), (above, other) in itertools.pairwise(ordered):
        if kernel != other:
            found.append((math.isqrt(rows * above), kernel))
    return (*found, (MOST, ordered[-1][1]))


def chosen_at(rows: int, ranges: Sequence[tuple[int, int]]) -> int:
    """Return the kernel for so many rows: the last one's where no range reaches that far."""
    return next((kernel for most, kernel in ranges if rows <= most), ranges[-1][1])


def decided(found: ByBatch, kernels: Kernels) -> ByBatch:
    """Return which kernel a file takes at which rows, and where it takes none.

    At a tuned size it is the kernel that was tuned for it, unless no race found that faster than
    PyTorch and it is slower here. Else it is the fastest; of those that hardly differ, the one
    that was tuned for the nearest size.

    Args:
        found: what was measured, of all kernels.
        kernels: what they were tuned for.
    """
    ranges: dict[Way, tuple[tuple[int, int], ...]] = {}
    taken: list[AtBatch] = []
    for way in sorted(kernels.offers):  # calls before steps
        offered = kernels.offers[way]
        mine = [at for at in found.measured if at.way == way and at.kernel in offered]
        points = {rows: _fastest(mine, rows, kernels, way) for rows in {a.num_rows for a in mine}}
        points |= {n: k for n, k in kernels.tuned if k is not None and k in offered}
        ranges[way] = ranges_of(points) if way in kernels.apart else ranges["call"]
        taken += [at for at in mine if chosen_at(at.num_rows, ranges[way]) == at.kernel]
    others = tuple(at for at in found.measured if at not in taken)
    ways = tuple(kernels.offers)
    lost = {at.num_rows for at in taken if at.way == "call" and at.is_lost} - kernels.faster
    anchors = [n for n, kernel in kernels.tuned if kernel is not None and n not in lost]
    rows: dict[Way, tuple[int, int]] = {"call": NO_ROWS, "step": NO_ROWS}
    gaps: dict[Way, tuple[tuple[int, int], ...]] = {}
    if anchors:
        rows = rows_taken(taken, anchors[0], ways, anchors[-1], refuses_one=found.refuses_one)
        gaps = {way: some for way in ways if (some := _gaps(taken, anchors, way))}
    rows = rows or dict.fromkeys(ways if gaps else (), ANY_ROWS)
    return replace(
        found, measured=tuple(taken), others=others, kernels=ranges, rows=rows, gaps=gaps,
        tuned=kernels.rows,
    )  # fmt: skip


def _fastest(measured: Sequence[AtBatch], rows: int, kernels: Kernels, way: Way) -> int:
    worst: dict[int, AtBatch] = {}  # of several ways to time it the worse one counts
    for at in sorted((at for at in measured if at.num_rows == rows), key=lambda at: -at.speedup):
        worst[at.kernel] = at
    usual = worst[_nearest(rows, kernels, way)]
    best = max(worst.values(), key=lambda at: at.speedup)
    is_clear = best.speedup > CLEARLY * usual.speedup and best.low > usual.speedup
    return best.kernel if is_clear and not best.is_disturbed else usual.kernel


def _gaps(
    taken: Sequence[AtBatch], anchors: Sequence[int], way: Way
) -> tuple[tuple[int, int], ...]:
    """Return ranges between the first and the last anchor in which PyTorch is faster."""
    mine = [at for at in taken if at.way == way and anchors[0] < at.num_rows < anchors[-1]]
    is_lost = {at.num_rows: False for at in mine} | dict.fromkeys(anchors, False)
    for at in mine:
        is_lost[at.num_rows] |= at.is_lost and at.num_rows not in anchors
    ordered = sorted(is_lost)
    found: list[tuple[int, int]] = []
    for below, rows, above in zip(ordered, ordered[1:], ordered[2:], strict=False):
        if not is_lost[rows]:
            continue
        low = math.isqrt(below * rows) + 1
        high = math.isqrt(rows * above)
        if found and is_lost[below]:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return tuple(found)
