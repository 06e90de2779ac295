"""Functions in forks of a process that has no other thread: real ones, which really end."""

from __future__ import annotations

import subprocess
import sys
from signal import SIGABRT

RUN = """
import os
from functools import partial
from tuner.machine.forks import called_in_forks

def pid(number):
    return number, os.getpid()

def fails():
    raise ValueError("not this one")

def ends():
    os._exit(3)

{body}
"""


def ran(body: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN.format(body=body)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0)


def test_each_is_called_in_a_fork_of_its_own_and_answers_in_order():
    done = ran(
        "found = called_in_forks([partial(pid, n) for n in range(4)])\n"
        "assert [n for n, _ in found] == [0, 1, 2, 3]\n"
        "assert os.getpid() not in {p for _, p in found}\n"
        "print('whole')"
    )
    assert done.stdout == "whole\n", done.stderr


def test_what_one_raises_is_raised():
    done = ran("called_in_forks([partial(pid, 0), fails])")
    assert done.returncode == 1 and "ValueError: not this one" in done.stderr


def test_where_one_ends_without_an_answer_this_process_ends_as_if_killed():
    assert ran("called_in_forks([partial(pid, 0), ends])").returncode == -SIGABRT
