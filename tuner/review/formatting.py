"""Numbers in words, as the page, the terminal and the figures all say them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tuner.run import Outlook
from tuner.trial import Finalist, ProbeResult, Trial
from tuner.wording import one_line, percent

__all__ = [
    "NONE",
    "count_words",
    "draws_words",
    "flat",
    "moment_words",
    "number_words",
    "outlook_words",
    "params_words",
    "percent_words",
    "rate_words",
    "ratio_words",
    "rejection_words",
    "relative_path",
    "seconds_words",
    "sizes_words",
    "three_digits",
    "time_unit",
    "us_in",
    "us_words",
    "wrapped_words",
]

NONE = "–"
COLUMNS = 80  # of a terminal
MOST_RATIO = 1000.0  # times: beyond it an interval says nothing


def three_digits(value: float | None) -> str:
    """Return a number with three digits, never as a power of ten: 0.0512, 7.22, 12,300."""
    if value is None:
        return NONE
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.2e}")
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def us_words(value: float | None) -> str:
    """Return a time in the unit that fits it, from a number in us."""
    unit = time_unit([value])
    words = us_in(value, unit)
    return words if words == NONE else f"{words} {unit}"


def rate_words(tflops: float) -> str:
    """Return a rate of arithmetic in the unit that fits it, from TFLOPS."""
    if tflops < 1:
        return f"{three_digits(1e3 * tflops)} GFLOPS"
    return f"{three_digits(tflops)} TFLOPS"


def time_unit(values_us: Iterable[float | None]) -> str:
    """Return the unit for a column of times: the one that fits the least of them."""
    known = [float(f"{v:.2e}") for v in values_us if v is not None and math.isfinite(v) and v > 0]
    least_us = min(known, default=0.0)
    return "s" if least_us >= 1e6 else "ms" if least_us >= 1e3 else "µs"


def us_in(value: float | None, unit: str) -> str:
    """Return a time in us as a number of that unit, one of `time_unit`."""
    if value is None or not math.isfinite(value):
        return NONE
    return three_digits(value / {"µs": 1.0, "ms": 1e3, "s": 1e6}[unit])


def sizes_words(sizes: Mapping[str, object]) -> str:
    """Return a problem's named sizes as one reads them; empty where none are recorded.

    A product's are 1024 x 8192 -> 4096, rows of columns 16 x 4096; of a module that was captured
    those of its inputs and of its largest weight, so that two layers of other widths differ. All
    others by name.
    """
    if {"batch", "in_features", "out_features"} <= sizes.keys():
        return f"{sizes['batch']} x {sizes['in_features']} -> {sizes['out_features']}"
    if sizes.keys() == {"rows", "cols"}:
        return f"{sizes['rows']} x {sizes['cols']}"
    tensors: dict[str, dict[int, object]] = {}
    for name, size in sizes.items():
        tensor, found, dimension = name.rpartition("_size_")
        if found and dimension.isdigit():
            tensors.setdefault(tensor, {})[int(dimension)] = size
    if tensors and "batch" in sizes:
        batch = sizes["batch"]  # the first dimension of each input, and of no weight
        shapes = {t: [d[n] for n in sorted(d)] for t, d in tensors.items()}
        inputs = {t: [batch, *dims] for t, dims in shapes.items() if 0 not in tensors[t]}
        weights = {t: dims for t, dims in shapes.items() if t not in inputs and len(dims) > 1}
        if inputs:
            largest = sorted(weights, key=lambda t: -_count(weights[t]))[:1]
            shown = inputs | {t: weights[t] for t in largest}
            return ", ".join(f"{t}: {' x '.join(map(str, dims))}" for t, dims in shown.items())
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


def _count(dims: Sequence[object]) -> float:
    return math.prod(dim if isinstance(dim, int) else 1 for dim in dims)


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested facts by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        is_nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return found


def moment_words(moment: str) -> str:
    """Return a moment as it was recorded in words, to the minute; as it is if it is none."""
    try:
        found = datetime.fromisoformat(moment)
    except ValueError:
        return moment
    return f"{found:%Y-%m-%d %H:%M} {found.tzname() or ''}".rstrip()


def seconds_words(value: float) -> str:
    """Return a duration in the unit that fits it, from a number in s."""
    if value >= 120:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s" if value >= 0.9995 else f"{1e3 * value:.3g} ms"


def ratio_words(value: float) -> str:
    """Return a speed-up, or that it has no bound that says anything."""
    if not value < MOST_RATIO:
        return "no bound" if value == math.inf or math.isnan(value) else f"above {MOST_RATIO:.0f}x"
    return f"{value:.3f}x" if value < 2 else f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def percent_words(value: float | None) -> str:
    """Return a share of 1 as a percentage."""
    return NONE if value is None or not math.isfinite(value) else percent(value)


def count_words(number: int, noun: str, nouns: str = "") -> str:
    """Return how many there are of something, in the singular or plural."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def number_words(values: Sequence[int], most: int = 12) -> str:
    """Return the first few numbers, and how many more there are."""
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(str(value) for value in values[:most]) + more


def wrapped_words(label: str, text: str, width: int, max_lines: int | None = None) -> list[str]:
    """Lay a text out behind its label, in lines of 80 columns; nothing in it controls a terminal.

    Args:
        label: stands before the first line.
        text: to be broken at blanks.
        width: of the column of labels.
        max_lines: of which the last one ends in dots where there is more.
    """
    lines = textwrap.wrap(
        "".join(c if c.isprintable() else " " for c in text),
        COLUMNS,
        initial_indent=f"{label:<{width}}",
        subsequent_indent=" " * width,
        max_lines=max_lines,
        placeholder=" ...",
        break_on_hyphens=False,
    )
    return lines or [label]


def params_words(trial: Trial) -> str:
    """Return a trial's parameters in one line, the template first."""
    rest = [f"{k}={v}" for k, v in trial.params.items() if k != "template"]
    return " ".join([f"template={trial.template}", *rest])


def relative_path(path: str, folder: Path) -> str:
    """Return a path as seen from a folder, or as it is where it lies outside.

    A folder that was moved since, or copied, is known by its name; one that has another name now,
    by the file that is in it at the same place.
    """
    whole = Path(path)
    if whole.is_relative_to(folder):
        return str(whole.relative_to(folder))
    places = [place for place, part in enumerate(whole.parts) if part == folder.name]
    if places:
        return str(Path(*whole.parts[places[-1] + 1 :]))
    ends = [] if whole.exists() else [Path(*whole.parts[i:]) for i in range(1, len(whole.parts))]
    return next((str(end) for end in ends if (folder / end).is_file()), path)


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
        f"improvement estimated at {percent(outlook.improvement)}; chance that the best is within "
        f"{sure} (after {outlook.number} trials)"
    )
