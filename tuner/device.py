"""What the hardware is, what it could do at best, and what this machine can build and run.

Facts come from the driver (`describe`) or, on a machine without the GPU, from a small table of
known ones (`known_device`). Ceilings come from NVIDIA's datasheets, each with its source; where
a rate is not known the answer is None, never a guess.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import psutil

from tuner.errors import DeviceError, InputError, did_you_mean

__all__ = [
    "Device",
    "Finding",
    "bandwidth_gbps",
    "describe",
    "doctor",
    "environment",
    "floor_us",
    "impossible_us",
    "known_device",
    "occupancy",
    "peak_tflops",
    "roofline_tflops",
]

_CLOCK_HEADROOM = 1.1
"""Real clocks over rated ones. NVIDIA's H100 whitepaper (table "H100 GPU boost clocks") rates the
tensor cores at 1830 MHz while the card may run at 1980 MHz, 8 % more: a floor must allow that."""

_MIN_FREE_BYTES = 2 * 1024**3  # PyTorch's own extension builds and a few hundred candidates


@dataclass(frozen=True, slots=True)
class Device:
    """The device that candidates run on; a fact that is not known, or not of its kind, is None.

    `capability` is 90 for compute capability 9.0. `smem_bytes_max` is the shared memory that one
    block may opt in to, `smem_bytes_sm` what one multiprocessor has. `num_cores` are the CPU
    cores that this process may use, `simd_bits` the width of their vector registers. `l2_bytes`
    is the whole L2 of a GPU, but one core's L2 on a CPU.
    """

    kind: Literal["cpu", "cuda"]
    index: int
    name: str
    memory_bytes: int
    l2_bytes: int | None = None
    # cuda
    capability: int | None = None
    num_sms: int | None = None
    smem_bytes_max: int | None = None
    smem_bytes_sm: int | None = None
    regs_per_sm: int | None = None
    max_threads_per_sm: int | None = None
    max_threads_per_block: int | None = None
    warp_size: int | None = None
    driver: str | None = None
    has_triton: bool | None = None  # installed beside PyTorch
    # cpu
    num_cores: int | None = None
    simd_bits: int | None = None
    l3_bytes: int | None = None

    @property
    def torch_name(self) -> str:
        """The name that PyTorch takes, `cpu` or `cuda:0`."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def facts(self) -> dict[str, bool | int | float | str]:
        """Return what constraints may use: `device.kind` and the numbers known of this kind."""
        unfit = {"index", "name", "driver"}  # not numbers that a kernel's shape could depend on
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in unfit}
        return {f"device.{name}": value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `doctor` looked at; `remedy` says what to do where it is not well."""

    name: str
    is_ok: bool
    detail: str
    remedy: str = ""


# ---- the device that is there ---------------------------------------------------------------


def describe(device_text: str) -> Device:
    """Return the facts of a device of this machine.

    Imports PyTorch and initialises CUDA for anything but `cpu`, so call it in a worker only.

    Args:
        device_text: `auto` (the first GPU if there is one, else the CPU), `cpu`, `cuda` or
            `cuda:N`.

    Raises:
        InputError: the text is none of these.
        DeviceError: there is no such device; says which there are.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", device_text)
    if match is None:
        raise InputError(
            f"device: got {device_text!r}\n  expected: auto, cpu, cuda or cuda:N\n"
            f"  {did_you_mean(device_text, ['auto', 'cpu', 'cuda', 'cuda:0'])}".rstrip()
        )
    if device_text == "cpu":
        return _describe_cpu()
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_text == "auto" and num_gpus == 0:
        return _describe_cpu()
    index = int(match.group(1) or 0)
    if index >= num_gpus:
        there = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(num_gpus)]
        why = "" if torch.version.cuda else f"\n  PyTorch {torch.__version__} has no CUDA in it"
        raise DeviceError(
            f"device: no {device_text} on this machine{why}\n  there is: "
            f"{', '.join(['cpu', *there])}\n  next: --device auto, or see `tune doctor`"
        )
    return _describe_cuda(index, torch.cuda.get_device_properties(index))


