"""What all figures share, marks, axes and hovering; and the one of accuracy.

Each is a Plotly figure. Plotly is imported when something is drawn. The page that shows the
figures is not known here, nor is the run's directory: trials go in, a figure comes out. A trace
of trials carries their numbers as `customdata`, and `HOVER` as its `meta`: the page's script
makes their texts from its table, and `with_hovers` makes the same for a notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from tuner.review.formatting import (
    params_words,
    percent_words,
    seconds_words,
    us_words,
)
from tuner.review.run_data import correct_trials, latency_us_of
from tuner.review.tables import (
    pareto,
    rms_of,
)
from tuner.trial import Status, Trial

__all__ = [
    "ACCENT",
    "BASELINE",
    "BEST",
    "FLOOR",
    "HOVER",
    "HOVER_SPANS",
    "LEGEND",
    "MAX_POINTS",
    "STATUS_MARKS",
    "TEMPLATE_MARKS",
    "accuracy_figure",
    "add_templates",
    "bars",
    "baseline_point",
    "hover_words",
    "log_axis",
    "plotly_text",
    "starred",
    "template_marks",
    "thinned",
    "trial_points",
    "with_hovers",
]

MAX_POINTS = 4_000  # of one plot: a browser draws as many in about 0.3 s
HOVER, HOVER_SPANS = "trials", "spans"
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}  # above a figure

# Each has a contrast of 3:1 or more on white and on the dark page (WCAG 2.2, 1.4.11); the marks
# differ in shape too.
STATUS_MARKS = {
    Status.CORRECT: ("#1f83c4", "circle"),
    Status.CONSTRAINTS: ("#8a7414", "diamond"),
    Status.COMPILE: ("#d55e00", "x"),
    Status.RUNTIME: ("#b0519c", "triangle-up"),
    Status.TIMEOUT: ("#7f7f7f", "square"),
    Status.CORRECTNESS: ("#d03a4a", "cross"),
}
ACCENT, BEST, BASELINE, FLOOR = "#1f83c4", "#12875a", "#7a7f87", "#a8700b"
TEMPLATE_MARKS = (
    (ACCENT, "circle"),
    ("#d55e00", "square"),
    (BEST, "diamond"),
    ("#b0519c", "triangle-up"),
    ("#8a7414", "cross"),
    ("#d03a4a", "x"),
    ("#7f7f7f", "triangle-down"),
    ("#2f7f86", "star"),
)


# ---- what several figures share -------------------------------------------------------------


def plotly_text(text: str) -> str:
    """Escape a text: Plotly reads a little HTML."""
    return escape(text, quote=False)


def log_axis(values: Iterable[float], **style: Any) -> dict[str, Any]:
    """Return a logarithmic axis for some values: over a decade only 1, 2 and 5 are labelled."""
    known = [value for value in values if value > 0]
    is_wide = bool(known) and max(known) > 5 * min(known)
    return {"type": "log", "tickformat": ",", **({"dtick": "D2"} if is_wide else {}), **style}


def template_marks(trials: Sequence[Trial]) -> dict[str, tuple[str, str]]:
    """Return each template's colour and mark; the ninth template has the first's again."""
    names = dict.fromkeys(trial.template for trial in trials)
    return {name: TEMPLATE_MARKS[i % len(TEMPLATE_MARKS)] for i, name in enumerate(names)}


def baseline_point(x: float, y: float, words: str, *, symbol: str, size: int) -> dict[str, Any]:
    """Return the trace of PyTorch's own point; `words` stands in its hover text."""
    line = {"width": 3, "color": BASELINE}
    return {
        "x": [x],
        "y": [y],
        "mode": "markers",
        "name": "PyTorch (baseline)",
        "marker": {"color": BASELINE, "symbol": symbol, "size": size, "line": line},
        "hovertext": [f"PyTorch: {words}"],
        "hoverinfo": "text",
    }


