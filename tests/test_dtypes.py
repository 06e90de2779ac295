"""Modules of bfloat16, float16, float64: what is loaded, computed, rounded, stored, declared."""

from __future__ import annotations

import ast
import ctypes
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from cpu_machine import FACTS, FEW_PASSES, GPP, VECTORS, WIDTH, compiled
from shared_builds import built_once
from test_operations import EXACT

from tuner.capture.capture import capture
from tuner.capture.derive import Derived, derived
from tuner.capture.graph.settings import settings_of
from tuner.capture.nests.index_space import NotOneNest
from tuner.capture.nests.operations import OPERATIONS, converted, emit
from tuner.capture.outline import outline_of
from tuner.capture.tasks.step_records import Captured
from tuner.errors import TemplateError
from tuner.evaluate.modules import fused, module_of
from tuner.export.python_operators import python_binding, python_calls
from tuner.export.registration import cpp_binding
from tuner.kernel.binding import bind
from tuner.kernel.family import builtin_folder, load_family
from tuner.kernel.rendering import rendered
from tuner.kernel.signatures import mismatches
from tuner.kernel.toolchain import CPP_FLAGS
from tuner.machine.datasheets import known_device
from tuner.machine.vectors import known_levels, missing_sets, of_level
from tuner.problem.draws import redistributed, widened
from tuner.problem.reference import Problem, load_problem

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")

# Distances of neighbours, beside the number: what one rounding may be off is half of it.
ULP = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-44}
TINY = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float64": 0.0}  # the least denormal

# ---- conversions in C++ -----------------------------------------------------------------------

