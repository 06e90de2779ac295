"""The page in a real browser: Debian's Chromium, driven by Playwright; skipped where none is."""

from __future__ import annotations

import csv
import difflib
import html
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from full_runs import SOURCE, make_hostile, make_result, make_run, make_trials

from tuner.review.formatting import NONE
from tuner.review.report import page_data, write_report
from tuner.review.run_data import RunData
from tuner.review.tables import trial_columns
from tuner.run import Run
from tuner.trial import Status, to_json

NUM_TRIALS = 70


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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    trials = make_trials(NUM_TRIALS)
    run = make_run(tmp_path_factory.mktemp("runs"), trials, make_result(trials))
    write_report(run)
    return run


class Tab:
    """A page in the browser that remembers what must not happen."""

    def __init__(self, browser: Any, run: Run, **options: object) -> None:
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
        if not run.report_path.exists():
            write_report(run)
        self.page.goto(run.report_path.resolve().as_uri())

    def draw(self, name: str) -> Any:
        """Scroll to a figure; return it when it is drawn."""
        chart = self.page.locator(f"#chart-{name}")
        chart.scroll_into_view_if_needed()
        chart.locator("svg").first.wait_for()
        return chart

    def draw_all(self) -> None:
        for chart in self.page.locator(".chart").all():
            if chart.is_visible():
                chart.scroll_into_view_if_needed()
                chart.locator("svg").first.wait_for()

    def numbers(self) -> list[int]:
        """The trials in the table's rows that are in the document, in their order."""
        script = "[...document.querySelectorAll('#trials [data-trial]')].map(b => b.dataset.trial)"
        return [int(text) for text in self.page.evaluate(script)]

    def all_numbers(self) -> list[int]:
        """The trials of all rows, those out of view too, in their order."""
        self.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        found = self.numbers()
        self.page.evaluate("dispatchEvent(new Event('afterprint'))")
        return found

    def cells(self, label: str) -> list[str]:
        """The texts of one column, of the rows that are in the document."""
        script = """label => {
          const heads = [...document.querySelectorAll('#trials th')].map(h => h.textContent);
          return [...document.querySelectorAll('#trials tbody tr:not(.space)')]
            .map(row => row.cells[heads.indexOf(label)].textContent);
        }"""
        found: list[str] = self.page.evaluate(script, label)
        return found

    def close(self) -> None:
        self.context.close()


@pytest.fixture(scope="module")
def opened(browser, finished):
    tab = Tab(browser, finished)
    yield tab
    tab.close()


@pytest.fixture
def tab(opened):
    """One page for many tests: opening it takes longer than most of them."""
    opened.page.evaluate("""() => {
      document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}));
      document.getElementById('unbrush').click();
      for (const [id, kind] of [['filter', 'input'], ['status', 'change'], ['other', 'change']]) {
        document.getElementById(id).value = '';
        document.getElementById(id).dispatchEvent(new Event(kind));
      }
      scrollTo(0, 0);
    }""")
    yield opened
    assert opened.complaints == []
    others = [u for u in opened.requests if not u.startswith(("file:", "data:", "blob:"))]
    assert others == []


# ---- what is drawn --------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn_without_complaint_network_or_fault(browser, finished, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core here")
    tab = Tab(browser, finished, color_scheme=scheme, bypass_csp=True)  # for axe's own script
    tab.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    tab.page.locator("#other").select_option(index=1)
    tab.draw_all()
    tab.page.get_by_role("button", name="By time").click()
    tab.page.locator("#chart-progress-time .main-svg").first.wait_for()
    tab.page.get_by_role("button", name="Show trial 0").click()
    # The inside of Plotly's drawings is thousands of nodes without a role; their frames are kept.
    where, what = {"exclude": [[".main-svg"]]}, {"resultTypes": ["violations"]}
    faults = axe.Axe().run(tab.page, context=where, options=what).response["violations"]
    assert [(f["id"], f["nodes"][0]["html"]) for f in faults] == []
    assert tab.complaints == []
    assert [u for u in tab.requests if not u.startswith(("file:", "data:", "blob:"))] == []
    tab.close()


