"""From a module's file to an operator of its own: real captures, a real compiler, whole runs."""

from __future__ import annotations

import ast
import inspect
import math
from pathlib import Path

import pytest
import torch
from command_line import tune
from cpu_machine import FACTS, FEW_PASSES, GPP, compiled

from tuner.capture.capture import capture, with_another_batch
from tuner.capture.derive import derived
from tuner.capture.graph.settings import made_from, settings_of
from tuner.capture.nests.index_space import NothingToGenerate, NotOneNest
from tuner.capture.tasks.step_records import Captured
from tuner.check.judge.chance import modes_of
from tuner.check.probes.probe import Modes
from tuner.check.probes.probes import thorough_probes
from tuner.config.run_config import load_config
from tuner.errors import InputError, ProblemError
from tuner.evaluate.modules import fused, imported, module_of
from tuner.export.certificate import read_certificate
from tuner.kernel.binding import bind
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device
from tuner.planning.deriving import derive_config
from tuner.planning.planning import plan
from tuner.problem.draws import widened
from tuner.problem.reference import load_problem
from tuner.review.gain import ModuleRecord
from tuner.review.summary import summary
from tuner.run import open_run
from tuner.trial import from_json

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")

F = "torch.nn.functional"
X = "torch.randn(37, 100)"
# A forward, what the constructor makes, and the inputs.
MODULES: dict[str, tuple[str, str, str]] = {
    "renorm": ("torch.renorm(x, 2, 0, 1.0) * 2", "", "torch.randn(20, 40)"),
    "rms_norm_gate": (
        f"x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w * {F}.silu(y)",
        "self.w = nn.Parameter(torch.randn(100))", f"{X}, {X}",
    ),
    "softmax": ("torch.softmax(x, -1)", "", X),
    "sums_of_a_transpose": ("x / x.transpose(1, 2).square().sum(2).unsqueeze(1)", "",
                            "torch.randn(4, 8, 6)"),
    "log_softmax": (f"{F}.log_softmax(x * 3.0, dim=1)", "", X),
    "masked_mean": (f"(lambda m: ({F}.layer_norm(x, (12,)) * m).sum(1) / m.sum(1))(y[..., None])",
                    "", "torch.randn(5, 7, 12), torch.ones(5, 7)"),
    "layer_norm": ("self.n(x)", "self.n = nn.LayerNorm(100)", "torch.randn(5, 7, 100)"),
    "bias_gelu": (f"{F}.gelu(x + self.b)", "self.b = nn.Parameter(torch.randn(100))",
                  "torch.randn(3, 11, 100)"),
    "channels": (f"{F}.relu(x * self.c[:, None, None].exp())",
                 "self.c = nn.Parameter(torch.randn(6))", "torch.randn(4, 6, 9, 11)"),
    "sum_of_rows": ("(x * y).sum(-1)", "", f"{X}, {X}"),
    "min_max": ("(x - x.amin(-1, True)) / (x.amax(-1, True) - x.amin(-1, True))", "", X),
    "as_many_columns_as_rows": ("torch.softmax(x * y, -1) + z", "",
                                "torch.randn(37, 37), torch.randn(37), torch.randn(37, 1)"),
    "where": ("torch.where(x > y, x.tanh(), 0.5 * y)", "", f"{X}, {X}"),
    "channels_norm": ("x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)", "",
                      "torch.randn(3, 33, 5, 7)"),
    "softmax_of_middle": ("torch.softmax(x, 1) * self.w[:, None]",
                          "self.w = nn.Parameter(torch.randn(21))", "torch.randn(4, 21, 50)"),
    "largest_of_middle": ("x.amax(1)", "", "torch.randn(4, 130, 9)"),
    "two_results": ("(x.mean(-1, keepdim=True), x - x.mean(-1, keepdim=True))", "", X),
    "sum_of_both_ends": ("x.sum((0, 2))", "", "torch.randn(5, 4, 70)"),
    "means_beside_rows": ("x - x.mean(-1)", "", "torch.randn(33, 33)"),  # two nests
    "batch_norm": ("self.n(x)", "self.n = nn.BatchNorm2d(6)", "torch.randn(4, 6, 5, 7)"),
    "batch_norm_of_rows": ("self.n(x)", "self.n = nn.BatchNorm1d(21)", X.replace("100", "21")),
    "batch_norm_in_sequence": ("self.n(x)", "self.n = nn.Sequential("
                               "nn.BatchNorm3d(3, momentum=0.3), nn.ReLU())",
                               "torch.randn(3, 3, 2, 5, 40)"),
    "instance_norm": ("self.n(x)", "self.n = nn.InstanceNorm2d(6, affine=True)",
                      "torch.randn(4, 6, 9, 11)"),
    "group_norm": ("self.n(x)", "self.n = nn.GroupNorm(3, 12)", "torch.randn(4, 12, 9, 5) + 10"),
    # x * s + (b - m * s) with the same factor twice: its mean is taken off once.
    "square_about_mean": ("x * x + (-x.mean(-1, keepdim=True) * x + y)", "", f"{X}, {X}"),
    "frobenius": ("x / torch.norm(x, p='fro')", "", "torch.randn(3, 5, 1000)"),
    "mse": (f"{F}.mse_loss(x, y)", "", f"{X}, {X}"),
    "huber": (f"{F}.smooth_l1_loss(x, y) + {F}.huber_loss(x, y, delta=0.5)", "", f"{X}, {X}"),
    "kl_div": (f"{F}.kl_div(torch.log(torch.softmax(x, -1)), torch.softmax(y, -1), "
               "reduction='batchmean')", "", f"{X}, {X}"),
    "hinge": ("torch.mean(torch.clamp(1 - x * y, min=0))", "", f"{X}, torch.randn(100)"),
    "cosine": (f"(1 - {F}.cosine_similarity(x, y, dim=1)).mean()", "", f"{X}, {X}"),
    "triplet": (f"{F}.triplet_margin_loss(x, y, x + y)", "", f"{X}, {X}"),
    "cross_entropy": (f"{F}.cross_entropy(x, y)", "", f"{X}, torch.randint(0, 100, (37,))"),
    "nll_of_images": (f"{F}.nll_loss({F}.log_softmax(x, 1), y, reduction='none')", "",
                      "torch.randn(3, 7, 5, 6), torch.randint(0, 7, (3, 5, 6))"),
    "everything": ("(x.sum(), x.mean(), x.amax(), x.var())", "", "torch.randn(3, 5, 1000)"),
    "long_rows": ("self.n(x)", "self.n = nn.LayerNorm((3, 30000))", "torch.randn(2, 3, 30000)"),
    "long_softmax": ("torch.softmax(x, -1)", "", "torch.randn(2, 70001)"),
    "long_mean": ("(x * y).mean()", "", "torch.randn(300, 301), torch.randn(300, 301)"),
    "argmax": ("(x.argmax(-1), x.argmin(-1))", "", X),
    "argmax_of_middle": ("x.argmax(1)", "", "torch.randn(3, 33, 21)"),
    "argmin_of_middle": ("x.argmin(1, keepdim=True)", "", "torch.randn(3, 33, 21)"),
    "max_with_indices": ("tuple(x.max(-1)) + tuple(x.min(1))", "", X),
    "masks": ("(x > y, torch.where(z, x, y), (x * z).sum(-1), x.masked_fill(z, -1.0))", "",
              f"{X}, {X}, torch.rand(37, 100) > 0.3"),
    "any_and_all": ("((x > 2).any(-1), (x > -2).all(-1), (x > 4).any())", "", X),
    "whole_numbers": ("(x * (y == 3), torch.where(y > 4, x, 0.0), x + y)", "",
                      f"{X}, torch.randint(0, 9, (37, 100))"),
    "linear_gelu_residual": (f"{F}.gelu(self.l(x)) + y", "self.l = nn.Linear(100, 37)",
                             f"{X}, torch.randn(37, 37)"),
    "rolled": ("torch.roll(torch.tanh(x), (3, -5), (1, 2)) * y", "",
               "torch.randn(37, 9, 11), torch.randn(37, 9, 11)"),
    "table": ("torch.tanh(self.t[self.i.view(-1)].view(10, 10) + x)",
              "self.t = nn.Parameter(torch.randn(7)); "
              "self.register_buffer('i', torch.arange(100).view(4, 25) % 7)",
              "torch.randn(37, 10, 10)"),
    "hidden_state": ("torch.tanh(self.r(x)[1]) * 2.0", "self.r = nn.GRU(9, 12)",
                     "torch.randn(5, 37, 9)"),
    "output_and_state": ("(torch.tanh(self.r(x)[0]), self.r(x)[1][1] * 2.0)",
                         "self.r = nn.LSTM(9, 12, batch_first=True)", "torch.randn(37, 5, 9)"),
    "linear_relu_linear": ("self.m(torch.relu(self.l(x * 2.0))) * 0.5",
                           "self.l, self.m = nn.Linear(100, 64), nn.Linear(64, 30, bias=False)",
                           "torch.randn(3, 7, 100)"),
    "convolution_relu_scale": ("torch.relu(self.c(x) + self.b) * 3.0",
                               "self.c = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False); "
                               "self.b = nn.Parameter(torch.randn(8, 1, 1))",
                               "torch.randn(2, 3, 17, 19)"),
    "transposed_convolution_in_3d": (
        f"torch.sigmoid({F}.max_pool3d(self.c(x), 2) - x.amax())",
        "self.c = nn.ConvTranspose3d(2, 5, 3, stride=2, output_padding=1)",
        "torch.randn(2, 2, 4, 5, 6)",
    ),
    "pooled_batch_norm": (
        f"({F}.avg_pool2d(torch.relu(self.n(self.c(x))), 2).flatten(1) * 2.0, x.exp())",
        "self.c, self.n = nn.Conv2d(3, 4, 3, padding='same'), nn.BatchNorm2d(4)",
        "torch.randn(2, 3, 8, 8)",
    ),
    "attention": (
        f"{F}.scaled_dot_product_attention(x, x.tanh(), y, scale=0.25) + "
        "torch.softmax(torch.matmul(x, y.transpose(-2, -1)), -1) @ y",
        "", "torch.randn(2, 3, 9, 16), torch.randn(2, 3, 9, 16)",
    ),
    "moved_and_joined": (
        "torch.cat([self.l(x)[:, 1:].tanh(), x.flip(1)], 1).cumsum(1) * 0.5",
        "self.l = nn.Linear(100, 8)", X,
    ),
    "pooled_to_one": (f"{F}.adaptive_avg_pool2d({F}.gelu(self.c(x)), 1).sum(1).sum(-1)",
                      "self.c = nn.Conv2d(3, 4, 3)", "torch.randn(2, 3, 8, 8)"),
    "number": ("x * y + torch.relu(x) / y", "", f"{X}, 3.14159"),
    "number_of_product": ("torch.tanh(self.l(x) * y) * y", "self.l = nn.Linear(100, 9)",
                          f"{X}, 0.1"),
    "max_pool": (f"{F}.max_pool2d(x, 3, 2, 1)", "", "torch.randn(4, 6, 17, 19)"),
    # 8 places a window: with 27 g++ took 7 s for each choice of parameters.
    "max_pool_in_3d": (f"{F}.max_pool3d(x, 2, stride=2, padding=1, dilation=2).exp()", "",
                       "torch.randn(2, 3, 11, 9, 12)"),
    "max_pool_to_its_end": (f"{F}.max_pool1d(x, 4, 3, ceil_mode=True) * y", "",
                            "torch.randn(3, 5, 36), torch.randn(5, 12)"),
    "avg_pool": (f"{F}.avg_pool1d(x, 8, 1, 4) - {F}.avg_pool1d(x, 2, 1, 1)", "",
                 "torch.randn(3, 5, 70)"),
    "avg_pool_in_3d": (f"{F}.avg_pool3d(self.c * x, (3, 2, 1), 1).mean((2, 3, 4))",
                       "self.c = nn.Parameter(torch.randn(3, 1, 1, 1))",
                       "torch.randn(2, 3, 6, 7, 8)"),
    "pools_between": (
        f"(torch.relu({F}.max_pool1d(self.l(x).unsqueeze(1), 2).squeeze(1)) * 0.5).sum(-1)",
        "self.l = nn.Linear(100, 64)", X,
    ),
    "masked_softmax": ("torch.softmax(x.masked_fill(y == 0, float('-inf')), -1)", "",
                       "torch.randn(2, 4, 9, 17), torch.rand(9, 17).round()"),
}  # fmt: skip
PARAMS = [
    {"unroll": 1, "keep": True, "stream_output": False, "huge_pages": False},
    {"unroll": 4, "keep": False, "stream_output": True, "huge_pages": True,
     "unroll_2": 1, "keep_2": True},
]  # fmt: skip


