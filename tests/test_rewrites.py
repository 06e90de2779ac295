"""Exact rewrites of captured graphs: named, on structure alone, right for Inf and NaN as well."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import graph_interpreter
import pytest
import torch
from command_line import tune
from cpu_machine import FACTS, FEW_PASSES, GPP, compiled
from test_any_module import answers, assert_as_exact, in_float64
from test_capture import HEAD, model_text

from benchmarks.kernelbench_suite import in_short, is_apart, line_of
from tuner.capture.any_batch import with_batch_numbers
from tuner.capture.capture import capture, with_another_batch
from tuner.capture.derive import derived
from tuner.capture.graph.graph import GRAPH_FILE, Argument, Graph, Node, Ref, Tensor
from tuner.capture.graph.settings import settings_of
from tuner.capture.outline import MODULE_FILE, outline_of
from tuner.capture.rewrites.merging import constant_outputs
from tuner.capture.rewrites.rewriting import RULES, rewritten
from tuner.capture.tasks.step_records import Captured
from tuner.errors import InputError
from tuner.evaluate.modules import fused, module_of
from tuner.kernel.binding import bind
from tuner.kernel.family import load_family
from tuner.planning.deriving import derive_config, derive_operator
from tuner.problem.reference import Problem, load_problem
from tuner.review.gain import Gain, ModuleRecord, graph_lines
from tuner.trial import to_json

X, IMAGE = "torch.randn(5, 6)", "torch.randn(3, 4, 5, 6)"
# The constructor, the forward, the inputs, and the steps that are taken, in their order.
TAKEN: dict[str, tuple[str, str, str, list[str]]] = {
    "bias before BatchNorm": (
        "self.l, self.n = nn.Linear(6, 4), nn.BatchNorm1d(4)",
        "return self.n(self.l(x))", X, ["shift-cancelled"],
    ),
    "bias, scale and a parameter before BatchNorm": (
        "self.l, self.n = nn.Linear(6, 4), nn.BatchNorm1d(4); "
        "self.s, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))",
        "return torch.relu(self.n((self.l(x) * self.s - self.b) * 3.0 + 2.0))", X,
        ["shift-cancelled"],
    ),
    "bias of a convolution before BatchNorm": (
        "self.c, self.n = nn.Conv2d(4, 3, 2), nn.BatchNorm2d(3, momentum=0.3)",
        "return self.n(self.c(x))", IMAGE, ["shift-cancelled"],
    ),
    "bias of a transposed convolution before InstanceNorm": (
        "self.c, self.n = nn.ConvTranspose2d(4, 3, 2), nn.InstanceNorm2d(3, affine=True)",
        "return self.n(self.c(x))", IMAGE, ["shift-cancelled"],
    ),
    "a scaled bias before InstanceNorm": (
        "self.c, self.n = nn.Conv1d(6, 3, 2), nn.InstanceNorm1d(3); "
        "self.s = nn.Parameter(torch.ones(3, 1))",
        "return self.n(self.c(x) * self.s)", "torch.randn(4, 6, 9)", ["shift-cancelled"],
    ),
    "a parameter and a number before LayerNorm": (
        "self.n = nn.LayerNorm(6); self.b = nn.Parameter(torch.ones(1))",
        "return self.n(x + self.b + 3.0)", X, ["shift-cancelled"],
    ),
    "a mean without its dimension": (
        "self.b = nn.Parameter(torch.ones(5, 1))",
        "m = (x + self.b).mean(1); return (x + self.b) - m[:, None], m", X, [],
    ),
    "one value less its mean": (
        "self.b = nn.Parameter(torch.ones(5, 1))",
        "h = x + self.b; m = h.mean(1); return h - m[:, None], m", X, ["shift-cancelled"],
    ),
    "numbers": (
        "pass",
        "y = torch.tanh(2.0 * x * 3) / 0.5 / 0.25; z = torch.sigmoid(x) * 2; "
        "return torch.exp(x * 0.5 / 3 * -0.1), y, z + z, torch.sin(x + 2 + 0.5 - -4)", X,
        ["factors-merged"] * 6 + ["terms-merged"] * 2,
    ),
    "bounds": (
        "pass",
        "y = torch.relu(x); return torch.relu(x.sin()).clamp(max=6).clamp(0.5, 9), "
        "torch.clamp(x.clamp(min=-1), max=-3.0), y.exp(), F.leaky_relu(y, 0.1) * 0.5, "
        "(x.exp() * 1 / 1.0 - 0).sin()", X,
        ["step-without-effect"] * 4 + ["bounds-merged"] * 3,
    ),
    "logsumexp of one": (
        "pass", "y = x.sum(1, keepdim=True); z = torch.logsumexp(y.sin(), 1); "
        "return torch.logsumexp(y, 1, keepdim=True) * 2, z", X, ["logsumexp-of-one"] * 2,
    ),
    "sum of a Linear": ("self.l = nn.Linear(6, 4)", "return self.l(x).sum(1)", X,
                        ["sum-of-linear"]),
    "scaled mean of a Linear": (
        "self.l = nn.Linear(6, 4); self.b = nn.Parameter(torch.ones(4))",
        "h = (self.l(x) * -3 - self.b + 2.0) / 7; "
        "return (h + x[:, :1] + x[:, 2:]).mean(-1, keepdim=True)",
        "torch.randn(2, 5, 6)[0]", ["sum-of-linear"],
    ),
    "sum of a product": ("self.w = nn.Parameter(torch.ones(4, 6))",
                         "return (x @ self.w.t()).sum(-1), (x @ y).mean(-1)",
                         f"torch.randn(2, 5, 6), {X.replace('5', '6')}", ["sum-of-linear"] * 2),
}  # fmt: skip


def seen(tmp_path: Path, init: str, forward: str, inputs: str) -> tuple[Problem, Graph]:
    """Return a module's file, and what was captured of it."""
    names = "x, y" if "@ y" in forward else "x"
    path = tmp_path / "module.py"
    path.write_text(HEAD + model_text(init, forward, inputs, names))
    problem = load_problem(path)
    return problem, capture(problem)


