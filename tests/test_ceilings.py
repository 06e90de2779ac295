from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from tuner.errors import DeviceError
from tuner.machine import datasheets
from tuner.machine.ceilings import floor_us, occupancy, roofline_tflops
from tuner.machine.datasheets import bandwidth_gbps, known_device, peak_tflops
from tuner.machine.device import describe

H200 = known_device("NVIDIA H200")
A100 = known_device("A100")


def test_known_devices_are_found_by_a_part_of_their_name():
    assert known_device().name == "NVIDIA H200"
    assert known_device("h100").name == "NVIDIA H100 80GB HBM3"
    with pytest.raises(DeviceError, match=r"nothing is known here of a GPU 'B200'") as caught:
        known_device("B200")
    assert "NVIDIA H200" in str(caught.value)


def test_peaks_agree_with_multiprocessors_times_clock():
    """A datasheet's rate is FLOP per clock and multiprocessor, times these, times the clock."""
    per_clock = {"fp32": 256, "tf32": 2048, "fp16": 4096, "bf16": 4096, "fp8": 8192}  # Hopper
    clock_ghz = {"fp32": 1.98, "tf32": 1.83, "fp16": 1.83, "bf16": 1.83, "fp8": 1.83}
    for precision, flops in per_clock.items():
        expected = H200.num_sms * flops * clock_ghz[precision] / 1e3
        assert peak_tflops(H200, precision) == pytest.approx(expected, rel=0.005)


def test_a_peak_is_shared_by_the_products_that_a_split_takes():
    assert peak_tflops(H200, "fp16x3") == pytest.approx(peak_tflops(H200, "fp16") / 3)


def test_unknown_peaks_are_none():
    cpu = describe("cpu")
    assert peak_tflops(cpu, "fp32") is None and bandwidth_gbps(cpu) is None
    assert peak_tflops(A100, "fp8") is None  # Ampere has no such tensor core
    assert peak_tflops(H200, "int4") is None and peak_tflops(H200, "fp16x") is None
    assert peak_tflops(dataclasses.replace(H200, name="NVIDIA H200 NVL"), "fp16") is None


def test_every_profile_names_its_source():
    assert all(len(profile.source) > 20 for profile in datasheets._PROFILES)
    assert len({profile.device.name for profile in datasheets._PROFILES}) == len(
        datasheets._PROFILES
    )


def test_roofline_bends_where_intensity_meets_the_peak():
    ridge = 989.4e12 / 4800e9  # FLOP a byte
    assert roofline_tflops(ridge * 1e9 * 2, 1e9, H200, "fp16") == pytest.approx(989.4)
    assert roofline_tflops(ridge * 1e9 / 2, 1e9, H200, "fp16") == pytest.approx(989.4 / 2)
    assert roofline_tflops(1e9, 0, H200, "fp32") == 67.0
    assert roofline_tflops(1e9, 1e9, describe("cpu"), "fp32") is None


def test_the_floor_lies_below_every_honest_time_on_record():
    """Measured on an H200: a float32 GEMM of 1024 x 8192 x 8192, an fp16 one, copies."""
    flops = 2 * 1024 * 8192 * 8192
    num_bytes = 4 * (1024 * 8192 * 2 + 8192 * 8192)
    assert 0.5 * 2686 < floor_us(flops, num_bytes, H200, "fp32") < 2686
    assert 0.5 * 174 < floor_us(flops, num_bytes / 2, H200, "fp16") < 174
    assert 0.8 * 2000 < floor_us(0, 8.6e9, H200, "fp32") < 2000  # a copy at 4.3 TB/s


def test_the_floor_is_zero_where_nothing_is_known():
    assert floor_us(1e12, 1e12, describe("cpu"), "fp32") == 0.0


def test_bytes_that_may_rest_in_the_cache_are_no_floor():
    assert floor_us(0, 60 * 1024**2, H200, "fp32") == 0.0
    assert floor_us(0, 60 * 1024**2 + 4.8e6, H200, "fp32") == pytest.approx(1.0)


# ---- occupancy ------------------------------------------------------------------------------

