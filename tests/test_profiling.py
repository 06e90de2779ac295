"""Kernels of one call: from the profiler's trace to the page, on a CPU by real processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_run, result, trials

from tuner.errors import StorageError, WorkerError
from tuner.evaluate.contender import Contender
from tuner.evaluate.profiling import call_of, profile_into, profiled
from tuner.evaluate.task import Task
from tuner.profiled import PROFILE_NAME, KernelTime, Launch, Profiled, Profiles
from tuner.review.report import parts_of
from tuner.review.run_data import RunData
from tuner.trial import from_json, to_json


def event(name: str, category: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    return {"name": name, "cat": category, "ts": start, "dur": length, "args": args}


# Two calls of a GPU, the second one shorter; what the host did has its own events.
GPU = [
    event("call", "user_annotation", 1000.0, 500.0),
    event("gemm", "kernel", 1100.0, 300.0),
    event("call", "user_annotation", 2000.0, 400.0),
    event("aten::linear", "cpu_op", 2010.0, 50.0),
    event(
        *("gemm", "kernel", 2100.0, 200.0),
        **{"registers per thread": 168, "shared memory": 197632, "grid": [132, 1, 1]},
        **{"block": [384, 1, 1], "est. achieved occupancy %": 19},
    ),
    event("Memset (Device)", "gpu_memset", 2090.0, 5.0),
    event("normalise", "kernel", 2310.0, 40.0, grid=[64, 2, 1], block=[256, 1, 1]),
]


def test_a_gpus_call_is_from_its_first_kernel_to_the_end_of_its_last():
    found = call_of(GPU, 7, is_gpu=True)
    assert (found.trial, found.call_us) == (7, 260.0)
    assert [(k.name, k.start_us, k.duration_us) for k in found.kernels] == [
        ("Memset (Device)", 0.0, 5.0),
        ("gemm", 10.0, 200.0),
        ("normalise", 220.0, 40.0),
    ]
    launches = [kernel.launch for kernel in found.kernels]
    assert launches == [None, Launch(132, 384, 168, 197632, 0.19), Launch(128, 256, 0, 0, None)]


def test_a_cpus_call_has_the_operations_that_lie_in_no_other():
    trace = [
        event("call", "user_annotation", 100.0, 90.0),
        event("aten::linear", "cpu_op", 110.0, 40.0),
        event("aten::addmm", "cpu_op", 115.0, 30.0),
        event("aten::relu", "cpu_op", 160.0, 20.0),
        event("aten::relu", "cpu_op", 300.0, 20.0),  # after it
    ]
    found = call_of(trace, None, is_gpu=False)
    assert found.call_us == 90.0
    assert [(k.name, k.start_us) for k in found.kernels] == [
        ("aten::linear", 10.0),
        ("aten::relu", 60.0),
    ]


REFERENCE = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x @ x).sum(-1)

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""


def test_a_real_call_is_profiled_in_processes_of_its_own(tmp_path):
    reference, new = tmp_path / "reference.py", tmp_path / "new.py"
    reference.write_text(REFERENCE)
    new.write_text(
        REFERENCE.replace("Model(", "ModelNew(").replace("torch.relu(x @ x)", "(x @ x).clamp(0)")
    )
    task = Task(str(reference), {}, "cpu", "float32", "", "[]", "")
    ended = replace(result(trials(3)), winner=2, export_path=str(new))
    assert profile_into(tmp_path, task, ended) == ""
    found = from_json(Profiles, (tmp_path / PROFILE_NAME).read_bytes())
    assert not found.is_gpu and (found.baseline.trial, found.winner.trial) == (None, 2)
    names = [[k.name for k in call.kernels] for call in (found.baseline, found.winner)]
    assert names == [
        ["aten::matmul", "aten::relu", "aten::sum"],
        ["aten::matmul", "aten::clamp", "aten::sum"],
    ]
    for call in (found.baseline, found.winner):
        assert 0 < sum(k.duration_us for k in call.kernels) <= call.call_us


def test_a_file_that_cannot_be_profiled_leaves_no_profile_and_no_error(tmp_path):
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "new.py").write_text("raise RuntimeError('no')")
    task = Task(str(tmp_path / "reference.py"), {}, "cpu", "float32", "", "[]", "")
    with pytest.raises(WorkerError, match="importing it: RuntimeError: no"):
        profiled(task, Contender.of_file(tmp_path / "new.py", is_deterministic=False), 0)
    ended = replace(result(trials(3)), export_path=str(tmp_path / "new.py"))
    assert "importing it: RuntimeError: no" in profile_into(tmp_path, task, ended)
    assert not (tmp_path / PROFILE_NAME).exists()


def with_profile(folder: Path) -> RunData:
    made = trials(20)
    run = made_run(folder, made, result(made))
    kernels = (
        KernelTime("gemm<128>", 0.0, 900.0, Launch(132, 384, 168, 197632, 0.19)),
        KernelTime("normalise", 950.0, 50.0),
        KernelTime("normalise", 1000.0, 50.0),
    )
    baseline = (KernelTime("cutlass", 0.0, 2000.0), KernelTime("normalise", 2100.0, 100.0))
    known = Profiles(True, Profiled(None, 2200.0, baseline), Profiled(18, 1050.0, kernels))
    (run.path / PROFILE_NAME).write_text(to_json(known))
    return RunData.of(run)


def test_the_page_shows_both_calls_on_one_axis_and_each_kernel_in_both(tmp_path):
    page = parts_of(with_profile(tmp_path), ["why"])["why"]
    rows = [" ".join(row.split()) for row in page.split("<tr>") if "<code>" in row]
    by_name = {
        name: row for row in rows for name in ("gemm", "normalise", "cutlass") if name in row
    }
    assert '<td class="number">–</td><td class="number">0.900</td>' in by_name["gemm"]
    assert '<td class="number">2.00</td><td class="number">–</td>' in by_name["cutlass"]
    assert '<td class="number">0.100</td><td class="number">0.100 <span' in by_name["normalise"]
    assert "132 x 384 threads, 168 registers, 197,632 bytes of shared memory" in by_name["gemm"]
    assert 'left:0.0%;width:90.909%" title="cutlass' in page
    assert 'left:0.0%;width:40.909%" title="gemm&lt;128&gt;: 900 µs"' in page
    assert "between kernels" in page


def test_a_profile_that_cannot_be_read_is_an_error_with_its_path(tmp_path):
    facts = with_profile(tmp_path)
    (facts.run.path / PROFILE_NAME).write_text("[]")
    with pytest.raises(StorageError, match=r"kernels\.json: cannot be read"):
        RunData.of(facts.run)
