"""To see, or make, each operation that PyTorch's dispatcher is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["dispatched"]


def dispatched(run: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[Any]:
    """Let `run` make each operation of PyTorch's dispatcher, with its arguments.

    That is below autograd and `torch.func`, which see nothing of it.

    Args:
        run: is given the operation, its positional arguments and those by name (a dict), and
            returns what it makes.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    words = {
        "__torch_dispatch__": lambda mode, func, types, args=(), kwargs=None: run(
            func, args, kwargs or {}
        ),
        # Else the first operation imports all of dynamo: 1.2 s.
        "_should_skip_dynamo": classmethod(lambda cls: False),
    }
    made: AbstractContextManager[Any] = type("Mode", (TorchDispatchMode,), words)()
    return made
