"""A folder of runs: what each is at, what was added since, and what is never read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from command_line import tune
from made_runs import (
    BASELINE_US,
    accepted,
    append,
    facts,
    made_run,
    raced_result,
    result,
    trial,
    trials,
)  # fmt: skip

from tuner.capture.outline import MODULE_FILE, Outline
from tuner.errors import InputError
from tuner.evaluate.race import Race, finalist
from tuner.review.gain import Gain, ModuleRecord
from tuner.review.listing import age_words
from tuner.review.notes import Note, note_of, write_note
from tuner.review.report import page, parts_of
from tuner.review.run_data import RunData
from tuner.review.run_index import RunIndex
from tuner.review.summary import format_summary, summary_of
from tuner.run import Run, is_locked
from tuner.trial import Check, Finalist, Interval, to_json


def test_a_run_is_listed_with_what_it_verified(tmp_path):
    made = trials(30)
    run = made_run(tmp_path, made, raced_result(made, 2.4))
    (shown,) = RunIndex(tmp_path).runs()
    assert (shown.name, shown.op, shown.device) == (run.path.name, "gemm", "NVIDIA H200")
    assert (shown.state, shown.num_trials, shown.is_verified) == ("finished", 30, True)
    assert shown.low is not None and shown.high is not None and not shown.problem
    assert shown.speedup == pytest.approx(2.4) and shown.low <= 2.4001 and shown.high >= 2.3999


def test_a_speed_up_without_samples_is_not_listed_as_verified(tmp_path):
    made = trials(30)
    made_run(tmp_path, made, result(made, Interval(2.4, 2.3, 2.5, 0.95, 5)))
    (shown,) = RunIndex(tmp_path).runs()
    assert (shown.speedup, shown.is_verified) == (2.4, False)


def test_an_open_run_is_listed_with_its_best_trial_and_follows_what_is_added(tmp_path):
    run = made_run(tmp_path, [trial(0, 2000.0), trial(1)])
    run_index = RunIndex(tmp_path)
    assert [(r.state, r.num_trials, r.speedup) for r in run_index.runs()] == [("stopped", 2, 1.5)]
    before = run_index.stamp(run.path.name)
    append(run, trial(2, 1000.0))
    with (run.path / "trials.jsonl").open("a") as file:
        file.write('{"number": 3, "half')  # as a kill leaves it
    assert [(r.num_trials, r.speedup) for r in run_index.runs()] == [(3, 3.0)]
    assert run_index.stamp(run.path.name) != before
    assert [t.number for t in run_index.run_data(run.path.name).trials] == [0, 1, 2]


WHY = "transposed input: output of call 1[0, 1]: got 2, expected 3"


def put_to_the_check(run: Run, *entries: tuple[int, str]) -> None:
    """Add finalists by trial, with why each was rejected, as a verification does one by one."""
    with (run.path / "checks.jsonl").open("a") as file:
        for number, reason in entries:
            entry = Finalist(number, Check(not reason, "float32", reason), error=reason)
            file.write(to_json(entry) + "\n")


def test_the_best_of_an_open_run_is_the_fastest_as_on_its_page(tmp_path):
    """Where the baseline drifts, another trial has the largest ratio to its own baseline."""
    made = [trial(0, 1500.0), trial(1, 1600.0)]
    measured = made[1].outcome.measurement
    assert measured is not None
    loaded = replace(measured, anchor_us=2 * BASELINE_US)  # another program ran meanwhile
    made[1] = replace(made[1], outcome=replace(made[1].outcome, measurement=loaded))
    run = made_run(tmp_path, made)
    (shown,) = RunIndex(tmp_path).runs()
    assert shown.speedup == pytest.approx(2.0)
    assert summary_of(RunData.of(run)).verdict.startswith("2.00x PyTorch's speed so far")


def test_a_run_whose_finalists_were_all_rejected_is_rejected_with_the_reason(tmp_path):
    run = made_run(tmp_path, [trial(0, 2000.0)])
    run_index = RunIndex(tmp_path)
    assert [(r.state, r.speedup) for r in run_index.runs()] == [("stopped", 1.5)]
    put_to_the_check(run, (0, WHY))
    (shown,) = run_index.runs()
    assert (shown.state, shown.speedup, shown.is_verified) == ("rejected", None, False)
    assert shown.problem == (
        f"1 trial was correct at screening, but rejected by the full check: {WHY}"
    )
    said = summary_of(run_index.run_data(run.path.name))
    assert (said.kind, said.verdict) == ("rejected", f"Rejected: {shown.problem}")
    assert said.measured == "screening only, and rejected since"
    text = format_summary(said)
    assert "1 correct, of them 1 rejected by the full check" in " ".join(text.split())
    assert "the run is not finished" not in text
    assert parts_of(run_index.run_data(run.path.name)).keys()  # the page says the same


def test_what_was_said_last_of_a_finalist_counts(tmp_path):
    run = made_run(tmp_path, [trial(0, 2000.0), trial(1, 2100.0)])
    run_index = RunIndex(tmp_path)
    put_to_the_check(run, (0, WHY), (1, ""))
    assert [(r.state, r.problem) for r in run_index.runs()] == [("stopped", "")]
    put_to_the_check(run, (1, "killed by signal 11 (SIGSEGV)"))  # in the race
    (shown,) = run_index.runs()
    assert shown.state == "rejected" and f"2 trials were correct {'at'} screening" in shown.problem
    assert f"trial 0: {WHY}" in shown.problem
    with run.locked():
        assert [(r.state, r.problem) for r in run_index.runs()] == [("running", "")]
    put_to_the_check(run, (0, ""))
    assert [(r.state, r.problem) for r in run_index.runs()] == [("stopped", "")]


def test_a_result_says_more_than_the_checks_before_it(tmp_path):
    made = trials(30)
    run = made_run(tmp_path, made, result(made))
    put_to_the_check(run, (3, WHY))
    (shown,) = RunIndex(tmp_path).runs()
    assert (shown.state, shown.problem) == ("finished", "")


def test_the_command_line_lists_and_reports_a_rejected_run(tmp_path):
    run = made_run(tmp_path / "runs", [trial(0, 2000.0)])
    put_to_the_check(run, (0, WHY))
    listed = tune("runs", cwd=tmp_path)
    assert listed.code == 0 and "stopped" not in listed.out and "~" not in listed.out
    assert "rejected" in listed.out and WHY in " ".join(listed.out.split())
    for folder, got in (("nowhere", "no such folder"), (run.path / "trials.jsonl", "a file")):
        refused = tune("runs", folder, cwd=tmp_path)
        assert refused.code == 2 and f"{got}\n  next: name a folder of runs" in refused.err
    reported = tune("report", run.path, cwd=tmp_path)
    assert reported.code == 0, reported
    assert "Rejected: 1 trial was correct at screening, but rejected" in reported.out


def test_a_run_that_is_worked_on_is_running_and_its_lock_is_left_alone(tmp_path):
    run = made_run(tmp_path, trials(3))
    run_index = RunIndex(tmp_path)
    with run.locked():
        assert is_locked(run)
        assert run_index.runs()[0].state == "running"
    assert not is_locked(run)
    assert run_index.runs()[0].state == "stopped"


def test_a_page_advises_to_resume_only_what_no_other_process_works_on(tmp_path):
    run = made_run(tmp_path, trials(3))
    hold = "f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True)"
    program = f"import fcntl, sys; {hold}; sys.stdin.read()"
    command = [sys.executable, "-c", program, str(run.path / "lock")]
    (run.path / "lock").touch()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"\n"
        for read in (RunIndex(tmp_path).run_data(run.path.name), RunData.of(run)):
            said = parts_of(read)["verdict"]
            assert "the run is going on, and nothing is verified yet" in said
            assert "--resume" not in said and "--resume" not in format_summary(summary_of(read))
        other.communicate()
    with run.locked():  # a tuner that failed writes its last page while it has the lock
        assert f"tune --resume {run.path}" in parts_of(RunData.of(run))["verdict"]
    assert (
        f"tune --resume {run.path}"
        in parts_of(RunIndex(tmp_path).run_data(run.path.name))["verdict"]
    )


def test_trials_are_read_again_when_the_file_is_another(tmp_path):
    run = made_run(tmp_path, trials(5))
    run_index = RunIndex(tmp_path)
    assert len(run_index.run_data(run.path.name).trials) == 5
    other = made_run(tmp_path / "other", trials(2))
    os.replace(other.path / "trials.jsonl", run.path / "trials.jsonl")
    assert len(run_index.run_data(run.path.name).trials) == 2
    assert run_index.runs()[0].num_trials == 2


def test_an_unreadable_run_is_listed_with_the_reason(tmp_path):
    run = made_run(tmp_path, trials(3))
    (run.path / "trials.jsonl").write_text("nonsense\n")
    (shown,) = RunIndex(tmp_path).runs()
    assert shown.state == "unreadable" and "trials.jsonl:1: not a trial" in shown.problem


@pytest.mark.parametrize(
    "name", ["..", ".", "", "../x", "a/b", "/etc", "a\\b", "x\n", "x\0", "%2e%2e", "nowhere"]
)
def test_a_name_that_is_no_run_of_the_folder_is_refused(tmp_path, name):
    made_run(tmp_path / "runs", trials(2))
    with pytest.raises(InputError, match="no run of that name"):
        RunIndex(tmp_path / "runs").run(name)


def test_links_that_lead_out_of_a_run_are_never_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "environment.json").write_text(json.dumps(facts(title="SECRET")))
    (secret / "source.cu").write_text("SECRET")
    runs = tmp_path / "runs"
    made = [made_run(runs, [trial(n, 1500.0) for n in range(3)]) for _ in range(4)]
    (runs / "linked").symlink_to(made_run(tmp_path / "elsewhere", trials(3)).path)
    (made[0].path / "environment.json").unlink()
    (made[0].path / "environment.json").symlink_to(secret / "environment.json")
    keep = made[1].path / "candidates" / f"{0:016x}"
    shutil.rmtree(keep)
    keep.symlink_to(secret)
    (made[2].path / "candidates" / f"{0:016x}" / "source.cu").unlink()
    (made[2].path / "candidates" / f"{0:016x}" / "source.cu").symlink_to(secret / "source.cu")
    run_index = RunIndex(runs)
    states = {shown.name: (shown.state, shown.title) for shown in run_index.runs()}
    assert "linked" not in states
    assert "SECRET" not in str(states)
    assert states[made[0].path.name][0] == "unreadable"
    with pytest.raises(InputError, match=r"environment\.json"):
        run_index.run_data(made[0].path.name)
    sources = []
    for run in made[1:]:
        found = run_index.run_data(run.path.name)
        sources.append(found.source(found.trials[0])[0])
        assert "SECRET" not in page(found)
    assert sources == ["", "", "source.cu"]


def test_a_folder_of_runs_reached_through_a_link_is_one(tmp_path):
    run = made_run(tmp_path / "runs", trials(2))
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert RunIndex(tmp_path / "link").run(run.path.name).path == tmp_path / "link" / run.path.name


def test_a_folder_that_is_not_there_holds_no_runs(tmp_path: Path):
    assert RunIndex(tmp_path / "nowhere").runs() == []


def test_ages_are_reported_in_their_largest_unit():
    ages = [age_words(s) for s in (0, 59.9, 61, 7200, 86400 * 3)]
    assert ages == ["0 s", "59 s", "1 min", "2 h", "3 d"]


# ---- what is no whole run -------------------------------------------------------------------


def test_what_is_left_of_a_run_is_listed_with_what_is_missing(tmp_path):
    (tmp_path / "20260101-120000-empty-cpu").mkdir()
    part = made_run(tmp_path, trials(3))
    (part.path / "environment.json").unlink()
    broken = made_run(tmp_path, trials(3))
    (broken.path / "environment.json").write_text("{half")
    (tmp_path / "notes about my runs").mkdir()
    (tmp_path / "figures").mkdir()  # is not called like a run
    run_index = RunIndex(tmp_path)
    found = {shown.name: shown for shown in run_index.runs()}
    assert {shown.state for shown in found.values()} == {"unreadable"}
    assert found.keys() == {"20260101-120000-empty-cpu", part.path.name, broken.path.name}
    assert found["20260101-120000-empty-cpu"].problem == (
        "the folder is empty: nothing of a run is in it"
    )
    assert found[part.path.name].problem == (
        "the folder is no whole run: environment.json is missing beside candidates, config.yaml, "
        "export, trials.jsonl"
    )
    assert "environment.json: not JSON" in found[broken.path.name].problem
    assert run_index.names() == [broken.path.name]  # of which something can be asked


def test_a_result_without_its_trials_is_said(tmp_path):
    made = trials(3)
    run = made_run(tmp_path, made, raced_result(made, 2.0))
    (run.path / "trials.jsonl").unlink()
    (shown,) = RunIndex(tmp_path).runs()
    assert (shown.state, shown.num_trials) == ("finished", 0)
    assert shown.problem == "its trials are gone: trials.jsonl is missing or empty"
    texts = [advice.text for advice in summary_of(RunData.of(run)).warnings]
    assert "there is a result, but no trial: trials.jsonl is missing or empty" in texts


def test_a_speedup_that_is_not_distinguished_from_one_is_listed_as_that(tmp_path):
    """Else a ratio of processes that scatter reads like a gain."""
    made = trials(3)
    made_run(tmp_path, made, raced_result(made, 2.0))
    bursts = [[[1500.0, 1501.0, 1502.0]] * 3 for _ in range(3)]
    baseline = [
        [[us * f for us in b] for b in rounds]
        for f, rounds in zip((0.6, 2, 4), bursts, strict=False)
    ]
    scattered = finalist(made[0].number, accepted(), Race([baseline, bursts]), 1)
    made_run(tmp_path, made, replace(raced_result(made, 2.0), exported=scattered))
    sure, open_ = sorted(RunIndex(tmp_path).runs(), key=lambda run: len(run.doubt))
    words = "not distinguished from PyTorch: "
    assert sure.doubt == "" and open_.doubt == f"{words}its processes differ too much for bounds"
    narrow = replace(open_, low=0.9, high=1.5)
    assert narrow.doubt == f"{words}another process would find 0.900x to 1.500x"
    said = tune("runs", tmp_path, cwd=tmp_path).out
    assert " (1.687x)" in said and " 2.00x" in said
    assert "not distinguished from PyTorch" in " ".join(said.split())


def test_a_run_without_its_config_is_listed_and_says_so_and_a_command_names_what_is_missing(
    tmp_path,
):
    made = trials(3)
    run = made_run(tmp_path, made, raced_result(made, 2.0))
    run.config_path.unlink()
    (shown,) = RunIndex(tmp_path).runs()
    assert (shown.state, shown.speedup) == ("finished", pytest.approx(2.0))
    assert shown.problem == (
        "config.yaml is missing: it can be neither resumed nor exported again"
    )
    done = tune("report", run.path, cwd=tmp_path)
    assert done.code == 3 and "not a run directory (no config.yaml)\n" in done.err


def test_a_run_is_as_old_as_its_start_and_not_as_its_files(tmp_path):
    a = made_run(tmp_path, trials(3), environment={"started_at": "2026-01-02T03:04:05+00:00"})
    b = made_run(tmp_path, trials(3), environment={"started_at": "yesterday"})
    (tmp_path / "20260101-000000-empty-cpu").mkdir()
    ages = {shown.name: shown.age_s for shown in RunIndex(tmp_path).runs()}
    started = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert ages[a.path.name] == pytest.approx(
        (datetime.now(UTC) - started).total_seconds(), abs=60
    )
    assert ages[b.path.name] < 3600  # by its name
    assert ages["20260101-000000-empty-cpu"] > ages[a.path.name]


def test_the_dashboard_knows_the_module_of_a_run_as_the_report_does(tmp_path):
    run = made_run(tmp_path, trials(3))
    gain = Gain("NVIDIA H200", True, 1, 1, 1, None)
    record = ModuleRecord(Outline((), (), (), (), 1, 1, 1, True), gain)
    (run.path / MODULE_FILE).write_text(to_json(record))
    assert RunIndex(tmp_path).run_data(run.path.name).module == RunData.of(run).module == record


# ---- notes ----------------------------------------------------------------------------------


def test_a_note_is_a_file_of_the_run_with_tags_in_it(tmp_path):
    run = made_run(tmp_path, trials(3))
    run_index = RunIndex(tmp_path)
    assert [(s.note, s.tags) for s in run_index.runs()] == [("", ())]
    before = run_index.stamp(run.path.name)
    text = "#flagship before the fix (#12 is no tag here); see #h200-b. a#b"
    assert write_note(run.path, f"  {text}\n\n").tags == ("flagship", "h200-b")
    assert (run.path / "notes.txt").read_text() == f"{text}\n"
    (shown,) = run_index.runs()
    assert (shown.note, shown.tags) == (text, ("flagship", "h200-b"))
    assert run_index.stamp(run.path.name) != before  # the list and the page change
    assert text in tune("runs", tmp_path, cwd=tmp_path).out.replace("\n  ", " ")
    assert write_note(run.path, " ") == Note() and not (run.path / "notes.txt").exists()
    with pytest.raises(InputError, match="at most 4,000 characters, got 4,001"):
        write_note(run.path, "x" * 4001)


def test_a_note_that_is_a_link_is_not_read(tmp_path):
    run = made_run(tmp_path / "runs", trials(3))
    (tmp_path / "secret").write_text("SECRET")
    (run.path / "notes.txt").symlink_to(tmp_path / "secret")
    assert note_of(run.path) == Note()
    (shown,) = RunIndex(tmp_path / "runs").runs()
    assert "SECRET" not in shown.note and shown.state == "unreadable"
