"""`tuner.tune(module, inputs)`: a live module with its weights, tuned by real runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import environment
from cpu_machine import GPP
from live_classes import Halved, Norm, OfFour, Optional, Outer, Scaled
from torch import nn

import tuner
from tuner.capture.capture import capture
from tuner.capture.modules.parameters_text import parameters_of
from tuner.errors import InputError, ProblemError
from tuner.export.certificate import read_certificate
from tuner.problem.reference import load_problem
from tuner.session.live_file import require_rows, write_live

X = torch.ones(4, 4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trained() -> tuple[Norm, tuple[torch.Tensor, torch.Tensor]]:
    """Return a module with other weights and statistics than its constructor gives, and inputs."""
    torch.manual_seed(3)
    live = Norm(48, 2.5)
    with torch.no_grad():
        for _ in range(3):
            live(torch.randn(64, 48) * 3.0 + 1.0, torch.randn(64, 48))
        live.bn.weight.uniform_(0.5, 2.0)
    return live, (torch.randn(64, 48), torch.randn(64, 48))


@pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
@pytest.mark.usefixtures("few")
def test_a_live_module_is_tuned_in_its_mode_with_its_weights(tmp_path):
    live, inputs = trained()
    with pytest.raises(InputError, match=r"live_classes.py:\d+: .* draws random .*\n.*eval"):
        tuner.tune(live, inputs, runs_dir=tmp_path / "runs")
    live.eval()
    found = tuner.tune(live, inputs, runs_dir=tmp_path / "runs", effort="quick", trials=1)
    assert isinstance(found, tuner.Tuned) and found.path == found.run.export_path
    assert found.speedup is not None and found.speedup == found.interval.speedup
    assert isinstance(found.module, Norm) and type(found.module).__name__ == "ModelNew"
    assert found.module.bn.weight is live.bn.weight and not found.module.training
    with torch.no_grad():
        live.bn.running_mean.add_(1.0)  # shared as well
        torch.testing.assert_close(found.module(*inputs), live(*inputs))
    certificate = read_certificate(found.path)
    assert certificate.mode == "eval" and certificate.num_probes > 50


@pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("few")
def test_a_live_module_is_tuned_for_several_numbers_of_rows(tmp_path):
    live, inputs = trained()
    live.eval()
    few = tuple(value[:2] for value in inputs)
    how = {"runs_dir": tmp_path / "runs", "effort": "quick", "trials": 1}
    found = tuner.tune(live, few, batch=(64, 8), **how)
    environment = found.run.environment()
    assert environment.sizes["batch"] == 64 and len(environment.beside) == 1
    assert environment.overrides["batch"] == "64,8" and "--batch 64,8" in environment.command
    certificate = read_certificate(found.path)
    assert certificate.sizes == {"batch": 64}
    if found.at_rows:  # where no kernel is faster, the file may be PyTorch's own modules
        assert [*found.at_rows] == [8, 64] and certificate.by_batch.tuned == (8, 64)
        assert found.speedup == min(each.speedup for each in found.at_rows.values())
        assert "# Tuned for 2 sizes:" in found.path.read_text()
    assert found.module.bn.weight is live.bn.weight
    for rows in (1, 2, 8, 20, 64, 1000):
        given = torch.randn(rows, 48), torch.randn(rows, 48)
        with torch.no_grad():
            torch.testing.assert_close(found.module(*given), live(*given))
        sums = []
        for module in (found.module, live):
            leaves = [value.clone().requires_grad_() for value in given]
            module(*leaves).square().sum().backward()
            sums.append([leaf.grad for leaf in leaves])
        torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [64, "64", [64], (64,)])
def test_one_number_of_rows_is_another_batch(batch):
    assert require_rows(Scaled(2.0), [X], batch, "cpu") == [64]


def test_several_numbers_of_rows_may_be_a_list_a_tuple_or_text():
    for batch in ([64, 1024], (64, 1024), "64,1024"):
        assert require_rows(Scaled(2.0), [X], batch, "cpu") == [64, 1024]


SMALL = torch.ones(4, 1)
NO_ROWS = {
    "a word": (X, "few", "expected whole numbers above 0, such as 64 or 64,1024, got few"),
    "nothing": (X, [], "expected whole numbers above 0, such as 64 or 64,1024, got none"),
    "a float": (X, [64.0], "expected whole numbers above 0, .* got 64.0"),
    "a truth": (X, True, "expected whole numbers above 0, .* got True"),
    "a negative": (X, [64, -1], "expected whole numbers above 0, .* got 64, -1"),
    "twice": (X, [64, 8, 64], r"a value is there twice: \[64, 8, 64\]"),
    "nine": (X, [*range(1, 10)], "expected at most 8 values, got 9"),
    "no dimension": (torch.tensor(1.0), 64, r"got inputs of shapes \[\]\n  next: leave batch out"),
    "no rows": (torch.ones(0, 4), 64, r"got inputs of shapes \[0, 4\]\n  next: leave batch out"),
    "no memory": (X, [8, 10**15], r"inputs of 10+ rows are 16,000,000.0 GB, and cpu has"),
    "too many draws": (
        SMALL,
        4 * 2**18 + 1,
        r"inputs of 1048577 rows are made of .* which are 4;",
    ),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_what_is_no_batch_is_refused_before_anything_runs(name):
    given, batch, words = NO_ROWS[name]
    with pytest.raises(InputError, match=rf"tune\(Scaled\): batch: .*{words}"):
        tuner.tune(Scaled(2.0), (given,), batch=batch)


def test_a_module_that_takes_one_batch_alone_is_refused_with_its_own_file():
    with pytest.raises(InputError, match=r"live_classes\.py:\d+: .*broadcast"):
        tuner.tune(OfFour(), (X,), batch=[8, 64])
    said = (
        r"live_classes\.py: batch: its forward is generated for one number of rows alone\n  next:"
    )
    with pytest.raises(InputError, match=said):
        tuner.tune(Halved(), (X,), batch=[8, 64])


def test_arguments_that_a_call_leaves_out_are_taken_by_the_modules_own_forward():
    path = write_live(Optional(), [X])
    head, first = parameters_of(path.read_text(), ["x"])
    assert head.endswith("def forward(self, x, *fused_more, **fused_named):")
    assert "super().forward(x, *fused_more" in first
    head, _ = parameters_of(path.read_text(), ["x", "by"])
    assert head.endswith("def forward(self, x, by=Ellipsis, *fused_more, **fused_named):")
    plain = parameters_of(write_live(Scaled(2.0), [X]).read_text(), ["x"])
    assert plain == ("def forward(self, x):", "")


def test_inputs_are_read_once_however_many_rows_are_made_of_them():
    path = write_live(Scaled(2.0), [torch.arange(6.0).reshape(1, 6), torch.tensor(5)])
    problem = load_problem(path, {"batch": 512})
    one, number = problem.make_inputs(1)
    (path.parent / "state.pt").unlink()
    number.zero_()
    other, kept = problem.make_inputs(2)
    assert one.shape == other.shape == (512, 6) and kept == 5
    assert torch.equal(one.sort().values, torch.arange(6.0).expand(512, 6))


def test_the_file_makes_the_module_as_it_is(tmp_path):
    live, inputs = trained()
    path = write_live(live.eval(), inputs)
    assert write_live(live, inputs) == path  # by content
    problem = load_problem(path)
    model = problem.make_model(7)
    assert isinstance(model, Norm) and not model.training and model.scaled.by == 2.5
    assert not capture(problem).is_training
    for name, value in live.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    one, same, other = (problem.make_inputs(seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(one.flatten().sort().values, inputs[0].flatten().sort().values)
    assert problem.make_inputs(1, batch=100)[1].shape == (100, 48)
    with torch.no_grad():
        live.bn.weight.zero_()
    assert write_live(live, inputs) != path and model.bn.weight.min() > 0.4


def test_a_file_of_an_edited_class_says_so(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_later.py"
    file.write_text("import torch\n\n\nclass Edited(torch.nn.Identity):\n    ...\n")
    import edited_later  # type: ignore[import-not-found]

    path = write_live(edited_later.Edited(), [torch.randn(4, 4)])
    load_problem(path)
    file.write_text(file.read_text() + "    other = True\n")
    with pytest.raises(ProblemError, match=r"edited_later.py is another text than was tuned"):
        load_problem(path)


class InAFunction:
    """Makes classes that nobody can import."""

    @staticmethod
    def made() -> nn.Module:
        class Local(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

        return Local()


def without_a_file() -> nn.Module:
    names: dict[str, type[nn.Module]] = {}
    exec("from torch import nn\nclass Cell(nn.Module):\n    ...", {"__name__": "cell"}, names)
    return names["Cell"]()


def changed(**values: object) -> nn.Module:
    module = Scaled(2.0)
    for name, value in values.items():
        setattr(module, name, value)
    return module


def in_two_modes() -> nn.Module:
    live, _ = trained()
    live.bn.eval()
    return live


REFUSED = {
    "no module": (lambda: "module.py", (X,), "expected a config of load_config, or a torch.nn"),
    "no inputs": (lambda: Scaled(2.0), None, "expected a list or tuple of the tensors of one"),
    "a lone tensor": (lambda: Scaled(2.0), X, r"got Tensor\n  next: tune\(module, \(x,\)\)"),
    "a number": (lambda: Scaled(2.0), (X, 3.0), r"inputs\[1\]: expected a tensor, got float"),
    "too many": (
        lambda: Scaled(2.0),
        (X, X),
        r"too many positional arguments; got 2\n  next: give",
    ),
    "a local class": (InAFunction.made, (X,), "move the class to the top level"),
    "no file": (without_a_file, (X,), "a notebook, or an interactive session"),
    "two modes": (in_two_modes, (X, X), "in training mode, but bn in eval mode"),
    "own forward": (lambda: changed(forward=torch.exp), (X,), "a forward of its own"),
    "a function": (lambda: changed(by=lambda: 2.0), (X,), "cannot be saved for other processes"),
    "compiled": (
        lambda: torch.compile(Scaled(2.0), backend="eager"),
        (X,),
        "the module is compiled already",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tuned_is_refused_with_the_next_step(name):
    make, inputs, words = REFUSED[name]
    with pytest.raises(InputError, match=words):
        tuner.tune(make(), inputs)


def test_other_options_are_refused():
    with pytest.raises(
        InputError, match=r"unknown option 'budget'\n  known: accuracy, batch, device"
    ):
        tuner.tune(Scaled(2.0), (X,), budget=3)


def test_a_class_inside_a_class_and_one_of_pytorch_are_written():
    for module in (Outer.Inner(), nn.Sequential(nn.Softmax(-1), Scaled(2.0))):
        problem = load_problem(write_live(module, [X]))
        assert type(problem.make_model(0)).__mro__[1] is type(module)
        torch.testing.assert_close(problem.make_model(0)(X), module(X))


def test_a_script_that_tunes_wherever_it_is_imported_is_refused_with_words(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, tuner\n\n\nclass Own(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x.exp()\n\n\n"
        "try:\n    tuner.tune(Own(), [torch.ones(4, 4)])\n"
        "except tuner.TunerError as error:\n"
        "    if __name__ != '__main__':\n        raise\n    print(error)\n"
    )
    said = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment(), cwd=tmp_path
    )
    assert said.returncode == 0, said.stderr
    assert "put the call under `if __name__ == '__main__':`" in said.stdout
