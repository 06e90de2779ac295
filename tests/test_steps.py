"""Steps of training of derived modules: gradients by kernels, beside float64 and PyTorch's own."""

from __future__ import annotations

import ast
import copy
import functools
import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cpu_machine import FACTS, FEW_PASSES, GPP, compiled
from test_any_module import answers, assert_as_exact, in_float64, text_of
from test_matching import TEXT
from unusual_modules import reference

from tuner.capture.capture import capture, with_another_batch
from tuner.capture.derive import derived
from tuner.capture.graph.settings import settings_of
from tuner.capture.steps.joint import captured_of
from tuner.capture.steps.step_plans import planned, why_not_planned
from tuner.capture.steps.step_text import without_steps
from tuner.evaluate.modules import arguments_for, fused, module_of
from tuner.kernel.binding import BoundOp, bind
from tuner.kernel.family import Family, load_family
from tuner.machine.datasheets import known_device
from tuner.problem.reference import Problem, load_problem
from tuner.trial import to_json

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")


def derive_with_steps(
    folder: Path, name: str, text: str, beside: Mapping[str, str] | None = None
) -> tuple[Problem, Family]:
    """Return a module's problem, and the operator of it with its steps of training."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text)
    problem = load_problem(path)
    graph = capture(problem)
    other = with_another_batch(problem, graph)
    forwards = [captured_of(problem, g) for g in (graph, other) if g]
    settings = settings_of(problem.make_model(0), False)
    made = derived(
        forwards[0], text, name, settings, False, folder / "made", *forwards[1:],
        beside=beside or {},
    )  # fmt: skip
    return problem, load_family(made.name, [made.folder])


class Taken:
    """A module with gradients by kernels, its reference, and how often the kernels were called.

    `params` are those of the template: C++ on a CPU, Triton on a GPU.
    """

    level = FEW_PASSES

    def __init__(
        self,
        folder: Path,
        name: str,
        text: str = "",
        device: str = "cpu",
        beside: Mapping[str, str] | None = None,
        **params: object,
    ) -> None:
        text = text or text_of(name)
        self.problem, self.family = derive_with_steps(folder, name, text, beside)
        self.device = device
        operator = self._bound(folder, params)
        self.num_calls = 0

        def counted(*args: object) -> object:
            self.num_calls += 1
            return further["gradients"](*args)

        def counted_of_weights(*args: object) -> object:
            self.num_weight_calls += 1
            return further["weight_gradients"](*args)

        further, self.num_weight_calls = operator.extra, 0
        self.module = module_of(self.family.model_new)
        self.module |= {**fused(operator), "fused_gradients": counted, "fused_device": device}
        if "weight_gradients" in further:
            self.module["fused_weight_gradients"] = counted_of_weights
        self.mine = self.new().to(device)
        self.own = self.problem.make_model(0).to(device)
        self.mine.load_state_dict(self.own.state_dict())
        self.wide = copy.deepcopy(self.own).double()

    def new(self) -> torch.nn.Module:
        """Return a further module, on the CPU, with weights of its own."""
        arguments = arguments_for(self.problem, self.module, "model_new.py")
        return self.module["ModelNew"](*arguments)

    def _bound(self, folder: Path, params: dict[str, object]) -> BoundOp:
        name = str(params.pop("template", "nest" if self.device == "cpu" else "nest_triton"))
        known = self.family.templates[name].parameters
        given = {p: value for p, value in params.items() if p in known}
        facts = FACTS if self.device == "cpu" else known_device("H200").facts()
        candidate = self.family.render({"template": name, **given}, facts)
        if self.device == "cpu":
            return bind(candidate.plan, "cpp", compiled(candidate, level=self.level))
        source = folder / "blocks" / "source.py"
        source.parent.mkdir()
        source.write_text(candidate.source)
        return bind(candidate.plan, "triton", source)

    def inputs(self, seed: int, batch: int | None = None) -> list[torch.Tensor]:
        return [x.to(self.device) for x in self.problem.make_inputs(seed, batch=batch)]


def leaves_of(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]


def gradients(model, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = leaves_of(inputs)
    made = [y for y in answers(model(*leaves)) if y.is_floating_point()]
    torch.manual_seed(5)
    given = [torch.randn(y.shape, dtype=torch.float32).to(y) for y in made]
    wanted = [x for x in (*leaves, *model.parameters()) if x.requires_grad]
    found = torch.autograd.grad(made, wanted, given, allow_unused=True)
    return [torch.zeros(1, device=made[0].device) if g is None else g for g in found]


TAKEN = [
    "rms_norm_gate", "softmax", "layer_norm", "bias_gelu", "where", "softmax_of_middle",
    "two_results", "min_max", "group_norm", "cosine", "linear_relu_linear", "avg_pool",
    "cross_entropy", "convolution_relu_scale", "batch_norm", "max_pool",
]  # fmt: skip
# Of one row PyTorch makes no variance, and of two all normalised numbers are alike.
OTHER_BATCHES = {"batch_norm": (3, 6)}


class AsBuilt(Taken):
    """With C++ that is compiled as a search does it."""

    level = "-O3"


@pytest.mark.parametrize("name", TAKEN)
def test_gradients_are_as_exact_as_pytorchs_at_any_batch(name, tmp_path):
    taken = AsBuilt(tmp_path, name)
    assert_gradients_are_as_exact(taken, name)
    on_gpus = taken.family.render({"template": "nest_triton"}, known_device("H200").facts())
    here = taken.family.render({"template": "nest"}, FACTS)
    assert {*on_gpus.plan.extra} == {*here.plan.extra} and None not in on_gpus.plan.extra.values()
    # Triton compiles ahead of time at the sizes that all calls have.
    shapes = [a.shape or () for call in taken.family.extra.values() for a in call.arguments]
    known = {*taken.family.op.sizes, *taken.family.op.extra_sizes}
    assert {size for shape in shapes for size in shape} <= known


class Held:
    """What a step keeps of a tensor for its backward; the tensor with what it holds itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def assert_nothing_is_held(taken: Taken) -> None:
    """What is kept for a backward that nobody asks for goes with the result."""
    kept: list[weakref.ref[Held]] = []

    def pack(tensor: torch.Tensor) -> Held:
        held = Held(tensor)
        kept.append(weakref.ref(held))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        made = taken.mine(*leaves_of(taken.inputs(2)))
    assert None not in [held() for held in kept]
    del made
    assert [held() for held in kept] == [None] * len(kept)


