"""Functions in forks of a process that has no other thread: real ones, which really end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

RUN = """
import os, signal, time
from functools import partial
from tuner.machine.forks import called_in_forks

def pid(number):
    return number, os.getpid()

def fails():
    raise ValueError("not this one")

def waits():
    os.write(1, f"{{os.getpid()}}\\n".encode())  # in one piece, also beside others
    time.sleep(600.0)

{body}
"""


def started(body: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN.format(body=body)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


def ran(body: str) -> subprocess.CompletedProcess[str]:
    with started(body) as process:
        out, err = process.communicate(timeout=60.0)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def has_ended(pid: int) -> bool:
    until_s = time.monotonic() + 30.0
    while time.monotonic() < until_s:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_each_is_called_in_a_fork_of_its_own_and_answers_in_order():
    done = ran(
        "found = called_in_forks([partial(pid, n) for n in range(4)])\n"
        "assert [n for n, _ in found] == [0, 1, 2, 3]\n"
        "assert len({os.getpid(), *(p for _, p in found)}) == 5\n"
        "big = called_in_forks([lambda: b'x' * 10**7] * 2)\n"
        "assert [len(each) for each in big] == [10**7] * 2\n"
        "print('whole')"
    )
    assert done.stdout == "whole\n", done.stderr


def test_what_one_raises_is_said_and_the_others_end():
    done = ran("called_in_forks([fails, waits])")
    assert done.returncode == 1 and "ValueError: not this one" in done.stderr
    assert "ChildProcessError: a fork ended with exit code 1" in done.stderr
    assert all(has_ended(int(line)) for line in done.stdout.split())


def test_behind_the_last_nothing_is_waited_for():
    done = ran("print([n for n, _ in called_in_forks([partial(pid, 7), waits], lambda f: True)])")
    assert done.stdout.splitlines()[-1] == "[7]", done.stderr


def test_where_one_is_killed_so_is_this_process():
    done = ran("called_in_forks([lambda: os.kill(os.getpid(), signal.SIGKILL), waits])")
    assert done.returncode == -signal.SIGKILL


def test_forks_end_with_this_process_whoever_kills_it():
    with started("called_in_forks([waits] * 3)") as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(3)]
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30.0)
        assert all(has_ended(pid) for pid in pids)
