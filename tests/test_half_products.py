"""Products of float32 as three of float16: which calls they are, and on a GPU how exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_any_module import derive

from tuner.capture.by_hand import written_by_hand
from tuner.capture.nests.index_space import NothingToGenerate
from tuner.capture.tasks.half_products import HALVES_TEMPLATE, PRODUCTS, WGMMA_TEMPLATE
from tuner.config.run_config import load_config
from tuner.errors import InputError, NothingToGainError
from tuner.evaluate.modules import fused, module_of
from tuner.kernel.binding import bind
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device
from tuner.planning.planning import plan

TEXT = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        return {forward}


def get_inputs():
    return [torch.randn({shape})]


def get_init_inputs():
    return []
"""
OF_MATRICES = [name for name, products in PRODUCTS.items() if not products.convolves]
WAYS = [
    {"template": HALVES_TEMPLATE},
    *({"template": WGMMA_TEMPLATE, "product_weight": way} for way in ("split", "converted")),
]
LAYER = "self.a = nn.Linear(264, 260)"
MODULES = {
    "alone": (LAYER, "self.a(x)", "200, 264"),
    "epilogue": (LAYER, "F.gelu(self.a(x)) * 2", "200, 264"),
    "chain": (
        LAYER + "; self.b = nn.Linear(260, 264, bias=False)",
        "x + self.b(torch.relu(self.a(x)))",
        "200, 264",
    ),
    "in_rows": (LAYER, "torch.softmax(self.a(x), -1)", "5, 40, 264"),
    "turned": ("self.w = nn.Parameter(torch.randn(264, 260))", "x @ self.w", "200, 264"),
    "a_view": ("self.w = nn.Parameter(torch.randn(260, 264))", "x @ self.w.T", "200, 264"),
}
NOT_TAKEN = {
    "few rows": (LAYER, "F.gelu(self.a(x))", "100, 264"),
    "short sums": ("self.a = nn.Linear(136, 260)", "F.gelu(self.a(x))", "200, 136"),
    "float64": (LAYER + "; self.double()", "F.gelu(self.a(x))", "200, 264, dtype=torch.float64"),
}


def made_of(folder: Path, module: tuple[str, str, str]):
    init, forward, shape = module
    return derive(folder, "product", TEXT.format(init=init, forward=forward, shape=shape))


@pytest.mark.parametrize("template", OF_MATRICES)
@pytest.mark.parametrize("name", ["alone", "chain", "a_view"])
def test_large_products_have_templates_of_their_own(name, template, tmp_path):
    _, made = made_of(tmp_path, MODULES[name])
    family = load_family(made.name, [made.folder])
    candidate = family.render({"template": template}, known_device("H200").facts())
    steps = [step.function for step in candidate.plan.steps]
    ours = [s for s in steps if s == PRODUCTS[template].function or s.endswith("behind_product")]
    assert len(ours) == (2 if name == "chain" else 1)
    assert not {"linear", "matmul"} & set(steps)


def test_short_sums_of_a_large_result_are_made_by_the_kernel_that_writes_it_once(tmp_path):
    layer = ("self.a = nn.Linear(64, 300)", "self.a(x)", "256, 64")
    _, made = made_of(tmp_path, layer)
    family = load_family(made.name, [made.folder])
    assert WGMMA_TEMPLATE in family.templates and HALVES_TEMPLATE not in family.templates
    (step,) = family.render({"template": WGMMA_TEMPLATE}, known_device("H200").facts()).plan.steps
    assert step.function == PRODUCTS[WGMMA_TEMPLATE].function
    with pytest.raises(NothingToGenerate):  # of a smaller one
        made_of(tmp_path, (*layer[:2], "255, 64"))


@pytest.mark.parametrize(
    ("gpu", "facts", "reason"),
    [
        ("H200", {}, ""),
        ("H200", {"device.has_nvcc": False}, "nvcc"),
        ("A100", {}, "sm_90a"),
    ],
)
def test_the_kernel_of_ours_is_for_hopper_with_nvcc(gpu, facts, reason, tmp_path):
    _, made = made_of(tmp_path, MODULES["alone"])
    family = load_family(made.name, [made.folder])
    rules = family.constraints([WGMMA_TEMPLATE], {})
    known = {**known_device(gpu).facts(), **facts, "template": WGMMA_TEMPLATE}
    broken = [rule.why for rule in rules if not rule.expression.evaluate(known)]
    assert len(broken) == bool(reason) and reason in "".join(broken)


