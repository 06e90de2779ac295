"""No honest module is rejected: odd references, put to the probes as their own candidates."""

from __future__ import annotations

import sys
from collections import OrderedDict

import pytest
import torch
from handled_modules import REMEMBERS
from test_check import load_reference, reasons
from unusual_modules import reference

from tuner.check.calls.parts import copied, tie_as, tied_as
from tuner.check.judge.chance import modes_of
from tuner.check.judge.expected import expected
from tuner.check.probes.probes import thorough_probes
from tuner.check.probes.traits import traits_of
from tuner.problem.accuracy import Accuracy

FLOAT32 = Accuracy("float32")
INIT = "    def __init__(self):\n        super().__init__()\n"
COUNTS = reference(
    "x: self.seen(x)", "torch.randn(40, 24)", "",
    INIT + """        self.register_buffer("mean", torch.zeros(24))

    def seen(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean

""",
)  # fmt: skip
SLICE = reference("x: x[:, 3:9]", "torch.randn(40, 24)")
OF_DEFAULT_TYPE = reference(
    "x: (x + torch.ones(24)) @ self.w", "torch.randn(40, 24)", "",
    INIT + "        self.w = nn.Parameter(torch.randn(24, 24))\n\n",
)  # fmt: skip
TIED = reference(
    "x: self.b(torch.tanh(self.a(x)))", "torch.randn(40, 24)", "",
    INIT + """        self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24)
        self.b.weight = self.a.weight

""",
)  # fmt: skip
INVERTED = reference(
    "x: x @ torch.linalg.inv(self.w)", "torch.randn(40, 24)", "",
    INIT + "        self.w = nn.Parameter(torch.eye(24))\n\n",
)  # fmt: skip
GIVEN_AWAY = reference(
    "x: (x + self.table, self.table)", "torch.randn(40, 24)", "",
    INIT + "        self.register_buffer('table', torch.randn(24), persistent=False)\n\n",
)  # fmt: skip
NOTED_IN_TRAINING = reference(
    "x: self.noted(torch.tanh(x))", "torch.randn(40, 24)", "",
    """    def noted(self, y):
        self.seen = y if self.training else None
        return y

""",
)  # fmt: skip
REPLACED = reference(
    "x: self.bn(self.renewed(x))", "torch.randn(40, 24)", "",
    INIT + """        self.bn = nn.BatchNorm1d(24)

    def renewed(self, x):
        if self.training:
            self.bn.running_mean = self.bn.running_mean.clone()
            self.bn.running_var = self.bn.running_var.clone()
        return x

""",
)  # fmt: skip
SPARSE = reference(
    "i: torch.tanh(self.emb(i)).mean(1)", "torch.randint(0, 50, (40, 8))", "",
    INIT + "        self.emb = nn.Embedding(50, 16, sparse=True)\n\n",
)  # fmt: skip
TWO_TABLES = reference(
    "i, k: torch.tanh(self.a(i) + self.b(k))",
    "torch.randint(0, 50, (40, 8)), torch.randint(0, 2, (40, 8))", "",
    INIT + "        self.a, self.b = nn.Embedding(50, 16), nn.Embedding(2, 16)\n\n",
)  # fmt: skip
NAMED = """import collections
import torch
import torch.nn as nn

Output = collections.namedtuple("Output", "logits hidden")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(24, 8)

    def forward(self, x):
        return Output(self.head(torch.tanh(x)), torch.tanh(x))


def get_inputs():
    return [torch.randn(40, 24)]


def get_init_inputs():
    return []
"""
# The reference, and the probes that once rejected it, or ended the judge.
ODD = {
    "what its calls change is read": (COUNTS, ("called twice",)),
    "an output is a view of an input": (SLICE, ("expanded input", "rows expanded input")),
    "tensors of the default type are made": (OF_DEFAULT_TYPE, ("default dtype",)),
    "parameters are tied": (TIED, ("drawn", "graphs that outlive")),
    "weights of 0 are refused": (INVERTED, ("parameters of zeros",)),
    "buffers are replaced in training": (REPLACED, ("two modules in two",)),
    "gradients are sparse": (
        SPARSE, ("gradients", "threads, eval", "a life, gradients", ".grad", "all gradients"),
    ),
    "numbers of one table are none of another": (TWO_TABLES, ("one tensor for all",)),
    "outputs have names": (NAMED, ("fresh weights", "copied with hooks")),
    "an output is what later calls read": (GIVEN_AWAY, ("outputs edited",)),
    "an attribute is set in one mode alone": (NOTED_IN_TRAINING, ("attributes that",)),
    "a call leaves what autograd has made": (
        REMEMBERS, ("transposed input", "graphs that outlive", "a copy beside", "drawn"),
    ),
}  # fmt: skip


