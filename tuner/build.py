"""Compile candidates in parallel with the real compilers, into a content-addressed cache.

    Candidate -> Builder.submit -> Future[Build]        <cache>/<key>/source.cu | .cpp | .py
                   key known? the same future                         artefact.so
                   folder good? read it                               log.txt     (whole)
                   else compile aside, rename                         build.json  (written last)
                                                              <cache>/triton/  (Triton's own)

A folder is filled beside its place, flushed to disk and renamed, so that a reader sees all of
it or nothing. A candidate that does not compile is a `Build` that says why and is kept too;
what the machine caused (timeout, killed compiler) is not believed a second time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import resource
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from tuner.errors import StorageError, ToolchainError
from tuner.trial import (
    Build,
    Candidate,
    KernelResources,
    Language,
    Status,
    content_key,
    from_json,
    to_json,
)
from tuner.triton_build import PLAN_FILE, REPORT_FILE, AheadBuild

__all__ = ["SOURCE_NAMES", "Builder", "Toolchain", "default_cache_dir"]

CPP_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",  # not -ffast-math: NaN and Inf must behave as in the reference
)
CUDA_FLAGS = (
    "-std=c++17",
    "-O3",
    # What torch.utils.cpp_extension adds: the exported text must mean the same while searching.
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
)
SOURCE_NAMES: dict[Language, str] = {
    "cuda": "source.cu",
    "cpp": "source.cpp",
    "triton": "source.py",
}
LAYOUT_VERSION = 1  # of a cache folder and of the commands below; part of every key
LOG_BYTES = 16 * 2**20  # a runaway template error prints gigabytes
ERROR_CHARS = 400
FULL_BYTES = 2**20  # with less left than one shared object, a failure says nothing
STALE_S = 24 * 3600.0  # a temporary folder this old belongs to a builder that was killed
TRITON_FOLDER = "triton"  # of the cache: what Triton compiled, by content; candidates share it
COMPILER_NICENESS = 10  # compiling must not delay the process that measures


# ---- the toolchain --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compilers found on this machine, and the flags they get.

    Attributes:
        capability: of the GPU, 90 for 9.0; None for kind "cpu".
        cpp_flags: what shapes the code of `.cpp` text (an export's `extra_cflags`).
        cuda_flags: what shapes the code of `.cu` text (an export's `extra_cuda_cflags`).
        link_flags: for both, as the host compiler spells them.
        versions: (compiler, version text) pairs, for the record and for cache keys.
        variables: environment variables that these compilers obey, and their values.
        cpu: model and instruction sets, which `-march=native` depends on.
        demangler: path of c++filt or cu++filt; None leaves kernel names as they are.
        triton: version of the Triton that is installed; None where there is none.
    """

    kind: Literal["cpu", "cuda"]
    host_compiler: str | None
    nvcc: str | None = None
    capability: int | None = None
    cpp_flags: tuple[str, ...] = CPP_FLAGS
    cuda_flags: tuple[str, ...] = CUDA_FLAGS
    link_flags: tuple[str, ...] = ("-Wl,-z,defs", "-Wl,-s")  # a missing symbol is a build error
    versions: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    cpu: str = ""
    demangler: str | None = None
    triton: str | None = None

    @classmethod
    def find(
        cls,
        kind: Literal["cpu", "cuda"],
        capability: int | None = None,
        languages: Collection[Language] | None = None,
    ) -> Toolchain:
        """Find the compilers for a device.

        Args:
            kind: of the device.
            capability: 90 for compute capability 9.0; needed for kind "cuda".
            languages: what must be compilable; by default "cuda" or "cpp", as `kind` says.

        Raises:
            ToolchainError: a compiler is missing, does not run, or is too old for the GPU; the
                message says what to install.
        """
        host = _first_program([os.environ.get("CXX", ""), "g++", "c++", "clang++"])
        nvcc = _find_nvcc() if kind == "cuda" else None
        flags: tuple[str, ...] = CUDA_FLAGS
        if kind == "cuda":
            if capability is None:
                raise ToolchainError("the GPU's compute capability is needed to compile for it")
            flags = (*CUDA_FLAGS, _gencode(capability))
        toolchain = cls(
            kind=kind,
            host_compiler=host,
            nvcc=nvcc,
            capability=capability,
            cuda_flags=flags,
            versions=tuple((path, _version(path)) for path in (host, nvcc) if path),
            variables=tuple((v, os.environ[v]) for v in _OBEYED if v in os.environ),
            cpu=_describe_cpu(),
            demangler=_first_program(["c++filt", "cu++filt"]),
            triton=_triton_version(),
        )
        for language in languages if languages is not None else [_NATIVE[kind]]:
            toolchain.require(language)
        if nvcc is not None and "cuda" in (languages if languages is not None else ["cuda"]):
            _check_architecture(nvcc, capability or 0)
        return toolchain

    def require(self, language: Language) -> None:
        """Raise ToolchainError if `language` cannot be compiled here."""
        if language == "triton":
            if self.kind == "cuda" and self.triton is None:
                raise ToolchainError("Triton is not installed\n  hint: pip install triton")
            return
        if self.host_compiler is None:
            raise ToolchainError(
                "no C++ compiler found: looked for $CXX, g++, c++ and clang++ on PATH\n"
                "  hint: install g++ (apt install g++, dnf install gcc-c++)"
            )
        if language == "cuda" and self.nvcc is None:
            raise ToolchainError(
                "nvcc not found: looked in $CUDA_HOME/bin, $CUDA_PATH/bin, on PATH and in "
                "/usr/local/cuda/bin\n"
                "  hint: install the CUDA toolkit (its version should be your PyTorch's "
                "torch.version.cuda), or set CUDA_HOME"
            )

    def signature(self, language: Language) -> str:
        """Key of all that shapes the machine code of `language` besides the text."""
        if language == "triton":
            return content_key(LAYOUT_VERSION, "triton", self.triton, self.capability)
        cpu = self.cpu if "-march=native" in self.cpp_flags and language == "cpp" else ""
        flags = self.cpp_flags if language == "cpp" else self.cuda_flags
        versions = [version for path, version in self.versions if self._uses(path, language)]
        machine = (platform.machine(), cpu, self.variables)
        return content_key(LAYOUT_VERSION, language, flags, self.link_flags, versions, machine)

    def _uses(self, path: str, language: Language) -> bool:
        return path == self.host_compiler or language == "cuda"

    def command(self, language: Language) -> list[str]:
        """Compose the command that turns SOURCE_NAMES[language] of its folder into artefact.so."""
        self.require(language)
        if language == "triton":
            return [sys.executable, "-I", "-c", _CHECK_PYTHON, SOURCE_NAMES[language]]
        assert self.host_compiler is not None
        output = ["-shared", "-o", "artefact.so", SOURCE_NAMES[language]]
        if language == "cpp":
            return [self.host_compiler, *self.cpp_flags, "-fPIC", *self.link_flags, *output]
        assert self.nvcc is not None
        linker = [flag.removeprefix("-Wl,") for flag in self.link_flags]
        ours = ["-ccbin", self.host_compiler, "-Xcompiler", "-fPIC", "-Xptxas", "-v"]
        # Uncompressed, so that `_hash_code` sees the symbols of the device code.
        ours += ["-no-compress", *(part for flag in linker for part in ("-Xlinker", flag))]
        return [self.nvcc, *self.cuda_flags, *ours, *output]


