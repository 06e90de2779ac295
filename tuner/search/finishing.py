"""What is in flight in a search: candidates on their way, finished as they are built."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import optuna

from tuner.trial import Outcome, Params

__all__ = ["Evaluator", "Finisher", "InFlight", "Pending", "overtake"]

LOOK_AGAIN_S = 0.05  # at what else was asked for, while nothing is built


class Pending(Protocol):
    """A candidate on its way: rendered, being built."""

    @property
    def candidate_key(self) -> str:
        """The candidate's content key, empty when it did not render."""


P = TypeVar("P", bound=Pending)


class Evaluator(Protocol[P]):
    """What the search needs of whatever turns parameters into outcomes."""

    def submit(self, params: Params) -> P:
        """Start working on a configuration; must not wait for it."""

    def first_ready(self, pending: Sequence[P], timeout_s: float | None = None) -> int | None:
        """Wait until one of them can be finished; return the place of the first that can.

        None where that takes longer than `timeout_s`: others may have been submitted meanwhile.
        """

    def finish(self, pending: P, number: int, best_us: float | None) -> Outcome:
        """Wait for a configuration and return what became of it."""

    @property
    def ahead(self) -> int:
        """How many submitted configurations keep the builders busy."""

    @property
    def overlaps(self) -> bool:
        """Whether the search may think, in another thread, while a configuration is finished."""


@dataclass(slots=True, eq=False)
class InFlight(Generic[P]):
    """A question that was asked, until its outcome is reported."""

    number: int  # of the question
    trial: optuna.Trial
    params: Params
    config_id: int
    started_at: str
    pending: P | None = None  # None for a trial of an earlier session
    outcome: Outcome | None = None  # once there is one
    ended: float = 0.0  # when that was, by `time.monotonic`
    overtaken: float | None = None  # when one that was asked later had its outcome

    def is_overtaken(self, patience_s: float) -> bool:
        """Whether another one that was asked later has waited for so long to be reported."""
        return self.overtaken is not None and time.monotonic() - self.overtaken > patience_s


def overtake(flying: Sequence[InFlight[P]]) -> None:
    """Note of what is in flight, in the order of asking, what others have overtaken."""
    first: float | None = None
    for item in reversed(flying):
        if item.outcome is not None:
            first = item.ended if first is None else min(first, item.ended)
        elif item.overtaken is None:
            item.overtaken = first


class Finisher(Generic[P]):
    """Gets the outcomes of what is in flight, of the first that are built.

    Where the evaluator lets it, threads do so, and the device works while the sampler thinks.
    Leaving it drops what they work on: whoever owns the evaluator ends that by closing it.

    Args:
        evaluator: of the search.
        best_us: the least time that the search knows, as trials are ranked.
        at_once: how many candidates are finished at the same time.
    """

    def __init__(self, evaluator: Evaluator[P], best_us: float | None, at_once: int = 1) -> None:
        self._evaluator = evaluator
        self._best_us = best_us
        self._at_once = at_once
        self._waiting: list[InFlight[P]] = []  # that nobody finishes yet, in the order of asking
        self._picking = threading.Lock()  # held by the one that looks for what is built
        self._num_done = 0
        self._error: BaseException | None = None
        self._is_left = False
        self._change = threading.Condition()

    def __enter__(self) -> Finisher[P]:
        if self._evaluator.overlaps:
            for number in range(min(self._at_once, self._evaluator.ahead)):
                name = f"device_{number}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Begin with no more of what waits."""
        with self._change:
            self._is_left = True
            self._change.notify_all()

    def take(self, item: InFlight[P]) -> None:
        """Get an outcome for it, unless it has one."""
        with self._change:
            if item.outcome is None:
                self._waiting.append(item)
                self._change.notify_all()

    def wait(self, *items: InFlight[P], timeout_s: float) -> None:
        """Wait until one of them, or another one from now on, has its outcome, or so long."""
        if not self._evaluator.overlaps:
            picked = self._picked(timeout_s)
            if picked is not None:
                self._finish(picked)
            return
        with self._change:
            before = self._num_done

            def has_outcome() -> bool:
                return any(item.outcome is not None for item in items)

            self._change.wait_for(
                lambda: has_outcome() or self._error or self._num_done > before, timeout_s
            )
            if self._error is not None and not has_outcome():
                raise self._error

    def _work(self) -> None:
        try:
            while True:
                with self._picking:
                    with self._change:
                        self._change.wait_for(lambda: self._waiting or self._is_left)
                        if self._is_left:
                            return
                    picked = self._picked(LOOK_AGAIN_S)
                if picked is not None:
                    self._finish(picked)
        except BaseException as error:  # raised again for who waits
            with self._change:
                self._error = error
                self._change.notify_all()

    def _picked(self, timeout_s: float | None) -> InFlight[P] | None:
        """Take the first that is built out of those that wait; None where none is in that time."""
        with self._change:
            waiting = list(self._waiting)
        pending = [item.pending for item in waiting if item.pending is not None]
        place = self._evaluator.first_ready(pending, timeout_s)
        with self._change:
            if place is None or self._is_left:
                return None
            self._waiting.remove(waiting[place])
        return waiting[place]

    def _finish(self, item: InFlight[P]) -> None:
        assert item.pending is not None  # or it had an outcome
        outcome = self._evaluator.finish(item.pending, item.number, self._best_us)
        with self._change:
            item.ended = time.monotonic()
            item.outcome = outcome
            if outcome.ranked_us is not None:
                self._best_us = min(self._best_us or outcome.ranked_us, outcome.ranked_us)
            self._num_done += 1
            self._change.notify_all()
