"""What a run shows is computed from its samples; a record that says otherwise is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import tune
from made_runs import made_run, raced, raced_result, result, trial, trials

from tuner.records import recomputed, set_aside
from tuner.run import Run, open_run
from tuner.trial import Interval, Measurement, Status
from tuner.verification.ranking import ranked_trials, replaced


def edited(path: Path, edit: Callable[[dict], None]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = trials(12)
    return made_run(tmp_path / "runs", made, raced_result(made, 1.5))


def test_what_the_racer_summarised_is_computed_again_to_the_last_digit(run):
    entry = raced(3, 1.5)
    assert recomputed(entry) == (entry, "")
    result = run.result()
    assert result is not None and result.disagreements == () and result.exported is not None
    assert result.exported.interval == raced(0, 1.5).interval


@pytest.mark.parametrize(
    "figures",
    [
        {"latency_us": 1.0},
        {"baseline_us": 9e9},
        {"noise": 0.5},
        {"interval": Interval(53.0, 52.0, 54.0, 0.95, 3)},
        {"interval": None},
    ],
)
def test_each_figure_that_its_samples_do_not_give_is_found(figures):
    entry = raced(3, 1.5)
    found, said = recomputed(replace(entry, **figures))
    assert found == entry and said.startswith("trial 3: recorded ")


def test_samples_that_give_no_figures_leave_none():
    found, said = recomputed(replace(raced(3, 1.5), baseline_samples_us=(((0.0,),),)))
    assert found.interval is None and found.latency_us is None and "no figures" in said


def test_an_edited_headline_is_shown_nowhere(run):
    def forge(data: dict) -> None:
        for entry in (data["exported"], *data["finalists"]):
            entry["interval"] |= {"speedup": 53.0, "low": 52.0, "high": 54.0}
            entry["latency_us"] = 28.3

    edited(run.path / "result.json", forge)
    reported = tune("report", run.path, cwd=run.path.parent.parent)
    words = " ".join(reported.out.split())
    assert "1.500x faster than PyTorch" in words and "the run's records disagree" in words
    listed = tune("runs", cwd=run.path.parent.parent)
    assert "1.500x" in listed.out and "its records disagree: trial" in listed.out
    data = json.loads(tune("report", run.path, "--json", cwd=run.path).out)
    assert data["interval"]["speedup"] == pytest.approx(1.5)
    assert data["latency_us"] == pytest.approx(1501.0, rel=1e-3)
    assert any("recorded 53.000x" in advice["text"] for advice in data["warnings"])


def test_a_faked_time_takes_no_finalists_place(tmp_path):
    run = made_run(tmp_path, trials(12))
    path = run.path / "trials.jsonl"
    lines = path.read_text().splitlines()
    data = json.loads(lines[2])
    data["outcome"]["measurement"]["latency_us"] = 0.5
    lines[2] = json.dumps(data)
    path.write_text("\n".join(lines) + "\n")
    made = open_run(run.path).trials()
    assert 2 not in [t.number for t in ranked_trials(made)] and len(ranked_trials(made)) == 10
    assert made[2].outcome.reason == (
        "set aside, its records disagree: latency 0.5 us, but the median of its samples is 1530 us"
    )
    reported = tune("report", run.path, cwd=tmp_path)
    assert "disagree with their samples, first 2" in " ".join(reported.out.split())


@pytest.mark.parametrize("samples_us", [(), (0.0, 0.0, 0.0), (-1.0,), (float("nan"),)])
def test_samples_that_cannot_be_are_set_aside(samples_us):
    made = trial(1, 1500.0)
    measurement = Measurement(1500.0, 0.003, samples_us, True)
    odd = replace(made, outcome=replace(made.outcome, measurement=measurement))
    assert set_aside(odd).outcome.status is Status.RUNTIME
    assert set_aside(odd).outcome.latency_us is None
    assert set_aside(made) == made


def test_a_file_that_takes_the_place_of_an_earlier_one_is_said():
    made = trials(20)
    before = result(made)
    assert replaced(None, before) == replaced(before, before) == []
    (said,) = replaced(before, result(made[:10]))
    assert f"held trial {before.winner}, 2.000x [1.900, 2.100], is replaced" in said
    (said,) = replaced(replace(before, is_fallback=True), before)
    assert "held PyTorch's own modules, is replaced" in said
