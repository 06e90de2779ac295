"""Candidates to outcomes, on a real device: what the search talks to.

A configuration is rendered and handed to the builders at once; the one worker of the device checks
and times what is built.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tuner.check.refusals import says_no_memory
from tuner.evaluate.measure import unseen_work
from tuner.evaluate.task import Task, explained, new_worker, too_fast
from tuner.evaluate.worker import JobFailed, WorkerCrashed, WorkerTimeout
from tuner.kernel.builder import Builder
from tuner.kernel.family import Family
from tuner.machine.device import Device
from tuner.machine.turns import turns_of
from tuner.trial import (
    Build,
    Candidate,
    Check,
    Measurement,
    Outcome,
    Params,
    Status,
    Value,
    from_json,
    to_json,
)

__all__ = ["RACE_MARGIN", "SCREEN_TIMEOUT_S", "DeviceEvaluator"]

SCREEN_TIMEOUT_S = 60.0  # one candidate, checked and measured
ANCHOR_EVERY = 16  # candidates between two timings of the baseline
DISTURBED = 0.02  # relative noise on a GPU beyond which a time is taken again beside idle builders
SURPRISING = 1.6  # times as fast as the best before: the baseline is timed again beside it
RACE_MARGIN = 1.1  # a candidate is stopped early when clearly slower than this times the best


@dataclass(slots=True)
class _Pending:
    """A configuration on its way: rendered, and handed to the builders."""

    candidate_key: str
    candidate: Candidate
    build: Future[Build]
    seconds: dict[str, float]


class DeviceEvaluator:
    """Turns configurations into outcomes on one device.

    Builders work ahead in parallel; one worker checks and times. A candidate with the machine
    code of an earlier one gets that one's outcome.

    Args:
        family: the operator's templates.
        task: the problem as the worker needs it.
        facts: device facts that shapes may use.
        device: where candidates run.
        builder: compiles them.
        screen_s: seconds of samples for one candidate.
        max_noise: relative noise at which sampling stops.
        stop_slow: whether it stops as well where the candidate is clearly slower than the best.
        seed: of the screening probes.
        ahead: configurations in flight, None for as many as keep builders and device busy.
        keep: called with each candidate and its build, to keep source and log with the run.
    """

    def __init__(
        self,
        family: Family,
        task: Task,
        *,
        facts: Mapping[str, Value],
        device: Device,
        builder: Builder,
        screen_s: float,
        max_noise: float,
        stop_slow: bool = True,
        seed: int,
        ahead: int | None,
        num_workers: int,
        keep: Callable[[Candidate, Build], None],
    ) -> None:
        self._family = family
        self._facts = dict(facts)
        self._builder = builder
        self._screen_s = screen_s
        self._max_noise = max_noise
        self._stop_slow = stop_slow
        self._keep = keep
        # On a CPU the builders pause while a candidate is timed. On a GPU they only do where the
        # launches came too late for it, which shows as noise.
        self._quiet = builder.paused if device.kind == "cpu" else nullcontext
        self._ahead = ahead or num_workers + 2
        payload = {**task.payload(), "screening_seed": seed}
        self._worker = new_worker(
            task.device, on_start=[("prepare", payload)], env=builder.environment
        )
        self._turns = turns_of(task.device)
        self._memory = ExitStack()  # what is held of the device's, while there is a worker
        self._impossible_us = task.impossible_us
        self._seen: dict[str, tuple[int, Outcome]] = {}
        self._num_since_anchor = 0
        self._waited_s = 0.0  # for a build, since the last one
        self.baseline: Measurement | None = None

    @property
    def ahead(self) -> int:
        """How many submitted configurations keep the builders busy."""
        return self._ahead

    @property
    def overlaps(self) -> bool:
        """Whether the search may go on meanwhile: not on the processor that is being timed."""
        return self._quiet is nullcontext

    @property
    def waited_s(self) -> float:
        """Seconds for which other tuners had the device when a candidate was to be timed."""
        return self._turns.waited_s

    @property
    def num_building(self) -> int:
        """How many candidates are being compiled or wait for it."""
        return self._builder.pending

    def start(self) -> Measurement:
        """Start the worker and time the baseline.

        Raises:
            ProblemError: the reference does not work on this device.
            DeviceError: the worker cannot use the device.
        """
        try:
            return self._started(is_alone=False)
        except JobFailed as failure:
            if not says_no_memory(failure.message):
                raise explained(failure) from failure
        self._memory.close()  # other tuners may have what is lacking
        try:
            return self._started(is_alone=True)
        except JobFailed as failure:
            raise explained(failure) from failure

    def _started(self, *, is_alone: bool) -> Measurement:
        self._memory.enter_context(self._turns.memory(needs_all=is_alone))
        self._worker.start()
        return self._time_baseline()

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
        """Check a configuration that is built, and time it; return what became of it."""
        build = pending.build.result()
        seconds = {"wait": 0.0, **pending.seconds, "build": build.seconds}
        self._keep(pending.candidate, build)
        if build.status is not Status.CORRECT:
            reason = self._family.explained(pending.candidate, build.error, self._facts)
            return Outcome(build.status, reason, build, seconds=seconds)
        known = self._seen.get(build.binary_key)
        if build.binary_key and known is not None:
            return replace(known[1], build=build, seconds=seconds, same_as=known[0])
        outcome = self._screen(pending.candidate, build, best_us, seconds)
        if outcome.status in (Status.CORRECT, Status.CORRECTNESS):
            self._seen[build.binary_key] = (number, outcome)
        return outcome

    def close(self) -> None:
        """End the worker; the builders belong to the caller."""
        self._worker.close()
        self._memory.close()

    def _screen(
        self,
        candidate: Candidate,
        build: Build,
        best_us: float | None,
        seconds: dict[str, float],
    ) -> Outcome:
        assert build.artefact is not None
        stop_above_us = None
        if self._stop_slow and best_us is not None:
            stop_above_us = best_us * RACE_MARGIN
        payload = {
            "candidate": to_json(candidate),
            "artefact": build.artefact,
            "budget_s": self._screen_s,
            "max_noise": self._max_noise,
            "stop_above_us": stop_above_us,
        }
        start_s = time.perf_counter()
        try:
            with self._quiet():
                if self._num_since_anchor >= ANCHOR_EVERY:
                    self._time_baseline()
                self._num_since_anchor += 1
                data = self._screened(payload)
            if self._is_doubtful(data.get("measurement"), best_us):
                with self._builder.paused():
                    self._time_baseline()
                    data = self._screened(payload)
        except (WorkerTimeout, WorkerCrashed, JobFailed) as error:
            status = Status.TIMEOUT if isinstance(error, WorkerTimeout) else Status.RUNTIME
            reason = error.message if isinstance(error, JobFailed) else error.reason
            seconds["device"] = time.perf_counter() - start_s
            return Outcome(status, reason, build, seconds=seconds)
        check = from_json(Check, json.dumps(data["check"]))
        seconds |= {"check": data["check_s"], "measure": data.get("measure_s", 0.0)}
        seconds["device"] = time.perf_counter() - start_s
        if not check.is_accepted:
            status = Status.RUNTIME if data["has_raised"] else Status.CORRECTNESS
            return Outcome(status, check.reason, build, check, seconds=seconds)
        measurement = from_json(Measurement, json.dumps(data["measurement"]))
        reason = (
            data.get("after_timing", "")
            or unseen_work(measurement)
            or self._too_fast(measurement.latency_us)
        )
        if reason:  # the measurement is kept, to be looked at
            return Outcome(Status.CORRECTNESS, reason, build, check, measurement, seconds)
        if self.baseline is not None:
            measurement = replace(measurement, anchor_us=self.baseline.latency_us)
        return Outcome(Status.CORRECT, "", build, check, measurement, seconds)

    def _is_doubtful(self, measurement: Mapping[str, Any] | None, best_us: float | None) -> bool:
        """Whether a time is taken again, beside idle builders and next to the baseline's.

        On a GPU it scatters as only the host's other work makes it. On a CPU it is so much better
        than all before that the machine may have been busy until now: 430x was seen, and the
        baseline was to blame.
        """
        if measurement is None:
            return False
        if self._quiet is nullcontext:
            return float(measurement["noise"]) > DISTURBED
        before_us = best_us or (self.baseline.latency_us if self.baseline else math.inf)
        return float(measurement["latency_us"]) * SURPRISING < before_us

    def _screened(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        with self._turns.alone():
            return self._worker.call("screen", dict(payload), timeout_s=SCREEN_TIMEOUT_S).data

    def _too_fast(self, latency_us: float) -> str:
        return too_fast(latency_us, self._impossible_us)

    def _time_baseline(self) -> Measurement:
        payload = {"budget_s": 4 * self._screen_s, "max_noise": self._max_noise}
        with self._quiet(), self._turns.alone():
            reply = self._worker.call("time_baseline", payload, timeout_s=SCREEN_TIMEOUT_S)
        self.baseline = from_json(Measurement, json.dumps(reply.data["measurement"]))
        self._num_since_anchor = 0
        return self.baseline
