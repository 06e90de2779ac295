"""A run for other tools: trials as CSV and Parquet, the timeline as a Chrome trace.

trials.csv        every trial, a row each: the columns of the page's table
trials.parquet    the same; needs pyarrow
timeline.json     what each worker did when, for ui.perfetto.dev or chrome://tracing
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuner.errors import InputError, MachineError
from tuner.review.run_data import RunData
from tuner.review.tables import Column, trial_columns
from tuner.review.timeline import spans_of
from tuner.run import Run
from tuner.storage import storage_errors, write_whole
from tuner.trial import Value

__all__ = ["EXPORTS", "exported", "write_export"]


def exported(run_data: RunData, name: str) -> tuple[bytes, str]:
    """Return one of `EXPORTS` and its media type.

    Raises:
        InputError: there is no such export.
        MachineError: it needs a library that is not installed.
    """
    if name not in EXPORTS:
        raise InputError(f"{name[:80]}: expected one of {', '.join(EXPORTS)}")
    make, media_type = EXPORTS[name]
    return make(run_data), media_type


def write_export(run: Run, path: Path) -> Path:
    """Write an export of a run to a file; its ending says which: .csv, .parquet or .json.

    Raises:
        InputError: the file's name ends otherwise.
        MachineError: it needs a library that is not installed.
        StorageError: the run cannot be read, or the file not written.
    """
    by_ending = {Path(name).suffix: name for name in EXPORTS}
    if path.suffix not in by_ending:
        raise InputError(
            f"{path}: expected a file that ends in {', '.join(by_ending)}\n"
            "  next: .csv and .parquet hold the trials, .json the timeline for ui.perfetto.dev"
        )
    data, _ = exported(RunData.of(run), by_ending[path.suffix])
    if path.suffix == ".parquet":
        with storage_errors(path):
            path.write_bytes(data)
    else:
        write_whole(path, data.decode("utf-8", "replace"))
    return path


def _csv(run_data: RunData) -> bytes:
    """Return the trials as CSV; no word begins like a formula, which a spreadsheet would run."""
    columns = trial_columns(run_data)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    writer.writerows(zip(*([_cell(c, v) for v in c.values] for c in columns), strict=True))
    return text.getvalue().encode("utf-8", "replace")


def _cell(column: Column, value: Value | None) -> str:
    if value is None:
        return ""
    text = str(value)
    return f"'{text}" if column.kind == "word" and text[:1] in "=+-@\t" and text else text


def _parquet(run_data: RunData) -> bytes:
    """Return the trials as Parquet: numbers as numbers, what is absent as null."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MachineError(
            "trials.parquet needs pyarrow, which is not installed\n"
            "  next: pip install 'tuner[parquet]', or take trials.csv"
        ) from error
    columns = {
        column.name: [
            value if value is None or column.kind != "word" else str(value)
            for value in column.values
        ]
        for column in trial_columns(run_data)
    }
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


def _trace(run_data: RunData) -> bytes:
    """Return the timeline as a Chrome trace: one complete event a span, times in us.

    Source: "Trace Event Format", Google, 2016.
    """
    spans = spans_of(run_data.trials)
    threads = {worker: n for n, worker in enumerate(dict.fromkeys(s.worker for s in spans), 1)}
    params = {trial.number: trial.params for trial in run_data.trials}
    events: list[dict[str, Any]] = [_named("process_name", 0, run_data.run.path.name)]
    events += [_named("thread_name", thread, worker) for worker, thread in threads.items()]
    events += [
        {
            "ph": "X",
            "pid": 1,
            "tid": threads[span.worker],
            "ts": round(1e6 * span.start_s, 3),
            "dur": round(1e6 * (span.end_s - span.start_s), 3),
            "cat": span.stage,
            "name": f"{span.stage} {span.trial}",
            "args": {"trial": span.trial, **params[span.trial]},
        }
        for span in spans
    ]
    data = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json.dumps(data).encode()


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": what, "args": {"name": name}}


EXPORTS: dict[str, tuple[Callable[[RunData], bytes], str]] = {
    "trials.csv": (_csv, "text/csv; charset=utf-8"),
    "trials.parquet": (_parquet, "application/vnd.apache.parquet"),
    "timeline.json": (_trace, "application/json"),
}
