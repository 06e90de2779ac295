"""One plan, run from Python while searching and compiled into an export, does the same.

Most tests here run twice: on the operator that `bind` calls through ctypes, and on the one that
an exported file registers with PyTorch. Both are compiled by the real compilers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tuner.evaluate.modules import fused
from tuner.export.module import export_text
from tuner.export.python_operators import python_binding, python_calls
from tuner.export.registration import cpp_binding, schema
from tuner.kernel.binding import bind, match_sizes
from tuner.kernel.builder import Builder, Toolchain
from tuner.kernel.family import Family, load_family
from tuner.kernel.python_calls import size_lines
from tuner.plans import Argument, Plan, Step, Tensor
from tuner.trial import Candidate, Status, from_json, to_json

OP = """\
name: dense
title: Linear with sums of its columns
function: fused_dense
replaces: [torch.nn.Linear]
sizes: {rows: 5, inner: 3, cols: 4}
arguments:
  - {name: x, shape: [rows, inner]}
  - {name: weight, shape: [cols, inner]}
  - {name: bias, shape: [cols]}
  - {name: factor, dtype: float}
  - {name: shift, dtype: int}
outputs:
  - {name: y, shape: [rows, cols]}
  - {name: total, shape: [cols], dtype: float64}
flops: 2 * rows * inner * cols
bytes: 4 * rows * cols
extra:
  plain:
    arguments:
      - {name: x, shape: [rows, inner]}
      - {name: weight, shape: [cols, inner]}
      - {name: offset, shape: [cols]}
      - {name: factor, dtype: float}
    outputs:
      - {name: y, shape: [rows, cols]}
  unheard_of:
    arguments: [{name: x, shape: [rows, inner]}, {name: other, shape: [cols]}]
    outputs: [{name: y, shape: [rows, cols]}]
"""

TEMPLATE = """\
---
title: The product by PyTorch, the rest here
language: cpp
parameters:
  max_rows: {about: "more rows are refused", default: 100}
  with_extra: {about: "whether the extra workspace exists", default: false}
workspace:
  sums: {shape: [2, cols], dtype: float64, zero: true}
  extra: {shape: ["cdiv(rows, 4)"], when: "with_extra"}
  scratch: {shape: ["rows * cols + 1"]}
  product: {shape: [rows, cols]}
steps:
  - {aten: mm, args: [x, weight.t], out: y}
  - call: fused_dense_sums
    args: [x, y, bias, sums, extra, scratch, rows, cols, "max(rows - max_rows, 0)", factor,
           num_threads]
  - {call: fused_dense_total, args: [sums, total, cols, shift]}
extra:
  plain:
    when: "max_rows >= 10"
    steps:
      - {aten: mm, args: [x, weight.t], out: product}
      - {call: fused_dense_plain, args: [product, offset, sums, extra, y, rows, cols, factor]}
---
#include <cstdint>

extern "C" const char* fused_dense_sums(const float* x, float* y, const float* bias, double* sums,
                                        const float* extra, float* scratch, int64_t rows,
                                        int64_t cols, int64_t num_too_many, double factor,
                                        int64_t num_threads) {
  if (num_too_many > 0) return "more than {{ max_rows }} rows";
  if (num_threads < 1) return "no threads";
  if (reinterpret_cast<uintptr_t>(x) % 16) return "x is not aligned";
  if (reinterpret_cast<uintptr_t>(bias) % 16) return "bias is not aligned";
  if ((extra != nullptr) != {{ with_extra | lower }}) return "extra workspace is not as planned";
  for (int64_t i = 0; i < 2 * cols; ++i)
    if (sums[i] != 0) return "the sums do not start at zero";
  for (int64_t i = 0; i < rows * cols + 1; ++i) scratch[i] = 7;  // a heap overrun would show
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) {
      y[i * cols + j] = y[i * cols + j] * static_cast<float>(factor) + bias[j];
      sums[j] += y[i * cols + j];
    }
  return nullptr;
}

extern "C" const char* fused_dense_total(const double* sums, double* total, int64_t cols,
                                         int64_t shift) {
  for (int64_t j = 0; j < cols; ++j) total[j] = sums[j] + static_cast<double>(shift);
  return nullptr;
}

