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
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from tuner.errors import WorkerError

__all__ = [
    "Blob",
    "Fault",
    "Job",
    "JobFailed",
    "Reply",
    "Worker",
    "WorkerCrashed",
    "WorkerTimeout",
    "kill_tree",
]

Blob = bytes | bytearray | memoryview
Job = Callable[[str, dict[str, Any], list[memoryview]], tuple[dict[str, Any], Sequence[Blob]]]

MAX_JSON_BYTES = 256 * 2**20  # thousands of samples are 1 MB; more than this is garbage
MAX_BLOBS = 4096
MAX_FRAME_BYTES = 64 * 2**30  # all blobs of a frame; the largest tensor in sight is 9 GB
LOG_TAIL_BYTES = 64 * 2**10
MESSAGE_CHARS = 20_000  # an exception's text or traceback; a candidate may raise megabytes
KILL_WAIT_S = 30.0  # the driver may need seconds to tear down a context with a running kernel
EXIT_WAIT_S = 2.0  # a dying process closes its sockets a little before it can be waited for
MARKER = "TUNER_WORKER_ID"  # environment variable that names the worker a process stems from


class WorkerCrashed(WorkerError):
    """The child died or broke the channel in the middle of a job.

    Attributes:
        reason: one line, e.g. "killed by signal 11 (SIGSEGV)".
        returncode: as `subprocess` reports it (negative: signal); None if it had to be killed.
        log_tail: the last of what the child printed.
    """

    def __init__(self, name: str, job: str, reason: str, returncode: int | None, log: str) -> None:
        self.reason = reason
        self.returncode = returncode
        self.log_tail = log
        super().__init__(f"worker {name}: job {job!r}: {reason}{_quote(log)}")


class WorkerTimeout(WorkerError):
    """The child did not answer in time and was killed, with everything it had started."""

    def __init__(self, name: str, job: str, timeout_s: float, log: str) -> None:
        self.timeout_s = timeout_s
        self.log_tail = log
        self.reason = f"no answer within {timeout_s:g} s"
        super().__init__(f"worker {name}: job {job!r}: {self.reason}{_quote(log)}")


class JobFailed(Exception):
    """The job raised an exception in the child.

    Attributes:
        error_type: qualified name of the exception's class, e.g. "builtins.ValueError".
        message: the exception's own text.
        traceback: the child's traceback, as text.
        is_fatal: the job said that its process is no longer usable (`Fault`); the child has
            been killed and the next call gets a fresh one.
    """

    def __init__(self, job: str, error_type: str, message: str, trace: str, fatal: bool) -> None:
        self.job = job
        self.error_type = error_type
        self.message = message
        self.traceback = trace
        self.is_fatal = fatal
        super().__init__(f"job {job!r}: {error_type.removeprefix('builtins.')}: {message}")


class Fault(Exception):
    """Raised by a job to say that this process is spoilt (e.g. a sticky CUDA error)."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a job returned: JSON data, and raw bytes (buffers of the parent, writable)."""

    data: dict[str, Any]
    blobs: list[bytearray]


def _quote(log: str, num_lines: int = 12) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    if not lines:
        return ""
    return "\n  its last output:\n" + "\n".join(f"    {line[:500]}" for line in lines[-num_lines:])


# ---- the channel, the same on both sides ----------------------------------------------------

_HEADER = struct.Struct("<8sQII")  # magic, request number, bytes of JSON, number of blobs
_MAGIC = b"tunerwk1"


class _Closed(Exception):
    """The other side closed the channel, or died."""


class _Expired(Exception):
    """The deadline passed."""


class _Garbled(Exception):
    """What came is not a frame of ours."""


