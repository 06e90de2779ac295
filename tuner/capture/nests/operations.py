"""The pointwise operations that generated kernels compute: how each is written, how exact it is.

The C++ spellings call templates/_lib/cpu_math.hpp and work on vectors of float32; those of CUDA
and Triton work on one float32 and on a block of them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from tuner.trial import Language

__all__ = [
    "OPERATIONS", "Kind", "Operation", "converted", "emit", "literal", "operation_of", "simpler",
]  # fmt: skip

Kind = Literal["float", "mask"]


@dataclass(frozen=True, slots=True)
class Operation:
    """A pointwise operation.

    The spellings are formats: `{0}`, `{1}`, ... stand for the operands and `{slope}` for an
    attribute. Only C++ writes every operand once, so that elsewhere operands are best names.

    Attributes:
        cpp: the C++ spelling, of vectors.
        cuda: the CUDA spelling, of one float.
        triton: the Triton spelling, with `tl` and `libdevice` imported.
        flop: floating-point operations of one element, counted roughly in the C++ function:
            additions, multiplications, divisions, comparisons and selections; conversions and
            integer instructions are not counted. Each is at least 1.
        ulp: how far the C++ function may be from the exact value of its float32 arguments, in
            ULP: distances of neighbouring float32 numbers at that value, 2^-149 for denormals.
            0 where nothing is rounded.
        absolute: what may be added to that, in 2^-24: for small results of large arguments.
        takes: what each operand is; their number is the arity.
        gives: what the result is.
        attributes: constants by name, with PyTorch's default of each.
    """

    cpp: str
    cuda: str
    triton: str
    flop: int
    ulp: float = 0.0
    absolute: float = 0.0
    takes: tuple[Kind, ...] = ("float",)
    gives: Kind = "float"
    attributes: Mapping[str, float] = field(default_factory=dict)

    @property
    def arity(self) -> int:
        """The number of operands, without attributes."""
        return len(self.takes)

    def spelling(self, language: Language) -> str:
        """Return the format for a language."""
        return {"cpp": self.cpp, "cuda": self.cuda, "triton": self.triton}[language]


_TWO: tuple[Kind, ...] = ("float", "float")
_MASKS: tuple[Kind, ...] = ("mask", "mask")


def _infix(sign: str) -> Operation:
    text = f"({{0}} {sign} {{1}})"
    return Operation(text, text, text, 1, 0.5, takes=_TWO)


def _comparison(sign: str) -> Operation:
    text = f"({{0}} {sign} {{1}})"
    return Operation(text, text, text, 1, takes=_TWO, gives="mask")


def _function(
    name: str,
    cuda: str,
    triton: str,
    flop: int,
    ulp: float = 0.0,
    absolute: float = 0.0,
    /,
    **attributes: float,
) -> Operation:
    """Return an operation of one operand that is a function of cpu_math.hpp."""
    arguments = ", ".join(["{0}", *(f"{{{attribute}}}" for attribute in attributes)])
    return Operation(
        f"math::{name}({arguments})", cuda, triton, flop, ulp, absolute, attributes=attributes
    )


_CUDA_SOFTPLUS = (
    "({0} * {beta} > {threshold} ? {0} : "
    "(fmaxf({0} * {beta}, 0.0f) + log1pf(expf(-fabsf({0} * {beta})))) / {beta})"
)
_TRITON_SOFTPLUS = (
    "tl.where({0} * {beta} > {threshold}, {0}, (tl.maximum({0} * {beta}, 0.0) + "
    "libdevice.log1p(libdevice.exp(-tl.abs({0} * {beta})))) / {beta})"
)
_CUDA_CLAMP = "({0} < {lo} ? {lo} : {0} > {hi} ? {hi} : {0})"
_TRITON_CLAMP = "tl.where({0} < {lo}, {lo}, tl.where({0} > {hi}, {hi}, {0}))"
# Those of Triton alone take denormals for 0.
_TRITON_FLOOR = "tl.where(tl.floor({0}) > {0}, tl.floor({0}) - 1.0, tl.floor({0}))"
_TRITON_CEIL = "tl.where(tl.ceil({0}) < {0}, tl.ceil({0}) + 1.0, tl.ceil({0}))"
_EXTREME = "tl.{name}({{0}}, {{1}}, propagate_nan=tl.PropagateNan.ALL)"

OPERATIONS: dict[str, Operation] = {
    # Arithmetic.
    "add": _infix("+"),
    "sub": _infix("-"),
    "mul": _infix("*"),
    # Rounded by itself: no compiler may join it with an addition.
    "product": Operation(
        "math::product({0}, {1})", "__fmul_rn({0}, {1})", "({0} * {1})", 1, 0.5, takes=_TWO
    ),
    "div": Operation("({0} / {1})", "({0} / {1})", "tl.div_rn({0}, {1})", 1, 0.5, takes=_TWO),
    "neg": Operation("(-{0})", "(-{0})", "(-{0})", 1),
    "abs": _function("abs", "fabsf({0})", "tl.abs({0})", 1),
    "square": _function("square", "({0} * {0})", "({0} * {0})", 1, 0.5),
    "cube": Operation("({0} * {0} * {0})", "({0} * {0} * {0})", "({0} * {0} * {0})", 2, 1.5),
    "reciprocal": _function("reciprocal", "(1.0f / {0})", "tl.div_rn(1.0, {0})", 1, 0.5),
    "sqrt": _function("sqrt", "sqrtf({0})", "tl.sqrt_rn({0})", 1, 0.5),
    "rsqrt": _function("rsqrt", "rsqrtf({0})", "tl.div_rn(1.0, tl.sqrt_rn({0}))", 2, 2.0),
    "pow": Operation(
        "math::pow({0}, {1})", "powf({0}, {1})", "libdevice.pow({0}, {1})", 71, 1.0, takes=_TWO
    ),
    # Exponentials and logarithms.
    "exp": _function("exp", "expf({0})", "libdevice.exp({0})", 25, 2.0),
    "exp2": _function("exp2", "exp2f({0})", "libdevice.exp2({0})", 21, 2.0),
    "expm1": _function("expm1", "expm1f({0})", "libdevice.expm1({0})", 37, 2.0),
    "log": _function("log", "logf({0})", "libdevice.log({0})", 37, 2.0),
    "log2": _function("log2", "log2f({0})", "libdevice.log2({0})", 37, 2.0),
    "log1p": _function("log1p", "log1pf({0})", "libdevice.log1p({0})", 54, 2.0),
    # Trigonometry.
    "sin": _function("sin", "sinf({0})", "libdevice.sin({0})", 31, 2.0),
    "cos": _function("cos", "cosf({0})", "libdevice.cos({0})", 29, 2.0),
    # Activations.
    "tanh": _function("tanh", "tanhf({0})", "libdevice.tanh({0})", 43, 2.0),
    "sigmoid": _function(
        "sigmoid",
        "(1.0f / (1.0f + expf(-{0})))",
        "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))",
        29,
        2.5,
    ),
    "silu": _function(
        "silu", "({0} / (1.0f + expf(-{0})))", "tl.div_rn({0}, 1.0 + libdevice.exp(-{0}))", 36, 2.5
    ),
    "gelu": _function(
        "gelu",
        "({0} * normcdff({0}))",
        "({0} * 0.5 * libdevice.erfc({0} * -0.7071067811865476))",
        92,
        8.0,
    ),
    "gelu_tanh": _function(
        "gelu_tanh",
        "({0} / (1.0f + expf(-{0} * (1.59576912f + 0.0713548163f * ({0} * {0})))))",
        "tl.div_rn({0}, 1.0 + libdevice.exp({0} * (-1.5957691216057308 - "
        "0.07135481282989444 * ({0} * {0}))))",
        40,
        4.0,
        1.0,
    ),
    "erf": _function("erf", "erff({0})", "libdevice.erf({0})", 69, 2.0),
    "relu": _function("relu", "({0} < 0.0f ? 0.0f : {0})", "tl.where({0} < 0, 0.0, {0})", 1),
    "leaky_relu": _function(
        "leaky_relu",
        "({0} > 0.0f ? {0} : {slope} * {0})",
        "tl.where({0} > 0, {0}, {slope} * {0})",
        2,
        0.5,
        0.0,
        slope=0.01,
    ),
    "elu": _function(
        "elu",
        "({0} > 0.0f ? {0} : {alpha} * expm1f({0}))",
        "tl.where({0} > 0, {0}, {alpha} * libdevice.expm1({0}))",
        39,
        2.0,
        0.0,
        alpha=1.0,
    ),
    "selu": _function(
        "selu",
        "({0} > 0.0f ? 1.05070098f * {0} : 1.75809934f * expm1f({0}))",
        "tl.where({0} > 0, 1.0507009873554805 * {0}, 1.7580993408473766 * libdevice.expm1({0}))",
        40,
        2.0,
    ),
    "softplus": _function(
        "softplus", _CUDA_SOFTPLUS, _TRITON_SOFTPLUS, 77, 2.0, 0.0, beta=1.0, threshold=20.0
    ),
    "mish": _function(
        "mish",
        "({0} > 20.0f ? {0} : {0} * tanhf(log1pf(expf({0}))))",
        "tl.where({0} > 20, {0}, {0} * libdevice.tanh(libdevice.log1p(libdevice.exp({0}))))",
        40,
        4.0,
    ),
    "hardtanh": _function("clamp", _CUDA_CLAMP, _TRITON_CLAMP, 2, 0.0, 0.0, lo=-1.0, hi=1.0),
    "hardsigmoid": _function(
        "hardsigmoid",
        "({0} <= -3.0f ? 0.0f : {0} >= 3.0f ? 1.0f : ({0} + 3.0f) * (1.0f / 6.0f))",
        "tl.where({0} <= -3, 0.0, tl.where({0} >= 3, 1.0, ({0} + 3.0) * (1.0 / 6.0)))",
        4,
        2.0,
    ),
    "hardswish": _function(
        "hardswish",
        "({0} * (fminf(fmaxf({0} + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f)))",
        "({0} * (tl.minimum(tl.maximum({0} + 3.0, 0.0), 6.0) * (1.0 / 6.0)))",
        5,
        2.0,
    ),
    "softsign": _function(
        "softsign", "({0} / (1.0f + fabsf({0})))", "tl.div_rn({0}, 1.0 + tl.abs({0}))", 3, 2.0
    ),
    "logsigmoid": _function(
        "logsigmoid",
        "(fminf({0}, 0.0f) - log1pf(expf(-fabsf({0}))))",
        "(tl.minimum({0}, 0.0) - libdevice.log1p(libdevice.exp(-tl.abs({0}))))",
        74,
        2.0,
    ),
    # Extremes. NaN in any operand gives NaN.
    "maximum": Operation(
        "math::maximum({0}, {1})",
        "({0} > {1} || {0} != {0} ? {0} : {1})",
        _EXTREME.format(name="maximum"),
        1,
        takes=_TWO,
    ),
    "minimum": Operation(
        "math::minimum({0}, {1})",
        "({0} < {1} || {0} != {0} ? {0} : {1})",
        _EXTREME.format(name="minimum"),
        1,
        takes=_TWO,
    ),
    "clamp": _function(
        "clamp", _CUDA_CLAMP, _TRITON_CLAMP, 2, 0.0, 0.0, lo=-math.inf, hi=math.inf
    ),
    # Selection, comparisons and masks.
    "where": Operation(
        "math::where({0}, {1}, {2})",
        "({0} ? {1} : {2})",
        "tl.where({0}, {1}, {2})",
        1,
        takes=("mask", "float", "float"),
    ),
    "lt": _comparison("<"),
    "le": _comparison("<="),
    "gt": _comparison(">"),
    "ge": _comparison(">="),
    "eq": _comparison("=="),
    "ne": _comparison("!="),
    "logical_and": Operation(
        "({0} & {1})", "({0} && {1})", "({0} & {1})", 1, takes=_MASKS, gives="mask"
    ),
    "logical_or": Operation(
        "({0} | {1})", "({0} || {1})", "({0} | {1})", 1, takes=_MASKS, gives="mask"
    ),
    "logical_not": Operation("(~{0})", "(!{0})", "({0} == 0)", 1, takes=("mask",), gives="mask"),
    "isnan": Operation("math::isnan({0})", "({0} != {0})", "({0} != {0})", 1, gives="mask"),
    # Rounding; `round` takes halves to the even neighbour.
    "sign": _function(
        "sign",
        "static_cast<float>(({0} > 0.0f) - ({0} < 0.0f))",
        "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
        2,
    ),
    "floor": _function("floor", "floorf({0})", _TRITON_FLOOR, 6),
    "ceil": _function("ceil", "ceilf({0})", _TRITON_CEIL, 6),
    "round": _function("round", "rintf({0})", "libdevice.rint({0})", 4),
    "trunc": _function("trunc", "truncf({0})", "libdevice.trunc({0})", 6),
}

# A value as it is once it was stored in a dtype of fewer bits; no operation of the vocabulary.
_ROUNDINGS = {
    f"as_{dtype}": Operation(f"{cpp}({{0}})", cuda, f"({{0}}).to({triton}).to(tl.float32)", 1)
    for dtype, cpp, cuda, triton in (
        ("bfloat16", "halves::rounded<halves::Bfloat16>",
         "__bfloat162float(__float2bfloat16({0}))", "tl.bfloat16"),
        ("float16", "halves::rounded<halves::Float16>",
         "__half2float(__float2half({0}))", "tl.float16"),
        ("float32", "math::as_float32", "static_cast<float>({0})", "tl.single"),  # of float64
    )
}  # fmt: skip


def operation_of(op: str) -> Operation:
    """Return an operation by its name: one of `OPERATIONS`, or a rounding, `as_<dtype>`.

    Raises:
        ValueError: there is no such operation.
    """
    found = OPERATIONS.get(op) or _ROUNDINGS.get(op)
    if found is None:
        raise ValueError(f"no such operation: {op!r}")
    return found


# Kind asked for -> language -> format of a text of the other kind. NaN is true, as in PyTorch.
_CONVERSIONS: dict[Kind, dict[Language, str]] = {
    "float": {
        "cpp": "math::to_floats({0})",
        "cuda": "static_cast<float>({0})",
        "triton": "({0}).to(tl.float32)",
    },
    "mask": {"cpp": "math::is_true({0})", "cuda": "({0} != 0.0f)", "triton": "({0} != 0.0)"},
}


def emit(
    op: str,
    operands: Sequence[str],
    attrs: Mapping[str, float] | None = None,
    language: Language = "cpp",
    *,
    is_wide: bool = False,
) -> str:
    """Write one operation as an expression, in parentheses where it needs them.

    Args:
        op: a name that `operation_of` knows.
        operands: texts of its operands, each of the kind that `Operation.takes` says.
        attrs: attributes that differ from PyTorch's defaults, by name; rounded to float32.
        language: of the texts and of the result.
        is_wide: whether it is computed in float64, and attributes are not rounded.

    Raises:
        ValueError: there is no such operation, or it has other operands or attributes.
    """
    operation = operation_of(op)
    if len(operands) != operation.arity:
        raise ValueError(f"{op} takes {operation.arity} operands, got {len(operands)}")
    given = dict(attrs or {})
    if unknown := sorted(given.keys() - operation.attributes.keys()):
        raise ValueError(f"{op} has no attribute {', '.join(unknown)}")
    values = {**operation.attributes, **given}
    constants = {name: literal(value, language, is_wide=is_wide) for name, value in values.items()}
    return operation.spelling(language).format(*operands, **constants)


def converted(text: str, given: Kind, wanted: Kind, language: Language = "cpp") -> str:
    """Write what is of one kind as the other: a mask as 0.0 and 1.0, a float as `it != 0`."""
    return text if given == wanted else _CONVERSIONS[wanted][language].format(text)


def literal(value: float, language: Language = "cpp", *, is_wide: bool = False) -> str:
    """Write a constant as exactly the float32 that is nearest to `value`; `is_wide`: the float64.

    What is beyond the largest float32 is Inf, as PyTorch converts it. C++ gets it in every lane of
    a vector.
    """
    single = float(value) if is_wide else ctypes.c_float(value).value
    if language == "triton":
        text = repr(single) if math.isfinite(single) else f'float("{single}")'
        return f"tl.full([], {text}, tl.float64)" if is_wide else text
    if math.isnan(single):
        text = '__builtin_nanf("")'
    elif math.isinf(single):
        text = "__builtin_inff()" if single > 0 else "-__builtin_inff()"
    else:
        digits, _, exponent = single.hex().partition("p")
        digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
        text = f"{digits}p{exponent}{'' if is_wide else 'f'}"
    if language == "cuda":
        return f"({text})" if text.startswith("-") else text
    return f"math::splat({text})"


_POWERS = {2: "square", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
T = TypeVar("T")


def simpler(op: str, args: tuple[T, ...]) -> tuple[str, tuple[T, ...]]:
    """Return an operation and its operands, of a power the one that PyTorch takes for it."""
    power = args[1] if op == "pow" else None
    if isinstance(power, int | float) and power == 1:  # as the gradient of a square has it
        return "mul", args
    found = _POWERS.get(power) if isinstance(power, int | float) else None
    return (op, args) if found is None else (found, args[:1])
