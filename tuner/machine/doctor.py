"""What is installed here: the record that a measurement needs, and what to install for more.

environment(device)   versions of all that a time depends on
doctor(folder)        what this machine can build and run, each with its remedy
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import InputError
from tuner.machine.device import Device
from tuner.machine.host import (
    ask_program,
    cpu_name,
    driver_version,
    find_gpu_program,
    find_host_compiler,
    usable_cores,
)
from tuner.machine.vectors import MARCH_VARIABLE, NATIVE, vectors

__all__ = ["Finding", "doctor", "environment", "tuner_version"]

_MIN_FREE_BYTES = 2 * 1024**3  # PyTorch's own extension builds and a few hundred candidates


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `doctor` looked at; `remedy` says what to do where it is not well."""

    name: str
    is_ok: bool
    detail: str
    remedy: str = ""


def _nvcc_release(nvcc: str) -> str | None:
    match = re.search(r"release (\d+\.\d+)", ask_program([nvcc, "--version"]).text)
    return match.group(1) if match else None


def _commit() -> str | None:
    """Return the commit that the tuner runs from, marked where files differ from it."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():  # installed: an enclosing repository is not ours
        return None
    head = ask_program(["git", "-C", str(root), "rev-parse", "HEAD"])
    if not head.is_ok:
        return None
    changes = ask_program(
        ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"]
    )
    return head.text + ("+changes" if changes.text else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def tuner_version() -> str:
    """Return this tuner's version, as installed."""
    return _version("tuner") or "(not installed)"  # run from a checkout


def environment(device: Device) -> dict[str, str]:
    """Return what a measurement depends on: versions, system, device; nothing that names a host.

    What is not there is left out. Imports PyTorch but initialises no CUDA.
    """
    import torch

    compiler, nvcc = find_host_compiler(), find_gpu_program("nvcc")
    march = vectors().march
    first_line = ask_program([compiler, "--version"]).text.splitlines()[:1] if compiler else []
    found: dict[str, str | None] = {
        "device": device.name,
        "driver": device.driver,
        "cpu": cpu_name(),
        "num_cores": str(usable_cores()),
        "march": None if march == NATIVE else march,  # where the user left code fewer sets
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": _version("triton"),
        "nvcc": _nvcc_release(nvcc) if nvcc else None,
        "compiler": first_line[0] if first_line else None,
        "tuner": _version("tuner"),
        "tuner_commit": _commit(),
    }
    return {name: text for name, text in found.items() if text}


# ---- doctor ---------------------------------------------------------------------------------

_OPENMP_PROGRAM = """
#include <cstdio>
#include <omp.h>
int main() {
    int threads = 0;
#pragma omp parallel reduction(+ : threads)
    threads += 1;
    std::printf("%d", threads);
    return threads == omp_get_max_threads() ? 0 : 1;
}
"""

_GPU_PROGRAM = """
import torch
if not torch.cuda.is_available():
    raise SystemExit("no NVIDIA GPU that PyTorch can use" if torch.version.cuda
                     else f"PyTorch {torch.__version__} has no CUDA in it")
print(", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))
"""


def doctor(folder: Path | None = None) -> list[Finding]:
    """Look at what this machine can build and run.

    Runs compilers on a tiny program and looks for a GPU in a process of its own; takes a few
    seconds. Nothing found is an error: each finding says what it means and what to install.

    Args:
        folder: where runs will be written, for the disk space; the current one if None.
    """
    compiler = find_host_compiler()
    return [
        _python_headers(),
        _compiler_finding(compiler),
        _openmp_finding(compiler),
        *(_tool_finding(tool) for tool in ("make", "git")),
        _ninja_finding(),
        _nvcc_finding(),
        _gpu_finding(),
        _triton_finding(),
        _disk_finding(folder or Path.cwd()),
        Finding("CPU cores", True, f"{usable_cores()} usable"),
        _vectors_finding(),
    ]


def _vectors_finding() -> Finding:
    try:
        return Finding("CPU vectors", True, str(vectors()))
    except InputError as error:
        remedy = f"unset {MARCH_VARIABLE}, or give it a level that the processor has"
        return Finding("CPU vectors", False, str(error).splitlines()[0], remedy)


def _python_headers() -> Finding:
    path = Path(sysconfig.get_path("include")) / "Python.h"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    remedy = f"install Python's headers, e.g. apt-get install python{version}-dev"
    there = path.is_file()
    text = f"{path}" if there else f"no {path}: exported modules cannot be compiled"
    return Finding("Python headers", there, text, "" if there else remedy)