extern "C" const char* fused_dense_plain(const float* product, const float* offset,
                                         const double* sums, const float* extra, float* y,
                                         int64_t rows, int64_t cols, double factor) {
  if ((extra != nullptr) != {{ with_extra | lower }}) return "extra workspace is not as planned";
  for (int64_t i = 0; i < 2 * cols; ++i)
    if (sums[i] != 0) return "the sums do not start at zero";
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j)
      y[i * cols + j] = product[i * cols + j] * static_cast<float>(factor) + offset[j];
  return nullptr;
}
"""

MODEL_NEW = """\
class ModelNew(nn.Module):
    def __init__(self, inner, cols):
        super().__init__()
        self.linear = nn.Linear(inner, cols)

    def forward(self, x):
        weight, bias = self.linear.weight, self.linear.bias
        if fused_plain is not None and not self.training and not torch.is_grad_enabled():
            (y,) = fused_plain(x, weight, bias, 1.0)
            return y
        return fused_op(x, weight, bias, 1.0, 0)[0]


def setup_context(ctx, inputs, output):
    x, weight, bias, factor, shift = inputs
    ctx.save_for_backward(x, weight)
    ctx.factor = factor
    ctx.mark_non_differentiable(output[1])


def backward(ctx, grad_y, grad_total):
    x, weight = ctx.saved_tensors
    grad = grad_y * ctx.factor
    return grad.mm(weight), grad.t().mm(x), grad_y.sum(0), None, None
"""

REFERENCE = """\
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, inner, cols):
        super().__init__()
        self.linear = nn.Linear(inner, cols)

    def forward(self, x):
        return self.linear(x)


rows = 5
inner = 3
cols = 4


def get_inputs():
    return [torch.rand(rows, inner)]


def get_init_inputs():
    return [inner, cols]
