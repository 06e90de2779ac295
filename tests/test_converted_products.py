"""Products whose weight is converted on its way into the tensor cores.

Without a GPU all of it, copies, barriers and products included, runs in an emulation that takes
threads and copies in any order.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from emulated_products import emulated_code, emulated_model
from interpreted import interpreted
from test_any_module import derive
from test_half_products import TEXT, filled, made_of, on_gpu

from tuner.capture.tasks.half_products import WGMMA_TEMPLATE
from tuner.kernel.family import load_family

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ on the PATH")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
NAMES = ("product_n", "product_k", "product_cluster", "product_raster")
TILES = [(256, 64, 1, 8), (192, 32, 1, 0), (128, 64, 2, 1)]
# Rows, columns, terms of each sum; two of them in all tiles.
SHAPES = [(70, 131, 268), (300, 258, 72)]
SMALL = [(128, 128, 64), (257, 40, 4)]


def product(tile, x, weight, bias=None, seed=0) -> torch.Tensor:
    """x weight^T + bias by the emulation of a tile's kernels."""
    code = emulated_code(tile, "converted")
    code.library.use_seed(seed)
    (rows, terms), columns = x.shape, len(weight)
    out = torch.full((rows, columns), float("nan"))
    room = torch.full((rows * (-(-terms // 16) * 16 + 2) + columns + 1,), float("nan"))
    code("product_of_rows_converted", x, weight, bias, out, room, rows, columns, terms)
    return out


def assert_as_exact(mine: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice the error of PyTorch's own in each column, with its infinities and NaN."""
    assert torch.equal(mine.isnan(), own.isnan())
    assert torch.equal(mine.isinf() * mine.sign(), own.isinf() * own.sign())
    is_finite = own.isfinite() & exact.isfinite()
    error, limit, scale = (
        torch.where(is_finite, y, 0).abs().amax(0)
        for y in (mine.double() - exact, own.double() - exact, exact)
    )
    assert (error <= 2 * limit + 2.0**-22 * scale).all()


def assert_is_product(mine: torch.Tensor, x, weight, bias=None) -> None:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_as_exact(mine, F.linear(x, weight, bias), exact)


@needs_gxx
@pytest.mark.parametrize(
    ("tile", "shape"), [*((t, s) for t in TILES for s in SHAPES), *((TILES[0], s) for s in SMALL)]
)
def test_every_number_is_made_of_the_right_ones(tile, shape):
    rows, columns, terms = shape
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, terms, generator=generator) for n in (rows, columns))
    bias = torch.randn(columns, generator=generator)
    assert_is_product(product(tile, x, weight, bias, seed=rows), x, weight, bias)


@needs_gxx
@pytest.mark.parametrize("what", ["positive", "offset", "tiny", "huge", "one large column"])
def test_inputs_that_sums_of_halves_go_wrong_on(what):
    x, weight = filled(torch.empty(70, 200), what), filled(torch.empty(131, 200), "positive")
    assert_is_product(product(TILES[0], x, weight), x, weight)


# Of a weight of normal numbers and whole ones from -20 to 20.
WEIGHTS = {
    "powers": lambda w, p: w * 2.0**p,
    "powers of rows": lambda w, p: w * 2.0 ** (3 * p[:, :1]),
    # The unit of a row's sums changes again and again.
    "growing": lambda w, p: w * 2.0 ** torch.linspace(-20, 20, w.shape[1]),
    "falling far": lambda w, p: w * 2.0 ** torch.linspace(120, -120, w.shape[1]),
    "largest": lambda w, p: 3.4e38 * w.sign() / w.abs().clamp(min=1),
    "subnormal": lambda w, p: w * 1e-42,
    "zeros": lambda w, p: torch.where(p > 10, w, 0) * (p[:, :1] > 0),
    "one large": lambda w, p: torch.where(p == p.max(), 1e37, 1) * w,
}


@needs_gxx
@pytest.mark.parametrize("what", WEIGHTS)
def test_weights_that_sums_of_halves_go_wrong_on(what):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 200, generator=generator) for n in (70, 131))
    x *= {"largest": 1e-3, "subnormal": 1e30}.get(what, 1)
    weight = WEIGHTS[what](w, torch.randint(-20, 21, w.shape, generator=generator))
    assert_is_product(product(TILES[1], x, weight), x, weight)


@needs_gxx
def test_small_numbers_that_meet_large_ones_are_not_lost():
    """Of a weight whose chunks of terms are too far apart for sums in one unit."""
    x, weight = torch.zeros(8, 256), torch.ones(4, 256)
    weight[:, :64], weight[1, :64] = 1e-38, 1e-37
    weight[:, 128:] = 1e38
    x[:, :64], x[3:, 64:128] = 1.0, 1e-38
    assert_is_product(product(TILES[0], x, weight), x, weight)


@needs_gxx
def test_usual_numbers_beside_a_large_one_are_not_lost():
    """Which meets a small one, so that the others are most of the sum."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 200, generator=generator) for n in (8, 4))
    weight[1, 9], x[:, 9] = 1e8, 1e-8
    assert_is_product(product(TILES[0], x, weight), x, weight)


@needs_gxx
def test_infinities_and_nan_go_where_pytorchs_products_let_them():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 200, generator=generator) for n in (70, 131))
    x[3, 5], x[40, 7], x[50, 0] = float("inf"), -float("inf"), float("nan")
    weight[17, 9], weight[18, 150], weight[130, 3] = float("inf"), float("nan"), -float("inf")
    weight[19, 7] = weight[20, 5] = -float("inf")  # which meet others
    bias = torch.randn(131, generator=generator)
    assert_is_product(product(TILES[0], x, weight, bias), x, weight, bias)


@needs_gxx
@pytest.mark.parametrize("terms", [8184, 8192, 8204, 9300])  # 8,192 are kept in registers
def test_rows_longer_than_registers_hold(terms):
    generator = torch.Generator().manual_seed(terms)
    x, weight = (torch.randn(n, terms, generator=generator) for n in (3, 5))
    assert_is_product(product(TILES[0], x, weight), x, weight)


@needs_gxx
def test_products_of_whole_numbers_are_exact():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 9, (70, 520), generator=generator).float()
    weight = torch.randint(-3, 4, (131, 520), generator=generator).float()
    assert torch.equal(product(TILES[2], x, weight).double(), x.double() @ weight.double().T)


# ---- what is made of a module -----------------------------------------------------------------


def check_module(folder: str) -> None:
    """Three products, of which one reads a weight that is turned."""
    init = "self.a = nn.Linear(264, 260); self.w = nn.Parameter(torch.randn(260, 264) / 16)"
    init += "; self.s = nn.Parameter(torch.randn(260)); self.b = nn.Linear(264, 264)"
    text = TEXT.format(
        init=init, forward="self.b(torch.relu(self.a(x) * self.s) @ self.w) + x", shape="130, 264"
    )
    problem, made = derive(Path(folder), "product", text)
    family = load_family(made.name, [made.folder])
    params = {"template": WGMMA_TEMPLATE, "product_weight": "converted", "product_n": 128}
    model, code = emulated_model(family, params, Path(folder))
    wide, own_model = problem.make_model(0).double(), problem.make_model(0)
    for other in (wide, own_model):
        other.load_state_dict(model.state_dict())
    x = problem.make_inputs(1)[0]
    with torch.no_grad():
        mine, theirs, exact = model(x), own_model(x), wide(x.double())
    error, limit = ((y.double() - exact).abs().max() for y in (mine, theirs))
    assert error <= 2 * limit
    steps = [name.rsplit("_behind", maxsplit=1)[-1] for name in code.called]
    assert steps == ["_product_converted", "product_of_rows_turned", "_product_converted"]


@needs_triton
@needs_gxx
def test_a_module_of_which_some_products_convert_the_weight(tmp_path):
    interpreted("test_converted_products", "check_module", str(tmp_path))


# ---- on a GPU ---------------------------------------------------------------------------------

ALL_TILES = [*itertools.product([128, 192, 256], [32, 64], [1, 2])]
ALL_TILES.remove((256, 64, 2))  # which has no registers


def on_a_gpu(folder: Path, shape: tuple[int, int, int], tile=(256, 32, 1), forward="self.a(x)"):
    """A Linear with its weight converted, the same in float64, PyTorch's own, and an input."""
    rows, columns, terms = shape
    layer = f"self.a = nn.Linear({terms}, {columns})"
    problem, made = made_of(folder, (layer, forward, f"{rows}, {terms}"))
    more = {**dict(zip(NAMES, tile, strict=False)), "product_weight": "converted"}
    model, wide, x = on_gpu(problem, made, folder, WGMMA_TEMPLATE, **more)
    own = problem.make_model(0).cuda()
    own.load_state_dict(model.state_dict())
    return model, wide, own, x


def assert_alike(model, wide, own, x) -> None:
    with torch.no_grad():
        assert_as_exact(model(x), own(x), wide(x.double()))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ALL_TILES, ids=str)
