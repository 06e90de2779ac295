from __future__ import annotations

import sys

import pytest
from full_runs import make_result, make_run, make_trials

import tuner
from tuner.errors import MachineError, StorageError
from tuner.review.charts import CHART_NAMES


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trials = make_trials(60)
    return make_run(tmp_path_factory.mktemp("runs"), trials, make_result(trials))


def test_data_frame_holds_every_trial_by_value(run):
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame, trials = tuner.load_run(str(run.path)).trials, run.trials()
    assert list(frame.index) == [trial.number for trial in trials]
    for trial in trials:
        row = frame.loc[trial.number]
        assert row["status"] == trial.outcome.status.value
        assert row["block_m"] == trial.params["block_m"]
        if trial.outcome.latency_us is None:
            assert row[["latency_us", "speedup", "noise"]].isna().all()
        else:
            assert row["latency_us"] == trial.outcome.latency_us
            assert row["speedup"] == pytest.approx(3010.0 / trial.outcome.latency_us)
    best = frame.sort_values("latency_us").index[0]
    assert best == run.best().number
    fast = frame[frame["template"] == "mma"]["latency_us"]
    assert fast.min() == run.best().outcome.latency_us
    assert frame["latency_us"].dtype == float


def test_figures_are_plotlys_own_and_those_of_the_page(run):
    from plotly.graph_objects import Figure

    loaded = tuner.load_run(run.path)
    assert tuple(loaded.figures) == CHART_NAMES
    assert all(isinstance(figure, Figure) for figure in loaded.figures.values())
    assert "1.620x faster" in repr(loaded) and loaded.summary.kind == "faster"
    assert loaded.path == run.path


def test_figures_that_a_run_cannot_have_are_absent(tmp_path):
    loaded = tuner.load_run(make_run(tmp_path, make_trials(4)).path)
    assert "importance" not in loaded.figures and "progress-time" in loaded.figures


def test_missing_pandas_is_named_with_the_remedy(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    loaded = tuner.load_run(run.path)
    assert loaded.figures and loaded.summary  # all else works
    with pytest.raises(MachineError, match=r"needs pandas(.|\n)*pip install 'tuner\[notebook\]'"):
        _ = loaded.trials


def test_no_run_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="not a run directory"):
        tuner.load_run(tmp_path)
