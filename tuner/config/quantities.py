"""Values that are written as text, in a config and on the command line alike."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from tuner.config.document import shown, with_known
from tuner.problem.accuracy import Accuracy
from tuner.problem.modes import TuneMode
from tuner.problem.ordinary import WORKLOADS, WorkloadName

__all__ = [
    "parse_accuracy", "parse_choice", "parse_device", "parse_duration", "parse_fraction",
    "parse_mode", "parse_rows", "parse_workloads", "problem_of_rows",
]  # fmt: skip

MOST_SIZES = 8  # tuned for one file: each has a search of its own
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:h|ms|us|m|s))+")


def parse_duration(value: object) -> float:
    """Read `1h30m`, `10m`, `90s`, `20ms` or a number of seconds; return seconds.

    Raises:
        ValueError: it is none of these, or not positive.
    """
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) < 1e12 else math.nan
    elif isinstance(value, str) and _DURATION.fullmatch(text := value.replace(" ", "")):
        parts = re.findall(r"(\d+(?:\.\d+)?)(h|ms|us|m|s)", text)
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    elif isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value.strip()):
        seconds = float(value)
    if 0.0 < seconds < math.inf:
        return seconds
    raise ValueError(f"expected a time such as 10m, 90s, 1h or 20ms, got {shown(value)}")


def parse_fraction(value: object) -> float:
    """Read `0.5%`, or the same as the number 0.005; return 0.005.

    Raises:
        ValueError: it is neither, or not above 0 and at most one half.
    """
    fraction = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        fraction = float(value) if abs(value) < 1e12 else math.nan
    elif isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value)):
        fraction = float(match[1]) / 100
    if 0.0 < fraction <= 0.5:
        return fraction
    expected = "expected a share above 0% and at most 50%, such as 0.5% (or 0.005)"
    raise ValueError(f"{expected}, got {shown(value)}")


def parse_accuracy(value: object) -> Accuracy:
    """Read `float32`, `tf32`, `1e-4,1e-4` (rtol, atol) or a mapping with rtol and atol.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, Accuracy):
        return value
    if not isinstance(value, str | Mapping):
        raise ValueError(f"expected float32, tf32, pytorch or rtol and atol, got {shown(value)}")
    try:
        return Accuracy.parse(value)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("accuracy: ")) from None


def parse_mode(value: object) -> TuneMode:
    """Read `train`, `eval`, or `as_given`: as the module's constructor leaves it.

    Raises:
        ValueError: it is none of these.
    """
    if value == "as_given" or value == "train" or value == "eval":
        return value
    raise ValueError(f"expected train or eval, got {shown(value)}")


def parse_choice(value: object, *known: str) -> str:
    """Read one of some words.

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(value, str) and value in known:
        return value
    raise ValueError(f"expected {' or '.join(known)}, got {shown(value)}")


def parse_rows(value: object) -> list[int]:
    """Read one or several numbers of rows: a whole number, a list of some, or `64,1024`.

    Raises:
        ValueError: it is none of these, or `problem_of_rows` has one.
    """
    given = value if isinstance(value, list | tuple) else str(value).split(",")
    words = [str(each).strip() for each in given]
    if not words or not all(re.fullmatch(r"[1-9][0-9]{0,17}", word) for word in words):
        raise ValueError(
            "expected whole numbers above 0, such as 64 or 64,1024, got "
            f"{', '.join(words) or 'none'}"
        )
    rows = [int(word) for word in words]
    if problem := problem_of_rows(rows):
        raise ValueError(problem)
    return rows


def problem_of_rows(rows: Sequence[int]) -> str:
    """Say why one file cannot be tuned for these numbers of rows; empty where it can."""
    if len(set(rows)) < len(rows):
        return f"a value is there twice: [{', '.join(map(str, rows))}]"
    if len(rows) > MOST_SIZES:
        return f"expected at most {MOST_SIZES} values, got {len(rows)}"
    return ""


def parse_workloads(value: object) -> tuple[WorkloadName, ...]:
    """Read a list of names of `WORKLOADS`, or `given,ordinary`; return them in their usual order.

    Raises:
        ValueError: it is neither, a name is unknown or there twice, or `given` is not among them:
            all other figures of a file are of that.
    """
    names = value.split(",") if isinstance(value, str) else value
    expected = f"expected a list of {' and '.join(WORKLOADS)}, such as [given]"
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"{expected}, got {shown(value)}")
    names = [name.strip() for name in names]
    if not any(names):
        raise ValueError(f"{expected}, got none\n  hint: leave the key out for all of them")
    for name in names:
        if name not in WORKLOADS:
            raise ValueError(with_known(f"unknown workload {name!r}", name, WORKLOADS))
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice\n  hint: write it once")
    if "given" not in names:
        raise ValueError(
            f"given is missing, got {', '.join(names)}\n"
            "  hint: write [given, ordinary]; the least of both counts"
        )
    return tuple(name for name in WORKLOADS if name in names)


def parse_device(value: object) -> str:
    """Read `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda|cuda:\d{1,3}", value):
        return value
    raise ValueError(f"expected auto, cpu, cuda or cuda:N, got {shown(value)}")
