"""Moments of a product's columns, found by the kernel that makes the product.

Without a GPU kernels of CUDA C++ run in an emulation, and Triton's in its interpreter.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from emulated_products import emulated_code, emulated_model
from interpreted import interpreted
from test_any_module import derive
from test_half_products import TEXT, made_of, on_gpu
from test_product_epilogues import candidate_of

from tuner.capture.tasks.half_products import WGMMA_TEMPLATE
from tuner.kernel.family import load_family

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ on the PATH")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
LAYER = "self.a = nn.Linear(264, 260); self.n = nn.BatchNorm1d(260)"
SCALED = LAYER + "; self.s = nn.Parameter(torch.randn(260))"
FOUND = {
    "of the product": (LAYER, "self.n(self.a(x))", "704, 264"),
    "of a product with a scale": (SCALED, "self.n(self.a(x) * self.s)", "704, 264"),
    "of what follows it": (SCALED, "self.n(torch.relu(self.a(x)) + self.s)", "704, 264"),
    "of a sum with a tensor of that size": (
        LAYER + "; self.r = nn.Parameter(torch.randn(704, 260))",
        "self.n(self.a(x) + self.r)",
        "704, 264",
    ),
    "of a product that is returned": (
        LAYER,
        "(lambda h: (h, self.n(h)))(self.a(x))",
        "704, 264",
    ),
}
NOT_FOUND = {
    "few rows": (LAYER, "self.n(self.a(x))", "200, 264"),
    "a norm of rows": (
        LAYER + "; self.l = nn.LayerNorm(260)",
        "self.l(self.a(x))",
        "704, 264",
    ),
    "sums": (LAYER, "(lambda h: h - h.sum(0))(self.a(x))", "704, 264"),
    "samples and places": (LAYER, "self.n(self.a(x).transpose(1, 2))", "88, 8, 264"),
    "truths": (LAYER, "self.n((self.a(x) > 0).float())", "704, 264"),
}
# Rows, columns, terms.
SHAPES = [(300, 258, 72), (129, 130, 40), (256, 128, 64)]
TILES = [(256, 64, 1, 8), (192, 32, 1, 0), (128, 64, 2, 1)]
SCALED_BY = """
struct scaled_epilogue {
  static constexpr bool kHasMoments = true;
  static constexpr int64_t kMean = 1, kSquares = 0;
  double* partial;
  const float* g0;
  float operator()(float sum, int64_t, int64_t, int64_t) const { return sum; }
  float of_moments(float sum, int64_t row, int64_t column, int64_t columns) const {
    return sum * g0[column] + 100;
  }
  bool reads(int64_t, int64_t, int64_t) const { return true; }
};
extern "C" const char* scaled(PRODUCT_ARGUMENTS, double* partial, const float* g0, int64_t rows,
                              int64_t columns, int64_t padded, int64_t x_batches,
                              int64_t w_batches, void* stream) {
  const scaled_epilogue epilogue = {partial, g0};
  return halves::product(PRODUCT_NAMES, epilogue, rows, columns, padded, x_batches, w_batches,
                         stream);
}
#ifdef CONVERTED_ARGUMENTS
extern "C" const char* scaled_converted(CONVERTED_ARGUMENTS, double* partial, const float* g0,
                                        int64_t rows, int64_t columns, int64_t depth,
                                        void* stream) {
  const scaled_epilogue epilogue = {partial, g0};
  return converted::product(CONVERTED_NAMES, epilogue, rows, columns, depth, stream);
}
#endif
"""


@pytest.mark.parametrize("name", FOUND)
def test_first_moments_behind_a_product_are_found_by_its_kernel(name, tmp_path):
    together = candidate_of(tmp_path, FOUND[name])
    apart = candidate_of(tmp_path, FOUND[name], product_epilogue="apart")
    (step,) = together.plan.steps
    assert step.function.endswith("_behind_product")
    assert "kHasMoments = true" in together.source
    first, second = (step.function for step in apart.plan.steps)
    assert first == "product_by_wgmma" and "_behind_product" not in second
    assert "kHasMoments = true" not in apart.source and "moments_room" in apart.source


@pytest.mark.parametrize("name", NOT_FOUND)
def test_other_reductions_read_the_product(name, tmp_path):
    candidate = candidate_of(tmp_path, NOT_FOUND[name])
    assert "kHasMoments = true" not in candidate.source


def halves_of(x: torch.Tensor, low_times: int) -> torch.Tensor:
    """High and low halves of rows, beside each other, of a multiple of 16 numbers each."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 16))
    high = padded.half()
    low = ((padded - high.float()) * low_times).half()
    return torch.cat([high, low], 1)


