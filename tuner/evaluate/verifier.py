"""Finalists, exports and strangers' files: checked in fresh processes.

One process judges and never imports a contender; it lives as long as the verifier, and keeps what
it expects of each probe. Every contender has a process of its own, which only produces tensors.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from tuner.check.majority import by_majority, redrawn
from tuner.check.probe import Modes, Probe
from tuner.check.probes import thorough_probes
from tuner.check.traits import Traits
from tuner.check.verdict import merge
from tuner.errors import TunerError
from tuner.evaluate.asking import Asking, JudgeEnded, lacks_memory, shrunk
from tuner.evaluate.contender import CALL_TIMEOUT_S, QUIET, Contender, Unedited, loaded, started
from tuner.evaluate.forecast import costs_of, remaining_s
from tuner.evaluate.giving import can_lend, hand_over
from tuner.evaluate.task import PREPARE_TIMEOUT_S, Task, asked, new_worker
from tuner.evaluate.worker import JobFailed, Reply, Worker, WorkerCrashed, WorkerTimeout
from tuner.machine.turns import turns_of
from tuner.problem.accuracy import Accuracy
from tuner.trial import Check, ProbeResult, from_json
from tuner.wording import one_line

__all__ = ["Answered", "JudgeEnded", "Verifier"]

HELD_BYTES = 48  # of each number that a call takes and makes: float64, some six times
SHARE_OF_ONE = 1 / 3  # of a GPU's memory, beside which others have room


@dataclass(frozen=True, slots=True)
class Answered:
    """One probe of a check is answered: the `number`-th of `total`; about `left_s` to go."""

    result: ProbeResult
    number: int
    total: int
    left_s: float


class Verifier:
    """Puts every thorough probe to contenders; several threads may check one each.

    Args:
        task: the problem.
        seed: of the secret probes.
        timeout_s: seconds for each call of a contender, its import included.
    """

    def __init__(self, task: Task, *, seed: int, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._task = task
        self._seed = seed
        self._timeout_s = timeout_s
        self._accuracy = Accuracy.parse(task.accuracy)
        self._files = Unedited(task)
        self._turns = turns_of(task.device)
        self._judge = new_worker(task.device, name="judge", env=QUIET, is_ours=True)
        self._about: dict[str, Any] = {}
        self._lock = threading.Lock()  # several contenders may be checked at a time
        self._seconds: dict[str, float] = {}  # that each probe took, the last time
        self._fewer_rows: dict[str, int] = {}  # probes for whose own number memory ran out

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the judge."""
        self._judge.close()

    @property
    def seconds(self) -> float:
        """What all probes of the last whole check took, 0 before there was one."""
        return sum(self._seconds.values())

    def prepare(self) -> None:
        """Start the judge, unless it is there: it loads the reference.

        Raises:
            ProblemError: the reference does not work on this device.
        """
        with self._lock:
            if not self._about or not self._judge.is_alive:
                payload = {**self._task.payload(), "model_new": "", "is_timed": False}
                reply = asked(self._judge, "prepare", payload, timeout_s=PREPARE_TIMEOUT_S)
                self._about = reply.data

    def check(
        self,
        contender: Contender,
        on_probe: Callable[[Answered], None] = lambda _: None,
        timeout_s: float | None = None,
    ) -> Check:
        """Put every thorough probe to a contender; stops at the first rejection.

        A crash, a hang or an exit of the contender is a rejection with its reason. The probes on
        few rows come first. `timeout_s` stands in for the verifier's own.
        """
        most_s = self._timeout_s if timeout_s is None else timeout_s
        results: list[ProbeResult] = []
        notes: list[str] = []
        self._files.remember(contender)
        with ExitStack() as stack:
            with ThreadPoolExecutor(1) as pool:  # both processes get ready side by side
                ready = pool.submit(self.prepare)
                [producer] = started(stack, self._task, [contender], env=QUIET)
                ready.result()
            about = self._about
            refusal = loaded(producer, self._task, contender, about, most_s, notes)
            if refusal:
                return Check(False, self._accuracy.label, refusal, (), is_thorough=True)
            probes = self._probes(contender.is_deterministic)
            costs = self._costs(probes)
            first_s = 0.0  # when the first was answered
            ask = functools.partial(self._of_judge, self._judge.generation)
            lends = self._task.device.startswith("cuda") and can_lend(producer, ask, most_s)
            num_rows = about["num_rows"]
            asking = Asking(ask, self._turns, num_rows, self._fewer_rows, lends=lends)
            with closing(self._answers(producer, probes, asking, most_s, lends)) as answers:
                for number, result in enumerate(answers, 1):
                    results.append(result)
                    first_s = first_s or time.monotonic()
                    left_s = remaining_s(costs, number, time.monotonic() - first_s)
                    on_probe(Answered(result, number, len(probes), left_s))
                    if not result.is_accepted:
                        break
        edited = self._files.edited(contender)
        if edited:
            return Check(False, self._accuracy.label, edited, tuple(results), is_thorough=True)
        verdict = merge(results, self._accuracy, is_thorough=True)
        unasked = (
            [*_unjudged(probes), *shrunk(probes, self._fewer_rows)] if verdict.is_accepted else []
        )
        return replace(verdict, notes=(*notes, *verdict.notes, *unasked))

    def _probes(self, is_deterministic: bool) -> list[Probe]:
        probes = thorough_probes(
            self._seed,
            self._about["num_rows"],
            modes=from_json(Modes, json.dumps(self._about["modes"])),
            is_deterministic=is_deterministic,
            has_cuda=self._task.device.startswith("cuda"),
            large_batch=max(self._task.also.values(), default=0),
            row_elements=float(self._about["row_elements"]),
            traits=from_json(Traits, json.dumps(self._about["traits"])),
        )
        # Most faults show on few rows, for a hundredth of the time.
        first, rest = probes[:1], probes[1:]
        ordered = [*first, *sorted(rest, key=lambda p: p.batch is None)]
        return sorted(ordered, key=self._needs_all)

    def _needs_all(self, probe: Probe) -> bool:
        """Whether a probe may take so much of a GPU that others have no room beside it."""
        if not self._task.device.startswith("cuda"):
            return False
        own = self._about["num_rows"] or 1
        rows = (own if probe.batch is None else probe.batch) * probe.calls
        held_bytes = HELD_BYTES * rows * float(self._about["row_elements"])
        return held_bytes > SHARE_OF_ONE * float(self._about["total_bytes"])

    def _costs(self, probes: list[Probe]) -> list[float]:
        """Return seconds of each probe: as the last time, or as is usual."""
        if self._seconds:
            return [self._seconds.get(probe.name, 0.0) for probe in probes]
        is_gpu = self._task.device.startswith("cuda")
        row_elements = float(self._about["row_elements"])
        return costs_of(probes, self._about["num_rows"], row_elements, is_gpu)

    def _answers(
        self, producer: Worker, probes: Sequence[Probe], asking: Asking, most_s: float, lends: bool
    ) -> Generator[ProbeResult]:
        """Yield the verdict on each answer, until one is a rejection.

        Those that may need all of a GPU's memory wait until no other tuner holds much of it.
        """
        known: set[str] = set()  # weights that this producer has
        seconds: dict[str, float] = {}
        for needs_all, some in itertools.groupby(probes, key=self._needs_all):
            with self._turns.memory(needs_all):
                rest = (asking, seconds, known, most_s, lends)
                yield from self._answers_in_turn(producer, [*some], needs_all, *rest)
                if self._turns.is_memory_wanted:
                    asking.free()
        self._seconds = seconds

    def _answers_in_turn(
        self,
        producer: Worker,
        probes: Sequence[Probe],
        needs_all: bool,
        asking: Asking,
        seconds: dict[str, float],
        known: set[str],
        most_s: float,
        lends: bool,
    ) -> Generator[ProbeResult]:
        """Yield verdicts; note what each probe took.

        The next question is made while the contender answers the one before, unless the device's
        memory might not hold both.
        """

        def answer_to(probe: Probe, question: Reply) -> ProbeResult:
            with self._turns.shared():
                return self._answered(producer, probe, question, asking.ask, known, most_s, lends)

        with ThreadPoolExecutor(1) as pool:
            ahead: Future[Reply] | None = None
            for probe, following in zip(probes, (*probes[1:], None), strict=True):
                start_s = time.monotonic()
                question = asking.question_of(probe, ahead)
                ahead = None
                if following is not None and not needs_all:
                    ahead = pool.submit(asking.once, following)

                def answered(
                    draw: int, probe: Probe = probe, question: Reply = question
                ) -> ProbeResult:
                    drawn = redrawn(probe, draw)
                    result = answer_to(drawn, asking.question(drawn) if draw else question)
                    if lacks_memory(result) and producer.is_alive:
                        return asking.again(drawn, answer_to)
                    return result

                result = by_majority(answered)
                seconds[probe.name] = time.monotonic() - start_s
                yield result

    def _of_judge(
        self,
        generation: int,
        job: str,
        payload: Mapping[str, Any],
        blobs: Sequence[Any] = (),
    ) -> Reply:
        """Run a job in the judge of that generation; a later one knows nothing of this check.

        Raises:
            JudgeEnded: it ended, before the job or in it.
            TunerError: as `asked`.
        """
        if self._judge.is_alive and self._judge.generation == generation:
            try:
                return asked(self._judge, job, payload, blobs, timeout_s=CALL_TIMEOUT_S)
            except (WorkerCrashed, WorkerTimeout) as error:
                raise _judge_ended(error.reason) from error
        raise _judge_ended(self._judge.ending())

    def _answered(
        self,
        producer: Worker,
        probe: Probe,
        question: Reply,
        ask: Callable[..., Reply],
        known: set[str],
        most_s: float,
        lends: bool,
    ) -> ProbeResult:
        """Put a question to the contender; return the judge's verdict on the answer."""

        def refused(reason: str) -> ProbeResult:
            nothing = float("nan")
            numbers = (nothing, nothing, nothing, nothing)
            return ProbeResult(probe.name, *numbers, False, f"{probe.name}: {reason}")

        if not producer.is_alive:  # a fresh one would hold no module
            return refused(f"the module's process ended: {producer.ending()}")
        tokens: Mapping[str, str] = question.data["known"]
        missing = sorted({*tokens.values()} - known)
        refusal = ""
        try:
            if missing:
                weights = ask("weights", {"tokens": missing, "lends": lends})
                refusal = hand_over(weights, producer, ask, most_s)
                received = {"question": weights.data["question"]}
                producer.call("receive", received, weights.blobs, timeout_s=most_s)
                known.update(missing)
            refusal = refusal or hand_over(question, producer, ask, most_s)
            asks = {name: question.data[name] for name in ("question", "known")}
            asks["lends"] = lends
            answer = producer.call("answer", asks, question.blobs, timeout_s=most_s)
        except (WorkerCrashed, WorkerTimeout, JobFailed) as error:
            return refused(error.message if isinstance(error, JobFailed) else error.reason)
        if refusal:
            return refused(refusal)
        payload = {**answer.data, "ticket": question.data["ticket"]}
        try:
            reply = ask("judge", payload, answer.blobs)
        except JudgeEnded:
            raise
        except TunerError as failure:  # what was received is no answer
            cause = failure.__cause__
            said = cause.message if isinstance(cause, JobFailed) else str(failure)
            return refused(f"its answer was garbled: {one_line(said, 300)}")
        return from_json(ProbeResult, json.dumps(reply.data["result"]))


def _unjudged(probes: Sequence[Probe]) -> list[str]:
    """Name the probes whose numbers nobody can judge."""
    names = [probe.name for probe in probes if probe.is_random]
    if not names:
        return []
    return [
        f"numbers were not compared on {len(names)} of {len(probes)} probes, since the reference "
        f"draws random numbers in their mode: {', '.join(names)}"
    ]


def _judge_ended(how: str) -> JudgeEnded:
    return JudgeEnded(
        f"the judge ended: {how}. This is an error of the machine, not a verdict on the module. "
        "Next: see whether memory ran out, and whether another program ends processes; then "
        "ask again"
    )