def test_nothing_hostile_runs(browser, tmp_path):
    tab = Tab(browser, make_hostile(tmp_path))
    tab.draw_all()
    chart = tab.draw("progress-trial")
    chart.locator(".points path").first.hover(force=True)
    assert "<b>bold</b>" in chart.locator(".hovertext").first.text_content()
    tab.page.locator("#other").select_option(index=1)
    tab.page.locator("#compared").filter(has_text="trial").wait_for()
    tab.page.get_by_role("button", name="Show trial 0").click()
    assert "<script>window.hacked=1</script>" in tab.page.locator("#card").inner_text()
    assert tab.page.evaluate("window.hacked") is None
    assert tab.complaints == []
    tab.close()


def test_every_point_of_progress_hovers_with_its_parameters(tab, finished):
    chart = tab.draw("progress-trial")
    chart.locator(".points path").first.hover(force=True)
    text = chart.locator(".hovertext").first.text_content()
    first = finished.trials()[0]
    for name, value in first.params.items():
        assert f"{name}={value}" in text


def test_a_point_that_is_clicked_shows_its_trial_and_escape_closes_it(tab, finished):
    point = tab.draw("progress-trial").locator(".points path").nth(2)
    box = point.bounding_box()
    tab.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    card = tab.page.locator("#card")
    card.wait_for()
    trial = [t for t in finished.trials() if t.outcome.latency_us][2]
    assert card.locator("h2").inner_text() == f"Trial {trial.number}"
    facts = dict(
        zip(
            card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts(), strict=True
        )
    )
    assert float(facts["latency µs"]) == pytest.approx(trial.outcome.latency_us, abs=0.05)
    assert facts["block_m"] == str(trial.params["block_m"])
    tab.page.keyboard.press("Escape")
    assert card.is_hidden()


def test_page_goes_on_with_newer_data(browser, tmp_path):
    trials = make_trials(40)
    run = make_run(tmp_path, trials[:20])
    tab = Tab(browser, run)
    tab.draw_all()
    tab.page.get_by_label("Filter").fill("mma")
    tab.page.get_by_role("button", name="latency µs").click()
    with (run.path / "trials.jsonl").open("a") as file:
        file.writelines(to_json(trial) + "\n" for trial in trials[20:])
    newer = json.dumps(page_data(RunData.of(run)))
    tab.page.locator("#progress").scroll_into_view_if_needed()
    script = """text => new Promise((done) => {
      document.getElementById('chart-progress-trial').on('plotly_afterplot', () => done());
      tunerPage.show(JSON.parse(text));
    })"""
    tab.page.evaluate(script, newer)
    points = (
        "document.getElementById('chart-progress-trial').data.flatMap(t => t.customdata || [])"
    )
    assert sorted(tab.page.evaluate(points)) == list(range(40))
    wanted = [t for t in trials if t.template == "mma"]
    wanted.sort(key=lambda t: (t.outcome.latency_us or 1e9, t.number))
    assert tab.all_numbers() == [trial.number for trial in wanted]  # filter and order are kept
    assert "40 tried of 5,120 possible" in tab.page.locator("[data-part=verdict]").inner_text()
    assert tab.complaints == []
    tab.close()


# ---- parallel coordinates -------------------------------------------------------------------


def brushed(tab: Tab) -> str:
    text: str = tab.page.locator("#brushed").inner_text()
    return text


