"""The flagship's module in eval mode: one product with the affine map folded in, where it may."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tuner.kernel.family import load_family
from tuner.problem.reference import load_problem

FAMILY = load_family("gemm_scale_batchnorm")
SIZES = {"batch": 36000, "in_features": 20, "out_features": 30}  # 2^20 outputs and more


def fused_op(*args: object) -> None:
    raise AssertionError("eval mode does not use the operator")


NAMES: dict[str, object] = {
    "torch": torch, "nn": nn, "F": F, "fused_op": fused_op, "fused_eval": None,
}  # fmt: skip
exec(compile(FAMILY.model_new, "model_new.py", "exec"), NAMES)


def models(**changes: object) -> tuple[nn.Module, nn.Module]:
    """Return our module and the reference in eval mode, with the same fresh weights."""
    problem = load_problem(FAMILY.reference, SIZES)
    theirs = problem.randomise(problem.module.Model(*problem.init_inputs(0)), 1).eval()
    ours = NAMES["ModelNew"](*problem.init_inputs(0)).eval()  # type: ignore[operator]
    ours.load_state_dict(theirs.state_dict())
    for model in (ours, theirs):
        for name, value in changes.items():
            setattr(model.bn, name, value)
    return ours, theirs


def make_input(num_rows: int = SIZES["batch"], offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_rows, SIZES["in_features"], generator=generator) + offset


def is_folded(model: nn.Module, x: Tensor) -> bool:
    """Return whether a call runs without PyTorch's BatchNorm."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(x)
    return "aten::batch_norm" not in {event.key for event in profiled.key_averages()}


def errors(y: Tensor, exact: Tensor) -> tuple[float, float]:
    off = y.double() - exact
    return float(off.square().mean().sqrt()), float(off.abs().max())


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize(
    "changes", [{}, {"weight": None, "bias": None}], ids=["affine", "not affine"]
)
def test_a_folded_call_is_as_accurate_as_the_references(offset, changes):
    ours, theirs = models(**changes)
    x = make_input(offset=offset)
    with torch.no_grad():
        assert is_folded(ours, x) and not is_folded(theirs, x)
        y, own = ours(x), theirs(x)
        exact = theirs.double()(x.double())
    for error, reference in zip(errors(y, exact), errors(own, exact), strict=True):
        assert error <= 1.5 * reference


@torch.no_grad()
def test_weights_and_statistics_are_folded_afresh_and_nothing_changes():
    ours, theirs = models()
    x = make_input()
    ours(x)
    for model in (ours, theirs):
        model.gemm.weight.mul_(-1.5)
        model.bn.running_var.add_(2.0)
        model.scale[:3] = torch.tensor([0.0, -2.0, 1e-3])
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_poisons_its_own_row(bad):
    ours, theirs = models()
    x = make_input()
    x[7, 3] = bad
    assert torch.equal(ours(x).isfinite(), theirs(x).isfinite())


@pytest.mark.parametrize(
    "why", ["recorded", "few rows", "float64", "three dimensions", "autocast"]
)
def test_every_other_call_goes_the_references_way(why):
    ours, theirs = models()
    x = make_input(19 if why == "few rows" else SIZES["batch"])
    if why == "float64":
        ours, theirs, x = ours.double(), theirs.double(), x.double()
    elif why == "three dimensions":
        ours.bn, theirs.bn = (nn.BatchNorm1d(100).eval() for _ in range(2))
        x = x.view(360, 100, SIZES["in_features"])
    grad = nullcontext() if why == "recorded" else torch.no_grad()
    cast = torch.autocast("cpu") if why == "autocast" else nullcontext()
    with grad, cast:
        y, own = ours(x), theirs(x)
        assert not is_folded(ours, x)
    assert y.dtype == own.dtype and y.requires_grad == own.requires_grad
    assert torch.equal(y, own)
    if why == "recorded":
        y.sum().backward()
        assert ours.gemm.weight.grad is not None and ours.scale.grad is not None
