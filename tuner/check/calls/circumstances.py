"""What surrounds the calls of a candidate: memory, streams, threads, forks; where it raised."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch

__all__ = [
    "Halted",
    "busy_side_stream",
    "changed_flags",
    "flags",
    "nan_filled_memory",
    "num_copies",
    "poison",
    "replaced_parameters",
    "spoil",
    "stage",
]


def flags(model: torch.nn.Module, arguments: Sequence[Any]) -> dict[str, str]:
    """Return which modules train, and what requires gradients, in words, by name."""
    import torch

    modes = {name or "the module": m.training for name, m in model.named_modules()}
    tensors = {f"input {i}": x for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)}
    tensors |= dict(model.named_parameters())
    wants = {name: x.requires_grad for name, x in tensors.items()}
    return {
        **{n: "in training mode" if is_on else "in eval mode" for n, is_on in modes.items()},
        **{n: f"{'with' if is_on else 'without'} requires_grad" for n, is_on in wants.items()},
    }


def changed_flags(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Say which of the `flags` a call left otherwise."""
    return [
        f"the call left {name} {now[name]}, which was {flag}"
        for name, flag in before.items()
        if now.get(name, flag) != flag
    ]


def replaced_parameters(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which parameters a call replaced."""
    return [
        f"the call replaced the parameter {name} by another object: an optimiser that was "
        "given the old one would train nothing"
        for name, parameter in before.items()
        if now.get(name) is not parameter
    ]


def num_copies() -> int:
    """Return how many children are copies of this process: forked, and running nothing else.

    What a module starts by running a program, such as a pool of compilers, is not among them.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has none
        return 0
    own, found = Path("/proc/self/cmdline").read_bytes(), 0
    for child in _children():
        with contextlib.suppress(OSError):  # it has just ended
            found += Path(f"/proc/{child}/cmdline").read_bytes() == own
    return found


def _children() -> list[int]:
    """Return the numbers of this process's children, of each thread that it has.

    Where the kernel does not list them, or a thread ends meanwhile, psutil reads what all
    processes are, in 6 ms and more.
    """
    threads = Path("/proc/self/task")
    try:
        lists = [(threads / name / "children").read_text() for name in os.listdir(threads)]
    except OSError:
        return [child.pid for child in psutil.Process().children()]
    return [int(number) for text in lists for number in text.split()]


def poison(output_bytes: Sequence[int], device: torch.device) -> None:
    """Leave NaN in the memory that the allocator will hand out next for such sizes."""
    import torch

    blocks = [
        torch.full((max(1, size // 4),), float("nan"), device=device)
        for size in output_bytes
        for _ in range(2)
    ]
    del blocks


@contextlib.contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Fill all memory that PyTorch allocates uninitialised with NaN."""
    import torch

    # Not use_deterministic_algorithms, which imports the whole of inductor: 1.6 s in each process.
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def spoil(outputs: Sequence[Any], model: torch.nn.Module, arguments: Sequence[Any]) -> None:
    """Edit outputs in place, as whoever got them may, but for what shares memory with others."""
    import torch

    others = [*model.state_dict().values(), *arguments]
    tensors = [x for x in others if isinstance(x, torch.Tensor)]
    places = {x.untyped_storage().data_ptr() for x in tensors}
    with torch.no_grad():
        for output in outputs:
            is_tensor = isinstance(output, torch.Tensor) and output.numel() > 0
            if is_tensor and output.untyped_storage().data_ptr() not in places:
                output.zero_()


@contextlib.contextmanager
def busy_side_stream(device: torch.device) -> Iterator[None]:
    """Make a stream current that is still busy when the candidate is called.

    What the arguments are copied from is complete; their copies wait behind about 20 ms of
    other work, so that a kernel launched on another stream reads memory not yet written.
    """
    import torch

    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40_000_000)
        yield
    stream.synchronize()


class Halted(Exception):
    """The candidate raised: `stage` is where, `message` what it said."""

    def __init__(self, stage: str, error: BaseException) -> None:
        self.stage = stage
        frames = traceback.extract_tb(error.__traceback__)
        place = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
        self.message = f"{type(error).__name__}: {str(error).strip() or 'no message'}{place}"
        super().__init__(self.message)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Give what is raised inside this name, as what the candidate answers."""
    try:
        yield
    except Halted:
        raise
    except (Exception, SystemExit) as error:
        # Whatever a candidate raises is its answer, not our failure.
        raise Halted(name, error) from None
