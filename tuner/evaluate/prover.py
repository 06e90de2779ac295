"""Finalists, exports and strangers' files: proved and raced, in fresh processes.

One process judges and never imports a contender; the others only produce tensors and times.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.check.majority import by_majority, redrawn
from tuner.check.probes import Probe, thorough_probes
from tuner.check.verdict import merge
from tuner.errors import WorkerError
from tuner.evaluate.measure import contradicted, ratio_interval
from tuner.evaluate.task import PREPARE_TIMEOUT_S, Task, explained, new_worker, too_fast
from tuner.evaluate.timers import BOUND_LAUNCH_US, USERS_LAUNCH_US
from tuner.evaluate.worker import JobFailed, Reply, Worker, WorkerCrashed, WorkerTimeout
from tuner.problem.accuracy import Accuracy
from tuner.trial import (
    Build,
    Candidate,
    Check,
    Compiled,
    Finalist,
    Interval,
    ProbeResult,
    from_json,
    to_json,
)

__all__ = ["Contender", "Prover", "Race", "compared_with_compiled", "finalist"]

CALL_TIMEOUT_S = 300.0  # a finalist's probe; an exported file compiles in its first
BURST_S = 0.05  # of samples from one process before the next one's turn
MIN_ROUNDS = 8  # turns of each process
MIN_BURST = 3  # samples of a turn, whose median counts
MAX_WARM_UPS = 12  # turns of each process before the race, unless two in a row agree
FEW_WARM_UPS = 2  # of processes that have raced before
WARM_UP_SAMPLES = 5
CROSS_CHECK_S = 0.03  # of calls in a row, for this process's clock
CROSS_CHECKS = 3  # times that the clocks must disagree before a contender is refused
CLOCK_US = 50.0  # what a process's clock need not see of a call on a CPU
SHARE_ELSEWHERE = 0.25  # of the samples, for a race on other values
STEADY = 0.05  # relative difference of two medians that agree


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to be proved: a built candidate, or a file that holds a ModelNew.

    `env` are the variables of its process: where what was built for it is found. What
    `is_ours` is raced without being judged.
    """

    name: str
    load: Mapping[str, Any]
    is_deterministic: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False

    @classmethod
    def of_file(cls, path: Path, is_deterministic: bool) -> Contender:
        """Return a file as a contender; it is imported in the producer alone."""
        return cls(path.name, {"file": str(path.resolve())}, is_deterministic)

    @classmethod
    def of_compiled(cls, task: Task, mode: str) -> Contender:
        """Return the reference, compiled by `torch.compile` in that mode."""
        load = {"reference": task.reference, "compile_mode": mode}
        return cls(f"torch.compile ({mode})", load, is_ours=True)

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