def test_products_of_any_size_in_any_tile(tile, tmp_path):
    shapes = [(128, 128, 256), (333, 1025, 520), (1000, 129, 260), (700, 2050, 4100)]
    for i, shape in enumerate(shapes):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert_alike(*on_a_gpu(folder, shape, tile))


@pytest.mark.gpu
@pytest.mark.parametrize("what", WEIGHTS)
def test_weights_that_go_wrong_on_a_gpu(what, tmp_path):
    model, wide, own, x = on_a_gpu(tmp_path, (300, 515, 1032))
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(own.a.weight.shape, generator=generator)
    w = WEIGHTS[what](w, torch.randint(-20, 21, w.shape, generator=generator))
    x *= {"largest": 1e-3, "subnormal": 1e30}.get(what, 1)
    for each in (model, wide, own):
        each.a.weight.data.copy_(w)
        each.a.bias.data.zero_()
    assert_alike(model, wide, own, x)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(256, 32, 1), (128, 64, 2)], ids=str)
def test_infinities_and_nan_on_a_gpu(tile, tmp_path):
    model, wide, own, x = on_a_gpu(tmp_path, (300, 515, 1032), tile, "torch.relu(self.a(x)) * 2")
    x[3, 5], x[100, 7], x[299, 1031] = float("inf"), -float("inf"), float("nan")
    for each in (model, wide, own):
        weight = each.a.weight.data
        weight[17, 9], weight[514, 1000], weight[18, 3] = float("inf"), -float("inf"), float("nan")
    assert_alike(model, wide, own, x)


