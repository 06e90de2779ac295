"""Processes that open a GPU before it is known what they will load."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from threading import Lock

from tuner.errors import TunerError
from tuner.evaluate.contender import Contender, started
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.worker import Worker
from tuner.machine.turns import turns_of

__all__ = ["Opened"]

MOST_OPENED = 8  # processes of sets that nobody wants yet


class Opened:
    """Sets of processes that were started before they are wanted.

    Args:
        first: the name of a process of ours that comes before those of files, if one is wanted.
        env: variables of all of them.
    """

    def __init__(self, first: str = "", env: Mapping[str, str] | None = None) -> None:
        self._first, self._env = first, env
        self._pool = ThreadPoolExecutor(1)
        self._opening: deque[Future[tuple[ExitStack, list[Worker]]]] = deque()
        self._lock, self._has_begun = Lock(), False

    def open_sets(self, spec: JobSpec, num_files: int, num_sets: int) -> None:
        """Begin to start sets of so many files, which open a GPU; once, and does not wait.

        They have loaded nothing. Beside other tuners none is: each holds half a gigabyte.
        """

        def opened() -> tuple[ExitStack, list[Worker]]:
            with ExitStack() as stack:
                files = [Contender("opened", {})] * num_files
                racers = started(stack, spec, files, self._first, self._env)
                return stack.pop_all(), racers

        with self._lock:
            if self._has_begun:
                return
            self._has_begun = True
            if turns_of(spec.device).has_others:
                return
            num_each = num_files + self._num_first
            for _ in range(min(num_sets, max(1, MOST_OPENED // num_each))):
                self._opening.append(self._pool.submit(opened))

    def opened(self, stack: ExitStack, contenders: Sequence[Contender]) -> list[Worker]:
        """Return an opened set of these, whose end `stack` becomes; nothing where there is none.

        A process that fails to open is found by who starts it.
        """
        are_files = all(c.load.keys() == {"file"} and not c.env for c in contenders)
        while are_files and contenders and (opening := self._taken()):
            with suppress(TunerError):
                own, racers = opening.result()
                stack.enter_context(own)
                num_first = self._num_first
                if len(racers) >= num_first + len(contenders):
                    for racer, contender in zip(racers[num_first:], contenders, strict=False):
                        racer.name = contender.name
                    return racers[: num_first + len(contenders)]
        return []

    def close(self) -> None:
        """End those that nobody took; none is opened any more."""
        with self._lock:
            self._has_begun = True
        with ExitStack() as stack:
            while opening := self._taken():
                with suppress(TunerError):
                    stack.enter_context(opening.result()[0])
        self._pool.shutdown()

    def _taken(self) -> Future[tuple[ExitStack, list[Worker]]] | None:
        with self._lock:
            return self._opening.popleft() if self._opening else None

    @property
    def _num_first(self) -> int:
        return int(bool(self._first))
