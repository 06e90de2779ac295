"""Where nobody can say which number is right: numbers of a tensor that are not judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tuner.check.exercise import read_at_once

if TYPE_CHECKING:
    import torch

__all__ = ["disputed_in", "is_near_overflow", "of_order", "undefined"]


def disputed_in(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return where tensors of an answer are `_disputed`, of those that are somewhere.

    A device is waited for once as long as all numbers are finite, as nearly always.
    """
    sums = [_sum(t) for n in got for t in (got[n], want[n]) if got[n].is_floating_point()]
    if all(math.isfinite(number) for number in read_at_once(sums)):
        got = {n: t for n, t in got.items() if not t.is_floating_point()}
    found = {name: _disputed(tensor, want[name]) for name, tensor in got.items()}
    return {name: mask for name, mask in found.items() if mask is not None}


def _disputed(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    """Return where the baseline is NaN or infinite and float64 is not, or the other way.

    Where it has an infinity of the other sign, what that was multiplied by is 0 up to rounding,
    which decides about the other infinities as well: none of them is judged.
    """
    import torch

    if not got.is_floating_point():
        # Where even the baseline's rounding decides, e.g. between two largest elements.
        mask = got != want
        return mask if bool(mask.any()) else None
    if math.isfinite(float(_sum(got))) and math.isfinite(float(_sum(want))):
        return None  # as nearly always, at a fourth of what follows
    got, want = _asked(got), _asked(want)
    mask = (torch.isnan(got) != torch.isnan(want)) | (torch.isinf(got) != torch.isinf(want))
    infinite = torch.isinf(got) & torch.isinf(want)
    if bool((infinite & (got != want)).any()):
        mask |= infinite
    return mask if bool(mask.any()) else None


def _asked(values: torch.Tensor) -> torch.Tensor:
    """Return numbers of which PyTorch says whether they are finite: of float8 it does not."""
    return values.double() if values.element_size() == 1 else values


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return a sum in float64 that is finite only where all numbers are.

    In another dtype most numbers would be copied first: of outputs of gigabytes, to twice as much.
    """
    import torch

    if values.dtype in (torch.float32, torch.float64):
        return values.sum().double()
    is_of_16_bits = values.dtype in (torch.float16, torch.bfloat16)
    return values.sum(dtype=torch.float32 if is_of_16_bits else torch.float64).double()


def undefined(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    """Return where either is no finite number: what a division by zero gives is nobody's."""
    import torch

    if not got.is_floating_point():
        return _disputed(got, want)
    got, want = _asked(got), _asked(want)
    mask = ~(torch.isfinite(got) & torch.isfinite(want))
    return mask if bool(mask.any()) else None


def is_near_overflow(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether numbers are so near the largest of their type that their order decides about Inf.

    Of a sum beyond a fourth of it, a partial sum may have been beyond the whole.
    """
    import torch

    if not got.is_floating_point() or got.dtype == torch.float64 or not want.numel():
        return False
    want = _asked(want)
    finite = torch.where(torch.isfinite(want), want.abs(), 0.0)
    return bool(finite.max() > torch.finfo(got.dtype).max / 4)


def of_order(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    """Return where the order in which many numbers are multiplied may decide about NaN and Inf.

    Beyond a float first and then times 0 it is NaN; times 0 first and then others it is 0. What is
    large may be the product of a part that is too large.
    """
    import torch

    mask = undefined(got, want)
    if mask is None or not got.is_floating_point():
        return mask
    return mask | (want == 0) | (want.abs() > math.sqrt(torch.finfo(got.dtype).max))
