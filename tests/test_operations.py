"""Every pointwise operation of generated C++, beside float64 over the whole of float32."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cpu_machine import GPP, VECTORS, WIDTH
from shared_builds import built_once
from torch import Tensor

from tuner.capture.nests.operations import OPERATIONS, converted, emit, literal
from tuner.kernel.family import builtin_folder
from tuner.kernel.rendering import rendered
from tuner.kernel.toolchain import CPP_FLAGS

TEMPLATES = builtin_folder()
WIDTHS = (4, 8, 16)
COUNT = 2**20  # random bit patterns of each operand

# Attributes whose values are no defaults; exact in float32, as the oracle's are.
ATTRIBUTES = {
    "leaky_relu": {"slope": 0.125},
    "elu": {"alpha": 1.5},
    "softplus": {"beta": 2.0, "threshold": 16.0},
    "hardtanh": {"lo": -0.75, "hi": 2.5},
    "clamp": {"lo": -3.0, "hi": 1e30},
}
CASES = [(name, {}) for name in OPERATIONS] + list(ATTRIBUTES.items())


CONSTANTS = [0.0, -0.0, 0.1, -1.5, 1e-45, 3.4028235e38, 1e39, -math.inf, math.nan, 7, True]


def _name(case: tuple[str, dict[str, float]]) -> str:
    return case[0] + ("_with_attributes" if case[1] else "")


def _gelu_tanh(x: Tensor) -> Tensor:
    argument = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * torch.sigmoid(argument)


def _elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x))


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    z = x * beta
    soft = (z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))) / beta
    return torch.where(z > threshold, x, soft)


def _selu(x: Tensor) -> Tensor:
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return torch.where(x > 0, scale * x, scale * alpha * torch.expm1(x))


# PyTorch's function of each; asked in float32 for what is special.
PYTORCH: dict[str, Callable[..., Tensor]] = {
    # In float32 it gives Inf of a scalar Inf, and NaN where Inf is one of several.
    "gelu": lambda x: F.gelu(x.double()).to(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "product": torch.mul,
    "cube": lambda x: x**3,
    "leaky_relu": lambda x, slope=0.01: F.leaky_relu(x, slope),
    "softplus": lambda x, beta=1.0, threshold=20.0: F.softplus(x, beta, threshold),
    "elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "hardtanh": lambda x, lo=-1.0, hi=1.0: F.hardtanh(x, lo, hi),
    "clamp": lambda x, lo=-math.inf, hi=math.inf: torch.clamp(x, lo, hi),
    "where": lambda m, a, b: torch.where(m != 0, a, b),
    "logical_and": lambda a, b: torch.logical_and(a, b).to(a),
    "logical_or": lambda a, b: torch.logical_or(a, b).to(a),
    "logical_not": lambda a: torch.logical_not(a).to(a),
    "isnan": lambda a: torch.isnan(a).to(a),
    **{
        name: lambda a, b, name=name: getattr(torch, name)(a, b).to(a)
        for name in ("lt", "le", "gt", "ge", "eq", "ne")
    },
}
for _op in OPERATIONS:
    if _op not in PYTORCH:
        PYTORCH[_op] = getattr(torch, _op, None) or getattr(F, _op)

# The same in float64, where PyTorch's own loses digits there too.
EXACT = {
    **PYTORCH,
    "gelu": lambda x: x * 0.5 * torch.special.erfc(-x / math.sqrt(2)),
    "gelu_tanh": _gelu_tanh,
    "elu": _elu,
    "selu": _selu,
    "softplus": _softplus,
}


def _source(width: int) -> str:
    """The C++ text with a function for every case: three arrays in, one out."""
    functions = []
    for case in CASES:
        op, attributes = case
        operation = OPERATIONS[op]
        loads = [f"simd::load({array} + i)" for array in "abc"]
        operands = [
            converted(load, "float", kind)
            for load, kind in zip(loads, operation.takes, strict=False)
        ]
        value = converted(emit(op, operands, attributes), operation.gives, "float")
        functions.append(
            f'extern "C" void test_{_name(case)}(const float* a, const float* b, const float* c,'
            " float* out, int64_t count) {\n"
            "  for (int64_t i = 0; i < count; i += simd::kWidth)\n"
            f"    simd::store(out + i, {value});\n}}\n"
        )
    for name in ("sum_of", "wide_sum_of", "max_of", "min_of"):
        functions.append(
            f'extern "C" double test_{name}(const float* a) {{'
            f" return math::{name}(simd::load(a)); }}\n"
        )
    for name in ("sum_of", "max_of", "min_of"):
        functions.append(
            f'extern "C" double test_double_{name}(const double* a) {{'
            f" return math::{name}(simd::load(a)); }}\n"
        )
    for op in GROWING:
        value = emit(op, ["simd::load(a + i)"])
        functions.append(
            f'extern "C" void test_{op}_less(const float* a, const float* b, const float*,'
            " float* out, int64_t count) {\n"
            "  for (int64_t i = 0; i < count; i += simd::kWidth)\n"
            f"    simd::store(out + i, {value} - simd::load(b + i));\n}}\n"
        )
    values = ", ".join(f"({literal(value)})[0]" for value in CONSTANTS)
    functions.append(
        f'extern "C" float test_constant(int i) {{ const float all[] = {{{values}}};'
        " return all[i]; }\n"
    )
    head = "#include <algorithm>\n#include <cstdint>\n"
    parts = [f'{{% include "_lib/{name}.hpp" %}}\n' for name in ("cpu_simd", "cpu_math")]
    text = head + "".join(parts)
    return rendered(TEMPLATES / "test", text, [TEMPLATES], {"width": width}) + "".join(functions)


@functools.cache
def _library(width: int) -> ctypes.CDLL:
    if GPP is None:
        pytest.skip("needs g++, which is not on the PATH")
    flags = [f"-march={VECTORS.march}" if flag == "-march=native" else flag for flag in CPP_FLAGS]
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    if 32 * width > VECTORS.bits:  # how such vectors are passed changes with the registers
        warnings.append("-Wno-psabi")
    command = [GPP, *flags, "-shared", "-fPIC", *warnings]
    return ctypes.CDLL(str(built_once(_source(width), ".cpp", command)[0]))


def _run(width: int, case: tuple[str, dict[str, float]], operands: list[Tensor]) -> Tensor:
    count = operands[0].numel()
    assert count % 16 == 0
    out = torch.empty(count)
    arrays = [*operands, *[operands[0]] * (3 - len(operands))]
    function = getattr(_library(width), f"test_{_name(case)}")
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64]
    function.restype = None
    function(*(array.data_ptr() for array in arrays), out.data_ptr(), count)
    return out


GROWING = ("exp", "exp2", "expm1")


@pytest.mark.parametrize("op", GROWING)
def test_infinity_less_infinity_is_no_number_also_where_products_and_sums_fuse(op):
    """A fused sum takes the product as it is before it is rounded to infinity."""
    a = torch.tensor([math.inf, 1e4, 200.0, 129.0, 1.0, -math.inf, math.nan, 88.0] * 2)
    operands = [a, torch.full_like(a, math.inf)]
    expected = PYTORCH[op](a) - operands[1]
    assert expected[:4].isnan().all() and expected[4] == -math.inf
    for width in WIDTHS:
        got = _run(width, (f"{op}_less", {}), operands)
        torch.testing.assert_close(got, expected, equal_nan=True)


SPECIAL = [
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0),
    *(1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, -1.1754944e-38, 3.4028235e38, -3.4028235e38),
]


def _of_bits(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


@functools.cache
def _numbers(num_operands: int) -> list[Tensor]:
    """Operands: special ones in all pairs, every exponent, halves, ordinary and any bits."""
    draw = np.random.default_rng(7)
    mantissas = np.array([0, 1, 0x3504F3, 0x3504F4, 0x400000, 0x7FFFFE, 0x7FFFFF])
    grid = (np.arange(512)[:, None] << 23 | mantissas).ravel()
    columns = []
    for at in range(num_operands):
        special = torch.tensor(SPECIAL)
        repeated = special.repeat_interleave(len(SPECIAL)) if at else special.repeat(len(SPECIAL))
        exponents = _of_bits(draw.permutation(grid) if at else grid)
        halves = (
            torch.arange(-4096, 4096) / 2 if at != 1 else torch.arange(-4096, 4096) % 97 - 48.0
        )
        ordinary = torch.from_numpy(
            np.concatenate(
                [draw.uniform(-scale, scale, 2**16) for scale in (1.0, 5.0, 20.0, 110.0, 1e5)]
            ).astype(np.float32)
        )
        if at == 1:
            ordinary = torch.roll(ordinary, 2**16)
        anything = _of_bits(draw.integers(0, 2**32, COUNT, dtype=np.uint64))
        columns.append(torch.cat([repeated, exponents, halves, ordinary, anything]))
    length = columns[0].numel() // 16 * 16
    return [column[:length].contiguous() for column in columns]


def _errors(got: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """How far float32 numbers are from float64 ones, and a ULP there. Inf counts as 2^128."""
    nearest = exact.float()
    _, exponent = torch.frexp(exact)  # of 1.0: 1
    ulp = torch.ldexp(torch.ones_like(exact), exponent.clamp(-125, 128) - 24)
    top = torch.tensor(2.0**128, dtype=torch.float64)
    finite = torch.where(got.isinf(), torch.copysign(top, got.double()), got.double())
    same = (got == nearest) & nearest.isinf() | (got.isnan() & nearest.isnan())
    return torch.where(same, 0.0, (finite - exact).abs()), ulp


def _constants(op: str, attributes: dict[str, float]) -> dict[str, float]:
    """All attributes of a case as the float32 numbers that both sides compute with."""
    values = {**OPERATIONS[op].attributes, **attributes}
    return {name: ctypes.c_float(value).value for name, value in values.items()}


@pytest.mark.parametrize("case", CASES, ids=_name)
@pytest.mark.parametrize("width", WIDTHS)
def test_an_operation_is_as_exact_as_the_table_says(width, case):
    """Also where vectors are wider than the registers: the compiler splits them."""
    op, attributes = case
    operands = _numbers(OPERATIONS[op].arity)
    if width != WIDTH:  # the same text: fewer numbers will do
        operands = [operand[: 2**18].contiguous() for operand in operands]
    got = _run(width, case, operands)
    exact = EXACT[op](*(operand.double() for operand in operands), **_constants(op, attributes))
    error, ulp = _errors(got, exact)
    operation = OPERATIONS[op]
    excess = error - operation.ulp * ulp - operation.absolute * 2.0**-24
    worst = int(torch.where(excess.isnan(), math.inf, excess).argmax())  # NaN on one side only
    said = [float(operand[worst]) for operand in operands]
    assert excess[worst] <= 0, f"{op} of {said}: {float(got[worst])}, not {float(exact[worst])}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_special_values_are_pytorch_s(case):
    """NaN, Inf and the signs of zeros that come of zeros, Inf, NaN and a few ordinary numbers."""
    op, attributes = case
    num_pairs = len(SPECIAL) ** 2 // 16 * 16
    operands = [operand[:num_pairs].contiguous() for operand in _numbers(OPERATIONS[op].arity)]
    got = _run(WIDTH, case, operands)
    theirs = PYTORCH[op](*operands, **_constants(op, attributes))
    ordinary = [operand.abs().log2().abs() < 100 for operand in operands]
    special = [operand.isnan() | operand.isinf() | (operand == 0) for operand in operands]
    asked = torch.stack([a | b for a, b in zip(ordinary, special, strict=True)]).all(0)
    for what in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = asked & (what(got) != what(theirs))
        assert not wrong.any(), (what, [operand[wrong] for operand in operands], got[wrong])
    wrong = asked & (got == 0) & (theirs == 0) & (got.signbit() != theirs.signbit())
    assert not wrong.any(), ([operand[wrong] for operand in operands], got[wrong])


def _kernels() -> str:
    """The Triton text with a kernel for every case: three arrays in, one out."""
    text = "import triton\nimport triton.language as tl\n"
    text += "from triton.language.extra import libdevice\n"
    for op, attributes in CASES:
        operation = OPERATIONS[op]
        operands = [
            converted(name, "float", kind, "triton")
            for name, kind in zip("abc", operation.takes, strict=False)
        ]
        value = emit(op, operands, attributes, "triton")
        text += (
            f"\n\n@triton.jit\ndef test_{_name((op, attributes))}(a, b, c, out, count):\n"
            "    at = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)\n"
            + "".join(f"    {n} = tl.load({n} + at, mask=at < count, other=0.0)\n" for n in "abc")
            + f"    value = {converted(value, operation.gives, 'float', 'triton')}\n"
            "    tl.store(out + at, value, mask=at < count)\n"
        )
    return text


@functools.cache
def _on_gpu(folder: Path) -> ModuleType:
    path = folder / "kernels.py"
    path.write_text(_kernels())
    spec = importlib.util.spec_from_file_location("kernels_of_operations", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What cancels in these, as in PyTorch's own.
OF_SMALL_RESULTS = {"gelu": 2.0**-23, "gelu_tanh": 2.0**-21, "mish": 2.0**-23}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_an_operation_in_triton_is_nearly_as_exact_and_as_special(case, tmp_path_factory):
    op, attributes = case
    numbers = _numbers(OPERATIONS[op].arity)
    operands = [operand.cuda() for operand in numbers]
    out = torch.empty_like(operands[0])
    kernels = _on_gpu(tmp_path_factory.getbasetemp())
    arrays = [*operands, *[operands[0]] * (3 - len(operands))]
    count = out.numel()
    getattr(kernels, f"test_{_name(case)}")[(-(-count // 1024),)](*arrays, out, count)
    got, constants = out.cpu(), _constants(op, attributes)
    exact = EXACT[op](*(operand.double() for operand in numbers), **constants)
    error, ulp = _errors(got, exact)
    operation = OPERATIONS[op]
    # Functions of CUDA's library take denormals for 0, as arguments and as results.
    allowed = (2 * operation.ulp + 4 * (operation.ulp > 0.5)) * ulp + 2.0**-120
    excess = error - allowed - operation.absolute * 2.0**-24 - OF_SMALL_RESULTS.get(op, 0.0)
    if op == "pow":
        excess -= 12 * ulp
        excess[numbers[0].abs() < 2.0**-126] = 0.0
    worst = int(torch.where(excess.isnan(), math.inf, excess).argmax())
    said = [float(operand[worst]) for operand in numbers]
    assert excess[worst] <= 0, f"{op} of {said}: {float(got[worst])}, not {float(exact[worst])}"


@pytest.mark.parametrize("function", ["sin", "cos"])
def test_numbers_too_large_for_the_fast_reduction_are_turned_as_exactly(function):
    x = torch.cat([torch.logspace(5, 38, 2**12), torch.linspace(1e5, 2e5, 2**12)])
    got = _run(WIDTH, (function, {}), [x])
    error, ulp = _errors(got, getattr(torch, function)(x.double()))
    assert (error <= OPERATIONS[function].ulp * ulp).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_vector_is_reduced_in_float32_and_in_float64(width):
    library = _library(width)

    def asked(name: str, values: Tensor) -> float:
        function = getattr(library, f"test_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_double
        return float(function(values.data_ptr()))

    x = torch.randn(width, generator=torch.Generator().manual_seed(3))
    for prefix, values in (("", x), ("double_", x.double()[: width // 2].contiguous())):
        assert asked(f"{prefix}sum_of", values) == pytest.approx(float(values.sum()), rel=1e-5)
        assert asked(f"{prefix}max_of", values) == float(values.max())
        assert asked(f"{prefix}min_of", values) == float(values.min())
        for lane in range(len(values)):
            poisoned = values.clone()
            poisoned[lane] = math.nan
            assert math.isnan(asked(f"{prefix}max_of", poisoned))
            assert math.isnan(asked(f"{prefix}min_of", poisoned))
    assert asked("wide_sum_of", x) == pytest.approx(float(x.double().sum()), rel=1e-14)


def test_a_literal_is_the_nearest_float32():
    function = _library(WIDTH).test_constant
    function.restype = ctypes.c_float
    got = torch.tensor([function(i) for i in range(len(CONSTANTS))])
    expected = torch.tensor([float(value) for value in CONSTANTS], dtype=torch.float64).float()
    assert torch.equal(got.isnan(), expected.isnan())
    there = ~expected.isnan()
    assert torch.equal(got[there].view(torch.int32), expected[there].view(torch.int32))


def test_literals_are_spelled_for_each_language():
    assert literal(0.1) == "math::splat(0x1.99999ap-4f)"
    assert literal(-2.0, "cuda") == "(-0x1p+1f)"
    assert literal(0.1, "triton") == "0.10000000149011612"
    assert literal(-math.inf, "triton") == 'float("-inf")'


@pytest.mark.parametrize("language", ["cpp", "cuda", "triton"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_an_operation_is_written_in_every_language(op, language):
    operation = OPERATIONS[op]
    names = ["p", "q", "r"][: operation.arity]
    text = emit(op, names, language=language)
    assert all(name in text for name in names) and text.count("(") == text.count(")")
    assert operation.flop >= 1 and len(names) == len(operation.takes)
    if language == "triton":
        compile(text, op, "eval")
    if language == "cpp":
        assert "{" not in text


def test_what_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match="no such operation: 'sinh'"):
        emit("sinh", ["x"])
    with pytest.raises(ValueError, match="add takes 2 operands, got 1"):
        emit("add", ["x"])
    with pytest.raises(ValueError, match="elu has no attribute slope"):
        emit("elu", ["x"], {"slope": 1.0})
    assert converted("m", "mask", "mask") == "m"
    assert converted("m", "mask", "float") == "math::to_floats(m)"
    assert converted("x", "float", "mask", "cuda") == "(x != 0.0f)"
