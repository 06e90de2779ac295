from __future__ import annotations

import html
import itertools
import json
import random
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tuner import figures, report
from tuner.device import known_device
from tuner.figures import (
    importance_figure,
    importances,
    parameter_figure,
    progress_figure,
)
from tuner.report import write_report
from tuner.run import Run, create_run
from tuner.summary import NONE, Facts, Summary, format_summary, summary
from tuner.timeline import stage_figure, stages_of
from tuner.trial import (
    Build,
    Check,
    Finalist,
    Interval,
    KernelResources,
    Measurement,
    Outcome,
    ProbeResult,
    Result,
    Status,
    Trial,
    to_json,
)

HOSTILE = (
    '</script><script>window.hacked=1</script><!--<img src=x onerror="window.hacked=1">'
    "{{ 7*7 }}{% raw %}'\"&\u2028\x1b[31m<b>bold</b>"
)
CONFIG = "problem: {op: gemm}\nmeasure: {max_noise: 0.5%}\n"
SOURCE = (
    "#include <cuda_runtime.h>\n// the winner\n"
    + "__global__ void fused_gemm_kernel(float* y) { y[threadIdx.x] = 1.0f; }\n" * 40
)


def environment(**changes: object) -> dict[str, object]:
    device = json.loads(to_json(known_device("H200")))
    return {
        "tuner": "0.1.0",
        "device": device,
        "torch_name": "cuda:0",
        "facts": {"device.num_sms": 132},
        "machine": {"driver": "580.1", "torch": "2.11", "os": "Linux"},
        "op": "gemm_scale_batchnorm",
        "title": "Gemm + Scale + BatchNorm1d (training mode)",
        "accuracy": "float32",
        "flops": 2 * 1024 * 8192 * 8192,
        "bytes": 4 * (2 * 1024 * 8192 + 8192 * 8192),
        "num_feasible": 5120,
        "num_cartesian": 40000,
        "baseline_us": 3000.0,
        "baseline_noise": 0.002,
        "command": "tune --config search_spaces/gemm.yaml --seed 0",
        "started_at": "2026-01-02T03:04:05+00:00",
        **changes,
    }


def probe(name: str, rms: float = 2e-7, baseline: float = 1e-7, **changes: object) -> ProbeResult:
    fields = {"max_abs": 1e-5, "baseline_max_abs": 1e-5, "is_accepted": True, **changes}
    return ProbeResult(name, rms, baseline_rms_rel=baseline, **fields)  # type: ignore[arg-type]


def check(reason: str = "") -> Check:
    probes = (probe("as given"), probe("x + 100", 3e-7), probe("NaN row", float("nan")))
    return Check(not reason, "float32", reason, probes, is_thorough=True)


REASONS = {
    Status.CONSTRAINTS: "shared memory: 300000 bytes, there are 232448",
    Status.COMPILE: 'source.cu(12): error: identifier "foo" is undefined',
    Status.RUNTIME: "an illegal memory access was encountered",
    Status.TIMEOUT: "no answer within 60 s",
    Status.CORRECTNESS: "as given: rms error 3.2e-3, allowed 2.0e-7",
}


def outcome(status: Status, number: int, latency_us: float) -> Outcome:
    kernels = (KernelResources("fused_gemm_kernel", 128, 65536, 8, 8),)
    build = Build(f"{number:016x}", status, "x.so", "log.txt", kernels=kernels, seconds=1.5)
    seconds = {"render": 0.001, "build": 1.5, "wait": 0.2}
    if status is Status.COMPILE:
        return Outcome(status, REASONS[status], replace(build, kernels=()), seconds=seconds)
    if status is not Status.CORRECT:
        return Outcome(status, REASONS[status], build, seconds=seconds)
    samples = (latency_us,) * 200
    measurement = Measurement(latency_us, 0.003, samples, True, anchor_us=3010.0)
    seconds |= {"check": 0.02, "measure": 0.05, "device": 0.1}
    return Outcome(status, "", build, check(), measurement, seconds)


