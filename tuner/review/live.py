"""A run's page, piece by piece: what a live page asks for, kept until the run changes.

The verdict, the table and the first figure are one piece, which is all that a page needs to be
read; the other texts are another; every other figure is one of its own, made when somebody
looks at it. The machine that draws is often the one that measures.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import Any

from pydantic_core import to_json

from tuner.at_work import AtWork
from tuner.errors import InputError
from tuner.review.charts import CHART_NAMES
from tuner.review.formatting import count_words, ratio_words
from tuner.review.parameters import importances
from tuner.review.report import PARTS, chart_data, page_data, parts_of
from tuner.review.run_data import RunData, correct_trials
from tuner.review.run_index import RunIndex
from tuner.run import LOG_NAME
from tuner.trial import Finalist
from tuner.wording import one_line

__all__ = ["LivePages", "bands_of"]

FIRST_CHART = "progress-trial"
FIRST_PARTS = ("head", "verdict", "module")
LOG_LINES, LOG_BYTES = 8, 4_000  # of a run's log, beside what it is at
MOST_BANDS = 16  # of devices; more are one band
MAX_KEPT = 48  # pieces that are kept until their run changes: up to some MB each
SHARES_GROWTH = 1.05  # importance is found anew when a running search has so many times the trials


class LivePages:
    """The pieces of every run's page, as JSON with the run's `stamp`; made once where several ask.

    Args:
        run_index: whose runs they are.
    """

    def __init__(self, run_index: RunIndex) -> None:
        self._run_index = run_index
        self._kept = _Kept()

    def first(self, name: str) -> bytes:
        """Return the verdict, the table of all trials and the first figure.

        Raises:
            InputError: there is no such run.
            StorageError: a file of the run cannot be read.
        """
        return self._piece(
            name, "first", lambda run_data: page_data(run_data, [FIRST_CHART], FIRST_PARTS)
        )

    def rest(self, name: str) -> bytes:
        """Return the other texts; raises as `first` does."""
        others = [part for part in PARTS if part not in FIRST_PARTS]
        return self._piece(name, "rest", lambda run_data: {"parts": parts_of(run_data, others)})

    def chart(self, name: str, chart: str) -> bytes:
        """Return one figure, of `CHART_NAMES`; raises as `first` does."""
        if chart not in CHART_NAMES:
            raise InputError(f"charts/{chart[:80]}: expected one of {', '.join(CHART_NAMES)}")

        def made(run_data: RunData) -> dict[str, Any]:
            return {"charts": chart_data(run_data, [chart], lambda: self._shares(name, run_data))}

        return self._piece(name, chart, made)

    def source(self, name: str, number: int) -> list[str] | None:
        """Return the lines of a trial's source, None if it is not kept; raises as `first` does."""
        run_data = self._run_index.run_data(name)
        for trial in run_data.trials:
            if trial.number == number:
                text = run_data.source(trial)[1]
                return text.splitlines() if text else None
        return None

    def waiting(self, name: str) -> dict[str, Any] | None:
        """Return what the run is at, for whoever waits; None where no process works on it.

        Returns:
            `phase`, `stage` and `plan`, words; `counted`, in words how far the stage is, as
            `done` of `total`, each None if not known; `left_s` of it, as it was `age_s` ago;
            `finalists`, how many had their verdict, and `verdicts`, one line each; `log`, the
            last lines of its log; `bands`, what several devices and their builders are at, each
            `words` with the shares `busy` and `lost`; `rate`, trials a minute in words.

        Raises:
            InputError: there is no such run.
        """
        now = self._run_index.underway(name)
        if now is None:
            return None
        latest: Mapping[int, Finalist] = {}
        if now.finalists:
            latest = self._kept.get(
                (name, "checks"),
                self._run_index.stamp(name),
                lambda: {entry.trial: entry for entry in self._run_index.run(name).checks()},
            )
        entries = [latest[number] for number in now.finalists if number in latest]
        same = ("phase", "stage", "plan", "counted", "done", "total", "left_s", "age_s")
        return {
            **{name: getattr(now, name) for name in same},
            "finalists": _finalists_words(entries, now.wanted) if now.phase == "verifying" else "",
            "verdicts": [_verdict_words(entry) for entry in entries],
            "bands": bands_of(now.at_work),
            "rate": f"{now.per_minute:g} trials a minute" if now.per_minute else "",
            "log": _tail(self._run_index.run(name).path / LOG_NAME),
        }

    def _piece(self, name: str, piece: str, make: Callable[[RunData], dict[str, Any]]) -> bytes:
        run = self._run_index.run(name)
        # Before reading: what is added meanwhile is a change.
        stamp = self._run_index.stamp(run.path.name)

        def made() -> bytes:
            data = make(self._run_index.run_data(name)) | {"stamp": stamp}
            return to_json(data, inf_nan_mode="null")

        found: bytes = self._kept.get((name, piece), stamp, made)
        return found

    def _shares(self, name: str, run_data: RunData) -> Mapping[str, float]:
        """Return the importance of each parameter: of a running search, of a little while ago."""
        count = len(correct_trials(run_data.trials))
        age = count
        if run_data.is_running and count:
            age = int(math.log(count, SHARES_GROWTH))
        stamp = f"{run_data.is_running} {age}"
        found: Mapping[str, float] = self._kept.get(
            (name, "shares"), stamp, lambda: importances(run_data.trials)
        )
        return found


