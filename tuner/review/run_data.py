"""All that is read of a run, once; page, terminal and figures take their answers from it."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from tuner.capture.outline import MODULE_FILE, KernelTask
from tuner.capture.tasks.half_products import PRODUCTS
from tuner.environment import Environment, SessionRecord
from tuner.errors import StorageError
from tuner.intervals import relative_noise
from tuner.machine.ceilings import roofline_tflops
from tuner.machine.device import Device
from tuner.profiled import COUNTERS_NAME, PROFILE_NAME, CountedCalls, Profiles
from tuner.review.gain import ModuleRecord
from tuner.review.workloads import finalist_of
from tuner.run import Outlook, Run, is_locked
from tuner.trial import Finalist, Result, Trial, from_json

__all__ = [
    "MAX_SOURCE_CHARS",
    "UNITS",
    "Baseline",
    "Bound",
    "RunData",
    "correct_trials",
    "is_all_rejected",
    "latency_us_of",
    "rejected_of",
    "speedup_over",
    "text_of",
]

R = TypeVar("R")

MAX_SOURCE_CHARS = 400_000
DEFAULT_MAX_NOISE = 0.005  # the config's own default for measure.max_noise

# Precisions as `device` names them, by what computes in them.
UNITS = {
    "fp32": "plain float32 cores",
    "fp16x3": "float16 tensor cores, three products",
    "fp16x2": "float16 tensor cores, one product and two in 8 bits",
    "tf32": "TF32 tensor cores",
    "fp16": "float16 tensor cores",
}
_SAME_RATE = {"fp16_int8x2": "fp16x2", "fp16_fp8x2": "fp16x2"}  # as hand-written templates say
# What an accuracy class allows at best; any other class allows float16.
_ALLOWED = {
    "float32": ("fp32", "fp16x3", "fp16x2"),
    "pytorch": ("fp32", "fp16x3", "fp16x2"),
    "tf32": ("tf32", "fp16"),  # float16 keeps as many bits, at twice the rate
}
_IN_CONVOLUTIONS = ("tf32", "fp16")  # what `pytorch` allows there besides, as PyTorch itself does


@dataclass(frozen=True, slots=True)
class Bound:
    """100 % of a roofline: the device's rated arithmetic or bandwidth, operands counted once.

    No law of nature: a clock above the rated one passes it by as much, and operands that are
    still in the L2 need no bandwidth. What is rejected as impossible lies below that too
    (`device.floor_us`).
    """

    precision: str
    words: str
    tflops: float
    latency_us: float
    is_memory: bool = False  # whether the bandwidth is what bounds


@dataclass(frozen=True, slots=True)
class Baseline:
    """PyTorch's own latency as it was timed once, and how its times scattered."""

    latency_us: float | None
    noise: float | None


