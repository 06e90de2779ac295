"""Which configurations to try first: those that tell most of all others, and those far apart."""

from __future__ import annotations

import numpy as np

from tuner.search.covariance import Array, Encoding, Kernel

__all__ = ["first_columns"]

MAX_FIRST = 1000  # columns among which the first are chosen
FIRST_NOISE = 1e-2  # of a first trial: model error rather than noise


def first_columns(
    pool: tuple[Array, Array],
    encoding: Encoding,
    kernel: Kernel,
    count: int,
    rng: np.random.Generator,
    before: Array,
) -> list[int]:
    """Return columns to try first: every third tells most of all others, the rest are far.

    One that tells most (that lowers the variance of all columns most) is mid-field, one that
    is far from those before it (maximin) at the rim; which kind is better differs from space
    to space, and both together never were far from the better one. After them come as many
    more, at most `count`, as it takes to have every value of every parameter without an
    order: no distance tells whether a word is good, and some occur in few configurations.

    Args:
        pool: codes [columns, parameters] and priors [priors, columns].
        encoding: of the space.
        kernel: says how alike two of them are.
        count: with those tried before.
        rng: where to look among many columns.
        before: [configurations, parameters], the codes of what was tried already.
    """
    columns, pool_priors = pool
    half = max(count, len(columns) // 2)  # so that another seed starts elsewhere
    some = np.sort(rng.permutation(len(columns))[: min(MAX_FIRST, half)])
    places = encoding.places(columns[some])
    priors = pool_priors[:, some]
    codes = columns[some]
    own = kernel.covariance(codes, codes, (priors, priors)).astype(float)
    nearest = np.full(len(some), np.inf)
    for place in encoding.places(before):
        nearest = np.minimum(nearest, ((places - place) ** 2).sum(axis=1))
    chosen: list[int] = []
    while len(chosen) < min(count - len(before), len(some)):
        if len(chosen) % 3 == 0:
            merit = (own**2).sum(axis=0) / (np.diag(own) + FIRST_NOISE)
        else:
            merit = nearest.copy()
        merit[chosen] = -np.inf
        best = int(np.argmax(merit))
        chosen.append(best)
        own -= np.outer(own[:, best], own[:, best]) / (own[best, best] + FIRST_NOISE)
        nearest = np.minimum(nearest, ((places - places[best]) ** 2).sum(axis=1))
    found = [int(some[column]) for column in chosen]
    before = np.concatenate([before, columns[found]])
    return found + _covering(columns, encoding, before, count, rng)


def _covering(
    columns: Array, encoding: Encoding, before: Array, most: int, rng: np.random.Generator
) -> list[int]:
    """Return columns that together have the values without an order that `before` lacks."""
    unseen = np.zeros(len(columns), dtype=int)  # how many of them a column has
    lacking = [
        (j, value)
        for j, (points, size) in enumerate(zip(encoding.points, encoding.sizes, strict=True))
        if points is None
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
