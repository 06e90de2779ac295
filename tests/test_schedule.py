from __future__ import annotations

from dataclasses import replace

import pytest

from tuner.config.run_config import parse_config
from tuner.planning.schedule import (
    MIN_PROCESSES,
    MIN_SAMPLES_S,
    MIN_SEARCH_S,
    Costs,
    check_s_on_cpu,
    scheduled,
)

CONFIG = "problem: {op: layer_norm}\n"
COSTS = Costs(compile_s=16.0, check_s=6.0, num_cores=2)


def schedule(tmp_path, **overrides):
    config = parse_config(CONFIG, tmp_path / "c.yaml", overrides)
    return scheduled(config, COSTS)


def test_without_a_time_a_run_takes_what_its_config_says(tmp_path):
    found = schedule(tmp_path)
    assert (found.num_finalists, found.num_processes, found.samples_s) == (3, 5, 0.2)
    assert (found.search_s, found.time_s, found.reductions) == (600.0, None, ())


def test_quick_verifies_one_file_and_thorough_more_than_normal(tmp_path):
    quick, normal, thorough = (
        schedule(tmp_path, effort=effort) for effort in ("quick", "normal", "thorough")
    )
    assert (quick.num_finalists, quick.num_processes) == (1, MIN_PROCESSES)
    assert quick.search_s <= 20.0
    assert thorough.num_finalists > normal.num_finalists
    assert thorough.num_processes > normal.num_processes
    assert quick.verification_s < normal.verification_s < thorough.verification_s


def test_each_of_the_data_that_a_file_is_raced_on_takes_time(tmp_path):
    given, usual, more = (
        schedule(tmp_path, workloads=workloads).race_s
        for workloads in (["given"], ["given", "ordinary"], ["given", "ordinary", "sparse"])
    )
    assert given < usual < more and more - usual == pytest.approx(usual - given)


def test_what_fits_is_left_alone_and_the_search_gets_the_rest(tmp_path):
    before = schedule(tmp_path, time="10m")
    found = before.fitted(600.0)
    assert found.reductions == () and found.num_finalists == before.num_finalists
    assert found.search_s == pytest.approx(600.0 - 3.0 - found.verification_s)


def test_less_time_makes_it_smaller_in_the_stated_order(tmp_path):
    before = schedule(tmp_path, time="10m", timeout="10m")
    before = replace(before, samples_s=1.0)
    seen = []
    for left_s in range(600, 5, -5):
        found = before.fitted(float(left_s))
        if not seen or seen[-1] != (found.num_finalists, found.num_processes, found.samples_s):
            seen.append((found.num_finalists, found.num_processes, found.samples_s))
        assert len(found.reductions) == (
            (found.num_finalists < 3) + (found.num_processes < 5) + (found.samples_s < 1.0)
        )
        assert found.search_s >= MIN_SEARCH_S
    finalists, processes, samples = zip(*seen, strict=True)
    assert finalists == tuple(sorted(finalists, reverse=True)) and finalists[-1] == 1
    assert processes == tuple(sorted(processes, reverse=True)) and processes[-1] == MIN_PROCESSES
    assert samples[-1] == MIN_SAMPLES_S
    for number, process, sample in seen:  # a later kind only once the earlier one is used up
        assert process == 5 or number == 1
        assert sample == 1.0 or process == MIN_PROCESSES


def test_what_takes_longer_than_the_time_asked_for_is_said_with_how_much(tmp_path):
    before = schedule(tmp_path, effort="quick", time="20s")
    assert "more than the time asked for" not in before.fitted(600.0).words
    found = before.fitted(20.0)
    late_s = found.search_s + found.verification_s + 3.0 - 20.0
    assert f": {late_s:.0f} s more than the time asked for, since no check is" in found.words
    assert "more than the time" in found.fitted(5.0, is_searched=True).words
    assert "more than the time" not in schedule(tmp_path).words  # without one


def test_after_the_search_all_that_is_left_is_for_the_verification(tmp_path):
    before = schedule(tmp_path, time="3m")
    found = before.fitted(before.verification_s + 4.0, is_searched=True)
    assert found.reductions == () and found.search_s == 0.0
    assert "search" not in found.words
    less = before.fitted(before.verification_s - 4.0, is_searched=True)
    assert less.reductions == ("2 of 3 finalists",)


def test_a_plan_in_words_names_every_part(tmp_path):
    words = schedule(tmp_path).words
    assert words == (
        "plan (normal): search 600 s, 3 finalists: compile about 32 s, check 3 x 6 s,"
        " race 5 sets of processes, 23 s, about 676 s from here"
    )


@pytest.mark.parametrize("effort", ["fast", 3])
def test_an_effort_that_there_is_not_is_refused_with_those_there_are(tmp_path, effort):
    with pytest.raises(Exception, match=r"effort.*(quick|'quick')"):
        schedule(tmp_path, effort=effort)


def test_timing_at_other_numbers_of_rows_is_in_the_plan(tmp_path):
    before = schedule(tmp_path)
    timed = replace(before, costs=replace(COSTS, batches_s=6.0))
    assert timed.verification_s == before.verification_s + before.num_finalists * 6.0
    assert "other rows 3 x 6 s" in timed.words and "other rows" not in before.words


def test_a_check_on_a_cpu_is_expected_to_take_longer_where_few_rows_are_much_work():
    """Those of docs/notebook/time.md took 43, 24 and 170 s."""
    gate = check_s_on_cpu(0.077, 3 * 4 * 4096 * 2048, 4096)
    patches = check_s_on_cpu(0.014, 39e6, 32)
    heads = check_s_on_cpu(0.055, 151e6, 16)
    assert patches < gate < heads
    assert 12 < patches < 48 and 21 < gate < 86 and 85 < heads < 340
    assert check_s_on_cpu(0.001, 1e3, 4) == pytest.approx(
        10 + 0.001 * 12_875
    )  # all rows each time
