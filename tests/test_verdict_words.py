"""What a check says: hints that fit the finding, notes, how long it will take, what ran out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_check import FLOAT32, ask_all, load_reference
from test_problem import FLAGSHIP
from test_trust_honest import NAMED, SPARSE
from unusual_modules import GATED

from tuner.check.judge.expected import expected
from tuner.check.judge.own_work import notes_of
from tuner.check.judge.verdict import judge, merge
from tuner.check.probes.batches import Extent
from tuner.check.probes.probe import Probe
from tuner.check.probes.probes import thorough_probes
from tuner.check.probes.tells import TELLS
from tuner.command.terminal import print_verdict
from tuner.evaluate.again import Taken
from tuner.evaluate.contender import Contender
from tuner.evaluate.forecast import costs_of, remaining_s
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.verifier import Verifier
from tuner.machine.turns import Turns
from tuner.trial import ProbeResult

HERE = Path(__file__).parent
MODULE = HERE / "cheats" / "holds_the_reference.py"  # right, on every probe


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    return load_reference(tmp_path_factory.mktemp("words"), GATED)


def said(problem, new_class, name: str) -> str:
    probe = next(p for p in thorough_probes(5, problem.num_rows()) if p.name == name)
    asked = expected(problem, probe, FLOAT32)
    return judge(asked, ask_all(problem, new_class, [asked])[0], FLOAT32).reason


def test_a_hint_about_values_is_left_out_where_a_type_or_memory_is_wrong(gated):
    reference = gated.module.Model

    class Narrow(reference):
        def forward(self, a, b):
            return super().forward(a, b).to(a.dtype)

    class SameMemory(reference):
        memory = torch.empty(40, 24)

        def forward(self, a, b):
            return self.memory.copy_(super().forward(a, b))

    reported = said(gated, Narrow, "mixed input")
    assert "float64" in reported and "(" not in reported.partition("expected")[2]
    reported = said(gated, SameMemory, "called twice")
    assert reported.endswith("shares memory with the output of call 1")


def test_a_hint_about_values_stands_where_values_are_wrong(gated):
    class Wrong(gated.module.Model):
        def forward(self, a, b):
            return super().forward(a, b) + (a.dtype != b.dtype)

    assert said(gated, Wrong, "mixed input").endswith(f"({TELLS['types']})")


def test_the_note_on_the_references_operations_sees_through_a_look_at_the_values(gated):
    class Looks(gated.module.Model):
        def forward(self, a, b):
            y = torch.nn.functional.silu(a)
            return y * b if bool(torch.isfinite(y).all()) or len(a) else y

    class Other(gated.module.Model):
        def forward(self, a, b):
            return a * torch.sigmoid(a) * b

    asked = [
        expected(gated, p, FLOAT32)
        for p in thorough_probes(5, gated.num_rows())
        if p.name in ("own work, training", "own work, eval")
    ]
    notes = []
    for new_class in (Looks, Other):
        answers = ask_all(gated, new_class, asked)
        results = [judge(e, a, FLOAT32) for e, a in zip(asked, answers, strict=True)]
        notes.append(merge(results, FLOAT32, is_thorough=True).notes)
    assert notes[1] == ()
    (note,) = notes[0]
    assert "(silu, mul) and others (abs, " in note
    assert "in 2 of the 2 ways to call it that are traced: training; eval" in note


def test_where_few_rows_alone_explain_the_references_operations_the_note_says_only_that():
    """A file that takes kernels from 256 rows on was asked for at 200, and at its own size."""
    own = "runs the reference's own operations (mm, relu)"
    names = ["training", "eval", "fewer rows", "gradients", "transposed input"]
    probes = [
        Probe(
            f"own work, {name}",
            batch=None if name in names[:2] else 200,
            mode="eval" if name == "eval" else "train",
            gradients="all" if name == "gradients" else "",
        )
        for name in names
    ]
    fewest = Taken({"call": (256, 2**63 - 1), "step": (256, 2**63 - 1)}).fewest_rows(probes)
    assert fewest == {f"own work, {name}": 256 for name in names[2:]}
    results = [
        ProbeResult(probe.name, 0.0, 0.0, 0.0, 0.0, True, note="" if probe.batch is None else own)
        for probe in probes
    ]
    few = "with few rows the module's own operations run (mm, relu): below"
    assert notes_of(results, fewest) == (f"{few} 256 in calls and for gradients",)
    assert notes_of(results, fewest | {"own work, gradients": 1024}) == (
        f"{few} 256 in calls, below 1024 for gradients",
    )
    assert merge(results, FLOAT32, True, fewest).notes == notes_of(results, fewest)
    everywhere = [replace(result, note=own) for result in results]
    assert notes_of(everywhere, fewest)[1:] == (
        f"right, but it {own} in 2 of the 5 ways to call it that are traced: training; eval",
    )
    assert notes_of(results) == (
        f"right, but it {own} in 3 of the 5 ways to call it that are traced: "
        "fewer rows; gradients; transposed input",
    )
    # Rows that a file never takes, or that it was asked at, explain nothing.
    assert Taken({"call": (2**63 - 1, 0)}).fewest_rows(probes) == {}
    assert Taken({"call": (200, 300), "step": (64, 300)}).fewest_rows(probes) == {}
    assert Taken({}).fewest_rows(probes) == {}


def test_another_container_and_another_kind_of_gradient_are_named(tmp_path):
    """Each in its own words, not in those of a probe that fails because of it."""
    named = load_reference(tmp_path, NAMED)

    class Bare(named.module.Model):
        def forward(self, x):
            return tuple(super().forward(x))

    reported = said(named, Bare, "as given")
    assert (
        "in a tuple or a list without names; expected them in a named tuple of logits" in reported
    )
    sparse = load_reference(tmp_path, SPARSE)

    class Dense(sparse.module.Model):
        def forward(self, i):
            return torch.tanh(torch.nn.functional.embedding(i, self.emb.weight)).mean(1)

    reported = said(sparse, Dense, "gradients")
    assert "of emb.weight is dense, where the reference's is sparse" in reported


def test_what_is_no_drop_in_says_so_in_its_first_words(gated, capsys):
    probe = Probe("plain", seed_inputs=3, seed_weights=4)
    asked = expected(gated, probe, FLOAT32)
    result = judge(asked, ask_all(gated, gated.module.Model, [asked])[0], FLOAT32)
    for differences in ((), ("plain: it refuses",)):
        print_verdict(replace(merge([result], FLOAT32, True), differences=differences))
    first, second = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("accepted")
    )
    assert first.startswith("accepted: right, and a drop-in; 1 probes")
    assert second.startswith("accepted: right, but no drop-in, with one difference")


# ---- how long it will take ------------------------------------------------------------------


def test_an_estimate_falls_as_a_check_goes_on_whatever_the_machine():
    probes = thorough_probes(5, 512, row_elements=2000.0)
    probes.sort(key=lambda probe: probe.batch is None)
    costs = costs_of(probes, Extent(512, 2000.0))
    for speed in (0.3, 1.0, 3.0):
        elapsed, worst = 0.0, 0.0
        total = speed * sum(costs[1:])
        for number in range(1, len(costs) + 1):
            elapsed += speed * costs[number - 1] if number > 1 else 0.0
            left = remaining_s(costs, number, elapsed)
            worst = max(worst, abs(left - (total - elapsed)) if number > len(costs) / 2 else 0.0)
            assert left <= 1.05 * max(1.0, 1.0 / speed) * total
        assert left == 0.0
        assert worst < 0.4 * total


def test_one_slow_probe_at_the_start_does_not_decide_an_estimate():
    costs = [0.05] * 200
    usual, slow = (remaining_s(costs, 3, elapsed_s) for elapsed_s in (0.1, 0.6))
    assert slow < 1.3 * usual


# ---- memory that ran out --------------------------------------------------------------------


@pytest.fixture
def task(tmp_path) -> JobSpec:
    reference = tmp_path / "reference.py"
    reference.write_text(FLAGSHIP)
    return JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")


def without_memory(folder: Path, when: str) -> Contender:
    """Return a right module whose call number `calls` finds no memory where `when` says so."""
    path = folder / "without_memory.py"
    path.write_text(
        f"{MODULE.read_text()}\n\ncalls = 0\n\n\nclass Right(ModelNew):\n    ...\n\n\n"
        "class ModelNew(Right):\n    def forward(self, x):\n        global calls\n"
        f"        calls += 1\n        if {when}:\n"
        "            raise torch.OutOfMemoryError('CUDA out of memory. Tried 2 GiB.')\n"
        "        return super().forward(x)\n"
    )
    return Contender.of_file(path, is_deterministic=True)


def test_what_found_no_memory_once_is_asked_again(task, tmp_path):
    with Verifier(task, seed=3) as verifier:
        check = verifier.check(without_memory(tmp_path, "calls == 1"))
    assert check.probes[0].is_accepted and len(check.probes) > 100
    assert check.is_accepted, check.reason


def test_what_finds_no_memory_twice_is_rejected_with_what_the_judge_held(task, tmp_path):
    with Verifier(task, seed=3) as verifier:
        check = verifier.check(without_memory(tmp_path, "True"))
    assert "OutOfMemoryError: CUDA out of memory" in check.reason
    assert "memory ran out again" in check.reason and "No wrong answer" in check.reason


OTHER = """
import sys, time
from pathlib import Path
from tuner.machine.turns import Turns

