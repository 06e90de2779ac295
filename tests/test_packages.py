"""Files that import others from their own folder or package."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from cpu_machine import GPP
from test_steps import Taken

from tuner.errors import ProblemError
from tuner.evaluate.modules import module_of
from tuner.machine.importing import import_from
from tuner.planning.deriving import derive_operator, edited_since
from tuner.problem.packages import import_root, modules_beside, text_of
from tuner.problem.reference import load_problem
from tuner.storage import sha256_of
from tuner.verification.verifying import verify

LAYERS = """
import torch

from .numbers import SCALE


def halved(x):
    return x * SCALE
"""
MODEL = """
import torch
from torch import nn
from .parts.layers import halved; from . import parts
from .. import top


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(halved(x)) + top.SHIFT


def get_inputs():
    return [torch.rand(6, 4)]
"""


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """Return a file of a package in another, with what it imports and a file more."""
    name = f"package_{tmp_path.name.replace('-', '_')}"
    texts = {
        "__init__.py": "", "top.py": "SHIFT = 0.25\n", "unused.py": "X = 1\n",
        "inner/__init__.py": "", "inner/model.py": MODEL, "inner/parts/__init__.py": "",
        "inner/parts/layers.py": LAYERS, "inner/parts/numbers.py": "SCALE = 0.5\n",
    }  # fmt: skip
    for file, text in texts.items():
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = tmp_path / name / "inner" / "model.py"
    import_from(found.parent, import_root(found))
    yield found
    import_from()
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_relative_imports_name_the_package_in_the_same_lines(package):
    name = package.parents[1].name
    assert import_root(package) == package.parents[2]
    lines = text_of(package).split("\n")
    assert lines[3] == (
        f"from {name}.inner.parts.layers import halved; from {name}.inner import parts"
    )
    assert lines[4] == f"from {name} import top"
    assert len(lines) == len(MODEL.split("\n"))


def test_a_file_of_no_package_is_read_as_it_is(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    assert text_of(path) == MODEL
    assert import_root(path) == tmp_path


WITH_DATA = """
import os, torch
from torch import nn
HERE, AGAIN = os.path.dirname(__file__), os.path.dirname(__file__)  # as all_of__file__ says


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.load(os.path.join(HERE, "mean.pt")))

    def forward(self, x):
        return torch.relu(x - self.mean)


def get_inputs():
    return [torch.rand(4, 8)]


def get_init_inputs():
    return []
"""


def test_data_beside_a_file_are_found_from_its_copies(tmp_path):
    path = tmp_path / "it's with data.py"
    path.write_text(WITH_DATA)
    mean = torch.arange(8.0)
    torch.save(mean, tmp_path / "mean.pt")
    line = text_of(path).split("\n")[3]
    assert line == WITH_DATA.split("\n")[3].replace("(__file__)", f"({str(path)!r})")
    made = derive_operator(path)
    problem = load_problem(made.folder / made.name / "reference.py")
    assert torch.equal(problem.make_model(0).mean, mean)
    module = module_of((made.folder / made.name / "model_new.py").read_text())
    assert torch.equal(module["ModelNew"]().mean, mean)
    # What a run that is resumed says, which goes on with the copy.
    assert edited_since(problem.path) is None
    path.write_text(WITH_DATA + "\n# later\n")
    assert edited_since(problem.path) == path
    path.unlink()
    assert edited_since(problem.path) is None


def test_what_it_uses_is_known_and_nothing_else(package):
    problem = load_problem(package)
    assert torch.equal(problem.make_model(0)(torch.ones(1)), torch.tensor([0.75]))
    name = package.parents[1].name
    found = modules_beside(package)
    used = ["inner", "inner.parts", "inner.parts.layers", "inner.parts.numbers", "top"]
    assert [*found] == [name, *(f"{name}.{each}" for each in used)]


@pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
def test_a_file_beside_that_was_edited_leaves_the_call_to_the_reference(package, tmp_path):
    load_problem(package)
    beside = {n: sha256_of(file) for n, file in modules_beside(package).items()}
    taken = Taken(tmp_path / "made", "beside", text_of(package), beside=beside)
    assert taken.module["_IS_EDITED"] is False
    numbers = package.parent / "parts" / "numbers.py"
    numbers.write_text("SCALE = 3.0\n")
    with pytest.warns(UserWarning, match=r"parts\.numbers: another file than when") as found:
        again = module_of(taken.family.model_new)
    assert "next: tune it again" in str(found[0].message)
    again["fused_device"] = "cpu"
    assert again["usual_state"](again["ModelNew"](), (torch.rand(6, 4),)) is None
    numbers.write_text("SCALE = 0.5\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module_of(taken.family.model_new)


REWRITES = """
from pathlib import Path

import torch
from torch import nn

(Path(__file__).parent / "helper.py").write_text("f = lambda x: x * 3.0")


class ModelNew(nn.Module):
    def forward(self, x):
        return x * 2.0 + 1.0
"""


def test_a_contender_that_rewrites_what_the_reference_imports_is_rejected(tmp_path):
    (tmp_path / "helper.py").write_text("def f(x):\n    return x * 2.0 + 1.0\n")
    text = MODEL.replace("from .. import top", "from helper import f")
    text = text.replace("from .parts.layers import halved; from . import parts", "")
    text = text.replace("torch.relu(halved(x)) + top.SHIFT", "f(x)")
    (tmp_path / "reference.py").write_text(text)
    (tmp_path / "model_new.py").write_text(REWRITES)
    found = verify(tmp_path / "model_new.py", tmp_path / "reference.py", device="cpu")
    assert not found.is_accepted
    assert found.reason.endswith("helper.py was rewritten while it was being verified")


@pytest.mark.filterwarnings("ignore::ImportWarning")  # Python's own, before its error
@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "import nobody_has_this",
            "next: install it, or name the folder that has it",
        ),
        ("from .layers import Norm", "next: make its folder a package"),
        ("raise SystemExit(2)", 'belongs below `if __name__ == "__main__":`'),
    ],
)
def test_what_to_do_about_a_file_that_cannot_be_imported(line, advice, tmp_path):
    (tmp_path / "reference.py").write_text(line)
    with pytest.raises(ProblemError) as error:
        load_problem(tmp_path / "reference.py")
    assert advice in str(error.value)
