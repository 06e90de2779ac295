"""From ranked trials to verified files: what is said of a file is so, and is never lost.

One small run serves most tests; its operator is that of `benchmarks.kills`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from command_line import Said, tune, tune_until
from test_fleet import wait_for

from benchmarks.kills import (
    CONFIG,
    MODEL_NEW,
    false_claims,
    killed,
    repeated,
    write_problem,
)
from tuner.by_batch import ANY_ROWS, NO_ROWS, AtBatch, ByBatch
from tuner.config.run_config import load_config
from tuner.environment import Environment
from tuner.evaluate import modules
from tuner.evaluate.contender import Contender, Unedited
from tuner.evaluate.verifier import Verifier
from tuner.export.certificate import read_certificate
from tuner.export.module import VERIFIED
from tuner.kernel.toolchain import Toolchain
from tuner.planning.observing import Observer
from tuner.planning.planning import plan
from tuner.planning.schedule import Costs, scheduled
from tuner.review.live import LivePages
from tuner.review.run_index import RunIndex
from tuner.run import Run, create_run, open_run
from tuner.trial import (
    Check,
    Finalist,
    Interval,
    Measurement,
    Outcome,
    Status,
    Trial,
)
from tuner.verification.exporting import ExportCompiler, ExportFile
from tuner.verification.instead import Instead
from tuner.verification.ranking import judged
from tuner.verification.verification import Verification

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("few")]


def first_line(path: Path) -> str:
    return path.read_text().splitlines()[0]


def only_run(folder: Path) -> Run:
    (path,) = (folder / "runs").iterdir()
    return open_run(path)


@dataclass(frozen=True)
class Watched:
    """What the live page showed of a run while it was under way, in order."""

    states: list[str]
    stages: list[tuple[str, str]]
    plans: set[str]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said, Watched]:
    folder = tmp_path_factory.mktemp("verified")
    write_problem(folder)
    run_index, seen = RunIndex(folder / "runs"), Watched([], [], set())
    pages = LivePages(run_index)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(tune, "--config", "config.yaml", "--time", "5m", cwd=folder)
        is_over = False
        while not is_over:
            is_over = ended.done()  # and is looked at once more
            for shown in run_index.runs():
                if shown.state not in seen.states:
                    seen.states.append(shown.state)
                found = pages.waiting(shown.name)
                if found is not None:
                    seen.stages.append((found["phase"], found["stage"]))
                    seen.plans.add(found["plan"].split(":")[0])
            time.sleep(0.05)
    return folder, ended.result(), seen


@pytest.fixture(scope="module")
def verified(watched: tuple[Path, Said, Watched]) -> tuple[Path, Said]:
    return watched[:2]


def test_a_real_run_is_running_then_verifying_then_finished_with_its_counts(watched):
    folder, said, seen = watched
    assert said.code == 0, seen
    (shown,) = RunIndex(folder / "runs").runs()
    assert shown.state == "finished"
    # At its very beginning a run has no tuner yet, or not all of its files.
    states = [state for state in seen.states if state not in ("stopped", "unreadable")]
    assert states == ["running", "verifying", "finished"]
    phases = list(dict.fromkeys(phase for phase, _ in seen.stages))
    assert phases == ["preparing", "searching", "verifying"]
    words = " ".join(dict.fromkeys(stage for _, stage in seen.stages))
    assert "on every probe" in words and "racing" in words
    assert "plan (normal)" in seen.plans


def test_the_plan_is_shown_before_the_search_and_after_it(verified):
    _, said = verified
    plans = [line for line in said.out.splitlines() if "plan (normal): " in line]
    assert len(plans) == 2 and "search" in plans[0] and "search" not in plans[1]
    assert said.code == 0, said.out


def test_the_defaults_are_checked_before_the_search(verified):
    _, said = verified
    lines = said.out.splitlines()
    checked = next(i for i, line in enumerate(lines) if "checking the defaults of sweep" in line)
    assert checked < next(i for i, line in enumerate(lines) if "#0 " in line)


def test_every_finalist_is_a_verified_file_and_the_winner_has_the_name(verified):
    folder, _ = verified
    run = only_run(folder)
    result = run.result()
    assert result is not None and result.exported is not None
    others = {e.trial for e in result.finalists} - {result.winner}
    names = {path.name for path in (run.path / "export").glob("*.py")}
    reasons = [entry.check.reason for entry in run.checks()]
    assert names == {"model_new.py", *(f"trial_{number}.py" for number in others)}, reasons
    for path in (run.path / "export").glob("*.py"):
        assert VERIFIED in first_line(path)
        assert read_certificate(path).interval is not None
    assert result.exported == next(e for e in result.finalists if e.trial == result.winner)
    assert false_claims(run) == [] and repeated(run) == []


def test_progress_and_verdicts_are_files_of_the_run(verified):
    folder, _ = verified
    run = only_run(folder)
    assert json.loads((run.path / "progress.json").read_text())["stage"] == "writing the report"
    seen = Counter(e.trial for e in run.checks())
    assert set(seen.values()) == {2}  # a check and a race


def copied(verified: tuple[Path, Said], tmp_path: Path) -> Run:
    """Return a copy of the run in a folder of its own, whose config and operator are copies."""
    folder = tmp_path / "copy"
    shutil.copytree(verified[0], folder)
    run = only_run(folder)
    replace(run.environment(), config_folder=str(folder)).write(run.path)
    return run


def as_searched(verified: tuple[Path, Said], tmp_path: Path) -> Run:
    """Return a copy of the run as it was when its search had ended."""
    run = copied(verified, tmp_path)
    for name in ("checks.jsonl", "result.json", "results.json", "report.html", "progress.json"):
        (run.path / name).unlink(missing_ok=True)
    for path in (run.path / "export").iterdir():
        path.unlink()
    return run


def test_what_an_earlier_session_verified_is_not_verified_again(verified, tmp_path):
    run = copied(verified, tmp_path)
    before = run.checks()
    (run.path / "result.json").unlink()  # as if it had been killed before the last line
    for path in (run.path / "export").iterdir():
        path.unlink()
    said = tune("--resume", run.path, cwd=tmp_path / "copy")
    assert said.code == 0, said.out
    for words in ("accepted on every probe by an earlier session", "raced by an earlier"):
        assert words in said.out, said.out
    assert run.checks() == before
    assert VERIFIED in first_line(run.export_path)
    assert run.result() is not None


def test_that_memory_ran_out_is_no_verdict_of_an_earlier_session(verified, tmp_path):
    """It may have been other tuners' doing, of which a later session knows nothing."""
    (first, *_) = copied(verified, tmp_path).checks()
    reason = "gradients: OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB."
    lacking = replace(first, check=replace(first.check, is_accepted=False, reason=reason))
    wrong = replace(first, check=replace(first.check, is_accepted=False, reason="y: 2 != 1"))
    assert judged(first.key, [lacking, wrong, first]) == [wrong, first]
    assert judged("another file", [wrong, first]) == []


