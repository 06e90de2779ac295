"""Whether PyTorch rounds what a module convolves on a GPU: to TF32, which it may by its settings.

cuDNN does so for some shapes and layouts and not for others, and for some numbers of rows: a
convolution of 256 samples was rounded on an H100, the same of 64 was not. What is as inexact as
TF32 is accepted where PyTorch is as well, so a search need not try it elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tuner.problem.accuracy import Accuracy, math_mode
from tuner.problem.dispatching import dispatched

if TYPE_CHECKING:
    import torch

__all__ = ["is_apart", "rounding_at_rows", "rounding_of"]

# Of the root mean square: TF32's differences are 3e-4, those of another order of sums 1e-6.
ROUNDED = 2e-5
EXACT = Accuracy.parse("float32")
SHARES = (1, 2, 4, 8)  # of the rows that are given: a check asks with fewer as well


def rounding_at_rows(model: Callable[..., object], inputs: Sequence[Any]) -> dict[str, bool]:
    """Return whether PyTorch rounds a model's convolutions, by layout, with fewer rows as well.

    The first input that has dimensions says how many rows (dim 0) there are.
    """
    import torch

    found = rounding_of(lambda: model(*inputs))
    num_rows = next((len(x) for x in inputs if isinstance(x, torch.Tensor) and x.dim()), 0)
    for rows in {num_rows // share for share in SHARES} - {0, num_rows}:
        few = [
            x[:rows] if isinstance(x, torch.Tensor) and x.shape[:1] == (num_rows,) else x
            for x in inputs
        ]
        with suppress(RuntimeError, ValueError, IndexError):  # a model of so many rows alone
            of_few = rounding_of(functools.partial(model, *few))
            found = {layout: found[layout] and of_few.get(layout, True) for layout in found}
    return found


def rounding_of(call: Callable[[], object]) -> dict[str, bool]:
    """Return whether PyTorch rounds what `call` convolves in float32, by layout.

    Each convolution is made in PyTorch's settings as they are, as given and with its channels
    last ("given", "channels_last"), and once without TF32. Empty where there is none.
    """
    import torch

    convolve = torch.ops.aten.convolution.default
    found: dict[str, bool] = {}

    def compared(func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        if func is not convolve or args[0].dtype != torch.float32:
            return made
        with math_mode(EXACT):
            exact = func(*args, **kwargs)
        found["given"] = found.get("given", False) or is_apart(made, exact)
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(args[0].ndim)
        if layout is not None:
            image, weight = (x.contiguous(memory_format=layout) for x in args[:2])
            last = func(image, weight, *args[2:], **kwargs)
            found["channels_last"] = found.get("channels_last", False) or is_apart(last, exact)
        return made

    with dispatched(compared):
        call()
    return found


def is_apart(made: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether results differ by more than the order of their sums; also what is no number."""
    difference, size = (float(x.square().mean().sqrt()) for x in (made - exact, exact))
    return not difference <= ROUNDED * size
