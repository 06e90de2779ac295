"""What a run found, as one HTML file for a browser and as twenty lines for a terminal.

Three layers: a run's records are read once (`_Facts`), become words and numbers (`Summary`, the
figures, the tables), and the template beside this file lays them out. The page needs no network
and no server; all text of a run is data to it, never markup.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import hashlib
import json
import math
import re
import statistics
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tuner.device import Device, floor_us, roofline_tflops
from tuner.run import Run, write_whole
from tuner.trial import Finalist, Interval, ProbeResult, Result, Status, Trial, Value

__all__ = [
    "Advice",
    "Summary",
    "format_summary",
    "importance_figure",
    "importances",
    "parameter_figure",
    "progress_figure",
    "stage_figure",
    "summary",
    "write_report",
]

MIN_CORRECT_FOR_IMPORTANCE = 10  # Optuna compares the best tenth with the rest
MAX_PARAMETER_PLOTS = 12  # those that matter most; the table has them all
MAX_FAILURE_GROUPS = 40
MAX_LOG_CHARS = 6_000  # of a compiler's log on the page; the run's folder keeps it whole
MAX_SOURCE_CHARS = 400_000
MAX_DIFFS = 6
DEFAULT_MAX_NOISE = 0.005  # the config's own default for measure.max_noise
DRIFT = 0.05  # of the baseline within one run: ten times the noise that is asked for

ABSENT = "absent"  # a parameter that a template does not have
NONE = "–"

# Each has a contrast of 3:1 or more on white and on the dark page (WCAG 2.2, 1.4.11); the marks
# differ in shape too.
_STATUS_MARKS = {
    Status.CORRECT: ("#0072b2", "circle"),
    Status.CONSTRAINTS: ("#8a7414", "diamond"),
    Status.COMPILE: ("#d55e00", "x"),
    Status.RUNTIME: ("#b0519c", "triangle-up"),
    Status.TIMEOUT: ("#7f7f7f", "square"),
    Status.CORRECTNESS: ("#d03a4a", "cross"),
}
_BEST, _BASELINE, _FLOOR = "#12875a", "#7a7f87", "#a8700b"

_STATUS_MEANING = {
    Status.CORRECT: "accepted by the check, and timed",
    Status.CONSTRAINTS: "refused before anything ran",
    Status.COMPILE: "the compiler refused it",
    Status.RUNTIME: "it crashed, or a launch failed",
    Status.TIMEOUT: "it did not end in time",
    Status.CORRECTNESS: "its answers are wrong, so it was not timed",
}

# What an accuracy class allows at best: (precision as `device` names it, in words).
_FLOORS = {
    "float32": (
        ("fp32", "floor of plain float32 cores"),
        ("fp16x3", "floor of three float16 products"),
    ),
    "tf32": (("tf32", "floor of TF32 tensor cores"),),
}
_LOOSE_FLOORS = (("fp16", "floor of float16 tensor cores"),)


# ---- reading a run --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Facts:
    """All that is read of a run, once. Any key of `environment` may be absent."""

    run: Run
    environment: Mapping[str, Any]
    trials: Sequence[Trial]
    result: Result | None
    config: str

    @classmethod
    def of(cls, run: Run) -> _Facts:
        config = _text(run.config_path, MAX_SOURCE_CHARS)
        return cls(run, run.environment(), run.trials(), run.result(), config)

    def number(self, name: str) -> float | None:
        value = self.environment.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None

    def word(self, name: str, default: str = "") -> str:
        value = self.environment.get(name)
        return str(value) if value not in (None, "") else default

    @property
    def device(self) -> Device | None:
        data = self.environment.get("device")
        known = {f.name for f in dataclasses.fields(Device)}
        needed = {"kind", "index", "name", "memory_bytes"}
        if not isinstance(data, Mapping) or not needed <= data.keys():
            return None
        return Device(**{key: value for key, value in data.items() if key in known})

    @property
    def device_name(self) -> str:
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
        return min(_correct(self.trials), key=_latency_us, default=None)

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
            return path.name, _text(path, MAX_SOURCE_CHARS)
        return "", ""


def _text(path: Path, max_chars: int) -> str:
    """Return a file's text, its middle left out where it is longer; empty if unreadable."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _correct(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.outcome.latency_us is not None]


def _latency_us(trial: Trial) -> float:
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
    export_path: str
    reproduce: str
    export_command: str
    warnings: tuple[Advice, ...]


def summary(run: Run) -> Summary:
    """Say what a run found, finished or not.

    Raises:
        StorageError: a file of the run cannot be read.
    """
    return _summary(_Facts.of(run))


