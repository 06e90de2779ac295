"""At how many rows a problem is asked, beside its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuner.check.probes.probe import Modes, Probe
from tuner.check.probes.tells import TELLS

__all__ = [
    "FEWEST", "FEW_ROWS", "MOST", "Extent", "batch_probes", "further_probes", "odd_batch",
]  # fmt: skip

# Numbers that a call takes and makes, those in between as well. The judge holds some of them six
# times, in float64; a CPU takes some 10 ns for each, and products count as what they take there.
MOST_ELEMENTS = {"gpu": 2**29, "cpu": 2**27}  # of what is asked again and again at full size
HELD_ELEMENTS = {"gpu": 2**28, "cpu": 2**24}  # of what is asked at other batches
REDUCED_ELEMENTS = {"gpu": 2**25, "cpu": 2**20}  # of what is asked at a smaller batch
FEWEST, MOST = 24, 256  # rows of that batch: some tiles of a kernel, where rows are cheap
HEAVY_ELEMENTS, FEWEST_HEAVY = 2**17, 4  # of such rows a kernel takes each by itself
# Such a row keeps a device busy by itself: a kernel computes several of them one after the other,
# which two or three show as well. Larger batches of them are asked as given, and timed calls are
# judged.
HUGE_ELEMENTS = {"gpu": 2**23, "cpu": 2**20}
HUGE_ROWS, FEW_HUGE = (2, 3), 4
# Gradients are asked at one number of rows of each.
GRADED_ROWS = ((3, 4), (5, 6, 7), range(9, 16), range(17, 24), range(25, 32), range(33, 64))
# Rows in whole tiles, above which a backward may leave out a few.
TILES, MOST_ABOVE = (128, 256, 384), 3
FEW_ROWS = 8  # that are asked whatever they take, unless each is huge


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a problem is.

    `num_rows` is its batch (`Problem.num_rows`), None where it has none; `row_elements` are the
    numbers that a call takes and makes for one row, 0 where that is not known; `fixed_elements`
    those of inputs that do not grow with the rows. With `is_fixed` the reference takes no other
    number of rows.
    """

    num_rows: int | None
    row_elements: float = 0.0
    device: Literal["gpu", "cpu"] = "cpu"
    fixed_elements: int = 0
    is_fixed: bool = False

    def rows_within(self, num_elements: int) -> int:
        """Return how many rows take at most that many numbers."""
        return int(num_elements / self.row_elements) if self.row_elements else 2**62

    @property
    def is_of_huge_rows(self) -> bool:
        """Whether each row takes a device's whole time by itself."""
        return self.row_elements > HUGE_ELEMENTS[self.device]

    @property
    def few_rows(self) -> int:
        """How many rows are asked whatever they take."""
        return FEW_HUGE if self.is_of_huge_rows else FEW_ROWS

    @property
    def most_rows(self) -> int:
        """How many rows there is room for at another batch than the problem's own."""
        return max(self.few_rows, self.rows_within(HELD_ELEMENTS[self.device]))

    def rows_each(self, num_calls: int) -> int:
        """Return how many rows there is room for where so many calls are held, 2 at least."""
        return max(2, self.rows_within(MOST_ELEMENTS[self.device]) // num_calls)

    def holds(self, rows: int) -> bool:
        """Whether there is room for so many rows at another batch than the problem's own."""
        return rows <= self.most_rows

    @property
    def is_large(self) -> bool:
        """Whether one call at the problem's own batch takes much of a device's memory."""
        return (self.num_rows or 1) > self.rows_within(HELD_ELEMENTS[self.device])

    @property
    def full(self) -> int | None:
        """The batch of what is asked at full size: None, as given, unless that takes too much."""
        most = max(self.few_rows, self.rows_within(MOST_ELEMENTS[self.device]))
        return None if self.num_rows is None or self.num_rows <= most else most

    @property
    def power(self) -> int | None:
        """A batch of a power of two, which keeps the mean of equal values exact: 64 at most."""
        if self.num_rows is None:
            return None
        most: int = min(64, max(2, self.num_rows), self.most_rows)
        return 1 << (most.bit_length() - 1)

    def reduced(self, secret: random.Random) -> int | None:
        """Draw the batch of what is asked at fewer rows; a known one would be a shape to know."""
        if self.is_of_huge_rows:
            is_more = self.num_rows is not None and self.num_rows > max(HUGE_ROWS)
            return secret.choice(HUGE_ROWS) if is_more else None
        fewest = FEWEST_HEAVY if self.row_elements > HEAVY_ELEMENTS else FEWEST
        most = max(fewest, min(MOST, self.rows_within(REDUCED_ELEMENTS[self.device])))
        if self.num_rows is None or self.num_rows <= most:
            return None
        return secret.randrange(3 * most // 4 + 1, most + 1)


def batch_probes(
    probe: Callable[..., Probe],
    modes: Modes,
    extent: Extent,
    secret: random.Random,
) -> list[Probe]:
    """Return what is asked at other batches, as far as there is room for so many rows."""
    assert extent.num_rows is not None
    num_rows = extent.num_rows
    fields: dict[str, Any] = {"is_reduced": False, "tells": TELLS["batch"]}
    # Two rows that happen to be close have a difference with few right bits in any float32
    # arithmetic, so there the products and sums are made exact.
    exact = {"distribution": "dyadic", "weights": "dyadic", **fields}
    usual = {"distribution": "normal", **modes.in_turn, **fields}
    in_eval = {"distribution": "normal", "mode": "eval", **fields}
    wide = {"gradients": "all", "backward": (0, 1), **usual}
    small = {2: exact, 1: {"distribution": "normal", **fields}, 0: usual}
    probes = [
        probe(f"batch {batch}", batch=batch, **others)
        for batch, others in small.items()
        if batch != num_rows
    ]
    # Which ones is secret, or a module could know them.
    some = secret.choice([rows for rows in range(33, 64) if rows != num_rows])
    parity = secret.randrange(2)  # a part of the module's own tiles may be wrong
    remainders = {**usual, "tells": TELLS["remainders"]}
    for rows in range(3, 65):
        more: dict[str, Any] = {}
        if rows > 32:  # each in one mode; few rows, which have ways of their own, in both
            mode = modes.other if (rows + parity) % 2 else modes.own
            more = {"calls": 1, "before": (), "mode": mode}
        elif rows <= 8:
            more = exact
        if rows != num_rows:
            probes.append(probe(f"{rows} rows", batch=rows, **{**remainders, **more}))
    for rows in _of_even_remainders(secret):
        if rows != num_rows:
            mode = secret.choice((modes.own, modes.other))
            more = {"calls": 1, "before": (), "mode": mode}
            probes.append(probe(f"{rows} rows", batch=rows, **{**remainders, **more}))
    odd = odd_batch(extent)
    if (most_odd := min(num_rows, 1024, extent.most_rows)) > 80:
        odd = 2 * secret.randrange(33, (most_odd - 1) // 2) + 1
    # An eighth more at most, where rows are heavy.
    most_more = 65 if extent.holds(num_rows + 65) else min(65, max(2, num_rows // 8))
    longer = num_rows + secret.randrange(1, most_more, 2)
    # Once, where all of them take gigabytes.
    has_room = num_rows <= extent.rows_within(MOST_ELEMENTS[extent.device])
    more_rows = wide if has_room else {"distribution": "normal", **fields}
    # Whole tiles of any kernel, and where the problem is small as many as fill a device.
    tiles = secret.choice([rows for rows in (128, 256) if rows != num_rows])
    whole = TELLS["tiles"]
    if num_rows <= 512:
        many = secret.choice([rows for rows in (1024, 2048) if rows != num_rows])
        odd_many = secret.randrange(513, 1024, 2)
        probes += [
            probe("whole tiles, many", batch=many, **{**usual, "tells": whole}),
            probe("gradients of many rows", batch=odd_many, **{**wide, "tells": whole}),
        ]
        # Beyond what partial sums of a few blocks of rows have room for, as far as there is room.
        very_many = min(1024 << secret.randrange(5), extent.most_rows // 2)
        very_many += secret.randrange(1, 1 + max(1, very_many))
        more = {"distribution": "normal", "gradients": "all", "tells": whole}
        if very_many > odd_many:
            probes.append(
                probe("gradients of very many rows", batch=very_many, **{**fields, **more})
            )
    # More than the blocks that a grid of CUDA has in its second dimension.
    tall = 65536 + secret.randrange(1, 64)
    if num_rows < tall:
        probes.append(
            probe(
                "very many rows", batch=tall, is_tall=True, **(usual | {"tells": TELLS["count"]})
            )
        )
    asked = [
        probe("some rows", batch=some, **usual),
        probe("an odd batch", batch=odd, **usual),
        probe("whole tiles", batch=tiles, **{**usual, "tells": whole}),
        probe(
            "another number of threads",
            batch=tiles,
            num_threads=secret.choice((5, 7, 9)),
            **{**usual, "tells": TELLS["team"]},
        ),
        probe("more rows", batch=longer, **{**more_rows, "tells": TELLS["rows"]}),
        probe("some rows, eval", batch=some + 1, **in_eval),
        probe("one row, eval", batch=1, **in_eval),
        probe("gradients of one row, eval", batch=1, gradients="plain_inputs", **in_eval),
        probe(
            "gradients of no rows, eval", batch=0, gradients="all", has_nan_memory=True, **in_eval
        ),
        *probes,
    ]
    # Kernels for few rows have backwards of their own; at which of them they are wrong is secret.
    for few in (*GRADED_ROWS, *_above_tiles(num_rows, secret)):
        rows = secret.choice([n for n in few if n != num_rows])
        more = exact if rows <= 8 else {}
        kind = secret.choice(("all", "all", "plain_inputs"))
        asked.append(
            probe(
                f"gradients of {rows} rows", batch=rows,
                **{**wide, **more, "gradients": kind, "tells": TELLS["gradients of rows"]},
            )
        )  # fmt: skip
    return [p for p in asked if p.name == "more rows" or p.is_tall or extent.holds(p.batch or 0)]


def further_probes(
    probe: Callable[..., Probe], modes: Modes, extent: Extent, rows: Sequence[int]
) -> list[Probe]:
    """Return what is asked at further numbers of rows, such as those that a file was tuned for.

    With gradients as far as there is room for them, of one call where they are many, and not at
    all where the device has no room.
    """
    asked = []
    for number in dict.fromkeys(rows):
        fields = {"is_reduced": False, "distribution": "normal", "tells": TELLS["tuned"]}
        if extent.holds(number):
            fields |= {"gradients": "all", **modes.in_turn}
        elif number > extent.rows_within(MOST_ELEMENTS[extent.device]):
            continue
        if number != extent.num_rows:
            asked.append(probe(f"kernels at {number} rows", batch=number, **fields))
    return asked


def _of_even_remainders(secret: random.Random) -> Iterator[int]:
    """Give numbers of rows of which tiles leave over 2, 4 ... 64: above a few tiles, and many."""
    for left in (2, 4, 8, 16, 32, 64):
        for least, most in ((64, 256), (256, 1024)):
            above = secret.randrange(max(1, least // (2 * left)), most // (2 * left))
            yield left + 2 * left * above


def _above_tiles(num_rows: int, secret: random.Random) -> list[Sequence[int]]:
    """Return numbers of rows just above whole tiles, each by itself; not the module's own.

    The first is above tiles of 32 rows alone, the others, by 1, 2 and 3, above those of 32, 64
    and 128.
    """
    above = [secret.randrange(1, MOST_ABOVE + 1), *secret.sample(range(1, MOST_ABOVE + 1), 3)]
    whole = [32 * secret.choice((3, 5, 7)), *TILES]
    found = [tiles + rows for tiles, rows in zip(whole, above, strict=True)]
    return [(rows,) for rows in found if rows != num_rows]


def odd_batch(extent: Extent) -> int:
    """Return an odd batch other than the problem's own, at most 257 rows and what has room."""
    own = extent.num_rows
    assert own is not None
    if not extent.holds(min(257, own)):
        return extent.most_rows - 1 + extent.most_rows % 2
    if own > 257:
        return 257
    if own % 2 == 0:
        return own - 1 if own > 2 else 3
    return own + 2 if extent.holds(own + 2) else own - 2
