"""One child process that owns a device and runs jobs: it may crash, hang or be killed.

    parent                                    child (own session, own process group)
    ------                                    --------------------------------------
    Worker.call(job, payload, blobs)  ---->   function(job, payload, blobs)
            Reply | JobFailed         <----   (data, blobs) | exception
            WorkerCrashed, WorkerTimeout      everything it started is killed with it

The channel is a private socket pair that carries JSON and raw bytes, never pickles. What the
child prints goes into a bounded tail that crash messages quote. A dead child is replaced at
the next call. Linux only (process descriptors, parent-death signal).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.errors import WorkerError
from tuner.evaluate.channel import Blob, Closed, Expired, Garbled
from tuner.evaluate.child import Fault
from tuner.evaluate.process import KILL_WAIT_S, Child, describe_exit
from tuner.machine.forkserver import preload
from tuner.machine.importing import import_path
from tuner.wording import one_line

__all__ = ["Fault", "JobFailed", "Reply", "Worker", "WorkerCrashed", "WorkerTimeout"]

RESTART_WAITS_S = (1.0, 5.0)  # a device that was reset needs a moment
NUM_QUOTED_LINES = 12  # of the output of a worker that failed
EXIT_WAIT_S = 2.0  # a dying process closes its sockets a little before it can be waited for


class WorkerCrashed(WorkerError):
    """The child died or broke the channel in the middle of a job.

    Attributes:
        worker: its name.
        reason: one line, e.g. "killed by signal 11 (SIGSEGV)".
        returncode: as `subprocess` reports it (negative: signal); None if it had to be killed.
        log_tail: the last of what the child printed.
    """

    def __init__(self, name: str, job: str, reason: str, returncode: int | None, log: str) -> None:
        self.worker = name
        self.reason = reason
        self.returncode = returncode
        self.log_tail = log
        super().__init__(f"worker {name}: job {job!r}: {reason}{_quote(log)}")

    @property
    def was_killed(self) -> bool:
        """Whether somebody else than the tuner sent it SIGKILL, such as a user or the kernel."""
        return self.reason == describe_exit(-signal.SIGKILL)


class WorkerTimeout(WorkerError):
    """The child did not answer in time and was killed, with everything it had started."""

    def __init__(self, name: str, job: str, timeout_s: float, log: str) -> None:
        self.worker = name
        self.timeout_s = timeout_s
        self.log_tail = log
        self.reason = f"no answer within {timeout_s:g} s"
        super().__init__(f"worker {name}: job {job!r}: {self.reason}{_quote(log)}")


class JobFailed(Exception):
    """The job raised an exception in the child.

    Attributes:
        worker: its name.
        error_type: qualified name of the exception's class, e.g. "builtins.ValueError".
        message: the exception's own text.
        traceback: the child's traceback, as text.
        is_fatal: the job said that its process is no longer usable (`Fault`); the child has
            been killed and the next call gets a fresh one.
    """

    def __init__(
        self, job: str, error_type: str, message: str, trace: str, fatal: bool, name: str = ""
    ) -> None:
        self.worker = name
        self.job = job
        self.error_type = error_type
        self.message = message
        self.traceback = trace
        self.is_fatal = fatal
        super().__init__(f"job {job!r}: {error_type.removeprefix('builtins.')}: {message}")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a job returned: JSON data, and raw bytes (buffers of the parent, writable)."""

    data: dict[str, Any]
    blobs: list[bytearray | mmap.mmap]


def _quote(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()][-NUM_QUOTED_LINES:]
    if not lines:
        return ""
    return "\n  its last output:\n" + "\n".join(f"    {line[:500]}" for line in lines)


