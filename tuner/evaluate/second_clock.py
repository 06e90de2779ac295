"""The clock of a race's own process beside the times that contenders report."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence

from tuner.evaluate.measure import contradicted
from tuner.evaluate.timed_calls import TimedCalls
from tuner.evaluate.timers import BOUND_LAUNCH_US, USERS_LAUNCH_US
from tuner.evaluate.worker import Worker
from tuner.machine.host import usable_cores

__all__ = ["SecondClock"]

CROSS_CHECK_S = 0.03  # of calls in a row
CROSS_CHECKS = 8  # times that the clocks must disagree before a contender is refused
# A processor that others have too: rests of whole seconds, which a minute's builds may leave.
BUSY_LOAD, BUSY_CHECKS, BUSY_REST_S = 1.0, 8, 3.0  # processes that want a core, for each
CLOCK_US = 100.0  # of a call on a CPU that its own clock need not see: Python, what is kept
NUM_SAMPLES = 3  # of the contender's own clock, whose median counts


class SecondClock:
    """Holds a clock against what the processes of a race report.

    Args:
        calls: asks them.
        is_gpu: whether a call goes on after it has returned.
    """

    def __init__(self, calls: TimedCalls, is_gpu: bool) -> None:
        self._calls, self._is_gpu = calls, is_gpu

    def refusal(
        self,
        racers: Sequence[Worker],
        reported_us: Sequence[float],
        lane: int,
        is_bound_here: bool,
    ) -> str:
        """Return why the times that a contender reported cannot be true.

        A machine that does other work can be slow at any moment: the contender is asked for times
        again right before and after; the slowest counts, and clocks must disagree every time. A
        processor that others want as much is given half a minute to become free.

        Args:
            racers: all processes of this set, the baseline's first.
            reported_us: the median that each of them reported in the race.
            lane: which of them is the contender's.
            is_bound_here: whether its launches are our own binding's, in Python.
        """
        host_us = BOUND_LAUNCH_US if is_bound_here else USERS_LAUNCH_US
        load, refusal = 0.0, ""
        for attempt in range(CROSS_CHECKS + BUSY_CHECKS):
            if attempt == CROSS_CHECKS:
                load = self._load_of_others()
                if not load:
                    return refusal
            # What else runs is over at some time.
            time.sleep(BUSY_REST_S if load else attempt * CROSS_CHECK_S)
            slowdown = self._slowdown(racers[0], reported_us[0])
            before = statistics.median(self._samples_us(racers[lane]))
            wall_us = self._wall_us(racers[lane], reported_us[lane])
            after = statistics.median(self._samples_us(racers[lane]))
            slowest = max(reported_us[lane], before, after)
            refusal = self._contradicted(slowest, wall_us, slowdown, host_us)
            if refusal and not self._is_gpu:  # what began meanwhile slows the baseline, too
                slowdown = max(slowdown, self._slowdown(racers[0], reported_us[0]))
                refusal = self._contradicted(slowest, wall_us, slowdown, host_us)
            if not refusal:
                return ""
        return f"{refusal}; or other programs: load {load:.1f} on {usable_cores()} cores"

    def _slowdown(self, baseline: Worker, reported_us: float) -> float:
        """Return how many times as long as it reported the baseline takes by this clock."""
        allowed_us = 0.0 if self._is_gpu else CLOCK_US
        return self._wall_us(baseline, reported_us) / (reported_us + allowed_us)

    def _contradicted(
        self, latency_us: float, wall_us: float, slowdown: float, host_us: float
    ) -> str:
        """Do as `contradicted`; on a CPU, Python is slowed as the baseline is."""
        allowed_us = host_us if self._is_gpu else CLOCK_US * max(1.0, slowdown)
        return contradicted(latency_us, wall_us, slowdown=slowdown, allowed_us=allowed_us)

    def _load_of_others(self) -> float:
        """Return how many processes want a processor that times, where these are far too many."""
        load = os.getloadavg()[0]
        return 0.0 if self._is_gpu or load <= BUSY_LOAD * usable_cores() else load

    def _wall_us(self, racer: Worker, latency_us: float) -> float:
        """Return the time of one call in a row of calls, by this process's clock."""

        def seconds(count: int) -> float:
            times = []
            for _ in range(2):  # what else the machine does makes one of them late, never early
                start_s = time.perf_counter()
                self._calls.repeat(racer, count)
                times.append(time.perf_counter() - start_s)
            return min(times)

        # As many as should take long enough; fewer where they do, whatever the process reported.
        empty_s = seconds(0)
        most = max(1, round(CROSS_CHECK_S * 1e6 / max(latency_us, 1.0)))
        num_calls = min(most, 16)
        while num_calls < most and seconds(num_calls) - empty_s < CROSS_CHECK_S:
            num_calls = min(most, 16 * num_calls)
        return max(0.0, seconds(num_calls) - empty_s) * 1e6 / num_calls

    def _samples_us(self, racer: Worker) -> list[float]:
        samples: list[float] = self._calls.burst(racer, NUM_SAMPLES).data["samples_us"]
        return samples
