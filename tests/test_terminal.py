"""The live view of a terminal, as it is drawn."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from command_line import environment, tune
from made_runs import made_run, trials
from rich.console import Console
from rich.live import Live
from test_any_module import text_of
from tiny_operator import NAME, config_text, write_family

from tuner.capture.modules.rows_text import ROWS_NAME
from tuner.command.terminal import _where, watching
from tuner.command.views import Plain, Screen
from tuner.config.run_config import load_config
from tuner.review.run_data import RunData
from tuner.review.summary import format_summary, summary_of
from tuner.run import Run
from tuner.session.tuning import derive_operator, plan
from tuner.trial import Check, Finalist, Interval, Measurement


def drawn(screen: Screen) -> list[str]:
    """Return the view's lines on a terminal of 80 columns without colour."""
    file = io.StringIO()
    Console(file=file, width=80, no_color=True, force_terminal=False).print(
        screen.live.get_renderable()
    )
    return file.getvalue().splitlines()


def screen_of(run: Run) -> Screen:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    screen = Screen(Live(console=console, auto_refresh=False))
    screen.on_run(run, Measurement(3000.0, 0.002, (3000.0,), True), [])
    return screen


def test_the_live_view_says_what_the_summary_says_in_20_lines_of_80_columns(tmp_path):
    made = trials(60)
    run = made_run(tmp_path, made)
    screen = screen_of(run)
    screen.on_stage("preparing " * 20)
    for number, trial in enumerate(made, 1):
        screen.on_trial(trial, 3)
        lines = drawn(screen)
        assert len(lines) <= 20 and max(map(len, lines)) <= 80
        facts = RunData(run, run.environment(), made[:number], None, "")
        reported = format_summary(summary_of(facts)).splitlines()
        shared = [line for line in reported if not line.startswith(("warning", "again"))]
        assert lines[1] == reported[1] and lines[1].startswith("verdict")
        assert set(lines[:6]) <= set(shared)
    assert f"#{made[-1].number}" in "\n".join(lines)
    assert "1.992x PyTorch's speed so far, not verified" in lines[1]


def test_the_live_view_before_the_first_trial_is_the_stage(tmp_path):
    screen = screen_of(made_run(tmp_path, []))
    screen.on_stage("timing the baseline")
    assert drawn(screen)[-1] == "timing the baseline"


def test_the_live_view_says_what_is_left_to_gain_until_it_is_known_better(tmp_path):
    made = trials(30)
    screen = screen_of(made_run(tmp_path, made))
    for trial in made[:20]:
        screen.on_trial(trial, 3)
    screen.on_remaining(0.0314, {0.01: 0.42, 0.05: 0.876})
    words = "remaining 3.1 % estimated; chance that the best is within 1 %: 42 %, 5 %: 88 %"
    assert drawn(screen)[-1] == words
    for trial in made[20:]:
        screen.on_trial(trial, 3)
    assert drawn(screen)[-1] == words
    screen.on_remaining(0.002, {0.02: 0.951})
    assert (
        drawn(screen)[-1] == "remaining 0.2 % estimated; chance that the best is within 2 %: 95 %"
    )
    assert len(drawn(screen)) <= 20


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((2.0, 1.9, 2.1), "2.000x [1.900, 2.100]: faster"),
        ((1.01, 0.98, 1.04), "1.010x [0.980, 1.040]: no difference"),
        (
            (2.9, 0.3, 4.5),
            "2.900x [0.300, 4.500]: not distinguished from PyTorch, its processes",
        ),
        (
            (2.9, 0.1, 99.0),
            "2.900x [3 processes differ too much for bounds]: not distinguished from PyTorch",
        ),
    ],
)
def test_a_race_that_tells_nothing_is_not_called_equal(interval, said):
    out = io.StringIO()
    found = Interval(*interval, 0.95, 3)
    entry = Finalist(7, Check(True, "float32"), interval=found, latency_us=12.0)
    Plain(Console(file=out, width=200)).on_finalist(entry)
    assert said in out.getvalue()


