"""Compile a Triton candidate ahead of time, in a process of its own that never opens the GPU.

    python -m tuner.kernel.triton_build SOURCE.py plan.json OUT_DIR --arch 90 --sizes JSON

Triton compiles a kernel when it is first called. Here the candidate's plan is called with
tensors that have a shape and no memory, under a driver that only names the target, and every
launch stops after its compilation. CUDA C++ that the text holds is compiled beside that, and
its launches are noted alone. Triton's cache folder then holds what a worker, which uses
the same folder, finds there instead of compiling. So builders compile in parallel, and the one
process that owns the device only loads.

The folder is Triton's own: `TRITON_CACHE_DIR`, or ~/.triton/cache. The report is one line of JSON
on stdout and in OUT_DIR/ahead.json; logs go to stderr. The exit status is 0 also for a candidate
that does not compile.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tuner.errors import ToolchainError, TunerError
from tuner.kernel.binding import AT_ONCE, CUDA_CODE, bind
from tuner.kernel.compiler_words import hash_code, last_line, parse_resources
from tuner.machine.forks import called_in_forks, end_at_once
from tuner.machine.forkserver import die_with
from tuner.plans import Plan
from tuner.trial import KernelResources, from_json, to_json

__all__ = ["PLAN_FILE", "REPORT_FILE", "AheadBuild", "has_kernels", "main"]

PLAN_FILE = "plan.json"
REPORT_FILE = "ahead.json"  # inside OUT_DIR
WARP_THREADS = 32  # NVIDIA, every architecture
STUCK_S = 60.0  # after which a build's log says where it is
DEFAULT_SIZE = 1024  # a size nobody gave: a multiple of 16, as Triton specialises on that

# Largest dynamic shared memory of a block by compute capability: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability", less 1 KB that the system keeps.
SMEM_BYTES_MAX = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448}

_RESOURCES = "tuner_resources.json"  # beside a kernel's binary in Triton's cache
_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class AheadBuild:
    """What compiling ahead found.

    `error` is empty when every kernel compiled; it is the compiler's last line otherwise.
    `note` says why kernels are left to the worker (the candidate still is a valid one).
    `binary_key` is equal for two candidates that launch the same machine code in the same way:
    order, grids, numbers, and which tensors go where. `folders` names what Triton's cache holds
    of the kernels.
    """

    error: str = ""
    note: str = ""
    kernels: tuple[KernelResources, ...] = ()
    binary_key: str = ""
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """What compiling a part of a candidate found; `launches` are described, in order."""

    error: str = ""
    note: str = ""
    kernels: Mapping[str, KernelResources] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()
    launches: tuple[str, ...] = ()


class _NotCompiledError(Exception):
    """A kernel of the candidate does not compile, or needs more than the device has."""


class _Driver:
    """What Triton asks of the active driver in order to compile; it knows no device."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, WARP_THREADS)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(slots=True)