def _summary(facts: _Facts) -> Summary:
    result, proof, best = facts.result, facts.proof, facts.best
    interval = proof.interval if proof else None
    latency_us, noise, baseline_us, measured = _figures_of(facts)
    kind, verdict = _verdict(facts, interval, latency_us, baseline_us)
    check = proof.check if proof else best.outcome.check if best else None
    counts = Counter(trial.outcome.status for trial in facts.trials)
    num_feasible = facts.number("num_feasible")
    export_path = _relative(result.export_path, facts.run.path) if result else ""
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
        export_path=export_path,
        reproduce=facts.word("command"),
        export_command=f"tune export {facts.run.path}",
        warnings=tuple(_advice(facts, interval, noise)),
    )


def _figures_of(facts: _Facts) -> tuple[float | None, float | None, float | None, str]:
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
    facts: _Facts, interval: Interval | None, latency_us: float | None, baseline_us: float | None
) -> tuple[Literal["faster", "slower", "no difference", "rejected", "open"], str]:
    proof = facts.proof
    if proof is not None and (proof.error or not proof.check.is_accepted):
        return "rejected", f"Rejected: {proof.error or proof.check.reason}"
    if interval is not None:
        ratio = _ratio(interval.speedup)
        words = {
            "faster": f"{ratio} faster than PyTorch",
            "slower": f"Slower than PyTorch: {ratio}",
            "no difference": f"No difference from PyTorch: {ratio}",
        }
        return interval.verdict, words[interval.verdict]
    if latency_us is None:
        return "open", "No trial yet" if not facts.trials else "Nothing correct found so far"
    if baseline_us is None:
        return "open", f"Best so far {_us(latency_us)}; the baseline's latency is not recorded"
    return "open", f"{_ratio(baseline_us / latency_us)} PyTorch's speed so far, not proved"


def _interval_words(interval: Interval) -> str:
    ends = f"{_ratio(interval.low)} to {_ratio(interval.high)}"
    share = f"{100 * interval.confidence:.3g} %"
    if interval.num_processes == 1:
        return f"{ends} in {share} of rounds, seen in 1 process alone"
    return f"{ends} in {share} of processes; {interval.num_processes} were raced"


def _error_words(probes: Sequence[ProbeResult]) -> str:
    """Compare the errors with the baseline's own: as given, and where they compare worst."""
    if not probes:
        return "not checked yet"
    accepted = sum(probe.is_accepted for probe in probes)
    ratios = [(ratio, p) for p in probes if (ratio := _error_ratio(p)) is not None]
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


def _error_ratio(probe: ProbeResult) -> float | None:
    if not probe.baseline_rms_rel > 0 or not math.isfinite(probe.baseline_rms_rel):
        return None
    return probe.rms_rel / probe.baseline_rms_rel if math.isfinite(probe.rms_rel) else None


def _throughput_words(facts: _Facts, latency_us: float | None) -> str:
    flops, num_bytes, device = facts.number("flops"), facts.number("bytes"), facts.device
    if not latency_us or not flops:
        return ""
    tflops = flops / latency_us / 1e6
    words = f"{tflops:.3g} TFLOPS"
    if num_bytes:
        words += f", {num_bytes / latency_us / 1e3:.3g} GB/s"
    for name, _ in _FLOORS.get(facts.word("accuracy"), _LOOSE_FLOORS):
        limit = roofline_tflops(flops, num_bytes or 0.0, device, name) if device else None
        if limit:
            words += f"; {100 * tflops / limit:.0f} % of the {name} roofline ({limit:.3g} TFLOPS)"
    return words


def _advice(facts: _Facts, interval: Interval | None, noise: float | None) -> list[Advice]:
    found = [*_advice_on_state(facts), *_advice_on_verdict(facts, interval)]
    if (limit := facts.max_noise) < (noise or 0.0):
        found.append(_noise_advice("the winner's", noise or 0.0, limit))
    if limit < (facts.number("baseline_noise") or 0.0):
        found.append(_noise_advice("the baseline's", facts.number("baseline_noise") or 0.0, limit))
    return [*found, *_advice_on_machine(facts), *_notes(facts)]


def _noise_advice(whose: str, noise: float, limit: float) -> Advice:
    return Advice(
        f"{whose} times scatter by {_percent(noise)}, more than the {_percent(limit)} asked for",
        "end other programs, or give measure.finalists more time",
    )


def _advice_on_state(facts: _Facts) -> list[Advice]:
    found, proof = [], facts.proof
    if facts.result is None:
        again = f"tune --resume {facts.run.path}"
        text = "the run is not finished: no finalist was proved in fresh processes"
        found.append(Advice(text, again))
    if facts.trials and not _correct(facts.trials):
        remedy = "read 'What failed and why'; widen the space or loosen the accuracy"
        found.append(Advice("not one candidate was correct", remedy))
    if proof is not None and (proof.error or not proof.check.is_accepted):
        text = f"the proof failed: {proof.error or proof.check.reason}"
        found.append(Advice(text, "do not use the exported file; export another trial"))
    elif facts.result is not None and facts.result.exported is None:
        remedy = "tune export makes the file and proves it"
        found.append(Advice("the exported file itself was not proved", remedy))
    return found


