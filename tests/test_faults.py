"""Accidents that are made to happen in whole tunings: each costs at most the trial in flight.

More of them: a kill in the search, a second tuner, Ctrl-C (test_tuning); kills at random moments
(test_resume); disks that fill up (test_cli, test_run, test_build); compilers that hang, are
killed or print for ever (test_build); workers (test_worker).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest
from command_line import Said, environment, wait_for
from tiny_operator import REFERENCE, TEMPLATE, config_text, write_family

from tuner.environment import Environment
from tuner.errors import StorageError, WorkerError
from tuner.evaluate.job_spec import explained
from tuner.evaluate.process import describe_exit
from tuner.evaluate.worker import JobFailed, WorkerCrashed, WorkerTimeout
from tuner.run import Run, create_run, open_run
from tuner.trial import Check, Status, Trial
from tuner.verification.ranking import blamed, despite_kills

ACCIDENTS = """
{% elif mode == "eats_memory" %}
  for (;;) std::memset(std::malloc(1 << 24), 1, 1 << 24);
{% elif mode == "forks" %}
  static bool has_forked = false;
  if (!has_forked && fork() == 0) {
    setsid();
    for (;;) pause();
  }
  has_forked = true;
{% elif mode == "floods" %}
  for (;;) std::puts("yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy");
{% elif mode == "loses_the_device" %}
  if (unlink(std::getenv("TEST_ARMED")) == 0) {
    unlink(std::getenv("TEST_DEVICE"));
    *reinterpret_cast<volatile int*>(8) = 1;
  }
{% elif mode == "slow" %}
"""
FAULTY = TEMPLATE.replace('{% elif mode == "slow" %}\n', ACCIDENTS.lstrip()).replace(
    "#include <cstdlib>", "#include <cstdlib>\n#include <cstring>"
)
WRONG = FAULTY.replace('{% if mode == "wrong" %}', "{% if true %}")


# ---- one run: memory, forks, output, a lost device, a clock that jumps ----------------------

# The real command line on a machine of which only this tuner uses memory, so that what others take
# or give back meanwhile neither kills nor spares a candidate: its processes may have 1.5 GiB. Who
# prints for ever has 1 s; the others have minutes, however busy the machine is.
PROGRAM = """
import json, os
from pathlib import Path
import psutil
from tuner.verification import defaults
from tuner.command.cli import main
from tuner.evaluate import process, runner, worker

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

def left():
    ours, used = b"TEST_ARMED=" + os.environ["TEST_ARMED"].encode(), 0
    for pid in psutil.pids():  # not by age: the wall clock jumps
        try:
            if ours in Path(f"/proc/{pid}/environ").read_bytes():
                used += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        except OSError:
            pass
    return process.RESERVE_BYTES + 3 * 2**29 - used

screened = runner.Runner._screened

def impatient(self, payload):
    mode = json.loads(payload["candidate"])["params"]["mode"]
    runner.SCREEN_TIMEOUT_S = 1.0 if mode == "floods" else 600.0
    return screened(self, payload)

assert defaults.SCREEN_TIMEOUT_S == runner.SCREEN_TIMEOUT_S
defaults.SCREEN_TIMEOUT_S = 3.0  # before the search: one of them prints for ever
process.available_bytes = left
runner.Runner._screened = impatient
worker.RESTART_WAITS_S = (0.1,)
main()
"""

# Every second look at the wall clock is three hours late. Monotonic clocks are left alone.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static long jump(void) { static int looks; return __sync_fetch_and_add(&looks, 1) % 2 * 10800; }
int clock_gettime(clockid_t id, struct timespec* t) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, t);
  if (id == CLOCK_REALTIME) t->tv_sec -= jump();
  return code;
}
int gettimeofday(struct timeval* t, void* zone) {
  struct timespec s;
  clock_gettime(CLOCK_REALTIME, &s);
  t->tv_sec = s.tv_sec;
  t->tv_usec = s.tv_nsec / 1000;
  return 0;
}
time_t time(time_t* out) {
  struct timespec s;
  clock_gettime(CLOCK_REALTIME, &s);
  if (out) *out = s.tv_sec;
  return s.tv_sec;
}
"""
# Two tunings before the first test; the limit ends what hangs, and asks nothing of the machine.
pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("few")]

MODES = ["eats_memory", "forks", "floods", "loses_the_device"]


