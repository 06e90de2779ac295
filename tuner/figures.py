"""The figures of a run: progress, importance, parameters, stages; each a Plotly figure.

Plotly and Optuna are imported when something is drawn. The page that shows the figures is not
known here, nor is the run's directory: trials go in, a figure comes out.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from tuner.summary import (
    correct_trials,
    latency_us_of,
    params_words,
    percent_words,
    seconds_words,
    us_words,
)
from tuner.trial import Status, Trial, Value

__all__ = [
    "ABSENT",
    "Stage",
    "grouped",
    "importance_figure",
    "importances",
    "parameter_figure",
    "parameter_names",
    "plotly_js",
    "progress_figure",
    "stage_figure",
    "stages_of",
    "value_words",
]

MIN_CORRECT_FOR_IMPORTANCE = 10  # Optuna compares the best tenth with the rest
ABSENT = "absent"  # a parameter that a template does not have

# Each has a contrast of 3:1 or more on white and on the dark page (WCAG 2.2, 1.4.11); the marks
# differ in shape too.
_STATUS_MARKS = {
    Status.CORRECT: ("#0072b2", "circle"),
    Status.CONSTRAINTS: ("#8a7414", "diamond"),
    Status.COMPILE: ("#d55e00", "x"),
    Status.RUNTIME: ("#b0519c", "triangle-up"),
    Status.TIMEOUT: ("#7f7f7f", "square"),
    Status.CORRECTNESS: ("#d03a4a", "cross"),
}
_BEST, _BASELINE, _FLOOR = "#12875a", "#7a7f87", "#a8700b"


def progress_figure(
    trials: Sequence[Trial],
    baseline_us: float | None,
    *,
    floors: Mapping[str, float] | None = None,
    by: Literal["trial", "time"] = "trial",
) -> Any:
    """Draw every trial, the best so far, the baseline and the physical floors.

    Args:
        trials: in order.
        baseline_us: PyTorch's own latency.
        floors: physical floors in us, by name.
        by: what runs to the right: the trial's number or the seconds of working time.

    Returns:
        A `plotly.graph_objects.Figure`; trials without a latency stand below, by status.
    """
    from plotly.subplots import make_subplots

    failed = [t for t in trials if t.outcome.latency_us is None]
    correct = correct_trials(trials)
    figure = make_subplots(
        rows=2 if failed else 1,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.03,
        row_heights=[0.78, 0.22] if failed else None,
    )

    def place(trial: Trial) -> float:
        return trial.number if by == "trial" else trial.elapsed_s

    _add_points(figure, Status.CORRECT, correct, place, [latency_us_of(t) for t in correct], 1)
    places = [place(trial) for trial in trials] or [0.0, 1.0]
    if correct:
        best = _running_best(trials)
        xs = [place(t) for t, _ in best]
        _add_line(figure, xs, [us for _, us in best], "best so far", _BEST, "solid")
    named = {"PyTorch (baseline)": baseline_us} if baseline_us else {}
    ends = [min(places), max(places)]
    for name, level in named.items():
        _add_line(figure, ends, [level, level], name, _BASELINE, "dash")
    for name, level in (floors or {}).items():
        _add_line(figure, ends, [level, level], name, _FLOOR, "dot")
    for status in Status:
        group = [t for t in failed if t.outcome.status is status]
        if group:
            _add_points(figure, status, group, place, [status.value] * len(group), 2)
    figure.update_yaxes(title_text="latency in µs", type="log", tickformat=",", row=1, col=1)
    words = "trial" if by == "trial" else "seconds of working time"
    figure.update_xaxes(title_text=words, row=2 if failed else 1, col=1)
    figure.update_layout(
        height=520 if failed else 420, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}
    )
    return figure


def _add_points(
    figure: Any, status: Status, trials: Sequence[Trial], place: Any, ys: list[Any], row: int
) -> None:
    colour, symbol = _STATUS_MARKS[status]
    figure.add_scatter(
        x=[place(t) for t in trials],
        y=ys,
        mode="markers",
        name=status.value,
        marker={"color": colour, "symbol": symbol, "size": 7, "opacity": 0.75},
        hovertext=[_hover(t) for t in trials],
        hoverinfo="text",
        showlegend=row == 1,
        row=row,
        col=1,
    )


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


def _hover(trial: Trial) -> str:
    """Return a trial in a few lines; Plotly reads a little HTML, so all text is escaped."""
    outcome = trial.outcome
    head = f"trial {trial.number}: {outcome.status.value}"
    if outcome.measurement is not None and outcome.latency_us is not None:
        head += f", {us_words(outcome.latency_us)} ± {percent_words(outcome.measurement.noise)}"
        head += " (stopped early)" if outcome.measurement.is_censored else ""
    parts = [head, *textwrap.wrap(params_words(trial), 60)]
    if outcome.reason:
        parts += textwrap.wrap(outcome.reason, 60, max_lines=3, placeholder=" ...")
    return "<br>".join(_plotly_text(part) for part in parts)


def _plotly_text(text: str) -> str:
    return escape(text, quote=False)


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
        y=[_plotly_text(name) for name, _ in ranked],
        orientation="h",
        marker={"color": _STATUS_MARKS[Status.CORRECT][0]},
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
    num_rows = -(-len(names) // num_columns)
    figure = make_subplots(
        rows=num_rows,
        cols=num_columns,
        shared_yaxes=True,
        horizontal_spacing=0.03,
        vertical_spacing=min(0.5 / num_rows, 70 / (250 * num_rows)),
        subplot_titles=[_plotly_text(name) for name in names],
    )
    for number, name in enumerate(names):
        row, col = number // num_columns + 1, number % num_columns + 1
        _add_parameter(figure, correct, name, row, col)
    figure.update_yaxes(type="log", tickformat=",")
    figure.update_yaxes(title_text="latency in µs", col=1)
    figure.update_layout(height=80 + 250 * num_rows, showlegend=False)
    return figure


def _add_parameter(figure: Any, correct: Sequence[Trial], name: str, row: int, col: int) -> None:
    words = _values(correct, name)
    place = {word: index for index, word in enumerate(words)}
    # Points of one value are spread by the golden ratio, which never bunches.
    spread = [((t.number * 0.618034) % 1 - 0.5) * 0.6 for t in correct]
    figure.add_scatter(
        x=[
            round(place[value_words(t, name)] + s, 3) for t, s in zip(correct, spread, strict=True)
        ],
        y=[latency_us_of(t) for t in correct],
        mode="markers",
        marker={"color": _STATUS_MARKS[Status.CORRECT][0], "size": 5, "opacity": 0.45},
        text=[f"trial {t.number}: {us_words(latency_us_of(t))}" for t in correct],
        hoverinfo="text",
        row=row,
        col=col,
    )
    groups = grouped(correct, [name])
    best = [min(map(latency_us_of, groups[(word,)])) for word in words]
    figure.add_scatter(
        x=list(range(len(words))),
        y=best,
        mode="markers",
        marker={
            "color": _BEST,
            "symbol": "line-ew",
            "size": 26,
            "line": {"width": 3, "color": _BEST},
        },
        text=[
            f"best with {_plotly_text(word)}: {us_words(us)}"
            for word, us in zip(words, best, strict=True)
        ],
        hoverinfo="text",
        row=row,
        col=col,
    )
    figure.update_xaxes(
        tickvals=list(range(len(words))),
        ticktext=[_plotly_text(word) for word in words],
        range=[-0.6, len(words) - 0.4],
        row=row,
        col=col,
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a candidate's way, and its seconds over all trials."""

    name: str
    seconds: float
    about: str


