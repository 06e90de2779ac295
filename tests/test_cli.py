"""The command line as a process: the exit code and the message for everything that goes wrong.

Most commands share a process that has imported the tuner: see `command_line.tune`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import Said, environment, tune
from test_problem import FLAGSHIP
from tiny_operator import NAME, REFERENCE, TEMPLATE, config_text, write_family

from tuner.run import open_run
from tuner.trial import Status

HERE = Path(__file__).parent


class Desk:
    """A folder with whatever a case needs in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.family = write_family(path / "family")

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def config(self, name: str, **settings: object) -> list[object]:
        text = config_text(self.family, **settings)  # type: ignore[arg-type]
        return ["--config", self.file(f"{name}.yaml", text)]

    def template(self, name: str, text: str) -> list[object]:
        folder = write_family(self.path / f"family_{name}", text)
        return ["--config", self.file(f"{name}.yaml", config_text(folder))]

    def reference(self, name: str, text: str) -> list[object]:
        path = self.file(f"{name}.py", text)
        return self.config(name, problem={"reference": str(path)})

    def yaml(self, name: str, content: str | bytes) -> list[object]:
        return ["--config", self.file(f"{name}.yaml", content)]

    def module(self, name: str, text: str, *, timeout: str = "30s") -> list[object]:
        """Arguments of `tune verify` for a ModelNew of the tiny operator."""
        reference = self.family / NAME / "reference.py"
        file = self.file(f"{name}.py", text)
        return ["verify", file, "--reference", reference, "--device", "cpu", "--timeout", timeout]

    def flagship(self, file: Path) -> list[object]:
        reference = self.file("flagship.py", FLAGSHIP)
        return ["verify", file, "--reference", reference, "--device", "cpu"]


# The others share a process. One of each way to end: our message, Typer's, a crash.
FROM_SCRATCH = ["two errors at once", "an unknown option", "a reference that crashes"]
FROM_SCRATCH += ["an honest module that prints a lot"]


class Answers:
    """What was said in each case: it is run when its answer is first wanted.

    One after the other: a second process would import what the first one has.
    """

    def __init__(self, cases: dict[str, tuple[Case, int, list[str]]], folder: Path) -> None:
        self.cases, self.folder = cases, folder
        self.known: dict[str, Said] = {}

    def said(self, name: str) -> Said:
        if name not in self.known:
            case, _, _ = self.cases[name]
            desk = Desk(self.folder / "".join(c if c.isalnum() else "_" for c in name))
            is_fresh = name in FROM_SCRATCH
            self.known[name] = tune(*case(desk), cwd=desk.path, is_fresh=is_fresh)
        return self.known[name]


Case = Callable[[Desk], list[object]]

