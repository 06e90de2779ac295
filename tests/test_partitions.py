"""Ways to cut a module in tasks: images channels last, work done again, writes apart, in place."""

from pathlib import Path

import pytest
import torch
from cpu_machine import FACTS, GPP, compiled
from test_any_module import F, answers, assert_as_exact, derive, in_float64, text_of
from test_matching import TEXT
from test_steps import Taken, assert_gradients_are_as_exact

from tuner.capture.capture import capture
from tuner.capture.nests.nest import Nest
from tuner.capture.tasks.half_products import PRODUCTS, WGMMA_TEMPLATE
from tuner.capture.tasks.partitions import partitions_of, traffic_bytes, worth_a_search
from tuner.capture.tasks.stages import Partition, stages_of
from tuner.config.run_config import load_config
from tuner.evaluate.modules import fused, module_of
from tuner.kernel.binding import bind
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device
from tuner.planning.planning import plan
from tuner.problem.reference import load_problem

needs_gpp = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")

# A forward, what the constructor makes, and the inputs.
MODULES: dict[str, tuple[str, str, str]] = {
    # Groups of channels: their moments, then one pass that writes what is returned.
    "groups": (
        f"self.n({F}.gelu(self.c(x))) * y",
        "self.c, self.n = nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12)",
        "torch.randn(2, 3, 9, 11), torch.randn(2, 12, 7, 9)",
    ),
    # Pooling before and behind, of volumes; channels that are reduced; a convolution of another.
    "pools": (
        f"torch.softmax({F}.max_pool3d(self.d(self.c({F}.avg_pool3d(x, 2))), 2, 1, 1), 1) * 3.0",
        "self.c = nn.ConvTranspose3d(2, 5, 3, stride=2, bias=False); self.d = nn.Conv3d(5, 18, 2)",
        "torch.randn(2, 2, 6, 4, 8)",
    ),
    # Channels as rows, over pixels and images; a result that is channels last and one that is not.
    "batches": (
        "(self.d(torch.relu(self.n(self.c(x)))), self.c(x).mean((2, 3)))",
        "self.c, self.d = nn.Conv2d(3, 20, 3, padding='same'), nn.Conv2d(20, 4, 1); "
        "self.n = nn.BatchNorm2d(20)",
        "torch.randn(3, 3, 5, 7)",
    ),
    # What is the same in each line of an image: its rows lie beside each other in none.
    "lines": (
        "torch.relu(self.c(x)) * y + x", "self.c = nn.Conv2d(24, 24, 3, padding=1)",
        "torch.randn(5, 24, 9, 20), torch.randn(24, 1, 20)",
    ),
    # What stands before windows that do not overlap is computed in them.
    "windows": (
        f"{F}.max_pool2d(torch.tanh(self.n({F}.silu(self.c(x)))), 2) + 1.0",
        "self.c, self.n = nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12)",
        "torch.randn(2, 3, 9, 11)",
    ),
    # Parts of tensors: of two halves one gates the other; halves that change places, beside sines
    # of few numbers; what is joined of three; neighbours, which are reduced behind that.
    "gated": (
        f"(lambda a, b: {F}.silu(a) * b)(*x.chunk(2, -1))", "pass", "torch.randn(3, 7, 74)",
    ),
    "turned": (
        "x * y.cos() + torch.cat((-x[..., 19:], x[..., :19]), -1) * (y * 2.0).sin()", "pass",
        "torch.randn(16, 5, 4, 38), torch.randn(5, 1, 38)",
    ),
    "joined": (
        "torch.cat((x[:, ::2], y * 2.0, x[:, 1::2]), 1).tanh() + z", "pass",
        "torch.randn(3, 6, 5, 7), torch.randn(3, 4, 5, 7), torch.randn(3, 10, 5, 7)",
    ),
    # Permuted: heads of attention, and images cut into patches.
    "heads": (
        "(lambda q, k, v: q * k.sigmoid() + v)"
        "(*x.view(x.shape[0], 6, 3, 2, 20).permute(2, 0, 3, 1, 4))", "pass",
        "torch.randn(3, 6, 120)",
    ),
    "patches": (
        f"{F}.layer_norm(x.view(x.shape[0], 3, 2, 4, 3, 5).permute(0, 2, 4, 3, 5, 1)"
        ".reshape(-1, 6, 60), (60,)) + y", "pass", "torch.randn(3, 3, 8, 15), torch.randn(6, 60)",
    ),
    "neighbours": (
        "((x[:, 1:] - x[:, :-1]).abs().mean(1), x[:, 2, None] * x[:, 5:9])", "pass",
        "torch.randn(6, 131)",
    ),
}  # fmt: skip
# Of each module a partition that a search would try.
TRIED = [
    ("groups", "channels_last"), ("pools", "channels_last"), ("batches", "channels_last"),
    ("windows", "recomputed"), ("windows", "channels_last_recomputed"), ("groups", "apart"),
    ("gated", "in_place"), ("turned", "in_place"), ("joined", "in_place"),
    ("neighbours", "in_place"), ("heads", "in_place"), ("patches", "in_place"),
    ("lines", "channels_last"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.setattr("test_any_module.MODULES", MODULES)


def as_channels_last(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Images the same in that order of memory, in which PyTorch's convolutions round otherwise."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    usual = torch.contiguous_format
    return [x.contiguous(memory_format=orders.get(x.dim(), usual)) for x in inputs]


def assert_right(problem, model, inputs, device: str) -> None:
    inputs = [x.to(device) for x in inputs]
    reference, wide = problem.make_model(0).to(device), problem.make_model(0).double().to(device)
    wide.load_state_dict(reference.state_dict())
    model.load_state_dict(reference.state_dict())
    with torch.no_grad():
        mine, own = answers(model(*inputs)), answers(reference(*as_channels_last(inputs)))
        exact = answers(wide(*in_float64(inputs)))
    assert_as_exact(mine, own, exact)
    assert all(value.is_contiguous() for value in mine)


@needs_gpp
@pytest.mark.parametrize(("name", "partition"), TRIED)
def test_the_loops_of_a_partition_compute_what_the_module_does(name, partition, tmp_path):
    problem, made = derive(tmp_path, name, text_of(name))
    family = load_family(made.name, [made.folder])
    candidate = family.render({"template": f"nest_{partition}", "unroll": 1}, FACTS)
    operator = bind(candidate.plan, "cpp", compiled(candidate))
    calls = []
    module = module_of(family.model_new)
    module |= {**fused(operator), "fused_op": lambda *args: calls.append(args) or operator(*args)}
    batches = [problem.make_inputs(1)]
    if name != "batches":  # whose means are over a batch
        batches.append(problem.make_inputs(2, batch=5))
    for inputs in batches:
        assert_right(problem, module["ModelNew"](), inputs, "cpu")
    assert len(calls) == len(batches), "a call took the reference's way"


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(32, 32), (8, 16)])
@pytest.mark.parametrize(("name", "partition"), TRIED)
def test_the_triton_blocks_of_a_partition_compute_what_the_module_does(
    name, partition, tile, tmp_path
):
    problem, made = derive(tmp_path, name, text_of(name))
    family = load_family(made.name, [made.folder])
    template = f"nest_{partition}_triton"
    known = family.templates[template].parameters
    params = {"tile_rows": tile[0], "tile_columns": tile[1], "num_warps": 4, "block_rows": 1}
    params = {p: value for p, value in params.items() if p in known}
    candidate = family.render({"template": template, **params}, known_device("H200").facts())
    path = tmp_path / "source.py"
    path.write_text(candidate.source)
    module = module_of(family.model_new)
    module |= {**fused(bind(candidate.plan, "triton", path)), "fused_device": "cuda"}
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert_right(problem, module["ModelNew"]().cuda(), problem.make_inputs(1), "cuda")


@needs_gpp
@pytest.mark.parametrize(
    ("name", "partition"), [("groups", "channels_last"), ("kept", "channels_last_recomputed")]
)
def test_a_step_of_training_is_right_beside_any_partition(name, partition, tmp_path, monkeypatch):
    """What a step keeps lies as ever, however images lie in the forward that a search times."""
    pooled = (
        f"{F}.avg_pool2d(torch.tanh(self.c({F}.silu(x))), 2) * 2.0",
        "self.c = nn.Conv2d(3, 12, 3)", "torch.randn(2, 3, 10, 12)",
    )  # fmt: skip
    monkeypatch.setitem(MODULES, "kept", pooled)
    taken = Taken(tmp_path, name, text_of(name), template=f"nest_{partition}")
    assert_gradients_are_as_exact(taken, name)
    with torch.no_grad():
        for batch in (None, 5):
            inputs = taken.inputs(1, batch)
            exact = answers(taken.wide(*in_float64(inputs)))
            assert_as_exact(answers(taken.mine(*inputs)), answers(taken.own(*inputs)), exact)


MIXED = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.l = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(512, 200)

    def forward(self, x):
        return torch.softmax(self.l(torch.relu(self.c(x) * 2.0).flatten(1)), -1)


def get_inputs():
    return [torch.randn(160, 3, 8, 8)]


def get_init_inputs():
    return []
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of an operator of images, products by halves and a second nest."""
    _, made = derive(tmp_path_factory.mktemp("mixed"), "mixed", MIXED)
    return made.config


def test_images_and_products_by_halves_and_a_second_nest_are_searched_together(mixed):
    planned = plan(load_config(mixed, {"device": "cuda"}), may_assume=True)
    by_template = {str(p["template"]): set(p) - {"template"} for p in planned.defaults}
    assert {"nest_triton", "nest_channels_last_triton", WGMMA_TEMPLATE} <= {*by_template}
    assert "product_n" in by_template[WGMMA_TEMPLATE]
    assert {"block_rows", "block_rows_2"} <= by_template["nest_triton"]
    last = by_template["nest_channels_last_triton"]
    assert {"tile_rows", "tile_columns"} <= last and "product_n" not in last


def test_a_search_starts_from_the_defaults_also_where_no_list_of_all_is_held(mixed, monkeypatch):
    monkeypatch.setattr("tuner.space.search_space.MAX_LISTED", 1000)
    monkeypatch.setattr("tuner.planning.starting.MAX_LOOKED_AT", 10)
    planned = plan(load_config(mixed, {"device": "cuda"}), may_assume=True)
    assert not planned.space.is_listed
    for params in planned.defaults:
        template = planned.family.templates[str(params["template"])]
        assert template.filled({}, planned.facts).items() >= params.items() - {
            ("template", params["template"])
        }


def test_what_is_cheap_is_computed_again_and_nothing_large_lies_between(tmp_path):
    (tmp_path / "groups.py").write_text(text_of("groups"))
    graph = capture(load_problem(tmp_path / "groups.py"))
    stages = stages_of(graph, Partition(is_channels_last=True))
    copy, convolution, moments, rest = stages.tasks
    assert convolution.reads[0] in stages.images and convolution.name in stages.images
    assert isinstance(copy, Nest) and copy.is_transposed
    assert "gelu" in moments.computed & rest.computed
    assert rest.is_transposed and not moments.is_transposed
    large = [name for name, shape in stages.between.items() if len(shape) == 4 and shape[2] > 1]
    assert large == [copy.outputs[0].name]


def test_pointwise_work_before_windows_is_not_stored(tmp_path):
    (tmp_path / "windows.py").write_text(text_of("windows"))
    graph = capture(load_problem(tmp_path / "windows.py"))
    default, stages = stages_of(graph), stages_of(graph, Partition(is_recomputed=True))
    assert "tanh" in default.between and "tanh" not in stages.between
    assert traffic_bytes(graph, stages) < traffic_bytes(graph, default)
    assert worth_a_search(graph, {"": default, **partitions_of(graph, default)}) == [
        "",
        "recomputed",
        "channels_last_recomputed",
    ]


def test_windows_that_overlap_read_what_is_stored(tmp_path, monkeypatch):
    forward = f"{F}.max_pool2d(torch.tanh(x), 3, 2)"
    monkeypatch.setitem(MODULES, "overlapping", (forward, "", "torch.randn(2, 3, 9, 9)"))
    (tmp_path / "overlapping.py").write_text(text_of("overlapping"))
    graph = capture(load_problem(tmp_path / "overlapping.py"))
    assert "tanh" in stages_of(graph, Partition(is_recomputed=True)).between


def test_work_that_would_be_computed_again_for_ever_has_no_such_template(tmp_path):
    text = TEXT.format(
        init="self.l = nn.Linear(40, 30)", names="x", inputs="torch.randn(16, 40)",
        forward="return self.l(x).mean(1) * x[:, 0].exp()",
    )  # fmt: skip
    assert_gradients_are_as_exact(Taken(tmp_path, "again", text), "again")


def test_a_scan_of_an_image_has_no_template_that_is_channels_last(tmp_path, monkeypatch):
    scanned = ("self.c(x).cumsum(1)", "self.c = nn.Conv2d(3, 4, 3)", "torch.randn(2, 3, 9, 9)")
    monkeypatch.setitem(MODULES, "scanned", scanned)
    _, made = derive(tmp_path, "scanned", text_of("scanned"))
    found = {*load_family(made.name, [made.folder]).templates} - PRODUCTS.keys()
    assert found == {"nest", "nest_triton"}
