"""Modules with products of several matrices, and with long sums: which are taken, and how exact.

Without a GPU what makes halves runs in Triton's interpreter, and the kernels in an emulation.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from emulated_products import emulated_model
from interpreted import interpreted
from test_batched_products import HALF
from test_half_products import filled, made_of, on_gpu

from tuner.capture.tasks import half_products
from tuner.capture.tasks.half_products import HALVES_TEMPLATE, WGMMA_TEMPLATE
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ on the PATH")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

WEIGHT = "self.w = nn.Parameter(torch.randn(3, 264, 260) / 16)"
MODULES = {
    "bmm": (WEIGHT, "torch.bmm(x, self.w)", "3, 200, 264"),
    "epilogue": (
        WEIGHT + "; self.s = nn.Parameter(torch.randn(3, 200, 1))",
        "torch.relu(x @ self.w * self.s)",
        "3, 200, 264",
    ),
    "two dimensions": (
        "self.w = nn.Parameter(torch.randn(2, 1, 264, 132) / 16)",
        "torch.tanh(x @ self.w)",
        "2, 1, 130, 264",
    ),
    "with itself": ("...", "torch.relu(x @ x.transpose(1, 2))", "2, 140, 264"),
    "turned": (
        "self.w = nn.Parameter(torch.randn(2, 260, 264) / 16)",
        "torch.relu(x.transpose(1, 2) @ self.w.transpose(-1, -2))",
        "2, 264, 136",
    ),
    "one x for all": (
        "self.w = nn.Parameter(torch.randn(2, 264, 132) / 16)",
        "torch.relu(x @ self.w)",
        "130, 264",
    ),
    "one weight for all": (
        "self.w = nn.Parameter(torch.randn(1, 264, 132) / 16)",
        "torch.relu(x @ self.w)",
        "3, 140, 264",
    ),
}
CONVERTED = {
    "batches": (
        "self.w = nn.Parameter(torch.randn(2, 256, 132) / 16)",
        "torch.relu(torch.bmm(x, self.w))",
        "2, 130, 256",
    ),
    "x turned": (
        "self.w = nn.Parameter(torch.randn(264, 132) / 16)",
        "torch.relu(x.T @ self.w)",
        "264, 130",
    ),
}
LONG = {
    "long": ("self.w = nn.Parameter(torch.randn(2100, 132) / 64)", "x @ self.w", "129, 2100"),
    "long and turned": (
        "self.w = nn.Parameter(torch.randn(2050, 128) / 64)",
        "torch.relu(x.T @ self.w)",
        "2050, 128",
    ),
}
NOT_TAKEN = {
    "few rows": (WEIGHT, "torch.relu(x @ self.w)", "3, 100, 264"),
    "a part of the batches": (
        "self.w = nn.Parameter(torch.randn(2, 1, 264, 260))",
        "torch.relu(x @ self.w)",
        "2, 3, 200, 264",
    ),
    "a linear of a view": (
        "self.a = nn.Linear(260, 264)",
        "torch.relu(self.a(x.transpose(1, 2)))",
        "3, 260, 30",
    ),
}


def steps_of(folder: Path, module, template: str = WGMMA_TEMPLATE) -> list:
    _, made = made_of(folder, module)
    family = load_family(made.name, [made.folder])
    return list(family.render({"template": template}, known_device("H200").facts()).plan.steps)


@pytest.mark.parametrize("name", MODULES)
def test_products_of_batches_are_one_step(name, tmp_path):
    (step,) = steps_of(tmp_path, MODULES[name])
    assert step.function.endswith("_behind_product") or name == "bmm"


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_other_batches_are_pytorchs(name, tmp_path):
    _, made = made_of(tmp_path, NOT_TAKEN[name])
    family = load_family(made.name, [made.folder])
    assert WGMMA_TEMPLATE not in family.templates


def test_a_view_that_is_no_transposed_matrix_stays_a_step(tmp_path):
    module = ("self.a = nn.Linear(260, 264)", "self.a(x.transpose(1, 2))", "3, 260, 140")
    assert [s.function for s in steps_of(tmp_path, module)] == ["permute", "product_by_wgmma"]


def test_batches_are_no_work_for_pytorchs_products_of_halves(tmp_path):
    _, made = made_of(tmp_path, MODULES["epilogue"])
    assert HALVES_TEMPLATE not in load_family(made.name, [made.folder]).templates


@pytest.mark.parametrize("is_taken", [True, False])
def test_long_sums_are_taken_where_their_pieces_have_room(is_taken, monkeypatch, tmp_path):
    init = "self.w = nn.Parameter(torch.randn(65600, 132))"
    if not is_taken:
        monkeypatch.setattr(half_products, "MOST_OF_PIECES", 3 * 130 * 132 - 1)
    _, made = made_of(tmp_path, (init, "torch.relu(x @ self.w)", "130, 65600"))
    templates = load_family(made.name, [made.folder]).templates
    assert (WGMMA_TEMPLATE in templates) is is_taken
    assert HALVES_TEMPLATE not in templates


def check_module(folder: str, name: str, way: str) -> None:
    """Compare a module's forward, by emulated kernels, with float64 and PyTorch's own."""
    problem, made = made_of(Path(folder), (MODULES | CONVERTED | LONG)[name])
    family = load_family(made.name, [made.folder])
    params = {"template": WGMMA_TEMPLATE, "product_n": 128, "product_weight": way}
    model, code = emulated_model(family, params, Path(folder))
    wide, theirs = problem.make_model(0).double(), problem.make_model(0)
    for other in (wide, theirs):
        other.load_state_dict(model.state_dict())
    x = problem.make_inputs(1)[0]
    for what in ("normal", "offset", "odd") if name in ("epilogue", "long") else ("normal",):
        x = filled(x, what) if what != "odd" else odd(filled(x, "normal"))
        with torch.no_grad():
            assert_as_exact(model(x), theirs(x), wide(x.double()))
    assert any(each.endswith("_in_pieces") for each in code.called) is (name in LONG)
    assert any(each.endswith("_turned") for each in code.called) is (way == "converted")
    assert len(set(code.called)) == 1 + (name in LONG)


def odd(x: torch.Tensor) -> torch.Tensor:
    """With numbers that halves do not have."""
    x = x.clone()
    flat = x.view(-1, x.shape[-2], x.shape[-1])
    flat[0, 3, 5], flat[-1, 100, 7], flat[-1, 7, 0] = float("inf"), -float("inf"), float("nan")
    flat[0, 20, 9] = 1e30
    return x


def assert_as_exact(mine: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice the error of PyTorch's own in each row, with its infinities and NaN.

    Not in rows of few numbers, as a triangle's last: a single sum may be as good as 0, and
    PyTorch's own error of it by chance as well.
    """
    assert torch.equal(mine.isnan(), own.isnan())
    assert torch.equal(mine.isinf() * mine.sign(), own.isinf() * own.sign())
    is_finite = own.isfinite() & exact.isfinite()
    error, limit, scale = (
        torch.where(is_finite, y, 0).abs().amax(-1)
        for y in (mine.double() - exact, own.double() - exact, exact)
    )
    is_enough = (exact != 0).sum(-1) >= 16
    assert is_enough.any() and (error <= 2 * limit + 2.0**-22 * scale)[is_enough].all()


