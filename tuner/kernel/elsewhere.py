"""Builders of other hosts, as a builder of this host sees them."""

from __future__ import annotations

from pathlib import Path

from tuner.at_work import AtWork
from tuner.trial import Build, Candidate

__all__ = ["Elsewhere"]


class Elsewhere:
    """Builders of other hosts; of this class itself, there are none."""

    @property
    def num_slots(self) -> int:
        """How many builds they do at a time, at present."""
        return 0

    def at_work(self) -> list[AtWork]:
        """Return how many of each host's are busy."""
        return []

    def begin(self, candidate: Candidate, key: str, *, is_held: bool) -> bool:
        """Take a slot for a build; whether there is one, and they do builds of this kind.

        With `is_held` only where one of them has it already. Each one that is begun is made.
        """
        return False

    def make(self, candidate: Candidate, key: str, folder: Path) -> tuple[Build, bool] | None:
        """Fill a folder as a compiler does: the build with relative paths, whether to keep it.

        Triton's kernels are KERNELS_FILE in it (`triton_files`). None where it has to be compiled
        here.
        """
        return None

    def close(self) -> None:
        """End what is being made: it returns None."""
