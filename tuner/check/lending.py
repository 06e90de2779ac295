"""Tensors that stay on a GPU while they cross: a producer lends them, the judge copies them.

Through the host, a gradient of 8192 x 8192 takes 0.2 s, and a check has some fifty of them. The
judge lends nothing: whoever may read another's memory may write it, too. What it gives, it writes
into rooms: empty tensors that the producer has made and lent.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "LENT_FROM_BYTES",
    "Rooms",
    "as_bytes",
    "copied",
    "is_sample",
    "is_worth_it",
    "lent",
    "sample",
]

LENT_FROM_BYTES = 2**20  # what is smaller goes through the host as fast
SAMPLE_ELEMENTS = 2**19
# What PyTorch's own `torch.multiprocessing` passes on, in the order of its functions.
_NAMES = (
    "device", "handle", "num_bytes", "offset_bytes", "counter", "counter_offset", "event",
    "has_event",
)  # fmt: skip


def is_worth_it(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, whole in memory, and large."""
    is_whole = tensor.is_cuda and tensor.is_contiguous()
    return is_whole and int(tensor.nbytes) >= LENT_FROM_BYTES


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers as bytes, in order; its own memory where they lie like that."""
    import torch

    flat = tensor.contiguous().reshape(-1)
    if flat.numel() == 1:  # which may be 0 apart, as of a number that was expanded
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def lent(tensor: torch.Tensor) -> dict[str, Any]:
    """Return, as JSON, where another process finds a contiguous tensor of a GPU.

    The tensor must be kept until that process has answered. Nothing where its memory cannot be
    shared between processes.
    """
    try:
        found = tensor.untyped_storage()._share_cuda_()
    except RuntimeError:
        return {}
    loan = {name: _as_text(value) for name, value in zip(_NAMES, found, strict=True)}
    return loan | {"start_bytes": tensor.storage_offset() * tensor.element_size()}


def copied(loan: Mapping[str, Any], num_bytes: int, device: str | torch.device) -> torch.Tensor:
    """Return a copy of lent memory as bytes; whoever lent it can no longer change it.

    Raises:
        ValueError: nothing of that size is lent.
        RuntimeError: it cannot be opened here.
    """
    import torch

    copy = _opened(loan, num_bytes, device).clone()
    torch.cuda.synchronize(copy.device)  # before it may be written again
    return copy


def _opened(loan: Mapping[str, Any], num_bytes: int, device: str | torch.device) -> torch.Tensor:
    """Return lent memory as bytes, as it is."""
    import torch

    arguments = [_as_bytes(loan[name]) for name in _NAMES]
    arguments[0] = torch.device(device).index or 0
    start = int(loan["start_bytes"])
    if not 0 <= start <= start + num_bytes <= int(loan["num_bytes"]):
        raise ValueError(f"{num_bytes} bytes from {start} on of {loan['num_bytes']} that are lent")
    torch.cuda.init()  # the call below ends the process without it
    storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole[start : start + num_bytes]


class Rooms:
    """What a process gives to others by writing it into memory that they lend.

    `to_many`: what is announced may be wanted more than once.
    """

    def __init__(self, *, to_many: bool = False) -> None:
        self._to_many = to_many
        self._waiting: dict[str, torch.Tensor] = {}

    def clear(self) -> None:
        """Forget what was announced."""
        self._waiting.clear()

    def announce(self, tensor: torch.Tensor) -> str:
        """Return the key under which the receiver shall make a room; kept until it is filled."""
        key = secrets.token_hex(8)
        self._waiting[key] = tensor.detach()
        return key

    def fill(self, loans: Mapping[str, Mapping[str, Any]]) -> None:
        """Write what was announced into the rooms that are lent, by key.

        Raises:
            KeyError: nothing was announced under such a key, or nothing is lent.
            ValueError, RuntimeError: as for `copied`.
        """
        import torch

        for key, loan in loans.items():
            tensor = self._waiting[key]
            if not self._to_many:
                del self._waiting[key]
            content = as_bytes(tensor)
            _opened(loan, content.numel(), tensor.device).copy_(content)
            torch.cuda.synchronize(tensor.device)


def sample(device: str | torch.device) -> torch.Tensor:
    """Return what is lent at first, to see whether lending works between two processes."""
    import torch

    return torch.arange(SAMPLE_ELEMENTS, dtype=torch.int32, device=device)


def is_sample(tensor: torch.Tensor) -> bool:
    """Whether the sample arrived whole."""
    import torch

    return bool(torch.equal(tensor, sample(tensor.device)))


def _as_text(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _as_bytes(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