def stages_of(trials: Sequence[Trial]) -> list[Stage]:
    """Return the seconds of each stage; all but the first are one after another."""
    total: dict[str, float] = defaultdict(float)
    for trial in trials:
        for stage, seconds in trial.outcome.seconds.items():
            total[stage] += seconds
    elapsed_s = max((trial.elapsed_s for trial in trials), default=0.0)
    known = {"build", "render", "wait", "check", "measure", "device"}
    others = {name: seconds for name, seconds in total.items() if name not in known}
    around = max(0.0, total["device"] - total["check"] - total["measure"])
    device_s = total["check"] + total["measure"] + around
    serial = total["render"] + total["wait"] + device_s + sum(others.values())
    return [
        Stage("build", total["build"], "in the builders, in parallel with all that follows"),
        Stage("render", total["render"], "from template to source text"),
        Stage("wait", total["wait"], "the device idle, waiting for a build"),
        Stage("check", total["check"], "asking for answers and judging them"),
        Stage("measure", total["measure"], "timing"),
        Stage("around", around, "on the device: loading code, timing the baseline again"),
        *(Stage(name, seconds, "") for name, seconds in sorted(others.items())),
        Stage(
            "rest",
            max(0.0, elapsed_s - serial),
            "choosing what to try, writing it down, candidates that crashed or hung",
        ),
    ]


def stage_figure(trials: Sequence[Trial]) -> Any:
    """Draw the seconds that each stage took, over all trials."""
    import plotly.graph_objects as go

    stages = stages_of(trials)[::-1]
    parallel, serial = _FLOOR, _STATUS_MARKS[Status.CORRECT][0]
    bars = go.Bar(
        x=[stage.seconds for stage in stages],
        y=[_plotly_text(stage.name) for stage in stages],
        orientation="h",
        marker={"color": [parallel if s.name == "build" else serial for s in stages]},
        text=[seconds_words(stage.seconds) for stage in stages],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    figure = go.Figure(bars)
    figure.update_xaxes(title_text="seconds, all trials together", rangemode="tozero")
    figure.update_yaxes(type="category", automargin=True)
    figure.update_layout(height=80 + 28 * len(stages), showlegend=False, margin={"t": 10})
    return figure


def plotly_js() -> str:
    """Return the script that draws the figures in a browser."""
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text.replace("\r\n", "\n")


# ---- parameters and their values ------------------------------------------------------------


def parameter_names(trials: Sequence[Trial]) -> list[str]:
    """Return every parameter that occurs, `template` first."""
    names = {name: None for trial in trials for name in trial.params}
    return ["template", *(name for name in names if name != "template")]


def value_words(trial: Trial, name: str) -> str:
    """Return a parameter's value as it is shown; `absent` where the template has none."""
    value = trial.template if name == "template" else trial.params.get(name, ABSENT)
    return str(value)


def _values(trials: Sequence[Trial], name: str) -> list[str]:
    """Return a parameter's values in their own order: numbers, words, absent."""
    found: dict[str, Value] = {value_words(t, name): t.params.get(name, ABSENT) for t in trials}

    def rank(word: str) -> tuple[int, float, str]:
        value = found[word]
        if isinstance(value, int | float):
            return 0, float(value), word
        return (2 if word == ABSENT else 1), 0.0, word

    return sorted(found, key=rank)


def grouped(trials: Sequence[Trial], names: Sequence[str]) -> dict[tuple[str, ...], list[Trial]]:
    """Return the trials by their values of some parameters."""
    groups: dict[tuple[str, ...], list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[tuple(value_words(trial, name) for name in names)].append(trial)
    return dict(groups)
