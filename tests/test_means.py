"""Means over the batch: of losses, columns and channels, whose kernels are for any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted import interpreted
from test_any_module import assert_as_exact
from test_ranges import check, needs_gpp, needs_triton

X = "torch.randn(37, 100)"
FORMS: dict[str, tuple[str, str, str]] = {
    "squares": ("((x - y) ** 2).mean()", "", f"{X}, {X}"),
    "of sums": ("(x * y).sum(-1).mean()", "", f"{X}, {X}"),
    "of a long row": ("(x - y).abs().mean()", "", "torch.randn(3, 70001), torch.randn(3, 70001)"),
    "beside others": ("(x.mean(), x.amax(), x * 2, x.mean(-1))", "", X),
    "by a weight": ("(x * self.w - y).square().mean() * 0.5",
                    "self.w = nn.Parameter(torch.randn(100))", f"{X}, {X}"),
    "in float64": ("(x * y).mean()", "", f"{X}.double(), {X}.double()"),
    "of halves": ("(x * y).mean()", "", f"{X}.bfloat16(), {X}.bfloat16()"),
    "as many targets as columns": ("torch.clamp(1 - x * y, min=0).mean()", "",
                                   "torch.randn(40, 40), torch.randn(40)"),
    "of columns": ("x - x.mean(0) * 3", "", X),
    "of columns and all": ("x - x.mean(0) * x.mean()", "", X),
    "variances of channels": ("x / (x.var((0, 2), keepdim=True) + 1)", "",
                              "torch.randn(11, 5, 90)"),
    "of channels of images": (
        "torch.nn.functional.silu(self.n(self.c(x)))",
        "self.c, self.n = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)", "torch.randn(11, 3, 9, 7)",
    ),
    "of features of many samples": (
        "(y - y.mean(0)) * (y.var(0, correction=0) + 1e-5).rsqrt() * self.s + x",
        "self.s = nn.Parameter(torch.rand(40))", "torch.randn(901, 40), torch.randn(901, 40) + 20",
    ),
    "of columns of many rows": (
        "(x.amax(0), (x - x.mean(0)) * y.sum(0), x.var(0, correction=0), x * x.var(0).sqrt())",
        "", "torch.randn(901, 40), torch.randn(901, 40)",
    ),
    "of places of many rows": ("x.softmax(0) * x.mean(0)", "", "torch.randn(901, 7, 40)"),
    "by the number of rows": ("(x - y) / len(x) + (x * y).sum(-1, keepdim=True) / (len(x) + 0.0)",
                              "", f"{X}, {X}"),
    "a share of all but one": ("(x - x.mean()) / (x.numel() - 1)", "", X),
    "in float64 of columns": ("x - x.mean(0) / len(x)", "", f"{X}.double()"),
}  # fmt: skip
# Of fewer rows a variance is another, so that PyTorch's operations run.
FEWEST = {"of features of many samples": 3, "of columns of many rows": 3}


@needs_gpp
@pytest.mark.parametrize("name", FORMS)
def test_the_loops_compute_what_the_module_does(name, tmp_path):
    check(tmp_path, name, FORMS[name], judge=assert_as_exact, fewest=FEWEST.get(name, 1))


def check_triton(folder: str) -> None:
    """Compare Triton's kernels with PyTorch: in its interpreter where TRITON_INTERPRET is set."""
    for number, (name, form) in enumerate(FORMS.items()):
        own = Path(folder) / str(number)
        own.mkdir()
        try:
            check(own, name, form, "_triton", assert_as_exact, FEWEST.get(name, 1))
        except Exception as error:
            raise AssertionError(name) from error


@needs_triton
def test_interpreted_blocks_compute_what_the_module_does(tmp_path):
    interpreted("test_means", "check_triton", str(tmp_path))
