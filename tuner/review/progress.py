"""The figures of a search as it went on: each trial, the best so far, the estimated rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tuner.review.figures import (
    BASELINE,
    BEST,
    FLOOR,
    LEGEND,
    MAX_POINTS,
    STATUS_MARKS,
    TEMPLATE_MARKS,
    log_axis,
    thinned,
    trial_points,
)
from tuner.review.formatting import ratio_words, us_words
from tuner.review.run_data import correct_trials, latency_us_of
from tuner.run import Outlook
from tuner.trial import Finalist, Status, Trial
from tuner.wording import percent

__all__ = ["outlook_figure", "progress_figure"]


def progress_figure(
    trials: Sequence[Trial],
    baseline_us: float | None,
    *,
    compiled_us: float | None = None,
    floors: Mapping[str, float] | None = None,
    by: Literal["trial", "time"] = "trial",
    raced: Finalist | None = None,
) -> dict[str, Any]:
    """Draw every trial, the best so far, the baseline and the physical floors.

    Args:
        trials: in order.
        baseline_us: PyTorch's own latency.
        compiled_us: that of `torch.compile`, where somebody measured it.
        floors: physical floors in us, by name.
        by: what runs to the right: the trial's number or the seconds of working time.
        raced: what counts of the run; its time is drawn at its trial, with the interval in which
            another process would find it.

    Returns:
        Data and layout as `plotly.graph_objects.Figure` takes them; trials without a latency stand
        below, by status. Plain, since it is the first figure that a page shows and the import of
        Plotly takes longer than all else.
    """
    failed = [t for t in trials if t.outcome.latency_us is None]
    correct = correct_trials(trials)
    share = min(1.0, MAX_POINTS / max(1, len(trials)))  # of each status, so that all are seen
    drawn = thinned(correct, math.ceil(share * len(correct)))

    def place(trial: Trial) -> float:
        return trial.number if by == "trial" else trial.elapsed_s

    traces = [_points(Status.CORRECT, drawn, place, [latency_us_of(t) for t in drawn])]
    places = [place(trial) for trial in trials] or [0.0, 1.0]
    if correct:
        best = _running_best(trials)
        xs = [place(t) for t, _ in best]
        line = _line(xs, [us for _, us in best], "best so far", BEST, "solid")
        traces.append({**line, "hoverinfo": "skip"})  # its corners are trials, which say more
    if raced is not None and raced.latency_us and raced.trial < len(trials):
        traces.append(_raced_point(raced, place(trials[raced.trial])))
    ends = [min(places), max(places)]
    levels = {
        "PyTorch (baseline)": (baseline_us, "dash"),
        "torch.compile": (compiled_us, "dashdot"),
    }
    for name, (level_us, dash) in levels.items():
        if level_us:
            traces.append(_line(ends, [level_us, level_us], name, BASELINE, dash))
    for number, (name, level) in enumerate((floors or {}).items()):
        dash = ("dot", "longdashdot")[number % 2]  # the legend tells them apart
        traces.append(_line(ends, [level, level], name, FLOOR, dash))
    for status in Status:
        group = [t for t in failed if t.outcome.status is status]
        group = thinned(group, math.ceil(share * len(group)))
        if group:
            below = _points(status, group, place, [status.value] * len(group))
            traces.append({**below, "showlegend": False, "xaxis": "x2", "yaxis": "y2"})
    seen = [*map(latency_us_of, drawn), baseline_us or 0.0, *(floors or {}).values()]
    words = "trial" if by == "trial" else "seconds of working time"
    ticks = {"dtick": 1} if by == "trial" and len(trials) <= 10 else {}  # no half trials
    across = {"title": {"text": words}, **ticks}
    layout: dict[str, Any] = {
        "height": 520 if failed else 420,
        "legend": LEGEND,
        "xaxis": {"anchor": "y", "domain": [0, 1], **({} if failed else across)},
        "yaxis": {"title": {"text": "latency in µs"}, **log_axis(seen), "anchor": "x"},
    }
    if failed:
        layout["xaxis"] |= {"matches": "x2", "showticklabels": False}
        layout["xaxis2"] = {"anchor": "y2", "domain": [0, 1], **across}
        layout["yaxis"] |= {"domain": [0.24, 1]}
        layout["yaxis2"] = {"anchor": "x2", "domain": [0, 0.21]}
    return {"data": traces, "layout": layout}


def _points(
    status: Status, trials: Sequence[Trial], place: Callable[[Trial], float], ys: list[Any]
) -> dict[str, Any]:
    colour, symbol = STATUS_MARKS[status]
    marker = {"color": colour, "symbol": symbol, "size": 7, "opacity": 0.85}
    points = trial_points(trials, list(map(place, trials)), ys, status.value, marker=marker)
    return {"type": "scatter", **points}


def _raced_point(raced: Finalist, x: float) -> dict[str, Any]:
    """Return the time of the race with its interval: the baseline's time over both speed-ups."""
    latency_us, i = raced.latency_us or 0.0, raced.interval
    point: dict[str, Any] = {
        "type": "scatter",
        "x": [x],
        "y": [latency_us],
        "mode": "markers",
        "name": "the winner's file, raced",
        "marker": {"color": BEST, "symbol": "diamond-open", "size": 12, "line": {"width": 2}},
        "hovertext": [f"raced: {us_words(latency_us)}"],
        "hoverinfo": "text",
    }
    if i is not None and i.low > 0 and math.isfinite(i.high):
        shares = {"array": i.speedup / i.low - 1, "arrayminus": 1 - i.speedup / i.high}
        ends = {name: [latency_us * share] for name, share in shares.items()}
        point["error_y"] = {
            "type": "data", "symmetric": False, "color": BEST, "thickness": 2, "width": 6, **ends,
        }  # fmt: skip
        point["hovertext"][0] += f", {ratio_words(i.low)} to {ratio_words(i.high)} PyTorch's speed"
    return point


