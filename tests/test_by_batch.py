"""At which rows a file takes its kernels: decided, written, obeyed, and checked both ways."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cpu_machine import FACTS, GPP
from full_runs import by_batch, make_result, make_run, make_trials, page_of
from test_any_module import assert_as_exact, in_float64, text_of
from test_cheats import CHEATS, task_of
from test_steps import Taken, gradients

from tuner.by_batch import (
    ANY_ROWS,
    FEW_ROWS_WORDS,
    MOST,
    NO_ROWS,
    AtBatch,
    ByBatch,
    Way,
    batches_of,
    rows_taken,
    without_steps_in,
)
from tuner.capture.modules.rows_text import ROWS_NAME, has_rows, ways_in, with_rows
from tuner.capture.steps.step_text import without_steps
from tuner.environment import Environment
from tuner.evaluate import batch_times, exposed, in_turns
from tuner.evaluate.batch_times import BatchTimes
from tuner.evaluate.contender import Contender
from tuner.evaluate.exposed import ExposedTimer
from tuner.evaluate.in_turns import InTurns, deciding
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.modules import module_of
from tuner.evaluate.race import finalist
from tuner.evaluate.racing import Racer
from tuner.evaluate.verifier import Verifier
from tuner.evaluate.worker import Reply
from tuner.export.module import export_text
from tuner.kernel.family import load_family
from tuner.kernel.toolchain import Toolchain
from tuner.problem.accuracy import Accuracy
from tuner.problem.reference import load_problem
from tuner.review.rows_figure import rows_caption, rows_figure, rows_table
from tuner.review.summary import summary
from tuner.run import Run, create_run
from tuner.trial import Check, Finalist, Interval, from_json, to_json
from tuner.verification import batching
from tuner.verification.batching import Batching
from tuner.verification.ranking import is_behind, remarks_on

needs_gpp = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")


# ---- what is decided ------------------------------------------------------------------------


def at(rows: int, speedup: float, error: float = 0.01, way: Way = "call") -> AtBatch:
    low, high = speedup * (1 - error), speedup * (1 + error)
    return AtBatch(rows, way, False, speedup, low, high, 10.0 * speedup, 10.0)


def taken(speedups: dict[int, float | tuple[float, float]], tuned: int) -> tuple[int, int]:
    """Return the rows of calls, by speed-ups at numbers of rows, with errors or without."""
    given = {n: s if isinstance(s, tuple) else (s, 0.01) for n, s in speedups.items()}
    found = rows_taken([at(n, *s) for n, s in given.items()], tuned, ["call"])
    assert found["step"] == NO_ROWS  # it has none
    return found["call"]


@pytest.mark.parametrize(
    ("speedups", "rows"),
    [
        ({1: 0.5, 2: 0.6, 4: 1.2, 8: 2.0, 16: 2.0}, (4, MOST)),
        ({1: 1.1, 2: 1.2, 4: 1.2, 8: 2.0}, ANY_ROWS),
        ({2: 1.1, 4: 1.2, 8: 2.0}, (2, MOST)),  # no time was left for one
        ({1: 0.9, 2: 1.2, 4: 1.2, 8: 2.0}, (2, MOST)),
        ({1: 2.0, 2: 0.9, 4: 1.2, 8: 2.0}, (4, MOST)),  # from which on none is slower
        ({1: 0.5, 4: (1.2, 0.5), 8: 2.0}, (8, MOST)),  # may be 0.6 as well: not decided
        ({4: (1.0, 0.02), 8: 2.0}, (4, MOST)),  # no difference that anybody would see
        ({4: (0.99, 0.001), 8: 2.0}, (8, MOST)),  # nothing is gained
        ({8: 0.5, 4: 0.5}, (8, MOST)),  # at the size that was tuned the race decides
        ({4: 2.0, 8: 2.0, 16: 1.0, 32: 0.8}, (4, 16)),
        ({4: 2.0, 8: 2.0, 16: 0.8, 32: 2.0}, (4, 8)),
        ({4: 2.0, 8: 2.0, 16: (0.8, 0.5), 32: 0.98}, (4, MOST)),  # not decided, and not seen
        ({4: 2.0}, (4, MOST)),  # there was no time for more
        ({}, (8, MOST)),
    ],
)
def test_kernels_are_taken_from_where_on_they_are_as_fast(speedups, rows):
    assert taken(speedups, 8) == rows


def test_where_the_reference_takes_no_row_alone_kernels_from_two_on_are_kernels_everywhere():
    one, two, more = at(1, 0.5), at(2, 1.1), at(8, 2.0)
    assert rows_taken([two, more], 8, ["call"], refuses_one=True)["call"] == ANY_ROWS
    assert rows_taken([one, two, more], 8, ["call"], refuses_one=True)["call"] == (2, MOST)


@pytest.mark.parametrize(
    ("speedups", "rows"),
    [
        ({4: 0.5, 8: 0.6}, NO_ROWS),  # at the tuned size
        ({1: 1.5, 2: 0.6}, NO_ROWS),  # near it, and no more were timed
        ({1: 0.6}, (8, MOST)),  # which says little of the tuned size
        ({4: 0.6, 8: 1.2}, (8, MOST)),
        ({4: 1.2, 8: (0.9, 0.2)}, (4, MOST)),  # not decided: the race will say
        ({4: 1.2, 8: (0.99, 0.05)}, NO_ROWS),  # nor this, but little could be gained
        ({4: (0.99, 0.05)}, (8, MOST)),  # of other rows
    ],
)
def test_steps_that_are_slower_are_pytorchs(speedups, rows):
    given = {n: s if isinstance(s, tuple) else (s, 0.01) for n, s in speedups.items()}
    found = rows_taken([at(n, *s, "step") for n, s in given.items()], 8, ["step"])
    assert found["step"] == rows


@pytest.mark.parametrize(
    ("speedup", "low", "high", "expected"),
    [
        (0.6, 0.09, 3.9, True),  # half as fast in each of three processes
        (0.98, 0.97, 0.99, True),  # by little, but surely
        (0.94, 0.85, 1.04, True),  # in each of three processes
        (0.94, 0.55, 1.61, False),  # in some, as PyTorch's own beside itself
        (0.98, 0.5, 1.9, False),  # by what nobody would see
        (1.2, 0.3, 4.8, False),
        (1.2, 1.1, 1.3, False),
    ],
)
def test_what_seems_slower_is_behind_however_few_processes_say_it(speedup, low, high, expected):
    assert is_behind(Interval(speedup, low, high, 0.95, 3)) == expected


def test_of_disturbed_steps_those_of_fewer_rows_tell():
    """At the tuned size other programs took the processor, and a half of it was timed well."""
    disturbed = replace(at(8, 0.6, way="step"), is_disturbed=True)
    assert rows_taken([at(4, 0.6, way="step"), disturbed], 8, ["step"])["step"] == NO_ROWS
    assert rows_taken([at(4, 1.2, way="step"), disturbed], 8, ["step"])["step"] == (4, MOST)
    assert rows_taken([disturbed], 8, ["step"])["step"] == (8, MOST)
    # Both say that steps are slower: then fewer rows tell, too.
    few, faster = at(1, 0.6, way="step"), replace(disturbed, speedup=1.3)
    assert rows_taken([few, disturbed], 8, ["step"])["step"] == NO_ROWS
    assert rows_taken([few, faster], 8, ["step"])["step"] == (8, MOST)
    assert rows_taken([few, replace(disturbed, num_rows=32)], 32, ["step"])["step"] == (32, MOST)


@pytest.mark.parametrize(
    ("above", "rows"),
    [
        ({16: (1.1, 0.8), 32: (2.0, 1.3)}, (32, MOST)),
        ({16: (2.0, 1.2), 32: (2.0, 0.5)}, (16, 16)),
        ({16: (1.1, 0.8), 32: (1.3, 0.9)}, NO_ROWS),
        ({}, NO_ROWS),
    ],
)
def test_steps_that_wait_for_the_host_at_the_tuned_size_begin_above_it(above, rows):
    """Back to back they are faster there; from an idle device, they are not."""
    speedups = {4: (2.0, 0.5), 8: (2.0, 0.6), **above}
    measured = [at(n, one, way="step") for n, (one, _) in speedups.items()]
    idle = [replace(at(n, two, way="step"), is_idle=True) for n, (_, two) in speedups.items()]
    assert rows_taken(measured + idle, 8, ["step"])["step"] == rows
    assert rows_taken(measured, 8, ["step"])["step"][0] == 4


def test_of_two_ways_to_time_a_call_the_worse_one_counts():
    quick, idle = at(4, 1.5), replace(at(4, 0.8), is_idle=True)
    assert rows_taken([quick, at(8, 2.0)], 8)["call"] == (4, MOST)
    assert rows_taken([quick, idle, at(8, 2.0)], 8)["call"] == (8, MOST)


def test_calls_and_steps_are_decided_apart_and_said_in_words():
    measured = [at(2, 2.0), at(8, 2.0), at(2, 0.5, way="step"), at(8, 2.0, way="step")]
    measured += [at(16, 0.5, way="step")]
    found = ByBatch(8, tuple(measured), rows_taken(measured, 8, refuses_one=True))
    assert found.rows == {"call": ANY_ROWS, "step": (8, 8)}
    words = "steps of training: the module's own forward but at 8 rows"
    assert found.words == (words,)
    assert found.brief == (
        "kernels run without gradients at any number of rows, with gradients at 8 rows alone"
    )
    assert from_json(ByBatch, to_json(found)) == found
    fewer = without_steps_in(found)
    assert fewer.words == ("steps of training: PyTorch's own at any number of rows",)
    assert {one.way for one in fewer.measured} == {"call"}
    assert fewer.brief == (
        "kernels run without gradients at any number of rows, with gradients never"
    )
    everywhere = [at(n, 2.0, way=way) for n in (1, 8) for way in ("call", "step")]
    assert rows_taken(everywhere, 8) == {} and not ByBatch(8).words


def test_powers_of_two_are_measured_up_to_four_times_the_tuned_size():
    assert batches_of(16) == [1, 2, 4, 8, 16, 32, 64]
    assert batches_of(37) == [1, 2, 4, 8, 16, 32, 37, 64, 128]


# ---- what is timed, by a clock that is told the time -----------------------------------------


class Clock:
    """A clock that only calls move on."""

    def __init__(self) -> None:
        self.now_us = 0.0

    def call(self, us: float) -> Callable[[], None]:
        def call() -> None:
            self.now_us += us

        return call


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(exposed, "_now_ns", lambda: round(1e3 * clock.now_us))
    return clock


def test_a_speed_up_is_of_the_calls_own_times(clock):
    turns = InTurns([clock.call(30.0), clock.call(20.0)], "cpu", num_rows=4, way="call")
    found = turns.take(5)
    assert (found.baseline_us, found.latency_us) == (30.0, 20.0)
    assert found.speedup == pytest.approx(1.5) and found.low == pytest.approx(1.5)


@pytest.mark.parametrize(("call_us", "num_calls"), [(3000.0, 3), (6000.0, 2)])
def test_a_long_call_is_looked_at_twice_before_it_takes_turns(clock, call_us, num_calls):
    calls = []

    def call() -> None:
        calls.append("")
        clock.now_us += call_us

    turns = InTurns([call, clock.call(20.0)], "cpu", num_rows=4, way="call")
    assert turns.is_long == (num_calls == 2)
    assert len(calls) == 2 * num_calls  # each after one that is not timed


def test_other_programs_stretch_a_few_calls_and_no_time(clock):
    number = iter(range(10**6))

    def disturbed() -> None:
        clock.now_us += 10_000.0 if next(number) % 5 == 0 else 10.0

    assert ExposedTimer("cpu", 10).samples(lambda _: disturbed(), 3) == [10.0] * 3


@pytest.mark.parametrize("num_calls", [1, 4])
def test_on_a_gpu_a_sample_begins_and_ends_with_an_idle_device(clock, monkeypatch, num_calls):
    queued_us = [0.0]

    def wait() -> None:
        clock.now_us += queued_us[0]
        queued_us[0] = 0.0

    def call(_: int) -> None:
        clock.now_us += 2.0  # to launch
        queued_us[0] += 10.0

    monkeypatch.setattr(exposed, "waiting_for", lambda device: wait)
    assert ExposedTimer("cuda:0", num_calls).samples(call, 2) == [12.0, 12.0]


def test_what_decides_is_timed_further_and_nothing_beyond_it():
    def known(rows: int, speedup: float, error: float) -> SimpleNamespace:
        found = at(rows, speedup, error)
        is_lost = found.is_clear and not found.is_won
        may_learn = not found.is_clear
        return SimpleNamespace(num_rows=rows, found=found, may_learn=may_learn, is_lost=is_lost)

    open_above, open_below = known(8, 1.1, 0.5), known(2, 1.1, 0.5)
    won, lost = known(16, 2.0, 0.01), known(4, 0.5, 0.01)
    assert deciding([won, open_above, lost, open_below]) is open_above
    assert deciding([won, lost, open_below]) is None  # PyTorch wins above it
    assert deciding([won, open_below]) is open_below
    lost_idle = known(8, 0.5, 0.01)  # beside what is open there back to back
    assert deciding([won, open_above, lost_idle], 16) is None
    assert deciding([won, open_above, lost_idle], 8) is open_above
    assert deciding([]) is None


def test_turns_that_other_programs_disturb_are_repeated_and_decide_nothing(clock, monkeypatch):
    counts = itertools.count(step=1000)
    monkeypatch.setattr(in_turns, "num_preempted", lambda: next(counts))
    turns = InTurns([clock.call(30.0), clock.call(20.0)], "cpu", num_rows=4, way="call")
    found = turns.take(5)
    assert found.is_disturbed and found.speedup == pytest.approx(1.5)
    assert not found.is_won and not found.is_lost and next(counts) >= 8000
    assert rows_taken([found], 8)["call"] == (8, MOST)


def test_more_turns_are_taken_where_it_is_not_clear(clock):
    uneven = itertools.cycle([10.0, 40.0])

    def scattered() -> None:
        clock.now_us += next(uneven)

    turns = InTurns([scattered, clock.call(20.0)], "cpu", num_rows=4, way="call")
    turns.take(7)
    while turns.may_learn:
        turns.take(7)
    clear = InTurns([clock.call(30.0), clock.call(20.0)], "cpu", num_rows=4, way="call")
    assert clear.take(7).is_won and not clear.may_learn


GATE = "rms_norm_gate"


class Fake(torch.nn.Module):
    """Takes as long as it is told, for a call and for each row."""

    def __init__(self, clock: Clock, call_us: float, row_us: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(100))
        self.clock, self.call_us, self.row_us = clock, call_us, row_us

    def forward(self, x, y):
        if len(x) == 1:
            raise ValueError("more than one row, please")
        self.clock.now_us += self.call_us + self.row_us * len(x)
        return x * self.w + y


def test_a_file_without_steps_says_of_each_way_at_which_rows_it_takes_kernels():
    """It looks up the way of a call in that line, also where all of them take any rows."""
    everywhere = ByBatch(64, tuple(at(64, 2.0, way=way) for way in ("call", "step", "eval")))
    assert without_steps_in(everywhere).rows == {
        "call": ANY_ROWS, "eval": ANY_ROWS, "step": NO_ROWS,
    }  # fmt: skip


def test_a_file_that_pays_from_some_rows_on_says_so(tmp_path, clock, monkeypatch):
    path = tmp_path / "gate.py"
    path.write_text(text_of(GATE))
    problem = load_problem(path)
    monkeypatch.setattr(type(problem), "make_model", lambda *_, **__: Fake(clock, 10.0, 2.0))
    times = BatchTimes(problem, lambda: Fake(clock, 30.0, 1.0), "cpu", Accuracy())
    measured = times.measured(["call", "step"], 60.0)
    timed = sorted({one.num_rows for one in measured})
    assert timed == [8, 16, 32, 37, 64, 128]  # at 8 and 16 PyTorch wins, and so with fewer
    assert rows_taken(measured, 37) == {"call": (32, MOST), "step": (32, MOST)}
    assert times.failures == {}


def test_steps_with_kernels_at_one_number_of_rows_are_timed_there_alone(
    tmp_path, clock, monkeypatch
):
    path = tmp_path / "gate.py"
    path.write_text(text_of(GATE))
    problem = load_problem(path)
    monkeypatch.setattr(type(problem), "make_model", lambda *_, **__: Fake(clock, 10.0, 2.0))
    times = BatchTimes(problem, lambda: Fake(clock, 30.0, 1.0), "cpu", Accuracy())
    measured = times.measured(["call", "step"], 60.0, fixed=["step"])
    assert {one.num_rows for one in measured if one.way == "call"} == {8, 16, 32, 37, 64, 128}
    assert {one.num_rows for one in measured if one.way == "step"} == {37}
    assert times.failures == {}


def test_a_call_of_pytorchs_that_takes_seconds_is_not_timed(tmp_path, clock, monkeypatch):
    """As the gradient of a product of a long row with a zero: others wait for the device."""
    path = tmp_path / "gate.py"
    path.write_text(text_of(GATE))
    problem = load_problem(path)
    monkeypatch.setattr(type(problem), "make_model", lambda *_, **__: Fake(clock, 10.0, 4e5))

    def seconds(call):
        begun_us = clock.now_us
        call()
        return (clock.now_us - begun_us) / 1e6

    monkeypatch.setattr(batch_times, "_seconds", seconds)
    times = BatchTimes(problem, lambda: Fake(clock, 30.0, 1.0), "cpu", Accuracy())
    measured = times.measured(["step"], 600.0)
    assert {one.num_rows for one in measured} == {2, 4, 8}
    assert times.failures == {"step": "PyTorch's own takes 15 s for 37 rows: too long to be timed"}


def test_without_gradients_no_step_is_timed(tmp_path):
    path = tmp_path / "gate.py"
    path.write_text(text_of("argmax"))
    problem = load_problem(path)
    times = BatchTimes(problem, lambda: problem.make_model(0), "cpu", Accuracy())
    measured = times.measured(["call", "step"], 0.5)
    assert {one.way for one in measured} == {"call"} and times.failures == {"step": ""}


# ---- what a file does ------------------------------------------------------------------------


@needs_gpp
def test_kernels_run_at_the_rows_that_the_file_says_and_the_reference_elsewhere(tmp_path):
    made = Taken(tmp_path, GATE)
    calls: list[str] = []

    def counted(name: str, function: Callable) -> Callable:
        def call(*args):
            calls.append(name)
            return function(*args)

        return call

    module = made.module
    module["fused_op"] = counted("kernels", module["fused_op"])
    module["Model"].forward = counted("reference", module["Model"].forward)
    reported = with_rows(made.family.model_new, {"call": (8, 64), "step": (16, 40)})
    exec(re.search(rf"^{ROWS_NAME} = .*\n_LEAST_ROWS = .*$", reported, re.MULTILINE)[0], module)
    expected = {1: "reference", 7: "reference", 8: "kernels", 64: "kernels", 65: "reference"}
    for rows, who in expected.items():
        inputs = made.inputs(3, rows)
        with torch.no_grad():
            mine = made.mine(*inputs)
            assert_as_exact([mine], [made.own(*inputs)], [made.wide(*in_float64(inputs))])
        assert calls == [who], rows
        calls.clear()
    # With gradients: data that want none, weights that do.
    for rows, who in {8: "reference", 16: "kernels", 40: "kernels", 41: "reference"}.items():
        inputs = made.inputs(3, rows)
        mine, own = gradients(made.mine, inputs), gradients(made.own, inputs)
        assert_as_exact(mine, own, gradients(made.wide, in_float64(inputs)))
        assert calls[0] == who, rows
        calls.clear()
        made.mine(*inputs)
        assert calls == [who], rows
        calls.clear()
    made.mine.requires_grad_(False)  # nothing wants gradients: no step, though they are enabled
    made.mine(*made.inputs(3, 8))
    assert calls == ["kernels"]


@needs_gpp
def test_the_line_is_read_at_each_call_and_compiles_with_the_module(tmp_path):
    made = Taken(tmp_path, GATE)
    text = made.family.model_new
    assert has_rows(text) and with_rows(text, None) == text
    assert ways_in(text) == ("call", "step")
    assert ways_in(without_steps(text)) == ("call",)
    assert ways_in("MATMUL_OPERATOR = 1\n" + without_steps(text)) == ("call",)  # a user's own
    reported = with_rows(text, {"call": (8, MOST), "step": NO_ROWS})
    assert f"\n{ROWS_NAME} = {{'call': (8, {MOST}), 'step': ({MOST}, 0)}}  # fewest" in reported
    assert with_rows(reported, None) == text
    made.module |= {ROWS_NAME: {"call": (8, MOST), "step": NO_ROWS}, "_LEAST_ROWS": 8}
    whole = torch.compile(made.mine, backend="eager", fullgraph=True, dynamic=True)
    for rows in (4, 6):  # with symbols for sizes
        inputs = made.inputs(3, rows)
        torch.testing.assert_close(whole(*inputs), made.own(*inputs))


@pytest.mark.parametrize(
    ("op", "ways"),
    [("gemm_scale_batchnorm", ("call", "step", "eval")), ("layer_norm", ("call", "step"))],
)
def test_operators_by_hand_leave_rows_to_pytorch_too(op, ways):
    family = load_family(op)
    assert has_rows(family.model_new) and ways_in(family.model_new) == ways
    rows = {"call": (8, 64), "step": (16, 64), "eval": (32, 64)}
    module = module_of(with_rows(family.model_new, {way: rows[way] for way in ways}))
    taken: list[int] = []

    def fused(x, *_):
        taken.append(len(x))
        raise NotImplementedError

    module |= {"fused_op": fused, "fused_eval": fused, "fused_device": "cpu"}
    model = module["ModelNew"](*((64, 2**15, (2**15,)) if op != "layer_norm" else (64,)))
    asked = [(model.train, torch.no_grad, "call"), (model.train, torch.enable_grad, "step")]
    asked += [(model.eval, torch.no_grad, "eval")] * ("eval" in ways)
    for set_mode, context, way in asked:
        set_mode()
        for n in (4, rows[way][0] - 1, rows[way][0], 64, 65):
            is_taken = rows[way][0] <= n <= 64 and (way != "eval" or n >= 64)
            with context(), pytest.raises(NotImplementedError) if is_taken else nullcontext():
                model(torch.randn(n, 64))
            assert taken == [n] * is_taken, (way, n)
            taken.clear()


@needs_gpp
def test_files_that_differ_in_rows_alone_share_what_is_compiled(tmp_path):
    made = Taken(tmp_path, GATE)
    candidate = made.family.render({"template": "nest"}, FACTS)

    def exported(model_new: str) -> str:
        return export_text(
            replace(made.family, model_new=model_new), candidate, reference=text_of(GATE),
            sizes={}, flags=Toolchain.find("cpu").cpp_flags, provenance=[],
        )  # fmt: skip

    one = exported(made.family.model_new)
    other = exported(with_rows(made.family.model_new, {"call": (8, MOST), "step": (8, MOST)}))
    assert one != other
    assert len({re.search(r'name="(tuner_\w+)"', text)[1] for text in (one, other)}) == 1


@needs_gpp
@pytest.mark.parametrize("name", ["means_beside_rows"])
def test_a_module_of_fixed_sizes_has_nothing_to_decide(name, tmp_path):
    text = Taken(tmp_path, name).family.model_new
    assert not has_rows(text) and ROWS_NAME not in text
    assert with_rows(text, {"call": (8, MOST), "step": (8, MOST)}) == text


# ---- what a session keeps --------------------------------------------------------------------


class FakeFile(SimpleNamespace):
    """What `Batching` reads of an exported file."""

    def write(self) -> None:
        self.written.append(self.key)


@pytest.fixture
def run(tmp_path) -> Run:
    return create_run(tmp_path / "runs", "gate", "cpu", "problem: {op: gate}\n", Environment())


def file_of(task, **more) -> FakeFile:
    config = SimpleNamespace(effort="quick", others={})
    text = more.pop("model_new", "")
    family = SimpleNamespace(model_new=text, text_of_steps=text)
    planned = SimpleNamespace(spec=task, config=config, sizes={"batch": 16}, family=family)
    path = Path("trial_0.unverified.py")
    made = {"key": "k", "ways": ("call", "step"), "written": [], "kernels": None, **more}
    file = FakeFile(planned=planned, unverified_path=path, **made)
    file.with_batches = lambda found: FakeFile(key="limited", with_batches=None, by_batch=found)
    return file


def test_what_was_measured_is_not_measured_again_by_a_later_session(run, tmp_path, monkeypatch):
    found = ByBatch(16, (at(16, 2.0),), {"call": (16, MOST), "step": NO_ROWS}, key="k")
    asked: list[str] = []
    monkeypatch.setattr(Batching, "_measured", lambda self, file: asked.append("") or found)
    stages: list[str] = []
    for _ in range(2):
        with run.locked() as writer:
            batching = Batching(run, writer, stages.append)
            file = file_of(task_of(tmp_path))
            assert (batching.known(file) is None) is (not asked)
            assert batching.kept(file).by_batch == found
            assert batching.kept(file).key == "limited"
    assert asked == [""] and run.batches() == [found]
    assert stages[1:] == [f"  {line}" for line in found.words]


def test_a_measurement_that_fails_keeps_kernels_from_the_tuned_size_on(run, tmp_path):
    with run.locked() as writer:
        task = replace(task_of(tmp_path), reference=str(tmp_path / "absent.py"))
        kept = Batching(run, writer, lambda _: None).kept(file_of(task))
    assert kept.by_batch.rows == {"call": (16, MOST), "step": (16, MOST)}
    assert "absent.py" in kept.by_batch.note


@pytest.mark.parametrize(
    ("speedup", "rows"), [(2.0, {"call": ANY_ROWS, "step": (16, 16)}), (0.5, None)]
)
def test_steps_of_one_number_of_rows_are_told_of_that_alone(speedup, rows, tmp_path):
    """Elsewhere the file's steps are PyTorch's."""
    ours = [at(n, 2.0) for n in (1, 8, 16, 32)] + [at(16, speedup, way="step")]
    file = file_of(task_of(tmp_path), model_new="_STEP_ROWS = 16  # None for any number\n")
    found = batching._decided(ByBatch(16, tuple(ours)), file, {})
    assert found.rows == (rows or {"call": ANY_ROWS, "step": NO_ROWS})


@pytest.mark.parametrize(("rows", "fixed"), [("16", ["step"]), ("None", None)])
def test_steps_of_one_number_of_rows_are_asked_about_there(
    rows, fixed, run, tmp_path, monkeypatch
):
    asks = {}

    def asked(worker, job, payload, **_):
        asks[job] = payload
        return Reply({"num_rows": 16, "measured": [], "failures": {}, "refuses_one": False}, [])

    monkeypatch.setattr(batching, "asked", asked)
    file = file_of(task_of(tmp_path), model_new=f"_STEP_ROWS = {rows}  # None for any number\n")
    with run.locked() as writer:
        Batching(run, writer, lambda _: None).kept(file)
    assert asks["by_batch"].get("fixed") == fixed


def test_records_of_runs_before_are_read():
    old = '{"trial": 3, "check": {"is_accepted": true, "accuracy": "float32"}}'
    assert from_json(Finalist, old).by_batch is None


# ---- what is shown ---------------------------------------------------------------------------


def test_a_picture_and_a_table_show_each_number_of_rows_and_what_runs_there(tmp_path):
    found = by_batch()
    calls, steps = rows_figure(found).data
    assert list(calls.x) == [1, 16, 64, 256, 1024, 4096] and calls.y[2] == 1.1
    hollow = [symbol.endswith("-open") for symbol in (*calls.marker.symbol, *steps.marker.symbol)]
    assert hollow == [True] * 2 + [False] * 4 + [True] * 4 + [False] * 2
    assert rows_caption(found).endswith(
        "Calls: the module's own forward below 64 rows; "
        "steps of training: the module's own forward below 1024 rows."
    )
    head, table = rows_table(found)
    assert head == ["rows", "calls", "calls run", "steps of training", "steps of training run"]
    assert [line[0] for line in table] == ["1", "16", "64", "256", "1,024", "4,096"]
    assert table[2] == [
        "64", "1.100x (0.990x to 1.210x)", "kernels", "0.440x (0.396x to 0.484x)", "PyTorch",
    ]  # fmt: skip
    trials = make_trials(30)
    run = make_run(tmp_path, trials, make_result(trials))
    shown = summary(run)
    line = "kernels run without gradients from 64 rows on, with gradients from 1024 rows on"
    exported = make_result(trials).exported
    assert exported is not None and any(line in remark for remark in remarks_on(exported, ""))
    noted = replace(exported.check, notes=(f"{FEW_ROWS_WORDS} (mul): below 64 in calls",))
    assert not any(line in remark for remark in remarks_on(replace(exported, check=noted), ""))
    ended = replace(found, rows={"call": (64, 2048)})
    result = replace(exported, check=noted, by_batch=ended)
    assert any("at 64 to 2048 rows" in remark for remark in remarks_on(result, ""))
    assert shown.rows == f"{line}; elsewhere the module's own forward runs"
    assert replace(found, rows={"call": (64, MOST), "step": (64, MOST)}).brief == (
        "kernels run without gradients and with gradients from 64 rows on"
    )
    page = page_of(run)
    assert shown.rows in page.text and f"{shown.rows};" not in page.text
    assert page.data["charts"]["rows"]["figure"]["data"]
    (table_shown,) = [t for name, t in page.tables.items() if "what the file runs there" in name]
    assert table_shown == [head, *table]


# ---- what is checked -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Iterator[Verifier]:
    with Verifier(task_of(tmp_path_factory.mktemp("both")), seed=21, timeout_s=60.0) as verifier:
        yield verifier


LEAVES_FEW = (CHEATS / "wrong_where_it_leaves_few_rows.py").read_text()


def names(check: Check) -> Sequence[str]:
    return [result.probe for result in check.probes]


def checked(verifier: Verifier, folder: Path, text: str) -> Check:
    path = folder / f"file_{hash(text)}.py"
    path.write_text(text)
    return verifier.check(Contender.of_file(path, is_deterministic=True))


def test_kernels_are_checked_at_the_rows_that_a_file_leaves_to_the_reference(
    verifier, tmp_path, monkeypatch
):
    check = checked(verifier, tmp_path, LEAVES_FEW)
    assert not check.is_accepted
    assert check.probes[-1].probe.endswith(", by kernels")
    assert check.reason.endswith("by the kernels, which the file takes at other rows alone")
    right = LEAVES_FEW.replace("y.half().to(y.dtype)", "y")
    honest = checked(verifier, tmp_path, right)
    assert honest.is_accepted, honest.reason
    own = [name for name in names(honest) if not name.endswith(", by kernels")]
    assert "2 rows" not in own and "batch 2" in own and "as given" in own
    again = [name for name in names(honest) if name.endswith(", by kernels")]
    assert names(honest) == [*own, *again]
    assert {*names(check)} <= {*own, *again}  # as far as it was asked
    assert "batch 2, by kernels" in again and "as given, by kernels" not in again
    # What is never taken has no kernels, and what is no pair of numbers says nothing. An eighth of
    # the probes tell, of which some are asked by kernels where there are any.
    monkeypatch.setenv("FEW_PROBES", "1")
    few = names(checked(verifier, tmp_path, right))
    asked = [name for name in few if not name.endswith(", by kernels")]
    assert 0 < len(asked) < len(few) and len(asked) < len(own)
    for said in ('{"call": (2**63 - 1, 0)}', '{"call": "few", "step": (1, 2.0)}', "[3]", "None"):
        reported = re.sub(r"_FUSED_ROWS = .*", f"_FUSED_ROWS = {said}", right, count=1)
        reported = reported.replace(
            '_FUSED_ROWS is None or len(x) >= _FUSED_ROWS["call"][0]', "False"
        )
        assert names(checked(verifier, tmp_path, reported)) == asked


SIGMOID_GATE = """import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16))
    def forward(self, x):
        return torch.sigmoid(x * self.weight)
