"""Built candidates to outcomes on one device: checked, then timed, in its one worker."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tuner.at_work import AtWork
from tuner.errors import says_no_memory
from tuner.evaluate.job_spec import JobSpec, explained, new_worker, too_fast
from tuner.evaluate.measure import unseen_work
from tuner.evaluate.worker import JobFailed, WorkerCrashed, WorkerTimeout
from tuner.machine.turns import ALL, more_than, turns_of
from tuner.trial import (
    Build,
    Candidate,
    Check,
    Measurement,
    Outcome,
    Status,
    from_json,
    to_json,
)

__all__ = ["RACE_MARGIN", "SCREEN_TIMEOUT_S", "Runner", "Terms"]

SCREEN_TIMEOUT_S = 60.0  # one candidate, checked and measured
ANCHOR_EVERY = 16  # candidates between two timings of the baseline
DISTURBED = 0.02  # relative noise on a GPU beyond which a time is taken again beside idle builders
# Of a GPU's baseline: how often it is timed where it seems to be another than before, how long is
# waited between, and what is no other one.
MOST_TIMED, MOMENT_S, ALIKE = 4, 0.4, 0.05
SURPRISING = 1.6  # times as fast as the best before: the baseline is timed again beside it
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# Where memory is scarce: blocks that were split held 15 of 80 GB, which a tensor of 16 lacked.
SPARING = "expandable_segments:True"
# A candidate is stopped early when clearly slower than this times the best, and timed on other
# data when it is not slower than that.
RACE_MARGIN = 1.1


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms candidates are screened.

    Attributes:
        screen_s: seconds of samples for one candidate.
        max_noise: relative noise at which sampling stops.
        stop_slow: whether it stops as well where the candidate is clearly slower than the best.
        seed: of the screening probes.
        others: the data that the baseline, and candidates near the best, are timed on as well: by
            their names, with the path of a file of tensors or "".
    """

    screen_s: float
    max_noise: float
    stop_slow: bool
    seed: int
    others: Mapping[str, str] = field(default_factory=dict)


