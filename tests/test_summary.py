from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from full_runs import (
    assert_fits_a_terminal,
    check,
    make_hostile,
    make_result,
    make_run,
    make_trials,
)
from made_runs import BASELINE_US, made_run, result, trials

from tuner.intervals import speedup_of
from tuner.review.formatting import moment_words, outlook_words, sizes_words
from tuner.review.report import parts_of
from tuner.review.run_data import RunData
from tuner.review.summary import Summary, format_summary, summary, summary_of
from tuner.run import Run
from tuner.trial import Compiled, Interval, OnData, ProbeResult, to_json


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    trials = make_trials(120)
    return make_run(tmp_path_factory.mktemp("runs"), trials, make_result(trials))


# ---- the summary ----------------------------------------------------------------------------


def test_sizes_of_a_captured_module_are_of_its_inputs_and_its_largest_weight():
    """Two layers of one input that differ in their width are not the same in a list."""
    small = {"bias_size_0": 64, "norm_weight_size_0": 99_999}
    sizes = {
        "batch": 32, "x_size_1": 3, "x_size_2": 8, "mask_size_1": 8, **small,
        "conv_weight_size_0": 64, "conv_weight_size_1": 3, "conv_weight_size_2": 4,
        "gate_weight_size_0": 2, "gate_weight_size_1": 3,
    }  # fmt: skip
    assert sizes_words(sizes) == "x: 32 x 3 x 8, mask: 32 x 8, conv_weight: 64 x 3 x 4"
    assert sizes_words({"batch": 4, "x_size_1": 3, **small}) == "x: 4 x 3"
    assert sizes_words({"rows": 4, "cols": 3}) == "4 x 3"


def test_a_moment_is_said_to_the_minute_and_words_as_they_are():
    assert moment_words("2026-11-26T09:23:30+00:00") == "2026-11-26 09:23 UTC"
    assert moment_words("2026-11-26T09:23:30") == "2026-11-26 09:23"
    assert moment_words("yesterday") == "yesterday"


def test_a_run_that_was_copied_names_its_file_within_it(tmp_path):
    made = trials(3)
    run = made_run(tmp_path, made, result(made))
    elsewhere = f"/elsewhere/{run.path.name}/export/model_new.py"
    (run.path / "result.json").write_text(to_json(replace(result(made), export_path=elsewhere)))
    assert summary(run).export_path == "export/model_new.py"
    (run.path / "result.json").write_text(
        to_json(replace(result(made), export_path="/elsewhere/other.py"))
    )
    assert summary(run).export_path == "/elsewhere/other.py"


def reported_of(folder: Path, interval: Interval) -> Summary:
    trials = make_trials(30)
    return summary(make_run(folder, trials, make_result(trials, interval)))


def test_interval_that_holds_one_is_no_difference(tmp_path):
    reported = reported_of(tmp_path, Interval(1.01, 0.99, 1.03, 0.95, 5))
    assert reported.kind == "no difference"
    assert reported.verdict.startswith("No difference from PyTorch: 1.010x")
    assert any("the interval holds 1" in advice.text for advice in reported.warnings)


def test_a_race_that_scatters_is_not_called_no_difference(tmp_path):
    reported = reported_of(tmp_path, Interval(3.95, 0.36, 42.9, 0.95, 5))
    assert reported.kind == "no difference"
    assert reported.verdict.startswith(
        "Cannot be distinguished from PyTorch: faster in this race (3.95x), but its processes"
    )
    own = (((10.0, 12.0, 11.0),) * 3, ((25.0, 24.0, 26.0),) * 3)
    baseline = (((88.0, 80.0, 90.0),) * 3, ((50.0, 49.0, 60.0),) * 3)
    trials = make_trials(30)
    result = make_result(trials, speedup_of([[88.0], [50.0]], [[11.0], [25.0]]))
    assert result.exported is not None
    raced = replace(result.exported, samples_us=own, baseline_samples_us=baseline)
    reported = summary(make_run(tmp_path, trials, replace(result, exported=raced)))
    assert "faster in this race (4.00x; 2.00x to 8.00x), but its processes" in reported.verdict


