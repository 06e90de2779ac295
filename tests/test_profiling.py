"""Kernels of one call: from the profiler's trace to the page, on a CPU by real processes."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_run, result, trial, trials
from test_any_module import derive

from tuner.capture.graph.graph import Graph
from tuner.capture.outline import MODULE_FILE, Given, KernelTask, Outline, Step, outline_of
from tuner.errors import StorageError, WorkerError
from tuner.evaluate.contender import Contender
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.profiling import call_of, profile_into, profiled
from tuner.machine.datasheets import known_device
from tuner.profiled import PROFILE_NAME, KernelTime, Launch, Profiled, Profiles
from tuner.review.gain import Gain, ModuleRecord
from tuner.review.kernel_work import works_of
from tuner.review.report import parts_of
from tuner.review.run_data import UNITS, RunData
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
    task = JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")
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
    task = JobSpec(str(tmp_path / "reference.py"), {}, "cpu", "float32", "", "[]", "")
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
    rows = [" ".join(row.split()) for row in page.split("<tr>") if "<code title" in row]
    by_name = {
        name: row for row in rows for name in ("gemm", "normalise", "cutlass") if name in row
    }
    assert '<td class="number">–</td><td class="number">900</td>' in by_name["gemm"]
    assert '<td class="number">2,000</td><td class="number">–</td>' in by_name["cutlass"]
    assert '<td class="number">100</td><td class="number">100 <span' in by_name["normalise"]
    assert "132 x 384 threads, 168 registers, 197,632 bytes of shared memory" in by_name["gemm"]
    assert 'left:0.0%;width:90.909%" title="cutlass' in page
    assert 'left:0.0%;width:40.909%" title="gemm: 900 µs"' in page
    assert 'title="gemm&lt;128&gt;"' in by_name["gemm"]  # its whole name
    assert "between kernels" in page


def test_a_profile_that_cannot_be_read_is_an_error_with_its_path(tmp_path):
    facts = with_profile(tmp_path)
    (facts.run.path / PROFILE_NAME).write_text("[]")
    with pytest.raises(StorageError, match=r"kernels\.json: not what was written there"):
        RunData.of(facts.run)


# ---- what each kernel moves and computes ----------------------------------------------------

STEPS = [
    Step("linear", "linear(x, w)", (1024, 4096), "float32", 9),
    Step("gelu", "gelu(linear)", (1024, 4096), "float32", 10),
    Step("turned", "permute(gelu, axes=[1, 0])", (4096, 1024), "float32", 11),
    Step("matmul", "matmul(turned, gelu)", (4096, 4096), "float32", 11),
    Step("sum", "sum(matmul, axes=[1])", (4096,), "float32", 12),
]
TASKS = [
    KernelTask("library", ("linear",), "linear", num_bytes=240_000_000, flops=20 * 10**9),
    KernelTask("nest", ("gelu",), "gelu", num_bytes=96_000_000, flops=67 * 10**7),
    KernelTask("library", ("turned",), "turned", num_bytes=48_000_000),
    KernelTask("library", ("matmul",), "matmul", num_bytes=120_000_000, flops=12 * 10**9),
    KernelTask("nest", ("sum",), "sum", num_bytes=480_000_000, flops=10**9),
]
KERNELS = [  # a name's number counts generated kernels alone; times add up to 1,000 us
    KernelTime("nvjet_tss_128x128", 0.0, 400.0),
    KernelTime("fused_mine_rows_kernel", 400.0, 100.0),
    KernelTime("void split_rows_kernel(Split)", 500.0, 50.0),
    KernelTime("gemm_sm90", 550.0, 250.0),
    KernelTime("fused_mine_rows_1_pass_0", 800.0, 150.0),
    KernelTime("fused_mine_rows_1_results", 950.0, 50.0),
]


def of_module(
    folder: Path,
    kernels: list[KernelTime],
    template: str = "nest_triton",
    tasks: list[KernelTask] = TASKS,
    op: str = "mine",
) -> RunData:
    """A run of a captured module on an H200, of 4,800 GB/s and 67 TFLOPS in plain float32."""
    made = [trial(n, 1500.0 - n, template=template) for n in range(3)]
    made = [replace(one, template=template) for one in made]
    facts = {"op": op, "accuracy": "float32", "flops": 3e10, "device": vars_of_h200()}
    run = made_run(folder, made, result(made), environment=facts)
    given = (Given("x", "input", (1024, 4096), "float32"),)
    outline = Outline(
        given, tuple(STEPS), ("sum",), tuple(tasks), 400_000_000, 80_000_000, 10**9, False
    )
    gain = Gain("NVIDIA H200", True, 400_000_000, 80_000_000, 10**9, 100.0)
    (run.path / MODULE_FILE).write_text(to_json(ModuleRecord(outline, gain)))
    baseline = Profiled(None, 2000.0, (KernelTime("cutlass", 0.0, 2000.0),))
    known = Profiles(True, baseline, Profiled(2, 1000.0, tuple(kernels)))
    (run.path / PROFILE_NAME).write_text(to_json(known))
    return RunData.of(run)


def vars_of_h200() -> dict[str, Any]:
    return asdict(known_device("NVIDIA H200"))


def test_each_kernel_belongs_to_a_task_by_its_name_or_by_its_place_between_named_ones(tmp_path):
    works = works_of(of_module(tmp_path, KERNELS))
    assert [(w.words, w.num_kernels, w.time_us) for w in works] == [
        ("1: linear", 1, 400.0),
        ("2: gelu", 1, 100.0),
        ("3: permute, 4: matmul", 2, 300.0),  # a view needs no kernel, and no traffic
        ("5: sum", 2, 200.0),
        ("all of the exported file's call", 6, 1000.0),
        ("all of PyTorch's call", 1, 2000.0),
    ]
    assert [w.gbps for w in works] == [600.0, 960.0, 400.0, 2400.0, 480.0, 240.0]
    assert [w.of_memory for w in works][:4] == [0.125, 0.2, 400 / 4800, 0.5]
    assert [w.tflops for w in works] == pytest.approx([50.0, 6.7, 40.0, 5.0, 30.0, 15.0])
    assert works[1].of_arithmetic == pytest.approx(0.1)  # of 67 TFLOPS, on plain float32 cores
    assert works[0].units == UNITS["fp32"]  # a call of PyTorch's, at float32's accuracy
    assert works[0].of_arithmetic == pytest.approx(50 / 67, rel=0.01)
    assert works[3].nearest == ("memory", 0.5)


def test_the_page_says_what_bounds_the_kernels_that_take_longest(tmp_path):
    page = parts_of(of_module(tmp_path, KERNELS), ["why"])["why"]
    text = " ".join(page.split())
    assert (
        "Task 1: linear takes 40 % of the kernels' time, at 75 % of the rate of plain float32 "
        "cores; task 3: permute, 4: matmul takes 30 % of the kernels' time, at 60 % of the rate "
        "of plain float32 cores. They move 936 MB, where 480 MB would do if nothing were stored "
        "between them."
    ) in text.replace("&#39;", "'")
    row = text.split("5: sum</td>")[1].split("</tr>")[0]
    cells = [cell.split(">")[-1] for cell in row.split("</td>")[:-1]]
    assert cells == ["2", "200", "2,400", "50 %", "5.00", "7.5 %", "plain float32 cores"]


def test_a_product_with_pointwise_work_behind_it_has_no_traffic_of_its_own(tmp_path):
    """Its kernel may keep what lies between the two tasks, so that their bytes cannot be added."""
    first = [KernelTime("product_kernel", 0.0, 500.0), *KERNELS[2:]]
    work = works_of(of_module(tmp_path, first))[0]
    # Nothing but the last nest has a name, so all before it are one.
    assert work.words == "1: linear, 2: gelu, 3: permute, 4: matmul" and work.num_kernels == 3
    assert work.num_bytes is None and work.gbps is None and work.of_memory is None
    assert work.flops == 20e9 + 67e7 + 12e9


@pytest.mark.parametrize("template", ["nest_across_triton", "nest_recomputed_triton"])
def test_a_graph_that_is_cut_in_another_way_has_no_tasks_to_name(template, tmp_path):
    works = works_of(of_module(tmp_path, KERNELS, template))
    assert [work.is_whole for work in works] == [True, True]


def test_kernels_out_of_the_tasks_order_are_known_by_their_names_alone(tmp_path):
    first, second = replace(KERNELS[4], start_us=0.0), replace(KERNELS[1], start_us=200.0)
    other = KernelTime("copy", 150.0, 20.0)
    works = works_of(of_module(tmp_path, [first, other, second]))
    assert [work.words for work in works[:3]] == ["5: sum", "of no task", "2: gelu"]
    assert works[1].gbps is None and works[1].nearest is None


def test_records_without_operations_show_no_rate_of_arithmetic(tmp_path):
    older = [replace(task, flops=0) for task in TASKS]
    works = works_of(of_module(tmp_path, KERNELS, tasks=older))
    assert [work.tflops for work in works[:4]] == [None] * 4
    assert works[0].gbps == 600.0


CAPTURED = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(64, 48)
        self.m = nn.Linear(48, 300000)
    def forward(self, x):
        return torch.softmax(self.m(F.gelu(self.l(x)) * 2.0), -1)

def get_inputs():
    return [torch.randn(8, 64)]

def get_init_inputs():
    return []
"""


