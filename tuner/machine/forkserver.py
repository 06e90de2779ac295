"""A process that has imported what others need, and forks a fresh process for each request.

    parent                            fork server (single-threaded, never does any work)
    ------                            -----------
    start_process(role, ..., env) -->  fork: own session, own output, own environment
            pid, pidfd            <--  the child goes on as the function `role`
    Process.reap                  -->  wait for it, kill the orphans it left; its exit code

Importing PyTorch takes seconds; a fork of a process that has done so takes milliseconds, and is as
fresh: nothing of a candidate, a problem or a device was ever in the server. Threads of OpenMP and
contexts of CUDA do not survive a fork, so the server starts neither. What libraries read of the
environment when they are loaded is the server's: each such environment has a server of its own.
Processes that may be harmed together have another server, a fork of the first.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import psutil

from tuner.machine.importing import import_path

__all__ = [
    "ALSO", "CORES", "MARKER", "SERVER", "Process", "die_with", "preload",
    "serve_forks", "start_process",
]  # fmt: skip

# Environment variable: which fork of the server. What a stranger may harm has one of its own.
SERVER = "TUNER_FORK_SERVER"
MARKER = "TUNER_WORKER_ID"  # environment variable that names the worker a process stems from
ALSO = "TUNER_PRELOAD"  # environment variable: what a server imports, or calls, as well
CORES = "TUNER_CORES"  # environment variable: those of a server and its processes
# Of each process. The user's filter of warnings must not turn a stranger's into errors; programs
# that compilers start with `python -m` import nothing from the current folder.
SETTINGS = {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "", "PYTHONSAFEPATH": "1"}
# PyTorch imports the third, for 1 to 5 s of CPU, in each process that calls an operator of an
# exported file, draws inputs by their shapes alone, or asks for the first gradient. The last is a
# checksum of all of Triton, 0.5 to 2 s of CPU, without which no process finds a kernel.
PRELOADED = (
    "torch", "tuner.evaluate.jobs", "torch._dynamo", "tuner.kernel.triton_build", "triton",
    "triton.runtime.cache:triton_key", "tuner.machine.blas:one_thread_for_numpy",
)  # fmt: skip
# What OpenMP, BLAS, the loader and PyTorch read once, when they are loaded.
READ_AT_LOAD = (
    "ATEN_", "BLIS_", "CUDA_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NVIDIA_", "OMP_",
    "OPENBLAS_", "PYTHON", "TORCH_", ALSO, CORES,
)  # fmt: skip
_HEADER_BYTES = 4
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36

# Not `python -m`: that would load the file a second time as `__main__`. A child of a fork returns
# from `serve_forks` with what it was asked to be; the server never does.
_BOOTSTRAP = (
    "import json, sys; o = json.loads(sys.argv[1]); sys.path[:] = o.pop('path'); "
    "from tuner.machine.forkserver import serve_forks; o = serve_forks(**o); "
    "sys.path[:] = o.pop('path'); role = o.pop('role'); "
    "import importlib; module, _, name = role.partition(':'); "
    "getattr(importlib.import_module(module), name)(**o)"
)


# ---- the parent's side ----------------------------------------------------------------------


class Process:
    """A forked process: its number, a descriptor that becomes readable at its end, its exit."""

    def __init__(self, server: _Server, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._server = server

    def has_exited(self, wait_s: float = 0.0) -> bool:
        """Whether it is dead; it stays a zombie, so that its number remains its own."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(wait_s * 1e3))

    def reap(self) -> int:
        """Free the number of a dead process; return its exit code, negative for a signal."""
        try:
            reply, _ = self._server.ask({"reap": self.pid})
            return int(reply["code"])
        except OSError:  # the server is gone, and all that it forked was killed with it
            return -int(signal.SIGKILL)
        finally:
            os.close(self.pidfd)