@dataclass(frozen=True, slots=True)
class RunData:
    """All that is read of a run, once.

    `is_running`: another process works on it, so that it cannot be resumed. `outlooks`: what
    the search expected of the rest, the latest last. `checks`: every finalist as it was checked or
    raced, in that order; a later one of a trial counts. `module`: of an operator that was derived
    from one. `profiles`: one call of the baseline and of the winner, kernel by kernel.
    `counters`: the same as Nsight Compute counts it, where somebody asked for that.
    """

    run: Run
    environment: Environment
    trials: Sequence[Trial]
    result: Result | None
    config: str
    is_running: bool = False
    outlooks: Sequence[Outlook] = ()
    checks: Sequence[Finalist] = ()
    module: ModuleRecord | None = None
    profiles: Profiles | None = None
    counters: CountedCalls | None = None

    @classmethod
    def of(cls, run: Run, trials: Sequence[Trial] | None = None) -> RunData:
        """Read a run.

        Args:
            run: to read.
            trials: of the run, where they are known already.

        Raises:
            StorageError: a file of the run cannot be read.
        """
        config = text_of(run.config_path, MAX_SOURCE_CHARS)
        is_running = is_locked(run, by_another=True)
        trials, outlooks = run.trials() if trials is None else trials, run.outlooks()
        result, checks = run.result(), run.checks()
        module = _record(run.path / MODULE_FILE, ModuleRecord)
        profiles = _record(run.path / PROFILE_NAME, Profiles)
        counters = _record(run.path / COUNTERS_NAME, CountedCalls)
        return cls(
            run, run.environment(), trials, result, config, is_running, outlooks, checks, module,
            profiles, counters,
        )  # fmt: skip

    @property
    def device(self) -> Device | None:
        """The device, if enough of it was recorded."""
        data = self.environment.device
        known = {f.name for f in dataclasses.fields(Device)}
        needed = {"kind", "index", "name", "memory_bytes"}
        if not needed <= data.keys():
            return None
        return Device(**{key: value for key, value in data.items() if key in known})

    @property
    def device_name(self) -> str:
        """What the device is called, however little was recorded."""
        return self.environment.named_device or "an unnamed device"

    @property
    def best(self) -> Trial | None:
        """The winner; of a run without a result the fastest by screening."""
        if self.result is not None:
            for trial in self.trials:
                if trial.number == self.result.winner:
                    return trial
        correct = correct_trials(self.trials)
        return min(correct, key=lambda trial: trial.outcome.ranked_us or math.inf, default=None)

    @property
    def compiled_us(self) -> float | None:
        """The latency of torch.compile, where it was raced with the exported file."""
        compiled = self.result.compiled if self.result is not None else None
        return None if compiled is None else compiled.latency_us

    @property
    def finalist(self) -> Finalist | None:
        """The exported file's own record, or the winner's."""
        return finalist_of(self.result)

    @property
    def rejected(self) -> Sequence[Finalist]:
        """The trials that the full check rejected, in the order of their checks."""
        return rejected_of(self.checks)

    @property
    def is_rejected(self) -> bool:
        """Whether the run ended without a result, since the full check rejected all it was put."""
        return self.result is None and not self.is_running and is_all_rejected(self.checks)

    @property
    def baseline(self) -> Baseline:
        """The baseline as it was timed beside what is reported: in its race, else its session."""
        finalist, best = self.finalist, self.best
        if finalist is not None and finalist.baseline_us:
            rounds = [
                statistics.median(burst)
                for process in finalist.baseline_samples_us
                for burst in process
                if burst
            ]
            return Baseline(finalist.baseline_us, relative_noise(rounds) if rounds else None)
        own = self.session(best.number if best else len(self.trials))
        measurement = best.outcome.measurement if best else None
        if measurement is not None and measurement.anchor_us:  # timed again shortly before
            return Baseline(measurement.anchor_us * (measurement.to_lead or 1.0), own.noise)
        return own

    def session(self, number: int) -> Baseline:
        """Return the baseline as it was timed when the session of a trial began."""
        found: Environment | SessionRecord = self.environment
        for session in self.environment.sessions:
            if session.from_trial <= number:
                found = session
        return Baseline(found.baseline_us, found.baseline_noise)

    @property
    def max_noise(self) -> float:
        """What the config asks of `measure.max_noise`."""
        try:
            data = yaml.safe_load(self.config)
            value = data["measure"]["max_noise"]
            if isinstance(value, str) and value.strip().endswith("%"):
                return float(value.strip().rstrip("% ")) / 100
            return float(value)
        except (yaml.YAMLError, KeyError, TypeError, ValueError):
            return DEFAULT_MAX_NOISE

    @property
    def precision(self) -> str:
        """The units that the best trial computes in, of `UNITS`; empty where nobody says.

        Of a captured module those of its products: ours where kernels of ours make any, else
        PyTorch's; plain float32 where it has none.
        """
        if self.best is None:
            return ""
        named = str(self.best.params.get("precision", ""))
        if named or self.module is None:
            named = _SAME_RATE.get(named, named)
            return named if named in UNITS else ""
        tasks = self.module.outline.tasks
        if any(self.makes(task) for task in tasks):
            return PRODUCTS[self.best.template].precision
        of_pytorch = self.baseline_precision
        has_products = any(task.kind == "library" and task.flops for task in tasks)
        return of_pytorch if has_products or not of_pytorch else "fp32"

    @property
    def baseline_precision(self) -> str:
        """The units that PyTorch's own products are made in, of `UNITS`; empty of other dtypes."""
        if self.module is not None:
            dtypes = {given.dtype for given in self.module.outline.given}
            if dtypes & {"float16", "bfloat16", "float64"}:
                return ""
        accuracy = self.environment.accuracy
        is_tf32 = accuracy == "tf32" or (accuracy == "pytorch" and self.convolves)
        return "tf32" if is_tf32 else "fp32"

    @property
    def convolves(self) -> bool:
        """Whether it is of a captured module that has a convolution."""
        steps = self.module.outline.steps if self.module is not None else ()
        return any(step.text.startswith("conv") for step in steps)

    def makes(self, task: KernelTask) -> bool:
        """Whether kernels of the best trial make a task that is else a call of PyTorch's."""
        maker = PRODUCTS.get(self.best.template) if self.best is not None else None
        return task.kind == "library" and bool(maker and {*maker.parameters} & {*task.parameters})

    def bounds(self) -> list[Bound]:
        """Return the rooflines that the accuracy class allows; none where rates are not known."""
        device = self.device
        flops, num_bytes = self.environment.flops, self.environment.bytes
        if device is None or not flops:
            return []
        found = []
        accuracy = self.environment.accuracy
        names = _ALLOWED.get(accuracy, ("fp16",))
        if accuracy == "pytorch" and self.convolves:
            names = (*names, *_IN_CONVOLUTIONS)
        for name in names:
            tflops = roofline_tflops(flops, num_bytes or 0.0, device, name)
            peak = roofline_tflops(flops, 0.0, device, name)
            if tflops and peak:
                latency_us = flops / tflops / 1e6
                found.append(Bound(name, UNITS[name], tflops, latency_us, tflops < peak))
        return found

    def shown_bounds(self) -> list[Bound]:
        """Return `bounds`; of more than two those of the units used, and of the fastest."""
        bounds = self.bounds()
        if len(bounds) <= 2:
            return bounds
        least_us = min((bound.latency_us for bound in bounds), default=0.0)
        fastest = next((b for b in bounds if b.latency_us == least_us), None)
        return [b for b in bounds if b.precision == self.precision or b is fastest]

    @property
    def least_us(self) -> float | None:
        """The least time of one call by the device's rates, in the fastest units allowed."""
        of_module = self.module.gain.bound_us if self.module is not None else None
        if not of_module:
            return None
        return max(of_module, min((bound.latency_us for bound in self.bounds()), default=0.0))

    def candidate(self, trial: Trial) -> Path | None:
        """Return the folder of a trial's source and log, if it was kept.

        A link is no such folder: what a run's page shows lies in the run.
        """
        folder = self.run.path / "candidates" / trial.candidate_key
        is_plain = trial.candidate_key.isalnum()  # never a way out of the run's folder
        return folder if is_plain and folder.is_dir() and not folder.is_symlink() else None

    def source(self, trial: Trial) -> tuple[str, str]:
        """Return a trial's source file by name and text; two empty words if it is not there."""
        folder = self.candidate(trial)
        if folder is None:
            return "", ""
        try:  # not `glob`, which takes longer than reading: there are as many folders as trials
            names = sorted(os.listdir(folder))
        except OSError:
            names = []
        for name in names:
            if name.startswith("source.") and not (folder / name).is_symlink():
                return name, text_of(folder / name, MAX_SOURCE_CHARS)
        return "", ""

    def log(self, trial: Trial, max_chars: int) -> str:
        """Return what the compiler wrote of a trial; empty if it was not kept."""
        folder = self.candidate(trial)
        path = folder / "log.txt" if folder else None
        return text_of(path, max_chars) if path and not path.is_symlink() else ""


