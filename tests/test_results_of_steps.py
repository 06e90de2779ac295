"""Steps of several results: what each has gradients by, and what autograd does with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations

import pytest
import torch
from cpu_machine import GPP
from test_any_module import answers
from test_matching import TEXT
from test_steps import Taken, leaves_of
from test_trained_modules import TRAINED, text_of

from tuner.capture.capture import capture
from tuner.capture.steps.joint import captured_of
from tuner.capture.steps.step_plans import why_not_planned
from tuner.problem.reference import load_problem
from tuner.problem.returned import tensors_of

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
RELATED = [
    "heads of several tasks", "straight through a quantiser", "loss and logits",
    "total of two losses", "scores of features", "actor and critic", "pyramid",
]  # fmt: skip


@pytest.mark.parametrize("name", RELATED)
def test_results_have_gradients_by_what_pytorchs_have_them(name, tmp_path):
    """Whichever results a loss is of and whatever is frozen: gradients, or none where it has none.

    A weight decays that has a gradient of zeros, and does not where it has none. Hooks are called
    with what comes through other results as well.
    """
    taken = Taken(tmp_path, "module", text_of(*TRAINED[name]))
    models = taken.mine, taken.own
    weights = [[*model.parameters()] for model in models]
    inputs = taken.inputs(1)
    count = len([y for y in answers(taken.own(*inputs)) if y.is_floating_point()])
    for of_loss in [set(c) for n in (1, 2, 3) for c in combinations(range(count), n)]:
        for frozen in [{}, {0}, {len(weights[0]) - 1}, {*range(len(weights[0]))}]:
            for has_gradient in (False, True):
                found = []
                for model, own in zip(models, weights, strict=True):
                    for place, weight in enumerate(own):
                        weight.requires_grad_(place not in frozen)
                        weight.grad = None
                    given = leaves_of(inputs) if has_gradient else inputs
                    made = answers(model(*given))
                    wants = [y.requires_grad for y in made]
                    heard: dict[int, torch.Tensor] = {}
                    for place, y in enumerate(made):
                        if y.requires_grad:
                            y.retain_grad()
                            y.register_hook(partial(heard.__setitem__, place))
                    loss = [made[i].sin().sum() for i in of_loss if made[i].requires_grad]
                    if loss:
                        sum(loss).backward()
                    kept = [heard.get(i) for i in range(len(made))]
                    kept += [y.grad for y in made if y.requires_grad]
                    found.append((wants, [*kept, *(x.grad for x in (*own, *given))]))
                (mine_want, mine), (own_want, own) = found
                assert mine_want == own_want
                for one, other in zip(mine, own, strict=True):
                    assert (one is None) == (other is None)
                    assert one is None or torch.allclose(one, other, atol=1e-5)
    assert taken.num_calls


@pytest.mark.parametrize("name", RELATED[2:5])
def test_a_result_has_gradients_by_another_that_it_is_computed_from(name, tmp_path):
    """And those of such gradients, and after the step's own went away with its backward."""
    taken = Taken(tmp_path, "module", text_of(*TRAINED[name]))
    found = []
    for model in (taken.mine, taken.own):
        x, *labels = leaves_of(taken.inputs(1))
        made = [y for y in answers(model(x, *labels)) if y.is_floating_point()]
        of = {"total of two losses": 0, "loss and logits": 0, "scores of features": 1}[name]
        by = [made[i] for i in range(len(made)) if i != of and (name[0] != "s" or i == 0)]
        loss = made[of].square().sum()
        found.append([*torch.autograd.grad(loss, by, retain_graph=True)])
        own = torch.autograd.grad(loss, x, create_graph=True)[0]
        found[-1] += [own, *torch.autograd.grad(own.square().sum(), [x, *model.parameters()],
                                                retain_graph=True, allow_unused=True)]  # fmt: skip
        loss.backward()
        found[-1] += [x.grad, *(p.grad for p in model.parameters())]
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(made[of].sum(), by)
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=1e-4)