def test_processes_that_disagree_with_their_rounds_are_not_called_slower(tmp_path):
    """Each process of a race may be faster by its medians, and slower by pairs of rounds."""
    own = [[10.0, 10.0, 30.0]] * 2
    baseline = [[8.0, 40.0, 12.0], [9.0, 40.0, 13.0]]
    trials = make_trials(30)
    result = make_result(trials, speedup_of(baseline, own))
    assert result.exported is not None

    def samples(lanes: list[list[float]]) -> tuple:
        return tuple(tuple((us,) * 3 for us in rounds) for rounds in lanes)

    raced = replace(
        result.exported, samples_us=samples(own), baseline_samples_us=samples(baseline)
    )
    reported = summary(make_run(tmp_path, trials, replace(result, exported=raced)))
    assert "slower" not in reported.verdict
    said = "0.849x by its pairs of rounds, 1.200x to 1.300x by its processes' medians"
    assert said in reported.verdict


def test_a_ratio_of_medians_that_is_not_the_speed_up_is_explained(tmp_path):
    """Who divides the two latencies of a summary should find what they read above them."""
    made = trials(30)
    verified = result(made).finalists[0]
    assert verified.latency_us is not None and verified.interval is not None
    speedup = verified.interval.speedup

    def measured(name: str, ratio: float, others: tuple[OnData, ...] = ()) -> str:
        raced = replace(verified, baseline_us=ratio * verified.latency_us, others=others)
        ended = replace(result(made), exported=raced, finalists=(raced,))
        return summary(made_run(tmp_path / name, made, ended)).measured

    assert "these are medians" in measured("more", 1.2 * speedup)
    assert "these are medians" in measured("less", speedup / 1.2)
    assert "these are medians" not in measured("alike", 1.01 * speedup)
    slower = replace(verified.interval, speedup=speedup / 2, low=speedup / 2.1, high=speedup / 1.9)
    others = (OnData("ordinary", "normal inputs", slower),)
    assert "these are medians" not in measured("others", 1.2 * speedup, others)


def test_slower_is_called_slower(tmp_path):
    assert reported_of(tmp_path, Interval(0.9, 0.88, 0.92, 0.95, 5)).kind == "slower"


def test_a_fallback_is_said_to_be_one_and_no_advice_asks_for_more(tmp_path):
    trials = make_trials(30)
    result = replace(make_result(trials, Interval(1.0, 0.99, 1.01, 0.95, 5)), is_fallback=True)
    reported = summary(make_run(tmp_path, trials, result))
    assert reported.kind == "no difference" and reported.verdict.startswith(
        "No faster kernel found"
    )
    assert not any("the interval holds 1" in advice.text for advice in reported.warnings)


def test_bounds_that_tell_nothing_are_not_said(tmp_path):
    reported = reported_of(tmp_path, Interval(1.5, 0.0, float("inf"), 0.95, 1))
    assert reported.certainty == "uncertain: rounds of 1 process differ too much for bounds"
    wide, told = Interval(2.66, 0.026, 270.0, 0.95, 2), Interval(2.66, 0.7, 10.1, 0.95, 3)
    assert wide.words == "2.660x [2 processes differ too much for bounds]"
    assert told.words == "2.660x [0.700, 10.100]"
    assert "0.700x to 10.1x (95 %, from 3 processes)" in reported_of(tmp_path, told).certainty
    assert any("one process only" in advice.text for advice in reported.warnings)


def test_rejected_export_is_never_faster(tmp_path):
    trials = make_trials(30)
    result = make_result(trials)
    assert result.exported is not None
    wrong = replace(result.exported, check=check("x + 100: 3 times the allowed error"))
    reported = summary(make_run(tmp_path, trials, replace(result, exported=wrong)))
    assert reported.kind == "rejected"
    assert reported.verdict == "Rejected: x + 100: 3 times the allowed error"
    assert any("do not use" in advice.remedy for advice in reported.warnings)


SESSIONS = {
    "baseline_us": 900.0,
    "baseline_noise": 0.5,
    "sessions": [
        {"from_trial": 0, "baseline_us": 3000.0, "baseline_noise": 0.004},
        {"from_trial": 20, "baseline_us": 900.0, "baseline_noise": 0.5},
    ],
}