_COMPILE_TRITON = """
import sys
sys.path.insert(0, sys.argv[1])
from tuner.triton_build import main
sys.exit(main(sys.argv[2:]))
"""
_OBEYED = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
)
_NATIVE: dict[str, Language] = {"cpu": "cpp", "cuda": "cuda"}

# Prints a syntax error in the form of a C++ compiler's. Nothing of the text is run.
_CHECK_PYTHON = """
import sys
name = sys.argv[1]
try:
    compile(open(name, "rb").read(), name, "exec")
except SyntaxError as error:
    sys.exit(f"{name}:{error.lineno}: error: {type(error).__name__}: {error.msg}\\n  {error.text}")
except (ValueError, RecursionError, MemoryError) as error:
    sys.exit(f"{name}: error: {type(error).__name__}: {error}")
"""


def _first_program(names: Sequence[str]) -> str | None:
    found = (shutil.which(name) for name in names if name)
    return next((path for path in found if path), None)


def _find_nvcc() -> str | None:
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    at_roots = [str(Path(root, "bin", "nvcc")) for root in roots if root]
    return _first_program([*at_roots, "nvcc", "/usr/local/cuda/bin/nvcc"])


def _gencode(capability: int) -> str:
    """Code for exactly this GPU; on Hopper with its own instructions (wgmma, TMA multicast)."""
    number = "90a" if capability == 90 else str(capability)
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def _check_architecture(nvcc: str, capability: int) -> None:
    known = [int(code) for code in re.findall(r"sm_(\d+)", _ask(nvcc, "--list-gpu-code"))]
    if known and capability not in known:
        raise ToolchainError(
            f"{nvcc} cannot compile for compute capability {capability / 10:.1f}; it knows "
            f"{', '.join(f'{code / 10:.1f}' for code in sorted(known))}\n"
            "  hint: install a CUDA toolkit that knows this GPU and set CUDA_HOME to it"
        )


