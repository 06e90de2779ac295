"""What forward returns beside a tensor: dictionaries, named tuples, dataclasses, lists, None."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from cpu_machine import GPP
from test_steps import Taken
from test_verdict_words import said

from tuner.capture.capture import capture
from tuner.check.calls.exercise import kinds_of
from tuner.errors import CaptureError, ProblemError
from tuner.evaluate.timed import Timed
from tuner.problem.accuracy import Accuracy
from tuner.problem.reference import load_problem
from tuner.problem.returned import is_plain, rebuilt, tensors_of, words_of, written

TEXT = """\
from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Optional
import torch
import torch.nn as nn


@dataclass
class Out:
    loss: Optional[torch.Tensor]
    states: tuple
    twice: Optional[torch.Tensor] = None


class Pair(NamedTuple):
    y: torch.Tensor
    mean: torch.Tensor


class Model(nn.Module):
    class Inner(NamedTuple):
        y: torch.Tensor

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(24))

    def forward(self, x):
        y = torch.tanh(x * self.w)
        mean = torch.sin(x * self.w).mean(1)  # not of y: PyTorch's own step takes such results
        return {returned}


def get_inputs():
    return [torch.randn(40, 24)]


def get_init_inputs():
    return []
"""
RETURNED = {
    "a dictionary": "{'y': y, 'me{a}n': mean, 'none': None}",
    "a dictionary in order": "OrderedDict(y=y, mean=mean)",
    "a named tuple": "Pair(y, mean)",
    "a dataclass": "Out(mean.sum(), (y, [torch.cos(x * self.w), None]))",
    "a class of a class": "Model.Inner(y)",
    "a list": "[y, mean]",
    "a tuple of one": "(y,)",
    "with None": "y, None",
    "PyTorch's own": "y.max(1)",
    "one in another": "[{'pair': Pair(y, mean), 0: (torch.cos(x * self.w),)}, Out(None, ())]",
}


def text_of(returned: str) -> str:
    return TEXT.replace("{returned}", returned)


class Named(NamedTuple):
    a: Any
    b: Any


@dataclass(slots=True)
class Held:
    x: Any
    y: Any = None


@pytest.mark.parametrize(
    ("result", "number", "words"),
    [
        ({"a": 1, "b": [2, None]}, 2, "a dict of a, b=(a list of 0, 1=None)"),
        (Named(1, (2, 3)), 3, "a named tuple of a, b=(a tuple of 0, 1)"),
        (Held(1, OrderedDict(k=2)), 2, "a Held of x, y=(an OrderedDict of k)"),
        ((1, None), 1, "a tuple of 0, 1=None"),
    ],
)
def test_containers_are_taken_apart_and_made_again(result, number, words):
    assert tensors_of(result) == tuple(range(1, number + 1))
    assert words_of(result) == words and not is_plain(result)
    text = written(result, lambda kind: kind.__name__).format(*tensors_of(result))
    assert eval(text) == result and type(eval(text)) is type(result)
    assert tensors_of(rebuilt(lambda x: x + 1, result)) == tuple(range(2, number + 2))


def test_no_code_of_a_container_runs_where_it_is_looked_at():
    class Lazy(dict):
        def items(self):
            raise AssertionError("it computes when it is asked")

        __iter__ = values = __getitem__ = items

    class Late(list):
        def __iter__(self):
            raise AssertionError("it computes when it is asked")

    @dataclass
    class Computed:
        x: Any

        def __getattribute__(self, name):
            raise AssertionError("it computes when it is asked")

    late = Late()
    late.append(2)
    held = {"x": 3}
    computed = object.__new__(Computed)
    object.__setattr__(computed, "x", held["x"])
    lazy = Lazy(a=1)
    assert tensors_of([lazy, late, computed]) == (1, 2, 3)
    words_of([lazy, late, computed])


@pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
@pytest.mark.parametrize("name", RETURNED)
def test_kernels_return_what_forward_does(name, tmp_path):
    taken = Taken(tmp_path, "returning", text_of(RETURNED[name]))
    assert not isinstance(taken.own.forward(*taken.inputs(1)), torch.Tensor)
    x = taken.inputs(1)[0]
    with torch.no_grad():
        mine, own = taken.mine(x), taken.own(x)
    assert type(mine).__name__ == type(own).__name__
    assert kinds_of(mine) == kinds_of(own) and words_of(mine) == words_of(own)
    for got, want in zip(tensors_of(mine), tensors_of(own), strict=True):
        torch.testing.assert_close(got, want)
    before = taken.num_calls
    grads = []
    for model in (taken.mine, taken.own):
        leaf = x.clone().requires_grad_()
        outputs = [y for y in tensors_of(model(leaf)) if y.requires_grad]
        grads.append(torch.autograd.grad(sum(y.sum() for y in outputs), [leaf, model.w]))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)
    assert taken.num_calls == before + 1
    again = []  # gradients of gradients, which are the reference's own
    for model in (taken.mine, taken.own):
        leaf = x.clone().requires_grad_()
        outputs = [y for y in tensors_of(model(leaf)) if y.requires_grad]
        (grad,) = torch.autograd.grad(sum(y.sum() for y in outputs), leaf, create_graph=True)
        again.append(torch.autograd.grad(grad.square().sum(), [leaf, model.w]))
    for got, want in zip(*again, strict=True):
        torch.testing.assert_close(got, want)


def test_what_is_no_tensor_in_a_container_is_refused(tmp_path):
    file = tmp_path / "odd.py"
    for returned, reason in {
        "{'y': y, 'n': 3}": "returns int",
        "{'y': y, 'f': Fraction(1, 2)}": "returns Fraction",
        "{(1, 2): y}": r"returns dict; .* \(by words or whole",
    }.items():
        file.write_text(text_of(returned))
        with pytest.raises(CaptureError, match=reason):
            capture(load_problem(file))
        problem = load_problem(file)
        with pytest.raises(ProblemError, match="dictionaries or dataclasses"):
            problem.call(problem.make_model(0), problem.make_inputs(0))


def test_a_class_that_no_file_can_name_is_refused(tmp_path):
    file = tmp_path / "odd.py"
    local = (
        "    @dataclass\n        class Own:\n            y: torch.Tensor\n\n        return Own(y)"
    )
    file.write_text(text_of("y").replace("    return y\n", local + "\n"))
    with pytest.raises(CaptureError, match="outside of functions"):
        capture(load_problem(file))


def test_other_containers_are_another_answer(tmp_path):
    file = tmp_path / "reference.py"
    for returned in (RETURNED["a dictionary"], RETURNED["a dataclass"]):
        file.write_text(text_of(returned))
        problem = load_problem(file)
        sys.modules[problem.module.__name__] = problem.module

        class Bare(problem.module.Model):
            def forward(self, x):
                return tensors_of(super().forward(x))

        assert "in a tuple or a list without names; expected them in a" in said(
            problem, Bare, "as given"
        )


def test_the_last_timed_call_has_its_containers(tmp_path):
    file = tmp_path / "reference.py"
    file.write_text(text_of(RETURNED["a dataclass"]))
    timed = Timed("cpu", Accuracy("float32"))
    timed.take_reference(load_problem(file))
    timed.repeat(2)
    assert timed.last is not None
    assert (
        timed.last.kinds[-1]
        == "in an Out of loss, states=(a tuple of 0, 1=(a list of 0, 1=None)), twice=None"
    )
