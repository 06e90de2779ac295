"""Nsight Compute's counters: from its CSV to words with advice.

The CSV is as `ncu --csv --metrics ... --print-units base` writes it: the header, the column
"Section Name" with "Command line profiler metrics", numbers with commas of thousands, lines of its
own that begin with ==. Format: docs.nvidia.com/nsight-compute/NsightComputeCli, "Console Output".
"""

from __future__ import annotations

import ast
import csv
import io
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import tune
from made_runs import made_run, result, trials

from tuner.errors import ToolchainError, WorkerError
from tuner.evaluate.counting import (
    SHARES,
    STALL,
    counted,
    find_ncu,
    ncu_command,
    read_counters,
)
from tuner.evaluate.job_spec import JobSpec
from tuner.profiled import COUNTERS_NAME, CountedCalls, Counters
from tuner.review.counters import counter_words, counters_table
from tuner.review.report import parts_of
from tuner.review.run_data import RunData
from tuner.trial import from_json, to_json

COLUMNS = [
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"),
    *("Block Size", "Grid Size", "Device", "CC", "Section Name"),
    *("Metric Name", "Metric Unit", "Metric Value"),
]
GEMM = "void (anonymous namespace)::gemm<(int)128, (int)4>(const float *, float *)"
BEFORE = (
    "==PROF== Connected to process 4242 (/usr/bin/python3.12)\n"
    '==PROF== Profiling "gemm" - 0: 0%....50%....100% - 12 passes\n'
)
AFTER = "==PROF== Disconnected from process 4242\n"
OF_GEMM = {
    "gpu__time_duration.sum": ("ns", "1,013,248"),
    "dram__bytes.sum": ("byte", "812,345,600"),
    "sm__cycles_elapsed.avg.per_second": ("hz", "1,755,000,000.25"),
    SHARES["tensor"]: ("%", "71.35"),
    SHARES["memory"]: ("%", "16.7"),
    SHARES["issue"]: ("%", "22.04"),
    SHARES["warps"]: ("%", "18.60"),
    STALL.format("long_scoreboard"): ("inst", "1.5"),
    STALL.format("gmma"): ("inst", "4.5"),
}
OF_NORM = {
    "gpu__time_duration.sum": ("nsecond", "41,000"),  # as versions before 2024 name the unit
    SHARES["tensor"]: ("", "n/a"),
    SHARES["memory"]: ("%", "38"),
    SHARES["issue"]: ("%", "12.5"),
    STALL.format("long_scoreboard"): ("inst", "9"),
    STALL.format("barrier"): ("inst", "3"),
}


