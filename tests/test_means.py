"""Means over all rows: of losses, whose kernels are for any batch."""

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
}  # fmt: skip


@needs_gpp
@pytest.mark.parametrize("name", FORMS)
def test_the_loops_compute_what_the_module_does(name, tmp_path):
    check(tmp_path, name, FORMS[name], judge=assert_as_exact)


def check_triton(folder: str) -> None:
    """Compare Triton's kernels with PyTorch: in its interpreter where TRITON_INTERPRET is set."""
    for number, (name, form) in enumerate(FORMS.items()):
        own = Path(folder) / str(number)
        own.mkdir()
        try:
            check(own, name, form, "_triton", assert_as_exact)
        except Exception as error:
            raise AssertionError(name) from error


@needs_triton
def test_interpreted_blocks_compute_what_the_module_does(tmp_path):
    interpreted("test_means", "check_triton", str(tmp_path))
