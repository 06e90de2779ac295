"""Configurations as points, of which close ones are much alike.

A number lies at its logarithm, so that 64 is between 32 and 128. A whole number has a second
place: the logarithm of its odd part, by which 96 is more like 192 than like 97. Devices work by
powers of two, and so do the sizes of most problems. A configuration with any other number is
marked, since where one such is slow, others are. Words have no order, nor have two values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tuner.trial import Value

__all__ = ["Array", "Encoding", "Prior"]

Array = np.ndarray[Any, np.dtype[Any]]


class Prior(Protocol):
    """What is expected of configurations before anything is known.

    Attributes:
        num_features: how many features there are.
        spread: deviation of the logarithm of latency, clipped as targets are.
    """

    num_features: int
    spread: float

    def features(self, codes: Array) -> Array:
        """Return [features, configurations], each about N(0, 1); the first is the expectation."""


class Encoding:
    """What the kernel needs to know of a space's parameters.

    Attributes:
        keep: the parameters with more than one value index; codes are the value indices of these.
        sizes: how many value indices each of them has, absence included.
        is_ordered: whether its values are numbers, at least three.
        places: for each of them, then for those of which odd parts differ, the parameter and
            where its value indices lie: [value indices, coordinates].
        num_linear: how many columns of points the kernel is linear in; they are the last.
    """

    def __init__(self, values: Sequence[Sequence[Value]], conditional: Sequence[bool]) -> None:
        """Take the values of each parameter, and whether it may be absent."""
        pairs = list(enumerate(zip(values, conditional, strict=True)))
        self.keep = [j for j, (v, may_lack) in pairs if len(v) + may_lack > 1]
        kept = [values[j] for j in self.keep]
        self.sizes = [len(v) + 1 for v in kept]
        self.is_ordered = [_is_ordered(v) for v in kept]
        self.places = [
            (j, _points(v) if self.is_ordered[j] else np.eye(len(v) + 1) * math.sqrt(0.5))
            for j, v in enumerate(kept)
        ]
        self._odd = [(j, _odd_parts(v)) for j, v in enumerate(kept) if self.is_ordered[j]]
        self._odd = [(j, odd) for j, odd in self._odd if odd.any()]
        self.places += [(j, odd / odd.max()) for j, odd in self._odd]
        self.num_linear = int(len(self._odd) > 0)

    def codes(self, value_indices: Array) -> Array:
        """Return [configurations, kept parameters], int32, of rows of a space's value indices."""
        return np.ascontiguousarray(value_indices[:, self.keep], dtype=np.int32)

    def points(self, codes: Array) -> Array:
        """Return [configurations, coordinates].

        All places, then 1 at each value index that is had, then (where numbers have odd parts)
        whether one of them is no power of two.
        """
        found = [table[codes[:, j]] for j, table in self.places]
        found += [np.eye(size)[codes[:, j]] for j, size in enumerate(self.sizes)]
        found += [self.oddness(codes)[:, None] > 0.0] * self.num_linear
        return np.concatenate([np.zeros((len(codes), 0)), *found], axis=1)

    def apart(self, codes: Array, code: Array) -> Array:
        """Return how far configurations are from one: the sum over their parameters."""
        total = np.zeros(len(codes))
        for j, table in self.places[: len(self.keep)]:
            total += np.linalg.norm(table[codes[:, j]] - table[code[j]], axis=1)
        return total

    def oddness(self, codes: Array) -> Array:
        """Return for each configuration how far its numbers are from powers of two."""
        total = np.zeros(len(codes))
        for j, odd in self._odd:
            total += odd[codes[:, j], 0]
        return total


def _is_ordered(values: Sequence[Value]) -> bool:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return len(numbers) == len(values) >= 3


def _points(values: Sequence[Value]) -> Array:
    """Return where numbers lie; absence is about as far from all of them as the ends are."""
    x = np.array(values, dtype=float)
    lowest = x.min()
    x = np.log2(x) if lowest > 0 else np.log2(x - lowest + 1.0)
    x = (x - x.min()) / (x.max() - x.min())
    return np.array([*[(xi, 0.0) for xi in x], (0.5, 1.0)])


def _odd_parts(values: Sequence[Any]) -> Array:
    """Return the binary logarithms of the odd parts of whole numbers; all 0 for others."""
    if not all(isinstance(v, int) and v > 0 for v in values):
        return np.zeros((len(values) + 1, 1))
    return np.array([*[[math.log2(v // (v & -v))] for v in values], [0.0]])