def parts_of(made: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """What the kernels should leave of `made`: squares, then means, by column and piece."""
    values = (made * scale + 100).double()
    pieces = values.split(rows)
    means = torch.stack([piece.mean(0) for piece in pieces], 1)
    squares = torch.stack([((p - p.mean(0)) ** 2).sum(0) for p in pieces], 1)
    return torch.stack([squares, means])


def assert_parts(partial: torch.Tensor, made, scale, rows: int) -> None:
    expected = parts_of(made, scale, rows)
    found = partial[: expected.numel()].view_as(expected)
    torch.testing.assert_close(found[1], expected[1], rtol=2e-7, atol=0)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert partial[expected.numel() :].isnan().all()


@needs_gxx
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("weight_is", ["split", "converted"])
def test_pieces_have_the_moments_of_what_is_stored(weight_is, tile, shape):
    rows, columns, terms = shape
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, terms, generator=generator) for n in (rows, columns))
    scale = torch.randn(columns, generator=generator)
    code = emulated_code(tile, weight_is, SCALED_BY)
    out = torch.full((rows, columns), float("nan"))
    partial = torch.full((2 * columns * (rows // 64 + 2),), float("nan"), dtype=torch.float64)
    if weight_is == "converted":
        room = torch.full((rows * (-(-terms // 16) * 16 + 2) + columns + 1,), float("nan"))
        given = (x, weight, None, out, room, partial, scale, rows, columns, terms)
        code("scaled_converted", *given)
        assert room[-1:].view(torch.int32) == 0
    else:
        x_all, w_all = (halves_of(y, 2048) for y in (x, weight))
        padded = x_all.shape[1] // 2
        ones = [torch.ones(n) for n in (rows, columns)]
        zeros = [torch.zeros(n) for n in (rows, columns)]
        code(
            "scaled", x_all, x_all[:, padded:], w_all, w_all[:, padded:], ones[0], zeros[0],
            ones[1], zeros[1], None, out, partial, scale, rows, columns, padded, 1, 1,
        )  # fmt: skip
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-4, atol=1e-4)
    assert_parts(partial, out, scale, tile[0] if weight_is == "converted" else 128)


@needs_gxx
def test_a_row_that_is_repaired_raises_the_flag():
    x, weight = torch.ones(130, 40), torch.ones(130, 40)
    code = emulated_code(TILES[1], "converted", SCALED_BY)
    flags = []
    for place in (None, x, weight):
        if place is not None:
            place[70, 3] = float("inf")
        out, room = torch.empty(130, 130), torch.empty(130 * (48 + 2) + 130 + 1)
        partial = torch.empty(4 * 130, dtype=torch.float64)
        given = (x, weight, None, out, room, partial, torch.ones(130), 130, 130, 40)
        code("scaled_converted", *given)
        flags.append(int(room[-1:].view(torch.int32)))
        if place is not None:
            place[70, 3] = 1.0
    assert flags == [0, 1, 1]


ODD = ["as given", "offset", "an infinity", "wide rows", "wide columns"]


def odd(what: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Change an input, or a weight, into one that a part of is computed apart in float32."""
    if what == "offset":
        x += 100
    if what == "an infinity":
        x[3, 5] = float("inf")
    if what == "wide rows":
        x[3, ::2] *= 2.0**-60
    if what == "wide columns":
        weight[5, ::2] *= 2.0**-60


def assert_normalised(mine, own, wide, x: torch.Tensor) -> None:
    """A call of ours, of PyTorch's own and in float64: at most twice the error, buffers too."""
    for other in (own, wide):
        other.load_state_dict(mine.state_dict())
    with torch.no_grad():
        answers = [mine(x), own(x), wide(x.double())]
    buffers = zip(mine.buffers(), own.buffers(), wide.buffers(), strict=True)
    for ours, theirs, exact in [answers, *buffers]:
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        kept = exact.isfinite()
        error, limit = ((y.double() - exact)[kept].abs() for y in (ours, theirs))
        if kept.any():
            assert error.max() <= 2 * limit.max() + 1e-7 * exact[kept].abs().max()


def emulated(folder: str, init: str, forward: str, shape: str, weight_is: str):
    """Ours, PyTorch's own, in float64, an input, and the names of the kernels that are called."""
    text = TEXT.format(init=init, forward=forward, shape=shape)
    problem, made = derive(Path(folder), "product", text)
    family = load_family(made.name, [made.folder])
    params = {"template": WGMMA_TEMPLATE, "product_weight": weight_is, "product_n": 128}
    model, code = emulated_model(family, params, Path(folder))
    own, wide = problem.make_model(0), problem.make_model(0).double()
    return model, own, wide, problem.make_inputs(1)[0], code.called


def check_module(folder: str, weight_is: str, what: str) -> None:
    """Two normalised products behind each other, in training, with inputs that are odd."""
    init = "self.a = nn.Linear(264, 260); self.n = nn.BatchNorm1d(260)"
    init += "; self.s = nn.Parameter(torch.randn(260)); self.b = nn.Linear(260, 132)"
    init += "; self.m = nn.BatchNorm1d(132)"
    forward = "self.m(self.b(torch.relu(self.n(self.a(x) * self.s))))"
    model, own, wide, x, called = emulated(folder, init, forward, "704, 264", weight_is)
    odd(what, x, model.a.weight.data)
    assert_normalised(model, own, wide, x)
    assert len(called) == 2 and all("_behind_product" in name for name in called)


def check_others(folder: str) -> None:
    """A sum in pieces, and a product that is PyTorch's, leave moments to the nest's kernels."""
    init = "self.a = nn.Linear(2112, 130); self.n = nn.BatchNorm1d(130)"
    model, own, wide, x, called = emulated(folder, init, "self.n(self.a(x))", "704, 2112", "split")
    assert_normalised(model, own, wide, x[:140])
    assert called == ["product_of_rows", "product_of_rows_in_pieces"]
    called.clear()
    assert_normalised(model, own, wide, x[:100])
    assert called == []


@needs_triton
@needs_gxx
@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("weight_is", ["split", "converted"])
def test_a_module_in_the_interpreter(weight_is, what, tmp_path):
    interpreted("test_product_moments", "check_module", str(tmp_path), weight_is, what)


@needs_triton
@needs_gxx
def test_products_without_moments_in_the_interpreter(tmp_path):
    interpreted("test_product_moments", "check_others", str(tmp_path))


# ---- on a GPU ---------------------------------------------------------------------------------

ON_GPU = [
    ("split", 256, 64, 1), ("split", 192, 32, 1), ("split", 128, 64, 2), ("split", 128, 32, 1),
    ("converted", 256, 64, 1), ("converted", 192, 32, 2), ("converted", 128, 64, 2),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("tile", ON_GPU, ids=str)
def test_normalised_products_on_a_gpu(tile, what, tmp_path):
    init = "self.a = nn.Linear(520, 1032); self.n = nn.BatchNorm1d(1032)"
    init += "; self.s = nn.Parameter(torch.randn(1032))"
    problem, made = made_of(tmp_path, (init, "self.n(self.a(x) * self.s)", "1000, 520"))
    names = ("product_weight", "product_n", "product_k", "product_cluster")
    params = dict(zip(names, tile, strict=True))
    model, wide, _ = on_gpu(problem, made, tmp_path, WGMMA_TEMPLATE, **params)
    own = problem.make_model(0).cuda()
    for rows in (1000, 130, 2047):
        given = torch.randn(rows, 520, device="cuda")
        odd(what, given, model.a.weight.data)
        assert_normalised(model, own, wide, given)
