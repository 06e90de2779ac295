"""One loop nest: what each pass over the columns of a row computes.

    pass 0 .. p     sweeps over the columns of a row; a reduction over the columns ends a pass,
                    and what follows from it for the row is computed before the next one
    the last pass   writes what varies over the columns

A scan, a sum or product of the columns up to each one, is a statement of a pass that takes the
columns in order. A nest with scans reduces nothing: it is one pass.

What does not is stored once a row. Tensors are contiguous, or images that lie channels last, so
that a view that keeps their order changes nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tuner.capture.graph.graph import Tensor, in_order
from tuner.capture.nests.batch_numbers import divisor_text, number_text
from tuner.capture.nests.operations import Kind, converted, emit, operation_of
from tuner.capture.nests.precision import FLOATS, Precision
from tuner.capture.nests.space import Space
from tuner.trial import Language

__all__ = [
    "COLUMN",
    "DTYPES",
    "Axis",
    "Nest",
    "Output",
    "Pass",
    "Reduction",
    "Scan",
    "Statement",
    "Tap",
    "emitted",
    "scale_text",
    "still_needed",
]

Fold = Literal["sum", "amax", "amin", "argmax", "argmin"]
COLUMN = "column index"  # the value that says which column it is, as a float
DTYPES = {*FLOATS, "int64", "bool"}  # of what is read and written


@dataclass(frozen=True, slots=True)
class Statement:
    """One operation on vectors of floats; operands are names of values, or numbers."""

    name: str
    op: str
    operands: tuple[str | float | bool, ...]
    attrs: Mapping[str, object]

    @property
    def refs(self) -> list[str]:
        """The names of the values that it reads."""
        return [operand for operand in self.operands if isinstance(operand, str)]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A value a row: `fold` over the columns of `value`.

    A sum is multiplied by `scale` before it is rounded: a mean of equal numbers is that number.
    `is_wide`: a mean that PyTorch merges from means, which no sum on the way can overflow.
    `is_mean`: over the batch, too, so that its `scale` is computed at the call, of the number of
    columns, less what `less` says: another batch has another.
    """

    name: str
    fold: Fold
    value: str
    scale: float = 1.0
    is_wide: bool = False
    is_mean: bool = False
    less: float = 0.0

    @property
    def refs(self) -> list[str]:
        """The name of the value that it reads."""
        return [self.value]

    @property
    def is_index(self) -> bool:
        """Whether it is the number of a column, not a float."""
        return self.fold in ("argmax", "argmin")


@dataclass(frozen=True, slots=True)
class Scan(Statement):
    """A statement that needs the columns before it: `fold` of all up to each one.

    Its operand is one value. It is computed in float64 and rounded once.
    """

    fold: Literal["sum", "prod"] = "sum"
    is_backwards: bool = False

    @property
    def neutral(self) -> float:
        """What changes nothing: the value before the first column, and of what is none."""
        return 0.0 if self.fold == "sum" else 1.0


@dataclass(frozen=True, slots=True)
class Output:
    """A value that is written, as which dtype, and its number of elements."""

    name: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class Axis:
    """How windows go along an axis: sizes of the pooled tensor and the input, in elements.

    `stride` is how far two windows are apart, `first` where the first one is read. Of `every` so
    many places in the input's stead the first `reach` read one element, the others nothing.
    """

    made: int
    given: int
    stride: int
    first: int
    every: int = 1
    reach: int = 1

    @property
    def is_inside(self) -> bool:
        """Whether nothing beyond the edges is read."""
        last = (self.made - 1) * self.stride + self.first
        is_before_end = max(self.first, last) // self.every < self.given
        return min(self.first, last) >= 0 and is_before_end and self.reach == self.every


@dataclass(frozen=True, slots=True)
class Tap:
    """A value whose elements lie in `source` as the last axes say; `fill` beyond its edges.

    `is_narrow`: neither tensor has 2^31 elements. `channels` is how many elements lie beside each
    other at each place: of images that lie channels last.
    """

    source: str
    axes: tuple[Axis, ...]
    fill: float
    is_narrow: bool
    channels: int = 1