def found_in(folder, text, start, seeds):
    """Return why probes whose names begin so reject a reference's own class, over some seeds."""
    problem, models = load_reference(folder, text), {}
    sys.modules[problem.module.__name__] = problem.module  # where pickling finds its class
    modes, traits = modes_of(problem, "cpu"), traits_of(problem, problem.make_model(0), "cpu")
    found = []
    for seed in seeds:
        probes = thorough_probes(seed, problem.num_rows(), modes=modes, traits=traits)
        asked = [p for p in probes if p.name.startswith(start)]
        expectations = [expected(problem, p, FLOAT32, models=models) for p in asked]
        found += reasons(problem.module.Model, problem, expectations)
    return found


@pytest.mark.parametrize("name", ODD)
def test_an_odd_reference_is_right_by_its_own_answers(name, tmp_path):
    text, start = ODD[name]
    assert found_in(tmp_path, text, start, range(4)) == []


def test_a_new_module_has_the_ties_of_the_one_that_it_replaces(tmp_path):
    model = load_reference(tmp_path, TIED).make_model(0)
    whole = tied_as(model)
    assert whole["b.weight"] == "a.weight"
    other = copied(model)
    other.a.weight = torch.nn.Parameter(torch.randn(24, 24))
    apart = tied_as(other)
    assert apart["b.weight"] == "b.weight"
    tie_as(model, apart)
    assert tied_as(model) == apart
    tie_as(model, whole)
    assert tied_as(model) == whole and model.a.weight is model.b.weight


def test_a_copy_shares_nothing_of_its_original_that_is_empty_yet():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    model.notes, model.seen = OrderedDict(), set()
    model.same = model.notes
    model.notes.told = ["by an attribute"]
    other = copied(model)
    assert vars(other).keys() == vars(model).keys() and other.same is other.notes
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        for name, value in vars(mine).items():
            if isinstance(value, (dict, set)):
                assert vars(theirs)[name] is not value and type(vars(theirs)[name]) is type(value)
    assert other.notes.told == ["by an attribute"] and other.notes.told is not model.notes.told
    other[0].register_forward_hook(lambda *_: torch.zeros(3))
    x = torch.ones(1, 2)
    assert torch.equal(other(x), torch.zeros(3)) and model(x).shape == (1, 3)


SHIFTED = reference("x: x + 1", "torch.randn(40, 24)")
VIEWED = reference("x: x.view(20, 48)", "torch.randn(40, 24)")


def test_a_gradient_is_not_in_the_memory_of_what_came_in(tmp_path):
    """PyTorch adds up in the first that it gets: two calls whose results are added share it."""

    class HandsOn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 1

        @staticmethod
        def backward(ctx, grad):
            return grad.view(grad.shape)  # what nobody else has is not copied

    problem = load_reference(tmp_path, SHIFTED)

    class Contender(problem.module.Model):
        def forward(self, x):
            return HandsOn.apply(x)

    modes, traits = modes_of(problem, "cpu"), traits_of(problem, problem.make_model(0), "cpu")
    probes = thorough_probes(1, problem.num_rows(), modes=modes, traits=traits)
    asked = [expected(problem, p, FLOAT32) for p in probes if p.name == "gradients added up"]
    (reason,) = reasons(Contender, problem, asked)
    assert "the gradients of what comes to output 0 and input 0 share memory" in reason
    assert reasons(problem.module.Model, problem, asked) == []
    # A view's own backward hands it on.
    assert found_in(tmp_path, VIEWED, "gradients added up", range(2)) == []


DIVIDED = reference(
    "x: self.divided(torch.sigmoid(x) * 0 + 0.1)", "torch.randn(40, 24)", "2.0",
    """    def __init__(self, by):
        super().__init__()
        self.by = by

    def divided(self, y):
        return (y - y.mean(1, keepdim=True)) / self.by

""",
)  # fmt: skip