def _record(path: Path, kind: type[R]) -> R | None:
    """Return a record of a run; None where it was not written."""
    try:
        return from_json(kind, path.read_bytes()) if path.is_file() else None
    except ValidationError as error:
        raise StorageError(
            f"{path}: not what was written there: {error.errors()[0]['msg']}\n"
            "  next: move the file away; the run is shown without it"
        ) from error


def rejected_of(checks: Sequence[Finalist]) -> list[Finalist]:
    """Return what the full check rejected, of each trial what was said last."""
    latest = {entry.trial: entry for entry in checks}
    return [entry for entry in latest.values() if entry.error or not entry.check.is_accepted]


def is_all_rejected(checks: Sequence[Finalist]) -> bool:
    """Whether something was put to the full check, and nothing of it was accepted."""
    return bool(checks) and len(rejected_of(checks)) == len({entry.trial for entry in checks})


def text_of(path: Path, max_chars: int) -> str:
    """Return a file's text, its middle left out where it is longer; empty if unreadable."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def correct_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that have a latency."""
    return [trial for trial in trials if trial.outcome.latency_us is not None]


def speedup_over(trial: Trial, baseline_us: float | None) -> float | None:
    """Return a trial's speed over PyTorch as timed just before it, else over that baseline."""
    outcome = trial.outcome
    if outcome.latency_us is None or outcome.measurement is None:
        return None
    anchor_us = outcome.measurement.anchor_us or baseline_us
    return anchor_us / outcome.measurement.latency_us if anchor_us else None


def latency_us_of(trial: Trial) -> float:
    """Return a trial's latency; infinite where it has none."""
    latency_us = trial.outcome.latency_us
    return math.inf if latency_us is None else latency_us
