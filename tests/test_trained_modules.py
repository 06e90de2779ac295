"""Modules as people train them: what their steps compute, and what their forward sets."""

from __future__ import annotations

import pytest
import torch
from cpu_machine import GPP
from test_matching import TEXT
from test_steps import Taken, assert_gradients_are_as_exact

from tuner.capture.capture import capture
from tuner.errors import CaptureError
from tuner.problem.reference import load_problem

needs_gpp = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
# The constructor, names of the inputs, forward, and the inputs.
TRAINED = {
    "label smoothing": (
        "pass", "x, y",
        "p = F.log_softmax(x, -1); n = -p.gather(-1, y[:, None]).squeeze(1); "
        "return (0.9 * n - 0.1 * p.mean(-1)).mean()",
        "torch.randn(12, 10), torch.randint(0, 10, (12,))",
    ),
    "heads of several tasks": (
        "self.w, self.a, self.b = (nn.Parameter(torch.rand(16)) for _ in range(3))", "x, y",
        "t = torch.tanh(x * self.w); "
        "return torch.relu(t * self.a), (t + self.b).square().mean(-1), y.exp() * self.b, t > 0",
        "torch.randn(6, 16), torch.randn(6, 16)",
    ),
    "straight through a quantiser": (
        "self.w = nn.Parameter(torch.randn(16))", "x",
        "q = torch.tanh(x) * self.w; return x + (q - x).detach(), ((q - x) ** 2).mean()",
        "torch.randn(4, 16)",
    ),
    "loss and logits": (
        "self.f, self.g = nn.Linear(16, 24), nn.Linear(24, 5)", "x, y",
        "z = self.g(F.gelu(self.f(x))); return F.cross_entropy(z, y), z, z.argmax(-1)",
        "torch.randn(12, 16), torch.randint(0, 5, (12,))",
    ),
    "total of two losses": (
        "self.f, self.w = nn.Linear(16, 5), nn.Parameter(torch.rand(5))", "x, y",
        "z = torch.tanh(self.f(x)); a, b = (z - y).square().mean(), (z * self.w).abs().mean(); "
        "return a + b * 0.5, a, b, z",
        "torch.randn(12, 16), torch.randn(12, 5)",
    ),
    "scores of features": (
        "self.w, self.v = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))", "x",
        "h = torch.tanh(x * self.w); return h, (h * self.v).square(), torch.softmax(h, -1)",
        "torch.randn(6, 16)",
    ),
    "actor and critic": (
        "self.f, self.g = nn.Linear(16, 24), nn.Linear(24, 20); "
        "self.p, self.v = nn.Linear(20, 5), nn.Linear(20, 1)", "x",
        "h = torch.tanh(self.g(F.relu(self.f(x)))); "
        "return F.log_softmax(self.p(h), -1), self.v(h).squeeze(-1)",
        "torch.randn(12, 16)",
    ),
    "pyramid": (
        "self.a, self.b, self.c = nn.Linear(16, 12), nn.Linear(12, 12), nn.Linear(12, 12); "
        "self.o = nn.ModuleList([nn.Linear(12, 7) for _ in range(3)])", "x",
        "a = F.silu(self.a(x)); b = F.silu(self.b(a)) + a; c = F.silu(self.c(b)) + b; "
        "return tuple(o(y) * 0.5 for o, y in zip(self.o, (a, b, c)))",
        "torch.randn(12, 16)",
    ),
    "class token": (
        "self.c, self.p = nn.Parameter(torch.rand(1, 1, 16)), nn.Parameter(torch.rand(6, 16)); "
        "self.q, self.l = nn.Parameter(torch.rand(2, 16)), nn.Linear(16, 9)", "x",
        "c, q = self.c.expand(len(x), -1, -1), self.q.repeat(len(x), 1, 1); "
        "t = torch.cat([c, x, q], 1) + self.p; "
        "return F.gelu(self.l(F.layer_norm(t, (16,))))",
        "torch.randn(4, 3, 16)",
    ),
    "queries": (
        "self.q, self.k, self.l = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)", "x",
        "q = self.q.weight[None].repeat(len(x), 1, 1).transpose(0, 1); "
        "a = torch.softmax(self.k(q).transpose(0, 1) @ x.transpose(1, 2), -1); "
        "return torch.relu(self.l(a @ x))",
        "torch.randn(4, 3, 8)",
    ),
    "causal mask": (
        "self.w = nn.Parameter(torch.rand(12))", "x",
        "t = x.shape[-1]; m = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1); "
        "return torch.softmax((x * self.w).masked_fill(m, -1e9), -1)",
        "torch.randn(4, 12, 12)",
    ),
    "self loops": (
        "self.l = nn.Linear(9, 9)", "x",
        "a = torch.tanh(x @ x.transpose(1, 2)) + torch.eye(6, device=x.device); "
        "return torch.relu(self.l(a @ x))",
        "torch.randn(4, 6, 9)",
    ),
    "no pairs with itself": (
        "self.w = nn.Parameter(torch.rand(12))", "x",
        "m = torch.eye(12, dtype=torch.bool, device=x.device); "
        "return torch.logsumexp((x * self.w).masked_fill(m, -1e9), -1)",
        "torch.randn(4, 12, 12)",
    ),
}  # fmt: skip


