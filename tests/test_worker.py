from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tuner.errors import WorkerError
from tuner.evaluate import process, worker as room
from tuner.evaluate.channel import Channel, Garbled
from tuner.evaluate.worker import JobFailed, Worker, WorkerCrashed, WorkerTimeout
from tuner.machine import forkserver
from tuner.machine.importing import import_path

ENTRY = "jobs_for_worker:run"
ANSWER_S = 60.0  # who answers at all does so in this time, however busy the machine is


# A server that imports nothing beforehand: PyTorch, in each that a test starts or has killed, took
# 3 s of CPU. What it forks is asked what it is, and computes nothing.
LIGHT = forkserver._BOOTSTRAP.replace(
    "from tuner.machine.forkserver import serve_forks; ",
    "from tuner.machine import forkserver; forkserver.PRELOADED = (); "
    "serve_forks = forkserver.serve_forks; ",
)


@pytest.fixture
def light(monkeypatch):
    """Servers of our own, which no other test has: they import what `ALSO` names alone."""
    assert LIGHT != forkserver._BOOTSTRAP
    monkeypatch.setattr(forkserver, "_BOOTSTRAP", LIGHT)
    monkeypatch.setenv(forkserver.ALSO, "")


@pytest.fixture
def worker():
    with Worker(ENTRY, name="test") as worker:
        yield worker
    assert not worker.is_alive


