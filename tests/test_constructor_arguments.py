"""What get_init_inputs() returns reaches a module in another process, with its own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tuner.errors import ProblemError
from tuner.evaluate.modules import MOST_DRAWN, constructed, module_of, packed, unpacked
from tuner.problem.reference import Problem, load_problem

DEFINED = """
import functools
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace

import torch


class Kind(Enum):
    RELU = 1


def halved(x):
    return x / 2


class Outer:
    @dataclass(frozen=True, slots=True)
    class Config:
        width: int
        kind: Kind = Kind.RELU
        dtype: torch.dtype = torch.float32
"""
REFERENCE = """

class Model(torch.nn.Module):
    def __init__(self, *arguments):
        super().__init__()
        self.arguments = arguments

    def forward(self, x):
        return x


def get_inputs():
    return [torch.rand(4)]


def get_init_inputs():
    return ARGUMENTS
"""
MODEL_NEW = DEFINED + "\n\nclass ModelNew(torch.nn.Module):\n    pass\n"


def problem_of(tmp_path: Path, arguments: str) -> Problem:
    path = tmp_path / "reference.py"
    path.write_text(DEFINED + REFERENCE.replace("ARGUMENTS", arguments))
    return load_problem(path)


def arrived(tmp_path: Path, arguments: str, model_new: str = MODEL_NEW) -> tuple[Any, Any]:
    module = module_of(model_new)
    (found,) = unpacked(packed(problem_of(tmp_path, f"[{arguments}]")), module, "model_new.py")
    return found, module


@pytest.mark.parametrize(
    "plain", [3, 0.5, "same", None, True, (1, [2, (3,)]), {"heads": 4, "scales": (0.5, 2.0)}]
)
def test_plain_values_arrive_as_they_were(tmp_path, plain):
    found, _ = arrived(tmp_path, repr(plain))
    assert found == plain
    assert type(found) is type(plain)


def test_a_config_is_an_object_of_the_modules_own_class(tmp_path):
    found, module = arrived(tmp_path, "Outer.Config(width=8)")
    assert type(found) is module["Outer"].Config
    assert (found.width, found.dtype) == (8, torch.float32)
    assert found.kind is module["Kind"].RELU


def test_so_are_a_function_and_what_the_library_defines(tmp_path):
    made = "SimpleNamespace(act=functools.partial(halved), table=OrderedDict(a=Kind.RELU))"
    found, module = arrived(tmp_path, made)
    assert found.act.func is module["halved"]
    assert found.table == {"a": module["Kind"].RELU}


def test_a_module_without_that_class_is_told(tmp_path):
    with pytest.raises(ProblemError) as error:
        arrived(tmp_path, "Outer.Config(width=8)", "class ModelNew(torch.nn.Module):\n    pass\n")
    assert str(error.value).startswith("model_new.py: no Outer.Config, of which get_init_inputs()")
    assert "next: define or import it there" in str(error.value)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("torch.ones(3)", "it holds a Tensor"),
        ("{'weight': [torch.ones(3)]}", "it holds a Tensor"),
        ("torch.nn.Linear(2, 2)", "it holds a Linear"),
        ("lambda x: x", "lambda"),
        ("(i for i in range(3))", "generator"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_with_its_line(tmp_path, value, why):
    problem = problem_of(tmp_path, f"[2, {value}]")
    with pytest.raises(ProblemError) as error:
        packed(problem)
    lines = problem.text.splitlines()
    assert str(error.value).startswith(
        f"{problem.path}:{lines.index('def get_init_inputs():') + 1}: another process cannot"
    )
    assert why in str(error.value)
    assert "  got: [int, " in str(error.value)
    assert "  next: make tensors, modules and functions in Model.__init__" in str(error.value)


@pytest.mark.parametrize("is_quick", [False, True])
def test_weights_that_are_replaced_at_once_are_few_random_numbers_repeated(is_quick):
    """PyTorch takes ten times as long to draw four million as to multiply a few rows by them."""
    torch.manual_seed(5)
    made = constructed(torch.nn.Linear, [512, 1000], "cpu", is_quick=is_quick)
    torch.manual_seed(5)
    usual = torch.nn.Linear(512, 1000)
    assert torch.equal(made.weight, usual.weight) is not is_quick
    flat = made.weight.detach().view(-1)
    assert torch.equal(flat[:MOST_DRAWN], usual.weight.detach().view(-1)[:MOST_DRAWN])
    assert torch.equal(flat[MOST_DRAWN:], flat[:-MOST_DRAWN]) is is_quick  # to the end
    assert made.weight.requires_grad and type(made.weight) is torch.nn.Parameter
    assert abs(float(flat.std() / usual.weight.detach().std()) - 1.0) < 0.02
