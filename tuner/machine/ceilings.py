"""What a device could do at best: roofline, the least time, occupancy.

The first two follow from the datasheets' rates; where these are not known nothing is claimed.
"""

from __future__ import annotations

import re

from tuner.errors import DeviceError
from tuner.machine.datasheets import bandwidth_gbps, peak_tflops
from tuner.machine.device import Device
from tuner.machine.platforms import is_gpu

__all__ = ["bound_us", "floor_us", "impossible_us", "occupancy", "roofline_tflops"]

_CLOCK_HEADROOM = 1.1
"""Real clocks over rated ones. NVIDIA's H100 whitepaper (table "H100 GPU boost clocks") rates the
tensor cores at 1830 MHz while the card may run at 1980 MHz, 8 % more: a floor must allow that."""


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


def bound_us(flops: float, num_bytes: float, device: Device, precision: str) -> float | None:
    """Return the roofline's time in us: the longer one of arithmetic and memory traffic.

    None where the device's rates are not known. Arguments are those of `roofline_tflops`.
    """
    peak, gbps = peak_tflops(device, precision), bandwidth_gbps(device)
    if peak is None or gbps is None:
        return None
    return max(flops / peak / 1e6, num_bytes / gbps / 1e3)


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
    if is_gpu(device.kind):
        return floor_us(flops, num_bytes, device, precision)
    # PyTorch's operations, which a candidate may call, use all that the processor has.
    simd_bits = device.machine_simd_bits or device.simd_bits or 0
    lanes, cores = simd_bits // 32, device.num_cores or 0
    match = re.fullmatch(r"fp16(?:x([1-9]))?", precision)
    factor = 1.0
    if match is not None and simd_bits >= 512:
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
