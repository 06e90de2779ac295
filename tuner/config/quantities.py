"""Values that are written as text, in a config and on the command line alike."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.config.document import shown, with_known
from tuner.problem.accuracy import Accuracy
from tuner.problem.modes import TuneMode
from tuner.problem.timed_data import FILE, GIVEN, USUAL, WORKLOADS

__all__ = [
    "absolute_workloads", "by_name", "parse_accuracy", "parse_choice", "parse_device",
    "parse_duration", "parse_fraction", "parse_mode", "parse_rows", "parse_workloads",
    "problem_of_rows",
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


def parse_workloads(value: object) -> tuple[str, ...]:
    """Read a list of names of `WORKLOADS` and of `{file: PATH}`, or text: `given,file:PATH`.

    Returns them in their usual order, files of tensors last, as `file:PATH`.

    Raises:
        ValueError: it is neither, a name is unknown or there twice, or `given` is not among them:
            all other figures of a file are of that.
    """
    given = value.split(",") if isinstance(value, str) else value
    expected = f"expected a list of {', '.join(WORKLOADS)} and {{file: PATH}}, such as [given]"
    if not isinstance(given, list | tuple):
        raise ValueError(f"{expected}, got {shown(value)}")
    if odd := [one for one in given if not _is_workload(one)]:
        raise ValueError(f"{expected}, got {shown(odd[0])} in it")
    names = [_worded(name).strip() for name in given]
    if not any(names):
        usual = ", ".join(USUAL)
        raise ValueError(f"{expected}, got none\n  hint: leave the key out for {usual}")
    for name in names:
        if name not in WORKLOADS and (not name.startswith(FILE) or name == FILE):
            known = (*WORKLOADS, f"{FILE}PATH")
            raise ValueError(with_known(f"unknown workload {name!r}", name, known))
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice\n  hint: write it once")
    if GIVEN not in names:
        raise ValueError(
            f"given is missing, got {', '.join(names)}\n"
            f"  hint: write [given, {', '.join(names)}]; the least of them counts"
        )
    files = (name for name in names if name.startswith(FILE))
    return (*(name for name in WORKLOADS if name in names), *files)


def _is_workload(value: object) -> bool:
    if isinstance(value, dict):
        return list(value) == ["file"] and isinstance(value["file"], str)
    return isinstance(value, str)


def by_name(workloads: Sequence[str], base: Path) -> dict[str, str]:
    """Return workloads by name, with the absolute path of a file of tensors or "".

    Args:
        workloads: as `parse_workloads` gives them.
        base: the folder that paths are relative to.

    Raises:
        ValueError: two files have one name.
    """
    found: dict[str, str] = {}
    for name in workloads:
        path = None
        if name.startswith(FILE):
            path = (base / Path(name.removeprefix(FILE)).expanduser()).absolute()
        known = name if path is None else f"{FILE}{path.name}"
        if known in found:
            raise ValueError(
                f"two files are called {known.removeprefix(FILE)}; expected other names"
            )
        found[known] = "" if path is None else str(path)
    return found


def absolute_workloads(value: str | Sequence[object]) -> str:
    """Return workloads as text of a command line, with paths that do not depend on the folder.

    Raises:
        ValueError: as `parse_workloads`, or there is a comma in a path, which would end it.
    """
    if not isinstance(value, str):
        parse_workloads(list(value))
    words = value.split(",") if isinstance(value, str) else map(_worded, value)
    found = [*map(_absolute, words)]
    if odd := [word for word in found if "," in word]:
        raise ValueError(
            f"{odd[0].removeprefix(FILE)}: a comma in a path\n"
            "  hint: name it in a config: workloads: [given, {file: PATH}]"
        )
    return ",".join(found)


def _worded(workload: object) -> str:
    return f"{FILE}{workload['file']}" if isinstance(workload, dict) else str(workload)


def _absolute(word: str) -> str:
    path = word.strip().removeprefix(FILE)
    if not path or path == word.strip():
        return word.strip()
    return f"{FILE}{Path(path).expanduser().absolute()}"


def parse_device(value: object) -> str:
    """Read `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda|cuda:\d{1,3}", value):
        return value
    raise ValueError(f"expected auto, cpu, cuda or cuda:N, got {shown(value)}")
