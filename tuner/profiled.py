"""What one call of a module ran on its device, kernel by kernel: the records of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROFILE_NAME", "KernelTime", "Launch", "Profiled", "Profiles"]

PROFILE_NAME = "kernels.json"  # in a run's folder


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
