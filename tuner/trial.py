"""The records that flow through a run, and their way to and from JSON.

A `Candidate` is rendered, becomes a `Build`, is judged by a `Check`, timed into a `Measurement`;
all of that is an `Outcome`, and with its number a `Trial`. Records are frozen, and do no work.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, model_validator

from tuner.by_batch import ByBatch
from tuner.measured import NUMBERS, SAME_SPEED, Bursts, Interval, Measurement, OnData, keys_of
from tuner.plans import Plan

__all__ = [
    "SAME_SPEED",
    "Build",
    "Candidate",
    "Check",
    "Compiled",
    "Finalist",
    "Interval",
    "KernelResources",
    "Language",
    "Measurement",
    "OnData",
    "Outcome",
    "Params",
    "ProbeResult",
    "Result",
    "Status",
    "Trial",
    "Value",
    "content_key",
    "from_json",
    "to_json",
]

Value = bool | int | float | str
Params = dict[str, Value]
Language = Literal["cuda", "cpp", "triton"]


class Status(StrEnum):
    """What became of a candidate, in the words of the community's T4 format (`invalidity`)."""

    CORRECT = "correct"
    CONSTRAINTS = "constraints"
    COMPILE = "compile"
    RUNTIME = "runtime"
    TIMEOUT = "timeout"
    CORRECTNESS = "correctness"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A template rendered with one set of parameters, not yet judged."""

    op: str
    template: str
    params: Params
    language: Language
    source: str
    plan: Plan
    optimisations: tuple[str, ...] = ()
    is_deterministic: bool = True

    @property
    def key(self) -> str:
        """Content key: equal for two candidates with the same text, plan and language."""
        return content_key(self.language, self.source, to_json(self.plan))


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What the compiler reports of one device kernel."""

    name: str
    registers: int
    smem_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Build:
    """The outcome of compiling one candidate.

    `artefact` is the path of the shared object (for Triton: of the Python module), None when
    it failed; then `error` says why in one line and `log` is the path of the whole log.
    `binary_key` is equal for two builds with the same machine code. `started_at` and `ended_at`
    (UTC, ISO 8601) include the pauses of a builder, `seconds` does not; `builder` numbers it,
    `host` names another host's, and `note` says why kernels are compiled where they are timed.
    """

    key: str
    status: Status
    artefact: str | None
    log: str
    error: str = ""
    binary_key: str = ""
    kernels: tuple[KernelResources, ...] = ()
    seconds: float = 0.0
    is_cached: bool = False
    started_at: str = ""
    ended_at: str = ""
    builder: int | None = None
    host: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One probe's errors against float64, beside the baseline's own on the same probe.

    `rms_rel` is the root mean square error over the root mean square of the float64 value;
    `max_abs` the largest absolute error; both over all elements of the output. `note` tells a
    right answer by means that are worth nothing. `num_draws` is above 1 where the first answer
    was so near its limit that chance may have decided, and the probe was drawn anew; `is_close`
    says that this is so of a rejection. `difference` tells of a right one by how it differs from
    the reference's class: it refuses what that does not, or answers where that refuses.
    `is_at_kinks`: gradients of a right one differ from float64 where rounding decides on which
    side of a kink a number lies.
    """

    __pydantic_config__ = NUMBERS

    probe: str
    rms_rel: float
    max_abs: float
    baseline_rms_rel: float
    baseline_max_abs: float
    is_accepted: bool
    reason: str = ""
    note: str = ""
    is_close: bool = False
    num_draws: int = 1
    difference: str = ""
    is_at_kinks: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """The verdict on a candidate's answers, in two degrees.

    `is_accepted`: it is right, as the reference is configured. `differences` are where it is no
    drop-in for the reference's class all the same. `notes` name right answers by means worth
    nothing.
    """

    is_accepted: bool
    accuracy: str
    reason: str = ""
    probes: tuple[ProbeResult, ...] = ()
    is_thorough: bool = False
    notes: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    def strictly(self) -> Check:
        """Return the verdict of one who rejects differences, too."""
        if not self.is_accepted or not self.differences:
            return self
        reason = f"right, but no drop-in: {'; '.join(self.differences)}"
        return replace(self, is_accepted=False, reason=reason)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a candidate: its status, the reason, and what each stage found."""

    status: Status
    reason: str = ""
    build: Build | None = None
    check: Check | None = None
    measurement: Measurement | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # per stage: render, build, ...
    same_as: int | None = None  # trial number whose outcome was reused (same machine code)
    device: str = ""  # which of several devices checked and timed it

    @property
    def latency_us(self) -> float | None:
        """The median latency of a correct candidate on the given data, else None."""
        if self.status is not Status.CORRECT or self.measurement is None:
            return None
        return self.measurement.reported_us

    @property
    def ranked_us(self) -> float | None:
        """The objective: `latency_us`, longer where other data make the speed-up less."""
        if self.latency_us is None or self.measurement is None:
            return None
        return self.latency_us * self.measurement.slowdown