HEADS = (
    "self.a, self.b = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))", "x, y",
    "return torch.tanh(x * self.a) * y, F.softplus(x * self.b)",
    "torch.randn(5, 16), torch.rand(5, 16)",
)  # fmt: skip
ONE = (HEADS[0], "x, y", "return torch.tanh(x * self.a) * y + F.softplus(x * self.b)", HEADS[3])


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> Taken:
    return Taken(tmp_path_factory.mktemp("heads"), "module", text_of(*HEADS))


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Taken:
    return Taken(tmp_path_factory.mktemp("one"), "module", text_of(*ONE))


def same(taken: Taken, done: Callable[..., list[object]]) -> None:
    """Compare what is found of both modules; errors by their first words."""
    found = []
    for model in (taken.mine, taken.own):
        for weight in model.parameters():
            weight.requires_grad_()
            weight.grad = None
        inputs = [x.clone() for x in taken.inputs(1)]
        try:
            found.append([*done(model, *inputs), *(w.grad for w in model.parameters())])
        except RuntimeError as error:
            found.append([str(error)[:40]])
    assert len(found[0]) == len(found[1])
    for mine, own in zip(*found, strict=True):
        if isinstance(own, torch.Tensor):
            torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)
        else:
            assert mine == own


def hooked(model, x, y):
    heard = []
    for weight in (model.a, model.b):
        hooks = [weight.register_hook(lambda g: heard.append(g.sum()) or g * 2)]
        hooks.append(
            weight.register_post_accumulate_grad_hook(lambda w: heard.append(w.grad.sum()))
        )
    model(x, y)[0].sum().backward()
    for weight in (model.a, model.b):
        weight._backward_hooks.clear()
        weight._post_accumulate_grad_hooks.clear()
    return heard


def in_turn(model, x, y):
    first, second = model(x, y)
    first.sum().backward()
    second.sum().backward()
    return []


def of_one_after_a_step(model, x, y):
    first, second = model(x, y)
    first.sum().backward()
    with torch.no_grad():
        model.a.mul_(0.5)
    second.sum().backward()
    with torch.no_grad():
        model.a.mul_(2.0)
    return []


def infinite(model, x, y):
    x[0, 0] = 3e38
    first, second = model(x, y)
    (second * 3e38).detach()
    first.sum().backward()
    return [first, second]


def frozen_between(model, x, y):
    made = model(x, y)
    model.a.requires_grad_(False)
    sum(y.sum() for y in made).backward()
    return [model.a.grad is None]


@pytest.mark.parametrize("done", [hooked, in_turn, of_one_after_a_step, infinite, frozen_between])
def test_results_go_their_own_ways(done, heads):
    """What is freed, checked and called behind one result is nothing of another one's."""
    calls = heads.num_calls
    same(heads, done)
    assert heads.num_calls > calls


def penalty(model, x, y):
    x.requires_grad_()
    (first,) = torch.autograd.grad(model(x, y).sum(), [x], create_graph=True)
    first.square().sum().backward()
    return [x.grad]


def with_hooks(model, x, y):
    hook = model.b.register_hook(lambda g: g * 2)
    found = torch.autograd.grad(model(x, y).sum(), [model.a, model.b], create_graph=True)
    hook.remove()
    return [*found]


def kept_on_the_way(model, x, y):
    h = x * torch.ones(16, requires_grad=True)
    h.retain_grad()
    model(h, y).sum().backward(create_graph=True)
    found = h.grad.detach()
    for weight in model.parameters():  # which would hold its graph
        weight.grad = weight.grad.detach()
    return [found]


def one_from_the_other(model, x, y):
    h = x.requires_grad_()
    (first,) = torch.autograd.grad(model(h, torch.sigmoid(h)).sum(), [h], create_graph=True)
    first.square().sum().backward()
    return [first.detach(), h.grad]


def given_twice(model, x, y):
    h = x.requires_grad_()
    (first,) = torch.autograd.grad(model(h, h).sum(), [h], create_graph=True)
    first.square().sum().backward()
    return [first.detach(), h.grad]


