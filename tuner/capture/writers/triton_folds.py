"""How Triton kernels reduce: where each fold starts, how results of it are joined.

Two reductions may be found in one sweep: the lanes of a program, or the programs of a row, hold
`<first>_part` and `<second>_part`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from tuner.capture.nests.nest import Reduction, scale_text
from tuner.capture.nests.operations import emit
from tuner.capture.nests.paired_sweeps import SweepPair

__all__ = [
    "JOINED", "PUT_MOMENTS_TOGETHER", "START", "begun", "fold_functions", "joined", "lane_counts",
    "put_together", "scaled", "stepped",
]  # fmt: skip

# Programs of these have several rows where programs that share a row are few.
PUT_MOMENTS_TOGETHER = """

@launched
@triton.jit
def {function}_put_together_moments(
    partial, totals, num_rows, num_columns, pieces, factor,
    PIECE: tl.constexpr, MEAN: tl.constexpr, SQUARES: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr,
):
    row_ids = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = row_ids < num_rows
    means = partial + (MEAN * num_rows + row_ids[:, None]) * pieces
    squares = partial + (SQUARES * num_rows + row_ids[:, None]) * pieces
    found = tl.zeros([ROWS, PIECES], tl.float64)
    for piece in range(0, pieces, PIECES):
        ids = (piece + tl.arange(0, PIECES))[None, :]
        present = is_row[:, None] & (ids < pieces)
        count = tl.minimum(PIECE, num_columns - ids * PIECE).to(tl.float64)
        found += tl.where(present, count, 0.0) * tl.load(means + ids, mask=present, other=0.0)
    mean = tl.sum(found, axis=1) / num_columns
    found = tl.zeros([ROWS, PIECES], tl.float64)
    for piece in range(0, pieces, PIECES):
        ids = (piece + tl.arange(0, PIECES))[None, :]
        present = is_row[:, None] & (ids < pieces)
        count = tl.minimum(PIECE, num_columns - ids * PIECE).to(tl.float64)
        apart = tl.load(means + ids, mask=present, other=0.0) - mean[:, None]
        more = tl.load(squares + ids, mask=present, other=0.0) + count * apart * apart
        found += tl.where(present, more, 0.0)
    tl.store(totals + MEAN * num_rows + row_ids, mean.to(tl.float32), mask=is_row)
    squared = (tl.sum(found, axis=1) * factor).to(tl.float32)
    tl.store(totals + SQUARES * num_rows + row_ids, squared, mask=is_row)
"""


def scaled(reduction: Reduction) -> str:
    """Write the product with a sum's scale; of a mean over the batch it is a float64."""
    return scale_text(reduction, "num_columns", "triton")


def begun(pair: SweepPair, names: Mapping[str, str]) -> Iterator[str]:
    """Write what each lane holds before the sweep."""
    first, second = names[pair.first.name], names[pair.second.name]
    start = "0.0" if pair.kind == "moments" else 'float("-inf")'
    yield f"{first}_part = tl.full([ROWS, COLUMNS], {start}, tl.float32)"
    yield f"{second}_part = tl.zeros([ROWS, COLUMNS], tl.float32)"
    if pair.kind == "moments":
        yield f"{first}_step = 0.0"


def stepped(pair: SweepPair, names: Mapping[str, str], value: str) -> Iterator[str]:
    """Write how each lane takes one more value where it is `present`."""
    first, second = names[pair.first.name], names[pair.second.name]
    if pair.kind == "moments":
        yield f"{first}_step += 1.0"
        yield f"{first}_next = tl.where(present, {value}, {first}_part)"
        yield f"{first}_apart = {first}_next - {first}_part"
        yield f"{first}_part = {first}_part + {first}_apart * (1.0 / {first}_step)"
        yield f"{second}_part = {second}_part + {first}_apart * ({first}_next - {first}_part)"
        return
    yield f'{second}_next = tl.where(present, {value}, float("-inf"))'
    # Equal ones may be infinite.
    distance = f"-tl.abs({second}_next - {first}_part)"
    distance = f"tl.where({second}_next == {first}_part, 0.0, {distance})"
    yield f"{second}_less = {emit('exp', [distance], None, 'triton')}"
    more, as_well = f"{second}_part * {second}_less + 1.0", f"{second}_part + {second}_less"
    yield f"{second}_part = tl.where({second}_next > {first}_part, {more}, {as_well})"
    yield f"{first}_part = {emit('maximum', [f'{first}_part', f'{second}_next'], None, 'triton')}"


