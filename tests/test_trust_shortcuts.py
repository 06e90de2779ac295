"""Shortcuts that usual calls do not show: each wrong module is rejected by its class's probe."""

from __future__ import annotations

import pytest
import shortcut_modules as modules
from test_check import FLOAT32, load_reference, reasons, verdict
from test_problem import FLAGSHIP

from tuner.check.judge.expected import expected
from tuner.check.probes.probes import thorough_probes

SEED = 33
# The probe that finds it, the reference where that is not the flagship, and what must be said.
WRONG = {
    "AddsToTheWeightsGrad": ("gradients beside .grad", "MULTIPLIED", "changed the .grad of w"),
    "AddsToTheInputsGrad": ("gradients beside .grad", "MULTIPLIED", "changed the .grad of input"),
    "RangeOfTheFirstCall": ("huge values", "GATED", "output of call 1"),
    "OneSweepIfItStartsWell": ("later rows", "SUM", "output of call 1"),
    "KeptByNameAndVersion": ("input edited in place, eval", "GATED", "memoised, or replayed"),
    "FoldedByAbsolutes": ("weights negated, eval", None, "output of call 2"),
    "FoldedBySums": ("weights shifted, inference", None, "output of call 2"),
    "FoldedByNorms": ("weights mirrored, eval", None, "output of call 2"),
    "RowsWithEqualSumsAreEqual": ("like rows", "SUM", "output of call 1"),
    "TableOfBytes": ("whole numbers", "GATED", "output of call 2"),
    "WholeNumbersInSixteenBits": ("whole numbers, other mode", "GATED", "output of call 4"),
    "ColumnsFromTheStart": ("transposed cut input", "GATED", "output of call 1"),
    "ColumnsAtTheNextEight": ("transposed cut input", "GATED", "output of call 1"),
    "GradientByColumns": ("gradients cut from columns", "GATED", "gradient of input 0"),
    "RuleOfOneWeight": ("mapped over weights", "MULTIPLIED", "output of call 1"),
    "RuleThatNamesTheOldPlace": ("mapped over inputs", "MULTIPLIED", "call 1"),
    "MeanOfNothingIsNothing": ("nothing but special", "LOSS", "got 0, expected nan"),
    "DropsWhatItDoesNotKnow": ("a wrong state_dict", "MULTIPLIED", "of a key too many"),
    "FindsItUnderAnyPrefix": ("a wrong state_dict", "MULTIPLIED", "of another prefix"),
    "TellsNothingIsMissing": ("a wrong state_dict", "MULTIPLIED", "of a key too few"),
    "CopiesWithoutHooks": ("copied with hooks", "MULTIPLIED", "output of call 2"),
    "CopiesByItsConstructor": ("copied with hooks", "MULTIPLIED", "has lost an attribute"),
    "CopiesThaw": ("copied with hooks", "MULTIPLIED", "gradient of w"),
    "ZeroIsNotGiven": ("zero arguments", "ADDED", "output of call 1"),
    "OneRowIsBroadcast": ("gradients of one row", "MULTIPLIED", "gradient of w"),
    "NoRowsWriteNoGradient": ("gradients of no rows", "MULTIPLIED", "gradient of w"),
    "GradientsInFloat32": ("float64 module, gradients", "MULTIPLIED", "gradient of"),
    "RowsOfTheLastCall": ("called on fewer rows before", "MULTIPLIED", "gradient of w"),
    "ReadsRowsAsChunks": ("twice the features", "MULTIPLIED", "reference raises"),
    "LeavesGradientsOff": ("after a refused call", "MULTIPLIED", "refused, "),
    "OnesOfTheFirstCall": ("served in inference mode", "MULTIPLIED", "Inference tensors"),
    "WeightsAtTheFourthFloat": ("a life", "MULTIPLIED", "output of call"),
    "EvalReturnsNothing": ("eval and training in turn", "MULTIPLIED", "eval() returns NoneType"),
    "TableSeenBeforeItIsWritten": ("threads, eval", "MULTIPLIED", "output of call"),
}
HONEST = {"HonestMean": "LOSS", "HonestRule": "MULTIPLIED"}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return a reference's problem and all of its probes."""
    held = {}

    def problem_of(reference):
        if reference not in held:
            text = getattr(modules, reference) if reference else FLAGSHIP
            problem = load_reference(tmp_path_factory.mktemp("shortcut"), text)
            held[reference] = problem, thorough_probes(SEED, problem.num_rows()), {}
        return held[reference]

    return problem_of


def asked_of(problems, reference, names):
    problem, probes, models = problems(reference)
    asked = [p for p in probes if p.name.startswith(names)]
    assert asked, names
    return problem, [expected(problem, p, FLOAT32, models=models) for p in asked]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_module_is_rejected_by_the_probe_of_its_class(name, problems):
    start, reference, words = WRONG[name]
    found = reasons(getattr(modules, name), *asked_of(problems, reference, start))
    assert any(words in reason for reason in found), found


USUAL = (
    "as given",
    "fresh weights",
    "some rows",
    "gradients of weights",
    "called twice",
    "copied",
)


@pytest.mark.parametrize("name", WRONG)
def test_usual_calls_do_not_tell_it(name, problems):
    """Else the probe of its class would not have been what found it."""
    has_to_change = name == "EvalReturnsNothing"
    usual = [n for n in USUAL if not (n == "copied" and name.startswith("Copies"))]
    usual = [n for n in usual if not (has_to_change and n in ("fresh weights", "some rows"))]
    problem, expectations = asked_of(problems, WRONG[name][1], tuple(usual))
    expectations = [e for e in expectations if e.probe.name in usual]
    assert len(expectations) == len(usual)
    assert reasons(getattr(modules, name), problem, expectations) == []


@pytest.mark.parametrize("reference", sorted({r for _, r, _ in WRONG.values()}, key=str))
def test_the_reference_itself_is_right_on_all_of_them(reference, problems):
    starts = tuple(start for start, r, _ in WRONG.values() if r == reference)
    problem, expectations = asked_of(problems, reference, starts)
    assert reasons(problem.module.Model, problem, expectations) == []


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_module_is_right_and_a_drop_in(name, problems):
    starts = tuple({start for start, _, _ in WRONG.values()})
    problem, expectations = asked_of(problems, HONEST[name], starts)
    check = verdict(problem, getattr(modules, name), expectations)
    assert check.is_accepted and check.strictly().is_accepted, (check.reason, check.differences)


def test_other_random_numbers_than_the_references_are_a_difference(problems):
    problem, expectations = asked_of(problems, "MULTIPLIED", "as given")
    check = verdict(problem, modules.DrawsOnceMore, expectations)
    assert check.is_accepted and not check.strictly().is_accepted
    assert "draws other random numbers" in check.differences[0]


def test_to_have_no_rule_for_vmap_is_a_difference_and_no_mistake(problems):
    problem, expectations = asked_of(problems, "GATED", "mapped over inputs")
    without_rule = modules.GradientByColumns  # its autograd.Function has none
    check = verdict(problem, without_rule, expectations)
    assert check.is_accepted and not check.strictly().is_accepted
    assert check.differences[0].startswith("mapped over inputs: it refuses")
