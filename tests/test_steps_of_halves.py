"""Steps of training whose products the kernel of ours makes: their plans, and their gradients.

Without a GPU the gradients are computed in Triton's interpreter, with the halves that are given
to the CUDA kernel multiplied in float64 instead.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from interpreted import interpreted
from test_any_module import assert_as_exact, in_float64
from test_half_products import LAYER, TEXT
from test_steps import Taken, derive_with_steps, gradients

from tuner.capture.tasks.half_products import HALVES_TEMPLATE, WGMMA_TEMPLATE
from tuner.kernel.binding import BoundOp, bind
from tuner.machine.datasheets import known_device

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
OURS = "product_by_wgmma"
BACK = LAYER + "; self.b = nn.Linear(260, 264, bias=False)"
WEIGHT = "self.w = nn.Parameter(torch.randn(264, 260) / 16)"
MODULES = {
    "norm": (LAYER + "; self.n = nn.LayerNorm(260)", "self.n(F.gelu(self.a(x)))", "300, 264"),
    "chain": (BACK, "x + self.b(torch.relu(self.a(x)))", "300, 264"),
    "in_rows": (LAYER, "torch.softmax(self.a(x), -1)", "5, 60, 264"),
    "turned": (WEIGHT, "torch.tanh(x @ self.w)", "300, 264"),
    "a_view": (WEIGHT.replace("264, 260", "260, 264"), "torch.relu(x @ self.w.T)", "300, 264"),
    "no nest": (LAYER.replace(")", ", bias=False)"), "self.a(x) + 1", "300, 264"),
    "alone": (LAYER, "self.a(x)", "300, 264"),
    "alone in rows": (LAYER.replace(")", ", bias=False)"), "self.a(x)", "5, 60, 264"),
    "two alone": (BACK, "self.b(self.a(x))", "300, 264"),
}
# How many products each call makes; the extra ones are of what is kept, if that is more, of all
# gradients, and of those of weights alone.
NUM_PRODUCTS = {
    "norm": (1, {"kept": 1, "gradients": 2, "weight_gradients": 1}),
    "chain": (2, {"kept": 2, "gradients": 4, "weight_gradients": 3}),
    "in_rows": (1, {"gradients": 2, "weight_gradients": 1}),
    "turned": (1, {"gradients": 2, "weight_gradients": 1}),
    "a_view": (1, {"gradients": 2, "weight_gradients": 1}),
    "no nest": (1, {"gradients": 2, "weight_gradients": 1}),
    "alone": (1, {"gradients": 2, "weight_gradients": 1}),
    "alone in rows": (1, {"gradients": 2, "weight_gradients": 1}),
    "two alone": (2, {"kept": 2, "gradients": 4, "weight_gradients": 3}),
}


def text_of(module: tuple[str, str, str]) -> str:
    init, forward, shape = module
    return TEXT.format(init=init, forward=forward, shape=shape)


def plan_of(folder: Path, module: tuple[str, str, str], template: str = WGMMA_TEMPLATE, **params):
    _, family = derive_with_steps(folder, "step", text_of(module))
    facts = known_device("H200").facts()
    return family.render({"template": template, **params}, facts).plan


def functions(plan) -> list[str]:
    return [step.function for step in plan.steps]


@pytest.mark.parametrize("name", MODULES)
def test_all_products_of_a_step_are_by_the_kernel_of_ours(name, tmp_path):
    plan = plan_of(tmp_path, MODULES[name])
    num, further = NUM_PRODUCTS[name]
    assert {*further} == {*plan.extra}
    for call, count in ((plan, num), *((plan.extra[n], count) for n, count in further.items())):
        ours = [f for f in functions(call) if f == OURS or f.endswith("_behind_product")]
        assert len(ours) == count
        # What is transposed is turned by the product: nothing is copied.
        assert not {"linear", "matmul", "mm", "permute"} & {*functions(call)}
        assert call.arguments[0].shape[0] == "batch"  # so any number of rows


@pytest.mark.parametrize("how", ["fused", "apart"])
def test_what_is_kept_has_the_epilogues_of_the_forward(how, tmp_path):
    plan = plan_of(tmp_path, MODULES["chain"], product_epilogue=how)
    for call in (plan, plan.extra["kept"]):
        is_fused = [f.endswith("_behind_product") for f in functions(call)]
        assert is_fused == ([True] * 2 if how == "fused" else [False] * 4)
    # Blocks of gradients are not searched, and neither are epilogues there.
    assert not any(f.endswith("_behind_product") for f in functions(plan.extra["gradients"]))


def test_a_step_keeps_a_product_as_it_is_made_with_its_bias_and_its_moments(tmp_path):
    module = (LAYER + "; self.n = nn.BatchNorm1d(260)", "self.n(self.a(x))", "704, 264")
    kept = plan_of(tmp_path, module).extra["kept"]
    (step,) = kept.steps
    assert step.function.endswith("_behind_product") and step.args[2] == "a_bias"
    large = [t.name for t in kept.workspace if t.shape[0] == "batch"]
    assert large == [] and step.args[3] in {output.name for output in kept.outputs}


def test_halves_of_pytorchs_products_leave_a_step_to_the_reference(tmp_path):
    """Gradients by those are not exact enough on whole numbers."""
    plan = plan_of(tmp_path, MODULES["chain"], HALVES_TEMPLATE)
    assert {*plan.extra.values()} == {None}


def test_steps_of_pytorchs_products_alone_are_left_to_the_reference(tmp_path):
    plan = plan_of(tmp_path, MODULES["no nest"], "nest_triton")
    assert {*plan.extra.values()} == {None}


def test_small_products_of_a_step_are_pytorchs(tmp_path):
    """Of 40 columns one way, and of 40 rows the other."""
    init = LAYER + "; self.b = nn.Linear(260, 40, bias=False)"
    plan = plan_of(tmp_path, (init, "self.b(torch.relu(self.a(x)))", "300, 264"))
    steps = functions(plan.extra["gradients"])
    assert steps.count(OURS) == 3 and steps.count("matmul") == 1
    (permuted,) = (s for s in plan.extra["gradients"].steps if s.function == "permute")
    assert permuted.gives  # which PyTorch's own product reads


def test_a_sum_over_the_batch_may_be_short_where_it_was_tuned(tmp_path):
    """At the batch that is captured, 254, it is, and at the next one, 257, it is not."""
    init, forward, _ = MODULES["norm"]
    plan = plan_of(tmp_path, (init, forward, "254, 264"))
    assert functions(plan.extra["gradients"]).count(OURS) == 2
    assert plan.arguments[0].shape[0] == "batch"


# ---- numbers ----------------------------------------------------------------------------------


def multiplied(function, *args) -> None:
    """Multiply halves in float64 as the CUDA kernel does; what is repaired stays."""
    x_high, x_low, high, low, x_unit, x_mean, unit, sums, bias, out, *numbers = args
    assert function == "product_of_rows" and [*out.shape] == numbers[:2]
    halves = [t.double() for t in (x_high, x_low, high, low)]
    made = halves[1] @ halves[2].t() + halves[0] @ halves[3].t()
    made = halves[0] @ halves[2].t() + made / 2048
    made += x_mean.double()[:, None] * sums.double()
    made *= x_unit.double()[:, None] * unit.double()
    made += 0 if bias is None else bias.double()
    out.copy_(torch.where(made.isnan(), out, made.float()))


class Libdevice:
    """CUDA's functions by PyTorch's, which Triton's interpreter lacks."""

    def __getattr__(self, name: str):
        function = getattr(torch, name)

        def computed(x):
            made = function(torch.from_numpy(x.handle.data.copy())).numpy()
            return type(x)(type(x.handle)(made, x.handle.dtype), x.type)

        return computed


