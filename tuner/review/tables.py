"""A run's trials as plain tables: columns of every trial, contests of strategies, failures.

What the page, the CSV, JSON for scripts and the notebook's data frame are made of. Values are
numbers, words or None; how they are shown is said by each column's kind.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuner.errors import DeviceError
from tuner.machine.ceilings import occupancy
from tuner.machine.device import Device
from tuner.review.formatting import NONE, number_words, time_unit, us_in
from tuner.review.run_data import RunData, correct_trials, latency_us_of, speedup_over
from tuner.trial import Status, Trial, Value
from tuner.wording import one_line

__all__ = [
    "Column",
    "Failure",
    "Resources",
    "Table",
    "contest",
    "failures",
    "grouped",
    "noise_of",
    "ordered_values",
    "parameter_names",
    "pareto",
    "resources_of",
    "rms_of",
    "speedup_of",
    "strategies",
    "trial_columns",
    "value_of",
    "value_words",
]

ABSENT = "absent"  # a parameter that a template does not have
# In a reason: 17, -0.5, 1,024, 3.2e-7, 0x7ffe, nan, as they differ from trial to trial.
_NUMBER = re.compile(r"[-+]?(0x[0-9a-f]+|\d[\d,.]*(e[-+]?\d+)?)|[-+]?\b(nan|inf)\b", re.IGNORECASE)
MAX_FAILURE_GROUPS = 40
MAX_CONTESTANTS = 25  # combinations of values in one table
MAX_LOG_CHARS = 6_000  # of a compiler's log on the page; the run's folder keeps it whole
MAX_REASON_CHARS = 300  # in the table; the group of failures has it whole


# ---- parameters and their values ------------------------------------------------------------


def parameter_names(trials: Sequence[Trial]) -> list[str]:
    """Return every parameter that occurs, `template` first."""
    names = {name: None for trial in trials for name in trial.params}
    return ["template", *(name for name in names if name != "template")]


def value_of(trial: Trial, name: str) -> Value | None:
    """Return a parameter's value; None where the template has none."""
    return trial.template if name == "template" else trial.params.get(name)


def value_words(trial: Trial, name: str) -> str:
    """Return a parameter's value as it is shown; `absent` where the template has none."""
    value = trial.template if name == "template" else trial.params.get(name, ABSENT)
    return str(value)


def ordered_values(trials: Sequence[Trial], name: str) -> list[str]:
    """Return a parameter's values in their own order: numbers, words, absent."""
    found: dict[str, Value] = {value_words(t, name): t.params.get(name, ABSENT) for t in trials}

    def rank(word: str) -> tuple[int, float, str]:
        value = found[word]
        if isinstance(value, int | float):
            return 0, float(value), word
        return (2 if word == ABSENT else 1), 0.0, word

    return sorted(found, key=rank)


