"""Steps of training through pooling: gradients gathered by windows, as PyTorch decides ties."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from cpu_machine import GPP
from interpreted import interpreted
from test_matching import TEXT
from test_steps import (
    Taken,
    assert_a_step_is_as_exact,
    assert_gradients_are_as_exact,
    gradients,
)
from test_steps_of_halves import Libdevice, with_saved_bytes

from tuner.capture.capture import capture
from tuner.capture.steps.joint import captured_of
from tuner.capture.steps.step_plans import planned
from tuner.kernel.binding import BoundOp, bind
from tuner.machine.datasheets import known_device
from tuner.problem.reference import load_problem

needs_compiler = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
# Pooling alone: the layer, and the shape of what it is of.
MAXIMA = {
    "plain": ("nn.MaxPool2d(2)", "2, 3, 8, 10"),
    "of one dimension": ("nn.MaxPool1d(3, 2, 1)", "3, 2, 21"),
    "overlapping": ("nn.MaxPool2d(3, 2, 1)", "2, 3, 9, 11"),
    "of every element": ("nn.MaxPool2d(3, 1, 1)", "2, 2, 7, 19"),
    "dilated": ("nn.MaxPool2d(3, 2, 1, dilation=2)", "2, 3, 9, 12"),
    "dilated far": ("nn.MaxPool1d(4, 1, 2, dilation=3)", "2, 3, 40"),
    "dilated volumes": ("nn.MaxPool3d(3, 2, 1, dilation=3)", "2, 2, 8, 9, 10"),
    "up to the end": ("nn.MaxPool2d(3, 2, ceil_mode=True)", "2, 3, 8, 10"),
    "up to the end, padded": ("nn.MaxPool2d(3, 3, 1, ceil_mode=True)", "2, 3, 9, 9"),
    "far apart": ("nn.MaxPool2d(2, 3)", "2, 3, 11, 14"),
    "of volumes": ("nn.MaxPool3d((2, 3, 2), (1, 2, 2), (1, 1, 0))", "2, 2, 4, 7, 8"),
    "of each volume": ("nn.MaxPool3d(2)", "2, 2, 4, 6, 8"),
    "of all pixels": ("nn.MaxPool2d(4)", "5, 6, 4, 4"),
    "of one each": ("nn.MaxPool2d(1, 2)", "2, 3, 5, 6"),
}
# Of more than 32 places, which are taken along one axis after the other.
LARGE = {
    "of every element": ("nn.MaxPool2d(7, 1, 3)", "2, 2, 9, 12"),
    "dilated": ("nn.MaxPool2d((9, 5), (3, 2), (4, 1), dilation=(1, 2))", "2, 2, 13, 15"),
    "up to the end": ("nn.MaxPool2d(6, 4, 2, ceil_mode=True)", "2, 2, 11, 12"),
    "along one axis": ("nn.MaxPool3d((5, 1, 7), 2, (2, 0, 3))", "2, 2, 6, 4, 8"),
    "of volumes": ("nn.MaxPool3d(4, 2, 1)", "2, 1, 6, 7, 8"),
}
MEANS = {
    "plain": ("nn.AvgPool2d(2)", "2, 3, 8, 10"),
    "of one dimension": ("nn.AvgPool1d(3, 2, 1)", "3, 2, 21"),
    "overlapping": ("nn.AvgPool2d(3, 2, 1)", "2, 3, 9, 11"),
    "of every element": ("nn.AvgPool2d(3, 1, 1)", "2, 2, 7, 19"),
    "far apart": ("nn.AvgPool2d(2, 3)", "2, 3, 11, 14"),
    "of volumes": ("nn.AvgPool3d((2, 3, 2), (1, 2, 2), (1, 1, 0))", "2, 2, 4, 7, 8"),
    "by another number": ("nn.AvgPool2d(2, divisor_override=3)", "2, 3, 8, 10"),
}
# Between other work: the constructor, forward, and the shape of x.
AMONG_OTHERS = {
    "convolution": (
        "self.c, self.p = nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)",
        "return F.mish(self.p(F.hardswish(self.c(x) - 0.5)))", "2, 3, 11, 13",
    ),
    "twice": ("self.p = nn.MaxPool3d(2)", "return self.p(self.p(torch.softmax(x, 1)))",
              "2, 3, 8, 9, 8"),
    "of a product": (
        "self.l, self.p = nn.Linear(20, 36), nn.MaxPool1d(2)",
        "return self.p(self.l(x).unsqueeze(1)).squeeze(1).sum(1) * 0.5", "7, 20",
    ),
    "summed": ("self.w = nn.Parameter(torch.rand(5, 1, 1))",
               "return F.max_pool2d(x * self.w, 3, 2).sum((2, 3))", "3, 5, 9, 10"),
    "means summed": ("self.w = nn.Parameter(torch.rand(5, 1, 1))",
                     "return F.avg_pool2d(x * self.w, 3, 2).sum((2, 3))", "3, 5, 9, 10"),
    "mean of maxima": (
        "self.w = nn.Parameter(torch.rand(5, 1, 1))",
        "return torch.tanh(F.hardtanh(F.max_pool2d(x * self.w, 2)).mean((2, 3), keepdim=True))",
        "3, 5, 9, 10",
    ),
    "of the same": ("self.w = nn.Parameter(torch.rand(9))",
                    "return F.max_pool1d(x * self.w, 3, 1, 1) + F.avg_pool1d(x * self.w, 3, 1, 1)",
                    "3, 4, 9"),
    "norm": ("self.n, self.p = nn.GroupNorm(2, 4), nn.MaxPool2d(2)",
             "return torch.clamp(self.p(self.n(x)), 0, 1)", "3, 4, 8, 8"),
    "adaptive": (
        "self.p, self.q = nn.AdaptiveMaxPool2d((3, 4)), nn.AdaptiveAvgPool3d(2)",
        "return torch.tanh(self.q(torch.sin(self.p(x * 0.5)).unflatten(1, (2, 2))))", "2, 4, 9, 8",
    ),
    "bfloat16": ("self.w = nn.Parameter(torch.rand(5, 1, 1)); self.bfloat16()",
                 "return torch.tanh(F.max_pool2d(x * self.w, 3, 2, 1))", "3, 5, 9, 10"),
    "float64": ("self.w = nn.Parameter(torch.rand(5, 1, 1)); self.double()",
                "return torch.tanh(F.max_pool2d(x * self.w, 3, 2, 1))", "3, 5, 9, 10"),
}  # fmt: skip
# Pooling whose gradient is PyTorch's own: windows of different counts.
BY_CALLS = {
    "means up to the end": ("nn.AvgPool2d(3, 2, ceil_mode=True)", "2, 3, 8, 10"),
    "means without padding": ("nn.AvgPool2d(3, 2, 1, count_include_pad=False)", "2, 3, 9, 9"),
    "uneven": ("nn.AdaptiveAvgPool2d((3, 4))", "2, 3, 10, 9"),
}


def text_of(init: str, forward: str, shape: str) -> str:
    dtype = next((d for d in ("bfloat16", "double") if d in init), "float")
    inputs = f"torch.randn({shape}).{dtype}()"
    return TEXT.format(init=init, names="x", forward=forward, inputs=inputs)


def alone(layer: str, shape: str, behind: str = "") -> str:
    return text_of(f"self.p = {layer}", f"return self.p(x){behind}", shape)


def functions_of(taken: Taken, template: str, facts: dict) -> list[str]:
    """Return what the gradients' call is made of: operations of PyTorch's by their names."""
    plan = taken.family.render({"template": template}, facts).plan.extra["gradients"]
    return [step.function for step in plan.steps if step.kind != "call"]


class InBlocks(Taken):
    """A module whose Triton kernels are interpreted on the CPU."""

    def _bound(self, folder: Path, params: dict[str, object]) -> BoundOp:
        candidate = self.family.render(
            {"template": "nest_triton", **params}, known_device("H200").facts()
        )
        source = folder / "source.py"
        source.write_text(candidate.source)
        operator = bind(candidate.plan, "triton", source)
        operator.globals["libdevice"] = Libdevice()
        return operator


def odd_values(shape: torch.Size, kind: str) -> torch.Tensor:
    """Return few different values, so that most windows have several largest ones."""
    torch.manual_seed(11)
    values = {
        "ties": [0.0, 1.0, 2.0],
        "nan": [0.0, 1.0, float("nan")],
        "infinite": [float("inf"), 1.0, -float("inf"), 0.0],
        "nothing": [-float("inf")],
        "all": [0.0, float("nan"), float("inf"), -float("inf"), -1.0, -0.0],
    }[kind]
    return torch.tensor(values)[torch.randint(len(values), shape)]


def assert_decided_as_by_pytorch(taken: Taken, kinds: list[str]) -> None:
    """Compare gradients of whole numbers, which any order of sums gives exactly."""
    for kind in kinds:
        x = odd_values(taken.inputs(3)[0].shape, kind).to(taken.device)
        mine, own = x.clone().requires_grad_(), x.clone().requires_grad_()
        made, expected = taken.mine(mine), taken.own(own)
        assert torch.equal(made.nan_to_num(7.0), expected.nan_to_num(7.0)), kind
        given = torch.randint(-4, 5, made.shape, device=x.device).float()
        (found,) = torch.autograd.grad(made, mine, given)
        (wanted,) = torch.autograd.grad(expected, own, given)
        assert torch.equal(found, wanted), kind


ODD = ["ties", "nan", "infinite", "nothing", "all"]


@needs_compiler
@pytest.mark.parametrize("name", MAXIMA)
def test_gradients_go_to_the_maximum_that_pytorch_takes(name, tmp_path):
    taken = Taken(tmp_path, "pool", alone(*MAXIMA[name]))
    assert_decided_as_by_pytorch(taken, ODD)
    assert taken.num_calls == len(ODD), "a step took the reference's way"
    taken.num_calls = 0
    assert_gradients_are_as_exact(taken, name)
    assert not functions_of(taken, "nest_triton", known_device("H200").facts())


@needs_compiler
@pytest.mark.parametrize("name", LARGE)
def test_large_windows_take_the_same_maximum(name, tmp_path):
    taken = Taken(tmp_path, "pool", alone(*LARGE[name], " * 2.0"))
    assert_decided_as_by_pytorch(taken, ODD)
    assert taken.num_calls == len(ODD), "a step took the reference's way"


@needs_compiler
@pytest.mark.parametrize("name", MEANS)
def test_gradients_of_means_are_as_exact_as_pytorchs(name, tmp_path):
    taken = Taken(tmp_path, "pool", alone(*MEANS[name]))
    assert_gradients_are_as_exact(taken, name)
    assert not functions_of(taken, "nest_triton", known_device("H200").facts())


@needs_compiler
@pytest.mark.parametrize("name", AMONG_OTHERS)
def test_gradients_through_pooling_are_as_exact_as_pytorchs(name, tmp_path):
    taken = Taken(tmp_path, "pool", text_of(*AMONG_OTHERS[name]))
    if name == "float64":
        (x,) = taken.inputs(3)
        torch.testing.assert_close(gradients(taken.mine, [x]), gradients(taken.own, [x]))
        assert taken.num_calls == 1, "a step took the reference's way"
        return
    assert_gradients_are_as_exact(taken, name)


@needs_compiler
@pytest.mark.parametrize("name", ["convolution", "twice", "norm"])
def test_what_is_kept_for_pooling_is_no_more_than_pytorch_keeps(name, tmp_path):
    taken = Taken(tmp_path, "pool", text_of(*AMONG_OTHERS[name]))
    inputs = taken.inputs(3)
    assert with_saved_bytes(taken.mine, inputs)[1] <= with_saved_bytes(taken.own, inputs)[1]


@needs_compiler
@pytest.mark.parametrize("name", BY_CALLS)
def test_means_of_different_counts_have_gradients_of_pytorchs_own(name, tmp_path):
    layer, shape = BY_CALLS[name]
    text = text_of(f"self.p = {layer}", "return torch.tanh(self.p(torch.sin(x)))", shape)
    taken = Taken(tmp_path, "pool", text)
    assert_gradients_are_as_exact(taken, name)
    assert any(
        "backward" in f for f in functions_of(taken, "nest_triton", known_device("H200").facts())
    )


def test_what_is_pooled_is_not_stored_where_windows_do_not_overlap(tmp_path):
    path = tmp_path / "pool.py"
    path.write_text(text_of(*AMONG_OTHERS["convolution"]))
    problem = load_problem(path)
    plan = planned(captured_of(problem, capture(problem)).joint)
    assert plan is not None and plan.forward is not None
    (nest,) = plan.forward.nests
    most = 2 * 8 * 4 * 5  # elements of what is pooled: maxima, places, results
    assert all(output.count == most for output in nest.outputs)


# Windows of many places, planes of so many that floats do not count them, and places returned.
LEFT = {
    "large windows": ("self.p = nn.MaxPool1d(33)", "return self.p(x)", "2, 3, 99"),
    "large planes": ("self.p = nn.MaxPool2d(2)", "return self.p(x)", "1, 1, 2048, 2048"),
    "uneven": ("self.p = nn.AdaptiveMaxPool2d(4)", "return self.p(x)", "2, 3, 9, 9"),
    "returned": ("self.p = nn.MaxPool2d(2, return_indices=True)", "return self.p(x)",
                 "2, 3, 8, 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_other_maxima_leave_steps_to_the_reference(name, tmp_path):
    path = tmp_path / "pool.py"
    path.write_text(text_of(*LEFT[name]))
    problem = load_problem(path)
    assert planned(captured_of(problem, capture(problem)).joint) is None


IN_BLOCKS = {
    **{name: alone(*MAXIMA[name]) for name in ("plain", "overlapping", "dilated", "of volumes")},
    "to the end": alone("nn.MaxPool2d(3, 3, 1, ceil_mode=True)", "2, 1, 9, 9"),
    "large": alone(*LARGE["dilated"], " * 2.0"),
    **{f"means {name}": alone(*MEANS[name]) for name in ("overlapping", "far apart")},
    **{name: text_of(*AMONG_OTHERS[name]) for name in ("convolution", "summed", "adaptive")},
}


def check_blocks(folder: str) -> None:
    """Compare Triton kernels with PyTorch, on the CPU."""
    for name, text in IN_BLOCKS.items():
        own = Path(folder) / name
        own.mkdir()
        taken = InBlocks(own, "pool", text)
        if name in MAXIMA:
            assert_decided_as_by_pytorch(taken, ["all", "nothing"])
            taken.num_calls = 0
        assert_a_step_is_as_exact(taken)


@needs_triton
def test_interpreted_blocks_give_the_gradients_of_pytorch(tmp_path):
    interpreted("test_pooling_gradients", "check_blocks", str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAXIMA)
def test_triton_gradients_go_to_the_maximum_that_pytorch_takes(name, tmp_path):
    taken = Taken(tmp_path, "pool", alone(*MAXIMA[name]), "cuda")
    assert_decided_as_by_pytorch(taken, ODD)
    taken.num_calls = 0
    assert_gradients_are_as_exact(taken, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_triton_gradients_of_large_windows_go_to_the_same_maximum(name, tmp_path):
    taken = Taken(tmp_path, "pool", alone(*LARGE[name], " * 2.0"), "cuda")
    assert_decided_as_by_pytorch(taken, ODD)
    assert taken.num_calls == len(ODD), "a step took the reference's way"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*MEANS, *AMONG_OTHERS])
def test_triton_gradients_through_pooling_are_as_exact_as_pytorchs(name, tmp_path):
    text = text_of(*AMONG_OTHERS[name]) if name in AMONG_OTHERS else alone(*MEANS[name])
    taken = Taken(tmp_path, "pool", text, "cuda")
    if name == "float64":
        (x,) = taken.inputs(3)
        torch.testing.assert_close(gradients(taken.mine, [x]), gradients(taken.own, [x]))
        return
    assert_gradients_are_as_exact(taken, name)
