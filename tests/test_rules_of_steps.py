"""Steps whose record has rules of its own: constants, what is spread, single places."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from cpu_machine import GPP
from interpreted import interpreted
from test_any_module import assert_as_exact, in_float64
from test_matching import TEXT
from test_pooling_gradients import InBlocks
from test_steps import (
    Taken,
    assert_a_step_is_as_exact,
    assert_gradients_are_as_exact,
    gradients,
)

from tuner.capture.capture import capture
from tuner.capture.steps.joint import captured_of
from tuner.planning.observing import Observer
from tuner.problem.reference import load_problem
from tuner.session.tuning import derive_operator

needs_compiler = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
WEIGHT = "self.w = nn.Parameter(torch.rand(4, 1, 1))"
# The constructor, forward, and the shape of x, or x.
MODULES = {
    "constant": (WEIGHT, "return torch.min(x * self.w, torch.tensor(0.5)) * 2.0", "3, 4, 6, 7"),
    "two constants": (
        WEIGHT,
        "return torch.maximum(x * torch.tensor(2.0), torch.tensor(1)) * self.w", "3, 4, 6, 7",
    ),
    "spread over channels": (
        "self.b = nn.Parameter(torch.rand(4, 1, 1))",
        "return torch.sum(torch.tanh(x).mean((2, 3), keepdim=True) + self.b, 1)", "3, 4, 6, 7",
    ),
    "spread over rows": ("self.b = nn.Parameter(torch.rand(1, 6, 1))",
                         "return torch.sum(torch.sin(x) + self.b, (1, 3)) * 0.5", "3, 4, 6, 7"),
    "all spread": ("self.b = nn.Parameter(torch.rand(7))",
                   "return (torch.sin(x) + self.b).sum((1, 2, 3))", "3, 4, 6, 7"),
    "one place": (
        "self.l = nn.Linear(20, 36)",
        "y = torch.sum(self.l(x), 1, keepdim=True); y = torch.max(y, 1, keepdim=True)[0]; "
        "return torch.logsumexp(y * 0.1, 1, keepdim=True) + torch.min(y, 1)[0][:, None]", "7, 20",
    ),
    "attention": (
        "self.l = nn.Linear(32, 96)",
        "q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in self.l(x).chunk(3, -1)); "
        "y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2); "
        "return F.gelu(y) + x", "3, 9, 32",
    ),
    "causal attention": (
        "self.w = nn.Parameter(torch.rand(16))",
        "y = torch.tanh(x * self.w); "
        "return F.scaled_dot_product_attention(y, y[:, :, 2:], x[:, :, 2:], is_causal=True) * 2.0",
        "3, 2, 9, 16",
    ),
    "masked attention": (
        "self.w = nn.Parameter(torch.rand(16)); "
        "seen = torch.arange(63).reshape(9, 7) % 5 + torch.arange(9)[:, None] > 3; "
        "self.register_buffer('m', seen.float())",
        "return torch.sin(F.scaled_dot_product_attention(x * self.w, x[:, :, 2:], x[:, :, :7], "
        "attn_mask=self.m.log(), scale=0.5))", "3, 2, 9, 16",
    ),
    "attention to nothing": (
        "self.w = nn.Parameter(torch.rand(16)); "
        "seen = torch.arange(9)[:, None] > torch.arange(9); "
        "self.register_buffer('m', seen.float())",
        "y = F.scaled_dot_product_attention(x * self.w, x, x, attn_mask=self.m.log()); "
        "return torch.sin(y)", "3, 2, 9, 16",
    ),
    "heads": (
        "self.a = nn.MultiheadAttention(16, 2, batch_first=True)",
        "return torch.tanh(self.a(x, x, x, need_weights=False)[0]) + x", "3, 9, 16",
    ),
    "parts": (
        "self.w = nn.Parameter(torch.rand(12))",
        "y = torch.sin(x * self.w); return torch.cat([y[:, 3:7].exp(), y[:, :3], y[:, 7:9] * 2.0, "
        "y[:, 1:2], y[:, ::4].tanh(), y[:, 10, None]], 1)", "5, 12",
    ),
    "larger images": (
        "self.c = nn.Conv2d(4, 4, 3, padding=1)",
        "return F.leaky_relu(self.c(F.interpolate(torch.sin(x), scale_factor=(2, 3))), 0.2)",
        "3, 4, 6, 7",
    ),
    "put where": (
        "self.w = nn.Parameter(torch.rand(12))",
        "y = x * self.w; y[y > 0.3] = 0.5; y[x < -1] = 0; return torch.exp(y)", "5, 12",
    ),
    "embedding": (
        "self.e = nn.Embedding(50, 12, padding_idx=3)",
        "return torch.tanh(self.e(x)) * 2.0",
        "torch.randint(50, (5, 12))",
    ),
    "tied": (
        "self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12); self.b.weight = self.a.weight",
        "return torch.sin(self.b(torch.tanh(self.a(x))))", "5, 12",
    ),
}  # fmt: skip


ATTENTION = ("attention", "causal attention", "attention to nothing")


def text_of(name: str) -> str:
    init, forward, inputs = MODULES[name]
    inputs = inputs if "torch" in inputs else f"torch.randn({inputs})"
    return TEXT.format(init=init, names="x", forward=forward, inputs=inputs)


@needs_compiler
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_as_exact_as_pytorchs(name, tmp_path):
    assert_gradients_are_as_exact(Taken(tmp_path, "module", text_of(name)), name)


# Many keys, and halves.
OF_ITS_OWN = {
    "many keys": ("pass", "return F.scaled_dot_product_attention(x, x, x) * 2.0", "2, 2, 65, 8"),
    "halves": (
        "pass", "y = x.bfloat16(); return F.scaled_dot_product_attention(y, y, y) * 2.0",
        "2, 2, 9, 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_other_attention_leaves_steps_to_the_reference(name, tmp_path):
    init, forward, shape = OF_ITS_OWN[name]
    path = tmp_path / "module.py"
    inputs = f"torch.randn({shape})"
    path.write_text(TEXT.format(init=init, names="x", forward=forward, inputs=inputs))
    problem = load_problem(path)
    assert captured_of(problem, capture(problem)).joint is None


@needs_compiler
def test_a_gradient_is_halved_where_a_value_is_the_constant(tmp_path):
    taken = Taken(tmp_path, "module", text_of("constant"))
    with torch.no_grad():
        taken.mine.w.fill_(1.0)
        taken.own.w.fill_(1.0)
    torch.manual_seed(3)
    values = torch.tensor([0.5, 0.0, 1.0, float("inf"), float("nan")])
    x = values[torch.randint(5, (3, 4, 6, 7))]
    found = []
    for model in (taken.mine, taken.own):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(leaf), leaf, torch.ones(3, 4, 6, 7))
        found.append(grad)
    assert torch.equal(*found) and 1.0 in found[0]
    assert taken.num_calls == 1, "a step took the reference's way"


@pytest.mark.parametrize(
    "forward", ["torch.min(x, torch.tensor([0.5] * 7))", "x * torch.tensor([2.0])"]
)
def test_constants_of_several_numbers_leave_steps_to_the_reference(forward, tmp_path):
    path = tmp_path / "module.py"
    init, inputs = "pass", "torch.randn(3, 7)"
    path.write_text(TEXT.format(init=init, names="x", forward=f"return {forward}", inputs=inputs))
    problem = load_problem(path)
    assert captured_of(problem, capture(problem)).joint is None


def check_blocks(folder: str) -> None:
    """Compare Triton kernels with PyTorch, on the CPU."""
    for name in ("constant", "spread over channels", "spread over rows", "one place", *ATTENTION):
        own = Path(folder) / name
        own.mkdir()
        taken = InBlocks(own, "module", text_of(name))
        assert_a_step_is_as_exact(taken)


def check_statistics(folder: str) -> None:
    """The same of steps that divide by the number of rows, at several of them."""
    for name, (init, forward, inputs) in OVER_THE_BATCH.items():
        own = Path(folder) / name
        own.mkdir()
        text = TEXT.format(init=init, names="x", forward=f"return {forward}", inputs=inputs)
        assert_gradients_are_as_exact(InBlocks(own, "module", text), name)


# Steps that divide by the number of rows.
OVER_THE_BATCH = {
    "norm_twice": ("self.l, self.n = nn.Linear(9, 64, bias=False), nn.BatchNorm2d(4)",
                   "self.n(self.l(x)) * torch.tanh(self.n(x * 2)).sum(-1, keepdim=True)",
                   "torch.randn(8, 4, 9, 9)"),
    "batch_norm": ("self.l, self.n = nn.Linear(9, 64, bias=False), nn.BatchNorm1d(64)",
                   "torch.relu(self.n(self.l(x)))", "torch.randn(16, 9)"),
    "two_norms": ("self.l, self.n = nn.Linear(9, 64, bias=False), nn.BatchNorm1d(64); "
                  "self.m = nn.LayerNorm(64)",
                  "self.m(self.n(self.l(x).flatten(0, 1)))", "torch.randn(8, 4, 9)"),
    "channels": ("self.c, self.n = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)",
                 "F.silu(self.n(self.c(x)))", "torch.randn(8, 3, 9, 7)"),
    "nearly so long that threads share them": (
        "self.n = nn.BatchNorm2d(3)", "torch.relu(self.n(x))", "torch.randn(8, 3, 28, 28)"),
    "columns": ("self.w = nn.Parameter(torch.rand(40))",
                "(x - x.mean(0)) * self.w / len(x)", "torch.randn(8, 40)"),
    "loss": ("self.w = nn.Parameter(torch.rand(40))",
             "F.mse_loss(torch.tanh(x * self.w), x)", "torch.randn(8, 40)"),
    "spread over rows": ("self.w = nn.Parameter(torch.rand(40))",
                         "torch.tanh(x.sum(0)) * self.w", "torch.randn(8, 40)"),
    "spread over columns": ("self.w = nn.Parameter(torch.rand(1))",
                            "torch.tanh(x.sum(1)) * self.w", "torch.randn(8, 40)"),
    "variance": ("self.w = nn.Parameter(torch.rand(5, 1))",
                 "x * self.w / (1 + x.var((0, 2), keepdim=True))", "torch.randn(8, 5, 40)"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_steps_over_the_batch_are_for_any(name, tmp_path):
    init, forward, inputs = OVER_THE_BATCH[name]
    text = TEXT.format(init=init, names="x", forward=f"return {forward}", inputs=inputs)
    assert_gradients_are_as_exact(Taken(tmp_path, "module", text), name)


@needs_triton
def test_interpreted_steps_over_the_batch_are_for_any(tmp_path):
    interpreted("test_rules_of_steps", "check_statistics", str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_triton_steps_over_the_batch_are_for_any(name, tmp_path):
    init, forward, inputs = OVER_THE_BATCH[name]
    text = TEXT.format(init=init, names="x", forward=f"return {forward}", inputs=inputs)
    assert_gradients_are_as_exact(Taken(tmp_path, "module", text, "cuda"), name)


@needs_triton
def test_interpreted_blocks_give_the_gradients_of_pytorch(tmp_path):
    interpreted("test_rules_of_steps", "check_blocks", str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODULES)
def test_triton_gradients_are_as_exact_as_pytorchs(name, tmp_path):
    assert_gradients_are_as_exact(Taken(tmp_path, "module", text_of(name), "cuda"), name)


# Steps whose loops or calls know the batch: rows that are another dimension of a result, and a
# call that takes the sizes of what it gives.
FOR_ONE_BATCH = {
    "one number for all rows": (
        "self.w = nn.Parameter(torch.rand(20))", "return x.mean(0) * self.w", "16, 20",
    ),
    "rows behind": (
        "self.l, self.n = nn.Linear(20, 64), nn.GroupNorm(16, 64); "
        "self.b = nn.Parameter(torch.rand(1, 64, 1, 1))",
        "return torch.min(self.n(self.l(x)), dim=1, keepdim=True)[0] + self.b", "16, 20",
    ),
    "bilinear": (
        "self.w = nn.Parameter(torch.rand(4, 1, 1))",
        "y = F.interpolate(torch.sin(x * self.w), scale_factor=2, mode='bilinear'); "
        "return torch.tanh(y)", "3, 4, 6, 7",
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", FOR_ONE_BATCH)
def test_a_step_may_be_for_one_batch_where_the_forward_is_for_any(name, tmp_path):
    init, forward, shape = FOR_ONE_BATCH[name]
    inputs = f"torch.randn({shape})"
    text = TEXT.format(init=init, names="x", forward=forward, inputs=inputs)
    taken = Taken(tmp_path, "module", text)
    num_forwards, operator = 0, taken.module["fused_op"]

    def counted(*args: object) -> object:
        nonlocal num_forwards
        num_forwards += 1
        return operator(*args)

    taken.module["fused_op"] = counted
    for batch, num_calls in ((None, 1), (5, 1), (1, 1), (None, 2)):
        inputs = taken.inputs(3, batch)
        mine, own = gradients(taken.mine, inputs), gradients(taken.own, inputs)
        assert_as_exact(mine, own, gradients(taken.wide, in_float64(inputs)))
        assert taken.num_calls == num_calls
        before = num_forwards
        with torch.no_grad():
            torch.testing.assert_close(taken.mine(*inputs), taken.own(*inputs))
        assert num_forwards == before + 1, "a forward took the reference's way"


def test_kernels_for_one_number_of_rows_say_so(tmp_path, monkeypatch):
    """A share of all pairs of samples."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "pairs.py"
    path.write_text(
        TEXT.format(
            init="self.c = nn.Parameter(torch.rand(24))",
            names="x",
            forward="return torch.tanh(x * self.c) / (len(x) * (len(x) + 1))",
            inputs="torch.randn(6, 9, 24)",
        )
    )
    said: list[str] = []
    observer = Observer()
    observer.on_stage = said.append
    derive_operator(path, observer)
    own = "with others PyTorch's own operations run"
    assert f"pairs.py: kernels are for 6 rows alone: {own}" in said


@pytest.mark.parametrize(
    ("batch", "says"),
    [(None, "512 is another of its sizes, too"), (384, "")],
    ids=["as given", "another"],
)
def test_where_a_step_is_for_one_batch_it_is_said_and_what_to_do(
    batch, says, tmp_path, monkeypatch
):
    """Square inputs are what people try first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forward = (
        "h = self.p(x); h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6); "
        "h = h * self.w + self.b; "
        "return torch.tanh(h) * torch.nn.functional.silu(y) + z * torch.sigmoid(h)"
    )
    path = tmp_path / "square.py"
    path.write_text(
        TEXT.format(
            init="self.p, self.w = nn.Linear(64, 512), nn.Parameter(torch.ones(512)); "
            "self.b = nn.Parameter(torch.zeros(512))",
            names="x, y, z",
            forward=forward,
            inputs="torch.randn(512, 64), torch.randn(512, 512), torch.randn(512, 512)",
        )
    )
    said: list[str] = []
    observer = Observer()
    observer.on_stage = said.append
    derive_operator(path, observer, batch=batch)
    found = [line for line in said if "a step of training" in line]
    assert len(found) == bool(says)
    assert all("kernels at 512 rows alone" in line and says in line for line in found)