def get_inputs():
    return [torch.randn(1024, 16)]
def get_init_inputs():
    return []
"""
SIGMOID_GATE_FROM_512 = """
_FUSED_ROWS = {"call": (512, 2**63 - 1), "step": (512, 2**63 - 1)}
class ModelNew(Model):
    def forward(self, x):
        if _FUSED_ROWS is None or (x.dim() and len(x) >= _FUSED_ROWS["call"][0]):
            if x.shape[1:] == (16,) and x.dtype == self.weight.dtype:
                return 0.5 + 0.5 * torch.tanh(0.5 * (self.weight * x))
        return super().forward(x)
"""


def test_what_few_rows_explain_is_all_that_a_check_notes_of_the_references_operations(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("FEW_PROBES", "own work")  # no other probe notes operations
    reference, file = tmp_path / "reference.py", tmp_path / "file.py"
    reference.write_text(SIGMOID_GATE)
    file.write_text(SIGMOID_GATE + SIGMOID_GATE_FROM_512)
    spec = JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")
    with Verifier(spec, seed=3) as verifier:
        check = verifier.check(Contender.of_file(file, is_deterministic=True))
    assert check.is_accepted, check.reason
    assert check.notes == (
        f"{FEW_ROWS_WORDS} (mul, sigmoid): below 512 in calls and for gradients",
    )


def test_a_file_that_leaves_the_timed_size_to_the_reference_is_no_difference(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(LEAVES_FEW.replace("(48,", "(65,"))
    race = Racer(task_of(tmp_path)).race(
        [Contender.of_file(path, is_deterministic=True)], num_processes=1, seconds=0.01
    )
    entry = finalist(0, Check(True, "float32", "", ()), race, 1)
    assert entry.falls_back and entry.verdict != "faster"


def test_a_file_that_ends_before_its_kernels_are_asked_is_rejected(verifier, tmp_path):
    ends = LEAVES_FEW.replace(
        "_FUSED_ROWS = {", "import os\n\nclass Rows(dict):\n    ...\n\n_FUSED_ROWS = {"
    ).replace("takes = _FUSED_ROWS is None", "takes = _FUSED_ROWS is None and os._exit(0)")
    check = checked(verifier, tmp_path, ends)
    assert not check.is_accepted and "exited with status 0" in check.reason