def test_axes_are_brushed_with_the_keyboard(tab, finished):
    tab.draw("parallel")
    axis = tab.page.get_by_role("slider", name="block_m")
    axis.focus()
    axis.press("Home")
    correct = [trial for trial in finished.trials() if trial.outcome.latency_us]
    wanted = [trial for trial in correct if trial.params["block_m"] == 64]
    best = min(wanted, key=lambda trial: trial.outcome.latency_us)
    assert brushed(tab) == (
        f"{len(wanted)} of {len(correct)} trials kept; the fastest is trial {best.number}"
    )
    assert axis.get_attribute("aria-valuetext") == "64"
    axis.press("Shift+ArrowUp")
    wider = [trial for trial in correct if trial.params["block_m"] in (64, 128)]
    assert brushed(tab).startswith(f"{len(wider)} of")
    other = tab.page.get_by_role("slider", name="template")
    other.focus()
    other.press("End")
    both = [trial for trial in wider if trial.template == "simt"]
    assert brushed(tab).startswith(f"{len(both)} of")
    tab.page.get_by_role("button", name="Show these in the table").click()
    assert tab.all_numbers() == [trial.number for trial in both]
    other.focus()
    other.press("Escape")
    axis.focus()
    axis.press("Escape")
    assert brushed(tab) == "" and len(tab.all_numbers()) == NUM_TRIALS


def test_axes_are_brushed_by_dragging(tab, finished):
    chart = tab.draw("parallel")
    box = chart.locator(".axis").last.locator(".grip").bounding_box()  # the latency's
    x = box["x"] + box["width"] / 2
    tab.page.mouse.move(x, box["y"] + box["height"] - 2)
    tab.page.mouse.down()
    tab.page.mouse.move(x, box["y"] + box["height"] / 2)
    tab.page.mouse.up()
    times = [t.outcome.latency_us for t in finished.trials() if t.outcome.latency_us]
    middle = (min(times) * max(times)) ** 0.5  # of a logarithmic axis
    wanted = sum(time < middle for time in times)
    assert 0 < wanted < len(times)
    assert brushed(tab).startswith(f"{wanted} of {len(times)} ")
    tab.page.get_by_role("button", name="Clear").click()
    assert brushed(tab) == ""


# ---- sources --------------------------------------------------------------------------------


def test_any_trials_source_is_compared_with_the_winners(tab, finished):
    result = finished.result()
    assert result is not None
    other = next(t.number for t in finished.trials() if t.outcome.status is Status.COMPILE)
    tab.page.locator("#other").select_option(str(other))
    tab.page.locator("#diff").wait_for()
    assert tab.page.locator("#compared").inner_text() == (
        f"1 line of trial {result.winner} replaced by 1 of trial {other}."
    )
    lines = tab.page.locator("#diff").inner_text().splitlines()
    num_lines = len(SOURCE.splitlines())
    assert lines[:3] == [
        f"--- trial {result.winner}",
        f"+++ trial {other}",
        f"@@ line {num_lines - 2} / line {num_lines - 2} @@",
    ]
    assert lines[3:6] == [f" {line}" for line in SOURCE.splitlines()[-3:]]
    assert lines[6:] == [f"-// trial {result.winner}", f"+// trial {other}"]


def test_differences_turn_one_text_into_the_other_and_are_few(tab):
    draw = random.Random(0)
    for _ in range(60):
        before = [draw.choice("abcd") for _ in range(draw.randrange(30))]
        after = [draw.choice("abcd") for _ in range(draw.randrange(30))]
        found = tab.page.evaluate("([a, b]) => differences(a, b)", [before, after])
        assert [line for kind, line in found if kind != "+"] == before
        assert [line for kind, line in found if kind != "-"] == after
        edits = sum(kind != " " for kind, _ in found)
        matches = difflib.SequenceMatcher(None, before, after, autojunk=False)
        same = sum(block.size for block in matches.get_matching_blocks())
        assert edits <= len(before) + len(after) - 2 * same  # the shortest script there is


def test_a_trial_of_the_table_leads_to_its_source(tab, finished):
    tab.page.get_by_role("button", name="Show trial 1", exact=True).click()
    tab.page.get_by_role("button", name="Compare its source").click()
    tab.page.locator("#diff").wait_for()
    assert tab.page.locator("#other").input_value() == "1"
    assert "+// trial 1" in tab.page.locator("#diff").inner_text().splitlines()


# ---- the table ------------------------------------------------------------------------------


