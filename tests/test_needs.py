"""What questions are expected to take of a GPU's memory: estimated, then as it was seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tuner.check.judge.refusals import FEWER_ROWS, extent_of
from tuner.check.probes.batches import Extent
from tuner.check.probes.probe import Probe
from tuner.check.probes.probes import thorough_probes
from tuner.evaluate.forecast import asked_rows
from tuner.evaluate.needs import FEWEST_SEEN, STEP, Needs
from tuner.machine.turns import ALL, HALF, LITTLE, MOST, SOME
from tuner.problem.reference import load_problem

GPU_BYTES = 80 * 2**30
TALL = Probe("very many rows", batch=65_537, is_tall=True)


def needs_of(row_elements: float, num_rows: int = 1024) -> Needs:
    return Needs(Extent(num_rows, row_elements, "gpu"), 0.0, GPU_BYTES)


def rows_of(rows: int, **fields: object) -> Probe:
    return replace(Probe(f"{rows} rows", batch=rows), **fields)


def test_very_many_rows_wait_for_the_memory_of_those_they_are_asked_at():
    needs = needs_of(20_000)
    assert needs.share(TALL) == LITTLE
    assert needs.share(replace(TALL, is_tall=False)) == HALF  # of which nothing is known


def test_what_takes_much_of_a_cpus_memory_is_asked_alone_and_nobody_waits_for_it():
    needs = Needs(Extent(64, 786_432, "cpu"), 0.0, 0.0, host_bytes=22 * 2**30)
    few, whole = rows_of(3, calls=9), rows_of(64, calls=9)
    assert needs.is_large(whole) and not needs.is_large(few)
    assert needs.share(few) == needs.share(whole) == LITTLE
    share, places = needs.next_of([whole, few])
    assert (share, places) == (LITTLE, [1])  # few rows first, by several pairs


@pytest.mark.parametrize("row_elements", [2e4, 1.2e6, 1e7, 1e9])
def test_very_many_rows_are_no_more_than_there_is_room_for(row_elements):
    extent = Extent(128, row_elements, "gpu")
    assert asked_rows(TALL, extent) <= max(extent.few_rows, min(FEWER_ROWS, extent.most_rows))
    share = needs_of(row_elements, 128).share(TALL)
    largest = max(extent.few_rows, min(extent.num_rows or 1, extent.most_rows))
    assert share <= max(SOME, needs_of(row_elements, 128).share(rows_of(largest, calls=2)))


def test_what_was_seen_of_small_questions_bounds_larger_ones():
    needs = needs_of(1e7)
    small, large = rows_of(16), rows_of(100)
    assert HALF == needs.share(large) < needs.taken(large) and not needs.is_known(large)
    taken = needs.taken(small) * GPU_BYTES
    for _ in range(FEWEST_SEEN):
        needs.note(small, taken / 8)  # as an eager call takes, of what is estimated
    assert needs.is_known(large) and needs.share(large) <= SOME
    assert needs.is_large(large)  # one pair of processes still asks it alone
    for _ in range(FEWEST_SEEN):
        needs.note(small, taken / 3)
    assert needs.share(large) == SOME + STEP
    assert needs.share(rows_of(200)) == HALF and not needs.is_known(rows_of(200))  # far more
    assert not needs.is_bounded(rows_of(200)) and needs.is_bounded(small)
    needs.note(small, taken * 2)  # one that took all that was estimated, and more
    assert HALF < needs.taken(large) <= needs.share(large) < ALL
    for _ in range(FEWEST_SEEN):
        needs.note(rows_of(150), float(GPU_BYTES))
    assert needs.share(rows_of(160)) == ALL


def test_weights_that_take_less_than_estimated_hide_no_rows_that_take_more():
    """Of 1e8 weights, which take 20 bytes each and not 180, beside rows as they are estimated."""
    needs = Needs(Extent(1024, 1e7, "gpu"), 1e8, GPU_BYTES)
    small, large = rows_of(16), rows_of(100)
    for _ in range(FEWEST_SEEN):
        needs.note(small, 20 * 1e8 + 16 * 1e7 * 56)
    taken = (20 * 1e8 + 100 * 1e7 * 56) / GPU_BYTES
    assert HALF < taken < needs._bound(large) and needs.share(large) >= taken


def test_weights_of_gigabytes_wait_for_what_they_take_and_leave_a_part_to_others():
    """A Linear of 32768 x 32768: questions took 93 GiB of 140, judge and contender together."""
    gpu_bytes = 140.0 * 2**30
    heavy = Needs(Extent(16, 32768.0 * 2, "gpu"), 2.0**30, gpu_bytes)
    light = Needs(Extent(1024, 8192.0 * 2, "gpu"), 2.0**26, gpu_bytes)
    assert heavy.are_heavy and not light.are_heavy
    small = rows_of(16)
    assert not heavy.is_known(small) and MOST <= heavy.share(small) < ALL
    for _ in range(FEWEST_SEEN):
        heavy.note(small, 93.0 * 2**30)
    assert heavy.is_known(small) and MOST < heavy.share(small) < ALL
    assert heavy.share(small) * gpu_bytes >= 93.0 * 2**30


def test_gradients_are_bounded_by_what_gradients_took_alone():
    needs = needs_of(1e7)
    small, large = rows_of(16), rows_of(100)
    graded = replace(large, gradients="all")
    for _ in range(FEWEST_SEEN):
        needs.note(small, 2.0**20)
    assert needs.share(large) == 2 * LITTLE and needs.is_bounded(large)  # what stays unused
    assert needs.share(graded) == HALF and not needs.is_bounded(graded)
    for _ in range(FEWEST_SEEN):
        needs.note(replace(small, gradients="all"), 2.0**20)
    assert needs.share(graded) == 2 * LITTLE


def test_no_bound_is_above_what_is_estimated():
    needs = needs_of(1e6)
    probes = thorough_probes(3, 1024, row_elements=1e6, has_cuda=True)
    for probe in probes:
        needs.note(probe, 2.0 * GPU_BYTES)
    for probe in probes:
        assert needs.share(probe) - STEP <= max(SOME, needs.taken(probe))


def test_of_a_cpu_nothing_is_waited_for():
    needs = Needs(Extent(1024, 1e9), 1e9, 0.0)
    needs.note(TALL, 0.0)
    assert needs.share(rows_of(10**6)) == LITTLE
    assert needs.num_pairs(2, free_bytes=2.0**40) == 1
    assert Needs(Extent(1024, 1e3), 1e3, 0.0).num_pairs(2, free_bytes=2.0**40) == 2


def test_small_ones_are_asked_first_and_together_and_a_few_large_ones_then():
    needs = needs_of(1e7)
    small = [rows_of(rows) for rows in (1, 2, 5)]
    large = [rows_of(rows, weights="ones") for rows in range(60, 90)]
    probes = [large[0], *small, *large[1:]]
    share, places = needs.next_of(probes)
    assert share == LITTLE and [probes[n] for n in places] == small
    share, places = needs.next_of(large)
    assert share == HALF and places == [*range(8)]
    for probe in large[:8]:
        needs.note(probe, 0.04 * GPU_BYTES)
    assert needs.next_of(large[8:]) == (3 * LITTLE, [*range(22)])
    # Of large ones as much is waited for however few rows are asked: those that are known of
    # take it once, all together.
    heavy = Needs(Extent(1024, 1e3), 1e10, GPU_BYTES)
    asked = [rows_of(rows) for rows in (*range(1, 40), 8192)]
    assert heavy.next_of(asked) == (ALL, [*range(8)])
    for probe in asked[:8]:
        heavy.note(probe, 0.9 * GPU_BYTES)
    assert heavy.next_of(asked[8:]) == (ALL, [*range(31)])
    middle = rows_of(20)  # which takes some by its estimate, and is asked by all pairs
    assert not needs.is_large(middle) and needs.share(middle) == 3 * LITTLE
    assert needs.next_of([large[9], middle, large[10]]) == (3 * LITTLE, [1])


LARGE_ROWS = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        if len(x) > {most}:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB.")
        return x + 1.0


def get_inputs():
    return [torch.rand(64, 8)]


def get_init_inputs():
    return []
"""


@pytest.mark.parametrize("most", [64, 4])
def test_where_memory_runs_out_a_row_is_measured_of_fewer(tmp_path, most):
    """A reference that seemed to take one number of rows alone would be asked far less."""
    file = tmp_path / "large.py"
    file.write_text(LARGE_ROWS.format(most=most))
    problem = load_problem(file)
    found = extent_of(problem, problem.make_model(0), "cpu")
    assert (found.is_fixed, found.row_elements, found.num_rows) == (False, 16.0, 64)
