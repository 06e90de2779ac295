"""A run for other tools: each export read again, by value."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest
from command_line import tune
from full_runs import HOSTILE, make_run, make_trials

import tuner
from tuner.errors import InputError, MachineError
from tuner.review.exports import exported, write_export
from tuner.review.run_data import RunData
from tuner.review.tables import trial_columns
from tuner.review.timeline import spans_of
from tuner.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs"), make_trials(30))


def test_csv_has_every_trial_with_every_digit(run):
    data, media_type = exported(RunData.of(run), "trials.csv")
    rows = list(csv.DictReader(io.StringIO(data.decode())))
    assert media_type.startswith("text/csv") and len(rows) == 30
    for row, trial in zip(rows, run.trials(), strict=True):
        assert int(row["number"]) == trial.number
        latency_us = trial.outcome.latency_us
        assert row["latency_us"] == ("" if latency_us is None else repr(latency_us))
        assert row["template"] == trial.template
        assert row["stages"] == str(trial.params.get("stages", ""))


def test_no_word_of_the_csv_begins_like_a_formula(tmp_path):
    trials = [t for t in make_trials(3)]
    trials[0].params["stats"] = "=1+1"
    trials[1].params["stats"] = HOSTILE
    data, _ = exported(RunData.of(make_run(tmp_path, trials)), "trials.csv")
    rows = list(csv.DictReader(io.StringIO(data.decode())))
    assert rows[0]["stats"] == "'=1+1" and rows[1]["stats"] == HOSTILE


def test_the_trace_has_each_span_once_in_the_lane_of_its_worker(run):
    data, _ = exported(RunData.of(run), "timeline.json")
    events = json.loads(data)["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(lanes.values()) == {"device", *(f"builder {n}" for n in range(4))}
    found = {
        (lanes[e["tid"]], e["cat"], e["args"]["trial"]): (e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    }
    spans = spans_of(run.trials())
    assert len(found) == len(spans)
    for span in spans:
        start_us, length_us = found[span.worker, span.stage, span.trial]
        assert start_us == pytest.approx(1e6 * span.start_s, abs=0.01)
        assert length_us == pytest.approx(1e6 * (span.end_s - span.start_s), abs=0.01)
    first = next(e for e in events if e["ph"] == "X" and e["args"]["trial"] == 0)
    assert first["args"]["template"] == run.trials()[0].template


def test_parquet_has_numbers_as_numbers_and_null_where_nothing_is(run):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    data, _ = exported(RunData.of(run), "trials.parquet")
    table = parquet.read_table(io.BytesIO(data)).to_pydict()
    for column in trial_columns(RunData.of(run)):
        wanted = [v if v is None or column.kind != "word" else str(v) for v in column.values]
        assert table[column.name] == wanted, column.name


def test_without_its_library_parquet_says_what_to_install(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        MachineError, match=r"needs pyarrow.*\n  next: pip install 'tuner\[parquet"
    ):
        write_export(run, tmp_path / "x.parquet")
    assert not (tmp_path / "x.parquet").exists()


def test_the_files_ending_says_what_is_written(run, tmp_path):
    said = tune("report", run.path, "--export", tmp_path / "x.csv", cwd=tmp_path)
    assert said.code == 0, said.err
    assert (tmp_path / "x.csv").read_bytes() == exported(RunData.of(run), "trials.csv")[0]
    assert tuner.load_run(run.path).write(tmp_path / "x.json").stat().st_size > 1000
    with pytest.raises(InputError, match=r"x\.xlsx: expected a file that ends in \.csv"):
        write_export(run, tmp_path / "x.xlsx")
    with pytest.raises(InputError, match=r"expected one of trials\.csv"):
        exported(RunData.of(run), "../secret")