def text_of(init: str, names: str, forward: str, inputs: str) -> str:
    return TEXT.format(init=init, names=names, forward=forward, inputs=inputs)


@needs_gpp
@pytest.mark.parametrize("name", TRAINED)
def test_steps_are_as_exact_as_pytorchs_at_any_batch(name, tmp_path):
    assert_gradients_are_as_exact(Taken(tmp_path, "module", text_of(*TRAINED[name])), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRAINED)
def test_triton_steps_are_as_exact_as_pytorchs(name, tmp_path):
    taken = Taken(tmp_path, "module", text_of(*TRAINED[name]), "cuda")
    assert_gradients_are_as_exact(taken, name)


LORA = (
    "self.l, self.a, self.b = nn.Linear(16, 24), nn.Linear(16, 4, bias=False), nn.Linear(4, 24); "
    "self.l.requires_grad_(False)", "x",
    "return F.gelu(self.l(x) + 0.5 * self.b(self.a(x)))",
    "torch.randn(12, 16)",
)  # fmt: skip


@needs_gpp
def test_what_the_constructor_freezes_is_no_part_of_a_step(tmp_path):
    """Kernels are for the gradients that are left; for others once a weight is to be trained."""
    taken = Taken(tmp_path, "module", text_of(*LORA))
    (x,) = taken.inputs(1)
    found = []
    for model in (taken.mine, taken.own):
        model(x).sin().sum().backward()
        found.append([w.grad for w in model.parameters()])
    assert taken.num_calls + taken.num_weight_calls == 1
    for model in (taken.mine, taken.own):
        model.l.weight.requires_grad_()
        model.zero_grad()
        model(x).sin().sum().backward()
        found.append([w.grad for w in model.parameters()])
    assert taken.num_calls + taken.num_weight_calls == 1
    for mine, own in (found[:2], found[2:]):
        for one, other in zip(mine, own, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, atol=1e-5)


SET = {
    "a map that is kept": (
        "self.q = nn.Linear(16, 16)",
        "w = torch.softmax(self.q(x), -1); self.map = w; return w * x",
        r"module\.py:\d+: .*sets the attribute self\.map .*\n  next: return it",
    ),
    "a cache": (
        "self.c = None", "self.c = torch.arange(16) * 0.1; return torch.relu(x * self.c)",
        r"module\.py:\d+: .*sets the attribute self\.c .*\n  next: .*make it in the constructor",
    ),
    "a state": (
        "self.register_buffer('s', torch.zeros(4, 16))",
        "self.s = torch.tanh(x + self.s); return self.s * 1.0",
        r"module\.py:\d+: .*sets the buffer self\.s .*\n  next: write it in place, self\.s\.copy_",
    ),
    "an older norm of weights": (
        "self.l = nn.utils.weight_norm(nn.Linear(16, 16))", "return torch.relu(self.l(x))",
        r"module\.py: .*sets the attribute self\.l\.weight .*\n  next: .*parametrizations",
    ),
    "an older norm of a spectrum": (
        "self.l = nn.utils.spectral_norm(nn.Linear(16, 16))", "return torch.relu(self.l(x))",
        r"module\.py: .*sets the attribute self\.l\.weight .*\n  next: .*parametrizations",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SET)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_forward_sets_is_refused_with_its_line_and_what_to_do(name, tmp_path):
    """A minute later a check would say that the file does not set it."""
    init, forward, said = SET[name]
    path = tmp_path / "module.py"
    path.write_text(text_of(init, "x", forward, "torch.randn(4, 16)"))
    with pytest.raises(CaptureError, match=said):
        capture(load_problem(path))


def test_a_buffer_that_is_written_in_place_is_captured(tmp_path):
    path = tmp_path / "module.py"
    init = "self.register_buffer('s', torch.zeros(16))"
    forward = (
        "self.s.copy_(self.s * 0.9 + x.detach().mean(0) * 0.1); return torch.relu(x - self.s)"
    )
    path.write_text(text_of(init, "x", forward, "torch.randn(4, 16)"))
    assert "s" in capture(load_problem(path)).buffer_updates
