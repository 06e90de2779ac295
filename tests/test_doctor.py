from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tuner.machine import doctor as room
from tuner.machine.device import describe
from tuner.machine.doctor import doctor, environment


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def test_environment_tells_versions_and_no_host():
    import socket

    import torch

    seen = environment(describe("cpu"))
    assert seen["torch"] == torch.__version__
    assert seen["python"] == sys.version.split()[0]
    assert seen["device"] == seen["cpu"]
    assert all(isinstance(text, str) and text for text in seen.values())
    assert not any(value == socket.gethostname() for value in seen.values())
    if (Path(room.__file__).parents[2] / ".git").exists() and shutil.which("git"):
        assert len(seen["tuner_commit"].removesuffix("+changes")) == 40


def test_doctor_runs_what_it_vouches_for(tmp_path):
    findings = {finding.name: finding for finding in doctor(tmp_path / "not" / "there" / "yet")}
    assert set(findings) == {
        "Python headers", "C++ compiler", "OpenMP", "make", "git", "ninja", "nvcc", "GPU",
        "Triton", "disk space", "CPU cores", "CPU vectors",
    }  # fmt: skip
    assert findings["GPU"].is_ok == has_gpu()
    assert findings["C++ compiler"].is_ok == (shutil.which("c++") is not None)
    assert all(finding.detail for finding in findings.values())
    assert all(bool(finding.remedy) != finding.is_ok for finding in findings.values())


@pytest.fixture
def no_gpu_asked(monkeypatch):
    """PyTorch need not be imported to look for compilers."""
    found = room.Finding("GPU", True, "not asked")
    monkeypatch.setattr(room, "_gpu_finding", lambda: found)


def test_doctor_says_what_to_install_where_nothing_is(tmp_path, monkeypatch, no_gpu_asked):
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = {finding.name: finding for finding in doctor(tmp_path)}
    for name in ("C++ compiler", "OpenMP", "make", "git"):
        assert not findings[name].is_ok
        assert "install" in findings[name].remedy


def test_a_compiler_that_does_not_work_is_found_out(tmp_path, monkeypatch, no_gpu_asked):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'cc1plus: fatal error: it is broken' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    findings = {finding.name: finding for finding in doctor(tmp_path)}
    assert not findings["C++ compiler"].is_ok
    assert not findings["OpenMP"].is_ok and "it is broken" in findings["OpenMP"].detail
