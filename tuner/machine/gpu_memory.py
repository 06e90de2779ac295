"""A GPU's memory: what is free, what this process keeps unused, whether libraries lacked some.

Where there is too little for its fastest algorithm, cuDNN takes another one and says nothing: one
that is slower, rounds otherwise, or makes NaN of the neighbours of a NaN. PyTorch then remembers
it for that shape as long as the process lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.machine.platforms import is_gpu

if TYPE_CHECKING:
    import torch

__all__ = [
    "MOST_UNUSED_BYTES",
    "free_all_unused",
    "free_cached",
    "free_unused",
    "most_bytes",
    "num_shortages",
    "require_no_shortage",
    "require_room",
    "total_bytes",
]

MOST_HELD_BYTES = 8 * 2**30
SCARCE_SHARE = 0.4  # of a GPU's memory that is free: with more, garbage may stay a while
MOST_UNUSED_BYTES = 4 * 2**30  # to free and ask for less costs more than it gives
# Of all memory, what a library may want beside a call's own tensors. Of 80 GB, cuDNN took another
# algorithm for a gradient of 2 images of 64 x 512 x 1024 with 1 GB left, and not with 2 GB.
LIBRARY_SHARE = 1 / 32


def total_bytes(device: str | torch.device) -> int:
    """Return the memory that a GPU has; 0 of a CPU."""
    import torch

    return int(torch.cuda.mem_get_info(device)[1]) if is_gpu(device) else 0


def most_bytes(device: str | torch.device) -> tuple[int, int]:
    """Return the most of a GPU's memory since this was asked, 0 of a CPU's.

    Returns:
        What tensors took, and what was held from other processes for them.
    """
    import torch

    if not is_gpu(device):
        return 0, 0
    used = int(torch.cuda.max_memory_allocated(device))
    held = int(torch.cuda.max_memory_reserved(device))
    torch.cuda.reset_peak_memory_stats(device)
    return used, held


def free_unused(device: str | torch.device) -> None:
    """Give a GPU's memory that this process no longer uses to the others, where it is much."""
    import torch

    if not is_gpu(device):
        return
    if _held_bytes(device)[1] > MOST_HELD_BYTES:
        free, total = torch.cuda.mem_get_info(device)
        if free < SCARCE_SHARE * total:
            gc.collect()  # what refers to itself goes when objects are many, not large
    free_cached(device)


def free_cached(device: str | torch.device) -> None:
    """Do what `free_unused` does, but let be what refers to itself, whose search takes 0.1 s."""
    import torch

    if is_gpu(device) and _unused_bytes(device) > MOST_UNUSED_BYTES:
        torch.cuda.empty_cache()


def free_all_unused(device: str | torch.device) -> int:
    """Give all memory that this process no longer uses to the others; return what it holds."""
    import torch

    gc.collect()
    if not is_gpu(device):
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return resident * mmap.PAGESIZE
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def require_room(device: str | torch.device) -> None:
    """Refuse to call a library while there is so little memory that it may take another algorithm.

    Raises:
        torch.OutOfMemoryError: there is, also when nobody refers to what this process has made.
    """
    import torch

    if not is_gpu(device):
        return
    wanted = int(LIBRARY_SHARE * total_bytes(device))
    if _room_bytes(device) >= wanted:
        return
    gc.collect()
    room = _room_bytes(device)
    if room < wanted:
        raise torch.OutOfMemoryError(
            f"out of memory: {room / 2**30:.2f} GiB of the GPU's are free, and a library that "
            f"finds less than {wanted / 2**30:.2f} GiB may take another algorithm"
        )


def num_shortages(device: str | torch.device) -> int:
    """Return how often memory ran out in this process until now, also where nothing said so."""
    import torch

    return int(torch.cuda.memory_stats(device)["num_ooms"]) if is_gpu(device) else 0


def require_no_shortage(device: str | torch.device) -> None:
    """Refuse to go on in a process in which memory ran out, whether or not anything said so.

    Raises:
        torch.OutOfMemoryError: it did, and a library may go on with another algorithm.
    """
    import torch

    if num_shortages(device):
        raise torch.OutOfMemoryError(
            "out of memory in this process: a library may have taken another algorithm than in a "
            "process that has enough, and would keep it"
        )


def _room_bytes(device: str | torch.device) -> int:
    """Return the memory that this process finds: free, or held by it and not used."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) + _unused_bytes(device)


def _unused_bytes(device: str | torch.device) -> int:
    held, used = _held_bytes(device)
    return held - used


def _held_bytes(device: str | torch.device) -> tuple[int, int]:
    """Return what this process holds, and what of that its tensors take."""
    import torch

    # As it comes: PyTorch's other functions make a flat dictionary of it first, some ten times
    # in each question of a check.
    found = torch.cuda.memory_stats_as_nested_dict(device)
    if not found:  # nothing was done on a GPU yet
        return 0, 0
    held, used = (found[f"{what}_bytes"]["all"]["current"] for what in ("reserved", "allocated"))
    return int(held), int(used)