def grouped(trials: Sequence[Trial], names: Sequence[str]) -> dict[tuple[str, ...], list[Trial]]:
    """Return the trials by their values of some parameters."""
    groups: dict[tuple[str, ...], list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[tuple(value_words(trial, name) for name in names)].append(trial)
    return dict(groups)


def strategies(trials: Sequence[Trial]) -> list[str]:
    """Return the parameters that are a choice between words, and vary."""
    return [
        name
        for name in parameter_names(trials)
        if any(isinstance(t.params.get(name), str) for t in trials) or name == "template"
        if len({value_words(t, name) for t in trials}) > 1
    ]


# ---- what a trial cost and gave -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resources:
    """What the kernels of one candidate take: the largest of each, over its kernels.

    `smem_bytes` is what the compiler sees, without what is asked for at the launch. `occupancy`
    is the most that registers and that memory allow for the kernel with most registers, whatever
    its block, which the compiler does not tell either. None where the device's limits are not
    known. What the winner's launches asked for is in its profile.
    """

    registers: int
    smem_bytes: int
    spilled_bytes: int
    occupancy: float | None


def resources_of(trial: Trial, device: Device | None) -> Resources | None:
    """Return what a trial's kernels take; None where the compiler reported nothing."""
    build = trial.outcome.build
    if build is None or not build.kernels:
        return None
    neediest = max(build.kernels, key=lambda kernel: kernel.registers)
    return Resources(
        max(kernel.registers for kernel in build.kernels),
        max(kernel.smem_bytes for kernel in build.kernels),
        sum(k.spill_store_bytes + k.spill_load_bytes for k in build.kernels),
        _occupancy(neediest.registers, neediest.smem_bytes, device),
    )


@functools.lru_cache(maxsize=4096)  # 10,000 trials share a few hundred pairs
def _occupancy(registers: int, smem_bytes: int, device: Device | None) -> float | None:
    if device is None:
        return None
    try:
        return max(
            occupancy(device, threads, registers, smem_bytes)
            for threads in (64, 128, 256, 512, 1024)
        )
    except DeviceError:
        return None


def rms_of(trial: Trial) -> float | None:
    """Return the relative rms error on the inputs as given; None where it was not computed."""
    check = trial.outcome.check
    if check is None or not check.probes:
        return None
    rms = check.probes[0].rms_rel
    return rms if math.isfinite(rms) else None


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Return the correct trials to which none is both faster and more accurate, fastest first."""
    known = [t for t in correct_trials(trials) if rms_of(t) is not None]
    front: list[Trial] = []
    least = math.inf
    for trial in sorted(known, key=lambda t: (latency_us_of(t), rms_of(t) or 0.0)):
        rms = rms_of(trial) or 0.0
        if rms < least:
            front.append(trial)
            least = rms
    return front


# ---- every trial ----------------------------------------------------------------------------

Kind = Literal["count", "us", "percent", "ratio", "error", "bytes", "seconds", "number", "word"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table of all trials.

    `name` is unique and carries the unit; `kind` says how a value is shown: "percent" is a
    share of 1, "error" a relative error, "number" a parameter, "word" anything else.
    `is_parameter` says that the candidate was made with it, not what became of it.
    """

    name: str
    label: str
    kind: Kind
    values: tuple[Value | None, ...]
    is_parameter: bool = False


_TAKEN: tuple[tuple[str, str, Kind], ...] = (
    ("registers", "registers", "count"),
    ("smem_bytes", "static shared bytes", "bytes"),
    ("spilled_bytes", "spilled bytes", "bytes"),
    ("occupancy", "occupancy ≤", "percent"),
)


def trial_columns(run_data: RunData) -> list[Column]:
    """Return the table of all trials, one row a trial, in order.

    The columns are the result, then the parameters, then what it took. A parameter that bears
    the name of another column is called `param_<name>`.
    """
    trials, device = run_data.trials, run_data.device
    taken = [resources_of(trial, device) for trial in trials]
    before = [
        _column("number", "trial", "count", trials, lambda t: t.number),
        _column("status", "status", "word", trials, lambda t: t.outcome.status.value),
        _column("latency_us", "latency µs", "us", trials, lambda t: t.outcome.latency_us),
        _column("noise", "noise", "percent", trials, noise_of),
        _column("speedup", "speed-up", "ratio", trials, lambda t: speedup_of(t, run_data)),
        _column("rms_rel", "rms error", "error", trials, rms_of),
    ]
    after = [
        Column(name, label, kind, tuple(getattr(r, name) if r else None for r in taken))
        for name, label, kind in _TAKEN
    ]
    after = [column for column in after if any(v is not None for v in column.values)]
    after += _on_other_data(trials)
    after += [
        _column("build_s", "build s", "seconds", trials, lambda t: _seconds(t, "build")),
        _column("check_s", "check s", "seconds", trials, lambda t: _seconds(t, "check")),
        _column("measure_s", "measure s", "seconds", trials, lambda t: _seconds(t, "measure")),
        _column("elapsed_s", "at s", "seconds", trials, lambda t: t.elapsed_s),
        _column("reason", "reason", "word", trials, _reason),
    ]
    used = {column.name for column in (*before, *after)}
    middle = [_parameter(trials, name, used) for name in parameter_names(trials)]
    return [*before, *middle, *after]


def _column(
    name: str, label: str, kind: Kind, trials: Sequence[Trial], value: Callable[[Trial], Any]
) -> Column:
    return Column(name, label, kind, tuple(value(trial) for trial in trials))


def _parameter(trials: Sequence[Trial], name: str, used: set[str]) -> Column:
    values = tuple(value_of(trial, name) for trial in trials)
    is_number = all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in values if v is not None
    )
    unique = f"param_{name}" if name in used else name
    return Column(unique, name, "number" if is_number else "word", values, True)


