from __future__ import annotations

import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from full_runs import (
    HOSTILE,
    REASONS,
    Page,
    assert_fits_a_terminal,
    contrast,
    make_hostile,
    make_result,
    make_run,
    make_trials,
    outcome,
    page_of,
)

import tuner
from tuner.environment import Environment
from tuner.errors import StorageError
from tuner.review import report
from tuner.review.charts import CHART_NAMES
from tuner.review.formatting import NONE, relative_path
from tuner.review.report import page_data, write_report
from tuner.review.run_data import RunData
from tuner.review.sources import sources_data
from tuner.review.summary import format_summary, summary
from tuner.run import Run, create_run
from tuner.trial import Outcome, Status, Trial


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    trials = make_trials(120)
    return make_run(tmp_path_factory.mktemp("runs"), trials, make_result(trials))


# ---- the page -------------------------------------------------------------------------------


def test_page_answers_in_the_order_in_which_one_asks(finished):
    page = page_of(finished)
    assert "1.620x faster than PyTorch" in page.text
    assert "another process would find 1.580x to 1.660x (95 %, from 5 processes)" in page.text
    text = html.unescape(finished.report_path.read_text())
    headings = re.findall(r"<h2[^>]*>([^<]*)", text)
    assert headings == [
        "Before you believe it",
        "Why it is this fast",
        "Progress",
        "What matters",
        "The hardware",
        "What failed and why",
        "Where the time went",
        "Source",
        "All trials",
        "Config and environment",
        "",  # of the card that shows one trial
    ]
    assert tuple(page.data["charts"]) == CHART_NAMES
    for chart in page.data["charts"].values():
        assert chart["figure"]["data"] and chart["caption"] and chart["label"]
    assert "74.3 TFLOPS" in page.text
    # What it multiplies in, not plain float32 cores, which it passes by.
    assert (
        "23 % of 330 TFLOPS, the roofline (arithmetic) of float16 tensor cores, three products"
        in page.text
    )


def test_page_loads_nothing_from_anywhere(finished):
    page = page_of(finished)
    for tag, attrs in page.elements:
        for name in ("src", "srcset", "data", "action", "poster"):
            assert name not in attrs, (tag, attrs)
        assert (attrs.get("href") or "#").startswith(("#", "data:,"))
    assert "@import" not in finished.report_path.read_text().split("</style>")[0]


def test_report_leaves_nothing_else_in_the_run(finished):
    before = {p for p in finished.path.rglob("*") if p.name != "report.html"}
    write_report(finished)
    assert {p for p in finished.path.rglob("*") if p.name != "report.html"} == before


def test_table_holds_every_trial_by_value(finished):
    columns, trials = page_of(finished).columns(), finished.trials()
    assert columns["number"] == [trial.number for trial in trials]
    for row, trial in enumerate(trials):
        cells = {name: values[row] for name, values in columns.items()}
        assert cells["status"] == trial.outcome.status.value
        assert cells["template"] == trial.template
        assert cells["block_m"] == trial.params["block_m"]
        assert cells["stages"] == trial.params.get("stages")
        assert cells["latency_us"] == trial.outcome.latency_us
        assert cells["build_s"] == 1.5 and cells["elapsed_s"] == trial.elapsed_s
        if trial.outcome.latency_us is None:
            assert cells["speedup"] is cells["noise"] is None
            assert cells["reason"] == trial.outcome.reason
        else:
            assert cells["speedup"] == pytest.approx(3010.0 / trial.outcome.latency_us)
            assert cells["registers"] == 64 + trial.params["block_m"] // 2
            assert cells["spilled_bytes"] == 16 and cells["reason"] is None


def test_failures_are_grouped_by_reason_with_the_compilers_log(finished):
    page = page_of(finished)
    counts = {row[0]: int(row[1]) for row in page.table("Trials by status")[1:]}
    assert counts == {"correct": 60, **{status.value: 12 for status in REASONS}}
    assert page.text.count("12 × ") == 5
    assert "error of 6" in page.text  # the log of the first of them, found by its candidate