@dataclass(frozen=True, slots=True)
class Trial:
    """One line of `trials.jsonl`.

    Trials are numbered in the order in which they were reported to the search. With several
    devices that need not be the order of asking: `asked` is then the number of the question,
    where it is another one.
    """

    number: int
    template: str
    params: Params
    candidate_key: str
    outcome: Outcome
    started_at: str = ""  # UTC, ISO 8601
    elapsed_s: float = 0.0  # since the run's first start, of working time
    asked: int | None = None

    @property
    def question(self) -> int:
        """The number of the question that it answers, counted in the order of asking."""
        return self.number if self.asked is None else self.asked


@dataclass(frozen=True, slots=True)
class Finalist:
    """A trial's exported file, checked in full and raced against the baseline.

    `latency_us` and `baseline_us` are medians over all rounds of all processes. Every sample is
    kept, as [process][round][sample] in us, its own and the baseline's of the same rounds;
    `num_throttled` more were dropped in that race, since the device was throttled. All of this is
    reported of the reference's weights as it is constructed and of its inputs; `others` are
    speed-ups on other data, with samples of their own, and `step` that of a step of training
    (forward, and gradients of inputs and weights), where they were asked for, or `step_failure` is
    why it was not timed. `key` is equal for equal code on equal terms,
    `race_key` for all that were in one race, and `seed` is that of the probes: no later session
    checks or races again.
    `falls_back` says that a timed call ran the reference's own operations, `by_batch` how fast the
    kernels are at other numbers of rows, and at which of them the file takes them. `at_sizes` are
    races at each of several tuned sizes, as "batch = 64", with empty checks; the rest is of one.
    """

    __pydantic_config__ = NUMBERS

    trial: int
    check: Check
    interval: Interval | None = None
    latency_us: float | None = None
    baseline_us: float | None = None
    noise: float | None = None
    error: str = ""
    samples_us: Bursts = ()
    baseline_samples_us: Bursts = ()
    num_throttled: int = 0
    others: tuple[OnData, ...] = ()
    step: Interval | None = None
    step_failure: str = ""
    key: str = ""
    race_key: str = ""
    seed: int = 0
    falls_back: bool = False
    by_batch: ByBatch | None = None
    at_sizes: dict[str, Finalist] = field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_releases(cls, values: Any) -> Any:
        """Read records of when there were ordinary data alone beside the given ones."""
        keys = keys_of(values)
        names = ("", "_samples_us", "_baseline_samples_us", "_on")
        interval, own, baseline, words = (keys.pop(f"elsewhere{name}", None) for name in names)
        if interval is not None:
            words = words or "random weights and normal inputs"
            samples = {"samples_us": own or (), "baseline_samples_us": baseline or ()}
            data = {"name": "ordinary", "words": words, "interval": interval, **samples}
            keys["others"] = [data]
        return values

    @property
    def counting(self) -> tuple[OnData, ...]:
        """The other data that count: raced in as many sets of processes as the given ones.

        Earlier releases raced ordinary data in two, whose interval is too wide to judge by.
        """
        least = math.inf if self.interval is None else self.interval.num_processes
        return tuple(each for each in self.others if each.interval.num_processes >= least)

    @property
    def least(self) -> Interval | None:
        """The speed-up that counts: that of the least worth over the data that count."""
        if self.interval is None:
            return None
        intervals = [self.interval, *(each.interval for each in self.counting)]
        return min(intervals, key=lambda interval: interval.worth)

    @property
    def least_on(self) -> str:
        """The data of `least` in words; empty where the given ones are as fast, but for noise."""
        given, least = self.interval, self.least
        if given is None or least is None or given.speedup <= (1 + SAME_SPEED) * least.speedup:
            return ""
        return next(each.words for each in self.counting if each.interval == least)

    @property
    def least_words(self) -> str:
        """The ratio of `least` and where it lies, with its data where these matter."""
        found = "not raced" if self.least is None else self.least.words
        return f"{found} on {self.least_on}" if self.least_on else found

    @property
    def verdict(self) -> Literal["faster", "slower", "no difference"] | None:
        """That of `least`, but what runs the reference's own operations is never faster."""
        found = self.least.verdict if self.least is not None else None
        return "no difference" if self.falls_back and found == "faster" else found

    @property
    def depends_on(self) -> OnData | None:
        """The other data that change the speed-up, by more than another process would.

        Of several it is that of the least worth.
        """
        found = [each for each in self.others if each.depends(self.interval)]
        return min(found, key=lambda each: each.interval.worth, default=None)