def _describe_cuda(index: int, properties: Any) -> Device:
    return Device(
        kind="cuda",
        index=index,
        name=properties.name,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        capability=10 * properties.major + properties.minor,
        num_sms=properties.multi_processor_count,
        smem_bytes_max=properties.shared_memory_per_block_optin,
        smem_bytes_sm=properties.shared_memory_per_multiprocessor,
        regs_per_sm=properties.regs_per_multiprocessor,
        max_threads_per_sm=properties.max_threads_per_multi_processor,
        # PyTorch 2.9 does not tell; 1024 on every GPU since compute capability 2.0
        max_threads_per_block=getattr(properties, "max_threads_per_block", 1024),
        warp_size=properties.warp_size,
        driver=_driver_version(),
        has_triton=importlib.util.find_spec("triton") is not None,
    )


def _describe_cpu() -> Device:
    caches = _cpu_caches()
    return Device(
        kind="cpu",
        index=0,
        name=_cpu_name(),
        memory_bytes=_usable_memory_bytes(),
        l2_bytes=caches.get(2),
        l3_bytes=caches.get(3),
        num_cores=_usable_cores(),
        simd_bits=_simd_bits(),
    )


def _read(path: str | Path) -> str:
    """Return a file's text, or nothing: /proc and /sys differ from machine to machine."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _driver_version() -> str:
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _read("/proc/driver/nvidia/version"))
    if match:
        return match.group(1)
    answer = _run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.text.splitlines()[0].strip() if answer.is_ok and answer.text else "unknown"


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _simd_bits() -> int:
    match = re.search(r"^flags\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    flags = match.group(1).split() if match else []
    if "avx512f" in flags:
        return 512
    return 256 if "avx2" in flags else 128  # SSE and NEON are 128 wide


def _cpu_caches() -> dict[int, int]:
    """Return bytes per level of the first core's data caches, where the kernel tells."""
    result = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        size = re.fullmatch(r"(\d+)([KM]?)", _read(folder / "size").strip())
        level = _read(folder / "level").strip()
        if size and level.isdigit() and "Instruction" not in _read(folder / "type"):
            unit = {"": 1, "K": 1024, "M": 1024**2}[size.group(2)]
            result[int(level)] = int(size.group(1)) * unit
    return result


def _cgroup_folders(controller: str) -> list[Path]:
    """Return this process's control groups, innermost first, for cgroup v2 and for v1."""
    result = []
    for line in _read("/proc/self/cgroup").splitlines():
        number, controllers, name = line.split(":", 2)
        roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
        if number != "0":
            if controller not in controllers.split(","):
                continue
            roots = [Path("/sys/fs/cgroup") / controllers, Path("/sys/fs/cgroup") / controller]
        for root in roots:
            here = root / name.strip("/")
            result += [here, *(p for p in here.parents if p.is_relative_to(root))]
    return result


