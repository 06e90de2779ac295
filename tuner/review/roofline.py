"""The figures of the hardware: the roofline, and what candidates take of a multiprocessor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tuner.machine.ceilings import roofline_tflops
from tuner.machine.device import Device
from tuner.review.figures import (
    FLOOR,
    LEGEND,
    add_templates,
    baseline_point,
    log_axis,
    plotly_text,
    template_marks,
    thinned,
    trial_points,
)
from tuner.review.formatting import rate_words, us_words
from tuner.review.run_data import UNITS, correct_trials, latency_us_of
from tuner.review.tables import Resources, resources_of
from tuner.trial import Trial

__all__ = ["resource_figure", "roofline_figure", "roofs_of"]

_DASHES = ("solid", "dash", "dashdot", "dot", "longdash")
_PANELS = (
    ("registers", "registers a thread"),
    ("smem_bytes", "static shared memory, bytes"),
    ("occupancy", "occupancy, at most"),
    ("spilled_bytes", "spilled bytes"),
)


def roofs_of(device: Device | None, intensity: float) -> dict[str, float]:
    """Return the bound in TFLOPS of each precision at an intensity in FLOP/byte, where known."""
    if device is None:
        return {}
    bounds = {name: roofline_tflops(intensity, 1.0, device, name) for name in UNITS}
    return {name: bound for name, bound in bounds.items() if bound}


def roofline_figure(
    trials: Sequence[Trial],
    device: Device | None,
    *,
    flops: float,
    num_bytes: float,
    baseline_us: float | None,
    precisions: Sequence[str] = tuple(UNITS),
) -> Any:
    """Draw every correct trial under the device's rooflines.

    All candidates solve one problem, so they stand at one intensity; they are spread by up to
    4 % to either side so that both can be seen.

    Args:
        trials: of any status.
        device: whose rates bound; without known rates there is no roof.
        flops: the problem's operations; one fused multiply-add counts as two.
        num_bytes: the problem's operands, each counted once.
        baseline_us: PyTorch's own latency.
        precisions: whose roofs are drawn, of `run_data.UNITS`.

    Source: Williams, Waterman, Patterson, "Roofline", CACM 2009.
    """
    import plotly.graph_objects as go

    intensity = flops / num_bytes
    figure = go.Figure()
    intensities = [intensity * 10 ** (i / 16 - 1.5) for i in range(49)]
    for dash, name in zip(_DASHES, precisions, strict=False):
        roof = [roofs_of(device, x).get(name) for x in intensities]
        if all(roof):
            figure.add_scatter(
                x=intensities,
                y=roof,
                mode="lines",
                name=f"roof of {UNITS[name]}",
                line={"color": FLOOR, "width": 2, "dash": dash},
                hovertext=[f"{UNITS[name]}: at most {rate_words(y)}" for y in roof if y],
                hoverinfo="text",
            )
    drawn = thinned(correct_trials(trials))
    add_templates(
        figure,
        trials,
        drawn,
        # The golden ratio spreads points without bunching them.
        lambda t: intensity * (1 + 0.08 * ((t.number * 0.618034) % 1 - 0.5)),
        lambda t: flops / latency_us_of(t) / 1e6,
    )
    if baseline_us:
        tflops = flops / baseline_us / 1e6
        words = f"{us_words(baseline_us)}, {rate_words(tflops)}"
        figure.add_scatter(**baseline_point(intensity, tflops, words, symbol="line-ew", size=40))
    ends = [math.log10(intensities[0]), math.log10(intensities[-1])]
    axis = log_axis([intensities[0], intensities[-1]], range=ends)
    figure.update_xaxes(title_text="FLOP per byte of operands", **axis)
    heights = [y for trace in figure.data for y in trace.y]
    figure.update_yaxes(title_text="TFLOPS", **log_axis(heights, tickformat="~g"))
    figure.update_layout(height=460, legend=LEGEND)
    return figure


def resource_figure(trials: Sequence[Trial], device: Device | None) -> Any:
    """Draw latency against registers, shared memory, occupancy and spills, where they are known.

    Each is the largest over a candidate's kernels; `Resources` says what occupancy means here.
    """
    from plotly.subplots import make_subplots

    drawn = thinned(correct_trials(trials), 1_500)  # each stands in four panels
    pairs = [(trial, taken) for trial in drawn if (taken := resources_of(trial, device))]
    panels = [p for p in _PANELS if any(getattr(taken, p[0]) is not None for _, taken in pairs)]
    figure = make_subplots(
        rows=-(-len(panels) // 2) or 1,
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.06,
        vertical_spacing=0.2,
    )
    for number, (name, words) in enumerate(panels):
        row, col = number // 2 + 1, number % 2 + 1
        _add_panel(figure, pairs, name, row, col)
        style = {"range": [0, 1.05], "tickformat": ".0%"} if name == "occupancy" else {}
        axis = {"title_text": words, "tickformat": ",", "rangemode": "tozero", **style}
        figure.update_xaxes(**axis, nticks=7, row=row, col=col)
    figure.update_yaxes(**log_axis([latency_us_of(trial) for trial, _ in pairs]))
    figure.update_yaxes(title_text="latency in µs", col=1)
    figure.update_layout(height=110 + 290 * -(-len(panels) // 2), legend=LEGEND)
    return figure


def _add_panel(
    figure: Any, pairs: Sequence[tuple[Trial, Resources]], name: str, row: int, col: int
) -> None:
    known = [(t, getattr(taken, name)) for t, taken in pairs if getattr(taken, name) is not None]
    marks = template_marks([trial for trial, _ in pairs])
    for template, (colour, symbol) in marks.items():
        group = [(trial, value) for trial, value in known if trial.template == template]
        trials = [trial for trial, _ in group]
        points = trial_points(
            trials,
            [value for _, value in group],
            [latency_us_of(trial) for trial in trials],
            template,
            marker={"color": colour, "symbol": symbol, "size": 6, "opacity": 0.75},
            legendgroup=plotly_text(template),
            showlegend=row == col == 1,
        )
        figure.add_scatter(**points, row=row, col=col)
