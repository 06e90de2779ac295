"""Faults of rare values, rows and options, each found by one question; and rare right modules."""

from __future__ import annotations

import pytest
import rare_modules as modules
from test_check import FLOAT32, load_reference, reasons, verdict

from tuner.check.judge.expected import expected
from tuner.check.probes.probes import thorough_probes
from tuner.check.probes.traits import traits_of

SEED = 11
# The question that finds it, its reference, and what must be said.
WRONG = {
    "DropsNaN": ("NaN elements", "MOST", "expected nan"),
    "NoGradientOfHalves": ("bfloat16 module, gradients", "LINEAR", "gradient of"),
    "SumsOfAThousand": ("gradients of very many rows", "LINEAR", "gradient of linear"),
    "KeepsItsFirstGradients": ("gradients", "LINEAR", "(backward 4)"),
    "RowsAsIfDense": ("padded input, gradients", "LINEAR", "gradient of linear.weight"),
    "LastEightLeftOut": (8, "LINEAR", "output of call 1"),
    "MeanOfAll": ("special values", "NAMED", "output of call 1"),
    "LogsUnbounded": ("zeros and ones in input 0", "CHANCES", "got nan"),
    "RemainderOfC": ("integers of both signs", "REMAINDER", "output of call 1"),
    "ApartInBytes": ("integers of both signs", "APART", "output of call 1"),
    "WithoutClamp": ("parameters of constants", "SCALED", "output of call"),
    "CountsAlways": ("other options, flags", "POOLED", "output of call 1"),
    "ImagesBesideEachOther": ("chunked input and gradients", "POOLED", "output of call 1"),
    "PadsZeros": ("other options, words", "PADDED", "output of call 1"),
    "LargerOfTwo": ("other options, large", "LEAKY", "output of call 1"),
    "EpsAdded": ("faint rows", "UNIT", "output of call 1"),
    "BoundsLeftOut": ("gradients at constants", "CLAMPED", "gradient of input 0"),
    "SeesTheLowerHalf": ("fresh weights", "SEEN", "output of call 1"),
    "KeepsAll": ("fresh weights", "KEPT", "output of call 1"),
    "FlipsAlways": ("fresh weights", "ORDERED", "output of call 1"),
    "MeanOrSum": (
        "other options, other words",
        "REDUCED",
        "expected torch.Tensor",
    ),
    "LastAlways": ("other options, few", "ALONG", "output of call 1"),
    "HalfATileLeftOut": (32, "LINEAR", "output of call 1"),
    "NormNeverClamped": ("gradients of faint rows", "UNIT", "gradient of input 0"),
    "MeanAloneForgotten": ("gradients of inner outputs", "THREE", "gradient of input 0"),
}
# Whose own class was rejected, and by which question.
RIGHT = {
    "LONG_NORM": "expanded input",
    "FIRST_COLUMN": "gradients of no rows, eval",
    "VARIANCE": "shared input",
    "POSITIONS": "emptied and loaded",
    "ENCODER": "threads, eval",
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return a reference's problem, the questions about it, and its models."""
    held = {}

    def problem_of(reference):
        if reference not in held:
            folder = tmp_path_factory.mktemp("rare")
            problem = load_reference(folder, getattr(modules, reference))
            traits = traits_of(problem, problem.make_model(0, "cpu"), "cpu")
            probes = thorough_probes(SEED, problem.num_rows(), traits=traits)
            held[reference] = problem, probes, {}
        return held[reference]

    return problem_of


def asked_of(problems, reference, name):
    problem, probes, models = problems(reference)
    if isinstance(name, str):
        asked = [p for p in probes if p.name == name]
    else:  # numbers of rows of which so many are over, whichever were drawn
        rows = {p: p.batch or 0 for p in probes}
        asked = [p for p in probes if rows[p] > 64 and rows[p] % (2 * name) == name]
    assert asked, name
    return problem, [expected(problem, p, FLOAT32, models=models) for p in asked]


@pytest.mark.parametrize("name", WRONG)
def test_a_module_that_is_wrong_in_rare_cases_is_rejected(name, problems):
    asked, reference, words = WRONG[name]
    found = reasons(getattr(modules, name), *asked_of(problems, reference, asked))
    assert any(words in reason for reason in found), found


@pytest.mark.parametrize("name", WRONG)
def test_its_reference_is_right_there(name, problems):
    asked, reference, _ = WRONG[name]
    problem, expectations = asked_of(problems, reference, asked)
    assert reasons(problem.module.Model, problem, expectations) == []


@pytest.mark.parametrize("reference", RIGHT)
def test_a_reference_is_right_beside_itself(reference, problems):
    problem, expectations = asked_of(problems, reference, RIGHT[reference])
    assert verdict(problem, problem.module.Model, expectations).is_accepted


def test_a_module_may_answer_where_its_reference_refuses_no_rows(problems):
    problem, expectations = asked_of(problems, "QUANTILE", "gradients of no rows, eval")
    check = verdict(problem, modules.QuantileBySorting, expectations)
    assert check.is_accepted and check.differences


def test_no_gradient_may_stand_for_zeros_where_there_are_no_rows(problems):
    problem, expectations = asked_of(problems, "BIASED", "gradients of no rows, eval")
    assert verdict(problem, modules.BiasedByOneCall, expectations).is_accepted


def test_which_of_two_near_codes_is_nearer_may_be_decided_by_rounding(problems):
    problem, probes, models = problems("CODES")
    asked = [p for p in probes if p.name in ("wide range", "wide columns", "bfloat16 module")]
    expectations = [expected(problem, p, FLOAT32, models=models) for p in asked]
    assert reasons(modules.CodesInHalves, problem, expectations) == []
