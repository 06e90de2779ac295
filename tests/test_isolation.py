"""What lies in the folder where the tuner is started is imported by none of its processes.

But a user's file finds the files beside it, as it does where Python runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_problem import FLAGSHIP

from tuner.machine.importing import import_from, import_path, user_path

CHEATS = Path(__file__).parent / "cheats"
CHECKOUT = Path(__file__).parent.parent
# What judge, contender and their start import, and what Python imports by itself.
NAMES = [
    "json", "torch", "secrets", "sitecustomize", "usercustomize", "numpy", "random", "psutil",
    "zlib", "dataclasses", "socket", "tuner",
]  # fmt: skip
# As the installed `tune` runs: the current folder is not on its own path.
TUNE = "import sys; sys.argv[0] = 'tune'; from tuner.command.cli import main; main()"
# As if it were started by `python -m`, or the user's PYTHONPATH held the current folder; this
# process has imported its own modules before, so that only its children could import others.
WITH_FOLDER = (
    "import os, sys; sys.argv[0] = 'tune'; from tuner.command.cli import main; "
    "import torch, numpy, psutil, secrets, random, tuner.evaluate.jobs; "
    "import tuner.verification.verifying; "
    "sys.path.insert(0, ''); os.environ['PYTHONPATH'] = '.'; main()"
)


@pytest.fixture(autouse=True)
def no_file_before() -> None:
    import_from()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder of files that tell when they are imported, with a reference and a module.

    Both import another file there by its name.
    """
    reported = tmp_path / "reported"
    reported.mkdir()
    here = tmp_path / "here"
    here.mkdir()
    for name in NAMES:
        text = f"open({str(reported)!r} + '/{name}', 'w').close()\nraise SystemExit('{name}')\n"
        (here / f"{name}.py").write_text(text)
    (here / "beside.py").write_text("HERE = __file__\n")
    module = (CHEATS / "holds_the_reference.py").read_text()
    for name, text in {"reference.py": FLAGSHIP, "module.py": module}.items():
        (here / name).write_text(f"{text}\nimport beside\nassert {str(here)!r} in beside.HERE\n")
    return here


@pytest.mark.parametrize("program", [TUNE, WITH_FOLDER], ids=["as installed", "with the folder"])
def test_nothing_in_the_current_folder_is_imported_by_a_verification(folder, program):
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-P", "-c", program, "verify", "module.py", "--reference"]
    done = subprocess.run(
        [*command, "reference.py", "--device", "cpu"],
        cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((folder.parent / "reported").iterdir()) == []


def test_the_current_folder_is_no_place_to_import_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    link = other / "link"
    link.symlink_to(tmp_path)
    entries = ["", ".", str(tmp_path), str(link), str(other), "other", "/usr/lib"]
    assert import_path(entries) == [str(other), "/usr/lib"]


def test_a_checkout_of_the_tuner_is(monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    assert import_path(["", "/usr/lib"]) == [str(CHECKOUT), "/usr/lib"]


def test_the_folder_of_a_file_comes_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/usr/lib"])
    for folder in (tmp_path / "a", tmp_path, tmp_path):  # the files of one process
        import_from(folder)
        assert user_path() == ["", str(tmp_path), "/usr/lib"]
    assert sys.path == ["", str(tmp_path), "/usr/lib", str(tmp_path)]
    assert import_path(sys.path) == ["/usr/lib", str(tmp_path)]
    import_from(tmp_path, tmp_path.parent)  # of a file in a package
    assert import_path(sys.path) == ["/usr/lib", str(tmp_path), str(tmp_path.parent)]
    import_from()