class _Channel:
    """Frames over a non-blocking stream socket.

    A frame: header, blob lengths (8 bytes each), JSON, blobs. With `pidfd`, the death of that
    process ends a wait even if a grandchild still holds the other end open.
    """

    def __init__(self, sock: socket.socket, pidfd: int | None = None) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # the kernel clips it; 2x faster
            sock.setsockopt(socket.SOL_SOCKET, option, 4 * 2**20)
        self.sock = sock
        self.pidfd = pidfd

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self.sock, event)
        if self.pidfd is not None:
            poll.register(self.pidfd, select.POLLIN)
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise _Expired
        ready = poll.poll(None if left_s is None else left_s * 1e3 + 1)
        if ready and all(fd == self.pidfd for fd, _ in ready):
            raise _Closed

    def _send_bytes(self, view: memoryview, deadline: float | None) -> None:
        while view:
            try:
                view = view[self.sock.send(view, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except (ConnectionError, BrokenPipeError):
                raise _Closed from None

    def _receive_into(self, view: memoryview, deadline: float | None) -> None:
        while view:
            try:
                count = self.sock.recv_into(view)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except ConnectionError:
                raise _Closed from None
            if count == 0:
                raise _Closed
            view = view[count:]

    def _receive(self, num_bytes: int, deadline: float | None) -> bytearray:
        try:
            buffer = bytearray(num_bytes)
        except MemoryError:
            raise _Garbled(f"a part of {num_bytes} bytes does not fit in memory") from None
        self._receive_into(memoryview(buffer), deadline)
        return buffer

    def send(
        self,
        number: int,
        data: Mapping[str, Any],
        blobs: Sequence[Blob],
        deadline: float | None = None,
    ) -> None:
        """Send one frame; TypeError or ValueError before the first byte if it cannot be sent."""
        text = json.dumps(data).encode()
        views = [_flat(blob) for blob in blobs]
        lengths = [len(view) for view in views]
        _refuse_absurd(len(text), lengths)
        head = _HEADER.pack(_MAGIC, number, len(text), len(views))
        head += struct.pack(f"<{len(views)}Q", *lengths) + text
        self._send_bytes(memoryview(head), deadline)
        for view in views:
            self._send_bytes(view, deadline)

    def receive(
        self, deadline: float | None = None
    ) -> tuple[int, dict[str, Any], list[bytearray]]:
        """Wait for one frame: its number, its data, its blobs."""
        head = self._receive(_HEADER.size, deadline)
        magic, number, num_json, num_blobs = _HEADER.unpack(head)
        if magic != _MAGIC:
            raise _Garbled(f"a frame starts with {bytes(magic)!r}")
        if num_blobs > MAX_BLOBS:
            raise _Garbled(f"a frame of {num_blobs} blobs; at most {MAX_BLOBS} are allowed")
        packed = self._receive(8 * num_blobs, deadline)
        lengths = struct.unpack(f"<{num_blobs}Q", packed)
        try:
            _refuse_absurd(num_json, lengths)
            data = json.loads(self._receive(num_json, deadline))
        except (ValueError, RecursionError) as error:
            raise _Garbled(str(error)) from None
        if not isinstance(data, dict):
            raise _Garbled("the JSON of a frame is not an object")
        return number, data, [self._receive(length, deadline) for length in lengths]


def _flat(blob: Blob) -> memoryview:
    view = memoryview(blob)
    if not view.c_contiguous:
        raise TypeError("a blob must be contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _refuse_absurd(num_json: int, lengths: Sequence[int]) -> None:
    if num_json > MAX_JSON_BYTES:
        raise ValueError(f"{num_json} bytes of JSON; at most {MAX_JSON_BYTES} are allowed")
    if len(lengths) > MAX_BLOBS or sum(lengths) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(lengths)} blobs of {sum(lengths)} bytes in one frame")


# ---- killing all that a process started -----------------------------------------------------


def kill_tree(pid: int, marker: str = "") -> None:
    """Send SIGKILL to `pid`, its process group, its descendants and whoever bears `marker`.

    `pid` must lead its own process group and must not have been waited for yet, so that the
    number cannot belong to anybody else. Descendants that left the group by `setsid` are
    reached through their parents; those whose parents are gone through the environment
    variable `TUNER_WORKER_ID` == `marker`, which they inherited.
    """
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.Error):  # psutil checks that the pid was not reused
            process.kill()
    for stray in _marked(marker) if marker else ():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(stray, signal.SIGKILL)


def _marked(marker: str) -> Iterator[int]:
    wanted = f"{MARKER}={marker}".encode()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                with open(f"/proc/{entry}/environ", "rb") as file:
                    variables = file.read().split(b"\0")
                if wanted in variables:
                    yield int(entry)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code} without an answer"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "no name"
    hint = ", perhaps out of memory" if -code == signal.SIGKILL else ""
    return f"killed by signal {-code} ({name}){hint}"


# ---- the parent's side ----------------------------------------------------------------------

# Not `-m tuner.worker`: that would load this file a second time as `__main__`, and the `Fault`
# that a job imports would be another class. The child gets the parent's own module path.
_BOOTSTRAP = (
    "import json, sys; o = json.loads(sys.argv[1]); sys.path[:] = o.pop('path'); "
    "from tuner.worker import _serve; _serve(**o)"
)


