"""The page of a real run on an H200, read in Chromium: what it answers, by value.

The run's records do not change, so neither may the answers: each number here was read from
`result.json` and `trials.jsonl` of the recorded run, not from the page.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Reader, chromium
from recorded_run import h200_run

from tuner.review.report import write_report
from tuner.review.summary import summary
from tuner.run import Run

BASELINE_US, EXPORTED_US, FLOPS = 1908.704, 1114.256, 2 * 16384 * 4096 * 4096


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return h200_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def opened(recorded: Run) -> Iterator[Reader]:
    write_report(recorded)
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        reader = Reader(context, "file://")
        reader.page.goto(recorded.report_path.resolve().as_uri())
        yield reader


@pytest.fixture
def reader(opened: Reader) -> Iterator[Reader]:
    yield opened
    assert opened.complaints == []  # of the console, and requests to anywhere else


def figure(page: Any, name: str) -> list[dict[str, Any]]:
    """Scroll to a figure; return the traces that Plotly drew."""
    chart = page.locator(f"#chart-{name}")
    chart.scroll_into_view_if_needed()
    chart.locator("svg").first.wait_for()
    script = """name => document.getElementById(`chart-${name}`).data.map(
      ({name, x, y, customdata}) => ({name, x: [...x], y: [...y], trials: customdata || []}))"""
    traces: list[dict[str, Any]] = page.evaluate(script, name)
    return traces


def numbers(page: Any) -> list[int]:
    """The trials of the table's rows, those out of view too."""
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    rows = "[...document.querySelectorAll('#trials [data-trial]')].map(b => +b.dataset.trial)"
    found: list[int] = page.evaluate(rows)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    return found


def test_the_verdict_is_what_the_races_measured(reader):
    text = reader.page.locator("[data-part=verdict]").inner_text()
    assert round(BASELINE_US / EXPORTED_US, 2) == 1.71
    for words in (
        "1.713x faster than PyTorch",
        "1.709x to 1.717x in 95 % of processes; 5 were raced",
        "1114 µs ± 0.083 %",
        "493 TFLOPS",
        # The winner multiplies in float16, which the class allows: both shares are said.
        "100 % of the tf32 roofline (495 TFLOPS); 50 % of the fp16 roofline (989 TFLOPS)",
        "rms 4.1e-04, max 2.3e-03 (PyTorch's own 4.1e-04, 2.3e-03)",
        "35 of 35 probes accepted",
        "trial 36 cannot be told from the winner",
        "47 of 29,480 feasible: 47 correct",
        "template=wgmma stats=two_pass precision=fp16 block_m=256",
    ):
        assert words in text, words
    assert round(FLOPS / EXPORTED_US / 1e6) == 493  # TFLOPS
    rows = reader.page.locator("[data-part=verdict] table").first.locator("tr").all_inner_texts()
    assert [row.split("\t") for row in rows[1:]] == [
        ["exported file", "1114 µs", "0.083 %", "1909 µs", "1.713x", "1.709x", "1.717x", "faster"],
        ["trial 46", "1114 µs", "0.13 %", "1910 µs", "1.713x", "1.706x", "1.720x", "faster"],
        ["trial 36", "1121 µs", "0.2 %", "1910 µs", "1.699x", "1.663x", "1.735x", "faster"],
    ]


def test_the_terminal_says_the_same(recorded):
    said = summary(recorded)
    assert (said.verdict, said.kind, said.ties) == ("1.713x faster than PyTorch", "faster", (36,))
    assert said.latency_us == pytest.approx(EXPORTED_US, abs=0.001)
    assert said.baseline_us == pytest.approx(BASELINE_US, abs=0.001)
    assert said.roofline.startswith("100 % of the tf32 roofline")


