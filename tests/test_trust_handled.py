"""What a user does with a module and with what it gives: each fault is rejected by its probe."""

from __future__ import annotations

import handled_modules as modules
import pytest
from test_check import FLOAT32, load_reference, reasons, verdict

from tuner.check.judge.expected import expected
from tuner.check.probes.probes import thorough_probes
from tuner.check.probes.traits import traits_of

SEED = 35
# By the probe that finds them: their reference, the words that must be said, and who.
CLASSES = {
    "parameters of zeros": (
        "RESIDUAL", "gradient of ",
        ("DividesByTheScalar", "NothingFlows", "SkipsColumnsOfZeros"),
    ),
    "all gradients kept": (
        "MULTIPLIED", "was written again", ("RingOfEight", "RingOfTheClass", "OneBlock"),
    ),
    "gradients of ": (
        "MULTIPLIED", "gradient of w", ("LeavesOutAFew", "LeavesOutTwo", "LeavesOutTheThird"),
    ),
    "training set as an attribute": (
        "NORM", "", ("NotesTheMode", "FoldsInTrain", "LooksAtItself"),
    ),
    "other methods": (
        "METHODS", "output of call ",
        ("EncodesWithoutTanh", "EncodesWithFirstWeights", "EncodesWhatForwardSaw"),
    ),
    "attributes that a call sets": (
        "REMEMBERS", "output 2 of call", ("StaleInEval", "OfTheFirstCall", "OfLogits"),
    ),
    "a part of another size": (
        "HEAD", "call 2",
        ("WidthOfTheConstructor", "MemoryOfTheFirstWidth", "WrapsAround"),
    ),
    "copied in a container": (
        "MULTIPLIED", "no longer shares w", ("CopiesAnew", "CopiesWithoutMemo", "CopiesItsState"),
    ),
    "frozen by a method": (
        "MULTIPLIED", "gradient", ("Freezes", "FreezesThePlan", "OnlySaysSo"),
    ),
    "others made before": (
        "OPTIONS", "call 1", ("StepOfTheClass", "FlagOfTheClass", "LastPlan"),
    ),
    "after more rows of NaN": (
        "DOUBLED", "nan", ("MasksByProduct", "PicksByProduct", "SumsBeyond"),
    ),
    "outputs edited": ("DOUBLED", "output of call 2", ("ByAddress", "ByContent", "ByObject")),
}  # fmt: skip
WRONG = [
    (name, start, named, words)
    for start, (named, words, names) in CLASSES.items()
    for name in names
]
HONEST = {
    "HonestBranch": "RESIDUAL", "HonestCopies": "MULTIPLIED", "HonestModes": "NORM",
    "HonestMemory": "DOUBLED",
}  # fmt: skip
DIFFERENT = {
    "NoEncode": ("METHODS", "other methods", "has no attribute 'encode'"),
    "TellsNothing": ("REMEMBERS", "attributes that", "has no attribute 'last_weights'"),
    "Refuses": ("HEAD", "a part of another size", "another head"),
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return a reference's problem, the probes that say anything of it, and its models."""
    held = {}

    def problem_of(named):
        if named not in held:
            text = getattr(modules, named)
            problem = load_reference(tmp_path_factory.mktemp("handled"), text)
            traits = traits_of(problem, problem.make_model(0), "cpu")
            held[named] = problem, thorough_probes(SEED, problem.num_rows(), traits=traits), {}
        return held[named]

    return problem_of


def asked_of(problems, named, *starts):
    problem, probes, models = problems(named)
    asked = [p for p in probes if p.name.startswith(starts)]
    assert asked, starts
    return problem, [expected(problem, p, FLOAT32, models=models) for p in asked]


@pytest.mark.parametrize(("name", "start", "named", "words"), WRONG)
def test_a_wrong_module_is_rejected_by_the_probe_of_its_class(name, start, named, words, problems):
    found = reasons(getattr(modules, name), *asked_of(problems, named, start))
    assert any(words in reason for reason in found), found


USUAL = (
    "as given", "fresh weights", "gradients of weights", "gradients", "called twice", "copied",
    "offset", "gradients, eval", "transposed input", "eval mode", "another module",
)  # fmt: skip


@pytest.mark.parametrize(("name", "named"), [(name, named) for name, _, named, _ in WRONG])
def test_usual_calls_do_not_tell_it(name, named, problems):
    """Else the probe of its class would not have been what found it."""
    problem, probes, models = problems(named)
    asked = [expected(problem, p, FLOAT32, models=models) for p in probes if p.name in USUAL]
    assert reasons(getattr(modules, name), problem, asked) == []


@pytest.mark.parametrize("named", sorted({named for named, _, _ in CLASSES.values()}))
def test_the_reference_itself_is_right_on_all_of_them(named, problems):
    present = tuple(s for s in CLASSES if any(p.name.startswith(s) for p in problems(named)[1]))
    problem, expectations = asked_of(problems, named, *present)
    assert reasons(problem.module.Model, problem, expectations) == []


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_module_is_right_and_a_drop_in(name, problems):
    named = HONEST[name]
    present = tuple(s for s in CLASSES if any(p.name.startswith(s) for p in problems(named)[1]))
    problem, expectations = asked_of(problems, named, *present)
    check = verdict(problem, getattr(modules, name), expectations)
    assert check.is_accepted and check.strictly().is_accepted, (check.reason, check.differences)


@pytest.mark.parametrize("own", [64, 97, 129, 130, 131, 258, 387])
def test_rows_just_above_tiles_are_asked_at_any_batch(own):
    for seed in range(12):
        rows = {p.batch for p in thorough_probes(seed, own) if p.name.startswith("gradients of ")}
        above = {n for n in rows if n and n > 96 and n % 32 in (1, 2, 3)}
        assert len(above - {own}) >= 3 and {n % 32 for n in above | {own}} >= {1, 2, 3}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_a_class_does_not_offer_is_a_difference_and_no_mistake(name, problems):
    named, start, words = DIFFERENT[name]
    problem, expectations = asked_of(problems, named, start)
    check = verdict(problem, getattr(modules, name), expectations)
    assert check.is_accepted and words in check.differences[0]
