"""A file that runs the reference's own operations is no difference, never faster."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_problem import FLAGSHIP

from tuner.evaluate.contender import Contender
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.race import finalist
from tuner.evaluate.racing import Racer
from tuner.evaluate.timed_calls import is_own_path
from tuner.trial import Check, Finalist, Interval

MODULE = (Path(__file__).parent / "cheats" / "holds_the_reference.py").read_text()
COMPILED = (
    MODULE + "\n_own = ModelNew.forward\nModelNew.forward = lambda self, x: _run(self, x)\n"
    "_run = torch.compile(_own, backend='eager')\n"
)
OTHER = (
    MODULE + "\n_own = ModelNew.forward\nModelNew.forward = lambda self, x: _own(self, x) + 0\n"
)


@pytest.mark.parametrize(
    ("text", "falls_back"), [(MODULE, True), (COMPILED, False), (OTHER, False)],
    ids=["the reference", "compiled", "another operation"],
)  # fmt: skip
def test_a_timed_call_through_the_references_operations_is_recorded(tmp_path, text, falls_back):
    reference, module = tmp_path / "reference.py", tmp_path / "module.py"
    reference.write_text(FLAGSHIP)
    module.write_text(text)
    task = JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")
    contender = Contender.of_file(module, is_deterministic=True)
    race = Racer(task).race([contender], num_processes=1, seconds=0.01)
    assert finalist(0, Check(True, "float32", "", ()), race, 1).falls_back is falls_back


def test_what_falls_back_is_never_faster():
    check = Check(True, "float32", "", ())
    fast, slow = Interval(2.0, 1.9, 2.1, 0.95, 3), Interval(0.5, 0.4, 0.6, 0.95, 3)
    assert Finalist(0, check, fast).verdict == "faster"
    assert Finalist(0, check, fast, falls_back=True).verdict == "no difference"
    assert Finalist(0, check, slow, falls_back=True).verdict == "slower"
    assert Finalist(0, check).verdict is None


def test_only_equal_sequences_are_the_references_own():
    theirs = ["aten.t", "aten.addmm", "aten.mul"]
    assert is_own_path(theirs, ["aten.addmm", "aten.view", "aten.mul"])
    assert not is_own_path(theirs, ["aten._to_copy", "aten.addmm", "aten.mul"])
    assert not is_own_path(theirs, []) and not is_own_path([], [])