def assert_a_step_is_as_exact(taken: Taken) -> None:
    """Of the module's own batch, once, as where kernels are interpreted."""
    inputs = taken.inputs(3)
    mine, own = gradients(taken.mine, inputs), gradients(taken.own, inputs)
    assert_as_exact(mine, own, gradients(taken.wide, in_float64(inputs)))
    assert taken.num_calls == 1, "a step took the reference's way"


def assert_gradients_are_as_exact(taken: Taken, name: str) -> None:
    for count, batch in enumerate((None, *OTHER_BATCHES.get(name, (1, 6))), 1):
        inputs = taken.inputs(3, batch)
        mine, own = gradients(taken.mine, inputs), gradients(taken.own, inputs)
        assert_as_exact(mine, own, gradients(taken.wide, in_float64(inputs)))
        assert taken.num_calls == count, "a step took the reference's way"
        buffers = [dict(m.named_buffers()).values() for m in (taken.mine, taken.own, taken.wide)]
        assert_as_exact(*buffers)
    assert_nothing_is_held(taken)


# Several rows a program, and several blocks a row; gradients have blocks of their own.
BLOCKS = {"block_rows": 4, "block_columns": 32, "num_warps": 2, "stages": 3}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TAKEN)
def test_triton_gradients_are_as_exact_as_pytorchs_at_any_batch(name, tmp_path):
    assert_gradients_are_as_exact(Taken(tmp_path, name, "", "cuda", **BLOCKS), name)


# Maxima and minima with their places: gradients are of one element each, the first of equal ones.
WITH_PLACES = {
    "linear": ("self.l = nn.Linear(40, 64)",
               "return torch.min(torch.tanh(self.l(x)), dim=1, keepdim=True)[0] * 2.0", "9, 40"),
    "of middle": ("self.w = nn.Parameter(torch.rand(33))",
                  "return torch.max(x * self.w[:, None], 1)[0].square()", "4, 33, 9"),
    "equal": ("self.w = nn.Parameter(torch.rand(700))",
              "return torch.max(torch.relu(x - 1.5), -1)[0][:, None] * self.w", "5, 700"),
    "returned": ("self.w = nn.Parameter(torch.rand(70))",
                 "y, i = torch.max(x * self.w, -1); return torch.exp(y), i", "5, 70"),
    "conv": ("self.c = nn.Conv2d(3, 8, 3)",
             "return torch.min(self.c(x) * 2.0, dim=1, keepdim=True)[0]", "2, 3, 9, 11"),
}  # fmt: skip


def text_with_places(name: str) -> str:
    init, forward, shape = WITH_PLACES[name]
    return TEXT.format(init=init, names="x", forward=forward, inputs=f"torch.randn({shape})")


@pytest.mark.parametrize("name", WITH_PLACES)
def test_gradients_of_maxima_are_of_their_places(name, tmp_path):
    assert_gradients_are_as_exact(Taken(tmp_path, "places", text_with_places(name)), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_PLACES)
def test_triton_gradients_of_maxima_are_of_their_places(name, tmp_path):
    taken = Taken(tmp_path, "places", text_with_places(name), "cuda", **BLOCKS)
    assert_gradients_are_as_exact(taken, name)


BFLOAT16 = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(40))
        self.bfloat16()

    def forward(self, x, gate):
        return torch.tanh(x * self.weight) * F.silu(gate)


def get_inputs():
    return [torch.randn(9, 40).bfloat16(), torch.randn(9, 40).bfloat16()]


def get_init_inputs():
    return []
"""


def test_gradients_of_bfloat16_are_as_exact_as_pytorchs(tmp_path):
    taken = Taken(tmp_path, "halves", BFLOAT16)
    inputs = taken.problem.make_inputs(1)
    mine, own = gradients(taken.mine, inputs), gradients(taken.own, inputs)
    exact = gradients(taken.wide, in_float64(inputs))
    assert taken.num_calls == 1
    for got, theirs, true in zip(mine, own, exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - true).abs().max() <= 2.0 * (theirs - true).abs().max()


def test_sums_over_the_batch_are_of_the_kernel_that_computes_what_is_summed(tmp_path, gate):
    """A norm's backward reads each tensor once on a GPU, and stores nothing between."""
    for taken in (gate, Taken(tmp_path, "layer_norm")):
        candidate = taken.family.render({"template": "nest_triton"}, known_device("H200").facts())
        call = candidate.plan.extra["gradients"]
        assert call is not None and len(call.steps) == 1
        assert {tensor.name.rpartition("_")[0] for tensor in call.workspace} == {
            "partial", "totals"
        }  # fmt: skip


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Taken:
    return Taken(tmp_path_factory.mktemp("gate"), "rms_norm_gate")


def test_a_result_without_gradients_leaves_those_of_the_others_to_kernels(tmp_path):
    """As a metric beside a loss: a share of a comparison, a value that is detached."""
    text = TEXT.format(
        init="self.w = nn.Parameter(torch.rand(40))",
        names="x, y",
        forward="e = (x * self.w - y).square(); "
        "return (e > 0.5).float().mean(), e.mean(1), e.detach().amax(1)",
        inputs="torch.randn(64, 40), torch.randn(64, 40)",
    )
    taken = Taken(tmp_path, "metrics", text)
    inputs = taken.problem.make_inputs(1)
    found = []
    for model, given in (
        (taken.mine, inputs),
        (taken.own, inputs),
        (taken.wide, in_float64(inputs)),
    ):
        leaves = leaves_of(given)
        made = model(*leaves)
        assert [y.requires_grad for y in made] == [False, True, False]
        grads = torch.autograd.grad(made[1].sin().sum(), [*leaves, model.w])
        found.append([y.detach() for y in (*made, *grads)])
    assert taken.num_calls == 1
    assert_as_exact(*found)


COPIED = {
    "part": ("y = x[:, :-1].contiguous(); return y.exp().sum(1) * y.square().mean(1)", "64, 40"),
    "turned": ("y = x.transpose(0, 1).contiguous(); return y.exp().sum(0) * y.square()", "7, 5"),
    "one of two": ("y = x[:, 3::2].clone(); return torch.sin(y) * x[:, :1].exp()", "6, 9"),
}


