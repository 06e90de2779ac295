"""Convolutions of float32 by float16 halves: which calls they are, and how exact."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreted import interpreted
from test_any_module import derive
from test_half_products import TEXT

from tuner.capture.tasks.convolutions import (
    CONVOLUTION_TEMPLATE,
    CONVOLUTION_WGMMA_TEMPLATE,
    CONVOLUTIONS,
    PLANES_TEMPLATE,
    ROUNDED_TEMPLATE,
    ROUNDED_WGMMA_TEMPLATE,
)
from tuner.capture.tasks.half_products import PRODUCTS
from tuner.config.run_config import load_config
from tuner.errors import NothingToGainError
from tuner.evaluate.modules import fused, module_of
from tuner.kernel.binding import bind
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device
from tuner.planning.planning import plan
from tuner.trial import to_json

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

MODULES = {
    "alone": ("self.a = nn.Conv2d(5, 20, 3)", "self.a(x)", "3, 5, 9, 11"),
    "strided": (
        "self.a = nn.Conv2d(8, 20, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2)); "
        "self.scale = nn.Parameter(torch.rand(20, 1, 1)); "
        "self.pixels = nn.Parameter(torch.rand(6, 12))",
        "torch.relu(self.a(x) * self.scale + self.pixels) - 0.25",
        "2, 8, 12, 16",
    ),
    "transposed": (
        "self.a = nn.ConvTranspose2d(20, 9, 3, stride=2, padding=1, output_padding=1)",
        "F.leaky_relu(self.a(x) + x.amax((1, 2, 3), keepdim=True), 0.1)",
        "2, 20, 6, 7",
    ),
    "volume": ("self.a = nn.Conv3d(6, 12, 3, padding=1)", "self.a(x) * 2", "2, 6, 4, 5, 6"),
    "transposed volume": (
        "self.a = nn.ConvTranspose3d(4, 12, (3, 5, 2), stride=(2, 2, 3), padding=(1, 2, 0))",
        "self.a(x).abs()",
        "2, 4, 3, 4, 5",
    ),
    "line": ("self.a = nn.Conv1d(6, 12, 5, stride=3, padding=2)", "self.a(x)", "2, 6, 40"),
    "dilated": (
        "self.a = nn.ConvTranspose1d(6, 10, 5, dilation=3); self.b = nn.Conv1d(10, 17, 7)",
        "self.b(torch.relu(self.a(x)))",
        "2, 6, 30",
    ),
    "fewer places than a stride": (
        "self.a = nn.ConvTranspose2d(4, 20, 2, stride=3)", "self.a(x)", "2, 4, 3, 4"
    ),
    "planes": (
        "self.a = nn.Conv2d(6, 12, (3, 5), padding=(1, 2), stride=(1, 2), groups=6); "
        "self.scale = nn.Parameter(torch.rand(12, 1, 1))",
        "torch.relu(self.a(x) * self.scale) - 0.25",
        "2, 6, 12, 16",
    ),
    "plane of a line": (
        "self.a = nn.Conv1d(6, 6, 5, dilation=2, groups=6)", "self.a(x)", "3, 6, 40"
    ),
}  # fmt: skip
OF_PLANES = {"planes", "plane of a line"}
# Of several tiles in each direction and more, for a GPU.
LARGE = {
    "rows": (
        "self.a = nn.Conv2d(24, 70, 3, padding=1)", "torch.relu(self.a(x)) + 1", "5, 24, 70, 150"
    ),
    "odd rows": ("self.a = nn.Conv2d(8, 64, 3)", "torch.relu(self.a(x))", "9, 8, 131, 131"),
    "deep": ("self.a = nn.Conv2d(320, 40, 3, padding=1)", "self.a(x) * 2", "3, 320, 24, 40"),
    "one place": ("self.a = nn.Conv2d(100, 130, 1)", "torch.relu(self.a(x))", "4, 100, 50, 64"),
    "pairs": (
        "self.a = nn.ConvTranspose2d(40, 70, 3, stride=2, padding=1, output_padding=1); "
        "self.pixels = nn.Parameter(torch.rand(70, 140, 200))",
        "torch.relu(self.a(x)) + self.pixels",
        "3, 40, 70, 100",
    ),
    "odd pairs": (
        "self.a = nn.ConvTranspose3d(16, 24, 3, stride=2, padding=1)",
        "torch.relu(self.a(x))",
        "2, 16, 9, 17, 40",
    ),
    "pairs of a line": (
        "self.a = nn.ConvTranspose1d(24, 32, 4, stride=2, padding=1)",
        "self.a(x) * 2",
        "6, 24, 999",
    ),
}  # fmt: skip
NOT_TAKEN = {
    "groups": ("self.a = nn.Conv2d(8, 16, 3, groups=2)", "F.gelu(self.a(x))", "2, 8, 9, 9"),
    "float64": (
        "self.a = nn.Conv2d(8, 16, 3); self.double()",
        "F.gelu(self.a(x))",
        "2, 8, 9, 9, dtype=torch.float64",
    ),
    "scattered places": (
        "self.a = nn.ConvTranspose2d(8, 16, 3, stride=2, dilation=2)",
        "F.gelu(self.a(x))",
        "2, 8, 9, 9",
    ),
    "no batch": ("self.a = nn.Conv2d(8, 16, 3)", "F.gelu(self.a(x))", "8, 9, 9"),
}
SMALL = {
    "image_pixels": 64, "image_channels": 16, "image_depth": 32, "image_warps": 4,
    "image_stages": 2,
}  # fmt: skip
SMALL_PLANES = {"plane_pixels": 256, "plane_warps": 2}
HOWS = ({}, {"product_epilogue": "apart"})


def made_of(folder: Path, module: tuple[str, str, str]):
    init, forward, shape = module
    folder.mkdir(exist_ok=True)
    return derive(folder, "image", TEXT.format(init=init, forward=forward, shape=shape))


def steps_of(folder: Path, name: str, **params: object) -> list[str]:
    _, made = made_of(folder, MODULES[name])
    family = load_family(made.name, [made.folder])
    candidate = family.render({"template": template_of(name), **params}, facts())
    return [step.function for step in candidate.plan.steps]


def template_of(name: str) -> str:
    return PLANES_TEMPLATE if name in OF_PLANES else CONVOLUTION_TEMPLATE


def facts():
    return known_device("H200").facts()


@pytest.mark.parametrize("name", MODULES)
def test_convolutions_have_templates_of_their_own(name, tmp_path):
    steps = steps_of(tmp_path, name)
    assert not [step for step in steps if step.startswith("conv") and step[-1] == "d"]
    count = 2 if name == "dilated" else 1
    ours = [s for s in steps if "behind_product" in s or s == PRODUCTS[template_of(name)].function]
    assert len(ours) == count


def test_pointwise_work_behind_a_convolution_is_its_epilogue_or_a_kernel_of_its_own(tmp_path):
    assert len(steps_of(tmp_path / "one", "strided")) == 1
    assert len(steps_of(tmp_path / "two", "strided", product_epilogue="apart")) == 2


@pytest.mark.parametrize("template", CONVOLUTIONS)
def test_no_text_has_words_that_kernelbench_takes_for_a_bypass(template, tmp_path):
    """Its static checker refuses `try`, `except` and `pass` outside comments."""
    name = "planes" if template == PLANES_TEMPLATE else "transposed"
    _, made = made_of(tmp_path, MODULES[name])
    source = load_family(made.name, [made.folder]).render({"template": template}, facts()).source
    text = re.sub(r"(#|//).*", "", source)
    assert not re.search(r"\btry\s*:|\bexcept\s*:|\bexcept\s+\w+|\bpass\b", text)


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_the_kernel_does_not_make_is_pytorchs(name, tmp_path):
    _, made = made_of(tmp_path, NOT_TAKEN[name])
    templates = load_family(made.name, [made.folder]).templates
    assert not PRODUCTS.keys() & templates.keys()


def test_on_a_cpu_there_is_nothing_to_generate_for_a_convolution_alone(tmp_path):
    _, made = made_of(tmp_path, MODULES["alone"])
    with pytest.raises(NothingToGainError, match=r"nothing to generate: .* on a GPU alone"):
        plan(load_config(made.config, {"device": "cpu"}))


def test_no_time_is_refused_for_what_need_not_be_moved(tmp_path):
    """A kernel with its epilogue moves inputs and results alone: a time's floor is of these."""
    problem, made = made_of(tmp_path, MODULES["strided"])
    family = load_family(made.name, [made.folder])
    x, model = problem.make_inputs(1)[0], problem.make_model(0)
    tensors = [x, *model.parameters(), model(x)]
    assert family.bytes.evaluate(family.op.sizes) == sum(4 * t.numel() for t in tensors)


