"""Transposed convolutions of float64 on a GPU, as matrix products.

cuDNN has one slow kernel for these, at 0.9 of a H100's 60 TFLOPS (2026-11-25), which was most of
the time of a check of KernelBench's level 1 #61. Here each place of the filter is a product.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["exact_convolutions", "transposed_convolution"]


def exact_convolutions(is_wanted: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Return what, while it is entered, convolves float64 on a GPU, transposed, by products."""
    import torch

    if not is_wanted or not torch.cuda.is_initialized():  # each operation would pass through it
        return contextlib.nullcontext()
    mode: contextlib.AbstractContextManager[Any] = _by_products()()
    return mode


@functools.cache
def _by_products() -> Any:
    """Return the class of such a mode, which needs PyTorch."""
    import torch
    from torch.overrides import TorchFunctionMode

    transposed = {
        torch.conv_transpose1d: 1, torch.conv_transpose2d: 2, torch.conv_transpose3d: 3,
    }  # fmt: skip

    class ByProducts(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = kwargs or {}
            found = None
            if func in transposed and args and isinstance(args[0], torch.Tensor):
                x = args[0]
                if x.is_cuda and x.dtype == torch.float64 and x.ndim == transposed[func] + 2:
                    found = transposed_convolution(*args, **given)
            return func(*args, **given) if found is None else found

    return ByProducts


def transposed_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> torch.Tensor | None:
    """Return what `torch.conv_transpose1d` to `3d` return, of a batch in one group; else None.

    Args:
        x: batch x channels x size, in 1 to 3 directions.
        weight: channels x channels of the result x size.
        bias: one number a channel of the result.
        stride: one number, or one a direction; so are the next two and `dilation`.
        padding: what is cut off at each end.
        output_padding: how much further the result goes.
        groups: 1, or there is no result.
        dilation: from a place of the filter to the next.
    """
    import torch

    dims = x.ndim - 2
    is_fitting = weight.ndim == x.ndim and weight.shape[0] == x.shape[1] and x.numel() > 0
    if groups != 1 or not is_fitting or weight.dtype != x.dtype:
        return None
    step, cut, more, apart = (
        (value,) * dims if isinstance(value, int) else (*value,) * (dims // len(value))
        for value in (stride, padding, output_padding, dilation)
    )
    size, kernel = x.shape[2:], weight.shape[2:]
    # With what the padding cuts off, and at least as far as the result goes.
    whole = [
        (n - 1) * s + d * (k - 1) + 1 + m
        for n, s, d, k, m in zip(size, step, apart, kernel, more, strict=True)
    ]
    made = x.new_zeros(x.shape[0], weight.shape[1], *whole)
    flat = x.flatten(2)
    for place in torch.cartesian_prod(*(torch.arange(k) for k in kernel)).view(-1, dims).tolist():
        part = torch.matmul(weight[(slice(None), slice(None), *place)].t(), flat)
        own = [
            slice(p * d, p * d + (n - 1) * s + 1, s)
            for p, d, n, s in zip(place, apart, size, step, strict=True)
        ]
        made[(slice(None), slice(None), *own)] += part.unflatten(2, size)
    kept = [slice(c, w - c) for c, w in zip(cut, whole, strict=True)]
    result = made[(slice(None), slice(None), *kept)]
    if any(n < 1 for n in result.shape[2:]):
        return None  # PyTorch says what is wrong
    if bias is None:
        return result.contiguous()
    return result + bias.view(-1, *(1,) * dims)
