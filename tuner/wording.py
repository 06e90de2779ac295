"""Shares and reasons as text, the same in messages, in the terminal and on pages."""

from __future__ import annotations

import math
from decimal import Decimal

__all__ = ["one_line", "percent"]

LINE_CHARS = 300  # of a reason where one line is shown of it


def percent(share: float, digits: int = 2) -> str:
    """Return a share of 1 as a percentage with so many digits, never as a power of ten: 100 %."""
    if not math.isfinite(share):
        return f"{share} %"
    return f"{Decimal(f'{100 * share:.{digits}g}'):f} %"


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
