"""One child process as its parent sees it: its output, its memory, its end.

    parent                                    child (own session, own process group)
    ------                                    --------------------------------------
    Child(options, env)  ---- fork -------->  child.serve(entry), by way of `forkserver`
        .channel         <--- frames ------>
        .log_tail        <--- what it prints, the last of it
        .kill, .reap     ---- SIGKILL ----->  it, its group, its descendants, who bears its marker

A child that eats the machine's memory is killed before the kernel has to choose whom to kill.
Linux only (process descriptors, parent-death signal).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import signal
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tuner.errors import WorkerError
from tuner.evaluate.channel import Channel
from tuner.machine.forkserver import MARKER, Process, start_process
from tuner.machine.host import cgroup_folders
from tuner.machine.platforms import platform_of

__all__ = [
    "KILL_WAIT_S",
    "RESERVE_BYTES",
    "Child",
    "available_bytes",
    "describe_exit",
    "free_bytes",
]

LOG_TAIL_BYTES = 64 * 2**10
KILL_WAIT_S = 30.0  # the driver may need seconds to tear down a context with a running kernel
LOOK_EVERY_S = 0.2  # at the memory that is left; 50 us each time
RESERVE_BYTES = 1 * 2**30  # left to the machine; a runaway allocates some 0.4 GB between two looks


class Child:
    """One process: its channel, its descriptor, and the tail of what it prints."""

    def __init__(self, options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self.marker = uuid.uuid4().hex
        self.was_killed = False  # we killed it; its death is no crash
        self.kill_reason = "killed on request"  # why, if we did
        self._tail = bytearray()
        self._is_reaped = False  # the pid and the descriptor may be somebody else's by now
        self._reap_lock = threading.Lock()
        sock, theirs = socket.socketpair()
        self._output, output = os.pipe()
        try:
            self._process: Process = start_process(
                "tuner.evaluate.child:serve",
                options,
                {**env, MARKER: self.marker},
                output,
                channel_fd=theirs.fileno(),
            )
        except OSError as error:
            sock.close()
            os.close(self._output)
            raise WorkerError(f"cannot start a worker process: {error}") from error
        finally:
            theirs.close()
            os.close(output)
        self.pid, self._pidfd = self._process.pid, self._process.pidfd
        self.channel = Channel(sock, self._pidfd)
        # Where it died, and nobody asks for it any more, nobody reaps it.
        weakref.finalize(self, sock.close).atexit = False
        self._thread = threading.Thread(target=self._read_output, daemon=True)
        self._thread.start()

    def _read_output(self) -> None:
        fd = self._output
        os.set_blocking(fd, False)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        next_look_s = time.monotonic()
        while True:
            ready = dict(poll.poll(LOOK_EVERY_S * 1e3))
            if time.monotonic() >= next_look_s:
                self._look_at_memory()
                next_look_s = time.monotonic() + LOOK_EVERY_S
            if fd in ready and not self._read_some(fd):
                poll.unregister(fd)  # it closed its output; we still wait for its end
            if self._pidfd in ready:
                break
        for _ in range(64):  # what is left in the pipe, unless a grandchild keeps printing
            if not self._read_some(fd):
                break
        os.close(fd)

    def _read_some(self, fd: int) -> bool:
        try:
            chunk = os.read(fd, 2**16)
        except BlockingIOError:
            return False
        self._tail += chunk
        del self._tail[:-LOG_TAIL_BYTES]
        return bool(chunk)

    def _look_at_memory(self) -> None:
        """Kill it when the machine's memory runs out and it is the one that has it."""
        left = available_bytes()
        if left >= RESERVE_BYTES:
            return
        used = _resident_bytes(self.pid)
        if used >= RESERVE_BYTES:
            self.kill_reason = (
                f"killed: it used {used / 2**30:.1f} GiB of memory and left the machine"
                f" {left / 2**30:.1f}"
            )
            self.kill()

    def has_exited(self, wait_s: float = 0.0) -> bool:
        """Whether it is dead; only the thread that may reap it may also wait."""
        if wait_s == 0:
            with self._reap_lock:
                return self._is_reaped or self._process.has_exited()
        return self._process.has_exited(wait_s)

    @property
    def is_idle(self) -> bool:
        """Alive, and silent: between jobs the channel has nothing to say."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self.channel.sock, select.POLLIN)
        return not self.was_killed and not poll.poll(0)

    @property
    def log_tail(self) -> str:
        """The last of what it printed."""
        return bytes(self._tail).decode(errors="replace")

    def kill(self) -> None:
        """Kill it and all that it started, from any thread; `reap` must follow."""
        with self._reap_lock:
            if not self._is_reaped:
                self.was_killed = True
                _kill_tree(self.pid, self.marker)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to it and to all that it started in its process group."""
        with self._reap_lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._is_reaped:
                os.killpg(self.pid, number)

    def reap(self) -> int:
        """Kill whatever is left, wait for the process, free everything; its exit code."""
        _kill_tree(self.pid, self.marker)
        if not self.has_exited(KILL_WAIT_S):
            raise WorkerError(f"process {self.pid} cannot be killed; is the driver stuck?")
        self._thread.join()
        with self._reap_lock:
            self._is_reaped = True
            code = self._process.reap()
            self.channel.sock.close()
        return code


# ---- memory ---------------------------------------------------------------------------------


def available_bytes() -> int:
    """Return what a process can still allocate without swapping, in this machine or container."""
    left = psutil.virtual_memory().available
    for limit, used, statistics in _memory_groups():
        with contextlib.suppress(OSError, ValueError):  # "max", or a file that is not there
            bound = int(limit.read_text())
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", statistics.read_text(), re.M)
            left = min(left, bound - int(used.read_text()) + int(cached[1] if cached else 0))
    return left


def free_bytes(device: str) -> int:
    """Return the memory that is free where the tensors of that device live."""
    found = platform_of(device).free_bytes(device)
    return available_bytes() if found is None else found


@functools.cache
def _memory_groups() -> tuple[tuple[Path, Path, Path], ...]:
    """Return limit, use and statistics of each memory group around us that sets a limit."""
    names = (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    return tuple(
        (folder / limit, folder / used, folder / "memory.stat")
        for folder in cgroup_folders("memory")
        for limit, used in names
        if (folder / limit).is_file()
    )


def _resident_bytes(pid: int) -> int:
    """Return what a process and its descendants have in memory."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total


# ---- the end --------------------------------------------------------------------------------


def _kill_tree(pid: int, marker: str = "") -> None:
    """Send SIGKILL to `pid`, its process group, its descendants and whoever bears `marker`.

    `pid` must lead its own process group and must not have been waited for yet, so that the
    number cannot belong to anybody else. Descendants that left the group by `setsid` are
    reached through their parents; those whose parents are gone through the environment
    variable `TUNER_WORKER_ID` == `marker`, which programs that they started inherited; other
    orphans are killed by the fork server.
    """
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(pid).children(recursive=True)
    for kill in (os.killpg, os.kill):  # it may have no group of its own yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
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


def describe_exit(code: int) -> str:
    """Say in words how a process ended; `code` as `subprocess` reports it."""
    if code >= 0:
        return f"exited with status {code} without an answer"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "no name"
    hint = ", perhaps out of memory" if -code == signal.SIGKILL else ""
    return f"killed by signal {-code} ({name}){hint}"
