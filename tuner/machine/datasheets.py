"""Known GPUs by the driver's name: their facts and their rates, each from NVIDIA's datasheet.

Where a rate is not known the answer is None, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.errors import DeviceError, did_you_mean
from tuner.machine.device import Device

__all__ = ["bandwidth_gbps", "known_device", "peak_tflops"]


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
        has_nvcc=True,
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
