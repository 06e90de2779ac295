"""What the questions of a check take of a GPU's memory: as estimated, then as was seen.

An estimate holds for any reference: it counts each number that a call makes as if all were held at
once, in float64. Most references hold a fraction of that, and a tuner that waits for all of a
GPU's memory waits for every other one. So what two processes took for the largest questions until
now bounds what larger ones of the same kind take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.check.probes.batches import FEW_ROWS, Extent
from tuner.check.probes.probe import Probe
from tuner.evaluate.forecast import asked_rows
from tuner.machine.gpu_memory import MOST_UNUSED_BYTES
from tuner.machine.turns import ALL, HALF, LITTLE, SOME

__all__ = ["Needs", "needs_of"]

# Of each number that a call takes and makes: float64, some six times, and what is kept of a call.
# Of each of the state what a pair of processes was seen to hold: weights of several probes and
# gradients of several calls, in float64 as well.
WIDE_BYTES, KEPT_BYTES, STATE_BYTES = 48, 8, 180
# Of these a Linear of 4 GB took on an H200, for gradients of several calls.
SEEN_STATE_BYTES = 90
FIXED_BYTES = 24  # for each call and number of an input that does not grow with the rows
SHARE_OF_FREE = 1 / 4  # of a host's memory, of which no other tuner takes a part
SHARE_OF_ONE, LITTLE_OF_ONE = 1 / 5, 1 / 20  # of the memory, beside which others have room
# A few questions say what larger ones take, and these a fourth more; a pair of processes keeps
# what it does not use beside that.
FEWEST_SEEN, SURPLUS, UNUSED_BYTES = 6, 1.25, 2 * MOST_UNUSED_BYTES
MOST_SURPLUS = 1 / 16  # of the memory: of weights that take most of it no more are to come
FIRST_LARGE = 8  # questions that take much memory, before it is looked at again
MOST_GROWN = 8.0  # times what is estimated for the rows of those that were seen
STEP = 1 / 8  # of the memory, in which much is waited for: those of one step are asked together
ALIKE = 0.5  # of the largest of these estimates: what was seen of those is compared


@dataclass(slots=True)
class Needs:
    """What is known of one reference on one device.

    Attributes:
        extent: how large the problem is.
        num_state: numbers of its parameters and buffers.
        total_bytes: of the GPU; 0 of a CPU, whose memory nobody waits for.
        host_bytes: of a CPU what was free at first; 0 of a GPU.
    """

    extent: Extent
    num_state: float
    total_bytes: float
    host_bytes: float = 0.0
    # Of questions with gradients, and of those without: shares of all memory, what was estimated
    # for their rows and what was taken.
    _seen: dict[bool, list[tuple[float, float]]] = field(
        default_factory=lambda: {False: [], True: []}
    )

    def share(self, probe: Probe) -> float:
        """Return which share of a GPU's memory is waited for before a probe is asked.

        Where too little is known that is half of it, what others took, or what weights take: who
        waits for more stops all other tuners, and what lacks memory is asked again.
        """
        taken = self.taken(probe)
        if self.is_known(probe):
            return _in_parts(min(taken, self._bound(probe)))
        if taken > SHARE_OF_ONE:
            most_seen = max((used for _, used in self._seen_of(probe)), default=0.0)
            taken = min(taken, max(HALF, most_seen, self._state_share))
        return _in_parts(taken)

    def next_of(self, probes: Sequence[Probe]) -> tuple[float, list[int]]:
        """Return the least share that some probes wait for, and the places of these, in order.

        Small ones come first, which several pairs of processes ask side by side. Of large ones
        those come first of which is known what they take, and where that is none a few: what is
        seen of them may let the rest wait for less.
        """
        each = [(self.share(probe), self.is_large(probe)) for probe in probes]
        share, is_large = least = min(each)
        places = [place for place, its in enumerate(each) if its == least]
        if is_large and share > SOME:
            known = [place for place in places if self.is_known(probes[place])]
            places = known or places[:FIRST_LARGE]
        return share, places

    @property
    def are_heavy(self) -> bool:
        """Whether weights alone make nearly all questions take more than half of the memory."""
        return self._state_share > HALF

    @property
    def _state_share(self) -> float:
        return self._of_all(SEEN_STATE_BYTES * self.num_state)

    def is_large(self, probe: Probe) -> bool:
        """Whether one pair of processes asks a probe alone, as far as is estimated.

        On a CPU as well, where processes keep what they freed: two pairs that were asked inputs of
        100 MB, estimated at 3 GB each, took all of 24 GB.
        """
        if self.total_bytes:
            return self.taken(probe) > SHARE_OF_ONE
        return 0 < LITTLE_OF_ONE * self.host_bytes < self._taken_bytes(probe)

    def is_bounded(self, probe: Probe) -> bool:
        """Whether a probe takes little, or what it takes at most was seen."""
        return not self.is_large(probe) or self.is_known(probe)

    def is_known(self, probe: Probe) -> bool:
        """Whether enough was seen to say what a probe takes."""
        seen = self._seen_of(probe)
        largest = max((rows for rows, _ in seen), default=0.0)
        return len(seen) >= FEWEST_SEEN and self._rows_share(probe) <= MOST_GROWN * largest

    def taken(self, probe: Probe) -> float:
        """Return the share of a GPU's memory that a probe is estimated to take."""
        return self._of_all(self._taken_bytes(probe))

    def note(self, probe: Probe, used_bytes: float) -> None:
        """Note what a judge and a contender's process took for a probe, at most."""
        if self.total_bytes and used_bytes:
            found = (self._rows_share(probe), self._of_all(used_bytes))
            self._seen[bool(probe.gradients)].append(found)

    def num_pairs(self, most: int, free_bytes: float) -> int:
        """Return how many pairs of processes, `most` or one, have room while they ask few rows."""
        rows = self.extent.num_rows
        if self.total_bytes and not self.extent.is_fixed:
            rows = min(FEW_ROWS, rows or FEW_ROWS)
        room = SHARE_OF_ONE * self.total_bytes or SHARE_OF_FREE * free_bytes
        needed = self._rows_bytes(rows or 1) + STATE_BYTES * self.num_state
        return most if needed + FIXED_BYTES * self.extent.fixed_elements <= room else 1

    def _bound(self, probe: Probe) -> float:
        """Return the share that a probe, of which enough is known, takes at most.

        What grows with the rows is at most what was estimated for them, and at most all that was
        taken; the rest stays as it is.
        """
        seen, its_rows = self._seen_of(probe), self._rows_share(probe)
        largest = max(rows for rows, _ in seen)
        most = max(
            used + max(0.0, its_rows / rows - 1.0) * min(used, rows) if rows else used
            for rows, used in seen
            if rows >= ALIKE * largest
        )
        return min(SURPLUS * most, most + MOST_SURPLUS) + self._of_all(UNUSED_BYTES)

    def _taken_bytes(self, probe: Probe) -> float:
        fixed = FIXED_BYTES * probe.calls * self.extent.fixed_elements
        return STATE_BYTES * self.num_state + fixed + self._asked_bytes(probe)

    def _asked_bytes(self, probe: Probe) -> float:
        return self._rows_bytes(asked_rows(probe, self.extent), probe.calls)

    def _seen_of(self, probe: Probe) -> list[tuple[float, float]]:
        with_gradients = self._seen[True]  # which take more than those without
        return with_gradients if probe.gradients else [*self._seen[False], *with_gradients]

    def _rows_share(self, probe: Probe) -> float:
        return self._of_all(self._asked_bytes(probe))

    def _rows_bytes(self, rows: int, num_calls: int = 1) -> float:
        return rows * self.extent.row_elements * (WIDE_BYTES + KEPT_BYTES * num_calls)

    def _of_all(self, num_bytes: float) -> float:
        return num_bytes / self.total_bytes if self.total_bytes else 0.0


def needs_of(about: Mapping[str, Any], *, is_gpu: bool) -> Needs:
    """Return what questions are estimated to take, of what a judge says of its reference."""
    extent = Extent(
        about["num_rows"], float(about["row_elements"]), "gpu" if is_gpu else "cpu",
        about["fixed_elements"], about["is_fixed"],
    )  # fmt: skip
    host_bytes = 0.0 if is_gpu else float(about["free_bytes"])
    return Needs(extent, float(about["state_elements"]), float(about["total_bytes"]), host_bytes)


def _in_parts(share: float) -> float:
    """Return a share of the memory that holds this one, of few there are."""
    step = LITTLE if share <= SOME else STEP
    return min(ALL, max(LITTLE, math.ceil(share / step) * step))
