"""Which configurations to try first: aligned ones, far apart, and what is fast elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tuner.search.encoding import Array, Encoding
from tuner.search.levels import Known

__all__ = ["Opening", "first_by_turns"]

FEWEST_FIRST = 2  # of each kind
NUM_AGAINST = 2  # merely spread, tried between the fastest elsewhere: are these fast here?
NUM_CONTEST = 3  # of the fastest elsewhere that must beat the spread ones
MAX_FIRST = 2000  # columns among which the first are chosen
ALIGNED = 0.2  # share of the columns, those nearest to powers of two


class Opening:
    """What is tried before the model is asked.

    Args:
        spread: configurations that are merely spread.
        best: those that are fastest elsewhere; the search begins with them.

    Attributes:
        config_ids: what to try, in order.
    """

    def __init__(self, spread: Sequence[int], best: Sequence[int] = ()) -> None:
        others = [config_id for config_id in spread if config_id not in best]
        rivals = others[:NUM_AGAINST] if best else []
        # By turns: where the sources mislead, the first spread one is known after two trials.
        pairs = [*zip(best, rivals, strict=False)]
        self.config_ids = [p for pair in pairs for p in pair] + [*best[len(pairs) :]]
        self._rest = others[len(rivals) :]  # as many as without sources
        self._contest = (best[:NUM_CONTEST], rivals) if best else None
        if not best:
            self.config_ids = self._rest

    def is_misled(self, known: Mapping[int, tuple[Known, float]]) -> bool:
        """Whether it shows now that the best elsewhere are slower here than the spread ones.

        The search then goes on as if there were no sources.
        """
        if self._contest is None:
            return False
        sides = [[known.get(p, (Known.PENDING, 0.0)) for p in side] for side in self._contest]
        if any(kind is Known.PENDING for side in sides for kind, _ in side):
            return False
        self._contest = None
        best, rival = (
            min((log for kind, log in side if kind is not Known.FAILED), default=math.inf)
            for side in sides
        )
        if best > rival:
            self.config_ids = self._rest
        return best > rival


def first_by_turns(
    columns: Array,
    kinds: Sequence[Array],
    encoding: Encoding,
    count: int,
    rng: np.random.Generator,
    before: Array,
) -> list[int]:
    """Return columns to try first, of each kind as many, by turns.

    Args:
        columns: codes [columns, parameters].
        kinds: which columns are of each kind; where there are several, the first parameter's.
        encoding: of the space.
        count: in all, with those tried before.
        rng: where to look among many columns.
        before: [configurations, parameters], the codes of what was tried already.
    """
    each = max(FEWEST_FIRST, count // len(kinds))
    found = []
    for own in kinds:
        tried = before if len(kinds) == 1 else before[before[:, 0] == columns[own[0], 0]]
        first = _first_columns(columns[own], encoding, each, rng, tried)
        found.append([int(i) for i in own[first]])
    turns = itertools.zip_longest(*found)
    return [column for turn in turns for column in turn if column is not None]


def _first_columns(
    columns: Array, encoding: Encoding, count: int, rng: np.random.Generator, before: Array
) -> list[int]:
    """Return columns to try first, each the farthest from those before it.

    They are chosen among the fifth whose numbers are nearest to powers of two. Devices work by
    these: on some, all else is ten times slower, and tells nothing of what is fast. After them
    come as many more, at most `count`, as it takes to have every value of every parameter without
    an order: no distance tells whether a word is good, and some occur in few configurations.
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
