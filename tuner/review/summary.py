"""What a run found, in words: what the page and the terminal both say.

A run's records are read once (`Facts`) and become the verdict, the numbers behind it and the
advice (`Summary`). The figures and the page take their facts and their words for numbers here.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tuner.machine.ceilings import floor_us, roofline_tflops
from tuner.machine.device import Device
from tuner.run import Run, is_locked
from tuner.trial import Finalist, Interval, ProbeResult, Result, Status, Trial

__all__ = [
    "MAX_SOURCE_CHARS",
    "NONE",
    "Advice",
    "Facts",
    "Summary",
    "correct_trials",
    "count_words",
    "error_ratio",
    "format_summary",
    "latency_us_of",
    "number_words",
    "params_words",
    "percent_words",
    "ratio_words",
    "relative_path",
    "seconds_words",
    "summary",
    "summary_of",
    "text_of",
    "trial_words",
    "us_words",
]

MAX_SOURCE_CHARS = 400_000
DEFAULT_MAX_NOISE = 0.005  # the config's own default for measure.max_noise
DRIFT = 0.05  # of the baseline within one run: ten times the noise that is asked for

NONE = "–"

# What an accuracy class allows at best: (precision as `device` names it, in words).
_FLOORS = {
    "float32": (
        ("fp32", "floor of plain float32 cores"),
        ("fp16x3", "floor of three float16 products"),
    ),
    "tf32": (  # float16 keeps as many bits, at twice the rate
        ("tf32", "floor of TF32 tensor cores"),
        ("fp16", "floor of float16 tensor cores"),
    ),
}
_LOOSE_FLOORS = (("fp16", "floor of float16 tensor cores"),)


# ---- reading a run --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is read of a run, once. Any key of `environment` may be absent.

    `is_running`: another process works on it, so that it cannot be resumed.
    """

    run: Run
    environment: Mapping[str, Any]
    trials: Sequence[Trial]
    result: Result | None
    config: str
    is_running: bool = False

    @classmethod
    def of(cls, run: Run) -> Facts:
        """Read a run.

        Raises:
            StorageError: a file of the run cannot be read.
        """
        config = text_of(run.config_path, MAX_SOURCE_CHARS)
        is_running = is_locked(run, by_another=True)
        return cls(run, run.environment(), run.trials(), run.result(), config, is_running)

    def number(self, name: str) -> float | None:
        """Return a finite number of the environment; None if it is not one."""
        value = self.environment.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None

    def word(self, name: str, default: str = "") -> str:
        """Return a word of the environment."""
        value = self.environment.get(name)
        return str(value) if value not in (None, "") else default

    @property
    def device(self) -> Device | None:
        """The device, if enough of it was recorded."""
        data = self.environment.get("device")
        known = {f.name for f in dataclasses.fields(Device)}
        needed = {"kind", "index", "name", "memory_bytes"}
        if not isinstance(data, Mapping) or not needed <= data.keys():
            return None
        return Device(**{key: value for key, value in data.items() if key in known})

    @property
    def device_name(self) -> str:
        """What the device is called, however little was recorded."""
        data = self.environment.get("device")
        if isinstance(data, Mapping):
            return str(data.get("name", "an unnamed device"))
        return str(data or self.word("torch_name", "an unnamed device"))

    @property
    def best(self) -> Trial | None:
        """The winner; of a run without a result the fastest by screening."""
        if self.result is not None:
            for trial in self.trials:
                if trial.number == self.result.winner:
                    return trial
        return min(correct_trials(self.trials), key=latency_us_of, default=None)

    @property
    def proof(self) -> Finalist | None:
        """The exported file's own proof, or the winner's."""
        if self.result is None:
            return None
        winner, finalists = self.result.winner, self.result.finalists
        return self.result.exported or next((f for f in finalists if f.trial == winner), None)

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

    def floors(self) -> dict[str, float]:
        """Return the physical floors in us that apply, by name; empty where nothing is known."""
        device, flops, num_bytes = self.device, self.number("flops"), self.number("bytes")
        if device is None or flops is None or num_bytes is None:
            return {}
        named = _FLOORS.get(self.word("accuracy"), _LOOSE_FLOORS)
        limits = {text: floor_us(flops, num_bytes, device, name) for name, text in named}
        return {text: limit for text, limit in limits.items() if limit > 0}

    def candidate(self, trial: Trial) -> Path | None:
        """Return the folder of a trial's source and log, if it was kept."""
        folder = self.run.path / "candidates" / trial.candidate_key
        is_plain = trial.candidate_key.isalnum()  # never a way out of the run's folder
        return folder if is_plain and folder.is_dir() else None

    def source(self, trial: Trial) -> tuple[str, str]:
        """Return a trial's source file by name and text; two empty words if it is not there."""
        folder = self.candidate(trial)
        for path in sorted(folder.glob("source.*")) if folder else []:
            return path.name, text_of(path, MAX_SOURCE_CHARS)
        return "", ""


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


