"""How near to float64 an answer must be, and the arithmetic that the baseline gets for it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tuner.errors import ProblemError, did_you_mean

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_TOLERANCE", "Accuracy", "math_mode"]

# Of rtol and atol: ten times what KernelBench allows float16. More would accept wrong answers.
MAX_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How near to float64 an answer must be.

    `float32`, `tf32` and `pytorch` are relative to PyTorch's own error in that arithmetic;
    `pytorch` is its arithmetic as it is installed: TF32 in convolutions on a GPU, not in matrix
    products. `tolerance` accepts every element within `atol + rtol * |value|`, both at most
    `MAX_TOLERANCE`.
    """

    kind: Literal["float32", "tf32", "pytorch", "tolerance"] = "float32"
    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        if self.kind != "tolerance":
            if self.rtol or self.atol:
                raise ValueError(f"accuracy {self.kind} takes no rtol and atol")
        elif not (0.0 <= self.rtol <= MAX_TOLERANCE and 0.0 <= self.atol <= MAX_TOLERANCE):
            raise ValueError(
                f"accuracy: expected 0 <= rtol <= {MAX_TOLERANCE:g} and 0 <= atol <= "
                f"{MAX_TOLERANCE:g}, got rtol={self.rtol:g}, atol={self.atol:g}; "
                "larger tolerances accept wrong answers (KernelBench allows float32 1e-4 and "
                "float16 1e-2); next: name smaller ones, such as 1e-2,1e-2"
            )
        elif self.rtol == 0.0 and self.atol == 0.0:
            raise ValueError("accuracy: rtol and atol are both 0, which no float32 kernel meets")

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> Accuracy:
        """Read a class's name, `1e-4,1e-4` (rtol, atol) or a mapping with rtol and atol.

        Raises:
            ValueError: it is none of these; the message says what was got and what is allowed.
        """
        if isinstance(value, str):
            return cls._parse_word(value)
        if not isinstance(value, Mapping):
            raise ValueError(f"accuracy: got {value!r}; expected {_ACCURACY_FORMS}")
        unknown = [str(name) for name in value if name not in ("rtol", "atol")]
        missing = [name for name in ("rtol", "atol") if name not in value]
        if unknown or missing:
            problem = f"unknown {unknown[0]!r}" if unknown else f"{missing[0]!r} is missing"
            raise ValueError(f"accuracy: {problem}; expected {_ACCURACY_FORMS}")
        return cls("tolerance", _tolerance(value["rtol"]), _tolerance(value["atol"]))

    @classmethod
    def _parse_word(cls, text: str) -> Accuracy:
        word = text.strip().lower()
        for kind in _KINDS:
            if word == kind:
                return cls(kind)
        # The label ("rtol=1e-4,atol=1e-4") is read back as well.
        form = re.fullmatch(r"(?:rtol=)?([^,=]+),\s*(?:atol=)?([^,=]+)", word)
        if form is None:
            hint = did_you_mean(word, _KINDS)
            raise ValueError(
                f"accuracy: got {text!r}; expected {_ACCURACY_FORMS}" + (hint and f"\n  {hint}")
            )
        return cls("tolerance", _tolerance(form[1]), _tolerance(form[2]))

    @property
    def label(self) -> str:
        """The class's name or `rtol=1e-4,atol=1e-4`; `parse` reads it back."""
        if self.kind != "tolerance":
            return self.kind
        return f"rtol={_short(self.rtol)},atol={_short(self.atol)}"

    @property
    def words(self) -> str:
        """What is accepted, in plain words."""
        if self.kind == "tolerance":
            return f"each element within {self.atol:g} + {self.rtol:g} times its value"
        own = {"float32": "PyTorch float32's", "tf32": "PyTorch TF32's", "pytorch": "PyTorch's"}
        times = "" if self.kind == "tf32" else "twice "
        return f"error at most {times}{own[self.kind]} own"

    @property
    def tf32(self) -> tuple[bool, bool]:
        """Whether the baseline's float32 products may be TF32: by matmul, by cuDNN."""
        return self.kind == "tf32", self.kind in ("tf32", "pytorch")

    @property
    def arithmetic(self) -> str:
        """How the baseline computes float32 on a GPU, in words."""
        matmul, cudnn = self.tf32
        if matmul == cudnn:
            return f"float32, TF32 {'on' if matmul else 'off'}"
        return "float32, TF32 off in matmul, on in cuDNN"

    def require_on(self, device: str | torch.device) -> None:
        """Raise ProblemError when `device` cannot compute this class's baseline."""
        kind = str(device).partition(":")[0]
        if self.kind == "tf32" and kind != "cuda":
            raise ProblemError(
                f"accuracy tf32 is not available on {kind}: TF32 is arithmetic of NVIDIA's tensor "
                "cores, so there is no PyTorch TF32 answer to compare with; "
                "use float32, or {rtol, atol}"
            )


_KINDS: tuple[Literal["float32", "tf32", "pytorch"], ...] = ("float32", "tf32", "pytorch")
_ACCURACY_FORMS = (
    "'float32', 'tf32', 'pytorch', 'RTOL,ATOL' such as '1e-4,1e-4', or {rtol: ..., atol: ...}"
)


def _tolerance(value: object) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        return float(value)
    except ValueError:
        raise ValueError(f"accuracy: {value!r} is no number; expected {_ACCURACY_FORMS}") from None


def _short(value: float) -> str:
    """Format 0.0001 as 1e-4 (Python would write 0.0001 or 1e-04), without losing a digit."""
    shortest = next(text for n in range(18) if float(text := f"{value:.{n}e}") == value)
    mantissa, _, exponent = shortest.partition("e")
    return f"{mantissa}e{int(exponent)}" if abs(int(exponent)) > 1 else repr(value)


@contextlib.contextmanager
def math_mode(accuracy: Accuracy) -> Iterator[None]:
    """Set PyTorch's arithmetic for float32 products to that of the class, and put it back.

    `tf32` allows TF32 in matrix products and convolutions, `pytorch` in convolutions alone, as
    PyTorch does by itself; all others forbid it in both.
    """
    import torch

    matmul_before = torch.get_float32_matmul_precision()
    cudnn_before = torch.backends.cudnn.allow_tf32
    matmul, cudnn = accuracy.tf32
    try:
        torch.set_float32_matmul_precision("high" if matmul else "highest")
        torch.backends.cudnn.allow_tf32 = cudnn
        yield
    finally:
        torch.set_float32_matmul_precision(matmul_before)
        torch.backends.cudnn.allow_tf32 = cudnn_before
