"""The kinds of device: each record is whole, and each compiler's text compiles."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tuner.errors import ToolchainError
from tuner.kernel.toolchain import Toolchain
from tuner.machine.platforms import FILE_ENDINGS, PLATFORMS, SOURCE_NAMES, is_gpu, platform_of

HIP = r"""
#include <hip/hip_runtime.h>
#include <cstdint>
__global__ void double_values(const float* x, float* y, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}
extern "C" const char* fused_go(const float* x, float* y, int64_t n, void* stream) {
  const dim3 blocks(unsigned((n + 255) / 256));
  double_values<<<blocks, dim3(256), 0, static_cast<hipStream_t>(stream)>>>(x, y, n);
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}
"""


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("cpu", "cpu"),
        (torch.device("cpu"), "cpu"),
        ("cpp", "cpu"),
        ("cuda", "cuda"),
        ("cuda:1", "cuda"),
        (torch.device("cuda", 0), "cuda"),
        ("triton", "cuda"),
        ("hip", "hip"),
    ],
)
def test_a_device_or_a_language_has_a_platform(what, kind):
    assert platform_of(what) is PLATFORMS[kind]
    assert is_gpu(what) == (kind != "cpu")


def test_each_language_has_names_of_its_own():
    assert FILE_ENDINGS.keys() == SOURCE_NAMES.keys() == {"cpp", "cuda", "hip", "triton"}
    for names in (FILE_ENDINGS, SOURCE_NAMES):
        assert len(set(names.values())) == len(names)


def test_on_a_cpu_there_is_nothing_to_wait_for_and_no_memory_of_its_own():
    cpu = platform_of("cpu")
    with cpu.chosen("cpu"):
        cpu.synchronize("cpu")
    assert cpu.free_bytes("cpu") is None


def test_hip_needs_an_architecture_and_its_compiler(monkeypatch, tmp_path):
    with pytest.raises(ToolchainError, match="architecture is needed"):
        Toolchain.find("hip")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ROCM_PATH", raising=False)
    if not Path("/opt/rocm/bin/hipcc").exists():
        with pytest.raises(ToolchainError, match="hipcc not found"):
            Toolchain("hip", "/usr/bin/c++").require("hip")


@pytest.mark.skipif(shutil.which("hipcc") is None, reason="needs hipcc on the PATH")
def test_hip_compiles(monkeypatch, tmp_path):
    monkeypatch.setenv("HIP_PLATFORM", "amd")  # or hipcc calls an nvcc that it finds
    toolchain = Toolchain.find("hip", architecture="gfx90a")
    (tmp_path / SOURCE_NAMES["hip"]).write_text(HIP)
    done = subprocess.run(
        toolchain.command("hip"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "VGPRs" in done.stderr  # what the kernel takes is said
    code = (tmp_path / "artefact.so").read_bytes()
    assert b"fused_go" in code and b"gfx90a" in code
