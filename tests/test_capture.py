"""A forward captured as a graph: run in float64 it is the module; what cannot be is refused."""

from __future__ import annotations

import re
import resource
import textwrap
from pathlib import Path

import graph_interpreter
import pytest
import torch

from tuner.capture.capture import capture
from tuner.capture.graph.graph import Graph, Ref
from tuner.capture.graph.vocabulary import VOCABULARY
from tuner.errors import CaptureError, InputError
from tuner.problem.reference import Problem, load_problem
from tuner.trial import from_json, to_json

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"


def problem_of(tmp_path: Path, text: str) -> Problem:
    path = tmp_path / "module.py"
    path.write_text(HEAD + textwrap.dedent(text))
    return load_problem(path)


def model_text(init: str, forward: str, inputs: str, arguments: str = "x") -> str:
    """Return a file; `init` and `forward` are lines apart by `;`."""
    body = "\n".join(f"        {line.strip()}" for line in forward.split(";"))
    made = "\n".join(f"        {line.strip()}" for line in init.split(";"))
    return (
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"{made}\n    def forward(self, {arguments}):\n{body}\n"
        f"def get_inputs():\n    return [{inputs}]\ndef get_init_inputs():\n    return []\n"
    )


def captured(tmp_path: Path, init: str, forward: str, inputs: str, arguments: str = "x") -> Graph:
    """Capture a module, run its graph in float64, and compare it with the module itself."""
    problem = problem_of(tmp_path, model_text(init, forward, inputs, arguments))
    graph = capture(problem)
    assert_computes_the_same(graph, problem)
    return graph


def assert_computes_the_same(graph: Graph, problem: Problem, mode: str = "as_given") -> None:
    assert to_json(from_json(Graph, to_json(graph))) == to_json(graph)
    model = problem.make_model(0)
    problem.randomise(model, 1)
    model = model.double()
    if mode == "eval":
        model.eval()
    inputs = [
        graph_interpreter.wide(x) if isinstance(x, torch.Tensor) else x
        for x in problem.make_inputs(2)
    ]
    state = {
        **{name: p.detach().clone() for name, p in model.named_parameters()},
        **{name: b.clone() for name, b in model.named_buffers()},
    }
    outputs, updates = graph_interpreter.run(graph, inputs, state)
    with torch.no_grad():
        result = model(*inputs)
    expected = list(result) if isinstance(result, (tuple, list)) else [result]
    assert len(outputs) == len(expected)
    for found, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    for name, wanted in model.named_buffers():
        found = updates.get(name, state[name])
        # PyTorch rounds n / (n - 1) to float32 where the capture was in float32.
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


X = "torch.randn(4, 6)"
IMAGE = "torch.randn(2, 6, 8, 8)"