def _compiler_finding(compiler: str | None) -> Finding:
    remedy = "install a C++17 compiler, e.g. apt-get install g++"
    if compiler is None:
        return Finding("C++ compiler", False, "no c++, g++ or clang++ on the PATH", remedy)
    answer = ask_program([compiler, "--version"])
    text = answer.text.splitlines()[0] if answer.text else compiler
    return Finding("C++ compiler", answer.is_ok, text, "" if answer.is_ok else remedy)


def _openmp_finding(compiler: str | None) -> Finding:
    remedy = "install OpenMP for the compiler, e.g. apt-get install libgomp1 (GCC) or libomp-dev"
    if compiler is None:
        return Finding("OpenMP", False, "needs a C++ compiler", remedy)
    with tempfile.TemporaryDirectory() as name:
        source, program = Path(name) / "openmp.cpp", Path(name) / "openmp"
        source.write_text(_OPENMP_PROGRAM, encoding="utf-8")
        built = ask_program([compiler, "-std=c++17", "-fopenmp", str(source), "-o", str(program)])
        answer = ask_program([str(program)]) if built.is_ok else built
    if answer.is_ok:
        return Finding("OpenMP", True, f"compiles and runs with {answer.text} threads")
    first = answer.text.splitlines()[0] if answer.text else "the program failed"
    return Finding("OpenMP", False, first, remedy)


def _tool_finding(tool: str) -> Finding:
    path = shutil.which(tool)
    remedy = "" if path else f"install it, e.g. apt-get install {tool}"
    return Finding(tool, path is not None, path or "not on the PATH", remedy)


def _ninja_finding() -> Finding:
    # beside Python first: a virtual environment that is not activated is not on the PATH
    beside = Path(sys.executable).parent / "ninja"
    path = str(beside) if beside.is_file() else shutil.which("ninja")
    remedy = "" if path else "pip install ninja"
    detail = path or "not found: exported modules cannot be compiled"
    return Finding("ninja", path is not None, detail, remedy)


def _nvcc_finding() -> Finding:
    import torch

    wanted = torch.version.cuda
    remedy = f"install the CUDA toolkit{f' {wanted}' if wanted else ''}, with nvcc on the PATH"
    nvcc = find_gpu_program("nvcc")
    if nvcc is None:
        return Finding("nvcc", False, "not found: only CPU and Triton templates", remedy)
    release = _nvcc_release(nvcc)
    if release is None:
        return Finding("nvcc", False, f"{nvcc} does not answer", remedy)
    if wanted is None:
        return Finding("nvcc", True, f"{release} at {nvcc}; PyTorch here has no CUDA in it")
    # torch.utils.cpp_extension refuses another major version, and warns of another minor one
    is_ok = release.split(".")[0] == wanted.split(".")[0]
    detail = f"{release} at {nvcc}; PyTorch was built with {wanted}"
    return Finding("nvcc", is_ok, detail, "" if is_ok else remedy)


def _gpu_finding() -> Finding:
    answer = ask_program(
        [sys.executable, "-P", "-W", "ignore", "-c", _GPU_PROGRAM], timeout_s=120.0
    )
    if answer.is_ok:
        return Finding("GPU", True, f"{answer.text}; driver {driver_version()}")
    last = answer.text.splitlines()[-1] if answer.text else "PyTorch does not start"
    remedy = "CPU templates work without one; else install NVIDIA's driver and a CUDA PyTorch"
    return Finding("GPU", False, last, remedy)


def _triton_finding() -> Finding:
    remedy = "pip install triton (comes with PyTorch for CUDA on Linux); others work without"
    if importlib.util.find_spec("triton") is None:
        return Finding("Triton", False, "not installed: no Triton templates", remedy)
    code = "import triton; print(triton.__version__)"
    answer = ask_program([sys.executable, "-P", "-W", "ignore", "-c", code], timeout_s=120.0)
    last = answer.text.splitlines()[-1] if answer.text else "does not import"
    return Finding("Triton", answer.is_ok, last, "" if answer.is_ok else remedy)


def _disk_finding(folder: Path) -> Finding:
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    is_ok = free >= _MIN_FREE_BYTES
    detail = f"{free / 1024**3:.1f} GiB free at {there}"
    return Finding("disk space", is_ok, detail, "" if is_ok else "free at least 2 GiB")