def test_the_baseline_that_is_reported_is_of_the_session_of_what_is_reported(tmp_path):
    made = trials(30)
    early = min(range(20), key=lambda n: made[n].outcome.latency_us or math.inf)
    fastest = replace(made[early].outcome.measurement, latency_us=1000.0, samples_us=(1000.0,) * 5)
    made[early] = replace(made[early], outcome=replace(made[early].outcome, measurement=fastest))
    facts = RunData.of(made_run(tmp_path, made, environment=SESSIONS))
    reported = summary_of(facts)
    assert reported.best is not None and reported.best.number == early
    assert (reported.baseline_us, reported.baseline_noise) == (BASELINE_US, 0.004)
    assert facts.session(19).latency_us == 3000.0 and facts.session(20).latency_us == 900.0
    assert not any("the baseline's times scatter" in a.text for a in reported.warnings)


def test_the_baseline_of_a_race_is_the_one_that_ran_in_it(tmp_path):
    made = trials(30)
    verified = result(made).finalists[0]
    bursts = (((100.0,), (110.0, 110.0, 500.0)), ((90.0,), (100.0,)))
    verified = replace(verified, baseline_us=100.0, baseline_samples_us=bursts)
    ended = replace(result(made), exported=verified, finalists=(verified,))
    reported = summary_of(RunData.of(made_run(tmp_path, made, ended, environment=SESSIONS)))
    assert reported.baseline_us == 100.0
    assert reported.baseline_noise == pytest.approx(1.4826 * 5.0 / 100.0)


def test_summary_takes_its_figures_from_the_exported_file(finished):
    reported = summary(finished)
    assert reported.latency_us == 1850.5 and reported.measured.startswith("the exported file")
    assert reported.baseline_us == 3005.0
    assert re.search(
        r"; relative rms \S+ on the worst probe \('x \+ 100'\), PyTorch's own \S+; ",
        reported.error,
    )
    assert (
        reported.best is not None
        and reported.best.number not in reported.ties
        and len(reported.ties) == 1
    )
    tflops = 2 * 1024 * 8192 * 8192 / 1850.5 / 1e6
    assert reported.throughput.startswith(f"{tflops:.3g} TFLOPS")
    assert reported.best.params["precision"] == "fp16x3"
    assert reported.roofline.startswith(f"{100 * tflops / 330:.0f} % of 330 TFLOPS, the roofline")
    assert "which it computes in" in reported.roofline and "67" not in reported.roofline


def test_near_misses_that_were_drawn_again_are_counted(tmp_path):
    trials = make_trials(30)
    result = make_result(trials)
    assert result.exported is not None
    first, *others = result.exported.check.probes
    probes = (replace(first, num_draws=4), *others)
    exported = replace(result.exported, check=replace(result.exported.check, probes=probes))
    reported = summary(make_run(tmp_path, trials, replace(result, exported=exported)))
    assert reported.error.endswith("probes accepted, 1 after a near miss in most of several draws")


def test_warnings_name_noise_throttling_drift_and_ties(tmp_path):
    trials = make_trials(30)
    best = min(trials, key=lambda t: t.outcome.latency_us or 1e9)
    measurement = best.outcome.measurement
    assert measurement is not None
    bad = replace(measurement, num_throttled=3, anchor_us=3300.0)
    trials[best.number] = replace(best, outcome=replace(best.outcome, measurement=bad))
    result = make_result(trials)
    assert result.exported is not None
    result = replace(result, exported=replace(result.exported, noise=0.02))
    run = make_run(tmp_path, trials, result, baseline_noise=0.01)
    texts = [advice.text for advice in summary(run).warnings]
    assert all(advice.remedy for advice in summary(run).warnings)
    for part in (
        "the winner's times scatter by 2 %, more than the 0.5 % of measure.max_noise",
        "the baseline's times scatter by 1 %",
        "slowed its clock during 1 of 15",
        "the baseline drifted between 3.01 ms and 3.30 ms",
        "cannot be distinguished from the winner",
    ):
        assert any(part in text for text in texts), (part, texts)


