"""Candidates to outcomes on the CPU, with real compilers and processes; proofs of finalists."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from tiny_operator import BAD, GOOD, NAME, config_text, write_family

from tuner.capture.modules.rows_text import ROWS_TEXT
from tuner.config.run_config import load_config
from tuner.environment import Environment
from tuner.errors import DeviceError, ProblemError, WorkerError
from tuner.evaluate import racing, runner as room, screening as screening_room
from tuner.evaluate.contender import Contender
from tuner.evaluate.evaluator import DeviceEvaluator
from tuner.evaluate.job_spec import JobSpec, explained
from tuner.evaluate.oracle import Oracle
from tuner.evaluate.race import Race, compared_with_compiled, finalist
from tuner.evaluate.race_sets import RaceSets, Ready
from tuner.evaluate.racing import Racer
from tuner.evaluate.runner import Runner, Terms
from tuner.evaluate.screening import Screening
from tuner.evaluate.timers import lead_of_call_us
from tuner.evaluate.verifier import Verifier
from tuner.evaluate.worker import JobFailed, Worker
from tuner.fleet.fleet import OPEN
from tuner.fleet.screener import Screener
from tuner.kernel.builder import Builder, Toolchain
from tuner.kernel.family import load_family
from tuner.machine import turns
from tuner.machine.ceilings import impossible_us
from tuner.machine.datasheets import known_device
from tuner.machine.turns import Turns
from tuner.problem.reference import load_problem
from tuner.records import recomputed
from tuner.run import create_run
from tuner.session.tuning import Planned, plan
from tuner.trial import (
    Build,
    Candidate,
    Check,
    Finalist,
    Interval,
    Measurement,
    OnData,
    Outcome,
    Params,
    Status,
    Trial,
)
from tuner.verification.ranking import ranked_trials, remarks_on
from tuner.verification.referee import refereed

SEED = 7
MODULE = "import torch, torch.nn as nn\n\n\nclass ModelNew(nn.Module):\n"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    folder = tmp_path_factory.mktemp("evaluate")
    config = folder / "config.yaml"
    space = {"mode": [*GOOD, *BAD], "salt": [0, 1, 2], "step": [1, 2, 4]}
    config.write_text(config_text(write_family(folder / "families"), space=space))
    return plan(load_config(config))


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    cache = tmp_path_factory.mktemp("cache") / "builds"
    with Builder(Toolchain.find("cpu"), cache, num_workers=2) as builder:
        yield builder


@dataclass
class Bench:
    """One evaluator, and what it kept."""

    planned: Planned
    builder: Builder
    kept: list[tuple[Candidate, Build]] = field(default_factory=list)
    number: int = 0
    reference: str = ""  # in place of the problem's own
    others: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        task = self.planned.spec
        self.runner = Runner(
            replace(task, reference=self.reference or task.reference),
            Terms(0.02, max_noise=0.05, stop_slow=True, seed=SEED, others=self.others),
            env=self.builder.environment,
            paused=self.builder.paused,
        )
        self.evaluator = DeviceEvaluator(
            self.planned.family,
            self.runner,
            facts=self.planned.facts,
            builder=self.builder,
            keep=lambda candidate, build: self.kept.append((candidate, build)),
        )

    def outcome(self, best_us: float | None = None, **params: object) -> Outcome:
        full = {"template": "sweep", "mode": "ok", "salt": 0, "step": 1, **params}
        self.number += 1
        # A hang is found out soon; who answers has minutes, however busy the machine is.
        room.SCREEN_TIMEOUT_S = 4.0 if full["mode"] == "hang" else 600.0
        return self.evaluator.finish(self.evaluator.submit(full), self.number - 1, best_us)


@pytest.fixture(scope="module")
def bench(planned: Planned, builder: Builder) -> Iterator[Bench]:
    before, room.SCREEN_TIMEOUT_S = room.SCREEN_TIMEOUT_S, 600.0
    bench = Bench(planned, builder)
    try:
        bench.runner.start()
        yield bench
    finally:
        bench.runner.close()
        room.SCREEN_TIMEOUT_S = before


def test_what_is_near_the_best_is_timed_on_other_data_as_well(planned, builder):
    bench = Bench(planned, builder, others={"ordinary": "", "sparse": ""})
    try:
        started = bench.runner.start()
        assert list(started.others_us) == ["ordinary", "sparse"] and min(
            started.others_us.values()
        )
        near = bench.outcome(None, mode="leaks").measurement
        assert list(near.others_us) == ["ordinary", "sparse"] and min(near.others_us.values()) > 0
        assert near.others_anchor_us == bench.runner.baseline.others_us
        far = bench.outcome(1e-3, mode="slow").measurement
        assert (far.others_us, far.others_anchor_us, far.slowdown) == ({}, {}, 1.0)
    finally:
        bench.runner.close()


def test_an_agent_times_the_tensors_that_were_sent_with_the_task(planned, tmp_path):
    """The path in the terms is one of the host that asks."""
    reference = Path(planned.spec.reference)
    given = load_problem(reference, planned.spec.sizes).make_inputs(SEED)
    torch.save([torch.ones_like(x) for x in given], tmp_path / "sent.pt")
    terms = Terms(0.02, 0.05, True, SEED, {"file:mine.pt": "/not/here/mine.pt", "sparse": ""})
    payload = {"task": planned.spec.payload(), "terms": asdict(terms), "env": {}}
    files = {reference.name: reference, "mine.pt": tmp_path / "sent.pt"}
    agent = Screener("cpu")
    try:
        times_us = agent.run(OPEN, payload, files)["baseline"]["others_us"]
    finally:
        agent.close()
    assert list(times_us) == ["file:mine.pt", "sparse"] and min(times_us.values()) > 0


def test_without_room_for_other_data_the_given_ones_are_timed_alone(planned, monkeypatch):
    spec = planned.spec
    oracle = Oracle(spec.reference, spec.sizes, spec.device, spec.accuracy, spec.mode)
    screening = Screening(oracle, SEED, spec.model_new)
    monkeypatch.setattr(screening_room, "free_bytes", lambda device: 0)
    answer, _ = screening.time_baseline(0.01, 0.05, others={"ordinary": "", "sparse": ""})
    assert answer["measurement"]["latency_us"] > 0
    assert answer["measurement"]["others_us"] == {}


class Telling:
    """What a run's observer hears."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def on_stage(self, words: str) -> None:
        self.stages.append(words)