"""


def reference(x, weight, bias, factor, shift):
    y = x @ weight.t() * factor + bias
    return y, y.double().sum(0) + shift


def arguments(rows=5, inner=3, cols=4, factor=0.5, shift=2):
    generator = torch.Generator().manual_seed(rows * 100 + cols)
    shapes = [(rows, inner), (cols, inner), (cols,)]
    return [*(torch.randn(s, generator=generator) for s in shapes), factor, shift]


def is_right(outputs, args) -> bool:
    pairs = zip(outputs, reference(*args), strict=True)
    return all(a.dtype == b.dtype and torch.allclose(a, b, atol=1e-5) for a, b in pairs)


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Family:
    folder = tmp_path_factory.mktemp("families")
    (folder / "dense").mkdir()
    files = {
        "op.yaml": OP,
        "plain.cpp.j2": TEMPLATE,
        "model_new.py": MODEL_NEW,
        "reference.py": REFERENCE,
    }
    for name, text in files.items():
        (folder / "dense" / name).write_text(text)
    return load_family("dense", [folder])


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return Toolchain.find("cpu")


@pytest.fixture(scope="module")
def built(toolchain, tmp_path_factory) -> Callable[[Candidate], Path]:
    def build(candidate: Candidate) -> Path:
        with Builder(toolchain, tmp_path_factory.mktemp("builds"), num_workers=1) as builder:
            result = builder.submit(candidate).result()
        assert result.status is Status.CORRECT, result.error
        return Path(result.artefact)

    return build


@pytest.fixture(scope="module")
def bound(family, built):
    candidate = family.render({"template": "plain"})
    return bind(candidate.plan, "cpp", built(candidate))


@pytest.fixture(scope="module")
def exported(family, toolchain, tmp_path_factory):
    """The module of an exported file, imported in this process."""
    text = export_text(
        family,
        family.render({"template": "plain"}),
        reference=REFERENCE,
        sizes={},
        flags=toolchain.cpp_flags,
        provenance=[],
    )
    path = tmp_path_factory.mktemp("export") / "model_new.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("exported_dense", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["bound", "exported"])
def op(request):
    """The same operator, both ways."""
    made = request.getfixturevalue(request.param)
    return made if request.param == "bound" else made.fused_op


# ---- what both ways promise -----------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(5, 3, 4), (1, 1, 1), (100, 2, 3), (7, 17, 33)])
def test_every_shape_is_computed_right(op, sizes):
    args = arguments(*sizes)
    assert is_right(op(*args), args)


def test_no_rows_at_all_give_empty_outputs(op):
    args = arguments(rows=0)
    y, total = op(*args)
    assert y.shape == (0, 4) and torch.equal(total, torch.full((4,), 2.0, dtype=torch.float64))


def test_numbers_arrive_as_they_were_given(op):
    for factor, shift in ((0.1, -3), (-1e30, 2**40), (2, 0), (float("inf"), 1)):
        args = arguments(rows=1, factor=factor, shift=shift)
        assert is_right(op(*args), args), (factor, shift)


def test_a_float_is_no_int(op):
    with pytest.raises((RuntimeError, TypeError)):
        op(*arguments(shift=1.5))


def test_strided_transposed_expanded_and_misaligned_tensors_are_prepared(op):
    x, weight, bias, factor, shift = arguments()
    strided = torch.empty(5, 6)[:, ::2].copy_(x)
    transposed = x.t().contiguous().t()
    misaligned = torch.empty(16)[1:].view(5, 3).copy_(x)
    assert misaligned.data_ptr() % 16 == 4
    odd_bias = torch.empty(5)[1:].copy_(bias)
    for x_like, bias_like in itertools.product(
        (strided, transposed, misaligned), (bias, odd_bias)
    ):
        before = x_like.clone(), bias_like.clone()
        args = [x_like, weight, bias_like, factor, shift]
        assert is_right(op(*args), args)
        assert torch.equal(x_like, before[0]) and torch.equal(bias_like, before[1])
    expanded = [torch.randn(1, 3).expand(5, 3), weight, bias, factor, shift]
    assert is_right(op(*expanded), expanded)


def test_outputs_and_workspace_are_fresh_at_every_call(op):
    args = arguments()
    first = op(*args)
    kept = [tensor.clone() for tensor in first]
    second = op(*arguments(shift=5))
    third = op(*args)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(third, kept, strict=True))
    pointers = [t.data_ptr() for t in (*first, *second, *third, *args[:3])]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(5, 4)}, r"weight has shape \[4, 3\], expected \[.*4"),
        ({1: torch.zeros(4, 9)}, r"weight has shape \[4, 9\], expected \[.*3"),
        ({2: torch.zeros(7)}, r"bias has shape \[7\], expected \[.*4"),
        ({2: torch.zeros(4, 1)}, r"bias has shape \[4, 1\], expected 1 dimensions"),
        ({0: torch.zeros(3)}, r"x has shape \[3\], expected 2 dimensions"),
    ],
)
def test_a_wrong_shape_is_a_runtime_error_that_names_the_tensor(op, change, message):
    args = arguments()
    for position, tensor in change.items():
        args[position] = tensor
    with pytest.raises(RuntimeError, match=message):
        op(*args)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_a_wrong_dtype_is_a_runtime_error_and_never_a_cast(op, position, dtype):
    args = arguments()
    args[position] = args[position].to(dtype)
    with pytest.raises(RuntimeError, match=f"(?i){['x', 'weight', 'bias'][position]} is"):
        op(*args)


def test_what_is_no_tensor_is_refused(op):
    args = arguments()
    for wrong in (None, [1.0], "1"):
        with pytest.raises((RuntimeError, TypeError), match="bias"):
            op(args[0], args[1], wrong, 0.5, 2)


def test_a_message_of_the_source_is_a_runtime_error_with_the_functions_name(op):
    with pytest.raises(RuntimeError, match="fused_dense_sums: more than 100 rows"):
        op(*arguments(rows=101))
    args = arguments()
    assert is_right(op(*args), args)  # and nothing is left behind


def test_a_wrong_number_of_arguments_is_refused(op):
    with pytest.raises((RuntimeError, TypeError)):
        op(*arguments()[:-1])


def test_both_ways_give_the_same_bits(bound, exported):
    args = arguments(50, 40, 30)
    for a, b in zip(bound(*args), exported.fused_op(*args), strict=True):
        assert torch.equal(a, b)


# ---- extra operators --------------------------------------------------------------------------


@pytest.fixture(params=["bound", "exported"])
def plain(request):
    """The same extra operator, both ways; like the operator's own it gives a tuple."""
    made = request.getfixturevalue(request.param)
    return made.extra["plain"] if request.param == "bound" else made.fused_plain