OTHER_BATCHES = [1, 50]
# An input that has as many elements as there are rows, but none for each.
FOR_ONE_BATCH = {"means_beside_rows", "max_pool_to_its_end"}


def text_of(name: str) -> str:
    return text_of_form(MODULES[name])


def text_of_form(form: tuple[str, str, str]) -> str:
    """Return the file of a module: its forward, what the constructor makes, and the inputs."""
    forward, init, inputs = form
    names = "x, y, z"[: 3 * len(ast.parse(f"[{inputs}]", mode="eval").body.elts) - 2]
    return f"""
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init or "..."}

    def forward(self, {names}):
        return {forward}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""


def derive(folder: Path, name: str, text: str):
    path = folder / f"{name}.py"
    path.write_text(text)
    problem = load_problem(path)
    graph = capture(problem)
    settings = settings_of(problem.make_model(0), False)
    resized = with_another_batch(problem, graph)
    forwards = [Captured(g) for g in (graph, resized) if g]
    made = derived(forwards[0], text, name, settings, False, folder / "derived", *forwards[1:])
    return problem, made


CLASHES = """
import torch, torch.nn as nn

def detached(x):
    return x * 2

class ModelNew(nn.Module):
    pass

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(detached(x))

def get_inputs():
    return [torch.randn(4, 100)]