@pytest.mark.parametrize(
    ("module", "default", "ways"),
    [
        (MODULES["alone"], "converted", {"split", "converted"}),
        (
            ("self.a = nn.Linear(264, 200)", "self.a(x)", "260, 264"),
            "split",
            {"split", "converted"},
        ),
        (MODULES["chain"], "converted", {"split", "converted"}),  # of whose columns there are more
        (MODULES["turned"], "converted", {"split", "converted"}),
        (
            ("self.w = nn.Parameter(torch.randn(264, 262))", "x @ self.w", "200, 264"),
            "split",
            {"split"},
        ),
        (("self.a = nn.Linear(266, 260)", "self.a(x)", "200, 266"), "split", {"split"}),
    ],
)
def test_the_weight_is_converted_where_it_is_the_larger_and_can_be(
    module, default, ways, tmp_path
):
    _, made = made_of(tmp_path, module)
    family = load_family(made.name, [made.folder])
    facts = known_device("H200").facts()
    source = family.render({"template": WGMMA_TEMPLATE}, facts).source
    assert ("CONVERTED_WEIGHTS = []" in source) is (default == "split")
    both = ("split", "converted")
    rules = family.constraints([WGMMA_TEMPLATE], {"product_weight": both})
    for way in both:
        known = {**facts, "template": WGMMA_TEMPLATE, "product_weight": way}
        broken = [rule.why for rule in rules if not rule.expression.evaluate(known)]
        assert len(broken) == (way not in ways), way
        assert all("multiples of 16 bytes" in why for why in broken)


def test_a_default_that_depends_on_the_batch_leaves_a_text_for_any(tmp_path):
    """Of 259 rows the weight, of 260, is the larger operand; of the next prime it is not."""
    init, forward, _ = MODULES["alone"]
    _, made = made_of(tmp_path, (init, forward, "259, 264"))
    family = load_family(made.name, [made.folder])
    plan = family.render({"template": WGMMA_TEMPLATE}, known_device("H200").facts()).plan
    assert plan.arguments[0].shape[0] == "batch"


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_where_halves_would_not_pay_or_be_exact_pytorchs_own_are_taken(name, tmp_path):
    _, made = made_of(tmp_path, NOT_TAKEN[name])
    assert not PRODUCTS.keys() & load_family(made.name, [made.folder]).templates.keys()


def test_on_a_cpu_there_is_nothing_to_generate_for_products_alone(tmp_path):
    _, made = made_of(tmp_path, MODULES["alone"])
    with pytest.raises(NothingToGainError, match=r"nothing to generate: .* on a GPU alone"):
        plan(load_config(made.config, {"device": "cpu"}))


def test_a_module_of_products_alone_has_no_task_to_write_by_hand(tmp_path):
    _, made = made_of(tmp_path, MODULES["alone"])
    with pytest.raises(InputError, match="products alone"):
        written_by_hand(made, tmp_path / "mine.py", None, tmp_path / "by_hand")


def filled(x: torch.Tensor, what: str) -> torch.Tensor:
    """Values of the same shape: what makes sums of halves go wrong."""
    generator = torch.Generator(x.device).manual_seed(len(what))
    normal = torch.randn(x.shape, generator=generator, device=x.device)
    return {
        "normal": normal,
        "positive": normal.abs(),
        "offset": normal + 1000,
        "tiny": normal * 1e-38,
        "huge": normal * 1e35,
        "one large column": torch.cat([normal[..., :1] * 100, normal[..., 1:]], -1),
    }[what]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "what", ["normal", "positive", "offset", "tiny", "huge", "one large column"]
)
@pytest.mark.parametrize("name", ["alone", "turned", "in_rows", "chain"])
@pytest.mark.parametrize("how", WAYS, ids=lambda how: "-".join(how.values()))
def test_halves_are_as_exact_as_float32(how, name, what, tmp_path):
    problem, made = made_of(tmp_path, MODULES[name])
    model, wide, x = on_gpu(problem, made, tmp_path, **how)
    reference = problem.make_model(0).cuda()
    for m in (model, reference, wide):
        for i, p in enumerate(m.parameters()):
            p.data.copy_(
                filled(torch.empty_like(p, dtype=torch.float32), "positive" if i else "normal")
            )
    x = filled(x, what)
    with torch.no_grad():
        mine, own, exact = model(x), reference(x), wide(x.double())
    finite = own.isfinite() & exact.isfinite()
    assert torch.equal(mine.isnan(), own.isnan()) and torch.equal(mine.isinf(), own.isinf())
    scale = exact[finite].abs().max()
    error, limit = ((y.double() - exact)[finite].abs().max() for y in (mine, own))
    assert error <= 2 * limit + 2.0**-23 * scale, (float(error / scale), float(limit / scale))


