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
        "another process would find 1.709x to 1.717x (95 %, from 5 processes)",
        "1.11 ms ± 0.083 %",
        "493 TFLOPS",
        # The winner multiplies in float16, which the class allows: TF32's roofline is not its.
        "50 % of 989 TFLOPS, the roofline (arithmetic) of float16 tensor cores, which it computes",
        "Verified: 35 of 35 probes accepted, raced in 5 processes, from the exported file",
        "relative rms 4.1e-04, absolute max 2.3e-03 (PyTorch's own 4.1e-04, 2.3e-03)",
        "35 of 35 probes accepted",
        "trial 36 cannot be distinguished from the winner",
        "47 tried of 29,480 possible: 47 correct",
        "template=wgmma stats=two_pass precision=fp16 block_m=256",
    ):
        assert words in text, words
    assert round(FLOPS / EXPORTED_US / 1e6) == 493  # TFLOPS
    found = reader.page.get_by_role("region", name="Finalists").locator("tr")
    rows = [row.split("\t") for row in found.all_inner_texts()[1:]]
    same = ["1.11", "1.11", "+0 %"]  # ms, at screening and in the race
    assert rows == [
        ["exported file", *same, "0.083 %", "1.91", "1.713x", "1.709x", "1.717x", "faster"],
        ["trial 46", *same, "0.13 %", "1.91", "1.713x", "1.706x", "1.720x", "faster"],
        [
            "trial 36",
            *["1.12"] * 2,
            "+0 %",
            "0.2 %",
            "1.91",
            "1.699x",
            "1.663x",
            "1.735x",
            "faster",
        ],
    ]
    head = reader.page.locator("[data-part=head]").inner_text()
    assert (
        "16384 x 4096 -> 4096 · accuracy class tf32 (error at most PyTorch TF32's own) · "
        "NVIDIA H200 · against PyTorch eager (float32, TF32 on)"
    ) in head


def test_the_verdict_answers_a_stranger_s_questions_on_the_first_screen(reader):
    """What, how much on which data, why, what bounds it, what is not verified."""
    box = reader.page.locator(".verdict")
    said = box.inner_text()
    assert "1.713x faster than PyTorch" in said
    assert "the reference's own weights and inputs" in said
    assert (
        "Why: of this search's trials the best with cluster_n=1 is 1.436x as fast as with 2, with "
        "template=wgmma 1.412x as fast as with library, with promote_k=0 1.119x as fast as with "
        "128. precision=fp16 may be worth 3.21x (against tf32), but only 1 trial chose otherwise."
    ) in said
    assert "Limit: nearest is float16 tensor cores, at 50 % of their rate: far from it" in said
    assert "Verified: 35 of 35 probes accepted, raced in 5 processes" in said
    assert (
        "Not verified: the speed on other weights and inputs, in a step of training, "
        "beside torch.compile"
    ) in said
    reader.page.evaluate("scrollTo(0, 0)")
    place = box.bounding_box()
    assert place is not None and place["y"] + place["height"] <= 900  # the window's height
    box.get_by_role("link", name="Why").click()
    assert reader.page.evaluate("location.hash") == "#why"


def test_why_it_is_faster_is_read_from_the_trials(reader, recorded):
    """Each number again from `trials.jsonl`, by other means than the page's."""
    section = reader.page.locator("[data-part=why]")
    assert (
        "cluster_n=1 is worth 1.436x (against 2, trial 13); template=wgmma is worth 1.412x "
        "(against library, trial 18); promote_k=0 is worth 1.119x (against 128, trial 42)."
    ) in section.inner_text()
    speeds = {
        t.number: t.outcome.measurement.anchor_us / t.outcome.measurement.latency_us
        for t in recorded.trials()
    }
    trials = {t.number: t for t in recorded.trials()}
    others = [n for n, t in trials.items() if t.template != "wgmma"]
    best = max(others, key=speeds.get)
    assert best == 18 and len(others) == 10
    assert round(max(speeds.values()) / speeds[best], 3) == 1.412
    rows = section.get_by_role("region", name="The winner's choices").locator("tr")
    cells = {row.split("\t")[0]: row.split("\t") for row in rows.all_inner_texts()[1:]}
    assert cells["template=wgmma"][3:] == [
        "library, trial 18", "37", "10", "13", "more than both scatter"
    ]  # fmt: skip
    assert cells["precision=fp16"][-1] == "1 trial without it: little to go by"
    assert cells["norm_rows=32"][-1] == "within the noise of both"
    limits = section.get_by_role("region", name="What bounds it").locator("tr").all_inner_texts()
    assert [[cell.strip() for cell in row.split("\t")] for row in limits[1:]] == [
        ["float16 tensor cores", "989 TFLOPS", "493 TFLOPS", "50 %", "", "29 %"],
        ["memory", "4,800 GB/s", "542 GB/s", "11 %", "", "6.6 %"],
    ]


def test_the_winner_is_starred_in_every_figure_of_trials(reader):
    for name in ("progress-trial", "parameters", "accuracy", "roofline", "resources"):
        stars = [trace for trace in figure(reader.page, name) if trace["name"] == "winner"]
        assert stars, name
    (star,) = [t for t in figure(reader.page, "progress-trial") if t["name"] == "winner"]
    assert star["x"] == [46] and star["y"][0] == pytest.approx(1114.608, abs=0.001)
    traces = {trace["name"]: trace for trace in figure(reader.page, "progress-trial")}
    assert traces["the winner's file, raced"]["y"][0] == pytest.approx(EXPORTED_US, abs=0.001)


def test_the_terminal_says_the_same(recorded):
    said = summary(recorded)
    assert (said.verdict, said.kind, said.ties) == ("1.713x faster than PyTorch", "faster", (36,))
    assert said.latency_us == pytest.approx(EXPORTED_US, abs=0.001)
    assert said.baseline_us == pytest.approx(BASELINE_US, abs=0.001)
    assert said.roofline.startswith("50 % of 989 TFLOPS, the roofline (arithmetic) of float16")
    assert (said.sizes, said.tone, said.caveat) == ("16384 x 4096 -> 4096", "good", "")


def test_every_template_is_distinguished_where_it_wins_and_under_the_roofline(reader):
    page = reader.page
    table = page.locator("[data-part=contests] table").filter(has_text="By template")
    rows = table.locator("tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["template", "trials", "correct", "best ms", "median ms", "times the best"],
        ["wgmma", "37", "37", "1.11", "1.40", "1.000"],
        ["library", "3", "3", "1.56", "1.57", "1.403"],
        ["wgmma_convert", "4", "4", "1.60", "2.34", "1.439"],
        ["triton", "3", "3", "1.68", "3.55", "1.507"],
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