# ---- how exact ------------------------------------------------------------------------------


def model_of(folder: Path, name: str, device: str, template: str = "", **params: object):
    """The module by halves, the reference, the same in float64, and an input."""
    problem, made = made_of(folder, (MODULES | LARGE)[name])
    family = load_family(made.name, [made.folder])
    how = {k: v for k, v in params.items() if k != "product_epilogue" or has_epilogue(name)}
    candidate = family.render({"template": template or template_of(name), **how}, facts())
    source = folder / "source.py"
    source.write_text(candidate.source)
    (folder / "plan.json").write_text(to_json(candidate.plan))
    (folder / "sizes.json").write_text(json.dumps(dict(family.op.sizes)))
    module = module_of(family.model_new)
    module |= {**fused(bind(candidate.plan, "triton", source)), "fused_device": device}
    model, own = module["ModelNew"]().to(device), problem.make_model(0).to(device)
    wide = problem.make_model(0).double().to(device)
    model.load_state_dict(own.state_dict())
    return model, own, wide, problem.make_inputs(1)[0].to(device)


def has_epilogue(name: str) -> bool:
    return (MODULES | LARGE)[name][1] != "self.a(x)"


def check(folder: str, names: list[str], device: str) -> None:
    """Compare with PyTorch; with TRITON_INTERPRET set, on the CPU."""
    for i, name in enumerate(names):
        path = Path(folder) / str(i)
        tile = SMALL_PLANES if name in OF_PLANES else SMALL
        model, own, wide, x = model_of(path, name, device, **tile, **HOWS[i % 2])
        # Of one sample, whose stride says nothing.
        one = x[:1].clone()
        one.flatten()[:7] *= 1e-9
        one = one.as_strided(one.shape, (7, *one.stride()[1:]))
        with torch.no_grad():
            for given in (x, one):
                assert_as_exact(model(given), own(given), wide(given.double()))


