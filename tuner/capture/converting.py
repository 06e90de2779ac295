"""Modules that are converted to another dtype while their tensors are fake: `.bfloat16()`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["conversions_of_fakes"]


@contextlib.contextmanager
def conversions_of_fakes() -> Iterator[None]:
    """Let modules with fake parameters be converted, in this process, while it is entered.

    PyTorch 2.13 swaps a fake parameter with the converted one, and then raises, since the fake
    mode refers to both. Here each parameter gets the converted one's data, as real ones do, so
    that it stays the same object wherever it is used.
    """
    from torch import no_grad
    from torch.nn import Module

    whole = Module._apply

    def apply(
        module: Any, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> Any:
        if recurse:
            for child in module.children():
                child._apply(function)
        with no_grad():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.data = function(parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = function(buffer)
        return module

    Module._apply = apply
    try:
        yield
    finally:
        Module._apply = whole
