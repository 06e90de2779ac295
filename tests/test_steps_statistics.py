"""Steps of halves behind a norm: rows of equal numbers leave nothing when their mean is taken."""

from __future__ import annotations

import pytest
import torch
from cpu_machine import GPP
from test_any_module import in_float64
from test_steps import Taken, gradients

needs_gpp = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
TEXT = """
import torch, torch.nn as nn, torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = {norm}

    def forward(self, x, g):
        return self.n(x * F.gelu(g))

def get_inputs():
    return [torch.randn({shape}).to({dtype}) for _ in range(2)]

def get_init_inputs():
    return []
"""
NORMS = {
    "layer": ("nn.LayerNorm(256, dtype={dtype})", "8, 256"),
    "batch": ("nn.BatchNorm1d(8, dtype={dtype})", "16, 8, 64"),
}


@needs_gpp
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
def test_equal_numbers_leave_nothing(norm, dtype, tmp_path):
    made, shape = NORMS[norm]
    text = TEXT.format(norm=made.format(dtype=dtype), shape=shape, dtype=dtype)
    taken = Taken(tmp_path, "norm", text)
    inputs = taken.inputs(3)
    # 9e6 and 8,099: not held by halves exactly, and far beyond what variances add to themselves.
    for x, value in zip(inputs, (3001.0, 2999.0) if "b" in dtype else (91.0, 89.0), strict=True):
        x.fill_(value)
        x.view(-1)[: x.numel() // 2] = torch.randn(x.numel() // 2).to(x)
    mine, own = gradients(taken.mine, inputs), gradients(taken.own, inputs)
    exact = gradients(taken.wide, in_float64(inputs))
    assert taken.num_calls == 1, "a step took the reference's way"
    for found, theirs, wanted in zip(mine, own, exact, strict=True):
        off, usual = ((y.double() - wanted).abs().max() for y in (found, theirs))
        assert off <= 2 * usual + 2**-7 * wanted.abs().max()