def test_the_best_of_several_devices_are_timed_again_on_one(planned, builder, tmp_path):
    """Where the second device only seemed to be faster, the order of the finalists changes."""
    steps, names = (1, 2, 4), ("cpu:0", "cpu:1", "cpu:0")
    trials = []
    for number, (step, name) in enumerate(zip(steps, names, strict=True)):
        us = 10.0 + 0.1 * number
        measured = Measurement(us, 0.001, (us,), is_cold=True, anchor_us=90.0, to_lead=1.1)
        params = {"template": "sweep", "mode": "ok", "salt": 0, "step": step}
        outcome = Outcome(Status.CORRECT, measurement=measured, device=name)
        trials.append(Trial(number, "sweep", params, "", outcome))
    run, reported = create_run(tmp_path, "op", "cpu", "", Environment()), Telling()
    terms = Terms(screen_s=0.02, max_noise=0.05, stop_slow=True, seed=SEED)

    def again(num_finalists: int, among: Sequence[Trial]) -> list[Trial]:
        with run.locked() as writer:
            return refereed(
                planned, terms, builder, among, num_finalists=num_finalists,
                writer=writer, observer=reported,
            )  # fmt: skip

    assert again(3, trials) == trials, "all of them are raced anyway"
    one_device = [t for t in trials if t.outcome.device == "cpu:0"]
    assert again(1, one_device) == one_device and not reported.stages
    found = again(1, trials)
    assert reported.stages == ["timing the best 3 of all devices again on cpu"]
    assert [entry.trial for entry in run.refereed()] == [0, 1, 2]
    for trial, entry in zip(found, run.refereed(), strict=True):
        raw = entry.measurement
        assert raw.samples_us and raw.to_lead is None, "it is the leading device"
        assert trial.outcome.latency_us == raw.latency_us
    assert again(1, trials) == found and len(reported.stages) == 1, "a later session takes these"


# ---- screening ------------------------------------------------------------------------------


OTHER = """
import os, sys, time
from pathlib import Path
from tuner.machine.turns import Turns

turns, asked = Turns(Path(sys.argv[1])), Path(sys.argv[2])
with turns.memory(0.5):
    print("has it", flush=True)
    while not turns.is_memory_wanted:
        time.sleep(0.01)
    time.sleep(0.2)
    print(Path(f"/proc/{asked.read_text()}").exists())
"""


LACKS_ONCE = """
import os, pathlib

forward_with_memory = Model.forward

def take():
    asked = pathlib.Path({asked!r})
    if pathlib.Path({lacks!r}).exists() and not asked.exists():
        asked.write_text(str(os.getpid()))
        raise RuntimeError("CUDA out of memory")

def forward(self, *inputs):
    take()
    return forward_with_memory(self, *inputs)

take()
Model.forward = forward
"""