class Worker:
    """A child process that runs the jobs of one function, one after the other.

    The child is spawned at the first call (or by `start`) and replaced at the next call after
    it crashed, hung or was killed. One call runs at a time; `kill` may come from any thread.

    Args:
        entry: "module:function"; the function is called in the child as
            `function(job, payload, blobs)` and returns `(data, blobs)`.
        name: for messages, e.g. "cuda:0".
        env: variables set in the child, on top of the parent's.
        on_start: (job, payload) pairs that every fresh child runs before its first call. With
            them the child is replaced before a crash or timeout is reported, so that this
            is the job's fault and not that of a device that went away.
        start_timeout_s: for the start (imports included), and for each job of `on_start`.
    """

    def __init__(
        self,
        entry: str,
        *,
        name: str = "worker",
        env: Mapping[str, str] | None = None,
        on_start: Sequence[tuple[str, dict[str, Any]]] = (),
        start_timeout_s: float = 120.0,
    ) -> None:
        self.name = name
        self._on_start = tuple(on_start)
        self._entry = entry
        self._env = dict(env or {})
        self._start_timeout_s = start_timeout_s
        self._lock = threading.RLock()
        self._child: Child | None = None
        self._generation = 0
        self._number = 0
        self._log_tail = ""
        self._ending = ""
        self._is_closed = False
        self._rests = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def generation(self) -> int:
        """How many times a child was spawned."""
        return self._generation

    @property
    def is_alive(self) -> bool:
        """Whether a usable child is running."""
        child = self._child
        return child is not None and not child.was_killed and not child.has_exited()

    @property
    def pid(self) -> int | None:
        """Process number of the child, None before the first call and after a kill."""
        child = self._child
        return child.pid if child is not None else None

    @property
    def log_tail(self) -> str:
        """The last of what the child printed (of the last child, when none is running)."""
        child = self._child
        return child.log_tail if child is not None else self._log_tail

    def ending(self) -> str:
        """Say how the last child ended, e.g. "killed by signal 9 (SIGKILL)"; "" before any did."""
        with self._lock:
            if self._child is not None and not self._child.is_idle:
                self._reap()
            return self._ending

    def get_ready(self) -> None:
        """Begin to start the server that the child will be forked by; does not wait."""
        preload({**os.environ, **self._env})

    def start(self) -> None:
        """Spawn the child if none is usable, and run the jobs of `on_start` in it.

        Raises:
            WorkerError: it cannot be spawned, or cannot import its entry.
            WorkerCrashed, WorkerTimeout, JobFailed: as `call`, for the start or `on_start`.
        """
        with self._lock:
            if self._is_closed:
                raise WorkerError(f"worker {self.name} is closed")
            if self._child is not None:
                if self._child.is_idle:
                    return
                self._reap()
            options = {"path": import_path(sys.path), "entry": self._entry}
            self._child = Child(options, {**os.environ, **self._env})
            self._generation += 1
            self._number = 0
            if self._is_closed:  # meanwhile, by another thread, which saw no child to end
                self._reap()
                raise WorkerError(f"worker {self.name} is closed")
            try:
                self._exchange("start", None, (), self._start_timeout_s)
                for job, payload in self._on_start:
                    self._exchange(job, payload, (), self._start_timeout_s)
            except JobFailed as error:
                if self._child is not None:
                    self._reap()
                if error.job == "start":
                    text = f"worker {self.name} cannot start: {error.message}\n{error.traceback}"
                    raise WorkerError(text) from None
                raise

    def call(
        self,
        job: str,
        payload: Mapping[str, Any] | None = None,
        blobs: Sequence[Blob] = (),
        *,
        timeout_s: float,
    ) -> Reply:
        """Run one job in the child and wait for its answer.

        Args:
            job: the name that the entry function gets.
            payload: anything that JSON can hold.
            blobs: contiguous buffers, sent as they are.
            timeout_s: for this job, transfers included; spawning a child is not counted.

        Raises:
            JobFailed: the job raised; the child lives on, unless `is_fatal`.
            WorkerCrashed: the child died, or broke the channel.
            WorkerTimeout: no answer in time; the child and all that it started are killed.
            WorkerError: after that no child could be started any more (with `on_start` only).
            TypeError, ValueError: the payload or a blob cannot be sent; nothing was.
        """
        with self._lock:
            self.start()
            self._signal(signal.SIGCONT)
            try:
                return self._exchange(job, payload or {}, blobs, timeout_s)
            except (JobFailed, WorkerCrashed, WorkerTimeout) as failure:
                if self._child is None and self._on_start and not self._is_closed:
                    self._replace(job, failure)
                raise
            finally:
                self._signal(signal.SIGSTOP)

    def rest_between_calls(self) -> None:
        """Stop the child and its process group from now on whenever no call runs in it."""
        with self._lock:
            self._rests = True
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self._rests and self._child is not None:
            self._child.signal_group(number)

    def _replace(self, job: str, failure: Exception) -> None:
        """Start a child anew after a failed job, or tell that it is not the job's fault."""
        for wait_s in (*RESTART_WAITS_S, None):
            try:
                return self.start()
            except (JobFailed, WorkerError) as error:
                if wait_s is None or self._is_closed:
                    raise WorkerError(
                        f"worker {self.name} cannot be started any more: {error}\n"
                        f"  it worked until job {job!r}: {one_line(str(failure))}\n"
                        "  next: see what became of the device (tune doctor); a run goes on with "
                        "`tune --resume`"
                    ) from failure
                time.sleep(wait_s)

    def _exchange(
        self, job: str, payload: Mapping[str, Any] | None, blobs: Sequence[Blob], timeout_s: float
    ) -> Reply:
        """Send a request (none for "start", which the child answers unasked), get the answer."""
        assert self._child is not None
        deadline = time.monotonic() + timeout_s
        number, self._number = self._number, self._number + 1
        try:
            if payload is not None:
                request = {"job": job, "payload": payload}
                self._child.channel.send(number, request, blobs, deadline)
            answered, data, answer = self._child.channel.receive(deadline)
            if answered != number or not data.keys() & {"data", "error"}:
                raise Garbled(f"an answer to request {answered} instead of {number}")
        except Expired:
            self._reap()
            raise WorkerTimeout(self.name, job, timeout_s, self._log_tail) from None
        except Garbled as error:
            self._reap()
            reason = f"garbled the channel: {error}"
            raise WorkerCrashed(self.name, job, reason, None, self._log_tail) from None
        except Closed:
            raise self._crash(job) from None
        except (TypeError, ValueError):
            raise  # the caller's; `send` looks before it writes
        except BaseException:  # Ctrl-C in the middle of a frame: the channel is out of step
            self._reap()
            raise
        if "error" in data:
            raise self._failure(job, data["error"])
        return Reply(data["data"], answer)

    def _failure(self, job: str, error: Mapping[str, Any]) -> JobFailed:
        failure = JobFailed(
            job,
            str(error.get("type")),
            str(error.get("message")),
            str(error.get("traceback")),
            bool(error.get("is_fatal")),
            self.name,
        )
        if failure.is_fatal:
            self._reap()
        return failure

    def _crash(self, job: str) -> WorkerCrashed:
        assert self._child is not None
        kill_reason = self._child.kill_reason if self._child.was_killed else ""
        if self._child.has_exited(EXIT_WAIT_S):
            code: int | None = self._reap()
            reason = kill_reason or describe_exit(code or 0)
        else:
            self._reap()
            code, reason = None, "closed the channel without an answer"
        return WorkerCrashed(self.name, job, reason, code, self._log_tail)

    def _reap(self) -> int:
        child, self._child = self._child, None
        assert child is not None
        kill_reason = child.kill_reason if child.was_killed else ""
        code = child.reap()
        self._ending = kill_reason or describe_exit(code)
        self._log_tail = child.log_tail
        return code

    def kill(self) -> None:
        """Kill the child and all that it started; a call in flight raises WorkerCrashed."""
        child = self._child
        if child is not None and not child.has_exited():
            child.kill()
        if self._lock.acquire(blocking=False):  # else the call in flight reaps it
            try:
                if self._child is not None:
                    self._reap()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the child, politely if it is idle, and refuse further calls."""
        self._is_closed = True
        child = self._child
        if child is not None and child.is_idle and self._lock.acquire(blocking=False):
            with contextlib.suppress(OSError):
                child.channel.sock.shutdown(socket.SHUT_RDWR)
            self._signal(signal.SIGCONT)
            child.has_exited(EXIT_WAIT_S)
            self._lock.release()
        self.kill()
        if self._lock.acquire(timeout=KILL_WAIT_S):  # by then a call in flight has reaped it
            self._lock.release()
