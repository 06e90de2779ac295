"""Steps of training in files of operators by hand, which are derived from the reference."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from families import built_in
from tiny_operator import NAME, REFERENCE, config_text, write_family

from tuner.config.run_config import load_config
from tuner.errors import TemplateError
from tuner.evaluate.modules import imported
from tuner.export.around import forward_of
from tuner.planning.observing import Observer
from tuner.planning.own_steps import with_own_steps
from tuner.planning.planning import Planned, plan
from tuner.problem.reference import load_problem
from tuner.verification.exporting import text_maker

SIZES = {"batch": 96, "in_features": 24, "out_features": 40}
CONFIG = {
    "problem": {"op": "gemm_scale_batchnorm", "sizes": SIZES},
    "device": "cpu",
    "space": {"template": ["cpu"], "stats": ["per_thread"]},
}


class Listening(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def on_stage(self, text: str) -> None:
        self.said.append(text)


def planned_of(folder: Path, config: dict[str, object]) -> Planned:
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return plan(load_config(path))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return with_own_steps(planned_of(tmp_path_factory.mktemp("own"), CONFIG), Observer())


def text_of(planned: Planned) -> str:
    candidate = planned.family.render(planned.defaults[0], planned.facts)
    written = text_maker(planned, planned.find_toolchain(), [candidate], lambda entry: [], None)
    return written("unverified", None, ())


@pytest.fixture(scope="module")
def text(own: Planned) -> str:
    return text_of(own)


@pytest.fixture(scope="module")
def module(text: str, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return module_of(text, tmp_path_factory.mktemp("file"))


def module_of(text: str, folder: Path) -> ModuleType:
    path = folder / "with_own_steps.py"
    path.write_text(text)
    made = imported(path)
    sys.modules[made.__name__] = made  # where pickle finds its classes
    return made


def both(
    module: ModuleType, sizes: dict[str, int] = SIZES
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The reference and ours, of the same random numbers."""
    problem = load_problem(built_in("gemm_scale_batchnorm").reference, sizes)
    theirs = problem.module.Model(*problem.init_inputs(0))
    torch.manual_seed(1)
    for x in theirs.parameters():
        torch.nn.init.normal_(x)
    ours = module.ModelNew(*problem.init_inputs(0))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def step(model: torch.nn.Module, rows: int = 96) -> list[torch.Tensor]:
    """A step's result, gradients and buffers, of inputs that are the same each time."""
    torch.manual_seed(2)
    weight = model.gemm.weight
    x, grad = (torch.randn(rows, n).to(weight) for n in (weight.shape[1], len(weight)))
    y = model(x.requires_grad_())
    found = torch.autograd.grad(y, [x, *model.parameters()], grad)
    return [y.detach(), *found, *(b.clone() for b in model.buffers())]


def test_a_step_is_the_derived_modules_and_right(module):
    _, ours = both(module)
    y = ours(torch.randn(96, 24, requires_grad=True))
    assert type(y.grad_fn).__name__ == "Step_of_stepsBackward"
    check(*both(module))


def check(theirs: torch.nn.Module, ours: torch.nn.Module, rows: int = 96) -> None:
    exact = step(copy.deepcopy(theirs).double(), rows)
    for mine, other, right in zip(step(ours, rows), step(theirs, rows), exact, strict=True):
        error = (mine - right).abs().max()
        assert error <= 4 * (other - right).abs().max() + 1e-6 * right.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("template", ["simt", "triton"])
def test_a_step_on_a_gpu_is_right_in_loops_and_at_other_rows(template, tmp_path):
    """From the third time on it is launched as a graph; C++ and Triton stand beside each other."""
    sizes = {"batch": 512, "in_features": 512, "out_features": 384}
    problem = {"op": "gemm_scale_batchnorm", "sizes": sizes}
    config = {"problem": problem, "device": "cuda", "space": {"template": [template]}}
    own = with_own_steps(planned_of(tmp_path, config), Observer())
    assert own.family.steps is not None and own.family.steps.candidate.language == "triton"
    module = module_of(text_of(own), tmp_path)
    for rows in (512, 512, 512, 512, 130, 512):
        theirs, ours = (each.cuda() for each in both(module, sizes))
        check(theirs, ours, rows)
        y = ours(torch.randn(rows, 512, device="cuda"))
        assert type(y.grad_fn).__name__ == "Step_of_stepsBackward"
        with torch.no_grad():
            x = torch.randn(rows, 512, device="cuda")
            right = copy.deepcopy(theirs).double()(x.double())
            torch.testing.assert_close(ours(x).double(), right, rtol=1e-4, atol=1e-4)