class Runner:
    """Checks and times candidates that are built, one after the other, on one device.

    Args:
        task: the problem as the worker needs it; it names the device.
        terms: of the screening.
        env: what the worker's environment has besides ours.
        cores: that the worker keeps to, None for all that this process may use.
        paused: keeps the builders quiet meanwhile.

    Attributes:
        baseline: as it was timed last.
        was_killed: whether the process of the last candidate was killed from outside.
    """

    at_once = 1
    together_us: Mapping[str, float] = MappingProxyType({})  # it is one device

    def __init__(
        self,
        spec: JobSpec,
        terms: Terms,
        *,
        env: Mapping[str, str],
        cores: Sequence[int] | None = None,
        paused: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._terms = terms
        self._paused = paused
        # On a CPU the builders pause while a candidate is timed. On a GPU they only do where the
        # launches came too late for it, which shows as noise.
        self._is_cpu = not spec.is_gpu
        self._quiet = paused if self._is_cpu else nullcontext
        payload = {**spec.payload(), "screening_seed": terms.seed}
        on_start: list[tuple[str, dict[str, Any]]] = [("prepare", payload)]
        if cores is not None:
            on_start.insert(0, ("keep_to", {"cores": list(cores)}))
        self._device = spec.device
        self._on_start, self._env = on_start, env
        self._worker = new_worker(spec.device, on_start=on_start, env=env)
        self._turns = turns_of(spec.device)
        self._memory = ExitStack()  # what is held of the device's, while there is a worker
        self._is_closed = False
        self._impossible_us, self._memory_share = spec.impossible_us, spec.memory_share
        self._num_since_anchor = self._num_shortages = self._generation = 0
        self.baseline: Measurement | None = None
        self.was_killed = False

    @property
    def baselines_us(self) -> Mapping[str, float]:
        """The baseline's time, once it is there."""
        return {} if self.baseline is None else {self._device: self.baseline.latency_us}

    @property
    def is_apart(self) -> bool:
        """Whether this host's processor is free meanwhile: not where it is what is timed."""
        return not self._is_cpu

    @property
    def overlaps(self) -> bool:
        """Whether the search may go on meanwhile."""
        return self.is_apart

    @property
    def waited_s(self) -> float:
        """Seconds for which other tuners had the device when a candidate was to be timed."""
        return self._turns.waited_s

    def at_work(self) -> Sequence[AtWork]:
        """Return nothing: whoever waits sees what one device is at."""
        return ()

    def start(self) -> Measurement:
        """Start the worker and time the baseline.

        Raises:
            ProblemError: the reference does not work on this device.
            DeviceError: the worker cannot use the device.
        """
        try:
            self._memory.enter_context(self._turns.memory(self._memory_share))
            measured = self._prepared()
            # A library that went without may have taken a slower algorithm, and keeps to it.
            if not self._num_shortages:
                return measured
        except JobFailed as failure:
            if not says_no_memory(failure.message):
                raise explained(failure) from failure
        return self._start_with_more()

    def _prepared(self) -> Measurement:
        """Start the worker and time the baseline; the memory is taken."""
        # What is expected is computed on the device, for seconds, in which nobody else may time.
        with self._turns.shared():
            self._worker.start()
        return self.time_baseline()

    def _start_with_more(self) -> Measurement:
        """Start anew where other tuners leave more, with what wastes least of the memory.

        The worker ends before: others that wait for memory would wait for what it holds.
        """
        while True:
            self._worker.close()
            self._memory.close()
            self._memory_share = more_than(self._memory_share)
            self._memory.enter_context(self._turns.memory(self._memory_share))
            env = self._env if ALLOCATOR in os.environ else {**self._env, ALLOCATOR: SPARING}
            self._worker = new_worker(self._device, on_start=self._on_start, env=env)
            if self._is_closed:  # meanwhile, by another thread, which saw the first one
                self._worker.close()
            try:
                measured = self._prepared()
                if self._has_all_memory or not self._num_shortages:
                    return measured
            except JobFailed as failure:
                if self._has_all_memory or not says_no_memory(failure.message):
                    raise explained(failure) from failure

    @property
    def _has_all_memory(self) -> bool:
        """Whether no other tuner has any of it; a CPU's nobody waits for."""
        return self._is_cpu or self._memory_share == ALL

    def described(self) -> dict[str, Any]:
        """Return the facts and limits of the device, as its worker finds them, JSON-able."""
        facts: dict[str, Any] = {}
        for job, what in (("describe", "device"), ("limits", "limits")):
            reply = self._worker.call(job, {"device": self._device}, timeout_s=SCREEN_TIMEOUT_S)
            facts |= reply.data[what]
        return facts

    def close(self) -> None:
        """End the worker; from any thread."""
        self._is_closed = True
        self._worker.close()
        self._memory.close()

    def screen(self, candidate: Candidate, build: Build, best_us: float | None) -> Outcome:
        """Check a candidate, and time it if it is right; return what became of it.

        Args:
            candidate: as it was rendered.
            build: of it, which succeeded.
            best_us: the least time that the search knows, as it ranks them.

        Raises:
            WorkerError: the worker cannot be started any more.
            ProblemError: started anew to have all memory, the reference lacks it all the same.
        """
        outcome = self._screen(candidate, build, best_us)
        while not self._has_all_memory and says_no_memory(outcome.reason):
            self._start_with_more()
            outcome = self._screen(candidate, build, best_us)
        return outcome

    def _screen(self, candidate: Candidate, build: Build, best_us: float | None) -> Outcome:
        assert build.artefact is not None
        near_us = None if best_us is None else best_us * RACE_MARGIN
        payload = {
            "candidate": to_json(candidate),
            "artefact": build.artefact,
            "budget_s": self._terms.screen_s,
            "max_noise": self._terms.max_noise,
            "stop_above_us": near_us if self._terms.stop_slow else None,
            "near_us": near_us,
        }
        seconds: dict[str, float] = {}
        self.was_killed = False
        start_s = time.perf_counter()
        try:
            with self._quiet():
                # A worker that was started anew has no other data until it is timed.
                is_new = self.baseline is not None and self._worker.generation != self._generation
                if is_new or self._num_since_anchor >= ANCHOR_EVERY:
                    self.time_baseline()
                self._num_since_anchor += 1
                data = self._screened(payload)
            if self._is_borderline(data.get("measurement"), best_us):
                with self._paused():
                    self.time_baseline()
                    data |= self._timed(payload)
        except (WorkerTimeout, WorkerCrashed, JobFailed) as error:
            status = Status.TIMEOUT if isinstance(error, WorkerTimeout) else Status.RUNTIME
            reason = error.message if isinstance(error, JobFailed) else error.reason
            self.was_killed = isinstance(error, WorkerCrashed) and error.was_killed
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
            measurement = replace(
                measurement,
                anchor_us=self.baseline.latency_us,
                others_anchor_us=self.baseline.others_us if measurement.others_us else {},
            )
        return Outcome(Status.CORRECT, "", build, check, measurement, seconds)

    def _is_borderline(self, measurement: Mapping[str, Any] | None, best_us: float | None) -> bool:
        """Whether a time is taken again, beside idle builders and next to the baseline's.

        On a GPU it scatters as only the host's other work makes it. On a CPU it is so much better
        than all before that the machine may have been busy until now: 430x was seen, and the
        baseline was to blame.
        """
        if measurement is None:
            return False
        if not self._is_cpu:
            return float(measurement["noise"]) > DISTURBED
        before_us = best_us or (self.baseline.latency_us if self.baseline else math.inf)
        return float(measurement["latency_us"]) * SURPRISING < before_us

    def _screened(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Check a candidate beside other tuners; time one that is right without them."""
        built = {name: payload[name] for name in ("candidate", "artefact")}
        with self._turns.shared(is_counted=True):
            data = self._worker.call("screen", built, timeout_s=SCREEN_TIMEOUT_S).data
        return data | self._timed(payload) if data["check"]["is_accepted"] else data

    def _timed(self, payload: dict[str, Any]) -> dict[str, Any]:
        with self._turns.alone():
            return self._worker.call("time_candidate", payload, timeout_s=SCREEN_TIMEOUT_S).data

    def _too_fast(self, latency_us: float) -> str:
        return too_fast(latency_us, self._impossible_us)

    def time_baseline(self) -> Measurement:
        """Time the baseline, which the next candidates are compared with.

        Where a GPU's is another one than before it is timed again, a moment later: another tuner
        that opens the GPU, or draws weights there, made 1.9 times of it.

        Raises:
            JobFailed, WorkerError: the worker cannot do so.
        """
        known = self.baseline if self._generation == self._worker.generation else None
        found = [self._timed_baseline()]
        while not self._is_cpu and known is not None and len(found) < MOST_TIMED:
            if any(_are_alike(found[-1], other) for other in (known, *found[:-1])):
                break
            time.sleep(MOMENT_S)
            found.append(self._timed_baseline())
        self.baseline = found[-1]
        self._num_since_anchor, self._generation = 0, self._worker.generation
        return self.baseline

    def _timed_baseline(self) -> Measurement:
        terms = self._terms
        payload = {
            "budget_s": 4 * terms.screen_s,
            "max_noise": terms.max_noise,
            "others": dict(terms.others),
        }
        with self._quiet(), self._turns.alone():
            reply = self._worker.call("time_baseline", payload, timeout_s=SCREEN_TIMEOUT_S)
        self._num_shortages = reply.data["num_shortages"]
        return from_json(Measurement, json.dumps(reply.data["measurement"]))


def _are_alike(one: Measurement, other: Measurement) -> bool:
    return abs(math.log(one.latency_us / other.latency_us)) < ALIKE
