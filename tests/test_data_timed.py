"""What a search and a race are for: the reference's own data alone, or ordinary ones as well.

The operator of `tiny_operator`, whose reference gives zeros. One template is fast on zeros and
slow on all else, another one always takes the same.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import tune
from tiny_operator import NAME, REFERENCE, config_text, write_family

from tuner.evaluate.race import Race, finalist
from tuner.export.certificate import read_certificate
from tuner.problem.draws import ORDINARY, SPARSE
from tuner.problem.timed_data import GIVEN_ALONE
from tuner.records import recomputed
from tuner.review.workloads import AS_GIVEN, workloads_of
from tuner.run import Run, open_run
from tuner.storage import sha256_of
from tuner.trial import (
    Check,
    Finalist,
    Interval,
    Measurement,
    Outcome,
    Status,
    Trial,
    from_json,
    to_json,
)
from tuner.verification.ranking import ranked_trials, tied

BASELINE_MS, ALWAYS_MS, ELSE_MS = 16, 4, 12
TEMPLATE = """---
title: Doubled, at a time of its own
language: cpp
requires:
  - {expr: "device.kind == 'cpu'", why: "it is C++ for the CPU"}
steps:
  - {call: fused_doubled_values_sweep, args: [x, y, rows, cols]}
optimisations:
  - {text: "one sweep over memory"}
