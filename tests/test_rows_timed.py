"""Which numbers of rows are timed in the time that there is, by a clock that calls move on."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from test_any_module import text_of
from test_by_batch import GATE, Clock, at

from tuner.by_batch import ANY_ROWS, MOST, NO_ROWS, ByBatch, Way, rows_taken
from tuner.choosing import Kernels
from tuner.evaluate import batch_times, exposed, in_turns
from tuner.evaluate.batch_times import BatchTimes
from tuner.evaluate.in_turns import InTurns, seconds_of_turns
from tuner.problem.accuracy import Accuracy
from tuner.problem.reference import load_problem
from tuner.trial import to_json
from tuner.verification import batching

Micros = Callable[[int, bool], float]  # of a call, by its rows and whether weights are trained


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(exposed, "_now_ns", lambda: round(1e3 * clock.now_us))
    monkeypatch.setattr(in_turns, "num_preempted", lambda: 0)
    seconds = SimpleNamespace(perf_counter=lambda: clock.now_us / 1e6)
    monkeypatch.setattr(batch_times, "time", seconds)
    monkeypatch.setattr(in_turns, "time", seconds)
    monkeypatch.setattr(batching, "time", SimpleNamespace(monotonic=seconds.perf_counter))
    return clock


class Timed(torch.nn.Module):
    """Takes as long as it is told."""

    def __init__(self, clock: Clock, micros: Micros) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(100))
        self.clock, self.micros = clock, micros

    def forward(self, x, y):
        self.clock.now_us += self.micros(len(x), not bool((self.w == 1.0).all()))
        return x * self.w + y


class AtLeastTwo(Timed):
    """A reference that takes no single row while it trains, as BatchNorm."""

    def forward(self, x, y):
        if self.training and len(x) == 1:
            raise ValueError("more than one row, please")
        return super().forward(x, y)


@pytest.fixture
def make(tmp_path, clock, monkeypatch) -> Callable[..., BatchTimes]:
    def make(
        rows: int, theirs: Micros, mine: Micros, *, kind: type[Timed] = Timed, is_gpu=False, **how
    ) -> BatchTimes:
        path = tmp_path / "gate.py"
        path.write_text(text_of(GATE).replace("37, 100", f"{rows}, 100"))
        problem = load_problem(path)
        monkeypatch.setattr(type(problem), "make_model", lambda *_, **__: kind(clock, theirs))
        monkeypatch.setattr(batch_times, "is_gpu", lambda device: is_gpu)
        return BatchTimes(problem, lambda: kind(clock, mine), "cpu", Accuracy(), **how)

    return make


def rows_of(found, way: Way = "call") -> list[int]:
    return sorted({at.num_rows for at in found if at.way == way})


def spent_s(clock: Clock, times: BatchTimes, ways: list[Way], most_s: float, **how):
    times.get_ready(ways)
    begun_us = clock.now_us
    found = times.measured(ways, most_s, **how)
    return found, (clock.now_us - begun_us) / 1e6


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("rows", [4096, 16384])
def test_a_loss_above_the_tuned_size_is_seen_however_few_rows_win(make, clock, rows, is_gpu):
    times = make(
        rows,
        lambda n, _: 40.0 + 0.01 * n,
        lambda n, _: 20.0 + (0.005 if n <= rows else 0.02) * n,
        is_gpu=is_gpu,
    )
    found, _ = spent_s(clock, times, ["call"], 1.5)
    assert rows_taken(found, rows, ["call"])["call"] == (1, rows)


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("tuned_ms", [10, 40, 160, 320, 1500])
def test_long_calls_are_timed_at_few_rows_in_the_time_that_there_is(make, clock, tuned_ms, is_gpu):
    times = make(
        128,
        lambda n, _: 1e3 * tuned_ms * n / 128,
        lambda n, _: 700 * tuned_ms * n / 128,
        is_gpu=is_gpu,
    )
    found, took_s = spent_s(clock, times, ["call"], 4.0)
    assert rows_of(found)[0] <= 2 and took_s < 5.0
    assert rows_taken(found, 128, ["call"]).get("call", ANY_ROWS)[0] <= 2


@pytest.mark.parametrize(
    ("least", "tuned"),
    [(1, ()), (64, ()), (512, ()), (1, (64, 1024, 16384)), (64, (64, 1024, 16384))],
)
def test_where_kernels_begin_to_win_is_found_far_below_a_size_of_long_calls(
    make, clock, least, tuned
):
    """As of the flagship's layers on an H200: 46 ms of PyTorch at 16,384 rows, 0.3 ms at 64."""
    begins_us = {1: 0.0, 64: 300.0, 512: 1200.0}[least]  # what a kernel's call takes at no rows
    ways: tuple[Way, ...] = ("call", "step", "eval")
    kernels = {"kernels": dict.fromkeys(ways, (0, 1, 2))} if tuned else {}
    times = make(
        16384,
        lambda n, _: 200.0 + 2.8 * n,
        lambda n, _: begins_us + 0.6 * n,
        is_gpu=True,
        **kernels,
    )
    most_s = batching.seconds_for(4.0, ways, len(tuned) or 1)
    found, took_s = spent_s(clock, times, [*ways], 0.75 * most_s, tuned=tuned)
    assert took_s < most_s
    for way in ways:
        fewest = rows_taken(found, min(tuned, default=16384), ways, 16384)
        assert fewest.get(way, ANY_ROWS)[0] == least, rows_of(found, way)
        assert not tuned or {128, 256, 512} <= {*rows_of(found, way)}  # between two tuned sizes


