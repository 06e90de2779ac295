"""Where an element of a value lies in memory, as text: from the numbers of row and column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tuner.capture.nests.nest import Nest
from tuner.capture.nests.space import Space

__all__ = [
    "SPLIT_COLUMNS", "counted", "inner_rows", "is_split", "is_split_by_blocks", "lies_apart",
    "loaded", "offset", "part_places", "row_dims", "stored", "tail_stride",
]  # fmt: skip

# At most so many rows of; no power of 2, which many a module has at its own batch but not at the
# next prime, so that its loops would not be cut alike at both.
SPLIT_ROWS = 768
SPLIT_COLUMNS = 8192  # at least so many columns are split; `another_batch` keeps to one side
SPLIT_BLOCKS = 10_000  # at most so many rows that lie beside each other, some 32 to a block
SPLIT_BATCH = 700  # at least so many columns over the batch of those; no power of 2, as above


def is_split(nest: Nest) -> bool:
    """Whether several threads share a row: where rows are few and long.

    What they find of a row is put together in an order that does not depend on their number.
    """
    if not nest.reductions or nest.space.is_across or any(r.is_index for r in nest.reductions):
        return False
    return nest.space.rows <= SPLIT_ROWS and nest.space.cols >= SPLIT_COLUMNS


def is_split_by_blocks(nest: Nest) -> bool:
    """Whether several programs share rows that lie beside each other, as channels do.

    In Triton alone; a search decides how large blocks of them are. So are columns of images that
    lie channels last, and a batch: of all rows at once each program would have a few, which it
    would read twice.
    """
    space = nest.space
    is_index = any(r.is_index for r in nest.reductions)
    if not nest.reductions or not space.is_across or is_index or nest.scans:
        return False
    is_long = space.cols >= (SPLIT_COLUMNS if space.last else SPLIT_BATCH)
    return space.rows <= SPLIT_BLOCKS and is_long and bool(space.last or 0 in space.columns)


def lies_apart(nest: Nest) -> bool:
    """Whether permutations put elements of a row apart in memory, those of rows beside."""
    space = nest.space
    own = [name for name in nest.stored if name in space.orders and nest.is_dense(name)]
    return not space.is_across and any(tail_stride(space, name) > 1 for name in own)


def row_dims(space: Space) -> list[int]:
    """Return the dimensions of the rows, in order."""
    return [d for d in range(len(space.sizes)) if d not in space.columns]


def inner_rows(space: Space) -> list[int]:
    """Return the last dimensions of the rows, which lie beside each other in every tensor."""
    found: list[int] = []
    for dim in reversed(row_dims(space)):
        if found and (dim + 1 != found[0] or not space.is_run(dim + 1)):
            break
        found.insert(0, dim)
    return found


def offset(space: Space, name: str, dims: Sequence[int], number: str, divided: str = "/") -> str:
    """Return how far a place in some dimensions moves an element of a value; "" where it does not.

    Args:
        space: of the loops.
        name: of the value.
        dims: in order; `number` counts their elements, in row-major order.
        number: a name, or text in parentheses.
        divided: how integers are divided.
    """
    strides = space.strides(name)
    runs: list[tuple[int, int, int, bool]] = []  # size, stride, elements behind, is outermost
    behind = 1
    for dim in reversed(dims):
        size, stride = space.sizes[dim], strides.get(dim, 0)
        if runs:
            before = runs[-1]
            is_dense = stride == before[0] * before[1] if stride else not before[1]
            if is_dense:
                runs[-1] = (before[0] * size, before[1], before[2], dim == dims[0])
                behind *= size
                continue
        runs.append((size, stride, behind, dim == dims[0]))
        behind *= size
    terms = []
    for size, stride, inner, is_first in reversed(runs):
        if not stride:
            continue
        text = f"{number} {divided} {inner}" if inner > 1 else number
        if not is_first:
            text = f"({text}) % {size}" if inner > 1 else f"{number} % {size}"
        terms.append(
            f"({text}) * {stride}" if stride != 1 else f"({text})" if " " in text else text
        )
    return " + ".join(terms)


def part_places(nest: Nest, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Give a pointer to each part's first element by its name, and where that lies, as text.

    Args:
        nest: that reads them.
        names: of values, as the language knows them.
    """
    for name, source in nest.parts.items():
        first, _ = nest.space.parts[name]
        yield f"{names[name]}_all", f"{names[source]}_all + {first}"


def tail_stride(space: Space, name: str) -> int:
    """Return how far apart elements of a value lie along the tail; 0 of one that is one there."""
    return space.strides(name).get(len(space.sizes) - 1, 0)


def loaded(apart: int | str, first: str, lane: str) -> str:
    """Write in C++ the load of a vector from an element of the tail on.

    Args:
        apart: how far elements of the tail lie apart.
        first: a pointer to the first element of the tail.
        lane: the number of the vector's first one.
    """
    if apart == 1:
        return f"rows_of::load<kPart>({first} + {lane}, n)"
    return f"rows_of::load_apart<kPart>({first} + {lane} * {apart}, {apart}, n)"


def counted(apart: int | str, first: str, lane: str) -> str:
    """Write in C++ the numbers of a vector's elements; for the arguments see `loaded`."""
    lane = lane if apart == 1 else f"{lane} * {apart}"
    if apart not in (0, 1):
        more = f"rows_of::columns(0) * math::splat(static_cast<simd::Float>({apart}))"
        return f"math::splat(static_cast<simd::Float>({first} + {lane})) + {more}"
    return f"rows_of::columns({first} + {lane})"


def stored(apart: int | str, first: str, lane: str, value: str) -> str:
    """Write in C++ the store of a vector; for the arguments see `loaded`."""
    if apart == 1:
        return f"rows_of::store<kPart>({first} + {lane}, {value}, n);"
    return f"rows_of::store_apart<kPart>({first} + {lane} * {apart}, {apart}, {value}, n);"
