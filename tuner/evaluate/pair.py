"""A judge and a contender's process, between which questions and answers go."""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from math import nan
from typing import Any
from zlib import crc32

from tuner.check.judge.refusals import unread
from tuner.check.probes.majority import by_majority, redrawn
from tuner.check.probes.probe import Probe
from tuner.errors import TunerError
from tuner.evaluate.again import Query, Taken
from tuner.evaluate.asking import Asking, Fewer, JudgeEnded, lacks_memory
from tuner.evaluate.contender import CALL_TIMEOUT_S
from tuner.evaluate.giving import hand_over, lender_of
from tuner.evaluate.job_spec import asked
from tuner.evaluate.needs import Needs
from tuner.evaluate.worker import JobFailed, Reply, Worker, WorkerCrashed, WorkerTimeout
from tuner.machine.turns import Turns
from tuner.trial import ProbeResult, from_json
from tuner.wording import one_line

__all__ = ["Pair", "Shares", "side_by_side"]


class Pair:
    """Puts probes to one process of a contender, and lets one judge give the verdicts.

    Args:
        judge: has loaded the reference.
        producer: has loaded the contender.
        turns: of the tuners on this device.
        fewer: notes the probes for which memory ran out.
        needs: what probes take of a GPU's memory; what they took is noted there.
        most_s: seconds for each call of the contender.
        is_gpu: whether the processes may lend each other memory.
    """

    def __init__(
        self,
        judge: Worker,
        producer: Worker,
        turns: Turns,
        fewer: Fewer,
        needs: Needs,
        *,
        most_s: float,
        is_gpu: bool,
    ) -> None:
        self._judge = judge
        self._turns = turns
        self._most_s = most_s
        self._is_gpu = is_gpu
        self._fewer, self._needs = fewer, needs
        self._judge_bytes = 0.0  # that the judge took for the question before
        takes_much = needs.is_large
        self._asking = Asking(self._ask, self._free_contender, turns, fewer, takes_much)
        self._lender = ""  # the contender's name, for what the judge has open of its memory
        self.go_on(producer)

    def go_on(self, producer: Worker) -> None:
        """Go on with a process that has loaded the contender, and with the judge as it is now."""
        self.close()
        self._producer = producer
        self._generation = self._judge.generation
        self._known: set[str] = set()  # weights that this producer has
        if self._is_gpu:
            self._lender = lender_of(producer, self._ask, self._most_s, is_staged=True)
        self._asking.lends = bool(self._lender)
        self._goes: tuple[bool, int | None] = (False, None)  # by kernels at all rows, which one

    def close(self) -> None:
        """Let the judge close what it has open of the contender's memory."""
        name, self._lender = self._lender, ""
        if name:
            with suppress(TunerError):  # it ended
                self._ask("give_back", {"name": name})

    def free(self) -> None:
        """Let both processes free what they can."""
        self._asking.free()

    def _free_contender(self, held: Sequence[str] | None = None) -> None:
        """Let the contender's process free what it can, if there is one.

        With `held` these are the weights that later questions may refer to: it forgets the others.
        """
        forgotten = set() if held is None else self._known.difference(held)
        if self._producer.is_alive and (held is None or forgotten):
            with suppress(WorkerCrashed, WorkerTimeout, JobFailed):  # its next call says so
                asks = {"forget": sorted(forgotten)}
                self._producer.call("free", asks, timeout_s=self._most_s)
                self._known -= forgotten

    def end(self, *, with_judge: bool = True) -> None:
        """End both processes, so that others have their memory; a judge may be started again.

        Without the judge, which other checks ask as well, that gives up what it keeps.
        """
        self._producer.kill()
        if with_judge:
            self._judge.kill()
        else:
            with suppress(TunerError):  # who asks it says so
                self._ask("free", {})

    def taken(self) -> Taken:
        """Return at which numbers of rows the contender says that it takes which kernels."""
        found = self._reported("rows_taken")
        return Taken(found.get("rows", {}), found.get("kernels", {}))

    def _go(self, query: Query) -> None:
        """Let the file take its kernels as a query says."""
        goes = (query.is_by_kernels, query.kernel)
        if goes != self._goes and self._producer.is_alive:  # who is not refuses the query
            more = {"kernel": query.kernel} if query.is_by_kernels else {}
            self._reported("take_all_rows" if query.is_by_kernels else "take_own_rows", **more)
            self._goes = goes

    def _reported(self, job: str, **payload: Any) -> dict[str, Any]:
        try:
            return self._producer.call(job, payload, timeout_s=self._most_s).data
        except (WorkerCrashed, WorkerTimeout, JobFailed):
            return {}  # the next question tells why

    def answers(
        self,
        queries: Iterable[Query],
        seconds: dict[str, float],
        *,
        is_alone: bool,
        is_strict: bool = False,
    ) -> Generator[ProbeResult, None, bool]:
        """Yield the verdict on each answer, until one is a rejection; note what each query took.

        The next question is made while the contender, which has been given the one before,
        answers that, unless each may fill the device's memory (`is_alone`); what the judge
        expects of a probe it computes once for the queries of it that follow each other. With
        `is_strict` nothing is done about memory that ran out: what lacked it is asked of fresh
        processes.

        Returns:
            Whether one was a rejection.

        Raises:
            JudgeEnded: the judge ended.
            TunerError: the reference fails.
        """
        self._asking.is_strict = is_strict
        ahead: Future[Reply] | None = None
        with ThreadPoolExecutor(1) as pool:
            try:
                for query, following, later in _with_following(queries):
                    start_s = time.monotonic()
                    probe, is_kept = query.probe, query.has_same_probe(following)
                    question = self._asking.question_of(probe, ahead, is_kept)
                    ahead = None
                    self._go(query)

                    def ask_ahead(
                        next_: Query | None = following, later: Query | None = later
                    ) -> None:
                        nonlocal ahead
                        is_over = next_ is None or is_alone or self._turns.gives_way
                        if next_ is not None and not is_over and ahead is None:
                            is_kept = next_.has_same_probe(later)
                            ahead = pool.submit(self._asking.once, next_.probe, is_kept)

                    def answered(
                        draw: int, probe: Probe = probe, question: Reply = question
                    ) -> ProbeResult:
                        drawn = redrawn(probe, draw)
                        asks = self._asking.question(drawn) if draw else question
                        result = self._answer_to(drawn, asks, ask_ahead)
                        if not is_strict and lacks_memory(result) and self._producer.is_alive:
                            return self._asking.again(drawn, self._answer_to)
                        return result

                    result = query.named(by_majority(answered))
                    seconds[query.name] = time.monotonic() - start_s
                    yield result
                    if not result.is_accepted:
                        return True
            finally:  # also where whoever asks stops: the judge holds gigabytes for a question
                with suppress(TunerError):  # there is none, and nobody asks any more
                    if ahead is not None:
                        self._withdraw(ahead.result())
        return False

    def _withdraw(self, question: Reply) -> None:
        """Let the judge give up a question that nobody answers."""
        self._ask("withdraw", {name: question.data[name] for name in ("ticket", "rooms")})

    def _ask(self, job: str, payload: Mapping[str, Any], blobs: Sequence[Any] = ()) -> Reply:
        """Run a job in the judge; one that was started later knows nothing of this check.

        Raises:
            JudgeEnded: it ended, before the job or in it.
            TunerError: as `asked`.
        """
        if self._judge.is_alive and self._judge.generation == self._generation:
            try:
                return asked(self._judge, job, payload, blobs, timeout_s=CALL_TIMEOUT_S)
            except (WorkerCrashed, WorkerTimeout) as error:
                raise _judge_ended(error.reason) from error
        raise _judge_ended(self._judge.ending())

    def _answer_to(
        self, probe: Probe, question: Reply, on_given: Callable[[], None] = lambda: None
    ) -> ProbeResult:
        """Put a question to the contender; return the judge's verdict on the answer.

        `on_given` is called when the judge has nothing more to do until there is an answer. The
        device is let go of after each step: who waits to time something waits for one step.
        """
        producer, most_s = self._producer, self._most_s

        def refused(reason: str) -> ProbeResult:
            self._withdraw(question)
            return ProbeResult(probe.name, nan, nan, nan, nan, False, f"{probe.name}: {reason}")

        if not producer.is_alive:  # a fresh one would hold no module
            return refused(f"the module's process ended: {producer.ending()}")
        asks = {name: question.data[name] for name in ("question", "known")}
        asks |= {"lends": self._asking.lends, "is_strict": self._asking.is_strict}
        try:
            with self._turns.shared():
                refusal = self._given(question)
            on_given()
            with self._turns.shared():
                answer = producer.call("answer", asks, question.blobs, timeout_s=most_s)
        except (WorkerCrashed, WorkerTimeout, JobFailed) as error:
            return refused(error.message if isinstance(error, JobFailed) else error.reason)
        if refusal:
            return refused(refusal)
        contender_bytes = answer.data.pop("used_bytes", 0)
        asks = {"ticket": question.data["ticket"], "lender": self._lender}
        try:
            with self._turns.shared():
                reply = self._ask("judge", answer.data | asks, answer.blobs)
        except JudgeEnded:
            raise
        except TunerError as failure:  # what was received is no answer
            cause = failure.__cause__
            said = cause.message if isinstance(cause, JobFailed) else str(failure)
            return refused(unread(one_line(said, 300)))
        self._note(probe, contender_bytes, float(reply.data["used_bytes"]))
        return from_json(ProbeResult, json.dumps(reply.data["result"]))

    def _given(self, question: Reply) -> str:
        """Give the contender a question's large tensors, and weights that it lacks.

        Returns:
            Why what it lent for them cannot be used, or nothing.
        """
        producer, most_s = self._producer, self._most_s
        missing = sorted({*question.data["known"].values()} - self._known)
        refusal = ""
        if missing:
            weights = self._ask("weights", {"tokens": missing, "lends": self._asking.lends})
            refusal = hand_over(weights, producer, self._ask, most_s, self._lender)
            forgotten = self._known.difference(weights.data["held"])
            received = {"question": weights.data["question"], "forget": sorted(forgotten)}
            self._known -= forgotten
            producer.call("receive", received, weights.blobs, timeout_s=most_s)
            self._known.update(missing)
        return refusal or hand_over(question, producer, self._ask, most_s, self._lender)

    def _note(self, probe: Probe, contender_bytes: object, judge_bytes: float) -> None:
        """Note what a question took; a contender can say anything of itself.

        A judge may have made this question before it was asked for the last one's verdict; which
        of several contenders' questions it took memory for cannot be said.
        """
        most_bytes = max(self._judge_bytes, judge_bytes)
        self._judge_bytes = judge_bytes
        if type(contender_bytes) is not int or self._turns.num_checks > 1:
            return
        if 0 <= contender_bytes <= self._needs.total_bytes:
            self._needs.note(self._fewer.asked(probe), most_bytes + contender_bytes)