MODULES = {
    "rolled": (
        "pass",
        "return x.roll(2), x.roll((1, -2), (0, 1)), x.roll(7, 1), torch.roll(x, -1, -1) * x",
        X,
    ),
    "rms norm and gate": (
        "self.weight = nn.Parameter(torch.ones(6))",
        "r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6); "
        "return x * r * self.weight * F.silu(gate)",
        f"{X}, {X}",
        "x, gate",
    ),
    "torch's rms norm": ("self.n = nn.RMSNorm(6, eps=1e-5)", "return self.n(x)", X),
    "LayerNorm": ("self.n = nn.LayerNorm(6)", "return self.n(x)", X),
    "LayerNorm over two axes": ("self.n = nn.LayerNorm((8, 8))", "return self.n(x)", IMAGE),
    "softmax over the last axis": ("pass", "return F.softmax(x, dim=-1)", X),
    "softmax over axis 1": ("pass", "return torch.softmax(x, 1)", IMAGE),
    "log_softmax": ("pass", "return F.log_softmax(x, dim=-1)", X),
    "logsumexp": ("pass", "return torch.logsumexp(x, dim=1, keepdim=True)", X),
    "gelu": ("pass", "return F.gelu(x)", X),
    "gelu by tanh": ("pass", "return F.gelu(x, approximate='tanh')", X),
    "linear, gelu, residual": (
        "self.a = nn.Linear(6, 6)",
        "return x + F.gelu(self.a(x))",
        X,
    ),
    "linear without bias": ("self.a = nn.Linear(6, 3, bias=False)", "return self.a(x)", X),
    "BatchNorm1d": ("self.n = nn.BatchNorm1d(6)", "return self.n(x)", X),
    "BatchNorm2d, cumulative": (
        "self.n = nn.BatchNorm2d(6, momentum=0.3, affine=False)",
        "return F.relu(self.n(x))",
        IMAGE,
    ),
    "BatchNorm without statistics": (
        "self.n = nn.BatchNorm2d(6, track_running_stats=False)",
        "return self.n(x)",
        IMAGE,
    ),
    "InstanceNorm": ("self.n = nn.InstanceNorm2d(6, affine=True)", "return self.n(x)", IMAGE),
    "GroupNorm": ("self.n = nn.GroupNorm(3, 6)", "return self.n(x)", IMAGE),
    "cross entropy": (
        "pass",
        "return F.cross_entropy(x, labels)",
        f"{X}, torch.randint(0, 6, (4,))",
        "x, labels",
    ),
    "losses": (
        "pass",
        "return F.mse_loss(x, y), F.smooth_l1_loss(x, y), F.huber_loss(x, y), "
        "F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), reduction='batchmean')",
        f"{X}, {X}",
        "x, y",
    ),
    "triplet loss": (
        "self.l = nn.TripletMarginLoss(margin=1.0)",
        "return self.l(x, y, z)",
        f"{X}, {X}, {X}",
        "x, y, z",
    ),
    "hinge loss": (
        "pass",
        "return torch.mean(torch.clamp(1 - x * y, min=0))",
        f"{X}, torch.randint(0, 2, (4, 6)).float() * 2 - 1",
        "x, y",
    ),
    "convolution, bias, relu": (
        "self.c = nn.Conv2d(6, 4, 3, stride=2, padding=1); "
        "self.b = nn.Parameter(torch.ones(4, 1, 1))",
        "return F.relu(self.c(x) + self.b)",
        IMAGE,
    ),
    "convolutions": (
        "self.a = nn.Conv2d(6, 6, (2, 3), padding='same', groups=3); "
        "self.b = nn.ConvTranspose2d(6, 2, 3, stride=2, output_padding=1, bias=False); "
        "self.c = nn.Conv1d(8, 2, 3, padding='valid', dilation=2)",
        "return self.b(self.a(x)), self.c(x[0])",
        IMAGE,
    ),
    "pools": (
        "self.p = nn.MaxPool2d(3, stride=2, padding=1); self.q = nn.AvgPool2d(2); "
        "self.r = nn.AdaptiveAvgPool2d((1, 1)); self.s = nn.AvgPool1d(3, ceil_mode=True)",
        "return self.p(x), self.q(x), self.r(x), self.s(x[0]), F.max_pool1d(x[0], 2)",
        IMAGE,
    ),
    "attention": (
        "pass",
        "return F.scaled_dot_product_attention(q, k, v, is_causal=True), "
        "F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.5)",
        "*(torch.randn(2, 3, 5, 4) for _ in range(3)), torch.rand(5, 5) > -1.0",
        "q, k, v, m",
    ),
    "two outputs": ("pass", "a = x.exp(); return a, a.sum(0)", X),
    "a list of outputs, one twice": ("pass", "a = x * 2; return [a, a]", X),
    "an input comes back": ("pass", "return x, x + 1", X),
    "scalars": ("pass", "return x * s + n if flag else x", f"{X}, 3.25, 2, True", "x, s, n, flag"),
    "a scalar that operators want as a number": (
        "pass",
        "return F.leaky_relu(x, s)",
        f"{X}, 0.25",
        "x, s",
    ),
    "a constant in forward": (
        "self.t = torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0, 6.0])",
        "return torch.min(x, torch.tensor(0.5)) + self.t",
        X,
    ),
    "bool mask and whole numbers": (
        "pass",
        "return torch.cumsum(x * mask, dim=1), (n // 2 + n * mask).sum(1), n / 2 + x",
        f"{X}, torch.rand(4, 6) > 0.5, torch.randint(0, 9, (4, 6))",
        "x, mask, n",
    ),
    "masked_fill with -inf": (
        "self.register_buffer('mask', torch.tril(torch.ones(6, 6)))",
        "a = x.t() @ x; return F.softmax(a.masked_fill(self.mask == 0, float('-inf')), -1)",
        X,
    ),
    "numbers where a mask says": (
        "pass",
        "y = x + 1; y[m] = 0.0; y[n] = -1.0; return y",
        f"{X}, torch.rand(4) > 0.5, torch.rand(4, 6) > 0.5",
        "x, m, n",
    ),
    "tied parameters": (
        "self.a = nn.Linear(6, 6); self.b = nn.Linear(6, 6); self.b.weight = self.a.weight",
        "return self.b(self.a(x))",
        X,
    ),
    "a buffer of one's own": (
        "self.register_buffer('count', torch.zeros(6)); self.register_buffer('t', torch.ones(6))",
        "self.count += x.sum(0); self.t.mul_(2); return x * self.count",
        X,
    ),
    "in-place on intermediates": (
        "self.r = nn.ReLU(inplace=True)",
        "y = x + 1; y[:, 2:4] = 0; y[0].mul_(3); return self.r(y)",
        X,
    ),
    "reductions": (
        "pass",
        "return x.amax(1), x.max(), x.min(1)[0], x.max(dim=1)[1], x.prod(1), x.var(), "
        "x.std(0), x.argmin(0), x.norm(dim=1), x.argmax(), torch.norm(x), x.max(1).values",
        X,
    ),
    "index maps": (
        "pass",
        "return x.flip(1).t()[1:5:2], x.reshape(3, 8)[-1], torch.stack([x, x], 1), "
        "torch.cat(x.split(2, 1), 0), x[:, None].expand(4, 3, 6), "
        "F.pad(x, (1, 2, 0, 1), value=2.0), "
        "x.repeat(2, 1), x.chunk(3, 1)[1], x.unbind(0)[2], x.unsqueeze(0).squeeze(), "
        "torch.einsum('ij,kj->ik', x, x), torch.roll(x, 1, 1)",
        X,
    ),
    "activations": (
        "pass",
        "return F.mish(x), F.hardswish(x), F.hardsigmoid(x), F.hardtanh(x), F.relu6(x), "
        "F.softplus(x), F.logsigmoid(x), F.elu(x, 0.5), F.selu(x), F.leaky_relu(x), F.celu(x), "
        "F.softsign(x), torch.sigmoid(x), F.glu(x), F.tanhshrink(x), F.threshold(x, 0.1, 2.0)",
        X,
    ),
    "pointwise": (
        "pass",
        "return torch.atan2(x, y), 2 - x, 1 / (x * x + 1), torch.pow(2.0, x), x.abs() ** 0.5, "
        "torch.where(x > y, x, y), torch.lerp(x, y, 0.3), torch.addcmul(x, x, y, value=2), "
        "torch.isnan(x), ~(x > 0), x.clamp(max=0.5), x.sign(), torch.add(x, y, alpha=3), x % 2.0, "
        "torch.round(x), torch.div(x, y, rounding_mode='floor'), torch.sub(1, x, alpha=2)",
        f"{X}, {X}",
        "x, y",
    ),
    "triangles": ("pass", "return torch.tril(x @ x.T), torch.triu(x, 1), x.diagonal()", X),
    "products": (
        "self.b = nn.Parameter(torch.randn(6))",
        "return torch.addmm(self.b, x @ x.t(), x, alpha=2, beta=3), torch.bmm(y, y), y @ y[0], "
        "torch.mv(x, self.b), torch.baddbmm(y, y, y)",
        f"{X}, torch.randn(2, 3, 3)",
        "x, y",
    ),
    "several results": (
        "pass",
        "v, i = torch.topk(x, 2); w, j = torch.sort(x, 1); return v, i, j, x.cummax(1)[0]",
        X,
    ),
    "a recurrent layer": (
        "self.l = nn.GRU(6, 5, batch_first=True)",
        "y, h = self.l(x); return y, h",
        "torch.randn(2, 3, 6)",
    ),
    "an embedding": (
        "self.e = nn.Embedding(9, 6)",
        "return self.e(n).sum(1)",
        "torch.randint(0, 9, (4, 5))",
        "n",
    ),
    "multi-head attention": (
        "self.a = nn.MultiheadAttention(6, 2, batch_first=True)",
        "return self.a(x, x, x, need_weights=False)[0]",
        "torch.randn(2, 5, 6)",
    ),
    "half precision inside": (
        "pass",
        "return (x.to(torch.bfloat16).float() > y).double() + n.float()",
        f"torch.ones(4, 6), {X}, torch.ones(6, dtype=torch.int32)",
        "x, y, n",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_graph_computes_what_the_module_computes_by_nodes_of_the_vocabulary(name, tmp_path):
    """They stand in order, and have lines."""
    graph = captured(tmp_path, *MODULES[name])
    known = {tensor.name for tensor in graph.given}
    num_lines = len((tmp_path / "module.py").read_text().splitlines())
    for node in graph.nodes:
        assert set(node.refs) <= known
        assert node.name not in known
        known.add(node.name)
        assert node.op.startswith("aten.") or set(node.attrs) == set(VOCABULARY[node.op].attrs)
        assert 0 < node.line <= num_lines
        assert node.kind
    assert set(graph.outputs) <= known


def test_a_quotient_that_is_rounded_down_is_the_exact_ones(tmp_path):
    """1.0 // 0.1 is 9: the quotient of the two rounds to 10."""
    problem = problem_of(
        tmp_path, model_text("pass", "return x // 0.1, x // y", f"{X}, {X}", "x, y")
    )
    graph = capture(problem)
    ones, tenths = torch.ones(4, 6), torch.full((4, 6), 0.1)
    found, _ = graph_interpreter.run(graph, [ones, tenths], {})
    assert all(bool((each == 9.0).all()) for each in found)


# ---- what a graph says beside its nodes -----------------------------------------------------


def test_batch_norm_in_training_updates_its_buffers(tmp_path):
    text = model_text("self.n = nn.BatchNorm1d(6)", "return self.n(x)", X)
    graph = capture(problem_of(tmp_path, text))
    assert set(graph.buffer_updates) == {
        "n.running_mean",
        "n.running_var",
        "n.num_batches_tracked",
    }
    assert graph.is_training
    assert {"mean", "var"} <= {node.op for node in graph.nodes}


def test_in_eval_mode_batch_norm_reads_its_buffers_and_dropout_is_nothing(tmp_path):
    init = "self.n = nn.BatchNorm1d(6); self.d = nn.Dropout(0.5)"
    problem = problem_of(tmp_path, model_text(init, "return self.d(self.n(x))", X))
    graph = capture(problem, mode="eval")
    assert not graph.is_training
    assert graph.buffer_updates == {}
    assert "var" not in {node.op for node in graph.nodes}
    assert_computes_the_same(graph, problem, "eval")
    # Scaled first, as PyTorch's kernels do: the deviation times 1 / sqrt(var) alone overflows.
    state = problem.make_model(0).double().state_dict()
    state |= {"n.weight": state["n.weight"] * 1e-6, "n.running_var": state["n.running_var"] * 0.3}
    (found,), _ = graph_interpreter.run(
        graph, [torch.full((4, 6), 1.5e308, dtype=torch.float64)], state
    )
    assert found.isfinite().all() and float(found[0, 0]) > 1e302


def test_parameters_have_their_names_and_tied_ones_one_of_them(tmp_path):
    graph = captured(tmp_path, *MODULES["tied parameters"])
    assert {t.name for t in graph.parameters} == {"a.weight", "a.bias", "b.bias"}


def test_a_number_stays_an_argument_where_operators_take_tensors(tmp_path):
    graph = captured(tmp_path, *MODULES["scalars"])
    fixed = {argument.name: argument.is_fixed for argument in graph.arguments}
    assert fixed == {"x": False, "s": False, "n": True, "flag": True}
    assert Ref("s") in {arg for node in graph.nodes for arg in node.args}
    graph = captured(tmp_path, *MODULES["a scalar that operators want as a number"])
    assert graph.arguments[1].is_fixed and graph.arguments[1].value == 0.25


def test_an_input_and_a_parameter_of_one_name_are_two_values(tmp_path):
    init = "self.x = nn.Parameter(torch.ones(6))"
    graph = captured(tmp_path, init, "return self.x * x", X)
    assert {t.name for t in graph.given} == {"x", "x_"}


def test_the_key_ignores_names_and_sees_what_is_computed(tmp_path):
    def key(init: str, forward: str, arguments: str = "x, y") -> str:
        text = model_text(init, forward, f"{X}, {X}", arguments)
        return capture(problem_of(tmp_path, text)).key

    init = "self.w = nn.Parameter(torch.ones(6)); self.v = nn.Parameter(torch.zeros(6))"
    first = key(init, "a = x * self.w; b = y * self.v; return a + b")
    assert key(init, "b = y * self.v; a = x * self.w; return a + b") == first
    renamed = init.replace("self.w", "self.other")
    assert key(renamed, "return p * self.other + q * self.v", "p, q") == first
    assert key(init, "return x * self.w + y * self.w") != first
    assert key(init, "return x * self.w - y * self.v") != first
    assert key(init, "return y * self.w + x * self.v") != first


def test_users_and_values_by_name(tmp_path):
    graph = capture(problem_of(tmp_path, model_text("pass", "return x * x + x", X)))
    square, total = graph.nodes
    assert graph.users["x"] == (square, total)
    assert graph.value("x") == graph.inputs[0]
    assert graph.value(total.name) is total
    with pytest.raises(KeyError):
        graph.value("y")


def test_nothing_of_100_gigabytes_is_allocated(tmp_path):
    text = model_text(
        "self.a = nn.Linear(1 << 17, 1 << 17)",
        "return F.relu(self.a(x))",
        "torch.rand(1 << 18, 1 << 17)",
    )
    problem = problem_of(tmp_path, text)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = capture(problem)
    values = [*graph.given, *map(graph.value, graph.outputs)]
    assert sum(value.num_bytes for value in values) > 300e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6  # KiB


def test_what_the_file_prints_is_not_on_stdout(tmp_path, capsys):
    problem = problem_of(tmp_path, model_text("print('made')", "print('called', x); return x", X))
    capture(problem)
    out, err = capsys.readouterr()
    assert out == "" and "made" in err and "called" in err


# ---- what is refused ------------------------------------------------------------------------

REFUSALS = {
    "a branch on data": (
        "pass",
        "if x.sum() > 0:;     return x;return -x",
        X,
        r":9: .*decides by the values of a tensor: if x.sum\(\) > 0:",
        "torch.where",
    ),
    "a guard": (
        "pass",
        "if (x < 0).any():;     raise ValueError('negative');return x.sqrt()",
        X,
        r":9: .*refuses by the values of a tensor: if \(x < 0\).any\(\):",
        "who calls it",
    ),
    "an assertion": (
        "pass",
        "assert (x >= 0).all(), 'negative';return x.sqrt()",
        X,
        r":9: .*refuses by the values of a tensor: assert",
        "who calls it",
    ),
    "a momentum that counts": (
        "self.b = nn.BatchNorm1d(4, momentum=None)",
        "return self.b(x)",
        "torch.rand(8, 4)",
        r":9: .*decides by the values of a tensor within PyTorch: return self.b",
        "momentum",
    ),
    "item": ("pass", "return x * x.max().item()", X, r":9: .*a number out of a tensor", "item"),
    "item in a branch": (
        "pass",
        "n = int(x.max().item());return x[:n]",
        X,
        r":9: ",
        "next",
    ),
    "a size by values": ("pass", "return x[x > 0]", X, r":9: ", "next"),
    "dropout": (
        "self.d = nn.Dropout(0.1)",
        "return self.d(x)",
        X,
        r":9: .*draws random numbers",
        "--mode eval",
    ),
    "random numbers": (
        "pass",
        "return x + torch.rand_like(x)",
        X,
        r":9: .*draws random numbers",
        r"get_inputs\(\)",
    ),
    "a number returned": ("pass", "return x, 3", X, "returns int", "tensors only"),
    "an object returned": (
        "pass",
        "from types import SimpleNamespace as Out;return Out(loss=x.mean())",
        X,
        "returns SimpleNamespace",
        "tensors only",
    ),
    "nothing returned": ("pass", "return None", X, "returns NoneType", "tensors only"),
    "complex numbers": ("pass", "return torch.fft.fft(x)", X, ":9: .*complex", "view_as_real"),
    "an input is written": (
        "pass",
        "return x.add_(1)",
        X,
        ":9: .*writes to its input 'x'",
        "clone",
    ),
    "a count of calls": (
        "self._calls = 0",
        "self._calls += 1;return x * min(1.0, self._calls / 10)",
        X,
        r":9: Model.forward changes self._calls with each call \(1, then 2\)",
        r'register_buffer\("_calls"',
    ),
    "a list that grows": (
        "self.inner = nn.Identity(); self.inner.sizes = []",
        "self.inner.sizes.append(len(x));return x * len(self.inner.sizes)",
        X,
        r"changes self.inner.sizes with each call",
        "next",
    ),
    "a list of tensors": (
        "pass",
        "return x[0]",
        f"[{X}]",
        "argument 'x' of Model.forward is of type list",
        "of its own",
    ),
    "too few inputs": ("pass", "return x", "", "does not fit Model.forward", "one value"),
    "wrong shapes": ("self.a = nn.Linear(5, 5)", "return self.a(x)", X, ":9: .*failed", "next"),
    "an unregistered tensor": (
        "self.t = torch.randn(6)",
        "return x * self.t",
        X,
        "the tensor 't' of shape",
        "register_buffer",
    ),
    "a name that PyTorch's graphs have": (
        "self.code = nn.Parameter(torch.ones(6))",
        "return torch.sigmoid(x) * self.code",
        X,
        "called code",
        "another name",
    ),
    "a constructor that draws a number": (
        "self.n = torch.rand(3).sum().item()",
        "return x * self.n",
        X,
        r":7: Model\(\*get_init_inputs\(\)\) reads a number out of a tensor",
        "next",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_a_graph_is_refused_with_line_and_next_step(name, tmp_path):
    init, forward, inputs, reason, advice = REFUSALS[name]
    text = model_text(init, "FORWARD", inputs)
    text = text.replace("FORWARD", "\n        ".join(forward.split(";")))
    problem = problem_of(tmp_path, text)
    with pytest.raises(CaptureError) as caught:
        capture(problem)
    message = str(caught.value)
    assert isinstance(caught.value, InputError) and caught.value.exit_code == 2
    assert message.startswith(str(problem.path))
    first, _, rest = message.partition("\n  next: ")
    assert re.search(reason, first, re.DOTALL), message
    assert rest and re.search(advice, f"next: {rest}"), message


NOT_PLAIN = {
    "compiled": (
        "pass",
        "torch.rand(4, 8)",
        ("    def forward(self", "    @torch.compile\n    def forward(self"),
        "Model is compiled by torch.compile",
    ),
    "a compiled part": (
        "self.net = nn.Linear(8, 8); self.net.compile()",
        "torch.rand(4, 8)",
        ("", ""),
        "Model.net is compiled by torch.compile",
    ),
    "sparse": (
        "pass",
        "torch.eye(8).to_sparse()",
        ("", ""),
        "a tensor of torch.sparse_coo at place 0",
    ),
    "empty": ("pass", "torch.rand(0, 8)", ("", ""), r"tensors without any number: \[0, 8\]"),
    "a function": (
        "pass",
        "torch.rand(4, 8)",
        ("def get_inputs", "Kept = Model\ndef Model():\n    return Kept()\ndef get_inputs"),
        "Model is no class; got function",
    ),
}


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method:DeprecationWarning"
)  # torch.compile's
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_is_refused_with_the_next_step(name, tmp_path):
    init, inputs, (old, new), reason = NOT_PLAIN[name]
    problem = problem_of(tmp_path, model_text(init, "return x.exp()", inputs).replace(old, new, 1))
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(problem)
    assert "\n  next: " in str(caught.value)


@pytest.mark.parametrize("takes", ["self, *, width", "self"])
def test_a_constructor_that_takes_other_arguments_says_what_it_is_given(takes, tmp_path):
    text = model_text("pass", "return x.exp()", X).replace("__init__(self)", f"__init__({takes})")
    problem = problem_of(tmp_path, text.replace("return []", "return [8]"))
    with pytest.raises(CaptureError, match="1 positional argument but 2 were given") as caught:
        capture(problem)
    assert "next: give each in get_init_inputs(), or a default" in str(caught.value)


@pytest.mark.parametrize("write", ["self.seen = len(x)", "self.calls += 1", "self.calls -= 1e400"])
def test_attributes_that_nothing_reads_may_change(write, tmp_path):
    init = "self.seen = None; self.calls = 0"
    captured(tmp_path, init.replace(";", ";"), f"{write};return x.exp()", X)


def test_a_constructor_may_read_numbers_that_are_the_same_each_time(tmp_path):
    """As models do whose layers are skipped at random, the more often the deeper they are."""
    init = (
        "self.rates = [x.item() for x in torch.linspace(0, 0.5, 3)]; "
        "self.pair = torch.tensor([self.rates[1], 4.0]); self.a = nn.Linear(6, 6)"
    )
    graph = captured(tmp_path, init, "return self.a(x) * self.rates[2] + self.pair[1]", X)
    assert [t.value for t in graph.constants] == [[0.25, 4.0]]
    assert {t.name for t in graph.parameters} == {"a.weight", "a.bias"}


def test_an_operator_that_is_not_pytorchs_is_refused(tmp_path):
    @torch.library.custom_op("tuner_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    text = model_text("pass", "return torch.ops.tuner_tests.twice(x)", X)
    with pytest.raises(CaptureError, match=r":9: .*the operator tuner_tests::twice; expected"):
        capture(problem_of(tmp_path, text))


def test_a_file_that_is_no_problem_is_refused(tmp_path):
    (tmp_path / "module.py").write_text("def get_inputs():\n    return []\n")
    with pytest.raises(InputError, match="no class 'Model'"):
        load_problem(tmp_path / "module.py")
    text = model_text("pass", "return x", X).replace("(nn.Module)", "")
    text = text.replace("super().__init__()", "pass")
    with pytest.raises(CaptureError, match=r"Model is no torch\.nn\.Module; got Model\n  next"):
        capture(problem_of(tmp_path, text))