@pytest.mark.parametrize("name", COPIED)
def test_of_a_copied_part_of_an_input_a_step_keeps_the_copy(name, tmp_path):
    """As PyTorch does, so that the input may be edited before the backward."""
    forward, shape = COPIED[name]
    text = TEXT.format(init="...", names="x", forward=forward, inputs=f"torch.randn({shape})")
    taken = Taken(tmp_path, "part", text)
    (given,) = taken.inputs(1, None)
    found = []
    for model in (taken.mine, taken.own, taken.wide):
        x = given.to(torch.float64 if model is taken.wide else torch.float32, copy=True)
        x.requires_grad_()
        y = model(x)
        if name != "one of two":
            with torch.no_grad():
                x.zero_()
        found.append(torch.autograd.grad(y.sin().sum(), x))
    assert_as_exact(*found)
    assert taken.num_calls == 1, "a step took the reference's way"


def test_an_input_may_be_a_tensor_of_one_number(tmp_path):
    forward, inputs = (
        "return torch.sin(x * self.w + shift)",
        "torch.randn(6, 5, 4), torch.tensor(0.3)",
    )
    init = "self.w = nn.Parameter(torch.tensor(1.5))"
    text = TEXT.format(init=init, names="x, shift", forward=forward, inputs=inputs)
    taken = Taken(tmp_path, "shifted", text)
    given = taken.inputs(1)
    assert given[1].shape == ()
    mine, own = gradients(taken.mine, given), gradients(taken.own, given)
    assert_as_exact(mine, own, gradients(taken.wide, in_float64(given)))
    assert taken.num_calls == 1, "a step took the reference's way"


CONVERTED = {
    "mask": "(torch.rand(7, 40) > 0.3).long()",
    "a mask that is turned": "(torch.rand(40, 7) > 0.3).long().t()",
    "bools": "torch.rand(7, 40) > 0.3",
    "halves": "torch.rand(7, 40).half()",
}


@pytest.mark.parametrize("name", CONVERTED)
def test_of_a_converted_input_a_step_keeps_what_it_was_converted_to(name, tmp_path):
    """As PyTorch does: the mask may be edited before the backward, at any batch."""
    forward = "m = mask.float(); return (torch.tanh(x) * m).sum(1) / m.sum(1).clamp(min=1e-6)"
    inputs = f"torch.randn(7, 40), {CONVERTED[name]}"
    text = TEXT.format(init="...", names="x, mask", forward=forward, inputs=inputs)
    taken = Taken(tmp_path, "masked", text)
    for batch in (None, 3):
        given, mask = taken.inputs(1, batch)
        found = []
        for model in (taken.mine, taken.own, taken.wide):
            x = given.to(torch.float64 if model is taken.wide else torch.float32, copy=True)
            x.requires_grad_()
            converted = mask.clone()
            y = model(x, converted)
            converted.zero_()
            found.append(torch.autograd.grad(y.sin().sum(), x))
        assert_as_exact(*found)
    assert taken.num_calls == 2, "a step took the reference's way"


def test_gradients_of_a_weight_of_a_given_norm_are_of_kernels(tmp_path):
    normed = "nn.utils.parametrizations.weight_norm"
    init = f"self.conv = {normed}(nn.Conv1d(6, 8, 3, padding=1))"
    forward = "return nn.functional.leaky_relu(self.conv(x), 0.1).square()"
    inputs = "torch.randn(4, 6, 50)"
    text = TEXT.format(init=init, names="x", forward=forward, inputs=inputs)
    taken = Taken(tmp_path, "normed", text)
    assert_gradients_are_as_exact(taken, "normed")
    assert taken.num_calls, "a step took the reference's way"


LONG_ROWS = {
    "batch norm": ("self.m = nn.BatchNorm2d(6)", "self.m(x)"),
    "group norm": ("self.m = nn.GroupNorm(2, 6)", "self.m(x)"),
    "instance norm": ("self.m = nn.InstanceNorm2d(6)", "self.m(x)"),
    "layer norm": ("self.m = nn.LayerNorm((6, 64, 130))", "self.m(x)"),
    "norm of all": ("self.m = nn.Identity()", "x / torch.norm(x)"),
    "mean": ("self.m = nn.Identity()", "x / x.abs().mean((1, 2, 3), keepdim=True)"),
}


@pytest.mark.parametrize("name", LONG_ROWS)
def test_what_long_rows_are_reduced_to_is_kept_if_nothing_else_is(name, tmp_path):
    """A sweep over a row costs more than a forward of its own for steps, which keeps a number."""
    init, forward = LONG_ROWS[name]
    inputs = "torch.randn(3, 6, 64, 130)"
    text = TEXT.format(init=init, names="x", forward=f"return {forward}", inputs=inputs)
    taken = AsBuilt(tmp_path, "long", text)
    kept = taken.family.extra["kept"].outputs
    given = {a.name for a in taken.family.extra["gradients"].arguments}
    (x,) = taken.inputs(1, None)
    made = len(kept) - len(given - {"x", "m_weight", "grad_0_gradients"})
    assert 0 < made < len(kept)  # all others are read by the gradients
    batches = (None, 2) if name == "batch norm" else (None, 1, 5)
    for count, batch in enumerate(batches, 1):
        inputs = taken.inputs(3, batch)
        mine, own = gradients(taken.mine, inputs), gradients(taken.own, inputs)
        assert_as_exact(mine, own, gradients(taken.wide, in_float64(inputs)))
        assert taken.num_calls == count
    held = []
    for model in (taken.mine, taken.own):
        bytes_of: dict[int, int] = {}

        def pack(tensor: torch.Tensor, bytes_of: dict[int, int] = bytes_of) -> torch.Tensor:
            storage = tensor.untyped_storage()
            bytes_of[storage.data_ptr()] = storage.nbytes()
            return tensor

        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(leaf)
        held.append(sum(bytes_of.values()))
        del y
    assert held[0] <= held[1]


@pytest.mark.parametrize(
    ("norm", "inputs"),
    [("nn.LayerNorm(520)", "torch.randn(64, 520)"), ("nn.BatchNorm1d(4)", "torch.randn(8191, 4)")],
)
def test_of_short_rows_nothing_is_kept_for_that(norm, inputs, tmp_path):
    """Whatever the batch: with one row more another step would be planned, and be for no batch."""
    text = TEXT.format(
        init=f"self.m = {norm}", names="x", forward="return self.m(x)", inputs=inputs
    )
    _, family = derive_with_steps(tmp_path, "short", text)
    assert {*family.extra} == {"gradients"}
    assert family.extra["gradients"].arguments[0].shape[0] == "batch"


BEFORE_ACTIVATIONS = {
    "group norm": ("self.m = nn.GroupNorm(4, 16)", "self.m(x)"),
    "batch norm": (
        "self.c, self.m = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)",
        "self.m(self.c(x))",
    ),
}


