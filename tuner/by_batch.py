"""Kernels beside PyTorch by number of rows: what was measured, and which rows a file takes.

Few rows are a launch and little else, where PyTorch's own modules may be faster. The rows that a
file takes reach from the size that it was tuned for as far as measuring bears it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import ConfigDict

__all__ = [
    "ANY_ROWS", "ELSEWHERE", "FEW_ROWS_WORDS", "MOST", "NO_ROWS", "WAYS", "WORST", "AtBatch",
    "ByBatch", "Way", "batches_of", "least_of", "rows_taken", "without_steps_in",
]  # fmt: skip

Way = Literal["call", "step", "eval"]
"""A call of forward, a step of training (forward, and gradients of inputs and weights), or a call
in eval mode, where a file has kernels of its own for that."""

WAYS: dict[Way, str] = {
    "call": "calls", "step": "steps of training", "eval": "calls in eval mode",
}  # fmt: skip
BRIEF_WAYS: dict[Way, str] = {
    "call": "without gradients", "step": "with gradients", "eval": "in eval mode",
}  # fmt: skip
ELSEWHERE = "elsewhere the module's own forward runs"
MOST = 2**63 - 1  # no tensor has more rows
ANY_ROWS = (1, MOST)
NO_ROWS = (MOST, 0)
FEW_ROWS_WORDS = "with few rows the module's own operations run"  # of a check's note
ABOVE = 4  # times the tuned size: as far as is measured
FAR = 16  # times fewer tell, where disturbed turns of the tuned size say the same
NEAR = 4  # times fewer rows than tuned tell of steps of training where no more were timed
LITTLE = 1.05  # of PyTorch's speed: for less no file is checked and raced that may be slower
WORST = 0.97  # of PyTorch's speed: what 3 % less is a user cannot tell from another process


@dataclass(frozen=True, slots=True)
class AtBatch:
    """Kernels beside PyTorch at one number of rows, by the host's clock, in one process.

    `speedup` is the median of PyTorch's time over the kernels', in turns; that median lies from
    `low` to `high` with 95 %. With `is_idle` the device is idle before each call, else calls
    follow each other; on a CPU there is no difference. `is_disturbed`: other programs took the
    processor again and again, so that it decides nothing. `kernel` is which one, in a file that
    has several. `data` names what it was timed on, "" where these are the given ones.
    """

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")

    num_rows: int
    way: Way
    is_idle: bool
    speedup: float
    low: float
    high: float
    baseline_us: float
    latency_us: float
    is_disturbed: bool = False
    kernel: int = 0
    data: str = ""

    @property
    def is_won(self) -> bool:
        """Whether kernels are as fast as PyTorch, or faster, and hardly below in any case."""
        return self.speedup >= 1.0 and self.low >= WORST and not self.is_disturbed

    @property
    def is_clear(self) -> bool:
        """Whether more turns would hardly change what is decided here."""
        return self.is_won or (self.high < 1.0 and not self.is_disturbed)

    @property
    def gains_little(self) -> bool:
        """Whether kernels seem to be slower, and are not much faster in any case."""
        return self.speedup < 1.0 and self.high < LITTLE and not self.is_disturbed

    @property
    def is_lost(self) -> bool:
        """Whether kernels are slower, and by more than nobody would see."""
        return self.speedup < WORST and self.high < 1.0 and not self.is_disturbed


@dataclass(frozen=True, slots=True)
class ByBatch:
    """What was measured of one file, and what it does then.

    `rows` are the fewest and the most at which it takes kernels, of calls and of steps of
    training; elsewhere the module's own forward runs. It is empty where that is nowhere. `note`
    says why nothing was measured. `key` is equal for the same kernels on the same terms.

    A file of several kernels has been tuned for the rows of `tuned`, of which `tuned_rows` is the
    largest. `kernels` has by way, few rows first, the most rows of each range and the kernel for
    them; `measured` is then of that kernel, and `others` of those that are not taken there.
    `gaps` are ranges within `rows` that are PyTorch's all the same. `refuses_one`: as of
    `rows_taken`.
    """

    tuned_rows: int
    measured: tuple[AtBatch, ...] = ()
    rows: dict[Way, tuple[int, int]] = field(default_factory=dict)
    note: str = ""
    key: str = ""
    tuned: tuple[int, ...] = ()
    kernels: dict[Way, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    gaps: dict[Way, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    others: tuple[AtBatch, ...] = ()
    refuses_one: bool = False

    @property
    def stated(self) -> dict[Way, tuple[int | tuple[int, int], ...]] | None:
        """What the file says of its rows: fewest, most, and gaps; None where it takes any."""
        if not self.rows:
            return None
        return {way: (*rows, *self.gaps.get(way, ())) for way, rows in self.rows.items()}

    @property
    def words(self) -> tuple[str, ...]:
        """Say where the module's own forward runs: a line for calls, one for steps."""
        lines = []
        for way, what in WAYS.items():
            fewest, most = self.rows.get(way, ANY_ROWS)
            if fewest > most:
                lines.append(f"{what}: PyTorch's own at any number of rows")
                continue
            if fewest == most:
                lines.append(f"{what}: the module's own forward but at {fewest} rows")
                continue
            where = [f"below {fewest} rows"] if fewest > 1 else []
            where += [f"at {low} to {high} rows" for low, high in self.gaps.get(way, ())]
            where += [f"above {most} rows"] if most < MOST else []
            if where:
                lines.append(f"{what}: the module's own forward {' and '.join(where)}")
        for way, ranges in self.kernels.items():
            words = [f"kernel {kernel + 1} up to {most} rows" for most, kernel in ranges[:-1]]
            words.append(f"kernel {ranges[-1][1] + 1} {'above' if words else 'at any number'}")
            lines.append(f"{WAYS[way]}: {', '.join(words)}")
        return tuple(lines)

    @property
    def brief(self) -> str:
        """Say the same in a line of a terminal; empty where kernels are taken everywhere."""
        parts: dict[str, list[str]] = {}
        for way in WAYS if self.rows else ():
            fewest, most = self.rows.get(way, ANY_ROWS)
            if fewest > most:
                where = "never"
            elif fewest == most:
                where = f"at {fewest} rows alone"
            elif most == MOST:
                where = f"from {fewest} rows on" if fewest > 1 else "at any number of rows"
            else:
                where = f"at {fewest} to {most} rows"
            where += ", with gaps," if way in self.gaps else ""
            if way in self.rows:
                parts.setdefault(where, []).append(BRIEF_WAYS[way])
        said = [f"{' and '.join(ways)} {where}" for where, ways in parts.items()]
        return f"kernels run {', '.join(said)}" if said else ""

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the words, and the speed-up of the kernels at each number of rows."""
        found = list(self.words)
        for way, what in WAYS.items():
            numbers = [f"{at.num_rows}: {at.speedup:.2f}x" for at in least_of(self.measured, way)]
            if numbers:
                found.append(f"speed-up of {what} by kernels, by rows: {', '.join(numbers)}")
        return tuple(found)


def least_of(measured: Sequence[AtBatch], way: Way) -> list[AtBatch]:
    """Return the worse record of each number of rows, few rows first."""
    found: dict[int, AtBatch] = {}
    for at in sorted((at for at in measured if at.way == way), key=lambda at: -at.speedup):
        found[at.num_rows] = at
    return [found[rows] for rows in sorted(found)]


def batches_of(tuned_rows: int, tuned: Sequence[int] = ()) -> list[int]:
    """Return the numbers of rows that are measured: powers of two, and the tuned sizes."""
    powers = (2**n for n in range((ABOVE * tuned_rows).bit_length()))
    below = (rows for rows in powers if rows <= ABOVE * tuned_rows)
    return sorted({tuned_rows, *tuned, *below})


def rows_taken(
    measured: Sequence[AtBatch],
    tuned_rows: int,
    ways: Sequence[Way] = ("call", "step"),
    largest: int | None = None,
    *,
    refuses_one: bool = False,
) -> dict[Way, tuple[int, int]]:
    """Return the fewest and the most rows at which a file takes its kernels.

    At the tuned size calls do: the race in fresh processes decides there. But steps of training,
    and calls in eval mode, that are slower at the most rows measured up to it are PyTorch's at all
    rows, and so are those that seem slower at the tuned size and could gain little. Those that are
    slower there in one of two ways to time them, as where the host's work shows, begin above it,
    where they are as fast; so do all at the smallest of several tuned sizes.
    Below, it does as far down as kernels are as fast at every number of rows between; where that
    cannot be decided, it does not. Above, it does until they are slower. Empty where it does
    everywhere.

    Args:
        measured: one or two for each number of rows and way; the worse one counts.
        tuned_rows: the size that was tuned.
        ways: in which the file has kernels; it takes none in other calls and steps.
        largest: of several tuned sizes, of which `tuned_rows` is the smallest; what lies between
            is not looked at.
        refuses_one: the reference takes no single row: who takes kernels from 2 on, takes any.
    """
    largest = tuned_rows if largest is None else largest
    found: dict[Way, tuple[int, int]] = dict.fromkeys(("call", "step", *ways), NO_ROWS)
    for way in ways:
        mine = [at for at in measured if at.way == way]
        by_rows = {rows: [at for at in mine if at.num_rows == rows] for rows in _rows_of(mine)}
        is_raced = way == "call"
        is_slower = not is_raced and _is_slower(mine, tuned_rows)
        if is_slower and largest == tuned_rows:
            continue
        fewest, most, last = tuned_rows, MOST, largest
        won = [rows for rows, some in by_rows.items() if all(at.is_won for at in some)]
        is_lost = any(at.is_lost for at in by_rows.get(tuned_rows, ()))
        if is_slower or (is_lost and not is_raced):
            fewest = min((rows for rows in won if rows > tuned_rows), default=MOST)
            last = max(largest, fewest)
            if fewest == MOST:
                continue
        for rows in sorted((n for n in by_rows if n < tuned_rows == fewest), reverse=True):
            if rows not in won:
                break
            fewest = rows
        for rows in sorted(rows for rows in by_rows if rows > last):
            if any(at.is_lost for at in by_rows[rows]):
                most = last
                break
            last = rows
        takes_any = refuses_one and fewest == 2 and 1 not in by_rows
        found[way] = (1 if takes_any else fewest, most)
    return {} if all(rows == ANY_ROWS for rows in found.values()) else found


def _is_slower(mine: Sequence[AtBatch], tuned_rows: int) -> bool:
    """Whether kernels lose at the most rows up to the tuned size that tell of it."""
    told = [at for at in mine if not at.is_disturbed and at.num_rows <= tuned_rows]
    near = max((at.num_rows for at in told), default=0)
    disturbed = [at.speedup for at in mine if at.num_rows == tuned_rows and at.is_disturbed]
    if near * (FAR if disturbed and max(disturbed) < 1.0 else NEAR) < tuned_rows:
        return False
    last_told = [at for at in told if at.num_rows == near]
    return all(at.is_lost or (at.gains_little and near == tuned_rows) for at in last_told)


def _rows_of(measured: Sequence[AtBatch]) -> list[int]:
    return sorted({at.num_rows for at in measured})


def without_steps_in(found: ByBatch) -> ByBatch:
    """Return what holds of the same file where steps of training are PyTorch's own."""
    ways: set[Way] = {"call", *(at.way for at in found.measured)}  # each stands in the file's line
    rows = {**dict.fromkeys(sorted(ways), ANY_ROWS), **found.rows, "step": NO_ROWS}
    measured = tuple(at for at in found.measured if at.way != "step")
    return replace(found, measured=measured, rows=rows)
