"""Pointwise work as the epilogue of a product's kernel: which, and what its CUDA C++ computes."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_half_products import LAYER, made_of, on_gpu

from tuner.capture.tasks.convolutions import CONVOLUTION_WGMMA_TEMPLATE
from tuner.capture.tasks.half_products import WGMMA_TEMPLATE
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device

FUSED = {
    "values alone": (LAYER, "torch.relu(self.a(x)) * 0.5 - 3", "200, 264"),
    "of columns": (
        LAYER + "; self.s = nn.Parameter(torch.randn(260))",
        "torch.tanh(self.a(x)) * self.s + 1",
        "200, 264",
    ),
    "of rows": (
        LAYER + "; self.r = nn.Parameter(torch.randn(200, 1))",
        "self.a(x) * self.r - 1",
        "200, 264",
    ),
    "of all": (
        LAYER + "; self.r = nn.Parameter(torch.randn(200, 260))",
        "(lambda h: torch.where(h > self.r, self.r, F.leaky_relu(h, 0.1)))(self.a(x))",
        "200, 264",
    ),
    "of one": (
        LAYER + "; self.o = nn.Parameter(torch.randn(1))",
        "F.silu(self.a(x) * self.o)",
        "200, 264",
    ),
    "masked": (LAYER, "torch.triu(self.a(x), 2) + torch.arange(200)[:, None] * 3", "200, 264"),
    "more dimensions": (
        LAYER + "; self.s = nn.Parameter(torch.randn(260))",
        "(self.a(x) + self.s).sigmoid()",
        "5, 40, 264",
    ),
}
APART = {
    "a reduction": (LAYER, "torch.softmax(self.a(x), -1)", "200, 264"),
    "two results": (LAYER, "(lambda h: (h, torch.relu(h)))(self.a(x))", "200, 264"),
    "truths": (LAYER, "self.a(x) > 0", "200, 264"),
    "part of a row": (
        LAYER + "; self.s = nn.Parameter(torch.randn(20))",
        "torch.relu(self.a(x)).view(200, 13, 20) * self.s",
        "200, 264",
    ),
    "a share of the number of rows": (LAYER, "torch.relu(self.a(x)) / len(x)", "200, 264"),
    "a mask in each of several": (LAYER, "torch.tril(self.a(x))", "5, 40, 264"),
}
# What the epilogue's text needs of CUDA, for a host compiler.
HOST = """
#include <cmath>
#include <cstdint>
#define __device__
#define __forceinline__
static float __ldg(const float* place) { return *place; }
"""


def candidate_of(folder: Path, module, **params):
    _, made = made_of(folder, module)
    family = load_family(made.name, [made.folder])
    facts = known_device("H200").facts()
    return family.render({"template": WGMMA_TEMPLATE, **params}, facts)


@pytest.mark.parametrize("name", FUSED)
def test_pointwise_work_alone_behind_a_product_is_its_epilogue(name, tmp_path):
    fused = candidate_of(tmp_path, FUSED[name])
    apart = candidate_of(tmp_path, FUSED[name], product_epilogue="apart")
    (step,) = fused.plan.steps
    assert step.function.endswith("_behind_product")
    assert f"struct {step.function}_epilogue" in fused.source
    steps = [step.function for step in apart.plan.steps]
    assert steps[0] == "product_by_wgmma" and len(steps) == 2 and "_epilogue {" not in apart.source


@pytest.mark.parametrize("name", APART)
def test_other_work_is_a_kernel_of_its_own(name, tmp_path):
    candidate = candidate_of(tmp_path, APART[name])
    steps = [step.function for step in candidate.plan.steps]
    assert "product_by_wgmma" in steps and "_epilogue {" not in candidate.source


@pytest.mark.parametrize("name", FUSED)
def test_an_epilogue_computes_what_the_module_does(name, tmp_path):
    """Its text, compiled for the host, on the values of PyTorch's product."""
    candidate = candidate_of(tmp_path, FUSED[name])
    (step,) = candidate.plan.steps
    struct = re.search(
        rf"struct {step.function}_epilogue {{.*?^}};", candidate.source, re.M | re.S
    )
    num = struct[0].count("const float* g")
    given = ", ".join(f"const float* g{i}" for i in range(num))
    text = f"""{HOST}{struct[0]}
extern "C" void run(float* y, int64_t rows, int64_t columns{", " * bool(num)}{given}) {{
  const {step.function}_epilogue epilogue = {{{", ".join(f"g{i}" for i in range(num))}}};
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t c = 0; c < columns; ++c)
      y[row * columns + c] = epilogue(y[row * columns + c], row, c, columns);
}}
"""
    (tmp_path / "host.cpp").write_text(text)
    command = ["g++", "-O1", "-shared", "-fPIC", "-o", "host.so", "host.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    problem, _ = made_of(tmp_path, FUSED[name])
    model, (x, *_) = problem.make_model(0), problem.make_inputs(1)
    with torch.no_grad():
        expected, y = model(x), model.a(x).contiguous()
    own = {name: p.detach() for name, p in model.named_parameters()}
    tensors = [own[place.removesuffix("_v")] for place in step.args[11:]]
    run = ctypes.CDLL(str(tmp_path / "host.so")).run
    sizes = (y.numel() // 260, 260)
    run(
        ctypes.c_void_p(y.data_ptr()),
        *map(ctypes.c_int64, sizes),
        *(ctypes.c_void_p(t.data_ptr()) for t in tensors),
    )
    torch.testing.assert_close(y, expected.view_as(y), rtol=2e-6, atol=2e-6)


# Behind a convolution with 3 samples, 12 channels and 5 by 6 pixels.
IMAGE = "self.a = nn.Conv2d(8, 12, 3)"
OF_IMAGES = {
    "bias": "torch.relu(self.a(x))",
    "all": "self.a(x) * self.r",
    "pixels": "self.a(x) * self.p - 1",
    "channels and pixels": "F.silu(self.a(x)) + self.c",
}


@pytest.mark.parametrize("name", OF_IMAGES)
def test_an_epilogue_of_an_image_computes_what_the_module_does(name, tmp_path):
    """Its CUDA C++, compiled for the host, on the values of PyTorch's convolution."""
    init = IMAGE + "; self.r = nn.Parameter(torch.randn(3, 12, 5, 6))"
    init += "; self.p = nn.Parameter(torch.randn(5, 6)); self.c = nn.Parameter("
    module = (init + "torch.randn(12, 5, 6))", OF_IMAGES[name], "3, 8, 7, 8")
    problem, made = made_of(tmp_path, module)
    family = load_family(made.name, [made.folder])
    facts = known_device("H200").facts()
    candidate = family.render({"template": CONVOLUTION_WGMMA_TEMPLATE}, facts)
    step = candidate.plan.steps[-1]
    assert step.function.endswith("_behind_product")
    pattern = rf"struct {step.function}_epilogue {{.*?^}};"
    struct = re.search(pattern, candidate.source, re.M | re.S)[0]
    num = struct.count("const float* g")
    given = "".join(f", const float* g{i}" for i in range(num))
    text = f"""{HOST}{struct}
extern "C" void run(float* y{given}) {{
  const {step.function}_epilogue epilogue = {{{", ".join(f"g{i}" for i in range(num))}}};
  for (int i = 0; i < 3 * 12 * 30; ++i)
    y[i] = epilogue(y[i], i / 360, i / 30 % 12, i % 30, 12, 30);
}}
"""
    (tmp_path / "host.cpp").write_text(text)
    command = ["g++", "-O1", "-shared", "-fPIC", "-o", "host.so", "host.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    model, (x, *_) = problem.make_model(0), problem.make_inputs(1)
    has_bias = step.args[2] != "null"
    with torch.no_grad():
        expected, own = model(x), dict(model.named_parameters())
        y = F.conv2d(x, model.a.weight, model.a.bias if has_bias else None).contiguous()
        own["a_bias"] = model.a.bias
        tensors = [own[place.removesuffix("_v")] for place in step.args[6 : 6 + num]]
    run = ctypes.CDLL(str(tmp_path / "host.so")).run
    run(*(ctypes.c_void_p(t.data_ptr()) for t in (y, *tensors)))
    torch.testing.assert_close(y, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [200, 100])  # of 100 rows PyTorch makes the product
@pytest.mark.parametrize("name", ["values alone", "of columns", "of one", "more dimensions"])
def test_epilogues_on_a_gpu(name, batch, tmp_path):
    problem, made = made_of(tmp_path, FUSED[name])
    model, wide, x = on_gpu(problem, made, tmp_path, WGMMA_TEMPLATE)
    own = problem.make_model(0).cuda()
    own.load_state_dict(model.state_dict())
    x = x[: batch * len(x) // 200].contiguous()
    x[0, ..., 5], x[-1, ..., 7] = float("inf"), float("nan")
    with torch.no_grad():
        mine, theirs, exact = model(x), own(x), wide(x.double())
    assert torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(mine.isinf(), theirs.isinf())
    finite = theirs.isfinite() & exact.isfinite()
    error, limit = ((y.double() - exact)[finite].abs().max() for y in (mine, theirs))
    assert error <= 2 * limit + 2.0**-22 * exact[finite].abs().max()