def is_gone(pid: int, wait_s: float = ANSWER_S) -> bool:
    """Dead, or a zombie that its new parent has not waited for."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def wait_until(is_so, wait_s: float = ANSWER_S) -> None:
    deadline = time.monotonic() + wait_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- answers --------------------------------------------------------------------------------


def test_payload_and_blobs_come_back_unchanged(worker):
    payload = {"text": "ä\n", "number": 1.5, "nothing": None, "list": [1, {"a": True}]}
    reply = worker.call("echo", payload, [b"abc", b"", bytearray(7)], timeout_s=ANSWER_S)
    assert reply.data == payload
    assert [bytes(blob) for blob in reply.blobs] == [b"abc", b"", bytes(7)]
    assert all(isinstance(blob, bytearray) for blob in reply.blobs)


def test_200_megabytes_go_both_ways_unchanged(worker):
    blob = bytes(range(256)) * (200 * 2**20 // 256)
    reply = worker.call("echo", {}, [blob], timeout_s=ANSWER_S)
    assert memoryview(reply.blobs[0]) == blob
    again = worker.call("echo", {}, reply.blobs, timeout_s=ANSWER_S)  # shared memory is passed on
    assert memoryview(again.blobs[0]) == blob


def test_shared_memory_that_somebody_could_still_change_is_refused():
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(2**20))
    head = struct.pack("<8sQIIQ", b"tunerwk1", 0, 2, 1, 2**20 | 1 << 63)
    theirs.sendall(head + b"{}")
    socket.send_fds(theirs, [b"s"], [fd])
    with pytest.raises(Garbled, match="not sealed"):
        Channel(ours).receive()
    for each in (ours, theirs):
        each.close()
    os.close(fd)


def test_what_a_receiver_writes_into_shared_memory_reaches_nobody():
    ours, theirs = socket.socketpair()
    blob = bytearray(2**20)
    Channel(theirs).send(0, {}, [blob])
    blob[0] = 1
    _, _, [first] = Channel(ours).receive()
    Channel(theirs).send(1, {}, [first])
    memoryview(first)[5] = 7
    _, _, [second] = Channel(ours).receive()
    assert (first[0], first[5], second[5]) == (0, 7, 0)
    for each in (ours, theirs):
        each.close()


def test_a_dead_child_that_nobody_asks_for_any_more_leaves_no_socket_open():
    worker = Worker(ENTRY, name="forgotten")
    worker.start()
    child = worker._child
    sock, thread = child.channel.sock, child._thread
    os.kill(child.pid, signal.SIGKILL)
    thread.join(ANSWER_S)
    del worker, child, thread
    gc.collect()
    assert sock.fileno() == -1


def test_many_small_calls_reuse_one_process(worker):
    pids = {worker.call("prepared", timeout_s=ANSWER_S).data["pid"] for _ in range(50)}
    assert pids == {worker.pid}
    assert worker.generation == 1


def test_numbers_of_blobs_beyond_the_limit_are_refused_before_sending(worker):
    with pytest.raises(ValueError, match="blobs"):
        worker.call("length", {}, [b""] * 5000, timeout_s=ANSWER_S)
    assert worker.call("length", {}, [b"ab"], timeout_s=ANSWER_S).data == {"lengths": [2]}


def test_payload_that_json_cannot_hold_is_the_callers_error(worker):
    with pytest.raises(TypeError):
        worker.call("echo", {"x": object()}, timeout_s=ANSWER_S)
    assert worker.call("echo", {"x": 1}, timeout_s=ANSWER_S).data == {"x": 1}
    assert worker.generation == 1


# ---- jobs that fail, in a child that lives on -----------------------------------------------


def test_of_a_recursion_without_end_both_ends_are_reported(worker):
    with pytest.raises(JobFailed) as caught:
        worker.call("recurse", {"depth": 0}, timeout_s=ANSWER_S)
    trace = caught.value.traceback
    assert caught.value.error_type == "builtins.RecursionError" and len(trace) < 21_000
    assert "in _serve_one" in trace and "characters left out" in trace
    assert trace.rstrip().splitlines()[-1].startswith("RecursionError")


def test_exception_comes_with_type_message_and_traceback(worker):
    with pytest.raises(JobFailed) as caught:
        worker.call("raise_error", {"kind": "value"}, timeout_s=ANSWER_S)
    error = caught.value
    assert (error.error_type, error.message) == ("builtins.ValueError", "boo")
    assert "in raise_error" in error.traceback
    assert not error.is_fatal
    assert "ValueError: boo" in str(error)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [("pickle", "Unpicklable", "this and that"), ("print", "Unprintable", "RuntimeError")],
)
def test_unpicklable_and_unprintable_exceptions_arrive(worker, kind, name, message):
    with pytest.raises(JobFailed) as caught:
        worker.call("raise_error", {"kind": kind}, timeout_s=ANSWER_S)
    assert caught.value.error_type == f"jobs_for_worker.{name}"
    assert message in caught.value.message
    assert worker.call("echo", {"x": 1}, timeout_s=ANSWER_S).data == {"x": 1}
    assert worker.generation == 1


@pytest.mark.parametrize(
    ("job", "payload"), [("no_json", {}), ("no_answer", {}), ("leave_politely", {"status": 0})]
)
def test_wrong_return_value_or_sys_exit_is_a_failed_job(worker, job, payload):
    with pytest.raises(JobFailed):
        worker.call(job, payload, timeout_s=ANSWER_S)
    assert worker.generation == 1
    assert worker.is_alive


def test_fault_is_fatal_and_the_next_call_gets_a_fresh_process(worker):
    first = worker.call("prepared", timeout_s=ANSWER_S).data["pid"]
    with pytest.raises(JobFailed, match="illegal memory access") as caught:
        worker.call("fault", timeout_s=ANSWER_S)
    assert caught.value.is_fatal
    assert not worker.is_alive
    assert worker.call("prepared", timeout_s=ANSWER_S).data["pid"] != first
    assert worker.generation == 2


# ---- children that die ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "payload", "reason", "code"),
    [
        ("segfault", {}, "killed by signal 11 (SIGSEGV)", -11),
        ("leave", {"status": 0}, "exited with status 0 without an answer", 0),
        ("leave", {"status": 7}, "exited with status 7 without an answer", 7),
        ("kill_self", {}, "killed by signal 9 (SIGKILL), perhaps out of memory", -9),
        ("close_channel", {}, "closed the channel without an answer", None),
        ("garble", {"text": "x" * 100}, "garbled the channel: a frame starts with", None),
    ],
)
def test_death_in_a_job_is_a_crash_with_its_reason(worker, job, payload, reason, code):
    with pytest.raises(WorkerCrashed) as caught:
        worker.call(job, payload, timeout_s=ANSWER_S)
    assert caught.value.reason.startswith(reason)
    assert caught.value.returncode == code
    assert worker.pid is None
    assert worker.call("echo", {"x": 1}, timeout_s=ANSWER_S).data == {"x": 1}
    assert worker.generation == 2


def test_crash_message_quotes_the_last_output_with_the_python_line(worker):
    with pytest.raises(WorkerCrashed) as caught:
        worker.call("segfault", timeout_s=ANSWER_S)
    assert "about to read address 0" in str(caught.value)
    assert "in segfault" in caught.value.log_tail  # faulthandler's line


def test_absurd_frame_sizes_are_refused(worker):
    frame = "tunerwk1" + "\x01" + "\0" * 7 + "\x7f" * 8
    with pytest.raises(WorkerCrashed, match="2139062143 blobs"):
        worker.call("garble", {"text": frame}, timeout_s=ANSWER_S)


def test_stray_bytes_after_an_answer_cost_the_child_its_life(worker):
    with pytest.raises(WorkerCrashed, match="garbled"):
        worker.call("answer_twice", timeout_s=ANSWER_S)
    assert worker.call("echo", {"x": 1}, timeout_s=ANSWER_S).data == {"x": 1}


def test_child_killed_while_idle_is_replaced_without_a_word(worker):
    worker.start()
    os.kill(worker.pid, signal.SIGKILL)
    assert is_gone(worker.pid)
    assert not worker.is_alive
    assert worker.call("echo", {"x": 1}, timeout_s=ANSWER_S).data == {"x": 1}
    assert worker.generation == 2


def test_no_zombies_are_left(worker):
    for _ in range(3):
        with pytest.raises(WorkerCrashed):
            worker.call("leave", {"status": 1}, timeout_s=ANSWER_S)
    children = psutil.Process().children()
    assert not [child for child in children if child.status() == psutil.STATUS_ZOMBIE]


# ---- time -----------------------------------------------------------------------------------


def test_hang_is_a_timeout_and_the_process_is_gone(worker):
    worker.start()
    pid = worker.pid
    with pytest.raises(WorkerTimeout, match="hanging now"):
        worker.call("hang", timeout_s=2.0)
    assert not psutil.pid_exists(pid)
    assert worker.call("echo", {"x": 1}, timeout_s=ANSWER_S).data == {"x": 1}


@pytest.mark.parametrize(
    ("job", "setsid", "then"),
    [
        *(
            (job, has, "segfault")
            for job in ("start_grandchild", "start_orphan")
            for has in (False, True)
        ),
        ("start_grandchild", False, "hang"),
        ("start_orphan", True, "hang"),
    ],
)
def test_grandchildren_die_with_the_child(worker, tmp_path, job, setsid, then):
    path = tmp_path / "pid"
    payload = {"path": str(path), "setsid": setsid, "then": then}
    for timeout_s in (1.0, 10.0, ANSWER_S):  # a busy machine starts a process in seconds
        with pytest.raises((WorkerTimeout, WorkerCrashed)):
            worker.call(job, payload, timeout_s=timeout_s)
        if path.exists() and path.read_text():
            break
    assert is_gone(int(path.read_text()))


def test_crash_is_seen_though_a_forked_process_holds_the_channel(worker, tmp_path):
    path = tmp_path / "pid"
    with pytest.raises(WorkerCrashed, match="SIGSEGV"):
        worker.call("fork_and_crash", {"path": str(path)}, timeout_s=ANSWER_S)
    assert is_gone(int(path.read_text()))


def test_timeout_while_the_child_does_not_read(worker):
    worker.start()
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerTimeout):
        worker.call("length", {}, [bytes(50 * 2**20)], timeout_s=0.5)


def test_killing_again_and_again_from_other_threads_does_no_harm(worker):
    stop = threading.Event()

    def kill_often():
        while not stop.wait(0.02):
            worker.kill()
            assert worker.is_alive in (True, False)

    thread = threading.Thread(target=kill_often)
    worker.start()
    thread.start()
    for _ in range(5):
        with pytest.raises(WorkerCrashed, match="killed on request"):
            worker.call("hang", timeout_s=ANSWER_S)
    stop.set()
    thread.join()
    assert worker.call("echo", {"x": 1}, timeout_s=ANSWER_S).data == {"x": 1}


def test_kill_from_another_thread_ends_a_call(worker):
    worker.start()
    threading.Timer(0.3, worker.kill).start()
    with pytest.raises(WorkerCrashed, match="killed on request"):
        worker.call("hang", timeout_s=ANSWER_S)
    assert worker.call("echo", {"x": 1}, timeout_s=ANSWER_S).data == {"x": 1}


# ---- output ---------------------------------------------------------------------------------


def test_much_output_does_not_block_and_only_the_tail_is_kept(worker):
    worker.call("print_a_lot", {"lines": 2000}, timeout_s=30)
    deadline = time.monotonic() + 5
    while "line 1999 " not in worker.log_tail and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "line 1999 " in worker.log_tail
    assert len(worker.log_tail) <= 64 * 2**10


def test_printing_forever_ends_at_the_timeout(worker):
    with pytest.raises(WorkerTimeout) as caught:
        worker.call("print_forever", timeout_s=1)
    assert "yyyy" in caught.value.log_tail
    assert len(str(caught.value)) < 10_000


# ---- starting and ending --------------------------------------------------------------------


def test_on_start_is_replayed_after_a_respawn():
    jobs = [("prepare", {"text": "a"}), ("prepare", {"text": "b"})]
    with Worker(ENTRY, on_start=jobs) as worker:
        assert worker.call("prepared", timeout_s=ANSWER_S).data["text"] == "ab"
        assert worker.call("prepared", timeout_s=ANSWER_S).data["text"] == "ab"
        with pytest.raises(WorkerCrashed):
            worker.call("segfault", timeout_s=ANSWER_S)
        assert worker.call("prepared", timeout_s=ANSWER_S).data["text"] == "ab"
        assert worker.generation == 2


@pytest.mark.parametrize(
    ("job", "words"), [(("raise_error", {"kind": "value"}), "boo"), (("fault", {}), "illegal")]
)
def test_failing_on_start_job_is_reported_and_leaves_no_process(job, words):
    with Worker(ENTRY, on_start=[job]) as worker:
        for _ in range(2):
            with pytest.raises(JobFailed, match=words):
                worker.call("echo", timeout_s=ANSWER_S)
            assert worker.pid is None


def test_crash_and_hang_in_on_start_name_the_job():
    with Worker(ENTRY, on_start=[("segfault", {})]) as worker:
        with pytest.raises(WorkerCrashed, match="'segfault'"):
            worker.start()
    with Worker(ENTRY, on_start=[("hang", {})], start_timeout_s=1) as worker:
        with pytest.raises(WorkerTimeout, match="'hang'"):
            worker.start()


@pytest.mark.parametrize("entry", ["no_such_module:run", "jobs_for_worker:no_such_function"])
def test_entry_that_cannot_be_imported_is_a_worker_error(entry):
    with Worker(entry, name="w") as worker, pytest.raises(WorkerError, match="no_such"):
        worker.start()


def test_a_warning_is_no_error_whatever_the_users_filter(worker, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert worker.call("warn", {"text": "be careful"}, timeout_s=ANSWER_S).data == {}
    wait_until(lambda: "UserWarning: be careful" in worker.log_tail)


def test_environment_and_own_session():
    with Worker(ENTRY, env={"TUNER_TEST_VARIABLE": "x"}) as worker:
        data = worker.call("facts", timeout_s=ANSWER_S).data
    assert data == {"variable": "x", "is_leader": True}


def test_numpys_own_threads_do_not_spin_beside_what_is_timed(monkeypatch):
    # Else each product keeps a core busy for 25 ms more, and calls of 1 ms took 5 ms.
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with Worker(ENTRY) as worker:
        assert worker.call("blas_threads", timeout_s=ANSWER_S).data == {"threads": [1]}


@pytest.mark.parametrize("forks", [False, True])
def test_a_child_that_eats_the_machines_memory_is_killed_before_the_kernel_must(
    worker, monkeypatch, forks
):
    worker.start()
    # As if the machine had 700 MB left: the leak is real, the rest of the machine is hidden.
    hidden = process.available_bytes() - process.RESERVE_BYTES - 700 * 2**20
    real = process.available_bytes
    monkeypatch.setattr(process, "available_bytes", lambda: real() - hidden)
    with pytest.raises(WorkerCrashed, match=r"killed: it used \d\.\d GiB of memory and left"):
        worker.call("leak", {"forks": forks}, timeout_s=ANSWER_S)
    monkeypatch.undo()
    assert worker.call("echo", {"x": 1}, timeout_s=ANSWER_S).data == {"x": 1}


def test_where_memory_is_short_a_small_child_is_not_to_blame(worker, monkeypatch):
    monkeypatch.setattr(process, "available_bytes", lambda: 0)
    monkeypatch.setattr(process, "LOOK_EVERY_S", 0.01)
    worker.call("echo", timeout_s=ANSWER_S)
    with pytest.raises(WorkerTimeout):
        worker.call("hang", timeout_s=0.5)


def test_the_kernel_would_take_the_child_first(worker):
    worker.start()
    score = Path(f"/proc/{worker.pid}/oom_score_adj").read_text()
    assert int(score) == 1000 > int(Path("/proc/self/oom_score_adj").read_text())


# ---- a device that goes away ----------------------------------------------------------------


@pytest.fixture
def device(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "RESTART_WAITS_S", (0.01, 0.2))
    path = tmp_path / "device"
    path.write_text("here")
    return path


def test_a_job_is_not_blamed_for_a_device_that_went_away(device):
    on_start = [("borrow", {"device": str(device)})]
    with Worker(ENTRY, name="gpu", on_start=on_start) as worker:
        with pytest.raises(WorkerError, match="cannot be started any more") as caught:
            worker.call("borrow_and_break", {"device": str(device)}, timeout_s=ANSWER_S)
        assert not isinstance(caught.value, WorkerCrashed | WorkerTimeout)
        for words in ("worker gpu", "FileNotFoundError", "the device does not answer", "--resume"):
            assert words in str(caught.value)
        assert worker.pid is None
        device.write_text("back")
        assert (
            worker.call("borrow", {"device": str(device)}, timeout_s=ANSWER_S).data["read"]
            == "back"
        )


def test_a_device_that_needs_a_moment_is_waited_for(device):
    on_start = [("borrow", {"device": str(device)})]
    with Worker(ENTRY, on_start=on_start) as worker:
        worker.start()
        timer = threading.Timer(0.1, device.write_text, ["back"])
        timer.start()
        with pytest.raises(JobFailed, match="the device does not answer"):
            worker.call("borrow_and_break", {"device": str(device)}, timeout_s=ANSWER_S)
        timer.join()
        assert worker.is_alive
        assert (
            worker.call("borrow", {"device": str(device)}, timeout_s=ANSWER_S).data["read"]
            == "back"
        )


def test_interrupt_is_ignored_by_the_child(worker):
    assert worker.call("interrupt", timeout_s=ANSWER_S).data == {"survived": True}


def test_a_child_that_rests_uses_no_processor_between_calls(worker):
    def used_s() -> float:
        times = psutil.Process(worker.pid).cpu_times()
        return times.user + times.system

    def used_in_a_while_s() -> float:
        before_s = used_s()
        time.sleep(0.5)
        return used_s() - before_s

    worker.call("spin_in_a_thread", timeout_s=ANSWER_S)
    assert used_in_a_while_s() > 0.0
    worker.rest_between_calls()
    wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
    assert used_in_a_while_s() <= 0.02  # a tick or two until its other thread has stopped
    assert worker.call("echo", {"a": 1}, timeout_s=ANSWER_S).data == {"a": 1}
    assert used_in_a_while_s() <= 0.02  # a tick or two until it has stopped again
    pid = worker.pid
    worker.close()
    assert is_gone(pid)


def test_closed_worker_refuses_calls_and_is_gone(worker):
    worker.start()
    pid = worker.pid
    worker.close()
    worker.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(WorkerError, match="closed"):
        worker.call("echo", timeout_s=ANSWER_S)


def test_a_closed_worker_is_gone_though_another_thread_was_in_a_call(worker):
    worker.start()
    pid, reported = worker.pid, []

    def call() -> None:
        with pytest.raises(WorkerCrashed):
            worker.call("hang", timeout_s=ANSWER_S)
        reported.append("crashed")

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.3)
    worker.close()
    assert not psutil.pid_exists(pid)
    thread.join(10)
    assert reported == ["crashed"]


def test_a_child_that_is_born_while_its_worker_is_closed_is_ended(worker, monkeypatch):
    born, child_of = [], room.Child

    def late(*arguments):
        child = child_of(*arguments)
        born.append(child.pid)
        worker._is_closed = True  # as `close` in another thread leaves it, with no child to end
        return child

    monkeypatch.setattr(room, "Child", late)
    with pytest.raises(WorkerError, match="closed"):
        worker.call("echo", timeout_s=ANSWER_S)
    assert born and is_gone(born[0])


@pytest.mark.usefixtures("light")
def test_temporary_files_are_where_each_process_was_asked_to_keep_them(tmp_path, monkeypatch):
    """An import may ask for that folder in the server: it was the first build's, and then gone."""
    (tmp_path / "asks_early.py").write_text(
        "import tempfile\ntempfile.gettempdir()\n"
        "def answer(**options):\n    print(tempfile.gettempdir(), flush=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first", "second"):
        (folder := tmp_path / name).mkdir()
        env = {**os.environ, forkserver.ALSO: "asks_early", "TMPDIR": str(folder)}
        ours, theirs = os.pipe()
        path = {"path": import_path(sys.path)}
        process = forkserver.start_process("asks_early:answer", path, env, theirs)
        os.close(theirs)
        with os.fdopen(ours) as output:
            assert output.read().strip() == str(folder)
        process.reap()
        folder.rmdir()