def _line(xs: list[float], ys: list[float], name: str, colour: str, dash: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": xs,
        "y": ys,
        "mode": "lines",
        "name": name,
        "line": {"color": colour, "dash": dash, "width": 2, "shape": "hv"},
        "text": [f"{name}: {us_words(y)}" for y in ys],
        "hoverinfo": "text",
    }


def _running_best(trials: Sequence[Trial]) -> list[tuple[Trial, float]]:
    """Return where the best latency fell, and the last trial to end the line."""
    steps: list[tuple[Trial, float]] = []
    for trial in trials:
        if latency_us_of(trial) < (steps[-1][1] if steps else math.inf):
            steps.append((trial, latency_us_of(trial)))
    return [*steps, (trials[-1], steps[-1][1])] if steps else []


def outlook_figure(outlooks: Sequence[Outlook]) -> Any:
    """Draw, over the trials, the probability that the best is within a share of the optimum."""
    import plotly.graph_objects as go

    shares = sorted({share for outlook in outlooks for share in outlook.within}, key=float)
    figure = go.Figure()
    for number, share in enumerate(shares):
        known = [outlook for outlook in outlooks if share in outlook.within]
        colour, symbol = TEMPLATE_MARKS[number % len(TEMPLATE_MARKS)]
        figure.add_scatter(
            x=[outlook.number for outlook in known],
            y=[outlook.within[share] for outlook in known],
            mode="lines+markers",
            name=f"within {percent(float(share), 3)} of the best there is",
            line={"color": colour, "width": 2, "dash": ("solid", "dash", "dot")[number % 3]},
            marker={"symbol": symbol, "size": 7},
            hovertext=[
                f"after {o.number} trials: {100 * o.within[share]:.0f} %; "
                f"estimated remaining improvement {percent(o.improvement)}"
                for o in known
            ],
            hoverinfo="text",
        )
    figure.update_xaxes(title_text="trial", rangemode="tozero")
    figure.update_yaxes(title_text="probability", tickformat=".0%", range=[-0.02, 1.05])
    figure.update_layout(height=320, legend=LEGEND, showlegend=True)
    return figure