def get_init_inputs():
    return []
"""


def test_a_name_that_exported_files_have_themselves_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"clashes\.py, line 4: .*'detached'(.|\n)*next: name it"):
        derive(tmp_path, "clashes", CLASHES)
    derive(tmp_path, "renamed", CLASHES.replace("detached", "doubled"))


def answers(value) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("name", MODULES)
def test_the_loops_compute_what_the_module_does(name, tmp_path):
    problem, made = derive(tmp_path, name, text_of(name))
    family = load_family(made.name, [made.folder])
    known = family.templates["nest"].parameters
    for params, level in zip(PARAMS, [FEW_PASSES, "-O3"], strict=True):
        given = {p: value for p, value in params.items() if p in known}
        candidate = family.render({"template": "nest", **given}, FACTS)
        operator = bind(candidate.plan, "cpp", compiled(candidate, level=level))
        calls = []

        def counted(*args, operator=operator, calls=calls):
            calls.append(args)
            return operator(*args)

        module = module_of(family.model_new)
        module |= {**fused(operator), "fused_op": counted}
        model, reference = module["ModelNew"](), problem.make_model(0)
        model.load_state_dict(reference.state_dict())
        wide = problem.make_model(0).double()
        wide.load_state_dict(reference.state_dict())
        for inputs in [problem.make_inputs(1), *other_rows(problem, name)]:
            with torch.no_grad():
                mine = answers(model(*inputs))
                own = answers(reference(*inputs))
                exact = answers(wide(*in_float64(inputs)))
            assert_as_exact(mine, own, exact)
            buffers = [dict(m.named_buffers()).values() for m in (model, reference, wide)]
            assert_as_exact(*buffers)
        num_others = 0 if name in FOR_ONE_BATCH else len(OTHER_BATCHES)
        assert len(calls) == 1 + num_others, "a call took the reference's way"


def in_float64(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [widened(x) for x in inputs]


def other_rows(problem, name: str) -> list[list[torch.Tensor]]:
    """Inputs of other numbers of rows, where the loops take them."""
    batches = [] if name in FOR_ONE_BATCH else OTHER_BATCHES
    # Of one row PyTorch makes no variance, and of two all normalised numbers are alike.
    fewest = 3 if "batch_norm" in name else 1
    return [problem.make_inputs(2, batch=max(fewest, batch)) for batch in batches]


def assert_as_exact(mine, own, exact) -> None:
    for got, theirs, true in zip(mine, own, exact, strict=True):
        assert got.shape == theirs.shape and got.dtype == theirs.dtype
        if not got.is_floating_point():
            assert torch.equal(got, true)
            continue
        error, limit = (got - true).abs().max(), (theirs - true).abs().max()
        assert error <= max(2.0 * limit, 16 * 2.0**-24 * true.abs().max())


TRITON = [
    {"block_rows": 1, "block_columns": 128, "num_warps": 4, "stages": 2},
    {"block_rows": 4, "block_columns": 32, "num_warps": 2, "stages": 3,  # several blocks a row
     "block_rows_2": 2, "block_columns_2": 64, "num_warps_2": 4, "stages_2": 1},
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODULES)
def test_triton_blocks_compute_what_the_module_does(name, tmp_path):
    problem, made = derive(tmp_path, name, text_of(name))
    family = load_family(made.name, [made.folder])
    known = family.templates["nest_triton"].parameters
    facts = known_device("H200").facts()  # no sizes: the plan is for any number of rows
    for number, params in enumerate(TRITON):
        given = {p: value for p, value in params.items() if p in known}
        candidate = family.render({"template": "nest_triton", **given}, facts)
        path = tmp_path / f"blocks_{number}" / "source.py"
        path.parent.mkdir()
        path.write_text(candidate.source)
        operator = bind(candidate.plan, "triton", path)
        module = module_of(family.model_new)
        module |= {**fused(operator), "fused_device": "cuda"}
        model, reference = module["ModelNew"]().cuda(), problem.make_model(0).cuda()
        model.load_state_dict(reference.state_dict())
        wide = problem.make_model(0).double().cuda()
        wide.load_state_dict(reference.state_dict())
        for inputs in [problem.make_inputs(1), *other_rows(problem, name)]:
            inputs = [x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs]
            for x in inputs[:1]:
                x.view(-1)[5] = -30.0
            with torch.no_grad():
                mine, own = answers(model(*inputs)), answers(reference(*inputs))
                exact = answers(wide(*in_float64(inputs)))
            assert_as_exact(mine, own, exact)
            inputs[0].view(-1)[7] = float("nan")
            with torch.no_grad():
                mine, own = answers(model(*inputs)), answers(reference(*inputs))
            for got, theirs in zip(mine, own, strict=True):
                assert torch.equal(got.isnan(), theirs.isnan()), name


LONG = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def forward(self, x):
        return {value}

def get_inputs():
    return [torch.randn({rows}, 20000)]

def get_init_inputs():
    return []
"""
NORM = "F.layer_norm(x, (20000,))"


def blocks_of_rows(value: str, rows: int, folder: Path, **params):
    """The family of a module with long rows, and its Triton kernels."""
    _, made = derive(folder, "long", LONG.format(value=value, rows=rows))
    family = load_family(made.name, [made.folder])
    known = family.templates["nest_triton"].parameters
    given = {p: value for p, value in params.items() if p in known}
    facts = known_device("H200").facts()
    return family, family.render({"template": "nest_triton", **given}, facts)