def start_process(
    role: str,
    options: Mapping[str, Any],
    env: Mapping[str, str],
    output_fd: int,
    *,
    channel_fd: int | None = None,
    folder: str | None = None,
) -> Process:
    """Fork a process that runs `role(**options)`.

    Args:
        role: of the form `module:function`.
        options: JSON-able; `path` becomes its sys.path; `parent_pid`, a channel's `fd` are added.
        env: its whole environment, but for `SETTINGS`.
        output_fd: of what it prints.
        channel_fd: of its channel.
        folder: where it runs; by default where this process does.

    Raises:
        OSError: no process can be started.
    """
    env = {**env, **SETTINGS}
    request = {
        "options": {**options, "role": role}, "env": env, "folder": folder or os.getcwd(),
    }  # fmt: skip
    given = (output_fd,) if channel_fd is None else (output_fd, channel_fd)
    for is_last in (False, False, True):
        server = _server_for(env)
        try:
            reply, fds = server.ask(request, given)
            return Process(server, reply["pid"], fds[0])
        except OSError:  # somebody killed it
            server.close()
            if is_last:
                raise
    raise AssertionError


def preload(env: Mapping[str, str]) -> None:
    """Start the server for that environment, without waiting until it is ready."""
    _server_for({**env, **SETTINGS})


