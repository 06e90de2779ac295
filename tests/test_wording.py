"""Shares and reasons read the same everywhere."""

from __future__ import annotations

import pytest

from tuner.wording import one_line, percent


@pytest.mark.parametrize(
    ("share", "digits", "words"),
    [
        (1.0, 2, "100 %"),
        (0.996, 2, "100 %"),
        (0.996, 3, "99.6 %"),
        (0.5, 2, "50 %"),
        (0.0123, 2, "1.2 %"),
        (0.0, 2, "0 %"),
        (3.4e-7, 2, "0.000034 %"),
        (12.345, 2, "1200 %"),
        (-0.25, 2, "-25 %"),
        (float("nan"), 2, "nan %"),
    ],
)
def test_a_share_is_a_percentage_without_a_power_of_ten(share, digits, words):
    assert percent(share, digits) == words


def test_one_line_keeps_the_lines_that_the_first_only_announces():
    text = 'Error(s) in loading state_dict for ModelNew:\n\tMissing key(s): "a", "b".\n\tOther\n'
    assert one_line(text) == (
        'Error(s) in loading state_dict for ModelNew: Missing key(s): "a", "b". Other'
    )
    assert one_line("one\n\n  two") == "one; two"
    assert one_line("") == ""
    assert len(one_line("word " * 1000)) <= 300 and one_line("word " * 1000).endswith(" ...")