def bars(
    values: Sequence[float], names: Sequence[str], words: Sequence[str], colour: Any, **axis: Any
) -> Any:
    """Return a figure of horizontal bars, the last one on top; `words` stand at their ends."""
    import plotly.graph_objects as go

    drawn = go.Bar(
        x=list(values),
        y=[plotly_text(name) for name in names],
        orientation="h",
        marker={"color": colour},
        text=list(words),
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    figure = go.Figure(drawn)
    figure.update_xaxes(rangemode="tozero", **axis)
    figure.update_yaxes(type="category", automargin=True)
    figure.update_layout(height=80 + 28 * len(values), showlegend=False, margin={"t": 10})
    return figure


def trial_points(
    trials: Sequence[Trial], xs: Sequence[Any], ys: Sequence[Any], name: str, **style: Any
) -> dict[str, Any]:
    """Return a scatter trace of trials, which `with_hovers` or the page gives their texts."""
    return {
        "x": list(xs),
        "y": list(ys),
        "mode": "markers",
        "name": plotly_text(name),
        "customdata": [trial.number for trial in trials],
        "hoverinfo": "text",
        "meta": HOVER,
        **style,
    }


def add_templates(
    figure: Any,
    trials: Sequence[Trial],
    drawn: Sequence[Trial],
    x: Callable[[Trial], Any],
    y: Callable[[Trial], Any],
) -> None:
    """Add the points of some of the trials to a figure, a trace for each template."""
    for name, (colour, symbol) in template_marks(trials).items():
        group = [trial for trial in drawn if trial.template == name]
        if group:
            marker = {"color": colour, "symbol": symbol, "size": 7, "opacity": 0.8}
            points = trial_points(group, [*map(x, group)], [*map(y, group)], name, marker=marker)
            figure.add_scatter(**points)


def thinned(trials: Sequence[Trial], most: int = MAX_POINTS) -> list[Trial]:
    """Return trials few enough to draw, in order: the fastest, and an even share of the rest."""
    if len(trials) <= most:
        return list(trials)
    ranked = sorted(trials, key=latency_us_of)
    rest = ranked[most // 2 :]
    step = -(-len(rest) // (most - most // 2))
    return sorted([*ranked[: most // 2], *rest[::step]], key=lambda trial: trial.number)


def hover_words(trial: Trial) -> str:
    """Return a trial in a few lines, escaped for Plotly."""
    outcome = trial.outcome
    head = f"trial {trial.number}: {outcome.status.value}"
    if outcome.measurement is not None and outcome.latency_us is not None:
        head += f", {us_words(outcome.latency_us)} ± {percent_words(outcome.measurement.noise)}"
        head += " (stopped early)" if outcome.measurement.is_censored else ""
    lines = [head, *_wrapped(params_words(trial), 12)]
    if outcome.reason:
        lines += _wrapped(outcome.reason, 3)
    return "<br>".join(plotly_text(line) for line in lines)


def _wrapped(text: str, max_lines: int, columns: int = 60) -> list[str]:
    """Break a text at blanks; `textwrap` takes ten times as long, and there are many trials."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) >= columns:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word[: 2 * columns]
    lines.append(line)
    return lines if len(lines) <= max_lines else [*lines[:max_lines], "..."]


def with_hovers(drawn: Any, trials: Sequence[Trial]) -> Any:
    """Return a figure whose points have the texts that the page's script makes of its table.

    Args:
        drawn: a figure of these rooms, Plotly's own or plain data.
        trials: of the run.
    """
    import plotly.graph_objects as go

    figure = go.Figure(drawn)
    by_number = {trial.number: trial for trial in trials}
    for trace in figure.data:
        if trace.meta == HOVER:
            trace.hovertext = [hover_words(by_number[number]) for number in trace.customdata]
        elif trace.meta == HOVER_SPANS:
            trace.hovertext = _span_words(trace)
    return figure


def _span_words(trace: Any) -> list[str | None]:
    """Return the texts of a lane's points: three a span, and a gap."""
    words: list[str | None] = []
    for at in range(0, len(trace.x), 4):
        length = seconds_words(trace.x[at + 2] - trace.x[at])
        words += [f"trial {trace.customdata[at]}: {trace.name}, {length}"] * 3 + [None]
    return words


def starred(figure: Any, number: int) -> Any:
    """Put a star on a trial in every panel of a figure that shows it.

    Args:
        figure: of trials, Plotly's own or plain data; it is changed.
        number: the trial's.
    """
    is_plain = isinstance(figure, dict)
    found: list[dict[str, Any]] = []
    for trace in figure["data"]:
        at = trace.get if is_plain else trace.__getitem__  # None of what it has not
        if at("meta") != HOVER or at("type") != "scatter":
            continue
        numbers = list(at("customdata"))
        if number in numbers:
            place = numbers.index(number)
            axes = {axis: at(axis) for axis in ("xaxis", "yaxis") if at(axis)}
            line = {"width": 1, "color": "#ffffff"}
            found.append(
                {
                    "type": "scatter",
                    "x": [at("x")[place]],
                    "y": [at("y")[place]],
                    "mode": "markers",
                    "name": "winner",
                    "showlegend": not found,
                    "marker": {"color": BEST, "symbol": "star", "size": 15, "line": line},
                    "hoverinfo": "skip",  # the point below says what it is
                    **axes,
                }
            )
    if is_plain:
        figure["data"].extend(found)
    else:
        figure.add_traces(found)
    return figure


# ---- accuracy -------------------------------------------------------------------------------


def accuracy_figure(trials: Sequence[Trial], baseline_us: float | None) -> Any:
    """Draw the error of every correct trial against its latency, and those that none beats.

    The error is the relative rms error against float64 on the first probe, the inputs as given.
    The cross is the baseline.
    """
    import plotly.graph_objects as go

    known = thinned([t for t in correct_trials(trials) if rms_of(t) is not None])
    figure = go.Figure()
    add_templates(figure, trials, known, latency_us_of, rms_of)
    front = pareto(trials)
    figure.add_scatter(
        x=[latency_us_of(trial) for trial in front],
        y=[rms_of(trial) for trial in front],
        mode="lines",
        name="none is both faster and closer",
        line={"color": BEST, "width": 2, "shape": "hv"},
        hoverinfo="skip",
    )
    first = next((t.outcome.check.probes[0] for t in known if t.outcome.check), None)
    if first is not None and first.baseline_rms_rel > 0 and baseline_us:
        words = f"{us_words(baseline_us)}, {first.baseline_rms_rel:.2e}"
        point = (baseline_us, first.baseline_rms_rel)
        figure.add_scatter(**baseline_point(*point, words, symbol="x-thin", size=14))
    times, errors = [latency_us_of(t) for t in known], [rms_of(t) or 0.0 for t in known]
    figure.update_xaxes(title_text="latency in µs", **log_axis([*times, baseline_us or 0.0]))
    style = {"tickformat": ".1e", "title_text": "relative rms error"}
    figure.update_yaxes(**log_axis([*errors, first.baseline_rms_rel if first else 0.0], **style))
    figure.update_layout(height=420, legend=LEGEND)
    return figure