def test_a_loss_among_wins_is_found_where_there_is_time(make, clock):
    times = make(1024, lambda n, _: 100.0, lambda n, _: 120.0 if n == 64 else 60.0)
    found, _ = spent_s(clock, times, ["call"], 4.0)
    assert rows_taken(found, 1024, ["call"])["call"] == (128, MOST)


@pytest.mark.parametrize("way", ["step", "eval"])
def test_what_no_race_decides_is_pytorchs_where_it_loses_at_the_tuned_size(make, clock, way):
    times = make(64, lambda n, _: 100.0, lambda n, _: 120.0)
    found, _ = spent_s(clock, times, ["call", way], 4.0)
    rows = rows_taken(found, 64, ["call", way])
    assert rows[way] == NO_ROWS and rows["call"][0] == 64  # calls are raced there


@pytest.mark.parametrize("way", ["step", "eval"])
def test_steps_that_lose_at_the_smallest_of_several_sizes_begin_above_it(make, clock, way):
    times = make(4096, lambda n, _: 100.0, lambda n, _: 120.0 if n <= 64 else 50.0)
    found, _ = spent_s(clock, times, ["call", way], 8.0, tuned=(64, 512, 4096))
    assert rows_taken(found, 64, ["call", way], 4096)[way] == (128, MOST)


@pytest.mark.parametrize("tuned_s", [5.0, 15.0])
def test_what_is_too_long_at_the_tuned_size_is_timed_where_it_is_not(
    make, clock, monkeypatch, tuned_s
):
    monkeypatch.setattr(batch_times, "_seconds", lambda call: seconds_of(clock, call))
    times = make(512, lambda n, _: 1e6 * tuned_s * n / 512, lambda n, _: 9e5 * tuned_s * n / 512)
    found, took_s = spent_s(clock, times, ["call"], 4.0)
    assert rows_of(found)[0] == 1 and took_s < 6.0
    assert "too long to be timed" in times.failures["call"]


def seconds_of(clock: Clock, call: Callable[[], object]) -> float:
    begun_us = clock.now_us
    call()
    return (clock.now_us - begun_us) / 1e6


def test_what_takes_as_long_with_fewer_rows_is_tried_twice(make, clock, monkeypatch):
    monkeypatch.setattr(batch_times, "_seconds", lambda call: seconds_of(clock, call))
    times = make(512, lambda n, _: 5e6, lambda n, _: 4e6)
    times.get_ready(["call"])
    found = times.measured(["call"], 4.0)
    assert found == [] and clock.now_us <= 4 * 5e6 + 4e6


def test_one_row_is_taken_where_it_is_timed_or_refused_by_the_reference(make, clock):
    slow_at_one = make(16, lambda n, _: 1000.0 if n == 1 else 2600.0, lambda n, _: 2500.0)
    for most_s in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 2.0):
        found, _ = spent_s(clock, slow_at_one, ["call"], most_s)
        rows = rows_taken(found, 16, ["call"], refuses_one=slow_at_one.refuses_one)
        assert rows["call"][0] > 1
    refusing = make(16, lambda n, _: 2600.0, lambda n, _: 2500.0, kind=AtLeastTwo)
    found, _ = spent_s(clock, refusing, ["call"], 2.0)
    assert refusing.refuses_one
    how = {"refuses_one": refusing.refuses_one}
    assert rows_taken(found, 16, ["call"], **how).get("call", ANY_ROWS) == ANY_ROWS


def test_one_disturbed_look_does_not_make_a_call_long(clock):
    numbers = iter(range(10**9))

    def disturbed() -> None:
        clock.now_us += 5050.0 if next(numbers) == 1 else 50.0

    turns = InTurns([disturbed, clock.call(40.0)], "cpu", num_rows=4, way="call")
    assert not turns.is_long


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("call_us", [50.0, 3000.0, 8000.0])
def test_what_turns_take_is_known_before_they_are_taken(make, clock, call_us, is_gpu):
    times = make(8, lambda n, _: call_us, lambda n, _: call_us, is_gpu=is_gpu)
    calls = times.calls(4, "call")
    begun_us = clock.now_us
    times._turns(4, "call", calls, 3)
    expected_s = seconds_of_turns(call_us / 1e6, 2, 3, is_gpu=is_gpu)
    took_s = (clock.now_us - begun_us) / 1e6
    assert took_s <= 1.05 * expected_s and (call_us < 1000.0 or expected_s <= 2.0 * took_s)


