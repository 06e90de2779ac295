"""Candidates to outcomes, on a real device.

`DeviceEvaluator` is what the search talks to: it renders and submits to the builders at once,
and lets the one worker of the device screen what is built. `Prover` is what finalists, exports
and strangers' files go through: fresh processes, of which one judges and never imports the
candidate, and the others only produce tensors and times.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner import errors
from tuner.build import Builder
from tuner.check import merge
from tuner.device import Device
from tuner.errors import TunerError, WorkerError
from tuner.measure import ratio_interval
from tuner.probes import Probe, thorough_probes
from tuner.problem import Accuracy
from tuner.template import Family
from tuner.trial import (
    Build,
    Candidate,
    Check,
    Finalist,
    Measurement,
    Outcome,
    Params,
    ProbeResult,
    Status,
    Value,
    from_json,
    to_json,
)
from tuner.worker import JobFailed, Reply, Worker, WorkerCrashed, WorkerTimeout

__all__ = [
    "Contender",
    "DeviceEvaluator",
    "Prover",
    "Task",
    "explained",
    "finalist",
    "new_worker",
]

ENTRY = "tuner.jobs:handle"
PREPARE_TIMEOUT_S = 300.0  # importing PyTorch; the float64 oracle of a large problem
SCREEN_TIMEOUT_S = 60.0  # one candidate, checked and measured
CALL_TIMEOUT_S = 300.0  # a finalist's probe; an exported file compiles in its first
ANCHOR_EVERY = 16  # candidates between two timings of the baseline
RACE_MARGIN = 1.1  # a candidate is stopped early when clearly slower than this times the best
BURST_S = 0.05  # of samples from one process before the next one's turn
MIN_ROUNDS = 8  # turns of each process
MIN_BURST = 3  # samples of a turn, whose median counts
MAX_WARM_UPS = 12  # turns of each process before the race, unless two in a row agree
WARM_UP_SAMPLES = 5
STEADY = 0.05  # relative difference of two medians that agree


@dataclass(frozen=True, slots=True)
class Task:
    """What every process of a run must know of the problem; JSON-able."""

    reference: str
    sizes: Mapping[str, int]
    device: str
    accuracy: str
    family: str
    arguments: str
    model_new: str

    @classmethod
    def of(
        cls, family: Family, reference: Path, sizes: Mapping[str, int], device: str, acc: Accuracy
    ) -> Task:
        """Collect a task from a family and what the config says."""
        return cls(
            str(reference),
            dict(sizes),
            device,
            acc.label,
            family.name,
            json.dumps([json.loads(to_json(a)) for a in family.arguments]),
            family.model_new,
        )

    def payload(self) -> dict[str, Any]:
        """Return the task as a job's payload."""
        return {name: getattr(self, name) for name in self.__slots__}


def new_worker(
    device: str,
    *,
    name: str = "",
    on_start: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
) -> Worker:
    """Return a worker whose children run `tuner.jobs`, with `env` on top of our environment."""
    # An exported file is built by ninja, which pip puts beside Python; an environment that was
    # not activated lacks that folder on its PATH.
    beside = Path(sys.executable).parent
    path = {"PATH": os.pathsep.join([str(beside), os.environ.get("PATH", os.defpath)])}
    return Worker(
        ENTRY,
        name=name or device,
        env={**path, **(env or {})},
        on_start=on_start,
        start_timeout_s=PREPARE_TIMEOUT_S,
    )


# ---- screening: what the search talks to ----------------------------------------------------