TEMPLATES = builtin_folder()
_HEADERS = ("cpu_simd", "cpu_math", "cpu_rows", "cpu_halves")
_FUNCTIONS = """
extern "C" void widen_{name}(const halves::{type}* from, float* to, int64_t count) {{
  for (int64_t i = 0; i < count; i += simd::kWidth)
    simd::store(to + i, rows_of::load<false>(from + i, simd::kWidth));
}}

extern "C" void round_{name}(const float* from, halves::{type}* to, int64_t count) {{
  for (int64_t i = 0; i < count; i += simd::kWidth)
    rows_of::store<false>(to + i, simd::load(from + i), simd::kWidth);
}}

extern "C" void round_and_widen_{name}(const float* from, float* to, int64_t count) {{
  for (int64_t i = 0; i < count; i += simd::kWidth)
    simd::store(to + i, halves::rounded<halves::{type}>(simd::load(from + i)));
}}

extern "C" void parts_of_{name}(const halves::{type}* from, halves::{type}* to, int n) {{
  rows_of::store<true>(to, rows_of::load<true>(from, n), n);
  rows_of::put(to + n, rows_of::as_float(from[n]));
}}
"""
LEVELS = [(WIDTH, ""), (4, "")]
# The narrowest has no instructions for float16.
LEVELS += [
    (of_level(level).bits // 32, level)
    for level in ("x86-64-v2", "x86-64-v3")
    if level in known_levels() and not missing_sets(level)
]


@functools.cache
def conversions(width: int, march: str) -> ctypes.CDLL:
    text = "#include <algorithm>\n#include <cmath>\n#include <cstdint>\n"
    text += "".join(f'{{% include "_lib/{name}.hpp" %}}\n' for name in _HEADERS)
    values = {"width": width, "stream_output": False}
    source = rendered(TEMPLATES / "test", text, [TEMPLATES], values)
    for name, type_name in (("bfloat16", "Bfloat16"), ("float16", "Float16")):
        source += _FUNCTIONS.format(name=name, type=type_name)
    flags = [f"-march={march or VECTORS.march}" if "march" in f else f for f in CPP_FLAGS]
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-Wno-psabi"]
    command = [GPP, *flags, "-shared", "-fPIC", *warnings, "-Wno-unused-function"]
    return ctypes.CDLL(str(built_once(source, ".cpp", command)[0]))


def called(library: ctypes.CDLL, name: str, given: torch.Tensor, made: torch.Tensor) -> None:
    function = getattr(library, name)
    function.restype = None
    function(
        ctypes.c_void_p(given.data_ptr()),
        ctypes.c_void_p(made.data_ptr()),
        ctypes.c_int64(given.numel()),
    )


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN is like NaN, whatever its digits; zeros have their sign."""
    assert torch.equal(got.isnan(), expected.isnan())
    whole = torch.int16 if got.element_size() == 2 else torch.int32
    is_number = ~got.isnan()
    assert torch.equal(got.view(whole)[is_number], expected.view(whole)[is_number])


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize(("width", "march"), LEVELS)
def test_every_half_is_widened_exactly_and_every_float_rounded_to_the_nearest(width, march, name):
    library, dtype = conversions(width, march), getattr(torch, name)
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    wide = torch.empty(2**16)
    called(library, f"widen_{name}", halves, wide)
    assert_same_bits(wide, halves.float())
    # All halves, what lies in the middle of two, its neighbours, and any bits.
    middles = halves.float().view(torch.int32) + (2**15 if name == "bfloat16" else 2**12)
    any_bits = np.random.default_rng(3).integers(-(2**31), 2**31, 2**18, dtype=np.int32)
    around = [middles - 1, middles, middles + 1, torch.from_numpy(any_bits)]
    special = torch.tensor([65504.0, 65519.99, 65520.0, 1e5, 2.0**-25, 2.0**-25 * 1.0001, 3e-8, 0])
    numbers = [halves.float(), *(bits.view(torch.float32) for bits in around), special, -special]
    floats = torch.cat(numbers)
    floats = floats[: floats.numel() // 16 * 16].contiguous()
    rounded = torch.empty(floats.numel(), dtype=dtype)
    called(library, f"round_{name}", floats, rounded)
    assert_same_bits(rounded, floats.to(dtype))
    again = torch.empty(floats.numel())
    called(library, f"round_and_widen_{name}", floats, again)
    assert_same_bits(again, floats.to(dtype).float())
    few = torch.randn(16).to(dtype)
    made = torch.zeros(16, dtype=dtype)
    library[f"parts_of_{name}"](
        ctypes.c_void_p(few.data_ptr()), ctypes.c_void_p(made.data_ptr()), 3
    )
    assert torch.equal(made[:4], few[:4]) and not made[4:].any()


# ---- operations in float64 --------------------------------------------------------------------


@functools.cache
def operations_in_float64(width: int) -> ctypes.CDLL:
    text = "#include <algorithm>\n#include <cmath>\n#include <cstdint>\n"
    text += '{% include "_lib/cpu_doubles.hpp" %}\n'
    values = {"width": width, "stream_output": False}
    source = rendered(TEMPLATES / "test", text, [TEMPLATES], values)
    for name, operation in OPERATIONS.items():
        loads = [f"simd::load({array} + i)" for array in "abc"]
        operands = [
            converted(load, "float", kind)
            for load, kind in zip(loads, operation.takes, strict=False)
        ]
        value = converted(emit(name, operands, is_wide=True), operation.gives, "float")
        source += (
            f'extern "C" void test_{name}(const double* a, const double* b, const double* c,'
            " double* out, int64_t count) {\n"
            "  for (int64_t i = 0; i < count; i += simd::kWidth)\n"
            f"    simd::store(out + i, {value});\n}}\n"
        )
    flags = [f"-march={VECTORS.march}" if "march" in f else f for f in CPP_FLAGS]
    command = [GPP, *flags, "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-psabi"]
    return ctypes.CDLL(str(built_once(source, ".cpp", command)[0]))


SPECIAL = [0.0, -0.0, 1.0, -1.0, 708.0, -745.0, 1e3, -1e3, 1e300, -1e300, 5e-324]
SPECIAL += [float("inf"), -float("inf"), float("nan"), 0.5, -0.5]


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_in_float64_are_as_near_as_float64_allows(name):
    draw = torch.Generator().manual_seed(5)
    special = torch.tensor(SPECIAL).double()
    columns = [
        torch.cat([torch.randn(4096, generator=draw).double() * 3, special.roll(shift)])
        for shift in (0, 5, 9)[: len(OPERATIONS[name].takes)]
    ]
    library, out = operations_in_float64(WIDTH // 2), torch.empty_like(columns[0])
    given = [*columns, *columns[:1] * (3 - len(columns))]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*given, out)]
    getattr(library, f"test_{name}")(*pointers, ctypes.c_int64(out.numel()))
    true = EXACT[name](*columns).double()
    assert torch.equal(out.isnan(), true.isnan())
    is_finite = true.isfinite()
    assert torch.equal(out[true.isinf()], true[true.isinf()])
    error = (out - true).abs()[is_finite]
    # In the tails of these the argument's own rounding counts many times.
    bits = 40 if name.startswith("gelu") else 46
    assert (error <= 2.0**-bits * true[is_finite].abs() + 2.0**-1060).all()


# ---- modules ----------------------------------------------------------------------------------

F = "torch.nn.functional"
X, CAST_X = "R(37, 100)", "torch.randn(37, 100)"
RMS = "x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)"
# A forward, what the constructor makes, and the inputs; R draws numbers of the dtype.
ONE_ROUNDING: dict[str, tuple[str, str, str]] = {
    "rms_norm_gate": (
        f"x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w * {F}.silu(y)",
        "self.w = nn.Parameter(R(100))", f"{X}, {X}",
    ),
    "softmax": ("torch.softmax(x, -1)", "", X),
    "layer_norm": (f"{F}.layer_norm(x.float() + y, (100,)).to(x.dtype)", "", f"{X}, {X}"),
    "bias_gelu": (f"{F}.gelu(x + self.b)", "self.b = nn.Parameter(R(100))", X),
    "channels_norm": ("x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)", "",
                      "R(3, 33, 5, 7)"),
    "long_rows": ("x * (x * y).sum(-1, keepdim=True)", "", "R(2, 9001), R(2, 9001)"),
    "number": ("x * y + torch.relu(x) / y", "", f"{X}, 3.14159"),
    "pooled": (f"{F}.max_pool2d(x, 3, 2, 1) * 0.1", "", "R(2, 3, 9, 11)"),
    "places_and_masks": ("(x.argmax(-1), x > y, torch.where(x > y, x, 0.25))", "", f"{X}, {X}"),
}  # fmt: skip
SEVERAL_ROUNDINGS = {
    "llama_norm": (f"({RMS}).type_as(x) * self.w", "self.w = nn.Parameter(R(100))", X),
    "cross_entropy": (f"{F}.cross_entropy(x, y)", "", f"{X}, torch.randint(0, 100, (37,))"),
    "module_layer_norm": ("self.n(x) + x", "self.n = nn.LayerNorm(100).to(DT)", X),
    "float32_weight": ("x * self.w", "self.w = nn.Parameter(torch.randn(100))", X),
    "linear_between": (f"{F}.gelu(self.l(x * 2.0)) + y",
                       "self.l = nn.Linear(100, 37).to(DT)", f"{X}, R(37, 37)"),
    "means_beside_rows": ("x - x.mean(-1)", "", "R(33, 33)"),  # two nests
    "batch_norm": ("self.n(x)", "self.n = nn.BatchNorm2d(6).to(DT)", "R(4, 6, 5, 7)"),
}  # fmt: skip
MODULES = {**ONE_ROUNDING, **SEVERAL_ROUNDINGS}
CASES = [
    *((name, "bfloat16") for name in MODULES),
    *((name, "float16") for name in ("rms_norm_gate", "softmax", "llama_norm")),
    *((name, "float64") for name in
      ("softmax", "channels_norm", "long_rows", "batch_norm")),
    ("places_and_masks", "float64"),
]  # fmt: skip
PARAMS = {"unroll": 2, "keep": True, "stream_output": True, "huge_pages": True}


def text_of(forward: str, init: str, inputs: str, dtype: str) -> str:
    names = "x, y, z"[: 3 * len(ast.parse(f"[{inputs}]", mode="eval").body.elts) - 2]
    return f"""
import torch
import torch.nn as nn

DT = torch.{dtype}


def R(*sizes):
    return torch.randn(*sizes).to(DT)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init or "..."}

    def forward(self, {names}):
        return {forward}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""


