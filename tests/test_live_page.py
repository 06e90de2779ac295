"""What a run says of itself while it works: in the list, on its page, never once it is dead."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Reader, chromium
from command_line import tune
from made_runs import CONFIG, accepted, made_run, probe, result, trials
from test_dashboard import Server, cells, serious_faults, serving

from tuner.at_work import AtWork
from tuner.errors import RunLockedError
from tuner.evaluate.verifier import Answered
from tuner.planning.observing import Observer, Progress, Recorder
from tuner.planning.schedule import Costs, Schedule
from tuner.review.launch import Launcher
from tuner.review.live import LivePages, bands_of
from tuner.review.run_index import RunIndex
from tuner.run import Run
from tuner.trial import Check, Finalist, Interval, to_json
from tuner.underway import underway

PLAN = Schedule("normal", 3, 5, 0.5, Costs(16.0, 8.0, 4), 60.0)
VERIFYING = Schedule("normal", 3, 5, 0.5, Costs(), 0.0)
STAGE = "checking trial_17.unverified.py on every probe"
WHY = "transposed input: output of call 1[0, 1]: got 2, expected 3"


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self) -> None:
        self.now_s += 1.5


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return made_run(tmp_path / "runs", trials(30))


AT_WORK = [
    AtWork("cuda:0", "device", 1, 1),
    AtWork("cuda:1", "device", 1, 0),
    AtWork("gpu7/cuda:0#91ab", "device", 0, 0),
    AtWork("", "builders", 31, 20),
    AtWork("cpu3#2c4e", "builders", 0, 0),
]
BANDS = [
    "cuda:0 busy",
    "cuda:1 waiting",
    "gpu7/cuda:0#91ab lost",
    "31 builders 20 busy, 11 waiting",
    "builders of cpu3#2c4e lost",
]


def answered(number: int, total: int, left_s: float) -> Answered:
    return Answered(probe("as given"), number, total, left_s)


def verdict(run: Run, entry: Finalist) -> None:
    with (run.path / "checks.jsonl").open("a") as file:
        file.write(to_json(entry) + "\n")


def state_of(run: Run) -> str:
    (shown,) = RunIndex(run.path.parent).runs()
    return shown.state


def waiting_of(run: Run) -> dict[str, Any]:
    found = LivePages(RunIndex(run.path.parent)).waiting(run.path.name)
    assert found is not None
    return found


def test_a_search_counts_trials_or_seconds_by_what_will_end_it(run, clock):
    with run.locked():
        recorder = Recorder(Observer(), run, clock)
        recorder.on_schedule(PLAN)
        recorder.on_stage("preparing the probes and timing the baseline")
        assert waiting_of(run)["phase"] == "preparing" and waiting_of(run)["counted"] == ""
        recorder.on_budget(50, 60.0)
        clock.wait()
        recorder.on_trial(trials(20)[19], 0)  # after 10.5 s: 30 more take 15.75 s
        found = waiting_of(run)
        assert (found["phase"], found["stage"]) == ("searching", "trying configurations")
        assert (found["counted"], found["left_s"]) == ("20 of 50 trials", 15.8)
        assert found["plan"] == PLAN.words and found["plan"].startswith("plan (normal): search 60")
        assert (found["finalists"], found["verdicts"]) == ("", [])
        assert state_of(run) == "running"
        recorder.on_budget(1000, 60.0)
        clock.wait()
        recorder.on_trial(trials(20)[19], 0)
        found = waiting_of(run)
        assert (found["counted"], found["left_s"]) == ("10 of 60 s", 49.5)


def test_many_devices_are_one_band():
    many = [AtWork(f"gpu{n}", "device", int(n > 3), int(n % 2 and n > 3)) for n in range(40)]
    (band,) = bands_of(many)
    assert band["name"] == "40 devices" and band["words"] == "18 busy, 18 waiting, 4 lost"
    assert (band["busy"], band["lost"]) == (18 / 40, 4 / 40)


def test_builders_of_a_host_are_one_band():
    builders = [AtWork("", "builders", 31, 4), AtWork("far", "builders", 1, 0)]
    gone = AtWork("gone", "builders", 0, 0)
    bands = bands_of([*builders, gone])
    assert [(band["name"], band["words"]) for band in bands] == [
        ("31 builders", "4 busy, 27 waiting"),
        ("1 builder of far", "waiting"),
        ("builders of gone", "lost"),
    ]


def test_a_verification_counts_probes_seconds_shares_and_finalists(run, clock):
    with run.locked():
        recorder = Recorder(Observer(), run, clock)
        recorder.on_budget(50, 60.0)
        recorder.on_schedule(VERIFYING)
        recorder.on_stage(STAGE)
        assert state_of(run) == "verifying"
        recorder.on_probe(answered(17, 46, 12.0))  # the first of a stage is written at once
        recorder.on_probe(answered(18, 46, 11.0))  # not a second later: not written
        found = waiting_of(run)
        assert {key: found[key] for key in ("phase", "stage", "counted", "done", "total")} == {
            "phase": "verifying",
            "stage": STAGE,
            "counted": "17 of 46 probes",
            "done": 17,
            "total": 46,
        }
        assert (found["left_s"], found["finalists"]) == (12.0, "0 of 3 accepted")

        verdict(run, Finalist(5, Check(False, "float32", "of an earlier session"), error="x"))
        for entry in (
            Finalist(17, accepted()),
            Finalist(3, Check(False, "float32", WHY), error=WHY),
        ):
            verdict(run, entry)
            recorder.on_finalist(entry)
        recorder.on_stage("compiling trial_8.unverified.py")
        clock.wait()
        recorder.on_progress(Progress("compiling", 12, None, 4.0))
        found = waiting_of(run)
        assert (found["counted"], found["total"], found["left_s"]) == ("12 s so far", None, 4.0)
        assert found["finalists"] == "1 of 3 accepted, 1 rejected"
        assert found["verdicts"] == [
            "trial 17: accepted on every probe, not raced yet",
            f"trial 3: rejected: {WHY}",
        ]

        verdict(run, Finalist(17, accepted(), Interval(2.4, 2.3, 2.5, 0.95, 5)))
        clock.wait()
        recorder.on_progress(Progress("racing", 45, 100, 8.0))
        found = waiting_of(run)
        assert (found["counted"], found["done"], found["total"]) == ("45 %", 45, 100)
        assert found["verdicts"][0] == "trial 17: faster, 2.40x (2.30x to 2.50x)"

        verdict(run, Finalist(17, accepted(), Interval(2.4, 0.026, 270.0, 0.95, 3)))
        clock.wait()
        recorder.on_progress(Progress("racing", 46, 100, 8.0))
        vague = "trial 17: no difference, 2.40x (3 processes differ too much for bounds)"
        assert waiting_of(run)["verdicts"][0] == vague
        assert found["finalists"] == "1 of 3 accepted, 1 rejected"


def test_what_a_killed_run_said_last_is_not_shown_nor_by_who_works_on_it_next(run, clock):
    with run.locked():
        recorder = Recorder(Observer(), run, clock)
        recorder.on_schedule(VERIFYING)
        recorder.on_stage(STAGE)
        assert underway(run) is not None
    left = (run.path / "progress.json").read_text()
    assert STAGE in left  # as a kill leaves it
    assert underway(run) is None and state_of(run) == "stopped"
    assert LivePages(RunIndex(run.path.parent)).waiting(run.path.name) is None
    with run.locked():  # `tune export`, or a resumed run that has said nothing yet
        assert underway(run) is None and state_of(run) == "running"


def test_no_second_run_is_started_beside_a_verification(run, clock, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yaml").write_text(CONFIG)
    launcher = Launcher(RunIndex(run.path.parent), tmp_path / "configs")
    with run.locked():
        Recorder(Observer(), run, clock).on_schedule(VERIFYING)
        assert state_of(run) == "verifying"
        with pytest.raises(RunLockedError, match="two at once would disturb"):
            launcher.start("a.yaml", {})
    assert launcher.jobs() == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        '{"stage": 3, "at": "2026-01-01T00:00:00+00:00"}',
        '{"stage": "x", "at": "yesterday"}',
        '{"stage": "x", "at": "2026-01-01T00:00:00+00:00", "left_s": Infinity}',
        '{"stage": "x", "at": "2026-01-01T00:00:00+00:00", "phase": "sleeping"}',
        '{"stage": "x", "at": "2026-01-01T00:00:00+00:00", "done": 1e400}',
        '{"stage": "' + "x" * 70_000 + '", "at": "2026-01-01T00:00:00+00:00"}',
    ],
)
def test_nonsense_in_the_file_is_no_progress(run, text):
    with run.locked():
        (run.path / "progress.json").write_text(text)
        assert underway(run) is None and state_of(run) == "running"


def test_what_is_reported_without_a_count_is_shown_and_a_link_is_not_followed(run, tmp_path):
    reported = '{"stage": "x", "at": "2026-01-01T00:00:00", "other": 1}'
    with run.locked():
        (run.path / "progress.json").write_text(reported)
        found = waiting_of(run)
        assert (found["stage"], found["counted"], found["left_s"]) == ("x", "", None)
        (run.path / "progress.json").unlink()
        (tmp_path / "secret.json").write_text(reported)
        (run.path / "progress.json").symlink_to(tmp_path / "secret.json")
        assert underway(run) is None


# ---- by the server, and in a browser --------------------------------------------------------


@pytest.fixture
def server(run: Run) -> Iterator[Server]:
    server = serving(run.path.parent)
    yield server
    server.end()


def first_event(server: Server, path: str) -> dict[str, Any]:
    """Return the first of a page's server-sent events."""
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    line.request("GET", path, headers={"Cookie": server.cookie})
    answer = line.getresponse()
    while not (text := answer.readline()).startswith(b"data: "):
        assert text
    line.close()
    event: dict[str, Any] = json.loads(text.removeprefix(b"data: "))
    return event