@dataclass(frozen=True)
class Accidents:
    """What was seen of a run that lost its device, and of the session after it came back."""

    run: Run
    first: Said
    at_first: tuple[Trial, ...]
    had_report: bool
    failure: str
    second: Said


@pytest.fixture(scope="module")
def accidents(tmp_path_factory: pytest.TempPathFactory) -> Accidents:
    folder = tmp_path_factory.mktemp("accidents")
    device = folder / "reference.py"
    (folder / "clock.c").write_text(CLOCK)
    compile_it = ["gcc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"]
    subprocess.run(compile_it, cwd=folder, check=True)
    family = write_family(folder / "families", WRONG)
    # One at a time: else the device may be lost before those asked for earlier are built.
    text = config_text(
        family,
        space={"mode": MODES},
        problem={"reference": str(device)},
        search={"in_flight": 1},
    )
    (folder / "config.yaml").write_text(text)
    armed = folder / "armed"
    env = {
        "LD_PRELOAD": str(folder / "clock.so"),
        "TEST_ARMED": str(armed),
        "TEST_DEVICE": str(device),
        "OMP_NUM_THREADS": "1",
    }

    def tune(*args: object) -> Said:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *map(str, args)],
            cwd=folder,
            env=environment(env),
            capture_output=True,
            timeout=1200,
        )
        return Said(done.returncode, done.stdout.decode(), done.stderr.decode())

    device.write_text(REFERENCE)
    armed.touch()
    first = tune("--config", "config.yaml")
    (path,) = (folder / "runs").iterdir()
    run = open_run(path)
    at_first, had_report = tuple(run.trials()), run.report_path.is_file()
    failure = (path / "failure.txt").read_text()
    device.write_text(REFERENCE)
    second = tune("--resume", path)
    return Accidents(run, first, at_first, had_report, failure, second)


def test_a_candidate_that_eats_all_memory_is_an_outcome(accidents):
    outcome = accidents.at_first[0].outcome
    assert outcome.status is Status.RUNTIME
    assert outcome.reason.startswith("killed: it used ") and "of memory" in outcome.reason


def test_a_candidate_that_forks_leaves_no_process(accidents):
    assert accidents.at_first[1].outcome.status is Status.CORRECTNESS
    folder = accidents.run.path.parent.parent

    def is_left(process: psutil.Process) -> bool:
        try:
            return process.environ().get("TEST_ARMED") == str(folder / "armed")
        except psutil.Error:
            return False

    wait_for(lambda: not any(map(is_left, psutil.process_iter())))


def test_a_candidate_that_prints_for_ever_is_a_timeout(accidents):
    outcome = accidents.at_first[2].outcome
    assert outcome.status is Status.TIMEOUT and "no answer within 1 s" in outcome.reason
    assert "yyyyyyyyyy" not in accidents.first.out + accidents.first.err
    assert (accidents.run.path / "trials.jsonl").stat().st_size < 100_000


def test_a_lost_device_stops_the_run_and_is_no_candidates_fault(accidents):
    said = accidents.first
    assert said.code == 3 and "Traceback" not in said.out + said.err
    assert "cannot be started any more" in said.err and "SIGSEGV" in said.err
    assert "tune --resume" in said.err and accidents.had_report
    assert "in _replace" in accidents.failure and "cannot be started any more" in accidents.failure
    assert len(accidents.at_first) == 3  # the trial in flight is lost, and none is blamed


def test_when_the_device_is_back_the_run_goes_on(accidents):
    assert not (accidents.run.path / "failure.txt").exists()
    assert accidents.second.code == 1 and "no candidate is correct: 4 trials" in (
        accidents.second.err
    )
    trials = accidents.run.trials()
    assert tuple(trials[:3]) == accidents.at_first and [t.number for t in trials] == [0, 1, 2, 3]
    assert trials[3].params["mode"] == "loses_the_device"
    assert trials[3].outcome.status is Status.CORRECTNESS


def test_no_time_is_taken_from_the_wall_clock(accidents):
    trials = accidents.run.trials()
    starts = [datetime.fromisoformat(t.started_at) for t in trials]
    assert max(starts) - min(starts) > timedelta(hours=2), "the clock did not jump"
    elapsed = [t.elapsed_s for t in trials]
    hour_s = 3600.0  # less than the clock jumps by, more than any machine takes
    assert elapsed == sorted(elapsed) and elapsed[0] > 0 and elapsed[-1] < hour_s
    for trial in trials:
        assert all(0 <= seconds < hour_s for seconds in trial.outcome.seconds.values())


