"""What turns a call into samples: the clocks of the CPU and of CUDA devices.

Cold: the caches are overwritten before each sample. The clocks are bound when this module is
imported and when a timer is made, before any candidate is: one that patches `time` or
`torch.cuda.Event` afterwards is timed by the true ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

__all__ = [
    "BOUND_LAUNCH_US",
    "USERS_LAUNCH_US",
    "Call",
    "CpuTimer",
    "CudaTimer",
    "Timer",
    "hidden_work_us",
    "no_garbage_collection",
]

_now_ns, _now_s = time.perf_counter_ns, time.perf_counter

Call = Callable[[int], object]
"""One call on the i-th of several rotating input sets; i grows without bound."""
Keep = Callable[[int, object], None]


class Timer(Protocol):
    """What times calls; it belongs to one thread, and rotates through input sets as it goes.

    `renew`, where it is set, is called before each sample with the number of the call that
    follows, outside of the time: it gives that call's inputs a content they never had. `keep`,
    where it is set, is given each call's number and result, after its time.
    `is_bound_here` says that calls go through our own binding, whose work on the host is not
    the candidate's. `is_cold`: the caches are overwritten before each sample. `num_throttled`
    samples were dropped so far because the device was throttled.
    """

    renew: Call | None = None
    keep: Keep | None = None
    is_bound_here: bool = False
    is_cold: bool = False
    num_throttled: int = 0

    def samples(self, call: Call, num_samples: int) -> list[float]:
        """Return `num_samples` times of one call each, in us; what it raises passes through."""

    def hidden_us(self, call: Call, allowed_us: float) -> float | None:
        """Return how long the device works on after the call's end, by the host's clock.

        More looks are taken where the first shows more than is allowed. None where the question
        makes no sense: a CPU call is over when it returns.
        """
        return None


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector out of the samples, as `timeit` does."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# ---- the CPU --------------------------------------------------------------------------------

_MAX_FLUSH_BYTES = 128 * 1024**2  # about 10 ms a sample; larger caches would cost seconds
_SETTLING_BYTES = 32 * 1024**2 - 64 * 1024


class CpuTimer(Timer):
    """Times calls that are over when they return.

    Cold: a buffer of twice the last-level cache (at most 128 MiB) is read and written before
    each sample, which costs about 10 ms. One thread does it, so that neither PyTorch's thread
    pool nor a candidate's own is kept awake for the call that follows.

    The process's allocator is brought to where that of a program that has run for a while is.
    """

    def __init__(self, *, l3_bytes: int | None = None, is_cold: bool = True) -> None:
        import numpy as np

        # glibc takes large blocks fresh from the kernel, page fault by page fault, until it has
        # seen such a block freed; then it keeps up to twice that size. What a process happened to
        # free before decides, which made the very same call take 4 ms or 11 ms. Freeing a block
        # just below its largest threshold (mallopt(3), M_MMAP_THRESHOLD) settles it for all.
        np.empty(_SETTLING_BYTES, dtype=np.uint8)
        wanted = 2 * l3_bytes if l3_bytes else _MAX_FLUSH_BYTES
        num_words = min(wanted, _MAX_FLUSH_BYTES) // 8 if is_cold else 0
        self.is_cold = is_cold
        self._buffer = np.zeros(num_words, dtype=np.uint64)
        self._next = 0

    def samples(self, call: Call, num_samples: int) -> list[float]:
        """Return `num_samples` times in us; the call's result is freed after the clock stops."""
        result = []
        with no_garbage_collection():
            for _ in range(num_samples):
                if self.renew is not None:
                    self.renew(self._next)
                # Read and write: a plain fill may bypass the caches with streaming stores.
                self._buffer += 1
                start = _now_ns()
                answer = call(self._next)
                stop = _now_ns()
                if self.keep is not None:
                    self.keep(self._next, answer)
                del answer
                self._next += 1
                result.append((stop - start) / 1e3)
        return result


# ---- the GPU --------------------------------------------------------------------------------

_MIN_L2_BYTES = 32 * 1024**2  # where the driver does not tell
_BATCH = 32  # samples a synchronisation; with 5 kernels each, well below 1024 queued launches
USERS_LAUNCH_US = 300.0  # host work of one call that is hidden; beyond, a user would see it too
BOUND_LAUNCH_US = 3000.0  # where it is our own binding's, in Python, which no user will meet
_DISTURBED = 4.0  # times as long may a host take that other processes hold up
_CYCLES_PER_US = 2000  # of the spin kernel, at about 2 GHz; slower clocks make it longer: fine
_MAX_RETRIES = 3
_COOL_DOWN_US = 20e3  # longer with each retry, as nvbench does; one spinning thread: no heat, but
# unlike sleep it does not let the clocks fall to idle
_MAX_LOOKS = 200  # at a call whose work seems to go on after its end; 0.2 s where it does