@pytest.mark.parametrize("name", BEFORE_ACTIVATIONS)
def test_before_an_activation_a_norm_is_computed_again_from_a_few_numbers(name, tmp_path):
    """PyTorch keeps all of what an activation reads, and lets the bias be edited meanwhile."""
    init, normed = BEFORE_ACTIVATIONS[name]
    forward, inputs = f"return nn.functional.silu({normed})", "torch.randn(12, 16, 24, 32)"
    text = TEXT.format(init=init, names="x", forward=forward, inputs=inputs)
    taken = Taken(tmp_path, "before", text)
    assert_gradients_are_as_exact(taken, "before")
    calls = taken.num_calls
    (given,) = taken.inputs(1, None)
    found, kept = [], dict[str, list[int]]()
    for model in (taken.mine, taken.own, taken.wide):
        counts = kept.setdefault(type(model).__name__ + str(given.dtype), [])
        x = given.to(torch.float64 if model is taken.wide else torch.float32, copy=True)
        x.requires_grad_()

        def pack(tensor: torch.Tensor, counts: list[int] = counts) -> torch.Tensor:
            counts.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(x)
        bias = model.m.bias
        before = bias.detach().clone()
        with torch.no_grad():
            bias.add_(1.0)  # which PyTorch allows
        found.append(torch.autograd.grad(y.sin().sum(), [x, *model.parameters()]))
        with torch.no_grad():
            bias.copy_(before)
    for each in zip(*found, strict=True):
        assert_as_exact(*([one] for one in each))
    assert taken.num_calls == calls + 1
    large = [count for count in kept["ModelNewtorch.float32"] if count >= given.numel()]
    assert len(large) == normed.count("(")  # the input, and what a convolution made


def test_what_is_kept_is_no_more_than_pytorch_keeps(tmp_path, gate):
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    softmax = Taken(tmp_path, "softmax")
    for taken, names in ((gate, 3), (softmax, 2)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            taken.mine(*leaves_of(taken.problem.make_inputs(1)))
        assert len(kept) == names  # inputs and weight; the result, and inputs in any case


def test_gradients_of_gradients_go_through_the_reference(gate):
    inputs = gate.problem.make_inputs(1)
    found = []
    for model in (gate.mine, gate.own):
        calls = gate.num_calls
        leaves = leaves_of(inputs)
        (first,) = torch.autograd.grad(model(*leaves).sin().sum(), leaves[:1], create_graph=True)
        assert gate.num_calls == calls
        found.append(torch.autograd.grad(first.square().sum(), [*leaves, model.w]))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_backward_is_refused_where_pytorch_refuses_it(gate):
    for model in (gate.mine, gate.own):
        leaves = leaves_of(gate.problem.make_inputs(1))
        y = model(*leaves)
        y.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
        y = model(*leaves)
        with torch.no_grad():
            leaves[0].add_(1.0)
        with pytest.raises(RuntimeError, match="inplace"):
            y.sum().backward()


def test_gradients_of_gradients_are_refused_where_what_forward_read_was_edited(tmp_path):
    """PyTorch reads no bias again; who computes from it would go on with another one, unseen."""
    taken = Taken(tmp_path, "bias_gelu")
    (x,) = leaves_of(taken.inputs(1))
    y = answers(taken.mine(x))[0]
    with torch.no_grad():
        taken.mine.b.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: b is at version"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    y = answers(taken.mine(x))[0]
    with pytest.raises(RuntimeError, match="inplace operation: x is at version"):
        with torch.no_grad():
            x.add_(1.0)
        torch.autograd.grad(y.sum(), x, create_graph=True)
    y = answers(taken.mine(x))[0]
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert first.requires_grad


def test_gradients_of_gradients_are_of_the_attributes_that_the_call_found(tmp_path):
    text = TEXT.format(
        init="self.w, self.eps = nn.Parameter(torch.rand(40)), 1e-6",
        names="x",
        forward="return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.w",
        inputs="torch.randn(64, 40)",
    )
    taken, found = Taken(tmp_path, "eps", text), []
    for model in (taken.mine, taken.own):
        (x,) = leaves_of(taken.inputs(1))
        y = model(x)
        model.eps = 1.0
        found.append(torch.autograd.grad(y.sum(), x, create_graph=True)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["rms_norm_gate", "linear_relu_linear"])
def test_a_module_that_keeps_its_result_is_freed(name, tmp_path):
    """As a hook that keeps activations does; what holds its own graph holds itself."""
    taken, freed = Taken(tmp_path, name), []
    for _ in range(2):
        model = taken.new()
        for _ in range(2):
            model.activation = answers(model(*leaves_of(taken.inputs(1))))[0]
            model.activation.sum().backward()
        freed.append(weakref.ref(model))
        del model
        gc.collect()
    assert [each() for each in freed] == [None, None] and taken.num_calls == 4
    model = taken.new()  # which a graph needs no longer
    leaves = leaves_of(taken.inputs(1))
    y = answers(model(*leaves))[0]
    (first,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaves[0])
    own = taken.problem.make_model(0)
    own.load_state_dict(model.state_dict())
    y = answers(own(*leaves))[0]
    (first,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first.sum(), leaves[0])[0])


@pytest.mark.parametrize("name", ["rms_norm_gate", "linear_relu_linear", "cross_entropy"])
def test_results_are_detached_in_place(name, tmp_path):
    taken = Taken(tmp_path, name)
    y = answers(taken.mine(*leaves_of(taken.inputs(1))))[0]
    assert y.requires_grad and not y.detach_().requires_grad


# PyTorch's own convolution of one dimension is a part of one of two.
CONVOLVED = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(8, 16, 1)

    def forward(self, x):
        return self.inner(torch.tanh(x) * torch.sigmoid(x))


def get_inputs():
    return [torch.randn(4, 8, 64)]


def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(
    "name", ["rms_norm_gate", "linear_relu_linear", "cross_entropy", "convolved"]
)
def test_results_without_gradients_and_gradients_are_no_views(name, tmp_path):
    """A trained token is written into frozen features, a loss is added up, both are detached."""
    taken = Taken(tmp_path, name, CONVOLVED if name == "convolved" else "")
    inputs = taken.inputs(1)
    with torch.no_grad():
        found = [*answers(taken.mine(*inputs))]
    leaves = leaves_of(inputs)
    made = answers(taken.mine(*leaves))[0]
    found += torch.autograd.grad(made.sum(), [x for x in leaves if x.requires_grad])
    assert taken.num_calls == 1
    for y in found:
        assert not y._is_view()
        y *= torch.ones((), requires_grad=True)
        assert y.requires_grad
        y.detach_()


