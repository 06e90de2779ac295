"""The computer around the device: its processor, what a process may use of it, its programs.

All is read from the system (/proc, /sys, control groups), whose files differ from machine to
machine: what is not reported has an answer too.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from tuner.wording import percent

__all__ = [
    "ProgramAnswer",
    "ask_program",
    "busy_words",
    "cache_folder",
    "cgroup_folders",
    "cpu_cache_bytes",
    "cpu_name",
    "driver_version",
    "find_gpu_program",
    "find_host_compiler",
    "has_many_cores",
    "instruction_sets",
    "modules_folder",
    "usable_cores",
    "usable_memory_bytes",
]


MANY_CORES = 8
NOISY = 0.15  # of a baseline's samples: a quiet machine has 0.01 to 0.05
BUSY_SHARE = 0.6  # of the cores in use before a run begins


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """What a program printed: its output where it ended well, else why it did not."""

    is_ok: bool
    text: str


def ask_program(command: list[str], timeout_s: float = 60.0) -> ProgramAnswer:
    """Run a program and return its output; one that is not there is an answer too."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except FileNotFoundError:
        return ProgramAnswer(False, f"{command[0]} is not installed")
    except PermissionError:
        return ProgramAnswer(False, f"{command[0]} may not be run")
    except subprocess.TimeoutExpired:
        return ProgramAnswer(False, f"{command[0]} did not answer within {timeout_s:g} s")
    is_ok = done.returncode == 0
    return ProgramAnswer(is_ok, (done.stdout if is_ok else done.stderr or done.stdout).strip())


def _read(path: str | Path) -> str:
    """Return a file's text, or nothing: /proc and /sys differ from machine to machine."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _first_program(*names: str | None) -> str | None:
    found = (shutil.which(name) for name in names if name)
    return next((path for path in found if path), None)


def find_host_compiler() -> str | None:
    """Return the path of the C++ compiler, None where none is; PyTorch tries the first two."""
    return _first_program(os.environ.get("CXX"), "c++", "g++", "clang++")


def find_gpu_program(name: str) -> str | None:
    """Return the path of nvcc or ncu: of $CUDA_HOME or $CUDA_PATH, on PATH, or the usual one."""
    roots = (os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH"))
    at_roots = (str(Path(root, "bin", name)) for root in roots if root)
    return _first_program(*at_roots, name, f"/usr/local/cuda/bin/{name}")


def driver_version() -> str:
    """Return the version of NVIDIA's driver, `unknown` where none tells."""
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _read("/proc/driver/nvidia/version"))
    if match:
        return match.group(1)
    answer = ask_program(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.text.splitlines()[0].strip() if answer.is_ok and answer.text else "unknown"


def cpu_name() -> str:
    """Return the processor's model, or at least its architecture."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def instruction_sets() -> frozenset[str]:
    """Return what the processor says it can do, in Linux's words; nothing where none tells."""
    text = _read("/proc/cpuinfo")
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return frozenset(match.group(1).split() if match else ())


def cpu_cache_bytes() -> dict[int, int]:
    """Return bytes per level of the first core's data caches, where the kernel tells."""
    result = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        size = re.fullmatch(r"(\d+)([KM]?)", _read(folder / "size").strip())
        level = _read(folder / "level").strip()
        if size and level.isdigit() and "Instruction" not in _read(folder / "type"):
            unit = {"": 1, "K": 1024, "M": 1024**2}[size.group(2)]
            result[int(level)] = int(size.group(1)) * unit
    return result


def cgroup_folders(controller: str) -> list[Path]:
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


def usable_cores() -> int:
    """Count the cores this process may use: its affinity mask, cut by the cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    for folder in cgroup_folders("cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us").strip()
            period = _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def cache_folder() -> Path:
    """Return where a user's tuners keep what can be made again: $XDG_CACHE_HOME/tuner."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "tuner"


def modules_folder() -> Path:
    """Return where operators stand that were derived from a user's modules."""
    return cache_folder() / "modules"


def has_many_cores() -> bool:
    """Whether there are cores for what is needed later, perhaps, or beside a GPU's work."""
    return usable_cores() >= MANY_CORES


def busy_words(load: float, noise: float) -> str:
    """Return why times of this machine are not to be believed now, and what to do, or nothing.

    Args:
        load: how many processes were running when the user began to wait.
        noise: relative, of the samples of a baseline.
    """
    num_cores = usable_cores()
    if noise <= NOISY and load <= BUSY_SHARE * num_cores:
        return ""
    cores = "1 core" if num_cores == 1 else f"{num_cores} cores"
    return (
        f"this machine is busy: load {load:.1f} on {cores} at the start, the baseline's"
        f" times scatter by {percent(noise)}; speed-ups found now are rough; end other"
        " programs, or raise measure.finalists, as --effort thorough does"
    )


def usable_memory_bytes() -> int:
    """Return the memory that this process may use: all there is, cut by the cgroup's limit."""
    memory = int(psutil.virtual_memory().total)
    for folder in cgroup_folders("memory"):
        limit = (_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")).strip()
        if limit.isdigit():
            memory = min(memory, int(limit))
    return memory
