"""The benchmarks' own parts that need no GPU: what they would run, and how they read answers."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from benchmarks import ablation, gpu_shapes, sanitize, waits
from benchmarks.candidates import label, refusal
from benchmarks.kernelbench_suite import line_of, main as suite, reason_of
from benchmarks.kernelbench_summary import GROUPS, lines_of, merged, place_of, table_of
from benchmarks.shapes import table
from tuner.kernel.family import Family, load_family
from tuner.machine.datasheets import known_device
from tuner.planning.planning import plan

TAKES_TURNS = """
import sys
from pathlib import Path
from tuner.machine.turns import Turns

turns = Turns(Path(sys.argv[1]))
with turns.memory(0.5), turns.alone():
    pass
with turns.shared():
    pass
sys.exit(3)
"""
H200 = known_device("NVIDIA H200")


@functools.cache
def family_of(op: str) -> Family:
    return load_family(op)


@pytest.mark.parametrize("op", sanitize.CONFIGURATIONS)
def test_every_gpu_template_is_sanitized_and_every_configuration_can_run(op):
    listed = [dict(params) for params in sanitize.CONFIGURATIONS[op]]
    assert {params["template"] for params in listed} == set(family_of(op).templates)
    for params in listed:
        if params["template"] != "cpu":
            assert refusal(family_of(op), params, H200, sanitize.SIZES[op]) == "", label(params)


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at fused_kernel(float *)+0x90
=========     by thread (3,0,0) in block (0,0,0)
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write at k+0x1 and Read at k+0x2
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", (0, "")),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", (0, "")),
        (
            MEMCHECK,
            (2, "Invalid __global__ read of size 4 bytes at fused_kernel(float *)+0x90"),
        ),
        (RACECHECK, (1, "Error: Race reported between Write at k+0x1 and Read at k+0x2")),
        ("Traceback\nImportError: torch\n", (None, "")),
    ],
)
def test_what_a_tool_says_is_counted_and_quoted(text, found):
    assert sanitize.summed_up(text) == found


def test_generated_kernels_are_called_by_children():
    command = [sys.executable, "-m", "benchmarks.sanitize_modules", "--device", "cpu"]
    said = subprocess.run(
        [*command, "--modules", "gate", "depthwise_convolution"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert said.returncode == 1  # a CPU has no kernels for one of them
    _, _, *rows = (line.split(" | ") for line in said.stdout.splitlines())
    assert [(row[0], row[3]) for row in rows] == [
        ("| depthwise_convolution", "not run"), ("| gate/nest", "0"),
    ]  # fmt: skip


def test_the_gpu_table_has_what_it_promises():
    shapes = gpu_shapes.SHAPES
    assert len({shape.label for shape in shapes}) == len(shapes) >= 10
    assert {64, 65536} <= {shape.batch for shape in shapes}
    features = [f for shape in shapes for f in (shape.in_features, shape.out_features)]
    assert min(features) == 512 and max(features) == 16384
    assert any(shape.out_features == 8 * shape.in_features for shape in shapes)
    assert any(size % 8 for shape in shapes for size in shape.sizes.values())


def test_a_shape_is_searched_with_some_templates_alone():
    path = gpu_shapes.SPACES / "gemm_scale_batchnorm_33.yaml"
    options = Namespace(
        device="cuda", trials=9, timeout="1s", finalists=1, processes=3, templates="library,wgmma"
    )
    tall = next(shape for shape in gpu_shapes.SHAPES if shape.in_features <= 2048)
    found = plan(gpu_shapes.config_of(tall, path, options), may_assume=True)
    assert found.config.measure.num_processes == 3 and found.config.search.trials == 9
    assert set(found.space.count_by("template")) == {"library", "wgmma"}
    assert found.space.count_by("stats")["gram"] > 0


def test_a_bar_in_a_cell_does_not_end_it():
    assert table([("a|b", "c\nd")], ("one", "two")).splitlines()[2] == "| a/b | c d |"


# ---- the ablation -----------------------------------------------------------------------------


def test_every_configuration_of_the_ablation_can_run_and_each_idea_is_one_of_its_own():
    config = yaml.safe_load(Path(ablation.__file__).with_suffix(".yaml").read_text())
    for problem in config["problems"].values():
        for study in problem["studies"]:
            rows = ablation.rows_of(study)
            assert len({label(row.params) + row.params["template"] for row in rows}) == len(rows)
            for row in rows:
                why = refusal(family_of(config["op"]), row.params, H200, [problem["sizes"]])
                assert why == "", f"{study['study']}: {row.idea}"


@pytest.mark.parametrize(
    ("kernel", "stage"),
    [
        ("fused_gemm_scale_bn_wgmma_convert_gemm_kernel(...)", "GEMM"),
        ("fused_gemm_scale_bn_wgmma_convert_prepare_kernel(...)", "preparation"),
        ("fused_gemm_scale_bn_split_kernel", "preparation"),
        ("void fused_gemm_scale_bn_finalise_kernel<...>", "statistics"),
        ("fused_gemm_scale_bn_normalise_kernel", "normalise"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", "GEMM"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<double>>", "other"),
        ("Memset (Device)", "other"),
    ],
)
def test_a_kernels_stage_is_known_by_its_name(kernel, stage):
    assert ablation.stage_of(kernel) == stage


def test_a_suites_entry_tells_the_error_what_repeats_and_the_end_of_a_traceback():
    frames = [f'  File "x.py", line {n}, in f{n}\n    y{n}()' for n in range(60)]
    frames.insert(9, "  [Previous line repeated 978 more times]")
    said = [
        "    8.4s  checking",
        "error: too deep",
        "Traceback (most recent call last):",
        *frames,
        "E: too deep",
    ]
    reason = reason_of("\n".join(said)).splitlines()
    assert reason[0] == "error: too deep" and reason[-1] == "E: too deep"
    assert "    y8()" in reason and "  [Previous line repeated 978 more times]" in reason
    assert "    y59()" in reason and "    y20()" not in reason
    entry = {"seconds": 1.0, "kind": "failed", "reason": "\n".join(reason)}
    assert line_of("a.py", entry).endswith("failed    error: too deep")


def test_the_summary_of_the_suite_counts_by_group_what_is_known():
    assert [len(numbers) for _, numbers in GROUPS.values()] == [49, 51, 58, 32, 10]
    entries = {
        ("level1", 23): {"kind": "faster", "interval": {"speedup": 4.0}},
        ("level1", 24): {
            "kind": "faster", "interval": {"speedup": 1.9},
            "torch_compile": {
                "interval": {"speedup": 2.0}, "ours": {"speedup": 0.96},
                "answer": {"is_accepted": False},
            },
        },
        ("level1", 25): {"kind": "nothing to gain"},
        ("level1", 26): {"kind": "nothing to generate"},
        ("level1", 90): {"kind": "failed", "reason": "error: no"},
        ("level1", 1): {"kind": "faster", "interval": {"speedup": 9.0}},
    }  # fmt: skip
    lines = "\n".join(lines_of("level 1, neither product nor convolution", entries))
    assert "4 of 49 have a file or nothing to gain, 1 of them PyTorch's own call" in lines
    assert "geometric mean 1.66x, least 1.00x (#25)" in lines
    assert "1 at 0.95 or more of the better of it and eager, 0 at 0.97" in lines
    assert "torch.compile's answer would be rejected: #24" in lines
    assert "without a file: #90" in lines and "not measured: #4, #5, #12" in lines


def test_a_race_without_torch_compile_stands_beside_the_last_that_had_it():
    def entry(speedup: float, day: int, compiled: float | None = None) -> dict:
        interval = {"speedup": speedup, "low": speedup - 0.1, "high": speedup + 0.1}
        race = {"torch_compile": {"interval": {"speedup": compiled}}} if compiled else {}
        return {"kind": "faster", "interval": interval, "device": "NVIDIA H200",
                "date": f"2026-11-{day}", **race}  # fmt: skip

    group = "level 1, neither product nor convolution"
    entries = merged({"level1/23_A.py": entry(2.0, 1, 1.5)}, {"level1/23_A.py": entry(3.0, 2)})
    for _ in range(2):  # also where the one before has it beside
        by_place = {place_of(name): each for name, each in entries.items()}
        row = "| #23 | 3.00x [2.90, 3.10] |  |  | 1.50x (ours 2.00x) | H200, 2026-11-2 |"
        assert row in table_of(group, by_place)
        lines = "\n".join(lines_of(group, by_place))
        assert "geometric mean 3.00x" in lines
        assert "raced with torch.compile: 1, ours 2.00x, torch.compile 1.50x" in lines
        entries = merged(entries, {"level1/23_A.py": entry(3.0, 2)})
    entries = merged(entries, {"level1/23_A.py": entry(4.0, 3, 1.6)})
    assert "with_compile" not in entries["level1/23_A.py"]


BRANCHING = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def get_inputs():
    return [torch.rand(8, 8)]

def get_init_inputs():
    return []
"""


