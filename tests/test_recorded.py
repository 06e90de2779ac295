"""Recordings: Kernel Tuner caches, T4 files and run directories become the same object."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from spaces import feasible

from tuner.config.run_config import parse_config
from tuner.environment import Environment
from tuner.errors import InputError
from tuner.kernel.family import load_family
from tuner.planning.earlier import warm_starts
from tuner.run import create_run, open_run
from tuner.search.recorded import read_recording
from tuner.search.t4 import to_t4
from tuner.trial import Measurement, Outcome, Params, Status, Trial

# Nine configurations of two parameters; block 3 was not enumerated with tile 4.
TIMES_MS = {(4, 1): 2.0, (4, 2): 1.0, (8, 1): "CompilationFailedConfig", (8, 2): 0.5, (3, 1): 1e20}


def cache(times: dict = TIMES_MS) -> dict:
    return {
        "device_name": "NVIDIA A100",
        "kernel_name": "convolution",
        "tune_params_keys": ["block", "tile", "fixed"],
        "tune_params": {"block": [8, 4, 3], "tile": [1, 2, 4], "fixed": [15]},
        "objective": "time",
        "cache": {
            f"{block},{tile},15": {
                "block": block,
                "tile": tile,
                "fixed": 15,
                "time": time,
                "compile_time": 900.0,
                "verification_time": 0,
                "benchmark_time": 100.0,
            }
            for (block, tile), time in times.items()
        },
    }


def write(path: Path, data: object) -> Path:
    text = data if isinstance(data, str) else json.dumps(data)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["conv.A100.json", "conv.A100.json.gz"])
def test_a_kernel_tuner_cache_becomes_a_space_with_its_times(tmp_path, name):
    recording = read_recording(write(tmp_path / name, cache()))
    assert (recording.name, recording.device, recording.kernel) == (
        "conv.A100",
        "NVIDIA A100",
        "convolution",
    )
    assert [p.values for p in recording.space.parameters] == [(8, 4, 3), (1, 2, 4), (15,)]
    assert recording.keys == ("8,1,15", "8,2,15", "4,1,15", "4,2,15", "3,1,15")  # as declared
    assert feasible(recording.space) == [
        {"block": int(b), "tile": int(t), "fixed": 15}
        for b, t, _ in (key.split(",") for key in recording.keys)
    ]
    np.testing.assert_allclose(recording.latency_us, [math.nan, 500, 2000, 1000, math.nan])
    assert recording.statuses == ("compile", "correct", "correct", "correct", "runtime")


def test_a_cache_that_was_left_open_or_half_written_is_read_to_its_last_whole_line(tmp_path):
    head, rows = json.dumps(cache()).split('"cache": {')
    lines = rows.removesuffix("}}").replace("}, ", "},\n")
    left_open = write(tmp_path / "open.json", head + '"cache": {\n' + lines + ",\n")
    assert len(read_recording(left_open).keys) == 5
    half = write(tmp_path / "half.json", (head + '"cache": {\n' + lines)[:-30])
    assert len(read_recording(half).keys) == 4


def test_values_that_the_header_does_not_list_are_those_seen_in_order(tmp_path):
    data = cache() | {"tune_params": {"block": "[8, 4, 3]", "tile": [1], "fixed": [15]}}
    recording = read_recording(write(tmp_path / "x.json", data))
    assert [p.values for p in recording.space.parameters] == [(3, 4, 8), (1, 2), (15,)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "no recorded space"),
        ('{"cache": 3}', "no recorded space"),
        ({"cache": {}, "tune_params_keys": ["a"]}, "no configuration that ran, of 0"),
        ({"cache": {"1": 3}, "tune_params_keys": ["a"]}, "cache['1']: expected an object"),
        ({"cache": {"1": {"a": 1}}, "tune_params_keys": ["a"]}, "cache['1']: no `time`"),
        ({"cache": {"1": {"time": 1}}, "tune_params_keys": ["a"]}, "a is None, expected a number"),
        ({"cache": {"1": {"a": [1], "time": 1}}, "tune_params_keys": ["a"]}, "a is [1]"),
        ({"cache": {"1": {"a": 1, "time": 1}}, "tune_params_keys": "a"}, "not a list of names"),
        (cache({(4, 1): "RuntimeFailedConfig"}), "no configuration that ran, of 1"),
        (cache({(4, 1): math.nan}), "no configuration that ran, of 1"),
        ({"results": [3]}, "results[0]: expected an object with `configuration`"),
        ({"results": [{"configuration": {"a": 1}, "invalidity": "odd"}]}, "unknown invalidity"),
        ({"results": [{"configuration": {"a": 1}}]}, "no measurement of ['time'] with a unit"),
        (
            {
                "results": [
                    {
                        "configuration": {"a": 1},
                        "measurements": [{"name": "time", "value": 1, "unit": "GB/s"}],
                    }
                ]
            },
            "with a unit of time",
        ),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_the_place(tmp_path, content, message):
    with pytest.raises(InputError) as error:
        read_recording(write(tmp_path / "x.json", content))
    assert message in str(error.value) and "x.json" in str(error.value)


def test_a_missing_or_damaged_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file or run folder"):
        read_recording(tmp_path / "none.json")
    whole = gzip.compress(json.dumps(cache()).encode())
    (tmp_path / "cut.json.gz").write_bytes(whole[:-20])
    with pytest.raises(InputError, match="cannot be read"):
        read_recording(tmp_path / "cut.json.gz")
    (tmp_path / "noise.json").write_bytes(os.urandom(100))
    with pytest.raises(InputError):
        read_recording(tmp_path / "noise.json")


# ---- runs of ours, and T4 -------------------------------------------------------------------


def finished_run(tmp_path: Path) -> Path:
    """A run of two templates, one of which has a parameter more; with failures of each kind."""
    environment = Environment(device_name="AMD EPYC", op="layer_norm", sizes={"rows": 4})
    run = create_run(tmp_path, "layer_norm", "cpu", "op: layer_norm\n", environment)
    configurations: list[Params] = [
        {"template": "cpu", "width": 8, "stream": True},
        {"template": "cpu", "width": 16, "stream": False},
        {"template": "plain", "width": 8},
        {"template": "plain", "width": 16},
        {"template": "cpu", "width": 16, "stream": True},
        {"template": "cpu", "width": 32, "stream": True},
        {"template": "plain", "width": 8},  # again: the first counts
    ]
    statuses = [*Status][1:]  # all but correct
    with run.locked() as writer:
        for number, params in enumerate(configurations):
            outcome = Outcome(statuses[number % 5], "why not", seconds={"build": 1.5})
            if number in (0, 3, 6):
                latency_us = 10.0 + number / 3
                measurement = Measurement(
                    latency_us,
                    0.01 if number else math.inf,
                    (latency_us - 1, latency_us, latency_us + 1),
                    is_cold=True,
                    is_censored=number == 3,
                    anchor_us=20.0,
                )
                seconds = {"build": 1.0, "wait": 0.5, "check": 0.25, "device": 2.0}
                outcome = Outcome(Status.CORRECT, measurement=measurement, seconds=seconds)
            writer.append(Trial(number, str(params["template"]), params, "", outcome))
    return run.path


def test_a_run_becomes_a_recording_with_its_conditional_parameters(tmp_path):
    recording = read_recording(finished_run(tmp_path))
    assert (recording.device, recording.kernel) == ("AMD EPYC", "layer_norm")
    width, stream = recording.space.parameters[1:]
    assert width.when is None and width.values == (8, 16, 32)
    assert stream.when is not None and stream.when.text == "template in ['cpu']"
    assert recording.keys == (
        "cpu,8,True",
        "cpu,16,False",
        "cpu,16,True",
        "cpu,32,True",
        "plain,8,",
        "plain,16,",
    )
    assert recording.space.at(4) == {"template": "plain", "width": 8}
    assert recording.latency_us[0] == 10.0 and recording.latency_us[5] == 11.0
    assert recording.is_bound.tolist() == [False] * 5 + [True]  # plain, 16 was stopped early
    assert recording.known_us[0] == 10.0 and np.isnan(recording.known_us[5])


def test_a_search_that_starts_from_a_run_knows_which_of_its_times_are_bounds(tmp_path):
    text = f"problem: {{op: x}}\nsearch: {{warm_start: [{finished_run(tmp_path)}]}}\n"
    config, family = parse_config(text, tmp_path / "c.yaml"), load_family("layer_norm")
    (source,) = warm_starts(config, family)
    assert source.known_us[0] == 10.0 and np.isnan(source.known_us[5])


def test_a_run_of_an_earlier_release_is_read_under_todays_names(tmp_path):
    def now(params: Params) -> Params:
        return {("vector" if name == "width" else name): v for name, v in params.items()}

    run = finished_run(tmp_path)
    written = write(tmp_path / "t4.json", to_t4(run.name, open_run(run).trials(), Environment()))
    for source in (run, written):
        recording = read_recording(source, now)
        assert [p.name for p in recording.space.parameters] == ["template", "vector", "stream"]
        assert recording.space.at(4) == {"template": "plain", "vector": 8}


def test_t4_results_hold_the_whole_run(tmp_path):
    path = finished_run(tmp_path)
    recording = read_recording(path)
    run = open_run(path)
    text = to_t4(path.name, run.trials(), run.environment())
    written = write(tmp_path / "results.json", text)
    back = read_recording(written)
    assert (back.name, back.device, back.kernel) == (path.name, "AMD EPYC", "layer_norm")
    assert back.keys == recording.keys and back.statuses == recording.statuses
    assert feasible(back.space) == feasible(recording.space)
    np.testing.assert_allclose(back.latency_us, recording.latency_us, rtol=1e-12)
    assert back.is_bound.tolist() == recording.is_bound.tolist()


def test_t4_results_have_the_fields_and_words_of_the_schema(tmp_path):
    run = open_run(finished_run(tmp_path))
    data = json.loads(to_t4("a-run", run.trials(), run.environment()))
    assert data["schema_version"] == "1.0.0" and len(data["results"]) == 7
    words = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}
    for result in data["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= result.keys()
        assert result["invalidity"] in words and result["objectives"] == ["time"]
        times = result["times"]
        assert isinstance(times["runtimes"], list)
        assert all(isinstance(times[n], int | float) for n in ("compilation_time", "validation"))
        for measured in result["measurements"]:
            assert isinstance(measured["value"], int | float | str) and "unit" in measured
    first = data["results"][0]
    assert first["measurements"][0] == {"name": "time", "value": 0.01, "unit": "ms"}
    assert first["times"]["compilation_time"] == 1000.0


def test_kernel_tuners_own_t4_file_is_read(tmp_path):
    def result(block: int, invalidity: str, time: object) -> dict:
        return {
            "timestamp": "2026-01-01",
            "configuration": {"block": block, "word": "a"},
            "times": {"compilation": 500.0, "benchmark": 1500.0, "runtimes": [1.0]},
            "invalidity": invalidity,
            "correctness": 1,
            "measurements": [{"name": "time", "value": time, "unit": "ms"}],
            "objectives": ["time"],
        }

    rows = [result(64, "correct", 2.0), result(32, "compile", "CompilationFailedConfig")]
    recording = read_recording(
        write(tmp_path / "t4.json.gz", {"results": rows, "schema_version": "1.0.0"})
    )
    assert recording.keys == ("32,a", "64,a") and recording.statuses == ("compile", "correct")
    np.testing.assert_allclose(recording.latency_us, [math.nan, 2000.0])
