"""From a module's file to an operator of its own: real captures, a real compiler, whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import tune
from cpu_machine import FACTS, GPP, compiled

from tuner.capture.capture import capture
from tuner.capture.derive import derived
from tuner.capture.index_space import NotOneNest
from tuner.capture.settings import settings_of
from tuner.capture.sharing import made_from
from tuner.evaluate.modules import fused, imported, module_of
from tuner.export.certificate import read_certificate
from tuner.kernel.binding import bind
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device
from tuner.problem.reference import load_problem
from tuner.run import open_run

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")

F = "torch.nn.functional"
X = "torch.randn(37, 100)"
# A forward, what the constructor makes, and the inputs.
MODULES: dict[str, tuple[str, str, str]] = {
    "rms_norm_gate": (
        f"x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w * {F}.silu(y)",
        "self.w = nn.Parameter(torch.randn(100))", f"{X}, {X}",
    ),
    "softmax": ("torch.softmax(x, -1)", "", X),
    "log_softmax": (f"{F}.log_softmax(x * 3.0, dim=1)", "", X),
    "layer_norm": ("self.n(x)", "self.n = nn.LayerNorm(100)", "torch.randn(5, 7, 100)"),
    "bias_gelu": (f"{F}.gelu(x + self.b)", "self.b = nn.Parameter(torch.randn(100))",
                  "torch.randn(3, 11, 100)"),
    "channels": (f"{F}.relu(x * self.c[:, None, None].exp())",
                 "self.c = nn.Parameter(torch.randn(6))", "torch.randn(4, 6, 9, 11)"),
    "sum_of_rows": ("(x * y).sum(-1)", "", f"{X}, {X}"),
    "min_max": ("(x - x.amin(-1, True)) / (x.amax(-1, True) - x.amin(-1, True))", "", X),
    "where": ("torch.where(x > y, x.tanh(), 0.5 * y)", "", f"{X}, {X}"),
    "channels_norm": ("x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)", "",
                      "torch.randn(3, 33, 5, 7)"),
    "softmax_of_middle": ("torch.softmax(x, 1) * self.w[:, None]",
                          "self.w = nn.Parameter(torch.randn(21))", "torch.randn(4, 21, 50)"),
    "largest_of_middle": ("x.amax(1)", "", "torch.randn(4, 130, 9)"),
    "two_results": ("(x.mean(-1, keepdim=True), x - x.mean(-1, keepdim=True))", "", X),
}  # fmt: skip
IN_TRITON_ALONE = {"channels_norm", "softmax_of_middle", "largest_of_middle"}
PARAMS = [
    {"unroll": 1, "keep": True, "stream_output": False, "huge_pages": False},
    {"unroll": 4, "keep": False, "stream_output": True, "huge_pages": True},
]


def text_of(name: str) -> str:
    forward, init, inputs = MODULES[name]
    names = "x, y" if inputs.count("randn") > 1 else "x"
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
    graph = capture(problem, with_sizes=False)
    settings = settings_of(problem.make_model(0), False)
    return problem, derived(graph, text, name, settings, False, folder / "derived")


def answers(value) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("name", MODULES)
def test_the_loops_compute_what_the_module_does(name, tmp_path):
    problem, made = derive(tmp_path, name, text_of(name))
    family = load_family(made.name, [made.folder])
    if name in IN_TRITON_ALONE:
        assert set(family.templates) == {"nest_triton"}
        return
    known = family.templates["nest"].parameters
    for params in PARAMS:
        given = {p: value for p, value in params.items() if p in known}
        candidate = family.render({"template": "nest", **given}, FACTS)
        operator = bind(candidate.plan, "cpp", compiled(candidate))
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
        for inputs in (problem.make_inputs(1), problem.make_inputs(2, batch=3)):
            with torch.no_grad():
                mine = answers(model(*inputs))
                own = answers(reference(*inputs))
                exact = answers(wide(*(x.double() for x in inputs)))
            for got, theirs, true in zip(mine, own, exact, strict=True):
                assert got.shape == theirs.shape and got.dtype == theirs.dtype
                error, limit = (got - true).abs().max(), (theirs - true).abs().max()
                assert error <= max(2.0 * limit, 16 * 2.0**-24 * true.abs().max()), name
        assert len(calls) == 2, "a call took the reference's way"


TRITON = [
    {"block_rows": 1, "block_columns": 128, "num_warps": 4, "stages": 2},
    {"block_rows": 4, "block_columns": 32, "num_warps": 2, "stages": 3},  # several blocks a row
]


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
        for inputs in (problem.make_inputs(1), problem.make_inputs(2, batch=3)):
            inputs = [x.cuda() for x in inputs]
            for x in inputs[:1]:
                x.view(-1)[5] = -30.0
            with torch.no_grad():
                mine, own = answers(model(*inputs)), answers(reference(*inputs))
                exact = answers(wide(*(x.double() for x in inputs)))
            for got, theirs, true in zip(mine, own, exact, strict=True):
                assert got.shape == theirs.shape and got.dtype == theirs.dtype
                error, limit = (got - true).abs().max(), (theirs - true).abs().max()
                assert error <= max(2.0 * limit, 16 * 2.0**-24 * true.abs().max()), name
            inputs[0].view(-1)[7] = float("nan")
            with torch.no_grad():
                mine, own = answers(model(*inputs)), answers(reference(*inputs))
            for got, theirs in zip(mine, own, strict=True):
                assert torch.equal(got.isnan(), theirs.isnan()), name


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
        model.other = 3.0  # a setting that nobody knew
        model(x, x)
        del model.other
        with pytest.raises(AssertionError, match="the loops were called"):
            model(x, x)


def test_a_live_modules_weights_are_taken_and_shared(tmp_path):
    problem, made = derive(tmp_path, "rms_norm_gate", text_of("rms_norm_gate"))
    family = load_family(made.name, [made.folder])
    calls = []

    def counted(*args):
        calls.append(args)
        return torch.zeros(37, 100)

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
    with pytest.raises(TypeError, match=r"w: \[99\], not \[100\]"):
        module["ModelNew"].from_module(live)


def test_buffers_and_submodules_are_shared_by_tensor_and_copied_else():
    live = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    mine = made_from(torch.nn.Sequential, live)
    mine(torch.randn(8, 4))  # in training mode: writes running statistics in place
    assert torch.equal(live[0].running_mean, mine[0].running_mean)
    assert int(live[0].num_batches_tracked) == 1
    mine.eval()
    assert live[0].training and mine[1].weight is live[1].weight and mine[1] is not live[1]


REFUSED = {
    "a product": ("x @ y.T", f"{X}, {X}", "no loop is generated for"),
    "a reduction of two that are apart": (
        "x.sum((0, 2))",
        "torch.randn(3, 4, 5)",
        "sum over the dimensions (0, 2)",
    ),
    "a value a row that is spread over rows": (
        "x - x.mean(-1)",
        "torch.randn(7, 7)",
        "one value a row, is spread",
    ),
    "a scan": ("x.cumsum(-1)", X, "no loop is generated for cumsum"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_loop_is_generated_for_is_refused_with_its_line(name, tmp_path):
    forward, inputs, words = REFUSED[name]
    MODULES["refused"] = (forward, "", inputs)
    text = text_of("refused")
    del MODULES["refused"]
    with pytest.raises(NotOneNest) as refusal:
        derive(tmp_path, "refused", text)
    assert words in str(refusal.value) and "line 12: " in str(refusal.value)


def test_a_module_is_tuned_from_its_file_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my_gate.py").write_text(text_of("rms_norm_gate"))
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
    exported = imported(run.export_path)
    live = load_problem(tmp_path / "my_gate.py").make_model(0)
    mine, inputs = exported.ModelNew.from_module(live), exported.get_inputs()
    with torch.no_grad():
        live.w.copy_(torch.rand(100))
        torch.testing.assert_close(mine(*inputs), live(*inputs))
    assert read_certificate(run.export_path).num_probes == len(check.probes)


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
    assert said.code == 2 and "no loop is generated for" in said.err, said.err
    assert tune("absent.py", cwd=tmp_path).err.startswith("error: absent.py: no such file")