def _usable_cores() -> int:
    """Count the cores this process may use: its affinity mask, cut by the cgroup's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for folder in _cgroup_folders("cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us").strip()
            period = _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _usable_memory_bytes() -> int:
    memory = int(psutil.virtual_memory().total)
    for folder in _cgroup_folders("memory"):
        limit = (_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")).strip()
        if limit.isdigit():
            memory = min(memory, int(limit))
    return memory


# ---- devices known by name, and their ceilings -----------------------------------------------


@dataclass(frozen=True, slots=True)
class _Profile:
    """A known GPU: its facts, dense peaks in TFLOPS by precision, and memory bandwidth in GB/s."""

    device: Device
    tflops: Mapping[str, float]
    gbps: float
    source: str


def _gpu(name: str, memory_mib: int, *, capability: int, num_sms: int, l2_mib: int) -> Device:
    """Fill in what all GPUs of sm_80 and sm_90 share.

    Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": a
    block may use all shared memory of its multiprocessor but 1 KiB.
    """
    smem_bytes_sm = {80: 164, 90: 228}[capability] * 1024
    return Device(
        kind="cuda",
        index=0,
        name=name,
        memory_bytes=memory_mib * 1024**2,
        l2_bytes=l2_mib * 1024**2,
        capability=capability,
        num_sms=num_sms,
        smem_bytes_max=smem_bytes_sm - 1024,
        smem_bytes_sm=smem_bytes_sm,
        regs_per_sm=65536,
        max_threads_per_sm=2048,
        max_threads_per_block=1024,
        warp_size=32,
        has_triton=True,
    )


_HOPPER_SXM = {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_HOPPER_PCIE = {"fp32": 51.2, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0, "fp8": 1513.0}
_AMPERE = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}

# Names are the driver's own, whole: the PCIe, NVL and SXM parts of one chip differ in their rates.
# Datasheets print tensor rates with sparsity; these are the dense ones, half of them.
_PROFILES = (
    _Profile(
        _gpu("NVIDIA H200", 143771, capability=90, num_sms=132, l2_mib=60),
        _HOPPER_SXM,
        4800.0,
        "NVIDIA H200 Tensor Core GPU datasheet (SXM); L2 as the driver reports it",
    ),
    _Profile(
        _gpu("NVIDIA H100 80GB HBM3", 81559, capability=90, num_sms=132, l2_mib=50),
        _HOPPER_SXM,
        3350.0,
        "NVIDIA H100 Tensor Core GPU datasheet (SXM5) and architecture whitepaper",
    ),
    _Profile(
        _gpu("NVIDIA H100 PCIe", 81559, capability=90, num_sms=114, l2_mib=50),
        _HOPPER_PCIE,
        2000.0,
        "NVIDIA H100 Tensor Core GPU architecture whitepaper (PCIe)",
    ),
    _Profile(
        _gpu("NVIDIA A100-SXM4-80GB", 81920, capability=80, num_sms=108, l2_mib=40),
        _AMPERE,
        2039.0,
        "NVIDIA A100 80GB datasheet (SXM)",
    ),
    _Profile(
        _gpu("NVIDIA A100-SXM4-40GB", 40960, capability=80, num_sms=108, l2_mib=40),
        _AMPERE,
        1555.0,
        "NVIDIA A100 40GB datasheet (SXM)",
    ),
    _Profile(
        _gpu("NVIDIA A100 80GB PCIe", 81920, capability=80, num_sms=108, l2_mib=40),
        _AMPERE,
        1935.0,
        "NVIDIA A100 80GB datasheet (PCIe)",
    ),
)


def known_device(name: str = "NVIDIA H200") -> Device:
    """Return the facts of a GPU that need not be in this machine, for a dry run.

    Args:
        name: the driver's name of it, or a part of that name (`H200`); the first that fits.

    Raises:
        DeviceError: no such GPU is known here; lists those that are.
    """
    for profile in _PROFILES:
        if name.lower() in profile.device.name.lower():
            return profile.device
    known = [profile.device.name for profile in _PROFILES]
    raise DeviceError(
        f"device: nothing is known here of a GPU {name!r}\n  known: {', '.join(known)}\n"
        f"  {did_you_mean(name, known)}".rstrip()
    )


def _profile(device: Device) -> _Profile | None:
    return next((p for p in _PROFILES if p.device.name == device.name), None)


def peak_tflops(device: Device, precision: str) -> float | None:
    """Return the most useful TFLOPS (1e12 FLOP/s, dense) the device can do in `precision`.

    Args:
        device: as `describe` or `known_device` gave it.
        precision: `fp32` (plain cores), `tf32`, `fp16`, `bf16`, `fp8` (tensor cores), or one of
            these with the number of products that each useful one takes, as in `fp16x3`.

    Returns:
        The datasheet's rate, divided by the number of products; None where it is not known.
    """
    match = re.fullmatch(r"(fp32|tf32|fp16|bf16|fp8)(?:x([1-9]))?", precision)
    profile = _profile(device)
    if match is None or profile is None or match.group(1) not in profile.tflops:
        return None
    return profile.tflops[match.group(1)] / int(match.group(2) or 1)


def bandwidth_gbps(device: Device) -> float | None:
    """Return the device memory's datasheet bandwidth in GB/s (1e9 bytes), None if not known."""
    profile = _profile(device)
    return profile.gbps if profile else None


def roofline_tflops(
    flops: float, num_bytes: float, device: Device, precision: str
) -> float | None:
    """Bound the useful TFLOPS of a problem, or None where the device's rates are not known.

    Args:
        flops: the problem's operations; one fused multiply-add counts as two.
        num_bytes: each operand counted once; a kernel that reads inputs again lies below.
        device: the device it runs on.
        precision: as for `peak_tflops`.

    Source: Williams, Waterman, Patterson, "Roofline", CACM 2009.
    """
    peak, gbps = peak_tflops(device, precision), bandwidth_gbps(device)
    if peak is None or gbps is None:
        return None
    return min(peak, flops / num_bytes * gbps / 1e3) if num_bytes > 0 else peak