def _seconds(trial: Trial, stage: str) -> float | None:
    return trial.outcome.seconds.get(stage)


def noise_of(trial: Trial) -> float | None:
    """Return how the times of a trial scatter; None where it was not timed."""
    measurement = trial.outcome.measurement
    return measurement.noise if measurement is not None else None


def _on_other_data(trials: Sequence[Trial]) -> list[Column]:
    """Return a column of speed-ups at screening for each of the other data that were timed."""
    measured = [t.outcome.measurement for t in trials if t.outcome.measurement is not None]
    names = dict.fromkeys(name for m in measured for name in m.others_us)

    def column(name: str) -> Column:
        return _column(
            f"{name}_speedup", f"on {name}", "ratio", trials, lambda t: _speedup_on(t, name)
        )

    return [column(name) for name in names]


def _speedup_on(trial: Trial, name: str) -> float | None:
    measured = trial.outcome.measurement
    if measured is None or not measured.others_us.get(name):
        return None
    return measured.speedup_on(name) if measured.others_anchor_us.get(name) else None


def speedup_of(trial: Trial, run_data: RunData) -> float | None:
    """Return a trial's speed over PyTorch as timed just before it; None where nobody timed it."""
    return speedup_over(trial, run_data.session(trial.number).latency_us)


def _reason(trial: Trial) -> str | None:
    outcome = trial.outcome
    notes = [" ".join(outcome.reason.split())[:MAX_REASON_CHARS]] if outcome.reason else []
    if outcome.same_as is not None:
        notes.append(f"same machine code as trial {outcome.same_as}")
    if outcome.measurement is not None and outcome.measurement.is_censored:
        notes.append("stopped early, clearly slow")
    return "; ".join(notes) or None


# ---- which strategy wins --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """Plain cells under their headings; `numeric` names the columns that hold numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()


def contest(trials: Sequence[Trial], names: Sequence[str]) -> Table:
    """Return which values of some parameters, together, gave the best latency, best first."""
    best_us = min(map(latency_us_of, trials), default=math.inf)
    ranked = []
    for values, group in grouped(trials, names).items():
        times = sorted(latency_us_of(t) for t in correct_trials(group))
        ranked.append((times[0] if times else math.inf, values, len(group), times))
    ranked.sort(key=lambda entry: entry[:2])
    del ranked[MAX_CONTESTANTS:]
    unit = time_unit(first_us for first_us, _, _, times in ranked if times)
    rows = [
        (
            *values,
            str(count),
            str(len(times)),
            us_in(times[0], unit) if times else NONE,
            us_in(statistics.median(times), unit) if times else NONE,
            f"{times[0] / best_us:.3f}" if times else NONE,
        )
        for _, values, count, times in ranked
    ]
    counted = ("trials", "correct", f"best {unit}", f"median {unit}", "times the best")
    return Table((*names, *counted), tuple(rows), frozenset(counted))


# ---- failures -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """Trials that failed for the same reason, but for numbers in its words.

    `log` is the compiler's own, of the trial `example`; empty where another stage failed.
    """

    status: str
    reason: str
    count: int
    trials: str
    log: str
    example: int


def failures(run_data: RunData) -> list[Failure]:
    """Return why trials failed, the most frequent reason first."""
    groups: dict[tuple[Status, str], list[Trial]] = defaultdict(list)
    for trial in run_data.trials:
        if trial.outcome.status is not Status.CORRECT:
            first = one_line(trial.outcome.reason) or "no reason was recorded"
            groups[trial.outcome.status, _NUMBER.sub("#", first)].append(trial)
    ranked = sorted(groups.values(), key=len, reverse=True)
    return [_failure(run_data, group) for group in ranked[:MAX_FAILURE_GROUPS]]


def _failure(run_data: RunData, group: Sequence[Trial]) -> Failure:
    first = group[0]
    is_compile = first.outcome.status is Status.COMPILE
    log = run_data.log(first, MAX_LOG_CHARS) if is_compile else ""
    return Failure(
        first.outcome.status.value,
        first.outcome.reason.strip()[:2000] or "no reason was recorded",
        len(group),
        number_words([trial.number for trial in group]),
        log,
        first.number,
    )
