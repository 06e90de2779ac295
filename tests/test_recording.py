"""A recording: a run that only searches, gone on with, made one small file, searched again."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from command_line import ROOT, Said, tune
from spaces import feasible
from test_search_spaces import cpu_with, search_space
from tiny_operator import config_text, write_family

from benchmarks.recording import merged, write
from tuner.config.run_config import config_of, load_config
from tuner.errors import InputError
from tuner.kernel.family import load_family
from tuner.planning.planning import plan
from tuner.run import Run, create_run, open_run
from tuner.search.recorded import read_recording
from tuner.search.replay import replay
from tuner.trial import Outcome, Status

SPACE = {"mode": ["ok", "slow", "wrong"], "step": [1, 2]}
CONFIGURATIONS = 6


@dataclass(frozen=True)
class Recorded:
    """A recording in two sessions of the same run."""

    run: Run
    said: tuple[Said, Said]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    family = write_family(folder / "families")
    (folder / "config.yaml").write_text(config_text(family, space=SPACE))
    first = tune("--config", "config.yaml", "--record", "--trials", 4, cwd=folder)
    (path,) = (folder / "runs").iterdir()
    second = tune("--resume", path, "--record", "--trials", 20, cwd=folder)
    return Recorded(open_run(path), (first, second))


def test_a_recording_ends_with_its_search_and_is_gone_on_with(recorded):
    assert [said.code for said in recorded.said] == [0, 0]
    assert "not verified" in recorded.said[0].out
    assert recorded.run.result() is None and not recorded.run.export_path.exists()
    assert recorded.run.report_path.exists()
    assert len(recorded.run.trials()) == CONFIGURATIONS


def test_a_recording_cuts_no_time_short_in_any_session(recorded):
    assert not config_of(recorded.run).measure.stop_slow  # what a resumed run goes by
    found = read_recording(recorded.run.path)
    assert (found.known_us > 0).sum() == 4 and not found.is_bound.any()


def test_runs_become_one_small_file_that_says_the_same(recorded, tmp_path):
    later = create_run(tmp_path, "later", "cpu", "x", recorded.run.environment())
    with later.locked() as writer:
        for trial in recorded.run.trials():
            writer.append(replace(trial, outcome=Outcome(Status.RUNTIME, "another session")))
    document = merged([recorded.run.path, later.path])
    write(document, tmp_path / "recording.json.gz")
    write(document, tmp_path / "again.json.gz")
    written = (tmp_path / "recording.json.gz").read_bytes()
    assert written == (tmp_path / "again.json.gz").read_bytes() and len(written) < 2000
    of_run, of_file = read_recording(recorded.run.path), read_recording(tmp_path / "again.json.gz")
    # Of what both runs have, the first one's outcome counts.
    assert of_file.space.num_feasible == of_run.space.num_feasible == CONFIGURATIONS
    for config_id, params in enumerate(feasible(of_file.space)):
        whole = next(p for p in feasible(of_run.space) if params.items() <= p.items())
        place = of_run.space.index(whole)
        assert of_file.statuses[config_id] == of_run.statuses[place]
        assert of_file.is_bound[config_id] == of_run.is_bound[place]
        assert of_file.latency_us[config_id] == pytest.approx(
            of_run.latency_us[place], rel=1e-3, nan_ok=True
        )
    # A file may stand for the runs that it was made of.
    assert merged([tmp_path / "again.json.gz", later.path]) == document
    fixed = document["metadata"]["fixed"]
    assert fixed["template"] == "sweep" and "mode" not in fixed
    with gzip.open(tmp_path / "recording.json.gz") as file:
        assert str(recorded.run.path.parent) not in json.load(file).__repr__()


@pytest.mark.parametrize("sampler", ["surrogate", "tpe", "random"])
def test_a_recording_is_searched_within_what_it_recorded(recorded, tmp_path, sampler):
    write(merged([recorded.run.path]), tmp_path / "recording.json.gz")
    recording = read_recording(tmp_path / "recording.json.gz")
    found = replay(recording, sampler, num_seeds=2, budget=50)
    for entry in found.searches:
        assert sorted(entry.order) == list(range(CONFIGURATIONS))
    assert found.best_us(CONFIGURATIONS) == np.nanmin(recording.latency_us)


def test_runs_of_another_problem_are_refused(recorded, tmp_path):
    environment = replace(recorded.run.environment(), sizes={"rows": 1})
    other = create_run(tmp_path, "other", "cpu", "x", environment)
    with pytest.raises(InputError, match="expected runs of one problem"):
        merged([recorded.run.path, other.path])


def test_what_is_no_recording_is_refused(recorded, tmp_path):
    (tmp_path / "other.json.gz").write_bytes(gzip.compress(b"{}"))
    for name in ("other.json.gz", "absent.json.gz"):
        with pytest.raises(InputError, match=f"{name}: no recording"):
            merged([recorded.run.path, tmp_path / name])


def test_the_space_to_record_on_a_gpu_is_the_flagships_thinned_out():
    thin = load_config(ROOT / "benchmarks/recording_33.yaml")
    whole = load_config(ROOT / "search_spaces/gemm_scale_batchnorm_33.yaml")
    assert thin.problem.sizes == whole.problem.sizes and thin.accuracy == whole.accuracy
    listed = {parameter.name: parameter.values for parameter in whole.space}
    for parameter in thin.space:
        assert set(parameter.values) <= set(listed[parameter.name]), parameter.name
    space = plan(thin, may_assume=True).space
    assert 1500 <= space.num_feasible <= 2500
    assert set(space.count_by("template")) == set(listed["template"])
    assert all(space.count_by("template").values())


FAMILY = load_family("gemm_scale_batchnorm")  # whose parameters had other names as it was recorded

# Every configuration of `benchmarks/recording_cpu.yaml`, recorded on two cores of an Intel Xeon
# that other work was using as well: some of its times say more of that than of the kernel.
CPU = ROOT / "tests" / "recordings" / "cpu_2048x64x256.json.gz"


def test_the_recorded_space_of_the_cpus_template_is_whole():
    recording = read_recording(CPU)
    config = load_config(ROOT / "benchmarks/recording_cpu.yaml")
    _, space = search_space(config, cpu_with(512, 32))  # that Xeon's vectors
    assert recording.space.num_feasible == space.num_feasible
    whole = {tuple(sorted(p.items())) for p in feasible(space)}
    found = {
        tuple(sorted(FAMILY.renamed({"template": "cpu", **p}).items()))
        for p in feasible(recording.space)
    }
    assert found == whole and not recording.is_bound.any()
    assert (recording.kernel, recording.device) == (
        "gemm_scale_batchnorm",
        "Intel(R) Xeon(R) Processor",
    )


# 2,109 of the 2,334 configurations of `benchmarks/recording_33.yaml`, recorded on two H200 in 8
# minutes each (seeds 0 and 1). Half of them are refused as too coarse: three bfloat16 products.
FLAGSHIP = ROOT / "tests" / "recordings" / "flagship_33_h200.json.gz"


def test_the_recorded_flagship_space_is_part_of_what_its_config_lists():
    recording = read_recording(FLAGSHIP)
    space = plan(load_config(ROOT / "benchmarks/recording_33.yaml"), may_assume=True).space
    recorded = [FAMILY.renamed(params) for params in feasible(recording.space)]
    for params in recorded:  # what triton has in common with others was at its default
        completed = space.complete(params)
        assert completed is not None and params.items() <= completed.items()
    assert len({tuple(sorted(params.items())) for params in recorded}) >= 2000
    assert not recording.is_bound.any() and (recording.known_us > 0).sum() > 1000
    assert (recording.kernel, recording.device) == ("gemm_scale_batchnorm", "NVIDIA H200")


def test_on_the_flagship_space_the_surrogate_finds_the_best_within_a_hundred_evaluations():
    recording = read_recording(FLAGSHIP)
    for search in replay(recording, "surrogate", num_seeds=2, budget=100).searches:
        assert np.nanmin(recording.latency_us[list(search.order)]) <= 1.01 * np.nanmin(
            recording.latency_us
        )


def test_on_the_cpus_space_the_surrogate_searches_better_than_random():
    recording = read_recording(CPU)
    score = {
        sampler: np.mean([s.score for s in replay(recording, sampler, num_seeds=4).searches])
        for sampler in ("surrogate", "random")
    }
    assert score["surrogate"] > max(0.1, score["random"] + 0.1)  # random is 0 on average
