"""The same task in other modules has the same key: real captures of small files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.capture.capture import capture
from tuner.capture.graph.graph import Graph
from tuner.capture.outline import KernelTask, outline_of
from tuner.capture.tasks.biases import with_biases_apart
from tuner.capture.tasks.identity import TaskKeys, keys_of
from tuner.capture.tasks.stages import Partition, stages_of
from tuner.problem.reference import load_problem

F = "torch.nn.functional"


def graph_of(
    folder: Path, forward: str, inputs: str, init: str = "...", names: str = "x, y"
) -> Graph:
    path = folder / "module.py"
    path.write_text(f"""
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {names}):
        {forward}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
""")
    return with_biases_apart(capture(load_problem(path)))


def tasks_of(folder: Path, *module: str, **more: str) -> tuple[KernelTask, ...]:
    return outline_of(graph_of(folder, *module, **more)).tasks


X = "torch.randn(37, 100)"
GATE = ("return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.sigmoid(y)",
        f"{X}, {X}")  # fmt: skip
SAME = {
    "other names": ("scale = torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6)\n"
                    "        return a * scale * torch.sigmoid(b)", f"{X}, {X}", "...", "a, b"),
    "other steps first": ("open = torch.sigmoid(y)\n"
                          "        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)"
                          " * open", f"{X}, {X}"),
    "arguments the other way": (GATE[0], f"{X}, {X}", "...", "y, x"),
    "rows in two dimensions": (GATE[0], "torch.randn(1, 37, 100), torch.randn(1, 37, 100)"),
    "a weight for an input": ("return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * "
                              "torch.sigmoid(self.w)", X,
                              "self.w = nn.Parameter(torch.randn(37, 100))", "x"),
}  # fmt: skip
FORM = {
    "other sizes": (GATE[0], "torch.randn(8, 48), torch.randn(8, 48)"),
    "another number": (GATE[0].replace("1e-6", "1e-5"), f"{X}, {X}"),
}
OTHER = {
    "another operation": (GATE[0].replace("sigmoid", "tanh"), f"{X}, {X}"),
    "another dtype": (GATE[0], f"{X}, {X}.bfloat16()"),
    "another order in memory": (GATE[0].replace("-1", "0"), f"{X}, {X}"),
    "one for each column": (GATE[0], f"{X}, torch.randn(100)"),
}


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    (task,) = tasks_of(tmp_path_factory.mktemp("gate"), *GATE)
    return task


@pytest.mark.parametrize("name", SAME)
def test_the_same_nest_has_the_same_key_in_another_module(name, gate, tmp_path):
    (task,) = tasks_of(tmp_path, *SAME[name])
    assert (task.key, task.form_key, task.label) == (gate.key, gate.form_key, gate.label)
    assert task.label == f"nest-{gate.key[:6]}"


@pytest.mark.parametrize("name", FORM)
def test_other_sizes_and_numbers_leave_the_form_of_a_nest(name, gate, tmp_path):
    (task,) = tasks_of(tmp_path, *FORM[name])
    assert task.key != gate.key and task.form_key == gate.form_key


@pytest.mark.parametrize("name", OTHER)
def test_other_work_has_another_key(name, gate, tmp_path):
    (task,) = tasks_of(tmp_path, *OTHER[name])
    assert task.key != gate.key and task.form_key != gate.form_key


def test_one_product_and_one_nest_are_found_in_modules_around_them(tmp_path):
    linear = "self.l = nn.Linear(100, 24)"
    one = tasks_of(tmp_path, f"return {F}.gelu(self.l(x)) * y", f"{X}, torch.randn(37, 24)",
                   linear)  # fmt: skip
    two = tasks_of(
        tmp_path, f"made = torch.softmax({F}.gelu(self.m(q)) * k, -1)\n        return made.sum(0)",
        f"{X}, torch.randn(37, 24)", "self.m = nn.Linear(100, 24)", "q, k",
    )  # fmt: skip
    three = tasks_of(tmp_path, f"return {F}.gelu(self.l(x)) * y",
                     "torch.randn(2, 6, 100), torch.randn(2, 6, 24)", linear)  # fmt: skip
    assert [task.kind for task in one] == ["library", "nest"]
    product, nest = one
    assert product.key in {task.key for task in two}
    assert nest.key not in {task.key for task in two}  # a softmax is joined to it there
    assert [task.form_key for task in three] == [product.form_key, nest.form_key]
    assert three[0].key != product.key and three[1].key != nest.key
    assert product.num_bytes == 4 * (37 * 100 + 100 * 24 + 24 + 37 * 24)
    assert nest.num_bytes == 4 * 3 * 37 * 24
    assert product.flops == 2 * 37 * 24 * 100 and nest.flops >= 2 * 37 * 24


def test_a_windows_sizes_and_step_count(tmp_path):
    def pooled(step: int, size: int) -> KernelTask:
        forward = f"return torch.relu({F}.max_pool2d(x, 2, {step})) * 2.0"
        (task,) = tasks_of(tmp_path, forward, f"torch.randn(2, 3, {size}, 8)", names="x")
        return task

    one, wide, stepped = pooled(2, 8), pooled(2, 16), pooled(1, 8)
    assert one.key == pooled(2, 8).key != wide.key
    assert one.form_key == wide.form_key != stepped.form_key


def test_which_order_of_memory_images_have_counts(tmp_path):
    convolutions = "self.c, self.d = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 5, 1)"

    def nests(forward: str, size: int, *, is_last: bool) -> list[TaskKeys]:
        graph = graph_of(
            tmp_path, f"return {forward}", f"torch.randn(2, 3, {size}, 8)", convolutions, "x"
        )
        return [keys_of(n) for n in stages_of(graph, Partition(is_channels_last=is_last)).nests]

    between = "self.d(torch.tanh(self.c(x)))"
    pooled = f"{F}.max_pool2d(self.c(x), 2)"
    for forward in (between, pooled):
        as_given, last = (nests(forward, 8, is_last=is_last) for is_last in (False, True))
        assert not {k.form for k in as_given} & {k.form for k in last}
        assert last == nests(forward, 8, is_last=True)
        wide = nests(forward, 16, is_last=True)
        assert [k.form for k in wide] == [k.form for k in last]
        assert not {k.whole for k in wide} & {k.whole for k in last}
