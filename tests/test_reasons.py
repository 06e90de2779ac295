"""Whose end it was: the judge's is the machine's error, the module's its own, garbage its own."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from test_problem import FLAGSHIP

from tuner.check.judge.refusals import unread
from tuner.check.probes.probe import Probe
from tuner.errors import MachineError, WorkerError, says_no_memory
from tuner.evaluate.asking import Fewer
from tuner.evaluate.contender import Contender
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.race import finalist
from tuner.evaluate.race_sets import RaceSets
from tuner.evaluate.racing import Racer
from tuner.evaluate.verifier import Verifier
from tuner.evaluate.worker import Worker
from tuner.trial import Check
from tuner.verification.ranking import remarks_on

CHEATS = Path(__file__).parent / "cheats"
MODULE = CHEATS / "holds_the_reference.py"  # right, on every probe
LEAVES_FEW = CHEATS / "wrong_where_it_leaves_few_rows.py"


@pytest.fixture
def task(tmp_path) -> JobSpec:
    reference = tmp_path / "reference.py"
    reference.write_text(FLAGSHIP)
    return JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")


def contender() -> Contender:
    return Contender.of_file(MODULE, is_deterministic=True)


def checked(reference: Path, file: Path) -> Check:
    task = JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")
    with Verifier(task, seed=3) as verifier:
        return verifier.check(Contender.of_file(file, is_deterministic=True))


def end(worker: Worker) -> None:
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    assert worker._child is not None and worker._child.has_exited(10.0)


def test_the_judges_end_is_an_error_of_the_machine_that_says_how_it_ended(task, monkeypatch):
    monkeypatch.setenv("FEW_PROBES", "1")
    with Verifier(task, seed=3) as verifier:

        def end_the_judge(answered) -> None:
            if answered.number == 2:
                end(verifier._judges[0])

        with pytest.raises(
            MachineError, match=r"^the judge ended: killed by signal 9 \(SIGKILL\)"
        ):
            verifier.check(contender(), end_the_judge)
        check = verifier.check(contender())  # a fresh judge, which asks all anew
        assert check.is_accepted, check.reason


@pytest.mark.parametrize(
    ("file", "number"),
    # The file that leaves few rows to the reference is asked by its kernels next, or as it is.
    [(MODULE, 2), (LEAVES_FEW, 2), (LEAVES_FEW, 3)],
)
def test_the_modules_end_between_two_probes_is_named(task, monkeypatch, tmp_path, file, number):
    from tuner.evaluate import verifier as room

    producers: list[Worker] = []
    real = room.started

    def started(*given, **named):
        producers[:] = real(*given, **named)
        return producers

    monkeypatch.setattr(room, "started", started)
    path = tmp_path / "right.py"
    path.write_text(file.read_text().replace("y.half().to(y.dtype)", "y"))
    with Verifier(task, seed=3, num_pairs=1) as verifier:

        def end_the_producer(answered) -> None:
            if answered.number == number:
                end(producers[0])

        check = verifier.check(Contender.of_file(path, is_deterministic=True), end_the_producer)
    assert not check.is_accepted
    assert "the module's process ended: killed by signal 9 (SIGKILL)" in check.reason


def test_garbage_for_an_answer_is_named_as_the_answers_fault(task, tmp_path):
    path = tmp_path / "garbage.py"
    garbled = "\nimport tuner.check.calls.crossing as c\nc.pack = lambda *_, **__: ('[]', [])\n"
    path.write_text(MODULE.read_text() + garbled)
    with Verifier(task, seed=3) as verifier:
        check = verifier.check(Contender.of_file(path, is_deterministic=True))
    assert not check.is_accepted
    assert check.reason.startswith("as given: its answer was garbled: not a packed record")


def test_an_answer_that_no_memory_is_left_to_judge_is_not_called_garbled():
    said = "m.py:15: Model.forward failed: OutOfMemoryError: CUDA out of memory"
    assert unread(said) == f"there was no memory to judge its answer: {said}"
    assert says_no_memory(unread(said))
    library = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert says_no_memory(library)  # a file of level 2 #59 was rejected for it


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (0, r"^baseline: its process ended between two calls: killed by signal 9"),
        (1, r"^holds_the_reference\.py: its process ended between two calls: killed by signal 9"),
    ],
)
def test_who_ends_between_two_turns_of_a_race_is_named(task, place, reason, monkeypatch):
    racers: list[Worker] = []
    real = RaceSets._get_ready

    def get_ready(self, workers, contenders) -> None:
        real(self, workers, contenders)
        racers[:] = workers

    monkeypatch.setattr(RaceSets, "_get_ready", get_ready)
    turns = []

    def on_round(share: float) -> None:
        turns.append(share)
        if len(turns) == 2:
            end(racers[place])

    with pytest.raises(WorkerError, match=reason):
        Racer(task).race([contender()], num_processes=1, seconds=0.01, on_round=on_round)


BROKEN = """

