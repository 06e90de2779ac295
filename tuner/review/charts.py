"""Which figures a run has, and what each says to those who cannot see it.

The page, the dashboard and the notebook all take their figures here: one list, one set of
names. A figure that a run cannot have says why instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.review.figures import MAX_POINTS, accuracy_figure, starred
from tuner.review.formatting import count_words, number_words, three_digits, us_words
from tuner.review.parameters import (
    MIN_CORRECT_FOR_IMPORTANCE,
    importance_figure,
    importances,
    parallel_figure,
    parameter_figure,
)
from tuner.review.progress import outlook_figure, progress_figure
from tuner.review.roofline import resource_figure, roofline_figure
from tuner.review.rows_figure import rows_caption, rows_figure
from tuner.review.run_data import RunData, correct_trials, latency_us_of
from tuner.review.tables import parameter_names, pareto, resources_of, rms_of, value_words
from tuner.review.timeline import spans_of, stage_figure, timeline_figure
from tuner.trial import Trial
from tuner.wording import percent

__all__ = ["CHART_NAMES", "Chart", "charts_of", "figure_data"]

MAX_PARAMETER_PLOTS = 12  # those that matter most; the table has them all
MAX_AXES = 9  # of the parallel coordinates, beside the latency


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with the words that say what it shows.

    `figure` is a `plotly.graph_objects.Figure` or plain data for one, or None where this run has
    none: then the caption says why.
    """

    name: str
    label: str
    caption: str
    figure: Any


def charts_of(
    run_data: RunData,
    names: Sequence[str] | None = None,
    shares: Callable[[], Mapping[str, float]] | None = None,
) -> list[Chart]:
    """Return a run's figures, in the order of the page.

    Args:
        run_data: of the run.
        names: those wanted, of `CHART_NAMES`; all if None.
        shares: the importance of each parameter, asked for by the figures that need it; found
            anew if None, which takes half a second with 5,000 correct trials.
    """
    wanted = tuple(names or _CHARTS)
    known: Mapping[str, float] = {}
    if _NEEDS_SHARES & set(wanted):
        known = shares() if shares else importances(run_data.trials)
    charts = []
    for name in wanted:
        label, drawn = _CHARTS[name]
        charts.append(Chart(name, label, *drawn(run_data, known)))
    if run_data.result is not None:
        for chart in charts:
            if chart.figure is not None:
                starred(chart.figure, run_data.result.winner)
    return charts


def figure_data(figure: Any) -> dict[str, Any]:
    """Return a figure as JSON holds it, for the page's own script.

    The template is left out, since the page's follows the reader's light or dark.
    """
    if isinstance(figure, dict):
        return figure
    data: dict[str, Any] = json.loads(figure.to_json())
    data["layout"].pop("template", None)
    return data


# ---- one by one -----------------------------------------------------------------------------

Drawn = tuple[str, Any]
"""What a figure shows, and the figure; None where the run has none, and the words say why."""


def _progress(run_data: RunData, by: Any) -> Drawn:
    if not run_data.trials:
        return "No trial is recorded yet.", None
    shown = run_data.shown_bounds()
    floors = {f"floor of {bound.words}": bound.latency_us for bound in shown}
    figure = progress_figure(
        run_data.trials,
        run_data.baseline.latency_us,
        compiled_us=run_data.compiled_us,
        floors=floors,
        by=by,
        raced=run_data.finalist,
    )
    best = min(correct_trials(run_data.trials), key=latency_us_of, default=None)
    words = f"Of {count_words(len(run_data.trials), 'trial')}"
    if best is None:
        words += " none is correct."
    else:
        words += (
            f" number {best.number} is the fastest at screening, {us_words(latency_us_of(best))}."
        )
    if len(correct_trials(run_data.trials)) < len(run_data.trials):
        words += " Failed trials stand below, by status."
    if len(run_data.trials) > MAX_POINTS:
        words += f" Drawn are about {MAX_POINTS:,}: of each status the fastest, and an even share."
    if run_data.compiled_us is None:
        words += " torch.compile was not raced: measure.torch_compile asks for it."
    if floors:
        words += (
            " A floor is 100 % of the roofline below, at the datasheet's rates; a clock above the "
            "rated one may pass it by a few percent."
        )
    else:
        words += " No physical floor: this device's rates are not known."
    return words, figure


def _outlook(run_data: RunData) -> Drawn:
    if not run_data.outlooks:
        words = "Not known: the sampler does not say how sure it is, or has seen too few trials."
        return words, None
    improvement = percent(run_data.outlooks[-1].improvement)
    words = (
        "How sure the search was, as it went on, that its best was within a share of the best "
        "there is: a model's own estimate from screening times, not a measurement. At the last, "
        f"if all configurations were tried, the best time was expected to fall by {improvement}."
    )
    return words, outlook_figure(run_data.outlooks)


def _importance(run_data: RunData, shares: Mapping[str, float]) -> Drawn:
    if not shares:
        words = (
            f"Importance needs {MIN_CORRECT_FOR_IMPORTANCE} correct trials that differ in a "
            "parameter; this run has fewer."
        )
        return words, None
    first = max(shares, key=lambda name: shares[name])
    words = (
        f"How much each parameter decides whether a trial is among the fastest tenth "
        f"(PED-ANOVA over correct trials). Most of all: {first}, {100 * shares[first]:.0f} %. "
        "Parameters that exist for one template alone share its merit."
    )
    return words, importance_figure(shares)


def _varied(trials: Sequence[Trial], shares: Mapping[str, float]) -> list[str]:
    """Return the parameters that vary among the correct trials, the most important first."""
    correct = correct_trials(trials)
    varied = [n for n in parameter_names(correct) if len({value_words(t, n) for t in correct}) > 1]
    return sorted(varied, key=lambda name: -shares.get(name, 0.0))


