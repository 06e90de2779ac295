"""The child's side of a worker: run jobs until the channel closes, and tie itself to the parent.

Whatever a job does, the answer is a frame: what it returned, or the exception as text. `Fault`
is how a job says that its process is spoilt.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tuner.evaluate.channel import Blob, Channel, Closed
from tuner.machine.forkserver import die_with

__all__ = ["Answer", "Fault", "Job", "serve"]

Answer = tuple[dict[str, Any], Sequence[Blob]]  # of a job: JSON, and raw bytes beside it
Job = Callable[[str, dict[str, Any], list[memoryview]], Answer]

MESSAGE_CHARS = 20_000  # an exception's text or traceback; a candidate may raise megabytes
FIRST_TO_DIE = 1000  # oom_score_adj: where memory runs out the kernel kills this, not the tuner


class Fault(Exception):
    """Raised by a job to say that this process is spoilt (e.g. a sticky CUDA error)."""


def serve(*, fd: int, parent_pid: int, entry: str) -> None:
    """Run jobs until the channel closes. The child's whole life."""
    _settle(parent_pid)
    os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=fd))
    with contextlib.suppress(Closed):
        try:
            module, _, function = entry.partition(":")
            run: Job = getattr(importlib.import_module(module), function)
        except BaseException as error:
            channel.send(0, {"error": _describe_error(error)}, ())
            return
        channel.send(0, {"data": {"pid": os.getpid()}}, ())
        while True:
            _serve_one(channel, run)
    # What was registered for the end is run. Python's own end, which takes PyTorch apart object by
    # object, would cost 0.2 s of CPU.
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def _serve_one(channel: Channel, run: Job) -> None:
    number, request, blobs = channel.receive()
    try:
        views = [memoryview(blob) for blob in blobs]
        data, answer = run(request["job"], request["payload"], views)
        channel.send(number, {"data": data}, answer)
    except Closed:
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
        "traceback": _with_both_ends(trace),
        "is_fatal": isinstance(error, Fault),
    }


def _with_both_ends(trace: str) -> str:
    """Return a traceback without its middle where it is long, as of a recursion without end."""
    half = MESSAGE_CHARS // 2
    if len(trace) <= 2 * half:
        return trace
    left_out = f"\n  ... ({len(trace) - 2 * half} characters left out)\n"
    return trace[:half] + left_out + trace[-half:]


def _settle(parent_pid: int) -> None:
    """Tie this process to its parent, the fork server, which dies with the tuner."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to decide
    die_with(parent_pid)  # orphans of the job become ours: found by whoever kills us
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a search may crash a hundred times
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_DIE))