@pytest.mark.gpu
@pytest.mark.parametrize("how", WAYS, ids=lambda how: "-".join(how.values()))
def test_sums_of_rows_beyond_float32_are_no_infinities(how, tmp_path):
    """Denormal inputs by weights whose sums overflow, of which the products are usual numbers."""
    problem, made = made_of(tmp_path, MODULES["alone"])
    model, wide, x = on_gpu(problem, made, tmp_path, **how)
    with torch.no_grad():
        for m in (model, wide):
            m.a.weight.copy_(torch.full_like(m.a.weight, 2.0**125))
            m.a.bias.zero_()
        x = torch.rand_like(x) * 2.0**-127
        mine, exact = model(x), wide(x.double())
    torch.testing.assert_close(mine.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("how", WAYS, ids=lambda how: "-".join(how.values()))
def test_rows_and_columns_of_too_wide_a_range_are_computed_in_float32(how, tmp_path):
    """A large number of one operand meets usual ones of the other, which float16 would lose."""
    problem, made = made_of(tmp_path, MODULES["turned"])
    model, wide, x = on_gpu(problem, made, tmp_path, **how)
    with torch.no_grad():
        x[50, 3], x[50, 4], x[51, 9] = 2e37, -1.6e37, -2e37
        model.w[100, 7], model.w[101, 8] = 2e37, -1e37
        wide.w.copy_(model.w)
        mine, exact = model(x), wide(x.double())
    fits = exact.abs() < 3.4e38  # 2e37 squared does not
    assert torch.equal(mine.isfinite(), fits)
    largest = torch.where(fits, exact, 0).abs().amax(1, keepdim=True)
    assert ((mine.double() - exact).abs()[fits] <= (1e-6 * largest).expand_as(exact)[fits]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("how", WAYS, ids=lambda how: "-".join(how.values()))
def test_products_of_whole_numbers_are_exact(how, tmp_path):
    """So that a kink behind them is where PyTorch has it."""
    problem, made = made_of(tmp_path, MODULES["alone"])
    model, wide, x = on_gpu(problem, made, tmp_path, **how)
    whole = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        for weight in (model.a.weight, model.a.bias):
            weight.copy_(torch.randint(-3, 4, weight.shape, generator=whole, device="cuda"))
        x = torch.randint(0, 9, x.shape, generator=whole, device="cuda").float()
        wide.load_state_dict(model.state_dict())
        assert torch.equal(model(x).double(), wide(x.double()))


@pytest.mark.gpu
@pytest.mark.parametrize("how", WAYS, ids=lambda how: "-".join(how.values()))
def test_infinities_and_nan_go_where_pytorchs_products_let_them(how, tmp_path):
    problem, made = made_of(tmp_path, MODULES["alone"])
    model, _, x = on_gpu(problem, made, tmp_path, **how)
    reference = problem.make_model(0).cuda()
    reference.load_state_dict(model.state_dict())
    x[3, 5], x[100, 7], x[150, 0] = float("inf"), -float("inf"), float("nan")
    for m in (model, reference):
        m.a.weight.data[17, 9] = float("inf")
    with torch.no_grad():
        mine, own = model(x), reference(x)
    assert torch.equal(mine.isnan(), own.isnan())
    assert torch.equal(mine.isposinf(), own.isposinf())
    assert torch.equal(mine.isneginf(), own.isneginf())
    torch.testing.assert_close(mine, own, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(128, 64, 2), (192, 32, 1), (256, 64, 2)])
@pytest.mark.parametrize(
    "sizes", [(128, 128, 256), (333, 1025, 520), (1000, 129, 257), (300, 260, 64), (131, 133, 32)]
)
def test_wgmma_products_of_any_size_in_any_tile(tile, sizes, tmp_path):
    rows, columns, depth = sizes
    layer = f"self.a = nn.Linear({depth}, {columns})"
    problem, made = made_of(tmp_path, (layer, "self.a(x)", f"{rows}, {depth}"))
    names = ("product_n", "product_k", "product_cluster")
    more = {**dict(zip(names, tile, strict=True)), "product_weight": "split"}
    model, wide, x = on_gpu(problem, made, tmp_path, WGMMA_TEMPLATE, **more)
    own = problem.make_model(0).cuda()
    own.load_state_dict(model.state_dict())
    with torch.no_grad():
        mine, theirs, exact = model(x), own(x), wide(x.double())
    error, limit = ((y.double() - exact).abs().max() for y in (mine, theirs))
    assert error <= 2 * limit + 2.0**-23 * exact.abs().max()


def on_gpu(problem, made, folder: Path, template: str, **more: int | str):
    """The module by float16 halves, the same in float64, and its input."""
    family = load_family(made.name, [made.folder])
    candidate = family.render({"template": template, **more}, known_device("H200").facts())
    path = folder / "source.py"
    path.write_text(candidate.source)
    module = module_of(family.model_new)
    module |= {**fused(bind(candidate.plan, "triton", path)), "fused_device": "cuda"}
    model = module["ModelNew"]().cuda()
    wide = problem.make_model(0).double().cuda()
    wide.load_state_dict(model.state_dict())
    return model, wide, problem.make_inputs(1)[0].cuda()
