"""A forward with arguments that the captured call left out, or that may be left out."""

from __future__ import annotations

import pytest
import torch
from test_any_module import derive, module_of

from tuner.kernel.family import load_family

TEXT = """\
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(100))

    def forward(self, {parameters}):
        x = x if y is None else x + y
        return x * self.w * scale + shift


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
X = "torch.randn(37, 100)"
FORMS = {
    "left out": ("x, y=None, scale=1.0, *, shift=0.5", X),
    "given": ("x, y=None, scale=1.0, *, shift=0.5", f"{X}, {X}"),
    "all given": ("x, y=None, scale=1.0, *, shift=0.5", f"{X}, {X}, 2.0"),
    "with others": ("x, y=None, scale=1.0, shift=0.5, **more", f"{X}, {X}"),
}


def named_of(given):
    return dict(zip(("y", "scale"), given[1:], strict=False))


@pytest.mark.parametrize("name", FORMS)
def test_other_arguments_take_the_references_way(name, tmp_path):
    parameters, inputs = FORMS[name]
    problem, made = derive(
        tmp_path, name.replace(" ", "_"), TEXT.format(parameters=parameters, inputs=inputs)
    )
    module = module_of(load_family(made.name, [made.folder]).model_new)
    calls = []

    def counted(*args):
        calls.append(args)
        return (torch.zeros(37, 100),)

    module |= {"fused_op": counted, "fused_device": torch.device("cpu")}
    model, reference = module["ModelNew"](), problem.make_model(0)
    given = problem.make_inputs(0)
    x, y = torch.randn(37, 100), torch.randn(37, 100)
    with torch.no_grad():
        model(*given)
        assert len(calls) == 1
        others = [
            ((x, y, 3.0), {"shift": 2.0}), ((x,), {"scale": 3.0}), ((x,), {"y": y, "shift": 1.0}),
            ((), {"x": x, "scale": -1.0}),
        ]  # fmt: skip
        if len(given) > 1:
            others.append(((x,), {}))
        if len(given) < 2:
            others.append(((x, y), {}))
        for args, named in others:
            assert torch.equal(model(*args, **named), reference(*args, **named))
        assert len(calls) == 1, "a call that was not captured took the kernel"
        assert torch.equal(model(x=given[0], **named_of(given)), torch.zeros(37, 100))
        assert len(calls) == 2
    with pytest.raises(TypeError):
        model()
    with pytest.raises(TypeError):
        model(x, unknown=3, x=x)
