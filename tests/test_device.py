from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from tuner.errors import DeviceError, InputError
from tuner.machine import datasheets, device as room
from tuner.machine.datasheets import known_device
from tuner.machine.device import Device, describe

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
    code += "from tuner.machine.device import describe; print(describe('cpu').num_cores)"
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
        "device.has_nvcc": True,
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
    own = {"device.memory_bytes": H200.memory_bytes}
    own |= {"device.has_triton": True, "device.has_nvcc": True}
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


@pytest.mark.gpu
def test_the_gpu_is_described_by_its_driver():
    if not has_gpu():
        pytest.skip("needs an NVIDIA GPU")
    gpu = describe("cuda")
    missing = {f.name for f in dataclasses.fields(Device) if getattr(gpu, f.name) is None}
    of_cpus = {"num_cores", "simd_bits", "simd_registers", "machine_simd_bits", "l3_bytes"}
    assert missing == of_cpus
    assert gpu.driver != "unknown" and gpu.driver[0].isdigit()
    if gpu.name in {profile.device.name for profile in datasheets._PROFILES}:
        known = known_device(gpu.name).facts()
        seen = gpu.facts()
        assert seen.pop("device.memory_bytes") == pytest.approx(
            known.pop("device.memory_bytes"), rel=0.03
        )
        assert seen == known