# 3 rows are split between programs.
@pytest.mark.parametrize("rows", [5000, 3])
@pytest.mark.parametrize("value", ["torch.softmax(x, -1)", NORM])
def test_long_rows_are_read_twice(value, rows, tmp_path):
    _, candidate = blocks_of_rows(value, rows, tmp_path)
    # One sweep finds maximum and sum, or both moments; the other one writes.
    is_plain = rows == 3 and value != NORM  # split, a sum of exponentials is a pass of its own
    assert candidate.source.count("in tl.range(") == (3 if is_plain else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5000, 3])
@pytest.mark.parametrize("value", ["torch.softmax(x, -1)", NORM, "torch.log_softmax(x, -1)"])
def test_long_rows_are_as_accurate_as_eager(value, rows, tmp_path):
    family, candidate = blocks_of_rows(value, rows, tmp_path, **TRITON[0])
    path = tmp_path / "source.py"
    path.write_text(candidate.source)
    module = module_of(family.model_new)
    module |= {**fused(bind(candidate.plan, "triton", path)), "fused_device": "cuda"}
    model, names = module["ModelNew"](), {"torch": torch, "F": torch.nn.functional}
    for offset in (0.0, 1e4):
        x = 3.0 * torch.randn(rows, 20000, device="cuda") + offset
        x[1], x[2] = 7.3, x[2].sort().values
        exact = eval(value, names, {"x": x.double()})
        mine, own = (model(x) - exact).abs().max(), (eval(value, names, {"x": x}) - exact).abs()
        assert mine <= max(2.0 * own.max(), 16 * 2.0**-24 * exact.abs().max())
    x[0] = torch.where(torch.arange(20000, device="cuda") % 2 == 0, 2.0**120, -(2.0**119))
    assert not model(x).isnan().any()  # a sum of these is beyond float32


@pytest.mark.gpu
def test_a_softmax_of_several_blocks_keeps_infinities(tmp_path):
    _, made = derive(tmp_path, "softmax", text_of("softmax"))
    family = load_family(made.name, [made.folder])
    params = {"template": "nest_triton", **TRITON[1]}
    candidate = family.render(params, known_device("H200").facts())
    path = tmp_path / "source.py"
    path.write_text(candidate.source)
    module = module_of(family.model_new)
    operator = bind(candidate.plan, "triton", path)
    module |= {**fused(operator), "fused_device": "cuda"}
    x = 20.0 * torch.randn(6, 300, device="cuda")
    x[0, 5] = x[1] = x[2, :250] = -math.inf
    x[3, 7], x[4, 9] = math.inf, math.nan
    x[5] = x[5].sort().values  # a larger one in each block
    got, want = module["ModelNew"]()(x), torch.softmax(x.double(), -1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-30, equal_nan=True)


def loops_of(name: str, folder: Path, text: str = "", **params):
    """The operator of a module's loops, without the module around it."""
    _, made = derive(folder, name, text or text_of(name))
    family = load_family(made.name, [made.folder])
    candidate = family.render({"template": "nest", **params}, FACTS)
    return bind(candidate.plan, "cpp", compiled(candidate, level=FEW_PASSES))


@pytest.mark.parametrize("name", ["long_softmax", "long_rows", "long_mean", "mse"])
def test_a_split_row_is_the_same_whatever_the_number_of_threads(name, tmp_path):
    problem = load_problem(derive(tmp_path, name, text_of(name))[0].path)
    params = {"piece": 16384} if name != "mse" else {}
    operator, before = loops_of(name, tmp_path, **params), torch.get_num_threads()
    state = [p.detach() for p in problem.make_model(0).parameters()]
    inputs = [x.reshape(-1) for x in (*problem.make_inputs(1), *state)]
    if name == "long_softmax":
        inputs = [x.view(2, -1) for x in inputs]
    if name == "long_rows":
        inputs = [inputs[0].view(2, -1), *inputs[1:]]
    if name in ("long_mean", "mse"):  # which are for any batch
        inputs = [x.flatten(1) for x in problem.make_inputs(1)]
    try:
        answered = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            answered.append(operator(*inputs))
    finally:
        torch.set_num_threads(before)
    for other in answered[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answered[0], other, strict=True))


PICKED = {
    "behind another pass": "(x - x.amin(1, keepdim=True)).gather(1, y.unsqueeze(1)).squeeze(1)",
    "beside another sum": "(x.amin(1), x.exp().gather(1, y.unsqueeze(1)).squeeze(1))",
}


@pytest.mark.parametrize("cols", [100, 60_000])
@pytest.mark.parametrize("name", PICKED)
def test_what_is_picked_of_a_row_is_read_at_its_place_alone(name, cols, tmp_path):
    """Also where a row is split between threads: of the piece that has the place."""
    given = f"torch.randn(5, {cols}), torch.randint(0, {cols}, (5,))"
    call = PICKED[name]
    MODULES["picked"] = (call, "", given)
    text = text_of("picked")
    del MODULES["picked"]
    operator = loops_of("picked", tmp_path, text, **({"piece": 16384} if cols > 100 else {}))
    x, y = torch.randn(5, cols), torch.tensor([0, cols - 1, 16, min(16384, cols - 2), 99])
    x[0, 1:], x[4, :99] = float("inf"), float("nan")  # beside the place
    *_, got = operator(x, y.view(5, 1))
    expected = eval(call, {"x": x, "y": y})
    expected = expected if isinstance(expected, torch.Tensor) else expected[1]
    torch.testing.assert_close(got.flatten(), expected, equal_nan=True, rtol=1e-6, atol=0)


def test_places_of_extremes_are_the_first_ones_and_of_nan_before_all(tmp_path):
    x = torch.randn(37, 100)
    x[0] = 1.0
    x[1, 60:] = float("nan")
    x[2] = -float("inf")
    x[3] = float("inf")
    x[4, [7, 90]], x[5, [40, 41]] = 9.0, -9.0
    most, least = loops_of("argmax", tmp_path)(x)
    assert torch.equal(most, x.argmax(-1)) and torch.equal(least, x.argmin(-1))
    x = x.t().contiguous().repeat(3, 1, 1)
    (most,) = loops_of_middle(tmp_path, x)(x.view(len(x), -1))
    assert torch.equal(most.view(3, -1), x.argmax(1))