def derive(folder: Path, text: str) -> tuple[Problem, Derived]:
    path = folder / "mine.py"
    path.write_text(text)
    problem = load_problem(path)
    graph = capture(problem)
    settings = settings_of(problem.make_model(0), False)
    return problem, derived(Captured(graph), text, "mine", settings, False, folder / "derived")


def answers(value) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


def compared(problem: Problem, made: Derived) -> list[tuple[torch.Tensor, ...]]:
    """Return of each output: that of the loops, of PyTorch's eager, of float64."""
    family = load_family(made.name, [made.folder])
    known = family.templates["nest"].parameters
    given = {name: value for name, value in PARAMS.items() if name in known}
    candidate = family.render({"template": "nest", **given}, FACTS)
    assert not mismatches(candidate, list).errors
    operator = bind(candidate.plan, "cpp", compiled(candidate, level=FEW_PASSES))
    calls = []

    def counted(*args):
        calls.append(args)
        return operator(*args)

    module = module_of(family.model_new)
    module |= {**fused(operator), "fused_op": counted}  # in place: its functions look there
    return _answers(module, problem, calls, "cpu")


def _answers(module, problem: Problem, calls: list, device: str) -> list[tuple]:
    model, reference = (m.to(device) for m in (module["ModelNew"](), problem.make_model(0)))
    model.load_state_dict(reference.state_dict())
    wide = problem.make_model(0).double().to(device)
    wide.load_state_dict(reference.state_dict())
    inputs = [x.to(device) if isinstance(x, torch.Tensor) else x for x in problem.make_inputs(1)]
    with torch.no_grad():
        mine, own = answers(model(*inputs)), answers(reference(*inputs))
        exact = answers(wide(*(widened(x) for x in inputs)))
    assert len(calls) == 1, "the call took the reference's way"
    buffers = [list(dict(m.named_buffers()).values()) for m in (model, reference, wide)]
    found = [*zip(mine, own, exact, strict=True), *zip(*buffers, strict=True)]
    for got, theirs, _ in found:
        assert got.shape == theirs.shape and got.dtype == theirs.dtype
    return found


