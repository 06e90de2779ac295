"""Gradients of cumulative products inside the judge's modes: PyTorch's own, of any order."""

from __future__ import annotations

import pytest
import torch

from tuner.check.calls.exercise import recorded
from tuner.check.judge.cumulative_products import linear_gradients
from tuner.check.judge.noise import noise

# By row: where its zeros are, and a number that is no zero but nearly one.
ZEROS = {0: [], 1: [4], 2: [0], 3: [2, 6], 4: [8], 5: [0, 1, 8]}
CALLS = {
    "function": lambda x: torch.cumprod(x, 1),
    "by name": lambda x: torch.cumprod(input=x, dim=-1),
    "method": lambda x: x.cumprod(1),
    "other dimension": lambda x: x.t().cumprod(0).t(),
    "other type": lambda x: torch.cumprod(x, 1, dtype=torch.float32).double(),
}


def rows():
    torch.manual_seed(0)
    x = torch.randn(6, 9, dtype=torch.float64)
    for row, places in ZEROS.items():
        x[row, places] = 0.0
    x[1, 7] = 1e-30
    return x.requires_grad_()


def answers(call, x):
    y = call(x)
    along = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    (first,) = torch.autograd.grad(y, x, along)
    y = call(x)
    (again,) = torch.autograd.grad(y, x, along, create_graph=True)
    return y.detach(), first, torch.autograd.grad((again**2).sum(), x)[0]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_answers_are_pytorchs(call):
    x = rows()
    expected = answers(call, x)
    with linear_gradients():
        found = answers(call, x)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def test_a_scalar_and_integers_are_pytorchs_own():
    with linear_gradients():
        x = torch.tensor(2.0, requires_grad=True)
        x.cumprod(0).backward()
        assert x.grad == 1.0
        assert torch.tensor([2, 3]).cumprod(0).tolist() == [2, 6]


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch's own jvp
def test_functional_transforms_pass():
    x = rows().detach()

    def transformed():
        call = CALLS["method"]
        batched = torch.stack([x, 2 * x]).requires_grad_()
        of_each = torch.func.vmap(call)(batched)
        (grad,) = torch.autograd.grad(of_each.sum(), batched)
        return [*torch.func.jvp(call, (x,), (x * x,)), of_each.detach(), grad]

    expected = transformed()
    with linear_gradients():
        for mine, theirs in zip(transformed(), expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("has_zero", [False, True])
def test_operations_of_a_gradient_do_not_grow_with_the_row(has_zero):
    x = torch.rand(2, 3000, dtype=torch.float64)
    x[1, 7] = 0.0 if has_zero else 1.0
    x.requires_grad_()
    operations: list[str] = []
    with linear_gradients(), recorded(operations):
        torch.cumprod(x, 1).sum().backward()
    assert 5 < len(operations) < 100


def test_the_judges_noise_has_them():
    x = rows()
    with noise():
        y = torch.cumprod(x, 1)
        assert "CumulativeProduct" in type(y.grad_fn).__name__