def test_a_call_without_gradients_is_the_operators_by_hand(module, monkeypatch):
    _, ours = both(module)
    calls = []
    by_hand = module.fused_op
    monkeypatch.setattr(module, "fused_op", lambda *args: calls.append(args) or by_hand(*args))
    step(ours)
    assert not calls
    with torch.no_grad():
        ours(torch.randn(96, 24))
    assert len(calls) == 1


def test_one_line_says_at_which_rows_either_takes_kernels(module, monkeypatch):
    rows = {"call": (8, 2**62), "step": (64, 2**62), "eval": (8, 2**62)}
    monkeypatch.setattr(module, "_FUSED_ROWS", rows)
    _, ours = both(module)
    names = [type(ours(torch.randn(n, 24)).grad_fn).__name__ for n in (63, 64)]
    assert names == ["NativeBatchNormBackward0", "Step_of_stepsBackward"]
    assert "_FUSED_ROWS_of_steps" not in vars(module)


def test_it_is_still_the_module_by_hand_to_whoever_holds_it(module):
    theirs, ours = both(module)
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(made) is module.ModelNew
        assert [*made.state_dict()] == [*theirs.state_dict()]
        assert all(torch.equal(a, b) for a, b in zip(step(made), step(ours), strict=True))
        ours.load_state_dict(theirs.state_dict())
    shared = module.ModelNew.from_module(theirs)
    assert all(a is b for a, b in zip(shared.parameters(), theirs.parameters(), strict=True))
    step(shared)
    assert int(theirs.bn.num_batches_tracked) == 1

    class Mine(module.ModelNew):  # type: ignore[misc, name-defined]
        def forward(self, x):
            return super().forward(x) * 2.0

    mine = Mine(24, 40, (40,))
    assert type(mine(torch.randn(96, 24)).grad_fn.next_functions[0][0]).__name__.startswith("Step")


def test_the_header_names_them_and_a_file_may_leave_them_out(own, text):
    assert "# Steps of training: derived from the reference, nest (" in text
    without = own.with_pytorchs_steps
    assert without is not None and without.family.steps is None
    assert without.with_pytorchs_steps is None
    assert "_of_steps" not in text_of(without)


def test_who_asks_for_none_has_none(tmp_path):
    problem = {**CONFIG["problem"], "steps": "pytorch"}  # type: ignore[dict-item]
    planned, heard = planned_of(tmp_path, {**CONFIG, "problem": problem}), Listening()
    assert with_own_steps(planned, heard) is planned and not heard.said


@pytest.mark.parametrize("forward, why", [
    ("return x + x if x.sum() > 0 else x * 2.0", "by the values of a tensor"),
    ("return x + x + torch.rand(())", "random"),
])  # fmt: skip
def test_a_reference_that_cannot_be_captured_leaves_them_to_pytorch_and_says_so(
    forward, why, tmp_path
):
    family = write_family(tmp_path / "family")
    reference = family / NAME / "reference.py"
    head = REFERENCE.partition("        for _")[0]
    tail = REFERENCE.partition(".contiguous()")[2]
    reference.write_text(f"{head}        {forward}{tail}")
    path = tmp_path / "config.yaml"
    path.write_text(config_text(family, problem={"steps": "derived"}))
    planned, heard = plan(load_config(path)), Listening()
    assert with_own_steps(planned, heard) is planned
    assert heard.said[-1].startswith("steps of training take PyTorch's own operations: ")
    assert why in heard.said[-1]


def test_arguments_are_given_on_as_they_are_declared():
    class_ = "class ModelNew(nn.Module):\n    def forward({}):\n        return x\n"
    assert forward_of(class_.format("self, x, y=2.0")) == ("self, x, y=2.0", "self, x, y")
    for others in ("self, *x", "self, x, **more", "self, x, *, y"):
        with pytest.raises(TemplateError, match="named arguments alone"):
            forward_of(class_.format(others))