def loops_of_middle(folder: Path, x: torch.Tensor):
    MODULES["argmax_of_these"] = ("x.argmax(1)", "", f"torch.randn{tuple(x.shape)}")
    try:
        return loops_of("argmax_of_these", folder)
    finally:
        del MODULES["argmax_of_these"]


def test_a_group_norm_of_large_numbers_keeps_its_digits(tmp_path):
    operator = loops_of("group_norm", tmp_path)
    x = torch.randn(4, 12, 45) + 10000.0
    weight, bias = torch.randn(12), torch.randn(12)
    (got,) = operator(x.view(4, -1), weight, bias)
    exact = torch.nn.functional.group_norm(x.double(), 3, weight.double(), bias.double())
    # Half the distance of neighbours at 10000 is what the mean may be off by.
    assert (got.view_as(x) - exact).abs().max() < 2.0**-10 * weight.abs().max()


def test_a_softmax_of_large_products_is_of_rounded_ones(tmp_path):
    text = text_of("softmax").replace("torch.softmax(x,", "torch.softmax(x * self.w,")
    text = text.replace("        ...", "        self.w = nn.Parameter(torch.rand(100))")
    operator = loops_of("scaled_softmax", tmp_path, text)
    x, weight = 1e30 * torch.randn(37, 100), torch.rand(100)
    (got,) = operator(x, weight)  # in the order of the nest's arguments
    torch.testing.assert_close(got.view_as(x), torch.softmax(x * weight, -1))


def test_a_norm_of_equal_products_leaves_nothing(tmp_path):
    text = text_of("softmax").replace("torch.softmax(x,", f"{F}.layer_norm(x * 3.0, (100,)")
    operator = loops_of("norm_of_products", tmp_path, text.replace("(100,) -1)", "(100,))"))
    x = torch.randn(37, 1).expand(37, 100).contiguous()
    (got,) = operator(x)
    assert (got == 0).all()


def test_labels_that_pytorch_refuses_take_the_references_way(tmp_path):
    problem, made = derive(tmp_path, "cross_entropy", text_of("cross_entropy"))
    module = module_of(load_family(made.name, [made.folder]).model_new)
    calls = []
    module |= {"fused_op": lambda *args: calls.append(args) or (torch.zeros(()),)}
    module["fused_device"] = torch.device("cpu")
    model, (x, y) = module["ModelNew"](), problem.make_inputs(1)
    with torch.no_grad():
        y[3] = -100  # which is left out
        model(x, y)
        for wrong in (-1, 100, -101):
            y[3] = wrong
            with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
                model(x, y)
    assert len(calls) == 1


