"""Candidates to outcomes: what the search talks to.

A configuration is rendered and handed to the builders at once; what is built is checked and timed
by the one worker of the device, or by one of several devices.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Protocol

from tuner.at_work import AtWork
from tuner.kernel.builder import Builder
from tuner.kernel.family import Family
from tuner.trial import Build, Candidate, Measurement, Outcome, Params, Status, Value

__all__ = ["DeviceEvaluator", "Devices"]


class Devices(Protocol):
    """What checks and times the candidates that are built: one device, or several."""

    @property
    def at_once(self) -> int:
        """How many candidates it screens at the same time, each asked for by a thread."""

    @property
    def is_apart(self) -> bool:
        """Whether this host's processor is free meanwhile, for what can be done ahead."""

    @property
    def overlaps(self) -> bool:
        """Whether the search may go on meanwhile."""

    @property
    def baselines_us(self) -> Mapping[str, float]:
        """The baseline's time on each device, alone, once they are started."""

    @property
    def together_us(self) -> Mapping[str, float]:
        """The same while all of several devices worked; empty for one."""

    @property
    def waited_s(self) -> float:
        """Seconds for which nothing could be timed, since others had the device."""

    def at_work(self) -> Sequence[AtWork]:
        """Return what each of several devices is at."""

    def start(self) -> Measurement:
        """Get ready, and time the baseline."""

    def screen(self, candidate: Candidate, build: Build, best_us: float | None) -> Outcome:
        """Check a candidate that is built, and time it; return what became of it."""

    def close(self) -> None:
        """End all that was started; a call of `screen` in another thread fails."""


@dataclass(slots=True)
class _Pending:
    """A configuration on its way: rendered, and handed to the builders."""

    candidate_key: str
    candidate: Candidate
    build: Future[Build]
    seconds: dict[str, float]


class DeviceEvaluator:
    """Turns configurations into outcomes.

    Builders work ahead in parallel. A candidate with the machine code of an earlier one gets that
    one's outcome.

    Args:
        family: the operator's templates.
        devices: check and time what is built.
        facts: device facts that shapes may use.
        builder: compiles candidates.
        keep: called with each candidate and its build, to keep source and log with the run.

    Attributes:
        ahead: how many configurations the search keeps in flight.
    """

    def __init__(
        self,
        family: Family,
        devices: Devices,
        *,
        facts: Mapping[str, Value],
        builder: Builder,
        keep: Callable[[Candidate, Build], None],
    ) -> None:
        self._family = family
        self._devices = devices
        self._facts = dict(facts)
        self._builder = builder
        self.ahead = 1
        self._keep = keep
        self._seen: dict[str, tuple[int, Outcome]] = {}
        self._running: set[str] = set()  # machine code that is being screened
        self._change = threading.Condition()
        self._keeping = threading.Lock()
        self._waited_s = 0.0  # for a build, since the last one

    @property
    def overlaps(self) -> bool:
        """Whether the search may go on while a candidate is finished."""
        return self._devices.overlaps

    @property
    def num_building(self) -> int:
        """How many candidates are being compiled or wait for it."""
        return self._builder.pending

    def submit(self, params: Params) -> _Pending:
        """Render a configuration and hand it to the builders; does not wait."""
        start_s = time.perf_counter()
        candidate = self._family.render(params, self._facts)
        seconds = {"render": time.perf_counter() - start_s}
        return _Pending(candidate.key, candidate, self._builder.submit(candidate), seconds)

    def first_ready(
        self, pending: Sequence[_Pending], timeout_s: float | None = None
    ) -> int | None:
        """Wait until one of them is built; return the place of the first that is.

        None where that takes longer than `timeout_s`.
        """
        start_s = time.perf_counter()
        built, _ = wait([item.build for item in pending], timeout_s, FIRST_COMPLETED)
        self._waited_s += time.perf_counter() - start_s
        place = next((i for i, item in enumerate(pending) if item.build in built), None)
        if place is not None:
            pending[place].seconds["wait"] = self._waited_s
            self._waited_s = 0.0
        return place

    def finish(self, pending: _Pending, number: int, best_us: float | None) -> Outcome:
        """Check a configuration that is built, and time it; return what became of it.

        Several threads may do so. One whose machine code another one screens waits for that.
        """
        build = pending.build.result()
        seconds = {"wait": 0.0, **pending.seconds, "build": build.seconds}
        with self._keeping:  # two may have the same source, and so the same folder
            self._keep(pending.candidate, build)
        if build.status is not Status.CORRECT:
            reason = self._family.explained(pending.candidate, build.error, self._facts)
            return Outcome(build.status, reason, build, seconds=seconds)
        code = build.binary_key
        with self._change:
            self._change.wait_for(lambda: not code or code not in self._running)
            known = self._seen.get(code)
            if code and known is not None:
                return replace(known[1], build=build, seconds=seconds, same_as=known[0])
            self._running.add(code)
        try:
            outcome = self._devices.screen(pending.candidate, build, best_us)
            if outcome.status in (Status.CORRECT, Status.CORRECTNESS):
                self._seen[code] = (number, outcome)
        finally:
            with self._change:
                self._running.discard(code)
                self._change.notify_all()
        return replace(outcome, build=build, seconds={**seconds, **outcome.seconds})
