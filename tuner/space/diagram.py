"""Feasible configurations as a decision diagram: paths that are counted and found, not listed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.space.constraints import MAX_PACKED, ValueIndices, index_type

__all__ = ["Diagram", "Layer", "Listed"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The choices of one parameter's value index; choice i leads from a state to `targets[i]`.

    `keys` are state * base + value index, ascending; `below[i]` counts the completions of all
    choices before choice i (its last entry, of all); `first[s]` is the first choice of state s.
    """

    column: int  # the parameter, by declaration
    base: int
    keys: Ints
    targets: ValueIndices
    below: Ints
    first: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Diagram:
    """All feasible configurations, each a path through the layers; config ids count paths.

    Attributes:
        num_feasible: how many paths there are.
    """

    num_feasible: int
    _layers: tuple[Layer, ...]

    def rows(self, config_ids: Ints) -> Ints:
        """Return the value indices of the configurations at `config_ids`, as int64 (n, d)."""
        rows = np.empty((len(config_ids), len(self._layers)), dtype=np.int64)
        state, rest = np.zeros(len(config_ids), dtype=np.int64), config_ids
        for layer in self._layers:
            value = layer.below[layer.first[state]] + rest
            choice = np.searchsorted(layer.below, value, side="right") - 1
            rest = value - layer.below[choice]
            rows[:, layer.column] = layer.keys[choice] - state * layer.base
            state = layer.targets[choice].astype(np.int64)
        return rows

    def config_ids(self, rows: Ints) -> Ints:
        """Return the config ids of the rows of value indices, -1 for none."""
        config_ids = np.zeros(len(rows), dtype=np.int64)
        state, is_there = config_ids.copy(), np.ones(len(rows), dtype=bool)
        for layer in self._layers:
            key = state * layer.base + rows[:, layer.column]
            choice = np.minimum(np.searchsorted(layer.keys, key), len(layer.keys) - 1)
            is_there &= layer.keys[choice] == key
            config_ids += layer.below[choice] - layer.below[layer.first[state]]
            state = np.where(is_there, layer.targets[choice], 0).astype(np.int64)
        return np.where(is_there, config_ids, -1)

    def counts(self, column: int) -> Ints:
        """Return how many configurations have each value index of a parameter, int64 (base,)."""
        arrivals = np.ones(1, dtype=np.int64)  # paths into each state
        for layer in self._layers:
            arrivals = np.pad(arrivals, (0, len(layer.first) - 1 - len(arrivals)))  # dead ends
            paths = np.repeat(arrivals, np.diff(layer.first))
            if layer.column == column:
                value_indices = layer.keys % layer.base
                found = np.zeros(layer.base, dtype=np.int64)
                np.add.at(found, value_indices, paths * np.diff(layer.below))
                return found
            arrivals = np.zeros(int(layer.targets.max()) + 1, dtype=np.int64)
            np.add.at(arrivals, layer.targets, paths)
        raise IndexError(column)

    def first(self, allowed: Sequence[Collection[int]]) -> int | None:
        """Return the first config id whose value indices are all among those allowed."""
        dead: set[tuple[int, int]] = set()

        def found(depth: int, state: int) -> int | None:
            """Return how many paths from the state come before the first one allowed."""
            if depth == len(self._layers):
                return 0
            layer = self._layers[depth]
            begin, end = layer.first[state : state + 2].tolist()
            for choice in range(begin, end):
                value_index = int(layer.keys[choice]) - state * layer.base
                target = int(layer.targets[choice])
                if value_index not in allowed[layer.column] or (depth, target) in dead:
                    continue
                behind = found(depth + 1, target)
                if behind is not None:
                    return int(layer.below[choice] - layer.below[begin]) + behind
                dead.add((depth, target))
            return None

        return found(0, 0)

    def all_rows(self) -> ValueIndices:
        """Return the value indices of all configurations, as the smallest integers (n, d)."""
        kind = index_type(layer.base for layer in self._layers)
        state = np.zeros(1, dtype=np.int64)
        steps: list[tuple[ValueIndices, Ints]] = []  # value indices, and whose they are
        for layer in self._layers:
            counts = layer.first[state + 1] - layer.first[state]
            parent = np.repeat(np.arange(len(state)), counts)
            start = np.cumsum(counts) - counts
            choice = np.arange(len(parent)) - np.repeat(start - layer.first[state], counts)
            value_indices = layer.keys[choice] - state[parent] * layer.base
            steps.append((value_indices.astype(kind), parent))
            state = layer.targets[choice].astype(np.int64)
        rows = np.empty((len(state), len(self._layers)), dtype=kind, order="F")
        index = np.arange(len(state))
        for layer, (value_indices, parent) in zip(self._layers[::-1], steps[::-1], strict=True):
            rows[:, layer.column] = value_indices[index]
            index = parent[index]
        return rows


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