def _notes(facts: _Facts) -> list[Advice]:
    """Return what the run itself noted, but for the rejection that is told already."""
    said = facts.proof.check.reason if facts.proof is not None else ""
    notes = facts.result.notes if facts.result is not None else ()
    return [Advice(note, "") for note in notes if not said or said not in note]


def _advice_on_verdict(facts: _Facts, interval: Interval | None) -> list[Advice]:
    found = []
    if interval is not None and interval.verdict == "no difference":
        remedy = "keep PyTorch's own, or give measure.finalists more time"
        found.append(Advice("the interval holds 1: it may not be faster at all", remedy))
    if interval is not None and interval.num_processes == 1:
        text = "raced in one process only: the interval says nothing of another process"
        found.append(Advice(text, "set measure.num_processes above 1"))
    ties = [n for n in facts.result.ties if n != facts.result.winner] if facts.result else []
    if ties:
        what = f"trial{'' if len(ties) == 1 else 's'} {_numbers(ties)}"
        text = f"{what} cannot be told from the winner"
        found.append(Advice(text, "choose the simplest, or give measure.finalists more time"))
    return found


def _advice_on_machine(facts: _Facts) -> list[Advice]:
    found = []
    measured = [t.outcome.measurement for t in facts.trials if t.outcome.measurement]
    throttled = sum(1 for m in measured if m.num_throttled)
    if throttled:
        text = f"the device slowed its clock during {throttled} of {len(measured)} measurements"
        remedy = "those samples were dropped; cool it, or lower its clock limit for steady times"
        found.append(Advice(text, remedy))
    anchors = [m.anchor_us for m in measured if m.anchor_us]
    if anchors and max(anchors) > (1 + DRIFT) * min(anchors):
        text = f"the baseline drifted between {_us(min(anchors))} and {_us(max(anchors))}"
        remedy = "compare trials by speed-up, not by latency; end other programs"
        found.append(Advice(text, remedy))
    return found


# ---- numbers in words -----------------------------------------------------------------------


def _us(value: float | None) -> str:
    """Return a time in the unit that fits it, from a number in us."""
    if value is None or not math.isfinite(value):
        return NONE
    if value >= 1e6:
        return f"{value / 1e6:.3g} s"
    return f"{value / 1e3:.4g} ms" if value >= 1e4 else f"{value:.4g} µs"