def test_a_further_call_is_computed_with_arguments_of_its_own(plain):
    x, weight, bias, factor, _ = arguments()
    strided = torch.empty(5, 6)[:, ::2].copy_(x)
    for given in (x, strided):
        outputs = plain(given, weight, bias, factor)
        assert isinstance(outputs, tuple)
        (y,) = outputs
        assert torch.allclose(y, x @ weight.t() * factor + bias, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"offset has shape \[7\], expected \[.*4"):
        plain(x, weight, torch.zeros(7), factor)
    with pytest.raises(RuntimeError, match=r"(?i)offset is"):
        plain(x, weight, bias.double(), factor)


def test_a_further_call_that_is_not_offered_is_none(family, built, bound, exported):
    assert bound.extra["unheard_of"] is None and exported.fused_unheard_of is None
    candidate = family.render({"template": "plain", "max_rows": 9})  # where `when` does not hold
    operator = bind(candidate.plan, "cpp", built(candidate))
    assert operator.extra == {"plain": None, "unheard_of": None} and operator.calls == (operator,)
    names = {"fused_plain": None, "fused_unheard_of": None}
    assert fused(operator) == {"fused_op": operator, "fused_device": "cpu", **names}
    assert exported.fused_device == "cpu"


def test_only_workspace_that_a_call_mentions_is_allocated_in_it(family):
    plan = family.render({"template": "plain", "with_extra": True}).plan
    further = plan.extra["plain"]
    assert further is not None and plan.calls == (plan, further)
    assert [t.name for t in plan.workspace] == ["sums", "extra", "scratch"]
    assert [t.name for t in further.workspace] == ["sums", "extra", "product"]
    assert further.function == "fused_dense_plain" and further.extra == {}


def test_a_plan_written_before_there_were_further_calls_is_read(family):
    plan = family.render({"template": "plain"}).plan
    assert from_json(Plan, to_json(plan)) == plan
    record = json.loads(to_json(plan))
    del record["extra"]
    assert from_json(Plan, json.dumps(record)) == dataclasses.replace(plan, extra={})


# ---- from Python alone ----------------------------------------------------------------------


def test_absent_workspace_is_a_null_pointer_and_present_workspace_is_not(family, built):
    # The template itself refuses when the pointer is not as its parameter says.
    candidate = family.render({"template": "plain", "with_extra": True, "max_rows": 3})
    operator = bind(candidate.plan, "cpp", built(candidate))
    args = arguments(rows=3)
    assert is_right(operator(*args), args)
    with pytest.raises(RuntimeError, match="more than 3 rows"):
        operator(*arguments(rows=4))


def test_a_bound_operator_can_be_unloaded(family, built):
    candidate = family.render({"template": "plain", "max_rows": 77})
    path = built(candidate)
    for _ in range(3):
        operator = bind(candidate.plan, "cpp", path)
        args = arguments()
        assert is_right(operator(*args), args)
        assert str(path) in Path("/proc/self/maps").read_text()
        operator.unload()
        operator.unload()  # twice is harmless
        assert str(path) not in Path("/proc/self/maps").read_text()


