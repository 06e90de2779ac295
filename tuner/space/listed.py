"""Feasible configurations as a list of rows of value indices: by id, and back by binary search."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.space.constraints import MAX_PACKED, ValueIndices

__all__ = ["Listed"]

Ints = NDArray[np.int64]


class Listed:
    """Feasible configurations as a list, in the order of declaration; asked as a `Diagram` is.

    Attributes:
        value indices: int (n, d), one row a configuration, read-only.
    """

    def __init__(self, rows: ValueIndices, bases: Sequence[int]) -> None:
        self._bases = bases
        self._weights = None  # of each value index in a key; none where that is too long for int64
        if math.prod(bases) <= MAX_PACKED:
            self._weights = np.array(
                [math.prod(bases[i + 1 :]) for i in range(len(bases))], dtype=np.int64
            )
        keys = self._keys(rows)
        order = np.argsort(keys, kind="stable")
        self._sorted_keys = keys[order]
        self.value_indices = rows[order]
        self.value_indices.setflags(write=False)  # handed out as it is

    @property
    def num_feasible(self) -> int:
        """How many configurations there are."""
        return len(self.value_indices)

    def counts(self, column: int) -> Ints:
        """Return how many configurations have each value index of a parameter, int64 (base,)."""
        return np.bincount(self.value_indices[:, column], minlength=self._bases[column])

    def rows(self, config_ids: Ints) -> ValueIndices:
        """Return the value indices at `config_ids`, int (n, d)."""
        return self.value_indices[config_ids]

    def config_ids(self, rows: Ints) -> Ints:
        """Return the config ids of `rows`, -1 where there is none."""
        keys = self._keys(rows)
        found = np.minimum(np.searchsorted(self._sorted_keys, keys), self.num_feasible - 1)
        return np.where(self._sorted_keys[found] == keys, found, -1)

    def first(self, allowed: Sequence[Collection[int]]) -> int | None:
        """Return the first config id whose value indices are all among those allowed."""
        is_it = np.ones(self.num_feasible, dtype=bool)
        for column, value_indices in enumerate(allowed):
            if len(value_indices) < self._bases[column]:
                is_it &= np.isin(self.value_indices[:, column], list(value_indices))
        found = int(is_it.argmax())
        return found if is_it[found] else None

    def _keys(self, rows: NDArray[np.integer]) -> NDArray[np.generic]:
        """Return what orders the rows: one number, or one string of bytes where it is too long."""
        if self._weights is not None:
            return np.asarray(rows @ self._weights)
        return np.ascontiguousarray(rows.astype(">u4")).view(f"S{4 * rows.shape[1]}")[:, 0]
