"""What one module's run found is where another's search begins: real runs, in small sizes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import environment
from cpu_machine import GPP
from spaces import feasible

import tuner
from tuner.capture.tasks.half_products import WGMMA_TEMPLATE
from tuner.kernel.cache import default_cache_dir
from tuner.planning.deriving import derive_config
from tuner.planning.earlier import Earlier, earlier_of, sources_from
from tuner.planning.observing import Observer
from tuner.planning.planning import Planned, plan
from tuner.run import Run, open_run
from tuner.search.samplers import make_sampler
from tuner.search.task_index import known_runs, operator_task, versions_of
from tuner.trial import Params, content_key, from_json, to_json

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
# Another nest, behind a product that keeps the size; and both.
BEHIND = "return torch.softmax(nn.functional.gelu((x @ y.t()) @ y), -1)"
BOTH = """h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.sigmoid(y)
        return torch.softmax(nn.functional.gelu((h @ y.t()) @ y), -1)"""


class Lines(Observer):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_stage(self, text: str) -> None:
        self.lines.append(text)


def config_of(
    folder: Path, name: str, forward: str, names: str = "x, y", rows: int = 40, cols: int = 96,
    trials: int = 1, device: str = "cpu",
) -> tuner.RunConfig:  # fmt: skip
    text = MODULE.format(forward=forward, names=names, rows=rows, cols=cols)
    (folder / f"{name}.py").write_text(text)
    config = folder / f"{name}.yaml"
    config.write_text(
        f"problem: {{module: {name}.py}}\ndevice: {device}\nsearch: {{trials: {trials}}}\n"
    )
    return tuner.load_config(derive_config(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the run of one module in `runs`."""
    folder = tmp_path_factory.mktemp("earlier")
    config = config_of(folder, "gate", GATE, trials=2)
    tuner.tune(config, runs_dir=folder / "runs", verifies=False)
    return folder


@pytest.fixture(scope="module")
def around(folder) -> Planned:
    """The plan of another module with the same nest."""
    return plan(config_of(folder, "around", AROUND, "first, second"))


@pytest.fixture
def runs(folder, tmp_path) -> Path:
    """A copy of the folder of runs, which has no index yet."""
    shutil.copytree(folder / "runs", tmp_path / "runs")
    return tmp_path / "runs"


def only(runs: Path) -> Run:
    (path,) = runs.iterdir()
    return open_run(path)


def index_of(runs: Path) -> Path:
    """The file of the index, which a look makes."""
    return default_cache_dir().parent / "index" / f"{content_key(runs.resolve())}.json"


def changed(runs: Path, name: str, params: Params, planned: Planned | None = None, **more) -> str:
    """Copy the only real run under another name, with another best, module or environment."""
    (real, *_) = sorted(runs.iterdir())
    path = shutil.copytree(real, runs / name)
    trial = open_run(path).trials()[0]
    (path / "trials.jsonl").write_text(to_json(replace(trial, params=params)) + "\n")
    environment = json.loads((path / "environment.json").read_text())
    (path / "environment.json").write_text(json.dumps({**environment, **more}))
    if planned is not None:
        record = json.loads((path / "module.json").read_text())
        record["outline"] = json.loads(to_json(planned.outline))
        (path / "module.json").write_text(json.dumps(record))
    return name


def reported(planned: Planned, runs: Path) -> Earlier:
    """What the folder tells a search of the same versions."""
    versions = open_run(min(runs.iterdir())).environment()
    return earlier_of(planned, versions_of(versions.machine, versions.toolchain), runs)


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
    recorded = from_json(Earlier, json.dumps(run.environment().earlier))
    assert [s.words for s in recorded.first] == [words] and recorded.runs == (name,)
    # A resumed run asks the same again, whatever was tuned since, and goes on.
    resumed = tuner.resume(run.path, overrides={"trials": 2}, verifies=False, observer=said)
    assert [t.params for t in resumed.trials()][:1] == [trial.params]
    assert len(resumed.trials()) == 2
    shutil.rmtree(run.path)


