"""Faults that show only where two properties meet: each is rejected by the probe of its class."""

from __future__ import annotations

import combined_modules as modules
import pytest
from test_check import FLOAT32, load_reference, reasons, verdict
from test_problem import FLAGSHIP

from tuner.check.judge.expected import expected
from tuner.check.probes.pairings import NUM_DRAWN, ORDERS
from tuner.check.probes.probes import thorough_probes
from tuner.check.probes.traits import Traits, traits_of

SEED = 34
# The probe that finds it, its reference, and what must be said.
WRONG = {
    "VarianceOfSquaresInBackward": ("gradients, offset", "SUM", "gradient of input"),
    "BackwardOverflows": ("gradients, huge", "GATED", "got nan"),
    "LastOddRowLeftOut": ("gradients of ", "MULTIPLIED", "gradient of w"),
    "SetsBackRandomNumbers": ("a chain of calls", "MULTIPLIED", "the backward left other sett"),
    "RowsOfTheFirst": ("more rows of input", "GATED", "the reference raises"),
    "OnePointerOneGradient": ("one tensor for all", "GATED", "gradient of input"),
    "WantsOfTheFirstCall": ("other inputs want gradients", "GATED", "gradient of input"),
    "FortySlots": ("a chain of calls", "GATED", "gradient of input"),
    "PlanCopied": ("a copy beside the original", "GATED", "gradient of input"),
    "KeptByPlaceInMemory": ("graphs that outlive their module", "MULTIPLIED", "gradient of w"),
    "LabelsUnsaved": ("integers edited", "LOSS", "gradient of input 0"),
    "GradientByPlace": ("tied weights", "TWO", "gradient of a"),
    "FirstTileAllMasked": ("masked rows", "HIDDEN", "got nan"),
    "FirstTileOfABias": ("a block of -Inf in a bias", "BIASED", "got nan"),
    "TimesNothing": ("Inf where labels are ignored", "LOSS", "got nan"),
    "ChannelsLastMisread": ("channels_last input, no gradients", "POOLED", "output of call 1"),
    "ChannelsLastGradientMisread": ("channels_last gradients", "POOLED", "gradient of input 0"),
    "StatisticsInTheInputsType": ("bfloat16 module but for its", "NORM", "buffer bn.running"),
    "SumsOfHalves": ("float16 module, many rows", "NORM", "NaN or Inf at other places"),
    "SquaresOfHalves": ("float16 module, wide range", "LAYER", "output of call"),
    "PaddingByType": ("int32, gradients", "PADDED", "gradient of emb.weight"),
}
HONEST = {"HonestTiles": "HIDDEN", "HonestSweeps": "SUM"}
STARTS = tuple({start for start, _, _ in WRONG.values()} | {"gradients, ", "drawn"})


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return a reference's problem and the probes that say anything of it, by seed."""
    held = {}

    def problem_of(reference, seed=SEED):
        if reference not in held:
            text = getattr(modules, reference) if reference else FLAGSHIP
            held[reference] = load_reference(tmp_path_factory.mktemp("combined"), text), {}
        problem, models = held[reference]
        traits = traits_of(problem, problem.make_model(0, "cpu"), "cpu")
        return problem, thorough_probes(seed, problem.num_rows(), traits=traits), models

    return problem_of


def asked_of(problems, reference, names, seed=SEED):
    problem, probes, models = problems(reference, seed)
    asked = [p for p in probes if p.name.startswith(names)]
    assert asked, names
    return problem, [expected(problem, p, FLOAT32, models=models) for p in asked]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_module_is_rejected_by_the_probe_of_its_class(name, problems):
    start, reference, words = WRONG[name]
    found = reasons(getattr(modules, name), *asked_of(problems, reference, start))
    assert any(words in reason for reason in found), found