def test_the_servers_events_tell_what_a_run_is_at_while_it_is(run, server, clock):
    events = f"/runs/{run.path.name}/events"
    with run.locked():
        recorder = Recorder(Observer(), run, clock)
        recorder.on_schedule(VERIFYING)
        recorder.on_stage(STAGE)
        clock.wait()
        recorder.on_probe(answered(17, 46, 12.0))
        reported = first_event(server, events)
        assert reported["run"]["state"] == "verifying"
        assert reported["waiting"]["counted"] == "17 of 46 probes"
        assert reported["waiting"]["left_s"] == 12.0 and 0 <= reported["waiting"]["age_s"] < 60
        (listed,) = first_event(server, "/events")["runs"]
        assert (listed["name"], listed["state"]) == (run.path.name, "verifying")
        said = tune("runs", cwd=run.path.parent.parent)
        assert said.code == 0 and said.out.splitlines()[1].startswith("verifying ")
    reported = first_event(server, events)
    assert (reported["run"]["state"], reported["waiting"]) == ("stopped", None)


def test_a_page_follows_a_verification_with_a_bar_until_it_is_over(run, server, clock):
    made = trials(30)
    with chromium() as started:
        context = started.new_context(viewport={"width": 1280, "height": 900})
        reader = Reader(context, server.url)
        page = reader.page
        page.goto(f"{server.url}/?token={server.token}")
        with run.locked():
            recorder = Recorder(Observer(), run, clock)
            recorder.on_schedule(PLAN)
            recorder.on_budget(50, 60.0)
            clock.wait()
            recorder.on_trial(made[19], 0)
            page.wait_for_selector(".state.running")
            page.click(f"#runs tr[data-run='{run.path.name}'] a")
            page.wait_for_selector("#waiting:not([hidden])")
            assert page.inner_text("#phase") == "Searching"
            bar = page.get_by_role("progressbar", name="Searching trying configurations")
            assert (bar.get_attribute("aria-valuenow"), bar.get_attribute("aria-valuemax")) == (
                "20",
                "50",
            )
            assert bar.get_attribute("aria-valuetext").startswith("20 of 50 trials, about 1")
            assert page.inner_text("#plan") == PLAN.words
            assert not page.is_visible("#finalists") and not page.is_visible("#bands")

            recorder.on_work(AT_WORK)
            clock.wait()
            recorder.on_trial(made[20], 0)
            page.wait_for_selector("#bands li")
            reported = page.locator("#bands li").all_inner_texts()
            assert [" ".join(text.split()) for text in reported] == BANDS
            assert page.inner_text("#rate") == "40 trials a minute"
            page.wait_for_function(
                "() => { const bar = document.querySelectorAll('#bands .band')[3];"
                " const share = bar.firstChild.offsetWidth / bar.clientWidth;"
                " return Math.abs(share - 20 / 31) < 0.02; }"
            )
            lost = page.locator("#bands .band").nth(2).locator(".lost")
            assert lost.bounding_box()["width"] > 50
            assert serious_faults(page, "header") == []
            recorder.on_work(AT_WORK[:1])
            clock.wait()
            recorder.on_trial(made[21], 0)
            page.wait_for_function("() => document.querySelectorAll('#bands li').length === 1")

            recorder.on_schedule(VERIFYING)
            recorder.on_stage(STAGE)
            page.wait_for_selector("#state.verifying")
            page.wait_for_selector(f"#stage:has-text('{STAGE}')")
            page.wait_for_selector("#bands", state="hidden")
            assert page.inner_text("#phase") == "Verifying"
            assert page.get_attribute("#bar", "aria-valuenow") is None  # nothing is counted yet
            page.wait_for_function(
                "() => /^for [1-9][0-9]* s$/.test(document.getElementById('counted').textContent)"
            )  # it is alive
            clock.wait()
            recorder.on_probe(answered(23, 46, 12.0))
            page.wait_for_selector("#bar[aria-valuenow='23'][aria-valuemax='46']")
            assert page.inner_text("#counted").startswith("23 of 46 probes, about 1")
            page.wait_for_function(
                "() => Math.abs(document.querySelector('#bar div').offsetWidth /"
                " document.querySelector('#bar').clientWidth - 0.5) < 0.02"
            )
            entry = Finalist(29, Check(False, "float32", WHY + "<b>"), error=WHY)
            verdict(run, entry)
            recorder.on_finalist(entry)
            recorder.on_stage("compiling trial_8.unverified.py")
            page.wait_for_selector("#verdicts li")
            assert page.inner_text("#verdicts li") == f"trial 29: rejected: {WHY}<b>"
            assert page.inner_text("#finalists") == "Finalists: 0 of 3 accepted, 1 rejected"
            assert serious_faults(page, "header") == []
            page.goto(f"{server.url}/")
            page.wait_for_selector(".state.verifying")
            assert cells(page, "#runs")[0][1] == "verifying"
            page.select_option("#state", "verifying")
            assert page.inner_text("#shown") == "1 of 1 runs shown"
            page.goto(f"{server.url}/runs/{run.path.name}")
            page.wait_for_selector("#waiting:not([hidden])")
            (run.path / "result.json").write_text(to_json(result(made)))
        page.wait_for_selector("#state.finished")
        assert not page.is_visible("#waiting")
        assert reader.complaints == []
        context.close()
