"""What a module meets seldom is asked: each wrong module is rejected by its class's probe."""

from __future__ import annotations

import pytest
import unusual_modules as modules
from test_check import FLOAT32, HERE, load_candidate, load_reference, reasons, verdict
from test_problem import FLAGSHIP

from tuner.check.judge.expected import expected
from tuner.check.probes.probes import thorough_probes

SEED = 32
# The probe that finds it, and the reference where that is not the flagship.
WRONG = {
    "TangentLostWithoutGradients": ("forward derivatives", None),
    "TangentLostInTraining": ("forward derivatives", None),
    "TangentHalved": ("forward derivatives", None),
    "RowsNeverOverlap": ("overlapping input", None),
    "OneRowForAll": ("rows expanded input", None),
    "NegationUnseen": ("negated input", None),
    "SamePointerIsSameInput": ("shared input", "SUM"),
    "OptionsById": ("another module before", None),
    "OptionsByHandle": ("saved and read elsewhere", None),
    "OptionsInATableOfTheClass": ("saved and read elsewhere", None),
    "BackwardSharesScratch": ("two modules in two threads", None),
    "WorkspaceForAllInTraining": ("two modules in two threads", None),
    "GradientKeptOnTheModule": ("threads, eval", None),
    "LargeNumbersTimesTwo": ("values near the largest", None),
    "MaskedRowIsZero": ("a row of -Inf", "MASKED"),
    "RowsOfZerosSkipped": ("NaN in a weight", None),
    "ShiftedByTheRunningMean": ("NaN in a weight", None),
    "SumsInTheDefaultType": ("default dtype bfloat16", None),
    "TypeOfTheFirst": ("mixed input", "GATED"),
    "IndexWrapsAround": ("negative integers", "TABLE"),
    "IndexClamped": ("integers beyond", "TABLE"),
    "EveryNegativeLabelIgnored": ("negative integers", "LOSS"),
    "SumsInInt32": ("large integers", "RUNNING"),
    "MaskIgnored": ("other arguments", "OPTIONAL"),
    "NumberAsGiven": ("other arguments", "WARM"),
    "SignOfTheNumberLost": ("negative arguments", "WARM"),
    "NumberCapped": ("large arguments", "WARM"),
    "RememberedByNorms": ("rows exchanged", None),
    "GridOfOneDimension": ("very many rows", "GATED"),
    "OneLevelOfCarries": ("very many rows", "DOWN"),
    "CountsBeforeItRaises": ("after a refused call", None),
    "KeepsWhatItStarted": ("after a refused call", None),
    "BackwardByTheModeNow": ("mode changed before", None),
    "TailOfThreeIsTwo": ("7 rows", None),
    "OneDistanceForBoth": ("padded input", "GATED"),
    "MiddleDistanceByShape": ("sliced input", "NORMED"),
    "FirstPartSetsTheMaximum": ("masked rows", "MASKED"),
    "ZeroEndsArePadding": ("rows of few values", "GATED"),
    "FoldedBySample": ("one weight of each nudged", None),
    "FoldedByRounding": ("one weight of each stepped", None),
    "FoldedUntilItsOwnLoad": ("one tensor edited", None),
    "ConvertsByItsOwnMethod": ("float64 module inside", None),
    "SmallGradientIsNone": ("gradients", "SMALL"),
    "SumOfZeroIsNoGradient": ("cancelling gradients", "GATED"),
    "RowsThatBeginWithZero": ("cancelling gradients", "GATED"),
    "TakesTheGradientsMemory": ("gradients of a branch", "GATED"),
    "BackwardKnowsItsThread": ("gradients in another thread", "GATED"),
    "ReadsWhatWasFreed": ("input freed", "MULTIPLIED"),
    "FactorOfTheFile": ("other options, numbers", "WEIGHTED"),
    "NamesExchanged": ("arguments by keyword", "WEIGHTED"),
    "NeedsWhatNoStateHolds": ("emptied and loaded", "WEIGHTED"),
    "TwoWorkspaces": ("threads, eval", "MULTIPLIED"),
}
THREADS = {
    "BackwardSharesScratch",
    "WorkspaceForAllInTraining",
    "GradientKeptOnTheModule",
    "TwoWorkspaces",
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return the problem and probes of each reference, and what was expected so far."""
    held = {}

    def expect(reference, start):
        if reference not in held:
            text = getattr(modules, reference) if reference else FLAGSHIP
            problem = load_reference(tmp_path_factory.mktemp("unusual"), text)
            held[reference] = problem, thorough_probes(SEED, problem.num_rows()), {}
        problem, probes, models = held[reference]
        asked = [p for p in probes if p.name.startswith(start)]
        assert asked, start
        return problem, [expected(problem, p, FLOAT32, models=models) for p in asked]

    return expect


@pytest.mark.parametrize("name", [name for name in WRONG if name not in THREADS])
def test_a_wrong_module_is_rejected_by_the_probe_of_its_class(name, problems):
    start, reference = WRONG[name]
    found = reasons(getattr(modules, name), *problems(reference, start))
    assert found and not all("it raised" in reason for reason in found), found


@pytest.mark.parametrize("name", sorted(THREADS))
def test_what_is_wrong_in_several_threads_is_rejected(name, problems):
    """They meet by chance, which is small where other programs use the cores."""
    start, reference = WRONG[name]
    asked = problems(reference, start)
    found = next((r for _ in range(5) if (r := reasons(getattr(modules, name), *asked))), [])
    assert found and not all("it raised" in reason for reason in found), found


@pytest.mark.parametrize("reference", sorted({r for _, r in WRONG.values()}, key=str))
def test_the_reference_itself_is_right_on_all_of_them(reference, problems):
    for start in dict.fromkeys(s for s, r in WRONG.values() if r == reference):
        problem, expectations = problems(reference, start)
        assert reasons(problem.module.Model, problem, expectations) == []


def test_outputs_that_share_memory_where_the_references_do_not_are_named(tmp_path):
    problem = load_reference(tmp_path, modules.TWICE)
    (probe, *_) = thorough_probes(SEED, problem.num_rows())
    wrong = reasons(modules.OutputsShareMemory, problem, [expected(problem, probe, FLOAT32)])
    assert "outputs 1 and 2 of call 1 share memory" in wrong[0]
    both = load_reference(tmp_path, modules.VIEWED)
    assert not reasons(modules.OutputsShareMemory, both, [expected(both, probe, FLOAT32)])


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("HonestClone", "MASKED"),
        ("HonestSoftmax", "MASKED"),  # whose gradients cancel where a row's are equal
        ("HonestDivergence", "DIVERGENCE"),  # whose terms cancel where its inputs are equal
    ],
)
def test_an_honest_module_is_right(name, reference, tmp_path):
    problem = load_reference(tmp_path, getattr(modules, reference))
    models = {}
    expectations = [
        expected(problem, probe, FLOAT32, models=models)
        for probe in thorough_probes(SEED, problem.num_rows())
    ]
    check = verdict(problem, getattr(modules, name), expectations)
    assert check.is_accepted and check.strictly().is_accepted, check.reason


def test_who_reads_the_weights_of_an_adapted_submodule_differs_from_a_drop_in(problems):
    problem, expectations = problems(None, "a submodule wrapped")
    reads = load_candidate(HERE / "honest" / "loops_over_blocks.py")
    check = verdict(problem, reads, expectations)
    assert check.is_accepted and not check.strictly().is_accepted
    assert check.differences[0].startswith("a submodule wrapped: it computes from the weights")
    assert verdict(problem, problem.module.Model, expectations).strictly().is_accepted


def test_a_submodule_that_gives_tuples_can_be_wrapped(tmp_path):
    problem = load_reference(tmp_path, modules.RECURRENT)
    (probe,) = (p for p in thorough_probes(SEED, 6) if p.name == "a submodule wrapped")
    asked = [expected(problem, probe, FLOAT32)]
    assert reasons(problem.module.Model, problem, asked) == []


def test_more_rows_than_a_grid_has_are_asked_only_where_they_cost_little(problems, tmp_path):
    _, (few,) = problems("GATED", "very many rows")
    assert few.num_rows > 65535
    wide = load_reference(tmp_path, out_features=800)
    assert expected(wide, few.probe, FLOAT32).num_rows < 1000