def _cell_us(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def _s(value: float) -> str:
    if value >= 120:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _ratio(value: float) -> str:
    if not math.isfinite(value):
        return "no bound"
    return f"{value:.3f}x" if value < 2 else f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def _percent(value: float | None) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{100 * value:.2g} %"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _numbers(values: Sequence[int], most: int = 12) -> str:
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(str(value) for value in values[:most]) + more


def _params_words(trial: Trial) -> str:
    rest = [f"{k}={v}" for k, v in trial.params.items() if k != "template"]
    return " ".join([f"template={trial.template}", *rest])


def _relative(path: str, folder: Path) -> str:
    whole = Path(path)
    return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else path


# ---- the terminal ---------------------------------------------------------------------------

_COLUMNS, _MAX_LINES, _LABEL = 80, 20, 10


def format_summary(summary: Summary) -> str:
    """Return the summary as plain text: at most 20 lines of at most 80 columns."""
    s = summary
    latency = _us(s.latency_us) + (f" ± {_percent(s.noise)}" if s.noise is not None else "")
    pairs = [
        ("verdict", s.verdict + (f" ({s.certainty})" if s.certainty else "")),
        ("latency", f"{latency}, PyTorch {_us(s.baseline_us)}; {s.measured}" if s.best else NONE),
        ("error", s.error),
        ("speed", s.throughput),
        ("trials", _trial_words(s)),
        ("best", f"trial {s.best.number}: {_params_words(s.best)}" if s.best else NONE),
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
            left = _count(len(s.warnings) - number, "more warning")
            lines += _wrapped(f"{left} in the report", "", 1)
            break
        lines += more
    return "\n".join(lines[:_MAX_LINES])


def _trial_words(s: Summary) -> str:
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


# ---- figures --------------------------------------------------------------------------------


def progress_figure(
    trials: Sequence[Trial],
    baseline_us: float | None,
    *,
    floors: Mapping[str, float] | None = None,
    by: Literal["trial", "time"] = "trial",
) -> Any:
    """Draw every trial, the best so far, the baseline and the physical floors.

    Args:
        trials: in order.
        baseline_us: PyTorch's own latency.
        floors: physical floors in us, by name.
        by: what runs to the right: the trial's number or the seconds of working time.

    Returns:
        A `plotly.graph_objects.Figure`; trials without a latency stand below, by status.
    """
    from plotly.subplots import make_subplots

    failed = [t for t in trials if t.outcome.latency_us is None]
    correct = _correct(trials)
    figure = make_subplots(
        rows=2 if failed else 1,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.03,
        row_heights=[0.78, 0.22] if failed else None,
    )

    def place(trial: Trial) -> float:
        return trial.number if by == "trial" else trial.elapsed_s

    _add_points(figure, Status.CORRECT, correct, place, [_latency_us(t) for t in correct], 1)
    places = [place(trial) for trial in trials] or [0.0, 1.0]
    if correct:
        best = _running_best(trials)
        xs = [place(t) for t, _ in best]
        _add_line(figure, xs, [us for _, us in best], "best so far", _BEST, "solid")
    named = {"PyTorch (baseline)": baseline_us} if baseline_us else {}
    ends = [min(places), max(places)]
    for name, level in named.items():
        _add_line(figure, ends, [level, level], name, _BASELINE, "dash")
    for name, level in (floors or {}).items():
        _add_line(figure, ends, [level, level], name, _FLOOR, "dot")
    for status in Status:
        group = [t for t in failed if t.outcome.status is status]
        if group:
            _add_points(figure, status, group, place, [status.value] * len(group), 2)
    figure.update_yaxes(title_text="latency in µs", type="log", tickformat=",", row=1, col=1)
    words = "trial" if by == "trial" else "seconds of working time"
    figure.update_xaxes(title_text=words, row=2 if failed else 1, col=1)
    figure.update_layout(
        height=520 if failed else 420, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}
    )
    return figure


def _add_points(
    figure: Any, status: Status, trials: Sequence[Trial], place: Any, ys: list[Any], row: int
) -> None:
    colour, symbol = _STATUS_MARKS[status]
    figure.add_scatter(
        x=[place(t) for t in trials],
        y=ys,
        mode="markers",
        name=status.value,
        marker={"color": colour, "symbol": symbol, "size": 7, "opacity": 0.75},
        hovertext=[_hover(t) for t in trials],
        hoverinfo="text",
        showlegend=row == 1,
        row=row,
        col=1,
    )


def _add_line(
    figure: Any, xs: list[float], ys: list[float], name: str, colour: str, dash: str
) -> None:
    line = {"color": colour, "dash": dash, "width": 2, "shape": "hv"}
    hover = [f"{name}: {_us(y)}" for y in ys]
    figure.add_scatter(
        x=xs, y=ys, mode="lines", name=name, line=line, text=hover, hoverinfo="text", row=1, col=1
    )


def _running_best(trials: Sequence[Trial]) -> list[tuple[Trial, float]]:
    """Return where the best latency fell, and the last trial to end the line."""
    steps: list[tuple[Trial, float]] = []
    for trial in trials:
        if _latency_us(trial) < (steps[-1][1] if steps else math.inf):
            steps.append((trial, _latency_us(trial)))
    return [*steps, (trials[-1], steps[-1][1])] if steps else []


def _hover(trial: Trial) -> str:
    """Return a trial in a few lines; Plotly reads a little HTML, so all text is escaped."""
    outcome = trial.outcome
    head = f"trial {trial.number}: {outcome.status.value}"
    if outcome.measurement is not None and outcome.latency_us is not None:
        head += f", {_us(outcome.latency_us)} ± {_percent(outcome.measurement.noise)}"
        head += " (stopped early)" if outcome.measurement.is_censored else ""
    parts = [head, *textwrap.wrap(_params_words(trial), 60)]
    if outcome.reason:
        parts += textwrap.wrap(outcome.reason, 60, max_lines=3, placeholder=" ...")
    return "<br>".join(_plotly_text(part) for part in parts)


def _plotly_text(text: str) -> str:
    return escape(text, quote=False)


def importances(trials: Sequence[Trial]) -> dict[str, float]:
    """Return how much each parameter decides whether a trial is among the best tenth.

    Shares of 1, the largest first; over correct trials. A parameter that a template does not
    have counts as one more value. Empty where fewer than 10 trials are correct.

    Source: Watanabe, Bansal, Hutter, "PED-ANOVA", IJCAI 2023, as Optuna computes it.
    """
    correct = _correct(trials)
    values = {name: {_value(t, name) for t in correct} for name in _names(correct)}
    varied = {name: tuple(sorted(seen)) for name, seen in values.items() if len(seen) > 1}
    if len(correct) < MIN_CORRECT_FOR_IMPORTANCE or not varied:
        return {}
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study()
            named = {
                name: optuna.distributions.CategoricalDistribution(choices)
                for name, choices in varied.items()
            }
            for trial in correct:
                params = {name: _value(trial, name) for name in varied}
                study.add_trial(
                    optuna.create_trial(
                        params=params, distributions=named, value=_latency_us(trial)
                    )
                )
            found = optuna.importance.get_param_importances(study)
    finally:
        optuna.logging.set_verbosity(level)
    return {name: share for name, share in found.items() if math.isfinite(share)}


def importance_figure(shares: Mapping[str, float]) -> Any:
    """Draw what `importances` found, the most important on top."""
    import plotly.graph_objects as go

    ranked = sorted(shares.items(), key=lambda pair: pair[1])
    bars = go.Bar(
        x=[share for _, share in ranked],
        y=[_plotly_text(name) for name, _ in ranked],
        orientation="h",
        marker={"color": _STATUS_MARKS[Status.CORRECT][0]},
        text=[f"{100 * share:.0f} %" for _, share in ranked],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    figure = go.Figure(bars)
    figure.update_xaxes(title_text="share of importance", tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(type="category", automargin=True)
    figure.update_layout(height=80 + 26 * len(ranked), showlegend=False, margin={"t": 10})
    return figure


def parameter_figure(trials: Sequence[Trial], names: Sequence[str]) -> Any:
    """Draw the latency of every correct trial by the value of each parameter.

    Args:
        trials: of any status.
        names: parameters, one plot each, in this order.
    """
    from plotly.subplots import make_subplots

    correct, num_columns = _correct(trials), min(3, len(names))
    num_rows = -(-len(names) // num_columns)
    figure = make_subplots(
        rows=num_rows,
        cols=num_columns,
        shared_yaxes=True,
        horizontal_spacing=0.03,
        vertical_spacing=min(0.5 / num_rows, 70 / (250 * num_rows)),
        subplot_titles=[_plotly_text(name) for name in names],
    )
    for number, name in enumerate(names):
        row, col = number // num_columns + 1, number % num_columns + 1
        _add_parameter(figure, correct, name, row, col)
    figure.update_yaxes(type="log", tickformat=",")
    figure.update_yaxes(title_text="latency in µs", col=1)
    figure.update_layout(height=80 + 250 * num_rows, showlegend=False)
    return figure


def _add_parameter(figure: Any, correct: Sequence[Trial], name: str, row: int, col: int) -> None:
    words = _values(correct, name)
    place = {word: index for index, word in enumerate(words)}
    # Points of one value are spread by the golden ratio, which never bunches.
    spread = [((t.number * 0.618034) % 1 - 0.5) * 0.6 for t in correct]
    figure.add_scatter(
        x=[round(place[_value(t, name)] + s, 3) for t, s in zip(correct, spread, strict=True)],
        y=[_latency_us(t) for t in correct],
        mode="markers",
        marker={"color": _STATUS_MARKS[Status.CORRECT][0], "size": 5, "opacity": 0.45},
        text=[f"trial {t.number}: {_us(_latency_us(t))}" for t in correct],
        hoverinfo="text",
        row=row,
        col=col,
    )
    groups = _grouped(correct, [name])
    best = [min(map(_latency_us, groups[(word,)])) for word in words]
    figure.add_scatter(
        x=list(range(len(words))),
        y=best,
        mode="markers",
        marker={
            "color": _BEST,
            "symbol": "line-ew",
            "size": 26,
            "line": {"width": 3, "color": _BEST},
        },
        text=[
            f"best with {_plotly_text(word)}: {_us(us)}"
            for word, us in zip(words, best, strict=True)
        ],
        hoverinfo="text",
        row=row,
        col=col,
    )
    figure.update_xaxes(
        tickvals=list(range(len(words))),
        ticktext=[_plotly_text(word) for word in words],
        range=[-0.6, len(words) - 0.4],
        row=row,
        col=col,
    )


@dataclass(frozen=True, slots=True)
class _Stage:
    name: str
    seconds: float
    about: str


def _stages(trials: Sequence[Trial]) -> list[_Stage]:
    """Return the seconds of each stage; all but the first are one after another."""
    total: dict[str, float] = defaultdict(float)
    for trial in trials:
        for stage, seconds in trial.outcome.seconds.items():
            total[stage] += seconds
    elapsed_s = max((trial.elapsed_s for trial in trials), default=0.0)
    known = {"build", "render", "wait", "check", "measure", "device"}
    others = {name: seconds for name, seconds in total.items() if name not in known}
    around = max(0.0, total["device"] - total["check"] - total["measure"])
    device_s = total["check"] + total["measure"] + around
    serial = total["render"] + total["wait"] + device_s + sum(others.values())
    return [
        _Stage("build", total["build"], "in the builders, in parallel with all that follows"),
        _Stage("render", total["render"], "from template to source text"),
        _Stage("wait", total["wait"], "the device idle, waiting for a build"),
        _Stage("check", total["check"], "asking for answers and judging them"),
        _Stage("measure", total["measure"], "timing"),
        _Stage("around", around, "on the device: loading code, timing the baseline again"),
        *(_Stage(name, seconds, "") for name, seconds in sorted(others.items())),
        _Stage(
            "rest",
            max(0.0, elapsed_s - serial),
            "choosing what to try, writing it down, candidates that crashed or hung",
        ),
    ]


def stage_figure(trials: Sequence[Trial]) -> Any:
    """Draw the seconds that each stage took, over all trials."""
    import plotly.graph_objects as go

    stages = _stages(trials)[::-1]
    parallel, serial = _FLOOR, _STATUS_MARKS[Status.CORRECT][0]
    bars = go.Bar(
        x=[stage.seconds for stage in stages],
        y=[_plotly_text(stage.name) for stage in stages],
        orientation="h",
        marker={"color": [parallel if s.name == "build" else serial for s in stages]},
        text=[_s(stage.seconds) for stage in stages],
        textposition="outside",
        cliponaxis=False,
        hoverinfo="skip",
    )
    figure = go.Figure(bars)
    figure.update_xaxes(title_text="seconds, all trials together", rangemode="tozero")
    figure.update_yaxes(type="category", automargin=True)
    figure.update_layout(height=80 + 28 * len(stages), showlegend=False, margin={"t": 10})
    return figure


# ---- parameters and their values ------------------------------------------------------------


def _names(trials: Sequence[Trial]) -> list[str]:
    """Return every parameter that occurs, `template` first."""
    names = {name: None for trial in trials for name in trial.params}
    return ["template", *(name for name in names if name != "template")]


def _value(trial: Trial, name: str) -> str:
    value = trial.template if name == "template" else trial.params.get(name, ABSENT)
    return str(value)


def _values(trials: Sequence[Trial], name: str) -> list[str]:
    """Return a parameter's values in their own order: numbers, words, absent."""
    found: dict[str, Value] = {_value(t, name): t.params.get(name, ABSENT) for t in trials}

    def rank(word: str) -> tuple[int, float, str]:
        value = found[word]
        if isinstance(value, int | float):
            return 0, float(value), word
        return (2 if word == ABSENT else 1), 0.0, word

    return sorted(found, key=rank)


def _grouped(trials: Sequence[Trial], names: Sequence[str]) -> dict[tuple[str, ...], list[Trial]]:
    groups: dict[tuple[str, ...], list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[tuple(_value(trial, name) for name in names)].append(trial)
    return dict(groups)


def _strategies(trials: Sequence[Trial]) -> list[str]:
    """Return the parameters that are a choice between words, and vary."""
    return [
        name
        for name in _names(trials)
        if any(isinstance(t.params.get(name), str) for t in trials) or name == "template"
        if len({_value(t, name) for t in trials}) > 1
    ]


# ---- tables ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    """Plain cells under their headings; `numeric` names the columns that hold numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()


def _contest(trials: Sequence[Trial], names: Sequence[str], most: int = 25) -> _Table:
    """Return which values of some parameters, together, gave the best latency."""
    best_us = min(map(_latency_us, trials), default=math.inf)
    ranked = []
    for values, group in _grouped(trials, names).items():
        times = sorted(_latency_us(t) for t in _correct(group))
        ranked.append((times[0] if times else math.inf, values, len(group), times))
    ranked.sort(key=lambda entry: entry[:2])
    rows = [
        (
            *values,
            str(count),
            str(len(times)),
            _cell_us(times[0]) if times else NONE,
            _cell_us(statistics.median(times)) if times else NONE,
            f"{times[0] / best_us:.3f}" if times else NONE,
        )
        for _, values, count, times in ranked[:most]
    ]
    counted = ("trials", "correct", "best µs", "median µs", "times the best")
    return _Table((*names, *counted), tuple(rows), frozenset(counted))


def _all_trials(facts: _Facts) -> _Table:
    names = _names(facts.trials)
    before = ("trial", "status", "latency µs", "noise %", "speed-up")
    after = ("registers", "shared bytes", "spilled bytes", "build s", "at s", "reason")
    numeric = {*before, *after, *_number_names(facts.trials, names)} - {"status", "reason"}
    baseline_us = facts.number("baseline_us")
    rows = []
    for trial in facts.trials:
        values = [_value(trial, name) for name in names]
        rows.append(
            (
                *_timing_cells(trial, baseline_us),
                *(NONE if value == ABSENT else value for value in values),
                *_build_cells(trial),
                f"{trial.elapsed_s:.1f}",
                _reason(trial),
            )
        )
    return _Table((*before, *names, *after), tuple(rows), frozenset(numeric))


def _number_names(trials: Sequence[Trial], names: Sequence[str]) -> set[str]:
    def is_number(name: str) -> bool:
        seen = [t.params[name] for t in trials if name in t.params]
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in seen)

    return {name for name in names if name != "template" and is_number(name)}


def _timing_cells(trial: Trial, baseline_us: float | None) -> tuple[str, ...]:
    outcome, status = trial.outcome, trial.outcome.status.value
    measurement = outcome.measurement
    if outcome.latency_us is None or measurement is None:
        return str(trial.number), status, NONE, NONE, NONE
    anchor_us = measurement.anchor_us or baseline_us
    return (
        str(trial.number),
        status,
        _cell_us(outcome.latency_us),
        f"{100 * measurement.noise:.2g}",
        f"{anchor_us / outcome.latency_us:.3f}" if anchor_us else NONE,
    )


def _build_cells(trial: Trial) -> tuple[str, ...]:
    build = trial.outcome.build
    if build is None:
        return (NONE,) * 4
    seconds = f"{build.seconds:.2f}"
    if not build.kernels:
        return NONE, NONE, NONE, seconds
    registers = max(kernel.registers for kernel in build.kernels)
    smem_bytes = max(kernel.smem_bytes for kernel in build.kernels)
    spilled = sum(k.spill_store_bytes + k.spill_load_bytes for k in build.kernels)
    return str(registers), str(smem_bytes), str(spilled), seconds


def _reason(trial: Trial) -> str:
    outcome = trial.outcome
    notes = [" ".join(outcome.reason.split())[:300]] if outcome.reason else []
    if outcome.same_as is not None:
        notes.append(f"same machine code as trial {outcome.same_as}")
    if outcome.measurement is not None and outcome.measurement.is_censored:
        notes.append("stopped early, clearly slow")
    return "; ".join(notes)


# ---- failures -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Failure:
    """Trials that failed for the same reason, but for numbers in its words."""

    status: str
    reason: str
    count: int
    trials: str
    log: str
    example: int


def _failures(facts: _Facts) -> list[_Failure]:
    groups: dict[tuple[Status, str], list[Trial]] = defaultdict(list)
    for trial in facts.trials:
        if trial.outcome.status is not Status.CORRECT:
            first = (trial.outcome.reason.strip() or "no reason was recorded").splitlines()[0]
            groups[trial.outcome.status, re.sub(r"\d[\d.e+-]*", "#", first)].append(trial)
    ranked = sorted(groups.values(), key=len, reverse=True)
    return [_failure(facts, group) for group in ranked[:MAX_FAILURE_GROUPS]]


def _failure(facts: _Facts, group: Sequence[Trial]) -> _Failure:
    first = group[0]
    folder = facts.candidate(first)
    log = ""
    if first.outcome.status is Status.COMPILE and folder is not None:
        log = _text(folder / "log.txt", MAX_LOG_CHARS)
    return _Failure(
        first.outcome.status.value,
        first.outcome.reason.strip()[:2000] or "no reason was recorded",
        len(group),
        _numbers([trial.number for trial in group]),
        log,
        first.number,
    )


# ---- sources --------------------------------------------------------------------------------


def _highlighted(text: str, lexer_name: str) -> Markup:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    formatter = HtmlFormatter(cssclass="code", wrapcode=True)
    return Markup(highlight(text, get_lexer_by_name(lexer_name, stripnl=False), formatter))


def _code_styles() -> Markup:
    """Return the colours of highlighted code for light pages and for dark screens."""
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".code")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".code")
    return Markup(f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}")


_LEXERS = {".cu": "cuda", ".cpp": "cpp", ".py": "python"}


def _winner_source(facts: _Facts) -> tuple[str, Markup]:
    """Return where the winner's source is, and its highlighted text."""
    name, text = facts.source(facts.best) if facts.best else ("", "")
    if text and facts.best is not None:
        name = f"candidates/{facts.best.candidate_key}/{name}"
    elif text := _text(facts.run.export_path, MAX_SOURCE_CHARS):
        name = _relative(str(facts.run.export_path), facts.run.path)
    if not text:
        return "", Markup("")
    return name, _highlighted(text, _LEXERS.get(Path(name).suffix, "text"))


def _diffs(facts: _Facts) -> list[tuple[str, Markup]]:
    """Return how the other finalists' sources differ from the winner's."""
    if facts.best is None or facts.result is None:
        return []
    by_number = {trial.number: trial for trial in facts.trials}
    winner = facts.source(facts.best)[1]
    found: list[tuple[str, Markup]] = []
    for finalist in facts.result.finalists:
        trial = by_number.get(finalist.trial)
        if trial is None or trial.number == facts.best.number or len(found) == MAX_DIFFS:
            continue
        other = facts.source(trial)[1]
        if not winner or not other:
            continue
        names = f"trial {facts.best.number}", f"trial {trial.number}"
        lines = difflib.unified_diff(winner.splitlines(), other.splitlines(), *names, lineterm="")
        text = "\n".join(lines) or "the same text"
        label = f"trial {trial.number}, {_us(trial.outcome.latency_us)} at screening"
        found.append((label, _highlighted(text, "diff")))
    return found


# ---- the page -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chart:
    """A figure with the words that say what it shows to those who cannot see it."""

    name: str
    label: str
    caption: str
    data: Markup


def write_report(run: Run) -> Path:
    """Write the run's report, whole or not at all; return its path.

    The file holds all it needs: no network, no server. A run that has not finished, or failed
    altogether, has a report too.

    Raises:
        StorageError: a file of the run cannot be read, or the report not written.
    """
    facts = _Facts.of(run)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"us": _us, "percent": _percent, "ratio": _ratio, "hash": _script_hash}
    page = environment.get_template("report.html.j2").render(_view(facts))
    # A lone surrogate (a file name that is not UTF-8, in a reason) cannot be written.
    write_whole(run.report_path, page.encode("utf-8", "replace").decode("utf-8"))
    return run.report_path


def _view(facts: _Facts) -> dict[str, Any]:
    """Return all that the template shows, by name."""
    from plotly.offline import get_plotlyjs

    shares = importances(facts.trials)
    source_name, source = _winner_source(facts)
    stages = _stages(facts.trials)
    builds = [trial.outcome.build for trial in facts.trials]
    strategies = _strategies(facts.trials)
    return {
        "summary": _summary(facts),
        "finalists": facts.result.finalists if facts.result else (),
        "exported": facts.result.exported if facts.result else None,
        "error_ratio": _error_ratio,
        "trial_words": _trial_words,
        "params_words": _params_words,
        "progress": _progress_charts(facts),
        "importance": _importance_chart(shares),
        "parameters": _parameter_chart(facts.trials, shares),
        "contests": [(name, _contest(facts.trials, [name])) for name in strategies],
        "together": _contest(facts.trials, strategies) if len(strategies) > 1 else None,
        "status_meaning": {status.value: text for status, text in _STATUS_MEANING.items()},
        "failures": _failures(facts),
        "stages": [(stage, _s(stage.seconds)) for stage in stages],
        "stage_chart": _stage_chart(facts.trials),
        "num_cached": sum(build.is_cached for build in builds if build),
        "num_same": sum(t.outcome.same_as is not None for t in facts.trials),
        "source_name": source_name,
        "source": source,
        "diffs": _diffs(facts),
        "table": _all_trials(facts),
        "config": _highlighted(facts.config, "yaml") if facts.config else "",
        "environment": _flat(facts.environment),
        "started_at": facts.word("started_at"),
        "code_styles": _code_styles(),
        "plotly_js": Markup(get_plotlyjs().replace("\r\n", "\n")),
    }


def _chart(name: str, label: str, caption: str, figure: Any) -> _Chart:
    data = json.loads(figure.to_json())
    data["layout"].pop("template", None)  # the page's own follows the reader's light or dark
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":  # inside a script element nothing else could end it
        text = text.replace(character, f"\\u{ord(character):04x}")
    return _Chart(name, label, caption, Markup(text))


def _progress_charts(facts: _Facts) -> list[_Chart]:
    if not facts.trials:
        return []
    baseline_us, floors = facts.number("baseline_us"), facts.floors()
    best = min(_correct(facts.trials), key=_latency_us, default=None)
    words = f"Of {_count(len(facts.trials), 'trial')}"
    if best is None:
        words += " none is correct."
    else:
        words += f" number {best.number} is the fastest at screening, {_us(_latency_us(best))}."
    words += " Failed trials stand below, by status."
    if not floors:
        words += " No physical floor: this device's rates are not known."
    by_trial = progress_figure(facts.trials, baseline_us, floors=floors)
    by_time = progress_figure(facts.trials, baseline_us, floors=floors, by="time")
    return [
        _chart("progress-trial", "By trial", words, by_trial),
        _chart("progress-time", "By time", words, by_time),
    ]


def _importance_chart(shares: Mapping[str, float]) -> _Chart | None:
    if not shares:
        return None
    first = max(shares, key=lambda name: shares[name])
    words = (
        f"How much each parameter decides whether a trial is among the fastest tenth "
        f"(PED-ANOVA over correct trials). Most of all: {first}, {100 * shares[first]:.0f} %. "
        "Parameters that exist for one template alone share its merit."
    )
    return _chart("importance", "Importance", words, importance_figure(shares))


def _parameter_chart(trials: Sequence[Trial], shares: Mapping[str, float]) -> _Chart | None:
    correct = _correct(trials)
    varied = [n for n in _names(correct) if len({_value(t, n) for t in correct}) > 1]
    names = sorted(varied, key=lambda name: -shares.get(name, 0.0))[:MAX_PARAMETER_PLOTS]
    if not names:
        return None
    words = "Every correct trial by each parameter's value; the green bar is the best one."
    if len(varied) > len(names):
        words += f" {len(varied) - len(names)} parameters that matter less are left out."
    return _chart("parameters", "Latency by parameter", words, parameter_figure(correct, names))


def _stage_chart(trials: Sequence[Trial]) -> _Chart | None:
    if not any(trial.outcome.seconds for trial in trials):
        return None
    words = "Seconds of each stage over all trials; builds run beside the others."
    return _chart("stages", "Time by stage", words, stage_figure(trials))


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested facts as rows."""
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return rows


def _script_hash(text: str) -> Markup:
    """Return a script's hash as a Content-Security-Policy names it: no other script may run."""
    digest = hashlib.sha256(str(text).encode()).digest()
    return Markup(f"'sha256-{base64.b64encode(digest).decode()}'")