def test_of_a_division_by_zero_the_sign_of_what_rounding_leaves_is_nobodys(tmp_path):
    """The mean of equal numbers, added up in another order, is above or below them."""
    problem = load_reference(tmp_path, DIVIDED)

    class Reordered(problem.module.Model):
        def divided(self, y):
            return (y - (0.5 * y.mean(1, keepdim=True) + 0.5 * y[:, :1])) / self.by * -1.0 * -1.0

    class Negated(problem.module.Model):
        def divided(self, y):
            return -super().divided(y)

    probes = thorough_probes(0, problem.num_rows(), modes=modes_of(problem, "cpu"))
    zeros = [expected(problem, p, FLOAT32) for p in probes if p.name == "other options, zeros"]
    assert zeros and reasons(Reordered, problem, zeros) == reasons(Negated, problem, zeros) == []


POWER = reference(
    "x: self.fc(x)", "torch.randn(40, 24)", "",
    INIT + "        self.fc = nn.utils.parametrizations.spectral_norm(nn.Linear(24, 48))\n\n",
)  # fmt: skip


def test_sums_in_another_order_may_be_remembered_by_a_module_that_is_converted(tmp_path):
    """Spectral norm in float64 divides by what its buffers keep of calls in float32.

    Where PyTorch's own rounding was lucky, twice its error is less than any other order leaves.
    """
    problem = load_reference(tmp_path, POWER)

    class Reordered(problem.module.Model):
        def forward(self, x):
            if x.dtype == torch.float64:
                return super().forward(x)
            kept = self.fc.parametrizations.weight
            weight, norm = kept.original, kept[0]
            if norm.training:
                with torch.no_grad():
                    for w, mine, other in ((weight, "_u", "_v"), (weight.T, "_v", "_u")):
                        sums = (w * getattr(norm, other)).flip(1).cumsum(1)[:, -1]
                        getattr(norm, mine).copy_(torch.nn.functional.normalize(sums, dim=0))
            sigma = torch.vdot(norm._u.clone(), torch.mv(weight, norm._v.clone()))
            return torch.nn.functional.linear(x, weight / sigma, self.fc.bias)

    class Rounded(Reordered):
        def forward(self, x):
            return super().forward(x).float().to(x.dtype)

    modes, traits = modes_of(problem, "cpu"), traits_of(problem, problem.make_model(0), "cpu")
    for seed in (8, 20, 26, 27):
        probes = thorough_probes(seed, problem.num_rows(), modes=modes, traits=traits)
        asked = [p for p in probes if p.name.startswith("float64 module, gradients")]
        expectations = [expected(problem, p, FLOAT32) for p in asked]
        assert reasons(Reordered, problem, expectations) == []
        assert "must compute in its new type" in reasons(Rounded, problem, expectations)[0]


GEGLU = reference(
    "x: self.gated(self.up(self.norm(x)))", "torch.randn(64, 24).bfloat16()", "",
    INIT + """        self.norm, self.up = nn.LayerNorm(24), nn.Linear(24, 256)
        self.bfloat16()

    def gated(self, y):
        a, b = y.chunk(2, -1)
        return a * nn.functional.gelu(b)

""",
)  # fmt: skip


def test_of_an_infinity_times_what_is_nearly_0_the_sign_is_nobodys(tmp_path):
    """Where a bias is -Inf, the gate's last bit decides, in bfloat16 of one gate in hundreds."""
    problem = load_reference(tmp_path, GEGLU)

    class RoundedOnce(problem.module.Model):
        def forward(self, x):
            norm = torch.nn.functional.layer_norm(
                x.float(), (24,), self.norm.weight.float(), self.norm.bias.float()
            )
            return self.gated(self.up(norm.to(x.dtype)))

    modes, traits = modes_of(problem, "cpu"), traits_of(problem, problem.make_model(0), "cpu")
    for seed in range(3):
        probes = thorough_probes(seed, problem.num_rows(), modes=modes, traits=traits)
        asked = [p for p in probes if p.name.startswith("a block of -Inf in a bias")]
        expectations = [expected(problem, p, FLOAT32) for p in asked]
        assert asked and reasons(RoundedOnce, problem, expectations) == []