def _parameters(run_data: RunData, shares: Mapping[str, float]) -> Drawn:
    varied = _varied(run_data.trials, shares)
    names = varied[:MAX_PARAMETER_PLOTS]
    if not names:
        return "No parameter varies among the correct trials.", None
    words = "Every correct trial by each parameter's value; the orange bar is the best one."
    if len(varied) > len(names):
        words += f" {len(varied) - len(names)} parameters that matter less are left out."
    return words, parameter_figure(run_data.trials, names)


def _parallel(run_data: RunData, shares: Mapping[str, float]) -> Drawn:
    names = _varied(run_data.trials, shares)[:MAX_AXES]
    if not names:
        return "No parameter varies among the correct trials.", None
    words = (
        "Each correct trial is a line through its values, blue where it is fast and orange "
        "where it is slow. Drag along an axis to keep the trials within; with the keyboard, "
        "focus an axis and use the arrow keys."
    )
    return words, parallel_figure(run_data.trials, names)


def _accuracy(run_data: RunData, _: Mapping[str, float]) -> Drawn:
    known = [t for t in correct_trials(run_data.trials) if rms_of(t) is not None]
    if not known:
        return "No correct trial has a recorded error.", None
    drawn = [trial for trial in known if rms_of(trial)]
    if not drawn:
        words = (
            "Every correct trial was exact on the inputs as given, at screening: no error to draw."
        )
        return words, None
    front = pareto(run_data.trials)
    beaten = number_words([trial.number for trial in front])
    words = (
        f"Error against float64 on the inputs as given, at screening. No trial is both faster "
        f"and closer than {'trial' if len(front) == 1 else 'any of the trials'} {beaten}."
    )
    if len(drawn) < len(known):
        exact = count_words(len(known) - len(drawn), "trial")
        words += f" {exact} without an error cannot stand on a logarithmic axis."
    return words, accuracy_figure(drawn, run_data.baseline.latency_us)


def _rows(run_data: RunData, _: Mapping[str, float]) -> Drawn:
    found = run_data.finalist.by_batch if run_data.finalist is not None else None
    if found is None or not found.measured:
        words = (
            "Not measured: the file runs at one number of rows, or the run has not come that far."
        )
        return words, None
    return rows_caption(found), rows_figure(found)


def _roofline(run_data: RunData, _: Mapping[str, float]) -> Drawn:
    flops, num_bytes = run_data.environment.flops, run_data.environment.bytes
    if not flops or not num_bytes or flops < 0 or num_bytes < 0:
        return "The problem's operations and bytes are not recorded: there is no roofline.", None
    if not correct_trials(run_data.trials):
        return "No correct trial to place under the roofline.", None
    figure = roofline_figure(
        run_data.trials,
        run_data.device,
        flops=flops,
        num_bytes=num_bytes,
        baseline_us=run_data.baseline.latency_us,
        precisions=[bound.precision for bound in run_data.bounds()],
    )
    words = (
        f"Every correct trial at the problem's {three_digits(flops / num_bytes)} FLOP per byte, "
        "spread a little sideways."
    )
    if run_data.bounds():
        words += (
            " The roofs are of what the accuracy class allows; the progress figure has those "
            "of the winner's units and of the fastest. A trial may stand above the roof of a unit "
            "that it does not use. Rates are the datasheet's; operands count once."
        )
    else:
        words += " No roof: this device's rates are not known."
    return words, figure


def _resources(run_data: RunData, _: Mapping[str, float]) -> Drawn:
    correct = correct_trials(run_data.trials)
    if not any(resources_of(trial, run_data.device) for trial in correct):
        return "The compiler reported no registers or shared memory; on a CPU it has none.", None
    words = (
        "The largest over each correct trial's kernels, as the compiler reports it. It does not "
        "know what shared memory is asked for at the launch: a kernel that asks for all of it "
        "stands at 0, and its occupancy is lower than shown. The winner's real launches are under "
        "'Why it is this fast', where they were profiled."
    )
    return words, resource_figure(run_data.trials, run_data.device)


def _stages(run_data: RunData, _: Mapping[str, float]) -> Drawn:
    if not any(trial.outcome.seconds for trial in run_data.trials):
        return "No stage was timed.", None
    words = "Seconds of each stage over all trials; builds run beside the others."
    return words, stage_figure(run_data.trials)


def _timeline(run_data: RunData, _: Mapping[str, float]) -> Drawn:
    spans = spans_of(run_data.trials)
    if not spans:
        return "No stage was timed.", None
    words = "What each worker did when; a gap is idle time."
    if all(span.stage != "build" for span in spans):
        words += " This run did not record when its builds ran."
    return words, timeline_figure(spans)


_CHARTS: dict[str, tuple[str, Callable[[RunData, Mapping[str, float]], Drawn]]] = {
    "progress-trial": ("By trial", lambda run_data, _: _progress(run_data, "trial")),
    "progress-time": ("By time", lambda run_data, _: _progress(run_data, "time")),
    "outlook": ("Estimated remaining improvement", lambda run_data, _: _outlook(run_data)),
    "importance": ("Importance of each parameter", _importance),
    "parameters": ("Latency by parameter", _parameters),
    "parallel": ("Parameters together", _parallel),
    "accuracy": ("Accuracy against latency", _accuracy),
    "roofline": ("Roofline", _roofline),
    "resources": ("Registers, shared memory, occupancy and spills", _resources),
    "rows": ("Speed by number of rows", _rows),
    "stages": ("Time by stage", _stages),
    "timeline": ("Timeline", _timeline),
}
_NEEDS_SHARES = {"importance", "parameters", "parallel"}
CHART_NAMES = tuple(_CHARTS)
