"""The configurations that are judged at every suggestion: all, or those that stand for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from tuner.search.encoding import Array
from tuner.space.search_space import SearchSpace

__all__ = ["Pool"]

POOL = 20_000  # configurations judged at every suggestion: all, or a pool of a larger space
MAX_STEPS = 6  # from neighbour to neighbour, at one suggestion
BEAM = 10  # configurations that are walked from at once
NEAR_SHARE = 0.3  # of a pool that is drawn anew: one or two changes away from the fastest trials
KEPT_SHARE = 0.2  # what promised most in the pool before


class Pool:
    """Config ids in a space, drawn anew now and then where they are not all there are.

    Attributes:
        config_ids: of the space.
        is_whole: whether these are all.
    """

    def __init__(self, space: SearchSpace, rng: np.random.Generator) -> None:
        self._space = space
        self._rng = rng
        self._neighbours: dict[int, np.ndarray] = {}  # of config ids that were climbed from
        self.is_whole = space.is_listed and space.num_feasible <= POOL
        self.config_ids = np.arange(space.num_feasible) if self.is_whole else self._drawn(POOL)

    def _drawn(self, count: int) -> np.ndarray:
        return np.sort(self._space.sample(count, self._rng))

    def draw_anew(self, centres: Sequence[int], merit: Array | None) -> None:
        """Take some near the fastest trials, what promised most, and anything.

        Args:
            centres: config ids of the fastest trials.
            merit: of the config ids there are; None while nothing is known.
        """
        near = [self._near(at) for at in centres]
        near += [self._near(int(at)) for ring in near[:1] for at in ring]  # two changes away
        around = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *near]))
        around = self._rng.permutation(around)[: int(POOL * NEAR_SHARE)]
        kept = np.empty(0, dtype=np.int64)
        if merit is not None:
            order = np.argsort(-merit, kind="stable")
            kept = self.config_ids[order[: int(POOL * KEPT_SHARE)]]
        fresh = self._drawn(POOL - len(around) - len(kept))
        self.config_ids = np.unique(np.concatenate([around, kept, fresh]))

    def climbed(
        self,
        merit: Array,
        merit_of: Callable[[np.ndarray], Array],
        centres: Sequence[int],
        tried: Collection[int],
    ) -> int:
        """Walk from the best of the pool and of the trials to neighbours that promise more.

        Args:
            merit: of the config ids; -inf where not to end.
            merit_of: judges others.
            centres: config ids of the fastest trials, which are starts, too.
            tried: where not to end.
        """
        is_tried = np.fromiter(tried, np.int64, len(tried))
        top = np.argsort(-merit, kind="stable")[:BEAM]
        at, merits = self.config_ids[top], merit[top]
        for _ in range(MAX_STEPS):
            near = np.unique(np.concatenate([self._near(int(p)) for p in [*at, *centres]]))
            near = near[~np.isin(near, is_tried) & ~np.isin(near, at)]
            if not len(near):
                break
            all_at, all_merits = np.append(at, near), np.append(merits, merit_of(near))
            top = np.argsort(-all_merits, kind="stable")[:BEAM]
            has_risen = top.max() >= len(at)
            at, merits, centres = all_at[top], all_merits[top], []
            if not has_risen:
                break
        return int(at[0])

    def _near(self, config_id: int) -> np.ndarray:
        if config_id not in self._neighbours:
            self._neighbours[config_id] = self._space.neighbour_ids(config_id)
        return self._neighbours[config_id]
