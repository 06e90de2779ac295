"""The run directory survives kills, full disks and second writers."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tuner import run as room
from tuner.environment import Environment
from tuner.errors import RunLockedError, StorageError
from tuner.run import Outlook, Run, create_run, open_run
from tuner.storage import storage_errors, write_whole
from tuner.trial import Check, Measurement, Outcome, Result, Status, Trial


def trial(number: int, latency_us: float | None = None) -> Trial:
    measurement = None
    if latency_us is not None:
        measurement = Measurement(latency_us, 0.01, (latency_us,), is_cold=True)
    status = Status.CORRECT if measurement else Status.COMPILE
    check = Check(True, "float32") if measurement else None
    outcome = Outcome(status, "why ⚠", check=check, measurement=measurement)
    return Trial(number, "cpu", {"template": "cpu", "rows": number}, f"key{number}", outcome)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(
        tmp_path, "layer_norm", "NVIDIA H200 (x)", "op: x\n", Environment(tuner="2.13")
    )


def test_a_new_run_holds_what_was_asked_and_an_empty_list_of_trials(run):
    assert run.path.name.endswith("-layer_norm-nvidia-h200--x")
    assert run.config_path.read_text() == "op: x\n"
    assert run.environment() == Environment(tuner="2.13")
    assert (run.path / "candidates").is_dir() and run.export_path.parent.is_dir()
    assert run.trials() == [] and run.result() is None and run.best() is None


def test_two_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    class Frozen(room.datetime):
        @classmethod
        def now(cls, tz=None):
            return room.datetime(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.setattr(room, "datetime", Frozen)
    paths = [create_run(tmp_path, "op", "cpu", f"{n}", Environment()).path for n in range(3)]
    assert [p.name for p in paths] == [
        "20260102-030405-op-cpu",
        "20260102-030405-op-cpu-1",
        "20260102-030405-op-cpu-2",
    ]
    assert [open_run(p).config_path.read_text() for p in paths] == ["0", "1", "2"]


def test_a_folder_that_is_no_run_is_refused_with_the_runs_beside_it(run):
    stranger = run.path.parent / "stranger"
    stranger.mkdir()
    with pytest.raises(StorageError, match="stranger: not a run directory") as caught:
        open_run(stranger)
    assert run.path.name in str(caught.value)
    with pytest.raises(StorageError, match="next: name a folder"):
        open_run(run.path / "nowhere" / "at_all")


def test_appended_trials_are_read_back_in_order_and_the_fastest_correct_one_is_best(run):
    written = [trial(0), trial(1, 20.0), trial(2, 10.0), trial(3, 15.0)]
    with run.locked() as writer:
        for one in written:
            writer.append(one)
            assert open_run(run.path).trials()[-1] == one  # on disk before append returns
    with run.locked() as writer:
        writer.append(trial(4))
    assert run.trials() == [*written, trial(4)]
    assert run.best() == written[2]


def test_every_append_is_synced_before_it_returns(run, monkeypatch):
    synced = []
    real = os.fsync

    def spy(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", spy)
    with run.locked() as writer:
        writer.append(trial(0))
        writer.append(trial(1))
    assert synced == [str(run.path / "trials.jsonl")] * 2


def test_what_the_search_expects_outlives_a_kill_in_the_middle_of_a_line(run):
    said = [Outlook(10, 0.25, {"0.01": 0.125}), Outlook(20, 0.0, {"0.01": 1.0, "0.05": 1.0})]
    assert run.outlooks() == []
    with run.locked() as writer:
        writer.append_outlook(said[0])
    with (run.path / "search.jsonl").open("ab") as file:
        file.write(b'{"number": 20, "impro')
    assert run.outlooks() == said[:1]
    with run.locked() as writer:
        writer.append_outlook(said[1])
    assert run.outlooks() == said


@pytest.mark.parametrize("half", [b'{"number": 1, "templ', b"\xf0\x9f", b"{" * 200_000])
def test_a_half_written_last_line_is_dropped_at_the_next_start(run, half):
    with run.locked() as writer:
        writer.append(trial(0))
    path = run.path / "trials.jsonl"
    with path.open("ab") as file:
        file.write(half)
    assert run.trials() == [trial(0)]  # reading alone changes nothing
    assert path.read_bytes().endswith(half)
    with run.locked() as writer:
        writer.append(trial(1))
    assert run.trials() == [trial(0), trial(1)]


def test_a_file_of_one_half_line_becomes_empty(run):
    (run.path / "trials.jsonl").write_bytes(b'{"num')
    with run.locked():
        assert (run.path / "trials.jsonl").read_bytes() == b""


@pytest.mark.parametrize("bad", [b"not json", b'{"number": "x"}', b"", b"\xff\xfe"])
def test_an_unreadable_line_in_the_middle_is_named(run, bad):
    with run.locked() as writer:
        writer.append(trial(0))
        writer.append(trial(1))
    path = run.path / "trials.jsonl"
    first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, bad, second, b""]))
    with pytest.raises(StorageError, match=r"trials\.jsonl:2: not a trial") as caught:
        run.trials()
    assert "the other 2 are kept" in str(caught.value)


def test_an_unreadable_result_or_environment_is_explained(run):
    (run.path / "result.json").write_text("{")
    with pytest.raises(StorageError, match=r"result\.json: not a result"):
        run.result()
    (run.path / "environment.json").write_bytes(b"\xff{")
    with pytest.raises(StorageError, match=r"environment\.json: not JSON"):
        run.environment()


def test_the_result_is_read_back(run):
    result = Result(winner=3, finalists=(), ties=(3, 5), notes=("a", "b"))
    with run.locked() as writer:
        writer.write_result(result)
        assert writer.write_text("notes/x.txt", "ü") == run.path / "notes" / "x.txt"
    assert run.result() == result
    assert (run.path / "notes" / "x.txt").read_bytes() == "ü".encode()


# ---- two writers ----------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from tuner.run import open_run
with open_run(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone_even_by_force(run, repository):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)],
        cwd=repository,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(RunLockedError, match="another process works on this run"):
            with run.locked():
                pytest.fail("both have it")
        assert run.trials() == []  # readers may look
        holder.kill()
        holder.wait()
        with run.locked() as writer:  # no stale lock stays behind
            writer.append(trial(0))
    assert run.trials() == [trial(0)]


def test_an_error_of_the_writers_own_is_no_storage_error(run):
    with pytest.raises(FileNotFoundError, match="mine"):
        with run.locked():
            raise FileNotFoundError(errno.ENOENT, "mine")


# ---- no space left --------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 64 KiB, where this process may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def appended_until_refused(run: Run, big: Trial) -> tuple[int, StorageError]:
    """Append until the disk is full; then try twice more, as a careless caller would."""
    with run.locked() as writer:
        for number in range(1000):
            try:
                writer.append(big)
            except StorageError as error:
                for _ in range(2):
                    with pytest.raises(StorageError):
                        writer.append(big)
                return number, error
    raise AssertionError("it never got full")


def big_trial() -> Trial:
    samples = tuple(float(n) for n in range(1, 2001))  # a line longer than a page and any buffer
    outcome = Outcome(Status.CORRECT, measurement=Measurement(1000.5, 0.1, samples, is_cold=True))
    return Trial(7, "cpu", {"template": "cpu"}, "key", outcome)


def test_a_full_disk_is_explained_and_leaves_no_half_line(tmp_path):
    with small_disk(tmp_path / "small") as disk:
        run = create_run(disk, "op", "cpu", "x", Environment())
        number, error = appended_until_refused(run, big_trial())
        assert "no space left" in str(error) and "free some disk space" in str(error)
        assert number > 1
        content = (run.path / "trials.jsonl").read_bytes()
        assert content.endswith(b"\n") and content.count(b"\n") == number
        assert run.trials() == [big_trial()] * number

        before = run.config_path.read_text()
        with pytest.raises(StorageError, match="no space left"):
            write_whole(run.config_path, "y" * 200_000)
        assert run.config_path.read_text() == before  # the old one is whole, the new one is gone
        assert not list(run.path.glob(".config*"))
        with pytest.raises(StorageError, match="no space left"):
            create_run(disk, "op", "cpu", "y" * 200_000, Environment())


def test_a_limit_on_file_sizes_is_explained_and_leaves_no_half_line(run):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        number, error = appended_until_refused(run, big_trial())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert "file too large" in str(error) and "ulimit" in str(error)
    assert run.trials() == [big_trial()] * number and number > 0
    with run.locked() as writer:
        writer.append(trial(8))
    assert run.trials() == [big_trial()] * number + [trial(8)]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "free some disk space"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "chown"),
        (errno.EROFS, "read-only"),
        (errno.ENOTDIR, "check the path"),
    ],
)
def test_each_storage_failure_has_its_advice(code, advice):
    with pytest.raises(StorageError, match=f"somewhere: .*\n  next: .*{advice}"):
        with storage_errors(Path("somewhere")):
            raise OSError(code, os.strerror(code))


def test_a_cache_that_cannot_be_written_is_moved_by_its_own_variable():
    with pytest.raises(StorageError, match="another folder by setting XDG_CACHE_HOME"):
        with storage_errors(Path("somewhere"), is_cache=True):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_run_cannot_be_made_inside_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="next: check the path"):
        create_run(tmp_path / "file", "op", "cpu", "", Environment())


# ---- killed at any moment -------------------------------------------------------------------

APPEND = """
import sys
from pathlib import Path
from tuner.run import open_run
from tuner.trial import Measurement, Outcome, Status, Trial
run = open_run(Path(sys.argv[1]))
samples = tuple(float(n) for n in range(3000))
outcome = Outcome(Status.CORRECT, measurement=Measurement(1000.5, 0.1, samples, is_cold=True))
with run.locked() as writer:
    number = len(run.trials())
    while True:
        writer.append(Trial(number, "cpu", {"template": "cpu"}, "key", outcome))
        number += 1
        print(number, flush=True)  # a promise: so many are on disk