NVIDIA_PROGRAM = r"""
#include <climits>
#include <cstdio>
#include "cuda_occupancy.h"
int main() {
    int major, threads_per_sm, smem_sm, threads, registers, smem;
    while (std::scanf("%d %d %d %d %d %d", &major, &threads_per_sm, &smem_sm, &threads,
                      &registers, &smem) == 6) {
        cudaOccDeviceProp device;
        device.computeMajor = major / 10;
        device.computeMinor = major % 10;
        device.maxThreadsPerBlock = 1024;
        device.maxThreadsPerMultiprocessor = threads_per_sm;
        device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.warpSize = 32;
        device.sharedMemPerBlock = 49152;
        device.sharedMemPerMultiprocessor = smem_sm;
        device.sharedMemPerBlockOptin = smem_sm - 1024;
        device.reservedSharedMemPerBlock = 1024;
        device.numSms = 1;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = 1024;
        kernel.numRegs = registers;
        kernel.sharedSizeBytes = 0;
        kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = smem_sm - 1024;
        kernel.numBlockBarriers = 1;
        cudaOccDeviceState state;
        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        cudaOccResult result;
        cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(
            &result, &device, &kernel, &state, threads, smem);
        std::printf("%d\n", error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1);
    }
}
"""


def nvidia_header() -> Path | None:
    nvcc = shutil.which("nvcc")
    roots = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"))]
    if nvcc:
        roots.insert(0, Path(nvcc).resolve().parent.parent)
    found = (root / "include" / "cuda_occupancy.h" for root in roots)
    return next((path for path in found if path.is_file()), None)


def test_occupancy_is_nvidias_own(tmp_path):
    header, compiler = nvidia_header(), shutil.which("c++")
    if header is None or compiler is None:
        pytest.skip("needs cuda_occupancy.h of the CUDA toolkit and a C++ compiler")
    source, program = tmp_path / "occupancy.cpp", tmp_path / "occupancy"
    source.write_text(NVIDIA_PROGRAM)
    subprocess.run([compiler, "-w", "-I", header.parent, source, "-o", program], check=True)
    ada = dataclasses.replace(A100, capability=89, max_threads_per_sm=1536)
    ada = dataclasses.replace(ada, smem_bytes_sm=102400, smem_bytes_max=101376)
    cases = [
        (there, threads, registers, smem)
        for there in (H200, A100, ada)
        for threads in (1, 32, 96, 128, 160, 256, 384, 480, 512, 1000, 1024)
        for registers in (0, 16, 32, 40, 64, 65, 96, 128, 168, 200, 255)
        for smem in (0, 1, 1000, 16384, 49152, 50000, 99328, 101376, 166912, 200000, 232448)
    ]
    asked = "\n".join(
        f"{d.capability} {d.max_threads_per_sm} {d.smem_bytes_sm} {t} {r} {s}"
        for d, t, r, s in cases
    )
    done = subprocess.run([program], input=asked, capture_output=True, text=True, check=True)
    answers = [int(line) for line in done.stdout.split()]
    assert len(answers) == len(cases) and max(answers) == 32 and 0 in answers
    for (there, threads, registers, smem), blocks in zip(cases, answers, strict=True):
        warps = -(-threads // 32)
        expected = max(blocks, 0) * warps / (there.max_threads_per_sm // 32)
        got = occupancy(there, threads, registers, smem)
        assert got == pytest.approx(expected), (there.name, threads, registers, smem)


def test_a_block_that_cannot_run_has_no_occupancy():
    assert occupancy(H200, 2048, 32, 0) == 0.0
    assert occupancy(H200, 128, 256, 0) == 0.0
    assert occupancy(H200, 1024, 128, 0) == 0.0
    assert occupancy(H200, 128, 32, 227 * 1024 + 1) == 0.0


def test_occupancy_of_a_device_with_unknown_limits_is_refused():
    with pytest.raises(DeviceError, match="not known"):
        occupancy(describe("cpu"), 128, 32, 0)
    with pytest.raises(DeviceError, match="not known"):
        occupancy(dataclasses.replace(H200, capability=70), 128, 32, 0)
