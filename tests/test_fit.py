"""What is wrong with a `model_new.py`, alone or beside the reference, is found by the plan.

Each case is a user's folder, put to `tune --dry-run` as a process: message, file, line, exit code.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Said, tune
from tiny_operator import NAME, config_text, write_family

from tuner.evaluate.fit import Fit
from tuner.plans import Argument, Tensor
from tuner.problem.reference import load_problem

OP = """
name: doubled_values
title: Doubled values and their scale
function: fused_doubled_values
replaces: [addition]
sizes: {rows: 64, cols: 100}
arguments:
  - {name: x, shape: [rows, cols]}
  - {name: weight, shape: [cols]}
  - {name: eps, dtype: float}
outputs:
  - {name: y, shape: [rows, cols]}
  - {name: mean, shape: [cols]}
flops: rows * cols
bytes: 8 * rows * cols
"""

REFERENCE = """
import torch
import torch.nn as nn

rows = 64
cols = 100


class Model(nn.Module):
    def __init__(self, cols, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cols))
        self.register_buffer("mean", torch.zeros(cols))
        self.eps = eps

    def forward(self, x):
        return 2 * x * self.weight


def get_inputs():
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return [cols, 1e-5]
"""

MODEL_NEW = """\
class ModelNew(nn.Module):
    def __init__(self, cols, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cols))
        self.register_buffer("mean", torch.zeros(cols))
        self.eps = eps

    def forward(self, x):
        if not self.training:
            return 2 * x * self.weight
        y, mean = fused_op(x, self.weight, self.eps)
        return y


def setup_context(ctx, inputs, output):
    x, weight, eps = inputs
    ctx.save_for_backward(x, weight)
    ctx.mark_non_differentiable(output[1])


def backward(ctx, grad_y, grad_mean):
    x, weight = ctx.saved_tensors
    return 2 * grad_y * weight, 2 * (grad_y * x).sum(0), None
"""

TEMPLATE = """---
title: One sweep
language: cpp
requires:
  - {expr: "device.kind == 'cpu'", why: "it is C++ for the CPU"}
parameters:
  mode: {about: "how it behaves", default: ok}
steps:
  - {call: fused_doubled_values_sweep, args: [x, weight, y, mean, rows, cols, eps]}