def test_every_template_is_told_apart_where_it_wins_and_under_the_roofline(reader):
    page = reader.page
    table = page.locator("[data-part=contests] table").filter(has_text="By template")
    rows = table.locator("tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["template", "trials", "correct", "best µs", "median µs", "times the best"],
        ["wgmma", "37", "37", "1114.6", "1395.1", "1.000"],
        ["library", "3", "3", "1563.4", "1569.9", "1.403"],
        ["wgmma_convert", "4", "4", "1604.1", "2342.6", "1.439"],
        ["triton", "3", "3", "1680.1", "3549.9", "1.507"],
    ]
    traces = figure(page, "roofline")
    # One definition: a floor of the progress figure is 100 % of a roof.
    roofs = {
        trace["name"]: max(trace["y"]) for trace in traces if trace["name"].startswith("roof")
    }
    floors = {trace["name"]: trace["y"][0] for trace in figure(page, "progress-trial")}
    units = ("TF32 tensor cores", "float16 tensor cores")
    assert set(roofs) == {f"roof of {unit}" for unit in units}
    for unit in units:
        at_floor = FLOPS / floors[f"floor of {unit}"] / 1e6
        assert at_floor == pytest.approx(roofs[f"roof of {unit}"], rel=1e-6)
    by_name = {trace["name"]: trace for trace in traces if trace["trials"]}
    counts = {name: len(trace["trials"]) for name, trace in by_name.items()}
    assert counts == {"library": 3, "triton": 3, "wgmma": 37, "wgmma_convert": 4}
    place = by_name["wgmma"]["trials"].index(46)
    assert by_name["wgmma"]["y"][place] == pytest.approx(FLOPS / 1114.608 / 1e6, abs=0.01)


def test_progress_ends_at_the_winner_above_the_floors(reader):
    traces = {trace["name"]: trace for trace in figure(reader.page, "progress-trial")}
    assert sorted(traces["correct"]["trials"]) == list(range(47))
    assert traces["best so far"]["y"][-1] == pytest.approx(1114.608, abs=0.001)
    # Of the race of what is reported, not of the search's start (1904.256).
    assert traces["PyTorch (baseline)"]["y"][0] == pytest.approx(1908.704, abs=0.001)
    floors = [traces[f"floor of {name} tensor cores"]["y"][0] for name in ("TF32", "float16")]
    assert floors[0] == pytest.approx(2 * floors[1], rel=0.01)
    assert floors[1] < floors[0] < 1114.608


def test_table_filters_and_downloads_each_row_as_recorded(reader, recorded, tmp_path):
    page = reader.page
    page.get_by_label("Filter").fill("template=library")
    trials = {trial.number: trial for trial in recorded.trials()}
    wanted = [number for number, trial in trials.items() if trial.template == "library"]
    assert numbers(page) == wanted and len(wanted) == 3
    page.get_by_label("Filter").fill("latency_us<1150")
    page.get_by_role("button", name="latency µs").click()
    assert numbers(page) == [46, 36, 21]
    with page.expect_download() as download:
        page.get_by_role("button", name="Download as CSV").click()
    assert download.value.suggested_filename == f"{recorded.path.name}-trials.csv"
    path = tmp_path / "trials.csv"
    download.value.save_as(path)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["number"]) for row in rows] == [46, 36, 21]
    for row in rows:
        trial = trials[int(row["number"])]
        assert float(row["latency_us"]) == trial.outcome.latency_us  # every digit
        assert {name: row[name] for name in trial.params} == {
            name: str(value) for name, value in trial.params.items()
        }
    measured = trials[46].outcome.measurement
    assert measured is not None and measured.anchor_us is not None
    assert float(rows[0]["speedup"]) == measured.anchor_us / measured.latency_us


def test_the_winners_source_differs_from_the_ties_where_their_parameters_do(reader):
    page = reader.page
    shown = page.locator("[data-part=source]").inner_text()
    assert shown.startswith("The winner's: candidates/e8a4799fc2218f21/source.cu")
    page.locator("#other").select_option("36")
    page.locator("#diff").wait_for()
    lines = page.locator("#diff").inner_text().splitlines()
    assert lines[:2] == ["--- trial 46", "+++ trial 36"]
    for line in (
        "-constexpr Stats kStats = Stats::kTwoPass;",
        "+constexpr Stats kStats = Stats::kAtomics;",
        "-constexpr int kClusterM = 2;",
        "+constexpr int kClusterM = 1;",
        "-constexpr int kRasterRows = 8;",
        "+constexpr int kRasterRows = 4;",
        "-constexpr bool kPreparesBehind = false;",
        "+constexpr bool kPreparesBehind = true;",
    ):
        assert lines.count(line) == 1, line
