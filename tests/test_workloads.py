"""What a file was timed on: the least of it, the verdict's colour, and the caveat beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import accepted, made_run, raced_result, result, trials

from tuner.by_batch import NO_ROWS, AtBatch, ByBatch
from tuner.problem.draws import ORDINARY, SPARSE
from tuner.review.listing import Shown
from tuner.review.report import parts_of
from tuner.review.run_data import RunData
from tuner.review.run_index import RunIndex
from tuner.review.summary import Summary, format_summary, summary_of
from tuner.review.workloads import caveat_of, least_of, tone_of, tone_words, workloads_of
from tuner.run import Run
from tuner.trial import Check, Compiled, Finalist, Interval, OnData, ProbeResult, Result

MADE = trials(20)


def around(speedup: float, half: float = 0.02) -> Interval:
    return Interval(speedup, speedup * (1 - half), speedup * (1 + half), 0.95, 5)


def on_ordinary(speedup: float) -> tuple[OnData, ...]:
    return (OnData("ordinary", ORDINARY, around(speedup)),)


def ended(headline: float, **others: Any) -> Result:
    """A result whose file is that fast as given, and so fast on `others` and in a `step`."""
    verified = replace(result(MADE, around(headline)).exported, **others)
    return replace(result(MADE, around(headline)), exported=verified, finalists=(verified,))


def timed_at(speedup: float, is_idle: bool = True, **others: Any) -> ByBatch:
    """Calls at the tuned size, 512 rows, and fewer rows, at which PyTorch wins."""
    at = AtBatch(512, "call", is_idle, speedup, speedup * 0.98, speedup * 1.02, 1e3, 1e3 / speedup)
    return ByBatch(512, (replace(at, num_rows=64, speedup=0.1), replace(at, **others)))


def compiled(speedup: float) -> Compiled:
    return Compiled("default", around(speedup), around(1.2), latency_us=2000.0)


ROUNDED = ProbeResult("after timing", 1e-4, 1e-3, 2e-7, 1e-6, False, "as in TF32")


@pytest.mark.parametrize(
    ("found", "tone", "caveat"),
    [
        (ended(4.67), "good", ""),
        (ended(4.67, others=on_ordinary(4.6)), "good", ""),
        (ended(4.67, others=on_ordinary(2.4)), "good", ""),
        (ended(4.67, others=on_ordinary(1.0)), "even", ""),
        (ended(4.67, others=on_ordinary(2.4), step=around(2.6)), "good", ""),
        (
            ended(4.67, others=on_ordinary(2.4), step=around(1.31)),
            "caution",
            "1.310x in a step of training",
        ),
        (
            ended(4.67, step=around(1.0)),
            "caution",
            "1.000x in a step of training: no difference",
        ),
        (ended(4.67, step=around(0.9)), "bad", "0.900x in a step of training"),
        # An idle device gains less in most files; one that may gain nothing is worth a word.
        (ended(4.67, by_batch=timed_at(3.9)), "good", ""),
        (
            ended(1.09, by_batch=timed_at(0.92)),
            "bad",
            "0.920x where the device is idle before each call",
        ),
        (
            ended(1.3, by_batch=timed_at(1.0)),
            "caution",
            "1.000x where the device is idle before each call: no difference",
        ),
        (ended(1.09, by_batch=timed_at(0.92, is_idle=False)), "good", ""),
        (ended(1.09, by_batch=timed_at(0.92, is_disturbed=True)), "good", ""),
        (ended(1.09, by_batch=replace(timed_at(0.92), rows={"call": NO_ROWS})), "good", ""),
        (ended(1.0), "even", ""),
        (ended(0.9), "bad", ""),
        (
            replace(ended(1.5), compiled=compiled(1.9)),
            "caution",
            "torch.compile is faster: 1.900x",
        ),
        (
            replace(ended(1.5), compiled=replace(compiled(1.9), answer=ROUNDED)),
            "caution",
            "torch.compile is faster: 1.900x, with 500 times PyTorch's error, for which a file "
            "would be rejected",
        ),
        (replace(ended(1.9), compiled=compiled(1.5)), "good", ""),
        (
            replace(
                ended(4.67, others=on_ordinary(2.4)),
                compiled=replace(compiled(1.1), others={ORDINARY: around(3.0)}),
            ),
            "caution",
            f"torch.compile is faster on {ORDINARY}: 3.00x",
        ),
        # On the same data, as given, it is not.
        (replace(ended(4.67, others=on_ordinary(2.4)), compiled=compiled(3.0)), "good", ""),
    ],
)
def test_the_colour_is_that_of_the_least_workload(found, tone, caveat):
    workloads = workloads_of(found)
    assert found.exported is not None
    kind = found.exported.verdict
    assert kind is not None and tone_of(workloads, kind) == tone
    assert caveat_of(workloads) == caveat
    said = {
        "good": "in all that was timed",
        "caution": "with a reservation",
        "bad": "slower in part of what was timed",
    }
    assert tone_words(tone, kind) == (said[tone] if kind == "faster" else "")
    least = least_of(workloads)
    speeds = [w.interval.speedup for w in workloads if w.is_ours]
    assert least is not None and least.interval.speedup == min(speeds)


def test_what_was_rejected_was_timed_for_nothing():
    found = ended(4.67)
    assert found.exported is not None
    wrong = replace(accepted(), is_accepted=False, reason="wrong")
    assert workloads_of(replace(found, exported=replace(found.exported, check=wrong))) == ()
    assert workloads_of(None) == () and least_of(()) is None and tone_of((), "rejected") == "bad"


def reported(folder: Path, found: Result) -> tuple[Run, Summary, Shown]:
    run = made_run(folder, MADE, found)
    (shown,) = RunIndex(folder).runs()
    return run, summary_of(RunData.of(run)), shown


def test_page_terminal_and_list_say_the_caveat_beside_the_headline(tmp_path):
    verified = replace(
        raced_result(MADE, 4.67).exported, others=on_ordinary(2.4), step=around(1.3)
    )
    found = replace(raced_result(MADE, 4.67), exported=verified, finalists=(verified,))
    run, summary, shown = reported(tmp_path, found)
    caveat, on = "1.300x in a step of training", "weights as after training and normal inputs"
    assert summary.verdict == f"2.40x faster than PyTorch on {on}, the least of its workloads"
    assert summary.interval == around(2.4) and shown.speedup == 2.4
    assert (summary.tone, summary.caveat) == ("caution", caveat)
    assert (shown.tone, shown.caveat, shown.least) == ("caution", caveat, 1.3)
    assert shown.sizes == summary.sizes == "batch=1024, features=8192"
    terminal = " ".join(format_summary(summary).split())
    assert f"but {caveat} workloads 4.67x as given; 2.40x on {on}" in terminal
    assert "the exported file, on the reference's own" in terminal  # beside the latency
    page = parts_of(RunData.of(run), ["verdict"])["verdict"]
    assert '<div class="verdict caution">' in page and f'<p class="caveat">but {caveat}' in page
    assert summary.trust == "1 of 1 probe accepted, raced in 3 processes, from the exported file"
    assert summary.untimed == "the speed beside torch.compile"
    assert "<strong>Not verified:</strong> the speed beside torch.compile</p>" in page
    assert page.count('class="track"') == 3  # each workload's interval


@pytest.mark.parametrize(
    ("step", "row"), [(4.7, "4.70x in a step of training"), (1.3, ""), (None, "")]
)
def test_a_step_of_training_has_a_row_where_it_is_no_caveat(step, row, tmp_path):
    interval = None if step is None else around(step)
    _, summary, _ = reported(tmp_path, ended(4.67, step=interval))
    lines = format_summary(summary).splitlines()
    found = [line for line in lines if line.startswith("training ")]
    words = row and f"training  {row} ({interval.low:.2f}x to {interval.high:.2f}x)"
    assert found == [words] * bool(row)
    assert any("in a step of training" in line for line in lines) is (step is not None)


def test_each_workload_has_a_row_and_the_headline_is_the_least_of_all(tmp_path):
    others = (*on_ordinary(2.4), OnData("sparse", SPARSE, around(1.75)))
    verified = replace(raced_result(MADE, 4.67).exported, others=others)
    found = replace(raced_result(MADE, 4.67), exported=verified, finalists=(verified,))
    run, summary, shown = reported(tmp_path, found)
    assert summary.verdict == f"1.750x faster than PyTorch on {SPARSE}, the least of its workloads"
    assert summary.interval == around(1.75) and shown.speedup == 1.75
    terminal = " ".join(format_summary(summary).split())
    rows = f"workloads 4.67x as given 2.40x on {ORDINARY} 1.750x on {SPARSE}"
    assert rows in terminal
    page = parts_of(RunData.of(run), ["verdict"])["verdict"]
    assert page.count('class="track"') == 3 and f"on {SPARSE}" in page


def test_many_workloads_have_a_row_each_in_the_terminal_and_the_rest_are_counted(tmp_path):
    found = ended(4.67, others=tuple(
        OnData(f"file:{n}.pt", f"the tensors of {n}.pt", around(2.0 + n)) for n in range(9)
    ))  # fmt: skip
    _, summary, _ = reported(tmp_path, found)
    lines = format_summary(summary).splitlines()
    first = lines.index("workloads 4.67x as given")
    rows = [f"          {2 + n}.00x on the tensors of {n}.pt" for n in range(7)]
    assert lines[first + 1 : first + 9] == [*rows, "          2 more in the report"]
    assert any(line.startswith("again") for line in lines)


def test_a_speed_up_without_samples_has_no_colour_in_the_list(tmp_path):
    _, summary, shown = reported(tmp_path, ended(4.67))
    assert (shown.tone, shown.is_verified) == ("even", False)
    assert summary.trust.endswith("no samples kept")
    assert summary.untimed == (
        "the speed on other weights and inputs, in a step of training, beside torch.compile"
    )
    alone = "workloads timed on the reference's own weights and inputs alone"
    assert alone in " ".join(format_summary(summary).split())


def test_screening_and_race_that_disagree_are_said(tmp_path):
    made = list(MADE)
    fast = replace(made[18].outcome.measurement, latency_us=1000.0, samples_us=(1000.0,) * 5)
    made[18] = replace(made[18], outcome=replace(made[18].outcome, measurement=fast))
    found = replace(raced_result(made, 2.0), winner=18)
    verified = replace(found.exported, trial=18)
    run = made_run(tmp_path, made, replace(found, exported=verified, finalists=(verified,)))
    texts = [advice.text for advice in summary_of(RunData.of(run)).warnings]
    (said,) = [text for text in texts if text.startswith("screening timed trial 18")]
    assert said == (
        "screening timed trial 18 at 1.00 ms ± 0.3 %, the race of its file at 1.50 ms: 50 % more; "
        "PyTorch took 0.067 % more"
    )
    page = parts_of(RunData.of(run), ["verdict"])["verdict"]
    assert (
        '<td class="number">1.00</td><td class="number">1.50</td><td class="number">+50 %' in page
    )


def test_screening_and_race_that_agree_are_not_warned_of(tmp_path):
    _, summary, _ = reported(tmp_path, raced_result(MADE, 2.0))
    assert not any("screening timed" in advice.text for advice in summary.warnings)


def interval(low: float, ratio: float, high: float, num_processes: int = 3) -> Interval:
    return Interval(ratio, low, high, 0.95, num_processes)


@pytest.mark.parametrize(
    ("given", "ordinary", "verdict", "least"),
    [
        # What is surely slower counts, whatever the ratio; then the smaller ratio.
        (interval(1.01, 1.03, 1.05), interval(0.90, 1.04, 1.20), "faster", 1.03),
        (interval(1.01, 1.05, 1.10), interval(0.90, 1.04, 1.20), "no difference", 1.04),
        (interval(0.90, 0.95, 1.01), interval(0.95, 0.96, 0.97), "slower", 0.96),
        (interval(1.90, 2.00, 2.10), interval(1.40, 1.50, 1.60), "faster", 1.50),
        # Of two sets of processes, as earlier releases raced ordinary data.
        (interval(1.03, 1.05, 1.07), interval(0.95, 1.04, 1.14, 2), "faster", 1.05),
        (interval(1.03, 1.05, 1.07), None, "faster", 1.05),
    ],
)
def test_what_counts_is_the_worst_over_the_data(given, ordinary, verdict, least):
    others = () if ordinary is None else (OnData("ordinary", ORDINARY, ordinary),)
    entry = Finalist(0, Check(True, "float32"), interval=given, others=others)
    assert entry.verdict == verdict and entry.least is not None
    assert entry.least.speedup == least
