"""Finalists, exports and strangers' files: checked in fresh processes.

A process judges and never imports a contender; it lives as long as the verifier, and keeps what it
expects of each probe. Every contender has a process of its own, which only produces tensors. Where
memory has room there are two of each, with half of the probes, and who is done takes the last ones
of the other: on a CPU, and for a GPU where the host has many cores.
What finds no memory beside other tuners is asked when these have given theirs up, by processes
in which none ran out.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from tuner.check.judge.verdict import merge
from tuner.check.probes.batches import Extent
from tuner.check.probes.probe import Modes, Probe
from tuner.check.probes.probes import thorough_probes
from tuner.check.probes.traits import Traits
from tuner.errors import TunerError
from tuner.evaluate.again import RACES, Query, Taken, in_order, parted, unjudged
from tuner.evaluate.asking import (
    Fewer,
    is_of_memory,
    lacks_memory,
    may_find_more,
    with_memory,
)
from tuner.evaluate.contender import CALL_TIMEOUT_S, QUIET, Contender, Unedited, loaded, started
from tuner.evaluate.forecast import costs_of, remaining_s
from tuner.evaluate.job_spec import PREPARE_TIMEOUT_S, JobSpec, asked, new_worker
from tuner.evaluate.needs import Needs, needs_of
from tuner.evaluate.opened import Opened
from tuner.evaluate.pair import Pair, side_by_side
from tuner.evaluate.worker import Reply, Worker
from tuner.machine.host import has_many_cores
from tuner.machine.turns import ALL, HALF, SOME, more_than, turns_of
from tuner.problem.accuracy import Accuracy
from tuner.trial import Check, ProbeResult, from_json

__all__ = ["Answered", "Verifier"]

PAIRS = 2  # of processes: most of a check is the host's work
FREE_SHARE = 1 / 2  # of it must be free beside other tuners for more than one pair


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
        num_pairs: of a judge and a contender's process at most; None: as this host can feed.

    Attributes:
        seconds: what the last whole check took, 0 before there was one.
        opened: processes for a contender that is not known yet.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        seed: int,
        timeout_s: float = CALL_TIMEOUT_S,
        num_pairs: int | None = None,
    ) -> None:
        self._spec = spec
        self._seed = seed
        self._timeout_s = timeout_s
        self._accuracy = Accuracy.parse(spec.accuracy)
        self._files = Unedited(spec)
        self._turns = turns_of(spec.device)
        self._is_gpu = spec.is_gpu
        if num_pairs is None:
            num_pairs = PAIRS if has_many_cores() or not self._is_gpu else 1
        self._judges = [
            new_worker(spec.device, name="judge", env=QUIET, is_ours=True)
            for _ in range(num_pairs)
        ]
        self.opened = Opened(env=QUIET)
        self._about: dict[str, Any] = {}
        self._needs = Needs(Extent(None), 0.0, 0.0)  # until a judge has measured them
        self._lock = threading.Lock()  # several contenders may be checked at a time
        self._closing = threading.Lock()  # whoever closes it waits until it is closed
        self.seconds = 0.0
        self._seconds: dict[str, float] = {}  # that each probe took, the last time
        self._fewer = Fewer()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the judges side by side: one that holds much of a GPU's memory takes seconds."""
        self.opened.close()
        with self._closing, ThreadPoolExecutor(len(self._judges)) as pool:
            list(pool.map(Worker.close, self._judges))

    def free(self) -> None:
        """Let judges that are not at work give up what they keep of a GPU's memory."""
        with self._lock:
            for judge in self._judges:
                if self._is_gpu and judge.is_alive and not self._turns.num_checks:
                    with suppress(TunerError):  # the next check starts another one
                        asked(judge, "free", {})

    def open_ahead(self) -> None:
        """Begin to start the processes of a check, where nobody else uses the GPU; no wait."""
        if self._is_gpu:
            self.opened.open_sets(self._spec, len(self._judges), 1)

    def prepare(self, num_judges: int | None = None) -> None:
        """Start so many judges, unless they are there: they load the reference.

        None: all, and one beside other tuners, which have room for no more.

        Raises:
            ProblemError: the reference does not work on this device.
        """
        payload = {**self._spec.payload(), "model_new": "", "is_timed": False}
        num_judges = num_judges or (1 if self._turns.has_others else len(self._judges))

        def prepared(judge: Worker) -> Reply:
            with self._turns.shared():  # it draws weights there, and calls the reference
                return asked(judge, "prepare", payload, timeout_s=PREPARE_TIMEOUT_S)

        with self._lock, ThreadPoolExecutor(len(self._judges)) as pool:
            judges = self._judges[:num_judges]
            ended = [judge for judge in judges if not (self._about and judge.is_alive)]
            for reply in pool.map(prepared, ended):
                if not self._about:
                    self._needs = needs_of(reply.data, is_gpu=self._is_gpu)
                self._about = reply.data
                self._files.imported(reply.data["beside"])

    def check(
        self,
        contender: Contender,
        on_probe: Callable[[Answered], None] = lambda _: None,
        timeout_s: float | None = None,
    ) -> Check:
        """Put every thorough probe to a contender; stops at the first rejection.

        A crash, a hang or an exit of the contender is a rejection with its reason. The probes on
        few rows come first. A file that says at which numbers of rows it takes its kernels is
        asked as it is, and at the other numbers once more by its kernels; one of several kernels
        also where one gives way to the next. `timeout_s` stands in for the verifier's own.
        """
        most_s = self._timeout_s if timeout_s is None else timeout_s
        notes: list[str] = []
        self._files.remember(contender)
        with self._turns.checking(self._needs.are_heavy), ExitStack() as stack:
            # What another tuner's check holds all memory for is waited for, not run into.
            start_pairs = functools.partial(self._pairs, stack, contender, most_s, notes)
            pairs, refusal = with_memory(self._turns, start_pairs, self._spec.memory_share)
            if refusal:
                return Check(False, self._accuracy.label, refusal, (), is_thorough=True)
            taken = pairs[0].taken()
            probes = self._probes(contender, taken)
            begun_s = time.monotonic()
            start_anew = functools.partial(self._start_anew, stack, contender, most_s)
            queries = taken.queries(probes, self._about["num_rows"])
            results = self._verdicts(pairs, queries, on_probe, start_anew)
            if all(result.is_accepted for result in results):
                self.seconds = time.monotonic() - begun_s
        edited = self._files.edited(contender)
        if edited:
            return Check(False, self._accuracy.label, edited, tuple(results), is_thorough=True)
        fewest = taken.fewest_rows(probes)
        verdict = merge(results, self._accuracy, is_thorough=True, fewest=fewest)
        unasked: list[str] = []
        if verdict.is_accepted:
            unasked = [*unjudged(probes), *self._fewer.notes(probes)]
            unasked += [RACES] * self._about["traits"]["updates_in_eval"]
        return replace(verdict, notes=(*notes, *verdict.notes, *unasked))

    def _verdicts(
        self,
        pairs: Sequence[Pair],
        queries: Sequence[Query],
        on_probe: Callable[[Answered], None],
        start_anew: Callable[[Pair], bool],
    ) -> list[ProbeResult]:
        """Return verdicts on the file as it is, then on kernels where it does not take them."""
        costs = self._costs(queries)
        first_s = 0.0  # when the first was answered
        found: list[ProbeResult] = []
        with closing(self._answers(pairs, queries, start_anew)) as answers:
            for number, result in enumerate(answers, 1):
                found.append(result)
                first_s = first_s or time.monotonic()
                left_s = remaining_s(costs, number, time.monotonic() - first_s)
                on_probe(Answered(result, number, len(costs), left_s))
        return in_order(found, queries)

    def _pairs(
        self, stack: ExitStack, contender: Contender, most_s: float, notes: list[str]
    ) -> tuple[list[Pair], str]:
        """Start processes that judge and answer; or say why the contender cannot be loaded."""
        most = self._num_pairs()

        def load(producer: Worker) -> str:
            noted = notes if producer is producers[0] else []
            refusal = loaded(producer, self._spec, contender, self._about, most_s, noted)
            return refusal or self._files.edited(contender)

        def pair(judge: Worker, producer: Worker) -> Pair:
            how = (self._turns, self._fewer, self._needs)
            made = Pair(judge, producer, *how, most_s=most_s, is_gpu=self._is_gpu)
            return stack.enter_context(closing(made))

        with ThreadPoolExecutor(1 + most) as pool:  # all of them get ready side by side
            ready = pool.submit(self.prepare, 1)
            producers = self.opened.opened(stack, [contender] * most)
            producers = producers or started(stack, self._spec, [contender] * most, env=QUIET)
            ready.result()
            most = min(most, self._num_pairs())
            ready = pool.submit(self.prepare, most)
            for surplus in producers[most:]:  # each has a GPU open, which takes memory
                surplus.kill()
            producers = producers[:most]
            refusals = [load(producers[0])]  # it may build for the others
            refusals += [] if any(refusals) else pool.map(load, producers[1:])
            if refusal := next(filter(None, refusals), ""):
                return [], refusal
            ready.result()
            self._fewer.num_rows = self._about["num_rows"]
            self._fewer.is_fixed = self._about["is_fixed"]
            return [*pool.map(pair, self._judges[:most], producers)], ""

    def _start_anew(
        self, stack: ExitStack, contender: Contender, most_s: float, pair: Pair
    ) -> bool:
        """Go on with fresh processes: in the old ones a library may keep another algorithm.

        Returns:
            False while another contender is checked as well, whose judge it is, too.
        """
        if self._turns.num_checks > 1:
            return False
        pair.end()
        (producer,) = started(stack, self._spec, [contender], env=QUIET)
        self.prepare(1)
        loaded(producer, self._spec, contender, self._about, most_s)  # or its next answer says why
        pair.go_on(producer)
        return True

    def _probes(self, contender: Contender, taken: Taken) -> list[Probe]:
        probes = thorough_probes(
            self._seed,
            self._about["num_rows"],
            modes=from_json(Modes, json.dumps(self._about["modes"])),
            is_deterministic=contender.is_deterministic,
            has_cuda=self._is_gpu,
            large_batch=max(self._spec.extra.values(), default=0),
            row_elements=float(self._about["row_elements"]),
            is_fixed=self._about["is_fixed"],
            traits=from_json(Traits, json.dumps(self._about["traits"])),
            further_rows=[*contender.further_rows, *taken.borders],
        )
        # Most faults show on few rows, for a hundredth of the time.
        ordered = [*probes[:1], *sorted(probes[1:], key=lambda p: p.batch is None)]
        # What needs most comes last: where some is lacking, libraries go on with what needs less.
        share, taken_of = self._needs.share, self._needs.taken
        return sorted(ordered, key=lambda p: (share(p), max(HALF, taken_of(p))))

    def _num_pairs(self) -> int:
        """Return how many pairs memory has room for now, a GPU's while they ask of few rows."""
        if not self._about:
            return len(self._judges)
        free, total = (float(self._about[name]) for name in ("free_bytes", "total_bytes"))
        if self._is_gpu and self._turns.has_others and free < FREE_SHARE * total:
            return 1
        return self._needs.num_pairs(len(self._judges), free)

    def _costs(self, queries: Sequence[Query]) -> list[float]:
        """Return seconds of each query: as the last time, or as is usual."""
        if self._seconds:
            return [self._seconds.get(query.name, 0.0) for query in queries]
        return costs_of([query.probe for query in queries], self._needs.extent)

    def _answers(
        self, pairs: Sequence[Pair], queries: Sequence[Query], start_anew: Callable[[Pair], bool]
    ) -> Generator[ProbeResult]:
        """Yield verdicts, until one is a rejection or a little longer.

        What may need much of a GPU's memory waits until other tuners leave as much, and one that
        found too little until they leave more; where that is all there is, it is asked with less.
        """
        seconds: dict[str, float] = {}
        to_ask = [*queries]
        # Waited for where the first of these found too little, which fresh processes are asked.
        least, can_start, is_rough = 0.0, True, False
        while to_ask:
            probes = [query.probe for query in to_ask]
            share, places = (least, [0]) if least else self._needs.next_of(probes)
            asked, rest = parted(to_ask, places)
            if least or share > SOME or self._needs.is_large(asked[0].probe):
                pairs = self._first_alone(pairs)
            with self._turns.memory(share):
                if least:
                    try:
                        can_start = start_anew(pairs[0])
                    except TunerError as error:
                        if not may_find_more(self._turns, share, error):
                            raise
                        least = more_than(share)
                        continue
                elif share == ALL:
                    pairs[0].free()
                is_strict = self._turns.are_taken and can_start and not is_rough
                how = (seconds, share, is_strict)
                if (found := (yield from self._asked(pairs, asked, *how))) is None:
                    return
                left, is_short = found
                self._give_up_memory(pairs)
            can_start |= self._turns.num_checks <= 1  # else old processes go on with what there is
            to_ask = [*left, *rest]
            least = more_than(share) if is_short else 0.0
            is_rough = is_short and share == ALL and not self._asks_less([q.probe for q in to_ask])
        self._seconds = {**self._seconds, **seconds}

    def _first_alone(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """End all pairs but the first, and return that one; a judge of other checks lives on."""
        for other in pairs[1:]:
            other.end(with_judge=self._turns.num_checks <= 1)
        return pairs[:1]

    def _asked(
        self,
        pairs: Sequence[Pair],
        queries: Sequence[Query],
        seconds: dict[str, float],
        share: float,
        is_strict: bool,
    ) -> Generator[ProbeResult, None, tuple[list[Query], bool] | None]:
        """Yield verdicts as `_answers`; return what is left to ask, None if rejected.

        That is what no memory was left for, which the second value says, or what gives way to a
        tuner that waits for memory.
        """
        is_short = False
        if len(pairs) == 1:
            is_alone = share > HALF or not self._needs.is_bounded(queries[0].probe)
            answers = pairs[0].answers(queries, seconds, is_alone=is_alone, is_strict=is_strict)
        else:
            answers = side_by_side(pairs, queries, seconds, is_strict=is_strict)
        answered: set[str] = set()
        is_rejected = False
        try:
            with closing(answers):
                for result in answers:
                    is_short = is_strict and lacks_memory(result)
                    if is_short:
                        break
                    answered.add(result.probe)
                    is_rejected |= not result.is_accepted
                    yield result
                    if self._turns.gives_way:
                        break
        except TunerError as error:
            is_short = is_strict and is_of_memory(error)
            if not is_short:
                raise
        return None if is_rejected else ([q for q in queries if q.name not in answered], is_short)

    def _asks_less(self, probes: Sequence[Probe]) -> bool:
        """Ask the first of these with less memory, and what would take as much, if that can be."""
        is_large = self._needs.is_large(self._fewer.asked(probes[0]))
        return is_large and self._fewer.limit(probes, self._needs.taken)

    def _give_up_memory(self, pairs: Sequence[Pair]) -> None:
        """Free what the judges keep for later contenders, where others use the memory, too."""
        if self._turns.has_others or self._turns.is_memory_wanted:
            for pair in pairs:
                pair.free()