def test_kernels_are_named_as_the_templates_of_a_captured_module_name_them(tmp_path):
    """Each kernel that the generated text starts, in the order of its steps."""
    _, made = derive(tmp_path, "mine", CAPTURED)
    text = (made.folder / made.name / "nest_triton.triton.py.j2").read_text()
    steps = text[text.index("\nsteps:") : text.index("\noptimisations:")]
    started = re.findall(r"^    (\w+)\[", text, re.MULTILINE)
    kernels = []
    for place in re.findall(r"- \{(aten|call): (\w+)", steps):
        kind, name = place
        own = ["ampere_sgemm_128x64_tn", "splitKreduce_kernel"]
        if kind == "call":
            own = [k for k in started if re.fullmatch(rf"{name}_[a-z]\w*", k)]
        kernels += [KernelTime(k, 10.0 * len(kernels) + n, 1.0) for n, k in enumerate(own)]
    outline = outline_of(from_json(Graph, (made.folder / made.name / "graph.json").read_bytes()))
    run_data = of_module(tmp_path, kernels, op=made.name, tasks=list(outline.tasks))
    assert [(w.words, w.num_kernels) for w in works_of(run_data)[:-2]] == [
        ("1: linear", 2),
        ("2: gelu to mul", 1),
        ("3: linear_1", 2),
        ("4: amax to div", 5),  # a long row: three passes, and two that put their parts together
    ]