def test_an_artefact_without_a_step_or_none_at_all_is_reported(family, built, tmp_path):
    candidate = family.render({"template": "plain"})
    path = built(candidate)
    step = Step("call", "fused_dense_other", ())
    plan = dataclasses.replace(candidate.plan, steps=(step,))
    with pytest.raises(AttributeError, match="fused_dense_other"):
        bind(plan, "cpp", path)
    (tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(OSError):
        bind(candidate.plan, "cpp", tmp_path / "broken.so")


def test_sizes_are_matched_from_shapes():
    declared = (
        Argument("x", shape=("rows", "inner")),
        Argument("eps", "float"),
        Argument("w", shape=("cols", "inner")),
    )
    assert match_sizes(declared, {"x": (2, 3), "w": (4, 3)}) == {"rows": 2, "inner": 3, "cols": 4}
    with pytest.raises(ValueError, match=r"w has shape \[4, 5\].* with inner = 3"):
        match_sizes(declared, {"x": (2, 3), "w": (4, 5)})
    with pytest.raises(
        ValueError, match=r"x has shape \[2\], expected 2 dimensions \[rows, inner"
    ):
        match_sizes(declared, {"x": (2,), "w": (4, 5)})


# ---- from the exported file alone -----------------------------------------------------------


def test_pytorchs_own_check_of_operators_finds_nothing(exported):
    x, weight, bias, factor, shift = arguments()
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    report = torch.library.opcheck(exported.fused_op.default, (*leaves, factor, shift))
    assert set(report.values()) == {"SUCCESS"} and len(report) >= 4
    plain = torch.library.opcheck(exported.fused_op.default, tuple(arguments(rows=1)))
    assert set(plain.values()) == {"SUCCESS"}
    own = getattr(torch.ops, exported.fused_op._qualified_op_name.split("::")[0])
    further = torch.library.opcheck(own.fused_dense_plain, tuple(arguments()[:4]))
    assert set(further.values()) == {"SUCCESS"}


def test_gradients_are_the_references(exported):
    args = arguments()
    gradients = []
    for call in (exported.fused_op, reference):
        leaves = [tensor.clone().requires_grad_() for tensor in args[:3]]
        y, _ = call(*leaves, *args[3:])
        y.square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert exported.fused_op(*leaves, *args[3:])[1].requires_grad is False


@torch.no_grad()
def test_a_compiled_module_makes_its_further_call_in_one_graph(exported):
    module = exported.ModelNew(3, 4).eval()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for rows in (5, 6, 101):  # more than 100 rows are refused by the operator's own call
        x = torch.randn(rows, 3)
        y = compiled(x)
        assert torch.equal(y, module(x)) and torch.allclose(y, module.linear(x), atol=1e-6)


# inductor imports PyTorch's own quantised modules, which use what PyTorch has deprecated
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_module_gives_the_same_output_in_one_graph(exported, backend):
    torch.manual_seed(0)
    module = exported.ModelNew(3, 4)
    # The second shape makes the batch symbolic. For inductor, whose C++ takes 6 s a kernel to
    # compile, it is so from the first: two kernels instead of four.
    dynamic = True if backend == "inductor" else None
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (5, 6, 7):
        x = torch.randn(rows, 3, requires_grad=True)
        again = x.detach().clone().requires_grad_()
        ours, theirs = compiled(x), module(again)
        assert torch.equal(ours, theirs)
        ours.sum().backward()
        theirs.sum().backward()
        assert torch.allclose(x.grad, again.grad)


def test_fake_tensors_get_shapes_without_a_computation(exported):
    shapes = [torch.empty(s, device="meta") for s in ((9, 3), (4, 3), (4,))]
    y, total = exported.fused_op(*shapes, 1.0, 0)
    assert (y.shape, y.dtype, y.device.type) == ((9, 4), torch.float32, "meta")
    assert (total.shape, total.dtype) == ((4,), torch.float64)


# ---- the text -------------------------------------------------------------------------------

PLAN = Plan(
    "fused_one",
    (Argument("x", shape=("rows", "cols")), Argument("eps", "float"), Argument("n", "int")),
    (Tensor("y", ("rows", "cols")),),
    (Tensor("ws", ("cdiv(rows, 4)", "min(cols, 8)"), "float16", zero=True),),
    (
        Step("aten", "addmm", ("x", "x", "x.t"), "y"),
        Step("call", "fused_one_go", ("x", "ws", "null", "rows // 2", "n", "eps", "num_threads")),
    ),
)


def test_the_schema_is_pytorchs():
    parsed = torch._C.parse_schema(f"ns::{schema(PLAN)}")
    assert [str(a.type) for a in parsed.arguments] == ["Tensor", "float", "int"]
    assert schema(PLAN) == "fused_one(Tensor x, float eps, int n) -> Tensor"
    two = dataclasses.replace(PLAN, outputs=PLAN.outputs * 2)
    assert schema(two).endswith("-> (Tensor, Tensor)")


def test_a_binding_registers_every_call_and_declares_a_shared_function_once():
    further = dataclasses.replace(PLAN, function="fused_one_more")
    plan = dataclasses.replace(PLAN, extra={"more": further, "unheard_of": None})
    text = cpp_binding(plan, "cuda", "some_namespace")
    assert text.count('extern "C" const char* fused_one_go(') == 1
    assert 'm.impl("fused_one", &call_fused_one); m.impl("fused_one_more"' in text
    assert f'm.def("{schema(PLAN)}"); m.def("{schema(further)}");' in text
    text = python_calls(plan, "some_namespace") + python_binding(plan, "some_namespace")
    for name in ("fused_one", "fused_one_more"):
        assert text.count(f'custom_op("some_namespace::{name}"') == 1


def test_the_cuda_binding_guards_the_device_and_uses_the_current_stream(golden):
    text = cpp_binding(PLAN, "cuda", "some_namespace")
    assert "c10::cuda::CUDAGuard guard(x_.device())" in text
    assert 'extern "C" const char* fused_one_go(' in text
    assert "getCurrentCUDAStream" in text and "TORCH_LIBRARY_IMPL(some_namespace, CUDA, m)" in text
    golden("binding_cuda.txt", text)


def test_the_python_binding_is_the_golden_one(golden):
    steps = (PLAN.steps[0], Step("call", "fused_one_go", ("x", "ws", "null", "rows // 2", "eps")))
    plan = dataclasses.replace(PLAN, steps=steps)
    text = python_calls(plan, "some_namespace") + "\n\n" + python_binding(plan, "some_namespace")
    assert size_lines(PLAN) == ["rows = x.shape[0]", "cols = x.shape[1]"]
    golden("binding_python.txt", text)


def test_the_python_binding_runs_the_steps_and_checks_shapes_and_dtypes():
    """The text is for GPUs; with the two lines that say so changed it runs on the CPU."""
    plan = Plan(
        "fused_py",
        (Argument("x", shape=("rows", "cols")), Argument("w", shape=("cols", "cols"))),
        (Tensor("y", ("rows", "cols")), Tensor("n", ("2",))),
        (Tensor("ws", ("cdiv(rows, 4)",), zero=True),),
        (
            Step("aten", "mm", ("x", "w.t"), "y"),
            Step("call", "fused_py_go", ("y", "ws", "null", "n", "rows + 1")),
        ),
    )
    text = python_calls(plan, "tests_of_binding") + python_binding(plan, "tests_of_binding")
    for gpu, cpu in (('device.type != "cuda"', "False"), ("torch.cuda.current_device()", "-1")):
        assert gpu in text
        text = text.replace(gpu, cpu)

    def fused_py_go(y, ws, absent, n, number):
        assert absent is None and ws.shape == (2,) and not ws.any()
        y.add_(1.0)
        n.fill_(number)

    space = {"torch": torch, "fused_py_go": fused_py_go, "nullcontext": contextlib.nullcontext}
    exec(text, space)
    call = torch.ops.tests_of_binding.fused_py
    x, w = torch.randn(5, 3), torch.randn(3, 3)
    y, n = call(x, w)
    assert torch.allclose(y, x @ w.t() + 1) and n.tolist() == [6.0, 6.0]
    with pytest.raises(RuntimeError, match=r"w has shape \[3, 4\], expected \[3, 3\]"):
        call(x, torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match=r"w has shape \[3\], expected 2 dimensions"):
        call(x, torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"w is torch.float64 on cpu, expected torch.float32"):
        call(x, w.double())


ONE_OUTPUT = """\
---
title: One output
language: cpp
steps: [{call: fused_single_go, args: [x, y, n]}]
---
#include <cstdint>
extern "C" const char* fused_single_go(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = 2 * x[i];
  return nullptr;
}
"""
ONE_OUTPUT_OP = """\
name: single
title: One output
function: fused_single
replaces: [doubling]
sizes: {n: 3}
arguments: [{name: x, shape: [n]}]
outputs: [{name: y, shape: [n]}]
flops: n
bytes: 8 * n
"""
ONE_OUTPUT_MODEL = """\
class ModelNew(nn.Module):
    def forward(self, x):
        (y,) = fused_op(x)
        return y


def setup_context(ctx, inputs, output):
    (x,) = inputs
    (y,) = output
    ctx.n = x.shape[0]


def backward(ctx, grad_y):
    return grad_y * 2
"""


def small_family(folder: Path, name: str, op: str, template: str, model: str) -> Family:
    """Return a family of one template in C++, written into a folder."""
    (folder / name).mkdir()
    files = {"op.yaml": op, "one.cpp.j2": template, "model_new.py": model}
    for file, text in {**files, "reference.py": REFERENCE}.items():
        (folder / name / file).write_text(text)
    return load_family(name, [folder])


def exported_text(family: Family, candidate: Candidate, toolchain: Toolchain) -> str:
    flags = toolchain.cpp_flags
    return export_text(
        family, candidate, reference=REFERENCE, sizes={}, flags=flags, provenance=[]
    )


def test_an_operator_with_one_output_still_gives_a_tuple(built, toolchain, tmp_path):
    family = small_family(tmp_path, "single", ONE_OUTPUT_OP, ONE_OUTPUT, ONE_OUTPUT_MODEL)
    candidate = family.render({"template": "one"})
    x = torch.randn(3)
    (y,) = bind(candidate.plan, "cpp", built(candidate))(x)
    assert torch.equal(y, 2 * x)
    text = exported_text(family, candidate, toolchain)
    module: dict = {}
    exec(text, module)
    x.requires_grad_()
    y = module["ModelNew"]()(x)
    y.sum().backward()
    assert torch.equal(y, 2 * x) and torch.equal(x.grad, torch.full((3,), 2.0))
    report = torch.library.opcheck(getattr(torch.ops, namespace_of(text)).fused_single, (x,))
    assert set(report.values()) == {"SUCCESS"}


PARTS = """\
---
title: Parts
language: cpp
steps:
- {call: fused_parts_go, args: [x, y, n * m]}
- {aten: slice, args: ["y", "1", "2", "3", "1"], gives: last}
- {aten: slice, args: ["x", "0", "0", "1", "1"], gives: first}
---
""" + ONE_OUTPUT.rpartition("---\n")[2].replace("single", "parts")
PARTS_OP = """\
name: parts
title: Parts
function: fused_parts
replaces: [doubling]
sizes: {n: 1, m: 3}
arguments: [{name: x, shape: [n, m]}]
outputs: [{name: y, shape: [n, m]}, {name: last, shape: [n, "1"]}, {name: first, shape: ["1", m]}]
flops: n
bytes: 8 * n
"""
PARTS_MODEL = """\
class ModelNew(nn.Module):
    def forward(self, x):
        return fused_op(x)


def setup_context(ctx, inputs, output):
    pass


def backward(ctx, *grads):
    return None
"""


def test_results_that_are_parts_have_memory_of_their_own(built, toolchain, tmp_path):
    """Of one row the last column of a result, and the first row of an argument, are contiguous.

    An operator that returns one of these as it is is refused by PyTorch, and an edit of one result
    would be an edit of another.
    """
    family = small_family(tmp_path, "parts", PARTS_OP, PARTS, PARTS_MODEL)
    candidate = family.render({"template": "one"})
    exported = exported_text(family, candidate, toolchain)
    exec(exported, {})
    text = python_calls(candidate.plan, "tests_of_parts")
    text += python_binding(candidate.plan, "tests_of_parts")
    for gpu, cpu in (('device.type != "cuda"', "False"), ("torch.cuda.current_device()", "-1")):
        text = text.replace(gpu, cpu)

    def fused_parts_go(x, y, count):
        y.copy_(2 * x)

    space = {"torch": torch, "fused_parts_go": fused_parts_go, "nullcontext": None}
    exec(text, space)
    ways = {
        "of a search": bind(candidate.plan, "cpp", built(candidate)),
        "exported C++": getattr(torch.ops, namespace_of(exported)).fused_parts,
        "exported Python": torch.ops.tests_of_parts.fused_parts,
        "called directly": space["called_fused_parts"],
    }
    for way, call in ways.items():
        for rows in (1, 4):
            x = torch.randn(rows, 3)
            expected = 2 * x, 2 * x[:, 2:], x[:1].clone()
            for _ in range(2):
                results = call(x)
                assert all(map(torch.equal, results, expected)), (way, rows)
            places = {r.untyped_storage().data_ptr() for r in (x, *results)}
            assert len(places) == 4, (way, rows)


def namespace_of(text: str) -> str:
    return re.search(r"torch\.ops\.(tuner_\w+)", text)[1]


def test_a_triton_plan_runs_on_tensors_without_memory(tmp_path):
    """As a builder calls it, which has no GPU: what a step launches is compiled meanwhile."""
    source = tmp_path / "source.py"
    source.write_text("def add(x, y, rows):\n    seen.append((x.device.type, y.shape, rows))\n")
    plan = Plan(
        "fused_add",
        (Argument("x", shape=("rows",)),),
        (Tensor("y", ("rows",)),),
        (),
        (Step("call", "add", ("x", "y", "rows")),),
    )
    operator = bind(plan, "triton", source)
    seen = operator.globals["seen"] = []
    (y,) = operator(torch.empty(5, device="meta"))
    assert y.device.type == "meta"
    assert seen == [("meta", (5,), 5)]
