"""Speed by number of rows: the figure, and the same as a table."""

from __future__ import annotations

from typing import Any

from tuner.by_batch import ANY_ROWS, WAYS, ByBatch, Way, least_of
from tuner.review.figures import ACCENT, BASELINE, LEGEND, TEMPLATE_MARKS, log_axis
from tuner.review.formatting import ratio_words, us_words

__all__ = ["rows_caption", "rows_figure", "rows_table"]

MARKS = {"call": (ACCENT, "circle"), "step": TEMPLATE_MARKS[1], "eval": TEMPLATE_MARKS[2]}


def _is_taken(found: ByBatch, way: Way, num_rows: int) -> bool:
    """Whether the file takes its kernels there."""
    fewest, most = found.rows.get(way, ANY_ROWS)
    is_gap = any(low <= num_rows <= high for low, high in found.gaps.get(way, ()))
    return fewest <= num_rows <= most and not is_gap


def rows_caption(found: ByBatch) -> str:
    """Say what the figure shows, and where the module's own forward runs."""
    words = (
        "Times PyTorch's speed of the kernels at other numbers of rows, by the host's clock with "
        "nothing of its work hidden, in one process; bars are where the median lies. Where a mark "
        "is hollow the file runs the module's own forward instead."
    )
    found_words = "; ".join(found.words)
    return f"{words} {found_words[:1].upper()}{found_words[1:]}." if found_words else words


def rows_figure(found: ByBatch) -> Any:
    """Draw speed-ups over numbers of rows; the line at 1 is PyTorch's own speed."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for way, what in WAYS.items():
        points = least_of(found.measured, way)
        if not points:
            continue
        colour, symbol = MARKS[way]
        taken = [_is_taken(found, way, at.num_rows) for at in points]
        figure.add_scatter(
            x=[at.num_rows for at in points],
            y=[at.speedup for at in points],
            error_y={
                "type": "data", "symmetric": False, "thickness": 1.5, "width": 4,
                "array": [max(0.0, min(at.high, 10 * at.speedup) - at.speedup) for at in points],
                "arrayminus": [max(0.0, at.speedup - max(at.low, 0.0)) for at in points],
            },
            mode="lines+markers",
            name=what,
            line={"color": colour, "width": 1.5},
            marker={
                "size": 9,
                "color": colour,
                "symbol": [symbol if is_here else f"{symbol}-open" for is_here in taken],
            },
            hovertext=[
                f"{what}, {at.num_rows} rows: {ratio_words(at.speedup)}, "
                f"{us_words(at.latency_us)} by kernels, {us_words(at.baseline_us)} PyTorch"
                for at in points
            ],
            hoverinfo="text",
        )  # fmt: skip
    figure.add_hline(y=1.0, line={"color": BASELINE, "width": 2, "dash": "dash"})
    rows = [at.num_rows for at in found.measured]
    speeds = [value for at in found.measured for value in (1.0, at.speedup)]
    figure.update_xaxes(title_text="rows", **log_axis(rows))
    figure.update_yaxes(title_text="times PyTorch's speed", **log_axis(speeds))
    figure.update_layout(height=320, legend=LEGEND, showlegend=True)
    return figure


def rows_table(found: ByBatch) -> tuple[list[str], list[list[str]]]:
    """Return the head, and a row for each number of rows: speed-ups, and what runs there."""
    by_way = {way: {at.num_rows: at for at in least_of(found.measured, way)} for way in WAYS}
    by_way = {way: known for way, known in by_way.items() if known}
    head = ["rows", *(name for way in by_way for name in (WAYS[way], f"{WAYS[way]} run"))]
    table = []
    for rows in sorted({at.num_rows for at in found.measured}):
        line = [f"{rows:,}"]
        for way, known in by_way.items():
            at = known.get(rows)
            if at is None:
                line += ["", ""]
                continue
            ends = f"{ratio_words(at.low)} to {ratio_words(at.high)}"
            which = f"kernel {at.kernel + 1}" if way in found.kernels else "kernels"
            who = which if _is_taken(found, way, rows) else "PyTorch"
            line += [f"{ratio_words(at.speedup)} ({ends})", who]
        table.append(line)
    return head, table