def test_the_suite_tells_what_each_problem_ended_with_and_asks_once(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "KernelBench" / "level1"
    folder.mkdir(parents=True)
    (folder / "7_Branching.py").write_text(BRANCHING)
    out = tmp_path / "out.json"
    words = [
        "suite", "--kernelbench", str(tmp_path / "KernelBench"), "--level", "1",
        "--runs-dir", str(tmp_path / "runs"), "--json", str(out),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    assert suite() == 0
    (entry,) = json.loads(out.read_text()).values()
    assert entry["kind"] == "refused" and entry["reason"].startswith("error: ")
    assert "7_Branching.py:6" in entry["reason"]
    assert "1 now" in capsys.readouterr().out
    assert suite() == 0
    assert "0 now" in capsys.readouterr().out
    out.unlink()  # the run directories know it
    assert suite() == 0
    assert json.loads(out.read_text()).popitem()[1]["reason"] == entry["reason"]


def test_turns_of_a_command_are_noted_and_summed(tmp_path, capfd, monkeypatch):
    command = [sys.executable, "-c", TAKES_TURNS, str(tmp_path / "turns")]
    notes = tmp_path / "notes"
    monkeypatch.setattr(sys, "argv", ["waits", "--notes", str(notes), "--", *command])
    assert waits.main() == 3
    taken = {(turn.what, turn.parts) for turn in waits.noted_in(notes)}
    assert taken == {("memory", 8), ("device", 1), ("device, shared", 1)}
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["turn", "times", "waited,"]
    assert any("memory (8)" in line for line in lines)


def test_turns_that_wait_longest_come_first():
    noted = [
        waits.Noted("memory", 4, 0.0, 20.0, 2.0, "verifier._answers < verifier._verdicts"),
        waits.Noted("memory", 4, 9.0, 10.0, 3.0, "verifier._answers < verifier._verdicts"),
        waits.Noted("device", 1, 1.0, 0.5, 0.5, "runner._timed < runner._screened"),
    ]
    lines = waits.table(noted)[1:]
    assert lines[0].split()[:6] == ["memory", "(4)", "2", "30.0", "5.0", "3.0"]
    assert lines[1].split() == ["memory", "2", "30.0", "5.0", "3.0", "all"]
    assert lines[2].endswith("  runner._timed < runner._screened")