def hidden_work_us(
    look_us: Callable[[], float],
    empty_look_us: Callable[[], float],
    *,
    quiet_us: float,
    allowed_us: float,
) -> tuple[float, float]:
    """Return by how much a call exceeds an empty one in its least look, in us.

    What other processes do on the device makes a look longer, never shorter; work that a call
    hides is in every one of its looks. So one look within what is allowed acquits, and is all
    that an ordinary call costs. Otherwise up to 200 more follow, each beside a look at an empty
    call: what makes both late in all of them is the machine's. A call that hides its work only now
    and then is for the race, where another process's clock counts many calls in a row.

    Args:
        look_us: what the host's clock sees of the call beyond its events.
        empty_look_us: the same of an empty call.
        quiet_us: the least look at an empty call so far.
        allowed_us: by how much a call may exceed an empty one.

    Returns:
        That, at least 0, and `quiet_us` for the next call.
    """
    least_us, beside_us = look_us(), math.inf
    for _ in range(_MAX_LOOKS):
        if least_us - quiet_us <= allowed_us:
            return max(0.0, least_us - quiet_us), quiet_us
        beside_us = min(beside_us, empty_look_us())
        quiet_us = min(quiet_us, beside_us)
        least_us = min(least_us, look_us())
    return max(0.0, least_us - beside_us), quiet_us


def lead_of_call_us(
    launches_us: Iterable[float], least_us: float, hidden_us: float = USERS_LAUNCH_US
) -> float:
    """Return the head start that one call's launches get, in us.

    Args:
        launches_us: what the host took to launch a call in the last batches.
        least_us: the least it ever took.
        hidden_us: what a call may take by itself and be hidden.
    """
    is_slow = least_us > hidden_us  # by itself, also on a host that does nothing else
    most_us = hidden_us if is_slow else max(hidden_us, _DISTURBED * least_us)
    return min(max(launches_us), most_us)