@pytest.mark.parametrize("when", ["it starts", "a candidate is checked"])
def test_where_memory_runs_out_it_starts_again_when_others_have_left(
    planned, builder, tmp_path, when
):
    """And while it waits for these it has none of what they may lack: its first worker ended."""
    reference, asked, lacks, turns = map(tmp_path.joinpath, ("m.py", "asked", "lacks", "turns"))
    text = LACKS_ONCE.format(asked=str(asked), lacks=str(lacks))
    reference.write_text(Path(planned.spec.reference).read_text() + text)
    bench = Bench(planned, builder, reference=str(reference))
    bench.runner._turns = Turns(turns)  # a CPU's have no folder
    bench.runner._is_cpu = False  # nor does it lack memory
    command = [sys.executable, "-c", OTHER, str(turns), str(asked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "has it\n"
        try:
            if when == "it starts":
                lacks.touch()
            assert bench.runner.start().latency_us > 0
            lacks.touch()
            assert bench.outcome(mode="ok").status is Status.CORRECT and asked.exists()
        finally:
            bench.runner.close()
            other.kill()
        assert other.stdout.read() == "False\n"


TIMES = """
import sys, time
from pathlib import Path
from tuner.machine.turns import Turns

with Turns(Path(sys.argv[1])).alone():
    print("times", flush=True)
    time.sleep(60)
"""


def test_what_probes_expect_is_computed_while_no_other_tuner_times(planned, builder, tmp_path):
    turns = tmp_path / "turns"
    bench = Bench(planned, builder)
    bench.runner._turns = Turns(turns)
    command = [sys.executable, "-c", TIMES, str(turns)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        assert other.stdout.readline() == "times\n"
        started = pool.submit(bench.runner.start)
        time.sleep(0.5)
        assert bench.runner._worker.generation == 0
        other.kill()
        assert started.result(60).latency_us > 0
    bench.runner.close()


def test_it_times_the_baseline_when_it_starts(bench):
    baseline = bench.runner.baseline
    assert baseline is not None and baseline.latency_us > 0 and baseline.samples_us


@pytest.mark.parametrize("mode", [m for m in GOOD if m != "slow"])
def test_a_right_candidate_is_correct_and_timed(bench, mode):
    outcome = bench.outcome(mode=mode)
    assert outcome.status is Status.CORRECT and not outcome.reason
    assert outcome.check is not None and outcome.check.is_accepted
    assert not outcome.check.is_thorough and len(outcome.check.probes) >= 3
    assert outcome.measurement is not None and outcome.measurement.latency_us > 0
    assert outcome.measurement.anchor_us == bench.runner.baseline.latency_us
    assert outcome.build is not None and outcome.build.artefact is not None
    assert {"render", "build", "wait", "check", "measure", "device"} <= outcome.seconds.keys()
    assert outcome.seconds["device"] >= outcome.seconds["check"] + outcome.seconds["measure"]


@pytest.mark.parametrize("mode", BAD)
def test_a_bad_candidate_is_an_outcome_with_its_reason_and_the_next_one_is_fine(bench, mode):
    status, reason = BAD[mode]
    outcome = bench.outcome(mode=mode)
    assert outcome.status == status and reason in outcome.reason
    assert outcome.measurement is None and outcome.latency_us is None
    assert outcome.build is not None and Path(outcome.build.log).is_file()
    # A step that this module uses nowhere else: it really runs.
    after = bench.outcome(mode="ok", step=100 + list(BAD).index(mode))
    assert after.status is Status.CORRECT and after.same_as is None


def test_a_clearly_slower_candidate_is_stopped_early_and_says_so(bench):
    outcome = bench.outcome(mode="slow", best_us=1.0)
    assert outcome.status is Status.CORRECT
    assert outcome.measurement is not None and outcome.measurement.is_censored


def test_where_slow_ones_are_not_stopped_every_time_is_one(bench, monkeypatch):
    monkeypatch.setattr(bench.runner, "_terms", replace(bench.runner._terms, stop_slow=False))
    outcome = bench.outcome(mode="slow", best_us=1.0, step=7)
    assert outcome.status is Status.CORRECT
    assert outcome.measurement is not None and not outcome.measurement.is_censored


def test_the_same_machine_code_is_neither_checked_nor_timed_again(bench):
    first = bench.outcome(step=8, salt=1)
    number = bench.number - 1
    again = bench.outcome(step=8, salt=2)
    assert first.same_as is None and again.same_as == number
    assert again.measurement == first.measurement and again.check == first.check
    assert again.build is not None and again.build.key != first.build.key
    assert again.build.binary_key == first.build.binary_key
    assert "device" not in again.seconds and "device" in first.seconds


def test_wrong_machine_code_is_wrong_again(bench):
    first = bench.outcome(mode="wrong", step=16, salt=1)
    number = bench.number - 1
    again = bench.outcome(mode="wrong", step=16, salt=2)
    assert first.status is again.status is Status.CORRECTNESS
    assert again.same_as == number and again.reason == first.reason


def test_every_candidate_is_kept_with_its_build(bench):
    num_kept = len(bench.kept)
    bench.outcome(mode="ok", salt=2)
    bench.outcome(mode="broken", salt=2)
    new = bench.kept[num_kept:]
    assert [candidate.params["mode"] for candidate, _ in new] == ["ok", "broken"]
    assert all("// salt 2" in candidate.source for candidate, _ in new)
    assert [build.status for _, build in new] == [Status.CORRECT, Status.COMPILE]


def test_submitting_does_not_wait_and_counts_as_building(bench):
    salts = range(900, 904)
    params: list[Params] = [
        {"template": "sweep", "mode": "ok", "salt": s, "step": 3} for s in salts
    ]
    flying = [bench.evaluator.submit(one) for one in params]
    assert bench.evaluator.num_building >= 2
    outcomes = [bench.evaluator.finish(f, 500 + i, None) for i, f in enumerate(flying)]
    assert [o.status for o in outcomes] == [Status.CORRECT] * 4
    assert [o.same_as for o in outcomes] == [None, 500, 500, 500]
    assert bench.evaluator.num_building == 0


def test_builders_stand_still_while_a_candidate_is_on_the_device(bench, monkeypatch):
    worker, builder = bench.runner._worker, bench.builder
    seen: list[tuple[str, bool]] = []
    call = worker.call

    def spy(job, *args, **kwargs):
        seen.append((job, builder._num_pauses > 0))
        return call(job, *args, **kwargs)

    monkeypatch.setattr(worker, "call", spy)
    monkeypatch.setattr(bench.runner, "_num_since_anchor", room.ANCHOR_EVERY)
    before = bench.runner.baseline
    assert bench.outcome(step=32).status is Status.CORRECT
    called = [("time_baseline", True), ("screen", True), ("time_candidate", True)]
    assert seen[:3] == called
    assert all(is_paused for _, is_paused in seen)  # also where it was surprising, and timed again
    assert bench.runner.baseline is not before  # the anchor was timed anew
    assert builder._num_pauses == 0


@pytest.mark.parametrize(
    ("times_us", "taken_us"),
    [
        ([101.0], 101.0),
        ([190.0, 102.0], 102.0),  # another tuner was in the way
        ([120.0, 121.0], 121.0),  # the device's clock is another one
        ([190.0, 150.0, 103.0], 103.0),
        ([190.0, 150.0, 170.0, 130.0], 130.0),
    ],
)
def test_a_gpus_baseline_that_is_another_one_is_timed_again(
    bench, monkeypatch, times_us, taken_us
):
    runner, left = bench.runner, list(times_us)
    known = replace(runner.baseline, latency_us=100.0)
    monkeypatch.setattr(room, "MOMENT_S", 0.0)
    monkeypatch.setattr(runner, "_is_cpu", False)
    monkeypatch.setattr(runner, "baseline", known)
    monkeypatch.setattr(
        runner, "_timed_baseline", lambda: replace(known, latency_us=left.pop(0))
    )  # a clock
    assert runner.time_baseline().latency_us == taken_us and not left
    monkeypatch.setattr(runner, "_is_cpu", True)
    left += [300.0, 100.0]
    assert runner.time_baseline().latency_us == 300.0 and left == [100.0]


def test_a_baseline_that_fails_is_the_users_error(planned, builder, tmp_path):
    text = (
        Path(planned.reference)
        .read_text()
        .replace("for _ in", "raise OSError('no')\n        for _ in")
    )
    (tmp_path / "reference.py").write_text(text)
    broken = replace(planned, reference=tmp_path / "reference.py")
    runner = Bench(broken, builder).runner
    try:
        with pytest.raises(ProblemError, match=r"reference.py:12: Model.forward failed"):
            runner.start()
    finally:
        runner.close()


def test_errors_of_ours_keep_their_kind_and_others_their_traceback():
    ours = explained(JobFailed("prepare", "tuner.errors.ProblemError", "bad", "trace", False))
    assert type(ours) is ProblemError and str(ours) == "bad"
    ours = explained(JobFailed("prepare", "tuner.errors.DeviceError", "gone", "trace", False))
    assert type(ours) is DeviceError
    other = explained(JobFailed("prepare", "builtins.KeyError", "'x'", "the trace", False))
    assert type(other) is WorkerError and "the trace" in str(other)


# ---- verified ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verifier(planned: Planned) -> Iterator[Verifier]:
    with Verifier(planned.spec, seed=SEED, timeout_s=60.0) as verifier:
        yield verifier


def contender(planned: Planned, builder: Builder, **params: object) -> Contender:
    full = {"template": "sweep", "mode": "ok", "salt": 0, "step": 1, **params}
    candidate = planned.family.render(full, planned.facts)
    build = builder.submit(candidate).result()
    return Contender.of_candidate(candidate, build, planned.family.model_new, builder.environment)


def test_a_right_candidate_passes_every_probe_then_races(
    verifier, planned, builder, tmp_path, monkeypatch
):
    monkeypatch.setenv("FEW_PROBES", "1")
    subject = contender(planned, builder)
    reported = []
    check = verifier.check(subject, reported.append)
    assert check.is_accepted and check.is_thorough, check.reason
    seen = sorted((answered.result for answered in reported), key=lambda result: result.probe)
    assert sorted(check.probes, key=lambda result: result.probe) == seen and len(seen) > 20
    where = tmp_path / "where"
    with_variables = file_of(
        tmp_path,
        f"import os\nopen({str(where)!r}, 'a').write(os.environ['WHERE_BUILT'] + '\\n')\n"
        + MODULE
        + DOUBLED,
    )
    with_variables = replace(with_variables, env={"WHERE_BUILT": "there"})
    race = Racer(planned.spec).race([subject, with_variables], num_processes=2, seconds=0.02)
    assert where.read_text() == "there\nthere\n"  # each contender has its own
    assert [len(lane) for lane in race] == [2, 2, 2]
    rounds = [[len(process) for process in lane] for lane in race]
    assert rounds[0] == rounds[1] == rounds[2] and min(rounds[0]) >= racing.MIN_ROUNDS
    assert all(us > 0 for lane in race for process in lane for us in process)
    entry = finalist(3, check, race, 1)
    assert entry.num_throttled == 0
    assert [len(process) for process in entry.samples_us] == rounds[1]
    assert all(len(burst) >= racing.MIN_BURST for p in entry.samples_us for burst in p)
    assert statistics.median(entry.samples_us[0][0]) == race[1][0][0]
    assert [len(process) for process in entry.baseline_samples_us] == rounds[0]
    assert entry.trial == 3 and entry.interval is not None and entry.interval.num_processes == 2
    assert entry.interval.low <= entry.interval.speedup <= entry.interval.high
    assert entry.latency_us and entry.baseline_us and entry.noise is not None


def test_a_check_gives_way_to_a_tuner_that_waits_for_memory(
    verifier, planned, builder, tmp_path, monkeypatch
):
    """Else that one, and all who come behind it, would wait for the whole check.

    A question that was made ahead is withdrawn: the judge would hold its tensors until it ends.
    """
    monkeypatch.setenv("FEW_PROBES", "1")
    asked, call = Counter(), Worker.call

    def counted(worker, job, *args, **named):
        asked[job] += 1
        return call(worker, job, *args, **named)

    monkeypatch.setattr(Worker, "call", counted)
    monkeypatch.setattr(turns, "HELD_S", 0.0)
    monkeypatch.setattr(verifier, "_turns", Turns(tmp_path))
    reported, had_after = [], []
    with ThreadPoolExecutor(1) as pool:

        def wants_all() -> None:
            with Turns(tmp_path).memory(turns.ALL):
                had_after.append(len(reported))

        def on_probe(answered) -> None:
            if not reported:
                pool.submit(wants_all)
                while not verifier._turns.is_memory_wanted:
                    time.sleep(0.01)
            reported.append(answered.result.probe)

        check = verifier.check(contender(planned, builder), on_probe)
    assert check.is_accepted, check.reason
    assert len(reported) == len({*reported}) == len(check.probes)
    assert had_after[0] < len(reported) // 2
    assert asked["withdraw"] and asked["ask"] == asked["judge"] + asked["withdraw"]


SLOW = """
class ModelNew(ModelNew):
    def forward(self, *args):
        time.sleep(0.02)
        return super().forward(*args)
"""


def test_who_is_clearly_behind_in_the_first_sets_takes_no_part_in_further_ones(
    planned, builder, tmp_path, monkeypatch
):
    monkeypatch.setattr(racing, "MIN_ROUNDS", 2)
    monkeypatch.setattr(racing, "MIN_SETS", 1)
    slow = file_of(tmp_path, "import time\n" + MODULE + DOUBLED + SLOW)
    others = [slow, contender(planned, builder)]
    # Which set judges is drawn; nobody leaves unjudged.
    monkeypatch.setattr(racing.secrets, "randbelow", lambda _: 0)
    race = Racer(planned.spec).race(others, num_processes=2, seconds=0.01)
    assert [len(lane) for lane in race] == [2, 1, 2]
    behind = finalist(1, Check(True, "float32"), race, 1)
    assert behind.interval is not None and behind.interval.num_processes == 1
    assert len(behind.baseline_samples_us) == len(behind.samples_us) == 1
    assert recomputed(behind)[1] == ""
    monkeypatch.setattr(racing.secrets, "randbelow", lambda _: 1)
    race = Racer(planned.spec).race(others, num_processes=2, seconds=0.01)
    assert [len(lane) for lane in race] == [2, 2, 2]


def test_further_sets_race_while_those_before_leave_open_who_is_faster(
    planned, builder, monkeypatch
):
    monkeypatch.setattr(racing.Race, "leaves_open", lambda *_: True)
    shares: list[float] = []
    asked = {"num_processes": 1, "seconds": 0.01, "on_round": shares.append}
    asked["goes_on"] = lambda num_raced: num_raced < 3
    race = Racer(planned.spec).race([contender(planned, builder)], **asked)
    assert [len(lane) for lane in race] == [3, 3]
    assert shares.count(1.0) == 1 and shares[-1] == 1.0  # it is over only once
    monkeypatch.setattr(racing.Race, "leaves_open", lambda *_: False)
    race = Racer(planned.spec).race([contender(planned, builder)], **asked)
    assert [len(lane) for lane in race] == [1, 1]


@pytest.mark.parametrize(("preempted", "repeated"), [([0, 90, 90, 0], 2), ([90], 4)])
def test_a_turn_in_which_other_programs_ran_is_repeated_but_not_for_ever(
    planned, monkeypatch, preempted, repeated
):
    """By what the processes tell of themselves; they are not asked here."""
    monkeypatch.setattr(racing, "MIN_ROUNDS", 4)
    monkeypatch.setattr(racing, "MOST_PREEMPTED_PER_S", 40.0)
    monkeypatch.setattr(racing, "DISTURBED_WAIT_S", 0.0)
    racer, reported = Racer(planned.spec), [0.0] * 2 + preempted  # warm-ups first

    def burst(_, num_samples, *, is_slow):
        racer._preempted_per_s = reported.pop(0) if len(reported) > 1 else reported[0]
        return [10.0] * num_samples

    monkeypatch.setattr(racer, "_burst", burst)
    (rounds,) = racer._rounds([object()], seconds=0.0)
    assert len(rounds) == racing.MIN_ROUNDS and racer._num_disturbed == repeated


def test_torch_compile_is_compared_with_the_baseline_and_with_the_exported_file():
    processes = [[[30.0, 31.0, 29.0]] * 8, [[30.0] * 3] * 8], [[[10.0] * 3] * 8] * 2
    race = Race([*processes, [[[20.0] * 3] * 8] * 2], compiled=2)
    found = compared_with_compiled("default", race, 1)
    assert (found.mode, found.latency_us, found.error) == ("default", 20.0, "")
    assert found.interval is not None and found.interval.speedup == pytest.approx(1.5)
    assert found.ours is not None and found.ours.speedup == pytest.approx(2.0)


def test_the_compiled_reference_races_like_any_other(tmp_path):
    # Few operations, and weights to be given: the tiny operator's 200 compile for 10 s.
    reference = tmp_path / "reference.py"
    reference.write_text(NORMALISED.format(name="Model", first=""))
    task = JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")
    race = Racer(task).race(
        [Contender.of_compiled(task, "default")], num_processes=1, seconds=0.01
    )
    rounds = [len(process) for lane in race for process in lane]
    assert rounds[0] == rounds[1] >= racing.MIN_ROUNDS
    assert all(us > 0 for us in race[1][0])


def test_a_forward_that_takes_a_number_races_with_that_number(tmp_path):
    """Between two tensors, so that their order matters."""
    text = """
import torch

class {name}(torch.nn.Module):
    def forward(self, x, by, y):
        assert isinstance(by, float) and x.shape != y.shape
        return x * by + y

def get_inputs():
    return [torch.rand(64, 8), 0.5, torch.rand(8)]

def get_init_inputs():
    return []
"""
    (tmp_path / "reference.py").write_text(text.format(name="Model"))
    (tmp_path / "file.py").write_text(text.format(name="ModelNew"))
    task = JobSpec(str(tmp_path / "reference.py"), {}, "cpu", "float32", "", "[]", "")
    file = Contender.of_file(tmp_path / "file.py", is_deterministic=True)
    race = Racer(task).race([file], num_processes=1, seconds=0.01)
    assert [len(lane) for lane in race] == [1, 1]
    assert all(us > 0 for us in race[1][0])


def test_processes_that_compiled_it_already_are_taken_into_the_race(tmp_path):
    reference = tmp_path / "reference.py"
    reference.write_text(NORMALISED.format(name="Model", first=""))
    task = JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")
    contender = Contender.of_compiled(task, "default")
    with ExitStack() as stack:
        kept = RaceSets(task).kept_ready(stack, contender, 2)
        kept[0].kill()  # one that ended meanwhile is replaced
        ready, pid = Ready({contender.name: kept}), kept[1].pid
        sets = RaceSets(task, ready)
        with closing(sets.each([contender], 2, [1])) as each:
            pids = [racers[1].pid for _, racers in islice(each, 2) if sets.give(racers)]
        assert pids[0] == pid != pids[1] is not None
        assert not ready.loaded[contender.name]
        race = Racer(task, ready).race([contender], num_processes=1, seconds=0.01)
    assert race.answer is not None and race.answer.is_accepted, race.answer


def test_sets_that_were_opened_before_a_race_are_taken_into_it(tmp_path):
    reference = tmp_path / "reference.py"
    reference.write_text(NORMALISED.format(name="Model", first=""))
    task = JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")
    file = file_of(tmp_path, NORMALISED.format(name="ModelNew", first=""))
    with closing(Ready()) as ready:
        ready.open_sets(task, num_files=1, num_sets=2)
        ready.open_sets(task, num_files=1, num_sets=2)  # once
        with ExitStack() as stack:
            baseline, opened = ready.opened(stack, [file])
            assert opened.name == file.name and baseline.is_alive and opened.is_alive
        assert not (baseline.is_alive or opened.is_alive)
        pids = [[racer.pid for racer in future.result()[1]] for future in ready._opening]
        with closing(RaceSets(task, ready).each([file], 2, [1])) as each:
            raced = [[racer.pid for racer in racers] for _, racers in islice(each, 2)]
        assert len(pids) == 1 and raced[0] == pids[0] != raced[1]
    ready.open_sets(task, num_files=1, num_sets=1)  # after its end, and before the first time
    closed = Ready()
    closed.close()
    closed.open_sets(task, num_files=1, num_sets=1)
    assert not ready._opening and not closed._opening


def test_a_compiler_that_fails_is_named_and_no_contender_is_blamed(planned):
    rival = Contender.of_compiled(planned.spec, "no such mode")
    with pytest.raises(WorkerError) as error:
        Racer(planned.spec).race([rival], num_processes=1, seconds=0.01)
    assert "no such mode" in str(error.value)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("wrong", "as given: output of call 1"), ("segfault", "as given: killed by signal 11")],
)
def test_a_bad_candidate_is_rejected_by_the_first_probe(verifier, planned, builder, mode, reason):
    check = verifier.check(contender(planned, builder, mode=mode))
    assert not check.is_accepted and reason in check.reason
    assert [probe.is_accepted for probe in check.probes] == [False]
    entry = finalist(1, check, None, 0)
    assert entry.interval is None and reason in entry.error


def test_a_file_is_checked_like_a_candidate(verifier, tmp_path, monkeypatch):
    monkeypatch.setenv("FEW_PROBES", "called twice")
    good = tmp_path / "good.py"
    good.write_text(MODULE + "    def forward(self, x):\n        return x + x\n")
    check = verifier.check(Contender.of_file(good, is_deterministic=True))
    assert check.is_accepted, check.reason
    names = [probe.probe for probe in check.probes]
    assert "called twice" in names and "as given" in names


def test_a_file_that_is_right_only_at_first_is_rejected(verifier, tmp_path):
    bad = tmp_path / "bad.py"
    body = "        self.y = getattr(self, 'y', x + x)\n        return self.y\n"
    bad.write_text(MODULE + "    def forward(self, x):\n" + body)
    check = verifier.check(Contender.of_file(bad, is_deterministic=True))
    assert not check.is_accepted and len(check.probes) > 1
    assert math.isfinite(check.probes[0].rms_rel) and check.probes[0].is_accepted


def test_a_file_that_cannot_be_imported_is_rejected_with_its_error(verifier, tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import there_is_no_such_module\n")
    check = verifier.check(Contender.of_file(bad, is_deterministic=True))
    assert check == Check(
        False,
        "float32",
        "importing it: ModuleNotFoundError: No module named 'there_is_no_such_module'",
        (),
        is_thorough=True,
    )


def test_a_contender_that_fails_in_the_race_is_named(planned, tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("raise RuntimeError('not today')\n")
    with pytest.raises(WorkerError, match=r"bad.py: importing it: RuntimeError: not today"):
        Racer(planned.spec).race([Contender.of_file(bad, True)], num_processes=1, seconds=0.01)


# ---- times and outputs that cannot be true --------------------------------------------------

DOUBLED = "    def forward(self, x):\n        return x + x\n"


def file_of(folder: Path, text: str) -> Contender:
    path = folder / "module.py"
    path.write_text(text)
    return Contender.of_file(path, is_deterministic=True)


NORMALISED = """
import time
import torch, torch.nn as nn


class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(32)

    def forward(self, x):
        {first}
        return self.bn(x)


def get_inputs():
    return [torch.rand(64, 32)]


def get_init_inputs():
    return []
"""
ORDINARY = {"ordinary": ""}  # other data to race on: there is no file of tensors
SLOW_ELSEWHERE = {
    "weights": "time.sleep(0 if bool((self.bn.weight == 1).all()) else 0.02)",
    "inputs": "time.sleep(0.02 if bool((x < 0).any()) else 0)",
}


@pytest.mark.parametrize("what", SLOW_ELSEWHERE)
def test_a_time_that_depends_on_the_values_is_reported(tmp_path, what):
    reference = tmp_path / "reference.py"
    reference.write_text(NORMALISED.format(name="Model", first=""))
    subject = file_of(tmp_path, NORMALISED.format(name="ModelNew", first=SLOW_ELSEWHERE[what]))
    task = JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")
    race = Racer(task).race([subject], num_processes=1, seconds=0.02, others=ORDINARY)
    slept_us = 20_000.0
    assert min(race[1][0]) < slept_us <= min(race.others["ordinary"][1][0])
    check = Check(True, "float32", "", (), is_thorough=True)
    entry = finalist(3, check, race, 1)
    (data,) = entry.others
    assert (data.name, data.interval.num_processes) == ("ordinary", 1)
    assert data.words == "weights as after training and normal inputs"
    assert finalist(3, check, Race(race.bursts), 1).others == ()


def test_each_of_several_data_has_its_own_weights_and_inputs(tmp_path):
    """The baseline, in one process, is given weights as after training before the next data."""
    reference = tmp_path / "reference.py"
    reference.write_text(NORMALISED.format(name="Model", first=""))
    slow = "time.sleep(0.02 * (not bool((self.bn.weight == 1).all())) + 0.04 * bool(x.max() > 50))"
    subject = file_of(tmp_path, NORMALISED.format(name="ModelNew", first=slow))
    task = JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")
    torch.save([torch.full((64, 32), 70.0).normal_(70.0)], tmp_path / "mine.pt")
    names = ("ordinary", "sparse", "offset", "file:mine.pt")
    others = {name: "" for name in names} | {"file:mine.pt": str(tmp_path / "mine.pt")}
    race = Racer(task).race(
        [subject], num_processes=1, seconds=0.02, others=others, has_steps=True
    )
    assert tuple(race.others) == names
    least_ms = {name: min(other[1][0]) / 1000 for name, other in race.others.items()}
    assert min(race[1][0]) / 1000 < 20 <= least_ms["ordinary"]
    assert least_ms["sparse"] < 20 and min(least_ms["offset"], least_ms["file:mine.pt"]) >= 40
    assert race.others["file:mine.pt"].on == "the tensors of mine.pt"
    assert race.steps is not None and min(race.steps[1][0]) >= 20_000  # on ordinary data
    entry = finalist(3, Check(True, "float32", "", (), is_thorough=True), race, 1)
    assert [data.name for data in entry.others] == list(names)


def test_a_reference_that_refuses_other_inputs_is_raced_on_its_own(tmp_path):
    refuses = "assert not bool((x < 0).any())"
    reference = tmp_path / "reference.py"
    reference.write_text(NORMALISED.format(name="Model", first=refuses))
    subject = file_of(tmp_path, NORMALISED.format(name="ModelNew", first=refuses))
    task = JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")
    race = Racer(task).race([subject], num_processes=1, seconds=0.02, others=ORDINARY)
    assert min(race.others["ordinary"][1][0]) > 0
    assert race.others["ordinary"].on == "weights as after training"


def test_a_reference_that_has_no_numbers_for_other_inputs_is_raced_on_its_own(tmp_path):
    reference = tmp_path / "reference.py"
    reference.write_text(NORMALISED.format(name="Model", first="x = x.sqrt()"))
    subject = file_of(tmp_path, NORMALISED.format(name="ModelNew", first="x = x.sqrt()"))
    task = JobSpec(str(reference), {}, "cpu", "float32", "", "[]", "")
    race = Racer(task).race([subject], num_processes=1, seconds=0.02, others=ORDINARY)
    assert race.others["ordinary"].on == "weights as after training"


def interval(low, high):
    return Interval((low * high) ** 0.5, low, high, 0.95, 5)


def on_ordinary(found):
    words = "weights as after training and normal inputs"
    return () if found is None else (OnData("ordinary", words, found),)


@pytest.mark.parametrize(
    ("here", "elsewhere", "depends"),
    [
        (interval(4.9, 5.1), interval(2.4, 2.6), True),
        (interval(4.9, 5.1), interval(5.4, 5.6), True),
        (interval(4.9, 5.1), interval(5.0, 5.2), False),  # another process might tell either
        (interval(4.98, 4.99), interval(5.0, 5.01), False),  # certain, and too small to matter
        (interval(4.9, 5.1), None, False),
        (None, interval(4.9, 5.1), False),
    ],
)
def test_speed_ups_that_differ_beyond_chance_and_by_5_percent_depend(here, elsewhere, depends):
    check = Check(True, "float32", "", (), is_thorough=True)
    entry = Finalist(3, check, here, others=on_ordinary(elsewhere))
    assert (entry.depends_on is not None) is depends


def test_a_candidate_like_a_later_one_that_was_never_reported_can_be_verified():
    measured = Measurement(75.0, 0.01, (75.0,), is_cold=True)

    def trial(number, same_as):
        outcome = Outcome(Status.CORRECT, measurement=measured, same_as=same_as)
        return Trial(number, "cpu", {}, f"key{number}", outcome)

    assert [t.number for t in ranked_trials([trial(0, 1)])] == [0]
    assert [t.number for t in ranked_trials([trial(0, 1), trial(1, None)])] == [1]


def test_a_file_whose_time_depends_on_the_values_is_noted():
    check = Check(True, "float32", "", (), is_thorough=True)
    raced = Finalist(3, check, interval(4.9, 5.1))
    same = replace(raced, others=on_ordinary(interval(4.9, 5.1)))
    other = replace(raced, others=on_ordinary(interval(2.4, 2.6)))
    assert remarks_on(same, ROWS_TEXT) == []
    why = "forward is given numbers beside tensors (s)"
    assert remarks_on(same, f"{ROWS_TEXT}\n_TAKES_STEPS = False  # {why}\n") == [
        f"a step of training takes PyTorch's own operations: {why}"
    ]
    assert remarks_on(other, ROWS_TEXT) == [
        "with weights as after training and normal inputs in place of the reference's own it runs "
        "at 2.50x, not 5.00x: its time depends on them"
    ]


def test_a_host_that_is_held_up_gets_a_longer_lead_than_one_that_is_slow_by_itself():
    assert lead_of_call_us([120, 150], 100) == 150
    assert lead_of_call_us([120, 350], 100) == 350  # held up
    assert lead_of_call_us([120, 3500], 100) == 400  # the next batch may find it quiet
    assert lead_of_call_us([60, 290], 50) == 290
    assert lead_of_call_us([700, 650], 600) == 300  # a user waits for the rest, too
    assert lead_of_call_us([700, 650], 600, hidden_us=3000) == 700  # but not for our binding


def test_a_finalist_below_the_physical_floor_is_refused(planned, tmp_path):
    floor = replace(planned.spec, impossible_us=1e9)
    with pytest.raises(WorkerError, match=r"module.py: .* is below the physical floor of 1000000"):
        Racer(floor).race([file_of(tmp_path, MODULE + DOUBLED)], num_processes=1, seconds=0.01)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"latency_us": 0.001}, "below the physical floor of 0.5 us"),
        ({"wall_us": 5e3, "latency_us": 50.0}, "works on for 4950 us after the call's end"),
        ({"after_timing": "after timing: output"}, "after timing: output"),
    ],
)
def test_a_time_that_cannot_be_true_rejects_a_candidate(bench, monkeypatch, changed, reason):
    """The answer of a real worker, altered on its way."""
    worker = bench.runner._worker
    call = worker.call

    def altered(job, *args, **kwargs):
        reply = call(job, *args, **kwargs)
        if job == "time_candidate":
            reported = {k: v for k, v in changed.items() if k != "after_timing"}
            reply.data["measurement"] |= reported
            reply.data["after_timing"] = changed.get("after_timing", "")
        return reply

    monkeypatch.setattr(worker, "call", altered)
    monkeypatch.setattr(bench.runner, "_impossible_us", 0.6)
    outcome = bench.outcome(step=200 + len(changed) + len(reason))
    assert outcome.status is Status.CORRECTNESS and reason.replace("0.5", "0.6") in outcome.reason
    assert outcome.latency_us is None and outcome.measurement is not None