def floor_us(flops: float, num_bytes: float, device: Device, precision: str) -> float:
    """Return the time in us below which no honest measurement can be, 0 where nothing is known.

    Lower than the roofline's time on purpose, since it is used to reject: clocks may run above
    the rated ones, and as many bytes as the L2 holds may not have reached memory when the last
    kernel ends. It holds for inputs that start in device memory (cold measurements).
    """
    peak, gbps = peak_tflops(device, precision), bandwidth_gbps(device)
    arithmetic_us = flops / (peak * _CLOCK_HEADROOM) / 1e6 if peak else 0.0
    moved = max(0.0, num_bytes - (device.l2_bytes or 0))
    memory_us = moved / gbps / 1e3 if gbps else 0.0
    return max(arithmetic_us, memory_us)


_CPU_CLOCK_GHZ = 7.0  # above any core's, overclocked ones included
_CPU_FMA_UNITS = 2  # of a core, the most that any has
_CPU_MATRIX_FACTOR = 32  # Intel AMX: 1024 16-bit multiply-adds a cycle, 32 times one AVX-512 unit


def impossible_us(flops: float, num_bytes: float, device: Device, precision: str) -> float:
    """Return a time in us below which a measurement must be wrong, 0 where nothing is known.

    On a GPU `floor_us`. On a CPU no datasheet is looked up: all of its cores at a clock that none
    has, in 16-bit matrix units where they may have some; so far below an honest time that only
    work that was not done lies below it.
    """
    if device.kind != "cpu":
        return floor_us(flops, num_bytes, device, precision)
    lanes, cores = (device.simd_bits or 0) // 32, device.num_cores or 0
    match = re.fullmatch(r"fp16(?:x([1-9]))?", precision)
    factor = 1.0
    if match is not None and (device.simd_bits or 0) >= 512:
        factor = _CPU_MATRIX_FACTOR / int(match.group(1) or 1)
    per_us = 2 * lanes * _CPU_FMA_UNITS * cores * _CPU_CLOCK_GHZ * 1e3 * factor
    return flops / per_us if per_us else 0.0


# ---- occupancy ------------------------------------------------------------------------------

# All from NVIDIA's cuda_occupancy.h (CUDA 13.0), for compute capability 8.0 to 12.x.
_REGISTER_GRANULARITY = 256  # registers, allocated a warp at a time
_SMEM_GRANULARITY_BYTES = 128
_SMEM_RESERVED_BYTES = 1024  # a block, by the driver (Programming Guide, since sm_80)
_NUM_PARTITIONS = 4  # of a multiprocessor; a warp's registers lie in one
_MAX_REGISTERS_PER_THREAD = 255  # what the instruction encoding can name (Programming Guide)
_MAX_BLOCKS_PER_SM = {80: 32, 86: 16, 87: 16, 89: 24, 90: 32, 100: 32, 103: 32, 120: 24, 121: 24}


