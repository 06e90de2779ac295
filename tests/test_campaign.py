"""Campaigns: what they consist of, what run directories say of them, and kills in the middle."""

from __future__ import annotations

import _thread
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from test_fleet import wait_for
from tiny_operator import config_text, write_family

from tuner.command.campaign import Campaign, format_table
from tuner.command.problems import Ended, Problem, append_ended, problems_of, states_of
from tuner.errors import ConfigError, InputError
from tuner.fleet.chosen import Chosen, chosen_devices
from tuner.machine.platforms import VISIBLE
from tuner.run import Run, is_locked

TUNE = "import sys; sys.argv[0] = 'tune'; from tuner.command.cli import main; main()"


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("problem: {op: nothing}\n")


def test_a_folder_and_a_list_name_problems_each_once_under_a_name_of_its_own(tmp_path):
    write(tmp_path, "a.py", "b.yaml", "notes.md", "more/a.py", "more/c.yaml")
    assert [p.name for p in problems_of(tmp_path)] == ["a", "b"]
    (tmp_path / "list.yaml").write_text("problems: [more, a.py, more/c.yaml, a.py]\n")
    found = problems_of(tmp_path / "list.yaml")
    assert [p.name for p in found] == ["more_a", "c", f"{tmp_path.name}_a"]
    assert [p.option for p in found] == ["--module", "--config", "--module"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("problems: [a.py, missing.py]", r"list.yaml:1: problems\[1\]: expected a module, a con"),
        ("problems: a.py", "expected `problems: "),
        ("problems: [a.py]\ntime: 5m", "expected `problems: "),
        ("problems: [", "not YAML"),
    ],
)
def test_a_list_that_is_none_is_refused_with_its_line(tmp_path, text, reason):
    write(tmp_path, "a.py")
    (tmp_path / "list.yaml").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        problems_of(tmp_path / "list.yaml")


