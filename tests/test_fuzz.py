"""Hostile text is read or refused, in seconds, and never run: see benchmarks/fuzz.py."""

from __future__ import annotations

import pytest

from benchmarks import fuzz
from tuner.errors import InputError

KINDS = ["expressions", "configs", "spaces", "damaged configs", "certificates"]


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_text_is_read_or_refused(tmp_path, kind):
    fuzz.kinds(tmp_path)[kind](100, 20261121)


def test_every_kind_is_fuzzed_here(tmp_path):
    assert list(fuzz.kinds(tmp_path)) == KINDS


@pytest.mark.parametrize("text", fuzz.ATTACKS)
def test_each_known_attack_is_refused(text):
    fuzz.try_expression(text, 1, 2.0)


WHAT_IT_HEARS = {
    "exec": lambda folder: exec("1"),
    "open": lambda folder: (folder / "x").write_text(""),
    "subprocess.Popen": lambda folder: __import__("subprocess").run(["true"]),
}


@pytest.mark.parametrize("event", WHAT_IT_HEARS)
def test_the_watch_hears_code_that_is_run(tmp_path, event):
    with pytest.raises(AssertionError, match=event):
        with fuzz.watched():
            WHAT_IT_HEARS[event](tmp_path)


RANGES = [f"{name}: {{range: [1, 10000]}}" for name in "abcd"]


@pytest.mark.parametrize(
    ("space", "rule"),
    [
        (RANGES, "a + b + c + d == 7777"),
        (RANGES, "a * b * c * d % 104729 == 1"),
        (RANGES, "a ** 3 + b ** 3 == c ** 3 and d == 1"),
        ([f"p{n}: [0, 1]" for n in range(60)], "p0 + p1 >= 0"),
        ([f"p{n}: {{range: [1, 10000]}}" for n in range(200)], "p0 < p199"),
        (
            [f"p{n}: {{range: [1, 10000]}}" for n in range(12)],
            " + ".join(f"p{n}" for n in range(12)) + " == 5",
        ),
    ],
)
def test_a_space_of_more_than_10_to_the_15_is_handled_or_refused_in_seconds(space, rule):
    text = "problem: {op: x}\nspace:\n" + "".join(f"  {line}\n" for line in space)
    text += f'constraints: [{{expr: "{rule}", why: "a rule"}}]\n'
    fuzz._try_config(text)


def test_what_is_refused_says_so_as_an_error_of_ours():
    with pytest.raises(InputError, match="beyond 64"):
        fuzz.Expression.parse("9**9**9**9").evaluate({})
