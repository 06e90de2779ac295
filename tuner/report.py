"""What a run found, as one HTML file for a browser.

The summary's words, the figures and the tables become one view, and the template beside this
file lays it out. The page needs no network and no server; all text of a run is data to it,
never markup.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tuner.figures import (
    ABSENT,
    grouped,
    importance_figure,
    importances,
    parameter_figure,
    parameter_names,
    plotly_js,
    progress_figure,
    stage_figure,
    stages_of,
    value_words,
)
from tuner.run import Run, write_whole
from tuner.summary import (
    MAX_SOURCE_CHARS,
    NONE,
    Facts,
    correct_trials,
    count_words,
    error_ratio,
    latency_us_of,
    number_words,
    params_words,
    percent_words,
    ratio_words,
    relative_path,
    seconds_words,
    summary_of,
    text_of,
    trial_words,
    us_words,
)
from tuner.trial import Status, Trial

__all__ = ["write_report"]

MAX_PARAMETER_PLOTS = 12  # those that matter most; the table has them all
MAX_FAILURE_GROUPS = 40
MAX_LOG_CHARS = 6_000  # of a compiler's log on the page; the run's folder keeps it whole
MAX_DIFFS = 6

_STATUS_MEANING = {
    Status.CORRECT: "accepted by the check, and timed",
    Status.CONSTRAINTS: "refused before anything ran",
    Status.COMPILE: "the compiler refused it",
    Status.RUNTIME: "it crashed, or a launch failed",
    Status.TIMEOUT: "it did not end in time",
    Status.CORRECTNESS: "its answers are wrong, so it was not timed",
}


# ---- tables ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    """Plain cells under their headings; `numeric` names the columns that hold numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()


def _strategies(trials: Sequence[Trial]) -> list[str]:
    """Return the parameters that are a choice between words, and vary."""
    return [
        name
        for name in parameter_names(trials)
        if any(isinstance(t.params.get(name), str) for t in trials) or name == "template"
        if len({value_words(t, name) for t in trials}) > 1
    ]


def _contest(trials: Sequence[Trial], names: Sequence[str], most: int = 25) -> _Table:
    """Return which values of some parameters, together, gave the best latency."""
    best_us = min(map(latency_us_of, trials), default=math.inf)
    ranked = []
    for values, group in grouped(trials, names).items():
        times = sorted(latency_us_of(t) for t in correct_trials(group))
        ranked.append((times[0] if times else math.inf, values, len(group), times))
    ranked.sort(key=lambda entry: entry[:2])
    rows = [
        (
            *values,
            str(count),
            str(len(times)),
            _cell_us(times[0]) if times else NONE,
            _cell_us(statistics.median(times)) if times else NONE,
            f"{times[0] / best_us:.3f}" if times else NONE,
        )
        for _, values, count, times in ranked[:most]
    ]
    counted = ("trials", "correct", "best µs", "median µs", "times the best")
    return _Table((*names, *counted), tuple(rows), frozenset(counted))


def _all_trials(facts: Facts) -> _Table:
    names = parameter_names(facts.trials)
    before = ("trial", "status", "latency µs", "noise %", "speed-up")
    after = ("registers", "shared bytes", "spilled bytes", "build s", "at s", "reason")
    numeric = {*before, *after, *_number_names(facts.trials, names)} - {"status", "reason"}
    baseline_us = facts.number("baseline_us")
    rows = []
    for trial in facts.trials:
        values = [value_words(trial, name) for name in names]
        rows.append(
            (
                *_timing_cells(trial, baseline_us),
                *(NONE if value == ABSENT else value for value in values),
                *_build_cells(trial),
                f"{trial.elapsed_s:.1f}",
                _reason(trial),
            )
        )
    return _Table((*before, *names, *after), tuple(rows), frozenset(numeric))


def _number_names(trials: Sequence[Trial], names: Sequence[str]) -> set[str]:
    def is_number(name: str) -> bool:
        seen = [t.params[name] for t in trials if name in t.params]
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in seen)

    return {name for name in names if name != "template" and is_number(name)}


def _timing_cells(trial: Trial, baseline_us: float | None) -> tuple[str, ...]:
    outcome, status = trial.outcome, trial.outcome.status.value
    measurement = outcome.measurement
    if outcome.latency_us is None or measurement is None:
        return str(trial.number), status, NONE, NONE, NONE
    anchor_us = measurement.anchor_us or baseline_us
    return (
        str(trial.number),
        status,
        _cell_us(outcome.latency_us),
        f"{100 * measurement.noise:.2g}",
        f"{anchor_us / outcome.latency_us:.3f}" if anchor_us else NONE,
    )