def lines_of(*kernels: tuple[str, Mapping[str, tuple[str, str]]]) -> str:
    """The CSV of kernels, by name and metrics, as ncu writes it: all in quotes."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(COLUMNS)
    for number, (name, metrics) in enumerate(kernels):
        for metric, (unit, value) in metrics.items():
            first = [number, 4242, "python3.12", "127.0.0.1", name, 1, 7]
            first += ["(384, 1, 1)", "(132, 1, 1)", 0, "9.0", "Command line profiler metrics"]
            writer.writerow([*first, metric, unit, value])
    return text.getvalue()


TEXT = BEFORE + lines_of((GEMM, OF_GEMM), ("normalise", OF_NORM)) + AFTER


def test_each_kernel_has_its_counters_in_our_units():
    gemm, norm = read_counters(TEXT)
    assert gemm == Counters(
        name=GEMM,
        duration_us=1013.248,
        tensor=pytest.approx(0.7135),
        memory=pytest.approx(0.167),
        issue=pytest.approx(0.2204),
        warps=pytest.approx(0.186),
        dram_bytes=812_345_600.0,
        clock_mhz=pytest.approx(1755.0),
        stalls={"long_scoreboard": 1.5, "gmma": 4.5},
    )
    assert (norm.name, norm.duration_us, norm.tensor, norm.memory) == (
        "normalise",
        41.0,
        None,
        0.38,
    )
    assert (norm.clock_mhz, norm.dram_bytes) == (None, None)


def test_two_launches_of_one_kernel_are_two():
    found = read_counters(lines_of(("k", OF_NORM), ("k", OF_NORM)))
    assert [kernel.name for kernel in found] == ["k", "k"]


@pytest.mark.parametrize("text", ["", BEFORE + AFTER, "==WARNING== No kernels were profiled.\n"])
def test_a_log_without_kernels_has_none(text):
    assert read_counters(text) == ()


def test_a_line_cut_short_is_left_out():
    cut = TEXT[: TEXT.index('"1,755,000,000.25"') - 12]
    (gemm,) = read_counters(cut)
    assert gemm.duration_us == 1013.248 and gemm.clock_mhz is None


def test_other_columns_are_an_error_that_names_them():
    with pytest.raises(WorkerError, match=r"no column 'Metric Name'\n.*got: ID, Kernel Name, x"):
        read_counters('"ID","Kernel Name","x"\n"0","k","1"\n')


def test_words_say_what_bounds_each_kernel_and_what_would_help():
    words = counter_words(CountedCalls((), read_counters(TEXT)))
    assert words == [
        "gemm (96 % of the kernels' time): the tensor cores are busy, in 71 % of the cycles; "
        "only less arithmetic, or a cheaper precision, helps.",
        "normalise (3.9 % of the kernels' time): no unit is busy: memory 38 %, issue 12 %; warps "
        "wait mostly for data from global memory or the L2; next: more loads under way: more "
        "stages, larger tiles, or more warps.",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory": 0.91}, "the memory is busy, at 91 % of its rate; fewer bytes help"),
        ({"issue": 0.8}, "the schedulers issue nearly all the time"),
        ({"stalls": {"barrier": 2.0, "wait": 1.0}}, "warps wait mostly for other warps of their"),
        ({"stalls": {}}, "no unit is busy: memory 38 %, issue 12 %."),
        ({"memory": None, "issue": None}, "its counters are not known on this GPU"),
    ],
)
def test_advice_follows_the_counters(changes, said):
    norm = read_counters(TEXT)[1]
    (words,) = counter_words(CountedCalls((), (replace(norm, **changes),)))
    assert said in words


def test_a_kernel_that_takes_next_to_no_time_is_in_the_table_alone():
    gemm, norm = read_counters(TEXT)
    calls = CountedCalls((norm,), (gemm, replace(norm, duration_us=1.0)))
    assert len(counter_words(calls)) == 1
    table = counters_table(calls)
    assert [row[:3] for row in table["rows"]] == [
        ["exported file", "gemm", "1,010"],
        ["exported file", "normalise", "1.00"],
        ["PyTorch", "normalise", "41.0"],
    ]
    assert table["rows"][0][3:] == [
        *("71 %", "17 %", "22 %", "19 %", "812", "1,755"),
        "a product of the tensor cores 75 %",
    ]


def test_the_page_has_the_counters_where_a_run_has_them(tmp_path):
    made = trials(5)
    run = made_run(tmp_path, made, result(made))
    assert "counters say" not in parts_of(RunData.of(run), ["why"])["why"]
    (run.path / COUNTERS_NAME).write_text(to_json(CountedCalls((), read_counters(TEXT))))
    page = parts_of(RunData.of(run), ["why"])["why"]
    assert "<li>normalise (3.9 %" in page and "<li>gemm (96 %" in page
    assert (
        from_json(CountedCalls, (run.path / COUNTERS_NAME).read_bytes()).winner[1].memory == 0.38
    )


# ---- the program ----------------------------------------------------------------------------

REFERENCE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(64))
    def forward(self, x):
        print("called", type(self).__name__, float(self.w[0]))
        return x * self.w

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""
# Stands for ncu where there is none: it runs the program that it is given, adds what that printed
# to a file, then writes its log. One that finds fault with how it was asked runs nothing.
STAND_IN = """#!{python}
import pathlib, subprocess, sys
options = sys.argv[1:]
log, at = options[options.index("--log-file") + 1], options.index({python!r})
status = {status}
if not status:
    ended = subprocess.run(options[at:], stdout=subprocess.PIPE, text=True)
    status = ended.returncode
    with pathlib.Path({folder!r}, "printed.txt").open("a") as printed:
        print(ended.stdout.splitlines(), file=printed)