def in_real_numbers(graph, problem, inputs) -> tuple[list, list, list, list]:
    """Run a graph and its module in float64; return outputs and buffers of both."""
    model = problem.make_model(0)
    problem.randomise(model, 1)
    model = model.double()
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    given = [graph_interpreter.wide(x) for x in inputs]
    found, updates = graph_interpreter.run(graph, given, state)
    with torch.no_grad():
        own = answers(model(*given))
    buffers = dict(model.named_buffers())
    return found, own, [updates[name] for name in updates], [buffers[name] for name in updates]


@pytest.mark.parametrize("name", TAKEN)
def test_a_rewritten_graph_computes_the_same_for_every_kind_of_value(name, tmp_path):
    init, forward, inputs, steps = TAKEN[name]
    problem, graph = seen(tmp_path, init, forward, inputs)
    after = rewritten(graph)
    assert [step.name for step in after.rewrites] == steps
    assert all(step.line and step.text for step in after.rewrites)
    assert rewritten(after) == after and (after.key == graph.key) == (not steps)
    for value in (None, math.inf, -math.inf, math.nan, 0.0, 1e-40, 1e15):
        given = problem.make_inputs(2)
        for x in given[:1] if value is not None else []:
            x.view(-1)[[0, 3]] = torch.tensor([value, -value if value == 1e15 else value])
        found, own, buffers, kept = in_real_numbers(after, problem, given)
        for one, other in [*zip(found, own, strict=True), *zip(buffers, kept, strict=True)]:
            atol = 1e-10 if value != 1e15 else 1e2
            torch.testing.assert_close(one, other, rtol=1e-6, atol=atol, equal_nan=True)