def test_reasons_that_differ_only_in_numbers_are_one_group(tmp_path):
    numbers = ("0.5e-3", "-7", "1,024", "0x7ffe", "nan", "-inf", "+3.25")
    trials = [
        Trial(n, "mma", {"template": "mma"}, "", Outcome(Status.RUNTIME, f"at {n}: {number} off"))
        for n, number in enumerate(numbers)
    ]
    page = page_of(make_run(tmp_path, trials))
    assert "7 × runtime: at 0: 0.5e-3 off" in page.text


def test_winning_strategy_stands_first(finished):
    rows = page_of(finished).table("By template")
    assert [row[0] for row in rows] == ["template", "mma", "library", "simt"]
    best_us = min(t.outcome.latency_us for t in finished.trials() if t.outcome.latency_us)
    assert (rows[0][3], rows[1][3]) == ("best ms", f"{best_us / 1e3:.2f}")
    assert rows[1][5] == "1.000"
    together = page_of(finished).table("Choices together")
    assert together[0][:3] == ["template", "stats", "precision"]
    assert together[1][0] == "mma"


def test_winners_source_is_highlighted_and_every_other_is_packed(finished):
    text = write_report(finished).read_text()
    page, result = Page(text), finished.result()
    assert result is not None
    assert f"// trial {result.winner}\n" in page.text
    assert '<span class="kr">__global__</span>' in text
    sources = page.sources()
    assert sorted(map(int, sources)) == [trial.number for trial in finished.trials()]
    for trial in finished.trials():
        kept = finished.path / "candidates" / trial.candidate_key / "source.cu"
        assert sources[str(trial.number)] == kept.read_text().splitlines()


def test_the_fastest_sources_are_kept_where_there_are_too_many(finished, monkeypatch):
    monkeypatch.setattr("tuner.review.sources.MAX_PACKED_CHARS", 10_000)
    ranked = sorted(finished.trials(), key=lambda t: t.outcome.latency_us or math.inf)
    kept = sorted(map(int, sources_data(RunData.of(finished))["trials"]))
    assert 2 <= len(kept) < 10
    assert kept == sorted(trial.number for trial in ranked[: len(kept)])


def test_data_of_the_page_is_json_without_nan(tmp_path):
    trials = make_trials(12)
    bad = trials[0].outcome.measurement
    assert bad is not None
    broken = replace(trials[0].outcome, measurement=replace(bad, noise=math.nan))
    run = make_run(tmp_path, [replace(trials[0], outcome=broken), *trials[1:]])
    data = page_data(RunData.of(run))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert next(c for c in data["columns"] if c["name"] == "noise")["values"][0] is None


def test_a_live_page_may_ask_for_some_figures(finished):
    data = page_data(RunData.of(finished), ["stages", "importance"])
    assert list(data["charts"]) == ["stages", "importance"]
    assert set(data["parts"]) == set(report.PARTS)


def test_candidate_key_cannot_lead_out_of_the_run(tmp_path):
    (tmp_path / "source.cu").write_text("SECRET")
    trial = replace(make_trials(1)[0], candidate_key="../../")
    run = make_run(tmp_path, [])
    with run.locked() as writer:
        writer.append(trial)
    assert "SECRET" not in page_of(run).text


# ---- hostile text ---------------------------------------------------------------------------


def test_hostile_text_is_never_markup(tmp_path, finished):
    page, harmless = page_of(make_hostile(tmp_path)), page_of(finished)
    assert page.tags() - {"b"} <= harmless.tags() and "b" not in page.tags()
    num_scripts = len([tag for tag, _ in page.elements if tag == "script"])
    assert num_scripts == 2 + len(report.SCRIPTS)  # data and sources
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert "{{ 7*7 }}" in page.text and "<script>window.hacked=1</script>" in page.text
    policy = page.elements[[tag for tag, _ in page.elements].index("meta") + 1][1]["content"]
    assert policy is not None and "default-src 'none'" in policy
    assert "unsafe" not in policy.split("script-src")[1].split(";")[0]


def test_data_cannot_end_its_script_element():
    data = report.json_markup({"title": HOSTILE})
    assert not set("<>&\u2028") & set(data)
    assert json.loads(data)["title"] == HOSTILE


# ---- runs that are not whole ----------------------------------------------------------------


def test_empty_run_has_a_report(tmp_path):
    page = page_of(make_run(tmp_path, []))
    assert "No trial yet" in page.text and "Nothing failed." in page.text
    assert "tune --resume" in page.text