---
#include <cstdint>
extern "C" const char* fused_doubled_values_sweep(const float* x, const float* weight, float* y,
    float* mean, int64_t rows, int64_t cols, double eps) {
  for (int64_t i = 0; i < rows * cols; ++i) y[i] = 2 * x[i] * weight[i % cols];
  for (int64_t j = 0; j < cols; ++j) mean[j] = 0;
  return nullptr;
}
"""

INIT = "    def __init__(self, cols, eps):\n"
CALL = "fused_op(x, self.weight, self.eps)"
GRADS = "    return 2 * grad_y * weight, 2 * (grad_y * x).sum(0), None\n"

# What is edited in model_new.py, and what the message says.
WRONG: dict[str, tuple[str, str, list[str]]] = {
    "a misspelt operator": (
        "fused_op(", "fusd_op(", ["model_new.py:11: name 'fusd_op' is not", "mean 'fused_op'?"],
    ),
    "a misspelt name where the plan does not come by": (
        "            return 2 * x", "            return 2 * xx",
        ["model_new.py:10: name 'xx' is not defined"],
    ),
    "a syntax error": (
        "def backward(ctx, grad_y", "def backward(ctx,, grad_y",
        ["model_new.py:21: not valid Python: invalid syntax", "got: def backward(ctx,,"],
    ),
    "an error at import": (
        "class ModelNew", "import nothing_of_the_kind\n\n\nclass ModelNew",
        ["model_new.py:1: running it raised ModuleNotFoundError: No module named 'nothing_of"],
    ),
    "another name of the class": (
        "class ModelNew", "class ModelNeu",
        ["model_new.py: no class ModelNew", "hint: did you mean 'ModelNeu'?"],
    ),
    "a class that is no module": (
        "class ModelNew(nn.Module)", "class ModelNew",
        ["model_new.py: ModelNew is a class, not an nn.Module"],
    ),
    "too few arguments of the constructor": (
        INIT, "    def __init__(self, cols):\n        eps = 0\n",
        ["model_new.py:2: ModelNew(100, 1e-05) raised TypeError", "get_init_inputs() gives [100,"],
    ),
    "a constructor that raises": (
        "        self.eps = eps\n", "        self.eps = eps\n        self.scale.no = 1\n",
        ["model_new.py:7: ModelNew(100, 1e-05) raised AttributeError: 'ModelNew' object has no"],
    ),
    "a missing weight": (
        "        self.weight = nn.Parameter(torch.ones(cols))\n", "        self.weights = 1\n",
        ["model_new.py:2: the state_dict of ModelNew", "'weight' float32[100] is missing"],
    ),
    "a weight of another name": (
        'register_buffer("mean"', 'register_buffer("means"',
        ["'mean' float32[100] is missing; 'means' float32[100] is one too many"],
    ),
    "a weight of another shape": (
        "torch.ones(cols)", "torch.ones(1, cols)",
        ["'weight' is float32[1, 100], not float32[100]"],
    ),
    "a weight of another type": (
        "torch.zeros(cols)", "torch.zeros(cols).double()",
        ["'mean' is float64[100], not float32[100]"],
    ),
    "too few arguments of the operator": (
        CALL, "fused_op(x, self.weight)",
        ["model_new.py:11: fused_op gets 2 arguments, not 3", "got: fused_op(float32[64, 100], "],
    ),
    "an argument by name": (
        CALL, "fused_op(x, self.weight, eps=self.eps)",
        ["model_new.py:11: fused_op takes its arguments by position"],
    ),
    "arguments in another order": (
        CALL, "fused_op(self.weight, x, self.eps)",
        ["model_new.py:11: x has shape [100], expected 2 dimensions"],
    ),
    "no tensor": (
        CALL, "fused_op(x, None, self.eps)", ["model_new.py:11: weight is None, not a tensor"],
    ),
    "another dtype": (
        CALL, "fused_op(x, self.weight.double(), self.eps)",
        ["model_new.py:11: weight is float64[100], not float32"],
    ),
    "no number": (
        CALL, "fused_op(x, self.weight, 'small')", ["model_new.py:11: eps is 'small', not float"],
    ),
    "a forward that raises": (
        "        y, mean =", "        x.no_such_thing()\n        y, mean =",
        ["model_new.py:11: ModelNew.forward raised AttributeError", "gives [float32[64, 100]]"],
    ),
    "outputs that are unpacked wrongly": (
        "y, mean = fused_op", "(y,) = fused_op",
        ["model_new.py:11: ModelNew.forward raised ValueError: too many values to unpack"],
    ),
    "outputs that are not unpacked": (
        "y, mean = fused_op", "y = fused_op",
        ["model_new.py:8: ModelNew.forward returns another kind of answer than the reference",
         "got: (float32[4, 100], float32[100],)\n", "expected: float32[4, 100]\n"],
    ),
    "a misspelt backward": (
        "def backward(", "def backwards(",
        ["model_new.py: no function backward", "expected: def backward(ctx, grad_y, grad_mean)",
         "hint: did you mean 'backwards'?"],
    ),
    "no setup_context": (
        "def setup_context(ctx", "def _(ctx",
        ["model_new.py: no function setup_context", "def setup_context(ctx, inputs, output)"],
    ),
    "a backward of too few gradients in": (
        "def backward(ctx, grad_y, grad_mean)", "def backward(ctx, grad_y)",
        ["model_new.py:21: backward does not take 3 arguments", "got: def backward(ctx, grad_y)"],
    ),
    "a backward of too few gradients out": (
        ".sum(0), None\n", ".sum(0)\n",
        ["model_new.py:21: backward raised RuntimeError", "incorrect number of gradients"],
    ),
    "a gradient of another shape": (
        ".sum(0), None\n", ".sum(1), None\n",
        ["model_new.py:21: backward raised RuntimeError", "gradient at index 1 - got [4]"],
    ),
    "a backward that raises": (
        GRADS, "    return ctx.nothing\n",
        ["model_new.py:23: backward raised AttributeError", "'nothing'"],
    ),
    "a setup_context that raises": (
        "    x, weight, eps = inputs\n", "    x, weight = inputs\n",
        ["model_new.py:16: ModelNew.forward raised ValueError: too many values"],
    ),
}  # fmt: skip


def folder_of(path: Path, model_new: str = MODEL_NEW, reference: str = REFERENCE) -> Path:
    """Write the operator, a config of it, and a folder for the reference of somebody else."""
    write_family(path, TEMPLATE)
    for name, text in {
        "op.yaml": OP,
        "reference.py": reference,
        "model_new.py": model_new,
    }.items():
        (path / NAME / name).write_text(text)
    return path


def dry_run(folder: Path, **problem: object) -> Said:
    (folder / "c.yaml").write_text(config_text(folder, problem=problem))
    return tune("--config", "c.yaml", "--dry-run", cwd=folder)


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_in_model_new_is_reported_with_its_line_before_anything_runs(tmp_path, name):
    old, new, reported = WRONG[name]
    assert MODEL_NEW.count(old) == 1, old
    found = dry_run(folder_of(tmp_path, MODEL_NEW.replace(old, new)))
    assert found.code == 2, found
    assert found.err.startswith("error: "), found.err
    for words in reported:
        assert words in found.err, found.err


def test_the_right_module_passes(tmp_path):
    found = dry_run(folder_of(tmp_path))
    assert found.code == 0, found


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("return [cols, 1e-5]", "return [cols]", ["model_new.py:2: ModelNew(100) raised TypeErr"]),
        ("self.weight", "self.gain", ["'gain' float32[100] is missing; 'weight'"]),
        (
            "randn(rows, cols)",
            "randn(rows, cols + 1)",
            ["weight has shape [100], expected [cols] with cols = 101"],
        ),
        (
            "return [torch.randn(rows, cols)]",
            "return [torch.randn(rows, cols), 1]",
            ["ModelNew.forward raised TypeError", "get_inputs() gives [float32[64, 100], 1]"],
        ),
    ],
)
def test_a_reference_of_ones_own_that_does_not_fit_is_named_first(tmp_path, old, new, words):
    folder = folder_of(tmp_path / "family")
    mine = tmp_path / "mine.py"
    mine.write_text(REFERENCE.replace(old, new))
    found = dry_run(folder, reference=str(mine))
    assert found.code == 2, found
    assert f"error: {mine}: does not fit the operator: {folder / NAME}" in found.err, found.err
    for word in words:
        assert word in found.err, found.err


def test_a_formula_may_refuse_numbers_without_meaning(tmp_path):
    checked = GRADS.replace(
        "    return", "    assert not x.isnan().any() and x.sum() > 1e9\n    return"
    )
    found = dry_run(folder_of(tmp_path, MODEL_NEW.replace(GRADS, checked)))
    assert found.code == 0, found


DERIVED = """\
CALLS = []


class Model(nn.Module):
    def forward(self, x):
        CALLS.append(tuple(x.shape))
        return 2 * x


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        return fused_op(x)[0]


def setup_context(ctx, inputs, output):
    raise AssertionError


def backward(ctx, grad):
    raise AssertionError
"""


def test_a_step_that_is_the_references_own_is_not_computed_at_planning(tmp_path):
    reference = tmp_path / "reference.py"
    given = "def get_inputs():\n    return [torch.rand(64, 5)]\n"
    own = DERIVED.partition("\n\nclass ModelNew")[0]
    imports = "import torch\nimport torch.nn as nn\n\n"
    reference.write_text(f"{imports}{own}\n{given}def get_init_inputs():\n    return []\n")
    x, y = (Argument("x", shape=("rows", "cols")), Tensor("y", ("rows", "cols")))
    fit = Fit(load_problem(reference), tmp_path / "model_new.py", DERIVED, [x], [y], ())
    module = fit.names()
    model = fit.model(module)
    assert fit.sizes(module, model, fit.problem.stand_ins()) == {"rows": 64, "cols": 5}
    fit.rehearse(module, model)
    assert module["CALLS"] == []