def bands_of(at_work: Sequence[AtWork]) -> list[dict[str, Any]]:
    """Return a band for each device and for each host's builders; of many devices one for all."""
    devices = [one for one in at_work if one.kind == "device"]
    bands = [_band(one.name, [one]) for one in devices]
    if len(devices) > MOST_BANDS:
        bands = [_band(f"{len(devices)} devices", devices)]
    for one in at_work:
        if one.kind == "builders":
            where = f" of {one.name}" if one.name else ""
            builders = count_words(one.num_slots, "builder") if one.num_slots else "builders"
            bands.append(_band(f"{builders}{where}", [one]))
    return bands


def _band(name: str, members: Sequence[AtWork]) -> dict[str, Any]:
    num_busy = sum(one.num_busy for one in members)
    num_lost = sum(not one.num_slots for one in members)
    num_slots = sum(one.num_slots for one in members)
    counts = [(num_busy, "busy"), (num_slots - num_busy, "waiting"), (num_lost, "lost")]
    total = max(1, num_slots + num_lost)
    is_one = total == 1
    words = ", ".join(word if is_one else f"{count} {word}" for count, word in counts if count)
    return {"name": name, "words": words, "busy": num_busy / total, "lost": num_lost / total}


def _finalists_words(entries: Sequence[Finalist], wanted: int) -> str:
    """Return how many finalists had their verdict, of all that are to be accepted."""
    accepted = sum(entry.check.is_accepted and not entry.error for entry in entries)
    num_rejected = len(entries) - accepted
    words = f"{accepted} of {wanted} accepted"
    return f"{words}, {num_rejected} rejected" if num_rejected else words


def _tail(path: Path) -> str:
    """Return the last lines of a log, without any before; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            lines = file.read(LOG_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_LINES:])


def _verdict_words(entry: Finalist) -> str:
    """Return what the check or the race said of a finalist, in one line."""
    i = entry.least
    if entry.error or not entry.check.is_accepted:
        reason = one_line(entry.check.reason or entry.error) or "no reason was recorded"
        return f"trial {entry.trial}: rejected: {reason}"
    if i is None:
        return f"trial {entry.trial}: accepted on every probe, not raced yet"
    speedup, low, high = (ratio_words(value) for value in (i.speedup, i.low, i.high))
    on = f" on {entry.least_on}" if entry.least_on else ""
    ends = i.bounds(f"{low} to {high}")
    return f"trial {entry.trial}: {entry.verdict}, {speedup} ({ends}){on}"


class _Kept:
    """What was made, by key, until its stamp is another; made once where several ask."""

    def __init__(self) -> None:
        self._found: OrderedDict[Any, tuple[str, Any]] = OrderedDict()
        self._making: defaultdict[Any, RLock] = defaultdict(RLock)

    def get(self, key: Any, stamp: str, make: Callable[[], Any]) -> Any:
        with self._making[key]:
            kept = self._found.pop(key, None)
            if kept is None or kept[0] != stamp:
                kept = stamp, make()
            self._found[key] = kept
            while len(self._found) > MAX_KEPT:
                self._found.popitem(last=False)
            return kept[1]
