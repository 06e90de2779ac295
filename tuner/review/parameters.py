"""The figures of what matters: importance, latency by parameter, parameters together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.review.figures import (
    ACCENT,
    MAX_POINTS,
    bars,
    log_axis,
    plotly_text,
    thinned,
    trial_points,
)
from tuner.review.formatting import us_words
from tuner.review.run_data import correct_trials, latency_us_of
from tuner.review.tables import grouped, ordered_values, parameter_names, value_words
from tuner.trial import Trial

__all__ = [
    "MIN_CORRECT_FOR_IMPORTANCE",
    "importance_figure",
    "importances",
    "parallel_figure",
    "parameter_figure",
]

NUM_TICKS = 5  # of the axis of latencies
MIN_CORRECT_FOR_IMPORTANCE = 30  # Optuna compares the best tenth, so 3 trials, with the rest

# Blue to orange through grey: distinct for the colour-blind, seen on white and on the dark page.
_ORANGE = "#d55e00"
_FAST_TO_SLOW = ((0.0, ACCENT), (0.5, "#8f8f8f"), (1.0, _ORANGE))


def importances(trials: Sequence[Trial]) -> dict[str, float]:
    """Return how much each parameter decides whether a trial is among the best tenth.

    Shares of 1, the largest first; over correct trials. A parameter that a template does not
    have counts as one more value. Empty where fewer than 30 trials are correct.

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
            named = {name: _shared(choices) for name, choices in varied.items()}
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


def _shared(choices: tuple[str, ...]) -> Any:
    """Return a distribution that a study's trials share: it never changes, so no copy is made.

    Optuna copies and compares one for each parameter of each trial: half of all the time.
    """
    from optuna.distributions import CategoricalDistribution

    class Shared(CategoricalDistribution):  # type: ignore[misc]
        def __deepcopy__(self, _: object) -> Any:
            return self

        def __eq__(self, other: object) -> bool:
            return self is other or super().__eq__(other)

        __hash__ = CategoricalDistribution.__hash__

    return Shared(choices)


def importance_figure(shares: Mapping[str, float]) -> Any:
    """Draw what `importances` found, the most important on top."""
    names = sorted(shares, key=lambda name: shares[name])
    values = [shares[name] for name in names]
    words = [f"{100 * share:.0f} %" for share in values]
    return bars(values, names, words, ACCENT, title_text="share of importance", tickformat=".0%")


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


def _log_ticks(logs: Sequence[float]) -> list[float]:
    low, high = (min(logs), max(logs)) if logs else (0.0, 1.0)
    if high - low < 1e-9:
        return [low]
    return [low + (high - low) * i / (NUM_TICKS - 1) for i in range(NUM_TICKS)]
