from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tuner import device as room
from tuner.device import (
    Device,
    bandwidth_gbps,
    describe,
    doctor,
    environment,
    floor_us,
    known_device,
    occupancy,
    peak_tflops,
    roofline_tflops,
)
from tuner.errors import DeviceError, InputError

H200 = known_device("NVIDIA H200")
A100 = known_device("A100")


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def test_the_cpu_is_described_with_its_own_facts_only():
    cpu = describe("cpu")
    facts = cpu.facts()
    assert cpu.kind == "cpu" and cpu.torch_name == "cpu"
    assert facts["device.kind"] == "cpu"
    assert 1 <= facts["device.num_cores"] <= (os.cpu_count() or 1)
    assert facts["device.simd_bits"] in (128, 256, 512)
    assert facts["device.memory_bytes"] > 2**28
    assert not {"device.num_sms", "device.capability", "device.smem_bytes_max"} & set(facts)


def test_usable_cores_follow_the_affinity_mask():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity masks")
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
    code += "from tuner.device import describe; print(describe('cpu').num_cores)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_a_gpu_has_the_facts_that_templates_use():
    assert H200.facts() == {
        "device.kind": "cuda",
        "device.memory_bytes": 143771 * 1024**2,
        "device.l2_bytes": 60 * 1024**2,
        "device.capability": 90,
        "device.num_sms": 132,
        "device.smem_bytes_max": 227 * 1024,
        "device.smem_bytes_sm": 228 * 1024,
        "device.regs_per_sm": 65536,
        "device.max_threads_per_sm": 2048,
        "device.max_threads_per_block": 1024,
        "device.warp_size": 32,
        "device.has_triton": True,
    }
    assert A100.capability == 80 and A100.smem_bytes_max == 163 * 1024


def test_properties_of_pytorch_without_the_block_size_are_enough():
    class Properties:  # what PyTorch 2.9 tells of an H200
        name = "NVIDIA H200"
        major, minor = 9, 0
        total_memory = 150_000_000_000
        L2_cache_size = 62914560
        multi_processor_count = 132
        shared_memory_per_block_optin = 232448
        shared_memory_per_multiprocessor = 233472
        regs_per_multiprocessor = 65536
        max_threads_per_multi_processor = 2048
        warp_size = 32

    seen = room._describe_cuda(3, Properties())
    assert seen.torch_name == "cuda:3"
    own = {"device.memory_bytes": H200.memory_bytes, "device.has_triton": True}
    assert {**seen.facts(), **own} == H200.facts()


def test_a_missing_gpu_is_an_error_that_says_what_exists():
    with pytest.raises(DeviceError) as caught:
        describe("cuda:77")
    assert "no cuda:77" in str(caught.value)
    assert "there is: cpu" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:-1", "cuda:x", "", "CPU", "cpu:0"])
def test_a_device_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="expected: auto, cpu, cuda or cuda:N"):
        describe(text)


def test_auto_is_a_gpu_if_there_is_one_else_the_cpu():
    assert describe("auto").kind == ("cuda" if has_gpu() else "cpu")


def test_facts_are_json():
    for there in (H200, describe("cpu")):
        assert json.loads(json.dumps(there.facts())) == there.facts()


def test_known_devices_are_found_by_a_part_of_their_name():
    assert known_device().name == "NVIDIA H200"
    assert known_device("h100").name == "NVIDIA H100 80GB HBM3"
    with pytest.raises(DeviceError, match=r"nothing is known here of a GPU 'B200'") as caught:
        known_device("B200")
    assert "NVIDIA H200" in str(caught.value)


# ---- ceilings -------------------------------------------------------------------------------


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
    assert all(len(profile.source) > 20 for profile in room._PROFILES)
    assert len({profile.device.name for profile in room._PROFILES}) == len(room._PROFILES)


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


# ---- the machine ----------------------------------------------------------------------------


def test_environment_tells_versions_and_no_host():
    import socket

    import torch

    seen = environment(describe("cpu"))
    assert seen["torch"] == torch.__version__
    assert seen["python"] == sys.version.split()[0]
    assert seen["device"] == seen["cpu"]
    assert all(isinstance(text, str) and text for text in seen.values())
    assert not any(value == socket.gethostname() for value in seen.values())
    if (Path(room.__file__).parent.parent / ".git").exists() and shutil.which("git"):
        assert len(seen["tuner_commit"].removesuffix("+changes")) == 40


def test_doctor_runs_what_it_vouches_for(tmp_path):
    findings = {finding.name: finding for finding in doctor(tmp_path / "not" / "there" / "yet")}
    assert set(findings) == {
        "Python headers", "C++ compiler", "OpenMP", "make", "git", "ninja", "nvcc", "GPU",
        "Triton", "disk space", "CPU cores",
    }  # fmt: skip
    assert findings["GPU"].is_ok == has_gpu()
    assert findings["C++ compiler"].is_ok == (shutil.which("c++") is not None)
    assert all(finding.detail for finding in findings.values())
    assert all(bool(finding.remedy) != finding.is_ok for finding in findings.values())


def test_doctor_says_what_to_install_where_nothing_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = {finding.name: finding for finding in doctor(tmp_path)}
    for name in ("C++ compiler", "OpenMP", "make", "git"):
        assert not findings[name].is_ok
        assert "install" in findings[name].remedy


def test_a_compiler_that_does_not_work_is_found_out(tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'cc1plus: fatal error: it is broken' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    findings = {finding.name: finding for finding in doctor(tmp_path)}
    assert not findings["C++ compiler"].is_ok
    assert not findings["OpenMP"].is_ok and "it is broken" in findings["OpenMP"].detail


@pytest.mark.gpu
def test_the_gpu_is_described_by_its_driver():
    if not has_gpu():
        pytest.skip("needs an NVIDIA GPU")
    gpu = describe("cuda")
    missing = {f.name for f in dataclasses.fields(Device) if getattr(gpu, f.name) is None}
    assert missing == {"num_cores", "simd_bits", "l3_bytes"}
    assert gpu.driver != "unknown" and gpu.driver[0].isdigit()
    if gpu.name in {profile.device.name for profile in room._PROFILES}:
        known = known_device(gpu.name).facts()
        seen = gpu.facts()
        assert seen.pop("device.memory_bytes") == pytest.approx(
            known.pop("device.memory_bytes"), rel=0.03
        )
        assert seen == known
