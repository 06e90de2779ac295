"""`tune new`: an operator's folder in which one task of a module is somebody's to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from command_line import tune
from cpu_machine import FACTS

from tuner.config.run_config import load_config
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device
from tuner.planning.planning import plan

TEXT = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(40, 24)

    def forward(self, x):
        h = self.lin(x.tanh() * 2.0)
        p = torch.softmax(h, -1)
        return (p * h).cumsum(1)


def get_inputs():
    return [torch.randn(30, 40)]


def get_init_inputs():
    return []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where `mine.py` and what was written for its task cumsum are."""
    folder = tmp_path_factory.mktemp("by_hand")
    (folder / "mine.py").write_text(TEXT)
    said = new(folder, "mine.py", "--task", "cumsum")
    assert said.code == 0, said.err
    assert "task cumsum in C++, yours to edit: mine_by_hand/mine_forward/cumsum.cpp.j2" in said.out
    assert "next: tune --config mine_by_hand/mine_forward.yaml --dry-run" in said.out
    return folder


def new(folder: Path, *args: str):
    return tune("new", *args, cwd=folder, env={"XDG_CACHE_HOME": str(folder / "cache")})


def test_a_stub_is_what_was_generated_with_what_the_task_is(folder):
    family = load_family("mine_forward", [folder / "mine_by_hand"])
    h200 = known_device("H200").facts()
    pairs = [("cumsum", "nest", FACTS), ("cumsum_triton", "nest_triton", h200)]
    for stub, generated, facts in pairs:
        mine = family.render({"template": stub}, facts)
        theirs = family.render({"template": generated}, facts)
        mark = "//" if stub == "cumsum" else "#"
        lines = mine.source.splitlines()
        begin = next(i for i, line in enumerate(lines) if line.startswith(f"{mark} ---- task"))
        end = next(i for i in range(begin, len(lines)) if not lines[i].startswith(mark))
        assert lines[:begin] + lines[end:] == theirs.source.splitlines()
        assert mine.plan == theirs.plan
        comment = "\n".join(lines[begin:end])
        assert "task cumsum: yours to write" in comment and "line 13" in comment
        assert "cumsum = cumsum(mul_1, axis=1)" in comment and "30 x 24" in comment
        # It stands before the task's own functions; those of gradients are behind them.
        assert lines[end].startswith(('extern "C" const char* fused_mine', "@launched"))
        function = next(line for line in lines[end:] if "fused_mine" in line)
        assert "_rows_1" not in function
        assert any("_rows_1" in line for line in lines[end:])


def test_it_is_tuned_as_it_was_written(folder):
    config = folder / "mine_by_hand" / "mine_forward.yaml"
    planned = plan(load_config(config, {"device": "cpu"}))
    assert planned.example().template == "cumsum"
    assert {t for t, n in planned.space.count_by("template").items() if n} == {"cumsum"}
    said = tune("--config", "mine_by_hand/mine_forward.yaml", "--dry-run", cwd=folder)
    assert said.code == 0 and "task cumsum: one nest" in said.out, said.err
    assert "a step of training takes kernels of its own for gradients" in said.out


def test_what_was_generated_competes_and_what_nothing_is_feasible_of_is_named(folder, tmp_path):
    """Values of parameters that a left out template alone has may stay in the config."""
    config = yaml.safe_load((folder / "mine_by_hand" / "mine_forward.yaml").read_text())
    assert "num_warps" in config["space"]
    config["space"]["template"] = ["cumsum", "nest"]
    config["problem"]["templates"] = [str(folder / "mine_by_hand")]
    path = tmp_path / "both.yaml"
    path.write_text(yaml.safe_dump(config))
    planned = plan(load_config(path, {"device": "cpu"}))
    assert {*planned.space.count_by("template")} == {"cumsum", "nest"} and not planned.warnings
    config["constraints"] = [{"expr": "template != 'cumsum'", "why": "a test"}]
    path.write_text(yaml.safe_dump(config))
    said = tune("--config", path, "--dry-run", "--device", "cpu", cwd=folder)
    assert "warning: no configuration of template 'cumsum' is feasible" in said.out, said.err
    assert "  cumsum: 0\n" in said.out


def test_the_tasks_are_those_that_a_dry_run_shows(folder):
    env = {"XDG_CACHE_HOME": str(folder / "cache")}
    said = tune("mine.py", "--dry-run", "--json", "--device", "cpu", cwd=folder, env=env)
    tasks = {t["name"]: t["kind"] for t in json.loads(said.out)["graph"]["tasks"]}
    nests = [name for name, kind in tasks.items() if kind == "nest"]
    (call,) = tasks.keys() - {*nests}
    listed = f"expected one of {', '.join(nests)}"
    said = new(folder, "mine.py")
    assert said.code == 2 and f"no task is named; {listed}" in said.err
    said = new(folder, "mine.py", "--task", "cumsun")
    assert said.code == 2 and f"no task 'cumsun'; {listed}" in said.err
    assert "did you mean 'cumsum'?" in said.err
    said = new(folder, "mine.py", "--task", call)
    assert said.code == 2 and "is a call of PyTorch's own" in said.err and listed in said.err
    said = new(folder, "mine.py", "--task", nests[0], "--json", "-o", "first")
    assert json.loads(said.out)["stubs"][0] == f"first/mine_forward/{nests[0]}.cpp.j2"


def test_nothing_is_overwritten(folder):
    stub = folder / "mine_by_hand" / "mine_forward" / "cumsum.cpp.j2"
    before = stub.read_text()
    said = new(folder, "mine.py", "--task", "cumsum")
    assert said.code == 2 and "mine_by_hand: exists already" in said.err
    assert "name another one with --output" in said.err and stub.read_text() == before
    said = new(folder, "mine.py", "--task", "cumsum", "-o", "mine.py")
    assert said.code == 2 and "mine.py: exists already" in said.err
    said = new(folder, "absent.py", "--task", "cumsum")
    assert said.code == 2 and said.err.startswith("error: absent.py: no such file")
