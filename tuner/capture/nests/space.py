"""The space that a nest loops over: its dimensions, rows and columns, and what varies over which.

A tensor is dense, so that the dimensions over which it varies, in the order in which they lie in
memory, say where each of its elements lies.

    tail    the last dimensions, of one kind, over which each tensor is dense or does not vary:
            vectors run along them. Where the tail is of rows, reductions go across vectors.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Space"]


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
    """

    sizes: tuple[int, ...]
    columns: frozenset[int]
    tail: int
    varies: Mapping[str, frozenset[int]]
    logical: tuple[int, ...]
    last: frozenset[str] = frozenset()
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

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
        every = range(len(self.sizes)) if name in self.last else self.logical
        return [dim for dim in self.orders.get(name, every) if dim in self.varies[name]]

    def is_run(self, dim: int) -> bool:
        """Whether a dimension is right behind the one before it in the memory of all values."""
        return all(is_behind(order, dim) for order in (self.logical, *self.orders.values()))

    def is_moved(self, name: str, among: Container[int] | None = None) -> bool:
        """Whether a value lies in another order of memory than the dimensions, or some of them."""
        order = [dim for dim in self.order(name) if among is None or dim in among]
        return order != sorted(order)

    def strides(self, name: str) -> dict[int, int]:
        """Return how far apart elements of a value lie along each of its dimensions."""
        found, step = {}, 1
        for dim in reversed(self.order(name)):
            found[dim] = step
            step *= self.sizes[dim]
        return found

    def count(self, dims: Iterable[int]) -> int:
        """Return the number of elements of a tensor that varies over these dimensions."""
        return math.prod(self.sizes[d] for d in dims)


def is_behind(order: Sequence[int], dim: int) -> bool:
    """Whether a dimension is right behind the one before it, where a value varies over both."""
    if dim not in order or dim - 1 not in order:
        return True
    return order.index(dim) == order.index(dim - 1) + 1