def test_each_nest_is_first_as_where_it_was_fastest(folder, around, runs):
    both = plan(config_of(folder, "both", BOTH))
    behind = plan(config_of(folder, "behind", BEHIND, names="y, x"))
    assert reported(behind, runs) == Earlier()  # nothing of it was ever tuned
    (first, second) = [t for t in both.outline.tasks if t.kind == "nest"]
    assert first.key in {t.key for t in around.outline.tasks} and second.suffix == "_2"
    assert second.key in {t.key for t in behind.outline.tasks}
    best = {"stream_output": False, "huge_pages": False, "template": "nest"}
    one = changed(runs, "1-gate", {**best, "unroll": 4, "keep": False}, around)
    two = changed(runs, "2-behind", {**best, "unroll": 1, "keep": False}, behind)
    shutil.rmtree(min(p for p in runs.iterdir() if p.name not in (one, two)))
    suggestion = reported(both, runs).first[0]
    wanted = {"unroll": 4, "keep": False, "unroll_2": 1, "keep_2": False}
    assert wanted.items() <= suggestion.params.items() and suggestion.is_same
    assert both.space.index(suggestion.params) is not None
    assert suggestion.words == (
        f"from run {one}, whose task {first.label} is the same; "
        f"from run {two}, whose task {second.label} is the same"
    )
    # And back: of the module with both, each of the others takes what is its own.
    shutil.rmtree(runs / one)
    changed(runs, "3-both", suggestion.params, both)
    shutil.rmtree(runs / two)
    assert reported(behind, runs).first[0].params["unroll"] == 1
    assert reported(around, runs).first[0].params["unroll"] == 4


def test_the_same_sizes_and_device_come_before_others(folder, around, runs):
    best = only(runs).best().params
    real = only(runs).path.name
    other = {**best, "unroll": 4 if best["unroll"] != 4 else 1}
    far = changed(runs, "9-far", other, device_name="Another CPU")
    wide = plan(config_of(folder, "wide", GATE, rows=50, cols=64))
    found = reported(around, runs)
    assert [s.params["unroll"] for s in found.first] == [best["unroll"], other["unroll"]]
    assert [s.is_same for s in found.first] == [True, False]
    assert found.first[1].words.endswith("is the same, on Another CPU")
    assert found.runs == (real, far) and found.same == found.first[:1]
    shutil.rmtree(runs / far)
    ((suggestion,), names) = (reported(wide, runs).first, reported(wide, runs).runs)
    assert suggestion.words.endswith("is the same in other sizes") and not suggestion.is_same
    assert suggestion.params == best and names == (real,)


def test_the_model_starts_from_all_that_another_module_tried(folder, around, runs):
    run = only(runs)
    # The fastest one: of a slower one a noisy machine may know a bound alone.
    trial = min(run.trials(), key=lambda trial: trial.outcome.ranked_us or float("inf"))
    tried = feasible(around.space)[:6]
    lines = [replace(trial, number=n, params=p) for n, p in enumerate(tried)]
    (run.path / "trials.jsonl").write_text("".join(to_json(t) + "\n" for t in lines[:4]))
    assert sources_from(around, [run.path.name], runs) == []  # too few to mean anything
    (run.path / "trials.jsonl").write_text("".join(to_json(t) + "\n" for t in lines))
    (source,) = sources_from(around, [run.path.name, "gone"], runs)
    assert [source.space.index(params) is not None for params in tried] == [True] * 6
    assert np.allclose(source.latency_us, trial.outcome.ranked_us)
    make_sampler("surrogate", around.space, 0, [source])  # it is of use to it


