"""What a forward asks that a capture answers once."""

from __future__ import annotations

import pytest

from tuner.errors import InputError
from tuner.planning.deriving import derive_operator
from tuner.planning.observing import Observer
from tuner.problem.asked_once import conditions_in, data_line

MODULE = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        if self.scale.requires_grad:
            self.scale.data.fill_(2.0)

    def forward(self, x):
        {line}
        return torch.tanh(x * self.scale) + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
"""


class Said(Observer):
    def __init__(self):
        self.stages = []

    def on_stage(self, text):
        self.stages.append(text)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("if torch.is_grad_enabled(): x = x * 2", ["torch.is_grad_enabled()"]),
        ("x = x if torch.compiler.is_compiling() else -x", ["torch.compiler.is_compiling()"]),
        ("if x.is_leaf and len(x) > 1: x = -x", ["x.is_leaf and len(x) > 1"]),
        ("if self.training: x = x * 2", []),
        ("x = x.contiguous() if x.ndim > 1 else x", []),
    ],
)  # fmt: skip
def test_a_condition_about_the_call_is_found_with_its_line(line, found):
    text = MODULE.format(line=line)
    assert conditions_in(text) == [(14, test) for test in found]
    assert data_line(text) is None  # that of the constructor is none of forward's


def test_a_text_that_is_not_python_has_none():
    assert conditions_in("def") == [] and data_line("def") is None


def test_it_is_said_when_the_file_is_captured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, said = tmp_path / "asks.py", Said()
    path.write_text(MODULE.format(line="if torch.compiler.is_compiling(): x = x * 2"))
    derive_operator(path, said)
    assert any(
        "line 14: `torch.compiler.is_compiling()` is answered once" in t for t in said.stages
    )


def test_data_in_forward_is_refused_with_its_line(tmp_path, monkeypatch):
    """PyTorch 2.13 ends the process of such a capture; whoever takes it may tune it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "data.py"
    path.write_text(MODULE.format(line="x = x / x.data.abs().amax(-1, keepdim=True)"))
    assert data_line(path.read_text()) == 14
    try:
        derive_operator(path)
    except InputError as error:
        assert "data.py:14" in str(error)


def test_a_tensor_that_forward_makes_belongs_into_the_constructor(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "edges.py"
    line = "x = torch.bucketize(x * 2, torch.tensor([-1.0, 0.0, 1.0])).float()"
    path.write_text(MODULE.format(line=line))
    with pytest.raises(
        InputError, match=r"line 14: a tensor of numbers that forward makes"
    ) as said:
        derive_operator(path)
    assert "next: make it in the constructor, self.register_buffer(" in str(said.value)
