"""The processes that compile: a program, or a fork of a process that has imported Triton.

Importing PyTorch and Triton takes seconds, and compiling a kernel tenths of one: on a machine with
a GPU a search of ten seconds built ten candidates before these were forks.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tuner.errors import ToolchainError
from tuner.machine.forkserver import SERVER, start_process
from tuner.machine.importing import import_path

__all__ = ["LOG_BYTES", "Compiler", "forked", "read_some", "restrain", "spawned"]

LOG_BYTES = 16 * 2**20  # a runaway template error prints gigabytes
COMPILER_NICENESS = 10  # compiling must not delay the process that measures
EARLY_TO_DIE = 900  # oom_score_adj: a compiler that eats all memory goes, not the tuner


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that runs: leader of a process group, what it prints, and how to reap it."""

    pid: int
    output: IO[bytes]
    wait: Callable[[], int]


def spawned(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Compiler:
    """Start a program; ToolchainError if it cannot be."""
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # A group of its own in our session: when the tuner is killed the kernel wakes and
            # ends an orphaned group that was stopped; in another session nobody would.
            process_group=0,
            bufsize=0,
        )
    except OSError as error:
        raise ToolchainError(f"cannot run {command[0]}: {error.strerror}") from None
    assert process.stdout is not None
    return Compiler(process.pid, process.stdout, process.wait)


def forked(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Compiler:
    """Fork a compiler of Triton kernels, given its command line; ToolchainError if none can be."""
    ours, theirs = os.pipe()
    try:
        process = start_process(
            "tuner.kernel.triton_build:compile_in",
            {"path": import_path(sys.path), "arguments": list(arguments)},
            {**environment, SERVER: "compilers"}, theirs, folder=str(folder),
        )  # fmt: skip
    except OSError as error:
        os.close(ours)
        raise ToolchainError(f"cannot fork a Triton compiler: {error.strerror}") from None
    finally:
        os.close(theirs)
    return Compiler(process.pid, os.fdopen(ours, "rb", buffering=0), process.reap)


def read_some(fd: int, output: bytearray) -> bool:
    """Read what is there; beyond LOG_BYTES it is thrown away."""
    try:
        chunk = os.read(fd, 2**16)
    except BlockingIOError:
        return False
    if len(output) < LOG_BYTES:
        output += chunk
        if len(output) >= LOG_BYTES:
            output += b"\n(the rest of the output was dropped)\n"
    return bool(chunk)


def restrain(pid: int, timeout_s: float) -> None:
    """Be nice, and bound the CPU time: even if we are killed, no compiler runs forever."""
    limit_s = math.ceil(timeout_s) + 60
    with contextlib.suppress(OSError):  # it may have ended already
        os.setpriority(os.PRIO_PROCESS, pid, COMPILER_NICENESS)
        resource.prlimit(pid, resource.RLIMIT_CPU, (limit_s, limit_s))
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(EARLY_TO_DIE))