pathlib.Path(log).write_text({text!r})
sys.exit(status)
"""


def stand_in(folder: Path, text: str = TEXT, status: int = 0) -> str:
    path = folder / "ncu"
    known = {"python": sys.executable, "text": text, "status": status, "folder": str(folder)}
    path.write_text(STAND_IN.format(**known))
    path.chmod(0o755)
    return str(path)


def task_in(folder: Path, new: str = "ModelNew(") -> tuple[JobSpec, Path]:
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "new.py").write_text(REFERENCE.replace("Model(", new))
    task = JobSpec(str(folder / "reference.py"), {}, "cpu", "float32", "", "[]", "")
    return task, folder / "new.py"


def test_one_call_of_either_is_counted_behind_warm_ones_on_the_same_weights(tmp_path):
    task, file = task_in(tmp_path)
    found = counted(stand_in(tmp_path), task, file)
    assert found == CountedCalls(read_counters(TEXT), read_counters(TEXT))
    # Each in a program of its own.
    printed = (tmp_path / "printed.txt").read_text()
    called = [ast.literal_eval(line) for line in printed.splitlines()]
    for name, lines in zip(("Model", "ModelNew"), called, strict=True):
        assert lines and set(lines) == {f"called {name} 1.0"}


def test_a_program_that_fails_is_an_error_with_what_it_said(tmp_path):
    task, file = task_in(tmp_path, "Other(")
    with pytest.raises(WorkerError, match=r"new\.py: ncu ended with 1: (?s:.*)no class ModelNew"):
        counted(stand_in(tmp_path), task, file)


def test_what_ncu_says_of_itself_is_the_error(tmp_path):
    task, file = task_in(tmp_path)
    said = "==ERROR== Failed to find metric sm__no_such\n"
    with pytest.raises(WorkerError, match="PyTorch's call: ncu ended with 9: Failed to find metr"):
        counted(stand_in(tmp_path, said, 9), task, file)
    rights = (
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU\n"
    )
    with pytest.raises(WorkerError, match=r"may not read the GPU's counters(?s:.*)administrator"):
        counted(stand_in(tmp_path, rights, 1), task, file)
    with pytest.raises(WorkerError, match="ended with 0: no kernel was counted"):
        counted(stand_in(tmp_path, ""), task, file)


def test_only_hopper_is_asked_for_its_own_stall(tmp_path):
    task, file = task_in(tmp_path)
    ours, others = (
        ncu_command("ncu", task, file, tmp_path / "log", capability) for capability in (90, 80)
    )
    assert STALL.format("gmma") in ours[ours.index("--metrics") + 1]
    assert "gmma" not in others[others.index("--metrics") + 1]


def test_where_ncu_is_missing_the_message_says_what_to_install(tmp_path, monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if Path("/usr/local/cuda/bin/ncu").exists():
        pytest.skip("ncu is installed where it usually is")
    with pytest.raises(ToolchainError, match=r"ncu is not installed(?s:.*)install Nsight Compute"):
        find_ncu()
    path = stand_in(tmp_path)
    assert find_ncu() == path


def test_the_command_refuses_what_has_no_counters(tmp_path):
    made = trials(5)
    open_run = made_run(tmp_path, made)
    done = tune("report", open_run.path, "--counters", cwd=tmp_path)
    assert done.code == 2 and "no exported file to count" in done.err
    ended = made_run(tmp_path, made, result(made), environment={"device": {"kind": "cpu"}})
    (ended.path / "export").mkdir(exist_ok=True)
    ended.export_path.write_text("")
    done = tune("report", ended.path, "--counters", cwd=tmp_path)
    assert done.code == 2 and "got: a run on cpu" in done.err
    assert "Traceback" not in done.err


@pytest.mark.gpu
def test_a_real_call_is_counted(tmp_path):
    try:
        ncu = find_ncu()
    except ToolchainError:
        pytest.skip("ncu is not installed")
    task, file = task_in(tmp_path)
    found = counted(ncu, replace(task, device="cuda:0"), file)
    for call in (found.baseline, found.winner):
        assert call and sum(kernel.duration_us for kernel in call) > 0
        assert all(kernel.memory is not None and kernel.stalls for kernel in call)