class Emulated(Taken):
    """A module whose step is computed on the CPU, with `multiplied` in place of CUDA C++."""

    def _bound(self, folder: Path, params: dict[str, object]) -> BoundOp:
        facts = known_device("H200").facts()
        candidate = self.family.render({"template": WGMMA_TEMPLATE, **params}, facts)
        text = candidate.source.replace("cuda_code = CudaCode(", "not_compiled = (")
        assert text != candidate.source
        source = folder / "source.py"
        source.write_text(text)
        operator = bind(candidate.plan, "triton", source)
        names = operator.globals
        self.num_products = 0

        def counted(*args: object) -> None:
            self.num_products += 1
            multiplied(*args)

        plain = names["product_and_more_by_wgmma"]

        def with_epilogue(*args, has_moments=False):
            """Compute the epilogue by the kernel that it has besides; moments are not found."""
            apart = args[11] if len(args) > 11 else None
            made = args[3] if apart is None else torch.empty_like(args[3])
            plain(*args[:3], made, *args[4:9])
            if apart is not None:
                apart(made)

        self.names = names
        names |= {"cuda_code": counted, "libdevice": Libdevice()}
        names["product_and_more_by_wgmma"] = with_epilogue
        return operator


def check_gradients(taken: Taken, name: str, batches: tuple[int | None, ...] = (None, 1)) -> None:
    """Compare a step with float64 and PyTorch's own, and what is kept for its backward."""
    for number, batch in enumerate(batches, 1):
        inputs = taken.inputs(3, batch)
        mine, num_bytes = with_saved_bytes(taken.mine, inputs)
        own, most = with_saved_bytes(taken.own, inputs)
        assert_as_exact(mine, own, gradients(taken.wide, in_float64(inputs)))
        assert taken.num_calls == number, "a step took the reference's way"
        assert num_bytes <= most
    # Weights alone, as in training on data.
    (x,) = taken.inputs(3)
    for model, given in ((taken.mine, x), (taken.own, x), (taken.wide, x.double())):
        model.zero_grad()
        model(given).sin().sum().backward()
    assert taken.num_calls == len(batches)
    found = ([p.grad for p in m.parameters()] for m in (taken.mine, taken.own, taken.wide))
    assert_as_exact(*found)