@dataclass(frozen=True, slots=True)
class Compiled:
    """How `torch.compile` does beside the exported file, raced with it and with the baseline.

    `interval` is baseline / torch.compile, `ours` torch.compile / exported file, of the same
    rounds; `answer` the verdict on one of its calls. Where all are None, `error` says why.
    `others` are the speed-ups of torch.compile on other data, by their words. In steps of
    training it does not race: that would compile once more.
    """

    mode: str
    interval: Interval | None = None
    ours: Interval | None = None
    latency_us: float | None = None
    error: str = ""
    answer: ProbeResult | None = None
    others: dict[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """What a run ended with.

    `ties` are the trial numbers that cannot be distinguished from the winner. `exported` is the
    measurement of the exported file itself, made from its file in fresh processes; with
    `is_fallback` that file holds the reference's own modules, since even the winner was slower.
    `compiled` is there where the config asked for it. `effort` is how much was asked for.
    `bound_us` is the device's, of an operator that was derived from a module, where it is known;
    `baseline_over_bound` how many times that PyTorch took in the exported file's race.
    `disagreements` are found at each reading: figures that were not what their samples give.
    """

    winner: int
    finalists: tuple[Finalist, ...]
    ties: tuple[int, ...]
    exported: Finalist | None = None
    export_path: str = ""
    notes: tuple[str, ...] = ()
    is_fallback: bool = False
    compiled: Compiled | None = None
    effort: str = "normal"
    bound_us: float | None = None
    baseline_over_bound: float | None = None
    disagreements: tuple[str, ...] = ()


R = TypeVar("R")

_adapter: Any = functools.cache(TypeAdapter)  # to build one takes milliseconds


def to_json(record: Any) -> str:
    """Return the record as one line of JSON."""
    text: str = _adapter(type(record)).dump_json(record).decode()
    return text


def from_json(kind: type[R], text: str | bytes) -> R:
    """Read a record of type `kind`; pydantic's ValidationError when the text is not one."""
    record: R = _adapter(kind).validate_json(text)
    return record


def content_key(*parts: object) -> str:
    """Return a 16-digit key of the given parts, stable across processes and machines."""
    text = json.dumps([str(part) for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