class _Child:
    """One spawned process: its channel, its descriptor, and the tail of what it prints.

    The thread that spawns it also reads its output, and lives until it is dead: Linux sends
    the parent-death signal when the spawning *thread* ends, not the process.
    """

    def __init__(self, options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self.marker = uuid.uuid4().hex
        self.is_condemned = False  # we killed it; its death is no crash
        self._options = options
        self._env = {**env, MARKER: self.marker, "PYTHONUNBUFFERED": "1"}
        self._tail = bytearray()
        self._is_buried = False  # the pid and the descriptor may be somebody else's by now
        self._grave = threading.Lock()
        self._error: OSError | None = None
        self._is_spawned = threading.Event()
        self._thread = threading.Thread(target=self._spawn_and_read, daemon=True)
        self._thread.start()
        self._is_spawned.wait()
        if self._error is not None:
            raise WorkerError(f"cannot start a worker process: {self._error}")

    def _spawn_and_read(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            options = {**self._options, "fd": theirs.fileno(), "parent_pid": os.getpid()}
            command = [sys.executable, "-X", "faulthandler", "-c", _BOOTSTRAP]
            self.process = subprocess.Popen(
                [*command, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=self._env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            self.pidfd = os.pidfd_open(self.process.pid)
            self.channel = _Channel(ours, self.pidfd)
        except OSError as error:
            self._error = error
            ours.close()
            return
        finally:
            theirs.close()
            self._is_spawned.set()
        self._read_output()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        os.set_blocking(fd, False)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if fd in ready and not self._read_some(fd):
                poll.unregister(fd)  # it closed its output; we still wait for its end
            if self.pidfd in ready:
                break
        for _ in range(64):  # what is left in the pipe, unless a grandchild keeps printing
            if not self._read_some(fd):
                break
        self.process.stdout.close()

    def _read_some(self, fd: int) -> bool:
        try:
            chunk = os.read(fd, 2**16)
        except BlockingIOError:
            return False
        self._tail += chunk
        del self._tail[:-LOG_TAIL_BYTES]
        return bool(chunk)

    def has_exited(self, wait_s: float = 0.0) -> bool:
        """Whether it is dead; only the thread that may bury it may also wait."""
        if wait_s == 0:
            with self._grave:
                return self._is_buried or self._poll_exit(0)
        return self._poll_exit(wait_s)

    def _poll_exit(self, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(wait_s * 1e3))

    @property
    def is_idle(self) -> bool:
        """Alive, and silent: between jobs the channel has nothing to say."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        poll.register(self.channel.sock, select.POLLIN)
        return not self.is_condemned and not poll.poll(0)

    @property
    def log_tail(self) -> str:
        return bytes(self._tail).decode(errors="replace")

    def kill(self) -> None:
        """Kill it and all that it started, from any thread; `bury` must follow."""
        with self._grave:
            if not self._is_buried:
                self.is_condemned = True
                kill_tree(self.process.pid, self.marker)

    def bury(self) -> int:
        """Kill whatever is left, wait for the process, free everything; its exit code."""
        kill_tree(self.process.pid, self.marker)
        if not self.has_exited(KILL_WAIT_S):
            raise WorkerError(f"process {self.process.pid} cannot be killed; is the driver stuck?")
        self._thread.join()
        with self._grave:
            self._is_buried = True
            code = self.process.wait()
            self.channel.sock.close()
            os.close(self.pidfd)
        return code


class Worker:
    """A child process that runs the jobs of one function, one after the other.

    The child is spawned at the first call (or by `start`) and replaced at the next call after
    it crashed, hung or was killed. One call runs at a time; `kill` may come from any thread.

    Args:
        entry: "module:function"; the function is called in the child as
            `function(job, payload, blobs)` and returns `(data, blobs)`.
        name: for messages, e.g. "cuda:0".
        env: variables set in the child, on top of the parent's.
        on_start: (job, payload) pairs that every fresh child runs before its first call; a
            list that may be changed at any time.
        start_timeout_s: for the start (imports included), and for each job of `on_start`.
        memory_limit_bytes: bound on the child's private memory (RLIMIT_DATA). Not for a child
            that uses CUDA, which reserves far more than it uses.
        niceness: added to the child's.
    """

    def __init__(
        self,
        entry: str,
        *,
        name: str = "worker",
        env: Mapping[str, str] | None = None,
        on_start: Sequence[tuple[str, dict[str, Any]]] = (),
        start_timeout_s: float = 120.0,
        memory_limit_bytes: int | None = None,
        niceness: int = 0,
    ) -> None:
        self.name = name
        self.on_start = list(on_start)
        self._entry = entry
        self._env = dict(env or {})
        self._start_timeout_s = start_timeout_s
        self._limits = {"memory_limit_bytes": memory_limit_bytes, "niceness": niceness}
        self._lock = threading.RLock()
        self._child: _Child | None = None
        self._generation = 0
        self._number = 0
        self._log_tail = ""
        self._is_closed = False

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
        return child is not None and not child.is_condemned and not child.has_exited()

    @property
    def pid(self) -> int | None:
        """Process number of the child, None before the first call and after a kill."""
        child = self._child
        return child.process.pid if child is not None else None

    @property
    def log_tail(self) -> str:
        """The last of what the child printed (of the last child, when none is running)."""
        child = self._child
        return child.log_tail if child is not None else self._log_tail

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
                self._bury()
            path = {"path": sys.path, "entry": self._entry}
            self._child = _Child({**path, **self._limits}, {**os.environ, **self._env})
            self._generation += 1
            self._number = 0
            try:
                self._exchange("start", None, (), self._start_timeout_s)
                for job, payload in self.on_start:
                    self._exchange(job, payload, (), self._start_timeout_s)
            except JobFailed as error:
                if self._child is not None:
                    self._bury()
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
            TypeError, ValueError: the payload or a blob cannot be sent; nothing was.
        """
        with self._lock:
            self.start()
            return self._exchange(job, payload or {}, blobs, timeout_s)

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
                raise _Garbled(f"an answer to request {answered} instead of {number}")
        except _Expired:
            self._bury()
            raise WorkerTimeout(self.name, job, timeout_s, self._log_tail) from None
        except _Garbled as error:
            self._bury()
            reason = f"garbled the channel: {error}"
            raise WorkerCrashed(self.name, job, reason, None, self._log_tail) from None
        except _Closed:
            raise self._crash(job) from None
        except (TypeError, ValueError):
            raise  # the caller's; `send` looks before it writes
        except BaseException:  # Ctrl-C in the middle of a frame: the channel is out of step
            self._bury()
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
        )
        if failure.is_fatal:
            self._bury()
        return failure

    def _crash(self, job: str) -> WorkerCrashed:
        assert self._child is not None
        was_killed = self._child.is_condemned
        if self._child.has_exited(EXIT_WAIT_S):
            code: int | None = self._bury()
            reason = "killed on request" if was_killed else _describe_exit(code or 0)
        else:
            self._bury()
            code, reason = None, "closed the channel without an answer"
        return WorkerCrashed(self.name, job, reason, code, self._log_tail)

    def _bury(self) -> int:
        child, self._child = self._child, None
        assert child is not None
        code = child.bury()
        self._log_tail = child.log_tail
        return code

    def kill(self) -> None:
        """Kill the child and all that it started; a call in flight raises WorkerCrashed."""
        child = self._child
        if child is not None and not child.has_exited():
            child.kill()
        if self._lock.acquire(blocking=False):  # else the call in flight buries it
            try:
                if self._child is not None:
                    self._bury()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the child, politely if it is idle, and refuse further calls."""
        self._is_closed = True
        child = self._child
        if child is not None and child.is_idle and self._lock.acquire(blocking=False):
            with contextlib.suppress(OSError):
                child.channel.sock.shutdown(socket.SHUT_RDWR)
            child.has_exited(EXIT_WAIT_S)
            self._lock.release()
        self.kill()


# ---- the child's side -----------------------------------------------------------------------


def _serve(
    *,
    fd: int,
    parent_pid: int,
    entry: str,
    memory_limit_bytes: int | None = None,
    niceness: int = 0,
) -> None:
    """Run jobs until the channel closes. The child's whole life."""
    _settle(parent_pid, memory_limit_bytes, niceness)
    os.set_inheritable(fd, False)
    channel = _Channel(socket.socket(fileno=fd))
    with contextlib.suppress(_Closed):
        try:
            module, _, function = entry.partition(":")
            run: Job = getattr(importlib.import_module(module), function)
        except BaseException as error:
            channel.send(0, {"error": _describe_error(error)}, ())
            return
        channel.send(0, {"data": {"pid": os.getpid()}}, ())
        while True:
            _serve_one(channel, run)


def _serve_one(channel: _Channel, run: Job) -> None:
    number, request, blobs = channel.receive()
    try:
        views = [memoryview(blob) for blob in blobs]
        data, answer = run(request["job"], request["payload"], views)
        channel.send(number, {"data": data}, answer)
    except _Closed:
        raise
    except BaseException as error:  # sys.exit and Ctrl-C in a job too: the process is ours
        channel.send(number, {"error": _describe_error(error)}, ())


def _describe_error(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    try:
        message = str(error)
    except Exception as failure:
        message = f"(its text cannot be had: {type(failure).__name__})"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception as failure:
        trace = f"(its traceback cannot be had: {type(failure).__name__})"
    return {
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "message": message[:MESSAGE_CHARS],
        "traceback": trace[-MESSAGE_CHARS:],
        "is_fatal": isinstance(error, Fault),
    }


_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36


def _settle(parent_pid: int, memory_limit_bytes: int | None, niceness: int) -> None:
    """Tie this process to its parent and set its limits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to decide
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
    # Orphans of the job become our children, so that the parent finds them when it kills us.
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a search may crash a hundred times
    if memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
    if niceness:
        os.nice(niceness)
