"""Which configurations to try first: aligned ones, far apart."""

from __future__ import annotations

import numpy as np

from tuner.search.encoding import Array, Encoding

__all__ = ["first_columns"]

MAX_FIRST = 2000  # columns among which the first are chosen
ALIGNED = 0.2  # share of the columns, those nearest to powers of two


def first_columns(
    columns: Array, encoding: Encoding, count: int, rng: np.random.Generator, before: Array
) -> list[int]:
    """Return columns to try first, each the farthest from those before it.

    They are chosen among the fifth whose numbers are nearest to powers of two. Devices work by
    these: on some, all else is ten times slower, and tells nothing of what is fast. After them
    come as many more, at most `count`, as it takes to have every value of every parameter without
    an order: no distance tells whether a word is good, and some occur in few configurations.

    Args:
        columns: codes [columns, parameters].
        encoding: of the space.
        count: with those tried before.
        rng: where to look among many columns.
        before: [configurations, parameters], the codes of what was tried already.
    """
    some = rng.permutation(len(columns))
    by_oddness = np.argsort(encoding.oddness(columns[some]), kind="stable")
    aligned = by_oddness[: max(2 * count, int(ALIGNED * len(columns)))]
    some = some[np.sort(aligned)][:MAX_FIRST]
    nearest = np.full(len(some), np.inf)
    for code in before:
        nearest = np.minimum(nearest, encoding.apart(columns[some], code))
    found: list[int] = []
    while len(found) < min(count - len(before), len(some)):
        best = int(np.argmax(nearest))
        found.append(int(some[best]))
        nearest = np.minimum(nearest, encoding.apart(columns[some], columns[some[best]]))
        nearest[best] = -np.inf
    before = np.concatenate([before, columns[found]])
    return found + _covering(columns, encoding, before, count, rng)


def _covering(
    columns: Array, encoding: Encoding, before: Array, most: int, rng: np.random.Generator
) -> list[int]:
    """Return columns that together have the values without an order that `before` lacks."""
    unseen = np.zeros(len(columns), dtype=int)  # how many of them a column has
    lacking = [
        (j, value)
        for j, (is_ordered, size) in enumerate(
            zip(encoding.is_ordered, encoding.sizes, strict=True)
        )
        if not is_ordered
        for value in np.setdiff1d(np.arange(size - 1), before[:, j])
    ]
    for j, value in lacking:
        unseen += columns[:, j] == value
    found: list[int] = []
    while unseen.any() and len(found) < most:
        best = int(rng.choice(np.flatnonzero(unseen == unseen.max())))
        found.append(best)
        for j, value in [(j, v) for j, v in lacking if columns[best, j] == v]:
            unseen -= columns[:, j] == value
            lacking.remove((j, value))
    return found