@pytest.mark.usefixtures("light")
def test_what_a_process_would_compute_first_is_the_servers(tmp_path, monkeypatch):
    (tmp_path / "computes.py").write_text(
        "import functools, os\n"
        "@functools.cache\ndef where():\n    return os.getpid()\n"
        "def answer(**options):\n    print(where(), os.getpid(), flush=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = {**os.environ, forkserver.ALSO: "computes:where computes:absent no_module:where"}
    found = []
    for _ in range(2):
        ours, theirs = os.pipe()
        path = {"path": import_path(sys.path)}
        process = forkserver.start_process("computes:answer", path, env, theirs)
        os.close(theirs)
        with os.fdopen(ours) as output:
            found.append(output.read().split())
        process.reap()
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]
    assert found[0][0] not in (found[0][1], found[1][1])


@pytest.mark.usefixtures("light")
def test_a_server_that_is_ready_is_the_one_that_forks(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # an environment that no other test has
    with Worker(ENTRY) as worker:
        worker.get_ready()
        num_servers = len(forkserver._SERVERS)
        worker.start()
        assert len(forkserver._SERVERS) == num_servers


@pytest.mark.usefixtures("light")
def test_who_kills_the_server_of_strangers_harms_nobody_else():
    """A stranger's server is a fork of the first one, which goes on without it."""
    with Worker(ENTRY) as ours, Worker(ENTRY, env={forkserver.SERVER: "strangers"}) as strangers:
        theirs, mine = pid_of(strangers), pid_of(ours)
        server, first = psutil.Process(theirs).parent(), psutil.Process(mine).parent()
        assert server.parent() == first
        server.kill()
        assert is_gone(theirs) and pid_of(ours) == mine
        theirs = pid_of(strangers)
        assert psutil.Process(theirs).parent().parent() == first
        first.kill()  # and all with it
        assert is_gone(mine) and is_gone(theirs)
        assert psutil.Process(pid_of(ours)).parent() != first and pid_of(strangers) != theirs


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("which", ["", "strangers"])
def test_a_server_that_was_killed_leaves_no_socket(monkeypatch, which):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # an environment that no other test has
    with Worker(ENTRY, env={forkserver.SERVER: which}) as worker:
        pid = pid_of(worker)
        first = psutil.Process(pid).parent()
        first = first.parent() if which else first
        read = [key for key in forkserver._SERVERS if ("OMP_NUM_THREADS", "2") in key[1]]
        server = forkserver._SERVERS["", read[0][1]]
        first.kill()
        assert is_gone(pid)
        until_s = time.monotonic() + ANSWER_S
        while server._socket.fileno() >= 0 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert server._socket.fileno() == -1
        if which:  # of whose fork nobody is told
            with pytest.raises(OSError):
                forkserver._Server({}, server)
        assert psutil.Process(pid_of(worker)).is_running()


def pid_of(worker):
    return worker.call("prepared", timeout_s=ANSWER_S).data["pid"]


def test_no_descriptor_leaks_over_respawns(worker):
    worker.start()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        worker.kill()
        worker.start()
    assert len(os.listdir("/proc/self/fd")) == before


def test_child_outlives_the_thread_that_started_it(worker):
    thread = threading.Thread(target=worker.start)
    thread.start()
    thread.join()
    pid = worker.pid
    time.sleep(0.3)
    assert worker.call("prepared", timeout_s=ANSWER_S).data["pid"] == pid


@pytest.mark.parametrize("job", ["hang", "echo"])
def test_parent_killed_takes_the_child_with_it(tmp_path, job):
    script = f"""
import sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
from tuner.evaluate.worker import Worker
from tuner.machine import forkserver
forkserver._BOOTSTRAP = {LIGHT!r}
worker = Worker({ENTRY!r})
worker.start()
print(worker.pid, flush=True)
worker.call({job!r}, timeout_s=1000)
threading.Event().wait()
"""
    root = str(Path(__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": root, forkserver.ALSO: ""}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env)
    try:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert is_gone(pid)