class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no kernel for this")


right = ModelNew.forward
ModelNew.forward = lambda self, x: Broken.apply(right(self, x))
"""


def test_why_a_step_of_training_was_not_timed_is_said(task, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(MODULE.read_text() + BROKEN)
    broken = Contender.of_file(path, is_deterministic=True)
    race = Racer(task).race([broken], num_processes=1, seconds=0.01, has_steps=True)
    reported = finalist(0, Check(True, "float32"), race, 1)
    assert reported.interval is not None and reported.step is None
    assert reported.step_failure == "broken.py: no kernel for this"
    assert remarks_on(reported, "")[-1].endswith("was not timed: broken.py: no kernel for this")


HUNGRY = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        if len(x) > 512:
            torch.empty(2**60, dtype=torch.int8)
        return torch.tanh(x)


def get_inputs():
    return [torch.randn(16, 12)]


def get_init_inputs():
    return []
"""


def test_what_the_judge_has_no_memory_for_is_asked_with_fewer_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("FEW_PROBES", "whole tiles")
    reference, sated = tmp_path / "reference.py", tmp_path / "sated.py"
    reference.write_text(HUNGRY)
    of_no_memory = "            torch.empty(2**60, dtype=torch.int8)\n"
    text = HUNGRY.replace("class Model(", "class ModelNew(")
    sated.write_text(text.replace(of_no_memory, "            pass\n"))
    check = checked(reference, sated)
    assert check.is_accepted, check.reason
    [note] = [note for note in check.notes if "memory ran out" in note]
    assert "asked again with fewer rows: " in note and "whole tiles, many (" in note


SQUARE = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def forward(self, x, y):  # no batch: as many rows as columns
        self.seen.add(x.data_ptr())
        if len(self.seen) > 6:
            torch.empty(2**60, dtype=torch.int8)
        return torch.tanh(x * y.T)


def get_inputs():
    return [torch.randn(24, 24), torch.randn(24, 24)]


def get_init_inputs():
    return []
"""


def test_what_has_no_memory_for_its_calls_is_asked_with_fewer_where_rows_are_fixed():
    fewer = Fewer(num_rows=64, is_fixed=True)
    life = Probe("a life", calls=7, before=((), ("eval",), ("train",), (), ("eval",)))
    steps = Probe("steps", calls=4, gradients="all", backward=(3, 0))
    assert fewer.asked(life) is not life and fewer.asked(life) == life
    assert fewer.halve(life) and fewer.halve(steps)
    assert fewer.asked(life) == replace(life, calls=3, before=life.before[:3])
    assert fewer.asked(steps) == replace(steps, calls=2, backward=(0,))
    assert fewer.halve(life) and fewer.asked(life).calls == 2
    assert fewer.halve(life) and fewer.asked(life) == replace(fewer.asked(life), batch=32)
    assert fewer.notes([life, steps]) == [
        "memory ran out for 1 probe, asked again with fewer rows: a life (32)",
        "memory ran out for 2 probes, asked again with fewer calls: a life (2), steps (2)",
    ]


def test_one_or_two_calls_without_rows_are_asked_as_they_are_or_not_at_all():
    fewer = Fewer(num_rows=None, is_fixed=True)
    assert not fewer.halve(Probe("two calls at once", calls=2, at_once="one module"))
    assert not fewer.halve(Probe("one call"))
    assert fewer.notes([Probe("one call")]) == []


def test_a_check_goes_on_where_memory_runs_out_for_long_histories(tmp_path, monkeypatch):
    monkeypatch.setenv("FEW_PROBES", "a life")
    reference, own = tmp_path / "reference.py", tmp_path / "own.py"
    reference.write_text(SQUARE)
    own.write_text(SQUARE.replace("class Model(", "class ModelNew(").replace("> 6", "> 60"))
    check = checked(reference, own)
    assert check.is_accepted, check.reason
    [note] = [note for note in check.notes if "memory ran out" in note]
    assert "asked again with fewer calls: " in note and "a life, training (" in note


@pytest.mark.parametrize("fault", ["(x.abs() < 1e-37).all()", "x.isnan().any()"])
def test_what_has_no_batch_is_asked_with_all_kinds_of_numbers(tmp_path, fault):
    reference, wrong = tmp_path / "reference.py", tmp_path / "wrong.py"
    reference.write_text(SQUARE.replace("24", "240").replace("> 6", "> 60"))
    text = reference.read_text().replace("class Model(", "class ModelNew(")
    wrong.write_text(text.replace("return torch", f"return bool({fault}) + torch"))
    check = checked(reference, wrong)
    assert not check.is_accepted and "output of call" in check.reason
