"""What one module's run found is where another's search begins: real runs, in small sizes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import environment
from cpu_machine import GPP

import tuner
from tuner.deriving import derive_config
from tuner.earlier import Earlier, earlier_of, sources_from
from tuner.kernel.cache import default_cache_dir
from tuner.observing import Observer
from tuner.planning import Planned, plan
from tuner.run import Run, open_run
from tuner.search.run_index import KnownRun, known_runs, operator_task
from tuner.trial import Trial, from_json, to_json

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")

MODULE = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear({cols}, 8)

    def forward(self, {names}):
        {forward}


def get_inputs():
    return [torch.randn({rows}, {cols}), torch.randn({rows}, {cols})]


def get_init_inputs():
    return []
"""
GATE = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.sigmoid(y)"
# The same nest behind other names and in another order, with a product after it.
AROUND = """open = torch.sigmoid(first)
        scale = torch.rsqrt(second.square().mean(-1, keepdim=True) + 1e-6)
        return self.head(second * scale * open)"""


class Lines(Observer):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_stage(self, text: str) -> None:
        self.lines.append(text)


def config_of(
    folder: Path, name: str, forward: str, names: str = "x, y", rows: int = 40, cols: int = 96,
    trials: int = 1, effort: str = "normal",
) -> tuner.RunConfig:  # fmt: skip
    text = MODULE.format(forward=forward, names=names, rows=rows, cols=cols)
    (folder / f"{name}.py").write_text(text)
    config = folder / f"{name}.yaml"
    config.write_text(
        f"problem: {{module: {name}.py}}\neffort: {effort}\nsearch: {{trials: {trials}}}\n"
    )
    return tuner.load_config(derive_config(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the run of one module in `runs`."""
    folder = tmp_path_factory.mktemp("earlier")
    config = config_of(folder, "gate", GATE, trials=3)
    tuner.tune(config, runs_dir=folder / "runs", verifies=False)
    return folder


@pytest.fixture(scope="module")
def around(folder) -> Planned:
    """The plan of another module with the same nest."""
    return plan(config_of(folder, "around", AROUND, "first, second"))


@pytest.fixture
def runs(folder, tmp_path) -> Path:
    """A copy of the folder of runs, whose index is not made yet."""
    shutil.copytree(folder / "runs", tmp_path / "runs")
    return tmp_path / "runs"


def only(runs: Path) -> Run:
    (path,) = runs.iterdir()
    return open_run(path)


def versions(runs: Path) -> str:
    return known_runs(runs)[0].versions


def index_of(runs: Path) -> Path:
    """The file of the index, which a first look has made."""
    folder = default_cache_dir().parent / "index"
    (path,) = [p for p in folder.iterdir() if f'"{only(runs).path.name}"' in p.read_text()
               and p.stat().st_mtime_ns >= runs.stat().st_ctime_ns]  # fmt: skip
    return path


# ---- another module ---------------------------------------------------------------------------


def test_another_module_with_the_same_task_starts_from_its_best(folder, around):
    best = only(folder / "runs").best()
    said = Lines()
    run = tuner.tune(around.config, runs_dir=folder / "runs", observer=said, verifies=False)
    task = next(t for t in around.outline.tasks if t.kind == "nest")
    name = min(p.name for p in (folder / "runs").iterdir())
    words = f"from run {name}, whose task {task.label} is the same"
    assert f"trial 0: {words}" in said.lines
    (trial,) = run.trials()
    assert trial.params == best.params
    # It is built, checked and timed like any other.
    assert trial.outcome.check.is_accepted and trial.outcome.check.probes
    assert trial.outcome.measurement.samples_us != best.outcome.measurement.samples_us
    recorded = from_json(Earlier, json.dumps(run.environment()["earlier"]))
    assert [s.words for s in recorded.first] == [words] and recorded.runs == (name,)
    # A resumed run asks the same again, whatever was tuned since, and goes on.
    resumed = tuner.resume(run.path, overrides={"trials": 2}, verifies=False, observer=said)
    assert [t.params for t in resumed.trials()][:1] == [trial.params]
    assert len(resumed.trials()) == 2
    shutil.rmtree(run.path)