def occupancy(device: Device, threads: int, registers: int, smem_bytes: int) -> float:
    """Return resident warps over the most a multiprocessor can hold, 0 if a block cannot run.

    Args:
        device: a GPU of compute capability 8.0 or later.
        threads: threads of a block.
        registers: 32-bit registers a thread, as the compiler reports them.
        smem_bytes: shared memory of a block, static and dynamic.

    Raises:
        DeviceError: the device is a CPU, or a GPU whose limits are not known here.

    Source: NVIDIA, cuda_occupancy.h of CUDA 13.0; the tests compare with it.
    """
    max_blocks = _MAX_BLOCKS_PER_SM.get(device.capability or 0)
    sizes = (device.warp_size, device.max_threads_per_sm, device.max_threads_per_block)
    memories = (device.regs_per_sm, device.smem_bytes_sm, device.smem_bytes_max)
    if max_blocks is None or None in sizes or None in memories:
        raise DeviceError(f"occupancy: the limits of {device.name} are not known")
    warp_size, threads_per_sm, threads_per_block = (size or 0 for size in sizes)
    regs_per_sm, smem_per_sm, smem_per_block = (size or 0 for size in memories)
    warps = -(-threads // warp_size)
    if not 1 <= threads <= threads_per_block or registers > _MAX_REGISTERS_PER_THREAD:
        return 0.0
    limits = [max_blocks, threads_per_sm // warp_size // warps]
    if registers > 0:
        regs_per_warp = _round_up(registers * warp_size, _REGISTER_GRANULARITY)
        if regs_per_warp * _round_up(warps, _NUM_PARTITIONS) > regs_per_sm:
            return 0.0
        warps_per_partition = regs_per_sm // _NUM_PARTITIONS // regs_per_warp
        limits.append(warps_per_partition * _NUM_PARTITIONS // warps)
    if smem_bytes > smem_per_block:
        return 0.0
    block_bytes = _round_up(smem_bytes + _SMEM_RESERVED_BYTES, _SMEM_GRANULARITY_BYTES)
    limits.append(smem_per_sm // block_bytes)
    return min(limits) * warps / (threads_per_sm // warp_size)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


# ---- what this machine has ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    is_ok: bool
    text: str


def _run(command: list[str], timeout_s: float = 60.0) -> _Answer:
    """Run a program and return its output; one that is not there is an answer too."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except FileNotFoundError:
        return _Answer(False, f"{command[0]} is not installed")
    except PermissionError:
        return _Answer(False, f"{command[0]} may not be run")
    except subprocess.TimeoutExpired:
        return _Answer(False, f"{command[0]} did not answer within {timeout_s:g} s")
    is_ok = done.returncode == 0
    return _Answer(is_ok, (done.stdout if is_ok else done.stderr or done.stdout).strip())


def _find_compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _find_nvcc() -> str | None:
    usual = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.is_file() else None)


def _nvcc_release(nvcc: str) -> str | None:
    match = re.search(r"release (\d+\.\d+)", _run([nvcc, "--version"]).text)
    return match.group(1) if match else None


def _commit() -> str | None:
    """Return the commit that the tuner runs from, marked where files differ from it."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():  # installed: an enclosing repository is not ours
        return None
    head = _run(["git", "-C", str(root), "rev-parse", "HEAD"])
    if not head.is_ok:
        return None
    changes = _run(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return head.text + ("+changes" if changes.text else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: Device) -> dict[str, str]:
    """Return what a measurement depends on: versions, system, device; nothing that names a host.

    What is not there is left out. Imports PyTorch but initialises no CUDA.
    """
    import torch

    compiler, nvcc = _find_compiler(), _find_nvcc()
    first_line = _run([compiler, "--version"]).text.splitlines()[:1] if compiler else []
    found: dict[str, str | None] = {
        "device": device.name,
        "driver": device.driver,
        "cpu": _cpu_name(),
        "num_cores": str(_usable_cores()),
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
    compiler = _find_compiler()
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
        Finding("CPU cores", True, f"{_usable_cores()} usable, {_simd_bits()}-bit vectors"),
    ]


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
    answer = _run([compiler, "--version"])
    text = answer.text.splitlines()[0] if answer.text else compiler
    return Finding("C++ compiler", answer.is_ok, text, "" if answer.is_ok else remedy)


def _openmp_finding(compiler: str | None) -> Finding:
    remedy = "install OpenMP for the compiler, e.g. apt-get install libgomp1 (GCC) or libomp-dev"
    if compiler is None:
        return Finding("OpenMP", False, "needs a C++ compiler", remedy)
    with tempfile.TemporaryDirectory() as name:
        source, program = Path(name) / "openmp.cpp", Path(name) / "openmp"
        source.write_text(_OPENMP_PROGRAM, encoding="utf-8")
        built = _run([compiler, "-std=c++17", "-fopenmp", str(source), "-o", str(program)])
        answer = _run([str(program)]) if built.is_ok else built
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
    nvcc = _find_nvcc()
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
    answer = _run([sys.executable, "-W", "ignore", "-c", _GPU_PROGRAM], timeout_s=120.0)
    if answer.is_ok:
        return Finding("GPU", True, f"{answer.text}; driver {_driver_version()}")
    last = answer.text.splitlines()[-1] if answer.text else "PyTorch does not start"
    remedy = "CPU templates work without one; else install NVIDIA's driver and a CUDA PyTorch"
    return Finding("GPU", False, last, remedy)


def _triton_finding() -> Finding:
    remedy = "pip install triton (comes with PyTorch for CUDA on Linux); others work without"
    if importlib.util.find_spec("triton") is None:
        return Finding("Triton", False, "not installed: no Triton templates", remedy)
    code = "import triton; print(triton.__version__)"
    answer = _run([sys.executable, "-W", "ignore", "-c", code], timeout_s=120.0)
    last = answer.text.splitlines()[-1] if answer.text else "does not import"
    return Finding("Triton", answer.is_ok, last, "" if answer.is_ok else remedy)


def _disk_finding(folder: Path) -> Finding:
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    is_ok = free >= _MIN_FREE_BYTES
    detail = f"{free / 1024**3:.1f} GiB free at {there}"
    return Finding("disk space", is_ok, detail, "" if is_ok else "free at least 2 GiB")
