"""Tensors that stay on a GPU while they cross: a producer lends them, the judge copies them.

Through the host, a gradient of 8192 x 8192 takes 0.2 s, and a check has some fifty of them. The
judge lends nothing: whoever may read another's memory may write it, too. What it gives, it writes
into rooms: empty tensors that the producer has made and lent.

To open another process's memory takes the driver 5 ms, and 30 ms on a host that is full. So a
producer lends a piece of it once, for a whole check, in which all lie that are not too large.
"""

from __future__ import annotations

import base64
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.machine import gpu_memory

if TYPE_CHECKING:
    import torch

__all__ = [
    "LENT_FROM_BYTES",
    "STAGING_SHARE",
    "Borrowed",
    "Rooms",
    "Staging",
    "as_bytes",
    "copied",
    "is_sample",
    "is_worth_it",
    "lent",
    "sample",
]

LENT_FROM_BYTES = 2**20  # what is smaller goes through the host as fast
SAMPLE_ELEMENTS = 2**19
STAGING_SHARE = 1 / 256  # of a GPU's memory: two float32 gradients of 8192 x 8192, on an H200
ALIGNED_BYTES = 512  # as PyTorch's own tensors
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
    if flat.numel() <= 1:  # which may be 0 apart, as of a number that was expanded, or 16 of none
        flat = flat.as_strided(flat.shape, (1,))
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


class Staging:
    """A piece of a producer's memory, lent once, in which tensors lie until they are had.

    Args:
        device: whose memory it is.
        share: of that memory; with none of it each tensor is lent by itself.

    Attributes:
        loan: where another process finds it.
    """

    def __init__(self, device: str | torch.device, share: float = 0.0) -> None:
        import torch

        num_bytes = int(share * gpu_memory.total_bytes(device))
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._num_used = 0
        self.loan = lent(self._memory) if num_bytes else {}

    def clear(self) -> None:
        """Let others lie where those that were had have lain."""
        self._num_used = 0

    def lend(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Return, as JSON, where a tensor, or its copy, is found; as for `lent`."""
        content = as_bytes(tensor)
        start, part = self._part(content.numel())
        if part is None:
            return lent(tensor)
        part.copy_(content)
        return {"staged": start}

    def room(
        self, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return an empty tensor, and where another process finds it; as for `lent`."""
        import torch

        start, part = self._part(math.prod(shape) * dtype.itemsize)
        if part is not None:
            return part.view(dtype).reshape(shape), {"staged": start}
        room = torch.empty(tuple(shape), dtype=dtype, device=self._memory.device)
        return room, lent(room)

    def moved_out(self, room: torch.Tensor) -> torch.Tensor:
        """Return a room that was filled, in memory of its own."""
        is_here = room.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()
        return room.clone() if is_here else room

    def _part(self, num_bytes: int) -> tuple[int, torch.Tensor | None]:
        start = self._num_used
        if not self.loan or start + num_bytes > self._memory.numel():
            return start, None
        self._num_used = start + -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return start, self._memory[start : start + num_bytes]


class Borrowed:
    """A producer's staging memory, open as long as this is kept.

    Raises:
        ValueError, KeyError, TypeError: such a loan is none.
        RuntimeError: it cannot be opened here.
    """

    def __init__(self, loan: Mapping[str, Any], device: str | torch.device) -> None:
        self._memory = _opened(loan, int(loan["num_bytes"]) - int(loan["start_bytes"]), device)

    def part(self, start: int, num_bytes: int) -> torch.Tensor:
        """Return some of it as bytes, as it is.

        Raises:
            ValueError: there is no such part.
        """
        if not 0 <= start <= start + num_bytes <= self._memory.numel():
            held = self._memory.numel()
            raise ValueError(f"{num_bytes} bytes from {start} on of {held} that are lent")
        return self._memory[start : start + num_bytes]


def copied(
    loan: Mapping[str, Any],
    num_bytes: int,
    device: str | torch.device,
    borrowed: Borrowed | None = None,
) -> torch.Tensor:
    """Return a copy of lent memory as bytes; whoever lent it can no longer change it.

    What lies in `borrowed` memory is being copied, until the device is waited for.

    Raises:
        ValueError: nothing of that size is lent.
        RuntimeError: it cannot be opened here.
    """
    import torch

    if "staged" in loan:
        return _staged(loan, num_bytes, borrowed).clone()
    copy = _opened(loan, num_bytes, device).clone()
    torch.cuda.synchronize(copy.device)  # before it may be written again, and is closed
    return copy


def _staged(loan: Mapping[str, Any], num_bytes: int, borrowed: Borrowed | None) -> torch.Tensor:
    if borrowed is None:
        raise ValueError(f"{num_bytes} bytes in memory that was never lent")
    return borrowed.part(int(loan["staged"]), num_bytes)


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

    def forget(self, keys: Sequence[str]) -> None:
        """Forget what was announced under these keys, unless it was filled."""
        for key in keys:
            self._waiting.pop(key, None)

    def announce(self, tensor: torch.Tensor) -> str:
        """Return the key under which the receiver shall make a room; kept until it is filled."""
        key = secrets.token_hex(8)
        self._waiting[key] = tensor.detach()
        return key

    def fill(
        self, loans: Mapping[str, Mapping[str, Any]], borrowed: Borrowed | None = None
    ) -> None:
        """Write what was announced into rooms that are lent, by key; some in `borrowed` memory.

        Raises:
            KeyError: nothing was announced under such a key, or nothing is lent.
            ValueError, RuntimeError: as for `copied`.
        """
        import torch

        devices = set()
        for key, loan in loans.items():
            tensor = self._waiting[key]
            if not self._to_many:
                del self._waiting[key]
            content = as_bytes(tensor)
            if "staged" in loan:
                _staged(loan, content.numel(), borrowed).copy_(content)
                devices.add(tensor.device)
            else:
                _opened(loan, content.numel(), tensor.device).copy_(content)
                torch.cuda.synchronize(tensor.device)  # before it is closed
        for device in devices:
            torch.cuda.synchronize(device)


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
