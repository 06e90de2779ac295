"""The device that candidates run on: its facts, as the driver and the system tell them."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, fields
from typing import Any

from tuner.errors import DeviceError, InputError, did_you_mean
from tuner.machine.host import (
    cpu_cache_bytes,
    cpu_name,
    driver_version,
    find_gpu_program,
    usable_cores,
    usable_memory_bytes,
)
from tuner.machine.platforms import Kind
from tuner.machine.vectors import vectors

__all__ = ["Device", "describe"]


@dataclass(frozen=True, slots=True)
class Device:
    """The device that candidates run on; a fact that is not known, or not of its kind, is None.

    `capability` is 90 for compute capability 9.0. `smem_bytes_max` is the shared memory that one
    block may opt in to, `smem_bytes_sm` what one multiprocessor has. `num_cores` are the CPU
    cores that this process may use, `simd_bits` and `simd_registers` the width and the number of
    the vector registers that generated code may use, `machine_simd_bits` the widest that the
    processor has and PyTorch may use. `l2_bytes` is the whole L2 of a GPU, but one core's L2 on a
    CPU.
    """

    kind: Kind
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
    has_nvcc: bool | None = None
    # cpu
    num_cores: int | None = None
    simd_bits: int | None = None
    simd_registers: int | None = None
    machine_simd_bits: int | None = None
    l3_bytes: int | None = None

    @property
    def torch_name(self) -> str:
        """The name that PyTorch takes, `cpu` or `cuda:0`."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def facts(self) -> dict[str, bool | int | float | str]:
        """Return what constraints may use: `device.kind` and the numbers known of this kind."""
        # not numbers that a kernel's shape could depend on
        unfit = {"index", "name", "driver", "machine_simd_bits"}
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in unfit}
        return {f"device.{name}": value for name, value in values.items() if value is not None}


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
        driver=driver_version(),
        has_triton=importlib.util.find_spec("triton") is not None,
        has_nvcc=find_gpu_program("nvcc") is not None,
    )


def _describe_cpu() -> Device:
    caches, registers = cpu_cache_bytes(), vectors()
    return Device(
        kind="cpu",
        index=0,
        name=cpu_name(),
        memory_bytes=usable_memory_bytes(),
        l2_bytes=caches.get(2),
        l3_bytes=caches.get(3),
        num_cores=usable_cores(),
        simd_bits=registers.bits,
        simd_registers=registers.num_registers,
        machine_simd_bits=registers.machine_bits,
    )