def test_environment_may_say_nothing(tmp_path):
    run = create_run(tmp_path, "gemm", "cpu", "", Environment())
    with run.locked() as writer:
        for trial in make_trials(12):
            writer.append(trial)
    assert "the baseline" in page_of(run).text
    assert_fits_a_terminal(format_summary(summary(run)))


@pytest.mark.parametrize("word", ["device", "flops", "bytes", "baseline_us", "facts", "machine"])
@pytest.mark.parametrize("value", [None, "nonsense", True, {"name": "half"}, [1]])
def test_environment_may_hold_nonsense(tmp_path, word, value):
    run = make_run(tmp_path, make_trials(3), **{word: value})
    assert format_summary(summary(run))
    assert page_data(RunData.of(run))["columns"][0]["values"] == [0, 1, 2]


def test_run_without_a_result_claims_no_speed_up(tmp_path):
    run = make_run(tmp_path, make_trials(50))
    reported = summary(run)
    assert reported.kind == "open" and reported.interval is None
    assert reported.verdict.endswith("so far, not verified")
    assert any("not finished" in advice.text for advice in reported.warnings)
    page_of(run)


@pytest.mark.parametrize("status", list(REASONS))
def test_run_where_all_failed_has_a_report(tmp_path, status):
    trials = [
        replace(trial, outcome=outcome(status, trial.number, 1.0)) for trial in make_trials(12)
    ]
    run = make_run(tmp_path, trials)
    assert summary(run).verdict == "Nothing correct found so far"
    assert f"12 × {status.value}" in page_of(run).text


def test_probe_without_a_number_is_shown_as_such(finished):
    rows = page_of(finished).table("Relative root mean square")
    assert rows[3][:4] == ["NaN row", "nan", "1.00e-07", NONE]


def test_page_colours_have_the_contrast_that_text_needs(finished):
    text = write_report(finished).read_text()
    for block in re.findall(r":root \{([^}]*--page[^}]*)\}", text):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
        for name in ("ink", "soft", "link", "good", "bad", "even"):
            assert contrast(colours[name], colours["page"]) >= 4.5, name
            assert contrast(colours[name], colours["box"]) >= 4.5, name
        assert contrast(colours["ink"], colours["warn-box"]) >= 4.5


# ---- size -----------------------------------------------------------------------------------


def test_thousand_trials_of_a_large_template_fit_in_8_megabytes(tmp_path):
    families = Path(tuner.__file__).parent.parent / "templates"
    source = max((p.read_text() for p in families.glob("*/*.j2")), key=len)
    trials = make_trials(1000)
    path = write_report(make_run(tmp_path, trials, make_result(trials), source=source))
    assert len(source) > 20_000
    assert path.stat().st_size < 4_000_000
    assert len(Page(path.read_text()).sources()) == 1000


def test_the_bundled_plotly_is_of_the_version_that_makes_the_figures():
    from plotly.offline import get_plotlyjs_version

    head = (report.PAGE_DIR / "plotly-basic.min.js").read_text()[:200]
    bundled = re.search(r"plotly.js \(basic - minified\) v([\d.]+)", head)
    assert bundled is not None and "MIT license" in head
    assert bundled[1].split(".")[0] == get_plotlyjs_version().split(".")[0]


@pytest.mark.parametrize("name", ["kernels.json", "module.json", "counters.json"])
def test_a_damaged_file_is_named_with_what_to_do(name, tmp_path):
    run = make_run(tmp_path, make_trials(3))
    (run.path / name).write_text("{}")
    message = rf"{name}: not what was written there: Field required\n  next: move the file away"
    with pytest.raises(StorageError, match=message):
        RunData.of(run)


def test_a_renamed_run_has_its_exported_file(tmp_path):
    old, new = tmp_path / "runs" / "old", tmp_path / "runs" / "new"
    (new / "export").mkdir(parents=True)
    (new / "export" / "model_new.py").write_text("")
    assert relative_path(str(old / "export" / "model_new.py"), new) == "export/model_new.py"
    elsewhere = str(tmp_path / "elsewhere" / "mine.py")
    assert relative_path(elsewhere, new) == elsewhere
