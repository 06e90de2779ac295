"""Compile candidates in parallel with the real compilers, into a content-addressed cache.

    Candidate -> Builder.submit -> Future[Build]        <cache>/<key>/source.cu | .cpp | .py
                   key known? the same future                         artefact.so
                   folder good? read it                               log.txt     (whole)
                   else compile aside, rename                         build.json  (written last)
                                            Triton's own folder, or <cache>/triton/: its kernels

A folder is filled beside its place, flushed to disk and renamed, so that a reader sees all of
it or nothing. A candidate that does not compile is a `Build` that says why and is kept too;
what the machine caused (timeout, killed compiler) is not believed a second time. Builders of other
hosts (`Elsewhere`) fill folders as this host's compilers do; Triton's kernels come packed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tuner.at_work import AtWork
from tuner.errors import ToolchainError
from tuner.kernel.cache import cache_errors, filling, install, load, placed, prepare, seal
from tuner.kernel.compiler_words import (
    COMPILER_KILLED,
    DISK_FULL,
    first_error,
    hash_code,
    matches,
    parse_resources,
    shortened,
)
from tuner.kernel.compilers import (
    LOG_BYTES,
    Compiler,
    forked,
    read_some,
    restrain,
    spawned,
)
from tuner.kernel.elsewhere import Elsewhere
from tuner.kernel.toolchain import Toolchain
from tuner.kernel.triton_build import PLAN_FILE, REPORT_FILE, AheadBuild, has_kernels
from tuner.kernel.triton_files import KERNELS_FILE, folder_or, unpack
from tuner.machine.platforms import PLATFORMS, SOURCE_NAMES
from tuner.trial import Build, Candidate, Status, content_key, from_json, to_json

__all__ = ["BUILD_TIMEOUT_S", "Builder"]

BUILD_TIMEOUT_S = 120.0  # for one candidate
FULL_BYTES = 2**20  # with less left than one shared object, a failure says nothing
CORES_APART = 3  # of each build, where these are so few that its calls are compiled side by side
MOST_AT_ONCE = 1024  # builds, where other hosts do some: a thread waits for each
LOOK_EVERY_S = 0.05  # for room elsewhere, while there is none


@dataclass(frozen=True, slots=True)
class _Exit:
    """How a compiler ended; `code` is None after a timeout."""

    code: int | None
    output: bytes


class Builder:
    """A pool of compilers over one cache folder. Several builders may share the folder.

    Args:
        cache_dir: created with mode 0700 if absent.
        num_workers: compilers that run at a time.
        timeout_s: for one candidate, not counting pauses.
        triton_sizes: the named sizes of every shape that Triton candidates will be called with
            on this toolchain's GPU; their kernels are compiled for these. Without sizes only
            their syntax is checked, and Triton compiles when they are first called.
        elsewhere: builders of other hosts, for what finds no free compiler here, and for what
            they have already; closed with this.

    Raises:
        StorageError: the cache folder cannot be used, or others could plant code in it.
    """

    def __init__(
        self,
        toolchain: Toolchain,
        cache_dir: Path,
        *,
        num_workers: int,
        timeout_s: float = BUILD_TIMEOUT_S,
        triton_sizes: Sequence[Mapping[str, int]] = (),
        elsewhere: Elsewhere | None = None,
    ) -> None:
        prepare(cache_dir)
        self.toolchain = toolchain
        self.cache_dir = cache_dir.absolute()
        self._timeout_s = timeout_s
        is_ahead = PLATFORMS[toolchain.kind].is_gpu and toolchain.triton is not None
        self._triton_sizes = [dict(sizes) for sizes in triton_sizes] if is_ahead else []
        own = self.cache_dir / "triton"  # what other hosts compile is for this tuner alone
        self._triton_folder = folder_or(own) if elsewhere is None else own
        self._num_workers, self._elsewhere = num_workers, elsewhere or Elsewhere()
        self._here = threading.Semaphore(num_workers)  # compilers that may start
        at_once = num_workers if elsewhere is None else MOST_AT_ONCE
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="build")
        self._change = threading.Condition()  # guards all below
        self._futures: dict[str, Future[Build]] = {}
        self._groups: set[int] = set()  # process groups of the running compilers
        self._begun_at: dict[str, str] = {}  # of builds that are made now
        self._num_pauses = 0
        self._pause_began = 0.0
        self._paused_s = 0.0  # all pauses that are over
        self._is_closed = False

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, candidate: Candidate) -> Future[Build]:
        """Start, or join, the build of a candidate.

        The future raises ToolchainError (no compiler for this language), StorageError (disk
        full, no permission) or CancelledError (the builder was closed).
        """
        key = self.key(candidate)
        with self._change:
            future = self._futures.get(key)
            if future is None or _is_spoilt(future):
                future = self._pool.submit(self._build, candidate, key)
                self._futures[key] = future
            return future

    def key(self, candidate: Candidate) -> str:
        """Name of the candidate's cache folder: its content and all that compiles it."""
        sizes = self._triton_sizes if candidate.language == "triton" else []
        return content_key(candidate.key, self.toolchain.signature(candidate.language), sizes)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a process that runs candidates, so that it finds what was built."""
        return {"TRITON_CACHE_DIR": str(self._triton_folder)}

    @property
    def at_once(self) -> int:
        """How many builds are done at a time, those of other hosts with them."""
        return self._num_workers + self._elsewhere.num_slots

    def at_work(self) -> list[AtWork]:
        """Return how many builders of this host, and of each other one, are busy."""
        with self._change:
            num_busy = len(self._groups)
        return [AtWork("", "builders", self._num_workers, num_busy), *self._elsewhere.at_work()]

    @property
    def pending(self) -> int:
        """How many submitted builds are not done."""
        with self._change:
            return sum(not future.done() for future in self._futures.values())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the CPU quiet: running compilers are stopped and none starts inside."""
        with self._change:
            self._num_pauses += 1
            if self._num_pauses == 1:
                self._pause_began = time.monotonic()
                self._signal_all(signal.SIGSTOP)
        try:
            yield
        finally:
            with self._change:
                self._num_pauses -= 1
                if self._num_pauses == 0:
                    self._paused_s += time.monotonic() - self._pause_began
                    self._signal_all(signal.SIGCONT)
                self._change.notify_all()

    def close(self) -> None:
        """Kill what runs, drop what waits, and wait until no process or temporary is left."""
        with self._change:
            self._is_closed = True
            self._signal_all(signal.SIGKILL)
            self._change.notify_all()
        self._elsewhere.close()
        # An interrupt between a lock and its `with` leaves it to this thread, and every build
        # that is about to end would wait for it.
        with contextlib.suppress(RuntimeError):  # of one that this thread does not hold
            while True:
                self._change.release()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _signal_all(self, number: signal.Signals) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)

    # -- one build, in a thread of the pool --

    def _build(self, candidate: Candidate, key: str) -> Build:
        started_at, thread = _now(), threading.current_thread().name  # build_0, build_1, ...
        build = self._looked_up(candidate, key)
        number = int(thread.rpartition("_")[2])
        started_at = self._begun_at.pop(key, started_at)
        return replace(build, started_at=started_at, ended_at=_now(), builder=number)

    def _looked_up(self, candidate: Candidate, key: str) -> Build:
        """Return what the cache holds, else compile."""
        started = time.monotonic()
        place = self.cache_dir / key
        self.toolchain.require(candidate.language)
        with cache_errors(self.cache_dir):
            build = load(place)
            if build is not None and has_kernels(place, self._triton_folder):
                return replace(build, is_cached=True, seconds=time.monotonic() - started)
            with filling(self.cache_dir, key) as made:
                build, is_final = self._made(candidate, key, made)
                seal(made, build, is_final=is_final)
                winner = install(made, place)
        return winner if winner is not None else placed(build, place)

    def _made(self, candidate: Candidate, key: str, folder: Path) -> tuple[Build, bool]:
        """Fill `folder`, here or elsewhere; as `_compile`."""
        is_elsewhere = self._goes_elsewhere(candidate, key)
        self._begun_at[key] = _now()  # of many threads most wait for room until then
        if is_elsewhere:
            made = self._elsewhere.make(candidate, key, folder)
            if made is not None:
                kernels = folder / KERNELS_FILE
                if kernels.exists():
                    unpack(kernels, self._triton_folder)
                    kernels.unlink()
                return made
            self._here.acquire()
        try:
            return self._compile(candidate, key, folder)
        finally:
            self._here.release()

    def _goes_elsewhere(self, candidate: Candidate, key: str) -> bool:
        """Wait for room; return whether it is elsewhere. Else a compiler may start here."""
        if self._elsewhere.begin(candidate, key, is_held=True):
            return True
        while not self._here.acquire(timeout=LOOK_EVERY_S):
            if self._is_closed:
                raise CancelledError
            if self._elsewhere.begin(candidate, key, is_held=False):
                return True
        return False

    def _compile(self, candidate: Candidate, key: str, folder: Path) -> tuple[Build, bool]:
        """Compile in `folder`; the build with relative paths, and whether to believe it later."""
        language = candidate.language
        (folder / SOURCE_NAMES[language]).write_text(candidate.source, encoding="utf-8")
        started, paused_s = time.monotonic(), self._total_paused_s()
        end = self._run(self._starter(candidate, folder), folder)
        seconds = time.monotonic() - started - (self._total_paused_s() - paused_s)
        (folder / "log.txt").write_bytes(end.output)
        log = end.output.decode(errors="replace")
        build = Build(key, Status.COMPILE, None, "log.txt", seconds=seconds)
        if end.code is None:
            error = f"the compiler was killed after {self._timeout_s:g} s"
            return replace(build, status=Status.TIMEOUT, error=error), False
        if end.code != 0:
            if matches(DISK_FULL, log) or shutil.disk_usage(folder).free < FULL_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            killed = end.code < 0 or matches(COMPILER_KILLED, log)
            return replace(build, error=first_error(log, end.code)), not killed
        if language == "triton":
            build = self._finish_triton(build, candidate, folder)
            return build, not matches(COMPILER_KILLED, build.error)
        return self._finish_native(build, candidate, folder, log), True

    def _starter(self, candidate: Candidate, folder: Path) -> Callable[[Path], Compiler]:
        """Return what starts its compiler with a folder for temporary files: of Triton, a fork."""
        if candidate.language != "triton" or not self._triton_sizes:
            command = self.toolchain.command(candidate.language)
            return lambda scratch: spawned(command, folder, self._environment(scratch))
        (folder / PLAN_FILE).write_text(to_json(candidate.plan))
        arguments = [SOURCE_NAMES["triton"], PLAN_FILE, ".", "--sizes"]
        arguments += [json.dumps(self._triton_sizes), "--arch", str(self.toolchain.capability)]

        def start(scratch: Path) -> Compiler:
            are_few = (len(self._groups) + 1) * CORES_APART <= self._num_workers
            more = ["--apart"] * are_few
            return forked([*arguments, *more], folder, self._environment(scratch))

        return start

    def _environment(self, scratch: Path) -> dict[str, str]:
        return {**os.environ, **self.environment, "TMPDIR": str(scratch), "LC_ALL": "C"}

    def _finish_triton(self, build: Build, candidate: Candidate, folder: Path) -> Build:
        """Take over what was compiled ahead; the artefact is the module's text itself."""
        plan = to_json(candidate.plan)
        done = replace(build, status=Status.CORRECT, artefact=SOURCE_NAMES["triton"])
        if not self._triton_sizes:
            return replace(done, binary_key=content_key(candidate.source, plan))
        report = from_json(AheadBuild, (folder / REPORT_FILE).read_bytes())
        if matches(DISK_FULL, report.error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if report.error:
            return replace(build, error=shortened(report.error))
        # Nothing is known of the code of a candidate that was left to the worker.
        code = report.binary_key or candidate.source
        key = content_key(code, plan)
        return replace(done, kernels=report.kernels, binary_key=key, note=shortened(report.note))

    def _finish_native(self, build: Build, candidate: Candidate, folder: Path, log: str) -> Build:
        artefact = folder / "artefact.so"
        if not artefact.is_file():
            program = self.toolchain.command(candidate.language)[0]
            raise ToolchainError(f"{program} exited with status 0 and wrote nothing")
        plan = to_json(candidate.plan)  # the same code may be called in other ways
        return replace(
            build,
            status=Status.CORRECT,
            artefact="artefact.so",
            kernels=parse_resources(log, self.toolchain.demangler),
            binary_key=content_key(hash_code(artefact.read_bytes()), plan),
        )

    def _run(self, start: Callable[[Path], Compiler], folder: Path) -> _Exit:
        """Run a compiler in its own process group, with its temporary files in `folder`."""
        scratch = folder / "scratch"
        scratch.mkdir()
        with self._change:  # holds off `paused` until the group is known
            self._change.wait_for(lambda: self._is_closed or not self._num_pauses)
            if self._is_closed:
                raise CancelledError
            process = start(scratch)
            self._groups.add(process.pid)
        try:
            restrain(process.pid, self._timeout_s)
            output, in_time = self._watch(process)
        finally:
            with self._change:
                self._groups.discard(process.pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # before the pid is free again
            code = process.wait()
            process.output.close()
            shutil.rmtree(scratch, ignore_errors=True)
        if self._is_closed:
            raise CancelledError
        return _Exit(code if in_time else None, output)

    def _watch(self, process: Compiler) -> tuple[bytes, bool]:
        """Collect the output until the process ends (True) or its time is over (False)."""
        output, pipe = bytearray(), process.output
        # Readable when the process ends; it is not waited for.
        with open(os.pidfd_open(process.pid), "rb", buffering=0) as pidfd:
            os.set_blocking(pipe.fileno(), False)
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            poll.register(pidfd, select.POLLIN)
            started, paused_s = time.monotonic(), self._total_paused_s()
            while True:
                used_s = time.monotonic() - started - (self._total_paused_s() - paused_s)
                left_s = self._timeout_s - used_s
                if left_s <= 0:
                    return bytes(output), False
                # While paused the clock stands still: look again, but not in a busy loop.
                ready = [fd for fd, _ in poll.poll(max(left_s * 1e3, 20.0))]
                if pipe.fileno() in ready and not read_some(pipe.fileno(), output):
                    poll.unregister(pipe)
                if pidfd.fileno() in ready:
                    while read_some(pipe.fileno(), output) and len(output) < LOG_BYTES:
                        pass
                    return bytes(output), True

    def _total_paused_s(self) -> float:
        with self._change:
            now_s = time.monotonic() - self._pause_began if self._num_pauses else 0.0
            return self._paused_s + now_s


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _is_spoilt(future: Future[Build]) -> bool:
    """Whether a finished build must be done again: it raised, or its files are gone."""
    if not future.done():
        return False
    if future.cancelled() or future.exception() is not None:
        return True
    build = future.result()
    return not os.path.exists(build.artefact if build.artefact is not None else build.log)
