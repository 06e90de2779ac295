"""Small tensors to a GPU and back, all of them in one piece.

Each transfer waits for the GPU, and a process that shares it with others waits for its slice of
the GPU's time: a question of a check that has ten small tensors waited twenty times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from tuner.check.calls.lending import LENT_FROM_BYTES, as_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["contents_of", "joined", "moved", "parted"]

ALIGNED_BYTES = 16  # the largest number, which is two float64


def contents_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, memoryview | bytes]:
    """Return the bytes of tensors, by name.

    Of those on the CPU they are no copies: the memory stays the tensor's, which must not change
    until they are sent.
    """
    small = {n: t for n, t in tensors.items() if t.is_cuda and 0 < t.nbytes < LENT_FROM_BYTES}
    here = {n: t.detach() for n, t in tensors.items()}
    if len(small) > 1:
        plain = [t.detach().resolve_conj().resolve_neg() for t in small.values()]
        here |= dict(zip(small, parted(joined(plain).cpu(), plain), strict=True))
    found: dict[str, memoryview | bytes] = {}
    for name, tensor in here.items():
        content = as_bytes(tensor.to("cpu"))
        found[name] = memoryview(content.numpy()) if len(content) else b""
    return found


def moved(tensors: Sequence[torch.Tensor], device: str | torch.device) -> list[torch.Tensor]:
    """Return tensors on a device, in memory of their own each, or themselves if they are there."""
    import torch

    is_gpu = torch.device(device).type != "cpu"
    small = [t for t in tensors if is_gpu and t.is_cpu and 0 < t.nbytes < LENT_FROM_BYTES]
    if len(small) < 2:
        return [t.to(device) for t in tensors]
    there = parted(joined(small).to(device), small)
    copies = {id(t): part.clone() for t, part in zip(small, there, strict=True)}
    return [copies[id(t)] if id(t) in copies else t.to(device) for t in tensors]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors of one device one after the other, as `parted` finds them."""
    import torch

    pieces = []
    for tensor in tensors:
        pieces += [as_bytes(tensor), tensor.new_zeros(_padding_of(tensor), dtype=torch.uint8)]
    return torch.cat(pieces)


def parted(together: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of what was joined, as tensors of these types and shapes."""
    lengths = [tensor.nbytes + _padding_of(tensor) for tensor in tensors]
    starts = accumulate(lengths, initial=0)
    return [
        together[start : start + t.nbytes].view(t.dtype).reshape(t.shape)
        for start, t in zip(starts, tensors, strict=False)
    ]


def _padding_of(tensor: torch.Tensor) -> int:
    return -int(tensor.nbytes) % ALIGNED_BYTES