def test_a_module_from_before_its_file_was_loaded_once_more_is_called_as_ever(gate, monkeypatch):
    """As `importlib.reload` leaves it: what its functions name is new, its class is not."""
    x, g = gate.problem.make_inputs(1)
    before = gate.mine(x, g)
    again = type("ModelNew", (gate.module["Model"],), {})
    monkeypatch.setitem(gate.module, "ModelNew", again)
    gate.module["_KNOWN"].clear()
    torch.testing.assert_close(gate.mine(x, g), before)


def wrapped(model: torch.nn.Module) -> None:
    inner = model.forward
    model.forward = functools.wraps(inner)(lambda *args: inner(*args))


class Hook:
    """As a framework keeps on modules that it has a hand in."""


@pytest.mark.parametrize(
    ("edit", "num_kernels"),
    [
        (lambda m: setattr(m, "layer_idx", 3), 2),
        (lambda m: setattr(m, "_framework_hook", Hook()), 2),
        (wrapped, 2),
        (lambda m: setattr(m, "keepdim", 3), 0),  # a name that the file's code has
        (lambda m: setattr(m, "children", 3), 0),  # of the class
    ],
    ids=["a number", "an object", "forward", "a name in the code", "a name of the class"],
)
def test_what_a_framework_notes_on_a_module_changes_no_call(gate, edit, num_kernels, monkeypatch):
    calls: list[None] = []
    op = gate.module["fused_op"]
    monkeypatch.setitem(gate.module, "fused_op", lambda *a: calls.append(None) or op(*a))
    model = gate.new()
    x, g = gate.problem.make_inputs(1)
    with torch.no_grad():
        before = model(x, g)
        edit(model)
        calls.clear()
        for _ in range(2):
            torch.testing.assert_close(model(x, g), before)
    assert len(calls) == num_kernels


