"""What is moved, joined or enlarged is read where it lies; sines of few numbers are made once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from interpreted import interpreted
from test_any_module import F, assert_as_exact, text_of_form
from test_ranges import Interpreted, check, check_each, derive, needs_gpp, needs_triton
from test_steps import Taken, assert_gradients_are_as_exact

from tuner.capture.capture import capture
from tuner.capture.nests.nest import Nest
from tuner.capture.tasks.partitions import partitions_of, worth_a_search
from tuner.capture.tasks.stages import Partition, Stages, stages_of

HALVES = "(lambda a, b: {})(*x.chunk(2, -1))"
FORMS: dict[str, tuple[str, str, str]] = {
    "gated": (HALVES.format(f"{F}.silu(a) * b"), "", "torch.randn(37, 148)"),
    "turned": (
        "x * y.cos() + torch.cat((-x[..., 19:], x[..., :19]), -1) * (y * 2.0).sin()", "",
        "torch.randn(37, 5, 4, 38), torch.randn(5, 1, 38)",
    ),
    "by positions": (
        "(lambda at: x * at.cos() + x.roll(1, -1) * at.sin())"
        "(torch.arange(9)[:, None] * self.inv)",
        "self.register_buffer('inv', torch.rand(40))", "torch.randn(37, 9, 40)",
    ),
    "joined in the middle": (
        "torch.cat((x[:, ::2], y * 2.0, x[:, 1::2]), 1).tanh() + z", "",
        "torch.randn(37, 6, 5, 7), torch.randn(37, 4, 5, 7), torch.randn(37, 10, 5, 7)",
    ),
    "joined at an end": ("torch.cat((y[:, 5:8], x * 0.5), 1) + y", "",
                         "torch.randn(37, 61), torch.randn(37, 64)"),
    "neighbours, reduced": ("(x[:, 1:] - x[:, :-1]).abs().mean(1)", "", "torch.randn(37, 131)"),
    "one row of each": ("x[:, 2] * y + x[:, -1].exp()", "",
                        "torch.randn(37, 6, 65), torch.randn(37, 65)"),
    "of a norm": (HALVES.format(f"{F}.gelu({F}.layer_norm(a, (64,))) * b"), "",
                  "torch.randn(37, 128)"),
    "masked by a part": (
        "torch.softmax((x * 0.5).masked_fill(self.mask[:, :9, :9] == 0, float('-inf')), -1)",
        "self.register_buffer('mask', torch.ones(1, 16, 16).tril())", "torch.randn(37, 9, 9)",
    ),
    "behind a product": ("(lambda a, b: torch.sigmoid(a) * b)(*self.l(x).chunk(2, -1))",
                         "self.l = nn.Linear(20, 66)", "torch.randn(37, 20)"),
    "enlarged": (f"{F}.interpolate(x, scale_factor=2, mode='nearest') * y", "",
                 "torch.randn(37, 3, 5, 7), torch.randn(37, 3, 10, 14)"),
    "enlarged once": (f"torch.relu({F}.interpolate(x, size=(5, 28)))", "",
                      "torch.randn(37, 3, 5, 7)"),
    "padded": (f"{F}.pad(torch.relu(x), (1, 2, 0, 1)) * 2.0 + y", "",
               "torch.randn(37, 3, 5, 7), torch.randn(6, 10)"),
    "cut off": (f"{F}.pad(x, (-1, 2, 3, -1)).exp()", "", "torch.randn(37, 3, 5, 7)"),
    "halves": (HALVES.format("torch.relu(a) * b"), "", "torch.randn(37, 148).half()"),
    "in float64": (HALVES.format("torch.exp(a) - b"), "", "torch.randn(37, 148).double()"),
}  # fmt: skip


def forward_of(folder: Path, form: tuple[str, str, str]) -> tuple[Stages, list[str], Stages]:
    """Return the default tasks, what is worth a search, and the tasks in place."""
    problem, _ = derive(folder, "module", form)
    graph = capture(problem)
    default = stages_of(graph)
    found = {"": default, **partitions_of(graph, default)}
    return default, worth_a_search(graph, found), stages_of(graph, Partition(is_in_place=True))


@pytest.mark.parametrize("name", FORMS)
def test_no_copy_is_made_and_a_search_tries_it(name, tmp_path):
    default, worth, own = forward_of(tmp_path, FORMS[name])
    assert "in_place" in worth
    assert len(own.calls) < len(default.calls)
    products = [call for call in own.calls if call.name == "linear"]
    assert len(own.calls) == len(products), [call.name for call in own.calls]


@pytest.mark.parametrize("name", ["of a norm", "masked by a part"])
def test_a_part_is_read_in_the_nest_that_reduces_it(name, tmp_path):
    _, _, own = forward_of(tmp_path, FORMS[name])
    (nest,) = own.tasks
    assert isinstance(nest, Nest) and nest.reductions and nest.parts and not nest.taps


def test_sines_of_few_numbers_are_computed_once(tmp_path):
    _, _, own = forward_of(tmp_path, FORMS["turned"])
    first, last = own.tasks
    assert isinstance(first, Nest) and isinstance(last, Nest)
    assert {output.count for output in first.outputs} == {5 * 38}
    kinds = [statement.op for each in last.passes for statement in each.statements]
    assert not {"sin", "cos"} & {*kinds}


@pytest.mark.parametrize(
    "forward",
    [
        f"{F}.pad(x, (1, 2), value=0.5) * 2.0",
        f"{F}.interpolate(x[None, None], size=(10, 21)) + 1.0",  # 3 times as large
        f"{F}.interpolate(x[None, None], scale_factor=2.05) + 1.0",
    ],
)
def test_what_a_tap_cannot_say_stays_a_call(forward, tmp_path):
    default, worth, own = forward_of(tmp_path, (forward, "", "torch.randn(5, 7)"))
    assert own.tasks == default.tasks and default.calls and worth == [""]


@pytest.mark.parametrize(
    "forward",
    [
        "(x * self.w.exp()).sum(1)",  # of as many columns as a row has, in a nest that reduces
        "x * torch.exp(x.mean(1, keepdim=True))",  # one number a row
        "x * 2.0 + y",  # costs nothing
    ],
)
def test_what_costs_nothing_or_follows_a_reduction_is_of_its_nest(forward, tmp_path):
    form = (forward, "self.w = nn.Parameter(torch.randn(7))", "torch.randn(5, 7), torch.randn(7)")
    default, _, own = forward_of(tmp_path, form)
    assert own.tasks == default.tasks


@needs_gpp
@pytest.mark.parametrize("name", FORMS)
def test_the_loops_compute_what_the_module_does(name, tmp_path):
    check(tmp_path, name, FORMS[name], judge=assert_as_exact)


def test_what_is_not_finite_goes_where_the_module_lets_it(tmp_path):
    """What a part has beyond its edges is chosen for no element, whatever stands there."""
    taken = Taken(tmp_path, "turned", text_of_form(FORMS["turned"]), template="nest_in_place")
    x, y = taken.inputs(1, None)
    x = x.detach().clone()
    x[0, 0, 0, 3], x[1, 2, 1, 30], x[2] = float("inf"), float("nan"), -float("inf")
    with torch.no_grad():
        mine, own = taken.mine(x, y), taken.own(x, y)
    assert torch.equal(mine.isnan(), own.isnan()) and torch.equal(mine.isinf(), own.isinf())


def check_triton(folder: str) -> None:
    """Compare Triton's kernels with PyTorch: in its interpreter where TRITON_INTERPRET is set."""
    check_each(FORMS, folder, assert_as_exact)


@needs_triton
def test_interpreted_blocks_compute_what_the_module_does(tmp_path):
    interpreted("test_in_place", "check_triton", str(tmp_path))


STEPS = [
    "gated", "turned", "joined in the middle", "neighbours, reduced", "one row of each", "padded",
]  # fmt: skip


@needs_gpp
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_as_exact_as_pytorchs(name, tmp_path):
    assert_gradients_are_as_exact(Taken(tmp_path, "parts", text_of_form(FORMS[name])), name)


def check_triton_steps(folder: str, forms: Mapping[str, tuple[str, str, str]]) -> None:
    """Compare gradients by Triton's kernels with PyTorch's, in its interpreter."""
    for number, (name, form) in enumerate(forms.items()):
        own = Path(folder) / str(number)
        own.mkdir()
        assert_gradients_are_as_exact(Interpreted(own, "parts", text_of_form(form)), name)


@needs_triton
def test_interpreted_gradients_are_as_exact_as_pytorchs(tmp_path):
    forms = {name: FORMS[name] for name in STEPS}
    interpreted("test_in_place", "check_triton_steps", str(tmp_path), forms)
