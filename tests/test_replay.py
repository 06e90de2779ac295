"""Replay: random search scores 0, the optimum at once 1; any sampler runs without a device."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from benchmarks.fleet_simulation import simulated
from tuner.errors import InputError
from tuner.search.optuna_codec import CENSORED
from tuner.search.recorded import read_recording
from tuner.search.replay import format_replays, replay
from tuner.search.score import Yardstick


def latencies(num: int, num_failed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(7)
    return np.concatenate([100 + 900 * rng.random(num) ** 2, np.full(num_failed, np.nan)])


def test_the_mean_of_random_search_is_that_of_all_its_orders():
    latency_us = np.array([5.0, 1.0, 9.0, 2.0, 2.0, 7.0])
    yardstick = Yardstick.of(latency_us, budget=6)
    orders = list(itertools.permutations(range(6)))
    for point, expected_us in zip(yardstick.points, yardstick.random_us, strict=True):
        mean_us = np.mean([min(latency_us[list(order[:point])]) for order in orders])
        assert expected_us == pytest.approx(mean_us)
    assert np.mean([yardstick.score(order) for order in orders]) == pytest.approx(0.0, abs=1e-12)


def test_the_optimum_at_once_scores_1_and_the_slowest_below_0():
    latency_us = latencies(2000)
    yardstick = Yardstick.of(latency_us)
    order = np.argsort(latency_us)
    assert yardstick.score(order[:1].tolist()) == 1.0  # what was found stays found
    assert yardstick.score(order[::-1].tolist()) < -1
    assert yardstick.random_us[-1] < yardstick.random_us[0] < yardstick.median_us


def test_points_go_from_1_to_95_percent_of_the_way_by_expected_rank():
    latency_us = np.arange(1.0, 1001.0)  # median 500.5: 95 % of the way is below 25.975
    yardstick = Yardstick.of(latency_us, budget=10_000)
    # The expected rank from the fastest after k draws of n is (n + 1) / (k + 1).
    ranks = 1001 / (yardstick.points + 1)
    assert ranks[-1] >= 25.975 > 1001 / (yardstick.points[-1] + 2)
    assert Yardstick.of(latency_us, budget=20).points[-1] == 19


def test_failures_count_as_evaluations_and_the_median_stands_for_nothing_found():
    latency_us = latencies(500, num_failed=100)
    yardstick = Yardstick.of(latency_us)
    assert yardstick.best_us([501, 502, 3], 4).tolist() == [
        yardstick.median_us,
        yardstick.median_us,
        latency_us[3],
        latency_us[3],
    ]
    best = int(np.nanargmin(latency_us))
    assert yardstick.evaluations_within(0.01, [*range(500, 510), best]) == 11
    assert yardstick.evaluations_within(0.01, [505]) is None


def test_equally_fast_configurations_have_no_score():
    assert math.isnan(Yardstick.of(np.full(50, 3.0)).score([1, 2]))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A cache of 384 configurations with a smooth optimum, some of them failing."""
    values = {
        "block": [2**i for i in range(8)],
        "tile": list(range(1, 9)),
        "unroll": [0, 1, 2, 4, 5, 8],
    }
    rows = {}
    for block, tile, unroll in itertools.product(*values.values()):
        time_ms = 1 + (math.log2(block) - 5) ** 2 / 8 + abs(tile - 3) / 4 + 0.02 * (unroll != 4)
        failed = "RuntimeFailedConfig" if block * tile > 700 else time_ms
        params = {"block": block, "tile": tile, "unroll": unroll}
        rows[f"{block},{tile},{unroll}"] = {**params, "time": failed}
    path = tmp_path_factory.mktemp("spaces") / "smooth.json"
    data = {"tune_params_keys": list(values), "tune_params": values, "cache": rows}
    path.write_text(json.dumps(data))
    return path


def test_every_sampler_replays_each_configuration_once_and_by_its_seed(recorded):
    recording = read_recording(recorded)
    for sampler in ("random", "grid"):
        found = replay(recording, sampler, num_seeds=2, seed=5, budget=1000)
        for entry in found.searches:
            assert sorted(entry.order) == list(range(384))  # ends when all is known
        again = replay(recording, sampler, seed=5, budget=40)
        assert again.searches[0].order == found.searches[0].order[:40]
        assert [entry.seed for entry in found.searches] == [5, 6]
    with pytest.raises(InputError, match="unknown sampler"):
        replay(recording, "rndom")


