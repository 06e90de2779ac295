"""Numbers in words, as the page, the terminal and the figures all say them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tuner.run import Outlook
from tuner.trial import Finalist, ProbeResult, Trial
from tuner.wording import one_line, percent

__all__ = [
    "NONE",
    "count_words",
    "draws_words",
    "number_words",
    "outlook_words",
    "params_words",
    "percent_words",
    "ratio_words",
    "rejection_words",
    "relative_path",
    "seconds_words",
    "us_words",
]

NONE = "–"


def us_words(value: float | None) -> str:
    """Return a time in the unit that fits it, from a number in us."""
    if value is None or not math.isfinite(value):
        return NONE
    if value >= 1e6:
        return f"{value / 1e6:.3g} s"
    return f"{value / 1e3:.4g} ms" if value >= 1e4 else f"{value:.4g} µs"


def seconds_words(value: float) -> str:
    """Return a duration in the unit that fits it, from a number in s."""
    if value >= 120:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def ratio_words(value: float) -> str:
    """Return a speed-up, or that it has no bound."""
    if not math.isfinite(value):
        return "no bound"
    return f"{value:.3f}x" if value < 2 else f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def percent_words(value: float | None) -> str:
    """Return a share of 1 as a percentage."""
    return NONE if value is None or not math.isfinite(value) else percent(value)


def count_words(number: int, noun: str) -> str:
    """Return how many there are of something, in the singular or plural."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def number_words(values: Sequence[int], most: int = 12) -> str:
    """Return the first few numbers, and how many more there are."""
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(str(value) for value in values[:most]) + more


def params_words(trial: Trial) -> str:
    """Return a trial's parameters in one line, the template first."""
    rest = [f"{k}={v}" for k, v in trial.params.items() if k != "template"]
    return " ".join([f"template={trial.template}", *rest])


def relative_path(path: str, folder: Path) -> str:
    """Return a path as seen from a folder, or as it is where it lies outside."""
    whole = Path(path)
    return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else path


def draws_words(probes: Sequence[ProbeResult]) -> str:
    """Return how many probes were drawn anew after a near miss; empty where none was."""
    number = sum(probe.num_draws > 1 for probe in probes)
    return f", {number} after a near miss in most of several draws" if number else ""


def rejection_words(rejected: Sequence[Finalist]) -> str:
    """Return why trials that were right at screening are not."""
    were = "trial was" if len(rejected) == 1 else "trials were"
    first = rejected[0]
    reason = one_line(first.check.reason or first.error) or "no reason was recorded"
    which = "" if len(rejected) == 1 else f"trial {first.trial}: "
    return (
        f"{len(rejected):,} {were} correct at screening, but rejected by the full check: "
        f"{which}{reason}"
    )


def outlook_words(outlook: Outlook | None) -> str:
    """Return what the rest of a search is expected to bring; empty where it is not known."""
    if outlook is None:
        return ""
    sure = ", ".join(
        f"{percent(float(share), 3)}: {100 * chance:.0f} %"
        for share, chance in sorted(outlook.within.items(), key=lambda pair: float(pair[0]))
    )
    return (
        f"{percent(outlook.improvement)} expected; chance that the best is within {sure} "
        f"(after {outlook.number} trials)"
    )
