"""What the page of a comparison shows: its table, and what its figures are drawn from."""

from __future__ import annotations

import dataclasses
from typing import Any

from tuner.review.comparing import Comparison, RunPair
from tuner.review.formatting import params_words, percent_words, ratio_words, us_words
from tuner.review.summary import trial_words

__all__ = ["cell_words", "curves_of", "rows_of"]


def rows_of(found: Comparison) -> list[tuple[str, list[str]]]:
    """Return what is known of each run, label by label."""
    summaries = [side.summary for side in found.sides]
    noises = [f" ± {percent_words(s.noise)}" if s.noise is not None else "" for s in summaries]
    rows = [
        ("problem", [s.title for s in summaries]),
        ("sizes", [s.sizes for s in summaries]),
        ("verdict", [s.verdict for s in summaries]),
        ("but", [s.caveat for s in summaries]),
        ("how sure", [s.certainty or "not verified" for s in summaries]),
        ("latency", [us_words(s.latency_us) + n for s, n in zip(summaries, noises, strict=True)]),
        ("PyTorch", [us_words(s.baseline_us) for s in summaries]),
        ("error", [s.error for s in summaries]),
        ("speed", [s.throughput for s in summaries]),
        ("trials", [trial_words(s) for s in summaries]),
        ("best", [params_words(s.best) if s.best else "" for s in summaries]),
        ("device", [s.device for s in summaries]),
        ("accuracy", [s.accuracy for s in summaries]),
    ]
    return [(label, texts) for label, texts in rows if any(texts)]


def cell_words(pair: RunPair | None) -> str:
    """Return what stands in a cell of the matrix: the row's run over the column's."""
    if pair is None:
        return ""
    if pair.ratio is None or pair.low is None or pair.high is None:
        return "no verdict" if pair.kind == "unknown" else pair.kind
    ends = f"{ratio_words(pair.low)} to {ratio_words(pair.high)}"
    return f"{ratio_words(pair.ratio)} ({ends})"


def curves_of(found: Comparison) -> list[dict[str, Any]]:
    """Return what a comparison's figures are drawn from."""
    return [
        {
            "name": side.name,
            "curve": dataclasses.asdict(side.curve),
            "speedup": interval.speedup if interval else None,
            "low": _finite(interval.low) if interval else None,
            "high": _finite(interval.high) if interval else None,
            "device": side.summary.device,
        }
        for side in found.sides
        for interval in [side.summary.interval]
    ]


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
