"""Shares, times, shapes and reasons as text, the same in messages, a terminal and on pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal

__all__ = ["one_line", "percent", "shape_words", "terminal_us"]

LINE_CHARS = 300  # of a reason where one line is shown of it


def percent(share: float, digits: int = 2) -> str:
    """Return a share of 1 as a percentage with so many digits, never as a power of ten: 100 %."""
    if not math.isfinite(share):
        return f"{share} %"
    return f"{Decimal(f'{100 * share:.{digits}g}'):f} %"


def terminal_us(latency_us: float) -> str:
    """Return a time as lines of the terminal have it: us with one decimal, or ms with three."""
    return f"{latency_us / 1e3:.3f} ms" if latency_us >= 1e3 else f"{latency_us:.1f} us"


def shape_words(shape: Sequence[int]) -> str:
    """Return a shape as 16384 x 4096; `one` of a tensor without dimensions."""
    return " x ".join(map(str, shape)) or "one"


def one_line(text: str, max_chars: int = LINE_CHARS) -> str:
    """Return a text of several lines as one.

    A first line may only announce what the next ones name, as PyTorch's "Error(s) in loading
    state_dict for ModelNew:" does, so they are joined and not dropped.
    """
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    joined = ""
    for line in lines:
        between = " " if joined.endswith((":", ",", ";", ".")) else "; "
        joined += (between if joined else "") + line
    return joined if len(joined) <= max_chars else joined[: max_chars - 4].rstrip() + " ..."
