"""What a user waits for: calls by the host's clock, with nothing of the host's work hidden."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable

from tuner.evaluate.timers import Call, Timer, no_garbage_collection
from tuner.machine.platforms import is_gpu

__all__ = ["MOST_PREEMPTED_PER_S", "ExposedTimer", "num_preempted"]

# A program beside takes some 100 to 250 time slices a second, the system by itself up to 50.
MOST_PREEMPTED_PER_S = 60.0
_now_ns = time.perf_counter_ns  # before any candidate could patch it
NUM_UNTIMED = 2  # calls before a row that is timed: threads wake up, caches hold its own


class ExposedTimer(Timer):
    """Times calls from a device that is idle to one that is idle again, by the host's clock.

    A sample is of `num_calls` calls in a row. On a GPU it is their mean, since launches overlap
    with what the device does; with one call it is what a user waits for who looks at each answer.
    On a CPU, where a call is over when it returns, it is their median: other programs stretch a
    few of them, by far. Caches are as calls leave them.

    Args:
        device: as PyTorch names it.
        num_calls: of a sample.
    """

    def __init__(self, device: str, num_calls: int) -> None:
        self._num_calls = num_calls
        self._is_gpu = is_gpu(device)
        self._wait = waiting_for(device)
        self._next = 0

    def samples(self, call: Call, num_samples: int) -> list[float]:
        """Return `num_samples` times of a call, in us."""
        result = []
        with no_garbage_collection():
            for _ in range(num_samples):
                for _ in range(min(NUM_UNTIMED, self._num_calls)):
                    call(self._next)
                result.append(self._mean_us(call) if self._is_gpu else self._median_us(call))
                self._next += self._num_calls
        return result

    def _mean_us(self, call: Call) -> float:
        self._wait()
        start = _now_ns()
        for number in range(self._num_calls):
            call(self._next + number)
        self._wait()
        return (_now_ns() - start) / 1e3 / self._num_calls

    def _median_us(self, call: Call) -> float:
        times = []
        for number in range(self._num_calls):
            start = _now_ns()
            call(self._next + number)
            times.append(_now_ns() - start)
        return statistics.median(times) / 1e3


def waiting_for(device: str) -> Callable[[], object]:
    """Return what waits until a device has done all its work; a CPU has, when a call returns."""
    if not is_gpu(device):
        return lambda: None
    import torch

    synchronize = torch.cuda.synchronize
    return lambda: synchronize(device)


def num_preempted() -> int:
    """Return how often the system took the processor from a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