def lane_counts(first: str, last: str) -> str:
    """Return how many columns each lane has taken in a sweep from `first` to `last`."""
    lanes = "tl.arange(0, COLUMNS)[None, :]"
    return f"tl.maximum(({last} - {first} - {lanes} + COLUMNS - 1) // COLUMNS, 0)"


def joined(
    pair: SweepPair, names: Mapping[str, str], largest: str, counts: str, *, is_all: bool
) -> Iterator[str]:
    """Write the row's two values of what several lanes, or programs, hold.

    Args:
        pair: the pair.
        names: of values.
        largest: the function that reduces to the largest value.
        counts: how many values each has taken, of moments.
        is_all: whether that is the whole row; a part's sums are not multiplied by their scale.
    """
    first, second = names[pair.first.name], names[pair.second.name]
    factor = scaled(pair.second) if is_all else ""
    if pair.kind == "moments":
        exact = f"{first}_exact"
        yield f"{first}_counts = ({counts}).to(tl.float64)"
        yield f"{first}_all = tl.maximum(tl.sum({first}_counts, axis=1), 1.0)"
        yield f"{exact} = tl.sum({first}_part.to(tl.float64) * {first}_counts, axis=1)"
        yield f"{exact} = {exact} / {first}_all"
        yield f"{first}_off = {first}_part.to(tl.float64) - {exact}[:, None]"
        squares = f"{first}_counts * {first}_off * {first}_off"
        squares = f"tl.sum({second}_part.to(tl.float64) + {squares}, axis=1){factor}"
        rounded = ".to(tl.float32)" if is_all else ""
        yield f"{second} = ({squares}){rounded}"
        yield f"{first} = {exact}{rounded}"
        return
    yield f"{first} = tl.reduce({first}_part, 1, {largest})"
    less = emit("exp", [f"{first}_part - {first}[:, None]"], None, "triton")
    less = f"tl.where({first}_part == {first}[:, None], 1.0, {less})"
    whole = f"tl.sum({second}_part * {less}, axis=1){factor}"
    if is_all:  # of infinite distances from the largest, PyTorch's own sum is NaN
        whole = f'tl.where(tl.abs({first}) == float("inf"), float("nan"), {whole})'
    yield f"{second} = {whole}"


START = {"sum": "0.0", "amax": 'float("-inf")', "amin": 'float("inf")',
          "argmax": 'float("-inf")', "argmin": 'float("inf")'}  # fmt: skip
JOINED = {"sum": "add", "amax": "maximum", "amin": "minimum"}
_EXTREME = """

@triton.jit
def {function}_{fold}(one, other):
    return tl.{name}(one, other, propagate_nan=tl.PropagateNan.ALL)
"""
# NaN is beyond every number; of equals the first one counts.
_PLACE = """

@triton.jit
def {function}_{fold}(one, one_at, other, other_at):
    is_beyond = (other {order} one) | ((other != other) & (one == one))
    is_equal = (other == one) | ((other != other) & (one != one))
    taken = is_beyond | (is_equal & (other_at < one_at))
    return tl.where(taken, other, one), tl.where(taken, other_at, one_at)
"""
_FOLD = """

@launched
@triton.jit
def {function}_put_together_{fold}(
    partial, totals, num_rows, pieces,
    NUMBER: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
):
    row_ids = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = row_ids < num_rows
    at = NUMBER * num_rows + row_ids
    found = tl.full([ROWS, PIECES], {start}, tl.float64)
    for piece in range(0, pieces, PIECES):
        ids = (piece + tl.arange(0, PIECES))[None, :]
        present = is_row[:, None] & (ids < pieces)
        more = tl.load(partial + at[:, None] * pieces + ids, mask=present, other={start})
        found = {joined}
    tl.store(totals + at, {folded}, mask=is_row)
"""


def fold_functions(function: str, folds: Collection[str]) -> str:
    """Return the functions, named after that one, which join two results of each fold."""
    head = ""
    for fold in sorted({*folds} - {"sum"}):
        if fold in JOINED:
            head += _EXTREME.format(function=function, fold=fold, name=JOINED[fold])
        else:
            order = ">" if fold == "argmax" else "<"
            head += _PLACE.format(function=function, fold=fold, order=order)
    return head


def put_together(function: str, fold: str) -> str:
    """Return the kernel that puts together what several programs found of a row."""
    extreme = f"{function}_{fold}"
    is_sum = fold == "sum"
    return _FOLD.format(
        function=function,
        fold=fold,
        start=START[fold],
        joined="found + more" if is_sum else f"{extreme}(found, more.to(tl.float64))",
        folded="tl.sum(found, axis=1)" if is_sum else f"tl.reduce(found, 1, {extreme})",
    ).rstrip("\n")