---
#include <cstdint>
#include <unistd.h>
extern "C" const char* fused_doubled_values_sweep(const float* x, float* y, int64_t rows,
                                                  int64_t cols) {
  bool is_zero = true;
  for (int64_t i = 0; i < rows * cols; ++i) {
    is_zero = is_zero && x[i] == 0.0f;
    y[i] = x[i] + x[i];
  }
  if (IF_SLOW) usleep(SLEEP_MS * 1000);
  return nullptr;
}
"""


def write_problem(folder: Path) -> None:
    family = write_family(folder / "kernels", TEMPLATE, "zeros.cpp.j2") / NAME
    for name, condition, slept_ms in (
        ("zeros", "!is_zero", ELSE_MS),
        ("always", "true", ALWAYS_MS),
    ):
        text = TEMPLATE.replace("IF_SLOW", condition).replace("SLEEP_MS", str(slept_ms))
        (family / f"{name}.cpp.j2").write_text(text)
    reference = REFERENCE.replace("torch.randn", "torch.zeros").replace(
        "for _ in range(200):\n            x = x + 0.0", f"time.sleep({BASELINE_MS / 1000})"
    )
    assert "time.sleep" in reference and "zeros" in reference
    (family / "reference.py").write_text(
        reference.replace("import torch\n", "import time\nimport torch\n", 1)
    )
    measure = {"num_finalists": 2}
    space = {"template": ["zeros", "always"]}
    (folder / "config.yaml").write_text(
        config_text(folder / "kernels", space=space, measure=measure)
    )


def tuned(folder: Path, *options: str) -> tuple[Run, str]:
    """Tune in a folder; return the run, and what was printed, on one line."""
    folder.mkdir(exist_ok=True)
    write_problem(folder)
    said = tune("--config", "config.yaml", *options, cwd=folder)
    assert said.code == 0, said.err
    (path,) = (folder / "runs").iterdir()
    return open_run(path), " ".join(said.out.split())


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("few")
def test_what_is_fast_on_the_given_data_alone_does_not_win(tmp_path):
    run, said = tuned(tmp_path / "both")
    trials = {trial.template: trial for trial in run.trials()}
    zeros, always = trials["zeros"], trials["always"]
    assert zeros.outcome.latency_us < 1000 * ALWAYS_MS <= always.outcome.latency_us
    assert zeros.outcome.measurement.others_us["ordinary"] >= 1000 * ELSE_MS
    assert zeros.outcome.measurement.slowdown > 10
    assert ranked_trials(run.trials())[0] == always == run.best()
    result = run.result()
    best, raced = (
        {entry.trial: entry for entry in result.finalists}[trial.number]
        for trial in (always, zeros)
    )
    assert result.winner == always.number in result.ties
    # On a busy machine times may scatter so far that the other one ties.
    if raced.least.high < best.least.low:
        assert result.ties == (always.number,)
    (ordinary,) = raced.others
    assert raced.least == ordinary.interval
    assert raced.interval.speedup > 10 * raced.least.speedup
    text = run.export_path.read_text()
    assert GIVEN_ALONE not in text
    assert "speed-up with the reference's own weights and inputs: " in text
    assert f"speed-up with {ORDINARY} in place of the reference's own: " in text
    certificate = read_certificate(run.export_path)
    assert certificate.workloads == ("given", "ordinary")
    (claimed,), (found,) = certificate.others, result.exported.others
    assert (claimed.name, claimed.words) == ("ordinary", ORDINARY)
    assert claimed.interval == found.interval and claimed.samples_us
    # On a busy machine the first may be "no difference", whatever its ratio.
    given, *_ = workloads_of(result)
    assert given.name == AS_GIVEN and f"{given.words}; {found.interval.speedup:.2f}" in said


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("few")
def test_who_knows_his_data_is_given_what_is_fast_on_them_and_the_file_says_so(tmp_path):
    run, said = tuned(tmp_path / "given", "--workloads", "given", "--effort", "quick")
    trials = run.trials()
    assert not any(trial.outcome.measurement.others_us for trial in trials)
    result = run.result()
    assert trials[result.winner].template == "zeros"
    assert result.exported.others == ()
    text = run.export_path.read_text()
    assert GIVEN_ALONE in text.splitlines()[0] and text.count(GIVEN_ALONE) == 2
    certificate = read_certificate(run.export_path)
    assert (certificate.workloads, certificate.others) == (("given",), ())
    assert f"workloads timed {GIVEN_ALONE}" in said
    again = tune("--resume", run.path, "--workloads", "given,ordinary", cwd=tmp_path)
    assert again.code == 2


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("few")
def test_what_is_slow_on_a_users_own_tensors_does_not_win(tmp_path):
    torch.save([torch.ones(64, 100)], tmp_path / "ones.pt")
    named = ("--workloads", "given,sparse,file:ones.pt", "--effort", "quick")
    run, said = tuned(tmp_path, *named)
    result = run.result()
    assert run.trials()[result.winner].template == "always"
    sparse, ones = result.exported.others
    assert (sparse.name, ones.name) == ("sparse", "file:ones.pt")
    assert ones.words == "the tensors of ones.pt" and f"x on {ones.words}" in said
    zeros = next(trial for trial in run.trials() if trial.template == "zeros")
    times_us = zeros.outcome.measurement.others_us
    assert times_us["sparse"] < 1000 * ALWAYS_MS < times_us["file:ones.pt"]
    text = run.export_path.read_text()
    assert f"speed-up with {ones.words} in place of the reference's own: " in text
    claimed = read_certificate(run.export_path)
    assert claimed.workloads == ("given", "sparse", "file:ones.pt")
    assert claimed.others[1].tensors_sha256 == sha256_of(tmp_path / "ones.pt")
    assert "ones.pt" in (run.path / "report.html").read_text()
    torch.save([torch.zeros(64, 100)], tmp_path / "ones.pt")
    again = tune("--resume", str(run.path), cwd=tmp_path)
    assert again.code == 2
    assert f"{tmp_path / 'ones.pt'}: other tensors than the run began with" in again.err
    assert read_certificate(run.export_path) == claimed


@pytest.mark.usefixtures("few")
def test_a_users_tensors_that_do_not_fit_end_the_run_with_what_would(tmp_path):
    torch.save([torch.ones(64, 99)], tmp_path / "ones.pt")
    write_problem(tmp_path)
    named = ("--workloads", "given,file:ones.pt")
    said = tune("--config", "config.yaml", *named, cwd=tmp_path)
    assert said.code == 2
    assert f"error: {tmp_path / 'ones.pt'}: got float32 [64, 99] as x\n" in said.err
    assert "expected: the tensors of the reference's inputs: x float32 [64, 100]" in said.err


# ---- what follows from times ----------------------------------------------------------------


def screened(number: int, given_us: float, ordinary_us: float | None) -> Trial:
    """A trial beside a baseline of 100 us, on either data."""
    measured = Measurement(
        given_us, 0.01, (given_us,), is_cold=True, anchor_us=100.0,
        others_us={} if ordinary_us is None else {"ordinary": ordinary_us},
        others_anchor_us={} if ordinary_us is None else {"ordinary": 100.0},
    )  # fmt: skip
    return Trial(number, "t", {"a": number}, "", Outcome(Status.CORRECT, measurement=measured))


def test_trials_are_ranked_by_their_least_speed_up():
    trials = [screened(0, 10, 80), screened(1, 20, 21), screened(2, 30, None), screened(3, 25, 5)]
    assert [t.number for t in ranked_trials(trials)] == [1, 3, 2, 0]
    assert [t.outcome.latency_us for t in trials] == [10, 20, 30, 25]
    assert [t.outcome.ranked_us for t in trials] == [80, 20, 30, 25]  # 5 % is noise


def test_a_slower_baseline_on_ordinary_data_is_no_slower_kernel():
    measured = screened(0, 10, 80).outcome.measurement
    assert replace(measured, others_anchor_us={"ordinary": 800.0}).slowdown == 1.0
    slower = replace(measured, others_anchor_us={"ordinary": 400.0})
    assert slower.slowdown == pytest.approx(2.0)


def test_of_several_data_the_slowest_beside_the_baseline_ranks_a_trial():
    measured = replace(
        screened(0, 10, 80).outcome.measurement,
        others_us={"ordinary": 10.0, "sparse": 30.0, "offset": 40.0},
        others_anchor_us={"ordinary": 100.0, "sparse": 60.0, "offset": 400.0},
    )
    assert measured.slowest_on == "sparse" and measured.slowdown == pytest.approx(5.0)
    assert replace(measured, others_us={}).slowest_on == ""


def test_records_of_earlier_releases_are_read():
    old = '{"latency_us": 10.0, "noise": 0.01, "samples_us": [10.0], "is_cold": true}'
    measured = from_json(Measurement, old)
    assert (measured.others_us, measured.slowdown) == ({}, 1.0)
    outcome = from_json(Outcome, f'{{"status": "correct", "measurement": {old}}}')
    assert outcome.ranked_us == outcome.latency_us == 10.0
    trial = screened(0, 10, 80)
    assert from_json(Trial, to_json(trial)) == trial


def test_records_of_ordinary_data_alone_are_read():
    """As they were stored before data had names: one field each."""
    stored = json.loads(to_json(screened(0, 10, 80)))
    measured = stored["outcome"]["measurement"]
    del measured["others_us"], measured["others_anchor_us"]
    measured |= {"ordinary_us": 80.0, "ordinary_anchor_us": 100.0}
    assert from_json(Trial, json.dumps(stored)) == screened(0, 10, 80)
    entry = raced(0, 10, 80)
    stored = json.loads(to_json(entry))
    (data,) = stored.pop("others")
    stored |= {"elsewhere": data["interval"], "elsewhere_on": data["words"]}
    without = from_json(Finalist, json.dumps(stored))
    assert without.least == entry.least and without.others[0].samples_us == ()
    stored["elsewhere_samples_us"] = data["samples_us"]
    stored["elsewhere_baseline_samples_us"] = data["baseline_samples_us"]
    assert from_json(Finalist, json.dumps(stored)) == entry
    del stored["elsewhere_on"]
    assert from_json(Finalist, json.dumps(stored)).least_on == "random weights and normal inputs"


BASELINE_US = 100.0
WORDS = {"ordinary": ORDINARY, "sparse": SPARSE}


def raced(
    number: int,
    given_us: float,
    ordinary_us: float | None,
    num_processes: int = 3,
    **others_us: float,
) -> Finalist:
    """A finalist whose processes agree within a few parts in a thousand; `others_us` by name."""

    def rounds(us: float) -> list[list[list[float]]]:
        return [[[us * (1 + 0.001 * (p + r))] for r in range(4)] for p in range(num_processes)]

    named = {} if ordinary_us is None else {"ordinary": ordinary_us}
    others = {
        name: Race([rounds(BASELINE_US), rounds(us)], on=WORDS[name])
        for name, us in {**named, **others_us}.items()
    }
    race = Race([rounds(BASELINE_US), rounds(given_us)], others=others)
    return finalist(number, Check(True, "float32"), race, 1)


def test_the_winner_of_a_race_is_the_best_in_the_least():
    assert tied([raced(0, 10, 80), raced(1, 20, 21), raced(2, 20, 40)]) == [1]
    assert tied([raced(0, 10, None), raced(1, 20, None)]) == [0]
    assert tied([raced(0, 20, 20), raced(1, 20, 20)]) == [0, 1]
    assert tied([raced(0, 10, 20), raced(1, 20, 20)]) == [0]  # faster on the given data
    assert tied([raced(0, 20, 80, num_processes=2), raced(1, 40, 40)]) == [1]
    assert tied([raced(0, 20, 20, sparse=20), raced(1, 20, 20, sparse=40)]) == [0]
    assert tied([raced(0, 10, 20, sparse=50), raced(1, 20, 20, sparse=40)]) == [1]


def test_an_edited_interval_of_ordinary_data_is_found():
    honest = raced(0, 10, 80)
    assert recomputed(honest) == (honest, "")
    forged = replace(honest.others[0], interval=Interval(50.0, 49.0, 51.0, 0.95, 3))
    edited = replace(honest, others=(forged,))
    found, said = recomputed(edited)
    assert found == honest
    assert f"50.000x [49.000, 51.000] on {ORDINARY}" in said


def test_the_words_of_a_file_name_the_data_only_where_these_matter():
    assert raced(0, 10, 80).least_on == ORDINARY
    assert raced(0, 20, 20.5).least_on == "" == raced(0, 20, None).least_on
    assert raced(0, 20, 20.5).least == raced(0, 20, 20.5).others[0].interval
    assert raced(0, 80, 10).least == raced(0, 80, 10).interval
    assert raced(0, 20, 40, sparse=30).least_on == ORDINARY
    assert raced(0, 20, 30, sparse=40).least_on == SPARSE
    depends = raced(0, 20, 30, sparse=40).depends_on
    assert depends is not None and depends.name == "sparse"
    assert raced(0, 20, 20, sparse=20).depends_on is None


def test_who_is_behind_on_the_given_data_alone_stays_in_the_race():
    def rounds(us: float) -> list[list[list[float]]]:
        return [[[us], [us]], [[us], [us]], [[us], [us]]]

    given = [rounds(us) for us in (BASELINE_US, 10.0, 20.0, 90.0)]
    ordinary = Race([rounds(us) for us in (BASELINE_US, 80.0, 20.0, 20.0)])
    assert Race(given).clearly_behind([1, 2, 3]) == [2, 3]
    assert Race(given, others={"ordinary": ordinary}).clearly_behind([1, 2, 3]) == [1, 3]
    sparse = Race([rounds(us) for us in (BASELINE_US, 20.0, 90.0, 20.0)])
    both = {"ordinary": ordinary, "sparse": sparse}
    assert Race(given, others=both).clearly_behind([1, 2, 3]) == [2, 3]


def test_processes_that_scatter_leave_open_what_seems_faster():
    def of(*processes_us: float) -> list[list[list[float]]]:
        return [[[us], [us]] for us in processes_us]

    baseline = of(100.0, 101.0, 99.0)
    faster, scattered, same = of(25.0, 25.1, 24.9), of(90.0, 10.0, 30.0), of(97.0, 104.0, 99.0)
    assert not Race([baseline, faster]).leaves_open([1])
    assert Race([baseline, scattered]).leaves_open([1])
    assert not Race([baseline, same]).leaves_open([1])  # little would be gained
    assert not Race([baseline, faster, scattered]).leaves_open([1, 2])  # the fastest is clear
    others = {"sparse": Race([baseline, scattered])}
    assert Race([baseline, faster], others=others).leaves_open([1])
    assert not Race([baseline]).leaves_open([])