# What is asked, the exit code, and what must be printed to stderr.
REFUSED: dict[str, tuple[Case, int, list[str]]] = {
    "a wrong key": (
        lambda d: d.yaml("c", "problem: {op: layer_norm}\nserch: {trials: 3}\n"),
        2,
        ["c.yaml:2: serch: unknown key 'serch'", "hint: did you mean 'search'?"],
    ),
    "a wrong type": (
        lambda d: d.yaml("c", "problem: {op: layer_norm}\nsearch: {trials: many}\n"),
        2,
        ["c.yaml:2: search.trials: expected a whole number, got 'many'"],
    ),
    "two errors at once": (
        lambda d: d.yaml("c", "problem: {op: layer_norm}\nsearch: {trials: -1}\ndevice: tpu\n"),
        2,
        ["error: ", "c.yaml:2: search.trials", "c.yaml:3: device: expected auto, cpu"],
    ),
    "an impossible constraint": (
        lambda d: d.config(
            "c",
            space={"step": [1, 2]},
            constraints=[
                {"expr": "step > 5", "why": "steps are large"},
                {"expr": "step < 9", "why": "but not too large"},
            ],
        ),
        2,
        ["no configuration is feasible", "2 by: steps are large (step > 5, ", "loosen 'steps are"],
    ),
    "an unknown name in a constraint": (
        lambda d: d.config("c", constraints=[{"expr": "stepp > 5", "why": "x"}]),
        2,
        ["constraints[0].expr: unknown name 'stepp'"],
    ),
    "an unknown template": (
        lambda d: d.config("c", space={"template": ["sweeep"]}),
        2,
        ["space.template: doubled_values has no template 'sweeep'", "did you mean 'sweep'?"],
    ),
    "an unknown operator": (
        lambda d: d.yaml("c", "problem: {op: layer_nrm}\n"),
        2,
        ["unknown operator 'layer_nrm'", "did you mean 'layer_norm'?"],
    ),
    "a template with a typo in a variable": (
        lambda d: d.template("c", TEMPLATE.replace("{{ salt }}", "{{ slat }}")),
        2,
        ["sweep.cpp.j2:19: undefined variable 'slat'", "did you mean 'salt'?"],
    ),
    "a reference that raises": (
        lambda d: d.reference("r", REFERENCE + "\nraise ValueError('not today')\n"),
        2,
        ["r.py:24: importing the reference failed: ValueError: not today"],
    ),
    "a reference that exits": (
        lambda d: d.reference("r", REFERENCE + "\nraise SystemExit(0)\n"),
        2,
        ["r.py:24: importing the reference failed: SystemExit"],
    ),
    "a reference with a syntax error": (
        lambda d: d.reference("r", REFERENCE + "\ndef f(:\n"),
        2,
        ["r.py:24: the reference is not valid Python"],
    ),
    "a reference without Model": (
        lambda d: d.reference("r", REFERENCE.replace("class Model(", "class Modell(")),
        2,
        ["r.py: no class 'Model'"],
    ),
    "a reference that does not fit the operator": (
        lambda d: d.reference("r", REFERENCE.replace("(rows, cols)", "(rows, cols, 2)")),
        2,
        ["r.py: the operator's module never called its operator"],
    ),
    "a reference whose forward raises": (
        lambda d: d.reference(
            "r", REFERENCE.replace("for _ in", "raise OSError('no')\n        for _ in")
        ),
        2,
        ["r.py:12: Model.forward failed: OSError: no"],
    ),
    "a reference that crashes": (
        lambda d: d.reference("r", REFERENCE + "\nimport ctypes\nctypes.string_at(8)\n"),
        3,
        ["SIGSEGV", "r.py"],
    ),
    "a reference that is not there": (
        lambda d: d.config("c", problem={"reference": "nowhere.py"}),
        2,
        ["problem.reference: no such file", "nowhere.py"],
    ),
    "random bytes": (
        lambda d: d.yaml("c", bytes(range(256)) * 4),
        2,
        ["c.yaml:2: not UTF-8 text"],
    ),
    "a directory in place of the config": (lambda d: ["--config", d.family], 2, ["a folder"]),
    "a config that is not there": (
        lambda d: ["--config", d.path / "cc.yaml", *d.config("c")[:0]],
        2,
        ["cc.yaml: no such file"],
    ),
    "an empty config": (
        lambda d: d.yaml("c", ""),
        2,
        ["c.yaml:1: nothing is written here", "known: problem"],
    ),
    "neither config nor run": (
        lambda d: ["--dry-run"],
        2,
        ["expected one of FILE.py, --config X.yaml"],
    ),
    "both config and run": (
        lambda d: [*d.config("c"), "--resume", d.path],
        2,
        ["expected one of FILE.py, --config X.yaml, --resume RUN"],
    ),
    "a dry run of a run": (
        lambda d: ["--resume", d.path, "--dry-run"],
        2,
        ["--dry-run goes with --config"],
    ),
    "no run to resume": (
        lambda d: ["--resume", d.path],
        2,
        ["not a run directory (no config.yaml, no environment.json)"],
    ),
    "another seed for a run": (
        lambda d: ["--resume", d.path, "--seed", "3"],
        2,
        ["seed cannot change within a run"],
    ),
    "no trials": (lambda d: [*d.config("c"), "--trials", "0"], 2, ["--trials: expected a number"]),
    "trials that are no number": (
        lambda d: [*d.config("c"), "--trials", "x"],
        2,
        ["--trials: expected a whole number, got 'x'"],
    ),
    "a strange timeout": (
        lambda d: [*d.config("c"), "--timeout", "10 parsecs"],
        2,
        ["--timeout: expected a time such as 10m", "got '10 parsecs'"],
    ),
    "a strange device": (
        lambda d: [*d.config("c"), "--device", "tpu"],
        2,
        ["--device: expected auto, cpu, cuda or cuda:N, got 'tpu'"],
    ),
    "a GPU that cannot be there": (
        lambda d: [*d.config("c"), "--device", "cuda:99"],
        3,
        ["device: no cuda:99 on this machine", "next: --device auto"],
    ),
    "a strange accuracy": (
        lambda d: [*d.config("c"), "--accuracy", "float16"],
        2,
        ["--accuracy: got 'float16'", "RTOL,ATOL"],
    ),
    "an unknown sampler": (
        lambda d: [*d.config("c"), "--sampler", "tep"],
        2,
        ["--sampler: unknown sampler 'tep'", "known: surrogate, tpe", "did you mean 'tpe'?"],
    ),
    "a negative seed": (lambda d: [*d.config("c"), "--seed", "-1"], 2, ["--seed: expected"]),
    "an unknown option": (
        lambda d: ["--trails", "3"],
        2,
        ["No such option: --trails", "--trials"],
    ),
    "a list in place of a config": (
        lambda d: [d.yaml("c", "problems: [a.py]\n")[-1]],
        2,
        ["c.yaml:1: problems: "],
    ),
    "two modules at once": (
        lambda d: [d.file("a.py", ""), d.file("b.py", "")],
        2,
        ["expected one file, got ", "next: tune campaign FOLDER"],
    ),
    "inputs that are none": (
        lambda d: [
            d.file("none.py", REFERENCE.replace("return [torch", "return None and [torch"))
        ],
        2,
        ["none.py: get_inputs() returned NoneType; expected a list", "next: return the arguments"],
    ),
    "inputs that no memory holds": (
        lambda d: [d.file("huge.py", REFERENCE.replace("rows = 64", "rows = 2**40"))],
        2,
        ["get_inputs(): the inputs take 409600.0 GiB, more than this machine has memory for"],
    ),
    "a strange effort for a module": (
        lambda d: [d.file("m.py", REFERENCE), "--effort", "fast"],
        2,
        ["--effort: expected 'quick', 'normal' or 'thorough', got 'fast'"],
    ),
    "an unknown sampler for a module": (
        lambda d: [d.file("m.py", REFERENCE), "--sampler", "tep"],
        2,
        ["--sampler: unknown sampler 'tep'"],
    ),
    "a port that is none": (lambda d: ["dashboard", "--port", "99999"], 2, ["--port"]),
    "an export in place of a folder": (
        lambda d: ["export", d.path, "-o", d.path],
        2,
        ["a folder", "next: name a file in it"],
    ),
    "an export in place of somebody's file": (
        lambda d: ["export", d.path, "-o", d.file("precious.py", "x = 1\n")],
        2,
        ["there is a file, and no exported one", "next: choose another name"],
    ),
    "an option before a module that is none": (
        lambda d: ["--dry-run", d.file("none.py", "x = 1\n")],
        2,
        ["none.py"],
    ),
    "an unknown command": (lambda d: ["tunes"], 2, ["No such command 'tunes'"]),
    "a file in place of the runs' folder": (
        lambda d: [*d.config("c"), "--runs-dir", d.file("taken", "")],
        2,
        ["Invalid value for '--runs-dir'", "is a file"],
    ),
    "an export of no run": (lambda d: ["export", d.path], 2, ["not a run directory"]),
    "a report of no run": (lambda d: ["report", d.path], 2, ["not a run directory"]),
    "a verify of no file": (
        lambda d: ["verify", d.path / "a.py", "--reference", d.file("r.py", REFERENCE)],
        2,
        ["a.py: no such file"],
    ),
    "a directory in place of a module's file": (
        lambda d: [d.family],
        2,
        ["family: a directory; next: name a file in it"],
    ),
    "a verify of a directory": (
        lambda d: ["verify", d.family, "--reference", d.file("r.py", REFERENCE)],
        2,
        ["family: a directory; next: name a file in it"],
    ),
    "a verify against no reference": (
        lambda d: ["verify", d.file("a.py", ""), "--reference", d.path / "r.py"],
        2,
        ["r.py: no such file"],
    ),
    "a verify against what is no reference": (
        lambda d: ["verify", d.file("a.py", ""), "--reference", d.file("r.py", "x = 1\n")],
        2,
        ["r.py: no class 'Model'"],
    ),
    "a verify without a reference": (
        lambda d: ["verify", d.file("a.py", "")],
        2,
        ["Missing option '--reference'"],
    ),
    "a verify with a strange timeout": (
        lambda d: [*d.module("m", ""), "--timeout", "soon"],
        2,
        ["expected a time such as 10m", "got 'soon'"],
    ),
    "a verify with a strange accuracy": (
        lambda d: [*d.module("m", ""), "--accuracy", "1e-3"],
        2,
        ["got '1e-3'"],
    ),
    "a verify on a GPU that cannot be there": (
        lambda d: [*d.module("m", ""), "--device", "cuda:99"],
        3,
        ["no cuda:99 on this machine"],
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Answers(REFUSED, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_their_message_and_exit_code(refused, name):
    said = refused.said(name)
    _, code, messages = REFUSED[name]
    assert said.code == code, said
    for message in messages:
        assert message in said.err, said.err
    assert said.err.startswith(("error: ", "Usage: ")), said.err


def test_nothing_is_left_of_a_run_that_was_refused(tmp_path):
    desk = Desk(tmp_path)
    said = tune(*desk.config("c", space={"template": ["sweeep"]}), cwd=tmp_path)
    assert said.code == 2 and not (tmp_path / "runs").exists()


# ---- the machine ----------------------------------------------------------------------------


def test_without_a_compiler_it_says_what_to_install(tmp_path):
    desk = Desk(tmp_path)
    said = tune(*desk.config("c"), cwd=tmp_path, env={"PATH": str(tmp_path), "CXX": ""})
    assert said.code == 3
    assert "no C++ compiler found" in said.err and "install g++" in said.err
    assert not (tmp_path / "runs").exists()


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path):
    desk = Desk(tmp_path)
    disk = tmp_path / "disk"
    config = desk.config("c", space={"mode": ["broken"], "salt": list(range(40))})
    with small_disk(disk, "100k"):
        said = tune(*config, "--runs-dir", disk, "--trials", 40, cwd=tmp_path)
        assert said.code == 3, said
        assert "no space left on device" in said.err
        assert "next: free some disk space, then `tune --resume`" in said.err
        (folder,) = disk.iterdir()
        kept = open_run(folder).trials()
        lines = [line for line in said.out.splitlines() if "this_is_not_declared" in line]
        reported = [line for line in lines if "  #" in line]  # not the defaults, before the search
        assert 1 <= len(kept) < 40 and len(kept) == len(reported)
        assert (folder / "trials.jsonl").read_bytes().endswith(b"\n")
        grow = ["mount", "-o", "remount,size=50m", str(disk)]
        subprocess.run(grow, check=True, capture_output=True)
        again = tune("--resume", folder, cwd=tmp_path)
        assert again.code == 1 and "no candidate is correct: 40 trials" in again.err
        trials = open_run(folder).trials()
        assert trials[: len(kept)] == kept and [t.number for t in trials] == list(range(40))


def test_a_full_build_cache_stops_the_run_with_its_reason(tmp_path):
    desk = Desk(tmp_path)
    disk = tmp_path / "disk"
    config = desk.config("c", space={"salt": list(range(500, 504))})
    with small_disk(disk, "40k"):
        said = tune(*config, cwd=tmp_path, env={"XDG_CACHE_HOME": str(disk)})
        assert said.code == 3, said
        assert "build cache" in said.err and "no space left on device" in said.err.lower()


# ---- candidates that do not compile ---------------------------------------------------------


def test_a_template_that_does_not_compile_is_compile_outcomes_and_exit_code_1(tmp_path):
    desk = Desk(tmp_path)
    said = tune(*desk.config("c", space={"mode": ["broken"], "salt": [1, 2]}), cwd=tmp_path)
    assert said.code == 1
    assert "no candidate is correct: 2 trials" in said.err and "2 compile" in said.err
    assert "error: 'this_is_not_declared' was not declared in this scope" in said.err
    (folder,) = (tmp_path / "runs").iterdir()
    trials = open_run(folder).trials()
    assert [t.outcome.status for t in trials] == [Status.COMPILE] * 2
    for trial in trials:
        kept = folder / "candidates" / trial.candidate_key
        assert "this_is_not_declared" in (kept / "source.cpp").read_text()
        assert "was not declared in this scope" in (kept / "log.txt").read_text()
    assert (folder / "report.html").is_file() and not (folder / "result.json").exists()
    assert "all 2 feasible configurations were tried" in said.out
    reported = tune("report", folder, cwd=tmp_path)
    assert reported.code == 0 and "2 compile" in reported.out
    refused = tune("export", folder, cwd=tmp_path)
    assert refused.code == 1 and "no trial is correct" in refused.err
    refused = tune("export", folder, "--trial", "1", cwd=tmp_path)
    assert refused.code == 2 and "trial 1 is not correct: compile" in refused.err
    refused = tune("export", folder, "--trial", "7", cwd=tmp_path)
    assert refused.code == 2 and "no trial 7" in refused.err and "known: 0 to 1" in refused.err


# ---- looking without running ----------------------------------------------------------------


def test_a_dry_run_counts_renders_one_and_makes_nothing(tmp_path):
    desk = Desk(tmp_path)
    rule = {"expr": "step != 2 or salt == 0", "why": "a rule"}
    space = {"step": [1, 2, 4], "salt": [0, 1]}
    config = desk.config("c", space=space, constraints=[rule], search={"first": [{"step": 4}]})
    said = tune(*config, "--dry-run", cwd=tmp_path)
    assert said.code == 0 and not said.err
    assert "tried first: template = sweep, step = 4, salt = 0" in said.out
    assert "feasible: 5 of 6 combinations" in said.out and "1 rejected: a rule" in said.out
    assert "one candidate (template = sweep, step = 1, salt = 0)" in said.out
    assert 'extern "C" const char* fused_doubled_values_sweep(' in said.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("args", [["--help"], ["verify", "--help"], ["export", "--help"]])
def test_help_is_quick_and_imports_no_library_that_is_slow(tmp_path, args):
    code = (
        "import sys\n"
        "from tuner.command.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    slow = {'torch', 'optuna', 'plotly', 'scipy', 'jinja2', 'numpy'} & set(sys.modules)\n"
        "    assert not slow, slow\n"
    )
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    used_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout and not done.stderr
    assert used_s < 1.5  # 0.3 s on the machine of November 2026


def test_help_tells_what_ctrl_c_does_and_the_exit_codes(tmp_path):
    said = tune("--help", cwd=tmp_path)
    text = " ".join(said.out.split())
    assert "Ctrl-C ends the search; what was found is still verified and exported" in text
    assert "130 interrupted" in text
    for option in (
        "--config",
        "--resume",
        "--trials",
        "--timeout",
        "--seed",
        "--device",
        "--time",
        "--effort",
    ):
        assert option in said.out


def test_the_installed_script_is_the_same_program(tmp_path):
    script = Path(sys.executable).with_name("tune")
    if not script.exists():
        pytest.skip("the package is not installed: no script beside the interpreter")
    done = subprocess.run([script, "--dry-run"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "expected one of FILE.py, --config" in done.stderr


def test_ctrl_c_while_it_is_imported_leaves_no_traceback(tmp_path):
    script = (
        "import builtins, runpy\n"
        "own = builtins.__import__\n"
        "def load(name, *more, **named):\n"
        "    if name == 'typer': raise KeyboardInterrupt\n"
        "    return own(name, *more, **named)\n"
        "builtins.__import__ = load\n"
        "runpy.run_module('tuner', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_doctor_tells_what_there_is_and_what_to_install(tmp_path):
    said = tune("doctor", cwd=tmp_path)
    has_needed = "no   C++ compiler" not in said.out and "no   Python headers" not in said.out
    assert said.code == (0 if has_needed else 3)
    for name in ("Python headers", "C++ compiler", "nvcc", "GPU", "Triton", "disk space", "CPU"):
        assert f"  {name}" in said.out, said.out
    marks = {line[:3] for line in said.out.splitlines() if line[:1] != " "}
    assert marks <= {"yes", "no "}


def test_the_doctor_without_a_compiler_says_so_and_exits_3(tmp_path):
    said = tune("doctor", cwd=tmp_path, env={"PATH": str(tmp_path), "CXX": ""})
    assert said.code == 3 and "no   C++ compiler" in said.out
    lines = said.out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("no   C++ compiler"))
    assert "next: " in lines[place + 1] and "g++" in lines[place + 1]


# ---- verify ---------------------------------------------------------------------------------

MODULE = """
import torch, torch.nn as nn, os, sys, time, ctypes

{head}
class ModelNew(nn.Module):
    def forward(self, x):
        {body}
        return x + x
"""

# How a module may end its process or garble the channel in a call, and hangs: test_cheats.
VERIFIED: dict[str, tuple[Case, int, list[str]]] = {
    "an honest module that prints a lot": (
        lambda d: d.module("m", MODULE.format(head="", body="print('x' * 10**6)")),
        0,
        ["accepted: ", "probes, accuracy class float32", "PyTorch's own"],
    ),
    "a cheat that memoises": (
        lambda d: d.flagship(HERE / "cheats" / "memoised_by_pointer.py"),
        1,
        ["rejected: ", "memoised"],
    ),
    "one that crashes when imported": (
        lambda d: d.module("m", MODULE.format(head="ctypes.string_at(8)", body="")),
        1,
        ["rejected: importing it: killed by signal 11 (SIGSEGV)"],
    ),
    "one that prints for ever": (
        lambda d: d.module(
            "m", MODULE.format(head="", body="while True: print('x' * 9999)"), timeout="3s"
        ),
        1,
        ["rejected: as given: no answer within 3 s"],
    ),
    "one that closes every descriptor": (
        lambda d: d.module("m", MODULE.format(head="", body="os.closerange(3, 64)")),
        1,
        ["rejected: as given: "],
    ),
    "no Python": (
        lambda d: d.module("m", "this is no Python"),
        1,
        ["rejected: importing it: SyntaxError"],
    ),
    "random bytes": (
        lambda d: ["verify", d.file("m.py", bytes(range(256))), *d.module("n", "")[2:]],
        1,
        ["rejected: importing it: "],
    ),
    "no ModelNew": (
        lambda d: d.module("m", "class ModelNeu:\n    pass\n"),
        2,
        ["m.py: no class ModelNew", "got: ModelNeu", "next: call the class"],
    ),
}


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory, few: None) -> Answers:
    return Answers(VERIFIED, tmp_path_factory.mktemp("verified"))


@pytest.mark.parametrize("name", VERIFIED)
def test_verify_gives_its_verdict_on_anything(verified, name):
    said = verified.said(name)
    _, code, messages = VERIFIED[name]
    assert said.code == code, said
    for message in messages:
        assert message in (said.err if code == 2 else said.out), said
    verdicts = [line for line in said.out.splitlines() if line.startswith(("acc", "rej"))]
    if code == 2:  # unusable: there is no verdict
        assert not verdicts
        return
    assert len(verdicts) == 1 and verdicts[0].startswith("accepted: " if code == 0 else "rejected")


def test_json_is_yaml_so_that_these_tests_write_what_users_write(tmp_path):
    assert json.loads(config_text(tmp_path))["problem"]["op"] == NAME


def test_each_session_records_the_baseline_of_its_own(tmp_path):
    desk = Desk(tmp_path)
    arguments = desk.config("c", space={"step": [1, 2, 4]}, search={"trials": 2})
    assert tune(*arguments, "--record", cwd=tmp_path).code == 0
    (path,) = (tmp_path / "runs").iterdir()
    first = open_run(path).environment()
    assert tune("--resume", path, "--trials", "3", "--record", cwd=tmp_path).code == 0
    environment = open_run(path).environment()
    one, other = environment.sessions
    assert (one.from_trial, other.from_trial) == (0, 2)
    assert first.sessions == (one,) and one.baseline_us == first.baseline_us
    assert other.baseline_us == environment.baseline_us


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["none.py"], 2)])
def test_the_command_ends_at_once_and_whole(words, code, tmp_path):
    """Whatever threads go on; what was to be done at the end is done, and all that was said."""
    text = (
        "import atexit, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(300.0,)).start()\n"
        f"atexit.register(lambda: open({str(tmp_path / 'ended')!r}, 'w').write('yes'))\n"
        f"sys.argv[:] = ['tune', *{words!r}]\n"
        "from tuner.command.cli import run\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=120.0
    )
    assert done.returncode == code
    assert (tmp_path / "ended").read_text() == "yes"
    assert "Usage" in done.stdout if code == 0 else "none.py" in done.stderr