def test_frozen_parts_and_edited_results_are_as_in_pytorch(gate):
    inputs = gate.problem.make_inputs(1)
    for place in range(3):
        found = []
        for model in (gate.mine, gate.own):
            model.zero_grad()
            leaves = leaves_of(inputs)
            everything = [*leaves, model.w]
            everything[place].requires_grad_(False)
            y = model(*leaves)
            y.mul_(2.0)  # a result may be edited
            y.sum().backward()
            found.append([x.grad for x in everything])
            model.w.requires_grad_()
            model.w.grad = None
        for got, expected in zip(*found, strict=True):
            assert (got is None) == (expected is None)
            if got is not None:
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_other_ways_to_train_take_the_reference(gate):
    calls = gate.num_calls
    x, y = gate.problem.make_inputs(1)
    per_row = torch.func.vmap(torch.func.grad(lambda a, b: gate.mine(a[None], b[None]).sum()))
    own = torch.func.vmap(torch.func.grad(lambda a, b: gate.own(a[None], b[None]).sum()))
    torch.testing.assert_close(per_row(x, y), own(x, y))
    with torch.no_grad():  # without gradients as well
        rows = torch.func.vmap(gate.mine)(x[:, None], y[:, None])
        torch.testing.assert_close(rows, torch.func.vmap(gate.own)(x[:, None], y[:, None]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gate.mine(x, y).sum().backward()
    halves = gate.mine(x.double(), y.double())
    assert halves.dtype == torch.float64 and gate.num_calls == calls


def test_threads_take_steps_at_once(gate):
    inputs = gate.problem.make_inputs(2)
    expected = gradients(gate.own, inputs)
    found: list[list[torch.Tensor]] = []

    def step() -> None:
        leaves = leaves_of(inputs)
        torch_grads = torch.ones(37, 100)
        made = gate.mine(*leaves)
        found.append(list(torch.autograd.grad(made, [*leaves, gate.mine.w], torch_grads)))

    threads = [threading.Thread(target=step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(expected) == 3
    for each in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(each, found[0], strict=True))


def test_hooks_of_what_has_no_gradient_are_not_called(tmp_path):
    text = text_of("bias_gelu").replace(
        "        self.b =", "        self.unused = nn.Parameter(torch.ones(3))\n        self.b ="
    )
    assert "unused" in text
    taken = Taken(tmp_path, "unused", text)
    calls = []
    taken.mine.unused.register_hook(calls.append)
    answers(taken.mine(*taken.problem.make_inputs(1)))[0].sum().backward()
    assert taken.num_calls == 1 and not calls and taken.mine.unused.grad is None
    assert taken.mine.b.grad is not None


def test_no_name_of_a_file_means_two_things(tmp_path):
    """What knows calls again, and steps, stand in one file, whose names are of all of it."""
    _, family = derive_with_steps(tmp_path, "rms_norm_gate", text_of("rms_norm_gate"))
    found: list[str] = []
    for node in ast.parse(family.model_new).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign):
            found += [x.id for x in node.targets if isinstance(x, ast.Name)]
    assert "_LEAVES_OF" in found and "known_call" in found
    assert [name for name, count in Counter(found).items() if count > 1] == []


@pytest.mark.parametrize(
    "factor", ["torch.exp(-self.p)", "torch.sigmoid(-self.p)", "torch.exp(2.0 * self.p)"]
)
def test_a_factor_may_be_computed_from_a_computed_weight(factor, tmp_path):
    """One reader of it would compute it again, from a few numbers, and another one keeps it."""
    text = TEXT.format(
        init="self.p = nn.Parameter(torch.rand(512))",
        names="x",
        forward=f"y = x * {factor}; return (y * y).mean(1)",
        inputs="torch.randn(96, 512)",
    )
    taken = Taken(tmp_path, "factor", text)
    inputs = taken.inputs(3)
    mine, own = gradients(taken.mine, inputs), gradients(taken.own, inputs)
    assert_as_exact(mine, own, gradients(taken.wide, in_float64(inputs)))
    assert taken.num_calls == 1


def test_products_are_less_the_largest_of_them_as_forward_rounded_it(tmp_path):
    """Joined with the subtraction a product of large logits lost what a kept maximum knew."""
    text = TEXT.format(
        init="self.t = nn.Parameter(torch.zeros(()))",
        names="x, y",
        forward="return -(y * torch.log_softmax(x * torch.exp(self.t), -1)).sum(-1)",
        inputs="torch.randn(64, 512) * 100.0, torch.softmax(torch.randn(64, 512), -1)",
    )
    taken = AsBuilt(tmp_path, "temperature", text)
    for model in (taken.mine, taken.own, taken.wide):
        model.t.data.fill_(1.0)
    inputs = taken.inputs(3)
    mine, own = gradients(taken.mine, inputs), gradients(taken.own, inputs)
    wide = gradients(taken.wide, in_float64(inputs))
    assert_as_exact(mine, own, wide)
    errors = [(g[0].double() - wide[0]).norm() / wide[0].norm() for g in (mine, own)]
    assert errors[0] < 2.0 * errors[1]
    assert taken.num_calls == 1


@pytest.mark.parametrize("name", ["linear_relu_linear", "convolution_relu_scale"])
def test_data_want_no_gradient_and_cost_none(name, tmp_path):
    taken = Taken(tmp_path, name)
    calls = []
    real = taken.module["fused_weight_gradients"]
    taken.module["fused_weight_gradients"] = lambda *args: calls.append(1) or real(*args)
    inputs = taken.problem.make_inputs(1)
    found = []
    for model, given in (
        (taken.mine, inputs),
        (taken.own, inputs),
        (taken.wide, in_float64(inputs)),
    ):
        torch.manual_seed(5)
        answers(model(*given))[0].sin().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert_as_exact(*found)
    assert len(calls) == 1 and not taken.num_calls
    weight = max(taken.mine.parameters(), key=torch.numel)
    weight.requires_grad_(False)  # a frozen weight of a product: PyTorch's own step
    answers(taken.mine(*inputs))[0].sum().backward()
    assert len(calls) == 1


@pytest.fixture(scope="module")
def gated_norm(tmp_path_factory) -> Taken:
    text = TEXT.format(
        init="self.l, self.n = nn.Linear(40, 48), nn.LayerNorm(48)",
        names="x, y",
        forward="return self.n(self.l(x)) * y",
        inputs="torch.randn(64, 40), torch.randn(64, 48)",
    )
    return Taken(tmp_path_factory.mktemp("gated"), "gated_norm", text)


@pytest.mark.parametrize(
    ("of_inputs", "frozen", "takes"),
    [
        ("x, y", [], True), ("x", [], True), ("", [], True), ("y", [], False),
        ("x", ["n.weight"], True), ("", ["l.bias", "n.weight", "n.bias"], True),
        ("x, y", ["l.weight"], False), ("x", ["l.weight", "l.bias", "n.weight", "n.bias"], False),
    ],
)  # fmt: skip
def test_some_want_gradients_and_others_do_not(of_inputs, frozen, takes, gated_norm):
    """Kernels compute no product in vain, nor does PyTorch; what else they compute is little."""
    taken, calls = gated_norm, []
    before = taken.num_calls
    real = taken.module["fused_weight_gradients"]
    taken.module["fused_weight_gradients"] = lambda *args: calls.append(1) or real(*args)
    found = []
    try:
        for model in (taken.mine, taken.own, taken.wide):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in frozen)
                parameter.grad = None
            given = [x.to(model.n.weight.dtype) for x in taken.problem.make_inputs(1)]
            for name, x in zip("xy", given, strict=True):
                x.requires_grad_(name in of_inputs)
            model(*given).sin().sum().backward()
            grads = [x.grad for x in (*given, *model.parameters())]
            assert [g is None for g in grads[:2]] == [name not in of_inputs for name in "xy"]
            found.append([g for g in grads if g is not None])
    finally:
        taken.module["fused_weight_gradients"] = real
        for model in (taken.mine, taken.own, taken.wide):
            model.requires_grad_(True)
    assert_as_exact(*found)
    assert (taken.num_calls - before + len(calls) == 1) is takes


def test_a_task_of_a_step_that_is_equal_to_the_forwards_has_no_parameters_of_its_own(tmp_path):
    """It was taken for the forward's own, whose parameters end in `_2`: `keep` was undefined."""
    text = TEXT.format(
        init="self.l, self.n = nn.Linear(40, 300), nn.BatchNorm1d(300)",
        names="x",
        forward="return torch.softmax(self.n(self.l(x)) * 2.0, 1)",
        inputs="torch.randn(64, 40)",
    )
    _, family = derive_with_steps(tmp_path, "softmax_of_batch_norm", text)
    own = (family.reference.parent / "nest.cpp.j2").read_text()
    assert "{% if keep %}" in own and "{% if keep_2 %}" in own
    family.render({"template": "nest"}, FACTS)


def test_steps_can_be_left_to_the_reference(gate):
    text = without_steps(gate.family.model_new)
    assert text != gate.family.model_new
    module = module_of(text)
    module |= {n: gate.module[n] for n in ("fused_op", "fused_device", "fused_gradients")}
    calls = gate.num_calls
    model = module["ModelNew"]()
    gradients(model, gate.problem.make_inputs(1))
    assert gate.num_calls == calls


def test_gradients_of_gradients_leave_running_statistics_alone(tmp_path):
    taken = Taken(tmp_path, "batch_norm")
    (x,) = leaves_of(taken.problem.make_inputs(1))
    y = taken.mine(x)
    before = [b.clone() for b in taken.mine.buffers()]
    torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(before, taken.mine.buffers(), strict=True))
    assert not taken.num_calls


AVERAGE = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(12))
        self.register_buffer("average", torch.ones(12))

    def forward(self, x):
        before = self.average.clone()
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
        return torch.tanh(x / (self.average + {used})) * self.scale


def get_inputs():
    return [torch.randn(40, 12)]


def get_init_inputs():
    return []
