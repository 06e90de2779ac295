"""Modules whose forward is a family's own reference: real captures, a compiler, a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import tune
from cpu_machine import FACTS, FEW_PASSES, GPP, compiled

from tuner.capture.capture import capture, with_another_batch
from tuner.capture.families import Matched, match_of
from tuner.capture.graph.settings import settings_of
from tuner.capture.match_text import has_clash, matched_text
from tuner.errors import InputError
from tuner.evaluate.modules import differentiable, fused, module_of
from tuner.kernel.binding import bind
from tuner.kernel.family import Family, family_names, load_family
from tuner.planning.deriving import derive_config, derive_operator
from tuner.problem.reference import load_problem
from tuner.space.expression import Expression

TEXT = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {names}):
        {forward}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
X = "torch.rand(48, 20)"
LINEAR = "self.linear, self.norm = nn.Linear(20, 36), nn.BatchNorm1d(36)"
SCALE = "self.s = nn.Parameter(torch.randn(36))"
# Constructor, forward, inputs, the family, and what the module lacks of it.
SAME: dict[str, tuple[str, str, str, str, set[str]]] = {
    "the reference itself": (
        f"{LINEAR}; {SCALE}", "return self.norm(self.linear(x) * self.s)", X,
        "gemm_scale_batchnorm", set(),
    ),
    "operands the other way round, other numbers": (
        "self.linear, self.norm = nn.Linear(20, 36), nn.BatchNorm1d(36, eps=1e-3, momentum=0.3); "
        f"{SCALE}", "return self.norm(self.s * self.linear(x))", X,
        "gemm_scale_batchnorm", set(),
    ),
    "functions with parameters and buffers of its own": (
        "self.w, self.b = nn.Parameter(torch.randn(36, 20)), nn.Parameter(torch.randn(36)); "
        f"{SCALE}; self.g, self.h = nn.Parameter(torch.randn(36)), nn.Parameter(torch.randn(36)); "
        "self.register_buffer('m', torch.zeros(36)); self.register_buffer('v', torch.ones(36))",
        "return F.batch_norm(F.linear(x, self.w, self.b) * self.s, self.m, self.v, self.g, "
        "self.h, training=True, momentum=0.2)", X,
        "gemm_scale_batchnorm", {"bn.num_batches_tracked"},
    ),
    "without a bias": (
        f"self.l, self.n = nn.Linear(20, 36, bias=False), nn.BatchNorm1d(36); {SCALE}",
        "return self.n(self.l(x) * self.s)", X, "gemm_scale_batchnorm", {"gemm.bias"},
    ),
    "without a scale": (
        LINEAR, "return self.norm(self.linear(x))", X, "gemm_scale_batchnorm", {"scale"},
    ),
    "without anything that may be absent": (
        "self.m = nn.Sequential(nn.Linear(20, 36, bias=False), nn.BatchNorm1d(36, affine=False, "
        "track_running_stats=False))", "return self.m(x)", X, "gemm_scale_batchnorm",
        {"gemm.bias", "scale", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var",
         "bn.num_batches_tracked"},
    ),
    "a norm of rows": (
        "self.norm = nn.LayerNorm(20, eps=1e-3)", "return self.norm(x)", X, "layer_norm", set(),
    ),
    "a norm of rows without a bias": (
        "self.g = nn.Parameter(torch.randn(20))",
        "return F.layer_norm(x, (20,), self.g, eps=1e-6)", X, "layer_norm", {"ln.bias"},
    ),
    "a norm of rows of several dimensions": (
        "self.norm = nn.LayerNorm((5, 6, 7))", "return self.norm(x)", "torch.rand(48, 5, 6, 7)",
        "layer_norm", set(),
    ),
    "a norm of rows that lie in several dimensions": (
        "self.norm = nn.LayerNorm(7)", "return self.norm(x)", "torch.rand(48, 5, 6, 7)",
        "layer_norm", set(),
    ),
}  # fmt: skip
# Near a family, and another function all the same.
OTHER = {
    "an activation": (f"{LINEAR}; {SCALE}", "return self.norm(self.linear(x) * self.s).relu()"),
    "a scale behind the norm": (f"{LINEAR}; {SCALE}", "return self.norm(self.linear(x)) * self.s"),
    "no norm": (f"{LINEAR}; {SCALE}", "return self.linear(x) * self.s"),
    "the wrong buffer": (
        f"{LINEAR}; {SCALE}",
        "return F.batch_norm(self.linear(x) * self.s, self.norm.running_var, "
        "self.norm.running_mean, self.norm.weight, self.norm.bias, training=True)"
        ".add(self.norm.running_var)",
    ),
    "a norm of other dimensions": (
        "self.norm = nn.LayerNorm((6, 5))",
        "return self.norm(x.view(-1, 5, 6).transpose(1, 2)).transpose(1, 2)",
    ),
    "a mean of other dimensions": (
        "",
        "x = x.view(-1, 4, 5); return (x - x.mean(1, True)) * torch.rsqrt(x.var(1, False, "
        "keepdim=True) + 1e-5)",
    ),
    "two results": (f"{LINEAR}", "y = self.linear(x); return self.norm(y), y"),
    "another dtype": (f"{LINEAR}; self.double()", "return self.norm(self.linear(x.double()))"),
}  # fmt: skip


def text_of(init: str, forward: str, inputs: str = X) -> str:
    return TEXT.format(init=init, names="x", forward=forward, inputs=inputs)


def matched(folder: Path, text: str, name: str) -> Matched | None:
    path = folder / "module.py"
    path.write_text(text)
    problem = load_problem(path)
    graph = capture(problem)
    family = load_family(name)
    return match_of(
        family.reference, list(family.op.sizes), graph, with_another_batch(problem, graph)
    )


def module_around(folder: Path, text: str, family: Family, found: Matched) -> str:
    problem = load_problem(folder / "module.py")
    graph = capture(problem)
    settings = settings_of(problem.model_without_memory(), True)
    return matched_text(graph, found, text, settings, True, family.model_new)


@pytest.mark.parametrize("name", SAME)
def test_what_a_familys_reference_is_runs_by_its_templates(name, tmp_path):
    init, forward, inputs, op, absent = SAME[name]
    text = text_of(init, forward, inputs)
    found = matched(tmp_path, text, op)
    assert found is not None and found.has_any_batch
    assert {*found.absent, *found.unused} == absent
    family = load_family(op)
    candidate = family.render({"template": "cpu"}, FACTS)
    operator = bind(candidate.plan, "cpp", compiled(candidate, level=FEW_PASSES))
    module = module_of(module_around(tmp_path, text, family, found))
    calls = []

    def counted(*args):
        calls.append(args)
        return operator(*args)

    module |= {**fused(operator), "fused_op": differentiable(counted, module)}
    problem = load_problem(tmp_path / "module.py")
    mine, own = module["ModelNew"](), problem.make_model(0)
    assert [*mine.state_dict()] == [*own.state_dict()]
    mine.load_state_dict(own.state_dict())
    wide = problem.make_model(0).double()
    wide.load_state_dict(own.state_dict())
    for num_calls, batch in enumerate((48, 9), 1):  # one is not the batch that was captured
        (x,) = problem.make_inputs(num_calls, batch=batch)
        answers = []
        for model in (mine, own, wide):
            given = x.to(next(iter(model.parameters()), x).dtype).requires_grad_()
            answer = model(given.double() if model is wide else given)
            weights = list(model.parameters())
            seed = torch.linspace(-1, 1, answer.numel(), dtype=answer.dtype).view_as(answer)
            gradients = torch.autograd.grad(answer, [given, *weights], seed)
            answers.append([answer.detach(), *gradients, *model.buffers()])
        assert len(calls) == num_calls, "a call took the reference's way"
        for got, theirs, true in zip(*answers, strict=True):
            error, limit = (got - true).abs().max(), (theirs - true).abs().max()
            assert error <= 4 * limit + 64 * 2.0**-24 * max(1.0, float(true.abs().max()))
    if op == "gemm_scale_batchnorm":
        mine.eval()(x)
    mine.double().train()(x.double())
    assert len(calls) == 2, "another mode or dtype is the reference's own"


@pytest.mark.parametrize("name", OTHER)
def test_what_is_near_a_family_is_not_it(name, tmp_path):
    inputs = X.replace("20", "30") if "(6, 5)" in OTHER[name][0] else X
    for family in family_names():
        assert matched(tmp_path, text_of(*OTHER[name], inputs), family) is None


def test_names_that_both_files_give_are_a_clash():
    family = load_family("layer_norm").model_new
    assert not has_clash(text_of("", "return x"), family)
    assert has_clash("def backward(x):\n    return x\n", family)
    assert has_clash("from torch.autograd import backward\n", family)


def test_a_config_and_the_command_line_say_which(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module, config = tmp_path / "module.py", tmp_path / "module.yaml"
    init, forward = SAME["a norm of rows"][:2]
    module.write_text(text_of(init, forward))
    assert derive_operator(module).name == "module_forward"
    made = derive_operator(module, match="any")
    assert made.name == "layer_norm" and made.matched == "LayerNorm"
    assert derive_operator(module, match="none").name == "module_forward"
    with pytest.raises(InputError, match="match: expected any or none, got 'some'"):
        derive_operator(module, match="some")
    config.write_text("problem: {module: module.py, match: none}\n")
    assert json.loads(derive_config(config).read_text())["problem"]["op"] == "module_forward"
    given = json.loads(derive_config(config, match="any").read_text())
    assert given["problem"]["op"] == "layer_norm"
    config.write_text(
        "problem: {module: module.py, match: any}\naccuracy: float32\n"
        "space: {template: [cpu], piece: [1024]}\n"
    )
    given = json.loads(derive_config(config).read_text())
    assert given["space"]["template"] == ["cpu"] and given["space"]["piece"] == [1024]
    assert "threads" not in given["space"] and given["accuracy"] == "float32"
    config.write_text("problem: {op: layer_norm}\n")
    with pytest.raises(InputError, match="--match: expected a config of a module"):
        derive_config(config, match="none")
    said = tune("--resume", "somewhere", "--match", "none", cwd=tmp_path)
    assert said.code == 2 and "--match goes with --config" in said.err


def test_where_the_operator_is_never_called_something_is_generated(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module = tmp_path / "module.py"
    module.write_text(text_of(*SAME["the reference itself"][:2]))
    assert derive_operator(module, mode="eval", match="any").name == "module_forward"


def test_a_familys_space_has_parameters_of_its_templates():
    import yaml

    for name in family_names():
        family = load_family(name)
        given = yaml.safe_load((family.reference.parent / "space.yaml").read_text())
        known = {p for template in family.templates.values() for p in template.parameters}
        assert {*given["space"]} <= known
        for rule in given["constraints"]:
            assert Expression.parse(rule["expr"]).names and rule["why"]


@pytest.mark.skipif(GPP is None, reason="no g++ on the PATH")
@pytest.mark.usefixtures("few")
def test_a_matched_module_is_tuned_from_its_file_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    init, forward, inputs = SAME["a norm of rows"][:3]
    (tmp_path / "mine.py").write_text(text_of(init, forward, inputs))
    asked = ("mine.py", "--device", "cpu", "--match", "any")
    said = tune(*asked, "--dry-run", "--json", cwd=tmp_path)
    assert said.code == 0, said.err
    planned = json.loads(said.out)
    assert planned["title"] == "LayerNorm, which is the forward of mine.py"
    assert planned["sizes"] == {"rows": 48, "cols": 20} and planned["accuracy"] == "pytorch"
    assert "mine.py computes what layer_norm does (LayerNorm)" in said.err
    said = tune(*asked, "--effort", "quick", "--trials", "3", cwd=tmp_path)
    assert said.code == 0, said.err
    assert "which is the forward of mine.py" in said.out
    # Where PyTorch is faster the trial's own file stands beside that.
    exported = [path.read_text() for path in tmp_path.glob("runs/*/export/*.py")]
    assert any("class OperatorModule(" in text for text in exported)
