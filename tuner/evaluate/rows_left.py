"""Which number of rows is timed next, below the most that were tuned.

First from how many rows on kernels win, by bisection: the larger a number of rows the longer its
calls take, and who times from above has no time left for what decides. Then those between, where
the gap is widest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tuner.by_batch import batches_of

__all__ = ["RowsLeft"]


class RowsLeft:
    """The numbers of rows of one way to call a module that may still be timed.

    Args:
        tuned_rows: the most that were tuned.
        tuned: all that were, where these are several.
        row_s: what PyTorch's call takes there, by its rows; 0 where that is not known.
        is_fixed: there are kernels at `tuned_rows` alone.

    Attributes:
        above: those from the most that were tuned on, few rows first.
    """

    def __init__(
        self,
        tuned_rows: int,
        tuned: Sequence[int] = (),
        row_s: float = 0.0,
        *,
        is_fixed: bool = False,
    ) -> None:
        rows = [tuned_rows] if is_fixed else batches_of(tuned_rows, tuned)
        self.above = [number for number in rows if number >= tuned_rows]
        self._left = [number for number in rows if number < tuned_rows]
        self._least = min([tuned_rows, *tuned])
        self._lost, self._won = 0, self._least  # the most that are, and the fewest that are not
        self._known = {0, tuned_rows}  # that were timed, or lie at an end
        self._seconds = {tuned_rows: row_s * tuned_rows} if row_s else {}

    def first(self) -> int | None:
        """Return the middle of those between the most that lose and the fewest that do not."""
        between = [rows for rows in self._left if self._lost < rows < self._won]
        return between[len(between) // 2] if between else None

    def between(self) -> int | None:
        """Return the middle of the widest gap above the most rows that lose; None without one."""
        known = sorted(self._known)
        found: list[tuple[float, int]] = []
        for low, high in itertools.pairwise(known):
            inside = [rows for rows in self._left if max(low, self._lost) < rows < high]
            if inside:
                found.append((high / max(1, low), -inside[len(inside) // 2]))
        return -max(found)[1] if found else None

    def expected_s(self, rows: int) -> float:
        """Return what PyTorch's call may take, from where a row takes least; 0: not known."""
        return min((s * rows / n for n, s in self._seconds.items()), default=0.0)

    def drop(self, rows: int) -> None:
        """Leave out a number of rows for which there is no time, or no room."""
        self._left.remove(rows)

    def timed(self, rows: int, call_s: float, *, is_lost: bool) -> None:
        """Take note: below what loses, and was not tuned for, nothing more is timed."""
        self._left.remove(rows)
        self._known.add(rows)
        self._seconds[rows] = call_s
        if rows >= self._least:
            return
        if is_lost:
            self._lost = max(self._lost, rows)
        elif rows > self._lost:
            self._won = min(self._won, rows)
