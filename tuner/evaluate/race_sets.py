"""The processes of a race, set after set: started ahead, loaded, given what they are timed on."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from tuner.errors import WorkerError
from tuner.evaluate.contender import CALL_TIMEOUT_S, Contender, loaded, started
from tuner.evaluate.giving import hand_over, lender_of
from tuner.evaluate.job_spec import PREPARE_TIMEOUT_S, JobSpec, asked, explained
from tuner.evaluate.opened import Opened
from tuner.evaluate.worker import JobFailed, Reply, Worker
from tuner.problem.timed_data import GIVEN

__all__ = ["RaceSets", "Ready", "raise_if"]

NONE: Mapping[str, list[Worker]] = MappingProxyType({})


class Ready(Opened):
    """Processes of a race that were started before it; sets take them out.

    Attributes:
        loaded: those of `RaceSets.kept_ready`, by their contender's name.
    """

    def __init__(self, loaded: Mapping[str, list[Worker]] = NONE) -> None:
        super().__init__("baseline")
        self.loaded = dict(loaded)


class RaceSets:
    """Sets of fresh processes: of the baseline first, then one of each contender.

    Args:
        spec: the problem.
        ready: processes that were started before.

    Attributes:
        lends: whether processes can write into each other's memory, once something was given.
    """

    def __init__(self, spec: JobSpec, ready: Ready | None = None) -> None:
        self._spec = spec
        self._ready = ready or Ready()
        self._loaded: set[Worker] = set()  # of those that were ready
        self._about: dict[str, Any] = {}  # the problem, as the baseline's process prepared it
        self.lends = False
        self._is_lending_known = not spec.is_gpu

    def each(
        self, contenders: Sequence[Contender], num_sets: int, lanes: Sequence[int]
    ) -> Generator[tuple[int, list[Worker]], None, None]:
        """Yield sets of processes that have loaded what they race.

        A set is started while the one before it loads, and ends while the next one does: nothing
        starts or ends while others race. Who wants more than `num_sets` waits until each further
        one has started. `lanes` says at each set who is in it, and may have become shorter.
        """

        def begun(lanes: Sequence[int]) -> tuple[ExitStack, list[int], list[Worker]]:
            with ExitStack() as stack:
                ready = {n: w for n in lanes if (w := self._taken(stack, contenders[n - 1]))}
                others = [lane for lane in lanes if lane not in ready]
                fresh = [contenders[lane - 1] for lane in others]
                racers = self._ready.opened(stack, fresh)
                racers = racers or started(stack, self._spec, fresh, "baseline")
                return stack.pop_all(), [0, *others, *ready], [*racers, *ready.values()]

        with ThreadPoolExecutor(2) as pool:
            following = pool.submit(begun, list(lanes))
            ended: Future[None] = pool.submit(ExitStack().close)  # of the set before
            try:
                for number in itertools.count():
                    if number >= num_sets:
                        following = pool.submit(begun, list(lanes))
                    stack, places, racers = following.result()
                    try:
                        if number + 1 < num_sets:
                            following = pool.submit(begun, list(lanes))
                        racers = [racers[places.index(lane)] for lane in (0, *lanes)]
                        self._get_ready(racers, [contenders[lane - 1] for lane in lanes])
                        following.exception()  # waits
                        ended.result()
                        yield number, racers
                    finally:
                        ended = pool.submit(stack.close)
            finally:
                if not following.exception():
                    following.result()[0].close()

    def kept_ready(self, stack: ExitStack, contender: Contender, number: int) -> list[Worker]:
        """Load one that is ours in that many processes, and call it once in each.

        The first is called before the others, which find on the disk what it compiled.

        Args:
            stack: ends these processes.
            contender: that is to be raced.
            number: of sets of processes.

        Raises:
            WorkerError: that failed.
        """

        def call_once(racer: Worker) -> None:
            asked(racer, "repeat", {"num_calls": 1})

        racers = started(stack, self._spec, [contender] * number)
        with ExitStack() as own:
            (baseline,) = started(own, self._spec, [], "baseline")
            self._get_ready([baseline, *racers], [contender] * number)
            for some in (racers[:1], racers[1:]):
                if some:
                    self.give([baseline, *some])
                    with ThreadPoolExecutor(len(some)) as pool:
                        list(pool.map(call_once, some))
        for racer in racers:
            asked(racer, "give_up_timing_set", {})
        return racers

    def _taken(self, stack: ExitStack, contender: Contender) -> Worker | None:
        """Take a process out of those that have loaded a contender; None if none is left."""
        of_it = self._ready.loaded.get(contender.name, [])
        while of_it:
            worker = of_it.pop(0)
            stack.callback(worker.close)
            if worker.is_alive:
                self._loaded.add(worker)
                return worker
        return None

    def _get_ready(self, racers: Sequence[Worker], contenders: Sequence[Contender]) -> None:
        """Let the baseline's process load the reference, and each other one its contender."""
        payload = {**self._spec.payload(), "model_new": "", "is_timed": True}

        def prepare() -> dict[str, Any]:
            return asked(racers[0], "prepare", payload, timeout_s=PREPARE_TIMEOUT_S).data

        def load(racer: Worker, contender: Contender) -> str:
            if racer in self._loaded:
                return ""
            return loaded(racer, self._spec, contender, self._about, CALL_TIMEOUT_S)

        with ThreadPoolExecutor(len(racers)) as pool:
            prepared = pool.submit(prepare)
            if not self._about:
                self._about = prepared.result()
            refusals = list(pool.map(load, racers[1:], contenders))
            prepared.result()
        for contender, refusal in zip(contenders, refusals, strict=True):
            raise_if(contender, refusal)

    def give(self, racers: Sequence[Worker], name: str = GIVEN, path: str = "") -> str:
        """Let the baseline's process share its weights and inputs; say in words what they are.

        Other data than the given ones are for processes that have some, which they give up.

        Args:
            racers: the baseline's process, then those of contenders.
            name: of the workload.
            path: of its file of tensors, if it is one.
        """
        baseline = racers[0]

        def ask(job: str, payload: Mapping[str, Any], blobs: Sequence[Any] = ()) -> Reply:
            return asked(baseline, job, payload, blobs)

        if not self._is_lending_known:
            self.lends = bool(lender_of(racers[1], ask, CALL_TIMEOUT_S))
            self._is_lending_known = True
        if name != GIVEN:
            for racer in racers[1:]:
                asked(racer, "give_up_timing_set", {})
        reply = ask("timing_set", {"name": name, "path": path, "lends": self.lends})

        def give(racer: Worker) -> None:
            try:
                refusal = hand_over(reply, racer, ask, CALL_TIMEOUT_S)
            except JobFailed as failure:  # no memory, say
                raise explained(failure) from failure
            if refusal:
                raise WorkerError(f"{racer.name}: {refusal}")
            given = {"question": reply.data["question"]}
            asked(racer, "take_timing_set", given, reply.blobs)

        with ThreadPoolExecutor(len(racers)) as pool:
            list(pool.map(give, racers[1:]))
        return str(reply.data["values"])


def raise_if(contender: Contender, refusal: str) -> None:
    """Raise a WorkerError that begins with the contender's name, where something is wrong."""
    if refusal:
        raise WorkerError(f"{contender.name}: {refusal}")