def test_a_configuration_that_is_not_feasible_here_is_not_tried(folder, around, runs):
    real = only(runs).path
    changed(runs, "1-odd", {"template": "nest", "unroll": 3, "stream_output": True})
    changed(runs, "2-by-hand", {"template": "by_hand", "unroll": 4, "stream_output": True})
    changed(runs, "3-alien", {"template": "nest_triton", "num_warps": 4})
    shutil.rmtree(real)
    found = reported(around, runs).first
    assert len(found) == 2 and {s.params["template"] for s in found} == {"nest"}
    for suggestion in found:
        assert around.space.index(suggestion.params) is not None
        assert suggestion.params["stream_output"] and suggestion.params["unroll"] != 3
        assert not suggestion.is_same  # neither is what was tried there


def test_of_a_product_the_template_and_its_parameter_are_found_again(folder, runs):
    size = {"rows": 256, "cols": 256, "device": "cuda"}
    alone, followed = (
        plan(config_of(folder, name, forward, **size), may_assume=True)
        for name, forward in (("product", "return x @ y"), ("relu", "return torch.relu(x @ y)"))
    )
    own = {"template": WGMMA_TEMPLATE, "product_n": 128, "product_k": 32, "product_cluster": 2}
    changed(runs, "1-relu", own, followed, device_name=alone.device.name)
    (suggestion,) = reported(alone, runs).first
    assert suggestion.is_same and alone.space.num_feasible > 1
    assert own.items() <= suggestion.params.items()
    ((again, *_), found) = (reported(followed, runs).first, reported(followed, runs).runs)
    assert own.items() <= again.params.items() and found == ("1-relu",)


def test_a_nest_says_nothing_of_another_modules_product(folder, runs):
    gate = "h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)"
    size = {"rows": 256, "cols": 256, "device": "cuda"}
    forwards = {"one": "h @ y, h", "biased": "nn.functional.linear(h, y, y[0]), h"}
    one, biased = (
        plan(config_of(folder, name, f"{gate}; return {forward}", **size), may_assume=True)
        for name, forward in forwards.items()
    )
    (default, *_) = biased.defaults
    assert default["template"] == WGMMA_TEMPLATE and default["product_k"] != 32
    own = {"template": WGMMA_TEMPLATE, "product_k": 32, "block_rows": 8}
    changed(runs, "1-one", {**default, **own}, one, device_name=biased.device.name)
    (suggestion,) = reported(biased, runs).first
    assert suggestion.params == {**default, "block_rows": 8}


# ---- the index --------------------------------------------------------------------------------