# What of y is picked, and which numbers PyTorch refuses then, of these.
LABELS = (-100, -1, 100)
CHOICES = {
    "masked": ("y.masked_fill(~y.ne(-100), 0)", (-1, 100)),
    "equal": ("y.masked_fill(y == -100, 7)", (-1, 100)),
    "where": ("torch.where(y != -100, y, 0)", (-1, 100)),
    "clamped": ("y.clamp(min=0)", (100,)),
    "between": ("y.clamp(0, 99)", ()),
    "from": ("torch.where(y >= 0, y, 3)", (100,)),
    "above": ("torch.where(y > -1, y, 3)", (100,)),
    "negative": ("y.masked_fill(y < 0, 5)", (100,)),
    "up_to": ("torch.where(y <= 99, y, 3)", (-100, -1)),
    "bound_and_left_out": (
        "(lambda z: torch.where(z != -100, z, 0))(y.clamp(min=-100))",
        (-1, 100),
    ),
    "outside": ("torch.where(y >= 0, y, -7)", (-100, -1, 100)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_labels_chosen_by_hand_take_the_references_way_where_pytorch_refuses_them(name, tmp_path):
    """Loops found nothing at a place outside, and gave an answer where PyTorch refuses one."""
    place, refused = CHOICES[name]
    place = place.replace("y", "y[1:]")
    call = f"x[:-1].logsumexp(1) - x[:-1].gather(1, ({place}).unsqueeze(1)).squeeze(1)"
    text = text_of("cross_entropy").replace(MODULES["cross_entropy"][0], call)
    problem, made = derive(tmp_path, name, text)
    module = module_of(load_family(made.name, [made.folder]).model_new)
    calls = []
    module |= {"fused_op": lambda *args: calls.append(args) or (torch.zeros(36),)}
    module["fused_device"] = torch.device("cpu")
    model, (x, y) = module["ModelNew"](), problem.make_inputs(1)
    with torch.no_grad():
        model(x, y)
        for number in LABELS:
            y[3] = number
            if number in refused:
                with pytest.raises(RuntimeError, match="is out of bounds"):
                    model(x, y)
            else:
                model(x, y)
    assert len(calls) == 1 + len(LABELS) - len(refused)


def test_what_is_not_usual_takes_the_references_way(tmp_path):
    _, made = derive(tmp_path, "rms_norm_gate", text_of("rms_norm_gate"))
    family = load_family(made.name, [made.folder])

    def never(*args):
        raise AssertionError("the loops were called")

    module = module_of(family.model_new)
    module |= {"fused_op": never, "fused_device": torch.device("cpu")}
    model = module["ModelNew"]()
    x = torch.randn(37, 100)
    model(x, x).sum().backward()  # wants gradients
    with torch.no_grad():
        model(x.double(), x.double())
        model.keepdim = 3.0  # a setting that nobody knew, of a name that the code has
        model(x, x)
        del model.keepdim
        with pytest.raises(AssertionError, match="the loops were called"):
            model(x, x)


@pytest.mark.gpu
def test_more_columns_than_32_bits_count_take_the_references_way(tmp_path):
    _, made = derive(tmp_path, "rms_norm_gate", text_of("rms_norm_gate"))
    module = module_of(load_family(made.name, [made.folder]).model_new)
    module["fused_device"] = torch.device("cuda")
    model, row = module["ModelNew"]().cuda(), torch.zeros(1, 100, device="cuda")
    numbers = (37, 38, 2**31 // 100)
    usual = [module["usual_state"](model, [row.expand(n, 100)] * 2) for n in numbers]
    assert [state is not None for state in usual] == [True, True, False]


def test_a_live_modules_weights_are_taken_and_shared(tmp_path):
    problem, made = derive(tmp_path, "rms_norm_gate", text_of("rms_norm_gate"))
    family = load_family(made.name, [made.folder])
    calls = []

    def counted(*args):
        calls.append(args)
        return (torch.zeros(37, 100),)

    module = module_of(family.model_new)
    module |= {"fused_op": counted, "fused_device": torch.device("cpu")}
    live = problem.make_model(0).eval()
    live.register_forward_hook(lambda *_: None)
    mine = module["ModelNew"].from_module(live)
    assert type(mine) is module["ModelNew"] and type(live) is not type(mine)
    assert mine.w is live.w and not mine.training and len(mine._forward_hooks) == 1
    x = torch.randn(37, 100)
    with torch.no_grad():
        live.w.fill_(3.0)
        mine(x, x)
    assert len(calls) == 1 and torch.equal(calls[0][-1], torch.full((100,), 3.0))
    mine(x, x).sum().backward()  # the reference's way, with the same parameter
    assert live.w.grad is not None and len(calls) == 1
    mine.train()
    mine.extra = torch.nn.Linear(2, 2)
    assert not live.training and not hasattr(live, "extra")

    with pytest.raises(TypeError, match="got OrderedDict"):
        module["ModelNew"].from_module(live.state_dict())
    live.w = torch.nn.Parameter(torch.ones(99))
    with pytest.raises(TypeError, match=r"w: float32 \[99\], not float32 \[100\]"):
        module["ModelNew"].from_module(live)


@pytest.mark.parametrize("start", ["0", "0.0"])
def test_a_count_of_calls_in_a_buffer_is_of_floats_where_it_is_read(start, tmp_path):
    init = f"self.register_buffer('calls', torch.tensor({start}))"
    text = text_of("softmax").replace("...", init).replace(
        "return ", "self.calls += 1; return torch.clamp(self.calls / 10, max=1.0) * ", 1
    )  # fmt: skip
    if start == "0":
        with pytest.raises(NotOneNest, match=r"line .*: add of whole numbers"):
            derive(tmp_path, "softmax", text)
        return
    assert derive(tmp_path, "softmax", text)


SETTINGS = """
import enum, functools, torch, torch.nn as nn
from dataclasses import dataclass, field

class Kind(enum.Enum):
    A = 1.0
    B = 2.0

@dataclass
class Config:
    kind: Kind = Kind.A
    factor: float = 1.0
    sizes: list = field(default_factory=lambda: [[1, 2], [3]])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self._scale, self.kind, self.nested = Config(), 2.0, Kind.A, [[1.0], [2.0]]
        shift = 1.0
        self.shift = lambda x: x + shift
        self.times = functools.partial(torch.mul, other=3.0)
        self.left = None

    def forward(self, x):
        y = self.times(self.shift(x)) * self.config.factor * self._scale * self.nested[0][0]
        return torch.tanh(y * self.kind.value * self.config.kind.value * self.config.sizes[1][0])

def get_inputs():
    return [torch.randn(10, 20)]

def get_init_inputs():
    return []
"""


def other_shift(by: float):
    return lambda x: x + by


EDITS = {
    "a number of an object": lambda m: setattr(m.config, "factor", 2.0),
    "an enumeration of an object": lambda m: setattr(m.config, "kind", type(m.kind).B),
    "a nested list of an object": lambda m: m.config.sizes[1].append(4),
    "an enumeration": lambda m: setattr(m, "kind", type(m.kind).B),
    "a nested list": lambda m: m.nested[0].append(1.0),
    "a private number": lambda m: setattr(m, "_scale", 3.0),
    "what a function closes over": lambda m: setattr(m, "shift", other_shift(2.0)),
    "what a partial holds": lambda m: m.times.keywords.update(other=4.0),
}


@pytest.mark.parametrize("name", EDITS)
def test_settings_in_objects_and_private_names_are_noticed(name, tmp_path):
    _, made = derive(tmp_path, "settings", SETTINGS)
    module = module_of(load_family(made.name, [made.folder]).model_new)
    module["fused_device"] = torch.device("cpu")
    model, inputs = module["ModelNew"](), [torch.randn(10, 20)]
    model.left = inputs[0]  # as a call may leave something
    assert module["usual_state"](model, inputs) is not None
    EDITS[name](model)
    assert module["usual_state"](model, inputs) is None


def test_forward_is_declared_as_the_references(tmp_path):
    text = text_of("softmax").replace("forward(self, x)", "forward(self, x, *, by=1.0, at=None)")
    _, made = derive(tmp_path, "softmax", text.replace("return ", "return by * ", 1))
    module = module_of(load_family(made.name, [made.folder]).model_new)
    module["fused_device"] = torch.device("cpu")
    model, x = module["ModelNew"](), torch.ones(37, 100)
    assert "by=" in text and "at" in inspect.signature(model.forward).parameters
    assert inspect.signature(model.forward) == inspect.signature(module["Model"]().forward)
    assert torch.allclose(model(x, by=3.0).sum(-1), torch.tensor(3.0))  # the reference's own


EDITED = """
import functools, torch, torch.nn as nn

FACTOR = 2.0

def around(function):
    @functools.wraps(function)
    def called(*inputs):
        return function(*inputs)
    return called

def scaled(x):
    return x * FACTOR

class Base(nn.Module):
    def forward(self, x):
        return x + 1.0

class Part(nn.Module):
    def forward(self, x):
        return x.exp()

class Model(Base):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(20))
        self.part = Part()

    @around
    def forward(self, x):
        "Scale."
        return self.shifted(scaled(self.part(x)) * self.w)

    def shifted(self, x):
        return x + 3.0

    def extra_repr(self):
        return "old"

def get_inputs():
    return [torch.randn(10, 20)]

def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(
    ("old", "new", "is_taken"),
    [
        ("", "", True),
        ('"Scale."', '"Scale all."', True),
        ('"old"', '"new"', True),
        ("def get_init", "def get_nothing():\n    return 1\n\ndef get_init", True),
        ("FACTOR = 2.0", "FACTOR = 2.5", False),
        ("x * FACTOR", "x / FACTOR", False),
        ("x + 3.0", "x - 3.0", False),
        ("* self.w)", "/ self.w)", False),
        ("x.exp()", "x.sin()", False),
    ],
)
def test_a_live_module_of_other_code_is_refused(old, new, is_taken, tmp_path):
    _, made = derive(tmp_path, "edited", EDITED)
    tuned = module_of(load_family(made.name, [made.folder]).model_new)
    path = tmp_path / "now.py"
    path.write_text(EDITED.replace(old, new, 1) if old else EDITED)
    live = load_problem(path).make_model(0)
    if is_taken:
        assert tuned["ModelNew"].from_module(live).w is live.w
        return
    with pytest.raises(TypeError, match=r"\.forward, or what it calls, is not the code"):
        tuned["ModelNew"].from_module(live)


def test_a_live_module_of_another_class_of_the_file_is_refused(tmp_path):
    _, made = derive(tmp_path, "edited", EDITED)
    tuned = module_of(load_family(made.name, [made.folder]).model_new)
    again = module_of(load_family(made.name, [made.folder]).model_new)

    class Louder(tuned["Model"]):
        def forward(self, x):
            return super().forward(x) * 100

    class Named(tuned["Model"]):
        pass

    new_class = tuned["ModelNew"]
    for known in (new_class(), tuned["Model"](), Named(), again["ModelNew"](), again["Model"]()):
        assert new_class.from_module(known).w is known.w
    bare = tuned["Base"]()
    bare.w, bare.part = torch.nn.Parameter(torch.ones(20)), tuned["Part"]()
    for other in (bare, Louder()):
        with pytest.raises(TypeError, match="is not the code that was tuned"):
            new_class.from_module(other)


def test_buffers_and_submodules_are_shared_by_tensor_and_copied_else():
    live = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    mine = made_from(torch.nn.Sequential, live)
    mine(torch.randn(8, 4))  # in training mode: writes running statistics in place
    assert torch.equal(live[0].running_mean, mine[0].running_mean)
    assert int(live[0].num_batches_tracked) == 1
    mine.eval()
    assert live[0].training and mine[1].weight is live[1].weight and mine[1] is not live[1]


REFUSED = {
    "unsigned numbers of 16 bits": (
        "x + y.float()",
        f"{X}, torch.randint(0, 9, (100,)).to(torch.uint16)",
        "y is uint16, which is not read yet",
    ),
    "unsigned numbers in a call": (
        "(x * 2, y.sum())",
        f"{X}, torch.ones(7).to(torch.uint16)",
        "x.long()",
    ),
    "complex numbers": ("torch.fft.rfft(x).abs()", X, "of real and of imaginary parts"),
    "an input among the results": ("(x * 2, x)", X, "result 2 of the 2 that forward returns is x"),
    "a view of an input": (
        "(x * 2, x[1:].T)",
        X,
        "result 2 of the 2 that forward returns is a view",
    ),
    "another type": ("x.to(torch.uint16)", X, "a result is uint16"),
    "a range past 2^24": ("x * torch.arange(0, 2**24 + 900, 169467)", X, "for arange yet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_loop_is_generated_for_is_refused_with_its_line(name, tmp_path):
    forward, inputs, words = REFUSED[name]
    MODULES["refused"] = (forward, "", inputs)
    text = text_of("refused")
    del MODULES["refused"]
    with pytest.raises(NotOneNest) as refusal:
        derive(tmp_path, "refused", text)
    assert words in str(refusal.value)
    assert "line 12: " in str(refusal.value) or name == "an input among the results"


def test_an_argument_that_is_neither_tensor_nor_float_is_refused_with_what_to_do(tmp_path):
    MODULES["flag"] = ("x * 2 if y else x", "", f"{X}, True")
    text = text_of("flag")
    del MODULES["flag"]
    with pytest.raises(
        NotOneNest, match=r"argument y of forward is True\n.*\n  next: leave it out"
    ):
        derive(tmp_path, "flag", text)


@pytest.mark.parametrize(
    ("forward", "words"),
    [("x @ y.T", "2 calls of PyTorch's permute and matmul"),
     ("x.sort(-1).values", "one call of PyTorch's sort")],
)  # fmt: skip
def test_where_all_is_pytorchs_own_nothing_is_generated(forward, words, tmp_path):
    MODULES["nothing"] = (forward, "", f"{X}, {X}")
    text = text_of("nothing")
    del MODULES["nothing"]
    with pytest.raises(NothingToGenerate, match=f"nothing to generate: the forward is {words}"):
        derive(tmp_path, "nothing", text)


@pytest.mark.usefixtures("few")
def test_a_module_is_tuned_from_its_file_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = text_of("rms_norm_gate").replace("silu(y)", "silu(y * 1.5 * 2)")
    (tmp_path / "my_gate.py").write_text(text)
    said = tune("my_gate.py", "--trials", "1", "--effort", "quick", cwd=tmp_path)
    assert said.code == 0, said.out + said.err
    (path,) = (tmp_path / "runs").iterdir()
    run = open_run(path)
    result = run.result()
    assert result is not None and result.exported is not None
    check = result.exported.check
    assert check.is_accepted and not check.differences
    if not result.is_fallback:
        assert "class ModelNew(Model):" in run.export_path.read_text()
    # No datasheet says what this machine could do at most.
    assert "the bound is not known" in said.out and result.bound_us is None
    record = from_json(ModuleRecord, (path / "module.json").read_bytes())
    steps = [step.name for step in record.outline.steps]
    assert steps[:6] == ["pow", "mean", "add", "rsqrt", "mul", "mul_1"]
    exported = imported(run.export_path)
    live = load_problem(tmp_path / "my_gate.py").make_model(0)
    mine, inputs = exported.ModelNew.from_module(live), exported.get_inputs()
    with torch.no_grad():
        live.w.copy_(torch.rand(100))
        torch.testing.assert_close(mine(*inputs), live(*inputs))
    certificate = read_certificate(run.export_path)
    assert certificate.num_probes == len(check.probes)
    (step,) = record.outline.rewrites
    assert (step.name, step.line) == ("factors-merged", 12) and summary(run).rewrites
    if not result.is_fallback:
        assert certificate.rewrites == (step.words,)
        assert f"exact rewrite: {step.words}" in run.export_path.read_text()
    # At other numbers of rows it was timed before it was checked, and says what came of it.
    (found,) = run.batches()
    assert found.tuned_rows == 37 and found.measured and "call" in found.rows | {"call": 0}
    if not result.is_fallback:
        by_batch = result.exported.by_batch
        assert by_batch is not None and (by_batch.rows or {}) == (exported._FUSED_ROWS or {})
        assert certificate.by_batch == by_batch
        assert all(f"#   {line}" in run.export_path.read_text() for line in by_batch.words)


DROPS = "x + self.drop(F.gelu(self.norm(x)))"
# By a submodule and by a function, beside statistics that training writes and eval mode reads.
STORED = "self.norm(x) * F.dropout(x, training=self.training) + self.drop(F.gelu(x))"


def drops(forward: str) -> str:
    norm = "nn.BatchNorm1d(48)" if forward == STORED else "nn.LayerNorm(48)"
    return f"""import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.norm = {norm}
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return {forward}


def get_inputs():
    return [torch.randn(64, 48)]


def get_init_inputs():
    return []
"""


@pytest.mark.usefixtures("few")
def test_a_module_with_dropout_is_tuned_in_eval_mode(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "drops.py").write_text(drops(STORED))
    said = tune("drops.py", "--dry-run", cwd=tmp_path)
    assert said.code == 2 and "draws random numbers" in said.err and "--mode eval" in said.err
    said = tune("verify", "drops.py", "--reference", "drops.py", cwd=tmp_path)
    assert said.code == 2 and "in training mode" in said.err and "--mode eval" in said.err
    said = tune("drops.py", "--mode", "eval", "--trials", "1", "--effort", "quick", cwd=tmp_path)
    assert said.code == 0, said.out + said.err
    (path,) = (tmp_path / "runs").iterdir()
    run = open_run(path)
    result = run.result()
    assert result is not None and result.exported is not None
    check = result.exported.check
    assert check.is_accepted
    assert any("numbers were not compared on" in note for note in check.notes)
    asked = {probe.probe for probe in check.probes}
    assert {"as given", "fresh weights", "own work, training"} <= asked
    assert summary(run).mode == "eval mode" and "in eval mode" in run.export_path.read_text()
    assert read_certificate(run.export_path).mode == "eval"
    exported = imported(run.export_path)
    model, x = exported.ModelNew(), torch.randn(64, 48)
    assert not torch.equal(model(x), model(x))  # the reference's way: random
    live = load_problem(tmp_path / "drops.py").make_model(0).eval()
    torch.testing.assert_close(exported.ModelNew.from_module(live)(x), live(x))


def test_a_config_names_a_module_and_says_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "drops.py").write_text(drops(DROPS))
    config = tmp_path / "drops.yaml"
    config.write_text(
        "problem: {module: drops.py, mode: eval}\nspace: {unroll: [4]}\nsearch: {trials: 7}\n"
    )
    loaded = load_config(derive_config(config))
    assert loaded.search.trials == 7 and loaded.problem.mode == "eval"
    found = plan(loaded).space
    values = {parameter.name: set(parameter.values) for parameter in found.parameters}
    assert values["unroll"] == {4} and values["stream_output"] == {False, True}
    config.write_text("problem: {module: drops.py, sizes: {rows: 4}}\n")
    said = tune("--config", "drops.yaml", "--dry-run", cwd=tmp_path)
    assert said.code == 2 and "drops.yaml: problem.sizes: expected batch alone" in said.err


def test_what_names_no_mode_is_asked_in_the_problems_own():
    usual, swapped = thorough_probes(1, 64), thorough_probes(1, 64, modes=Modes("eval"))
    assert thorough_probes(1, 64, modes=Modes("train")) == usual
    # What was drawn stands behind a colon.
    names, others = ([p.name.partition(":")[0] for p in probes] for probes in (swapped, usual))
    assert names == others and len(names) == len(set(names))
    modes = {probe.name: (probe.mode, probe.before) for probe in swapped}
    assert modes["as given"][0] == modes["own work, eval"][0] == "eval"
    assert modes["fresh weights"] == ("eval", ((), ("train",)))
    assert modes["own work, training"][0] == modes["a life, training"][0] == "train"
    assert not any(probe.is_random for probe in (*usual, *swapped))


def test_where_training_is_chance_numbers_are_compared_in_eval_mode_alone():
    modes = Modes("eval", random=("train", "thawed"))
    probes = {probe.name: probe for probe in thorough_probes(1, 64, modes=modes)}
    random = {name for name, probe in probes.items() if probe.is_random}
    assert {"own work, training", "cumulative average", "thawed submodules"} <= random
    assert len(random) < 12 and probes["fresh weights"].before == ((), ("eval",))
    for name, probe in probes.items():
        assert name in random or probe.mode in ("eval", "frozen")
        assert name in random or not any("train" in actions for actions in probe.before)


@pytest.mark.parametrize(
    ("forward", "random"),
    [
        ("self.drop(x)", ("train", "thawed")),
        ("F.dropout(x, 0.5, self.training)", ("train", "frozen")),
        ("x + 0 * torch.rand_like(x)", ()),  # drawn, and of no consequence
        ("self.norm(x)", ()),
    ],
)
def test_in_which_modes_a_reference_draws_is_found_out(forward, random, tmp_path):
    (tmp_path / "drops.py").write_text(drops(forward))
    found = modes_of(load_problem(tmp_path / "drops.py", mode="eval"), "cpu")
    assert found == Modes("eval", random)
    if not random:
        assert modes_of(load_problem(tmp_path / "drops.py"), "cpu") == Modes("train")
        return
    with pytest.raises(ProblemError, match=r"in training mode.*\n  next: .*--mode eval"):
        modes_of(load_problem(tmp_path / "drops.py"), "cpu")


def test_a_file_that_cannot_be_tuned_says_why(tmp_path):
    branches = text_of("softmax").replace(
        "return torch.softmax(x, -1)",
        """if x.sum() > 0:
            return x
        return -x""",
    )
    (tmp_path / "branches.py").write_text(branches)
    said = tune("branches.py", cwd=tmp_path)
    assert said.code == 2 and "branches.py:12" in said.err and "next: " in said.err
    (tmp_path / "product.py").write_text(
        text_of("softmax").replace("torch.softmax(x, -1)", "x @ x.T")
    )
    said = tune("product.py", cwd=tmp_path)
    assert said.code == 0 and "nothing to generate: the forward is 2 calls of" in said.out, said
    assert tune("absent.py", cwd=tmp_path).err.startswith("error: absent.py: no such file")


NAMED = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.{state} = nn.Parameter(torch.ones(40))

    def forward(self, x, {name}):
        return torch.softmax(x * {name} + self.{state}, -1)


def get_inputs():
    return [torch.randn(6, 40), torch.randn(6, 40)]


def get_init_inputs():
    return []
"""


@pytest.mark.parametrize("name", ["keep", "template", "max", "guard", "block_rows", "programs"])
def test_a_users_names_may_be_ones_of_ours(name, tmp_path):
    """Of parameters of templates, and words that texts keep for themselves."""
    for given, state in ((name, "w"), ("other", name)):
        folder = tmp_path / given
        folder.mkdir()
        _, made = derive(folder, "named", NAMED.format(name=given, state=state))
        family = load_family(made.name, [made.folder])
        for template, device in (("nest", "cpu"), ("nest_triton", "H200")):
            facts = FACTS if device == "cpu" else known_device(device).facts()
            assert family.render({"template": template}, facts).source