def test_table_sorts_by_keyboard_with_missing_last(tab, finished):
    heading = tab.page.get_by_role("button", name="latency µs")
    heading.focus()
    heading.press("Enter")
    trials = finished.trials()
    ranked = sorted(trials, key=lambda t: (t.outcome.latency_us or 1e9, t.number))
    assert tab.all_numbers() == [trial.number for trial in ranked]
    shown = [float(text) for text in tab.cells("latency µs")[:20]]
    assert shown == pytest.approx([t.outcome.latency_us for t in ranked[:20]], abs=0.06)
    heading.press("Enter")
    correct = [trial.number for trial in ranked if trial.outcome.latency_us]
    assert tab.all_numbers()[: len(correct)] == correct[::-1]
    assert tab.cells("latency µs")[-1] != NONE or len(tab.cells("latency µs")) < NUM_TRIALS
    assert tab.page.locator("th[aria-sort=descending]").inner_text().startswith("latency")


def test_table_filters_by_words_and_comparisons(tab, finished):
    def numbers(keep) -> list[int]:
        return [trial.number for trial in finished.trials() if keep(trial)]

    def shown() -> list[int]:
        return sorted(tab.all_numbers())

    filter_box = tab.page.get_by_label("Filter")
    filter_box.fill("simt two_pass")
    assert shown() == numbers(lambda t: t.template == "simt" and t.params["stats"] == "two_pass")
    filter_box.fill("block_m>=128 latency_us<2000 stages!=3")
    assert shown() == numbers(
        lambda t: (
            t.params["block_m"] >= 128
            and (t.outcome.latency_us or 1e9) < 2000
            and t.params.get("stages") != 3
        )
    )
    filter_box.fill("template=mma")
    tab.page.locator("#status").select_option("timeout")
    wanted = numbers(lambda t: t.template == "mma" and t.outcome.status is Status.TIMEOUT)
    assert wanted and shown() == wanted
    assert tab.page.locator("#shown").inner_text() == f"{len(wanted)} of {NUM_TRIALS} shown"


def downloaded(tab: Tab, path: Path) -> list[dict[str, str]]:
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Download as CSV").click()
    download.value.save_as(path)
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_download_is_what_is_shown_by_value(tab, finished, tmp_path):
    tab.page.get_by_label("Filter").fill("block_m=128")
    rows = downloaded(tab, tmp_path / "trials.csv")
    columns = {column.name: column.values for column in trial_columns(RunData.of(finished))}
    wanted = [t.number for t in finished.trials() if t.params["block_m"] == 128]
    assert [int(row["number"]) for row in rows] == tab.all_numbers()
    assert sorted(int(row["number"]) for row in rows) == wanted
    for row in rows:
        assert list(row) == list(columns)
        for name, text in row.items():
            value = columns[name][int(row["number"])]
            if value is None:
                assert text == "", name
            elif isinstance(value, str):
                assert text == value, name
            else:
                assert float(text) == value, name  # every digit


def test_download_starts_no_formula(browser, tmp_path):
    trials = [
        replace(trial, outcome=replace(trial.outcome, reason='=HYPERLINK("x"),1'))
        for trial in make_trials(3)
    ]
    tab = Tab(browser, make_run(tmp_path, trials))
    rows = downloaded(tab, tmp_path / "trials.csv")
    assert rows[0]["reason"].startswith('\'=HYPERLINK("x"),1')
    tab.close()


def test_long_table_keeps_few_rows_and_reaches_the_last(browser, tmp_path):
    trials = make_trials(300)
    tab = Tab(browser, make_run(tmp_path, trials, make_result(trials), source="one line\n"))
    assert len(tab.numbers()) < 80
    assert tab.page.locator("#trials").get_attribute("aria-rowcount") == "301"
    box = tab.page.locator("#trials-box")
    box.evaluate("box => { box.scrollTop = box.scrollHeight; }")
    last = tab.page.get_by_role("button", name="Show trial 299")
    last.wait_for()
    assert last.locator("xpath=ancestor::tr").get_attribute("aria-rowindex") == "301"
    assert len(tab.all_numbers()) == 300
    assert tab.complaints == []
    tab.close()


# ---- everybody can use it -------------------------------------------------------------------