def with_saved_bytes(model, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Return gradients, and the bytes of what lies between forward and backward.

    Inputs and weights are the caller's. A step holds inputs in any case, for gradients that are
    differentiated; where something packs what is saved, it saves them as well.
    """
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not (tensor.is_leaf and tensor.requires_grad):
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = gradients(model, inputs)
    return found, sum(saved.values())


def check_second_gradients(taken: Taken) -> None:
    """Gradients that are differentiated are the reference's."""
    (x,) = taken.inputs(3)
    found = []
    for model in (taken.mine, taken.own):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(leaf).sin().sum(), leaf, create_graph=True)
        assert taken.num_calls == len(found)
        found += torch.autograd.grad(first.square().sum(), leaf)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def check_large_samples(taken: Taken) -> None:
    """Behind a normalisation samples of large numbers have small gradients, in a weight's sum."""
    (x,) = taken.inputs(3)
    later = len(x) - len(x) // 2
    x[-later:] += torch.linspace(100, 3000, later, device=x.device)[:, None]
    found = []
    for model in (taken.mine, taken.own, taken.wide):
        leaf = x.to(next(model.parameters())).requires_grad_()
        y = model(leaf)
        of_features = torch.linspace(-2, 2, y.shape[-1]).exp().to(y)
        total = (y * of_features).sum()
        found.append(torch.autograd.grad(total, [leaf, *model.parameters()]))
    assert taken.num_calls == 1
    assert_as_exact(*found)


def emulated(folder: str, name: str) -> Emulated:
    return Emulated(Path(folder), "step", text_of(MODULES[name]))


def check_emulated(folder: str, name: str) -> None:
    taken = emulated(folder, name)
    check_gradients(taken, name)
    further = NUM_PRODUCTS[name][1]
    assert taken.num_products >= further.get("kept", 1) + further["gradients"]


def check_emulated_of_large_samples(folder: str, name: str) -> None:
    check_large_samples(emulated(folder, name))


def check_softmax(folder: str, name: str) -> None:
    """Rows as behind a softmax become halves; of wider ones it is said that they may not."""
    split = emulated(folder, name).names["product_split"]
    for least, is_odd in ((2.0**-28, False), (2.0**-32, True)):
        rows = torch.rand(130, 272).add_(1).mul_(least)
        rows[torch.arange(130), torch.arange(130) * 2] = -1.0
        for given in (rows, rows.t().contiguous().t()):  # along memory, and across
            odd = torch.zeros(1, dtype=torch.int32)
            made, _, unit, _ = split(given, 272, True, odd, False)
            assert bool(odd) is is_odd
            if not is_odd:
                high, low = made[:, 272:].double(), made[:, :272].double() / 2048
                found = (high + low) * unit.double()[:, None]
                assert ((found - given).abs() <= 2.0**-18 * given.abs()).all()