def latency_us_of(trial: Trial) -> float:
    """Return a trial's latency; infinite where it has none."""
    latency_us = trial.outcome.latency_us
    return math.inf if latency_us is None else latency_us


# ---- the summary ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advice:
    """Something that makes the result less sure, and what to do about it."""

    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What the page and the terminal both say of a run.

    `latency_us`, `noise` and `baseline_us` come from the proof of the exported file where there
    is one, else from the winner's race, else from screening; `measured` says which. `probes` are
    the errors against float64 beside the baseline's own. Paths are relative to `path`.
    """

    path: str
    op: str
    title: str
    device: str
    accuracy: str
    verdict: str
    certainty: str
    kind: Literal["faster", "slower", "no difference", "rejected", "open"]
    measured: str
    interval: Interval | None
    latency_us: float | None
    noise: float | None
    baseline_us: float | None
    baseline_noise: float | None
    best: Trial | None
    counts: Mapping[str, int]
    num_trials: int
    num_feasible: int | None
    error: str
    probes: tuple[ProbeResult, ...]
    ties: tuple[int, ...]
    throughput: str
    roofline: str
    export_path: str
    reproduce: str
    export_command: str
    warnings: tuple[Advice, ...]


def summary(run: Run) -> Summary:
    """Say what a run found, finished or not.

    Raises:
        StorageError: a file of the run cannot be read.
    """
    return summary_of(Facts.of(run))


def summary_of(facts: Facts) -> Summary:
    """Say what a run found, from its records."""
    result, proof, best = facts.result, facts.proof, facts.best
    interval = proof.interval if proof else None
    latency_us, noise, baseline_us, measured = _figures_of(facts)
    kind, verdict = _verdict(facts, interval, latency_us, baseline_us)
    check = proof.check if proof else best.outcome.check if best else None
    counts = Counter(trial.outcome.status for trial in facts.trials)
    num_feasible = facts.number("num_feasible")
    export_path = relative_path(result.export_path, facts.run.path) if result else ""
    return Summary(
        path=str(facts.run.path),
        op=facts.word("op", facts.run.path.name),
        title=facts.word("title", facts.word("op", facts.run.path.name)),
        device=facts.device_name,
        accuracy=facts.word("accuracy", "unknown"),
        verdict=verdict,
        certainty=_interval_words(interval) if interval and kind != "rejected" else "",
        kind=kind,
        measured=measured,
        interval=interval,
        latency_us=latency_us,
        noise=noise,
        baseline_us=baseline_us,
        baseline_noise=facts.number("baseline_noise"),
        best=best,
        counts={status.value: counts[status] for status in Status if counts[status]},
        num_trials=len(facts.trials),
        num_feasible=None if num_feasible is None else int(num_feasible),
        error=_error_words(check.probes if check else ()),
        probes=check.probes if check else (),
        ties=tuple(n for n in result.ties if n != result.winner) if result else (),
        throughput=_throughput_words(facts, latency_us),
        roofline=_roofline_words(facts, latency_us),
        export_path=export_path,
        reproduce=facts.word("command"),
        export_command=f"tune export {facts.run.path}",
        warnings=tuple(_advice(facts, interval, noise)),
    )


def _figures_of(facts: Facts) -> tuple[float | None, float | None, float | None, str]:
    """Return latency, noise and baseline latency, and where they were measured."""
    proof, best, baseline_us = facts.proof, facts.best, facts.number("baseline_us")
    if proof is not None and proof.latency_us is not None:
        is_export = facts.result is not None and facts.result.exported is proof
        what = "the exported file" if is_export else "the winner"
        words = f"{what}, raced against the baseline in fresh processes"
        return proof.latency_us, proof.noise, proof.baseline_us or baseline_us, words
    measurement = best.outcome.measurement if best else None
    if measurement is None:
        return None, None, baseline_us, ""
    # The baseline was re-timed shortly before the candidate: drift cancels.
    anchor_us = measurement.anchor_us or baseline_us
    return measurement.latency_us, measurement.noise, anchor_us, "screening only, not proved"


def _verdict(
    facts: Facts, interval: Interval | None, latency_us: float | None, baseline_us: float | None
) -> tuple[Literal["faster", "slower", "no difference", "rejected", "open"], str]:
    proof = facts.proof
    if proof is not None and (proof.error or not proof.check.is_accepted):
        return "rejected", f"Rejected: {proof.error or proof.check.reason}"
    if interval is not None and facts.result is not None and facts.result.is_fallback:
        said = "No kernel is faster than PyTorch: the exported file holds PyTorch's own modules"
        return interval.verdict, said
    if interval is not None:
        ratio = ratio_words(interval.speedup)
        words = {
            "faster": f"{ratio} faster than PyTorch",
            "slower": f"Slower than PyTorch: {ratio}",
            "no difference": f"No difference from PyTorch: {ratio}",
        }
        return interval.verdict, words[interval.verdict]
    if latency_us is None:
        return "open", "No trial yet" if not facts.trials else "Nothing correct found so far"
    if baseline_us is None:
        return (
            "open",
            f"Best so far {us_words(latency_us)}; the baseline's latency is not recorded",
        )
    return "open", f"{ratio_words(baseline_us / latency_us)} PyTorch's speed so far, not proved"


def _interval_words(interval: Interval) -> str:
    ends = f"{ratio_words(interval.low)} to {ratio_words(interval.high)}"
    share = f"{100 * interval.confidence:.3g} %"
    if interval.num_processes == 1:
        return f"{ends} in {share} of rounds, seen in 1 process alone"
    return f"{ends} in {share} of processes; {interval.num_processes} were raced"


def _error_words(probes: Sequence[ProbeResult]) -> str:
    """Compare the errors with the baseline's own: as given, and where they compare worst."""
    if not probes:
        return "not checked yet"
    accepted = sum(probe.is_accepted for probe in probes)
    ratios = [(ratio, p) for p in probes if (ratio := error_ratio(p)) is not None]
    if not ratios:
        return f"{accepted} of {len(probes)} probes accepted"
    worst, probe = max(ratios, key=lambda pair: pair[0])
    first = probes[0]  # the inputs as given
    return (
        f"against float64, {first.probe}: rms {first.rms_rel:.1e}, max {first.max_abs:.1e} "
        f"(PyTorch's own {first.baseline_rms_rel:.1e}, {first.baseline_max_abs:.1e}); "
        f"at most {worst:.2f} times the baseline's own error on any probe ('{probe.probe}'); "
        f"{accepted} of {len(probes)} probes accepted"
    )