USUAL = (
    "as given", "fresh weights", "some rows", "gradients of weights", "gradients", "called twice",
    "copied", "offset", "gradients, eval", "transposed input",
)  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_usual_calls_do_not_tell_it(name, problems):
    """Else the probe of its class would not have been what found it."""
    # What a backward leaves is looked at after each.
    is_any = name == "SetsBackRandomNumbers"
    usual = [n for n in USUAL if not (is_any and "gradients" in n)]
    problem, expectations = asked_of(problems, WRONG[name][1], tuple(usual))
    expectations = [e for e in expectations if e.probe.name in usual]
    assert reasons(getattr(modules, name), problem, expectations) == []


@pytest.mark.parametrize("reference", [None, *sorted({r for _, r, _ in WRONG.values()})])
def test_the_reference_itself_is_right_on_all_of_them(reference, problems):
    problem, expectations = asked_of(problems, reference, STARTS)
    assert reasons(problem.module.Model, problem, expectations) == []


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_module_is_right_and_a_drop_in(name, problems):
    problem, expectations = asked_of(problems, HONEST[name], STARTS)
    check = verdict(problem, getattr(modules, name), expectations)
    assert check.is_accepted and check.strictly().is_accepted, (check.reason, check.differences)


# ---- probes whose properties are drawn ------------------------------------------------------


PLAIN = Traits(1, 1, 2, True, False, False, False, False, False)


def drawn(seeds, *traits):
    more = dict(zip(("traits",), traits, strict=False))
    probes = [p for s in seeds for p in thorough_probes(s, 40, **more)]
    return [p for p in probes if p.name.startswith("drawn")]


def test_any_two_properties_that_fit_meet_in_some_draw():
    probes = drawn(range(200))
    assert len(probes) == 200 * NUM_DRAWN
    wanted = {
        "gradients of a view in eval mode": lambda p: p.gradients and p.mode == "eval",
        "a view of few rows": lambda p: p.layout == "cut" and (p.batch or 99) < 9,
        "a view with an offset": lambda p: p.layout == "strided" and p.distribution == "offset",
        "NaN after a copy": lambda p: "nan" in p.distribution and ("copy",) in p.before,
        "a view in mixed modes": lambda p: p.mode == "frozen" and p.layout == "transposed",
        "one view, incoming another": lambda p: (
            p.layout == "transposed cut" and p.gradient_layout == "transposed"
        ),
        "inference of a view": lambda p: p.is_inference and p.layout == "negated",
    }
    assert [what for what, is_met in wanted.items() if not any(map(is_met, probes))] == []


def test_what_cannot_meet_is_not_drawn():
    for probe in drawn(range(30), PLAIN):
        assert probe.layout not in ("channels_last", "reversed", "rows inside", "same", "shared")
        assert not (probe.gradients and "nan" in probe.distribution)


def test_what_ends_pytorch_itself_is_not_drawn():
    """GroupNorm's backward of a channels_last input by the weights alone: a segmentation fault."""
    probes = [p for p in drawn(range(100)) if p.layout in ORDERS and p.gradients]
    assert len(probes) > 20 and {p.gradients for p in probes} == {"all"}


def test_a_fault_of_two_properties_is_found_in_some_draw(problems):
    found = []
    for seed in range(SEED, SEED + 12):
        problem, probes, models = problems("GATED", seed)
        fitting = [
            p for p in probes
            if p.name.startswith("drawn") and p.gradients == "all" and p.mode == "eval"
        ]  # fmt: skip
        asked = [expected(problem, p, FLOAT32, models=models) for p in fitting]
        found += reasons(modules.TransposedInEvalWithGradients, problem, asked)
    assert any("gradient of input 0" in reason for reason in found)


def test_what_says_nothing_of_a_module_is_not_asked():
    every = {p.name for p in thorough_probes(SEED, 40)}
    asked = {p.name for p in thorough_probes(SEED, 40, traits=PLAIN)}
    left_out = {name for name in every - asked if not name.startswith("drawn")}
    assert {"int32, gradients", "tied weights", "one tensor for all"} <= left_out
    assert "gradients, offset" in asked and "other inputs want gradients" in asked