# ---- contenders that fail in the final race -------------------------------------------------

NAMES = ["trial 0", "trial 1"]
FAILURES = {
    "a crash": (WorkerCrashed("trial 1", "time_model", "exited", 0, ""), "exited"),
    "a hang": (WorkerTimeout("trial 1", "time_model", 3.0, ""), "no answer within 3 s"),
    "an exception": (JobFailed("time_model", "E", "no more", "", False, "trial 1"), "no more"),
    "a refusal to be loaded": (WorkerError("trial 1: importing it: no"), "importing it: no"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_way_to_fail_in_the_race_is_reported_of_the_one_who_did(name):
    failure, reason = FAILURES[name]
    error = failure
    if isinstance(failure, JobFailed):
        error = explained(failure)
        error.__cause__ = failure
    assert blamed(error, NAMES) == ("trial 1", f"in the race: {reason}")


def test_a_failure_of_the_baselines_own_process_is_nobodys_but_the_machines():
    crash = WorkerCrashed("baseline", "time_model", "killed by signal 9 (SIGKILL)", -9, "")
    with pytest.raises(WorkerCrashed, match="baseline"):
        blamed(crash, NAMES)


def in_turn(*results):
    """Return a check or race that ends so, one time after the other; what is left is returned."""
    left = list(results)

    def ask():
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return ask, left


CRASH = WorkerCrashed("trial 1", "time_model", "killed by signal 11 (SIGSEGV)", -11, "")
WAS_KILLED = WorkerCrashed("trial 1", "time_model", describe_exit(-signal.SIGKILL), -9, "")
REJECTED = Check(False, "float32", "three calls: wrong", ())
CUT_SHORT = Check(False, "float32", f"three calls: {describe_exit(-signal.SIGKILL)}", ())
ACCEPTED = Check(True, "float32", "", ())


def test_what_something_else_killed_is_checked_and_raced_again():
    for first in (WAS_KILLED, CUT_SHORT):
        ask, left = in_turn(first, first, ACCEPTED)
        assert despite_kills(ask) is ACCEPTED and not left


def test_what_is_killed_each_time_is_believed_at_last():
    ask, left = in_turn(WAS_KILLED, WAS_KILLED, WAS_KILLED, ACCEPTED)
    with pytest.raises(WorkerCrashed):
        despite_kills(ask)
    assert left == [ACCEPTED]
    ask, left = in_turn(CUT_SHORT, CUT_SHORT, CUT_SHORT, ACCEPTED)
    assert despite_kills(ask) is CUT_SHORT and left == [ACCEPTED]


def test_a_file_that_fails_by_itself_is_asked_once():
    ask, left = in_turn(CRASH, ACCEPTED)
    with pytest.raises(WorkerCrashed, match="SIGSEGV"):
        despite_kills(ask)
    assert left == [ACCEPTED]
    ask, left = in_turn(REJECTED, ACCEPTED)
    assert despite_kills(ask) is REJECTED and left == [ACCEPTED]


# ---- folders that are somebody else's -------------------------------------------------------


@contextmanager
def as_nobody() -> Iterator[None]:
    """Be a user who may read what root wrote, and no more."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that everybody may enter."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(0o755)
    return tmp_path


def test_a_run_of_somebody_else_is_read_and_not_written(shared):
    run = create_run(shared, "op", "cpu", "x", Environment(tuner="2.13"))
    with run.locked():
        pass
    with as_nobody():
        assert open_run(run.path).trials() == [] and run.environment() == Environment(tuner="2.13")
        with pytest.raises(StorageError, match=r"lock: permission denied\n  next: make it yours"):
            with run.locked():
                pytest.fail("it may not")
        with pytest.raises(StorageError, match="permission denied"):
            create_run(shared, "op", "cpu", "x", Environment())


def test_one_file_of_somebody_else_is_named(shared):
    run = create_run(shared, "op", "cpu", "x", Environment())
    with run.locked():
        pass
    with as_nobody():
        os.seteuid(0)
        for path in (run.path, run.path / "lock"):
            os.chown(path, 65534, 65534)
        os.seteuid(65534)
        with pytest.raises(StorageError, match=r"trials\.jsonl: permission denied"):
            with run.locked():
                pytest.fail("it may not")