def test_an_optuna_sampler_replays_by_its_seed(recorded):
    recording = read_recording(recorded)
    first, again = (replay(recording, "tpe", seed=3, budget=25).searches[0] for _ in range(2))
    assert first.order == again.order and len(set(first.order)) == 25
    assert first.ms_per_suggestion > 0


def test_random_searches_score_0_on_average(recorded):
    recording = read_recording(recorded)
    scores = [s.score for s in replay(recording, "random", num_seeds=30, budget=50).searches]
    error = statistics.stdev(scores) / math.sqrt(len(scores))
    # Failed configurations cost evaluations, which the yardstick does not count: below 0.
    assert -0.6 < statistics.mean(scores) < 3 * error


def test_a_time_that_was_cut_short_is_reported_as_a_bound_and_is_nothing_found(
    recorded, monkeypatch
):
    whole = read_recording(recorded)
    is_bound = whole.latency_us <= np.nanquantile(whole.latency_us, 0.3)  # of the fastest, all
    recording = dataclasses.replace(whole, is_bound=is_bound)
    reported = []
    tell = optuna.Study.tell
    monkeypatch.setattr(
        optuna.Study,
        "tell",
        lambda study, trial, *values, **more: (
            reported.append(trial.user_attrs.get(CENSORED, False)),
            tell(study, trial, *values, **more),
        )[1],
    )
    found = replay(recording, "random", budget=60)
    assert reported == [bool(is_bound[config_id]) for config_id in found.searches[0].order]
    assert 0 < sum(reported) < 60
    assert found.yardstick.optimum_us == np.nanmin(whole.latency_us[~is_bound])
    assert found.best_us(60) >= found.yardstick.optimum_us


def orders_in(data: dict[str, Any]) -> list[list[str]]:
    return [one["order"] for runs in data["runs"].values() for one in runs["smooth"]]


def test_the_table_and_the_file_say_what_was_found(recorded, tmp_path):
    target = tmp_path / "out.json"
    command = [sys.executable, "-m", "tuner", "replay", str(recorded), "--sampler", "random"]
    command += ["--sampler", "grid", "--seeds", "3", "--budget", "50", "--out", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "smooth: 384 configurations," in done.stdout and "grid: X50 " in done.stdout
    data = json.loads(target.read_text())
    asked = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    printed = json.loads(asked.stdout)  # alone: no table beside it
    assert orders_in(printed) == orders_in(data) and printed["budget"] == 50
    recording = read_recording(recorded)
    searches = data["runs"]["random"]["smooth"]
    assert [entry["seed"] for entry in searches] == [0, 1, 2] and data["budget"] == 50
    found = replay(recording, "random", num_seeds=3, budget=50)
    assert [entry["order"] for entry in searches] == [
        [recording.keys[config_id] for config_id in entry.order] for entry in found.searches
    ]
    lines = format_replays([found]).splitlines()
    assert lines[2].split() == ["evaluations", "10", "20", "50"]
    ratio = found.best_us(50) / np.nanmin(recording.latency_us)
    assert lines[3].split()[-1] == f"{ratio:.3f}" and lines[3].split()[0] == "random"


def test_a_source_that_is_none_is_refused_with_exit_code_2(tmp_path):
    command = [sys.executable, "-m", "tuner", "replay", str(tmp_path / "none.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "no such file or run folder" in done.stderr


def test_questions_asked_ahead_are_other_questions_and_still_each_once(recorded):
    recording = read_recording(recorded)
    one, ahead = (
        replay(recording, "surrogate", seed=2, budget=60, in_flight=number).searches[0].order
        for number in (1, 8)
    )
    assert one[:12] == ahead[:12], "what is tried first depends on no outcome"
    assert one != ahead and len(set(ahead)) == len(ahead) == 60


def test_simulated_devices_share_the_work_until_builders_are_short(recorded):
    recording = read_recording(recorded)
    options = argparse.Namespace(
        trials=200, sampler="random", builders=64, think_ms=1.0, job_ms=1.0, build_s=2.0,
        screen_s=1.0, fails_per_hour=1e-6,
    )  # fmt: skip
    one, two, many = (simulated(recording, options, number, 0) for number in (1, 2, 32))
    assert two.trials_per_s > 1.8 * one.trials_per_s and two.busy > 0.9
    assert (one.waits_for, two.waits_for) == ("nothing", "nothing")
    assert many.busy < 0.9 and many.waits_for in ("builders", "parent")
    options.fails_per_hour, options.trials = 60.0, 40
    assert simulated(recording, options, 8, 0).trials_per_s > 0, "all is done, whatever is lost"
