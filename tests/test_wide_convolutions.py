"""Convolutions of float64 by products: PyTorch's own answers and gradients, of any order."""

from __future__ import annotations

import itertools

import pytest
import torch

from tuner.check.judge import wide_convolutions
from tuner.check.judge.wide_convolutions import by_products, exact_convolutions

KINDS = {
    (is_transposed, dims): getattr(torch.nn, f"Conv{'Transpose' * is_transposed}{dims}d")
    for is_transposed, dims in itertools.product((False, True), (1, 2, 3))
}
# Stride, padding, output_padding, dilation. With a stride of 4 and a dilation of 2 nothing goes
# into every other pixel.
SHAPES = [(1, 0, 0, 1), (2, 1, 1, 1), (4, 2, 3, 2), (2, 0, 1, 2), (1, 2, 0, 1)]


def convolution_of(is_transposed, dims, shape, has_bias=True, device="cpu"):
    torch.manual_seed(0)
    stride, padding, output_padding, dilation = shape
    more = {"output_padding": output_padding} if is_transposed else {}
    kernel = (3, 2, 3)[:dims]
    kind = KINDS[is_transposed, dims]
    convolution = kind(3, 4, kernel, stride, padding, dilation=dilation, bias=has_bias, **more)
    x = torch.randn(2, 3, *(9, 8, 7)[:dims], dtype=torch.float64, device=device)
    return convolution.double().to(device), x.requires_grad_()


def answers(convolution, x):
    """Return outputs, gradients and gradients of these."""
    of = [x, *convolution.parameters()]
    y = convolution(x)
    along = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    first = torch.autograd.grad(y, of, along, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), of, allow_unused=True)
    return [t for t in (y, *first, *second) if t is not None]


def assert_same(own, theirs):
    assert len(own) == len(theirs)
    for mine, other in zip(own, theirs, strict=True):
        assert mine.shape == other.shape
        assert torch.allclose(mine, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("most_elements", [wide_convolutions.MOST_ELEMENTS, 300])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("dims", "shape"), [*itertools.product((1, 2, 3), SHAPES)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_answers_are_pytorchs(monkeypatch, is_transposed, dims, shape, has_bias, most_elements):
    monkeypatch.setattr(wide_convolutions, "MOST_ELEMENTS", most_elements)
    convolution, x = convolution_of(is_transposed, dims, shape, has_bias)
    expected = answers(convolution, x)
    with by_products("cpu"):
        assert_same(answers(convolution, x), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_groups_are_convolved_by_themselves(is_transposed, shape):
    stride, padding, output_padding, dilation = shape
    more = {"output_padding": output_padding} if is_transposed else {}
    kind = KINDS[is_transposed, 2]
    convolution = kind(6, 9, 3, stride, padding, dilation=dilation, groups=3, **more).double()
    x = torch.randn(2, 6, 9, 8, dtype=torch.float64, requires_grad=True)
    expected = answers(convolution, x)
    with by_products("cpu"):
        assert_same(answers(convolution, x), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("dims", "shape"), [*itertools.product((1, 2, 3), SHAPES)])
def test_a_weight_that_is_not_finite_reaches_its_own_pixels_alone(dims, shape, value):
    """Zeros that stand for pixels beside the small tensor would be NaN, times such a weight."""
    convolution, x = convolution_of(True, dims, shape)
    with torch.no_grad():
        convolution.weight.view(3, 4, -1)[1, 2, 1] = value
        expected = convolution(x)
        with by_products("cpu"):
            found = convolution(x)
    assert not expected.isfinite().all() and expected.isfinite().any()
    assert torch.allclose(found, expected, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch's own jvp
@pytest.mark.parametrize("is_transposed", [False, True])
def test_functional_transforms_pass(is_transposed):
    convolution, x = convolution_of(is_transposed, 2, (2, 1, 0, 1))
    weights = {name: w.detach() for name, w in convolution.named_parameters()}
    x = x.detach()

    def transformed():
        def call(x):
            return torch.func.functional_call(convolution, weights, (x,))

        both = torch.stack([x, 2 * x])
        return [*torch.func.jvp(call, (x,), (x * x,)), torch.func.vmap(call)(both)]

    expected = transformed()
    with by_products("cpu"):
        assert_same(transformed(), expected)


@pytest.mark.parametrize(
    ("kind", "more", "shape"),
    [
        (torch.nn.Conv2d, {}, (1, 5, 9, 9)),  # other channels
        (torch.nn.Conv2d, {}, (1, 4, 2, 2)),  # smaller than the filter
        (torch.nn.ConvTranspose2d, {"padding": 5}, (1, 4, 2, 2)),
        (torch.nn.ConvTranspose2d, {"output_padding": 2}, (1, 4, 5, 5)),
        (torch.nn.Conv2d, {"groups": 2}, (1, 6, 9, 9)),
        (torch.nn.ConvTranspose2d, {"groups": 2}, (1, 6, 9, 9)),
    ],
)
def test_pytorch_says_what_is_wrong(kind, more, shape):
    convolution, x = kind(4, 6, 3, **more).double(), torch.randn(shape).double()
    with pytest.raises(RuntimeError) as expected:
        convolution(x)
    with by_products("cpu"), pytest.raises(RuntimeError) as found:
        convolution(x)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("groups", [1, 2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_groups_and_float32_are_left_to_pytorch(groups, dtype):
    convolution = torch.nn.Conv2d(16, 32, 3, groups=groups).to(dtype)
    x = torch.randn(2, 16, 9, 9, dtype=dtype)
    with by_products("cpu"), torch.profiler.profile(acc_events=True) as seen:
        convolution(x)
    is_ours = groups <= wide_convolutions.MOST_GROUPS and dtype == torch.float64
    names = {event.key for event in seen.key_averages()}
    assert ("aten::bmm" in names) == is_ours
    assert (
        "aten::mkldnn_convolution" in names or "aten::_slow_conv2d_forward" in names
    ) != is_ours


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_gpus_float64_takes_the_products(is_transposed, dims):
    convolution, x = convolution_of(is_transposed, dims, (2, 1, 1, 1), device="cuda")
    expected = answers(convolution, x)
    with torch.profiler.profile(acc_events=True) as seen, exact_convolutions():
        found = answers(convolution, x)
    names = {event.key for event in seen.key_averages()}
    assert names & {"aten::mm", "aten::bmm"}
    assert not any("cudnn" in name for name in names)  # in the backward's thread neither
    assert_same(found, expected)
