"""Numbers of a graph that depend on the batch, such as what a gradient of a mean is divided by.

PyTorch's record holds them as they were at its own batch. Two records, of two batches, tell what
they are at any other one (`any_batch`): a quotient in which the batch is. A kernel computes that
from its own number of rows or columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.capture.nests.operations import literal
from tuner.capture.nests.space import Space
from tuner.trial import Language

__all__ = [
    "BatchNumber",
    "Linear",
    "as_float",
    "divisor_text",
    "number_text",
]


@dataclass(frozen=True, slots=True)
class Linear:
    """`each * batch + fixed`."""

    each: float
    fixed: float

    def at(self, batch: int) -> float:
        """Return its value."""
        return self.each * batch + self.fixed

    def text(self, batch: str) -> str:
        """Write it, of a batch that is a float64."""
        if not self.each:
            return repr(self.fixed)
        grown = batch if self.each == 1 else f"{self.each!r} * {batch}"
        return f"({grown} + {self.fixed!r})" if self.fixed else f"({grown})"


class BatchNumber(float):
    """A number at one batch, which at another one is `above / below` there."""

    __slots__ = ("above", "batch", "below")

    above: Linear
    below: Linear
    batch: int

    def __new__(cls, value: float, above: Linear, below: Linear, batch: int) -> BatchNumber:
        """Return `value`, with what it is at any batch."""
        made = super().__new__(cls, value)
        made.above, made.below, made.batch = above, below, batch
        return made

    def __reduce__(self) -> tuple[object, ...]:
        """Return what makes a copy."""
        return BatchNumber, (float(self), self.above, self.below, self.batch)


def as_float(number: float) -> float:
    """Return a number as a float; one that depends on the batch still does."""
    return number if isinstance(number, BatchNumber) else float(number)


def number_text(number: float, space: Space, language: Language, is_wide: bool) -> str:
    """Write a number as a kernel over a space has it, as the nearest float32 or float64."""
    found = _batch_text(number, space, language) if isinstance(number, BatchNumber) else None
    if found is None:
        return literal(float(number), language, is_wide=is_wide)
    if language == "triton":
        return found if is_wide else f"{found}.to(tl.float32)"
    return f"math::splat(static_cast<simd::Float>{found})"


def divisor_text(less: float, size: str, language: Language) -> str:
    """Write what a sum of `size` numbers is divided by: their number, less so many."""
    found = f"tl.cast({size}, tl.float64)" if language == "triton" else size
    most = "tl.maximum" if language == "triton" else "std::max"
    return f"{most}({found} - {less!r}, 0.0)" if less else found


def _batch_text(number: BatchNumber, space: Space, language: Language) -> str | None:
    """Write a number, as float64, where a kernel knows its rows and columns; None where it cannot.

    The batch is the first dimension of what is looped over.
    """
    if language == "cuda" or not space.sizes or space.sizes[0] % number.batch:
        return None
    is_column = 0 in space.columns
    each = (space.cols if is_column else space.rows) // number.batch
    if language == "triton":
        size = f"tl.cast({'num_columns' if is_column else 'num_rows'}, tl.float64)"
    else:
        size = f"static_cast<double>({'cols' if is_column else 'rows'})"
    batch = size if each == 1 else f"{size} / {float(each)!r}"
    return f"({number.above.text(batch)} / {number.below.text(batch)})"