turns, full = Turns(Path(sys.argv[1])), Path(sys.argv[2])
with turns.memory():
    full.touch()
    print("has it", flush=True)
    while not turns.is_memory_wanted:
        time.sleep(0.01)
    full.unlink()
"""


# What ran out of memory beside another tuner goes on with another algorithm, as a library does.
LACKS = """

def lacking(forward):
    calls, is_short = 0, False

    def lacks(self, x):
        nonlocal calls, is_short
        calls += 1
        if calls > {first} and __import__("os").path.exists({full!r}):
            is_short = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.")
        found = forward(self, x)
        return found * 1.001 if is_short else found

    return lacks

{name}.forward = lacking({name}.forward)
"""


# So does a process that is started in place of the judge, for as long as that tuner has it.
LACKS_ANEW = """

def started(init):
    def start(self, *args):
        if calls_of_judges.exists() and __import__("os").path.exists({full!r}):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.")
        init(self, *args)

    return start


def remembered(forward):
    def remember(self, x):
        try:
            return forward(self, x)
        except torch.OutOfMemoryError:
            calls_of_judges.touch()
            raise

    return remember

calls_of_judges = __import__("pathlib").Path({full!r} + ".short")
Model.__init__, Model.forward = started(Model.__init__), remembered(Model.forward)
"""


@pytest.mark.parametrize("who", ["contender", "judge", "fresh judge"])
def test_what_finds_no_memory_beside_another_tuner_is_asked_when_that_has_none(
    task, tmp_path, who
):
    """By processes in which none ran out: nothing of what is found too little shows."""
    turns, full = tmp_path / "turns", tmp_path / "full"
    command = [sys.executable, "-c", OTHER, str(turns), str(full)]
    contender = tmp_path / "contender.py"
    contender.write_text(MODULE.read_text())
    name, first = ("ModelNew", 20) if who == "contender" else ("Model", 100)
    with (contender if who == "contender" else Path(task.reference)).open("a") as file:
        file.write(LACKS.format(name=name, first=first, full=str(full)))
        file.write(LACKS_ANEW.format(full=str(full)) if who == "fresh judge" else "")
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other,
        Verifier(task, seed=3) as verifier,
    ):
        verifier._turns = Turns(turns)  # a CPU's have no folder
        assert other.stdout.readline() == "has it\n"
        try:
            check = verifier.check(Contender.of_file(contender, is_deterministic=True))
            assert other.wait(30) == 0
        finally:
            other.kill()
    assert check.is_accepted, check.reason
    assert len({result.probe for result in check.probes}) == len(check.probes) > 100
