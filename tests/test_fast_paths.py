"""Attention modules that run another, fused operation in eval mode without gradients."""

from __future__ import annotations

import pytest
import torch
from cpu_machine import FACTS, FEW_PASSES, GPP, compiled

from tuner.capture.graph.fast_paths import fast_paths
from tuner.errors import InputError
from tuner.evaluate.modules import fused, module_of
from tuner.kernel.binding import bind
from tuner.kernel.family import load_family
from tuner.planning.deriving import derive_operator
from tuner.problem.reference import load_problem

TEXT = """
import torch
import torch.nn as nn
{before}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = {part}

    def forward(self, x):
        return torch.tanh({call}) * 2.0


def get_inputs():
    return [torch.randn(6, 5, 32)]


def get_init_inputs():
    return []
"""
LAYER = ("nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)", "self.part(x)")
ATTENTION = ("nn.MultiheadAttention(32, 2, batch_first=True)", "self.part(x, x, x)[0]")
OFF = "torch.backends.mha.set_fastpath_enabled(False)"


def text_of(part: str, call: str, before: str = "") -> str:
    return TEXT.format(part=part, call=call, before=before)


@pytest.fixture(autouse=True)
def with_fast_paths():
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize(
    ("part", "call", "before", "found"),
    [
        (*LAYER, "", ["aten._transformer_encoder_layer_fwd"]),
        (*ATTENTION, "", ["aten._native_multi_head_attention"]),
        (*LAYER, OFF, []),
        ("nn.MultiheadAttention(32, 3 - 1)", "self.part(x, x, x)[0]", "", []),  # rows come first
        ("nn.Linear(32, 32)", "self.part(x)", "", []),
    ],
)
def test_it_is_found_where_pytorch_takes_it(part, call, before, found, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(text_of(part, call, before))
    assert fast_paths(load_problem(path)) == found


@pytest.mark.parametrize("draws", [False, True])
def test_in_eval_mode_it_is_named_with_what_to_do(draws, tmp_path):
    """Training mode is no way out where that draws random numbers."""
    path = tmp_path / "module.py"
    part, call = LAYER
    path.write_text(text_of(part.replace("=0.0", "=0.1") if draws else part, call))
    with pytest.raises(InputError, match=r"aten\._transformer_encoder_layer_fwd") as refused:
        derive_operator(path, mode="eval")
    assert ("--mode train" in str(refused.value)) != draws and OFF in str(refused.value)


@pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
def test_kernels_of_training_mode_leave_eval_mode_to_the_module(tmp_path, monkeypatch):
    """Numbers near the largest are NaN in one way of PyTorch's and none in the other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "module.py"
    path.write_text(text_of(*LAYER))
    problem, made = load_problem(path), derive_operator(path)
    family = load_family(made.name, [made.folder])
    candidate = family.render({"template": "nest"}, FACTS)
    operator = bind(candidate.plan, "cpp", compiled(candidate, level=FEW_PASSES))
    calls = []
    module = module_of(family.model_new)
    module |= {**fused(operator), "fused_op": lambda *args: calls.append(args) or operator(*args)}
    own, mine = problem.make_model(0), module["ModelNew"]()
    mine.load_state_dict(own.state_dict())
    (x,) = problem.make_inputs(1)
    x[2, 1] = 3e38
    with torch.no_grad():
        torch.testing.assert_close(mine(x[:2]), own(x[:2]))
        assert len(calls) == 1
        got, expected = mine.eval()(x), own.eval()(x)
    assert len(calls) == 1 and torch.equal(got.isnan(), expected.isnan())


def test_a_submodule_with_a_methods_name_is_named(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(text_of("None\n        self.to = nn.Linear(32, 32)", "self._modules['to'](x)"))
    with pytest.raises(
        InputError, match=r"a submodule called to, the name of a method(?s:.*)next"
    ):
        derive_operator(path)
