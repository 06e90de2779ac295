"""The sums and extremes that the error of a tensor is made of, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tuner.check.calls.exercise import CHUNK_ELEMENTS
from tuner.problem.accuracy import Accuracy

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["chunks", "differences", "sums_of", "sums_on_cpu"]

EDGE_ULPS = 64  # so near to the largest number of its type, rounding decides about an Inf
CACHED_ELEMENTS = 2**15  # in float64 with the other two they stay in a core's second cache


def sums_of(
    error: torch.Tensor,
    value: torch.Tensor,
    accuracy: Accuracy | None,
    is_misplaced: torch.Tensor | None = None,
    *,
    is_sized: bool = True,
) -> torch.Tensor:
    """Return what an `Error` is made of, of one chunk, on its device; signs do not matter.

    Without `is_sized`, where somebody knows already how large the values are, 0 stands for that.
    Absolute values would be written and read again: that was half of the memory's traffic.
    """
    import torch

    norm, none = torch.linalg.vector_norm, error.new_zeros(())

    def largest(values: torch.Tensor) -> torch.Tensor:
        low, high = values.aminmax()  # NaN where one is
        return torch.maximum(-low, high)

    limit = None
    if accuracy is not None and accuracy.kind == "tolerance":
        limit = accuracy.atol + accuracy.rtol * value.abs()
    return torch.stack([
        largest(error), norm(error).square(),
        *((largest(value), norm(value).square()) if is_sized else (none, none)),
        none if limit is None else (error.abs() > limit).sum().double(),
        none if is_misplaced is None else is_misplaced.sum().double(),
    ])  # fmt: skip


def sums_on_cpu(
    got: torch.Tensor, want: torch.Tensor, accuracy: Accuracy | None, *, is_sized: bool = True
) -> list[list[float]]:
    """Return what `sums_of` does, of each piece of tensors in the computer's own memory.

    PyTorch's 15 operations take 180 us for a few numbers, and for 4 million two cores as long as
    this takes half of one: they write what is larger than a cache and read it again.
    """
    import torch

    known = (torch.float32, torch.float64)  # to NumPy, which makes float64 of a piece at a time
    g, w = (t.detach().resolve_neg().reshape(-1) for t in (got, want))
    g, w = ((t if t.dtype in known else t.double()).numpy() for t in (g, w))
    pieces = [slice(n, n + CACHED_ELEMENTS) for n in range(0, len(w), CACHED_ELEMENTS)]
    return [_sums_of_piece(g[at], w[at], accuracy, is_sized=is_sized) for at in pieces]


def _sums_of_piece(
    got: NDArray[Any], want: NDArray[Any], accuracy: Accuracy | None, *, is_sized: bool
) -> list[float]:
    import numpy as np

    want = want.astype(np.float64, copy=False)
    with np.errstate(all="ignore"):  # NaN and Inf show in what comes out
        error, size, beyond = np.subtract(got, want, dtype=np.float64), (0.0, 0.0), 0.0
        if accuracy is not None and accuracy.kind == "tolerance":
            limit = accuracy.atol + accuracy.rtol * np.abs(want)
            beyond = float(np.count_nonzero(np.abs(error) > limit))
        if is_sized:
            size = (float(max(-want.min(), want.max())), float(want @ want))
        return [
            float(max(-error.min(), error.max())), float(error @ error), *size, beyond, 0.0
        ]  # fmt: skip


def chunks(
    got: torch.Tensor, want: torch.Tensor, unjudged: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield flat pieces of both, small enough for several temporaries; those wanted in float64.

    On a GPU what was got stays of its own type where arithmetic beside float64 makes float64 of
    it: a copy would be a fourth of the memory's traffic. A CPU takes four times as long for that.
    """
    import torch

    promoted = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    g, w = got.reshape(-1), want.reshape(-1)
    skip = None if unjudged is None else unjudged.reshape(-1)
    for start in range(0, w.numel(), CHUNK_ELEMENTS):
        piece = slice(start, start + CHUNK_ELEMENTS)
        mine = g[piece].double() if g.is_cpu or g.dtype not in promoted else g[piece]
        yield mine, w[piece].double(), None if skip is None else skip[piece]


def differences(
    got: torch.Tensor, want: torch.Tensor, skip: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the absolute error (0 where either is not finite) and where NaN or Inf is amiss.

    Within rounding of the largest number of its dtype, a value may be an Inf of its sign.
    """
    import torch

    is_both_finite = torch.isfinite(got) & torch.isfinite(want)
    error = torch.where(is_both_finite, (got - want).abs(), 0.0)
    is_same = is_both_finite | (got == want) | (torch.isnan(got) & torch.isnan(want))
    kind = torch.finfo(dtype if dtype.is_floating_point else torch.float64)
    edge = kind.max * (1.0 - EDGE_ULPS * kind.eps)
    is_same |= torch.isinf(got) & (got.sign() == want.sign()) & (want.abs() >= edge)
    if skip is not None:
        error = torch.where(skip, 0.0, error)
        is_same = is_same | skip
    return error, ~is_same
