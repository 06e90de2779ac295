"""What a run found, as one HTML file for a browser.

The summary's words, the tables and the figures become one page, which the files in `page/` lay
out. The page needs no network and no server; all text of a run is data to it, never markup.

    page_data(run_data)what the page shows, as JSON: its script can draw it again, and again
    write_report(run)  the page with its data, styles and scripts in one file
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tuner.review.charts import charts_of, figure_data
from tuner.review.formatting import (
    count_words,
    outlook_words,
    params_words,
    percent_words,
    ratio_words,
    seconds_words,
    us_in,
    us_words,
)
from tuner.review.gain import bytes_words
from tuner.review.run_data import RunData
from tuner.review.sections import PARTS, shown
from tuner.review.sources import code_styles, packed_sources
from tuner.review.summary import Summary, summary_of, trial_words
from tuner.review.tables import Column, trial_columns
from tuner.review.workloads import error_ratio
from tuner.run import Run
from tuner.storage import write_whole
from tuner.trial import Status
from tuner.wording import one_line, shape_words

__all__ = [
    "PAGE_DIR",
    "PARTS",
    "SCRIPTS",
    "chart_data",
    "json_markup",
    "page",
    "page_data",
    "page_environment",
    "parts_of",
    "script",
    "styles",
    "write_report",
    "write_report_of",
]

PAGE_DIR = Path(__file__).parent / "page"
SCRIPTS = ("plotly-basic.min.js", "parallel.js", "trials.js", "sources.js", "report.js")


def write_report(run: Run) -> Path:
    """Write the run's report, whole or not at all; return its path.

    The file holds all it needs: no network, no server. A run that has not finished, or failed
    altogether, has a report too.

    Raises:
        StorageError: a file of the run cannot be read, or the report not written.
    """
    return write_report_of(RunData.of(run))


def write_report_of(run_data: RunData) -> Path:
    """Write the report of a run that was read; see `write_report`."""
    run, text = run_data.run, page(run_data)
    # A lone surrogate (a file name that is not UTF-8, in a reason) cannot be written.
    write_whole(run.report_path, text.encode("utf-8", "replace").decode("utf-8"))
    return run.report_path


def page(run_data: RunData) -> str:
    """Return the page of a run with everything in it."""
    data = page_data(run_data)
    parts = {name: Markup(text) for name, text in data.pop("parts").items()}
    return (
        page_environment()
        .get_template("report.html.j2")
        .render(
            parts=parts,
            charts=data["charts"],
            data=json_markup(data),
            sources=packed_sources(run_data),
            title=data["title"],
            statuses=[status.value for status in Status],
            styles=styles(),
            scripts=[script(name) for name in SCRIPTS],
        )
    )


def page_data(
    run_data: RunData,
    chart_names: Sequence[str] | None = None,
    part_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return what the page shows, ready for JSON (no NaN, no infinity).

    Args:
        run_data: of the run.
        chart_names: figures wanted, of `charts.CHART_NAMES`; all if None. A live page asks for
            one at first, and for the others as they are looked at.
        part_names: texts wanted, of `PARTS`; all if None.

    Returns:
        `title`; `parts`: HTML by name, escaped; `charts`: label, caption and Plotly figure (or
        null) by name; `columns`: the table of all trials; `winner`: its number or null;
        `csv_name`.
    """
    summary = summary_of(run_data)
    return {
        "title": f"{summary.op} on {summary.device}: {summary.verdict}",
        "parts": parts_of(run_data, part_names, summary),
        "charts": chart_data(run_data, chart_names),
        "columns": [_column(column) for column in trial_columns(run_data)],
        "winner": summary.best.number if summary.best else None,
        "csv_name": f"{run_data.run.path.name}-trials.csv",
    }


def _column(column: Column) -> dict[str, Any]:
    values = [
        None if isinstance(value, float) and not math.isfinite(value) else value
        for value in column.values
    ]
    return {
        "name": column.name,
        "label": column.label,
        "kind": column.kind,
        "is_parameter": column.is_parameter,
        "values": values,
    }


def chart_data(
    run_data: RunData,
    names: Sequence[str] | None = None,
    shares: Callable[[], Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """Return label, caption and Plotly figure (or None) of each chart, by name.

    The arguments are those of `charts.charts_of`.
    """
    return {
        chart.name: {
            "label": chart.label,
            "caption": chart.caption,
            "figure": None if chart.figure is None else figure_data(chart.figure),
        }
        for chart in charts_of(run_data, names, shares)
    }


def parts_of(
    run_data: RunData, names: Sequence[str] | None = None, summary: Summary | None = None
) -> dict[str, str]:
    """Return the parts of the page that are text and tables, as HTML by name, all escaped.

    Args:
        run_data: of the run.
        names: those wanted, of `PARTS`; all if None.
        summary: the run's summary, where it is known already.
    """
    module = page_environment().get_template("parts.html.j2").module
    summary = summary or summary_of(run_data)
    return {
        name: str(getattr(module, name)({"summary": summary, **shown(name, run_data, summary)}))
        for name in names or PARTS
    }


# ---- what the page is made of ---------------------------------------------------------------


def styles() -> Markup:
    """Return the page's style sheet, with the colours of highlighted code."""
    text = (PAGE_DIR / "report.css").read_text(encoding="utf-8")
    return Markup(f"{text}\n{code_styles()}\n.code, .code .err {{ background: none; border: 0; }}")


@functools.cache
def script(name: str) -> Markup:
    """Return one of the page's scripts, of `SCRIPTS`; ours all, or Plotly's own."""
    text = (PAGE_DIR / name).read_text(encoding="utf-8")
    return Markup(text.replace("\r\n", "\n").strip())


def json_markup(data: Any) -> Markup:
    """Return data as JSON that nothing in it can make end its script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@functools.cache
def page_environment() -> Environment:
    """Return what renders the page's templates: everything escaped, nothing undefined."""
    environment = Environment(
        loader=FileSystemLoader(PAGE_DIR),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "us": us_words,
        "us_in": us_in,
        "count": count_words,
        "bytes": bytes_words,
        "shape": shape_words,
        "percent": percent_words,
        "one_line": one_line,
        "ratio": ratio_words,
        "duration": seconds_words,
        "hash": _script_hash,
        "error_ratio": error_ratio,
        "trial_words": trial_words,
        "outlook_words": outlook_words,
        "params_words": params_words,
        "breakable": _breakable,
    }
    return environment


def _breakable(text: str) -> Markup:
    """Return a name that may break behind each underscore, as those of modules are long."""
    return escape(text).replace("_", Markup("_<wbr>"))


def _script_hash(text: str) -> Markup:
    """Return a script's hash as a Content-Security-Policy names it: no other script may run."""
    digest = hashlib.sha256(str(text).encode()).digest()
    return Markup(f"'sha256-{base64.b64encode(digest).decode()}'")