def test_export_command_is_copied(tab, finished):
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.page.get_by_role("button", name="Copy the command that exports the winner").click()
    tab.page.get_by_text("Copied").wait_for()
    copied = tab.page.evaluate("navigator.clipboard.readText()")
    assert copied == f"tune export {finished.path}"


def test_tab_key_reaches_whatever_can_be_used(tab):
    tab.draw_all()
    tab.page.get_by_label("Filter").fill("trial=1")  # few rows: few stops
    script = """() => {
      const kinds = 'a[href], button, input, select, summary, [tabindex="0"]';
      const all = [...document.querySelectorAll(kinds)].filter(
        e => e.checkVisibility() && !e.disabled && e.tabIndex >= 0 && !e.dataset.trial);
      all.forEach((e, i) => { e.dataset.stop = i; });
      document.activeElement.blur();
      return all.length;
    }"""
    count = tab.page.evaluate(script)
    reached = set()
    for _ in range(count + 5):
        tab.page.keyboard.press("Tab")
        found = "(d => d.trial ? `trial ${d.trial}` : d.stop)(document.activeElement.dataset)"
        reached.add(tab.page.evaluate(found))
    assert count > 40 and "trial 1" in reached
    missed = set(map(str, range(count))) - reached
    lost = 's => document.querySelector(`[data-stop="${s}"]`)?.outerHTML.slice(0, 200)'
    assert [tab.page.evaluate(lost, stop) for stop in missed] == []


@pytest.mark.parametrize("width", [360, 1280])
def test_page_never_scrolls_sideways(browser, finished, width):
    tab = Tab(browser, finished, viewport={"width": width, "height": 800})
    tab.draw_all()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()


def test_paper_is_black_on_white_with_every_figure_and_row(browser, finished):
    tab = Tab(browser, finished, color_scheme="dark")
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    charts = tab.page.locator(".chart:visible")
    assert charts.count() >= 10
    for chart in charts.all():
        assert chart.locator("svg").count() > 0, chart.get_attribute("id")
    tab.page.emulate_media(media="print")
    colour = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == "rgb(255, 255, 255)"
    drawn = tab.page.locator(
        "figure:not([hidden]) .chart > svg, figure:not([hidden]) .svg-container"
    )
    assert drawn.count() == 11  # all but progress by time
    assert len(tab.numbers()) == NUM_TRIALS
    assert tab.page.pdf().startswith(b"%PDF")
    assert html.unescape(tab.page.title()).startswith("gemm_scale_batchnorm on NVIDIA H200")
    tab.close()


# ---- what is asked for and not there, and where the reader was --------------------------------


def test_a_filter_by_a_column_that_is_not_there_says_so(tab, finished):
    tab.page.get_by_label("Filter").fill("foo=3")
    assert tab.page.locator("#shown").inner_text() == (
        f"0 of {NUM_TRIALS} shown: no column is called foo"
    )
    tab.page.get_by_label("Filter").fill("template=nothing")
    assert tab.page.locator("#shown").inner_text() == f"0 of {NUM_TRIALS} shown"


def test_escape_on_a_trials_card_gives_the_focus_back(tab, finished):
    focused = "document.activeElement.dataset.trial || document.activeElement.id"
    button = tab.page.get_by_role("button", name="Show trial 3", exact=True)
    button.focus()
    button.press("Enter")
    tab.page.locator("#card").wait_for()
    tab.page.keyboard.press("Escape")
    assert tab.page.evaluate(focused) == "3"
    point = tab.draw("progress-trial").locator(".points path").nth(2)
    box = point.bounding_box()
    tab.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.page.locator("#card").wait_for()
    tab.page.keyboard.press("Escape")
    assert tab.page.evaluate(focused) == "chart-progress-trial"


def test_every_figure_is_drawn_without_being_scrolled_to(browser, finished):
    tab = Tab(browser, finished)
    undrawn = """() => [...document.querySelectorAll('.chart')].every(
      (chart) => chart.closest('[hidden]') || chart.querySelector('svg'))"""
    tab.page.wait_for_function(undrawn, timeout=60_000)
    assert tab.page.evaluate("scrollY") == 0 and tab.complaints == []
    tab.close()
