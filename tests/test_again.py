"""Which probes a file is asked once more, by the kernels that it leaves out at their rows."""

from __future__ import annotations

import pytest

from tuner.by_batch import ANY_ROWS, MOST, NO_ROWS
from tuner.check.probes.probe import Probe
from tuner.evaluate.again import Query, Taken

CALL = Probe("call", batch=4, tells="?")
EVAL = Probe("eval", batch=4, mode="eval", tells="?")
STEP = Probe("step", batch=4, gradients="all", tells="?")
FORWARD = Probe("forward", batch=4, gradients="forward", tells="?")
PROBES = [CALL, EVAL, STEP, FORWARD]
MANY, ALL, NONE = (64, MOST), ANY_ROWS, NO_ROWS


@pytest.mark.parametrize(
    ("rows", "asked"),
    [
        ({}, []),
        ({"call": ALL, "step": ALL}, []),
        ({"call": MANY, "step": MANY}, ["call", "eval", "step", "forward"]),
        ({"call": MANY, "step": ALL}, ["call", "eval", "forward"]),
        ({"call": ALL, "step": MANY}, ["step"]),
        ({"call": MANY, "step": NONE}, ["call", "eval", "forward"]),  # no step has kernels
        ({"call": NONE, "step": MANY}, ["step"]),
        ({"call": ALL, "eval": MANY, "step": ALL}, ["eval"]),
        ({"call": (1, MOST, [3, 5]), "step": ALL}, ["call", "eval", "forward"]),
    ],
)
def test_kernels_are_asked_what_the_file_leaves_to_pytorch(rows, asked):
    queries = Taken(rows).queries(PROBES, 1024)
    assert [query.probe for query in queries if not query.is_by_kernels] == PROBES
    assert [query.probe.name for query in queries if query.is_by_kernels] == asked


def test_no_rows_are_left_out_by_a_file_that_says_nothing():
    probe = Probe("no rows", batch=0, tells="?")
    assert Taken().queries([probe], 1024) == [Query(probe)]