def _cell_us(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def _build_cells(trial: Trial) -> tuple[str, ...]:
    build = trial.outcome.build
    if build is None:
        return (NONE,) * 4
    seconds = f"{build.seconds:.2f}"
    if not build.kernels:
        return NONE, NONE, NONE, seconds
    registers = max(kernel.registers for kernel in build.kernels)
    smem_bytes = max(kernel.smem_bytes for kernel in build.kernels)
    spilled = sum(k.spill_store_bytes + k.spill_load_bytes for k in build.kernels)
    return str(registers), str(smem_bytes), str(spilled), seconds


def _reason(trial: Trial) -> str:
    outcome = trial.outcome
    notes = [" ".join(outcome.reason.split())[:300]] if outcome.reason else []
    if outcome.same_as is not None:
        notes.append(f"same machine code as trial {outcome.same_as}")
    if outcome.measurement is not None and outcome.measurement.is_censored:
        notes.append("stopped early, clearly slow")
    return "; ".join(notes)


# ---- failures -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Failure:
    """Trials that failed for the same reason, but for numbers in its words."""

    status: str
    reason: str
    count: int
    trials: str
    log: str
    example: int


def _failures(facts: Facts) -> list[_Failure]:
    groups: dict[tuple[Status, str], list[Trial]] = defaultdict(list)
    for trial in facts.trials:
        if trial.outcome.status is not Status.CORRECT:
            first = (trial.outcome.reason.strip() or "no reason was recorded").splitlines()[0]
            groups[trial.outcome.status, re.sub(r"\d[\d.e+-]*", "#", first)].append(trial)
    ranked = sorted(groups.values(), key=len, reverse=True)
    return [_failure(facts, group) for group in ranked[:MAX_FAILURE_GROUPS]]


def _failure(facts: Facts, group: Sequence[Trial]) -> _Failure:
    first = group[0]
    folder = facts.candidate(first)
    log = ""
    if first.outcome.status is Status.COMPILE and folder is not None:
        log = text_of(folder / "log.txt", MAX_LOG_CHARS)
    return _Failure(
        first.outcome.status.value,
        first.outcome.reason.strip()[:2000] or "no reason was recorded",
        len(group),
        number_words([trial.number for trial in group]),
        log,
        first.number,
    )


# ---- sources --------------------------------------------------------------------------------


def _highlighted(text: str, lexer_name: str) -> Markup:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    formatter = HtmlFormatter(cssclass="code", wrapcode=True)
    return Markup(highlight(text, get_lexer_by_name(lexer_name, stripnl=False), formatter))


def _code_styles() -> Markup:
    """Return the colours of highlighted code for light pages and for dark screens."""
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".code")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".code")
    return Markup(f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}")


_LEXERS = {".cu": "cuda", ".cpp": "cpp", ".py": "python"}


def _winner_source(facts: Facts) -> tuple[str, Markup]:
    """Return where the winner's source is, and its highlighted text."""
    name, text = facts.source(facts.best) if facts.best else ("", "")
    if text and facts.best is not None:
        name = f"candidates/{facts.best.candidate_key}/{name}"
    elif text := text_of(facts.run.export_path, MAX_SOURCE_CHARS):
        name = relative_path(str(facts.run.export_path), facts.run.path)
    if not text:
        return "", Markup("")
    return name, _highlighted(text, _LEXERS.get(Path(name).suffix, "text"))


def _diffs(facts: Facts) -> list[tuple[str, Markup]]:
    """Return how the other finalists' sources differ from the winner's."""
    if facts.best is None or facts.result is None:
        return []
    by_number = {trial.number: trial for trial in facts.trials}
    winner = facts.source(facts.best)[1]
    found: list[tuple[str, Markup]] = []
    for finalist in facts.result.finalists:
        trial = by_number.get(finalist.trial)
        if trial is None or trial.number == facts.best.number or len(found) == MAX_DIFFS:
            continue
        other = facts.source(trial)[1]
        if not winner or not other:
            continue
        names = f"trial {facts.best.number}", f"trial {trial.number}"
        lines = difflib.unified_diff(winner.splitlines(), other.splitlines(), *names, lineterm="")
        text = "\n".join(lines) or "the same text"
        label = f"trial {trial.number}, {us_words(trial.outcome.latency_us)} at screening"
        found.append((label, _highlighted(text, "diff")))
    return found


# ---- the page -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chart:
    """A figure with the words that say what it shows to those who cannot see it."""

    name: str
    label: str
    caption: str
    data: Markup


def write_report(run: Run) -> Path:
    """Write the run's report, whole or not at all; return its path.

    The file holds all it needs: no network, no server. A run that has not finished, or failed
    altogether, has a report too.

    Raises:
        StorageError: a file of the run cannot be read, or the report not written.
    """
    facts = Facts.of(run)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "us": us_words,
        "percent": percent_words,
        "ratio": ratio_words,
        "hash": _script_hash,
    }
    page = environment.get_template("report.html.j2").render(_view(facts))
    # A lone surrogate (a file name that is not UTF-8, in a reason) cannot be written.
    write_whole(run.report_path, page.encode("utf-8", "replace").decode("utf-8"))
    return run.report_path