def test_a_faked_time_is_named_by_the_session_that_resumes(verified, tmp_path):
    run = copied(verified, tmp_path)
    result = run.result()
    assert result is not None
    path = run.path / "trials.jsonl"
    lines = path.read_text().splitlines()
    made = [json.loads(line) for line in lines]
    number = next(e.trial for e in result.finalists if e.trial != result.winner)
    made[number]["outcome"]["measurement"]["latency_us"] = 0.01
    path.write_text("".join(json.dumps(t) + "\n" for t in made))
    said = tune("--resume", run.path, cwd=tmp_path / "copy")
    assert said.code == 0, said.out + said.err
    assert f"trial {number}: set aside, its records disagree: latency 0.01 us" in said.out
    again = run.result()
    assert again is not None and number not in {e.trial for e in again.finalists}
    assert any("set aside" in note for note in again.notes)


def test_a_rejected_export_never_says_that_it_is_verified(verified, tmp_path):
    run = copied(verified, tmp_path)
    (run.path / "checks.jsonl").unlink()
    family = tmp_path / "copy" / "kernels" / "doubled"
    wrong = MODEL_NEW.replace("fused_op(x)[0]", "fused_op(x)[0].clamp(max=1e4)")
    (family / "model_new.py").write_text(wrong)  # right until values are large
    said = tune("export", run.path, "--trial", "1", cwd=tmp_path / "copy")
    assert said.code == 1 and "put aside: " in said.out, said.out + said.err
    (rejected,) = (run.path / "export").glob("*.rejected.py")
    assert "REJECTED: " in first_line(rejected)
    assert not list((run.path / "export").glob("*.unverified.py"))