def made_of_a_weight(model, x, y):
    h = x * model.a
    found = torch.autograd.grad(model(h, y).sum(), [model.a, model.b], create_graph=True)
    found[0].square().sum().backward()
    return [each.detach() for each in found]


def under_autocast(model, x, y):
    h = x.requires_grad_()
    made = model(h, torch.sigmoid(h)).sum()
    with torch.autocast("cpu"):
        made.backward()
    return [h.grad]


PENALTIES = [
    penalty, with_hooks, kept_on_the_way, one_from_the_other, given_twice, made_of_a_weight,
    under_autocast,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("done", PENALTIES)
def test_gradients_that_are_differentiated_are_asked_for_once(done, one):
    """The reference computes them, of tensors of its own: hooks and other paths are autograd's."""
    same(one, done)


def test_the_module_is_not_another_while_its_reference_computes(heads):
    """Other threads call it meanwhile, and hooks look at it."""
    seen = []
    model, x, y = heads.mine, *heads.inputs(1)
    parameters = [id(p) for p in model.parameters()]
    x.requires_grad_()
    forward = heads.module["Model"].forward

    def looked(self, *inputs):
        seen.append([id(p) for p in model.parameters()])
        return forward(self, *inputs)

    heads.module["Model"].forward = looked
    try:
        torch.autograd.grad(model(x, y)[0].sum(), [x], create_graph=True)
    finally:
        heads.module["Model"].forward = forward
    assert seen and all(each == parameters for each in seen)


LOSS = (
    "self.f, self.g = nn.Linear(12, 9), nn.Linear(9, 5)", "x, y",
    "h = torch.tanh(self.f(x)); z = self.g(h); return F.cross_entropy(z, y), z, h",
    "torch.randn(8, 12), torch.randint(0, 5, (8,))",
)  # fmt: skip


@pytest.fixture(scope="module")
def loss(tmp_path_factory) -> Taken:
    return Taken(tmp_path_factory.mktemp("loss"), "module", text_of(*LOSS))


def hessian(model, x, y):
    lost, z, _ = model(x, y)
    (g,) = torch.autograd.grad(lost, z, create_graph=True)
    return [g.detach(), *torch.autograd.grad(g.square().sum(), z, retain_graph=True),
            *torch.autograd.grad(g.square().sum(), [*model.parameters()])]  # fmt: skip


def of_a_square(model, x, y):
    lost, z, h = model(x.requires_grad_(), y)
    (g,) = torch.autograd.grad(lost * lost, z, create_graph=True)
    found = torch.autograd.grad(g.square().sum(), [z, h, x], retain_graph=True)
    return [g.detach(), *found]


def hooks_in_both(model, x, y):
    lost, z, _ = model(x, y)
    heard = []
    z.register_hook(lambda g: heard.append(g.detach().abs().sum()) or g.clamp(-0.02, 0.02))
    weights = [*model.parameters()]
    first = torch.autograd.grad(lost, weights, create_graph=True)
    return [*heard, *torch.autograd.grad(sum(g.square().sum() for g in first), weights), *heard]


def twice_through(model, x, y):
    lost, z, _ = model(x, y)
    (g,) = torch.autograd.grad(lost, z, create_graph=True)
    z.sum().backward()
    g.square().sum().backward()
    return []


def nobody_has_it(model, x, y):
    lost = model(x.requires_grad_(), y)[0]
    (g,) = torch.autograd.grad(lost, x, create_graph=True)
    g.square().sum().backward()
    return [g.detach(), x.grad]


def edited(model, x, y):
    lost, z, _ = model(x, y)
    with torch.no_grad():
        z.view(-1).mul_(2.0)
    lost.backward()
    return []


class Drops(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return None


def dropped(model, x, y):
    lost, _, h = model(x, y)
    (Drops.apply(lost) + h.sum()).backward()
    return [x.grad]


def of_all(model, x, y):
    made = answers(model(x.requires_grad_(), y))
    found = torch.autograd.grad(sum(y.sin().sum() for y in made), [x, *made], create_graph=True)
    # By a result itself it depends on whether PyTorch's formula takes that or what it is made of.
    second = torch.autograd.grad(sum(g.square().sum() for g in found), [x, *model.parameters()])
    return [*(g.detach() for g in found), *second]


def penalty_of_all(model, x, y):
    made = answers(model(x.requires_grad_(), y))
    (first,) = torch.autograd.grad(sum(y.sin().sum() for y in made), [x], create_graph=True)
    del made
    first.square().sum().backward()
    return [first.detach(), x.grad]


def penalty_of_weights(model, x, y):
    made = answers(model(x, y))
    weights = [*model.parameters()]
    first = torch.autograd.grad(sum(y.sin().sum() for y in made), weights, create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return [g.detach() for g in first]


def of_the_first(model, x, y):
    made = answers(model(x.requires_grad_(), y))
    made[0].sin().sum().backward()
    return [x.grad]


# One result is computed from two others, of which one is computed from the other; and by an input
# that another one is computed from.
BOTH = {
    "diamond": (
        "self.a, self.b = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))", "x, y",
        "h = torch.tanh(x * self.a); g = torch.sin(h * self.b); return h * g + y, h, g",
        "torch.randn(5, 16), torch.randn(5, 16)",
    ),
    "autoencoder": (
        "self.e, self.d = nn.Linear(16, 4), nn.Linear(4, 16)", "x, y",
        "h = torch.tanh(self.e(x)); r = self.d(h); "
        "return (r - x).square().mean() + y.mean(), r, h",
        "torch.randn(6, 16), torch.randn(6)",
    ),
    "heads behind one trunk": (
        "self.f, self.p, self.v = nn.Linear(16, 8), nn.Linear(8, 5), nn.Linear(8, 3)", "x, y",
        "h = torch.tanh(self.f(x.abs())); return self.p(h).sin() + y, self.v(h).exp()",
        "torch.randn(6, 16), torch.randn(6, 5)",
    ),
    "chain": (
        "self.a, self.b = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))", "x, y",
        "h = torch.tanh(x * self.a); g = torch.sin(h * self.b) * x; k = (g * h + x).exp(); "
        "return (h + k).cos() * y, h, g, k",
        "torch.randn(5, 16), torch.randn(5, 16)",
    ),
}  # fmt: skip


def under_autocast_too(model, x, y):
    made = answers(model(x.requires_grad_(), y))
    lost = sum(y.sin().sum() for y in made)
    with torch.autocast("cpu"):
        lost.backward()
    return [x.grad]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("name", BOTH)
def test_what_goes_through_another_result_is_that_ones(name, tmp_path):
    taken = Taken(tmp_path, "module", text_of(*BOTH[name]))
    for done in (of_the_first, of_all, under_autocast_too, penalty_of_all, penalty_of_weights):
        same(taken, done)
    assert taken.num_calls + taken.num_weight_calls


WAYS = [hessian, of_a_square, hooks_in_both, twice_through, nobody_has_it, dropped]


@pytest.mark.parametrize("done", WAYS)
def test_a_result_is_a_function_of_those_that_it_is_computed_from(done, loss):
    """Gradients of gradients too: of a loss by its logits, by which these are differentiated."""
    same(loss, done)


def test_a_result_may_be_computed_from_one_that_is_not_returned_too(tmp_path):
    form = (
        "self.t, self.a = nn.Linear(12, 16), nn.Linear(16, 16)", "x, y",
        "h = torch.tanh(self.t(x)); z = self.a(h); return (z.square() * h).sum(-1).exp() * y, z",
        "torch.randn(5, 12) * 0.1, torch.rand(5)",
    )  # fmt: skip

    def second(model, x, y):
        summed, z = model(x, y)
        (g,) = torch.autograd.grad(summed.sum(), z, create_graph=True)
        return [g.detach(), *torch.autograd.grad(g.sin().sum(), [z, *model.parameters()])]

    same(Taken(tmp_path, "module", text_of(*form)), second)


def test_a_hook_that_forward_registers_leaves_steps_to_the_reference(tmp_path):
    path = tmp_path / "hooked.py"
    hook = "h.requires_grad and h.register_hook(lambda g: g * 2)"
    forward = f"h = torch.tanh(x * self.a); {hook}; return h.sin(), h"
    init, inputs = "self.a = nn.Parameter(torch.rand(16))", "torch.randn(5, 16)"
    path.write_text(TEXT.format(init=init, names="x", forward=forward, inputs=inputs))
    problem = load_problem(path)
    captured = captured_of(problem, capture(problem))
    assert "registers a hook on one of its results" in captured.without_step


def test_edits_of_what_is_kept_are_seen_through_views(tmp_path):
    forward = "p = self.l(x).squeeze(-1); return F.binary_cross_entropy_with_logits(p, y), p"
    form = "self.l = nn.Linear(12, 1)", "x, y", forward, "torch.randn(8, 12), torch.rand(8)"
    taken = Taken(tmp_path, "module", text_of(*form))
    for model in (taken.mine, taken.own):
        loss, p = model(*taken.inputs(1))
        with torch.no_grad():
            p.clamp_(-0.1, 0.1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


NONE = """
import torch
import torch.nn as nn


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a):
        return x * a

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))

    def forward(self, x, y):
        return Through.apply(x, self.a) * 2, torch.tanh(x * self.b)


def get_inputs():
    return [torch.randn(8, 16), torch.randn(8, 16)]


def get_init_inputs():
    return []
"""


def test_what_a_function_gives_no_gradient_by_has_none(tmp_path):
    taken = Taken(tmp_path, "module", NONE)

    def summed(model, x, y):
        first, second = model(x, y)
        wants = [first.requires_grad, second.requires_grad]
        (first.sum() + second.sum()).backward()
        return wants

    same(taken, summed)
    assert taken.num_calls


def test_statistics_are_written_without_pytorchs_noticing_as_batch_norm_does(tmp_path):
    """A backward of a call before, by the reference, has saved them: as where targets are made."""
    form = (
        "self.n, self.l = nn.BatchNorm1d(16), nn.Linear(16, 16)", "x",
        "return torch.relu(self.l(self.n(x)))", "torch.randn(8, 16)",
    )  # fmt: skip
    taken = Taken(tmp_path, "module", text_of(*form))

    def consistent(model, x):
        before = model.n.running_mean._version
        with torch.autocast("cpu"):  # a call of the reference
            mine = model(x)
        with torch.no_grad():
            other = model(x + 0.1)
        (mine.float() - other).square().mean().backward()
        edits = model.n.running_mean._version - before
        return [edits, model.n.running_mean, model.n.running_var]

    same(taken, consistent)


def test_by_reference_buffers_that_are_updated_are_lent(tmp_path):
    form = (
        "self.n, self.b = nn.BatchNorm1d(16), nn.Parameter(torch.rand(16))", "x, y",
        "return torch.relu(self.n(x)), torch.sigmoid(y * self.b)",
        "torch.randn(8, 16), torch.randn(8, 16)",
    )  # fmt: skip
    taken = Taken(tmp_path, "module", text_of(*form))

    def second(model, x, y):
        (g,) = torch.autograd.grad(model(x.requires_grad_(), y)[0].sum(), x, create_graph=True)
        return [*torch.autograd.grad(g.square().sum(), x), *model.buffers()]

    same(taken, second)


RETURNED = {
    "torch.tanh(self.l(x)), torch.relu(self.l(x * 2)), torch.sin(self.l(x))": "",
    "torch.tanh(h), torch.relu(h)": "",
    "h, torch.softmax(h, -1) * x": "",
    "h, h.detach() * self.p": "",
    "h * torch.sin(h), h, torch.sin(h)": "",
    "h + k, h, k": "",
    "h, torch.softmax(h, -1), torch.relu(h)": "",
    # They part within one function, where nothing is seen.
    "self.m(x, x, x)": "its first and its second result are made by the same linear, through",
}


@pytest.mark.parametrize("results", RETURNED)
def test_results_that_part_where_nothing_is_seen_are_pytorchs_and_others_are_not(
    results, tmp_path
):
    path = tmp_path / "results.py"
    init = (
        "self.l, self.p = nn.Linear(8, 8), nn.Parameter(torch.rand(8)); "
        "self.m = nn.MultiheadAttention(8, 2)"
    )
    forward = f"h = self.l(x); k = torch.sin(h * self.p); return {results}"
    path.write_text(TEXT.format(init=init, names="x", forward=forward, inputs="torch.randn(6, 8)"))
    problem = load_problem(path)
    captured = captured_of(problem, capture(problem))
    said = captured.without_step or why_not_planned(captured.joint)
    assert said.startswith(RETURNED[results]) if RETURNED[results] else said == ""


SLOTS = """
import torch
import torch.nn as nn


class Scale(nn.Module):
    __slots__ = ("by",)

    def __init__(self):
        super().__init__()
        self.by = 3.0
        self.w = nn.Parameter(torch.rand(16))

    def forward(self, x):
        return x * self.w * self.by


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = Scale()

    def forward(self, x):
        return torch.tanh(self.s(x))


def get_inputs():
    return [torch.randn(8, 16)]


def get_init_inputs():
    return []
"""


def test_by_reference_a_part_with_slots_is_itself(tmp_path):
    taken = Taken(tmp_path, "module", SLOTS)

    def second(model, x):
        (g,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
        return [g.detach(), *torch.autograd.grad(g.square().sum(), [x, *model.parameters()])]

    same(taken, second)


NORMED = "self.n = nn.LayerNorm(16)"
STATES = "h = torch.tanh(self.n(x)) * x; "
VIEWS = {  # what forward returns of `h`, of 5 x 6 x 16 numbers
    "the last": "h, h[:, -1]",
    "turned": "h, h.transpose(1, 2)",
    "in rows": "h, h.view(len(x), -1)",
    "the view first": "h[:, -1], h",
    "every other one": "h, h[:, ::2]",
    "of a view": "h, h[:, -1], h[:, -1].view(len(x), 4, 4)",
    "expanded": "(m := h.mean(-1, keepdim=True)), m.expand(-1, -1, 3), h",
    "the last, copied": "h, h[:, -1].clone()",
    "turned, copied": "h, h.transpose(1, 2).contiguous()",
    "turned, in rows": "h, h.transpose(1, 2).reshape(len(x), -1)",
    "read by a third": "h, h[:, -1], torch.sin(h[:, -1]) * self.n.weight",
    "in a dictionary": "{'all': h, 'last': h[:, -1]}",
    "edited by forward": "h, h[:, -1].mul_(2.0)",
    "flipped": "h, h.flip(1)",  # no view in PyTorch, and nothing to generate
    "joined": "h, torch.cat([h, x], 1)",
    "halves": "h, *h.chunk(2, -1)",  # which eager lets nobody edit in place
    "a diagonal": "h, h.diagonal(dim1=1, dim2=2)",
}


def normed(returned: str, states: str = STATES) -> str:
    return text_of(NORMED, "x", f"{states}return {returned}", "torch.randn(5, 6, 16)")


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_results_leave_the_rest_to_kernels(name, tmp_path):
    """Gradients of each result and of several, at two batches; memory is shared as in eager."""
    taken = Taken(tmp_path, "module", normed(VIEWS[name]))
    for batch in (None, 7):
        calls = taken.num_calls
        count = len(tensors_of(taken.own(*taken.inputs(1, batch))))
        for of_loss in [c for n in range(1, count + 1) for c in combinations(range(count), n)]:
            found = []
            for model in (taken.mine, taken.own):
                inputs = leaves_of(taken.inputs(1, batch))
                made = tensors_of(model(*inputs))
                bases = [y if y._base is None else y._base for y in made]
                shared = [a is b for a, b in combinations(bases, 2)]
                wanted = [*inputs, *model.parameters()]
                loss = sum((made[i] * torch.linspace(1, 2, made[i].shape[-1])).sum()
                           for i in of_loss)  # fmt: skip
                found.append((shared, [*made, *torch.autograd.grad(loss, wanted)]))
            (mine_shared, mine), (own_shared, own) = found
            assert mine_shared == own_shared or name in ("a diagonal", "halves")
            for one, other in zip(mine, own, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert taken.num_calls > calls


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> Taken:
    """All states and the last, of which PyTorch keeps nothing: it may be edited."""
    return Taken(tmp_path_factory.mktemp("states"), "module", normed("h, h[:, -1]"))


@pytest.fixture(scope="module")
def kept_states(tmp_path_factory) -> Taken:
    """All states and the last, of which PyTorch keeps the first."""
    text = normed("h, h[:, -1]", "h = torch.tanh(self.n(x)); ")
    return Taken(tmp_path_factory.mktemp("kept"), "module", text)


def the_last_scaled(model, x):
    every, last = model(x)
    last.mul_(2.0)
    every.square().sum().backward()
    return [every.detach(), last.detach()]


def all_scaled(model, x):
    every, last = model(x)
    every.mul_(2.0)
    last.square().sum().backward()
    return [every.detach(), last.detach()]


def overwritten(model, x):
    every, last = model(x)
    with torch.no_grad():
        last.zero_()
    every.square().sum().backward()
    return [every.detach()]


def filled_in(model, x):
    every, last = model(x)
    last.copy_(model.n.bias.expand(last.shape))
    every.square().sum().backward()
    return [every.detach()]


def each_in_turn(model, x):
    every, last = model(x)
    last.sum().backward(retain_graph=True)
    every.sum().backward()
    return []


def each_in_turn_though_freed(model, x):
    every, last = model(x)
    last.sum().backward()
    every.sum().backward()
    return []


def detached_in_place(model, x):
    return [model(x)[1].detach_()]


def all_detached_in_place(model, x):
    every, last = model(x)
    every.detach_()
    return [every.requires_grad, last.requires_grad]


def heard_of_all(model, x):
    every, last = model(x)
    heard = []
    every.register_hook(heard.append)
    every.retain_grad()
    last.square().sum().backward()
    return [*heard, every.grad]


def by_all(model, x):
    every, last = model(x)
    found = torch.autograd.grad(last.square().sum(), every, create_graph=True)
    return [*found, *torch.autograd.grad(found[0].square().sum(), [*model.parameters()])]


def penalty_of_the_last(model, x):
    _, last = model(x.requires_grad_())
    (found,) = torch.autograd.grad(last.square().sum(), x, create_graph=True)
    found.square().sum().backward()
    return [found.detach(), x.grad]


def the_last_alone(model, x):
    last = model(x)[1]
    last.square().sum().backward()
    return [last._base.shape]


EDITED = [
    the_last_scaled, all_scaled, overwritten, filled_in, each_in_turn, each_in_turn_though_freed,
    detached_in_place, all_detached_in_place, heard_of_all, by_all, penalty_of_the_last,
    the_last_alone,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("done", EDITED)
@pytest.mark.parametrize("of", ["states", "kept_states"])
def test_a_view_of_a_result_is_that_of_eager(done, of, request):
    """Edits of one are edits of the other, or refused; hooks and gradients go through both."""
    taken = request.getfixturevalue(of)
    assert taken.module["_TAKES_STEPS"]
    same(taken, done)


REVERSED = NONE.replace("return x * a", "return x.view(len(x), 4, 4)").replace(
    "return grad, None", "return -grad.reshape(len(grad), 16), None"
).replace(
    "return Through.apply(x, self.a) * 2, torch.tanh(x * self.b)",
    "h = torch.tanh(x * self.b) * self.a; return h, Through.apply(h, 2.0)",
)  # fmt: skip


def test_a_view_by_a_function_of_the_users_has_its_gradient(tmp_path):
    """As of a layer that reverses gradients: the numbers are those of a view, and no more."""
    taken = Taken(tmp_path, "module", REVERSED)

    def of_both(model, x, y):
        first, second = model(x, y)
        (first.sum() + second.square().sum()).backward()
        return []

    same(taken, of_both)
    assert taken.num_calls