class Shares:
    """Queries by the pair that answers them: of so many pairs a probe has always the same one.

    For a judge keeps what it expects for the next contender. A pair that has none left takes
    another's last ones.
    """

    def __init__(self, queries: Sequence[Query], num_pairs: int) -> None:
        self._left: list[deque[list[Query]]] = [deque() for _ in range(num_pairs)]
        self._lock = threading.Lock()
        for name, same in itertools.groupby(queries, key=lambda query: query.probe.name):
            self._left[crc32(name.encode()) % num_pairs].append([*same])

    def of(self, place: int) -> Iterator[Query]:
        """Yield what a pair answers, those of one probe together, until there is nothing left."""
        while True:
            with self._lock:
                own, longest = self._left[place], max(self._left, key=len)
                taken = own.popleft() if own else longest.pop() if longest else None
            if taken is None:
                return
            yield from taken


def _with_following(
    queries: Iterable[Query],
) -> Iterator[tuple[Query, Query | None, Query | None]]:
    """Yield each with the next two, None where there is none."""
    left = iter(queries)
    query, following = next(left, None), next(left, None)
    while query is not None:
        later = next(left, None)
        yield query, following, later
        query, following = following, later


def side_by_side(
    pairs: Sequence[Pair], queries: Sequence[Query], seconds: dict[str, float], *, is_strict: bool
) -> Generator[ProbeResult, None, bool]:
    """Yield verdicts as they come of pairs that have a share of the probes each.

    After a rejection each pair answers what it has been asked, which may be an earlier probe.

    Returns:
        Whether one was a rejection.

    Raises:
        JudgeEnded, TunerError: as `Pair.answers`.
    """
    found: queue.SimpleQueue[ProbeResult | BaseException | None] = queue.SimpleQueue()
    is_over = threading.Event()
    shares = Shares(queries, len(pairs))

    def put(pair: Pair, place: int) -> None:
        try:
            given = pair.answers(shares.of(place), seconds, is_alone=False, is_strict=is_strict)
            with closing(given) as answers:
                for result in answers:
                    found.put(result)
                    if is_over.is_set():
                        break
        except BaseException as error:
            found.put(error)
        finally:
            found.put(None)

    with ThreadPoolExecutor(len(pairs)) as pool:
        for place, pair in enumerate(pairs):
            pool.submit(put, pair, place)
        try:
            num_ended = 0
            while num_ended < len(pairs):
                item = found.get()
                if item is None:
                    num_ended += 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    if not item.is_accepted:
                        is_over.set()
                    yield item
            return is_over.is_set()
        finally:
            is_over.set()


def _judge_ended(how: str) -> JudgeEnded:
    return JudgeEnded(
        f"the judge ended: {how}. This is an error of the machine, not a verdict on the module. "
        "Next: see whether memory ran out, and whether another program ends processes; then "
        "ask again"
    )