def _triton_version() -> str | None:
    """Return the installed Triton's version, without importing it."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _version(program: str) -> str:
    """Return the line of `--version` that names the build: nvcc's last, another's first."""
    lines = _ask(program, "--version").strip().splitlines()
    if not lines:
        raise ToolchainError(f"{program} --version prints nothing; is it a compiler?")
    return lines[-1] if "nvcc" in Path(program).name else lines[0]


def _ask(program: str, question: str) -> str:
    try:
        return subprocess.run(
            [program, question],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{program} {question} does not work: {error}") from None


def _describe_cpu() -> str:
    """Model and instruction sets: two virtual machines may share a model name, not the sets."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.M)
    sets = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.M)
    return f"{model[1] if model else platform.machine()} {content_key(sets[1] if sets else '')}"


# ---- the cache ------------------------------------------------------------------------------


def default_cache_dir() -> Path:
    """Where builds are kept unless told otherwise: $XDG_CACHE_HOME/tuner/builds."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(root) if Path(root).is_absolute() else Path.home() / ".cache"
    return base / "tuner" / "builds"


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a StorageError that names the folder."""
    try:
        yield
    except OSError as error:
        hint = "\n  hint: free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StorageError(f"build cache {path}: {reason}{hint}") from error


def _prepare_cache_dir(path: Path) -> None:
    """Create the folder, or make sure that nobody else can put code into it.

    Raises:
        StorageError: it cannot be created, belongs to another user, or others may write to it.
    """
    with _storage(path):
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
        for folder in path.glob(".tmp-*"):
            with contextlib.suppress(OSError):  # its builder may be tidying up as well
                if time.time() - folder.stat().st_mtime > STALE_S:
                    shutil.rmtree(folder)


def _load(folder: Path) -> Build | None:
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
    return _absolute(build, folder)


def _absolute(build: Build, folder: Path) -> Build:
    artefact = None if build.artefact is None else str(folder / build.artefact)
    return replace(build, artefact=artefact, log=str(folder / build.log))


def _seal(folder: Path, build: Build, *, is_final: bool) -> None:
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