def test_an_export_is_refused_while_another_process_works_on_the_run(verified):
    folder, _ = verified
    run = only_run(folder)
    with run.locked():
        said = tune("export", run.path, "--trial", "0", cwd=folder)
    assert said.code == 3 and "another process works on this run" in said.err


def test_a_fault_that_all_candidates_share_is_found_before_the_search(tmp_path):
    write_problem(tmp_path)
    wrong = MODEL_NEW.replace("grad * 2.0", "grad * 3.0")
    (tmp_path / "kernels" / "doubled" / "model_new.py").write_text(wrong)
    said = tune("--config", "config.yaml", cwd=tmp_path)
    assert said.code == 1, said.out + said.err
    assert "rejected before the search" in said.err and "gradient" in said.err
    assert only_run(tmp_path).trials() == []


def test_little_time_makes_the_verification_smaller_and_says_so(verified, tmp_path):
    run = as_searched(verified, tmp_path)
    said = tune("--resume", run.path, "--time", "12s", cwd=tmp_path)
    assert said.code == 0, said.out + said.err
    assert "less than asked for: 1 of 2 finalists" in said.out
    result = run.result()
    assert result is not None and len(result.finalists) == 1
    assert any("1 of 2 finalists" in note for note in result.notes)


def test_quick_starts_from_what_an_earlier_run_found(verified, tmp_path):
    winner = copied(verified, tmp_path)
    found = winner.result()
    assert found is not None
    best = next(t for t in winner.trials() if t.number == found.winner)
    said = tune("--config", "config.yaml", "--effort", "quick", "--json", cwd=tmp_path / "copy")
    assert said.code == 0, said.err
    events = [json.loads(line) for line in said.err.splitlines() if line.startswith("{")]
    assert any("plan (quick)" in event["text"] for event in events)
    new = next(
        open_run(path)
        for path in (tmp_path / "copy" / "runs").iterdir()
        if path.name != winner.path.name
    )
    assert new.trials()[0].params == best.params
    text = new.export_path.read_text()
    assert "effort: quick" in text and read_certificate(new.export_path).effort == "quick"
    result = new.result()
    assert result is not None and result.effort == "quick"


# ---- a verification by itself ---------------------------------------------------------------

FILE = """# standing: {standing}
import os, signal, torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        {accident}
        return x + x
"""


