"""Whole runs on the CPU: from YAML to a verified file, through kills, locks and Ctrl-C.

One run's life serves most tests: killed in its search, resumed and interrupted, resumed again.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import optuna
import psutil
import pytest
from command_line import (
    Said,
    all_children,
    are_gone,
    environment,
    started,
    tune,
    tune_until,
    wait_for,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from tiny_operator import BAD, NAME, TEMPLATE, config_text, write_family

import tuner
from tuner.environment import Environment
from tuner.errors import RunLockedError
from tuner.evaluate import process as process_room, runner as runner_room
from tuner.evaluate.runner import Runner
from tuner.export.certificate import code_sha256, read_certificate
from tuner.kernel.builder import Toolchain
from tuner.review.summary import format_summary, summary
from tuner.run import Run, create_run, open_run
from tuner.search.recorded import read_recording
from tuner.session import session as session_room
from tuner.trial import Build, Result, Status, Trial, to_json

# The life that most tests look at tunes three times: 160 s on two cores, 270 s on busy ones. The
# limit ends what hangs; whether a machine is slow is not asked.
pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("few")]

# Fast to compile, and of four machine codes: salt stands in a comment alone. In the order of the
# grid; the first trial is the default, ok.
MODES = ["ok", "prints", *BAD]
SPACE = {"mode": MODES, "salt": [0, 1]}
RULE = {"expr": "salt == 0 or mode in ['ok', 'wrong']", "why": "one salt is enough"}
NUM_FEASIBLE = len(MODES) + 2


def whole_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def only_run(folder: Path) -> Run:
    (path,) = (folder / "runs").iterdir()
    return open_run(path)


# ---- a run's life ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """What was seen of a run that was killed, resumed, interrupted by Ctrl-C and resumed again."""

    folder: Path
    run: Run
    locked: Said  # a second tuner while the first one searched
    num_workers: int  # of the tuner that was killed; `are_gone` was waited for
    killed: tuple[Trial, ...]  # what was on disk when it was killed
    interrupted: Said
    first: tuple[Trial, ...]  # what was on disk then
    first_result: Result | None
    extended: Said


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("life")
    family = write_family(folder / "families")
    text = config_text(family, space=SPACE, constraints=[RULE], search={"trials": 9})
    (folder / "config.yaml").write_text(text)

    # Each search waits at a trial until it was killed or interrupted, however late we come to it.
    hold = folder / "hold"
    hold.touch()
    waits = {"HOLD": str(hold), "HOLD_FROM": "3"}
    with running("--config", "config.yaml", cwd=folder, env=waits) as process:
        wait_for(lambda: (folder / "runs").exists() and any((folder / "runs").iterdir()))
        run = Run(next((folder / "runs").iterdir()))
        trials = run.path / "trials.jsonl"
        wait_for(lambda: whole_lines(trials) >= 1)
        locked = tune("--resume", run.path, cwd=folder)
        wait_for(lambda: whole_lines(trials) >= 3)
        # None for a moment where one is replaced, or between the search and the verified.
        wait_for(lambda: any(map(is_worker, all_children(process))))
        children = all_children(process)
        workers = [child for child in children if is_worker(child)]
    wait_for(lambda: are_gone(workers))
    kill_all(children)  # compilers may outlive it: see the test of them
    killed = tuple(run.trials())
    with trials.open("ab") as file:
        file.write(b'{"number": 99, "templ')  # what a kill in the middle of a write leaves

    waits["HOLD_FROM"] = str(len(killed) + 1)
    interrupted = tune_until(
        lambda: whole_lines(trials) > len(killed),
        *("--resume", run.path),
        cwd=folder,
        env=waits,
        then=hold.unlink,
    )
    first, first_result = tuple(run.trials()), run.result()

    options = ["--trials", 50, "--json"]  # progress is on stderr then
    extended = tune("--resume", run.path, *options, cwd=folder)
    return Life(
        folder, run, locked, len(workers), killed, interrupted, first, first_result, extended
    )


@contextmanager
def running(
    *args: object, cwd: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A tuner that takes a hang for one soon, and is killed at the latest at the end."""
    process = started(*args, cwd=cwd, env=env, is_impatient=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_second_tuner_on_a_run_is_refused(life):
    assert life.locked.code == 3
    assert "another process works on this run" in life.locked.err
    assert "next: wait for it, or stop it" in life.locked.err


def test_a_run_that_is_locked_is_refused_before_anything_is_planned(tmp_path):
    run = create_run(tmp_path, NAME, "cpu", "no config at all", Environment())
    with run.locked(), pytest.raises(RunLockedError, match="another process works on this run"):
        tuner.resume(run.path)


def is_worker(process: psutil.Process) -> bool:
    try:
        return any("serve_forks" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_kill_while_builders_pause_leaves_no_compiler(tmp_path):
    # Compilers work for seconds and a timed call takes 20 ms: pauses that nobody can miss.
    heavy = "#include <regex>\ntemplate class std::basic_regex<char>;\n"
    heavy = "{% if step > 1 %}\n" + heavy + "{% endif %}\n"
    template = TEMPLATE.replace("// salt {{ salt }}", heavy + "// salt {{ salt }}")
    template = template.replace("const int64_t n =", "usleep(20000);\n  const int64_t n =")
    family = write_family(tmp_path / "families", template)
    space = {"step": list(range(1, 13))}
    (tmp_path / "config.yaml").write_text(config_text(family, space=space))
    # Without a check of the defaults, whose processes take longer than all the rest.
    with running("--config", "config.yaml", "--record", cwd=tmp_path) as process:
        wait_for(lambda: process.poll() is not None or is_any_stopped(all_children(process)))
        assert process.poll() is None, "no compiler was stopped before the run ended"
        children = all_children(process)
    try:
        wait_for(lambda: are_gone(children))
    finally:
        kill_all(children)


def is_any_stopped(processes: Sequence[psutil.Process]) -> bool:
    """Whether one of them is stopped, whichever have ended meanwhile."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                return True
    return False


def test_a_search_writes_down_what_it_expects_of_the_rest(tmp_path):
    family = write_family(tmp_path / "families")
    # Of four machine codes: of the others only the compilation is paid for.
    space = {"step": [1, 2, 3, 4], "salt": list(range(12))}
    search = {"sampler": "surrogate", "trials": 24}
    (tmp_path / "config.yaml").write_text(config_text(family, space=space, search=search))
    config = tuner.load_config(tmp_path / "config.yaml")
    run = tuner.tune(config, runs_dir=tmp_path / "runs", verifies=False)
    said = run.outlooks()[0]
    assert said.number % 10 == 0 and 20 <= said.number <= len(run.trials())
    assert said.improvement >= 0 and said.within.keys() == {"0.01", "0.05"}
    assert 0 <= said.within["0.01"] <= said.within["0.05"] <= 1


def num_threads() -> int:
    """Count our threads, without those that wait for fork servers, which serve the next run."""
    return sum(thread.name != "fork server" for thread in threading.enumerate())


def test_accidents_are_reported_in_order_where_the_device_works_while_the_search_thinks(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Runner, "is_apart", True)
    screened = Runner._screened

    def impatient(self, payload):  # with what hangs, and with nothing else
        mode = json.loads(payload["candidate"])["params"]["mode"]
        limit_s = 2.0 if mode == "hang" else 600.0
        monkeypatch.setattr(runner_room, "SCREEN_TIMEOUT_S", limit_s)
        return screened(self, payload)

    monkeypatch.setattr(Runner, "_screened", impatient)
    family = write_family(tmp_path / "families")
    config = config_text(family, space={"mode": MODES}, search={"sampler": "surrogate"})
    (tmp_path / "config.yaml").write_text(config)
    start, workers = process_room.start_process, list[psutil.Process]()

    def known(*args, **kwargs):
        process = start(*args, **kwargs)
        workers.append(psutil.Process(process.pid))
        return process

    monkeypatch.setattr(process_room, "start_process", known)
    threads = num_threads()
    run = tuner.tune(
        tuner.load_config(tmp_path / "config.yaml"), runs_dir=tmp_path / "runs", verifies=False
    )
    assert [t.number for t in run.trials()] == list(range(len(MODES)))
    found = {t.params["mode"]: (t.outcome.status, t.outcome.reason) for t in run.trials()}
    for mode, (status, reason) in BAD.items():
        assert found[mode][0] == status and reason in found[mode][1]
    assert found["ok"][0] is found["prints"][0] is Status.CORRECT
    elapsed = [t.elapsed_s for t in run.trials()]
    assert elapsed == sorted(elapsed)
    wait_for(lambda: num_threads() <= threads)
    assert len(workers) > 1 and not any(map(psutil.Process.is_running, workers))


def test_a_kill_loses_no_outcome_and_leaves_no_worker(life):
    assert life.num_workers >= 1 and len(life.killed) >= 3
    assert life.first[: len(life.killed)] == life.killed


def test_ctrl_c_ends_the_search_and_verifies_what_was_found(life):
    assert life.interrupted.code == 130
    assert "stopping: what is in flight is finished" in life.interrupted.err
    assert life.interrupted.err.endswith(f"interrupted\n  next: tune --resume {life.run.path}\n")
    assert "Traceback" not in life.interrupted.err
    assert f"stopped by the user after {len(life.first)} trials" in life.interrupted.out
    assert "verdict" in life.interrupted.out
    assert len(life.killed) < len(life.first) < NUM_FEASIBLE
    assert life.first_result is not None and life.first_result.exported.check.is_accepted


def test_a_resumed_run_goes_on_counting_and_repeats_nothing(life):
    assert f"resumed after {len(life.killed)} trials" in life.interrupted.out
    assert f"resumed after {len(life.first)} trials" in life.extended.err
    assert life.extended.code == 0, life.extended
    assert f"all {NUM_FEASIBLE} feasible configurations were tried" in life.extended.err
    trials = life.run.trials()
    assert tuple(trials[: len(life.first)]) == life.first
    assert [t.number for t in trials] == list(range(NUM_FEASIBLE))
    assert len({tuple(t.params.items()) for t in trials}) == NUM_FEASIBLE


def test_every_line_of_a_run_is_one_whole_outcome(life):
    lines = (life.run.path / "trials.jsonl").read_text().splitlines()
    assert len(lines) == NUM_FEASIBLE
    for number, line in enumerate(lines):
        data = json.loads(line)
        assert data["number"] == number and data["outcome"]["status"] in set(Status)


def test_each_accident_is_its_own_outcome_and_the_run_goes_on(life):
    outcomes = {t.params["mode"]: t.outcome for t in life.run.trials() if t.params["salt"] == 0}
    assert outcomes.keys() == set(MODES)
    for mode, (status, reason) in BAD.items():
        assert outcomes[mode].status == status, (mode, outcomes[mode].reason)
        assert reason in outcomes[mode].reason
    assert outcomes["ok"].status is outcomes["prints"].status is Status.CORRECT
    assert (
        "printed by a candidate"
        not in life.interrupted.out + life.extended.out + life.extended.err
    )


def test_the_same_machine_code_is_not_measured_again(life):
    trials = {(t.params["mode"], t.params["salt"]): t for t in life.run.trials()}
    for mode in ("ok", "wrong"):
        one, other = trials[mode, 0], trials[mode, 1]
        assert one.outcome.build.binary_key == other.outcome.build.binary_key
        if other.outcome.same_as is not None:  # None when a kill stood between the two
            assert other.outcome.same_as == one.number
            assert other.outcome.measurement == one.outcome.measurement
    assert any(t.outcome.same_as is not None for t in trials.values())
    assert "(the machine code of #" in life.extended.err


def test_a_finished_run_holds_what_the_architecture_says(life):
    path = life.run.path
    names = {entry.name for entry in path.iterdir()}
    assert names == {
        "config.yaml", "environment.json", "trials.jsonl", "study.journal", "candidates",
        "export", "result.json", "results.json", "report.html", "lock", "checks.jsonl",
        "progress.json", "kernels.json", "log.txt",
    }  # fmt: skip
    assert (path / "config.yaml").read_text() == (life.folder / "config.yaml").read_text()
    for trial in life.run.trials():
        kept = path / "candidates" / trial.candidate_key
        assert {entry.name for entry in kept.iterdir()} == {"source.cpp", "log.txt"}
    ours, t4 = read_recording(path), read_recording(path / "results.json")
    assert t4.keys == ours.keys and t4.statuses == ours.statuses and t4.device == ours.device
    about = life.run.environment()
    assert about.op == "doubled_values" and about.sizes == {"rows": 64, "cols": 100}
    assert about.command.startswith("tune --config") and about.toolchain
    assert about.num_feasible == NUM_FEASIBLE and about.baseline_us > 0
    assert about.overrides == {"trials": "50"}  # the next --resume goes by it, too


def test_the_result_names_a_verified_winner(life):
    result = life.run.result()
    winner = life.run.trials()[result.winner]
    assert winner.outcome.status is Status.CORRECT and winner.outcome.same_as is None
    assert [entry.trial for entry in result.finalists] == [result.winner] == list(result.ties)
    exported = result.exported
    assert exported.check.is_accepted and exported.check.is_thorough
    assert len(exported.check.probes) > 20
    assert exported.interval.low <= exported.interval.speedup <= exported.interval.high
    assert exported.interval.num_processes == 2
    assert Path(result.export_path) == life.run.export_path


def test_the_export_is_certified_with_what_the_result_says(life):
    exported, about = life.run.result().exported, life.run.environment()
    certificate = read_certificate(life.run.export_path)
    assert certificate.interval == exported.interval and certificate.accuracy == "float32"
    assert certificate.probes == exported.check.probes
    assert certificate.code_sha256 == code_sha256(life.run.export_path.read_text())
    assert certificate.versions.items() >= about.machine.items()
    baseline, own = certificate.samples_us
    assert [len(rounds) for rounds in baseline] == [len(rounds) for rounds in own]
    assert len(own) == exported.interval.num_processes == 2
    assert statistics.median(us for rounds in own for us in rounds) == exported.latency_us
    assert life.run.path.name in certificate.origin


def test_the_journal_agrees_with_the_trials_and_is_optunas_own(life):
    storage = JournalStorage(JournalFileBackend(str(life.run.journal_path)))
    study = optuna.load_study(study_name="tune", storage=storage)
    finished = [t for t in study.trials if t.state.is_finished()]
    assert [t.user_attrs["status"] for t in finished] == [
        t.outcome.status.value for t in life.run.trials()
    ]
    assert len(finished) == len(study.trials)


def test_the_exported_file_is_right_in_a_process_that_has_no_tuner(life, tmp_path):
    code = """
import importlib.util, sys, torch
sys.path = [p for p in sys.path if p]
assert importlib.util.find_spec("tiny_operator") is None
spec = importlib.util.spec_from_file_location("exported", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
model = module.ModelNew(*module.get_init_inputs())
(x,) = module.get_inputs()
assert x.shape == (64, 100)
assert torch.equal(model(x), x + x)
y = torch.randn(7, 100, requires_grad=True)
model(y).sum().backward()
assert torch.equal(y.grad, torch.full_like(y, 2.0))
assert not any(name.split(".")[0] == "tuner" for name in sys.modules)
print("right")
"""
    env = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, life.run.export_path],
        cwd=tmp_path,
        env={**env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and done.stdout == "right\n", done


def test_the_summary_is_printed_and_can_be_printed_again(life):
    for words in ("verdict", "file:   ", "report: ", "run:    "):
        assert words in life.interrupted.out
    life.run.report_path.unlink()
    again = tune("report", life.run.path, cwd=life.folder)
    assert again.code == 0 and life.run.report_path.stat().st_size > 100_000
    assert again.out == (
        f"{format_summary(summary(life.run))}\n"
        f"file:   {life.run.export_path}\n"
        f"report: {life.run.report_path}\nrun:    {life.run.path}\n"
    )


def test_the_summary_as_json_is_alone_on_stdout(life):
    reported, result = json.loads(life.extended.out), life.run.result()
    assert result is not None and result.exported is not None
    assert reported["interval"] == json.loads(to_json(result.exported.least))
    assert (
        reported["kind"] == result.exported.verdict and reported["best"]["number"] == result.winner
    )
    assert reported["num_trials"] == sum(reported["counts"].values()) == NUM_FEASIBLE
    assert reported["counts"]["compile"] == 1 and reported["path"] == str(life.run.path)


def test_the_winner_can_be_exported_again_to_another_place(life, tmp_path):
    said = tune("export", life.run.path, "-o", "mine.py", "--json", cwd=tmp_path)
    assert said.code == 0, said
    reported = json.loads(said.out)
    check = reported["check"]
    assert (
        reported["path"] == "mine.py" and check["is_accepted"] and check["accuracy"] == "float32"
    )
    assert [probe["is_accepted"] for probe in check["probes"]] == [True] * len(check["probes"])
    assert "speed-up over PyTorch eager" in (tmp_path / "mine.py").read_text()


def test_another_toolchain_is_refused_unless_asked(life, tmp_path):
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\necho 'c++ (another) 1.2.3'\n")
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CXX": ""}
    said = tune("--resume", life.run.path, cwd=tmp_path, env=env)
    assert said.code == 3 and "this is another machine than the run's" in said.err
    assert "c++ (another) 1.2.3" in said.err and "--any-machine" in said.err


# ---- Ctrl-C ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overlaps", [False, True])
def test_ctrl_c_twice_ends_at_once_and_leaves_no_process(tmp_path, monkeypatch, overlaps):
    options = []
    if overlaps:
        monkeypatch.setenv("OVERLAPS", "1")
        options = ["--record"]  # the other one has all processes, those of a check included
    family = write_family(tmp_path / "families")
    space = {"mode": ["ok", "hang"], "step": list(range(1, 30))}
    (tmp_path / "config.yaml").write_text(config_text(family, space=space, search={"trials": 58}))
    with running("--config", "config.yaml", *options, cwd=tmp_path) as process:
        wait_for(lambda: b" #0 " in (tmp_path / "out.txt").read_bytes())
        children = all_children(process)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: b"Ctrl-C again" in (tmp_path / "err.txt").read_bytes())
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 130  # 3 s at most on cores that others kept busy
    assert children
    wait_for(lambda: are_gone(children))
    err = (tmp_path / "err.txt").read_text()
    run = only_run(tmp_path)
    assert "Traceback" not in err and "interrupted\n  next: tune --resume" in err
    assert run.trials() and run.result() is None
    with run.locked():  # its lock went with it
        assert not [p for p in psutil.process_iter() if is_of(p, tmp_path)]


def is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


# ---- a real operator, from Python -----------------------------------------------------------

LAYER_NORM = """
problem:
  op: layer_norm
  sizes: {rows: 64, cols: 96}
device: cpu
space:
  template: [cpu]
  stats: [two_pass, per_thread]
search: {trials: 2, seed: 3, first: [{stats: per_thread}]}
measure: {screen: 5ms, finalists: 20ms, num_finalists: 1, num_processes: 2}
"""


class Notes(tuner.Observer):
    """Writes down what it hears, in order."""

    def __init__(self) -> None:
        self.reported: list[str] = []

    def on_plan(self, planned) -> None:
        self.reported.append(f"plan {planned.space.num_feasible}")

    def on_run(self, run, baseline, trials) -> None:
        self.reported.append(f"run {len(trials)}")

    def on_trial(self, trial, num_building) -> None:
        self.reported.append(f"trial {trial.number}")

    def on_finalist(self, entry) -> None:
        self.reported.append(f"finalist {entry.interval is not None}")


def test_a_notebook_tunes_layer_norm_and_gets_a_run_with_its_result(tmp_path, capfd):
    (tmp_path / "layer_norm.yaml").write_text(LAYER_NORM)
    config = tuner.load_config(tmp_path / "layer_norm.yaml")
    notes = Notes()
    run = tuner.tune(config, runs_dir=tmp_path / "runs", observer=notes)
    assert notes.reported[:4] == ["plan 2", "run 0", "trial 0", "trial 1"]
    # One finalist or both, checked and then raced: how near the two came is the machine's.
    finalists = notes.reported[4:]
    assert set(finalists) == {"finalist False", "finalist True"}
    assert (finalists[0], finalists[-1]) == ("finalist False", "finalist True")
    assert isinstance(run, tuner.Run) and len(run.trials()) == 2
    result = run.result()
    assert result is not None and result.exported is not None
    assert result.exported.check.is_accepted, result.exported.check.reason
    assert result.exported.interval is not None and result.exported.interval.speedup > 0
    assert run.trials()[result.winner].template == "cpu"
    assert [trial.params["stats"] for trial in run.trials()] == ["per_thread", "two_pass"]
    printed = capfd.readouterr()
    assert not printed.out and not printed.err  # the API prints nothing


def test_planning_from_python_counts_and_renders(tmp_path):
    (tmp_path / "layer_norm.yaml").write_text(LAYER_NORM)
    planned = tuner.plan(tuner.load_config(tmp_path / "layer_norm.yaml"))
    assert planned.space.num_feasible == 2 and planned.sizes == {"rows": 64, "cols": 96}
    assert not planned.is_assumed and planned.device.kind == "cpu"
    assert 'extern "C" const char* fused_layer_norm_rows(' in planned.example().source


def test_the_parent_process_never_imports_pytorch(tmp_path):
    (tmp_path / "layer_norm.yaml").write_text(LAYER_NORM)
    code = (
        "import sys, tuner\n"
        "tuner.plan(tuner.load_config('layer_norm.yaml'))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), check=True)


@pytest.mark.parametrize("name", tuner.__all__)
def test_every_name_of_the_api_is_there_and_explained(name):
    found = getattr(tuner, name)
    assert callable(found) and found.__doc__ and name in dir(tuner)
    assert found is getattr(importlib.import_module(found.__module__), name)


def test_a_type_checker_sees_the_same_names_from_the_same_rooms():
    source = Path(tuner.__file__).read_text(encoding="utf-8")
    (block,) = (n for n in ast.parse(source).body if isinstance(n, ast.If))
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == {name: f"tuner.{room}" for name, room in tuner._API.items()}


def test_no_name_of_the_api_is_a_rooms_too():
    # A room, once imported, would take the name's place.
    rooms = {path.stem for path in Path(tuner.__file__).parent.iterdir()}
    assert not rooms & set(tuner.__all__)


def test_a_name_that_is_not_of_the_api_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'tuner' has no attribute 'tun'"):
        tuner.tun  # noqa: B018


def test_wrong_files_are_exceptions_of_one_tree(tmp_path):
    with pytest.raises(tuner.TunerError, match="no such file"):
        tuner.load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(tuner.ConfigError, match="unknown key"):
        tuner.parse_config("problm: {}\n", tmp_path / "c.yaml")
    with pytest.raises(tuner.TunerError, match="not a run directory"):
        tuner.open_run(tmp_path)
    with pytest.raises(tuner.TunerError, match="no such file"):
        tuner.verify(tmp_path / "a.py", tmp_path / "b.py")


def test_a_rejected_export_is_no_success(tmp_path):
    # While searching no PyTorch header is there: what breaks here is the file alone.
    refusal = '#ifdef TORCH_API_INCLUDE_EXTENSION_H\n#include "not_today"\n#endif\n// salt'
    family = write_family(tmp_path / "families", TEMPLATE.replace("// salt", refusal))
    (tmp_path / "config.yaml").write_text(config_text(family))
    said = tune("--config", "config.yaml", cwd=tmp_path)
    assert said.code == 1, said
    assert "no file was accepted: 1 finalist of 1 trials" in said.err
    assert "trial 0 is rejected: importing it: " in said.err
    run = only_run(tmp_path)
    assert [t.outcome.status for t in run.trials()] == [Status.CORRECT]
    (entry,) = run.checks()
    assert run.result() is None and "not_today: No such file" in entry.check.reason
    (rejected,) = (run.path / "export").glob("*.py")
    assert rejected.name == "trial_0.rejected.py"
    assert " ".join(entry.check.reason.split()) in rejected.read_text().split("\n")[0]


def test_a_candidate_whose_keeping_was_killed_is_kept_whole_by_the_next_tuner(tmp_path):
    family = write_family(tmp_path / "families")
    text = config_text(family)
    planned = tuner.plan(tuner.parse_config(text, tmp_path / "config.yaml"))
    run = create_run(tmp_path / "runs", NAME, "cpu", text, Environment())
    toolchain = Toolchain.find("cpu")
    session = session_room.Session(planned, toolchain, run, tuner.Observer(), lambda: False)
    params = {"template": "sweep", "mode": "ok", "salt": 0, "step": 1}
    candidate = planned.family.render(params, planned.device.facts())
    folder = run.path / "candidates" / candidate.key
    folder.mkdir()
    (folder / ".source.cpp.x1y2z3").write_text("half of a sou")
    session._keep(candidate, Build("key", Status.COMPILE, None, "nowhere", error="it said so"))
    assert {entry.name for entry in folder.iterdir()} == {"source.cpp", "log.txt"}
    assert (folder / "source.cpp").read_text() == candidate.source
    assert (folder / "log.txt").read_text() == "it said so"