def _install(made: Path, place: Path) -> Build | None:
    """Rename a sealed folder into its place; the build found there if another was faster."""
    with open(place.parent / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        winner = _load(place)
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


# ---- the builder ----------------------------------------------------------------------------


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

    Raises:
        StorageError: the cache folder cannot be used, or others could plant code in it.
    """

    def __init__(
        self,
        toolchain: Toolchain,
        cache_dir: Path,
        *,
        num_workers: int,
        timeout_s: float = 120.0,
        triton_sizes: Sequence[Mapping[str, int]] = (),
    ) -> None:
        _prepare_cache_dir(cache_dir)
        self.toolchain = toolchain
        self.cache_dir = cache_dir.absolute()
        self._timeout_s = timeout_s
        is_ahead = toolchain.kind == "cuda" and toolchain.triton is not None
        self._triton_sizes = [dict(sizes) for sizes in triton_sizes] if is_ahead else []
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="build")
        self._change = threading.Condition()  # guards all below
        self._futures: dict[str, Future[Build]] = {}
        self._groups: set[int] = set()  # process groups of the running compilers
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
        return {"TRITON_CACHE_DIR": str(self.cache_dir / TRITON_FOLDER)}

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
        return replace(build, started_at=started_at, ended_at=_now(), builder=number)

    def _looked_up(self, candidate: Candidate, key: str) -> Build:
        """Return what the cache holds, else compile."""
        started = time.monotonic()
        place = self.cache_dir / key
        self.toolchain.require(candidate.language)
        with _storage(self.cache_dir):
            build = _load(place)
            if build is not None:
                return replace(build, is_cached=True, seconds=time.monotonic() - started)
            made = Path(tempfile.mkdtemp(prefix=f".tmp-{key}-", dir=self.cache_dir))
            try:
                build, is_final = self._compile(candidate, key, made)
                _seal(made, build, is_final=is_final)
                winner = _install(made, place)
            finally:
                shutil.rmtree(made, ignore_errors=True)
        return winner if winner is not None else _absolute(build, place)

    def _compile(self, candidate: Candidate, key: str, folder: Path) -> tuple[Build, bool]:
        """Compile in `folder`; the build with relative paths, and whether to believe it later."""
        language = candidate.language
        (folder / SOURCE_NAMES[language]).write_text(candidate.source, encoding="utf-8")
        started, paused_s = time.monotonic(), self._total_paused_s()
        end = self._run(self._command(candidate, folder), folder)
        seconds = time.monotonic() - started - (self._total_paused_s() - paused_s)
        (folder / "log.txt").write_bytes(end.output)
        log = end.output.decode(errors="replace")
        build = Build(key, Status.COMPILE, None, "log.txt", seconds=seconds)
        if end.code is None:
            error = f"the compiler was killed after {self._timeout_s:g} s"
            return replace(build, status=Status.TIMEOUT, error=error), False
        if end.code != 0:
            if _matches(_DISK_FULL, log) or shutil.disk_usage(folder).free < FULL_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            killed = end.code < 0 or _matches(_COMPILER_KILLED, log)
            return replace(build, error=_first_error(log, end.code)), not killed
        if language == "triton":
            build = self._finish_triton(build, candidate, folder)
            return build, not _matches(_COMPILER_KILLED, build.error)
        return self._finish_native(build, candidate, folder, log), True

    def _command(self, candidate: Candidate, folder: Path) -> list[str]:
        """Compose the compiler's command; for Triton, ahead of time if the sizes are known."""
        if candidate.language != "triton" or not self._triton_sizes:
            return self.toolchain.command(candidate.language)
        (folder / PLAN_FILE).write_text(to_json(candidate.plan))
        package = str(Path(__file__).absolute().parent.parent)
        target = ["--arch", str(self.toolchain.capability)]
        target += ["--sizes", json.dumps(self._triton_sizes)]
        # -P: a candidate's folder is no place to import from.
        ours = [sys.executable, "-P", "-c", _COMPILE_TRITON, package]
        return [*ours, SOURCE_NAMES["triton"], PLAN_FILE, ".", *target]

    def _finish_triton(self, build: Build, candidate: Candidate, folder: Path) -> Build:
        """Take over what was compiled ahead; the artefact is the module's text itself."""
        plan = to_json(candidate.plan)
        done = replace(build, status=Status.CORRECT, artefact=SOURCE_NAMES["triton"])
        if not self._triton_sizes:
            return replace(done, binary_key=content_key(candidate.source, plan))
        report = from_json(AheadBuild, (folder / REPORT_FILE).read_bytes())
        if _matches(_DISK_FULL, report.error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if report.error:
            return replace(build, error=_shortened(report.error))
        # Nothing is known of the code of a candidate that was left to the worker.
        code = report.binary_key or candidate.source
        return replace(done, kernels=report.kernels, binary_key=content_key(code, plan))

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
            kernels=_parse_resources(log, self.toolchain.demangler),
            binary_key=content_key(_hash_code(artefact.read_bytes()), plan),
        )

    def _run(self, command: Sequence[str], folder: Path) -> _Exit:
        """Run a compiler in its own process group, with its temporary files in `folder`."""
        scratch = folder / "scratch"
        scratch.mkdir()
        with self._change:  # holds off `paused` until the group is known
            self._change.wait_for(lambda: self._is_closed or not self._num_pauses)
            if self._is_closed:
                raise CancelledError
            process = _spawn(command, folder, scratch, self.environment)
            self._groups.add(process.pid)
        try:
            _restrain(process.pid, self._timeout_s)
            output, in_time = self._watch(process)
        finally:
            with self._change:
                self._groups.discard(process.pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # before the pid is free again
            code = process.wait()
            shutil.rmtree(scratch, ignore_errors=True)
        if self._is_closed:
            raise CancelledError
        return _Exit(code if in_time else None, output)

    def _watch(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bool]:
        """Collect the output until the process ends (True) or its time is over (False)."""
        assert process.stdout is not None
        output = bytearray()
        with process.stdout as pipe, contextlib.closing(_PidFd(process.pid)) as pidfd:
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
                if pipe.fileno() in ready and not _read_some(pipe.fileno(), output):
                    poll.unregister(pipe)
                if pidfd.fileno() in ready:
                    while _read_some(pipe.fileno(), output) and len(output) < LOG_BYTES:
                        pass
                    return bytes(output), True

    def _total_paused_s(self) -> float:
        with self._change:
            now_s = time.monotonic() - self._pause_began if self._num_pauses else 0.0
            return self._paused_s + now_s


@dataclass(frozen=True, slots=True)
class _PidFd:
    """A descriptor that becomes readable when the process ends; it is not waited for."""

    pid: int
    fd: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "fd", os.pidfd_open(self.pid))

    def fileno(self) -> int:
        return self.fd

    def close(self) -> None:
        os.close(self.fd)


def _spawn(
    command: Sequence[str], folder: Path, scratch: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, "TMPDIR": str(scratch), "LC_ALL": "C"},
            # A group of its own in our session: when the tuner is killed the kernel wakes and
            # ends an orphaned group that was stopped; in another session nobody would.
            process_group=0,
            bufsize=0,
        )
    except OSError as error:
        raise ToolchainError(f"cannot run {command[0]}: {error.strerror}") from None


