"""How far tensors are from float64, and how far they may be.

`compare` gives the error of one tensor; `limits_of` what the accuracy class allows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.check.calls.exercise import read_at_once
from tuner.check.judge.sums_of_errors import chunks, differences, sums_of, sums_on_cpu
from tuner.problem.accuracy import Accuracy

if TYPE_CHECKING:
    import torch

__all__ = [
    "FLOOR_ULPS",
    "SMALL_BATCH",
    "ULP",
    "ZERO",
    "Comparison",
    "Error",
    "Limits",
    "are_close",
    "compare",
    "compare_all",
    "errors_of",
    "first_beyond",
    "gradient_limits",
    "index_of",
    "limits_of",
    "repeats",
]

ULP = 2.0**-24  # half the distance between 1 and the next float32
FLOOR_ULPS = 16  # an error below this many ULP of the largest value is always accepted
SMALL_BATCH = 32  # below it the float32 class allows 4x instead of 2x the baseline's error
DOUBLE = 2.0**-38  # of the largest float64 value: 15 bits for sums, 14 bits from float32
ZERO = 1e-10  # of the largest gradient: one below this share is mathematically 0
CANCELLED = 2.0**-48  # sixteen times what float64 leaves of terms of 1 that cancel
HALF_ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
MADE_OF_HALVES = 0.125  # of that
GRADIENT_FACTOR = 4.0  # gradients: times the baseline's own largest error, in every class
GRADIENT_FLOOR_ULPS = 64  # and this many ULP of the largest gradient of all tensors


@dataclass(frozen=True, slots=True)
class Error:
    """How one tensor differs from float64; absolute, over the elements finite in both."""

    max_abs: float = 0.0
    rms_abs: float = 0.0
    largest: float = 0.0  # of the float64 value
    rms_value: float = 0.0
    num_misplaced: int = 0  # NaN or Inf at other places than in the reference
    num_beyond: int = 0  # elements beyond atol + rtol * |value|, tolerance class only

    @property
    def rms_rel(self) -> float:
        """The root mean square error over the root mean square value."""
        return self.rms_abs / self.rms_value if self.rms_value else self.rms_abs

    def beside(self, baseline: Error) -> Error:
        """Return it beside values that are as large as for the baseline's error."""
        rms_value = max(self.rms_value, baseline.rms_value)
        return replace(self, largest=max(self.largest, baseline.largest), rms_value=rms_value)


def repeats(*answers: Mapping[str, torch.Tensor]) -> bool:
    """Whether second calls gave what the first did: one that reads what calls change does not.

    On a GPU, where sums may be in another order, that is a matter of float64's digits.
    """
    import torch

    def is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
        near = 1e-10 if second.is_cuda else 0.0
        if second.is_cuda and second.dtype != torch.float64:
            return True
        return bool(torch.allclose(first, second, near, near, equal_nan=True))

    return all(
        is_same(tensors[name.replace("call1.", "call0.", 1)], second)
        for tensors in answers
        for name, second in tensors.items()
        if name.startswith("call1.")
    )


def compare(
    got: torch.Tensor,
    want: torch.Tensor,
    unjudged: torch.Tensor | None = None,
    accuracy: Accuracy | None = None,
) -> Error:
    """Return the error of one tensor, as `Comparison` says."""
    return compare_all({"": Comparison(got, want, unjudged)}, accuracy)[""]


def compare_all(
    comparisons: Mapping[str, Comparison], accuracy: Accuracy | None = None
) -> dict[str, Error]:
    """Return errors by name; a GPU is waited for once where all of them are finite.

    Args:
        comparisons: of tensors of one answer.
        accuracy: whose tolerance counts the elements that are beyond it.
    """
    sums = {name: each.quick_sums(accuracy) for name, each in comparisons.items()}
    rows = iter(read_at_once([row for found in sums.values() for row in found]))
    return {
        name: each.error([next(rows) for _ in sums[name]], accuracy)
        for name, each in comparisons.items()
    }