LEFT = {
    "a scale that may be infinite before BatchNorm": (
        "self.l, self.n, self.s = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Parameter(torch.ones(4))",
        "return self.n(self.l(x) * self.s)", X,
    ),
    "pointwise": (
        "pass",
        "y, z, u = x * 2, x.exp(), torch.reciprocal(x.round() + 0); "
        "return y * 3, y.exp(), u, z, z / 1, torch.sin(x + 0.1 + 0.2) + torch.cos(x + 1 - 1)", X,
    ),
    "BatchNorm in eval mode": ("self.l, self.n = nn.Linear(6, 4), nn.BatchNorm1d(4); self.eval()",
                               "return self.n(self.l(x))", X),
    "what makes a value larger": ("self.b = nn.Parameter(torch.ones(5, 1))",
                                  "h = self.b - x[:1]; return h - h.mean(1, keepdim=True)", X),
    "biases that are needed": (
        "self.l, self.n, self.m = nn.Linear(6, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)",
        "h = self.l(x); return self.n(self.l(x)), h + self.m(h)", X,
    ),
    "sums of something else": ("self.l = nn.Linear(6, 4)",
                               "return self.l(x).relu().sum(1), self.l(x).sum(0)", X),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_might_differ_or_gains_nothing_is_left(name, tmp_path):
    _, graph = seen(tmp_path, *LEFT[name])
    assert rewritten(graph) == graph and not graph.rewrites


def test_what_cancels_is_no_difference_from_itself(tmp_path):
    """A compiler fuses a product with the subtraction of it: what is left is its rounding."""
    init, forward, inputs, _ = TAKEN["a scaled bias before InstanceNorm"]
    _, graph = seen(tmp_path, init, forward, inputs)
    nodes = rewritten(graph).nodes
    assert not [node for node in nodes if node.op == "sub" and node.args[0] == node.args[1]]
    assert [node for node in nodes if node.op == "mul" and 0.0 in node.args[1:]]


def test_weights_that_are_no_numbers_show_as_in_the_module(tmp_path):
    init = "self.l, self.n, self.m = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(6, 3)"
    forward = "return self.n(self.l(x)), self.m(x).mean(1)"
    problem, graph = seen(tmp_path, init, forward, X)
    after = rewritten(graph)
    assert [step.name for step in after.rewrites] == ["shift-cancelled", "sum-of-linear"]
    inputs = in_float64(problem.make_inputs(1))
    infinite = inputs[0].clone().index_fill_(1, torch.tensor([0]), math.inf)
    for weight in (math.inf, -math.inf, math.nan, 0.0):
        for parameter in ("l.bias", "l.weight", "m.weight", "m.bias"):
            for x in (inputs[0], infinite):
                model = problem.make_model(0).double()
                dict(model.named_parameters())[parameter].data.view(-1)[0] = weight
                state = {k: v.detach().clone() for k, v in model.state_dict().items()}
                found, updates = graph_interpreter.run(after, [x], state)
                torch.testing.assert_close(found, list(model(x)), equal_nan=True)
                for name, buffer in model.named_buffers():
                    torch.testing.assert_close(
                        updates[name], buffer, rtol=1e-6, atol=1e-8, equal_nan=True
                    )


NUMBERS = [1.0, 2.0, 3.0, 0.1, 0.5, -7.0, 16777217.0, 1e30, 1e-30, 1e-40, 3e38, 2.0**-126, 1e300]
ODD = [0.0, 1.0, -1.1, 3e38, 1.2e38, -2e30, 1e-38, 1e-44, -1e-20, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("ops", [("mul", "mul"), ("mul", "div"), ("div", "mul"), ("div", "div"),
                                 ("add", "add"), ("add", "sub"), ("sub", "sub")])  # fmt: skip
def test_merged_numbers_give_infinities_where_they_did_and_no_larger_errors(ops):
    x = Tensor("x", (len(ODD),), "float32")
    values = torch.tensor(ODD + [-n for n in NUMBERS], dtype=torch.float32)
    count = 0
    for first in NUMBERS:
        for second in NUMBERS:
            pairs = zip(ops, (("x", first), ("a", second)), "ab", strict=True)
            nodes = [
                Node(n, op, (Ref(v), k), {}, x.shape, "float32", 1) for op, (v, k), n in pairs
            ]
            graph = Graph((Argument("x", True),), (x,), (), (), (), tuple(nodes), ("b",))
            found = rewritten(graph)
            if not any(step.name.endswith("-merged") for step in found.rewrites):
                continue
            count += 1
            (node,) = found.nodes
            own, exact = values, values.double()
            for each in nodes:
                own = getattr(torch, each.op)(own, each.args[1])
                exact = getattr(torch, each.op)(exact, each.args[1])
            merged = getattr(torch, node.op)(values, node.args[1])
            assert torch.equal(merged.isnan(), own.isnan())
            assert torch.equal(merged.isinf(), own.isinf())
            is_number = own.isfinite()
            error, limit = ((y - exact)[is_number].abs() for y in (merged, own))
            assert (error <= 2 * limit + 2.0**-23 * exact[is_number].abs() + 2.0**-149).all()
    assert count >= 5


def test_outputs_that_are_the_same_for_all_finite_inputs_are_named(tmp_path):
    forward = (
        "h = x.amax(1, keepdim=True); s = torch.softmax(x.sum(1, keepdim=True), 1); "
        "c = torch.min(x, torch.tensor(0.0)).clamp(0.0, 1.0); "
        "z = x - x.reshape(6, 5).reshape(5, 6).clone(); "
        "return F.gelu(h - h.mean(1, keepdim=True)), s, c, z, x - x.flip(1), x[:, :1] - x[:1, :5]"
    )
    problem, graph = seen(tmp_path, "pass", forward, X)
    assert constant_outputs(graph) == graph.outputs[:4]
    for found in (graph, rewritten(graph)):
        runs = [
            graph_interpreter.run(found, in_float64(problem.make_inputs(seed)), {})[0]
            for seed in (1, 2)
        ]
        same = [torch.equal(one, other) for one, other in zip(*runs, strict=True)]
        assert same == [True] * 4 + [False] * 2


@pytest.mark.parametrize("most", ["20.0", "10.0"])
def test_a_bound_that_depends_on_the_batch_is_no_number_to_merge(most, tmp_path):
    """Of 16 and 17 rows the least of it and 20 is the number of rows, and 10 at both."""
    forward = f"return torch.exp(x).clamp(max={most}).clamp(max=len(x)).sin()"
    problem, graph = seen(tmp_path, "pass", forward, "torch.randn(16, 40)")
    other = with_another_batch(problem, graph)
    assert other is not None
    assert rewritten(graph).rewrites
    for captured in with_batch_numbers(Captured(graph), Captured(other)):
        assert not rewritten(captured.graph).rewrites


BOTH = (
    "self.l, self.n = nn.Linear(9, 7), nn.BatchNorm1d(7, momentum=0.3); "
    "self.m, self.b = nn.Linear(9, 70), nn.Parameter(torch.randn(70))",
    "h = torch.relu(self.n(self.l(x) * 2.0)); p = (self.m(x) / 3 - self.b).mean(1, keepdim=True); "
    "return h, torch.logsumexp(p, 1), torch.tanh(x * 2 * 3 + 1 + 2).clamp(-0.5).clamp(max=0.25)",
    "torch.randn(40, 9)",
)


def compiled_module(problem: Problem, after: Graph, folder: Path) -> tuple[dict, list]:
    """Return the text of a module around a rewritten graph's operator, executed, and its calls."""
    module = folder / "module.py"
    settings = settings_of(problem.make_model(0), False)
    made = derived(Captured(after), module.read_text(), "both", settings, False, folder / "made")
    family = load_family(made.name, [made.folder])
    candidate = family.render({"template": "nest"}, FACTS)
    operator = bind(candidate.plan, "cpp", compiled(candidate, level=FEW_PASSES))
    calls = []

    def counted(*args):
        calls.append(args)
        return operator(*args)

    text = module_of(family.model_new)
    text |= {**fused(operator), "fused_op": counted}
    return text, calls


@pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
@pytest.mark.parametrize("forward", ["self.l(x).sum(1)", "(-3 * self.l(x)).mean(1)"])
def test_weights_whose_sum_is_past_the_largest_number_are_summed_smaller(forward, tmp_path):
    """As in the module, whose products are of ordinary size."""
    problem, graph = seen(tmp_path, "self.l = nn.Linear(6, 9)", f"return {forward}", X)
    after = rewritten(graph)
    assert "sum-of-linear" in {step.name for step in after.rewrites}
    text, calls = compiled_module(problem, after, tmp_path)
    model = text["ModelNew"]()
    (x,) = problem.make_inputs(1)
    x[0, 0] = math.inf
    sizes = (2.0**126, -(2.0**127), 1.5 * 2.0**125, 1.0, 2.0**-140)
    for size in sizes:
        with torch.no_grad():
            model.l.weight.copy_(size * torch.tensor([0.5, 1.0])[torch.randint(2, (9, 6))])
            model.l.weight[:, 1:4] /= 2.0**100
            given = x * 2.0**-128 if abs(size) > 1 else x
            found = model(given)
        assert size < 1 or found[1:].isfinite().all()
        exact = copy.deepcopy(model).double()
        wanted = text["Model"].forward(exact, given.double()).float()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-44)
    assert len(calls) == len(sizes), "a call took the reference's way"


@pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
def test_the_operator_computes_the_same_and_leaves_gradients_to_the_reference(tmp_path):
    problem, graph = seen(tmp_path, *BOTH)
    after = rewritten(graph)
    assert {step.name for step in after.rewrites} == RULES.keys() - {"step-without-effect"}
    text, calls = compiled_module(problem, after, tmp_path)
    mine, own, wide = text["ModelNew"](), problem.make_model(0), problem.make_model(0).double()
    for model in (mine, wide):
        model.load_state_dict(own.state_dict())
    for number, value in enumerate((None, 0.0, 1e4, math.inf, -math.inf, math.nan)):
        (x,) = problem.make_inputs(number)
        if value is not None:
            x[3, 2] = x[5, 0] = value
        with torch.no_grad():
            found, theirs, exact = mine(x), own(x), wide(x.double())
        buffers = [dict(m.named_buffers()).values() for m in (mine, own, wide)]
        if value is None or math.isfinite(value):
            assert_as_exact(found, theirs, exact)
            assert_as_exact(*buffers)
            continue
        for got, true in zip((*found, *buffers[0]), (*exact, *buffers[2]), strict=True):
            torch.testing.assert_close(got.double(), true.double(), equal_nan=True, rtol=1e-4,
                                       atol=1e-5)  # fmt: skip
        for model in (mine, own, wide):
            model.n.reset_running_stats()
    assert len(calls) == 6, "a call took the reference's way"
    x = torch.randn(40, 9, requires_grad=True)
    wanted = [g for m in (mine, own) for g in torch.autograd.grad(m(x)[0].sum(), (x, m.l.weight))]
    assert len(calls) == 6
    torch.testing.assert_close(wanted[:2], wanted[2:])


def test_none_leaves_the_graph_as_it_was_captured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, graph = seen(tmp_path, *TAKEN["sum of a Linear"][:3])
    config, module = tmp_path / "module.yaml", tmp_path / "module.py"
    config.write_text("problem: {module: module.py, rewrites: none}\n")
    with pytest.raises(InputError, match="rewrites: expected exact or none, got 'some'"):
        derive_operator(module, rewrites="some")

    def graph_of(folder: Path) -> str:
        (path,) = folder.glob(f"*/{GRAPH_FILE}")
        return path.read_text().strip()

    assert graph_of(derive_config(config).parent) == to_json(graph)
    found = graph_of(derive_config(config, rewrites="exact").parent)
    assert found == to_json(rewritten(graph)) != to_json(graph)
    config.write_text("problem: {op: layer_norm}\n")
    assert derive_config(config) == config
    with pytest.raises(InputError, match="--rewrites: expected a config of a module"):
        derive_config(config, rewrites="none")
    said = tune("--resume", "somewhere", "--rewrites", "none", cwd=tmp_path)
    assert said.code == 2 and "--rewrites goes with --config" in said.err


def test_a_suite_keeps_collapsed_and_constant_problems_apart(tmp_path):
    linear = "self.l = nn.Linear(6, 4)"
    forwards = {"return self.l(x).sum(1)": "collapsed", "return self.l(x) * 2 * 3": "",
                "y = self.l(x).amax(1); return F.gelu(y - y)": "constant"}  # fmt: skip
    for forward, said in forwards.items():
        outline = outline_of(rewritten(seen(tmp_path, linear, forward, X)[1]))
        gain = Gain("cpu", False, outline.read_bytes, outline.written_bytes, outline.flops, None)
        (tmp_path / MODULE_FILE).write_text(to_json(ModuleRecord(outline, gain)))
        entry = {"seconds": 1.0, **in_short({"kind": "faster", "path": str(tmp_path)})}
        assert is_apart(entry) == bool(said) and said in line_of("file", entry)
        assert entry["rewrites"] == [step.name for step in outline.rewrites]
        lines = "\n".join(graph_lines(outline))
        assert all(f"rewritten: {step.words}" in lines for step in outline.rewrites)
        assert ("constant for all finite" in lines) == (said == "constant")