def make_trials(num_trials: int, seed: int = 0) -> list[Trial]:
    """Latency depends on the template and block_m, and not on swizzle."""
    draw = random.Random(seed)
    statuses = itertools.cycle([Status.CORRECT] * 5 + list(REASONS))
    trials = []
    for number in range(num_trials):
        template = draw.choice(["mma", "simt", "library"])
        params = {"template": template, "stats": draw.choice(["atomics", "two_pass"])}
        params |= {"block_m": draw.choice([64, 128, 256]), "swizzle": draw.choice([1, 2, 4, 8])}
        if template == "mma":
            params |= {
                "precision": draw.choice(["fp16x3", "tf32x3"]),
                "stages": draw.choice([2, 3]),
            }
        base_us = {"mma": 1200.0, "simt": 3500.0, "library": 2500.0}[template]
        latency_us = base_us * (1 + 64 / params["block_m"]) * draw.uniform(0.99, 1.01)
        found = outcome(next(statuses), number, latency_us)
        trials.append(
            Trial(number, template, params, f"{number:016x}", found, elapsed_s=0.4 * number + 1)
        )
    return trials


def make_result(trials: list[Trial], interval: Interval | None = None) -> Result:
    ranked = sorted(
        (t for t in trials if t.outcome.latency_us), key=lambda t: t.outcome.latency_us or 0
    )
    interval = interval or Interval(1.62, 1.58, 1.66, 0.95, 5)
    finalists = tuple(
        Finalist(t.number, check(), interval, t.outcome.latency_us, 3005.0, 0.002)
        for t in ranked[:4]
    )
    winner = ranked[0].number
    return Result(
        winner,
        finalists,
        (winner, ranked[1].number),
        replace(finalists[0], latency_us=1850.5),
        "export/model_new.py",
    )


def make_run(
    folder: Path,
    trials: list[Trial],
    result: Result | None = None,
    config: str = CONFIG,
    **changes: object,
) -> Run:
    run = create_run(folder, "gemm", "NVIDIA H200", config, environment(**changes))
    # One write: 1,000 appends with their fsync are the run's business, tested there.
    with run.locked() as writer:
        for trial in trials[:3]:
            writer.append(trial)
    with (run.path / "trials.jsonl").open("a") as file:
        file.writelines(to_json(trial) + "\n" for trial in trials[3:])
    if result is not None:
        with run.locked() as writer:
            writer.write_result(result)
    for trial in trials[:300]:
        keep = run.path / "candidates" / trial.candidate_key
        keep.mkdir(exist_ok=True)
        (keep / "source.cu").write_text(SOURCE + f"// trial {trial.number}\n")
        (keep / "log.txt").write_text(f"source.cu(12): error of {trial.number}\n")
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    trials = make_trials(120)
    return make_run(tmp_path_factory.mktemp("runs"), trials, make_result(trials))