@dataclass(slots=True)
class _Pending:
    """A configuration on its way: rendered, and handed to the builders."""

    candidate_key: str
    candidate: Candidate | None = None
    build: Future[Build] | None = None
    seconds: dict[str, float] = field(default_factory=dict)


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
        self._keep = keep
        # On a CPU the builders pause while a candidate is timed.
        self._quiet = builder.paused if device.kind == "cpu" else nullcontext
        self._ahead = ahead or num_workers + 2
        payload = {**task.payload(), "screening_seed": seed}
        self._worker = new_worker(
            task.device, on_start=[("prepare", payload)], env=builder.environment
        )
        self._seen: dict[str, tuple[int, Outcome]] = {}
        self._num_since_anchor = 0
        self.baseline: Measurement | None = None

    @property
    def ahead(self) -> int:
        """How many submitted configurations keep the builders busy."""
        return self._ahead

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
            self._worker.start()
            return self._time_baseline()
        except JobFailed as failure:
            raise explained(failure) from failure

    def submit(self, params: Params) -> _Pending:
        """Render a configuration and hand it to the builders; does not wait."""
        start_s = time.perf_counter()
        candidate = self._family.render(params, self._facts)
        seconds = {"render": time.perf_counter() - start_s}
        return _Pending(candidate.key, candidate, self._builder.submit(candidate), seconds)

    def finish(self, pending: _Pending, number: int, best_us: float | None) -> Outcome:
        """Wait for a configuration's build, check it, time it; return what became of it."""
        assert pending.build is not None and pending.candidate is not None
        start_s = time.perf_counter()
        build = pending.build.result()
        seconds = {
            **pending.seconds,
            "build": build.seconds,
            "wait": time.perf_counter() - start_s,
        }
        self._keep(pending.candidate, build)
        if build.status is not Status.CORRECT:
            return Outcome(build.status, build.error, build, seconds=seconds)
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

    def _screen(
        self,
        candidate: Candidate,
        build: Build,
        best_us: float | None,
        seconds: dict[str, float],
    ) -> Outcome:
        assert build.artefact is not None
        payload = {
            "candidate": to_json(candidate),
            "artefact": build.artefact,
            "budget_s": self._screen_s,
            "max_noise": self._max_noise,
            "stop_above_us": None if best_us is None else best_us * RACE_MARGIN,
        }
        start_s = time.perf_counter()
        try:
            with self._quiet():
                if self._num_since_anchor >= ANCHOR_EVERY:
                    self._time_baseline()
                self._num_since_anchor += 1
                data = self._worker.call("screen", payload, timeout_s=SCREEN_TIMEOUT_S).data
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
        if self.baseline is not None:
            measurement = replace(measurement, anchor_us=self.baseline.latency_us)
        return Outcome(Status.CORRECT, "", build, check, measurement, seconds)

    def _time_baseline(self) -> Measurement:
        payload = {"budget_s": 4 * self._screen_s, "max_noise": self._max_noise}
        with self._quiet():
            reply = self._worker.call("time_baseline", payload, timeout_s=SCREEN_TIMEOUT_S)
        self.baseline = from_json(Measurement, json.dumps(reply.data["measurement"]))
        self._num_since_anchor = 0
        return self.baseline


def explained(failure: JobFailed) -> TunerError:
    """Return the error of ours that a job raised, or a WorkerError that quotes its traceback."""
    name = failure.error_type.rpartition(".")[2]
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TunerError) and kind is not errors.ConfigError:
        return kind(failure.message)
    return WorkerError(f"{failure.message}\n{failure.traceback}")


