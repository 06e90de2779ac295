"""Files that survive a kill and a full disk: written whole, or one whole line after another."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tuner.errors import InputError, StorageError

__all__ = [
    "append_line", "read_lines", "require_file", "sha256_of", "storage_errors", "whole_lines",
    "write_whole",
]  # fmt: skip


@contextmanager
def storage_errors(path: Path, *, is_cache: bool = False) -> Iterator[None]:
    """Turn an OSError on `path` into a StorageError that says what to do.

    Args:
        path: what it is about.
        is_cache: the path lies in the user's cache, which no `--runs-dir` moves.
    """
    try:
        yield
    except OSError as error:
        elsewhere = "by setting XDG_CACHE_HOME" if is_cache else "with --runs-dir"
        advice = {
            errno.ENOSPC: "free some disk space, then `tune --resume`",
            errno.EFBIG: "the file size limit is reached (ulimit -f); raise it, then resume",
            errno.EDQUOT: "the disk quota is used up; free some, then `tune --resume`",
            errno.EACCES: f"make it yours (chown), or choose another folder {elsewhere}",
            errno.EROFS: f"the file system is read-only; choose another folder {elsewhere}",
        }.get(error.errno or 0, f"check the path, or choose another folder {elsewhere}")
        reason = (error.strerror or str(error)).lower()
        raise StorageError(f"{path}: {reason}\n  next: {advice}") from error


def require_file(path: Path) -> None:
    """Raise an InputError unless there is such a file."""
    if not path.is_file():
        why = "a directory; next: name a file in it" if path.is_dir() else "no such file"
        raise InputError(f"{path}: {why}")


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all (a temporary beside it, then renamed)."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextmanager
def whole_lines(path: Path) -> Iterator[io.FileIO]:
    """Open a file of lines, without what follows its last newline: that was never whole.

    Unbuffered: after a failed write nothing may stay behind in a buffer, to be written later.
    """
    with storage_errors(path), path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            file.seek(start)
            found = file.read(keep - start).rfind(b"\n")
            if found >= 0:
                keep = start + found + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)
        yield file


def append_line(path: Path, text: str) -> None:
    """Append a line and see it on disk; after a failure the file is as it was."""
    with whole_lines(path) as file:
        start = file.seek(0, os.SEEK_END)
        try:
            line = memoryview(text.encode() + b"\n")
            while line:  # a full disk takes a part before it refuses the rest
                line = line[file.write(line) :]
            os.fsync(file.fileno())
        except BaseException:
            os.ftruncate(file.fileno(), start)  # no half line stays behind
            raise


def read_lines(path: Path) -> list[bytes]:
    """Return the whole lines of a file; none where there is no file."""
    if not path.exists():
        return []
    with storage_errors(path):
        return path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is no line


def sha256_of(path: Path) -> str:
    """Return the hash of a file; an OSError is a StorageError, as for `storage_errors`."""
    with storage_errors(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()