def error_ratio(probe: ProbeResult) -> float | None:
    """Return a probe's error over the baseline's own; None if either is not a number."""
    if not probe.baseline_rms_rel > 0 or not math.isfinite(probe.baseline_rms_rel):
        return None
    return probe.rms_rel / probe.baseline_rms_rel if math.isfinite(probe.rms_rel) else None


def _throughput_words(facts: Facts, latency_us: float | None) -> str:
    flops, num_bytes = facts.number("flops"), facts.number("bytes")
    if not latency_us or not flops:
        return ""
    words = f"{flops / latency_us / 1e6:.3g} TFLOPS"
    if num_bytes:
        words += f", {num_bytes / latency_us / 1e3:.3g} GB/s"
    return words


def _roofline_words(facts: Facts, latency_us: float | None) -> str:
    """Return the share of each roofline that the accuracy class allows; empty if not known."""
    flops, num_bytes, device = facts.number("flops"), facts.number("bytes"), facts.device
    if not latency_us or not flops or device is None:
        return ""
    shares = []
    for name, _ in _FLOORS.get(facts.word("accuracy"), _LOOSE_FLOORS):
        limit = roofline_tflops(flops, num_bytes or 0.0, device, name)
        if limit:
            share = 100 * flops / latency_us / 1e6 / limit
            shares.append(f"{share:.0f} % of the {name} roofline ({limit:.3g} TFLOPS)")
    return "; ".join(shares)


