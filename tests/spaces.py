"""What tests look at of a space: all of its configurations at once."""

from __future__ import annotations

from tuner.space.search_space import SearchSpace
from tuner.trial import Params


def feasible(space: SearchSpace) -> list[Params]:
    """Return every feasible configuration, in the order of the config ids."""
    return [space.params_of(row) for row in space.rows().tolist()]