"""


@pytest.mark.parametrize("used", ["1e-5", "before"])
def test_gradients_are_of_the_state_that_the_call_found(used, tmp_path):
    # The result depends on what the call updates, or on what that was before.
    taken = Taken(tmp_path, "average", AVERAGE.replace("{used}", used))
    (given,) = taken.problem.make_inputs(1)
    for is_differentiated in (False, True):
        found = []
        for model in (taken.mine, taken.own):
            x = given.clone().requires_grad_()
            y = model(x)
            model(given + 1.0)  # updates once more, before the backward
            wanted = [x, model.scale]
            first = torch.autograd.grad(y.sin().sum(), wanted, create_graph=is_differentiated)
            found.append([g.detach() for g in first])
            if is_differentiated:
                found[-1] += torch.autograd.grad(first[0].square().sum(), wanted)
            found[-1].append(model.average)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    # Plain ones, and second ones through the result; those to differentiate are the reference's.
    assert taken.num_calls == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (text_of("argmax"), "its results have no gradients"),
        (text_of("number"), "forward is given numbers beside tensors (y)"),
        (
            reference("x: torch.relu(x).prod(-1) + 1", "torch.rand(8, 16)"),
            "gradients of a product of many (line 8) are not generated yet",
        ),
        (
            reference("x: x * torch.tensor([1.0, 2.0])", "torch.rand(8, 2)"),
            "it uses a tensor that is neither a parameter nor a buffer (line 8)",
        ),
        (
            reference("x: torch.polar(x, x).abs()", "torch.rand(8, 2)"),
            "its gradients are computed with complex numbers",
        ),
        (
            reference("x: torch.relu(torch.topk(x, 3)[0] * 2)", "torch.rand(8, 16)"),
            "gradients of topk are not generated yet",
        ),
    ],
    ids=["no gradient", "number", "product", "constant", "complex", "largest"],
)
def test_what_has_no_kernels_for_gradients_says_why(text, why, tmp_path):
    path = tmp_path / "none.py"
    path.write_text(text)
    problem = load_problem(path)
    captured = captured_of(problem, capture(problem))
    assert captured.joint is None
    assert why in captured.without_step


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            reference(
                "x: F.conv2d(x, torch.ones_like(x[:1, :, :3, :3]))", "torch.rand(2, 3, 8, 8)"
            ),
            "its gradients are nothing but calls of PyTorch's own operations",
        ),
        (
            reference("ctx: torch.relu(ctx).sum(-1)", "torch.rand(8, 16)"),
            "an argument of forward is called ctx, as generated text calls its own",
        ),
        (
            reference(
                "x, y: (torch.relu(x), torch.relu(y))", "torch.rand(8, 16), torch.rand(8, 4)"
            ),
            "",
        ),
        (reference("x: torch.relu(x)", "torch.rand(8, 16)"), ""),
    ],
    ids=["calls", "name", "apart", "planned"],
)
def test_what_is_recorded_and_not_generated_says_why(text, why, tmp_path):
    path = tmp_path / "none.py"
    path.write_text(text)
    problem = load_problem(path)
    joint = captured_of(problem, capture(problem)).joint
    assert joint is not None
    assert why_not_planned(joint) == why
    assert (planned(joint) is None) == bool(why)


# ---- on a GPU ---------------------------------------------------------------------------------

LARGE = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}
        self.to(torch.{dtype})

    def forward(self, x, y):
        return {forward}


def get_inputs():
    return [torch.randn({shape}, dtype=torch.{dtype}) for _ in range(2)]


def get_init_inputs():
    return []
"""
# What is computed, the constructor, and a shape: sums over the batch in many pieces, rows that no
# block holds, few rows that are long, columns that lie apart, scans.
LARGE_MODULES = {
    "rms_norm_gate": (
        "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w * F.silu(y)",
        "self.w = nn.Parameter(torch.randn(1000))", "3001, 1000",
    ),
    "layer_norm": ("self.n(x) * y", "self.n = nn.LayerNorm(9000)", "700, 9000"),
    "bias": ("F.gelu(x + self.b) * y", "self.b = nn.Parameter(torch.randn(300))", "3001, 300"),
    "few_long_rows": ("torch.softmax(x * self.w, -1) * y",
                      "self.w = nn.Parameter(torch.randn(70001))", "3, 70001"),
    "channels": ("F.gelu(x + self.b[:, None]) * torch.softmax(y, 1)",
                 "self.b = nn.Parameter(torch.randn(150))", "20, 150, 333"),
    "batch_norm_of_rows": ("F.relu(self.n(x)) * y", "self.n = nn.BatchNorm1d(300)", "2500, 300"),
    "one_scale": ("torch.tanh(x * self.s) * y", "self.s = nn.Parameter(torch.ones(1))",
                  "300, 500"),
    "scan": ("x.cumsum(-1) * self.w + y.cumsum(1)", "self.w = nn.Parameter(torch.randn(2500))",
             "40, 2500"),
}  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("layer_norm", "nest_triton"),
        ("bias_gelu", "nest_triton"),
        ("max_pool", "nest_triton"),
        ("convolution_relu_scale", "nest_triton"),
        ("convolution_relu_scale", "nest_channels_last_triton"),
    ],
)
def test_triton_compiles_all_calls_ahead_without_a_gpu(name, template, tmp_path):
    family = Taken(tmp_path, name).family
    candidate = family.render({"template": template}, known_device("H200").facts())
    source, plan = tmp_path / "source.py", tmp_path / "plan.json"
    source.write_text(candidate.source)
    plan.write_text(to_json(candidate.plan))
    sizes = json.dumps({**family.op.extra_sizes, **family.op.sizes})
    ran = subprocess.run(
        [sys.executable, "-m", "tuner.kernel.triton_build", str(source), str(plan),
         str(tmp_path), "--arch", "90", "--sizes", sizes],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)
    assert not found["error"] and not found["note"], found
    functions = {
        s.function for call in candidate.plan.calls for s in call.steps if s.kind == "call"
    }
    compiled_names = [kernel["name"] for kernel in found["kernels"]]
    assert all(any(name.startswith(f) for name in compiled_names) for f in functions)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", LARGE_MODULES)
def test_triton_gradients_of_large_modules_are_exact_and_always_the_same(name, dtype, tmp_path):
    forward, init, shape = LARGE_MODULES[name]
    text = LARGE.format(forward=forward, init=init, shape=shape, dtype=dtype)
    taken = Taken(tmp_path, name, text, "cuda")
    inputs = taken.inputs(1)
    mine, own = gradients(taken.mine, inputs), gradients(taken.own, inputs)
    again = gradients(taken.mine, inputs)
    assert taken.num_calls == 2, "a step took the reference's way"
    assert all(torch.equal(one, other) for one, other in zip(mine, again, strict=True))
    exact = gradients(taken.wide, in_float64(inputs))
    for got, theirs, true in zip(mine, own, exact, strict=True):
        assert got.dtype == theirs.dtype and got.shape == theirs.shape
        error, limit = (got - true).abs().max(), 2.0 * (theirs - true).abs().max()
        assert error <= max(limit, 16 * torch.finfo(got.dtype).eps * true.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [8, 40, 100_000])
@pytest.mark.parametrize("name", ["rms_norm_gate", "bias"])
def test_sums_over_the_batch_are_right_whatever_the_number_of_programs(name, programs, tmp_path):
    forward, init, shape = LARGE_MODULES[name]
    text = LARGE.format(forward=forward, init=init, shape=shape, dtype="float32")
    taken = Taken(tmp_path, name, text, "cuda", programs=programs)
    for batch in (None, 1, 17):
        inputs = taken.inputs(1, batch)
        mine, own = gradients(taken.mine, inputs), gradients(taken.own, inputs)
        assert_as_exact(mine, own, gradients(taken.wide, in_float64(inputs)))