def _read_some(fd: int, output: bytearray) -> bool:
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


def _restrain(pid: int, timeout_s: float) -> None:
    """Be nice, and bound the CPU time: even if we are killed, no compiler runs forever."""
    limit_s = math.ceil(timeout_s) + 60
    with contextlib.suppress(OSError):  # it may have ended already
        os.setpriority(os.PRIO_PROCESS, pid, COMPILER_NICENESS)
        resource.prlimit(pid, resource.RLIMIT_CPU, (limit_s, limit_s))
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


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


# ---- reading what the compilers wrote -------------------------------------------------------

# The only places where a log is classified by its words; each has a test.
_DISK_FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "fatal error: when writing output to",  # g++ then names a stale, unrelated error
)
_COMPILER_KILLED = (
    "died due to signal",  # nvcc
    "Killed signal terminated program",  # g++
    "out of memory allocating",  # g++
    "virtual memory exhausted",  # g++, ld
    "`ptxas` failed with error code -",  # Triton
)
_ERRORS = (
    re.compile(r"^.*\b(?:fatal )?error\s*(?:#\d+(?:-D)?)?\s*:.*$", re.M),  # g++, nvcc, ptxas
    re.compile(r"^ptxas fatal\s*:.*$", re.M),
    re.compile(r"^.*undefined (?:reference|symbol).*$", re.M),
    re.compile(r"^nvcc fatal\s*:.*$", re.M),
)
_LINKER_SUMMARY = "collect2: error:"  # says only that the linker has said why above


