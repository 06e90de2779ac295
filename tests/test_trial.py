"""The records go to JSON and back unchanged, and their keys mean their content."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from tuner.plans import Argument, Plan, Step, Tensor
from tuner.trial import (
    Build,
    Candidate,
    Check,
    Finalist,
    Interval,
    KernelResources,
    Measurement,
    Outcome,
    ProbeResult,
    Result,
    Status,
    Trial,
    content_key,
    from_json,
    to_json,
)

PLAN = Plan(
    "fused_mine",
    (Argument("x", shape=("rows", "cols")), Argument("eps", "float")),
    (Tensor("y", ("rows", "cols")),),
    (Tensor("sums", ("2", "cols"), "float64", zero=True),),
    (
        Step("aten", "mm", ("x", "x.t"), "y"),
        Step("call", "fused_mine_go", ("y", "null", "rows", "eps")),
    ),
)
CANDIDATE = Candidate(
    "mine", "cpu", {"template": "cpu", "rows": 4}, "cpp", "text ü\x00", PLAN, ("a line",), False
)
MEASUREMENT = Measurement(
    10.5, 0.01, (10.0, 11.0), True, num_throttled=2, anchor_us=20.0, wall_us=10.6
)
CHECK = Check(
    True,
    "float32",
    probes=(ProbeResult("as given", 1e-7, 1e-6, 2e-7, 2e-6, True, ""),),
    is_thorough=True,
)
BUILD = Build(
    "key",
    Status.CORRECT,
    "/tmp/x.so",
    "/tmp/log",
    kernels=(KernelResources("k", 32, 1024, 0, 0),),
    seconds=1.5,
)
OUTCOME = Outcome(Status.CORRECT, "", BUILD, CHECK, MEASUREMENT, {"build": 1.5}, same_as=3)
TRIAL = Trial(4, "cpu", {"template": "cpu", "is_big": True, "x": 0.5}, "key", OUTCOME, "now", 2.5)
FINALIST = Finalist(4, CHECK, Interval(1.2, 1.1, 1.3, 0.95, 5), 10.0, 12.0, 0.01)
RESULT = Result(4, (FINALIST,), (4, 5), FINALIST, "export/model_new.py", ("a note",))


@pytest.mark.parametrize(
    "record", [PLAN, CANDIDATE, TRIAL, RESULT], ids=lambda r: type(r).__name__
)
def test_every_record_survives_json_unchanged(record):
    text = to_json(record)
    assert "\n" not in text
    assert from_json(type(record), text) == record
    assert from_json(type(record), text.encode()) == record


def test_the_text_is_the_same_whoever_wrote_it_first():
    first = to_json(from_json(Trial, to_json(TRIAL)))
    assert first == to_json(TRIAL)
    assert json.loads(first)["outcome"]["status"] == "correct"  # T4's word, not a number


def test_nan_and_infinity_survive_json():
    result = ProbeResult("p", math.nan, math.inf, 0.0, -math.inf, False, "NaN")
    back = from_json(ProbeResult, to_json(result))
    assert math.isnan(back.rms_rel) and back.max_abs == math.inf
    assert back.baseline_max_abs == -math.inf
    interval = from_json(Interval, to_json(Interval(1.0, 0.0, math.inf, 0.95, 2)))
    assert interval.high == math.inf


def test_nan_survives_inside_a_trial():
    bad = dataclasses.replace(CHECK.probes[0], rms_rel=math.nan, max_abs=math.inf)
    outcome = Outcome(Status.CORRECTNESS, "NaN", check=Check(False, "float32", "NaN", (bad,)))
    back = from_json(Trial, to_json(dataclasses.replace(TRIAL, outcome=outcome)))
    assert back.outcome.check is not None
    assert math.isnan(back.outcome.check.probes[0].rms_rel)
    assert back.outcome.check.probes[0].max_abs == math.inf


VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
)


@given(st.dictionaries(st.text(max_size=10), VALUES, max_size=5))
def test_parameters_keep_their_values_and_their_types(params):
    back = from_json(Trial, to_json(dataclasses.replace(TRIAL, params=params))).params
    assert back == params
    # True is not 1 and "1" is not 1: a template asked for one of them.
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in params.items()}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"number": 1}', "null", b"\xff"])
def test_what_is_no_record_is_refused(text):
    with pytest.raises(ValidationError):
        from_json(Trial, text)


def test_records_are_frozen_and_have_no_room_for_more():
    for record in (PLAN, CANDIDATE, TRIAL, RESULT):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, dataclasses.fields(record)[0].name, None)
        assert not hasattr(record, "__dict__")


def test_a_candidates_key_is_its_text_plan_and_language_and_nothing_else():
    same = dataclasses.replace(CANDIDATE, params={"template": "other"}, template="other")
    assert same.key == CANDIDATE.key
    assert dataclasses.replace(CANDIDATE, source="other").key != CANDIDATE.key
    assert dataclasses.replace(CANDIDATE, language="cuda").key != CANDIDATE.key
    plan = dataclasses.replace(PLAN, workspace=())
    assert dataclasses.replace(CANDIDATE, plan=plan).key != CANDIDATE.key


def test_keys_are_stable_across_processes():
    code = "from tuner.trial import content_key; print(content_key('a', 1, 'ü'))"
    seen = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert seen == content_key("a", 1, "ü") and len(seen) == 16


def test_the_borders_between_the_parts_of_a_key_count():
    assert content_key("ab", "c") != content_key("a", "bc") != content_key("abc")


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.01, 1.2, "faster"),
        (0.9, 0.99, "slower"),
        (0.99, 1.01, "no difference"),
        (1.0, 1.5, "no difference"),
        (0.5, 1.0, "no difference"),
    ],
)
def test_an_interval_that_holds_1_is_no_difference(low, high, verdict):
    assert Interval((low + high) / 2, low, high, 0.95, 3).verdict == verdict


def test_only_a_correct_outcome_has_a_latency():
    assert OUTCOME.latency_us == 10.5
    assert dataclasses.replace(OUTCOME, status=Status.CORRECTNESS).latency_us is None
    assert dataclasses.replace(OUTCOME, measurement=None).latency_us is None