def _advice(facts: Facts, interval: Interval | None, noise: float | None) -> list[Advice]:
    found = [*_advice_on_state(facts), *_advice_on_verdict(facts, interval)]
    if (limit := facts.max_noise) < (noise or 0.0):
        found.append(_noise_advice("the winner's", noise or 0.0, limit))
    if limit < (facts.number("baseline_noise") or 0.0):
        found.append(_noise_advice("the baseline's", facts.number("baseline_noise") or 0.0, limit))
    return [*found, *_advice_on_machine(facts), *_notes(facts)]


def _noise_advice(whose: str, noise: float, limit: float) -> Advice:
    return Advice(
        f"{whose} times scatter by {percent_words(noise)}, "
        f"more than the {percent_words(limit)} asked for",
        "end other programs, or give measure.finalists more time",
    )


def _advice_on_state(facts: Facts) -> list[Advice]:
    found, proof = [], facts.proof
    if facts.is_running:
        proved = "no finalist is proved yet" if facts.result is None else "its proof is of before"
        text = f"the run is going on, and {proved}"
        found.append(Advice(text, ""))
    elif facts.result is None:
        again = f"tune --resume {facts.run.path}"
        text = "the run is not finished: no finalist was proved in fresh processes"
        found.append(Advice(text, again))
    if facts.trials and not correct_trials(facts.trials):
        remedy = "read 'What failed and why'; widen the space or loosen the accuracy"
        found.append(Advice("not one candidate was correct", remedy))
    if proof is not None and (proof.error or not proof.check.is_accepted):
        text = f"the proof failed: {proof.error or proof.check.reason}"
        found.append(Advice(text, "do not use the exported file; export another trial"))
    elif facts.result is not None and facts.result.exported is None:
        remedy = "tune export makes the file and proves it"
        found.append(Advice("the exported file itself was not proved", remedy))
    return found


def _notes(facts: Facts) -> list[Advice]:
    """Return what run and check noted, but for the rejection that is told already."""
    said = facts.proof.check.reason if facts.proof is not None else ""
    notes = facts.result.notes if facts.result is not None else ()
    notes = tuple(dict.fromkeys([*notes, *(facts.proof.check.notes if facts.proof else ())]))
    return [Advice(note, "") for note in notes if not said or said not in note]


def _advice_on_verdict(facts: Facts, interval: Interval | None) -> list[Advice]:
    found = []
    is_fallback = facts.result is not None and facts.result.is_fallback
    if interval is not None and interval.verdict == "no difference" and not is_fallback:
        remedy = "keep PyTorch's own, or give measure.finalists more time"
        found.append(Advice("the interval holds 1: it may not be faster at all", remedy))
    if interval is not None and interval.num_processes == 1:
        text = "raced in one process only: the interval says nothing of another process"
        found.append(Advice(text, "set measure.num_processes above 1"))
    ties = [n for n in facts.result.ties if n != facts.result.winner] if facts.result else []
    if ties:
        what = f"trial{'' if len(ties) == 1 else 's'} {number_words(ties)}"
        text = f"{what} cannot be told from the winner"
        found.append(Advice(text, "choose the simplest, or give measure.finalists more time"))
    return found