# ---- ordinary data ---------------------------------------------------------------------------


class Measured:
    """A worker that times a fake, as `batching` asks it."""

    def __init__(self, times: BatchTimes, monkeypatch) -> None:
        self.times, self.asks = times, []
        monkeypatch.setattr(batching, "asked", self.asked)

    def asked(self, worker, job: str, asks, *, timeout_s: float):
        assert job == "on_ordinary"
        self.asks.append((asks["way"], asks["rows"]))
        found = self.times.on_ordinary(**asks)
        return SimpleNamespace(data={"measured": [json.loads(to_json(one)) for one in found]})


def decided_on_both(times, found, monkeypatch, rows, ways=("call",), kernels=None):
    worker = Measured(times, monkeypatch)
    planned = SimpleNamespace(family=SimpleNamespace(text_of_steps=""))  # of any number of rows
    file = SimpleNamespace(ways=ways, kernels=kernels, planned=planned)
    known = ByBatch(rows, tuple(found), refuses_one=times.refuses_one)
    both = batching._on_ordinary(worker, known, file, {}, 2.0)
    return batching._decided(both, file, {}), worker.asks


def test_more_rows_are_the_fewest_where_kernels_lose_on_ordinary_data(make, clock, monkeypatch):
    times = make(64, lambda n, _: 10.0 + 2 * n, lambda n, trained: 15.0 + n + 10.0 * trained)
    found, _ = spent_s(clock, times, ["call"], 4.0)
    assert rows_taken(found, 64, ["call"])["call"] == (8, MOST)
    both, asks = decided_on_both(times, found, monkeypatch, 64)
    assert both.rows["call"] == (16, MOST)
    assert asks == [("call", 8), ("call", 16)]


def test_eval_mode_is_timed_in_its_mode_on_ordinary_data(make, clock, monkeypatch):
    times = make(
        64,
        lambda n, _: 100.0,
        lambda n, trained: 200.0 if trained and n < 16 else 80.0,
        kind=AtLeastTwo,
    )
    found, _ = spent_s(clock, times, ["call", "eval"], 4.0)
    both, asks = decided_on_both(times, found, monkeypatch, 64, ("call", "eval"))
    assert both.rows["eval"] == (16, MOST) and ("eval", 1) in asks


def test_the_kernel_that_is_taken_is_the_one_that_must_win_on_ordinary_data(
    make, clock, monkeypatch
):
    taken = {"kernel": 0}

    def mine(n: int, trained: bool) -> float:
        if taken["kernel"] == 1:
            return 89.0 if n >= 8 else 99.0
        return 150.0 if n < 8 or (trained and n < 128) else 90.0

    times = make(
        1024, lambda n, _: 100.0, mine,
        take=lambda kernel: taken.update(kernel=kernel), kernels={"call": (0, 1)},
    )  # fmt: skip
    found, _ = spent_s(clock, times, ["call"], 4.0, tuned=(256, 1024))
    both = frozenset({256, 1024})
    kernels = Kernels(((256, 0), (1024, 1)), {"call": (0, 1)}, frozenset({"call"}), both)
    decided, _ = decided_on_both(times, found, monkeypatch, 1024, kernels=kernels)
    for at_rows in decided.measured:  # of the kernels that are taken
        fewest = decided.rows.get("call", ANY_ROWS)[0]
        assert at_rows.num_rows < fewest or at_rows.speedup > 0.97, at_rows


def test_a_tuned_size_that_is_pytorchs_does_not_end_what_is_timed(make, clock, monkeypatch):
    times = make(
        1024,
        lambda n, _: 100.0,
        lambda n, trained: 150.0 if n < (256 if trained else 64) else 80.0,
    )
    found, _ = spent_s(clock, times, ["call"], 4.0, tuned=(16, 1024))
    kernels = Kernels(
        ((16, None), (1024, 0)), {"call": (0,)}, frozenset({"call"}), frozenset({1024})
    )
    decided, _ = decided_on_both(times, found, monkeypatch, 1024, kernels=kernels)
    assert decided.rows["call"][0] == 256


def test_given_inputs_stand_in_where_normal_ones_are_refused(tmp_path):
    path = tmp_path / "gate.py"
    text = text_of(GATE).replace("randn(", "rand(")
    line = next(line for line in text.splitlines() if line.strip().startswith("return x"))
    space = line[: len(line) - len(line.lstrip())]
    path.write_text(text.replace(line, f"{space}assert y.min() >= 0\n{line}"))
    problem = load_problem(path)
    times = BatchTimes(problem, lambda: problem.make_model(0), "cpu", Accuracy())
    found = times.on_ordinary(8, "call", 10.0)
    assert [one.data for one in found] == ["ordinary"]


def test_records_of_earlier_releases_are_read():
    assert at(8, 2.0).data == "" and not ByBatch(8).refuses_one