def errors_of(
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    unjudged: Mapping[str, torch.Tensor],
    accuracy: Accuracy,
) -> dict[str, Error]:
    """Return the errors of tensors beside those of their names, as `compare_all`."""
    pairs = {n: Comparison(t, want[n], unjudged.get(n)) for n, t in got.items()}
    return compare_all(pairs, accuracy)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A tensor beside what is expected of it, compared on its device in chunks.

    Args:
        got: any floating-point tensor, or one of the dtype of `want`.
        want: of the same shape.
        unjudged: where nothing is compared.
        tells_nan_from_inf: whether one is misplaced where the other is wanted.
        beside: the error of another tensor against `want`, which knows how large that is.
    """

    got: torch.Tensor
    want: torch.Tensor
    unjudged: torch.Tensor | None = None
    tells_nan_from_inf: bool = True
    beside: Error | None = None

    @property
    def _is_on_cpu(self) -> bool:
        return bool(self.got.is_cpu and self.want.is_cpu)

    def quick_sums(self, accuracy: Accuracy | None) -> list[torch.Tensor]:
        """Return what an error is made of where all is finite: a fourth of what else it takes.

        On a CPU, where nothing is waited for, `error` makes it.
        """
        is_plain = self.want.is_floating_point() and self.unjudged is None
        if not is_plain or not self.want.numel() or self._is_on_cpu:
            return []
        pieces = chunks(self.got, self.want, None)
        is_sized = self.beside is None
        return [sums_of(g - w, w, accuracy, is_sized=is_sized) for g, w, _ in pieces]

    def error(self, rows: list[list[float]], accuracy: Accuracy | None) -> Error:
        """Return the error, of those sums where they say it."""
        import torch

        got, want, unjudged, beside = self.got, self.want, self.unjudged, self.beside
        if not want.is_floating_point():
            is_wrong = got != want
            return Error(
                num_misplaced=int((is_wrong if unjudged is None else is_wrong & ~unjudged).sum())
            )
        if not want.numel():
            return Error()
        if unjudged is None and self._is_on_cpu:
            rows = sums_on_cpu(got, want, accuracy, is_sized=beside is None)
        # So are the largest error and the squares, where all are.
        if not rows or not all(math.isfinite(sum(row[:2])) for row in rows):
            sums = []
            for g, w, skip in chunks(got, want, unjudged):
                error, is_misplaced = differences(g, w, skip, got.dtype)
                if not self.tells_nan_from_inf:
                    is_misplaced &= torch.isfinite(g) | torch.isfinite(w)
                value = torch.where(torch.isfinite(w), w.abs(), 0.0)
                sums.append(sums_of(error, value, accuracy, is_misplaced, is_sized=beside is None))
            rows = torch.stack(sums).tolist()
        max_abs, squares, largest, squares_of_values, beyond, misplaced = zip(*rows, strict=True)
        found = Error(
            max(max_abs), math.sqrt(sum(squares) / want.numel()), max(largest),
            math.sqrt(sum(squares_of_values) / want.numel()), int(sum(misplaced)),
            int(sum(beyond)),
        )  # fmt: skip
        return found if beside is None else found.beside(beside)


def are_close(first: torch.Tensor, second: torch.Tensor, tolerance: float) -> bool:
    """Whether no element differs by more than a part of itself and of the largest one.

    NaN is like NaN; with a tolerance of 0 all elements are the same.
    """
    import torch

    largest = 0.0
    for a, _, _ in chunks(first, second, None) if tolerance else ():
        largest = max(largest, float(torch.where(torch.isfinite(a), a.abs(), 0.0).max()))
    return all(
        torch.allclose(a.double(), b, tolerance, tolerance * largest, equal_nan=True)
        for a, b, _ in chunks(first, second, None)
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """How large the error of one tensor may be, and why (for the message)."""

    max_abs: float
    rms_abs: float
    why: str
    is_elementwise: bool = False  # no element beyond atol + rtol * |value| is enough as well
    is_relative: bool = True  # to PyTorch's own error, which is another for every draw

    def accepts(self, error: Error) -> bool:
        """Whether an error is within them."""
        if error.num_misplaced:
            return False
        if self.is_elementwise and not error.num_beyond:
            return True
        return error.max_abs <= self.max_abs and error.rms_abs <= self.rms_abs

    def excess(self, error: Error) -> float:
        """Return how many times the limit an error is; infinite where no chance is in it."""
        if self.accepts(error):
            return 0.0
        if error.num_misplaced or not self.is_relative or self.max_abs == 0.0:
            return math.inf
        return max(error.max_abs / self.max_abs, error.rms_abs / self.rms_abs)


def limits_of(
    name: str,
    baseline: Error,
    num_rows: int,
    accuracy: Accuracy,
    *,
    dtype: str = "float32",
    converted: str = "",
) -> Limits:
    """Return the limits of an output or a buffer by the class of accuracy.

    - float32: twice PyTorch float32's own rms and max error on this probe (4 times for batches
      under 32), or 16 * 2^-24 of the largest value, whichever is larger (2^-48 where all values
      are 0); 32 * 2^-24 for buffers,
      since a variance is quadratic in what it is computed from: twice the relative error (seen:
      PyTorch's own product with other statistics, 16.03 * 2^-24 on heavy tails);
    - pytorch: the same, beside PyTorch's own error with its settings as they are installed;
    - tf32: once PyTorch TF32's own, with the same floor. Two equally good kernels that sum in
      another order differ by chance: the rms by 1 %, the largest error of millions by 10 % (seen
      on an H200 between PyTorch's own algorithms), so 1.02 and 1.25 times are taken as once;
      twice for buffers, whose few elements leave the ratio of two maxima more to chance;
    - tolerance: every element within atol + rtol * |value|, or all within twice the baseline's
      own largest error (which is more where the baseline leaves the tolerance, as on x + 100);
      for buffers, |value| is that of the largest element;
    - what is float16 or bfloat16 in the reference, in all classes: four times PyTorch's own
      error, or 2 units in the last place of the largest value (1 of the rms value);
    - what is float32 in a module that was `converted` to one of them, statistics of products of
      that type say: four times PyTorch's own error, or an eighth of that unit. Sums in another
      order are rounded to another neighbour; statistics that are of 16 bits are not as near;
    - what is float64 in the reference, in the first two classes: 2^-38 of the largest value, or
      twice PyTorch's own error where a part of it is float32; 32 * 2^-24 for buffers of a module
      that was `converted` to it after calls in float32. Where all is float64, as the oracle
      is, PyTorch's own error is not known; float32 is not as near.
    """
    infinite = float("inf")
    is_buffer = name.startswith("buffer.")
    if dtype in HALF_ULP:
        ulp = HALF_ULP[dtype]
        most = max(4.0 * baseline.max_abs, 2.0 * ulp * baseline.largest)
        rms = max(4.0 * baseline.rms_abs, ulp * baseline.rms_value)
        return Limits(most, rms, f"4 x PyTorch's own {baseline.max_abs:.3g} in {dtype}")
    if converted in HALF_ULP and dtype == "float32":
        floor = HALF_ULP[converted] * MADE_OF_HALVES * baseline.largest
        most, rms = max(4.0 * baseline.max_abs, floor), max(4.0 * baseline.rms_abs, floor)
        return Limits(most, rms, f"4 x PyTorch's own {baseline.max_abs:.3g} of {converted}")
    if accuracy.kind == "tolerance":
        limit = 2.0 * baseline.max_abs
        if not is_buffer:
            is_relative = baseline.num_beyond > 0  # else the tolerance is promised, not a class
            return Limits(limit, infinite, accuracy.label, True, is_relative)
        promised = accuracy.atol + accuracy.rtol * baseline.largest
        why = f"{accuracy.label} of the largest value"
        return Limits(max(limit, promised), infinite, why, is_relative=limit > promised)
    if dtype == "float64":
        limit = max(DOUBLE * baseline.largest, 2.0 * baseline.max_abs)
        why = f"2^-38 of {baseline.largest:.3g}, in float64"
        if is_buffer and converted == "float64":  # it keeps what it was before
            limit = max(limit, 2 * FLOOR_ULPS * ULP * baseline.largest)
            why = f"{2 * FLOOR_ULPS} x 2^-24 of {baseline.largest:.3g}, from calls in float32"
        return Limits(limit, limit, why, is_relative=False)
    factor = rms_factor = 4.0 if num_rows < SMALL_BATCH else 2.0
    if accuracy.kind == "tf32":
        factor, rms_factor = (2.0, 2.0) if is_buffer else (1.25, 1.02)
    ulps = 2 * FLOOR_ULPS if is_buffer else FLOOR_ULPS
    # A sum that should be 0 may keep what rounding leaves of its terms, even in float64.
    floor = ulps * ULP * baseline.largest if baseline.largest else CANCELLED
    arithmetic = "" if accuracy.kind == "pytorch" else f" {accuracy.kind}"
    own = f"{factor:g} x PyTorch{arithmetic}'s own {baseline.max_abs:.3g}"
    why = (
        own if factor * baseline.max_abs >= floor else f"{ulps} x 2^-24 of {baseline.largest:.3g}"
    )
    return Limits(
        max(factor * baseline.max_abs, floor), max(rms_factor * baseline.rms_abs, floor), why
    )


def gradient_limits(
    baseline: Error, largest_of_all: float, accuracy: Accuracy, *, dtype: str = "float32"
) -> Limits:
    """Return the limits of a gradient.

    4 times the baseline's own largest error, or 64 * 2^-24 of the tensor's largest element (2^-32
    of what is float64); in the tolerance class at least atol + 10 * rtol of it. A gradient that
    is mathematically 0 (of a bias in front of a batch normalisation) has no size of its own, and
    is compared absolutely: with the largest element of all gradients.
    """
    is_zero = baseline.largest < ZERO * largest_of_all
    largest = largest_of_all if is_zero else baseline.largest
    ulp = DOUBLE if dtype == "float64" else ULP
    limit = max(GRADIENT_FACTOR * baseline.max_abs, GRADIENT_FLOOR_ULPS * ulp * largest)
    if accuracy.kind == "tolerance":
        limit = max(limit, accuracy.atol + 10.0 * accuracy.rtol * largest)
    return Limits(limit, float("inf"), f"PyTorch's own {baseline.max_abs:.3g}")


def first_beyond(
    got: torch.Tensor,
    want: torch.Tensor,
    unjudged: torch.Tensor | None,
    error: Error,
    limits: Limits,
    accuracy: Accuracy,
) -> tuple[int, float]:
    """Return the flat index of the first offending element, and the share of them."""
    start, first, worst, total = 0, None, (-1.0, 0), 0
    for g, w, skip in chunks(got, want, unjudged):
        difference, is_misplaced = differences(g, w, skip, got.dtype)
        is_bad = is_misplaced
        if not error.num_misplaced:
            limit: Any = limits.max_abs
            if limits.is_elementwise:
                limit = accuracy.atol + accuracy.rtol * w.abs()
            is_bad = difference > limit
        count = int(is_bad.sum())
        if count and first is None:
            first = start + int(is_bad.int().argmax())
        total += count
        worst = max(worst, (float(difference.max()), start + int(difference.argmax())))
        start += g.numel()
    return (worst[1] if first is None else first), total / max(1, start)


def index_of(flat: int, tensor: torch.Tensor) -> str:
    """Return a flat position as it is written in Python, `[3, 5]`."""
    places = []
    for size in reversed(tensor.shape):
        places.append(flat % size)
        flat //= size
    return f"[{', '.join(str(place) for place in reversed(places))}]"