def test_a_dry_run_gives_its_counts_as_json_alone(tmp_path):
    family = write_family(tmp_path / "family")
    config = tmp_path / "c.yaml"
    config.write_text(
        config_text(
            family,
            space={"mode": ["ok", "slow"], "step": [1, 2, 4]},
            constraints=[{"expr": "step < 4", "why": "steps are small"}],
        )
    )
    said = tune("--config", config, "--dry-run", "--json", cwd=tmp_path)
    data = json.loads(said.out)
    assert (said.code, data["num_feasible"], data["num_cartesian"]) == (0, 4, 6)
    assert data["num_feasible_by_template"] == {"sweep": 4}
    assert [(why.split(" (")[0], n) for why, n in data["num_rejected_by_reason"].items()] == [
        ("steps are small", 2)
    ]
    assert data["example"]["params"] == {"template": "sweep", "mode": "ok", "step": 1}


def test_a_plan_says_at_which_sizes_and_steps_its_kernels_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "gate.py"
    path.write_text(text_of("rms_norm_gate"))
    planned = plan(load_config(derive_operator(path).config, {"device": "cpu"}))
    assert _where(planned) == ["a step of training takes kernels of its own for gradients"]
    text = planned.family.model_new
    fixed = re.sub("^_STEP_ROWS = .*$", "_STEP_ROWS = 16", text, flags=re.MULTILINE)
    fixed = fixed.replace(ROWS_NAME, "_OTHER_NAME")
    family = replace(planned.family, model_new=fixed)
    assert _where(replace(planned, family=family)) == [
        "the kernels are for these sizes alone: at others it takes PyTorch's own operations",
        "a step of training takes kernels of its own for gradients, at 16 rows alone",
    ]


@pytest.mark.parametrize("is_json", [False, True])
def test_what_a_command_shows_second_counts_its_seconds_on(is_json):
    with watching(is_json=is_json) as first:
        first.start_s -= 100.0
    with watching(is_json=is_json, since=first) as view:
        assert view.start_s == first.start_s
    with watching(is_json=is_json) as other:
        assert other.start_s > first.start_s + 100.0


def test_verdicts_and_findings_are_json_alone(tmp_path):
    family = write_family(tmp_path / "family")
    reference = family / NAME / "reference.py"
    file = tmp_path / "wrong.py"
    file.write_text(
        "import torch.nn as nn\nclass ModelNew(nn.Module):\n"
        "    def forward(self, x):\n        return x + x + 1\n"
    )
    options = ["--reference", reference, "--device", "cpu", "--json"]
    said = tune("verify", file, *options, cwd=tmp_path)
    wrong = json.loads(said.out)
    assert (said.code, wrong["is_accepted"], wrong["accuracy"]) == (1, False, "float32")
    assert wrong["reason"].startswith("as given: ")
    assert wrong["probes"][0]["max_abs"] == pytest.approx(1.0, rel=1e-3)
    assert wrong["probes"][0]["baseline_max_abs"] < 1e-5

    said = tune("doctor", "--json", cwd=tmp_path)
    findings = {finding["name"]: finding for finding in json.loads(said.out)}
    assert said.code == 0 and findings["C++ compiler"]["is_ok"]
    assert findings["C++ compiler"]["detail"] and findings["Python headers"]["is_ok"]


STUBBORN = """
import sys, time
import tuner.command.terminal as room

room.GRACE_S = 0.5
with room.interruptible():
    while True:
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:  # as in a finaliser, where no exception can pass
            print("swallowed", flush=True)
"""


def test_a_second_ctrl_c_that_is_swallowed_ends_the_process_all_the_same():
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert b"Ctrl-C again stops at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"swallowed\n"
        assert process.wait(60) == 130
        assert process.stderr.read() == b"interrupted\n"
