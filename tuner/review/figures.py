"""The figures of what a search found: progress, importance, parameters, accuracy.

Each is a Plotly figure. Plotly and Optuna are imported when something is drawn. The page that
shows the figures is not known here, nor is the run's directory: trials go in, a figure comes
out. A trace of trials carries their numbers as `customdata`, and `HOVER` as its `meta` where
its text is `hover_words`: the page keeps each of those texts once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal

from tuner.review.summary import (
    correct_trials,
    latency_us_of,
    params_words,
    percent_words,
    us_words,
)
from tuner.review.tables import (
    grouped,
    ordered_values,
    parameter_names,
    pareto,
    rms_of,
    value_words,
)
from tuner.trial import Status, Trial

__all__ = [
    "ACCENT",
    "BASELINE",
    "BEST",
    "FLOOR",
    "HOVER",
    "MAX_POINTS",
    "accuracy_figure",
    "hover_words",
    "importance_figure",
    "importances",
    "log_axis",
    "parallel_figure",
    "parameter_figure",
    "plotly_text",
    "progress_figure",
    "template_marks",
    "thinned",
    "trial_points",
]

MIN_CORRECT_FOR_IMPORTANCE = 10  # Optuna compares the best tenth with the rest
MAX_POINTS = 4_000  # of one plot: a browser draws as many in about 0.3 s
HOVER = "trials"

# Each has a contrast of 3:1 or more on white and on the dark page (WCAG 2.2, 1.4.11); the marks
# differ in shape too.
_STATUS_MARKS = {
    Status.CORRECT: ("#1f83c4", "circle"),
    Status.CONSTRAINTS: ("#8a7414", "diamond"),
    Status.COMPILE: ("#d55e00", "x"),
    Status.RUNTIME: ("#b0519c", "triangle-up"),
    Status.TIMEOUT: ("#7f7f7f", "square"),
    Status.CORRECTNESS: ("#d03a4a", "cross"),
}
ACCENT, BEST, BASELINE, FLOOR = "#1f83c4", "#12875a", "#7a7f87", "#a8700b"
# Blue to orange through grey: told apart by the colour-blind, seen on white and on the dark page.
_ORANGE = "#d55e00"
_FAST_TO_SLOW = ((0.0, ACCENT), (0.5, "#8f8f8f"), (1.0, _ORANGE))
_TEMPLATE_MARKS = (
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


def log_axis(values: Iterable[float], **style: Any) -> dict[str, Any]:
    """Return a logarithmic axis for some values: over a decade only 1, 2 and 5 are labelled."""
    known = [value for value in values if value > 0]
    is_wide = bool(known) and max(known) > 5 * min(known)
    return {"type": "log", "tickformat": ",", **({"dtick": "D2"} if is_wide else {}), **style}


def template_marks(trials: Sequence[Trial]) -> dict[str, tuple[str, str]]:
    """Return each template's colour and mark; the ninth template has the first's again."""
    names = dict.fromkeys(trial.template for trial in trials)
    return {name: _TEMPLATE_MARKS[i % len(_TEMPLATE_MARKS)] for i, name in enumerate(names)}


def trial_points(
    trials: Sequence[Trial], xs: Sequence[Any], ys: Sequence[Any], name: str, **style: Any
) -> dict[str, Any]:
    """Return a scatter trace of trials that hovers with all that there is to say of each."""
    return {
        "x": list(xs),
        "y": list(ys),
        "mode": "markers",
        "name": plotly_text(name),
        "customdata": [trial.number for trial in trials],
        "hovertext": [hover_words(trial) for trial in trials],
        "hoverinfo": "text",
        "meta": HOVER,
        **style,
    }


def thinned(trials: Sequence[Trial], most: int = MAX_POINTS) -> list[Trial]:
    """Return trials few enough to draw, in order: the fastest, and an even share of the rest."""
    if len(trials) <= most:
        return list(trials)
    ranked = sorted(trials, key=latency_us_of)
    rest = ranked[most // 2 :]
    step = -(-len(rest) // (most - most // 2))
    return sorted([*ranked[: most // 2], *rest[::step]], key=lambda trial: trial.number)


# ---- progress -------------------------------------------------------------------------------


def progress_figure(
    trials: Sequence[Trial],
    baseline_us: float | None,
    *,
    compiled_us: float | None = None,
    floors: Mapping[str, float] | None = None,
    by: Literal["trial", "time"] = "trial",
) -> Any:
    """Draw every trial, the best so far, the baseline and the physical floors.

    Args:
        trials: in order.
        baseline_us: PyTorch's own latency.
        compiled_us: that of `torch.compile`, where somebody measured it.
        floors: physical floors in us, by name.
        by: what runs to the right: the trial's number or the seconds of working time.

    Returns:
        A `plotly.graph_objects.Figure`; trials without a latency stand below, by status.
    """
    from plotly.subplots import make_subplots

    failed = [t for t in trials if t.outcome.latency_us is None]
    correct = correct_trials(trials)
    share = min(1.0, MAX_POINTS / max(1, len(trials)))  # of each status, so that all are seen
    drawn = thinned(correct, math.ceil(share * len(correct)))
    figure = make_subplots(
        rows=2 if failed else 1,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.03,
        row_heights=[0.78, 0.22] if failed else None,
    )

    def place(trial: Trial) -> float:
        return trial.number if by == "trial" else trial.elapsed_s

    _add_points(figure, Status.CORRECT, drawn, place, [latency_us_of(t) for t in drawn], 1)
    places = [place(trial) for trial in trials] or [0.0, 1.0]
    if correct:
        best = _running_best(trials)
        xs = [place(t) for t, _ in best]
        _add_line(figure, xs, [us for _, us in best], "best so far", BEST, "solid")
    ends = [min(places), max(places)]
    levels = {
        "PyTorch (baseline)": (baseline_us, "dash"),
        "torch.compile": (compiled_us, "dashdot"),
    }
    for name, (level_us, dash) in levels.items():
        if level_us:
            _add_line(figure, ends, [level_us, level_us], name, BASELINE, dash)
    for number, (name, level) in enumerate((floors or {}).items()):
        dash = ("dot", "longdashdot")[number % 2]  # the legend tells them apart
        _add_line(figure, ends, [level, level], name, FLOOR, dash)
    for status in Status:
        group = [t for t in failed if t.outcome.status is status]
        group = thinned(group, math.ceil(share * len(group)))
        if group:
            _add_points(figure, status, group, place, [status.value] * len(group), 2)
    seen = [*map(latency_us_of, drawn), baseline_us or 0.0, *(floors or {}).values()]
    figure.update_yaxes(title_text="latency in µs", **log_axis(seen), row=1, col=1)
    words = "trial" if by == "trial" else "seconds of working time"
    ticks = {"dtick": 1} if by == "trial" and len(trials) <= 10 else {}  # no half trials
    figure.update_xaxes(title_text=words, **ticks, row=2 if failed else 1, col=1)
    figure.update_layout(
        height=520 if failed else 420, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}
    )
    return figure


def _add_points(
    figure: Any,
    status: Status,
    trials: Sequence[Trial],
    place: Callable[[Trial], float],
    ys: list[Any],
    row: int,
) -> None:
    colour, symbol = _STATUS_MARKS[status]
    xs = [place(trial) for trial in trials]
    marker = {"color": colour, "symbol": symbol, "size": 7, "opacity": 0.85}
    points = trial_points(trials, xs, ys, status.value, marker=marker)
    figure.add_scatter(**points, showlegend=row == 1, row=row, col=1)


def _add_line(
    figure: Any, xs: list[float], ys: list[float], name: str, colour: str, dash: str
) -> None:
    line = {"color": colour, "dash": dash, "width": 2, "shape": "hv"}
    hover = [f"{name}: {us_words(y)}" for y in ys]
    figure.add_scatter(
        x=xs, y=ys, mode="lines", name=name, line=line, text=hover, hoverinfo="text", row=1, col=1
    )


def _running_best(trials: Sequence[Trial]) -> list[tuple[Trial, float]]:
    """Return where the best latency fell, and the last trial to end the line."""
    steps: list[tuple[Trial, float]] = []
    for trial in trials:
        if latency_us_of(trial) < (steps[-1][1] if steps else math.inf):
            steps.append((trial, latency_us_of(trial)))
    return [*steps, (trials[-1], steps[-1][1])] if steps else []


# ---- what matters ---------------------------------------------------------------------------


def importances(trials: Sequence[Trial]) -> dict[str, float]:
    """Return how much each parameter decides whether a trial is among the best tenth.

    Shares of 1, the largest first; over correct trials. A parameter that a template does not
    have counts as one more value. Empty where fewer than 10 trials are correct.

    Source: Watanabe, Bansal, Hutter, "PED-ANOVA", IJCAI 2023, as Optuna computes it.
    """
    correct = correct_trials(trials)
    values = {name: {value_words(t, name) for t in correct} for name in parameter_names(correct)}
    varied = {name: tuple(sorted(seen)) for name, seen in values.items() if len(seen) > 1}
    if len(correct) < MIN_CORRECT_FOR_IMPORTANCE or not varied:
        return {}
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study()
            named = {
                name: optuna.distributions.CategoricalDistribution(choices)
                for name, choices in varied.items()
            }
            for trial in correct:
                params = {name: value_words(trial, name) for name in varied}
                study.add_trial(
                    optuna.create_trial(
                        params=params, distributions=named, value=latency_us_of(trial)
                    )
                )
            found = optuna.importance.get_param_importances(study)
    finally:
        optuna.logging.set_verbosity(level)
    return {name: share for name, share in found.items() if math.isfinite(share)}


def importance_figure(shares: Mapping[str, float]) -> Any:
    """Draw what `importances` found, the most important on top."""
    import plotly.graph_objects as go

    ranked = sorted(shares.items(), key=lambda pair: pair[1])
    bars = go.Bar(
        x=[share for _, share in ranked],
        y=[plotly_text(name) for name, _ in ranked],
        orientation="h",
        marker={"color": ACCENT},
        text=[f"{100 * share:.0f} %" for _, share in ranked],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    figure = go.Figure(bars)
    figure.update_xaxes(title_text="share of importance", tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(type="category", automargin=True)
    figure.update_layout(height=80 + 26 * len(ranked), showlegend=False, margin={"t": 10})
    return figure


def parameter_figure(trials: Sequence[Trial], names: Sequence[str]) -> Any:
    """Draw the latency of every correct trial by the value of each parameter.

    Args:
        trials: of any status.
        names: parameters, one plot each, in this order.
    """
    from plotly.subplots import make_subplots

    correct, num_columns = correct_trials(trials), min(3, len(names))
    correct = thinned(correct, MAX_POINTS // max(1, len(names)))
    num_rows = -(-len(names) // num_columns)
    figure = make_subplots(
        rows=num_rows,
        cols=num_columns,
        shared_yaxes=True,
        horizontal_spacing=0.03,
        vertical_spacing=min(0.5 / num_rows, 70 / (250 * num_rows)),
        subplot_titles=[plotly_text(name) for name in names],
    )
    for number, name in enumerate(names):
        row, col = number // num_columns + 1, number % num_columns + 1
        _add_parameter(figure, correct, name, row, col)
    figure.update_yaxes(**log_axis(map(latency_us_of, correct)))
    figure.update_yaxes(title_text="latency in µs", col=1)
    figure.update_layout(height=80 + 250 * num_rows, showlegend=False)
    return figure


def _add_parameter(figure: Any, correct: Sequence[Trial], name: str, row: int, col: int) -> None:
    words = ordered_values(correct, name)
    place = {word: index for index, word in enumerate(words)}
    # Points of one value are spread by the golden ratio, which never bunches.
    spread = [((t.number * 0.618034) % 1 - 0.5) * 0.6 for t in correct]
    xs = [round(place[value_words(t, name)] + s, 3) for t, s in zip(correct, spread, strict=True)]
    ys = [latency_us_of(trial) for trial in correct]
    marker = {"color": ACCENT, "size": 5, "opacity": 0.65}
    figure.add_scatter(**trial_points(correct, xs, ys, name, marker=marker), row=row, col=col)
    groups = grouped(correct, [name])
    best = [min(map(latency_us_of, groups[(word,)])) for word in words]
    figure.add_scatter(
        x=list(range(len(words))),
        y=best,
        mode="markers",
        marker={
            "color": _ORANGE,
            "symbol": "line-ew",
            "size": 30,
            "line": {"width": 3, "color": _ORANGE},
        },
        text=[
            f"best with {plotly_text(word)}: {us_words(us)}"
            for word, us in zip(words, best, strict=True)
        ],
        hoverinfo="text",
        row=row,
        col=col,
    )
    figure.update_xaxes(
        tickvals=list(range(len(words))),
        ticktext=[plotly_text(word) for word in words],
        range=[-0.6, len(words) - 0.4],
        row=row,
        col=col,
    )


def parallel_figure(trials: Sequence[Trial], names: Sequence[str]) -> Any:
    """Draw every correct trial as a line through its parameters' values and its latency.

    Args:
        trials: of any status.
        names: parameters, from left to right; the latency stands behind them.
    """
    import plotly.graph_objects as go

    correct = thinned(correct_trials(trials))
    times = [math.log10(latency_us_of(trial)) for trial in correct]
    dimensions = []
    for name in names:
        words = ordered_values(correct, name)
        place = {word: index for index, word in enumerate(words)}
        dimensions.append(
            {
                "label": plotly_text(name),
                "values": [place[value_words(trial, name)] for trial in correct],
                "tickvals": list(range(len(words))),
                "ticktext": [plotly_text(word) for word in words],
            }
        )
    ticks = _log_ticks(times)
    dimensions.append(
        {
            "label": "latency",
            "values": times,
            "tickvals": ticks,
            "ticktext": [us_words(10**tick) for tick in ticks],
        }
    )
    line = {"color": times, "colorscale": list(_FAST_TO_SLOW)}
    lines = go.Parcoords(
        dimensions=dimensions, line=line, customdata=[trial.number for trial in correct]
    )
    figure = go.Figure(lines)
    figure.update_layout(height=420, margin={"l": 80, "r": 80})
    return figure


def _log_ticks(logs: Sequence[float], num: int = 5) -> list[float]:
    low, high = (min(logs), max(logs)) if logs else (0.0, 1.0)
    if high - low < 1e-9:
        return [low]
    return [low + (high - low) * i / (num - 1) for i in range(num)]


def accuracy_figure(trials: Sequence[Trial], baseline_us: float | None) -> Any:
    """Draw the error of every correct trial against its latency, and those that none beats.

    The error is the relative rms error against float64 on the first probe, the inputs as given.
    The cross is the baseline.
    """
    import plotly.graph_objects as go

    known = thinned([t for t in correct_trials(trials) if rms_of(t) is not None])
    figure = go.Figure()
    for name, (colour, symbol) in template_marks(trials).items():
        group = [trial for trial in known if trial.template == name]
        if group:
            marker = {"color": colour, "symbol": symbol, "size": 7, "opacity": 0.8}
            xs, ys = [latency_us_of(t) for t in group], [rms_of(t) for t in group]
            figure.add_scatter(**trial_points(group, xs, ys, name, marker=marker))
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
        figure.add_scatter(
            x=[baseline_us],
            y=[first.baseline_rms_rel],
            mode="markers",
            name="PyTorch (baseline)",
            marker={
                "color": BASELINE,
                "symbol": "x-thin",
                "size": 14,
                "line": {"width": 3, "color": BASELINE},
            },
            hovertext=[f"PyTorch: {us_words(baseline_us)}, {first.baseline_rms_rel:.2e}"],
            hoverinfo="text",
        )
    times, errors = [latency_us_of(t) for t in known], [rms_of(t) or 0.0 for t in known]
    figure.update_xaxes(title_text="latency in µs", **log_axis([*times, baseline_us or 0.0]))
    style = {"tickformat": ".1e", "title_text": "relative rms error"}
    figure.update_yaxes(**log_axis([*errors, first.baseline_rms_rel if first else 0.0], **style))
    figure.update_layout(height=420, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return figure