def check_poisoned_weight(folder: str) -> None:
    """A NaN in a filter reaches the pixels that its place of the filter makes, and no others."""
    model, own, wide, x = model_of(Path(folder), "transposed", "cpu", **SMALL, **HOWS[0])
    for module in (model, own, wide):
        with torch.no_grad():
            module.a.weight[3, 4, 1, 1] = float("nan")
    with torch.no_grad():
        exact = wide(x.double())
        assert 0 < exact.isnan().sum() < exact[:, 4].numel() / 3
        assert_as_exact(model(x), own(x), exact)


def check_without_memory(folder: str) -> None:
    """Where there is no memory for halves, a call is PyTorch's own."""
    model, own, _, x = model_of(Path(folder), "strided", "cpu", **SMALL)
    empty = torch.empty

    def scarce(*sizes, dtype=None, **more):
        if dtype == torch.float16:
            raise torch.OutOfMemoryError("no memory for halves")
        return empty(*sizes, dtype=dtype, **more)

    torch.empty = scarce
    with torch.no_grad():
        torch.testing.assert_close(model(x), own(x))


def assert_as_exact(mine: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> None:
    assert mine.shape == own.shape
    assert torch.equal(mine.isnan(), own.isnan()) and torch.equal(mine.isinf(), own.isinf())
    finite = own.isfinite() & exact.isfinite()
    scale = exact[finite].abs().max()
    error, limit = ((y.double() - exact)[finite].abs().max() for y in (mine, own))
    assert error <= 2 * limit + 2.0**-22 * scale, (float(error / scale), float(limit / scale))


@needs_triton
@pytest.mark.parametrize("names", [[*MODULES][:4], [*MODULES][4:]], ids=["first", "second"])
def test_interpreted_convolutions_are_as_exact_as_pytorch(names, tmp_path):
    interpreted("test_half_convolutions", "check", str(tmp_path), names, "cpu")


@needs_triton
def test_interpreted_transposed_convolutions_keep_a_nan_of_a_filter_where_it_belongs(tmp_path):
    interpreted("test_half_convolutions", "check_poisoned_weight", str(tmp_path))


@needs_triton
def test_without_memory_for_halves_a_call_is_pytorchs(tmp_path):
    interpreted("test_half_convolutions", "check_without_memory", str(tmp_path))


@needs_triton
@pytest.mark.parametrize(
    ("name", "template", "kernel"),
    [
        ("transposed", CONVOLUTION_TEMPLATE, "convolution_kernel"),
        ("transposed", ROUNDED_TEMPLATE, "convolution_kernel"),
        ("planes", PLANES_TEMPLATE, "planes_kernel"),
    ],
)
def test_a_convolution_compiles_ahead_for_a_hopper_gpu(name, template, kernel, tmp_path):
    model_of(tmp_path, name, "cpu", template)
    ran = subprocess.run(
        [sys.executable, "-m", "tuner.kernel.triton_build", str(tmp_path / "source.py"),
         str(tmp_path / "plan.json"), str(tmp_path), "--arch", "90",
         "--sizes", (tmp_path / "sizes.json").read_text()],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)
    assert not found["error"] and not found["note"]
    assert kernel in {each["name"] for each in found["kernels"]}


def filled(x: torch.Tensor, what: str) -> torch.Tensor:
    """Values of the same shape: what makes sums of halves go wrong."""
    generator = torch.Generator(x.device).manual_seed(len(what))
    normal = torch.randn(x.shape, generator=generator, device=x.device)
    wide = torch.exp(20 * torch.randn(x.shape, generator=generator, device=x.device))
    flat = normal.flatten().clone()
    flat[3], flat[7], flat[-1] = float("inf"), float("nan"), -float("inf")
    return {
        "normal": normal,
        "positive": normal.abs(),
        "offset": normal + 1000,
        "tiny": normal * 1e-38,
        "huge": normal * 1e35,
        "wide": normal * wide,
        "infinite": flat.view_as(x),
    }[what]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "what", ["normal", "positive", "offset", "tiny", "huge", "wide", "infinite"]
)
@pytest.mark.parametrize("template", ["", CONVOLUTION_WGMMA_TEMPLATE])
@pytest.mark.parametrize("name", MODULES)
def test_convolutions_of_ours_are_as_exact_as_float32(name, template, what, tmp_path, monkeypatch):
    if template and name in OF_PLANES:
        pytest.skip("no products")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    how = HOWS[len(what) % 2]
    model, own, wide, x = model_of(tmp_path, name, "cuda", template, **how)
    x = filled(x, what)
    with torch.no_grad():
        assert_as_exact(model(x), own(x), wide(x.double()))