def _advice_on_machine(facts: Facts) -> list[Advice]:
    found = []
    measured = [t.outcome.measurement for t in facts.trials if t.outcome.measurement]
    throttled = sum(1 for m in measured if m.num_throttled)
    if throttled:
        text = f"the device slowed its clock during {throttled} of {len(measured)} measurements"
        remedy = "those samples were dropped; cool it, or lower its clock limit for steady times"
        found.append(Advice(text, remedy))
    anchors = [m.anchor_us for m in measured if m.anchor_us]
    if anchors and max(anchors) > (1 + DRIFT) * min(anchors):
        text = (
            f"the baseline drifted between {us_words(min(anchors))} and {us_words(max(anchors))}"
        )
        remedy = "compare trials by speed-up, not by latency; end other programs"
        found.append(Advice(text, remedy))
    return found


# ---- numbers in words -----------------------------------------------------------------------


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
    return NONE if value is None or not math.isfinite(value) else f"{100 * value:.2g} %"


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


# ---- the terminal ---------------------------------------------------------------------------

_COLUMNS, _MAX_LINES, _LABEL = 80, 20, 10


def format_summary(summary: Summary) -> str:
    """Return the summary as plain text: at most 20 lines of at most 80 columns."""
    s = summary
    latency = us_words(s.latency_us) + (
        f" ± {percent_words(s.noise)}" if s.noise is not None else ""
    )
    pairs = [
        ("verdict", s.verdict + (f" ({s.certainty})" if s.certainty else "")),
        (
            "latency",
            f"{latency}, PyTorch {us_words(s.baseline_us)}; {s.measured}" if s.best else NONE,
        ),
        ("error", s.error),
        ("speed", "; ".join(words for words in (s.throughput, s.roofline) if words)),
        ("trials", trial_words(s)),
        ("best", f"trial {s.best.number}: {params_words(s.best)}" if s.best else NONE),
        ("run", s.path),
        ("export", s.export_path),
        ("again", s.reproduce),
    ]
    lines = _wrapped(f"{s.title} on {s.device}, accuracy {s.accuracy}", "", 1)
    for label, text in pairs:
        if text:
            lines += _wrapped(text, label, 3 if label == "run" else 2)
    for number, advice in enumerate(s.warnings):
        text = advice.text + (f"; {advice.remedy}" if advice.remedy else "")
        more = _wrapped(text, "warning", 2)
        is_last = number == len(s.warnings) - 1
        if len(lines) + len(more) > _MAX_LINES - (0 if is_last else 1):
            left = count_words(len(s.warnings) - number, "more warning")
            lines += _wrapped(f"{left} in the report", "", 1)
            break
        lines += more
    return "\n".join(lines[:_MAX_LINES])


def trial_words(s: Summary) -> str:
    """Return how many trials there were, by status."""
    of = f" of {s.num_feasible:,} feasible" if s.num_feasible is not None else ""
    counts = ", ".join(f"{count:,} {status}" for status, count in s.counts.items())
    return f"{s.num_trials:,}{of}" + (f": {counts}" if counts else "")


def _wrapped(text: str, label: str, max_lines: int) -> list[str]:
    """Lay a text out behind its label; control characters never reach the terminal."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    indent = " " * _LABEL if label else ""
    lines = textwrap.wrap(
        clean,
        _COLUMNS,
        initial_indent=f"{label:<{_LABEL}}" if label else "",
        subsequent_indent=indent,
        max_lines=max_lines,
        placeholder=" ...",
        break_on_hyphens=False,
    )
    return lines or [label]
