"""Side by side with Kernel Tuner: what is known of it without Kernel Tuner and without a GPU."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys

import pytest
from command_line import ROOT, environment
from gemm_cases import needs_nvcc
from recorded_run import h200_run
from spaces import feasible
from tiny_operator import config_text, write_family

from benchmarks import side_by_side
from tuner import load_config, plan
from tuner.planning.planning import Planned
from tuner.trial import Status


@pytest.fixture(scope="module")
def planned() -> Planned:
    return plan(load_config(side_by_side.CONFIG), may_assume=True)


def test_both_tuners_get_the_same_configurations_and_one_text_for_all(planned):
    job = side_by_side.job(planned, 60, 0)
    assert len(job["feasible"]) == planned.space.num_feasible > 5000
    assert job["sizes"] == {"batch": 1024, "in_features": 2048, "out_features": 2048}
    assert json.loads(json.dumps(job)) == job
    code = re.sub(r'//.*|"[^"]*"', "", job["text"])
    varied = [p.name for p in planned.space.parameters if len(p.values) > 1]
    assert sorted(varied) == sorted(job["names"])
    for name in side_by_side.NUMBERS:  # a macro must stand nowhere else
        found = [line.strip() for line in code.splitlines() if re.search(rf"\b{name}\b", line)]
        assert found == [f"constexpr int {side_by_side.NUMBERS[name]} = {name};"] * 2
    assert "extern __shared__" not in code and code.count("__global__") == 1


@needs_nvcc
@pytest.mark.parametrize("load", side_by_side.LOADS)
def test_the_text_compiles_with_parameters_as_macros(planned, tmp_path, load):
    (tmp_path / "kernel.cu").write_text(side_by_side.kernel_text(planned))
    params = [p for p in feasible(planned.space) if p["load"] == load][-1]
    macros = [f"-D{name}={params[name]}" for name in [*side_by_side.NUMBERS, "load"]]
    command = ["nvcc", "-cubin", "-arch=sm_90", "-std=c++17", "--expt-relaxed-constexpr"]
    done = subprocess.run(
        [*command, "-Xptxas", "-v", *macros, "-o", "kernel.cubin", "kernel.cu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert side_by_side.KERNEL in done.stderr and " 0 bytes spill stores" in done.stderr
    assert int(re.findall(r"(\d+) bytes smem", done.stderr)[0]) <= 48 * 1024


def test_a_changed_template_is_refused_and_not_half_rewritten(planned):
    with pytest.raises(ValueError, match="no longer has one 'x'"):
        side_by_side._between("a x b x c", "x", "c")


def test_kernel_tuners_half_knows_nothing_of_ours():
    tree = ast.parse(side_by_side.KERNEL_TUNER.read_text())
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported <= {"json", "random", "sys", "datetime", "importlib", "typing", "numpy"}


def test_what_kernel_tuner_says_when_it_fails_is_reported(planned):
    job = {**side_by_side.job(planned, 60, 0), "sizes": {}}
    with pytest.raises(RuntimeError, match=r"ModuleNotFoundError|KeyError"):
        side_by_side.theirs(sys.executable, None, job)


def test_a_candidate_counts_once_and_only_if_it_was_checked(tmp_path):
    run = h200_run(tmp_path)
    trials = run.trials()
    rate = side_by_side.rate_of(run)
    statuses = [t.outcome.status for t in trials if t.outcome.same_as is None]
    right, wrong = statuses.count(Status.CORRECT), statuses.count(Status.CORRECTNESS)
    assert rate.checked == right + wrong and rate.wrong == wrong
    assert len(trials) == rate.tried >= rate.checked > 0
    assert rate.seconds == max(t.elapsed_s for t in trials)
    assert rate.per_minute == pytest.approx(60 * (right + wrong) / rate.seconds)
    assert rate.stages["build"] > rate.stages["wait"] and rate.best_us > 0
    assert f"**{rate.per_minute:.0f}**" in side_by_side.row(rate)


def test_our_half_searches_proves_nothing_and_finds_nothing_built(tmp_path):
    family = write_family(tmp_path / "families")
    # Three texts of two machine codes.
    space = {"mode": ["ok"], "step": [1, 2], "salt": [0, 1]}
    rule = {"expr": "step == 1 or salt == 0", "why": "one is enough"}
    text = config_text(family, space=space, constraints=[rule])
    (tmp_path / "config.yaml").write_text(text)
    options = ["--only", "ours", "--config", tmp_path / "config.yaml", "--seconds", "60"]
    options += ["--runs-dir", tmp_path / "runs", "--out", tmp_path / "out.json"]
    cache = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.side_by_side", *map(str, options)],
        cwd=ROOT,
        env=environment({"XDG_CACHE_HOME": str(cache)}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "out.json").read_text())
    assert (found["tuner"], found["tried"], found["checked"], found["wrong"]) == ("ours", 3, 2, 0)
    assert found["per_minute"] == pytest.approx(60 * 2 / found["seconds"])
    assert "| ours |" in done.stdout and not (cache / "tuner" / "builds").exists()
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "result.json").exists()
