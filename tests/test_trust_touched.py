"""Weights, types, sizes and threads that are not usual: each fault is rejected by its probe."""

from __future__ import annotations

import pytest
import touched_modules as modules
from test_check import FLOAT32, load_reference, reasons, verdict
from test_trust_handled import USUAL

from tuner.check.judge.expected import expected
from tuner.check.judge.refusals import extent_of
from tuner.check.probes.probes import thorough_probes
from tuner.check.probes.traits import traits_of

SEED = 35
# By the probe that finds them: their reference, the words that must be said, and who.
CLASSES = {
    "parameters of constants": (
        "BENT", "", ("LeavesOutOnes", "LargerOfTwo", "GetsItBack"),
    ),
    "rows of weights edited": (
        "EMBEDDED", "output of call ", ("KnowsEveryEighthRow", "KnowsTheFirstColumns"),
    ),
    "rows of weights scaled": ("PROJECTED", "output of call ", ("FixedPoint",)),
    "far from 0": ("CENTRED", "output of call ", ("FoldsTheMean",)),
    "in 16 bits and in 32": ("WAVES", "output of call 2", ("Waves",)),
    "bools as masks": ("ATTENTION", "output of call 1", ("ToBools",)),
    "the last integers": ("LONG", "output of call 1", ("SixteenBits",)),
    "numbers as tensors": ("TEMPERED", "gradient of input 1 is missing", ("TakesAFloat",)),
    "half of each size": ("MULTIPLIED", "output of call 1", ("EightColumns",)),
    "of a user's own class": (
        "MULTIPLIED", "", ("CopiesItsOwnClass", "GivesItsStateDetached"),
    ),
    "many threads": ("LAYERS", "output of call ", ("EightPlaces",)),
    "many of PyTorch's threads": ("MULTIPLIED", "gradient of w", ("SumsOf32Threads",)),
    "4096 rows": ("MULTIPLIED", "nan", ("LeavesTheLastChunk",)),
    "forward derivatives of weights": ("MULTIPLIED", "forward derivative", ("BareMemory",)),
}  # fmt: skip
WRONG = [
    (name, start, named, words)
    for start, (named, words, names) in CLASSES.items()
    for name in names
]
HONEST = {"HonestFold": "EMBEDDED", "HonestWaves": "WAVES"}
TRIES = 60  # of threads, which meet by chance: rarely where other programs have the cores


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return a reference's problem, the probes that say anything of it, and its models."""
    held = {}

    def problem_of(named):
        if named not in held:
            problem = load_reference(tmp_path_factory.mktemp("touched"), getattr(modules, named))
            model = problem.make_model(0)
            traits = traits_of(problem, model, "cpu")
            row = extent_of(problem, model, "cpu").row_elements
            probes = thorough_probes(SEED, problem.num_rows(), row_elements=row, traits=traits)
            held[named] = problem, probes, {}
        return held[named]

    return problem_of


def asked_of(problems, named, *starts):
    problem, probes, models = problems(named)
    asked = [p for p in probes if p.name.startswith(starts)]
    assert asked, starts
    return problem, [expected(problem, p, FLOAT32, models=models) for p in asked]


@pytest.mark.parametrize(("name", "start", "named", "words"), WRONG)
def test_a_wrong_module_is_rejected_by_the_probe_of_its_class(name, start, named, words, problems):
    problem, asked = asked_of(problems, named, start)
    tries = TRIES if "threads" in start else 1
    made = getattr(modules, name)
    found = next((r for _ in range(tries) if (r := reasons(made, problem, asked))), [])
    assert any(words in reason for reason in found), found


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