def _view(facts: Facts) -> dict[str, Any]:
    """Return all that the template shows, by name."""
    shares = importances(facts.trials)
    source_name, source = _winner_source(facts)
    stages = stages_of(facts.trials)
    builds = [trial.outcome.build for trial in facts.trials]
    strategies = _strategies(facts.trials)
    return {
        "summary": summary_of(facts),
        "finalists": facts.result.finalists if facts.result else (),
        "exported": facts.result.exported if facts.result else None,
        "error_ratio": error_ratio,
        "trial_words": trial_words,
        "params_words": params_words,
        "progress": _progress_charts(facts),
        "importance": _importance_chart(shares),
        "parameters": _parameter_chart(facts.trials, shares),
        "contests": [(name, _contest(facts.trials, [name])) for name in strategies],
        "together": _contest(facts.trials, strategies) if len(strategies) > 1 else None,
        "status_meaning": {status.value: text for status, text in _STATUS_MEANING.items()},
        "failures": _failures(facts),
        "stages": [(stage, seconds_words(stage.seconds)) for stage in stages],
        "stage_chart": _stage_chart(facts.trials),
        "num_cached": sum(build.is_cached for build in builds if build),
        "num_same": sum(t.outcome.same_as is not None for t in facts.trials),
        "source_name": source_name,
        "source": source,
        "diffs": _diffs(facts),
        "table": _all_trials(facts),
        "config": _highlighted(facts.config, "yaml") if facts.config else "",
        "environment": _flat(facts.environment),
        "started_at": facts.word("started_at"),
        "code_styles": _code_styles(),
        "plotly_js": Markup(plotly_js()),
    }


def _chart(name: str, label: str, caption: str, figure: Any) -> _Chart:
    data = json.loads(figure.to_json())
    data["layout"].pop("template", None)  # the page's own follows the reader's light or dark
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":  # inside a script element nothing else could end it
        text = text.replace(character, f"\\u{ord(character):04x}")
    return _Chart(name, label, caption, Markup(text))


def _progress_charts(facts: Facts) -> list[_Chart]:
    if not facts.trials:
        return []
    baseline_us, floors = facts.number("baseline_us"), facts.floors()
    best = min(correct_trials(facts.trials), key=latency_us_of, default=None)
    words = f"Of {count_words(len(facts.trials), 'trial')}"
    if best is None:
        words += " none is correct."
    else:
        words += (
            f" number {best.number} is the fastest at screening, {us_words(latency_us_of(best))}."
        )
    words += " Failed trials stand below, by status."
    if not floors:
        words += " No physical floor: this device's rates are not known."
    by_trial = progress_figure(facts.trials, baseline_us, floors=floors)
    by_time = progress_figure(facts.trials, baseline_us, floors=floors, by="time")
    return [
        _chart("progress-trial", "By trial", words, by_trial),
        _chart("progress-time", "By time", words, by_time),
    ]


def _importance_chart(shares: Mapping[str, float]) -> _Chart | None:
    if not shares:
        return None
    first = max(shares, key=lambda name: shares[name])
    words = (
        f"How much each parameter decides whether a trial is among the fastest tenth "
        f"(PED-ANOVA over correct trials). Most of all: {first}, {100 * shares[first]:.0f} %. "
        "Parameters that exist for one template alone share its merit."
    )
    return _chart("importance", "Importance", words, importance_figure(shares))


def _parameter_chart(trials: Sequence[Trial], shares: Mapping[str, float]) -> _Chart | None:
    correct = correct_trials(trials)
    varied = [n for n in parameter_names(correct) if len({value_words(t, n) for t in correct}) > 1]
    names = sorted(varied, key=lambda name: -shares.get(name, 0.0))[:MAX_PARAMETER_PLOTS]
    if not names:
        return None
    words = "Every correct trial by each parameter's value; the green bar is the best one."
    if len(varied) > len(names):
        words += f" {len(varied) - len(names)} parameters that matter less are left out."
    return _chart("parameters", "Latency by parameter", words, parameter_figure(correct, names))


def _stage_chart(trials: Sequence[Trial]) -> _Chart | None:
    if not any(trial.outcome.seconds for trial in trials):
        return None
    words = "Seconds of each stage over all trials; builds run beside the others."
    return _chart("stages", "Time by stage", words, stage_figure(trials))


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested facts as rows."""
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return rows


def _script_hash(text: str) -> Markup:
    """Return a script's hash as a Content-Security-Policy names it: no other script may run."""
    digest = hashlib.sha256(str(text).encode()).digest()
    return Markup(f"'sha256-{base64.b64encode(digest).decode()}'")