def test_what_is_left_to_gain_is_the_last_that_the_search_said(finished, tmp_path):
    said = (
        "improvement estimated at 0.42 %; chance that the best is within 1 %: 92 %, 5 %: 96 % "
        "(after 120 trials)"
    )
    reported = summary(finished)
    assert reported.outlook is not None and reported.outlook.number == 120
    assert outlook_words(reported.outlook) == said
    assert said in " ".join(format_summary(reported).split())
    assert said in parts_of(RunData.of(finished), ["verdict"])["verdict"]
    few = summary(make_run(tmp_path, make_trials(10)))
    assert few.outlook is None and "remaining" not in format_summary(few)


def test_torch_compile_is_reported_where_it_was_raced(tmp_path):
    trials = make_trials(10)
    known = Compiled(
        "default",
        Interval(1.02, 1.01, 1.03, 0.95, 5),
        Interval(2.5, 2.4, 2.6, 0.95, 5),
        latency_us=2700.0,
    )
    facts = RunData.of(make_run(tmp_path, trials, replace(make_result(trials), compiled=known)))
    said = (
        "torch.compile (default) takes 2.70 ms, 1.020x PyTorch's speed; the exported file runs at "
        "2.50x of that; another process would find 2.40x to 2.60x (95 %, from 5 processes)"
    )
    assert summary_of(facts).compiled == said and facts.compiled_us == 2700.0
    assert said in parts_of(facts, ["verdict"])["verdict"].replace("&#39;", "'")
    assert said[:50] in " ".join(format_summary(summary_of(facts)).split())
    rounded = replace(known, answer=ProbeResult("after timing", 2e-4, 1e-3, 1e-7, 1e-6, False, ""))
    facts = RunData.of(make_run(tmp_path, trials, replace(make_result(trials), compiled=rounded)))
    assert summary_of(facts).compiled == said.replace(
        "speed;",
        "speed, with 2,000 times PyTorch's error, for which a file would be rejected;",
    )
    failed = replace(make_result(trials), compiled=Compiled("default", error="no compiler"))
    reported = summary(make_run(tmp_path, trials, failed))
    assert reported.compiled == "torch.compile (default) could not be raced: no compiler"


@pytest.mark.parametrize(
    ("config", "limit"),
    [("measure: {max_noise: 3%}", 0.03), ("measure: {max_noise: 0.02}", 0.02)]
    + [(text, 0.005) for text in ("", "a: [", "measure: 3", "measure: {max_noise: x}", "- 1")],
)
def test_noise_limit_is_the_configs(tmp_path, config, limit):
    assert RunData.of(make_run(tmp_path, [], config=config)).max_noise == limit


def test_terminal_summary_fits_and_says_the_same(finished):
    text = format_summary(summary(finished))
    assert_fits_a_terminal(text)
    joined = " ".join(text.split())
    for part in (
        "1.620x faster",
        "float32",
        "H200",
        "120 tried of 5,120 possible",
        "tune --config",
    ):
        assert part in joined
    assert str(finished.path) in text.replace("\n" + 10 * " ", "")


def test_terminal_summary_with_many_warnings_still_fits(tmp_path):
    trials = make_trials(30)
    result = replace(make_result(trials), notes=tuple(f"note {n} " * 30 for n in range(30)))
    text = format_summary(summary(make_run(tmp_path, trials, result)))
    assert_fits_a_terminal(text)
    assert "more warnings in the report" in text


def test_what_the_check_noted_is_reported_once(tmp_path):
    trials = make_trials(30)
    made = make_result(trials)
    assert made.exported is not None
    noted = replace(made.exported.check, notes=("it patches torch.allclose", "a note"))
    exported = replace(made.exported, check=noted)
    run = make_run(tmp_path, trials, replace(made, exported=exported, notes=("a note",)))
    reported = [advice.text for advice in summary(run).warnings]
    assert reported.count("it patches torch.allclose") == reported.count("a note") == 1


def test_hostile_text_moves_no_cursor_in_the_terminal(tmp_path):
    text = format_summary(summary(make_hostile(tmp_path)))
    assert "\x1b" not in text and "\u2028" not in text
    assert_fits_a_terminal(text)


def test_a_file_that_runs_pytorchs_own_operations_is_no_difference(tmp_path):
    made = trials(30)
    verified = replace(result(made).exported, falls_back=True)
    reported = summary(make_run(tmp_path, made, replace(result(made), exported=verified)))
    assert reported.kind == "no difference"
    assert reported.verdict.startswith(
        "No difference from PyTorch: the file runs its own operations"
    )