@needs_triton
@needs_gxx
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "split") for name in (*MODULES, *LONG)),
        *((name, "converted") for name in (*CONVERTED, *LONG)),
    ],
)
def test_interpreted_modules_are_as_exact_as_pytorch(name, way, tmp_path):
    interpreted("test_batched_modules", "check_module", str(tmp_path), name, way)


# ---- on a GPU ---------------------------------------------------------------------------------

ON_GPU = {
    **MODULES,
    **CONVERTED,
    "many batches": (
        "self.w = nn.Parameter(torch.randn(20, 512, 516) / 16)",
        "torch.relu(torch.bmm(x, self.w))",
        "20, 300, 512",
    ),
    "very long": (
        "self.w = nn.Parameter(torch.randn(140004, 132) / 64)",
        "torch.relu(x @ self.w)",
        "200, 140004",
    ),
    "odd sizes": ("self.w = nn.Parameter(torch.randn(2949, 593))", "x @ self.w", "821, 2949"),
    "short rows": ("self.w = nn.Parameter(torch.randn(64, 520))", "x @ self.w", "1000, 64"),
    "lies across": ("self.w = nn.Parameter(torch.randn(4096, 520))", "x.T @ self.w", "4096, 260"),
    **{
        forward: ("self.w = nn.Parameter(torch.randn(300, 700))", forward, "700, 300")
        for forward in HALF
    },
}
GPU_TILES = [(256, 64, 1), (192, 64, 2), (128, 32, 2)]


def check_on_gpu(folder: Path, name: str, tile, way: str) -> None:
    """Compare a module with float64 and PyTorch's own on the data that halves go wrong on."""
    problem, made = made_of(folder, (ON_GPU | LONG)[name])
    names = ("product_n", "product_k", "product_cluster")
    more = {**dict(zip(names, tile, strict=True)), "product_weight": way}
    model, wide, x = on_gpu(problem, made, folder, WGMMA_TEMPLATE, **more)
    own = problem.make_model(0).cuda()
    own.load_state_dict(model.state_dict())
    kinds = ("normal", "positive", "offset", "tiny", "huge")
    for what in kinds[: 4 if name == "with itself" else 5]:  # whose squares overflow
        given = filled(x, what)
        with torch.no_grad():
            mine = model(given)
            assert_as_exact(mine, own(given), wide(given.double()))
            assert torch.equal(mine.view(torch.int32), model(given).view(torch.int32))
    with torch.no_grad():
        given = odd(filled(x, "normal")) if x.shape[-2] > 100 else filled(x, "normal")
        for parameter in model.parameters():
            if parameter.shape[-1] > 9:  # else it is an epilogue's, one for each row
                parameter.view(-1, parameter.shape[-1])[5, 9] = float("inf")
        own.load_state_dict(model.state_dict())
        wide.load_state_dict(model.state_dict())
        assert_as_exact(model(given), own(given), wide(given.double()))


BY_TILES = [
    *(("many batches", tile, way) for tile in GPU_TILES for way in ("split", "converted")),
    *((name, GPU_TILES[i % 3], "split") for i, name in enumerate([*ON_GPU, *LONG])),
    *((name, tile, "converted") for name in LONG for tile in GPU_TILES[:2]),
    *((name, GPU_TILES[1], "converted") for name in ("x turned", "very long", "lies across")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "tile", "way"), BY_TILES, ids=str)
def test_modules_on_a_gpu_are_as_exact_as_pytorch(name, tile, way, tmp_path):
    check_on_gpu(tmp_path, name, tile, way)
