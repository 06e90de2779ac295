"""The streams that a program prints to: closed, full, of few characters, or read by nobody."""

from __future__ import annotations

import errno
import io
import os
import sys

__all__ = ["is_unwritable", "print_no_more", "usable_streams"]

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


def usable_streams() -> None:
    """Let them take whatever is printed: also closed ones, and those of few characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started it; a file opened later would get its place
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_unwritable(error: OSError) -> bool:
    """Whether an error is of a stream, which has no name, and not of a file."""
    return error.filename is None and error.errno in _UNWRITABLE


def print_no_more() -> None:
    """Let what is still to be flushed at the end go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