@pytest.mark.gpu
def test_weights_of_too_wide_a_range_are_computed_in_float32(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, own, wide, x = model_of(tmp_path, "strided", "cuda")
    with torch.no_grad():
        for m in (model, own, wide):
            m.a.weight[3].copy_(filled(m.a.weight[3].float(), "wide"))
        assert_as_exact(model(x), own(x), wide(x.double()))


@pytest.mark.gpu
@pytest.mark.parametrize("is_tf32", [False, True])
@pytest.mark.parametrize("template", [ROUNDED_TEMPLATE, ROUNDED_WGMMA_TEMPLATE])
@pytest.mark.parametrize("name", ["strided", "volume", "transposed"])
def test_one_product_is_as_exact_as_tf32_and_three_where_that_is_off(
    name, template, is_tf32, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", is_tf32)
    model, _, wide, x = model_of(tmp_path, name, "cuda", template)
    with torch.no_grad():
        mine, exact = model(x), wide(x.double())
    error = float((mine.double() - exact).abs().max() / exact.abs().max())
    assert 1e-5 < error < 2e-3 if is_tf32 else error < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("pixels", [64, 128, 256])
@pytest.mark.parametrize("channels", [16, 32, 64])
@pytest.mark.parametrize("depth", [32, 64])
def test_convolutions_in_any_tile(pixels, channels, depth, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    tile = {"image_pixels": pixels, "image_channels": channels, "image_depth": depth}
    tile |= {"image_warps": 8 if pixels * channels > 8192 else 4, "image_stages": 2}
    for i, name in enumerate(["dilated", "transposed", "volume"]):
        model, own, wide, x = model_of(tmp_path / str(i), name, "cuda", **tile)
        with torch.no_grad():
            assert_as_exact(model(x), own(x), wide(x.double()))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile",
    [(2, 1, 64, 2), (2, 2, 64, 1), (3, 1, 64, 1), (4, 1, 32, 2), (2, 1, 128, 1), (4, 2, 16, 1)],
)
@pytest.mark.parametrize("name", LARGE)
def test_hopper_convolutions_in_any_tile(name, tile, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    names = ("image_consumers", "image_groups", "image_part", "image_blocks")
    how = dict(zip(names, tile, strict=True))
    model, own, wide, x = model_of(tmp_path, name, "cuda", CONVOLUTION_WGMMA_TEMPLATE, **how)
    with torch.no_grad():
        exact = wide(x.double())
        for _ in range(3):
            assert_as_exact(model(x), own(x), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(2, 1, 64, 2), (2, 2, 128, 1), (4, 2, 32, 1)])
@pytest.mark.parametrize("name", LARGE)
def test_one_product_in_any_tile_is_as_exact_as_tf32(name, tile, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    names = ("image_consumers", "image_groups", "image_part", "image_blocks")
    how = dict(zip(names, tile, strict=True))
    model, _, wide, x = model_of(tmp_path, name, "cuda", ROUNDED_WGMMA_TEMPLATE, **how)
    with torch.no_grad():
        mine, exact = model(x), wide(x.double())
    assert float((mine.double() - exact).abs().max() / exact.abs().max()) < 2e-3