@pytest.fixture
def verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verification]:
    """The verification of a run without trials."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_problem(tmp_path)
    planned = plan(load_config(tmp_path / "config.yaml"))
    run = create_run(tmp_path / "runs", "doubled", "cpu", planned.config.text, Environment())
    toolchain = Toolchain.find("cpu")
    compiler = ExportCompiler("cpu", 1)
    schedule = scheduled(planned.config, Costs())
    with run.locked() as writer, Verifier(planned.spec, seed=1) as verifier:
        made = Verification(
            planned, toolchain, run, writer, verifier, 1, compiler, Observer(), schedule
        )
        yield made
        made.rival.close()  # with the processes that were opened for a race
    compiler.close()


def file_of(verification: Verification, number: int, accident: str) -> ExportFile:
    def text_of(standing: str, entry: object, remarks: object) -> str:
        return FILE.format(standing=standing, accident=accident)

    name = f"trial_{number}"
    path = verification.run.path / "export" / f"{name}.py"
    file = ExportFile(
        verification.planned, verification.run.path, name, number, path, True, text_of
    )
    file.write()
    return file


def test_a_file_that_is_checked_is_not_written_again_as_it_was_compiled(verification):
    compiled, checked = (
        replace(file_of(verification, 0, accident), compiled_as="the same")
        for accident in ("...", "pass  # at other rows")
    )
    compiler = verification.compiler
    compiler.submit(compiled).result()
    checked.write()
    compiler.submit(compiled).result()
    compiler.finish(compiled, Observer(), 1.0)
    assert "at other rows" in checked.unverified_path.read_text()


def test_who_fails_in_the_race_is_out_of_it_and_the_others_race_on(verification):
    accidents = ["...", "os.kill(os.getpid(), signal.SIGSEGV)"]
    files = {n: file_of(verification, n, accident) for n, accident in enumerate(accidents)}
    entries = {n: Finalist(n, Check(True, "float32")) for n in files}
    chosen = [0, 1]
    verification.files.update(files)
    verification._raced(chosen, entries)
    assert chosen == [0]
    assert entries[0].check.is_accepted and entries[0].interval is not None
    assert not entries[1].check.is_accepted and entries[1].interval is None
    assert entries[1].error == "in the race: killed by signal 11 (SIGSEGV)"
    assert "REJECTED: in the race: killed by" in first_line(files[1].rejected_path)
    assert [e.trial for e in verification.run.checks()] == [1, 0]


@pytest.mark.parametrize("mode", ["default", "no such mode"])
def test_torch_compile_takes_part_in_the_race_of_files_where_it_can(verification, mode):
    verification.rival._mode = mode
    verification.rival.get_ready(2)
    verification.files[0] = file = file_of(verification, 0, "...")
    entries = {0: Finalist(0, Check(True, "float32"))}
    verification._raced([0], entries)
    entry = entries[0]
    assert entry.interval is not None and entry.step is not None and entry.others
    # It is not raced again, and the file is not even looked at.
    found = verification.rival.result(entry, file.path, verification.schedule)
    if mode == "default":
        assert found.interval.num_processes == found.ours.num_processes == 2
        assert found.error == "" and found.latency_us > 0.0
        assert found.answer.is_accepted and found.answer.rms_rel < 1e-6
        (on,) = entry.others
        assert found.others.keys() == {on.words} and found.others[on.words].num_processes == 2
        assert verification.rival.ready.loaded == {f"torch.compile ({mode})": []}  # all raced
    else:
        assert mode in found.error and found.interval is None and found.ours is None


def test_a_file_that_an_earlier_session_raced_races_with_torch_compile(verification):
    verification.rival._mode = "default"
    file = file_of(verification, 0, "...")
    entry = Finalist(0, Check(True, "float32"), race_key="of an earlier session")
    found = verification.rival.result(entry, file.unverified_path, verification.schedule)
    assert found.error == "" and found.ours.num_processes == 2
    assert found.others == {}  # as given alone


class Begun(dict):
    """Checks on their way, which remembers whether the main thread began each."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[int, bool]] = []

    def __setitem__(self, trial, check) -> None:
        self.begun.append((trial, threading.current_thread() is threading.main_thread()))
        super().__setitem__(trial, check)


def test_finalists_that_are_checked_side_by_side_get_a_verdict_each(verification):
    accidents = ["...", "x = x + 1.0", "pass"]
    files = {n: file_of(verification, n, accident) for n, accident in enumerate(accidents)}
    verification.files.update(files)
    measured = Measurement(10.0, 0.01, (10.0,), is_cold=True)
    outcome = Outcome(Status.CORRECT, measurement=measured)
    trials = [Trial(n, "sweep", {"step": n}, "", outcome) for n in files]
    seen = []
    verification.observer.on_probe = seen.append
    with ThreadPoolExecutor(3) as verification.checks_ahead:
        entries: dict[int, Finalist] = {}
        verification.ahead = Begun()
        assert verification._checked(trials, entries) == [0, 2]
    # The spare one was begun where the second was rejected, and nothing is left on its way.
    assert [is_main for _, is_main in verification.ahead.begun] == [True, True, False]
    assert verification.ahead == {}
    assert [entries[n].check.is_accepted for n in files] == [True, False, True]
    assert entries[1].check.reason.startswith("as given: output of call 1")
    assert len({len(entries[n].check.probes) for n in (0, 2)}) == 1 and seen
    assert "REJECTED: as given" in first_line(files[1].rejected_path)


def test_a_second_file_of_ours_in_the_same_place_is_no_strangers_edit(tmp_path, verification):
    """As the winner with PyTorch's steps of training, behind the winner itself."""
    unedited = Unedited(verification.planned.spec)
    path = tmp_path / "trial_4.unverified.py"
    first = Contender.of_file(path, is_deterministic=True)
    second = replace(first, version="another text")
    path.write_text("one\n")
    unedited.remember(first)
    path.write_text("two\n")
    unedited.remember(second)
    assert unedited.edited(second) == ""
    assert unedited.edited(first) == f"{path} was rewritten while it was being verified"
    path.write_text("three\n")
    unedited.remember(second)  # as before the race: it is what was checked that counts
    assert unedited.edited(second)


def test_the_files_of_one_trial_have_versions_of_their_own(verification):
    file = file_of(verification, 4, "")
    other = replace(file, text_of=lambda *given: file.text_of(*given) + "MORE = 1\n")
    assert file.contender.version and file.contender.version != other.contender.version
    assert file.contender.load == other.contender.load