def test_what_no_device_can_do_is_known_of_every_class(planned):
    strict, loose = (impossible_us(1e12, 0.0, planned.device, p) for p in ("fp16x2", "fp16"))
    assert strict >= loose > 0.0
    assert impossible_us(0.0, 0.0, planned.device, "fp16x2") == 0.0
    h200 = known_device("H200")
    assert impossible_us(1e12, 0, h200, "fp16x2") / impossible_us(1e12, 0, h200, "fp16") == 2.0
    assert planned.spec.impossible_us == impossible_us(6400.0, 51200.0, planned.device, "fp16")
    assert planned.spec.impossible_us > 0.0


def test_an_operator_says_how_fast_a_class_of_its_kernels_may_be_at_most(planned):
    flagship = load_family("gemm_scale_batchnorm")
    assert flagship.op.arithmetic == {"float32": "fp16x2"}  # a product and corrections of 8 bits
    h200 = replace(planned, device=known_device("H200"))
    other = planned.family.op.model_copy(update={"arithmetic": {"float32": "fp32x9"}})
    slower = replace(h200, family=replace(planned.family, op=other))
    assert slower.spec.impossible_us > h200.spec.impossible_us


def test_the_operator_of_these_tests_is_known_by_its_folder(planned):
    assert planned.family.name == NAME and planned.sizes == {"rows": 64, "cols": 100}