@dataclass(slots=True)
class Pass:
    """A sweep over the columns: what it computes, reduces and writes.

    `after` is computed once for the row when it is over.
    """

    statements: list[Statement] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    writes: list[Output] = field(default_factory=list)
    after: list[Statement] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Nest:
    """Loops over a space.

    Attributes:
        space: rows and columns, with what varies over which of their dimensions.
        arguments: what is read, in order.
        before: computed once a row, before the first pass.
        passes: in order.
        outputs: what is written, once each.
        kinds: of values that are no floats: masks.
        taps: values that are read from windows of an argument, by name.
        precision: of the arithmetic.
        indices: values that count the places over which they vary, in row-major order.
        parts: values that are read where they lie in an argument, by name (`Space.parts`).
    """

    space: Space
    arguments: tuple[Tensor, ...]
    before: tuple[Statement, ...]
    passes: tuple[Pass, ...]
    outputs: tuple[Output, ...]
    flops: int
    kinds: Mapping[str, Kind]
    taps: Mapping[str, Tap] = field(default_factory=dict)
    precision: Precision = "float32"
    indices: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_wide(self) -> bool:
        """Whether it computes in float64."""
        return self.precision == "float64"

    @property
    def name(self) -> str:
        """The last value that it gives, which no other task does."""
        return self.outputs[-1].name

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """All of them, in order."""
        return tuple(r for each in self.passes for r in each.reductions)

    @property
    def scans(self) -> tuple[Scan, ...]:
        """All of them, in order; they go the same way."""
        return tuple(s for each in self.passes for s in each.statements if isinstance(s, Scan))

    @property
    def is_backwards(self) -> bool:
        """Whether columns are taken from the last to the first."""
        return any(scan.is_backwards for scan in self.scans)

    @property
    def statements(self) -> list[Statement]:
        """All of them, of rows and of columns."""
        return [*self.before, *(s for p in self.passes for s in (*p.statements, *p.after))]

    @property
    def computed(self) -> set[str]:
        """The names of all values that it computes."""
        return {s.name for s in self.statements} | {r.name for r in self.reductions}

    @property
    def num_elements(self) -> int:
        """Of its space."""
        return self.space.rows * self.space.cols

    def is_whole(self, name: str) -> bool:
        """Whether a value varies over all dimensions."""
        return len(self.space.varies[name]) == len(self.space.sizes)

    def is_inner(self, name: str) -> bool:
        """Whether a value varies over the columns."""
        return bool(self.space.varies[name] & self.space.columns)

    def is_dense(self, name: str) -> bool:
        """Whether a value varies along the tail."""
        return bool(self.space.varies[name] & set(range(self.space.tail, len(self.space.sizes))))

    @property
    def is_transposed(self) -> bool:
        """Whether some tensor lies channels last, and another one does not."""
        return any(map(self.space.is_moved, [*self.stored, *self.taps, *self.parts]))

    @property
    def read(self) -> list[str]:
        """The names of what is loaded at its own strides: arguments, and parts of some."""
        return [*(t.name for t in self.arguments), *self.parts]

    @property
    def stored(self) -> list[str]:
        """The names of what lies in memory: what is read, and what is written."""
        return [*(t.name for t in self.arguments), *(o.name for o in self.outputs)]


def scale_text(reduction: Reduction, size: str, language: Language) -> str:
    """Write the product with a sum's scale; `size` is how the text calls its number of columns."""
    if reduction.is_mean:
        return f" * (1.0 / {divisor_text(reduction.less, size, language)})"
    if math.isnan(reduction.scale):
        return ' * float("nan")' if language == "triton" else " * NAN"
    return "" if reduction.scale == 1.0 else f" * {reduction.scale!r}"


def still_needed(each: Pass, from_memory: Sequence[str]) -> list[Statement]:
    """Return the statements of a pass that are needed where some values come from memory."""
    by_name = {s.name: s for s in each.statements}
    ends = [r.value for r in each.reductions] + [o.name for o in each.writes]
    found = in_order(ends, lambda n: by_name[n].refs if n in by_name else (), from_memory)
    return [s for s in each.statements if s.name in found]


def emitted(
    statement: Statement,
    nest: Nest,
    text_of: Callable[[str], str],
    language: Language = "cpp",
    *,
    is_wide: bool = False,
) -> str:
    """Write the value of a statement, whose operands `text_of` writes.

    With `is_wide` its constants are of float64, and so is what is computed.
    """
    operands = [
        converted(text_of(o), nest.kinds.get(o, "float"), wanted, language)
        if isinstance(o, str)
        else converted(number_text(o, nest.space, language, is_wide), "float", wanted, language)
        for o, wanted in zip(statement.operands, operation_of(statement.op).takes, strict=True)
    ]
    attrs = {name: float(str(value)) for name, value in statement.attrs.items()}
    return emit(statement.op, operands, attrs, language, is_wide=is_wide)
