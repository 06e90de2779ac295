"""The list of runs in a browser: what it says beside the headline, notes, groups, a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Reader, chromium
from made_runs import append, made_run, raced_result, trial, trials
from test_dashboard import Server, cells, serious_faults, serving

from tuner.problem.draws import ORDINARY
from tuner.run import Run
from tuner.trial import Interval, OnData

MADE = trials(20)


def run_of(folder: Path, speedup: float, batch: int, elsewhere: float | None = None) -> Run:
    found = raced_result(MADE, speedup)
    verified = found.exported
    if elsewhere is not None:
        there = Interval(elsewhere, 0.98 * elsewhere, 1.02 * elsewhere, 0.95, 2)
        verified = replace(verified, others=(OnData("ordinary", ORDINARY, there),))
    sizes = {"batch": batch, "in_features": 4096, "out_features": 8192}
    ended = replace(found, exported=verified, finalists=(verified,))
    return made_run(folder, MADE, ended, environment={"sizes": sizes})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("place") / "runs"
    made = {
        "caveat": run_of(folder, 4.67, 1024, 2.4),
        "plain": run_of(folder, 4.5, 1024),
        "large": run_of(folder, 1.9, 16384),
        "part": made_run(folder, trials(3)),
    }
    (made["part"].path / "environment.json").unlink()
    return made


@pytest.fixture(scope="module")
def server(runs: dict[str, Run]) -> Iterator[Server]:
    server = serving(runs["plain"].path.parent)
    yield server
    server.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def reading(browser: Any, server: Server, **options: object) -> Reader:
    reader = Reader(browser.new_context(**options), server.url)
    reader.page.goto(f"{server.url}/?token={server.token}")
    reader.page.wait_for_selector("#shown:has-text('4 of 4')")
    return reader


@pytest.fixture(scope="module")
def opened(browser: Any, server: Server) -> Iterator[Reader]:
    reader = reading(browser, server, viewport={"width": 1280, "height": 900})
    yield reader
    reader.page.context.close()


@pytest.fixture
def reader(opened: Reader) -> Iterator[Reader]:
    opened.page.goto(f"{opened.home}/")
    opened.page.wait_for_selector("#shown:has-text('4 of 4')")
    yield opened
    assert opened.complaints == []


def row_of(page: Any, run: Run) -> list[str]:
    return next(row for row in cells(page, "#runs") if row[-1] == run.path.name)


def test_sizes_least_speed_up_and_caveat_stand_in_the_list(runs, reader):
    page = reader.page
    row = row_of(page, runs["caveat"])
    assert row[2] == "Gemm + Scale 1024 x 4096 -> 8192 gemm, float32"
    assert row[4] == (
        "4.67x 4.67x to 4.67x least 2.40x 2.40x on weights as after training and normal inputs"
    )
    assert page.locator(f"tr[data-run='{runs['caveat'].path.name}'] .tone.caution").count() == 2
    plain = f"tr[data-run='{runs['plain'].path.name}']"
    assert page.locator(f"{plain} .tone.good").inner_text() == "4.50x"
    assert page.locator(f"{plain} .caveat").count() == 0
    page.fill("#filter", "16384")
    assert [row[-1] for row in cells(page, "#runs")] == [runs["large"].path.name]


def test_a_folder_that_is_no_whole_run_has_its_reason_in_list_and_page(runs, reader):
    page = reader.page
    row = row_of(page, runs["part"])
    assert row[1] == "unreadable"
    assert "environment.json is missing beside candidates, config.yaml" in row[2]
    page.goto(f"{reader.home}/runs/{runs['part'].path.name}")
    assert page.inner_text("h1") == "This cannot be shown"
    assert "environment.json is missing beside candidates" in page.inner_text("main pre")
    assert serious_faults(page) == []
    page.click("text=All runs")
    page.wait_for_selector("#shown:has-text('4 of 4')")
    assert [said for said in reader.complaints if "404" not in said] == []
    reader.complaints.clear()  # the browser tells of every page that is not there


def test_runs_are_grouped_by_problem(runs, reader):
    page = reader.page
    page.click("th[data-by=name] button")
    page.check("#group")
    heads = [" ".join(text.split()) for text in page.locator("tr.group").all_inner_texts()]
    assert sorted(heads)[1:] == [
        "Gemm + Scale · 1024 x 4096 -> 8192 · float32 · NVIDIA H200 2 runs, best 4.67x",
        "Gemm + Scale · 16384 x 4096 -> 8192 · float32 · NVIDIA H200 1 run, best 1.900x",
    ]
    assert serious_faults(page) == []
    page.uncheck("#group")
    assert page.locator("tr.group").count() == 0


def test_a_note_is_written_on_the_page_and_found_in_the_list(runs, reader):
    page, run = reader.page, runs["large"]
    page.goto(f"{reader.home}/runs/{run.path.name}")
    page.click("#noted summary")
    page.fill("#note textarea", "#flagship <b>before</b> the fix")
    page.click("#note button")
    page.wait_for_selector("#saved:has-text('Saved.')")
    assert page.locator("#tags .tag").all_inner_texts() == ["#flagship"]
    assert (run.path / "notes.txt").read_text() == "#flagship <b>before</b> the fix\n"
    assert serious_faults(page, "header") == []
    page.goto(f"{reader.home}/")
    page.wait_for_selector("#runs .tag")
    page.fill("#filter", "#flagship")
    assert [row[-1] for row in cells(page, "#runs")] == [run.path.name]
    assert "<b>before</b> the fix" in row_of(page, run)[2]


def test_a_phone_shows_each_run_as_a_card_with_its_speed_up(runs, browser, server):
    reader = reading(browser, server, viewport={"width": 390, "height": 800})
    page = reader.page
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    card = page.locator(f"tr[data-run='{runs['caveat'].path.name}']")
    for words in ("4.67x", "least 2.40x", "1024 x 4096 -> 8192", "NVIDIA H200"):
        box = card.get_by_text(words, exact=True).first.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390, words
    page.click("th[data-by=speedup] button")  # headings still sort
    names = page.eval_on_selector_all("#runs tbody tr", "rows => rows.map(r => r.dataset.run)")
    assert names[:3] == [runs[name].path.name for name in ("caveat", "plain", "large")]
    assert serious_faults(page) == [] and reader.complaints == []
    page.context.close()


def test_exports_are_files_to_take_and_strangers_get_none(runs, server):
    name = runs["plain"].path.name
    status, text = server.get(f"/runs/{name}/export/trials.csv")
    assert status == 200 and text.splitlines()[1].startswith("0,correct,1560.0,")
    status, text = server.get(f"/runs/{name}/export/timeline.json")
    assert status == 200 and json.loads(text)["traceEvents"]
    assert server.get(f"/runs/{name}/export/secret")[0] == 404
    assert server.ask(f"/runs/{name}/export/trials.csv")[0] == 403
    assert server.post(f"/runs/{name}/note", {"text": "x"}, X_Tune_Key="wrong")[0] == 403


def test_three_runs_are_a_matrix_by_problem(runs, server, reader):
    page = reader.page
    names = [runs[name].path.name for name in ("caveat", "plain", "large")]
    page.goto(f"{reader.home}/compare?" + "&".join(f"run={name}" for name in names))
    page.wait_for_selector("#chart-search .main-svg")
    assert cells(page, "#matrix") == [
        ["A", "–", "1.038x (1.038x to 1.038x)", "not comparable"],
        ["B", "0.964x (0.964x to 0.964x)", "–", "not comparable"],
        ["C", "not comparable", "not comparable", "–"],
    ]
    notes = page.locator(".warnings li").all_inner_texts()
    assert notes[0] == "A: but 2.40x on weights as after training and normal inputs"
    assert notes[1].startswith("C and A are not comparable: different sizes: batch=1024")
    titles = page.locator("h2").all_inner_texts()
    assert titles[-1] == "What differs in the environment"
    assert serious_faults(page) == []


def test_the_page_has_the_last_lines_of_a_running_runs_log(tmp_path, browser):
    run = made_run(tmp_path / "runs", trials(3))
    server = serving(tmp_path / "runs")
    with run.locked():
        lines = [f"12:00:{n:02}  stage {n} <b>" for n in range(30)]
        (run.path / "log.txt").write_text("\n".join(lines) + "\n")
        reported = '{"stage": "checking", "phase": "verifying", "at": "2026-01-01T00:00:00+00:00"}'
        (run.path / "progress.json").write_text(reported)
        reader = Reader(browser.new_context(), server.url)
        reader.page.goto(f"{server.url}/?token={server.token}")
        reader.page.goto(f"{server.url}/runs/{run.path.name}")
        reader.page.wait_for_selector("#log:has-text('stage 29')")
        assert reader.page.inner_text("#log").splitlines() == lines[-8:]
        append(run, trial(3, 900.0))
        reader.page.wait_for_selector("#count:has-text('4 trials')")
        assert reader.complaints == []
        reader.page.context.close()
    server.end()
