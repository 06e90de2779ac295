"""Functions that are called side by side, in a fork of this process each."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from tuner.machine.forkserver import die_with

__all__ = ["called_in_forks", "end_at_once"]

T = TypeVar("T")


class _Fork(NamedTuple):
    pid: int
    answer: int  # the descriptor of a pipe


def called_in_forks(
    calls: Sequence[Callable[[], T]], is_last: Callable[[T], bool] = lambda found: False
) -> list[T]:
    """Return what functions without arguments return, in their order.

    This process must have no other thread, and forks end with it. Where no more of them can be
    had, a function is called here.

    Args:
        calls: what they return can be pickled.
        is_last: whether nothing is asked for behind what a function returned.

    Raises:
        ChildProcessError: a function raised, or ended its fork. Where that was killed, so is this
            process, by the same signal.
    """
    forks: list[_Fork | None] = []
    found: list[T] = []
    try:
        for call in calls:
            forks.append(_forked(call))
        for call, fork in zip(calls, forks, strict=True):
            found.append(call() if fork is None else _answer_of(fork))
            if is_last(found[-1]):
                break
    finally:
        for fork in forks[len(found) :]:
            _end(fork)
    return found


def _forked(call: Callable[[], object]) -> _Fork | None:
    """Start a fork, if one can be had."""
    ours, theirs = os.pipe()
    own_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:  # too many processes, or too little memory for one
        os.close(ours)
        os.close(theirs)
        return None
    if pid == 0:
        code = 1
        try:
            os.close(ours)
            die_with(own_pid)
            with open(theirs, "wb") as answer:
                pickle.dump(call(), answer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            end_at_once(code)
    os.close(theirs)
    return _Fork(pid, ours)


def end_at_once(code: int) -> NoReturn:
    """End a fork, with what it has printed but without Python's own end."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whatever: what comes next is its parent's
        os._exit(code)


def _answer_of(fork: _Fork) -> Any:
    with open(fork.answer, "rb", closefd=False) as answer:
        told = answer.read()
    _, status = os.waitpid(fork.pid, 0)
    os.close(fork.answer)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    if code != 0:
        raise ChildProcessError(f"a fork ended with exit code {code}")
    return pickle.loads(told)


def _end(fork: _Fork | None) -> None:
    """Kill a fork that nobody has waited for, if there is one."""
    if fork is None:
        return
    try:
        os.kill(fork.pid, signal.SIGKILL)
        os.waitpid(fork.pid, 0)
        os.close(fork.answer)
    except (ChildProcessError, ProcessLookupError):  # the one that ended without an answer
        pass
