"""The search loop against an evaluator with a known optimum and known failures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tuner.errors import WorkerError
from tuner.search import finishing, study
from tuner.search.journal import STUDY_NAME, Journal
from tuner.search.optuna_codec import ABSENT, encoded
from tuner.search.study import SearchBudget, search
from tuner.space.constraints import Constraint, Parameter
from tuner.space.expression import Expression
from tuner.space.search_space import SearchSpace
from tuner.trial import Check, Measurement, Outcome, Params, Status, Trial

SAMPLERS = ("tpe", "random", "grid")


def make_space() -> SearchSpace:
    """69 feasible configurations, `stages` absent for one template."""
    return SearchSpace.build(
        [
            Parameter("template", ("mma", "library")),
            Parameter("block", (16, 32, 64, 128, 256)),
            Parameter("stages", (1, 2, 3, 4), Expression.parse("template == 'mma'")),
            Parameter("vector", (1, 2, 4)),
        ],
        [Constraint(Expression.parse("block * stages <= 512"), "fits")],
        {},
    )


def latency_us(params: Params) -> float:
    """Best at block 64, stages 3, vector 4 of mma: 10 us."""
    block = {16: 4.0, 32: 2.0, 64: 0.0, 128: 1.0, 256: 5.0}[int(params["block"])]
    stages = abs(int(params.get("stages", 0)) - 3)
    return 10.0 + 3 * block + 2 * stages + (4 - int(params["vector"]))


def never(params: Params) -> Status | None:
    return None


def by_region(params: Params) -> Status | None:
    """What fails, and how; the optimum's neighbours are among it."""
    if params["block"] == 256:
        return Status.COMPILE
    if params.get("stages") == 4:
        return Status.TIMEOUT
    if params["block"] == 16 and params["vector"] == 1:
        return Status.CORRECTNESS
    if params["template"] == "library" and params["vector"] == 2:
        return Status.RUNTIME
    return None


@dataclass
class Flying:
    params: Params
    candidate_key: str


def of_two_templates() -> SearchSpace:
    """16 configurations of one template, and 10,000 of the other."""
    wide = Expression.parse("template == 'wide'")
    return SearchSpace.build(
        [
            Parameter("template", ("wide", "narrow")),
            Parameter("block", tuple(range(1, 17)), Expression.parse("template == 'narrow'")),
            *(Parameter(f"p{i}", tuple(range(10)), wide) for i in range(4)),
        ],
        [],
        {},
    )


@dataclass
class FakeEvaluator:
    """Answers at once, slow ones when nothing else is left; writes down what it is asked."""

    fails: Callable[[Params], Status | None] = never
    ahead: int = 3
    overlaps: bool = False
    is_slow: Callable[[Params], bool] = lambda params: False
    events: list[tuple[str, object]] = field(default_factory=list)
    flying: list[Flying] = field(default_factory=list)
    bests: list[float | None] = field(default_factory=list)
    most_in_flight: int = 0

    def submit(self, params: Params) -> Flying:
        pending = Flying(params, f"key{len(self.events)}")
        self.flying.append(pending)
        self.most_in_flight = max(self.most_in_flight, len(self.flying))
        self.events.append(("submit", params))
        return pending

    def first_ready(self, pending: Sequence[Flying], timeout_s: float | None = None) -> int:
        assert self.overlaps or list(pending) == self.flying
        places = [i for i, one in enumerate(pending) if not self.is_slow(one.params)]
        return places[0] if places else 0

    def finish(self, pending: Flying, number: int, best_us: float | None) -> Outcome:
        self.flying.remove(pending)
        self.events.append(("finish", pending.params))
        self.bests.append(best_us)
        status = self.fails(pending.params)
        if status is not None:
            return Outcome(status, f"it is {status.value}")
        us = latency_us(pending.params)
        measured = Measurement(us, 0.01, (us,), is_cold=True)
        return Outcome(Status.CORRECT, "", check=Check(True, "float32"), measurement=measured)

    @property
    def submitted(self) -> list[Params]:
        return [params for what, params in self.events if what == "submit"]  # type: ignore[misc]


