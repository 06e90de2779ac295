"""Why the winner is faster, read from the trials: by value, and what few trials cannot say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import made_run, result, trial

from tuner.review.ablation import choices_brief, choices_of, choices_words, unvaried
from tuner.review.report import parts_of
from tuner.review.run_data import RunData
from tuner.trial import Trial


def run_of(folder: Path, made: list[Trial]) -> RunData:
    return RunData.of(made_run(folder, made, result(made)))


def searched(count: int = 24) -> list[Trial]:
    """Each second trial has a tile of 64, which costs half as much again; one has no stages."""
    made = [
        trial(n, (1500.0 + n) * (1.5 if n % 2 else 1.0), block_m=64 if n % 2 else 128, stages=3)
        for n in range(count)
    ]
    return [*made, trial(count, 3000.0, block_m=128, stages=0)]


def test_a_choice_is_worth_what_the_best_without_it_costs(tmp_path):
    run_data = run_of(tmp_path, searched())
    first, second = choices_of(run_data)
    assert (first.name, first.value, first.instead, first.other) == ("stages", "3", "0", 24)
    assert first.gain == pytest.approx(2.0)
    assert (first.num_with, first.num_without, first.num_changed) == (24, 1, 1)
    assert first.remark == "1 trial without it: little to go by"
    assert (second.name, second.value, second.instead, second.other) == ("block_m", "128", "64", 1)
    assert second.gain == pytest.approx(1501 * 1.5 / 1500) and second.remark == ""
    assert choices_brief(choices_of(run_data), run_data) == (
        "of this search's trials the best with block_m=128 is 1.501x as fast as with 64. "
        "stages=3 may be worth 2.00x (against 0), but only 1 trial chose otherwise. "
        "The first configuration tried won; 24 others were slower."
    )
    assert unvaried(run_data, choices_of(run_data)) == (
        "1 choice that no correct trial made otherwise: template."
    )


def test_a_choice_of_a_captured_module_says_what_it_is(tmp_path):
    made = [
        replace(one, template="nest_wgmma", params={"template": "nest_wgmma", "product_n": n})
        for one, n in zip([trial(0, 1500.0), trial(1, 1600.0)], (256, 128), strict=True)
    ]
    made.append(replace(trial(2, 3000.0), template="nest", params={"template": "nest"}))
    made += [replace(made[2], number=n, candidate_key=f"{n:016x}") for n in (3, 4)]
    run_data = run_of(tmp_path, made)
    template, tile = choices_of(run_data)
    assert template.about == "products of float16 in one Hopper kernel"
    assert tile.about == "columns of one tile of a product, which has 128 rows"
    assert choices_brief([template], run_data).startswith(
        "of this search's trials the best with template=nest_wgmma (products of float16 in one "
        "Hopper kernel) is 2.00x as fast as with nest."
    )
    page = parts_of(run_data, ["why"])["why"]
    assert '<span class="soft">columns of one tile of a product, which has 128 rows</span>' in page


def test_few_trials_say_little_and_the_verdict_says_so(tmp_path):
    run_data = run_of(tmp_path, searched(8))
    assert choices_brief(choices_of(run_data), run_data).endswith(
        "won; 8 others were slower. Only 9 correct trials: little to go by."
    )
    page = parts_of(run_data, ["verdict"])["verdict"]
    assert "Only 9 correct trials: little to go by." in page


def test_where_no_choice_explains_it_the_verdict_says_that(tmp_path):
    same = [trial(n, 1500.0 + n, block_m=64 << n % 2, stages=3) for n in range(4)]
    run_data = run_of(tmp_path, same)
    assert choices_brief(choices_of(run_data), run_data) == (
        "the trials do not say which choice made it so. The first configuration tried won; "
        "3 others were slower. Only 4 correct trials: little to go by."
    )
    assert choices_words(choices_of(run_data)).startswith("No single choice explains it")
    assert choices_words([]).startswith("The trials do not say")
    page = parts_of(run_data, ["verdict"])["verdict"]
    assert "</a>:</strong> the trials do not say which choice made it so." in page
