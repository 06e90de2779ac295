"""A folder of builds by content key, which several tuners may share.

    <cache>/<key>/source.cu | .cpp | .py
                  artefact.so
                  log.txt     (whole)
                  build.json  (written last)
    <cache>/.tmp-*            (being filled; locked by its builder, and swept when nobody holds it)

A folder is filled beside its place, flushed to disk and renamed, so that a reader sees all of it
or nothing. No clock is looked at.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tuner.errors import StorageError
from tuner.machine.host import cache_folder
from tuner.machine.platforms import SOURCE_NAMES
from tuner.storage import write_whole
from tuner.trial import Build, Candidate, from_json, to_json

__all__ = [
    "cache_errors",
    "default_cache_dir",
    "filling",
    "install",
    "keep",
    "keys_of",
    "load",
    "placed",
    "prepare",
    "seal",
]


def default_cache_dir() -> Path:
    """Where builds are kept if nothing else is said: $XDG_CACHE_HOME/tuner/builds."""
    return cache_folder() / "builds"


@contextlib.contextmanager
def cache_errors(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a StorageError that names the folder."""
    try:
        yield
    except OSError as error:
        hint = "\n  hint: free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StorageError(f"build cache {path}: {reason}{hint}") from error


def prepare(path: Path) -> None:
    """Create the folder, or make sure that nobody else can put code into it.

    Raises:
        StorageError: it cannot be created, belongs to another user, or others may write to it.
    """
    with cache_errors(path):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = path.stat()
        if facts.st_uid != os.geteuid():
            raise StorageError(f"build cache {path} belongs to user {facts.st_uid}, not to you")
        if stat.S_IMODE(facts.st_mode) & 0o022:
            raise StorageError(
                f"build cache {path}: others may write to it (mode "
                f"{stat.S_IMODE(facts.st_mode):o}), and what is in it is run\n"
                f"  hint: look at what is in it, then chmod go-w {path}"
            )
        with _locked(path):
            for folder in path.glob(".tmp-*"):
                _sweep(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold off other builders from creating, placing and sweeping folders."""
    with open(path / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(folder: Path) -> None:
    """Remove a temporary folder whose builder was killed: nobody holds its lock."""
    with contextlib.suppress(OSError):  # held, or its builder is tidying up as well
        fd = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(fd)


@contextlib.contextmanager
def filling(path: Path, key: str) -> Iterator[Path]:
    """Yield a fresh folder to fill; it is ours for as long, and removed unless it was placed."""
    if not path.is_dir():
        prepare(path)  # somebody deleted the cache
    with _locked(path):
        made = Path(tempfile.mkdtemp(prefix=f".tmp-{key}-", dir=path))
        fd = os.open(made, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks: it may be swept
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield made
    finally:
        os.close(fd)
        shutil.rmtree(made, ignore_errors=True)


def load(folder: Path) -> Build | None:
    """Read a finished build; None if it is absent, half-written, changed, or not to be kept."""
    try:
        record = json.loads((folder / "build.json").read_bytes())
        build = from_json(Build, json.dumps(record["build"]))
        if not record["is_final"] or not (folder / "log.txt").is_file():
            return None
        if build.artefact is not None:
            code = (folder / build.artefact).read_bytes()
            if hashlib.sha256(code).hexdigest() != record["artefact_sha256"]:
                return None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return placed(build, folder)


def keys_of(path: Path) -> list[str]:
    """Return the keys of all builds in a cache, of this moment; none where there is no cache."""
    return sorted(found.parent.name for found in path.glob("*/build.json"))


def keep(folder: Path, candidate: Candidate, build: Build) -> None:
    """Keep with a run what was compiled and what the compiler said, once."""
    if (folder / "log.txt").exists():  # it is written last
        return
    for left in folder.glob(".*"):  # by a tuner that was killed at this
        left.unlink()
    write_whole(folder / SOURCE_NAMES[candidate.language], candidate.source)
    log = Path(build.log)
    text = log.read_text(errors="replace") if log.is_file() else build.error
    write_whole(folder / "log.txt", text)


def placed(build: Build, folder: Path) -> Build:
    """Return a build with the paths that it has in `folder`."""
    artefact = None if build.artefact is None else str(folder / build.artefact)
    return replace(build, artefact=artefact, log=str(folder / build.log))


def seal(folder: Path, build: Build, *, is_final: bool) -> None:
    """Write build.json last and flush everything in the folder to disk."""
    digest = ""
    if build.artefact is not None:
        digest = hashlib.sha256((folder / build.artefact).read_bytes()).hexdigest()
    record = {
        "build": json.loads(to_json(build)),
        "artefact_sha256": digest,
        "is_final": is_final,
    }
    (folder / "build.json").write_text(json.dumps(record, indent=1) + "\n")
    for path in (*folder.iterdir(), folder):
        _flush(path)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def install(made: Path, place: Path) -> Build | None:
    """Rename a sealed folder into its place; the build found there if another was faster."""
    with _locked(place.parent):
        winner = load(place)
        if winner is not None:
            shutil.rmtree(made)
            return winner
        if place.exists():  # half-written, damaged, or a timeout's
            aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=place.parent))
            os.rename(place, aside / "old")
            shutil.rmtree(aside)
        os.rename(made, place)
        _flush(place.parent)
    return None