class Bench:
    """One run's trials, searched in as many sessions as a test wants."""

    def __init__(self, folder: Path, space: SearchSpace | None = None) -> None:
        self.space = space or make_space()
        self.journal = folder / "study.journal"
        self.trials: list[Trial] = []

    def search(
        self,
        evaluator: FakeEvaluator,
        *,
        sampler: str = "tpe",
        trials: int = 20,
        timeout_s: float = 1000.0,
        least: int = 1,
        seed: int = 0,
        first: Sequence[Params] = (),
        should_stop: Callable[[], bool] = lambda: False,
        waited_s: Callable[[], float] = lambda: 0.0,
        at_once: int = 1,
    ) -> str:
        def record(trial: Trial) -> None:
            evaluator.events.append(("record", trial.params))
            self.trials.append(trial)

        return search(
            self.space,
            evaluator,
            sampler=sampler,
            seed=seed,
            budget=SearchBudget(trials, timeout_s, least=least),
            journal=self.journal,
            previous=list(self.trials),
            record=record,
            first=first,
            should_stop=should_stop,
            waited_s=waited_s,
            at_once=at_once,
        )

    def study(self) -> optuna.Study:
        storage = JournalStorage(JournalFileBackend(str(self.journal)))
        return optuna.load_study(study_name=STUDY_NAME, storage=storage)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    before = optuna.logging.get_verbosity()
    yield Bench(tmp_path)
    assert optuna.logging.get_verbosity() == before, "Optuna's verbosity is given back"


def is_listed_once(trials: Sequence[Trial]) -> bool:
    return len({tuple(trial.params.items()) for trial in trials}) == len(trials)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_outcomes_are_taken_in_order_with_builds_ahead(bench, sampler):
    evaluator = FakeEvaluator(by_region, ahead=4)
    why = bench.search(evaluator, sampler=sampler, trials=25)
    assert why == "25 trials: the budget is used up"
    assert [t.number for t in bench.trials] == list(range(25))
    assert [t.params for t in bench.trials] == evaluator.submitted
    assert evaluator.most_in_flight == 4 and not evaluator.flying
    assert is_listed_once(bench.trials)
    assert all(bench.space.index(t.params) is not None for t in bench.trials)
    assert all(t.template == t.params["template"] for t in bench.trials)


def test_every_outcome_is_recorded_before_the_next_question(bench):
    evaluator = FakeEvaluator(ahead=3)
    bench.search(evaluator, trials=12)
    kinds = [what for what, _ in evaluator.events]
    assert kinds[:3] == ["submit"] * 3
    for place, kind in enumerate(kinds):
        if kind == "finish":
            assert kinds[place + 1] == "record"
            assert evaluator.events[place][1] == evaluator.events[place + 1][1]


@pytest.mark.parametrize("sampler", ["surrogate", "random"])
def test_what_is_asked_before_anything_is_known_is_of_every_template(tmp_path, sampler):
    """However many parameters one has: it may be the one that is wrong, or slow."""
    evaluator = FakeEvaluator(lambda params: None, ahead=64)  # half of them in the opening
    bench = Bench(tmp_path, of_two_templates())
    with pytest.raises(KeyError):  # no times are known of these: what was asked first is
        bench.search(evaluator, sampler=sampler, trials=64)
    asked = [params["template"] for params in evaluator.submitted]
    assert len(asked) == 32 and 8 <= asked.count("narrow") <= 24


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_is_built_is_finished_first_and_reported_in_the_order_of_asking(
    tmp_path, sampler, overlaps
):
    def is_scalar(params: Params) -> bool:
        return params["vector"] == 1

    reported = []
    for name, is_slow in (("slow", is_scalar), ("equal", lambda params: False)):
        (folder := tmp_path / name).mkdir()
        bench = Bench(folder)
        evaluator = FakeEvaluator(by_region, 4, overlaps, is_slow)
        bench.search(evaluator, sampler=sampler, trials=30)
        finished = [params for what, params in evaluator.events if what == "finish"]
        assert [t.params for t in bench.trials] == evaluator.submitted
        assert overlaps or (finished == evaluator.submitted) == (name == "equal")
        assert all(t.outcome.seconds.get("held", 0.0) >= 0.0 for t in bench.trials)
        reported.append([(t.number, t.params, t.outcome.status) for t in bench.trials])
    assert reported[0] == reported[1]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_equal_seeds_ask_the_same_questions(tmp_path, sampler):
    asked = []
    for seed in (5, 5, 6):
        (folder := tmp_path / str(len(asked))).mkdir()
        evaluator = FakeEvaluator(by_region)
        Bench(folder).search(evaluator, sampler=sampler, seed=seed, trials=30)
        asked.append(evaluator.submitted)
    assert asked[0] == asked[1]
    assert (asked[0] == asked[2]) == (sampler == "grid")


