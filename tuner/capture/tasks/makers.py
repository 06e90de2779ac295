"""How a template makes large products of float32, or convolutions, in place of PyTorch's calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tuner.capture.tasks.library import Call

__all__ = ["INCLUDE_PRODUCTS", "Products", "parameter"]

INCLUDE_PRODUCTS = '{% include "_lib/triton_products.py" %}\n'
_CHANNELS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Products:
    """How a template makes large products of float32, or convolutions.

    Attributes:
        title: more words for the template's.
        function: that computes one.
        tail: further arguments of the function, each after a comma.
        requires: lines of the head, what must hold.
        parameters: lines of the head, by the parameter's name; words as `<channels>` there are by
            how many channels the convolutions have, `<weight>` and `<k>` by the larger operand.
        include: the functions' text.
        takes_epilogues: whether pointwise work behind a product can be part of its kernel.
        takes_steps: whether the products of a step of training are made so as well.
        takes_batches: whether it makes products of several matrices, and those whose sums are
            longer than one sum in float32 should be.
        of: what it makes: products of matrices, convolutions, or those of each channel by itself.
        more: numbers that its function gets behind its parameters.
        precision: what it computes in, as `datasheets.peak_tflops` names it.
        behind: the function that computes one with what is behind it, if that is another.
    """

    title: str
    function: str
    tail: str
    requires: str
    parameters: dict[str, str]
    include: str
    takes_epilogues: bool = False
    takes_steps: bool = False
    takes_batches: bool = False
    of: Literal["matrices", "images", "planes"] = "matrices"
    more: tuple[int, ...] = ()
    precision: str = "fp16x3"
    behind: str = ""

    @property
    def convolves(self) -> bool:
        """Whether it makes convolutions, and no products of matrices."""
        return self.of != "matrices"

    def declared(self, calls: Iterable[Call]) -> str:
        """Return the head's lines of its parameters, where it makes these calls."""
        most = max((call.shape[1] for call in calls if len(call.shape) > 1), default=1)
        values = [value for value in _CHANNELS if value < 2 * most] or [*_CHANNELS[:1]]
        channels = min(values[-1], 128)
        text = "".join(self.parameters.values()).replace("<channels>", str(channels))
        text = text.replace("<part>", str(min(channels, 64)))
        text = text.replace("<depth>", "64" if channels == 128 else "32")
        text = text.replace("<warps>", "8" if channels == 128 else "4")
        return text.replace("<all channels>", str(values[-3:]))


def parameter(name: str, about: str, rest: str) -> dict[str, str]:
    """Return a line of the head, by the parameter's name; `rest` is its default and its values."""
    return {name: f'  {name}: {{about: "{about}", {rest}}}\n'}
