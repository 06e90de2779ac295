"""Whole numbers and truths between tasks: PyTorch's own calls make and read them beside nests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from cpu_machine import GPP
from interpreted import interpreted
from test_ranges import check as check_form

needs_gpp = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

F = "torch.nn.functional"
X, Y = "torch.randn(5, 33, 40)", "torch.randn(37, 100)"
WIDE = "torch.randint(-2**40, 2**40, (37, 100))"
IDS, LABELS = "torch.randint(0, 50, (37, 20))", "torch.randint(0, 7, (37,))"
# Of numbers of few bits, some of which their sums, products and opposites do not fit.
SMALL = {
    "read": "(x * y, y.float() / 255 - x, y / 3, y * 0.5, x * y.bool())",
    "compared": "(x * (y > 5), x * (y == z), torch.where(y > z, x, 0), y <= z)",
    "computed": "(x * 2, y + z, y * z, (y - 1).float() * x, y.long() * 3, -y, y.clamp(3, 9))",
    "reduced": "(x * 2, y.sum(1), y.amax(1), y.argmin(1), y.max(), y.any(1))",
    "moved": "(x * 2, y.roll(1, 1), torch.cat([y, z], 1), torch.where(x > 0, y, z), "
             "y.masked_fill(x > 0, 3))",
    "cast": "((x.abs() * 20).clamp(max=100).to(OWN), y.long(), y.half(), y.long() + 2**40, "
            "(x > 0).to(OWN), x * 2)",
}  # fmt: skip
# A forward, what the constructor makes, and the inputs.
FORMS: dict[str, tuple[str, str, str]] = {
    "embeddings": (
        f"{F}.layer_norm(self.e(x) + self.p(torch.arange(20)), (16,))",
        "self.e, self.p = nn.Embedding(50, 16), nn.Embedding(30, 16)", IDS,
    ),
    "largest ones": (
        "(lambda v, i: (v / v.sum(-1, keepdim=True), i, (i + 1) * 2))(*x.softmax(-1).topk(3, -1))",
        "", Y,
    ),
    "sorted": (
        "(lambda v, i: (v.softmax(-1) > 0.01).scatter(1, i, v.softmax(-1) > 0.01) * x)"
        "(*x.sort(-1, descending=True))", "", Y,
    ),
    "places read again": (
        "(lambda i: (self.e(i) - x[:, :16], i, i.float() / 2))((x * 2).argmin(1))",
        "self.e = nn.Embedding(100, 16)", Y,
    ),
    "one of a row by its number": (
        f"{F}.cross_entropy(x @ y.T * 0.5, torch.arange(37))", "", f"{Y}, {Y}",
    ),
    "truths moved": (
        f"(x.softmax(1) * {F}.one_hot(y, 7).permute(0, 2, 1).float()).sum(2)", "",
        "torch.randn(37, 7, 9), torch.randint(0, 7, (37, 9))",
    ),
    "numbers of truths": (
        "(x * 2).sum(1) / (y != 1).long().sum(1, keepdim=True).clamp(min=1)", "",
        f"torch.randn(37, 20, 8), {IDS}",
    ),
    "positions that skip": (
        "x + self.e(((y != 1).long().cumsum(1) * (y != 1).long() + 1))",
        "self.e = nn.Embedding(30, 8)", f"torch.randn(37, 20, 8), {IDS}",
    ),
    "returned in other types": ("(x * 1.5, (y[:, None] == y).float(), (y[:, None] < y).long(), "
                                "(y[:, None] == y).float().sum(1) * x[:, 0])", "",
                                f"{Y}, {LABELS}"),
    "pairs": ("((y[:, None] == y) & (x @ x.T > 0)).long(), (y[:, None] > y) * x[:, :1], x * 2",
              "", f"{Y}, {LABELS}"),
    "arithmetic": ("(x * 2, 5 - y * 3, y % 4 - 1, (y // 2).clamp(1, 2), (1000003 * y).sum())", "",
                   f"{Y}, {LABELS}"),
    "of ranges": ("(x * (torch.arange(100) // 3) + torch.arange(100) * 430186, torch.arange(9))",
                  "", Y),
    "large sums": ("(x * 2, y.sum(), y.sum(0, keepdim=True))", "",
                   f"{Y}, torch.randint(0, 2**30, (37,))"),
    "chosen": ("(x * 2, torch.where(y > 2, z, 0))", "",
               f"{Y}, {LABELS}, torch.randint(0, 2**40, (37,))"),
    "cut off": ("((x * 1000).long(), (x * 3).long() // 2, x + (y.long() > 0))", "", f"{Y}, {Y}"),
    "added to places": (
        "torch.zeros_like(x).index_add_(0, y, x * 2) / torch.zeros(37).scatter_add_("
        "0, y, torch.ones(37)).clamp(min=1)[:, None]", "", f"{Y}, {LABELS}",
    ),
    "places in two dimensions": ("(x * 2)[:, self.i] + 1", "self.register_buffer('i', "
                                 "torch.randint(-33, 33, (4, 6)))", X),
    "several of a row": ("torch.gather(x * 2, 2, y) + 1", "",
                         f"{X}, torch.randint(0, 40, (5, 33, 3))"),
    "attention under a mask": (
        f"{F}.scaled_dot_product_attention(x * 2, x, x, attn_mask=(y > 0)[:, None, :]) + 1", "",
        "torch.randn(5, 3, 9, 16), torch.rand(5, 9, 9)",
    ),
    "upsampled": (
        f"{F}.pad({F}.interpolate({F}.interpolate(x * 2, scale_factor=2) + 1, size=(15, 17), "
        "mode='bilinear', align_corners=False) * 3, (1, 1, 2, 2), mode='reflect') + 1",
        "", "torch.randn(5, 3, 8, 9)",
    ),
    "patches": (f"({F}.unfold(x, 3, padding=1).view(-1, 3, 9, 63) * 2).amax(2) - 1", "",
                "torch.randn(5, 3, 7, 9)"),
    "rows counted": (
        "((y + len(x)).float()[:, None] * x.exp(), y * len(x), torch.arange(40) * len(x) + x)",
        "", f"{X}[0, :, :40], torch.randint(9, (33,))",
    ),
    "the most of large ones": (
        "(lambda v, i: (x * 2, y.amax(-1), v, i, y.argmin(-1), y.argmax(), z.argmax(-1)))"
        "(*y.min(-1))", "",
        f"{Y}, {WIDE}, torch.randint(2**40, 2**40 + 9, (37, 100))",
    ),
    "halves of large ones": ("(x * 2, y.half() + x.half() * 0, y.half())", "",
                             f"{Y}, torch.randint(-70000, 70000, (37, 100))"),
    "given as floats": (
        "(y.float(), z.half(), z.long(), (y.T + 0).float(), x * 2, y.float().view(-1))", "",
        f"{Y}, {WIDE}, torch.rand(37, 100) > 0.5",
    ),
    "places of 32 bits": ("self.e(y) * 2 + x[:, z]", "self.e = nn.Embedding(50, 16)",
                          f"{Y}, torch.randint(0, 50, (37,), dtype=torch.int32), "
                          "torch.randint(0, 100, (16,), dtype=torch.int32)"),
    "labels of 8 bits": (f"{F}.cross_entropy(x * 2, y.long())", "",
                         f"{Y}, torch.randint(0, 100, (37,), dtype=torch.uint8)"),
    **{f"{name} {dtype}": (forward.replace("OWN", f"torch.{dtype}"), "", ", ".join(
            [Y, *2 * [f"torch.randint({least}, {most}, (37, 100), dtype=torch.{dtype})"]]))
       for dtype, least, most in (("int32", -2**31, 2**31), ("int16", -2**15, 2**15),
                                  ("int8", -128, 128), ("uint8", 0, 256))
       for name, forward in SMALL.items()},
    "a part written": ("(lambda t: (t[:, 1:].copy_(x[:, :-1] > 0), x * t)[1])(x > 1)", "", Y),
}  # fmt: skip
FOR_ONE_BATCH = {
    "large sums",
    "one of a row by its number",
    "pairs",
    "arithmetic",
    "added to places",
    "chosen",
    "returned in other types",
    "rows counted",
    "the most of large ones",
    "halves of large ones",
    "given as floats",
    "places of 32 bits",
    "labels of 8 bits",
    *(f"{name} {dtype}" for name in SMALL for dtype in ("int32", "int16", "int8", "uint8")),
}


@needs_gpp
@pytest.mark.parametrize("name", FORMS)
def test_kernels_and_calls_compute_what_the_module_does(name, tmp_path, monkeypatch):
    monkeypatch.setattr("test_ranges.FOR_ONE_BATCH", FOR_ONE_BATCH)
    check_form(tmp_path, name, FORMS[name])


def check_triton(folder: str) -> None:
    """Compare Triton's kernels with PyTorch: in its interpreter where TRITON_INTERPRET is set."""
    import test_ranges

    test_ranges.FOR_ONE_BATCH = FOR_ONE_BATCH
    for number, (name, form) in enumerate(FORMS.items()):
        own = Path(folder) / str(number)
        own.mkdir()
        try:
            check_form(own, name, form, "_triton")
        except Exception as error:
            raise AssertionError(name) from error


@needs_triton
def test_interpreted_blocks_and_calls_compute_what_the_module_does(tmp_path):
    interpreted("test_whole_numbers", "check_triton", str(tmp_path))
