"""News of a search: what a session says of its devices, its baseline and what is compiled."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tuner.machine.host import busy_words
from tuner.planning.observing import Observer
from tuner.trial import Measurement, Trial

__all__ = ["News"]

WORTH_SAYING_S = 1.0  # of waiting for a device that other tuners had
NOT_TIMED = (
    "the search did not time candidates on {}: there is no room for these data beside the given "
    "ones, or the reference fails on them"
)


class News:
    """Says what becomes of a search; what is to stand beside its result is added to `notes`."""

    def __init__(self, observer: Observer, notes: list[str]) -> None:
        self._observer, self._notes = observer, notes
        self._taken: deque[str] = deque()  # of devices, by a thread of theirs

    def take(self, device: str, words: str) -> None:
        """Take what became of a device or of builders, in a thread of theirs."""
        self._taken.append(f"{device}: {words}")

    def say_of_devices(self) -> None:
        """Say what was taken."""
        while self._taken:
            self._observer.on_stage(self._taken.popleft())

    def say_of_baseline(self, baseline: Measurement, others: Iterable[str], load: float) -> None:
        """Warn of workloads that are not timed, and of a busy machine.

        Args:
            baseline: as it was timed.
            others: the workloads beside the given one, by name.
            load: of the machine before this session.
        """
        if untimed := [name for name in others if name not in baseline.others_us]:
            self._warn(NOT_TIMED.format(", ".join(untimed)))
        if busy := busy_words(load, baseline.noise):
            self._warn(busy)

    def say_of_waiting(self, waited_s: float) -> None:
        """Say for how long others had the device, where it was long."""
        if waited_s > WORTH_SAYING_S:
            waited = f"other tuners had the device for {waited_s:.0f} s of the search"
            self._observer.on_stage(f"{waited}, which do not count as its time")

    def say_of_builds(self, trials: Sequence[Trial]) -> None:
        """Say of what was compiled while the device waited, which takes time from the search."""
        builds = [t.outcome.build for t in trials if t.outcome.build is not None]
        notes = [build.note for build in builds if build.note]
        if notes:
            self._observer.on_stage(
                f"warning: {len(notes)} of {len(builds)} candidates could not be compiled ahead "
                f"and were compiled where they are timed: {notes[0]}; fewer were tried for it"
            )

    def _warn(self, words: str) -> None:
        self._observer.on_stage(f"warning: {words}")
        self._notes.append(words)
