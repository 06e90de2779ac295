"""Whether PyTorch rounds convolutions; a search leaves out what does where PyTorch does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_any_module import derive

from tuner.capture.tasks.convolutions import ROUNDED_TEMPLATE, ROUNDED_WGMMA_TEMPLATE
from tuner.config.run_config import load_config
from tuner.evaluate.contender import QUIET
from tuner.evaluate.job_spec import JobSpec, asked, new_worker
from tuner.evaluate.rounding import is_apart, rounding_at_rows, rounding_of
from tuner.planning.gaining import ROUNDING
from tuner.planning.planning import plan
from tuner.problem.accuracy import Accuracy, math_mode
from tuner.space.constraints import Constraint
from tuner.space.expression import Expression

CONVOLVES = """
import torch, torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(64, 128, 3)

    def forward(self, x):
        return torch.relu(self.c(x) * 2.0)

def get_inputs():
    return [torch.randn(16, 64, 34, 34)]

def get_init_inputs():
    return []
"""
GIVEN, LAST = ROUNDING.values()
ROUNDED = {ROUNDED_TEMPLATE, ROUNDED_WGMMA_TEMPLATE}
CHANNELS_LAST = "nest_channels_last_triton"


def test_what_tf32_does_is_apart_and_another_order_of_sums_is_not():
    torch.manual_seed(0)
    x, y = torch.randn(64, 512), torch.randn(512, 64)
    exact = x @ y
    rounded = (x.view(torch.int32) & ~0x1FFF).view(torch.float32) @ y
    assert is_apart(rounded, exact)
    assert not is_apart(x[:, ::2] @ y[::2] + x[:, 1::2] @ y[1::2], exact)
    assert is_apart(torch.full_like(exact, torch.nan), exact)
    assert not is_apart(torch.zeros_like(exact), torch.zeros_like(exact))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_cpus_convolutions_are_not_rounded(dims):
    kind = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[dims - 1]
    convolution, x = kind(3, 5, 3), torch.randn(2, 3, *(8,) * dims)
    expected, made = convolution(x), []
    found = rounding_of(lambda: made.append(convolution(x)))
    assert found == {"given": False, **({"channels_last": False} if dims > 1 else {})}
    assert torch.equal(made[0], expected)
    assert rounding_of(lambda: x * 2) == {}
    assert rounding_of(lambda: convolution.double()(x.double())) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpus_are_where_its_settings_say_so():
    convolution = torch.nn.Conv2d(64, 128, 3, device="cuda")
    x = torch.randn(16, 64, 34, 34, device="cuda")
    with torch.no_grad(), math_mode(Accuracy.parse("pytorch")):
        assert rounding_of(lambda: convolution(x))["given"] is True
    with torch.no_grad(), math_mode(Accuracy.parse("float32")):
        found = rounding_of(lambda: convolution(x))
    assert found == {"given": False, "channels_last": False}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_convolution_is_rounded_where_it_is_with_fewer_samples_as_well():
    convolution = torch.nn.Conv2d(3, 96, 11, stride=4, padding=2, device="cuda")
    x = torch.randn(256, 3, 224, 224, device="cuda")
    with torch.no_grad(), math_mode(Accuracy.parse("pytorch")):
        found = rounding_at_rows(convolution, [x])
        each = [rounding_of(lambda rows=r: convolution(x[:rows])) for r in (256, 128, 64, 32)]
    assert found == {layout: all(one[layout] for one in each) for layout in each[0]}


def test_fewer_samples_are_asked_where_the_model_takes_them():
    convolution, rows = torch.nn.Conv2d(3, 5, 3), []

    def model(x, scale):
        rows.append(len(x))
        if len(x) == 2:
            raise RuntimeError("not of two")
        return convolution(x) * scale

    given = [torch.randn(8, 3, 6, 6), torch.ones(8, 5, 4, 4)]
    assert rounding_at_rows(model, given) == {"given": False, "channels_last": False}
    assert sorted(rows) == [1, 2, 4, 8]


def test_a_worker_says_so_of_the_reference(tmp_path):
    reference = tmp_path / "convolves.py"
    reference.write_text(CONVOLVES)
    payload = JobSpec(str(reference), {}, "cpu", "pytorch", "", "[]", "").payload()
    with new_worker("cpu", name="gain", env=QUIET, is_ours=True) as worker:
        asked(worker, "prepare", payload)
        found = asked(worker, "rounding", {}).data
    assert found == {"rounds": {"given": False, "channels_last": False}}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    _, made = derive(tmp_path_factory.mktemp("convolves"), "convolves", CONVOLVES)
    return plan(load_config(made.config, {"device": "cuda"}), may_assume=True)


def templates_of(planned) -> set[str]:
    return {str(params["template"]) for params in planned.defaults}


@pytest.mark.parametrize(
    ("facts", "left_out"),
    [
        ({}, set()),
        ({GIVEN: True, LAST: True}, set()),
        ({GIVEN: True, LAST: False}, set()),
        ({GIVEN: False}, ROUNDED),
        ({GIVEN: False, LAST: False}, ROUNDED),
        ({GIVEN: False, LAST: True}, ROUNDED | {CHANNELS_LAST}),
    ],
)
def test_what_rounds_is_left_out_where_pytorch_does_not(planned, facts, left_out):
    known = planned.knowing(facts)
    assert templates_of(planned) - templates_of(known) == left_out
    assert ROUNDED | {CHANNELS_LAST} <= templates_of(planned)
    assert (known.space.num_feasible < planned.space.num_feasible) == bool(left_out)
    assert known.facts == {**planned.facts, **facts}
    reasons = [why for why, count in known.space.rejections.items() if "does not round" in why]
    assert bool(reasons) or not left_out


def test_what_is_compiled_before_that_is_known_is_what_the_search_starts_from(planned):
    def keys(plan) -> set[str]:
        return {plan.family.render(params, plan.facts).key for params in plan.defaults}

    assert keys(planned.knowing({GIVEN: True, LAST: True})) == keys(planned)
    assert keys(planned.knowing({GIVEN: False, LAST: False})) < keys(planned)


def test_a_named_configuration_that_is_left_out_then_is_said(planned):
    first = [{"template": name} for name in sorted({*ROUNDED, CHANNELS_LAST})]
    search = planned.config.search.model_copy(update={"first": first})
    named = replace(planned, config=planned.config.model_copy(update={"search": search}))
    assert not named.knowing({GIVEN: True, LAST: True}).warnings
    known = named.knowing({GIVEN: False})
    said = known.warnings
    assert [*known.start.named] == [
        place for place, asked in enumerate(first) if asked["template"] == CHANNELS_LAST
    ]
    assert len(said) == len(ROUNDED) and all("PyTorch does not round" in why for why in said)


def test_who_asks_for_such_templates_alone_gets_them(planned):
    own = Constraint(Expression.parse(f"template in {sorted(ROUNDED)!r}"), "the user's own")
    narrow = replace(planned, constraints=[*planned.constraints, own])
    assert narrow.knowing({GIVEN: False}) is narrow