class CudaTimer(Timer):
    """Times calls on the current stream of one GPU by CUDA events.

    Cold: a buffer of twice the L2 is overwritten before each sample. Samples are enqueued in
    batches between two device-wide synchronisations, behind a spin kernel as long as the host
    needs to enqueue them, so the events see device time and not Python's launch work. Cache
    lines that a candidate asked the hardware to keep are taken back, from then on before every
    sample. A batch during which the GPU slows itself down (heat, a failing supply) is dropped,
    counted and repeated; a GPU that stays slow is timed as it is.
    """

    def __init__(self, device_index: int = 0, *, is_cold: bool = True) -> None:
        import torch

        properties = torch.cuda.get_device_properties(device_index)
        self.is_cold = is_cold
        event = torch.cuda.Event
        self._event, self._record, self._elapsed_ms = event, event.record, event.elapsed_time
        self._synchronize, self._spin = torch.cuda.synchronize, torch.cuda._sleep
        self._torch: Any = torch
        self._device = torch.device("cuda", device_index)
        flush_bytes = 2 * max(properties.L2_cache_size, _MIN_L2_BYTES) if is_cold else 0
        self._buffer = torch.empty(flush_bytes // 4, dtype=torch.int32, device=self._device)
        self._clocks = _GpuClocks(str(properties.uuid))
        self._kept_cache = _KeptCache()
        self._launch_us: deque[float] = deque([USERS_LAUNCH_US / 3], maxlen=4)
        self._least_launch_us = math.inf
        self._quiet_us = math.inf  # the host's clock beyond the events of an empty call
        self._batch_size = _BATCH
        self._next = 0

    def samples(self, call: Call, num_samples: int) -> list[float]:
        """Return `num_samples` device times in us."""
        result: list[float] = []
        num_retries = 0
        with self._torch.cuda.device(self._device), no_garbage_collection():
            while len(result) < num_samples:
                times, is_throttled = self._batch(call, num_samples - len(result))
                if is_throttled and num_retries < _MAX_RETRIES:
                    num_retries += 1
                    self.num_throttled += len(times)
                    self._spin(int(_COOL_DOWN_US * num_retries * _CYCLES_PER_US))
                else:
                    result += times
        return result

    def hidden_us(self, call: Call, allowed_us: float) -> float | None:
        """Return what the host's clock saw of a call beyond its events, less an empty call's.

        The device is idle before and after, so work on another stream that the end event did
        not wait for shows here, to about 10 us.
        """

        def empty_look_us() -> float:
            return self._beyond_events(lambda _: None)

        with self._torch.cuda.device(self._device), no_garbage_collection():
            if self._quiet_us == math.inf:
                # As many as a suspect gets: were none of them quiet, work could hide behind it.
                self._quiet_us = min(empty_look_us() for _ in range(_MAX_LOOKS))
            hidden_us, self._quiet_us = hidden_work_us(
                lambda: self._beyond_events(call),
                empty_look_us,
                quiet_us=self._quiet_us,
                allowed_us=allowed_us,
            )
        return hidden_us

    def _batch(self, call: Call, num_wanted: int) -> tuple[list[float], bool]:
        if self._kept_cache.release():
            self._batch_size = 1  # and hence before every sample from now on
        num_samples = min(num_wanted, self._batch_size)
        events = [self._event_pair() for _ in range(num_samples)]
        self._synchronize(self._device)
        hidden_us = BOUND_LAUNCH_US if self.is_bound_here else USERS_LAUNCH_US
        lead_us = lead_of_call_us(self._launch_us, self._least_launch_us, hidden_us) * num_samples
        self._spin(int(lead_us * _CYCLES_PER_US))
        begun = _now_s()
        for start, stop in events:
            self._sample(call, start, stop)
        self._launch_us.append((_now_s() - begun) * 1e6 / num_samples)
        self._least_launch_us = min(self._least_launch_us, self._launch_us[-1])
        is_throttled = self._clocks.are_throttled()  # while the device works
        self._synchronize(self._device)
        return [self._elapsed_ms(a, b) * 1e3 for a, b in events], is_throttled

    def _sample(self, call: Call, start: Any, stop: Any) -> None:
        self._prepare()
        self._record(start)
        answer = call(self._next)
        self._record(stop)
        if self.keep is not None:
            self.keep(self._next, answer)
        del answer  # freed before the next call: the allocator works as for a user
        self._next += 1

    def _beyond_events(self, call: Call) -> float:
        start, stop = self._event_pair()
        self._prepare()
        self._synchronize(self._device)
        begun = _now_s()
        self._record(start)
        call(self._next)
        self._record(stop)
        self._synchronize(self._device)
        wall_us = (_now_s() - begun) * 1e6
        self._next += 1
        return wall_us - float(self._elapsed_ms(start, stop)) * 1e3

    def _prepare(self) -> None:
        if self.renew is not None:
            self.renew(self._next)
        if self.is_cold:
            self._buffer.zero_()

    def _event_pair(self) -> tuple[Any, Any]:
        return self._event(enable_timing=True), self._event(enable_timing=True)


class _GpuClocks:
    """Asks NVIDIA's management library whether the GPU is held back; "no" where it is absent.

    Source: NVML API reference, nvmlClocksEventReasons and nvmlDeviceGetClockInfo. The power cap
    is not among the reasons: under a large matrix product it is the card's normal state.
    """

    _HELD_BACK = 0x8 | 0x20 | 0x40 | 0x80  # hardware, thermal (driver), thermal, power brake
    _SM_CLOCK = 1
    _POLL_S = 0.01  # NVML's own readings are no fresher, and a call costs up to a millisecond

    def __init__(self, uuid: str) -> None:
        self._library: Any = None
        self._handle = ctypes.c_void_p()
        self._polled_at = -math.inf
        self._answer = False
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        if library.nvmlInit_v2() != 0:
            return
        if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._handle)) == 0:
            self._library = library
            self._max_mhz = self._clock_mhz("nvmlDeviceGetMaxClockInfo")

    def are_throttled(self) -> bool:
        """Whether the clocks are held back, or still at half of what they could be."""
        now = time.monotonic()
        if self._library is not None and now - self._polled_at > self._POLL_S:
            self._polled_at = now
            reasons = ctypes.c_ulonglong()
            self._library.nvmlDeviceGetCurrentClocksThrottleReasons(
                self._handle, ctypes.byref(reasons)
            )
            clock_mhz = self._clock_mhz("nvmlDeviceGetClockInfo")
            is_slow = 0 < clock_mhz < self._max_mhz / 2  # e.g. not yet woken from idle
            self._answer = bool(reasons.value & self._HELD_BACK) or is_slow
        return self._answer

    def _clock_mhz(self, function: str) -> int:
        clock = ctypes.c_uint()
        getattr(self._library, function)(self._handle, self._SM_CLOCK, ctypes.byref(clock))
        return clock.value


class _KeptCache:
    """Takes back L2 lines that a candidate has asked the hardware to keep.

    Source: CUDA driver API, cuCtxSetLimit and cuCtxResetPersistingL2Cache. The limit is 0
    unless someone raised it.
    """

    _PERSISTING_L2_LIMIT = 6

    def __init__(self) -> None:
        self._library: Any = None
        with contextlib.suppress(OSError):
            self._library = ctypes.CDLL("libcuda.so.1")

    def release(self) -> bool:
        """Return whether there was something to take back."""
        if self._library is None:
            return False
        limit = ctypes.c_size_t()
        self._library.cuCtxGetLimit(ctypes.byref(limit), self._PERSISTING_L2_LIMIT)
        if limit.value == 0:
            return False
        self._library.cuCtxSetLimit(self._PERSISTING_L2_LIMIT, ctypes.c_size_t(0))
        self._library.cuCtxResetPersistingL2Cache()
        return True
