"""How the judge is asked for the questions of probes, and what is done where memory runs out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from tuner.check.probes.probe import Probe
from tuner.errors import TunerError, WorkerError, says_no_memory
from tuner.evaluate.worker import Reply
from tuner.machine.turns import ALL, SOME, Turns, more_than
from tuner.trial import ProbeResult, to_json

__all__ = [
    "Asking",
    "Fewer",
    "JudgeEnded",
    "is_of_memory",
    "lacks_memory",
    "may_find_more",
    "require_memory",
    "waits_for_memory",
    "with_memory",
]

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
SHARE_OF_JUDGE = 0.4  # of a GPU's memory, beside which a contender may find too little
ENOUGH_BYTES = 2**34  # of a GPU, beside which a contender cannot say that none is left


class JudgeEnded(WorkerError):
    """The judge's process ended in the middle of a check, whose module is not to blame."""


@dataclass(slots=True)
class Fewer:
    """Probes that are asked with fewer rows or calls, since memory ran out for their own.

    Attributes:
        num_rows: the problem's own batch, where it has one.
        is_fixed: its reference may take no other; then calls are left out first.
    """

    num_rows: int | None = None
    is_fixed: bool = False
    _rows: dict[str, int] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)

    def asked(self, probe: Probe) -> Probe:
        """Return a probe as it is asked."""
        calls = self._calls.get(probe.name, probe.calls)
        return replace(
            probe,
            batch=self._rows.get(probe.name, probe.batch),
            calls=calls,
            before=probe.before[:calls],
            backward=tuple(call for call in probe.backward if call < calls),
        )

    def limit(self, probes: Sequence[Probe], taken_by: Callable[[Probe], float]) -> bool:
        """Ask with less from now on: the first, and each that may take as much memory as that.

        Returns:
            Whether less is asked of the first: else it has too few rows and calls.
        """
        most = taken_by(self.asked(probes[0]))
        for probe in probes:
            while taken_by(self.asked(probe)) >= most and self.halve(probe):
                pass
        return taken_by(self.asked(probes[0])) < most

    def halve(self, probe: Probe) -> bool:
        """Ask a probe with half as many rows or calls from now on; False where it has too few."""
        ways = (self._halve_rows, self._halve_calls)
        return any(way(probe) for way in (reversed(ways) if self.is_fixed else ways))

    def _halve_rows(self, probe: Probe) -> bool:
        own = probe.batch if probe.batch is not None else self.num_rows
        rows = self._rows.get(probe.name, own)
        if rows is None or rows < 2:
            return False
        self._rows[probe.name] = rows // 2
        return True

    def _halve_calls(self, probe: Probe) -> bool:
        calls = self._calls.get(probe.name, probe.calls)
        if calls < 3:  # with two calls one still follows another, or meets it
            return False
        self._calls[probe.name] = max(2, calls // 2)
        return True

    def notes(self, probes: Sequence[Probe]) -> list[str]:
        """Name the probes that were asked with fewer rows or calls than they should be."""
        notes = []
        for what, fewer in (("rows", self._rows), ("calls", self._calls)):
            found = [f"{p.name} ({fewer[p.name]})" for p in probes if p.name in fewer]
            if found:
                count = "1 probe" if len(found) == 1 else f"{len(found)} probes"
                said = f"asked again with fewer {what}: {', '.join(found)}"
                notes.append(f"memory ran out for {count}, {said}")
        return notes


class Asking:
    """Asks the judge of one check, with fewer rows or calls where its memory is too small.

    Args:
        ask: runs a job in the judge, by name and payload.
        free_contender: lets the contender's process give up what it does not use, and all weights
            but those that are named.
        turns: of the tuners on this device.
        fewer: notes the probes for which memory ran out.
        takes_much: whether a probe may take much of a GPU's memory.

    Attributes:
        lends: whether processes lend each other memory.
        is_strict: whether fresh processes are asked where memory ran out in these.
    """

    def __init__(
        self,
        ask: Callable[..., Reply],
        free_contender: Callable[[Sequence[str] | None], object],
        turns: Turns,
        fewer: Fewer,
        takes_much: Callable[[Probe], bool],
    ) -> None:
        self.ask = ask
        self._free_contender = free_contender
        self._turns = turns
        self._fewer = fewer
        self._takes_much = takes_much
        self.lends = False
        self.is_strict = False

    def once(self, probe: Probe, is_kept: bool = False) -> Reply:
        """Return a probe's question; with `is_kept` the next one is the same.

        Raises:
            JudgeEnded: the judge ended.
            TunerError: the reference fails, or there is no memory.
        """
        asked = to_json(self._fewer.asked(probe))
        how = {"lends": self.lends, "is_strict": self.is_strict, "is_kept": is_kept}
        with self._turns.shared():
            return self.ask("ask", {"probe": asked, **how})

    def question(self, probe: Probe, is_kept: bool = False) -> Reply:
        """Return a probe's question; where the judge has no memory for it, one of less.

        First what nobody uses is freed. `is_kept`: as for `once`.

        Raises:
            TunerError: as `once`; also where memory ran out and fresh processes are asked.
        """
        has_freed = False
        while True:
            try:
                return self.once(probe, is_kept)
            except TunerError as error:
                if self.is_strict or not is_of_memory(error):
                    raise
                if has_freed and not self._fewer.halve(probe):
                    raise
            self.free()
            has_freed = True

    def question_of(
        self, probe: Probe, ahead: Future[Reply] | None, is_kept: bool = False
    ) -> Reply:
        """Return a question that is being made; where memory ran out beside another, a new one.

        `is_kept`: as for `once`.

        Raises:
            TunerError: as `once`.
        """
        if ahead is not None:
            try:
                return ahead.result()
            except TunerError as error:
                if not is_of_memory(error):
                    raise
        return self.question(probe, is_kept)

    def again(self, probe: Probe, answer_to: Callable[[Probe, Reply], ProbeResult]) -> ProbeResult:
        """Ask again where a contender had no memory, after the judge has freed what it can.

        The judge holds memory of the same machine: what ran out may be its doing. What does not
        fit then is asked with half as many rows or calls, and so on, as long as it may take much
        of the memory: else the contender only says so, or needs more than there is.
        """
        self.free()
        while True:
            result = answer_to(probe, self.question(probe))
            if not lacks_memory(result):
                return result
            freed = self.free().data
            is_much = freed["most_bytes"] > SHARE_OF_JUDGE * freed["total_bytes"]
            is_much |= freed["free_bytes"] < ENOUGH_BYTES or self._takes_much(probe)
            if not (self.lends and is_much and self._fewer.halve(probe)):
                break
        held, free = (freed[name] / 2**30 for name in ("held_bytes", "free_bytes"))
        said = (
            f"{result.reason}; memory ran out again after the judge had freed what it could: it "
            f"holds {held:.1f} GiB, {free:.1f} GiB are free. No wrong answer, but not one either"
        )
        return replace(result, reason=said)

    def free(self) -> Reply:
        """Let both processes free what they can; return what the judge holds, and what is free."""
        self._free_contender(None)
        reply = self.ask("free", {})
        self._free_contender(reply.data["held"])
        return reply


def lacks_memory(result: ProbeResult) -> bool:
    """Whether a contender says that it had no memory, as an answer or where it refuses one."""
    said = result.difference if result.is_accepted else result.reason
    return says_no_memory(said)


def is_of_memory(error: TunerError) -> bool:
    """Whether a judge that still lives had no memory."""
    is_alive = not isinstance(error, JudgeEnded)
    return is_alive and says_no_memory(f"{error} {error.__cause__}")


def may_find_more(turns: Turns, share: float, error: TunerError) -> bool:
    """Whether memory ran out beside a share of it, and other tuners may leave more."""
    return share != ALL and turns.are_taken and is_of_memory(error)


def with_memory(turns: Turns, run: Callable[[], T], share: float = SOME) -> T:
    """Return what `run` does; where memory runs out beside other tuners, when these leave more.

    `share` is what it takes of a GPU's memory, as far as that is known.
    """
    while True:
        try:
            with turns.memory(share):
                return run()
        except TunerError as error:
            if not may_find_more(turns, share, error):
                raise
        share = more_than(share)


def require_memory(turns: Turns, num_shortages: int) -> None:
    """Raise where memory ran out in a process that times, and `with_memory` may find more.

    Also where nothing said so: a library that finds too little takes a slower algorithm.
    """
    if num_shortages and turns.are_taken and not turns.has_all_memory:
        raise WorkerError("out of memory in a process that times")


def waits_for_memory(method: Method) -> Method:
    """Call a method by `with_memory`; its object has a `_spec`, and the device's `_turns`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **more: Any) -> Any:
        share = self._spec.memory_share
        return with_memory(self._turns, lambda: method(self, *args, **more), share)

    return cast("Method", run)