def test_a_folder_without_problems_is_refused(tmp_path):
    with pytest.raises(InputError, match="no modules"):
        problems_of(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        problems_of(tmp_path / "elsewhere")


def test_what_ended_without_a_result_is_over_until_its_file_or_its_options_change(tmp_path):
    write(tmp_path, "a.yaml")
    (problem,) = problems_of(tmp_path)
    runs, options = tmp_path / "runs", ["--effort", "quick"]
    digest = problem.digest(options)
    append_ended(runs, Ended(str(problem.path), digest, "refused", "it is wrong"))
    with (runs / "ended.jsonl").open("a") as file:
        file.write('{"problem": "half a li')  # by a campaign that was killed
    assert states_of([problem], runs, options)["a"].reason == "it is wrong"
    assert states_of([problem], runs, [])["a"].status == "waiting"
    problem.path.write_text("problem: {op: another}\n")
    assert states_of([problem], runs, options)["a"].status == "waiting"
    append_ended(runs, Ended(str(problem.path), problem.digest(options), "refused", "still"))
    assert states_of([problem], runs, options)["a"].reason == "still"


def test_problems_are_refused_side_by_side_and_not_asked_again(tmp_path):
    write(tmp_path, "a.yaml", "b.yaml")
    reported: list[str] = []
    campaign = Campaign(
        problems_of(tmp_path), tmp_path / "runs", chosen=Chosen(("cpu:0", "cpu:1"), PARTS),
        on_change=reported.append,
    )  # fmt: skip
    states = campaign.work()
    assert {state.status for state in states.values()} == {"refused"}
    assert all("unknown operator 'nothing'" in state.reason for state in states.values())
    assert reported[:2] == ["a: begins on cpu:0", "b: begins on cpu:1"]
    summary = json.loads((tmp_path / "runs" / "summary.json").read_text())
    assert [row["problem"] for row in summary] == ["a", "b"]
    assert (tmp_path / "runs" / "summary.txt").read_text() == format_table(states) + "\n"
    reported.clear()
    assert campaign.work() == states
    assert reported == ["2 of 2 problems are done already"]


def of_two_jobs(folder: Path) -> tuple[Campaign, list[str], list[str]]:
    """Return a campaign on one device, what it reports, and the problems that have ended."""
    reported: list[str] = []
    ended: list[str] = []
    campaign = Campaign(
        problems_of(folder), folder / "runs", chosen=Chosen(("cpu:0",), PARTS), jobs=2,
        on_change=reported.append,
        on_end=lambda problem, state, seconds: ended.append(problem.name),
    )  # fmt: skip
    return campaign, reported, ended


def test_several_problems_share_a_device_where_that_is_asked_for(tmp_path):
    write(tmp_path, "a.yaml", "b.yaml", "c.yaml")
    campaign, reported, ended = of_two_jobs(tmp_path)
    campaign.work()
    assert reported[:2] == ["a: begins on cpu:0", "b: begins on cpu:0"]
    assert sorted(ended) == ["a", "b", "c"]


@pytest.mark.parametrize("is_large", [False, True])
def test_a_problem_that_lacks_memory_beside_others_begins_again_alone(is_large, tmp_path):
    """A file that asks for more than there is ends so the second time, too."""
    lines = "import os, pathlib, time\n"
    here = "pathlib.Path(__file__).parent"
    meets = f"while not ({here} / '{{}}').exists(): time.sleep(0.01)\n"
    (tmp_path / "a.py").write_text(
        f"{lines}{meets.format('b_is_here')}"
        f"if {is_large} or not ({here} / 'b_is_over').exists():\n"
        f"    ({here} / 'a_is_over').touch()\n"
        "    raise MemoryError(400 * 'a' + ' CUDA out of memory')\n"
        "raise ValueError('there was enough')\n"
    )
    (tmp_path / "b.py").write_text(
        f"{lines}({here} / 'b_is_here').touch()\n{meets.format('a_is_over')}"
        f"time.sleep(0.5)\n({here} / 'b_is_over').touch()\n"
    )
    campaign, reported, ended = of_two_jobs(tmp_path)
    state = campaign.work()["a"]
    assert ended == ["b", "a"] and state.status == "refused"
    assert ("there was enough" in state.reason) is not is_large
    begins = [n for n, words in enumerate(reported) if words == "a: begins on cpu:0"]
    assert len(begins) == 2  # once more, when b is over
    assert begins[1] > next(n for n, words in enumerate(reported) if words.startswith("b: refuse"))


def test_a_file_that_ends_its_process_each_time_failed_and_is_tried_by_the_next_call(tmp_path):
    (tmp_path / "a.py").write_text("import os\nos._exit(7)\n")
    reported: list[str] = []
    campaign = Campaign(problems_of(tmp_path), tmp_path / "runs", on_change=reported.append)
    state = campaign.work()["a"]
    assert state.status == "failed" and "exited with status 7" in state.reason
    reported.clear()
    campaign._num_tried.clear()
    assert campaign.work()["a"].status == "failed" and reported[0] == "a: begins"
    assert "failed" in (tmp_path / "runs" / "summary.txt").read_text()


def test_each_problem_sees_the_gpus_alone_that_it_is_tuned_on(tmp_path, monkeypatch):
    """A process opens all that it sees; the driver of a host lets one do so at a time."""
    for name in ("a", "b"):
        seen = f"raise ValueError(os.environ['{VISIBLE}'])"
        (tmp_path / f"{name}.py").write_text(f"import os\n{seen}\n")
    monkeypatch.setenv(VISIBLE, "7, GPU-9")
    campaign = Campaign(
        problems_of(tmp_path), tmp_path / "runs", chosen=Chosen(("cuda:1", "cuda:2"))
    )
    ended = campaign.work()
    assert "ValueError: GPU-9" in ended["a"].reason and "ValueError: 2" in ended["b"].reason
    both = campaign._started(campaign.problems[0], ("cuda:0", "cuda:1"))
    with open(f"/proc/{both.process.pid}/environ") as file:
        assert f"{VISIBLE}=7,GPU-9" in file.read().split("\0")
    both.process.kill()
    both.process.wait()
    assert both.process.args[-2:] == ["--devices", "0,1"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--jobs", "2"], "--jobs 2 without --devices"),
        (["--jobs", "2", "--devices", "0", "--device", "cpu"], "--jobs 2 on a CPU"),
        (["--limit", "soon"], "--limit: expected a time such as 10m"),
    ],
)
def test_a_campaign_says_what_is_wrong_with_its_options(tmp_path, options, reason):
    write(tmp_path, "a.yaml")
    command = [sys.executable, "-c", TUNE, "campaign", str(tmp_path), *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and reason in ended.stderr.replace("\n", " ")


def test_a_problem_that_takes_too_long_is_ended_and_goes_on_when_asked_again(tmp_path):
    space = {"mode": ["ok"], "salt": list(range(5000))}
    search = {"sampler": "random", "trials": 5000}
    family = write_family(tmp_path / "families")
    path = tmp_path / "one.yaml"
    path.write_text(config_text(family, space=space, search=search))
    problem, runs = Problem("one", path), tmp_path / "runs"
    campaign = Campaign([problem], runs, limit_s=240.0)

    def be_over_once_begun() -> None:
        wait_for(lambda: any(runs.glob("*/trials.jsonl")))
        campaign.limit_s = 0.0

    with ThreadPoolExecutor(1) as pool:
        pool.submit(be_over_once_begun)
        late = campaign.work()["one"]
    assert late.status == "no file in time" and late.run is not None
    reported: list[str] = []
    campaign = Campaign([problem], runs, limit_s=0.1, on_change=reported.append)
    assert campaign.work()["one"].run == late.run
    assert reported[0] == "one: goes on"


@pytest.mark.skipif(torch.cuda.is_available(), reason="all devices are GPUs here")
def test_all_devices_of_a_machine_without_gpus_are_its_cpu(tmp_path):
    assert chosen_devices("all", "auto", {}).names == ("cpu:0",)


PARTS = {"cpu:0": tuple(os.sched_getaffinity(0)), "cpu:1": tuple(os.sched_getaffinity(0))}


@pytest.fixture
def interrupts():
    """Let interrupts reach this process; in the background of a shell it ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_a_killed_campaign_takes_its_searches_with_it_and_they_go_on(tmp_path):
    space = {"mode": ["ok", "raise"], "salt": list(range(50))}
    search = {"sampler": "random", "trials": 100}
    family = write_family(tmp_path / "families")
    (tmp_path / "list.yaml").write_text("problems: [one.yaml]\n")
    (tmp_path / "one.yaml").write_text(config_text(family, space=space, search=search))
    runs = tmp_path / "runs"
    command = [sys.executable, "-c", TUNE, "campaign", str(tmp_path / "list.yaml")]
    process = subprocess.Popen(
        [*command, "--runs-dir", str(runs), "--effort", "quick", "--trials", "100"],
        stdout=subprocess.DEVNULL,
    )

    def num_trials() -> int:
        return sum(path.read_bytes().count(b"\n") for path in runs.glob("*/trials.jsonl"))

    wait_for(lambda: num_trials() >= 1, 200.0)
    (search_process,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait()
    search_process.wait(60.0)
    problems = [Problem("one", tmp_path / "one.yaml")]
    (state,) = states_of(problems, runs, []).values()
    assert state.status == "begun" and state.run is not None

    later_s = time.time() + 100.0
    os.utime(problems[0].path, (later_s, later_s))  # as if it was edited
    assert states_of(problems, runs, [])["one"].status == "waiting"
    os.utime(problems[0].path, (1.0, 1.0))

    reported: list[str] = []
    campaign = Campaign(problems, runs, ["--trials", "100"], on_change=reported.append)

    def interrupt_once_begun() -> None:
        wait_for(lambda: is_locked(Run(state.run)), 200.0)
        _thread.interrupt_main()

    threading.Thread(target=interrupt_once_begun, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        campaign.work()
    assert reported == ["one: goes on"]
    assert [run.name for run in runs.glob("*doubled*")] == [state.run.name], "it is the same run"