def test_tpe_finds_the_known_optimum_in_half_of_the_space(bench):
    bench.search(FakeEvaluator(by_region), sampler="tpe", trials=bench.space.num_feasible // 2)
    correct = [t for t in bench.trials if t.outcome.latency_us]
    best = min(correct, key=lambda t: latency_us(t.params))
    assert best.params == {"template": "mma", "block": 64, "stages": 3, "vector": 4}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_exhausted_space_ends_the_search_and_says_so(bench, sampler):
    evaluator = FakeEvaluator(by_region, ahead=5)
    why = bench.search(evaluator, sampler=sampler, trials=1000)
    assert why == f"all {bench.space.num_feasible} feasible configurations were tried"
    assert len(bench.trials) == bench.space.num_feasible and is_listed_once(bench.trials)
    states = {t.state for t in bench.study().trials}
    assert states == {TrialState.COMPLETE, TrialState.PRUNED}
    again = FakeEvaluator()
    assert bench.search(again, sampler=sampler, trials=1000) == why and not again.events


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_space_of_one_configuration_is_tried_once(tmp_path, sampler):
    space = SearchSpace.build([Parameter("template", ("only",)), Parameter("n", (1,))], [], {})
    bench = Bench(tmp_path, space)
    bench.search(FakeEvaluator(lambda _: Status.COMPILE), sampler=sampler)
    assert [t.params for t in bench.trials] == [{"template": "only", "n": 1}]
    assert bench.search(FakeEvaluator()) == "all 1 feasible configurations were tried"
    assert len(bench.trials) == 1


def test_the_evaluator_is_given_the_best_latency_so_far(bench):
    evaluator = FakeEvaluator(by_region, ahead=1)
    bench.search(evaluator, sampler="random", trials=20)
    best: float | None = None
    for trial, reported in zip(bench.trials, evaluator.bests, strict=True):
        assert reported == best
        us = trial.outcome.latency_us
        best = us if best is None else best if us is None else min(best, us)
    again = FakeEvaluator(by_region)
    bench.search(again, trials=21)
    assert again.bests == [best]  # a resumed search knows it from the start


# ---- a device that works while the sampler thinks -------------------------------------------


class Meeting(FakeEvaluator):
    """Its second question ends when its first candidate is being finished, and the reverse."""

    def __init__(self) -> None:
        super().__init__(by_region, overlaps=True)
        self._met = threading.Barrier(2, timeout=20.0)

    def submit(self, params: Params) -> Flying:
        pending = super().submit(params)
        if len(self.submitted) == 2:
            self._met.wait()
        return pending

    def finish(self, pending: Flying, number: int, best_us: float | None) -> Outcome:
        if number == 0:
            self._met.wait()
        return super().finish(pending, number, best_us)


def test_the_device_works_while_a_question_is_thought_out(bench):
    evaluator = Meeting()
    bench.search(evaluator, trials=15)
    assert [t.params for t in bench.trials] == evaluator.submitted and not evaluator.flying


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_it_asks_what_it_would_ask_of_a_device_that_waits(tmp_path, sampler):
    reported = []
    for overlaps in (False, True):
        (folder := tmp_path / str(overlaps)).mkdir()
        bench = Bench(folder)
        for trials in (7, 24):  # resumed, too
            bench.search(FakeEvaluator(by_region, 4, overlaps), sampler=sampler, trials=trials)
        reported.append([(t.number, t.params, t.outcome.status) for t in bench.trials])
        ends = [t.elapsed_s - t.outcome.seconds.get("held", 0.0) for t in bench.trials]
        assert min(ends) >= 0 and min(ends[7:]) >= bench.trials[6].elapsed_s - 0.001  # rounded
    assert reported[0] == reported[1] and len(reported[0]) == 24


class SlowFirst(FakeEvaluator):
    """Its first candidate is built when three later ones are finished."""

    def first_ready(self, pending: Sequence[Flying], timeout_s: float | None = None) -> int | None:
        finished = sum(what == "finish" for what, _ in self.events)
        is_first = [one.params == self.submitted[0] for one in pending]
        if all(is_first) and finished < 3:
            assert timeout_s is not None, "it would wait for ever"
            time.sleep(timeout_s)
            return None
        return (
            is_first.index(finished >= 3)
            if finished >= 3 and any(is_first)
            else is_first.index(False)
        )


def test_the_device_takes_what_was_asked_for_while_it_waited(bench):
    evaluator = SlowFirst(by_region, 4, overlaps=True)
    bench.search(evaluator, trials=12)
    finished = [params for what, params in evaluator.events if what == "finish"]
    assert finished.index(evaluator.submitted[0]) == 3
    assert [t.params for t in bench.trials] == evaluator.submitted


class Hung(FakeEvaluator):
    """The compiler of its second candidate never ends."""

    def first_ready(self, pending: Sequence[Flying], timeout_s: float | None = None) -> int | None:
        hung = self.submitted[1:2]
        ready = [i for i, one in enumerate(pending) if one.params not in hung]
        if not ready:
            assert timeout_s is not None, "it would wait for ever"
            time.sleep(timeout_s)
            return None
        return ready[0]


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_time_is_used_up_also_while_a_compiler_hangs(bench, overlaps):
    """What was finished behind it is reported; another session asks what it would not say."""
    evaluator = Hung(by_region, 4, overlaps)
    started = time.monotonic()
    why = bench.search(evaluator, trials=50, timeout_s=3.0)
    assert time.monotonic() - started < 20.0 and why.endswith("the time is used up")
    first, _, *others = evaluator.submitted
    assert [t.params for t in bench.trials] == [first, *others] and len(others) >= 2
    bench.search(FakeEvaluator(by_region, 4, overlaps), trials=20)
    assert [t.number for t in bench.trials] == list(range(20)) and is_listed_once(bench.trials)


def test_a_compiler_that_hangs_holds_up_what_others_found_for_a_while(bench, monkeypatch):
    monkeypatch.setattr(study, "PATIENCE_S", 0.2)
    evaluator = Hung(by_region, 4, overlaps=True)
    why = bench.search(evaluator, trials=50, timeout_s=1000.0,
                       should_stop=lambda: len(bench.trials) >= 30)  # fmt: skip
    assert why.startswith("stopped by the user after 3") and len(bench.trials) >= 30
    assert evaluator.submitted[1] not in [t.params for t in bench.trials]
    assert is_listed_once(bench.trials)


class Lost(FakeEvaluator):
    """A device that is lost at its sixth candidate."""

    def finish(self, pending: Flying, number: int, best_us: float | None) -> Outcome:
        if number == 5:
            raise WorkerError("the device is gone")
        return super().finish(pending, number, best_us)


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_came_before_a_lost_device_is_recorded(bench, overlaps):
    with pytest.raises(WorkerError, match="the device is gone"):
        bench.search(Lost(by_region, 4, overlaps), trials=20)
    assert [t.number for t in bench.trials] == list(range(5))
    bench.search(FakeEvaluator(by_region, 4, overlaps), trials=20)
    assert [t.number for t in bench.trials] == list(range(20)) and is_listed_once(bench.trials)


def test_a_search_that_ends_drops_what_the_device_works_on(bench):
    evaluator = FakeEvaluator(never, 4, overlaps=True)
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    why = bench.search(evaluator, should_stop=lambda: len(bench.trials) >= 6)
    # What was finished by then, and is next in order, is told.
    assert why == f"stopped by the user after {len(bench.trials)} trials"
    assert 6 <= len(bench.trials) <= 9
    deadline = time.monotonic() + 20.0
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    states = [t.state for t in bench.study().trials]
    num = len(bench.trials)
    assert states == [TrialState.COMPLETE] * num + [TrialState.FAIL] * (len(states) - num)


# ---- the budget -----------------------------------------------------------------------------


class Clock:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for room in (study, finishing):
        monkeypatch.setattr(room, "time", clock)
    return clock


def test_the_time_is_up_after_so_many_seconds_of_all_sessions(bench, clock):
    why = bench.search(FakeEvaluator(), trials=1000, timeout_s=20.0)
    assert why.endswith("in 21 s: the time is used up")
    num_first = len(bench.trials)
    assert why.startswith(f"{num_first} trials in") and 5 <= num_first <= 20
    assert bench.trials[-1].elapsed_s <= 20
    clock.now_s += 10_000  # days between the sessions do not count
    bench.search(FakeEvaluator(), trials=1000, timeout_s=30.0)
    assert 2 <= len(bench.trials) - num_first <= 10
    elapsed = [t.elapsed_s for t in bench.trials]
    assert elapsed == sorted(elapsed) and elapsed[-1] <= 31
    assert bench.search(FakeEvaluator(), timeout_s=30.0).endswith("the time is used up")


def test_what_it_waits_for_the_device_does_not_count_as_its_time(bench, clock):
    bench.search(FakeEvaluator(), trials=1000, timeout_s=20.0)
    num_alone, other = len(bench.trials), Bench(bench.journal.parent / "other")
    other.journal.parent.mkdir()
    begun_s = clock.now_s
    # Half of the time another tuner has the device; it had it for 100 s before.
    why = other.search(
        FakeEvaluator(),
        trials=1000,
        timeout_s=20.0,
        waited_s=lambda: 100.0 + (clock.now_s - begun_s) / 2,
    )
    assert why.endswith("the time is used up")
    assert 1.7 * num_alone <= len(other.trials) <= 2.3 * num_alone


def test_one_outcome_is_waited_for_however_little_time_there_is(bench, clock):
    why = bench.search(FakeEvaluator(), trials=1000, timeout_s=0.5)
    assert why.startswith("1 trials in") and why.endswith("the time is used up")
    assert len(bench.trials) == 1


def test_as_many_outcomes_are_waited_for_as_are_asked_for(bench, clock):
    why = bench.search(FakeEvaluator(), trials=1000, timeout_s=0.5, least=3)
    assert why.startswith("3 trials in") and len(bench.trials) == 3


def test_trials_of_earlier_sessions_count(bench):
    bench.search(FakeEvaluator(), trials=7)
    bench.search(FakeEvaluator(), trials=12)
    assert [t.number for t in bench.trials] == list(range(12))
    none = FakeEvaluator()
    assert bench.search(none, trials=12) == "12 trials: the budget is used up"
    assert not none.events and len(bench.trials) == 12


def test_a_stop_drops_what_is_in_flight_and_leaves_nothing_running(bench):
    evaluator = FakeEvaluator(ahead=4)
    why = bench.search(evaluator, should_stop=lambda: len(bench.trials) >= 6)
    assert why == "stopped by the user after 6 trials"
    assert len(bench.trials) == 6 and len(evaluator.flying) == 3
    states = [t.state for t in bench.study().trials]
    assert states == [TrialState.COMPLETE] * 6 + [TrialState.FAIL] * 3
    bench.search(FakeEvaluator(), trials=9)
    assert is_listed_once(bench.trials)


def test_a_stop_before_the_first_question_asks_nothing(bench):
    evaluator = FakeEvaluator()
    why = bench.search(evaluator, should_stop=lambda: True)
    assert why == "stopped by the user after 0 trials" and not evaluator.events


# ---- resuming, and Optuna's journal ---------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_resumed_search_repeats_nothing_and_goes_on_counting(bench, sampler):
    for trials in (4, 5, 20, bench.space.num_feasible):
        bench.search(FakeEvaluator(by_region), sampler=sampler, trials=trials)
        assert [t.number for t in bench.trials] == list(range(trials))
        assert is_listed_once(bench.trials)


def test_the_journal_is_rebuilt_from_the_runs_own_trials(bench):
    bench.search(FakeEvaluator(by_region), sampler="random", trials=30)
    bench.journal.write_bytes(b"not a journal \xff\n")
    assert bench.search(FakeEvaluator(), trials=30) == "30 trials: the budget is used up"
    recorded = bench.study().trials
    assert len(recorded) == 30
    for trial, reported in zip(bench.trials, recorded, strict=True):
        is_correct = trial.outcome.status is Status.CORRECT
        assert reported.state == (TrialState.COMPLETE if is_correct else TrialState.PRUNED)
        assert reported.value == trial.outcome.latency_us
        assert reported.params == encoded(trial.params, bench.space)
        assert reported.user_attrs["status"] == trial.outcome.status.value
    assert any(reported.params["stages"] == ABSENT for reported in recorded)
    assert {t.outcome.status for t in bench.trials} >= {Status.CORRECT, Status.COMPILE}


def test_a_trial_waits_for_the_disk_once_and_its_outcome_is_there_then(bench, monkeypatch):
    seen: list[int] = []
    write = JournalFileBackend.append_logs

    def counted(self: JournalFileBackend, logs: list[dict[str, object]]) -> None:
        write(self, logs)
        seen.append(sum(trial.state.is_finished() for trial in bench.study().trials))

    monkeypatch.setattr(JournalFileBackend, "append_logs", counted)
    bench.search(FakeEvaluator(by_region), sampler="random", trials=20)
    assert seen == sorted(seen) and seen[-1] == 20
    assert set(seen) == set(range(21)) and len(seen) <= 22  # the first: the study itself


def test_failures_are_reported_as_pruned_with_their_reason(bench):
    bench.search(FakeEvaluator(by_region), sampler="random", trials=40)
    reported = bench.study().trials
    assert [t.state == TrialState.PRUNED for t in reported] == [
        by_region(t.params) is not None for t in bench.trials
    ]
    reasons = {t.user_attrs.get("reason") for t in reported if t.state == TrialState.PRUNED}
    assert reasons >= {"it is compile", "it is timeout", "it is runtime"}
    assert bench.study().best_value == min(
        t.outcome.latency_us for t in bench.trials if t.outcome.latency_us is not None
    )


def test_a_lock_that_a_killed_process_left_does_not_block(bench):
    bench.search(FakeEvaluator(), trials=2)
    lock = Path(f"{bench.journal}.lock")
    lock.symlink_to(bench.journal)
    assert bench.search(FakeEvaluator(), trials=4) == "4 trials: the budget is used up"


def test_trials_that_the_space_no_longer_has_stay_in_the_run(bench):
    bench.search(FakeEvaluator(), sampler="grid", trials=3)
    gone = Trial(3, "mma", {"template": "mma", "block": 999}, "k", Outcome(Status.COMPILE, "x"))
    bench.trials.append(gone)
    bench.search(FakeEvaluator(), sampler="grid", trials=1000)
    assert len(bench.trials) == bench.space.num_feasible + 1 and is_listed_once(bench.trials)


# ---- known good ones first ------------------------------------------------------------------

FIRST = (
    {"template": "library", "block": 128, "vector": 2},
    {"template": "mma", "block": 32, "stages": 2, "vector": 1},
)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_given_configurations_come_first_in_their_order(bench, sampler):
    bench.search(FakeEvaluator(by_region), sampler=sampler, trials=30, first=FIRST)
    assert tuple(t.params for t in bench.trials[:2]) == FIRST
    assert is_listed_once(bench.trials)


def test_given_configurations_that_were_tried_are_not_tried_again(bench):
    bench.search(FakeEvaluator(), trials=1, first=FIRST)
    bench.search(FakeEvaluator(), trials=1000, first=FIRST)
    assert tuple(t.params for t in bench.trials[:2]) == FIRST
    assert len(bench.trials) == bench.space.num_feasible and is_listed_once(bench.trials)


def test_an_unknown_sampler_is_refused_by_name(bench):
    with pytest.raises(Exception, match="unknown sampler 'tep'"):
        bench.search(FakeEvaluator(), sampler="tep")


def test_ctrl_c_while_the_journal_is_written_is_no_fault_of_its_lock(tmp_path, monkeypatch):
    rename = os.rename

    def interrupted(source, target):  # where Optuna's own lock is given back
        rename(source, target)
        os.unlink(target)
        raise KeyboardInterrupt

    journal = Journal(tmp_path / "study.journal")
    journal.append_logs([{"op_code": 0}])
    monkeypatch.setattr(os, "rename", interrupted)
    journal.write()
    assert [path.name for path in tmp_path.iterdir()] == ["study.journal"]
    assert list(journal.read_logs(0)) == [{"op_code": 0}]


# ---- several devices --------------------------------------------------------------------------


class Devices(FakeEvaluator):
    """Several candidates at once, which end one after the other in an order of their own.

    Once as many are in flight as may be, the one whose parameters come first in `order_of` ends;
    so what an uninterrupted search asks does not depend on threads.
    """

    def __init__(
        self, ahead: int, most: int, order_of: Callable[[Params], int], trials: Sequence[Trial]
    ):
        super().__init__(by_region, ahead=ahead, overlaps=True)
        self.order_of = order_of
        self.most = most  # questions of the whole search: fewer are in flight at its end
        self.trials = trials  # as they are recorded: none ends before the one that ended last is
        self.begun: list[Params] = []
        self.change = threading.Condition()

    def first_ready(self, pending: Sequence[Flying], timeout_s: float | None = None) -> int | None:
        return 0 if pending else None

    def finish(self, pending: Flying, number: int, best_us: float | None) -> Outcome:
        with self.change:
            self.begun.append(pending.params)
            self.change.notify_all()
            while not self.may_end(pending.params):
                self.change.wait(0.01)  # who records a trial does not notify
            self.begun.remove(pending.params)
            self.change.notify_all()
        return super().finish(pending, number, best_us)

    def may_end(self, params: Params) -> bool:
        is_full = len(self.begun) == min(self.ahead, self.most - len(self.trials))
        return is_full and min(self.begun, key=self.key) == params

    def key(self, params: Params) -> tuple[int, str]:
        return self.order_of(params), str(params)


def slow_mma(params: Params) -> int:
    return int(params["template"] == "mma" and params["vector"] == 1)


def searched_in_parts(folder: Path, ends: Sequence[int], sampler: str) -> list[Trial]:
    """Return the trials of a search of 30 that stopped after so many of them, and was resumed."""
    folder.mkdir()
    bench = Bench(folder)
    for end in [*ends, 30]:
        devices = Devices(ahead=5, most=30, order_of=slow_mma, trials=bench.trials)
        bench.search(
            devices,
            sampler=sampler,
            trials=30,
            at_once=5,
            should_stop=lambda end=end: end < 30 and len(bench.trials) >= end,
        )
    return bench.trials


@pytest.mark.parametrize("sampler", ["surrogate", "random"])
def test_of_several_devices_a_resumed_search_asks_what_an_uninterrupted_one_asks(
    tmp_path, sampler
):
    whole = searched_in_parts(tmp_path / "whole", [], sampler)
    assert [t.number for t in whole] == list(range(30))
    assert sorted(t.question for t in whole) == list(range(30)), "each question has its answer"
    assert any(t.asked is not None for t in whole), "they did not end in the order of asking"
    for number, ends in enumerate([[7, 8, 21], [1], [12, 29]]):
        parts = searched_in_parts(tmp_path / f"parts{number}", ends, sampler)
        assert [(t.question, t.params) for t in parts] == [(t.question, t.params) for t in whole]


def test_of_several_devices_a_slow_candidate_keeps_no_other_waiting(bench):
    first = make_space().at(0)
    devices = Devices(3, 20, lambda params: int(params == first), bench.trials)
    bench.search(devices, sampler="grid", trials=20, at_once=3)
    assert bench.trials[-1].params == first and bench.trials[-1].question == 0
    assert is_listed_once(bench.trials)


def test_of_several_devices_equal_machine_code_names_the_trial_it_is_reported_as(bench):
    class Same(Devices):
        def finish(self, pending: Flying, number: int, best_us: float | None) -> Outcome:
            outcome = super().finish(pending, number, best_us)
            return replace(outcome, same_as=1) if number == 4 else outcome

    first = make_space().at(0)
    devices = Same(3, 12, lambda params: int(params == first), bench.trials)
    bench.search(devices, sampler="grid", trials=12, at_once=3)
    one, same = (next(t for t in bench.trials if t.question == n) for n in (1, 4))
    assert one.number == 0 and same.outcome.same_as == one.number
