"""How the judge is asked for the questions of probes, and what is done where memory runs out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar, cast

from tuner.check.probe import Probe
from tuner.check.refusals import says_no_memory
from tuner.errors import TunerError, WorkerError
from tuner.evaluate.worker import Reply
from tuner.machine.turns import Turns
from tuner.trial import ProbeResult, to_json

__all__ = [
    "Asking",
    "JudgeEnded",
    "is_of_memory",
    "lacks_memory",
    "shrunk",
    "waits_for_memory",
    "with_memory",
]

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
WAITS_S = (2.0, 5.0, 10.0)  # for memory that other tuners have
SHARE_OF_JUDGE = 0.4  # of a GPU's memory, beside which a contender may find too little
ENOUGH_BYTES = 2**34  # of a GPU, beside which a contender cannot say that none is left


class JudgeEnded(WorkerError):
    """The judge's process ended in the middle of a check, whose module is not to blame."""


class Asking:
    """Asks the judge of one check, with fewer rows where its memory is too small.

    Args:
        ask: runs a job in the judge, by name and payload.
        free_contender: lets the contender's process give up what it does not use.
        turns: of the tuners on this device.
        num_rows: the problem's own batch, where it has one.
        fewer_rows: filled with the probes for whose own number of rows memory ran out.
        lends: whether processes lend each other memory.
    """

    def __init__(
        self,
        ask: Callable[..., Reply],
        free_contender: Callable[[], object],
        turns: Turns,
        num_rows: int | None,
        fewer_rows: dict[str, int],
        *,
        lends: bool,
    ) -> None:
        self.ask = ask
        self._free_contender = free_contender
        self._turns = turns
        self._num_rows = num_rows
        self._fewer_rows = fewer_rows
        self._lends = lends
        self._waits_s = iter(WAITS_S)  # what is lacking after all of them will be later

    def once(self, probe: Probe) -> Reply:
        """Return a probe's question.

        Raises:
            JudgeEnded: the judge ended.
            TunerError: the reference fails, or there is no memory.
        """
        rows = self._fewer_rows.get(probe.name, probe.batch)
        asks = {"probe": to_json(replace(probe, batch=rows)), "lends": self._lends}
        with self._turns.shared():
            return self.ask("ask", asks)

    def question(self, probe: Probe) -> Reply:
        """Return a probe's question; where the judge has no memory for it, one of fewer rows.

        First what nobody uses is freed, and other tuners are given time to free theirs.

        Raises:
            TunerError: as `once`.
        """
        has_freed = False
        while True:
            try:
                return self.once(probe)
            except TunerError as error:
                if not is_of_memory(error):
                    raise
                if has_freed and not self._has_waited() and not self._halved(probe):
                    raise
            self.free()
            has_freed = True

    def _has_waited(self) -> bool:
        """Give other tuners time to free memory, a few times in all; False if that is over."""
        wait_s = next(self._waits_s, None) if self._turns.has_others else None
        time.sleep(wait_s or 0.0)
        return wait_s is not None

    def question_of(self, probe: Probe, ahead: Future[Reply] | None) -> Reply:
        """Return a question that is being made; where memory ran out beside another, a new one.

        Raises:
            TunerError: as `once`.
        """
        if ahead is not None:
            try:
                return ahead.result()
            except TunerError as error:
                if not is_of_memory(error):
                    raise
        return self.question(probe)

    def again(self, probe: Probe, answer_to: Callable[[Probe, Reply], ProbeResult]) -> ProbeResult:
        """Ask again where a contender had no memory, after the judge has freed what it can.

        The judge holds memory of the same machine: what ran out may be its doing. What does not
        fit then is asked with half as many rows, and so on, as long as the judge takes much of
        the memory for it: else the contender only says so, or needs more than there is.
        """
        self.free()
        while True:
            result = answer_to(probe, self.question(probe))
            if result.is_accepted or not lacks_memory(result):
                return result
            freed = self.free().data
            is_much = freed["most_bytes"] > SHARE_OF_JUDGE * freed["total_bytes"]
            is_full = is_much or freed["free_bytes"] < ENOUGH_BYTES
            if not (self._lends and is_full and self._halved(probe)):
                break
        held, free = (freed[name] / 2**30 for name in ("held_bytes", "free_bytes"))
        said = (
            f"{result.reason}; memory ran out again after the judge had freed what it could: it "
            f"holds {held:.1f} GiB, {free:.1f} GiB are free. No wrong answer, but not one either"
        )
        return replace(result, reason=said)

    def free(self) -> Reply:
        """Let both processes free what they can; return what the judge holds, and what is free."""
        self._free_contender()
        return self.ask("free", {})

    def _halved(self, probe: Probe) -> bool:
        """Ask a probe with half as many rows from now on; False where it has one, or none."""
        own = probe.batch if probe.batch is not None else self._num_rows
        rows = self._fewer_rows.get(probe.name, own)
        if rows is None or rows < 2:
            return False
        self._fewer_rows[probe.name] = rows // 2
        return True


def shrunk(probes: Sequence[Probe], fewer_rows: Mapping[str, int]) -> list[str]:
    """Name the probes that were asked with fewer rows than they should be."""
    fewer = {p.name: fewer_rows[p.name] for p in probes if p.name in fewer_rows}
    if not fewer:
        return []
    said = ", ".join(f"{name} ({rows})" for name, rows in fewer.items())
    count = "1 probe" if len(fewer) == 1 else f"{len(fewer)} probes"
    return [f"memory ran out for {count}, asked again with fewer rows: {said}"]


def lacks_memory(result: ProbeResult) -> bool:
    """Whether a contender says that it had no memory."""
    return not result.is_accepted and says_no_memory(result.reason)


def is_of_memory(error: TunerError) -> bool:
    """Whether a judge that still lives had no memory."""
    is_alive = not isinstance(error, JudgeEnded)
    return is_alive and says_no_memory(f"{error} {error.__cause__}")


def with_memory(turns: Turns, run: Callable[[], T]) -> T:
    """Return what `run` does; where memory runs out beside other tuners, when these hold none."""
    try:
        with turns.memory(needs_all=False):
            return run()
    except TunerError as error:
        if not (turns.are_taken and is_of_memory(error)):
            raise
    with turns.memory(needs_all=True):
        return run()


def waits_for_memory(method: Method) -> Method:
    """Call a method by `with_memory`; its object has the device's `_turns`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **more: Any) -> Any:
        return with_memory(self._turns, lambda: method(self, *args, **more))

    return cast("Method", run)