class Page(HTMLParser):
    """What a browser would make of a page: elements, attributes, texts, tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.tables: dict[str, list[list[str]]] = {}
        self._inside: list[str] = []
        self._caption = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "img", "br"):
            self._inside.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self.tables.setdefault(self._caption, []).append([])
        if tag in ("td", "th"):
            self.tables[self._caption][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script" in self._inside:
            self.scripts[-1] += data
            return
        if "style" not in self._inside:
            self.text += data
        if "caption" in self._inside:
            self._caption += data
        if "td" in self._inside or "th" in self._inside:
            self.tables[self._caption][-1][-1] += data

    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    def figure(self, name: str) -> dict[str, object]:
        order = [attrs for tag, attrs in self.elements if tag == "script"]
        ids = [attrs.get("id") for attrs in order]
        data: dict[str, object] = json.loads(self.scripts[ids.index(f"data-{name}")])
        return data

    def table(self, start: str) -> list[list[str]]:
        return next(rows for caption, rows in self.tables.items() if caption.startswith(start))


def page_of(run: Run) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


# ---- the page -------------------------------------------------------------------------------


def test_page_answers_in_the_order_in_which_one_asks(finished):
    page = page_of(finished)
    assert "1.620x faster than PyTorch" in page.text
    assert "1.580x to 1.660x in 95 % of processes; 5 were raced" in page.text
    text = html.unescape(finished.report_path.read_text())
    headings = re.findall(r"<h2[^>]*>([^<]+)", text)
    assert headings == [
        "Before you believe it",
        "Progress",
        "What matters",
        "What failed and why",
        "Where the time went",
        "The winner's source",
        "All trials",
        "Config and environment",
    ]
    for name in ("progress-trial", "progress-time", "importance", "parameters", "stages"):
        assert page.figure(name)["data"]


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
    head, *rows = page_of(finished).table("Every trial")
    trials = finished.trials()
    assert [int(row[0]) for row in rows] == [trial.number for trial in trials]
    for row, trial in zip(rows, trials, strict=True):
        cells = dict(zip(head, row, strict=True))
        assert cells["status"] == trial.outcome.status.value
        assert cells["template"] == trial.template
        assert cells["block_m"] == str(trial.params["block_m"])
        assert cells["stages"] == str(trial.params.get("stages", NONE))
        if trial.outcome.latency_us is None:
            assert cells["latency µs"] == cells["speed-up"] == NONE
            assert cells["reason"] == trial.outcome.reason
        else:
            assert float(cells["latency µs"]) == pytest.approx(trial.outcome.latency_us, rel=1e-4)
            assert float(cells["speed-up"]) == pytest.approx(
                3010.0 / trial.outcome.latency_us, abs=1e-3
            )
            assert (cells["registers"], cells["spilled bytes"]) == ("128", "16")


def test_failures_are_grouped_by_reason_with_the_compilers_log(finished):
    page = page_of(finished)
    counts = {row[0]: int(row[1]) for row in page.table("Trials by status")[1:]}
    assert counts == {"correct": 60, **{status.value: 12 for status in REASONS}}
    assert page.text.count("12 × ") == 5
    assert "error of 6" in page.text  # the log of the first of them, found by its candidate


def test_reasons_that_differ_only_in_numbers_are_one_group(tmp_path):
    trials = [
        Trial(n, "mma", {"template": "mma"}, "", Outcome(Status.RUNTIME, f"at {n}: {n}.5e-3 off"))
        for n in range(7)
    ]
    page = page_of(make_run(tmp_path, trials))
    assert "7 × runtime: at 0: 0.5e-3 off" in page.text


def test_winning_strategy_stands_first(finished):
    rows = page_of(finished).table("By template")
    assert [row[0] for row in rows] == ["template", "mma", "library", "simt"]
    best_us = min(t.outcome.latency_us for t in finished.trials() if t.outcome.latency_us)
    assert float(rows[1][3]) == pytest.approx(best_us, rel=1e-3)
    assert rows[1][5] == "1.000"
    together = page_of(finished).table("Choices together")
    assert together[0][:3] == ["template", "stats", "precision"]
    assert together[1][0] == "mma"


def test_winners_source_is_highlighted_and_compared_with_the_finalists(tmp_path):
    trials = make_trials(50)
    run = make_run(tmp_path, trials, make_result(trials))
    text = write_report(run).read_text()
    page = Page(text)
    result = run.result()
    assert result is not None
    assert f"// trial {result.winner}\n" in page.text
    assert '<span class="kr">__global__</span>' in text
    for finalist in result.finalists[1:]:
        assert f"+// trial {finalist.trial}" in page.text


def test_candidate_key_cannot_lead_out_of_the_run(tmp_path):
    (tmp_path / "source.cu").write_text("SECRET")
    trial = replace(make_trials(1)[0], candidate_key="../../")
    run = make_run(tmp_path, [])
    with run.locked() as writer:
        writer.append(trial)
    assert "SECRET" not in page_of(run).text


# ---- hostile text ---------------------------------------------------------------------------


def make_hostile(folder: Path) -> Run:
    trials = make_trials(40)
    for number, trial in enumerate(trials):
        params = {HOSTILE: HOSTILE if number % 2 else "word", **trial.params}
        bad = replace(trial.outcome, reason=HOSTILE + "\n" + HOSTILE)
        trials[number] = replace(trial, outcome=bad, params=params, template=HOSTILE)
    result = make_result(trials)
    result = replace(
        result,
        notes=(HOSTILE,),
        export_path=HOSTILE,
        finalists=tuple(replace(f, error=HOSTILE) for f in result.finalists),
        exported=replace(
            result.finalists[0], check=replace(check(HOSTILE), probes=(probe(HOSTILE),))
        ),
    )
    words = ("op", "title", "accuracy", "command", "started_at", HOSTILE)
    run = make_run(folder, trials, result, config=HOSTILE, **dict.fromkeys(words, HOSTILE))
    for trial in trials:
        for name in ("source.cu", "log.txt"):
            (run.path / "candidates" / trial.candidate_key / name).write_text(HOSTILE * 3)
    path = run.path / "environment.json"
    data = json.loads(path.read_text())
    data["device"]["name"] = HOSTILE
    path.write_text(json.dumps(data))
    return run


def test_hostile_text_is_never_markup(tmp_path, finished):
    page, harmless = page_of(make_hostile(tmp_path)), page_of(finished)
    assert page.tags() - {"b"} <= harmless.tags() and "b" not in page.tags()
    num_scripts = len([tag for tag, _ in page.elements if tag == "script"])
    assert num_scripts == 2 + 5  # Plotly, the page's own, five figures
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert "{{ 7*7 }}" in page.text and "<script>window.hacked=1</script>" in page.text
    hover = page.figure("progress-trial")["data"][0]["hovertext"][0]  # type: ignore[index]
    assert "<b>" not in hover and "&lt;b&gt;" in hover


def test_figures_data_cannot_end_its_script_element():
    figure = importance_figure({"a": 1.0})
    figure.update_layout(title=HOSTILE)
    data = report._chart("x", "x", "x", figure).data
    assert not set("<>&\u2028") & set(data)
    assert json.loads(data)["layout"]["title"]["text"] == HOSTILE


def test_hostile_text_moves_no_cursor_in_the_terminal(tmp_path):
    text = format_summary(summary(make_hostile(tmp_path)))
    assert "\x1b" not in text and "\u2028" not in text
    assert_fits_a_terminal(text)


# ---- runs that are not whole ----------------------------------------------------------------


def test_empty_run_has_a_report(tmp_path):
    page = page_of(make_run(tmp_path, []))
    assert "No trial yet" in page.text and "Nothing failed." in page.text
    assert "tune --resume" in page.text


def test_environment_may_say_nothing(tmp_path):
    run = create_run(tmp_path, "gemm", "cpu", "", {})
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
    assert report._view(Facts.of(run))["summary"].num_trials == 3


def test_run_without_a_result_claims_no_speed_up(tmp_path):
    run = make_run(tmp_path, make_trials(50))
    told = summary(run)
    assert told.kind == "open" and told.interval is None
    assert told.verdict.endswith("so far, not proved")
    assert any("not finished" in advice.text for advice in told.warnings)
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


# ---- the summary ----------------------------------------------------------------------------


def told_of(folder: Path, interval: Interval) -> Summary:
    trials = make_trials(30)
    return summary(make_run(folder, trials, make_result(trials, interval)))


def test_interval_that_holds_one_is_no_difference(tmp_path):
    told = told_of(tmp_path, Interval(1.01, 0.99, 1.03, 0.95, 5))
    assert told.kind == "no difference"
    assert told.verdict.startswith("No difference from PyTorch: 1.010x")
    assert any("the interval holds 1" in advice.text for advice in told.warnings)


def test_slower_is_called_slower(tmp_path):
    assert told_of(tmp_path, Interval(0.9, 0.88, 0.92, 0.95, 5)).kind == "slower"


def test_a_fallback_is_said_to_be_one_and_no_advice_asks_for_more(tmp_path):
    trials = make_trials(30)
    result = replace(make_result(trials, Interval(1.0, 0.99, 1.01, 0.95, 5)), is_fallback=True)
    told = summary(make_run(tmp_path, trials, result))
    assert told.kind == "no difference" and told.verdict.startswith("No kernel is faster")
    assert not any("the interval holds 1" in advice.text for advice in told.warnings)


def test_interval_without_ends_is_said_in_words(tmp_path):
    told = told_of(tmp_path, Interval(1.5, 0.0, float("inf"), 0.95, 1))
    assert told.certainty == "0.000x to no bound in 95 % of rounds, seen in 1 process alone"
    assert any("one process only" in advice.text for advice in told.warnings)


def test_rejected_export_is_never_faster(tmp_path):
    trials = make_trials(30)
    result = make_result(trials)
    assert result.exported is not None
    wrong = replace(result.exported, check=check("x + 100: 3 times the allowed error"))
    told = summary(make_run(tmp_path, trials, replace(result, exported=wrong)))
    assert told.kind == "rejected"
    assert told.verdict == "Rejected: x + 100: 3 times the allowed error"
    assert any("do not use" in advice.remedy for advice in told.warnings)


def test_summary_takes_its_figures_from_the_exported_file(finished):
    told = summary(finished)
    assert told.latency_us == 1850.5 and told.measured.startswith("the exported file")
    assert told.baseline_us == 3005.0
    assert "at most 3.00 times the baseline's own error" in told.error
    assert "'x + 100'" in told.error
    assert told.best is not None and told.best.number not in told.ties and len(told.ties) == 1
    tflops = 2 * 1024 * 8192 * 8192 / 1850.5 / 1e6
    assert told.throughput.startswith(f"{tflops:.3g} TFLOPS")
    assert f"{100 * tflops / 67:.0f} % of the fp32 roofline" in told.throughput


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
        "the winner's times scatter by 2 %, more than the 0.5 % asked for",
        "the baseline's times scatter by 1 %",
        "slowed its clock during 1 of 15",
        "the baseline drifted between 3010 µs and 3300 µs",
        "cannot be told from the winner",
    ):
        assert any(part in text for text in texts), (part, texts)


@pytest.mark.parametrize(
    ("config", "limit"),
    [("measure: {max_noise: 3%}", 0.03), ("measure: {max_noise: 0.02}", 0.02)]
    + [(text, 0.005) for text in ("", "a: [", "measure: 3", "measure: {max_noise: x}", "- 1")],
)
def test_noise_limit_is_the_configs(tmp_path, config, limit):
    assert Facts.of(make_run(tmp_path, [], config=config)).max_noise == limit


def assert_fits_a_terminal(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80


def test_terminal_summary_fits_and_says_the_same(finished):
    text = format_summary(summary(finished))
    assert_fits_a_terminal(text)
    joined = " ".join(text.split())
    for part in ("1.620x faster", "float32", "H200", "120 of 5,120 feasible", "tune --config"):
        assert part in joined
    assert str(finished.path) in text.replace("\n" + 10 * " ", "")


def test_terminal_summary_with_many_warnings_still_fits(tmp_path):
    trials = make_trials(30)
    result = replace(make_result(trials), notes=tuple(f"note {n} " * 30 for n in range(30)))
    text = format_summary(summary(make_run(tmp_path, trials, result)))
    assert_fits_a_terminal(text)
    assert "more warnings in the report" in text


# ---- figures --------------------------------------------------------------------------------


def test_progress_shows_each_trial_once_and_only_improvements():
    trials = make_trials(60)
    figure = progress_figure(trials, 3000.0, floors={"floor": 400.0})
    points = [trace for trace in figure.data if trace.mode == "markers"]
    assert sorted(x for trace in points for x in trace.x) == list(range(60))
    best = next(trace for trace in figure.data if trace.name == "best so far")
    assert list(best.y) == sorted(best.y, reverse=True)
    assert best.y[-1] == min(t.outcome.latency_us for t in trials if t.outcome.latency_us)
    names = {trace.name for trace in figure.data}
    assert {"PyTorch (baseline)", "floor", *(status.value for status in Status)} <= names


def test_progress_by_time_uses_working_seconds():
    trials = make_trials(10)
    figure = progress_figure(trials, None, by="time")
    seen = [x for trace in figure.data if trace.mode == "markers" for x in trace.x]
    assert sorted(seen) == [trial.elapsed_s for trial in trials]


def test_importance_finds_what_decides():
    shares = importances(make_trials(400))
    assert sum(shares.values()) == pytest.approx(1.0)
    # `stages` and `precision` exist for the fastest template alone: the three share its merit.
    assert sum(shares[name] for name in ("template", "stages", "precision", "block_m")) > 0.9
    assert shares["swizzle"] < 0.05 and shares["stats"] < 0.05
    assert len(importance_figure(shares).data[0].y) == len(shares)


def test_importance_is_not_guessed_from_few_trials(tmp_path):
    trials = make_trials(15)
    assert sum(t.outcome.latency_us is not None for t in trials) < 11
    assert importances(trials[:9]) == {}
    assert "Importance needs 10 correct trials" in page_of(make_run(tmp_path, trials[:9])).text


def test_importance_is_silent(capfd):
    importances(make_trials(100))
    assert capfd.readouterr() == ("", "")


def test_parameter_plot_orders_numbers_as_numbers():
    trials = make_trials(100)
    figure = parameter_figure(trials, ["block_m", "stages"])
    assert figure.layout.xaxis.ticktext == ("64", "128", "256")
    assert figure.layout.xaxis2.ticktext == ("2", "3", "absent")
    assert len(figure.data[0].x) == sum(t.outcome.latency_us is not None for t in trials)


def test_stages_add_up_to_the_working_time():
    trials = make_trials(100)
    stages = {stage.name: stage.seconds for stage in stages_of(trials)}
    assert stages["build"] == pytest.approx(150.0)
    assert stages["check"] == pytest.approx(1.0) and stages["around"] == pytest.approx(1.5)
    serial = sum(seconds for name, seconds in stages.items() if name != "build")
    assert serial == pytest.approx(trials[-1].elapsed_s)
    assert len(stage_figure(trials).data[0].x) == len(stages)


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#14171c"])
def test_marks_can_be_seen_on_light_and_dark(page):
    colours = [colour for colour, _ in figures._STATUS_MARKS.values()]
    for colour in [*colours, figures._BEST, figures._BASELINE, figures._FLOOR]:
        assert contrast(colour, page) >= 3, colour


def test_page_colours_have_the_contrast_that_text_needs(finished):
    text = write_report(finished).read_text()
    for block in re.findall(r":root \{([^}]*--page[^}]*)\}", text):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))
        for name in ("ink", "soft", "link", "good", "bad", "even"):
            assert contrast(colours[name], colours["page"]) >= 4.5, name
            assert contrast(colours[name], colours["box"]) >= 4.5, name
        assert contrast(colours["ink"], colours["warn-box"]) >= 4.5


# ---- size -----------------------------------------------------------------------------------


def test_thousand_trials_fit_in_8_megabytes_and_5_seconds(tmp_path):
    trials = make_trials(1000)
    run = make_run(tmp_path, trials, make_result(trials))
    start_s = time.perf_counter()
    path = write_report(run)
    assert time.perf_counter() - start_s < 5.0
    assert path.stat().st_size < 8_000_000


# ---- a real browser -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(
        (p for p in ("/usr/bin/chromium", "/usr/bin/google-chrome") if Path(p).exists()), ""
    )
    if not path:
        pytest.skip("no Chromium at /usr/bin/chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=flags)
        yield started
        started.close()


class Tab:
    """A page in the browser that remembers what must not happen."""

    def __init__(self, browser, run: Run, **options: object) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on(
            "console",
            lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.requests: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(write_report(run).resolve().as_uri())

    def draw_all(self) -> None:
        for chart in self.page.locator(".chart").all():
            if chart.is_visible():
                chart.scroll_into_view_if_needed()
                chart.locator(".main-svg").first.wait_for()

    def cells(self, column: int) -> list[str]:
        script = "c => [...document.querySelectorAll('#trials tbody tr:not([hidden])')]"
        found: list[str] = self.page.evaluate(f"{script}.map(r => r.cells[c].textContent)", column)
        return found


@pytest.fixture
def tab(browser, finished):
    opened = Tab(browser, finished)
    yield opened
    opened.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_draws_every_figure_without_complaint_or_network(browser, finished, scheme):
    tab = Tab(browser, finished, color_scheme=scheme)
    tab.draw_all()
    tab.page.get_by_role("button", name="By time").click()
    tab.page.locator("#chart-progress-time .main-svg").first.wait_for()
    assert tab.complaints == []
    others = [u for u in tab.requests if not u.startswith(("file:", "data:", "blob:"))]
    assert others == []
    tab.context.close()


def test_browser_runs_nothing_hostile(browser, tmp_path):
    tab = Tab(browser, make_hostile(tmp_path))
    tab.draw_all()
    tab.page.locator("#chart-progress-trial").hover()
    assert tab.page.evaluate("window.hacked") is None
    assert tab.complaints == []
    tab.context.close()


def test_browser_sorts_by_keyboard_with_missing_last(tab):
    heading = tab.page.get_by_role("button", name="latency µs")
    heading.focus()
    heading.press("Enter")
    times = [float(text) for text in tab.cells(2) if text != NONE]
    assert times == sorted(times) and len(times) == 60
    assert tab.cells(2)[60:] == [NONE] * 60
    heading.press("Enter")
    assert [float(t) for t in tab.cells(2) if t != NONE] == sorted(times, reverse=True)
    assert tab.page.locator("th[aria-sort=descending]").inner_text().startswith("latency")


def test_browser_filters_and_downloads_what_is_shown(tab, finished, tmp_path):
    tab.page.get_by_label("Filter").fill("simt two_pass")
    tab.page.locator("#status").select_option("correct")
    wanted = [
        trial
        for trial in finished.trials()
        if trial.template == "simt"
        and trial.params["stats"] == "two_pass"
        and trial.outcome.status is Status.CORRECT
    ]
    assert wanted and tab.cells(0) == [str(trial.number) for trial in wanted]
    assert f"{len(wanted)} of 120 shown" in tab.page.locator("#shown").inner_text()
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Download as CSV").click()
    path = tmp_path / "trials.csv"
    download.value.save_as(path)
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    assert head.startswith("trial,status,latency µs")
    assert [int(line.split(",")[0]) for line in lines] == [trial.number for trial in wanted]
    latency_us = wanted[0].outcome.latency_us
    assert float(lines[0].split(",")[2]) == pytest.approx(latency_us, rel=1e-4)


def test_browser_download_starts_no_formula(browser, tmp_path):
    trials = [
        replace(trial, outcome=replace(trial.outcome, reason='=HYPERLINK("x"),1'))
        for trial in make_trials(3)
    ]
    tab = Tab(browser, make_run(tmp_path, trials))
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Download as CSV").click()
    download.value.save_as(tmp_path / "trials.csv")
    assert '"\'=HYPERLINK(""x""),1"' in (tmp_path / "trials.csv").read_text(encoding="utf-8")
    tab.context.close()


def test_browser_copies_the_export_command(tab, finished):
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.page.get_by_role("button", name="Copy the command that exports the winner").click()
    tab.page.get_by_text("Copied").wait_for()
    copied = tab.page.evaluate("navigator.clipboard.readText()")
    assert copied == f"tune export {finished.path}"


@pytest.mark.parametrize("width", [360, 1280])
def test_browser_page_never_scrolls_sideways(browser, finished, width):
    tab = Tab(browser, finished, viewport={"width": width, "height": 800})
    tab.draw_all()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    tab.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_page_has_no_serious_accessibility_fault(browser, finished, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core here")
    tab = Tab(browser, finished, color_scheme=scheme, bypass_csp=True)
    tab.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    tab.draw_all()
    faults = axe.Axe().run(tab.page).response["violations"]
    assert [(f["id"], f["nodes"][0]["html"]) for f in faults] == []
    tab.context.close()


def test_browser_prints_black_on_white_with_every_figure(browser, finished):
    tab = Tab(browser, finished, color_scheme="dark")
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    tab.page.emulate_media(media="print")
    colour = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == "rgb(255, 255, 255)"
    drawn = tab.page.locator("figure:not([hidden]) .chart .main-svg:first-child").count()
    assert drawn == 4
    assert tab.page.pdf().startswith(b"%PDF")
    assert html.unescape(tab.page.title()).startswith("gemm_scale_batchnorm on NVIDIA H200")
    tab.context.close()
