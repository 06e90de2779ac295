"""Products of several matrices, and of long sums in pieces, and epilogues that read half of one.

The kernels run in an emulation that takes threads and copies in any order.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from emulated_products import EmulatedCode, emulated_code
from test_converted_products import assert_as_exact
from test_half_products import made_of

from tuner.capture.tasks.half_products import WGMMA_TEMPLATE
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ on the PATH")

# ---- the kernel -------------------------------------------------------------------------------

TILES = [(256, 32, 1, 8), (256, 64, 1, 8), (192, 32, 1, 0), (128, 64, 2, 1)]
# Batches of x and of the weight, rows and columns of each, terms of each sum.
SHAPES = [(1, 1, 130, 200, 328), (3, 3, 70, 40, 80), (3, 1, 40, 140, 24), (1, 2, 150, 30, 136)]


def halves_of(x: torch.Tensor, padded: int, low_times: int = 2048) -> tuple[torch.Tensor, ...]:
    """High and low halves of rows, each beside the other, and what brings a row back."""
    rows = x.reshape(-1, x.shape[-1])
    unit = 2.0 ** (rows.abs().amax(1).clamp(min=1e-30).log2().floor() - 12)
    values = torch.zeros(len(rows), padded)
    values[:, : rows.shape[1]] = rows / unit[:, None]
    high = values.half()
    low = ((values - high.float()) * low_times).half()
    return torch.cat([high, low], 1).contiguous(), unit


def product(
    tile,
    x: torch.Tensor,
    weight: torch.Tensor,
    seed: int = 0,
    code: EmulatedCode | None = None,
    *,
    has_more: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x weight^T and more for each batch by the emulation of a tile's kernels; and the more."""
    code = code or emulated_code(tile, "split")
    function = EPILOGUE if hasattr(code.library, EPILOGUE) else "product_of_rows"
    code.library.use_seed(seed)
    batches, rows, columns = max(len(x), len(weight)), x.shape[1], weight.shape[1]
    padded = -(-x.shape[2] // 16) * 16
    (of_x, x_unit), (of_weight, unit) = halves_of(x, padded), halves_of(weight, padded)
    mean = torch.linspace(-4096, 4096, len(x_unit)) * has_more
    sums = torch.linspace(-4096, 4096, len(unit))
    out = torch.full((batches, rows, columns), float("nan"))
    code(
        *(function, of_x, of_x[:, padded:], of_weight, of_weight[:, padded:]),
        *(x_unit, mean, unit, sums, torch.full((columns,), 0.25 * has_more), out),
        *(rows, columns, padded, len(x), len(weight)),
    )
    by_means = (mean * x_unit).double().view(*x.shape[:2], 1) * (sums * unit).view(
        len(weight), 1, -1
    )
    return out.double(), by_means + 0.25 * has_more


@needs_gxx
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_number_is_of_its_own_batch(tile, shape):
    lefts, rights, rows, columns, terms = shape
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(lefts, rows, terms, generator=generator)
    weight = torch.randn(rights, columns, terms, generator=generator)
    exact = x.double() @ weight.double().mT
    found, more = product(tile, x, weight, rows)
    torch.testing.assert_close(found - more, exact, rtol=1e-6, atol=1e-4)


@needs_gxx
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_what_is_small_beside_the_largest_of_its_row_is_not_lost(tile):
    """As a softmax's gradients: where the large one meets a 0, what is left is of small ones."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(1, n, 192, generator=generator) for n in (130, 140))
    x *= 2.0**-24
    x[:, :, 3], weight[:, :, 3] = 1.0, 0.0
    found, _ = product(tile, x, weight, has_more=False)
    (exact,) = x.double() @ weight.double().mT
    assert_as_exact(found[0].float(), (x @ weight.mT)[0], exact)


@needs_gxx
def test_a_tile_over_the_end_of_a_batch_reads_no_infinity_of_the_next():
    x, weight = torch.ones(3, 70, 64), torch.ones(3, 40, 64)
    x[1], weight[1] = float("inf"), float("inf")
    found, more = product(TILES[0], x, weight)
    assert torch.allclose((found - more)[::2], torch.tensor(64.0, dtype=torch.float64), atol=1e-5)


@needs_gxx
def test_pieces_are_added_up_in_float64():
    made = torch.tensor([2.0**30, 1.0, 2.0**-20, -(2.0**30)]).view(4, 1, 1).repeat(1, 3, 700)
    made[1] = torch.arange(2100.0).view(3, 700)
    out, bias = torch.full((3, 700), float("nan")), torch.arange(700.0)
    emulated_code(TILES[0], "split")("product_of_rows_in_pieces", made, bias, out, 3, 700, 4)
    assert torch.equal(out, (made[1].double() + 2.0**-20 + bias).float())


# ---- the kernel that converts a weight whose rows lie across ----------------------------------

TURNED = {
    # Batches of x and of the weight, rows, columns and terms; pieces of how many terms.
    "one": (1, 1, 130, 260, 330, None),
    "batches": (3, 3, 70, 40, 128, None),
    "one weight for all": (3, 1, 40, 140, 40, None),
    "one x for all": (1, 2, 150, 36, 64, None),
    "pieces": (1, 1, 130, 132, 330, 128),
}


def turned_product(
    tile,
    x: torch.Tensor,
    weight: torch.Tensor,
    cut: int | None = None,
    code: EmulatedCode | None = None,
):
    """x weight + 0.25 for each batch, or piece of sums: weight is [batches, terms, columns]."""
    code = code or emulated_code(tile, "converted")
    function = EPILOGUE if hasattr(code.library, EPILOGUE) else "product_of_rows"
    code.library.use_seed(len(weight))
    (lefts, rows, terms), columns = x.shape, weight.shape[2]
    depth = cut or terms
    pieces = -(-terms // depth)
    parts = torch.nn.functional.pad(x, (0, pieces * depth - terms)).unflatten(2, (pieces, depth))
    padded = -(-depth // 16) * 16
    of_x, x_unit = halves_of(parts.transpose(1, 2).reshape(-1, rows, depth), padded, 1)
    of_x = of_x.view(-1, 2, padded)
    is_odd = (~x.isfinite()).any(-1).view(-1) if cut is None else torch.zeros(len(x_unit)) > 0
    x_unit[is_odd] = float("nan")
    mean = torch.zeros(len(x_unit))
    rights = pieces if cut else len(weight)
    out = torch.full((max(lefts * pieces, rights), rows, columns), float("nan"))
    marks = torch.full((rights * columns,), -1, dtype=torch.int32)
    odd = is_odd.any().to(torch.int32).view(1)
    apart = (depth, terms, 1) if cut else (rows * terms, terms, 1)
    numbers = torch.tensor([rows, columns, depth, terms, padded, lefts * pieces, rights, *apart])
    code(
        *(f"{function}_turned", of_x[:, 0], of_x[:, 1], x_unit, mean, x, weight),
        *(torch.full((columns,), 0.25), out, marks, odd, numbers, len(numbers)),
    )
    return out.double(), marks.view(rights, columns), odd


@needs_gxx
@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("tile", [(256, 64, 1, 8), (192, 32, 1, 0), (128, 64, 2, 1)], ids=str)
def test_weights_that_lie_across_are_converted(tile, name):
    lefts, rights, rows, columns, terms, cut = TURNED[name]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(lefts, rows, terms, generator=generator)
    weight = torch.randn(rights, terms, columns, generator=generator)
    found, marks, odd = turned_product(tile, x, weight, cut)
    pairs = zip(
        x.double().split(cut or terms, 2), weight.double().split(cut or terms, 1), strict=True
    )
    exact = torch.cat([one @ other for one, other in pairs])
    torch.testing.assert_close(found - 0.25, exact, rtol=1e-6, atol=1e-4)
    assert not marks.any() and not odd


@needs_gxx
def test_what_float16_cannot_have_of_a_batch_is_repaired_in_it():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 70, 64, generator=generator)
    weight = torch.randn(2, 64, 40, generator=generator)
    x[1, 3, 5], weight[0, 7, 9], weight[1, 8, 33] = float("inf"), -float("inf"), 1e30
    found, marks, odd = turned_product(TILES[0], x, weight)
    assert [*map(tuple, marks.nonzero().tolist())] == [(0, 9), (1, 33)] and odd
    exact = x.double() @ weight.double() + 0.25
    assert torch.equal(found.isnan(), exact.isnan()) and torch.equal(found.isinf(), exact.isinf())
    is_finite = exact.isfinite()
    scale = exact.where(is_finite, torch.zeros(())).abs().amax(1, keepdim=True).expand_as(exact)
    assert ((found - exact).abs()[is_finite] <= 1e-5 * scale[is_finite]).all()


@needs_gxx
def test_a_last_piece_of_fewer_terms_is_repaired_from_these_alone():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 70, 330, generator=generator)
    weight = torch.randn(1, 330, 40, generator=generator)
    weight[0, 300, 9], x[0, :, 300] = 1e30, 0
    found, marks, _ = turned_product(TILES[0], x, weight, 128)
    assert marks.nonzero().tolist() == [[2, 9]]
    exact = x[0, :, 256:].double() @ weight[0, 256:, 9].double() + 0.25
    torch.testing.assert_close(found[2, :, 9], exact, rtol=1e-6, atol=1e-5)


@needs_gxx
def test_a_stage_of_two_batches_is_refused():
    with pytest.raises(AssertionError, match="two batches"):
        turned_product(TILES[0], torch.ones(2, 8, 40), torch.ones(2, 40, 8))


# ---- epilogues that read half of a product ----------------------------------------------------

EPILOGUE = "fused_product_forward_rows_behind_product"
SQUARE = "self.w = nn.Parameter(torch.randn(300, 400))"
HALF = {
    "torch.triu(x @ self.w)": torch.triu,
    "torch.tril(x @ self.w, -20) * 2": lambda y: torch.tril(y, -20) * 2,
    "torch.triu(x @ self.w, 130) + 1": lambda y: torch.triu(y, 130) + 1,
}


def epilogues_of(folder: Path, forward: str, shape: str = "400, 300") -> str:
    """Return the CUDA C++ of a forward's epilogue."""
    _, made = made_of(folder, (SQUARE, forward, shape))
    family = load_family(made.name, [made.folder])
    source = family.render({"template": WGMMA_TEMPLATE}, known_device("H200").facts()).source
    begin = source.index(f"struct {EPILOGUE}_epilogue")
    return source[begin : source.index('""",', begin)]


@needs_gxx
@pytest.mark.parametrize(
    ("tile", "way", "forward"),
    [
        (((128, 64, 1, 8), (128, 32, 2, 1))[(i + j) % 2], way, forward)
        for i, way in enumerate(["split", "converted"])
        for j, forward in enumerate(HALF)
    ],
    ids=str,
)
def test_tiles_of_which_no_sum_is_read_are_not_made(tile, way, forward, tmp_path):
    code = emulated_code(tile, way, epilogues_of(tmp_path, forward))
    plain = emulated_code(tile, way)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 400, 72, generator=generator)
    weight = torch.randn(1, 72, 400, generator=generator)
    for library in (code.library, plain.library):
        library.num_copies()
    if way == "converted":
        # The column is marked by a tile that is made, and not by one behind it that is not.
        x[0, 2, 5], x[0, :, 20], weight[0, 20, 200] = float("inf"), 0, 1e30
        (found, *_), (made, *_) = (turned_product(tile, x, weight, code=c) for c in (code, plain))
    else:
        (found, _), (made, _) = (product(tile, x, weight.mT, code=c) for c in (code, plain))
    torch.testing.assert_close(found, HALF[forward](made), rtol=1e-6, atol=1e-4, equal_nan=True)
    assert 0 < code.library.num_copies() < 0.8 * plain.library.num_copies()