def check_wide(folder: str, name: str) -> None:
    """Wide rows are computed in float32 where what they lose shows beside their largest term."""
    names = emulated(folder, name).names
    rows = torch.rand(130, 272).add_(1).mul_(2.0**-34)
    places = torch.arange(130), torch.arange(130) * 2
    rows[places] = -1.0
    rows[:50] = rows[:50].sign() * 2.0**-20  # of which none is wide
    rows[60, 5], rows[61] = torch.inf, 0
    others = torch.randn(140, 272)
    balanced = others.clone()
    balanced[:, places[1]] *= 2.0**-25  # so that the others' terms can be seen
    as_scaled = others * 2.0 ** torch.linspace(-60, 60, 140)[:, None]
    for weight, is_repaired in ((others, False), (balanced, True), (as_scaled, False)):
        for x in (rows, rows.t().contiguous().t()):
            for is_turned in (False, True):  # wide is the weight
                one, other = (weight, x) if is_turned else (x, weight)
                odd = torch.zeros(1, dtype=torch.int32)
                _, _, x_unit, _ = names["product_split"](one, 272, True, odd, False)
                _, _, unit, _ = names["product_split"](other, 272, False, odd)
                out = torch.full((len(one), len(other)), 7.0)
                names["product_repair"](one, other, None, x_unit, unit, odd, out)
                wide, fine = (unit, x_unit) if is_turned else (x_unit, unit)
                wants = torch.zeros(130, dtype=torch.bool)
                wants[60] = True
                wants[50:] |= torch.tensor(is_repaired)
                wants[61] = False
                assert torch.equal(wide.isnan(), wants) and (wide[~wants] > 0).all()
                assert (fine > 0).all()
                out = out.t() if is_turned else out
                assert (out[~wants] == 7).all()
                wants[60] = False
                exact = x[wants].double() @ weight.double().t()
                sizes = x[wants].double().abs() @ weight.double().t().abs()
                assert ((out[wants] - exact).abs() <= 2.0**-20 * sizes).all()
    # A number that meets small ones alone, and is larger than what all the largest ones meet.
    others[7, 1] = 2.0**60
    odd = torch.zeros(1, dtype=torch.int32)
    _, _, x_unit, _ = names["product_split"](rows, 272, True, odd, False)
    _, _, unit, _ = names["product_split"](others, 272, False, odd)
    names["product_repair"](rows, others, None, x_unit, unit, odd, torch.zeros(130, 140))
    assert torch.equal(
        x_unit.isnan().nonzero()[:, 0], torch.cat([torch.arange(50, 61), torch.arange(62, 130)])
    )


def wide_gradients(taken: Taken) -> None:
    """As behind a softmax that is sure; and of features whose units their weights balance."""
    (x,) = taken.inputs(1)
    generator = torch.Generator().manual_seed(1)
    of_numbers = 2.0 ** -(60 * torch.rand(len(x), 260, generator=generator))
    of_features = 2.0 ** -(60 * torch.rand(260, generator=generator)).to(x)
    models = taken.mine, taken.own, taken.wide
    for is_balanced in (False, True):
        given = torch.randn(len(x), 260, generator=generator) if is_balanced else of_numbers
        given = given.to(x) * of_features if is_balanced else given.to(x)
        is_lost = given.abs() < 2.0**-30 * given.abs().amax(1, keepdim=True)
        assert (is_lost.sum(1) > 260 / 8).all()
        found = []
        for model in models:
            if is_balanced:
                model.a.weight.data.div_(of_features.to(model.a.weight)[:, None])
            leaf = x.to(model.a.weight).requires_grad_()
            y = model(leaf)
            found.append(torch.autograd.grad(y, [leaf, *model.parameters()], given.to(y)))
        assert_as_exact(*found)
    assert taken.num_calls == 2


def check_wide_gradients(folder: str, name: str) -> None:
    wide_gradients(emulated(folder, name))


def check_emulated_twice(folder: str, name: str) -> None:
    check_second_gradients(emulated(folder, name))


@needs_triton
@pytest.mark.parametrize(
    ("check", "name"),
    [
        *(("check_emulated", name) for name in ("norm", "chain", "turned", "alone")),
        ("check_emulated_twice", "alone"),
        ("check_softmax", "alone"),
        ("check_wide", "alone"),
        ("check_wide_gradients", "alone"),
        ("check_emulated_of_large_samples", "norm"),
    ],
)
def test_interpreted_gradients_are_as_exact_as_pytorchs(check, name, tmp_path):
    interpreted("test_steps_of_halves", check, str(tmp_path), name)


# ---- on a GPU ---------------------------------------------------------------------------------

ON_GPU = {
    **MODULES,
    "large": (
        "self.a = nn.Linear(1024, 2048); self.b = nn.Linear(2048, 1032, bias=False)",
        "self.b(F.gelu(self.a(x)))",
        "4000, 1024",
    ),
}
TILES = [(256, 64, 1), (128, 32, 2), (192, 64, 2)]