@dataclass(slots=True)
class Race:
    """What processes that took turns told of their times, the baseline in lane 0.

    `bursts` are samples in us, [lane][process][round][sample]. `race[lane]` is what counts of
    them, the median of each burst, [process][round]. `num_throttled` samples were dropped.
    `elsewhere` is the same race on other values, if that was asked for.
    """

    bursts: list[list[list[list[float]]]]
    num_throttled: int = 0
    elsewhere: Race | None = None

    def __getitem__(self, lane: int) -> list[list[float]]:
        return [[statistics.median(burst) for burst in rounds] for rounds in self.bursts[lane]]

    def __len__(self) -> int:
        return len(self.bursts)

    def __iter__(self) -> Iterator[list[list[float]]]:
        return (self[lane] for lane in range(len(self)))


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
        self._num_throttled = 0
        self._hashes = {task.reference: _sha256(task.reference)}

    def check(
        self, contender: Contender, on_probe: Callable[[ProbeResult], None] = lambda _: None
    ) -> Check:
        """Put every thorough probe to a contender; stops at the first rejection.

        A crash, a hang or an exit of the contender is a rejection with its reason.
        """
        results: list[ProbeResult] = []
        self._remember(contender)
        with ExitStack() as stack:
            judge, producer = self._started(stack, "judge", [contender])
            about = self._prepared(judge, is_timed=False)
            notes: list[str] = []
            refusal = self._loaded(producer, contender, about, notes)
            if refusal:
                return Check(False, self._accuracy.label, refusal, (), is_thorough=True)
            probes = thorough_probes(
                self._seed,
                about["num_rows"],
                is_deterministic=contender.is_deterministic,
                has_cuda=self._task.device.startswith("cuda"),
                large_batch=max(self._task.also.values(), default=0),
            )
            for probe in probes:
                results.append(self._asked_fairly(judge, producer, probe))
                on_probe(results[-1])
                if not results[-1].is_accepted:
                    break
        edited = self._edited(contender)
        if edited:
            return Check(False, self._accuracy.label, edited, tuple(results), is_thorough=True)
        verdict = merge(results, self._accuracy, is_thorough=True)
        return replace(verdict, notes=(*notes, *verdict.notes))

    def race(
        self,
        contenders: Sequence[Contender],
        *,
        num_processes: int,
        seconds: float,
        has_other_values: bool = False,
    ) -> Race:
        """Time the baseline and contenders in turn, in that many fresh sets of processes.

        They are timed on the reference's weights as it is constructed, and on its inputs.

        What a contender's process tells of its times is compared with this process's clock, and
        with the physical floor; one output of calls that this process timed is judged, in a set
        of processes that nobody can foresee.

        Args:
            contenders: all that are not ours must have been checked.
            num_processes: how often every process is started anew.
            seconds: of samples for each contender and set of processes.
            has_other_values: whether to race on random weights and normal inputs as
                well, for a shorter time.

        Raises:
            WorkerError: a process failed, or what it told cannot be believed; the message starts
                with the contender's name.
        """
        race = Race([[] for _ in range(len(contenders) + 1)])
        if has_other_values:
            race.elsewhere = Race([[] for _ in race])
        for contender in contenders:
            self._remember(contender)
        judged = [secrets.randbelow(num_processes) for _ in contenders]
        for number in range(num_processes):
            with ExitStack() as stack:
                racers = self._started(stack, "baseline", contenders)
                about = self._prepared(racers[0], is_timed=True)
                for racer, contender in zip(racers[1:], contenders, strict=True):
                    refusal = self._loaded(racer, contender, about)
                    if refusal:
                        raise WorkerError(f"{contender.name}: {refusal}")
                for racer in racers:
                    racer.rest_between_calls()  # no thread of one slows the turn of another
                self._give_timing_set(racers)
                for lane, rounds in zip(race.bursts, self._rounds(racers, seconds), strict=True):
                    lane.append(rounds)
                told = [statistics.median(lane[-1]) for lane in race]
                for place, contender in enumerate(contenders):
                    refusal = too_fast(told[place + 1], self._task.impossible_us)
                    if not refusal and judged[place] == number and not contender.is_ours:
                        is_bound_here = "file" not in contender.load
                        refusal = self._cross_check(racers, told, place + 1, is_bound_here)
                    if refusal:
                        raise WorkerError(f"{contender.name}: {refusal}")
                if race.elsewhere is not None:
                    self._give_timing_set(racers, has_other_values=True)
                    seconds_elsewhere = seconds * SHARE_ELSEWHERE
                    rounds_elsewhere = self._rounds(racers, seconds_elsewhere, FEW_WARM_UPS)
                    for lane, rounds in zip(race.elsewhere.bursts, rounds_elsewhere, strict=True):
                        lane.append(rounds)
                for contender in contenders:
                    edited = self._edited(contender)
                    if edited:
                        raise WorkerError(f"{contender.name}: {edited}")
        race.num_throttled = self._num_throttled
        return race

    def _give_timing_set(self, racers: Sequence[Worker], has_other_values: bool = False) -> None:
        """Let the baseline's process share its weights and inputs with the others."""
        asked = {"has_other_values": has_other_values}
        reply = self._call(racers[0], "timing_set", asked)
        for racer in racers[1:]:
            self._call(racer, "take_timing_set", reply.data, reply.blobs)

    def _remember(self, contender: Contender) -> None:
        """Note a contender's file as it is before anything of it has run."""
        path = str(contender.load.get("file", self._task.reference))
        self._hashes.setdefault(path, _sha256(path))

    def _edited(self, contender: Contender) -> str:
        """Return which file is another now than before a contender ran, or nothing.

        What was proved is what was read; the next process would read another reference.
        """
        for path in (self._task.reference, str(contender.load.get("file", ""))):
            if path and _sha256(path) != self._hashes[path]:
                return f"{path} was rewritten while it was being proved"
        return ""

    def _cross_check(
        self, racers: Sequence[Worker], told: Sequence[float], lane: int, is_bound_here: bool
    ) -> str:
        """Return why the times that a contender told cannot be true, or its output is wrong.

        A machine that does other work can be slow at any moment: the contender is asked for times
        again right before and after the calls that this process times, the slowest counts, and
        the clocks must disagree every time. One that lies tells the same whenever it is asked.

        Args:
            racers: all processes of this set, the baseline's first.
            told: the median in us that each of them told in the race.
            lane: which of them is the contender's.
            is_bound_here: whether its launches are our own binding's, in Python.
        """
        host_us = BOUND_LAUNCH_US if is_bound_here else USERS_LAUNCH_US
        allowed_us = host_us if self._task.device.startswith("cuda") else CLOCK_US
        refusal = ""
        for _ in range(CROSS_CHECKS):
            slowdown = self._wall_us(racers[0], told[0]) / told[0]
            before = statistics.median(self._burst(racers[lane], MIN_BURST))
            wall_us = self._wall_us(racers[lane], told[lane])
            after = statistics.median(self._burst(racers[lane], MIN_BURST))
            slowest = max(told[lane], before, after)
            refusal = contradicted(slowest, wall_us, slowdown=slowdown, allowed_us=allowed_us)
            if not refusal:
                break
        return refusal or self._timed_output(racers[0], racers[lane])

    def _wall_us(self, racer: Worker, latency_us: float) -> float:
        """Return the time of one call in a row of calls, by this process's clock."""

        def seconds(count: int) -> float:
            times = []
            for _ in range(2):  # what else the machine does makes one of them late, never early
                start_s = time.perf_counter()
                self._call(racer, "repeat", {"num_calls": count})
                times.append(time.perf_counter() - start_s)
            return min(times)

        # As many as should take long enough; fewer where they do, whatever the process told.
        empty_s = seconds(0)
        most = max(1, round(CROSS_CHECK_S * 1e6 / max(latency_us, 1.0)))
        num_calls = min(most, 16)
        while num_calls < most and seconds(num_calls) - empty_s < CROSS_CHECK_S:
            num_calls = min(most, 16 * num_calls)
        return max(0.0, seconds(num_calls) - empty_s) * 1e6 / num_calls

    def _timed_output(self, judge: Worker, racer: Worker) -> str:
        """Judge the last output of calls that this process has just timed."""

        def ask(draw: int) -> ProbeResult:
            if draw:
                self._call(racer, "repeat", {"num_calls": 1})
            answer = self._call(racer, "timed_output", {})
            verdict = self._call(judge, "judge_timed", answer.data, answer.blobs).data["result"]
            return from_json(ProbeResult, json.dumps(verdict))

        return by_majority(ask).reason

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

    def _burst(self, racer: Worker, num_samples: int) -> list[float]:
        data = self._call(racer, "time_model", {"num_samples": num_samples}).data
        self._num_throttled += data["num_throttled"]
        samples: list[float] = data["samples_us"]
        return samples

    def _rounds(
        self, racers: Sequence[Worker], seconds: float, max_warm_ups: int = MAX_WARM_UPS
    ) -> list[list[list[float]]]:
        """Let processes take turns; a round is one burst of samples from each."""
        # Warm up until two turns of each agree: allocators and huge pages settle slowly. The last
        # turn sets the burst's length: short, so that drift hits all alike.
        before = [0.0] * len(racers)
        for _ in range(max_warm_ups):
            start_s = time.perf_counter()
            now = [statistics.median(self._burst(racer, WARM_UP_SAMPLES)) for racer in racers]
            sample_s = (time.perf_counter() - start_s) / (WARM_UP_SAMPLES * len(racers))
            if all(abs(n - b) <= STEADY * n for n, b in zip(now, before, strict=True)):
                break
            before = now
        num_samples = max(MIN_BURST, min(20, round(BURST_S / sample_s)))
        num_rounds = max(MIN_ROUNDS, round(seconds / (num_samples * sample_s)))
        rounds: list[list[list[float]]] = [[] for _ in racers]
        for number in range(num_rounds):
            order = list(range(len(racers)))
            for place in order if number % 2 == 0 else reversed(order):
                rounds[place].append(self._burst(racers[place], num_samples))
        return rounds

    def _prepared(self, judge: Worker, *, is_timed: bool) -> dict[str, Any]:
        payload = {**self._task.payload(), "model_new": "", "is_timed": is_timed}
        return self._call(judge, "prepare", payload, timeout_s=PREPARE_TIMEOUT_S).data

    def _loaded(
        self,
        producer: Worker,
        contender: Contender,
        about: Mapping[str, Any],
        notes: list[str] | None = None,
    ) -> str:
        """Load a contender into its process; return why that failed, or nothing.

        What its text tells is added to `notes`.
        """
        payload = {
            "device": self._task.device,
            "accuracy": self._task.accuracy,
            "init_inputs": about["init_inputs"],
            "sizes": about["sizes"],
            **contender.load,
        }
        try:
            told = producer.call("load", payload, timeout_s=self._timeout_s).data
            if notes is not None:
                notes += [str(note) for note in told["notes"]]
        except (WorkerCrashed, WorkerTimeout) as error:
            return f"importing it: {error.reason}"
        except JobFailed as failure:
            return f"importing it: {failure.error_type.rpartition('.')[2]}: {failure.message}"
        return ""

    def _asked_fairly(self, judge: Worker, producer: Worker, probe: Probe) -> ProbeResult:
        return by_majority(lambda draw: self._asked(judge, producer, redrawn(probe, draw)))

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


