"""The space that a nest loops over: its dimensions, rows and columns, and what varies over which.

A tensor is dense, so that the dimensions over which it varies, in the order in which they lie in
memory, say where each of its elements lies.

    tail    the last dimensions, of one kind, over which each tensor is dense or does not vary:
            vectors run along them. Where the tail is of rows, reductions go across vectors.
            Where few elements are dense in what permutations move, that is left out of account,
            and is gathered by who reads along the tail (`is_even`).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import JsonValue

__all__ = ["Space", "part_of", "with_loops"]

SHORT_TAIL = 16  # fewer elements are no vector: a row of what permutations move is gathered first
MOST_GATHERED = 8191  # of a row: 32 KB; longer ones may be split between threads


@dataclass(frozen=True, slots=True)
class Space:
    """Dimensions by number, outermost first.

    Attributes:
        sizes: of each, none of them 1.
        columns: those that are reduced or scanned.
        tail: the first one of the tail.
        varies: for each value, by name, the dimensions over which it varies.
        logical: the dimensions in the order in which they lie in memory, of all values but those
            that lie `last` or are in `orders`.
        last: values that lie channels last: in the order of the dimensions.
        orders: for each value that permutations move, its dimensions as they lie in memory.
        parts: of values that are parts of others, where the first element lies in these, and how
            far apart they lie along each dimension.
    """

    sizes: tuple[int, ...]
    columns: frozenset[int]
    tail: int
    varies: Mapping[str, frozenset[int]]
    logical: tuple[int, ...]
    last: frozenset[str] = frozenset()
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parts: Mapping[str, tuple[int, Mapping[int, int]]] = field(default_factory=dict)

    @property
    def is_across(self) -> bool:
        """Whether the tail is of rows, so that reductions go across vectors."""
        return self.tail < len(self.sizes) and self.tail not in self.columns

    @property
    def length(self) -> int:
        """Elements of the tail."""
        return math.prod(self.sizes[self.tail :])

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return math.prod(s for d, s in enumerate(self.sizes) if d not in self.columns)

    @property
    def cols(self) -> int:
        """How many columns there are."""
        return math.prod(self.sizes[d] for d in self.columns)

    def order(self, name: str) -> list[int]:
        """Return the dimensions over which a value varies, as it lies in memory."""
        if name in self.parts:
            apart = self.strides(name)
            return sorted(apart, key=lambda dim: -abs(apart[dim]))
        every = range(len(self.sizes)) if name in self.last else self.logical
        return [dim for dim in self.orders.get(name, every) if dim in self.varies[name]]

    def is_run(self, dim: int) -> bool:
        """Whether a dimension is right behind the one before it in the memory of all values."""
        return all(_is_behind(order, dim) for order in (self.logical, *self.orders.values()))

    def is_moved(self, name: str, among: Container[int] | None = None) -> bool:
        """Whether a value lies in another order of memory than the dimensions, or some of them."""
        order = [dim for dim in self.order(name) if among is None or dim in among]
        return order != sorted(order)

    def is_plain(self, name: str) -> bool:
        """Whether a value's elements lie together, in the order of the dimensions."""
        return name not in self.parts and not self.is_moved(name)

    def strides(self, name: str) -> dict[int, int]:
        """Return how far apart elements of a value lie along each of its dimensions."""
        if name in self.parts:
            return {d: n for d, n in self.parts[name][1].items() if d in self.varies[name]}
        found, step = {}, 1
        for dim in reversed(self.order(name)):
            found[dim] = step
            step *= self.sizes[dim]
        return found

    def is_even(self, name: str) -> bool:
        """Whether a value's elements lie evenly apart along the tail."""
        apart = self.strides(name)
        return all(_is_even(apart, self.sizes, d) for d in range(self.tail + 1, len(self.sizes)))

    def count(self, dims: Iterable[int]) -> int:
        """Return the number of elements of a tensor that varies over these dimensions."""
        return math.prod(self.sizes[d] for d in dims)


def with_loops(space: Space, num_channels: int, *, can_gather: bool) -> Space:
    """Return a space with columns where nothing is reduced, and the tail.

    Args:
        space: with the columns that are reduced, or none.
        num_channels: how many dimensions are channels, of images that lie channels last.
        can_gather: whether what permutations move may be gathered along a tail.
    """
    count = len(space.sizes)
    if not space.columns:
        # As many as are dense, or one number, in every tensor. Rows where there are any: another
        # number of them is the same loop.
        every = [*range(1, count), 0]
        dense = next((at for at in every if _is_dense(space, at)), count - 1)
        first = count - num_channels if num_channels else dense
        space = replace(space, columns=frozenset(range(first, count)))
    tail = _tail(space)
    can_gather &= tail in space.columns and space.cols <= MOST_GATHERED
    if can_gather and space.count(range(tail, count)) < SHORT_TAIL:
        tail = _tail(replace(space, orders={}))
    return replace(space, tail=tail)


def _tail(space: Space) -> int:
    """Return the first of the last dimensions, of one kind, that are dense in every tensor."""
    tail, columns = len(space.sizes) - 1, space.columns
    while tail and ((tail - 1) in columns) == (tail in columns) and _is_dense(space, tail - 1):
        tail -= 1
    return tail


def _is_dense(space: Space, at: int) -> bool:
    """Whether each tensor is dense over the dimensions from one on, or has one value."""
    run, behind = {*range(at, len(space.sizes))}, range(at + 1, len(space.sizes))
    lies = [apart for _, apart in space.parts.values()]
    is_run = all(map(space.is_run, behind)) and all(
        _is_even(apart, space.sizes, dim) for apart in lies for dim in behind
    )
    every = {frozenset(range(len(space.sizes))), *space.varies.values()}
    return is_run and all(not run & dims or run <= dims for dims in every)


def part_of(
    axes: JsonValue, dims: Sequence[Sequence[int]], sizes: Sequence[int]
) -> tuple[int, dict[int, int]]:
    """Return where a part's first element lies in what it is a part of, and its strides there.

    Args:
        axes: the last ones, of each its size in the part and in the whole, the step and the first
            place; what comes before them is all there.
        dims: of the space, by axis.
        sizes: of the dimensions.
    """
    assert isinstance(axes, list)
    first, behind, apart = 0, 1, dict[int, int]()
    every = [math.prod(sizes[dim] for dim in own) for own in dims]
    ways = [[size, size, 1, 0] for size in every[: len(dims) - len(axes)]]
    ways += [[int(str(number)) for number in way[:4]] for way in axes if isinstance(way, list)]
    for own, (_, given, step, begin) in zip(reversed(dims), reversed(ways), strict=True):
        inner = step * behind
        for dim in reversed(own):
            apart[dim] = inner
            inner *= sizes[dim]
        first, behind = first + begin * behind, behind * given
    return first, apart


def _is_even(apart: Mapping[int, int], sizes: Sequence[int], dim: int) -> bool:
    """Whether elements at strides lie evenly apart along a dimension and the one before it."""
    return apart.get(dim - 1, 0) == apart.get(dim, 0) * sizes[dim]


def _is_behind(order: Sequence[int], dim: int) -> bool:
    """Whether a dimension is right behind the one before it, where a value varies over both."""
    if dim not in order or dim - 1 not in order:
        return True
    return order.index(dim) == order.index(dim - 1) + 1