@pytest.mark.gpu
def test_steps_on_a_gpu_follow_the_stream_and_differentiate_twice(tmp_path):
    taken = Taken(tmp_path, "rms_norm_gate", "", "cuda", **BLOCKS)
    inputs = taken.inputs(1)
    expected = gradients(taken.mine, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gradients(taken.mine, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    assert taken.num_calls == 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    twice = []
    for model in (taken.mine, taken.own):
        leaves = leaves_of(inputs)
        (first,) = torch.autograd.grad(model(*leaves).sin().sum(), leaves[:1], create_graph=True)
        twice.append(torch.autograd.grad(first.square().sum(), [*leaves, model.w]))
    for got, wanted in zip(*twice, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    # Of the second derivatives one way goes through the first ones' kernels.
    assert taken.num_calls == 3


# What forward returns, its inputs, and of how many of them gradients are in one memory at first.
SAME = {
    "a result and its input": ("return torch.tanh(x + 1), x + 1", "torch.randn(6, 40)"),
    "two inputs": (
        "return torch.tanh(x + y) * torch.sigmoid(x + y)",
        "torch.randn(6, 40), torch.randn(6, 40)",
    ),
    "two inputs of a result": (
        "return torch.tanh(x + y), x + y", "torch.randn(6, 40), torch.randn(6, 40)"
    ),
    "of columns": (
        "return torch.tanh(x + y[:, None]), x + y[:, None]", "torch.randn(6, 40), torch.randn(6)"
    ),
    "through products": (
        "return self.a(x + y), x + y", "torch.randn(6, 40), torch.randn(6, 40)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ["a copy", "a hook", "under autocast"])
def test_what_goes_on_is_nobody_elses(how, tmp_path):
    """What a module hands on reaches a leaf through nodes that hand it on, and is added up."""
    forward = "return F.layer_norm(x, (40,), self.w) + y"
    init = "self.w = nn.Parameter(torch.randn(40))"
    inputs = "torch.randn(6, 40), torch.randn(6, 40)"
    taken = Taken(
        tmp_path, "on", TEXT.format(init=init, forward=forward, inputs=inputs, names="x, y")
    )
    found = []
    for model in (taken.mine, taken.own):
        x, _ = taken.inputs(1)
        p, q = (torch.zeros(6, 40, requires_grad=True) for _ in range(2))
        if how == "a hook":
            model.register_full_backward_hook(lambda *_: None)
        incoming = torch.ones(6, 40)
        for _ in range(3):
            there = q + 1
            given = p.clone() if how == "a copy" else p
            total = (model(x, given) + there).mul(torch.ones(6, 40)).sum()
            with torch.autocast("cpu", enabled=how == "under autocast"):
                total.backward()
                model(x, given).backward(incoming)
        found.append([p.grad, q.grad, incoming])
    torch.testing.assert_close(*found)
    assert found[0][0].data_ptr() != found[0][1].data_ptr()


@pytest.mark.parametrize("name", SAME)
def test_equal_gradients_are_added_up_apart(name, tmp_path):
    """PyTorch adds them up in the first that it gets, unless something else has that, too."""
    forward, inputs = SAME[name]
    names = "x, y" if inputs.count("randn") > 1 else "x"
    init = "self.a = nn.Linear(40, 40)" if "self.a" in forward else "..."
    text = TEXT.format(init=init, forward=forward, inputs=inputs, names=names)
    taken = Taken(tmp_path, "same", text)
    found, num_places = [], []
    for model in (taken.mine, taken.own):
        leaves = [leaves_of(taken.inputs(seed)) for seed in (1, 2)]
        for _ in range(2):
            results = [model(*each) for each in leaves]
            results = [r if isinstance(r, tuple) else (r,) for r in results]
            sum((a + b).pow(2).sum() for a, b in zip(*results, strict=True)).backward()
            leaves[0][0].grad.mul_(0.5)  # as a clipping of its own
        result = model(*leaves[0])
        result = result[-1] if isinstance(result, tuple) else result
        incoming = torch.ones_like(result)
        every = [x for each in leaves for x in each]
        found.append([x.grad.clone() for x in every])
        for x in every:
            x.grad = None
        result.backward(incoming)
        num_places.append(len({t.data_ptr() for t in (incoming, *(x.grad for x in leaves[0]))}))
    assert taken.num_calls
    torch.testing.assert_close(*found)
    assert num_places[0] == len(leaves[0]) + 1 >= num_places[1]


def test_numbers_of_a_dimension_leave_a_step_to_pytorch(tmp_path):
    """As the decomposition of a reflecting pad's gradient makes them."""
    forward = "return F.pad(x.view(-1, 1, 40), (2, 2), mode='reflect') * 2"
    text = TEXT.format(init="...", forward=forward, inputs="torch.randn(20, 40)", names="x")
    _, family = derive_with_steps(tmp_path / "made", "padded", text)
    assert "gradients" not in family.extra


@pytest.mark.parametrize("forward", ["torch.tanh(x * self.w)", "torch.softmax(x * self.w, -1)"])
def test_a_result_that_is_kept_is_detached_in_place(forward, tmp_path):
    """As in truncated backpropagation through time; an edit of one is noticed all the same."""
    init, inputs = "self.w = nn.Parameter(torch.randn(40))", "torch.randn(6, 40)"
    text = TEXT.format(init=init, forward=f"return {forward}", inputs=inputs, names="x")
    taken = Taken(tmp_path, "cut", text)
    found = []
    for model in (taken.mine, taken.own):
        (x,) = taken.inputs(1)
        for _ in range(3):
            x = model(x)
            x.square().sum().backward()
            x.detach_()
        found.append([x, model.w.grad])
        made = model(x)
        with torch.no_grad():
            made.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()
    torch.testing.assert_close(*found)
    assert taken.num_calls == 3


def test_a_sparse_gradient_may_come_in(tmp_path):
    """As an embedding's of what a module has made."""
    inputs = "torch.randn(6, 40), torch.randn(6, 40)"
    text = TEXT.format(init="...", forward="return x * 2 + y", inputs=inputs, names="x, y")
    taken = Taken(tmp_path, "sparse", text)
    found = []
    for model in (taken.mine, taken.own):
        leaves = leaves_of(taken.inputs(1))
        table = model(*leaves)
        F.embedding(torch.tensor([0, 2]), table, sparse=True).sum().backward()
        found.append([x.grad.to_dense() for x in leaves])
    torch.testing.assert_close(*found)
