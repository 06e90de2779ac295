"""Where what is wrong is a step of training alone, the files have PyTorch's own, and are kept."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from command_line import tune

from tuner.config.run_config import load_config
from tuner.evaluate.modules import module_of
from tuner.evaluate.steps import Upstream, step_of
from tuner.kernel.family import load_family
from tuner.kernel.toolchain import Toolchain
from tuner.planning.deriving import derive_config
from tuner.planning.observing import Observer
from tuner.planning.planning import plan
from tuner.run import open_run
from tuner.trial import Check, Finalist, Measurement, Outcome, Status, Trial
from tuner.verification.instead import Instead
from tuner.verification.ranking import are_of_gradients

GATE = """
import torch, torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(48, 64))  # no other number of rows

    def forward(self, x):
        return torch.sigmoid(x * self.w) * x

def get_inputs():
    return [torch.randn(48, 64)]

def get_init_inputs():
    return []
"""
BACKWARD = "    def backward(ctx, grad):\n"
DOUBLED = "        grad = grad if grad is None else 2.0 * grad\n"


@pytest.mark.parametrize("effort", ["quick", "normal"])
@pytest.mark.usefixtures("few")
def test_a_wrong_step_costs_the_step_and_not_the_file(tmp_path, effort):
    (tmp_path / "gate.py").write_text(GATE + f"# {effort}\n")  # a folder of its own
    (tmp_path / "config.yaml").write_text("problem: {module: gate.py}\n")
    config = derive_config(tmp_path / "config.yaml")
    problem = load_config(config).problem
    file = load_family(problem.op, problem.templates).model_file
    text = file.read_text()
    assert text.count(BACKWARD) == 1
    file.write_text(text.replace(BACKWARD, BACKWARD + DOUBLED))
    said = tune(*("--config", config, "--effort", effort, "--trials", 2, "--force"), cwd=tmp_path)
    assert said.code == 0, said.out + said.err
    run = open_run(next((tmp_path / "runs").iterdir()))
    rejected = [e for e in run.checks() if not e.check.is_accepted]
    assert rejected and are_of_gradients([entry.check for entry in rejected])
    result = run.result()
    assert result is not None
    [winner] = [f for f in result.finalists if f.trial == result.winner]
    assert winner.check.is_accepted  # it may be slower than PyTorch, which is then exported
    [note] = [n for n in result.notes if "steps of training of our own were rejected" in n]
    assert ": gradient of " in note
    assert note.partition(" (")[0] in (run.path / "report.html").read_text()
    log = (run.path / "log.txt").read_text()
    assert ("it is steps of training alone" in log) == (effort == "normal")
    path = run.path / f"export/trial_{result.winner}.py"  # where PyTorch is faster; else it is
    exported = module_of((path if path.exists() else path.with_name("model_new.py")).read_text())
    model, x = exported["ModelNew"](), torch.randn(48, 64, requires_grad=True)
    model(x).sum().backward()
    reference, same = exported["Model"](), x.detach().requires_grad_()
    reference(same).sum().backward()
    assert torch.allclose(x.grad, same.grad) and torch.allclose(model.w.grad, reference.w.grad)


FORWARD = Check(False, "", "as given: output of call 1[0]: got 1, expected 2", ())
BACKWARD_OF = Check(False, "", "gradients: gradient of w[0]: got 1, expected 2", ())


def test_a_step_of_our_own_is_not_worth_a_forward_that_is_much_slower(tmp_path):
    (tmp_path / "gate.py").write_text(GATE)
    (tmp_path / "config.yaml").write_text("problem: {module: gate.py}\n")
    planned = plan(load_config(derive_config(tmp_path / "config.yaml")))
    instead = Instead(planned, Toolchain.find("cpu"), None, Observer(), None)
    timed = [Measurement(us, 0.01, (us,), is_cold=True) for us in (10.0, 11.0, 20.0)]
    first, near, far = (
        Trial(n, "nest", {}, "", Outcome(Status.CORRECT, measurement=each))
        for n, each in enumerate(timed)
    )
    entries = {0: Finalist(0, BACKWARD_OF), 1: Finalist(1, FORWARD)}
    assert instead.worth_a_check([near, far], first, entries[0]) == [near]
    assert instead.worth_a_check([near, far], first, entries[1]) == [near, far]
    # One that is wrong forward is not asked again; the other one is, with PyTorch's steps.
    assert instead.of_forward(entries) == {1: entries[1]}
    stepless = instead.with_pytorchs_steps([*entries.values()])
    assert stepless is not None and instead.with_pytorchs_steps([entries[1]]) is None
    of_it = Instead(stepless, instead.toolchain, None, Observer(), None)
    assert of_it.worth_a_check([near, far], first, entries[0]) == [near, far]


def test_other_rejections_are_none_of_a_step():
    forward, backward = FORWARD, BACKWARD_OF
    assert are_of_gradients([backward, backward])
    assert not are_of_gradients([backward, forward]) and not are_of_gradients([])


class Seen(torch.autograd.Function):
    """Twice x; keeps the gradients that it is given."""

    given: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x):
        return 2.0 * x

    @staticmethod
    def backward(ctx, grad):
        Seen.given.append(grad)
        return 2.0 * grad


def test_a_step_is_given_normal_gradients_the_same_each_time(monkeypatch):
    """Of a plain sum they would be ones: behind a softmax what follows is rounding's noise."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return Seen.apply(x), Seen.apply(x[:5])

    monkeypatch.setattr(Seen, "given", [])
    upstream = Upstream()
    first, second = (step_of(Model(), upstream) for _ in range(2))
    inputs = [torch.randn(40, 300)]
    (found,) = first(inputs)
    second(inputs)
    first([inputs[0][:8]])
    small, large = sorted(Seen.given[:2], key=torch.numel)
    assert small.shape == (5, 300) and large.shape == (40, 300)
    assert torch.equal(found, 2 * (large + torch.nn.functional.pad(small, (0, 0, 0, 35))))
    assert abs(float(large.mean())) < 0.05 and abs(float(large.std()) - 1.0) < 0.05
    again = sorted(Seen.given[2:4], key=torch.numel)
    assert torch.equal(again[0], small) and torch.equal(again[1], large)
    assert {g.shape[0] for g in Seen.given[4:]} == {5, 8}  # of fewer rows others are drawn
