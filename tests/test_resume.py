"""A search that was killed goes on as if it had not been: same questions, same result.

The evaluator's answers depend on the configuration alone, so that two runs may be compared word
by word. `benchmarks.faults` kills the same program, and whole tunings, fifty times.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from benchmarks.faults import (
    Deterministic,
    compared,
    is_one_search,
    killed_search,
    searched,
    small_space,
)
from tuner.environment import Environment
from tuner.run import Run, create_run, open_run
from tuner.search.journal import STUDY_NAME
from tuner.search.samplers import SAMPLERS

TRIALS = 18


def new_run(folder: Path) -> Run:
    return create_run(folder, "op", "cpu", "x", Environment())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Each sampler's search without any interruption."""
    found = {}
    for sampler in SAMPLERS:
        run = new_run(tmp_path_factory.mktemp(sampler))
        searched(run, Deterministic(), sampler, seed=3, trials=TRIALS)
        found[sampler] = compared(run.trials())
    return found


class PowerCut(BaseException):
    """Ends a search at once, wherever it is."""


class Doomed(Deterministic):
    def __init__(self, num_left: int) -> None:
        super().__init__()
        self.num_left = num_left

    def finish(self, pending, number, best_us):
        if self.num_left == 0:
            raise PowerCut
        self.num_left -= 1
        return super().finish(pending, number, best_us)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_interrupted_anywhere_the_sequence_is_that_of_an_uninterrupted_run(
    whole, tmp_path, sampler
):
    chosen = random.Random(7)
    for attempt in range(2):
        run = new_run(tmp_path / str(attempt))
        num_cuts = 0
        while len(run.trials()) < TRIALS:
            try:
                doomed = Doomed(chosen.randrange(1, 8))
                searched(run, doomed, sampler, seed=3, trials=TRIALS)
            except PowerCut:
                num_cuts += 1
        assert num_cuts >= 2 and compared(run.trials()) == whole[sampler]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_larger_budget_goes_on_as_if_it_had_been_so_from_the_start(whole, tmp_path, sampler):
    run = new_run(tmp_path)
    for trials in (1, 9, 10, TRIALS):
        searched(run, Deterministic(), sampler, seed=3, trials=trials)
    assert compared(run.trials()) == whole[sampler]


def test_the_journal_of_a_resumed_search_is_that_of_an_uninterrupted_one(tmp_path):
    reported = []
    for cuts in ((TRIALS,), (5, 6, TRIALS)):
        run = new_run(tmp_path)
        for trials in cuts:
            searched(run, Deterministic(), "tpe", seed=3, trials=trials)
        storage = JournalStorage(JournalFileBackend(str(run.journal_path)))
        (study,) = storage.get_all_studies()
        assert study.study_name == STUDY_NAME
        trials = storage.get_all_trials(study._study_id)
        reported.append([(t.number, t.params, t.value, t.state, t.user_attrs) for t in trials])
    assert reported[0] == reported[1] and len(reported[0]) == TRIALS


def test_with_other_builders_than_before_nothing_is_repeated_or_lost(tmp_path):
    run = new_run(tmp_path)
    searched(run, Deterministic(ahead=4), "tpe", seed=3, trials=10)
    before = run.trials()
    searched(run, Deterministic(ahead=2), "tpe", seed=3, trials=TRIALS)
    trials = run.trials()
    assert trials[:10] == before and [t.number for t in trials] == list(range(TRIALS))
    assert len({tuple(t.params.items()) for t in trials}) == TRIALS


@pytest.mark.parametrize("damage", ["truncated", "half a line", "gone", "noise"])
def test_a_damaged_journal_costs_nothing(whole, tmp_path, damage):
    run = new_run(tmp_path)
    searched(run, Deterministic(), "tpe", seed=3, trials=12)
    journal = run.journal_path
    content = journal.read_bytes()
    if damage == "gone":
        journal.unlink()
    else:
        made = {
            "truncated": content[: len(content) // 2],
            "half a line": content[:-7],
            "noise": b"\xff\x00" * 500,
        }
        journal.write_bytes(made[damage])
    searched(run, Deterministic(), "tpe", seed=3, trials=TRIALS)
    assert compared(run.trials()) == whole["tpe"]


def test_kill_9_at_random_moments_changes_nothing(whole, tmp_path):
    """The process is killed in Optuna, in a write, in an answer: wherever it happens to be."""
    run = new_run(tmp_path)
    seen = killed_search(run.path, "tpe", seed=3, trials=TRIALS, kills=5, draw=random.Random(11))
    assert seen.kills == 5
    assert compared(open_run(run.path).trials()) == whole["tpe"]


def test_kill_9_at_random_moments_changes_no_question_of_several_devices(tmp_path):
    """They answer in an order of chance, which is recorded: asked again in it, all is the same."""
    run = new_run(tmp_path)
    seen = killed_search(
        run.path, "surrogate", seed=3, trials=40, kills=4, draw=random.Random(5), devices=4
    )
    trials = open_run(run.path).trials()
    assert seen.kills == 4 and sorted(t.question for t in trials) == list(range(40))
    assert [t.number for t in trials] == list(range(40)), "none is lost, none is there twice"
    assert any(t.asked is not None for t in trials), "they did not end in the order of asking"
    assert is_one_search(trials, "surrogate", seed=3, devices=4)
    assert not is_one_search(trials, "surrogate", seed=4, devices=4), "another seed asks others"


def test_the_same_program_is_what_is_killed(tmp_path):
    """`benchmarks.faults search` ends by itself where nobody kills it."""
    run = new_run(tmp_path)
    command = [sys.executable, "-m", "benchmarks.faults", "search", str(run.path), "grid", "1"]
    done = subprocess.run([*command, "5", "1"], cwd=Path(__file__).parent.parent, timeout=120)
    assert done.returncode == 0 != -signal.SIGKILL and len(run.trials()) == 5
    assert small_space().num_feasible > TRIALS