def assert_exact(name: str, dtype: str, found: list[tuple[torch.Tensor, ...]]) -> None:
    for got, theirs, true in found:
        if not got.is_floating_point():
            assert torch.equal(got, true)
            continue
        error, own = ((y.double() - true).abs() for y in (got, theirs))
        if name in ONE_ROUNDING and dtype != "float64":
            # Half a unit in the last place, and what float32's own rounding can add.
            assert (error <= (0.5 + 2.0**-6) * ULP[dtype] * true.abs() + TINY[dtype]).all()
        most = 2.0**-20 * true.abs().max() if dtype != "float64" else 2.0**-44 * true.abs().max()
        # Of several roundings some may cancel in eager.
        assert error.max() <= (1.0 if name in ONE_ROUNDING else 1.5) * own.max() + most


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_loops_round_once_where_they_store(name, dtype, tmp_path):
    assert_exact(name, dtype, compared(*derive(tmp_path, text_of(*MODULES[name], dtype))))


# It rounds to float32 inside, and the float64 answer is PyTorch's own: nothing else is as near.
ON_A_GPU = [
    (name, dtype)
    for dtype in ("bfloat16", "float16", "float64")
    for name in MODULES
    if (name, dtype) != ("llama_norm", "float64")
]
BLOCKS = [
    {"block_rows": 1, "block_columns": 128, "num_warps": 4, "stages": 2},
    {"block_rows": 4, "block_columns": 32, "num_warps": 2, "stages": 3},  # several blocks a row
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), ON_A_GPU)
def test_triton_blocks_round_once_where_they_store(name, dtype, tmp_path):
    problem, made = derive(tmp_path, text_of(*MODULES[name], dtype))
    family = load_family(made.name, [made.folder])
    known = family.templates["nest_triton"].parameters
    for number, params in enumerate(BLOCKS):
        given = {p: value for p, value in params.items() if p in known}
        facts = known_device("H200").facts()
        candidate = family.render({"template": "nest_triton", **given}, facts)
        path = tmp_path / f"blocks_{number}" / "source.py"
        path.parent.mkdir()
        path.write_text(candidate.source)
        operator = bind(candidate.plan, "triton", path)
        calls: list = []

        def counted(*args, operator=operator, calls=calls):
            calls.append(args)
            return operator(*args)

        module = module_of(family.model_new)
        module |= {**fused(operator), "fused_device": "cuda", "fused_op": counted}
        assert_exact(name, dtype, _answers(module, problem, calls, "cuda"))


# ---- casts that are written -------------------------------------------------------------------

