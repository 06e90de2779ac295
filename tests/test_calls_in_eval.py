"""Modules that are tuned in training: their calls in eval mode take kernels of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cpu_machine import FACTS, FEW_PASSES, GPP, compiled
from test_matching import TEXT
from torch import Tensor, nn

from tuner.capture.capture import capture, in_eval_mode, with_another_batch
from tuner.capture.modules.rows_text import ways_in, with_rows
from tuner.errors import InputError
from tuner.evaluate.modules import fused, module_of
from tuner.kernel.binding import bind
from tuner.kernel.family import load_family
from tuner.planning.deriving import derive_operator
from tuner.problem.reference import load_problem

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
MOST = 2**63 - 1
NORM = TEXT.format(
    init=(
        "self.a, self.n = nn.Linear(6, 8), nn.BatchNorm1d(8); self.k = nn.Parameter(torch.ones(1))"
    ),
    names="x, by=2.0, *, more=0.0",
    forward="return torch.relu(self.n(self.a(x)) * self.k * by) + more",
    inputs="torch.randn(20, 6)",
)


# What `train` changes besides: a part that stays in training, and a number.
OWN_TRAIN = """
import torch
from torch import nn


class Part(nn.Module):
    def forward(self, x):
        return x * 2.0 if self.training else x * 3.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.p, self.by = nn.BatchNorm1d(6), Part(), 2.0
        self.register_buffer("b", torch.ones(6))

    def train(self, mode=True):
        super().train(mode)
        self.p.train(True)
        self.by = 2.0 if mode else 5.0
        return self

    def forward(self, x):
        return torch.relu(self.n(x) * self.by + self.p(x)) * self.b


def get_inputs():
    return [torch.randn(20, 6)]


def get_init_inputs():
    return []
