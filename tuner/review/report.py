"""What a run found, as one HTML file for a browser.

The summary's words, the tables and the figures become one page, which the files in `page/` lay
out. The page needs no network and no server; all text of a run is data to it, never markup.

    page_data(facts)   what the page shows, as JSON: its script can draw it again, and again
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
from markupsafe import Markup

from tuner.review.charts import charts_of, figure_data
from tuner.review.facts import Facts
from tuner.review.gain import bytes_words, shape_words
from tuner.review.sources import code_styles, highlighted, packed_sources, winner_source
from tuner.review.summary import Summary, error_ratio, summary_of, trial_words
from tuner.review.tables import Column, contest, failures, strategies, trial_columns
from tuner.review.timeline import stages_of, workers_of
from tuner.review.words import (
    outlook_words,
    params_words,
    percent_words,
    ratio_words,
    seconds_words,
    us_words,
)
from tuner.run import Run
from tuner.storage import write_whole
from tuner.trial import Status, Trial
from tuner.wording import one_line

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
]

PAGE_DIR = Path(__file__).parent / "page"
SCRIPTS = ("plotly-basic.min.js", "parallel.js", "trials.js", "sources.js", "report.js")

_STATUS_MEANING = {
    Status.CORRECT: "accepted by the check, and timed",
    Status.CONSTRAINTS: "refused before anything ran",
    Status.COMPILE: "the compiler refused it",
    Status.RUNTIME: "it crashed, or a launch failed",
    Status.TIMEOUT: "it did not end in time",
    Status.CORRECTNESS: "its answers are wrong, so it was not timed",
}


def write_report(run: Run) -> Path:
    """Write the run's report, whole or not at all; return its path.

    The file holds all it needs: no network, no server. A run that has not finished, or failed
    altogether, has a report too.

    Raises:
        StorageError: a file of the run cannot be read, or the report not written.
    """
    text = page(Facts.of(run))
    # A lone surrogate (a file name that is not UTF-8, in a reason) cannot be written.
    write_whole(run.report_path, text.encode("utf-8", "replace").decode("utf-8"))
    return run.report_path


def page(facts: Facts) -> str:
    """Return the page of a run with everything in it."""
    data = page_data(facts)
    parts = {name: Markup(text) for name, text in data.pop("parts").items()}
    return (
        page_environment()
        .get_template("report.html.j2")
        .render(
            parts=parts,
            charts=data["charts"],
            data=json_markup(data),
            sources=packed_sources(facts),
            title=data["title"],
            statuses=[status.value for status in Status],
            styles=styles(),
            scripts=[script(name) for name in SCRIPTS],
        )
    )


def page_data(
    facts: Facts, chart_names: Sequence[str] | None = None, part_names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return what the page shows, ready for JSON (no NaN, no infinity).

    Args:
        facts: of the run.
        chart_names: figures wanted, of `charts.CHART_NAMES`; all if None. A live page asks for
            one at first, and for the others as they are looked at.
        part_names: texts wanted, of `PARTS`; all if None.

    Returns:
        `title`; `parts`: HTML by name, escaped; `charts`: label, caption and Plotly figure (or
        null) by name; `columns`: the table of all trials; `winner`: its number or null;
        `csv_name`.
    """
    told = summary_of(facts)
    return {
        "title": f"{told.op} on {told.device}: {told.verdict}",
        "parts": parts_of(facts, part_names, told),
        "charts": chart_data(facts, chart_names),
        "columns": [_column(column) for column in trial_columns(facts)],
        "winner": told.best.number if told.best else None,
        "csv_name": f"{facts.run.path.name}-trials.csv",
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
    facts: Facts,
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
        for chart in charts_of(facts, names, shares)
    }


def parts_of(
    facts: Facts, names: Sequence[str] | None = None, told: Summary | None = None
) -> dict[str, str]:
    """Return the parts of the page that are text and tables, as HTML by name, all escaped.

    Args:
        facts: of the run.
        names: those wanted, of `PARTS`; all if None.
        told: the run's summary, where it is known already.
    """
    module = page_environment().get_template("parts.html.j2").module
    summary = told or summary_of(facts)
    return {
        name: str(getattr(module, name)({"summary": summary, **_SHOWN[name](facts)}))
        for name in names or PARTS
    }


def _shown_verdict(facts: Facts) -> dict[str, Any]:
    return {
        "finalists": facts.result.finalists if facts.result else (),
        "exported": facts.result.exported if facts.result else None,
    }


def _shown_module(facts: Facts) -> dict[str, Any]:
    """Return the module's graph, and the times of one call: before, after, the least."""
    module = facts.module
    if module is None:
        return {"module": None}
    told = summary_of(facts)
    is_fallback = facts.result is not None and facts.result.is_fallback
    times = [
        ("PyTorch", told.baseline_us),
        ("what was found: nothing faster" if is_fallback else "what was found", told.latency_us),
        ("the device's bound", module.gain.bound_us),
        ("a copy of as many bytes", module.gain.copy_us),
    ]
    known = [(what, time_us) for what, time_us in times if time_us]
    longest_us = max((time_us for _, time_us in known), default=1.0)
    return {"module": module, "times": known, "longest_us": longest_us}


def _shown_contests(facts: Facts) -> dict[str, Any]:
    trials = facts.trials
    words = strategies(trials)
    return {
        "contests": [(name, contest(trials, [name])) for name in words],
        "together": contest(trials, words) if len(words) > 1 else None,
    }


def _shown_failures(facts: Facts) -> dict[str, Any]:
    meaning = {status.value: text for status, text in _STATUS_MEANING.items()}
    return {"status_meaning": meaning, "failures": failures(facts)}


def _shown_time(facts: Facts) -> dict[str, Any]:
    trials = facts.trials
    builds = [trial.outcome.build for trial in trials]
    return {
        "stages": stages_of(trials) if _is_timed(trials) else [],
        "workers": workers_of(trials),
        "num_cached": sum(build.is_cached for build in builds if build),
        "num_same": sum(t.outcome.same_as is not None for t in trials),
    }


def _shown_source(facts: Facts) -> dict[str, Any]:
    name, text = winner_source(facts)
    return {"source_name": name, "source": text}


def _shown_how(facts: Facts) -> dict[str, Any]:
    return {
        "config": highlighted(facts.config, "yaml") if facts.config else "",
        "environment": _flat(facts.environment),
    }


# What each part shows beside the summary.
_SHOWN: dict[str, Callable[[Facts], dict[str, Any]]] = {
    "head": lambda facts: {"started_at": facts.word("started_at")},
    "verdict": _shown_verdict,
    "module": _shown_module,
    "contests": _shown_contests,
    "failures": _shown_failures,
    "time": _shown_time,
    "source": _shown_source,
    "how": _shown_how,
}
PARTS = tuple(_SHOWN)


def _is_timed(trials: Sequence[Trial]) -> bool:
    return any(trial.outcome.seconds for trial in trials)


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested facts as rows."""
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return rows


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
    }
    return environment


def _script_hash(text: str) -> Markup:
    """Return a script's hash as a Content-Security-Policy names it: no other script may run."""
    digest = hashlib.sha256(str(text).encode()).digest()
    return Markup(f"'sha256-{base64.b64encode(digest).decode()}'")
