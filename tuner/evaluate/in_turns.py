"""Calls of a file's kernels and of PyTorch that take turns at one number of rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from tuner.by_batch import AtBatch, Way
from tuner.evaluate.exposed import MOST_PREEMPTED_PER_S, ExposedTimer, num_preempted
from tuner.evaluate.measure import interleave
from tuner.evaluate.timers import Call
from tuner.intervals import median_interval
from tuner.machine.platforms import is_gpu

__all__ = [
    "FEW_ROUNDS", "LONG_US", "InTurns", "deciding", "least_us_of", "numbered", "seconds_of_turns",
]  # fmt: skip

ROW_S = 0.004  # of calls in a row: many clocks' ticks, and few interrupts of another program
MOST_IN_A_ROW = {"cpu": 8, "cuda": 24}  # few where each is timed, many where they overlap
FEW_CALLS, FEW_LONG_CALLS = 3, 2  # that tell how long a call takes
LONG_US = 5e3  # a call whose launches nobody notices: two tell how long it takes
SHORT_S = 2e-3  # what a sample of short calls takes: several of them, and more that are not timed
FEW_ROUNDS, MOST_ROUNDS = 5, 30  # turns of each; more where it is not known yet
IDLE_ROUNDS = 3  # times as many of one call each
# Turns are repeated where other programs took the processor so often, a few times in all.
CALLS_PREEMPTED, MOST_REPEATED = 0.25, 3


class InTurns:
    """Calls, the reference's first, then one of each kernel, that take turns at a number of rows.

    All should have been called before: what is loaded or compiled then is none of their time.

    Args:
        calls: of nothing; what they return is dropped.
        device: as PyTorch names it.
        num_rows: for the record.
        way: for the record.
        is_idle: whether the device is idle before each call.
        kernels: which of a file's the further calls take, for the record.
        data: for the record: "" for the given ones.

    Attributes:
        is_long: the first takes so long that it does not matter whether the device is idle.
    """

    def __init__(
        self,
        calls: Sequence[Callable[[], object]],
        device: str,
        *,
        num_rows: int,
        way: Way,
        is_idle: bool = False,
        kernels: Sequence[int] = (0,),
        data: str = "",
    ) -> None:
        self._calls = [numbered(call) for call in calls]
        self.num_rows, self._way, self._is_idle = num_rows, way, is_idle
        self._kernels, self._data = kernels, data
        calls_us = [least_us_of(call, device) for call in self._calls]
        self.is_long = calls_us[0] >= LONG_US
        call_s = sum(calls_us) / 1e6 / len(calls_us)
        most = MOST_IN_A_ROW[device.partition(":")[0]]
        num_calls = max(1, min(most, round(ROW_S / max(call_s, 1e-7))))
        self._num_calls = 1 if is_idle else num_calls
        self._timer = ExposedTimer(device, self._num_calls)
        self._is_gpu = is_gpu(device)  # whose own work no other program stretches
        self._is_disturbed, self._num_repeated = False, 0
        self._rounds: list[tuple[float, ...]] = []  # of each, a time of every call

    def take(self, num_rounds: int) -> AtBatch:
        """Take so many turns more, thrice as many of one call; return what all of them say.

        That is of the fastest kernel.
        """
        num_rounds *= IDLE_ROUNDS if self._is_idle else 1
        while True:
            before, begun_s = num_preempted(), time.perf_counter()
            turns = interleave(self._calls, self._timer, num_rounds)
            allowed = CALLS_PREEMPTED * len(self._calls) * num_rounds * self._num_calls
            allowed = max(allowed, MOST_PREEMPTED_PER_S * (time.perf_counter() - begun_s))
            self._is_disturbed = not self._is_gpu and num_preempted() - before > allowed
            if not self._is_disturbed or self._num_repeated == MOST_REPEATED:
                break
            self._num_repeated += 1
        self._rounds += list(zip(*turns, strict=True))
        return self.found

    @property
    def found(self) -> AtBatch:
        """What all turns say of the fastest kernel."""
        return max(self.all_found, key=lambda at: at.speedup)

    @property
    def all_found(self) -> list[AtBatch]:
        """What all turns say of each kernel."""
        baseline, *sides = zip(*self._rounds, strict=True)
        baseline_us, records = statistics.median(baseline), []
        for kernel, side in zip(self._kernels, sides, strict=True):
            interval = median_interval(list(zip(baseline, side, strict=True)))
            records.append(
                AtBatch(
                    self.num_rows, self._way, self._is_idle, interval.speedup, interval.low,
                    interval.high, baseline_us, statistics.median(side), self._is_disturbed,
                    kernel, self._data,
                )
            )  # fmt: skip
        return records

    @property
    def is_lost(self) -> bool:
        """Whether PyTorch wins here, as more turns would hardly change."""
        return self.found.is_clear and not self.found.is_won

    @property
    def may_learn(self) -> bool:
        """Whether more turns may change what is decided."""
        most = MOST_ROUNDS * (IDLE_ROUNDS if self._is_idle else 1)
        return not self.found.is_clear and len(self._rounds) < most


def seconds_of_turns(call_s: float, num_calls: int, num_rounds: int, *, is_gpu: bool) -> float:
    """Return what turns of calls will take, looks at how long these are included.

    Args:
        call_s: of the longest of them.
        num_calls: that take turns.
        num_rounds: of each.
        is_gpu: calls of an idle device are timed as well, where they are not long.
    """
    is_long = call_s >= LONG_US / 1e6
    num_samples = (FEW_LONG_CALLS if is_long else FEW_CALLS) + 1 + num_rounds
    if is_gpu and not is_long:
        num_samples += FEW_CALLS + 1 + IDLE_ROUNDS * num_rounds
    return num_calls * num_samples * 2 * max(call_s, SHORT_S)  # each after one that is not timed


def deciding(known: Sequence[InTurns], tuned_rows: int = 0) -> InTurns | None:
    """Return the turns of the most rows that are not clear, unless PyTorch wins there or above.

    Args:
        known: at each number of rows, those back to back and those of an idle device.
        tuned_rows: from which on it is not one of these that decides, but all.
    """
    for turns in sorted(known, key=lambda turns: -turns.num_rows):
        here = [other for other in known if other.num_rows == turns.num_rows]
        if turns.num_rows < tuned_rows and any(other.is_lost for other in here):
            return None
        if turns.may_learn:
            return turns
        if not turns.found.is_won:
            return None
    return None


def least_us_of(call: Call, device: str) -> float:
    """Return the least time of a few calls: what disturbs one makes it later."""
    timer = ExposedTimer(device, 1)
    found_us = min(timer.samples(call, FEW_LONG_CALLS))
    if found_us >= LONG_US:
        return found_us
    return min(found_us, *timer.samples(call, FEW_CALLS - FEW_LONG_CALLS))


def numbered(call: Callable[[], object]) -> Call:
    """Return a call that a timer numbers."""
    return lambda _: call()
