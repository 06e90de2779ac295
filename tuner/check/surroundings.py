"""What a candidate must leave as it found it: PyTorch's functions, the clocks, the settings."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["changed", "functions", "replaced", "settings"]


def settings() -> dict[str, Any]:
    """Return PyTorch's settings of this thread, by name."""
    import torch

    return {
        "gradients enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "seed": torch.initial_seed(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "number of threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


def changed(before: Mapping[str, Any]) -> list[str]:
    """Say which settings are no longer what `settings` returned."""
    now = settings()
    return [
        f"the call left PyTorch with other settings: {name} is {now[name]}, was {value}"
        for name, value in before.items()
        if now[name] != value
    ]


def functions() -> dict[str, Any]:
    """Return PyTorch's functions and the clocks as they are now, by name.

    What is there before a stranger's file is imported is theirs to call, not to replace: a tensor
    could be computed when it is copied, a clock stand still.
    """
    import torch

    rooms = {
        "time": time,
        "torch": torch,
        "torch.Tensor": torch.Tensor,
        "torch.nn.functional": torch.nn.functional,
        "torch.nn.Module": torch.nn.Module,
        "torch.autograd": torch.autograd,
        "torch.cuda": torch.cuda,
        "torch.testing": torch.testing,
    }
    found = {}
    for place, room in rooms.items():
        for name in dir(room):
            value = _found(room, name)
            if callable(value) and not isinstance(value, type):
                found[f"{place}.{name}"] = value
    return found


def _found(room: Any, name: str) -> Any:
    """Return an attribute without asking a `__getattr__`, which may import."""
    for place in getattr(room, "__mro__", (room,)):
        if name in vars(place):
            return vars(place)[name]
    return None


def replaced(before: Mapping[str, Any]) -> list[str]:
    """Say which of these functions are others now."""
    now = functions()
    return [
        f"it replaced {name}, which is not its own"
        for name, value in before.items()
        if now.get(name) is not value and not _is_pytorchs(now.get(name))
    ]


def _is_pytorchs(value: Any) -> bool:
    """Whether PyTorch defines it, and what it wraps: its compiler replaces a few by its own."""
    import torch

    folder = os.path.join(os.path.dirname(torch.__file__), "")
    while value is not None:
        code = getattr(value, "__code__", None)
        if code is None or not code.co_filename.startswith(folder):
            return False
        value = getattr(value, "__wrapped__", None)
    return True