class _Recorder:
    """Replaces `JITFunction.run`: compile, note what was made, launch nothing."""

    arch: int
    run: Any
    kernels: dict[str, KernelResources] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)  # of the machine code
    folders: set[str] = field(default_factory=set)  # of Triton's cache, by name
    launches: list[str] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)  # kept, so that no address is used twice

    def build(self, plan: Plan, call: Any, sizes: Sequence[Mapping[str, int]]) -> _Part:
        """Compile every kernel that one call launches, at each of `sizes`."""
        error = note = ""
        self.launches, self.tensors = [], []
        try:
            for shape in sizes:
                call(*_stand_ins(plan, shape))
        except _NotCompiledError as failure:
            error = str(failure)
        except Exception as failure:  # the candidate's own host code: any exception
            traceback.print_exc(file=sys.stderr)
            note = f"left to the worker: {last_line(failure)}"
        return _Part(
            error, note, dict(self.kernels), frozenset(self.folders), tuple(self.launches)
        )

    def compile(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        log = io.StringIO()
        try:
            with contextlib.redirect_stdout(log):
                kernel = self.run(function, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            print(log.getvalue(), file=sys.stderr)
            raise _NotCompiledError(f"{function.__name__}: {last_line(error)}") from error
        print(log.getvalue(), end="", file=sys.stderr)
        if kernel.hash not in self.digests:
            self._note(kernel, log.getvalue())
        self.launches.append(self._launch(kernel, args, options, grid))
        limit = SMEM_BYTES_MAX.get(self.arch)
        if limit is not None and kernel.metadata.shared > limit:
            raise _NotCompiledError(
                f"{kernel.name}: needs {kernel.metadata.shared} bytes of shared memory, "
                f"a block of sm_{self.arch} has {limit}"
            )
        return kernel

    def _note(self, kernel: Any, log: str) -> None:
        binary = next(Path(p) for n, p in kernel.metadata_group.items() if n.endswith(".cubin"))
        self.digests[kernel.hash] = hash_code(binary.read_bytes())
        self.folders.add(binary.parent.name)
        _compile_launcher(kernel)
        beside = binary.parent / _RESOURCES
        registers, stack = _REGISTERS.search(log), _STACK.search(log)
        if registers is not None and stack is not None:
            resources = KernelResources(
                name=kernel.name,
                registers=int(registers[1]),
                smem_bytes=kernel.metadata.shared,
                spill_store_bytes=int(stack[2]),
                spill_load_bytes=int(stack[3]),
                stack_bytes=int(stack[1]),
            )
            unfinished = beside.with_suffix(f".{os.getpid()}")
            unfinished.write_text(to_json(resources))
            unfinished.replace(beside)  # two builders may compile the same kernel
        elif not beside.is_file():
            return  # compiled by a process that does not note resources
        else:
            resources = from_json(KernelResources, beside.read_text())
        self.kernels[kernel.hash] = resources

    def beside(self, code: Any) -> Any:
        """Return what stands in for CUDA C++ beside the kernels, and launches nothing."""

        def launch(name: str, *arguments: Any) -> None:
            given = [self._described(value) for value in arguments]
            self.launches.append(repr((code.key, name, given)))

        return launch

    def _launch(
        self, kernel: Any, args: Sequence[Any], options: Mapping[str, Any], grid: Any
    ) -> str:
        """Describe a launch by all that its effect depends on, in words without addresses."""
        blocks = "worked out" if callable(grid) else tuple(grid)
        about = (self.digests[kernel.hash], kernel.metadata.shared, kernel.metadata.num_warps)
        # A constant is part of the machine code; a grid may be worked out from it, though.
        names = [n for n, v in sorted(options.items()) if callable(grid) or hasattr(v, "shape")]
        given = [self._described(value) for value in (*args, *(options[n] for n in names))]
        return repr((about, blocks, names, given))

    def _described(self, value: Any) -> str:
        import torch

        if isinstance(value, tuple):
            return repr(tuple(map(self._described, value)))
        base = getattr(value, "base", None)  # a tensor descriptor's
        if base is not None and not isinstance(value, torch.Tensor):
            return f"descriptor {self._described(base)} {value.shape} {value.strides} " + str(
                getattr(value, "block_shape", "")
            )
        if not isinstance(value, torch.Tensor):
            return repr(value)
        self.tensors.append(value)
        storage = value.untyped_storage()._cdata
        known = [kept.untyped_storage()._cdata for kept in self.tensors]
        place = (known.index(storage), value.storage_offset(), value.dtype)
        return f"tensor {place} {tuple(value.shape)} {value.stride()}"


def has_kernels(place: Path, cache: Path) -> bool:
    """Whether Triton's cache still has the kernels of a build, if it has any."""
    try:
        report = from_json(AheadBuild, (place / REPORT_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return True
    return all((cache / name).is_dir() for name in report.folders)


def _build_ahead(
    source: Path,
    plan: Plan,
    *,
    arch: int,
    sizes: Sequence[Mapping[str, int]],
    is_apart: bool = False,
) -> AheadBuild:
    """Compile every kernel that the candidate's calls launch, at each of `sizes`.

    Changes this process for good (Triton's driver, its launches): it is meant for a process of
    its own.

    Args:
        source: the rendered text, as a file (Triton reads a kernel's lines from it).
        plan: the candidate's plan.
        arch: compute capability, 90 for 9.0.
        sizes: the problem's named sizes, one mapping a shape that will be called; a size that
            is missing is taken as 1024. Triton makes one binary for sizes that are multiples
            of 16 and another for those that are not.
        is_apart: compile each of a candidate's calls in a fork of its own.

    Raises:
        ToolchainError: Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise ToolchainError("Triton is not installed\n  next: pip install triton")
    recorder = _intercept(arch)
    try:
        call = bind(plan, "triton", source)
    except Exception as failure:
        traceback.print_exc(file=sys.stderr)
        return AheadBuild(last_line(failure))
    call.globals[AT_ONCE] = False
    calls = [*zip(plan.calls, call.calls, strict=True)]
    builds = [partial(recorder.build, *each, sizes) for each in calls]
    if CUDA_CODE in call.globals:
        code = call.globals[CUDA_CODE]
        call.globals[CUDA_CODE] = recorder.beside(code)
        builds.insert(0, partial(_built_by_nvcc, code))
    parts: list[_Part] = []
    if is_apart and len(builds) > 1:  # each may have a large kernel, which takes seconds
        faulthandler.cancel_dump_traceback_later()  # forks have timers of their own
        watched = [partial(_watched, build) for build in builds]
        parts = called_in_forks(watched, is_last=lambda part: bool(part.error))
    else:
        for build in builds:
            parts.append(build())
            if parts[-1].error:
                break
    error = next((part.error for part in parts if part.error), "")
    note = next((part.note for part in parts if part.note), "")
    kernels = {hash_: found for part in parts for hash_, found in part.kernels.items()}
    folders = tuple(sorted({name for part in parts for name in part.folders}))
    key = "" if error or note else _digest([word for part in parts for word in part.launches])
    return AheadBuild(error, note, tuple(kernels.values()), key, folders)


def _watched(build: Callable[[], _Part]) -> _Part:
    """Build in a fork. It would wait for ever for the thread of a timer that was not cancelled."""
    faulthandler.dump_traceback_later(STUCK_S)
    return build()


def _built_by_nvcc(code: Any) -> _Part:
    """Compile the CUDA C++ that a text holds beside its kernels."""
    try:
        found = parse_resources(code.load().log, shutil.which("c++filt"))
    except Exception as failure:
        traceback.print_exc(file=sys.stderr)
        return _Part(error=last_line(failure))
    return _Part(kernels={kernel.name: kernel for kernel in found})


def _intercept(arch: int) -> _Recorder:
    from triton import knobs
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_Driver(arch))
    knobs.nvidia.dump_ptxas_log = True  # registers and spills; no part of the cache key
    recorder = _Recorder(arch, JITFunction.run)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return recorder.compile(self, *args, grid=grid, warmup=warmup, **options)

    JITFunction.run = run
    return recorder


def _stand_ins(plan: Plan, sizes: Mapping[str, int]) -> list[Any]:
    """Return the call's arguments as tensors without memory, and numbers."""
    import torch

    values: list[Any] = []
    for argument in plan.arguments:
        if argument.shape is not None:
            shape = [sizes.get(name, DEFAULT_SIZE) for name in argument.shape]
            values.append(torch.empty(shape, dtype=getattr(torch, argument.dtype), device="meta"))
        else:
            values.append(1e-5 if argument.dtype == "float" else sizes.get(argument.name, 1))
    return values


def _compile_launcher(kernel: Any) -> None:
    """Compile the C function that launches a kernel, which Triton caches too.

    It links against the driver's library, which a machine without a GPU may lack: the worker
    compiles it then.
    """
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    missing = (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError)
    with contextlib.suppress(*missing):
        CudaUtils()
        CudaLauncher(kernel.src, kernel.metadata)


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; print the report as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m tuner.kernel.triton_build")
    parser.add_argument("source", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--arch", type=int, required=True, help="90 for compute capability 9.0")
    parser.add_argument(
        "--sizes", type=json.loads, default={}, help="JSON: an object of named sizes, or a list"
    )
    parser.add_argument("--apart", action="store_true", help="compile calls side by side")
    asked = parser.parse_args(arguments)
    try:
        plan = from_json(Plan, asked.plan.read_bytes())
        sizes = asked.sizes if isinstance(asked.sizes, list) else [asked.sizes]
        how = {"arch": asked.arch, "sizes": sizes, "is_apart": asked.apart}
        report = _build_ahead(asked.source, plan, **how)
    except TunerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    (asked.out_dir / REPORT_FILE).write_text(to_json(report))
    print(to_json(report))
    return 0


def compile_in(arguments: list[str], parent_pid: int) -> None:
    """Run as a fork of a process that has imported Triton: the whole life of this process."""
    die_with(parent_pid)
    faulthandler.dump_traceback_later(STUCK_S)  # into the log, of which a killed one is left
    code = 1
    try:
        code = main(arguments)
    except SystemExit as end:  # of the command line's parser
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    end_at_once(code)  # Python's own end would take PyTorch apart object by object


if __name__ == "__main__":
    sys.exit(main())
