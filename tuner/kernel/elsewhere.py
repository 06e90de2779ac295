"""Builders of other hosts, as a builder of this host sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tuner.at_work import AtWork
from tuner.trial import Build, Candidate

__all__ = ["Elsewhere", "Nowhere"]


class Elsewhere(Protocol):
    """Builders of other hosts."""

    @property
    def num_slots(self) -> int:
        """How many builds they do at a time, at present."""

    def at_work(self) -> list[AtWork]:
        """Return how many of each host's are busy."""

    def begin(self, candidate: Candidate, key: str, *, is_held: bool) -> bool:
        """Take a slot for a build; whether there is one, and they do builds of this kind.

        With `is_held` only where one of them has it already. Each one that is begun is made.
        """

    def make(self, candidate: Candidate, key: str, folder: Path) -> tuple[Build, bool] | None:
        """Fill a folder as a compiler does: the build with relative paths, whether to keep it.

        Triton's kernels are KERNELS_FILE in it (`triton_files`). None where it has to be compiled
        here.
        """

    def close(self) -> None:
        """End what is being made: it returns None."""


class Nowhere:
    """There are none."""

    num_slots = 0

    def at_work(self) -> list[AtWork]:
        """Return nobody."""
        return []

    def begin(self, candidate: Candidate, key: str, *, is_held: bool) -> bool:
        """Take no slot."""
        return False

    def make(self, candidate: Candidate, key: str, folder: Path) -> tuple[Build, bool] | None:
        """Leave it to this host."""
        return None

    def close(self) -> None:
        """End nothing."""
