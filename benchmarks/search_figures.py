"""Draw the two pictures of docs/search.md from what `benchmarks.search` wrote.

    python -m benchmarks.search_figures --spaces DIR --to docs [--sure STOP] OUT...

`search_progress.svg`: how far the best so far is above the optimum, median over all searches of
all spaces, by evaluations and sampler. `search_sure.svg`: how often the best was within 5 % of the
optimum (up) where the search had said so with a probability (across), from STOP (or the first
OUT), which was written with `--stop`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tuner.search.recorded import Recording, read_recording
from tuner.search.score import Yardstick

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 320, 60, 45, 15  # px
COLOURS = ("#0b6bcb", "#c2410c", "#15803d", "#6b7280")  # told apart by the colour-blind too
Line = tuple[str, Sequence[float], Sequence[float]]  # name, x, y


def _svg(
    lines: Sequence[Line],
    axes: tuple[str, str],
    ticks: tuple[Mapping[str, float], Mapping[str, float]],
) -> str:
    """Draw lines; `ticks` give what is written at which x and y, the first and last the ends."""
    (x_low, *_, x_high), (y_low, *_, y_high) = (list(side.values()) for side in ticks)
    width, height = WIDTH - LEFT - 130, HEIGHT - BOTTOM - TOP

    def px(x: float) -> float:
        return LEFT + width * (x - x_low) / (x_high - x_low)

    def py(y: float) -> float:
        return TOP + height * (1 - (y - y_low) / (y_high - y_low))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for text, x in ticks[0].items():
        parts.append(f'<path d="M{px(x):.1f},{TOP}v{height}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{px(x):.1f}" y="{HEIGHT - 28}" text-anchor="middle">{text}</text>')
    for text, y in ticks[1].items():
        parts.append(f'<path d="M{LEFT},{py(y):.1f}h{width}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{py(y) + 4:.1f}" text-anchor="end">{text}</text>')
    middle = TOP + height / 2
    parts.append(
        f'<text x="{LEFT + width / 2}" y="{HEIGHT - 8}" text-anchor="middle">{axes[0]}</text>'
    )
    parts.append(
        f'<text transform="translate(14,{middle}) rotate(-90)" text-anchor="middle">'
        f"{axes[1]}</text>"
    )
    for number, (name, xs, ys) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        row = TOP + 14 + 18 * number
        parts.append(f'<text x="{LEFT + width + 10}" y="{row}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _progress(recordings: Mapping[str, Recording], runs: Mapping[str, Any], budget: int) -> str:
    lines: list[Line] = []
    low, high = 0.1, 100.0  # per cent
    for sampler, by_space in runs.items():
        curves = []
        for name, searches in by_space.items():
            recording = recordings[name]
            at = {key: config_id for config_id, key in enumerate(recording.keys)}
            yardstick = Yardstick.of(recording.latency_us, budget)
            for search in searches:
                best_us = yardstick.best_us([at[key] for key in search["order"]], budget)
                curves.append(100 * (best_us / yardstick.optimum_us - 1))
        middle = np.clip(np.median(np.array(curves), axis=0), low, high)
        lines.append((sampler, np.arange(1, budget + 1).tolist(), np.log10(middle).tolist()))
    x = {str(n): float(n) for n in (1, *range(50, budget + 1, 50))}
    y = {
        "0.1 %": -1.0,
        "1 %": 0.0,
        "5 %": float(np.log10(5)),
        "20 %": float(np.log10(20)),
        "100 %": 2.0,
    }
    return _svg(lines, ("evaluations", "best so far above the optimum"), (x, y))


def _sure(recordings: Mapping[str, Recording], runs: Mapping[str, Any], budget: int) -> str:
    said, was = [], []
    for by_space in runs.values():
        for name, searches in by_space.items():
            recording = recordings[name]
            at = {key: config_id for config_id, key in enumerate(recording.keys)}
            yardstick = Yardstick.of(recording.latency_us, budget)
            for search in searches:
                best_us = yardstick.best_us([at[key] for key in search["order"]], budget)
                for row in search.get("sure", []):
                    said.append(row[1])
                    was.append(best_us[row[0] - 1] <= 1.05 * yardstick.optimum_us)
    edges = np.linspace(0, 1, 11)
    groups = np.digitize(said, edges[1:-1])
    xs = [float(np.mean(np.array(said)[groups == g])) for g in range(10) if (groups == g).any()]
    ys = [float(np.mean(np.array(was)[groups == g])) for g in range(10) if (groups == g).any()]
    lines: list[Line] = [("found to be", xs, ys), ("if it were exact", [0.0, 1.0], [0.0, 1.0])]
    ticks = {f"{share:.0%}": share for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)}
    return _svg(lines, ("said: within 5 % of the optimum", "was within 5 %"), (ticks, ticks))


def main() -> None:
    """Read what was searched; write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--spaces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR")
    parser.add_argument("--budget", type=int, default=300)
    parser.add_argument("--sure", type=Path, metavar="STOP")
    parser.add_argument("files", type=Path, nargs="+", metavar="OUT")
    options = parser.parse_args()
    loaded = [read_recording(path) for path in sorted(options.spaces.glob("*.json.gz"))]
    recordings = {recording.name: recording for recording in loaded}
    runs: dict[str, Any] = {}
    for path in options.files:
        runs |= json.loads(path.read_text())["runs"]
    progress = _progress(recordings, runs, options.budget)
    (options.to / "search_progress.svg").write_text(progress)
    judged = runs if options.sure is None else json.loads(options.sure.read_text())["runs"]
    cold = {"surrogate": judged["surrogate"]}
    (options.to / "search_sure.svg").write_text(_sure(recordings, cold, options.budget))


if __name__ == "__main__":
    main()