# ---- proof: finalists, exports, strangers ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to be proved: a built candidate, or a file that holds a ModelNew.

    `env` are the variables of its process: where what was built for it is found.
    """

    name: str
    load: Mapping[str, Any]
    is_deterministic: bool = True
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: Path, is_deterministic: bool) -> Contender:
        """Return a file as a contender; it is imported in the producer alone."""
        return cls(path.name, {"file": str(path.resolve())}, is_deterministic)

    @classmethod
    def of_candidate(
        cls,
        candidate: Candidate,
        build: Build,
        model_new: str,
        env: Mapping[str, str] | None = None,
    ) -> Contender:
        """Return a built candidate as a contender; `env` is `Builder.environment`."""
        load = {
            "candidate": to_json(candidate),
            "artefact": build.artefact,
            "model_new": model_new,
        }
        return cls(candidate.template, load, candidate.is_deterministic, dict(env or {}))


class Prover:
    """Checks and races contenders in fresh processes.

    One judge process holds the reference, the secret probes and the oracle, and never imports a
    contender; each contender has a process of its own, which is killed afterwards.
    """

    def __init__(self, task: Task, *, seed: int, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._task = task
        self._seed = seed
        self._timeout_s = timeout_s
        self._accuracy = Accuracy.parse(task.accuracy)

    def check(
        self, contender: Contender, on_probe: Callable[[ProbeResult], None] = lambda _: None
    ) -> Check:
        """Put every thorough probe to a contender; stops at the first rejection.

        A crash, a hang or an exit of the contender is a rejection with its reason.
        """
        results: list[ProbeResult] = []
        with ExitStack() as stack:
            judge, producer = self._started(stack, "judge", [contender])
            about = self._prepared(judge, is_timed=False)
            refusal = self._loaded(producer, contender, about)
            if refusal:
                return Check(False, self._accuracy.label, refusal, (), is_thorough=True)
            probes = thorough_probes(
                self._seed,
                about["num_rows"],
                is_deterministic=contender.is_deterministic,
                has_cuda=self._task.device.startswith("cuda"),
            )
            for probe in probes:
                results.append(self._asked(judge, producer, probe))
                on_probe(results[-1])
                if not results[-1].is_accepted:
                    break
        return merge(results, self._accuracy, is_thorough=True)

    def race(
        self, contenders: Sequence[Contender], *, num_processes: int, seconds: float
    ) -> list[list[list[float]]]:
        """Time the baseline and contenders in turn, in that many fresh sets of processes.

        Args:
            contenders: all must have been checked.
            num_processes: how often every process is started anew.
            seconds: of samples for each contender and set of processes.

        Returns:
            Samples in microseconds: [contender, the baseline first][process][round].

        Raises:
            WorkerError: a process failed; a checked contender should not.
        """
        samples: list[list[list[float]]] = [[] for _ in range(len(contenders) + 1)]
        for _ in range(num_processes):
            with ExitStack() as stack:
                racers = self._started(stack, "baseline", contenders)
                about = self._prepared(racers[0], is_timed=True)
                reply = self._call(racers[0], "timing_set", {})
                for racer, contender in zip(racers[1:], contenders, strict=True):
                    refusal = self._loaded(racer, contender, about)
                    if refusal:
                        raise WorkerError(f"{contender.name}: {refusal}")
                    self._call(racer, "take_timing_set", reply.data, reply.blobs)
                for lane, rounds in zip(samples, self._rounds(racers, seconds), strict=True):
                    lane.append(rounds)
        return samples

    def _started(
        self, stack: ExitStack, first: str, contenders: Sequence[Contender]
    ) -> list[Worker]:
        """Start `first`, which is ours, and a process for each contender.

        Side by side, since each imports PyTorch for seconds; no contender is loaded yet.
        """
        device = self._task.device
        own = [new_worker(device, name=c.name, env=c.env) for c in contenders]
        workers = [new_worker(device, name=first), *own]
        for worker in workers:
            stack.enter_context(worker)
        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(lambda worker: self._call(worker, "warm_up", self._where), workers))
        return workers

    @property
    def _where(self) -> dict[str, Any]:
        return {"device": self._task.device}

    def _rounds(self, racers: Sequence[Worker], seconds: float) -> list[list[float]]:
        """Let processes take turns; a round is one burst of samples from each."""

        def burst(racer: Worker, num_samples: int) -> list[float]:
            payload = {"num_samples": num_samples}
            samples: list[float] = self._call(racer, "time_model", payload).data["samples_us"]
            return samples

        # Warm up until two turns of each agree: allocators and huge pages settle slowly. The last
        # turn sets the burst's length: short, so that drift hits all alike.
        before = [0.0] * len(racers)
        for _ in range(MAX_WARM_UPS):
            start_s = time.perf_counter()
            now = [statistics.median(burst(racer, WARM_UP_SAMPLES)) for racer in racers]
            sample_s = (time.perf_counter() - start_s) / (WARM_UP_SAMPLES * len(racers))
            if all(abs(n - b) <= STEADY * n for n, b in zip(now, before, strict=True)):
                break
            before = now
        num_samples = max(MIN_BURST, min(20, round(BURST_S / sample_s)))
        num_rounds = max(MIN_ROUNDS, round(seconds / (num_samples * sample_s)))
        rounds: list[list[float]] = [[] for _ in racers]
        for number in range(num_rounds):
            order = list(range(len(racers)))
            for place in order if number % 2 == 0 else reversed(order):
                rounds[place].append(statistics.median(burst(racers[place], num_samples)))
        return rounds

    def _prepared(self, judge: Worker, *, is_timed: bool) -> dict[str, Any]:
        payload = {**self._task.payload(), "model_new": "", "is_timed": is_timed}
        return self._call(judge, "prepare", payload, timeout_s=PREPARE_TIMEOUT_S).data

    def _loaded(self, producer: Worker, contender: Contender, about: Mapping[str, Any]) -> str:
        """Load a contender into its process; return why that failed, or nothing."""
        payload = {
            "device": self._task.device,
            "accuracy": self._task.accuracy,
            "init_inputs": about["init_inputs"],
            **contender.load,
        }
        try:
            producer.call("load", payload, timeout_s=self._timeout_s)
        except (WorkerCrashed, WorkerTimeout) as error:
            return f"importing it: {error.reason}"
        except JobFailed as failure:
            return f"importing it: {failure.error_type.rpartition('.')[2]}: {failure.message}"
        return ""

    def _asked(self, judge: Worker, producer: Worker, probe: Probe) -> ProbeResult:
        nothing = float("nan")
        asked = self._call(judge, "ask", {"probe": to_json(probe)})
        try:
            answer = producer.call("answer", asked.data, asked.blobs, timeout_s=self._timeout_s)
        except (WorkerCrashed, WorkerTimeout, JobFailed) as error:
            reason = error.message if isinstance(error, JobFailed) else error.reason
            return ProbeResult(
                probe.name, nothing, nothing, nothing, nothing, False, f"{probe.name}: {reason}"
            )
        payload = {"probe": to_json(probe), **answer.data}
        try:
            reply = judge.call("judge", payload, answer.blobs, timeout_s=self._timeout_s)
        except JobFailed as failure:  # the answer was no answer
            reason = f"{probe.name}: unreadable answer: {failure.message}"
            return ProbeResult(probe.name, nothing, nothing, nothing, nothing, False, reason)
        return from_json(ProbeResult, json.dumps(reply.data["result"]))

    def _call(
        self,
        worker: Worker,
        job: str,
        payload: Mapping[str, Any],
        blobs: Sequence[Any] = (),
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Reply:
        try:
            return worker.call(job, dict(payload), blobs, timeout_s=timeout_s)
        except JobFailed as failure:
            raise explained(failure) from failure


def finalist(
    number: int, check: Check, lanes: Sequence[Sequence[Sequence[float]]] | None, lane: int
) -> Finalist:
    """Summarise one lane of a race against lane 0, the baseline.

    Args:
        number: the trial's number.
        check: the verdict of all probes.
        lanes: what `Prover.race` returned, None for a contender that did not race.
        lane: which of them is the contender's.
    """
    if lanes is None:
        return Finalist(number, check, error=check.reason)
    pairs = [
        list(zip(base, mine, strict=True))
        for base, mine in zip(lanes[0], lanes[lane], strict=True)
    ]
    rounds = [value for process in lanes[lane] for value in process]
    latency_us = statistics.median(rounds)
    spread = statistics.median(abs(value - latency_us) for value in rounds)
    return Finalist(
        number,
        check,
        ratio_interval(pairs),
        latency_us,
        statistics.median(value for process in lanes[0] for value in process),
        1.4826 * spread / latency_us,
    )