class _Server:
    """A fork server as its parent sees it; one request at a time."""

    def __init__(self, env: Mapping[str, str], first: _Server | None) -> None:
        self.parent_pid = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        weakref.finalize(self, self._socket.close).atexit = False  # where it never starts, say
        self._error: OSError | None = None
        if first is None:
            self._start(env, theirs)
        else:
            # It answers nothing: whoever asks the fork something waits for it as long as needed.
            try:
                with theirs, first._lock:
                    _send(first._socket, {"serve": True}, (theirs.fileno(),))
            except OSError:
                self.close()
                raise

    def _start(self, env: Mapping[str, str], theirs: socket.socket) -> None:
        is_started = threading.Event()

        def spawn_and_wait() -> None:
            # Linux sends the parent-death signal when the spawning thread ends: this one lives
            # as long as the server.
            own = {"path": import_path(sys.path), "fd": theirs.fileno(), "parent_pid": os.getpid()}
            # -P: `-c` alone would import `json` from the current folder. Without PYTHONPATH, since
            # a `sitecustomize.py` there runs before `path` is set.
            command = [sys.executable, "-P", "-X", "faulthandler", "-c", _BOOTSTRAP]
            left_out = (MARKER, SERVER, "PYTHONPATH")
            try:
                process = subprocess.Popen(
                    [*command, json.dumps(own)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={name: value for name, value in env.items() if name not in left_out},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                self._error = error
                return
            finally:
                theirs.close()
                is_started.set()
            process.wait()
            with self._lock:  # whoever asks it hears that it is gone
                self.close()

        threading.Thread(target=spawn_and_wait, name="fork server", daemon=True).start()
        is_started.wait()
        if self._error is not None:
            raise self._error

    def ask(
        self, request: Mapping[str, Any], fds: tuple[int, ...] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            _send(self._socket, request, fds)
            return _receive(self._socket)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


_ReadAtLoad = tuple[tuple[str, str], ...]
_SERVERS: dict[tuple[str, _ReadAtLoad], _Server] = {}
_SERVERS_LOCK = threading.Lock()


@atexit.register
def _close_servers() -> None:
    """End them with this process; in a fork of it they are its parent's."""
    for server in _SERVERS.values():
        if server.parent_pid == os.getpid():
            server.close()


def _server_for(env: Mapping[str, str]) -> _Server:
    read = tuple(sorted((n, v) for n, v in env.items() if n.startswith(READ_AT_LOAD)))
    which = env.get(SERVER, "")
    with _SERVERS_LOCK:
        for _ in range(2):
            first = _usable("", read) or _kept("", read, _Server(env, None))
            try:
                if not which:
                    return first
                return _usable(which, read) or _kept(which, read, _Server(env, first))
            except OSError:  # somebody killed the first
                first.close()
        raise OSError("fork servers die as soon as they are started")


def _usable(which: str, read: _ReadAtLoad) -> _Server | None:
    """Return that server unless it is gone; a fork of this process must not use its parent's."""
    server = _SERVERS.get((which, read))
    is_ours = server is not None and server.parent_pid == os.getpid()
    return server if server is not None and is_ours and server._socket.fileno() >= 0 else None


def _kept(which: str, read: _ReadAtLoad, server: _Server) -> _Server:
    _SERVERS[which, read] = server
    return server


def _send(sock: socket.socket, message: Mapping[str, Any], fds: tuple[int, ...] = ()) -> None:
    body = json.dumps(message).encode()
    header = len(body).to_bytes(_HEADER_BYTES, "little")
    if fds:
        socket.send_fds(sock, [header], fds)
    else:
        sock.sendall(header)
    sock.sendall(body)


def _receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    header, fds, _, _ = socket.recv_fds(sock, _HEADER_BYTES, 4)
    body = b""
    while len(header) < _HEADER_BYTES or len(body) < int.from_bytes(header, "little"):
        is_header = len(header) < _HEADER_BYTES
        wanted = _HEADER_BYTES if is_header else int.from_bytes(header, "little")
        part = sock.recv(wanted - len(header if is_header else body))
        if not part:
            raise ConnectionResetError("the other side is gone")
        header, body = (header + part, body) if is_header else (header, body + part)
    message: dict[str, Any] = json.loads(body)
    return message, fds


# ---- the server's side ----------------------------------------------------------------------


def serve_forks(*, fd: int, parent_pid: int) -> dict[str, Any]:
    """Fork whenever asked, until the parent is gone; return, in each child, its options."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to decide
    die_with(parent_pid)
    gc.disable()  # imports make hardly any garbage; to look for it took a tenth of their time
    for name in (*PRELOADED, *os.environ.get(ALSO, "").split()):
        module, _, function = name.partition(":")
        with contextlib.suppress(Exception):  # the child that needs it will say what is wrong
            imported = importlib.import_module(module)
            if function:  # which keeps what it returns
                getattr(imported, function)()
    # What the imports want at their end, such as that PyTorch's libraries are unregistered one by
    # one, is no work for the end of each child.
    for finalizer in getattr(weakref.finalize, "_registry", {}):
        finalizer.atexit = False
    gc.freeze()  # pages that the collector never writes stay shared
    gc.enable()
    os.set_inheritable(fd, False)
    while True:  # once for this server, and once more in each server that is a fork of it
        asked = _serve(socket.socket(fileno=fd))
        if "serve" not in asked:
            return asked
        fd = asked["fd"]
        die_with(asked["parent_pid"])


def die_with(parent_pid: int) -> None:
    """End when the parent does, and adopt what a dead child leaves."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a dead child are ours to kill


def _serve(sock: socket.socket) -> dict[str, Any]:
    """Fork whenever asked; return, in each child, what it is to be."""
    alive: set[int] = set()
    while True:
        try:
            request, fds = _receive(sock)
        except OSError:
            os._exit(0)
        if "reap" in request:
            _send(sock, {"code": _reaped(int(request["reap"]), alive)})
            continue
        own_pid = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forks of processes with threads: those of NumPy's OpenBLAS, which
            # ends them before a fork and starts them again behind it.
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            os.setsid()
            sock.close()
            if "serve" in request:
                return {"serve": True, "fd": fds[0], "parent_pid": own_pid}
            _become(request, fds[0])
            channel = {"fd": fds[1]} if len(fds) > 1 else {}
            return {**request["options"], **channel, "parent_pid": own_pid}
        alive.add(pid)
        if "serve" not in request:
            pidfd = os.pidfd_open(pid)
            _send(sock, {"pid": pid}, (pidfd,))
            fds.append(pidfd)
        for each in fds:
            os.close(each)


def _become(request: Mapping[str, Any], output_fd: int) -> None:
    """Take on the output, the environment and the folder that were asked for."""
    for target in (1, 2):
        os.dup2(output_fd, target)
    os.close(output_fd)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # what an import asked for was the server's, and may be gone
    with contextlib.suppress(OSError):  # it is gone, or not ours to enter
        os.chdir(request["folder"])


def _reaped(pid: int, alive: set[int]) -> int:
    """Wait for a child and kill what it left behind; return its exit code."""
    _, status = os.waitpid(pid, 0)
    alive.discard(pid)
    # What left its group and lost its parents is our child now. Each that dies may leave more.
    while strays := [c.pid for c in psutil.Process().children() if c.pid not in alive]:
        for stray in strays:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(stray, signal.SIGKILL)
                os.waitpid(stray, 0)
    return os.waitstatus_to_exitcode(status)