def on_gpu(folder: Path, name: str, **params) -> Taken:
    return Taken(folder, "step", text_of(ON_GPU[name]), "cuda", template=WGMMA_TEMPLATE, **params)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["fused", "apart"])
@pytest.mark.parametrize("name", ON_GPU)
def test_gradients_on_a_gpu_are_as_exact_as_pytorchs(name, how, tmp_path):
    check_gradients(on_gpu(tmp_path, name, product_epilogue=how), name, (None, 1, 129, 257))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_gradients_are_exact_in_any_tile(tile, tmp_path):
    names = ("product_n", "product_k", "product_cluster")
    taken = on_gpu(tmp_path, "large", **dict(zip(names, tile, strict=True)))
    check_gradients(taken, "large", (None, 300))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["norm", "alone"])
def test_second_gradients_on_a_gpu_are_the_references(name, tmp_path):
    check_second_gradients(on_gpu(tmp_path, name))


@pytest.mark.gpu
def test_gradients_of_large_samples_on_a_gpu_are_as_exact_as_pytorchs(tmp_path):
    check_large_samples(on_gpu(tmp_path, "norm"))


@pytest.mark.gpu
def test_gradients_of_whole_numbers_are_exact_also_at_kinks(tmp_path):
    """All sums are below 2^24; many numbers are zero before relu, and so PyTorch's mask counts."""
    taken = on_gpu(tmp_path, "chain")
    whole = torch.Generator("cuda").manual_seed(1)

    def drawn(like: torch.Tensor, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, like.shape, generator=whole, device="cuda").float()

    (x,) = taken.inputs(1)
    x = drawn(x, 0, 3)
    with torch.no_grad():
        for p in taken.mine.parameters():
            p.copy_(drawn(p, -1, 2))
        taken.mine.a.weight[:, 8:] = 0  # so that sums are often zero
    found = []
    taken.wide.load_state_dict(taken.mine.state_dict())
    for model in (taken.mine, taken.wide):
        leaf = x.to(next(model.parameters())).requires_grad_()
        y = model(leaf)
        grad = torch.randint(-2, 3, y.shape, generator=torch.Generator().manual_seed(2)).to(y)
        found.append([y, *torch.autograd.grad(y, [leaf, *model.parameters()], grad)])
    assert taken.num_calls == 1
    for got, exact in zip(*found, strict=True):
        assert torch.equal(got.double(), exact)


@pytest.mark.gpu
def test_gradients_behind_a_softmax_are_as_exact_as_pytorchs(tmp_path):
    """One class of each row is nearly sure; all others have 2^-21 to 2^-28 of its gradient."""
    taken = on_gpu(tmp_path, "large")
    (x,) = taken.inputs(1)
    generator = torch.Generator("cuda").manual_seed(3)
    found = []
    for model in (taken.mine, taken.own, taken.wide):
        leaf = x.to(next(model.parameters())).requires_grad_()
        y = model(leaf)
        generator.manual_seed(3)
        incoming = (
            torch.rand(y.shape, generator=generator, device="cuda").mul_(-7).sub_(21).exp2_()
        )
        incoming[torch.arange(len(y)), torch.arange(len(y)) % y.shape[1]] = -1.0
        found.append(torch.autograd.grad(y, [leaf, *model.parameters()], incoming.to(y)))
    assert taken.num_calls == 1
    assert_as_exact(*found)


@pytest.mark.gpu
def test_gradients_of_a_wide_range_are_as_exact_as_pytorchs(tmp_path):
    """As behind a softmax: most of a column's gradients are far below its largest."""
    taken = on_gpu(tmp_path, "chain")
    (x,) = taken.inputs(1)
    scale = 2.0 ** torch.linspace(0, -60, len(x), device="cuda")[:, None]
    found = []
    for model in (taken.mine, taken.own, taken.wide):
        leaf = x.to(next(model.parameters())).requires_grad_()
        y = model(leaf)
        found.append(torch.autograd.grad(y, [leaf, *model.parameters()], scale.to(y) + 0 * y))
    assert taken.num_calls == 1
    assert_as_exact(*found)


@pytest.mark.gpu
def test_gradients_of_wide_rows_on_a_gpu_are_as_exact_as_pytorchs(tmp_path):
    wide_gradients(on_gpu(tmp_path, "alone"))