def test_in_place_of_a_slower_winner_pytorchs_own_modules_are_verified(verification):
    check = Check(True, "float32", "", (), is_thorough=True)
    slower = Finalist(7, check, Interval(0.9, 0.88, 0.92, 0.95, 5), 11.0, 10.0)
    verification.schedule = verification.schedule.of_pytorch
    exported, notes = verification.instead.pytorch(slower)
    assert exported.others == () and exported.step is None
    # Not the verdict: on a busy machine two clocks may contradict each other, a rejection.
    assert len(exported.check.probes) > 20
    assert all(probe.is_accepted for probe in exported.check.probes)
    assert "no kernel is as fast as PyTorch, the best one is at 0.900x [0.880, 0.920]" in notes[0]
    assert "trial_7.py" in notes[0]
    run = verification.run
    path = (
        run.export_path
        if exported.check.is_accepted
        else run.path / "export/model_new.rejected.py"
    )
    assert path.read_text().endswith("ModelNew = Model\n")


def test_slower_steps_stay_where_a_file_has_no_other_ones(verification):
    check = Check(True, "float32", "", (), is_thorough=True)
    step = Interval(0.5, 0.45, 0.55, 0.95, 3)
    slower = Finalist(7, check, Interval(2.0, 1.9, 2.1, 0.95, 5), 11.0, 10.0, step=step)
    trial = Trial(7, "nest", {}, "", Outcome(Status.CORRECT))
    assert verification.instead.without_slow_steps(trial, slower) == (slower, [])
    by_batch = ByBatch(8, rows={"call": ANY_ROWS, "step": NO_ROWS})
    slower = replace(slower, by_batch=by_batch)  # they are PyTorch's already, raced beside itself
    assert verification.instead.without_slow_steps(trial, slower) == (slower, [])


@pytest.mark.parametrize(
    ("again", "is_fallback", "is_accepted"),
    [(0.62, True, True), (1.4, False, True), (0.62, True, False)],
)
def test_a_winner_that_is_slower_once_its_steps_are_pytorchs_is_not_exported(
    verification, again, is_fallback, is_accepted
):
    """A mixture of experts, at 0.83x in one race and 0.62x in the next, was exported.

    It is where PyTorch's own modules are rejected: that file has the usual name by then.
    """
    check = Check(True, "float32", "", (), is_thorough=True)
    step = Interval(0.5, 0.45, 0.55, 0.95, 3)
    by_batch = ByBatch(8, rows={"call": ANY_ROWS, "step": ANY_ROWS})
    raced = Finalist(
        7, check, Interval(0.95, 0.5, 1.6, 0.95, 3), 11.0, 10.0, step=step, by_batch=by_batch
    )
    asked, accepted = [], []

    def export(file, at, *, is_of_pytorch=False):
        asked.append(file.name)
        found = 1.0 if is_of_pytorch else again
        found_check = replace(check, is_accepted=is_accepted or not is_of_pytorch)
        interval = Interval(found, 0.3, 1.7, 0.95, 3)
        return replace(raced, check=found_check, interval=interval, step=None)

    instead = replace(verification.instead, export=export)
    (params,) = verification.planned.defaults
    trial = Trial(7, str(params["template"]), params, "", Outcome(Status.CORRECT))
    exported, is_pytorchs, notes = instead.settled(trial, raced, accepted.append)
    assert is_pytorchs == (is_fallback and is_accepted)
    assert accepted == [7, None][: 1 + is_fallback]
    assert asked[1:] == ["pytorch"] * is_fallback
    assert exported.interval.speedup == (1.0 if is_pytorchs else again)
    assert any("0.62x" in note or "0.620x" in note for note in notes) == is_fallback


def test_kills_in_the_middle_of_a_verification_lose_and_claim_nothing(verified, tmp_path):
    """Right behind the first verdict, in the next check; `benchmarks.kills`: at random moments."""
    run = as_searched(verified, tmp_path)
    resume = ["--resume", str(run.path)]
    assert killed(resume, tmp_path, lambda: bool(run.checks())) is None
    assert false_claims(run) == [] and run.result() is None
    kept = run.checks()
    assert kept and all(entry.check.is_accepted for entry in kept)
    said = tune(*resume, cwd=tmp_path)
    assert said.code == 0 and "by an earlier session" in said.out, said.out + said.err
    assert run.checks()[: len(kept)] == kept and run.result() is not None
    assert false_claims(run) == [] and repeated(run) == []