@pytest.mark.gpu
def test_a_cuda_graph_replays_it_and_a_side_stream_takes_it(tmp_path):
    model, wide, own, x = on_a_gpu(tmp_path, (300, 515, 1032))
    x[4, 4] = float("inf")  # so that something is computed again
    with torch.no_grad():
        first = model(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            again = model(x)
        torch.cuda.current_stream().wait_stream(side)
        torch.testing.assert_close(first, again, rtol=0, atol=0, equal_nan=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = model(x)
        x.copy_(torch.randn_like(x))
        own.a.weight.mul_(2)
        model.load_state_dict(own.state_dict())
        wide.load_state_dict(own.state_dict())
        for _ in range(2):
            made.fill_(float("nan"))
            graph.replay()
            torch.testing.assert_close(made.double(), wide(x.double()), rtol=1e-5, atol=1e-5)
        assert torch.equal(made, model(x))


@pytest.mark.gpu
def test_a_weight_may_begin_where_the_copy_engine_reads_none(tmp_path):
    """At a multiple of 4 bytes alone."""
    model, wide, own, x = on_a_gpu(tmp_path, (200, 260, 264))
    moved = torch.empty(260 * 264 + 1, device="cuda")[1:].view(260, 264)
    model.a.weight = torch.nn.Parameter(moved.copy_(model.a.weight.data))
    assert_alike(model, wide, own, x)


@pytest.mark.gpu
def test_a_product_may_be_the_first_that_a_thread_asks_of_the_device(tmp_path):
    """Its memory is there already, so that no call before it makes the thread a context."""
    model, _, _, x = on_a_gpu(tmp_path, (300, 515, 1032))

    def call(_: int = 0) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    wanted = call().clone()
    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            assert all(torch.equal(made, wanted) for made in pool.map(call, range(8)))