def _matches(words: Sequence[str], log: str) -> bool:
    return any(word in log for word in words)


def _first_error(log: str, code: int) -> str:
    """Return the line of the log that says why, shortened; the first if there are several."""
    found = [match for pattern in _ERRORS for match in pattern.finditer(log)]
    found = [match for match in found if not match[0].startswith(_LINKER_SUMMARY)]
    if found:
        line = min(found, key=lambda match: match.start())[0]
    else:
        lines = [line for line in log.splitlines() if line.strip()]
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        line = f"the compiler {how}" + (f": {lines[-1]}" if lines else "")
    return _shortened(line.strip())


def _shortened(line: str) -> str:
    return line if len(line) <= ERROR_CHARS else line[: ERROR_CHARS - 3] + "..."


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for")
_PROPERTIES = re.compile(r"Function properties for '?([^'\s]+)'?")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


def _parse_resources(log: str, demangler: str | None) -> tuple[KernelResources, ...]:
    """Read ptxas -v: one record a kernel; device functions that were not inlined are left out."""
    kernels: dict[str, dict[str, int]] = {}
    entry = described = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = described = match[1]
            kernels.setdefault(entry, {})
        elif match := _PROPERTIES.search(line):
            described = match[1]
        elif (match := _STACK.search(line)) and described in kernels:
            stack, stores, loads = (int(number) for number in match.groups())
            kernels[described].update(stack=stack, stores=stores, loads=loads)
        elif (match := _USED.search(line)) and entry:
            smem = _SMEM.search(line)
            kernels[entry].update(registers=int(match[1]), smem=int(smem[1]) if smem else 0)
    names = _demangle(list(kernels), demangler)
    return tuple(
        KernelResources(
            name=name,
            registers=found.get("registers", 0),
            smem_bytes=found.get("smem", 0),
            spill_store_bytes=found.get("stores", 0),
            spill_load_bytes=found.get("loads", 0),
            stack_bytes=found.get("stack", 0),
        )
        for name, found in zip(names, kernels.values(), strict=True)
    )


def _demangle(names: list[str], demangler: str | None) -> list[str]:
    """Readable names without their parameters; as they are if the demangler fails."""
    if not names or demangler is None:
        return names
    try:
        done = subprocess.run(
            [demangler, "-p", *names], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return names
    lines = done.stdout.splitlines()
    return lines if len(lines) == len(names) else names


# The number that nvcc derives from the text and puts into names of internal linkage.
_MODULE_ID = re.compile(rb"(?<=_)[0-9a-f]{8}(?=_9_source_cu)")


def _hash_code(elf: bytes) -> str:
    """Hash all that a shared object loads into memory, the device code included.

    Left out: the build id and what is not loaded (symbols with the compiler's temporary
    names). nvcc's module id is blanked, since it changes with every comment of the text.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ToolchainError("the compiler did not write a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_at = struct.unpack_from("<HHH", elf, 58)
    fields: list[tuple[Any, ...]] = [
        struct.unpack_from("<IIQQQQ", elf, table + number * size) for number in range(count)
    ]
    names = fields[names_at][4]
    digest = hashlib.sha256()
    for name_at, kind, flags, _, offset, length in fields:
        if not flags & _SHF_ALLOC or kind == _SHT_NOTE:
            continue
        name = elf[names + name_at : elf.index(b"\0", names + name_at)]
        digest.update(name + struct.pack("<QQ", kind, length))
        if kind != _SHT_NOBITS:
            digest.update(_MODULE_ID.sub(b"0" * 8, elf[offset : offset + length]))
    return digest.hexdigest()


_SHF_ALLOC, _SHT_NOTE, _SHT_NOBITS = 2, 7, 8  # <elf.h>