"""


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return family_of(tmp_path_factory.mktemp("norm") / "norm.py", NORM)


@pytest.fixture(scope="module")
def own_train(tmp_path_factory):
    return family_of(tmp_path_factory.mktemp("own_train") / "own_train.py", OWN_TRAIN)


def family_of(path: Path, text: str) -> SimpleNamespace:
    path.write_text(text)
    made = derive_operator(path, match="none")
    found = load_family(made.name, [made.folder])
    candidate = found.render({"template": "nest"}, FACTS)
    operator = bind(candidate.plan, "cpp", compiled(candidate, level=FEW_PASSES))
    return SimpleNamespace(text=found.model_new, operator=operator, problem=load_problem(path))


def both(family: SimpleNamespace, rows: dict | None = None) -> SimpleNamespace:
    """Our module and the reference in eval mode, with statistics of some steps of training."""
    module = module_of(with_rows(family.text, rows))
    calls: list[int] = []

    def in_eval(*args: Tensor) -> object:
        calls.append(len(args[0]))
        return family.operator.extra["eval"](*args)

    module |= {**fused(family.operator), "fused_eval": in_eval, "fused_device": "cpu"}
    own = family.problem.make_model(0)
    with torch.no_grad():
        own(3.0 * torch.randn(50, 6) + 1.0)
    mine = module["ModelNew"]()
    mine.load_state_dict(own.state_dict())
    return SimpleNamespace(mine=mine.eval(), own=own.eval(), calls=calls, known=module["_KNOWN"])


def given(rows: int) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def assert_close(pair: SimpleNamespace, x: Tensor, *args: float, **named: float) -> None:
    torch.testing.assert_close(pair.mine(x, *args, **named), pair.own(x, *args, **named))


@torch.no_grad()
def test_calls_in_eval_mode_take_kernels_and_leave_the_statistics(family):
    pair = both(family)
    before = copy.deepcopy(pair.mine.state_dict())
    for rows in (3, 20, 7, 20, 64, 20):
        assert_close(pair, given(rows))
    assert pair.calls == [3, 20, 7, 20, 64, 20]
    assert all(torch.equal(x, before[name]) for name, x in pair.mine.state_dict().items())
    for rows in (0, 1, 2):  # fewer than forward in training was captured for
        assert_close(pair, given(rows))
    assert len(pair.calls) == 6
    assert set(ways_in(family.text)) == {"call", "step", "eval"}


@torch.no_grad()
def test_modes_that_follow_one_another_are_both_remembered(family):
    pair = both(family)
    for _ in range(70):
        for is_training in (True, False):
            pair.mine.train(is_training), pair.own.train(is_training)
            assert_close(pair, given(20))
    known = {mode: pair.known[id(pair.mine), mode] for mode in (True, False)}
    assert [known[mode].changes for mode in (True, False)] == [0, 0]
    assert [len(known[mode].calls) for mode in (True, False)] == [1, 1]
    assert len(pair.calls) == 70


def test_what_wants_gradients_in_eval_mode_is_the_references(family):
    pair = both(family)
    x = given(20).requires_grad_()

    def gradients(model: nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()])

    for mine, own in zip(gradients(pair.mine), gradients(pair.own), strict=True):
        torch.testing.assert_close(mine, own)
    assert not pair.calls
    pair.mine.requires_grad_(False)
    assert not pair.mine(x.detach()).requires_grad and pair.calls == [20]  # as it is deployed
    assert pair.mine(x).requires_grad and pair.calls == [20]


@torch.no_grad()
def test_parts_in_another_mode_are_the_references(family):
    pair = both(family)
    assert_close(pair, given(20))
    for model in (pair.mine, pair.own):
        model.n.train()
    assert_close(pair, given(20))  # statistics of the batch
    torch.testing.assert_close(pair.mine.state_dict(), pair.own.state_dict())
    assert pair.calls == [20]
    for model in (pair.mine, pair.own):
        model.train().n.eval()
    assert_close(pair, given(20))
    for model in (pair.mine, pair.own):
        model.eval()
    assert_close(pair, given(20))
    assert pair.calls == [20, 20]


@torch.no_grad()
@pytest.mark.parametrize("is_training", [True, False])
def test_other_arguments_than_those_of_the_captured_call_are_used(is_training, family):
    """In eval mode a call once left them out: the mode was asked first."""
    pair = both(family)
    for model in (pair.mine, pair.own):
        model.train(is_training)
    assert_close(pair, given(20), 3.0)
    assert_close(pair, given(20), by=0.5, more=1.0)
    assert_close(pair, given(20), more=-2.0)
    assert not pair.calls


@torch.no_grad()
def test_rows_at_which_pytorch_is_faster_are_the_references(family):
    rows = {"call": (1, MOST), "step": (1, MOST), "eval": (8, 64, (20, 24))}
    pair = both(family, rows)
    for count in (7, 8, 19, 20, 24, 25, 64, 65):
        assert_close(pair, given(count))
    assert pair.calls == [8, 19, 25, 64]


@torch.no_grad()
def test_what_train_changes_besides_is_as_it_was_captured(own_train):
    pair = both(own_train)
    for count, change in enumerate(
        (
            lambda model: None,
            lambda model: model.p.eval(),
            lambda model: model.eval(),
            lambda model: setattr(model, "by", 2.0),
            lambda model: model.train().eval(),
        )
    ):
        for model in (pair.mine, pair.own):
            change(model)
        assert_close(pair, given(20))
        assert len(pair.calls) == (1, 1, 2, 2, 3)[count]


def test_buffers_that_want_gradients_have_them(own_train):
    pair = both(own_train)
    for model in (pair.mine, pair.own):
        model.requires_grad_(False)
    assert_close(pair, given(20))
    assert pair.calls == [20]
    for model in (pair.mine, pair.own):
        model.b.requires_grad_(True)
    grads = [torch.autograd.grad(m(given(20)).sum(), m.b)[0] for m in (pair.mine, pair.own)]
    torch.testing.assert_close(*grads)
    assert pair.calls == [20]


@pytest.mark.parametrize("taken", ["is_trained", "usual_state"])
def test_an_argument_that_hides_a_function_of_the_file_is_refused(taken, tmp_path):
    path = tmp_path / "hiding.py"
    path.write_text(TEXT.format(
        init="self.n = nn.BatchNorm1d(6)", names=taken, forward=f"return self.n({taken}).relu()",
        inputs="torch.randn(20, 6)",
    ))  # fmt: skip
    with pytest.raises(InputError, match=f"an argument of forward is called '{taken}'.*\n  next"):
        derive_operator(path, match="none")


def test_a_module_whose_train_raises_is_refused_with_its_line(tmp_path):
    path = tmp_path / "raising.py"
    raising = "super().train(mode) if mode else [][0]"
    path.write_text(OWN_TRAIN.replace("super().train(mode)", raising))
    with pytest.raises(InputError, match=r"raising\.py:18: Model\.train.*IndexError"):
        derive_operator(path, match="none")


def test_it_is_said_where_eval_mode_stays_the_references(tmp_path):
    path = tmp_path / "counting.py"
    path.write_text(TEXT.format(
        init="self.n = nn.BatchNorm1d(6); self.register_buffer('b', torch.zeros(()))", names="x",
        forward="self.b.add_(1.0); return self.n(x).relu() + self.b", inputs="torch.randn(20, 6)",
    ))  # fmt: skip
    said: list[str] = []
    derive_operator(path, SimpleNamespace(on_stage=said.append), match="none")
    words = "counting.py: calls in eval mode run PyTorch's own operations; --mode eval tunes those"
    assert words in said


@torch.no_grad()
def test_a_compiled_module_takes_the_same_way(family):
    pair = both(family)
    x = given(20)
    compiled_model = torch.compile(pair.mine, backend="eager")
    torch.testing.assert_close(compiled_model(x), pair.own(x))


UNLIKE = {
    "edits a buffer": ("self.b.add_(0 if self.training else 1); return x + self.b", False),
    "is for few rows": (
        "return x * 2.0 if self.training else (x * len(x) if len(x) > 64 else x + 1.0)", False
    ),
    "returns less": ("return {'y': x * 2.0, 'z': x + 1.0} if self.training else x * 3.0", True),
    "returns more": ("return x * 3.0 if self.training else {'y': x * 2.0, 'z': x + 1.0}", True),
    "returns a class": (
        "return x * 3.0 if self.training else __import__('collections').OrderedDict(y=x * 2.0)",
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_a_forward_that_is_unlike_that_of_training_may_be_the_references(name, tmp_path: Path):
    path = tmp_path / "unlike.py"
    forward, is_taken = UNLIKE[name]
    path.write_text(TEXT.format(
        init="self.register_buffer('b', torch.zeros(6))", names="x", forward=forward,
        inputs="torch.randn(20, 6)",
    ))  # fmt: skip
    problem = load_problem(path)
    graph = capture(problem)
    other = with_another_batch(problem, graph)
    assert other is not None and graph.is_training
    found = in_eval_mode(problem, (graph, other), capture(problem, mode="eval"))
    assert (found is not None) == is_taken
