"""What a module's operator could gain, as a record and in words; and its graph as lines.

A GPU's bound follows from its datasheet, which no kernel reaches in full; how near one comes is
what a copy of as many bytes takes. A CPU's rates are not known, and PyTorch's copy is no bound
there: a kernel that writes past the caches is faster.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from tuner.capture.outline import Outline
from tuner.review.formatting import count_words, three_digits, us_words
from tuner.wording import percent, shape_words

__all__ = [
    "Gain", "ModuleRecord", "bytes_words", "gain_lines", "graph_lines",
]  # fmt: skip

NEAR = 1.05  # times a bound: what is left is not worth a search
MAX_COLUMN = 44  # characters of a column of the graph, unless one is longer


@dataclass(frozen=True, slots=True)
class Gain:
    """A module's traffic, the device's bound, and PyTorch's own time, where they are known.

    `read_bytes`, `written_bytes` and `flops` are an `Outline`'s, `product_flops` those of its
    products and convolutions. `bound_us` is the datasheet's, `copy_us` what PyTorch takes to copy
    as many bytes, timed like PyTorch's forward (`eager_us`).
    `facts` were seen of PyTorch on the device, named as constraints name them.
    """

    device: str
    is_gpu: bool
    read_bytes: int
    written_bytes: int
    flops: int
    bound_us: float | None
    eager_us: float | None = None
    copy_us: float | None = None
    facts: dict[str, bool] = field(default_factory=dict)
    product_flops: int = 0

    @property
    def num_bytes(self) -> int:
        """Compulsory traffic in bytes."""
        return self.read_bytes + self.written_bytes

    @property
    def ratio(self) -> float | None:
        """How many times the bound PyTorch takes: no kernel gains more."""
        if not self.bound_us or self.eager_us is None:
            return None
        return self.eager_us / self.bound_us

    @property
    def is_nothing(self) -> bool:
        """Whether PyTorch is as fast as the bound, or as a copy, within 5 %."""
        if self.ratio is None or self.eager_us is None:
            return False
        is_like_copy = self.copy_us is not None and self.eager_us <= NEAR * self.copy_us
        return self.ratio <= NEAR or is_like_copy

    @property
    def words(self) -> str:
        """What could be gained, in one sentence."""
        if self.eager_us is None:
            eager = "PyTorch was not timed"
        else:
            eager = f"PyTorch takes {us_words(self.eager_us)}"
        if self.copy_us is not None:
            eager += f", a copy of as many bytes {us_words(self.copy_us)}"
        if not self.bound_us:
            return f"{eager}; the bound is not known: no datasheet's rates of {self.device}"
        bound = f"the bound is {us_words(self.bound_us)}"
        if self.ratio is None:
            return f"{eager}; {bound}"
        share = f"{percent(1 / self.ratio)} of PyTorch's time"
        return f"{eager}; {bound}, {share}: at most {self.ratio:.2f}x to gain"

    @property
    def data(self) -> dict[str, object]:
        """All of it as plain data, what follows from it included."""
        return {**asdict(self), "ratio": self.ratio, "is_nothing": self.is_nothing}


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """What a run knows of the module that its operator was derived from: `module.json`."""

    outline: Outline
    gain: Gain


def graph_lines(outline: Outline) -> list[str]:
    """Return a graph as lines: what is given, steps in order with shapes, rewrites, tasks.

    A dtype is named where it is not float32.
    """
    mode = "training" if outline.is_training else "eval"
    lines = [f"captured graph, in {mode} mode:"]
    rows = [(t.name, t.kind, _form_words(t.shape, t.dtype), "") for t in outline.given]
    for step in outline.steps:
        line = f"line {step.line}" if step.line else ""
        rows.append((step.name, step.text, _form_words(step.shape, step.dtype), line))
    widths = [min(MAX_COLUMN, max((len(row[i]) for row in rows), default=0)) for i in range(3)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[3]]).rstrip())
    lines.append(f"  returns {', '.join(outline.outputs)}")
    lines += [f"rewritten: {step.words}" for step in outline.rewrites]
    if outline.constants:
        lines.append(f"constant for all finite inputs and weights: {', '.join(outline.constants)}")
    for number, task in enumerate(outline.tasks, 1):
        name = task.name or number
        same = f", {task.label}" if task.key else ""
        steps = count_words(len(task.steps), "step")
        own = f", with parameters of its own (...{task.suffix})" if task.suffix else ""
        lines.append(f"task {name}: one {task.kind}, {steps}{same}{own}")
    return lines


def gain_lines(gain: Gain) -> list[str]:
    """Return traffic, arithmetic, bound and what could be gained, a line each."""
    read, written = bytes_words(gain.read_bytes), bytes_words(gain.written_bytes)
    total = bytes_words(gain.num_bytes)
    return [
        f"traffic: {total} ({read} read, {written} written), each input, weight and output once",
        f"arithmetic: at least {_flop_words(gain)}",
        f"to gain: {gain.words}",
    ]


def _flop_words(gain: Gain) -> str:
    others = gain.flops - gain.product_flops
    if not gain.product_flops:
        return f"{others:,} flop, one an element and step"
    return (
        f"{gain.product_flops:,} flop in products, two for each and its sum, and {others:,} "
        "around, one an element and step"
    )


def _form_words(shape: tuple[int, ...], dtype: str) -> str:
    return shape_words(shape) if dtype == "float32" else f"{shape_words(shape)} {dtype}"


def bytes_words(number: int) -> str:
    """Return a number of bytes in the decimal unit that fits it."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{three_digits(number / size)} {unit}"
    return f"{number} B"