"""


def test_kill_9_at_any_moment_loses_at_most_the_line_being_written(run, repository):
    generator = random.Random(20260101)
    promised = 0
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", APPEND, str(run.path)],
            cwd=repository,
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout.readline()  # it is at work
            time.sleep(generator.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            promises = process.stdout.read().split()
        complete = run.trials()  # every complete line is readable
        promised = max(promised, int(promises[-1]) if promises else 0)
        assert promised <= len(complete)
        assert [t.number for t in complete] == list(range(len(complete)))
        promised = len(complete)
    assert promised > 8


def test_write_whole_never_shows_a_part_to_a_reader(tmp_path):
    path = tmp_path / "result.json"
    texts = ["a" * 500_000, "b" * 700_000]
    write_whole(path, texts[0])
    seen, is_over = set(), threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(30):
        write_whole(path, texts[n % 2])
    is_over.set()
    reader.join()
    assert seen <= set(texts)
    assert os.listdir(tmp_path) == ["result.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_what_an_environment_says_beyond_the_known_is_kept(run):
    path = run.path / "environment.json"
    wrong = {"flops": True, "sizes": {"rows": "many"}, "sessions": [1], "num_feasible": "9"}
    written = {"op": "gemm", "bytes": 8, "baseline_us": 2.5, "commit": ["a", {"b": None}], **wrong}
    path.write_text(json.dumps(written))
    found = run.environment()
    assert (found.op, found.bytes, found.baseline_us) == ("gemm", 8, 2.5)
    assert (found.flops, found.sizes, found.sessions, found.num_feasible) == (None, {}, (), None)
    replace(found, command="tune").write(run.path)
    assert json.loads(path.read_text()) == {**written, "command": "tune"}
    path.write_text('{"sittings": [{"from_trial": 3, "baseline_us": 2.0}]}')  # as they were called
    assert [session.from_trial for session in run.environment().sessions] == [3]
    path.write_text('{"baseline_us": NaN, "flops": Infinity}')
    assert run.environment().baseline_us is None and run.environment().flops is None
    path.write_text("[1]")
    with pytest.raises(StorageError, match=r"environment\.json: expected a JSON object, got list"):
        run.environment()


def test_the_environment_of_a_run_of_before_is_read_and_written_alike(tmp_path):
    with tarfile.open(Path(__file__).parent / "runs" / "h200_tf32.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (path,) = tmp_path.glob("**/environment.json")
    before = json.loads(path.read_text())
    found = open_run(path.parent).environment()
    assert found.num_feasible == 29480 and found.device["num_sms"] == 132 and found.mode == ""
    assert not found.other
    found.write(path.parent)
    assert json.loads(path.read_text()) == before