def test_a_build_lock_that_a_killed_compiler_left_does_not_block_for_ever(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(modules, "LOOK_EVERY_S", 0.05)
    from torch.utils import cpp_extension

    lock = Path(cpp_extension._get_build_directory("tuner_0123abcd", verbose=False)) / "lock"
    file = tmp_path / "model_new.py"
    file.write_text('load_inline(\n    name="tuner_0123abcd",\n)\n')
    lock.touch()
    compiler = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1)"], cwd=lock.parent
    )
    started_s = time.monotonic()
    modules.free_build_lock(file)
    assert not lock.exists()
    assert compiler.wait() == 0 and time.monotonic() - started_s > 0.9  # it was waited for


def test_an_import_that_was_killed_while_it_compiled_keeps_no_later_one_waiting(tmp_path):
    """PyTorch's own lock is a file, which nobody removes then."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\ntouch $BEGUN\nsleep 600\n")
    slow.chmod(0o755)
    build = (
        "from tuner.export.registration import built_alone\n"
        "built_alone(name='tuner_0123abcd', cpp_sources=['int one() { return 1; }'])\n"
        "print('imported')"
    )
    begun = tmp_path / "begun"
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "BEGUN": str(begun)}
    command = [sys.executable, "-c", build]
    killed = subprocess.Popen(command, env={**env, "CXX": str(slow)}, start_new_session=True)
    wait_for(begun.exists)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert (tmp_path / "tuner_0123abcd" / "lock").exists()
    said = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert "imported" in said.stdout, said.stderr
    assert not (tmp_path / "tuner_0123abcd" / "lock").exists()


def test_ctrl_c_in_the_verification_ends_with_what_was_accepted(verified, tmp_path):
    run = as_searched(verified, tmp_path)
    progress = run.path / "progress.json"

    def is_checking() -> bool:
        return progress.is_file() and "checking trial_" in progress.read_text()

    said = tune_until(is_checking, "--resume", run.path, cwd=tmp_path)
    assert said.code == 130, said.out + said.err
    assert "what is in flight is finished" in said.err
    assert "Traceback" not in said.out + said.err
    result = run.result()
    assert result is not None and result.exported is not None
    assert result.exported.check.is_accepted
    assert len(result.finalists) < CONFIG["measure"]["num_finalists"]


@pytest.mark.parametrize(
    ("low", "speedup", "high", "is_wanted"),
    [
        (0.85, 0.90, 0.95, True),
        (0.50, 0.90, 1.05, True),  # each of few processes was slower
        (0.50, 0.90, 1.60, False),  # as PyTorch's own modules might be on this machine
        (0.20, 0.56, 1.90, True),  # whatever the scatter
        (0.70, 0.99, 1.01, False),
        (1.05, 1.10, 1.15, False),
    ],
)
def test_a_winner_that_seems_slower_is_not_what_is_exported(low, speedup, high, is_wanted):
    raced = Finalist(7, Check(True, "float32"), Interval(speedup, low, high, 0.95, 3), 11.0, 10.0)
    assert Instead.is_wanted(raced) == is_wanted


@pytest.mark.parametrize(
    ("raced", "rows", "speedup", "high", "is_wanted"),
    [
        (0.83, 448, 0.76, 0.89, True),
        (0.83, 448, 0.76, 1.20, False),  # which is open as well
        (0.83, 256, 0.76, 0.89, False),  # of fewer rows, at which the file may be PyTorch's
        (0.99, 448, 0.76, 0.89, False),  # the race is of fresh processes
    ],
)
def test_where_few_processes_leave_it_open_turns_in_one_tell(
    raced, rows, speedup, high, is_wanted
):
    """A cross entropy was at 0.83x [0.56, 1.24] in the race, and was exported with its kernels."""
    at = AtBatch(rows, "call", False, speedup, 0.65, high, 353.0, 446.0)
    entry = Finalist(
        7, Check(True, "float32"), Interval(raced, 0.56, 1.24, 0.95, 3), 11.0, 10.0,
        by_batch=ByBatch(448, (at,)),
    )  # fmt: skip
    assert Instead.is_wanted(entry) == is_wanted
