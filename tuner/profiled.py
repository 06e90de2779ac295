"""What one call of a module ran on its device, kernel by kernel: the records of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = [
    "COUNTERS_NAME",
    "PROFILE_NAME",
    "CountedCalls",
    "Counters",
    "KernelTime",
    "Launch",
    "Profiled",
    "Profiles",
    "busy_us",
]

PROFILE_NAME = "kernels.json"  # in a run's folder
COUNTERS_NAME = "counters.json"  # in a run's folder, where somebody asked for them


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel was launched: `smem_bytes` of a block, with what was asked for at the launch.

    `occupancy` is a share of 1, as the profiler estimates it from the four others.
    """

    num_blocks: int
    threads: int
    registers: int
    smem_bytes: int
    occupancy: float | None


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel, copy or fill of a GPU; on a CPU an operation of PyTorch, with those inside it.

    `start_us` counts from the start of its call; `launch` is None of what is no kernel.
    """

    name: str
    start_us: float
    duration_us: float
    launch: Launch | None = None


@dataclass(frozen=True, slots=True)
class Profiled:
    """The shortest of a few calls, warm and apart from any race; `call_us` is all of it.

    `trial` is the number of the one whose file it was, None of the baseline. On a GPU `call_us` is
    from the first kernel's start to the last one's end.
    """

    trial: int | None
    call_us: float
    kernels: tuple[KernelTime, ...]


@dataclass(frozen=True, slots=True)
class Profiles:
    """The baseline's call and the winner's; `is_gpu` says what their kernels are."""

    is_gpu: bool
    baseline: Profiled
    winner: Profiled


def busy_us(kernels: Iterable[KernelTime]) -> float:
    """Return the time in which any of some kernels runs: what overlaps counts once."""
    total_us = end_us = 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        stop_us = kernel.start_us + kernel.duration_us
        total_us += max(0.0, stop_us - max(end_us, kernel.start_us))
        end_us = max(end_us, stop_us)
    return total_us


@dataclass(frozen=True, slots=True)
class Counters:
    """What Nsight Compute counted of one kernel; None of what it does not know on this GPU.

    `tensor`, `memory`, `issue` and `warps` are shares of 1: of the cycles in which the tensor pipe
    works, of the memory's rate, of the cycles in which a scheduler issues, of the warps that a
    multiprocessor can hold. `stalls` are warps that wait, by reason, for each instruction issued.
    """

    name: str
    duration_us: float
    tensor: float | None
    memory: float | None
    issue: float | None
    warps: float | None
    dram_bytes: float | None
    clock_mhz: float | None
    stalls: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CountedCalls:
    """The kernels of one call of the baseline and of the winner, in the order of their launch."""

    baseline: tuple[Counters, ...]
    winner: tuple[Counters, ...]
