"""Transposed convolutions of float64 by products: PyTorch's own answers and gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from tuner.check.wide_convolutions import exact_convolutions, transposed_convolution

KINDS = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)
# Stride, padding, output_padding, dilation.
SHAPES = [(1, 0, 0, 1), (2, 1, 1, 1), (3, 2, 0, 2), (2, 0, 1, 2), (1, 2, 0, 1)]


def assert_as_pytorch(convolution, result, x):
    expected = convolution(x)
    assert result.shape == expected.shape
    assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12)
    of = [x, *convolution.parameters()]
    along = torch.randn_like(expected)
    own, theirs = (torch.autograd.grad(y, of, along) for y in (result, expected))
    for mine, other in zip(own, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("dims", "shape"), [*itertools.product((1, 2, 3), SHAPES)])
def test_a_transposed_convolution_is_pytorchs(dims, shape, has_bias):
    torch.manual_seed(0)
    kind = KINDS[dims - 1]
    stride, padding, output_padding, dilation = shape
    convolution = kind(
        3, 4, (3, 2, 4)[:dims], stride, padding, output_padding, dilation=dilation, bias=has_bias
    ).double()
    x = torch.randn(2, 3, *(7, 6, 5)[:dims], dtype=torch.float64, requires_grad=True)
    found = transposed_convolution(
        x, convolution.weight, convolution.bias, stride, padding, output_padding,
        dilation=convolution.dilation,
    )  # fmt: skip
    assert_as_pytorch(convolution, found, x)


def test_what_has_no_product_is_left_to_pytorch():
    x, w = torch.randn(1, 4, 5, 5).double(), torch.randn(4, 2, 3, 3).double()
    assert transposed_convolution(x, w, groups=2) is None
    assert transposed_convolution(x, w.float()) is None
    assert transposed_convolution(x, w, padding=5) is None
    assert transposed_convolution(x[:, :2], w) is None


@pytest.mark.gpu
def test_a_gpus_float64_takes_the_products():
    torch.manual_seed(0)
    convolution = torch.nn.ConvTranspose3d(8, 6, 3, 2, 1, 1).double().cuda()
    x = torch.randn(2, 8, 6, 7, 8, dtype=torch.float64, device="cuda", requires_grad=True)
    with exact_convolutions(), torch.profiler.profile(acc_events=True) as seen:
        result = convolution(x)
    names = {event.key for event in seen.key_averages()}
    assert names & {"aten::mm", "aten::bmm"}
    assert not any("conv" in name for name in names)
    assert_as_pytorch(convolution, result, x)
