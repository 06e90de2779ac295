"""Runs beside each other: the verdict, its confidence, and what differs, by value."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import tune
from made_runs import BASELINE_US, CONFIG, made_run, result, trial, trials

from tuner.capture.outline import KernelTask, Outline
from tuner.errors import InputError
from tuner.review.compare_page import cell_words, rows_of
from tuner.review.comparing import Comparison, compare_runs, confidence_words, format_comparison
from tuner.review.gain import Gain, ModuleRecord
from tuner.review.run_data import RunData
from tuner.run import Run
from tuner.trial import Interval, to_json


def verified(folder: Path, speedup: float, half: float = 0.05, **changes: object) -> Run:
    made = trials(20)
    interval = Interval(speedup, speedup / math.exp(half), speedup * math.exp(half), 0.95, 5)
    return made_run(folder, made, result(made, interval), **changes)  # type: ignore[arg-type]


def compared(*runs: Run) -> Comparison:
    return compare_runs([RunData.of(run) for run in runs])


def test_the_faster_run_is_better_with_welchs_interval(tmp_path):
    a, b = verified(tmp_path, 2.4), verified(tmp_path, 2.0)
    found = compared(a, b)
    (pair,) = found.pairs
    assert (found.best, pair.kind, pair.one) == (a.path.name, "better", a.path.name)
    # s = 0.05 / t(4) / sqrt(6 / 5); the error of the difference s sqrt(2 / 5), 8 degrees: t(4) =
    # 2.776445 and t(8) = 2.306004 at 97.5 %, from a printed table.
    error = 0.05 / 2.776445 / math.sqrt(6 / 5) * math.sqrt(2 / 5)
    assert pair.ratio == pytest.approx(1.2)
    assert pair.low == pytest.approx(1.2 * math.exp(-2.306004 * error), rel=1e-6)
    assert pair.high == pytest.approx(1.2 * math.exp(2.306004 * error), rel=1e-6)
    assert pair.confidence is not None and pair.confidence > 0.999
    assert pair.words == (f"{a.path.name} is 1.200x as fast as {b.path.name} (1.172x to 1.229x)")


def test_the_other_way_round_says_the_same(tmp_path):
    a, b = verified(tmp_path, 2.0), verified(tmp_path, 2.4)
    found = compared(a, b)
    assert (found.best, found.pairs[0].kind) == (b.path.name, "worse")
    assert f"{b.path.name} is 1.200x as fast as {a.path.name} (1.172x to 1.229x)" in (
        found.pairs[0].words
    )


def test_what_cannot_be_distinguished_has_no_best(tmp_path):
    found = compared(verified(tmp_path, 2.0), verified(tmp_path, 2.02))
    assert found.best is None and found.pairs[0].kind == "no difference"
    # t = ln 1.01 / 0.0103964 = 0.957 with 8 degrees of freedom
    assert found.pairs[0].confidence == pytest.approx(0.8168, abs=2e-4)


def test_equal_runs_are_distinguished_with_a_confidence_of_one_half(tmp_path):
    assert compared(verified(tmp_path, 2.0), verified(tmp_path, 2.0)).pairs[
        0
    ].confidence == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "other", "sizes": {"n": 1}}, "different operators: gemm and other"),
        ({"sizes": {"batch": 1}}, "different sizes: batch=1024, features=8192 and batch=1"),
        (
            {"sizes": {"batch": 1024, "features": 64}},
            "different sizes: features=8192 and features=64",
        ),
        ({"accuracy": "tf32"}, "different accuracy classes: float32 and tf32"),
        ({"device": {"name": "CPU"}}, "different devices: NVIDIA H200 and CPU"),
    ],
)
def test_runs_of_different_things_are_not_compared(tmp_path, change, words):
    found = compared(verified(tmp_path, 2.4), verified(tmp_path, 2.0, environment=change))
    assert found.best is None
    assert found.pairs[0].kind == "not comparable"
    assert found.pairs[0].words.endswith(f"are not comparable: {words}")


def test_a_run_that_was_not_verified_gives_no_verdict(tmp_path):
    found = compared(verified(tmp_path, 2.4), made_run(tmp_path, trials(20)))
    assert (found.best, found.pairs[0].kind) == (None, "unknown")
    assert found.pairs[0].ratio is None


def test_of_three_the_best_is_held_against_each(tmp_path):
    runs = [verified(tmp_path, speedup) for speedup in (2.0, 2.4, 1.5)]
    found = compared(*runs)
    assert found.best == runs[1].path.name
    assert [(v.one, v.other, v.kind) for v in found.pairs] == [
        (runs[1].path.name, runs[0].path.name, "better"),
        (runs[1].path.name, runs[2].path.name, "better"),
    ]


def test_what_differs_is_listed_and_nothing_else(tmp_path):
    a = verified(tmp_path, 2.4)
    b = verified(
        tmp_path,
        2.0,
        config=CONFIG.replace("[64, 128]", "[64]") + "search: {seed: 3}\n",
        environment={"machine": {"driver": "590.2", "torch": "2.13"}, "baseline_us": 4000.0},
    )
    found = compared(a, b)
    assert [(d.key, d.values) for d in found.config] == [
        ("space.block_m", ("64, 128", "64")),
        ("search.seed", ("", "3")),
    ]
    assert [(d.key, d.values) for d in found.environment] == [
        ("machine.driver", ("580.1", "590.2"))
    ]
    assert found.winner == ()


def test_the_curve_is_the_best_so_far_up_to_the_last_trial(tmp_path):
    curve = compared(verified(tmp_path, 2.4), verified(tmp_path, 2.0)).sides[0].curve
    assert curve.numbers[:3] == (0, 1, 2) and curve.numbers[-2:] == (18, 19)
    assert curve.latency_us[-2:] == (1506.0, 1506.0)
    assert curve.ratio[-1] == pytest.approx(3000 / 1506)


def test_one_run_alone_or_twice_is_refused(tmp_path):
    run = verified(tmp_path, 2.0)
    for runs in ([run], [run, run], []):
        with pytest.raises(InputError, match="expected two to 12 different runs"):
            compared(*runs)


def test_a_confidence_never_claims_to_be_certain():
    assert [confidence_words(c) for c in (0.5, 0.9712, 0.99953, 1.0)] == [
        "50 %",
        "97.1 %",
        "above 99.9 %",
        "above 99.9 %",
    ]


# ---- in the terminal ------------------------------------------------------------------------


def test_the_terminal_has_80_columns_and_letters_for_names(tmp_path):
    a, b = verified(tmp_path, 2.4), verified(tmp_path, 2.0, config=CONFIG + "device: cuda\n")
    said = tune("compare", a.path, b.path, cwd=tmp_path, env={"NO_COLOR": "1"})
    assert said.code == 0 and said.out.rstrip("\n") == format_comparison(compared(a, b))
    assert max(map(len, said.out.splitlines())) <= 80 and "\x1b" not in said.out
    assert (
        "verdict     A is 1.200x as fast as B (1.172x to 1.229x); confidence above 99.9 %"
        in said.out.splitlines()
    )
    assert "config      device: A –; B cuda" in said.out.splitlines()


def test_compare_gives_the_same_as_json(tmp_path):
    a, b = verified(tmp_path, 2.4), verified(tmp_path, 2.0)
    data = json.loads(tune("compare", a.path, b.path, "--json", cwd=tmp_path).out)
    assert data["best"] == a.path.name
    assert data["pairs"][0]["ratio"] == pytest.approx(1.2)
    assert [side["summary"]["interval"]["speedup"] for side in data["sides"]] == [2.4, 2.0]


def test_runs_are_listed_in_80_columns_and_as_json(tmp_path):
    verified(tmp_path / "runs", 2.4)
    made_run(tmp_path / "runs", trials(12))
    said = tune("runs", cwd=tmp_path)
    head, first, about, second, more = said.out.splitlines()
    assert about == more == "  Gemm + Scale; batch=1024, features=8192; float32"
    assert head.split() == ["state", "speed-up", "trials", "age", "run"]
    assert first.split()[:3] == ["stopped", "~1.996x", "12"]
    assert second.split()[:3] == ["finished", "~2.40x", "20"]  # its samples are not kept
    assert max(map(len, said.out.splitlines())) <= 80
    data = json.loads(tune("runs", "--json", cwd=tmp_path).out)
    assert [(r["state"], r["num_trials"], r["speedup"]) for r in data] == [
        ("stopped", 12, pytest.approx(3000 / 1503)),
        ("finished", 20, 2.4),
    ]


def test_a_run_of_long_names_is_listed_in_80_columns_too(tmp_path):
    sizes = {"batch": 32, "x_size_1": 32, "x_size_2": 16, "x_size_3": 32, "x_size_4": 32}
    weight = {f"conv_transpose_weight_size_{n}": size for n, size in enumerate((32, 64, 4, 4, 4))}
    title = "m_34_convtranspose3d_layernorm_gelu_scaling_forward"
    facts = {"title": title, "sizes": sizes | weight}
    run = made_run(tmp_path / "runs", trials(12), environment=facts)
    lines = tune("runs", cwd=tmp_path).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-2:] == [
        f"  {title}; x: 32 x 32 x 16 x 32 x",
        "  32, conv_transpose_weight: 32 x 64 x 4 x 4 x 4; float32",
    ]
    (run.path / "result.json").write_text("{half")
    lines = tune("runs", cwd=tmp_path).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-3].startswith("  runs/") and lines[-1].endswith("--resume`")


def test_the_report_command_prints_its_summary_as_json(tmp_path):
    run = verified(tmp_path, 2.4)
    said = tune("report", run.path, "--json", cwd=tmp_path)
    assert said.code == 0, said.err
    data = json.loads(said.out)
    assert data["kind"] == "faster" and data["interval"]["speedup"] == 2.4
    assert data["counts"] == {"correct": 18, "compile": 2}


# ---- by problem -----------------------------------------------------------------------------


def test_a_baseline_that_drifted_voids_the_verdict_with_the_reason(tmp_path):
    quiet, loaded = (verified(tmp_path, speedup) for speedup in (2.0, 2.6))
    path = loaded.path / "result.json"
    ended = loaded.result()
    slow = replace(ended.exported, baseline_us=11 * BASELINE_US)
    path.write_text(to_json(replace(ended, exported=slow, finalists=(slow,))))
    found = compared(quiet, loaded)
    (pair,) = found.pairs
    assert (found.best, found.bests, pair.kind, pair.ratio) == (None, (), "unknown", None)
    assert "PyTorch itself took 3.00 ms and 33.0 ms, 11.0x between the two" in pair.words
    assert "best" not in format_comparison(found)


def test_a_smaller_drift_is_noted_and_only_within_one_problem(tmp_path):
    def drifting(us: float, **sizes: int) -> Run:
        run = verified(tmp_path, 2.0, environment={"sizes": sizes or {"batch": 1024}})
        slow = replace(run.result().exported, baseline_us=us)
        ended = replace(run.result(), exported=slow, finalists=(slow,))
        (run.path / "result.json").write_text(to_json(ended))
        return run

    (note,) = compared(drifting(3000.0), drifting(3300.0)).notes
    assert note.startswith("PyTorch itself took 3.00 ms in one run and 3.30 ms in another")
    assert compared(drifting(3000.0), drifting(9000.0, batch=16384)).notes == ()


def test_several_problems_have_a_best_each_and_a_matrix_of_all(tmp_path):
    small = [verified(tmp_path, s, environment={"sizes": {"batch": 1}}) for s in (2.0, 2.4)]
    large = [verified(tmp_path, s, environment={"sizes": {"batch": 9}}) for s in (1.5, 1.2)]
    found = compared(small[0], large[0], small[1], large[1])
    assert found.best is None
    assert found.bests == (small[1].path.name, large[0].path.name)
    assert [v.kind for v in found.pairs] == ["worse", "better"]
    kinds = [[v and v.kind for v in row] for row in found.matrix]
    assert kinds[0] == [None, "not comparable", "worse", "not comparable"]
    assert kinds[2] == ["better", "not comparable", None, "not comparable"]
    assert cell_words(found.matrix[2][0]) == "1.200x (1.172x to 1.229x)"
    assert cell_words(found.matrix[0][1]) == "not comparable"


def test_what_is_less_than_the_headline_is_noted(tmp_path):
    a, b = verified(tmp_path, 4.0), verified(tmp_path, 2.0)
    less = replace(a.result().exported, step=Interval(2.4, 2.3, 2.5, 0.95, 2))
    (a.path / "result.json").write_text(to_json(replace(a.result(), exported=less)))
    found = compared(a, b)
    assert found.notes == (f"{a.path.name}: but 2.40x in a step of training",)
    assert ("but", ["2.40x in a step of training", ""]) in rows_of(found)
    assert "A: but 2.40x in a step" in format_comparison(found)


def test_captured_modules_are_compared_by_task(tmp_path):
    def of_module(last: str, **params: object) -> Run:
        tasks = (
            KernelTask("library", ("linear",), "linear", "a1" * 8, parameters=("chunk",)),
            KernelTask("nest", ("gelu",), last, "b2" * 8, suffix="_1"),
            KernelTask("nest", ("sum",), "sum", ("c3" if last == "gelu" else "d4") * 8),
        )
        outline = Outline((), (), (last,), tasks, 1, 1, 1, True)
        gain = Gain("NVIDIA H200", True, 1, 1, 1, None)
        run = made_run(tmp_path, [trial(0, 100.0, **params)])
        (run.path / "module.json").write_text(to_json(ModuleRecord(outline, gain)))
        return run

    one = of_module("gelu", chunk=8, unroll=2, unroll_1=4)
    other = of_module("tanh", chunk=16, unroll=1, unroll_1=4)
    found = {row.key: row.values for row in compared(one, other).tasks}
    assert found["library-a1a1a1"] == ("linear chunk=8", "linear chunk=16")
    assert found["nest-b2b2b2"] == ("gelu unroll_1=4", "tanh unroll_1=4")
    assert found["nest-c3c3c3"][1] == "" and "unroll=2" in found["nest-c3c3c3"][0]
    assert "unroll_1" not in found["nest-c3c3c3"][0]