def _sha256(path: str) -> str:
    """Return the hash of a file, nothing where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def finalist(number: int, check: Check, race: Race | None, lane: int) -> Finalist:
    """Summarise one lane of a race against lane 0, the baseline.

    Args:
        number: the trial's number.
        check: the verdict of all probes.
        race: what `Prover.race` returned, None for a contender that did not race.
        lane: which of them is the contender's.
    """
    if race is None:
        return Finalist(number, check, error=check.reason)
    baseline, own, elsewhere = race[0], race[lane], race.elsewhere
    rounds = [value for process in own for value in process]
    latency_us = statistics.median(rounds)
    spread = statistics.median(abs(value - latency_us) for value in rounds)
    return Finalist(
        number,
        check,
        _ratio(baseline, own),
        latency_us,
        statistics.median(value for process in baseline for value in process),
        1.4826 * spread / latency_us,
        samples_us=_frozen(race.bursts[lane]),
        baseline_samples_us=_frozen(race.bursts[0]),
        num_throttled=race.num_throttled,
        elsewhere=None if elsewhere is None else _ratio(elsewhere[0], elsewhere[lane]),
    )


def compared_with_compiled(mode: str, race: Race) -> Compiled:
    """Summarise a race of the baseline, the exported file and torch.compile, in that order."""
    baseline, own, compiled = race
    return Compiled(
        mode,
        interval=_ratio(baseline, compiled),
        ours=_ratio(compiled, own),
        latency_us=statistics.median(value for process in compiled for value in process),
    )


def _ratio(slow: list[list[float]], fast: list[list[float]]) -> Interval:
    """Return the interval of slow / fast of two lanes, [process][round] in us."""
    return ratio_interval([list(zip(s, f, strict=True)) for s, f in zip(slow, fast, strict=True)])


def _frozen(lane: list[list[list[float]]]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    return tuple(tuple(tuple(burst) for burst in rounds) for rounds in lane)