# Each rounds where it is told to: the same numbers as PyTorch's, bit for bit.
WRITTEN = {
    "down and up again": ("x.to(torch.bfloat16).float() * 3.0", CAST_X),
    "to float16, past its range": ("(x * 1e5).half().float() + 1.0", CAST_X),
    "to float32 beside float64": ("x.double().mul(y).float().double() * 0.5", f"{CAST_X}, 0.1"),
    "returned in both dtypes": ("((x * 2.0).bfloat16(), (x * 2.0).bfloat16().float())", CAST_X),
    "from one half to the other": ("x.bfloat16().half() * 1.0", CAST_X),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_cast_that_is_written_rounds(name, tmp_path):
    forward, inputs = WRITTEN[name]
    for got, theirs, _ in compared(*derive(tmp_path, text_of(forward, "", inputs, "float32"))):
        assert torch.equal(got, theirs)


# ---- what cannot be, and what is declared -----------------------------------------------------

REFUSED = {
    "float64 beside bfloat16": ("x.bfloat16() * y", f"{CAST_X}, {CAST_X}.double()", "cast gives"),
    "a type of 8 bits": ("(x * 2).to(torch.float8_e5m2)", CAST_X, "float8_e5m2"),
    "one number in two dtypes": (
        "(lambda s: (s, s.bfloat16()))(x.sum())",
        CAST_X,
        "is returned as",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_types_are_refused_with_their_line(name, tmp_path):
    forward, inputs, words = REFUSED[name]
    with pytest.raises(NotOneNest) as refusal:
        derive(tmp_path, text_of(forward, "", inputs, "float32"))
    assert words in str(refusal.value) and "line 18: " in str(refusal.value)


def test_dtypes_are_declared_from_the_graph_to_the_export(tmp_path):
    text = text_of(*MODULES["llama_norm"], "bfloat16")
    problem, made = derive(tmp_path, text)
    op = yaml.safe_load((made.folder / made.name / "op.yaml").read_text())
    assert [a["dtype"] for a in (*op["arguments"], *op["outputs"])] == ["bfloat16"] * 3
    assert op["bytes"] == "15000"  # 3700 numbers read and as many written, and 100 of the weight
    outline = outline_of(capture(problem))
    assert (outline.read_bytes, outline.written_bytes) == (2 * 3800, 2 * 3700)
    family = load_family(made.name, [made.folder])
    candidate = family.render({"template": "nest"}, FACTS)
    operator = bind(candidate.plan, "cpp", compiled(candidate, level=FEW_PASSES))
    x, weight = torch.randn(3700).bfloat16(), torch.ones(100).bfloat16()
    (y,) = operator(*((x, weight) if op["arguments"][0]["name"] == "x" else (weight, x)))
    assert y.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"is torch\.float32 on cpu, expected torch\.bfloat16"):
        operator(x.float(), weight.float())
    assert cpp_binding(candidate.plan, "cpp", "mine").count("at::kBFloat16") == 3
    python = python_binding(candidate.plan, "mine") + python_calls(candidate.plan, "mine")
    assert python.count("torch.bfloat16") == 3
    # A function that takes other pointers is found before it is compiled.
    wrong = candidate.source.replace("const halves::Bfloat16*", "const halves::Float16*")
    swapped = type(candidate)(
        candidate.op, candidate.template, candidate.params, "cpp", wrong, candidate.plan
    )
    assert "of bfloat16" in mismatches(swapped, list).errors[0]


def test_a_dtype_that_no_kernel_takes_is_refused_in_op_yaml(tmp_path):
    _, made = derive(tmp_path, text_of(*MODULES["softmax"], "float16"))
    path = made.folder / made.name / "op.yaml"
    path.write_text(path.read_text().replace("float16", "float8", 1))
    with pytest.raises(
        TemplateError, match="expected 'float32', 'float64', 'float16', 'bfloat16'"
    ):
        load_family(made.name, [made.folder])


@pytest.mark.parametrize("name", ["rms_norm_gate", "long_rows"])
def test_triton_texts_name_the_dtypes_that_they_compute_and_store(name, tmp_path):
    facts = known_device("H200").facts()
    for dtype in ("float16", "float64"):
        folder = tmp_path / dtype
        folder.mkdir()
        _, made = derive(folder, text_of(*MODULES[name], dtype))
        family = load_family(made.name, [made.folder])
        source = family.render({"template": "nest_triton"}, facts).source
        ast.parse(source)
        if dtype == "float64":
            assert (
                "tl.float32" not in source and "div_rn" not in source and "tl.single" not in source
            )
        else:
            assert ".to(tl.float16)" in source and "tl.float32" in source
        wanted = [t.dtype for t in family.render({"template": "nest_triton"}, facts).plan.made]
        beside = {"float32", "float64"} if name == "long_rows" else set()  # totals, and parts
        assert set(wanted) == ({dtype} if dtype == "float64" else {dtype, *beside})


def test_values_near_the_largest_leave_float64_room_for_squares():
    """Float64 is the oracle: where its own squares overflow, no answer can be called right."""
    x = redistributed(torch.zeros(8, 9).double(), "extreme", torch.Generator().manual_seed(1))
    assert x.abs().max() > 2.0**127 and x.square().sum().isfinite()