def test_an_index_that_is_lost_or_damaged_is_made_again(runs):
    first = known_runs(runs)
    assert [known.name for known in first] == [only(runs).path.name]
    index = index_of(runs)
    whole = index.read_text()
    index.unlink()
    assert known_runs(runs) == first and index.read_text() == whole
    alien, half = whole.replace('"format":2', '"format":0'), whole[: len(whole) // 2]
    for damage in ("", half, "[]", "{" * 10_000, alien, "\0\xff"):
        index.write_text(damage)
        assert known_runs(runs) == first and index.read_text() == whole, damage[:50]
    index.unlink()
    index.mkdir()  # it can be neither read nor written
    assert known_runs(runs) == first


def test_the_index_follows_the_run_directories(runs):
    (before,) = known_runs(runs)
    run = only(runs)
    best = run.best()
    measurement = replace(
        best.outcome.measurement, latency_us=1.0, samples_us=(1.0,) * 5, others_us={}
    )
    faster = replace(best, number=9, params={**best.params, "unroll": 4},
                     outcome=replace(best.outcome, measurement=measurement))  # fmt: skip
    with (run.path / "trials.jsonl").open("a") as file:
        file.write(to_json(faster) + "\n" + to_json(faster)[:50])  # the last one half-written
    (after,) = known_runs(runs)
    assert after == replace(before, params=faster.params, ranked_us=1.0)
    with run.locked():  # another process works on it
        with (run.path / "trials.jsonl").open("a") as file:
            file.write(to_json(replace(faster, number=10)) + "\n")
        assert known_runs(runs) == [after]
    shutil.rmtree(run.path)
    assert known_runs(runs) == [] and run.path.name not in index_of(runs).read_text()


FOREIGN = {
    "no run": {"notes.txt": "mine"},
    "no trials": {"environment.json": None, "config.yaml": None},
    "no JSON": {"environment.json": "{", "config.yaml": "", "trials.jsonl": None},
    "another environment": {"environment.json": "[1]", "config.yaml": "", "trials.jsonl": None},
    "damaged trials": {"environment.json": None, "config.yaml": "", "module.json": None,
                       "trials.jsonl": "{}\n{}\n"},
    "a record before tasks had keys": {
        "environment.json": None, "config.yaml": "", "trials.jsonl": None,
        "module.json": '{"outline": {"tasks": [{"kind": "nest", "steps": ["a"]}]}}'},
    "a module that is none": {"environment.json": None, "config.yaml": "", "trials.jsonl": None,
                              "module.json": "[]"},
    "a result that is none": {"environment.json": None, "config.yaml": "", "trials.jsonl": None,
                              "module.json": None, "result.json": '{"winner": "first"}'},
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_or_damaged_directory_tells_nothing(what, runs):
    real = only(runs).path
    first = known_runs(runs)
    (runs / "a file").write_text("not a run")
    (runs / "a loop").symlink_to(runs / "a loop")
    (runs / "odd" / "trials.jsonl").mkdir(parents=True)
    other = runs / "99999999-foreign"
    other.mkdir()
    for name, text in FOREIGN[what].items():
        (other / name).write_text((real / name).read_text() if text is None else text)
    assert known_runs(runs) == first
    assert known_runs(runs) == first  # from the index as well


def test_processes_that_look_at_once_agree(runs, tmp_path):
    real = only(runs).path
    for number in range(20):
        shutil.copytree(real, runs / f"copy-{number}")
    code = (
        "import sys; from pathlib import Path; from tuner.search.task_index import known_runs\n"
        f"print(len([known_runs(Path({str(runs)!r})) for _ in range(20)][-1]))"
    )
    several = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                         env=environment())
        for _ in range(2)
    ]  # fmt: skip
    assert [process.communicate()[0] for process in several] == ["21\n"] * 2
    assert len(json.loads(index_of(runs).read_text())["runs"]) == 21


def test_an_entry_supplies_no_time_and_skips_no_check(folder, around, runs):
    (known,) = known_runs(runs)
    index = index_of(runs)
    params = {**known.params, "unroll": 4 if known.params["unroll"] != 4 else 1}
    data = json.loads(index.read_text())
    found = data["runs"][known.name]["found"]
    found["params"], found["ranked_us"] = params, 0.12345678
    index.write_text(json.dumps(data))
    run = tuner.tune(around.config, runs_dir=runs, verifies=False)
    (trial,) = run.trials()
    assert trial.params == params and trial.outcome.check.is_accepted
    assert trial.outcome.latency_us > 0.2
    texts = [p.read_text() for p in run.path.rglob("*.json*")]
    assert not any("0.12345678" in text for text in texts)


def test_an_operator_by_hand_knows_its_own_runs_alone(runs):
    (real,) = known_runs(runs)
    path = only(runs).path
    (path / "module.json").unlink()
    environment = open_run(path).environment()
    asked = [getattr(environment, name) for name in ("op", "sizes", "accuracy", "mode")]
    (known,) = known_runs(runs)
    assert known == replace(real, tasks=(operator_task(*asked),))
    bigger = operator_task(asked[0], {"batch": 1}, *asked[2:])
    assert bigger.key != known.tasks[0].key and bigger.form_key == known.tasks[0].form_key
    assert operator_task("another", *asked[1:]).form_key != bigger.form_key
