"""What the terminal shows of a run: the live view, the summary, the verdict; and Ctrl-C.

Colour and width come from the terminal. A pipe gets plain lines of any length, one an event.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tuner.errors import NothingCorrectError
from tuner.wording import one_line, percent

if TYPE_CHECKING:
    from tuner.evaluate.verifier import Answered
    from tuner.export.repeat import Repeated
    from tuner.review.facts import Facts
    from tuner.review.shelf import Shown
    from tuner.run import Run
    from tuner.schedule import Schedule
    from tuner.trial import Check, Finalist, Measurement, Trial
    from tuner.tuning import Planned, Progress

__all__ = [
    "INTERRUPTED",
    "Interrupted",
    "Screen",
    "err",
    "go_on",
    "interruptible",
    "out",
    "print_json",
    "print_plan",
    "print_points",
    "print_runs",
    "print_summary",
    "print_verdict",
    "watching",
]

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

COLUMNS, LINES = 80, 20
SHOWN_TRIALS = 8  # of the latest, in the live view
INTERRUPTED = 130  # exit code, as shells say it
PROGRESS_S = 3.0  # between two lines of progress where the output is no terminal
GRACE_S = 15.0  # after the second Ctrl-C, to end by itself


class Interrupted(Exception):
    """Ctrl-C; the text says how to go on."""


# ---- what is printed ------------------------------------------------------------------------


def print_plan(planned: Planned, *, is_json: bool = False) -> None:
    """Print what a config amounts to: counts, what rejects the rest, one rendered candidate."""
    space, candidate = planned.space, planned.example()
    by_template = {str(name): count for name, count in space.count_by("template").items()}
    rejected = {why: count for why, count in space.rejections.items() if count}
    if is_json:
        print_json(
            {
                "title": planned.family.title,
                "sizes": dict(planned.sizes),
                "device": planned.device.name,
                "is_assumed": planned.is_assumed,
                "accuracy": planned.config.accuracy.label,
                "num_feasible": space.num_feasible,
                "num_cartesian": space.num_cartesian,
                "num_feasible_by_template": by_template,
                "num_rejected_by_reason": rejected,
                "warnings": list(planned.warnings),
                "example": {"params": candidate.params, "source": candidate.source},
            }
        )
        return
    if planned.is_assumed:
        out.print(f"no GPU here: assuming {planned.device.name}", markup=False)
    for warning in planned.warnings:
        out.print(f"warning: {warning}", markup=False)
    sizes = ", ".join(f"{name} = {size}" for name, size in planned.sizes.items())
    out.print(f"problem: {planned.family.title}; {sizes}", markup=False)
    out.print(f"device: {planned.device.name}; accuracy: {planned.config.accuracy.label}")
    out.print(
        f"feasible: {space.num_feasible} of {space.num_cartesian} combinations"
        f" ({percent(space.num_feasible / space.num_cartesian)})"
    )
    for name, count in by_template.items():
        out.print(f"  {name}: {count}")
    for why, count in sorted(rejected.items(), key=lambda item: -item[1])[:10]:
        out.print(f"  {count} rejected: {why}", markup=False)
    chosen = ", ".join(f"{k} = {v}" for k, v in candidate.params.items())
    out.print(f"\none candidate ({chosen}):\n", markup=False)
    out.print(candidate.source, markup=False)


def print_summary(run: Run, *, is_json: bool = False) -> None:
    """Print what a run found, in 20 lines, and where it is."""
    from tuner.review.summary import format_summary, summary

    found = summary(run)
    if is_json:
        print_json(found)
        return
    out.print(format_summary(found), markup=False)
    out.print(f"report: {run.report_path}\nrun:    {run.path}", markup=False)


def print_verdict(check: Check) -> None:
    """Print the first probes' errors, and whether all were accepted."""
    from tuner.review.words import draws_words

    for probe in check.probes[:3]:
        out.print(
            f"  {probe.probe}: rms {probe.rms_rel:.2e}, max {probe.max_abs:.2e}"
            f" (PyTorch's own {probe.baseline_rms_rel:.2e}, {probe.baseline_max_abs:.2e})",
            markup=False,
        )
    if check.is_accepted:
        near = draws_words(check.probes)
        out.print(f"accepted: {len(check.probes)} probes{near}, accuracy class {check.accuracy}")
    else:
        out.print(f"rejected: {check.reason}", markup=False)
    for note in check.notes:
        out.print(f"note: {note}", markup=False)


def print_points(repeated: Repeated) -> None:
    """Print point by point what of a certificate holds."""
    words = {True: "holds", False: "no longer holds", None: "note"}
    for point in repeated.points:
        out.print(f"{words[point.holds]:<16} {point.what}: {point.detail}", markup=False)
    num_broken = sum(point.holds is False for point in repeated.points)
    end = f"{num_broken} of its points no longer" if num_broken else "all of its points still"
    out.print(f"the certificate: {end} hold here")


def print_runs(folder: Path, runs: Sequence[Shown]) -> None:
    """Print a list of runs at 80 columns; a speed-up after ~ was not verified."""
    if not runs:
        out.print(f"no runs in {folder}\n  next: tune --config X.yaml", markup=False)
        return
    out.print(f"{'state':<10} {'speed-up':>8} {'trials':>6} {'age':>7}  run")
    from tuner.review.shelf import age_words
    from tuner.review.words import NONE, ratio_words

    for run in runs:
        speed = ratio_words(run.speedup) if run.speedup else NONE
        speed = speed if run.is_proved or not run.speedup else f"~{speed}"
        head = f"{run.state:<10} {speed:>8} {run.num_trials:>6} {age_words(run.age_s):>7}  "
        fits = len(head) + len(run.name) <= COLUMNS
        out.print(f"{head}{run.name}" if fits else f"{head.rstrip()}\n  {run.name}", markup=False)
        if run.problem:
            out.print(f"  {run.problem}", markup=False)


def print_json(record: object) -> None:
    """Print a record, or a list or mapping of them, as JSON alone on stdout."""
    from tuner.trial import to_json

    sys.stdout.write(to_json(record) + "\n")
    sys.stdout.flush()


class _Plain:
    """The view where the output is no terminal: one line an event."""

    console = out

    def __init__(self) -> None:
        self.start_s = time.monotonic()
        self.run: Run | None = None
        self.best_us: float | None = None
        self.budget: Any = None
        self.shown_s = self.start_s

    def on_plan(self, planned: Planned) -> None:
        self.budget = planned.config.search
        space = planned.space
        self.line(
            f"{planned.family.title} on {planned.device.name}, accuracy"
            f" {planned.config.accuracy.label}: {space.num_feasible} feasible configurations"
            f" of {space.num_cartesian} combinations"
        )
        for warning in planned.warnings:
            self.line(f"warning: {warning}")

    def on_run(self, run: Run, baseline: Measurement, trials: Sequence[Trial]) -> None:
        self.run = run
        self.line(f"run {run.path}")
        self.line(
            f"baseline: {_us(baseline.latency_us)} (noise {baseline.noise:.1%},"
            f" {'cold' if baseline.is_cold else 'hot'} caches)"
        )
        for trial in trials:
            self._improve(trial)
        if trials:
            self.line(f"resumed after {len(trials)} trials")

    def on_trial(self, trial: Trial, num_building: int) -> None:
        self._improve(trial)
        self.line(_trial_line(trial))

    def on_remaining(self, improvement: float, within: Mapping[float, float]) -> None:
        self.line(_remaining_line(improvement, within))

    def on_schedule(self, schedule: Schedule) -> None:
        self.line(schedule.words)
        for reduction in schedule.reductions:
            self.line(f"  less than asked for: {reduction}")

    def on_stage(self, text: str) -> None:
        self.line(text)

    def on_probe(self, answered: Answered) -> None:
        result = answered.result
        if not result.is_accepted:
            self.line(f"  probe {result.probe}: {result.reason}")
        progress = (answered.number, answered.total, answered.left_s)
        self.progress(f"  probe {answered.number} of {answered.total}", *progress)

    def on_progress(self, progress: Progress) -> None:
        text = f"  {progress.what}: {progress.done} s"
        if progress.total is not None:
            text = f"  {progress.what}: {100 * progress.done // progress.total} %"
        self.progress(text, progress.done, progress.total, progress.left_s)

    def progress(self, text: str, done: int, total: int | None, left_s: float) -> None:
        """Print how far a wait is, not more often than every few seconds."""
        now_s = time.monotonic()
        if now_s - self.shown_s >= PROGRESS_S and done != total:
            self.shown_s = now_s
            self.line(f"{text}, about {left_s:.0f} s left")

    def on_finalist(self, entry: Finalist) -> None:
        self.line(_finalist_line(entry))

    def line(self, text: str) -> None:
        self.console.print(f"{time.monotonic() - self.start_s:7.1f}s  {text}", markup=False)

    def _improve(self, trial: Trial) -> None:
        latency_us = trial.outcome.latency_us
        if latency_us is not None:
            self.best_us = min(self.best_us or latency_us, latency_us)


class _JsonLines(_Plain):
    """The view where a program reads: every event is a line of JSON."""

    def line(self, text: str) -> None:
        self._write({"text": text.strip()})

    def progress(self, text: str, done: int, total: int | None, left_s: float) -> None:
        now_s = time.monotonic()
        if now_s - self.shown_s >= PROGRESS_S and done != total:
            self.shown_s = now_s
            left = {"done": done, "total": total, "left_s": round(left_s, 1)}
            self._write({"text": text.strip(), **left})

    def _write(self, event: dict[str, Any]) -> None:
        elapsed_s = round(time.monotonic() - self.start_s, 1)
        sys.stderr.write(json.dumps({"elapsed_s": elapsed_s, **event}) + "\n")
        sys.stderr.flush()


class Screen(_Plain):
    """The live view of a terminal: what the summary would say now, and the latest trials.

    At most 20 lines of at most 80 columns, with nothing that needs colour.
    """

    def __init__(self, live: Live) -> None:
        super().__init__()
        self.live = live
        self.facts: Facts | None = None
        self.trials: list[Trial] = []
        self.num_building = 0
        self.stage = self.remaining = self.waiting = ""
        self.schedule: Schedule | None = None

    def on_run(self, run: Run, baseline: Measurement, trials: Sequence[Trial]) -> None:
        """The run's folder is there; `trials` is what a resumed run has."""
        from tuner.review.facts import Facts

        super().on_run(run, baseline, trials)
        self.trials = list(trials)
        self.facts = Facts(run, run.environment(), self.trials, None, "")

    def on_trial(self, trial: Trial, num_building: int) -> None:
        """One more outcome is on disk."""
        self.trials.append(trial)
        self.num_building = num_building
        self._draw()

    def on_remaining(self, improvement: float, within: Mapping[float, float]) -> None:
        """What the rest of the search is expected to bring is known anew."""
        self.remaining = _remaining_line(improvement, within)
        self._draw()

    def on_stage(self, text: str) -> None:
        """Something that takes a while begins."""
        self.stage, self.waiting = text, ""
        self._draw()

    def on_schedule(self, schedule: Schedule) -> None:
        """How the time is shared is known, or known anew."""
        super().on_schedule(schedule)
        self.schedule = schedule

    def progress(self, text: str, done: int, total: int | None, left_s: float) -> None:
        """Show how far a wait is."""
        self.waiting = f"{text.strip()}, about {left_s:.0f} s left" if done != total else ""
        self._draw()

    def line(self, text: str) -> None:
        """Print a line above the view."""
        self.live.console.print(text, markup=False)

    def _draw(self) -> None:
        below = [
            *self._left(),
            *(text for text in (self.remaining, self.stage, self.waiting) if text),
        ]
        told = self._told()
        num_shown = max(1, min(SHOWN_TRIALS, LINES - len(told) - len(below)))
        rows = [_trial_line(trial) for trial in self.trials[-num_shown:]]
        lines = [Text(line[:COLUMNS], no_wrap=True) for line in (*told, *rows, *below)]
        self.live.update(Group(*lines))

    def _told(self) -> list[str]:
        """Return what the summary says of the trials until now, but for its warnings."""
        from tuner.review.summary import format_summary, summary_of

        if self.facts is None:
            return []
        found = replace(summary_of(self.facts), warnings=(), reproduce="")
        return format_summary(found).splitlines()

    def _left(self) -> list[str]:
        if self.budget is None:
            return []
        elapsed_s = self.trials[-1].elapsed_s if self.trials else 0.0
        search_s = self.schedule.search_s if self.schedule else self.budget.timeout_s
        left_s = max(0.0, search_s - elapsed_s)
        return [
            f"{'left':<10}{max(0, self.budget.trials - len(self.trials))} trials,"
            f" {left_s:.0f} s; {self.num_building} builds ahead"
        ]


def _us(latency_us: float) -> str:
    return f"{latency_us / 1e3:.3f} ms" if latency_us >= 1e3 else f"{latency_us:.1f} us"


def _trial_line(trial: Trial) -> str:
    outcome = trial.outcome
    params = " ".join(f"{k}={v}" for k, v in trial.params.items() if k != "template")
    head = f"#{trial.number:<4} {outcome.status.value:<12} "
    if outcome.latency_us is not None and outcome.measurement is not None:
        measured = outcome.measurement
        mark = ">" if measured.is_censored else " "
        speed = f"{measured.anchor_us / measured.latency_us:5.2f}x" if measured.anchor_us else ""
        head += f"{mark}{_us(measured.latency_us):>10} ±{measured.noise:5.1%} {speed} "
    text = f"{head} {trial.template} {params}"
    if outcome.same_as is not None:
        text += f" (the machine code of #{outcome.same_as})"
    return f"{text}: {one_line(outcome.reason)}" if outcome.reason else text


def _remaining_line(improvement: float, within: Mapping[float, float]) -> str:
    sure = ", ".join(
        f"{percent(share, 3)}: {100 * p:.0f} %" for share, p in sorted(within.items())
    )
    words = f"{percent(improvement)} expected; chance that the best is within {sure}"
    return f"{'to gain':<10}{words}"


def _finalist_line(entry: Finalist) -> str:
    head = f"finalist, trial {entry.trial}: "
    if entry.interval is None or entry.latency_us is None:
        return head + (
            "accepted on every probe" if entry.check.is_accepted else f"rejected: {entry.error}"
        )
    i = entry.interval
    return head + (
        f"{_us(entry.latency_us)}, {i.speedup:.3f}x [{i.low:.3f}, {i.high:.3f}]: {i.verdict}"
    )


# ---- running --------------------------------------------------------------------------------


@contextmanager
def watching(
    was_stopped: Callable[[], bool] = lambda: False, *, is_json: bool = False
) -> Iterator[Any]:
    """Yield what shows progress: live in a terminal, plain lines elsewhere.

    With `is_json` it is lines of JSON on stderr; stdout is for the result.
    """
    from tuner.tuning import Observer

    view: Any = None
    try:
        if is_json or not out.is_terminal:
            view = type("View", (_JsonLines if is_json else _Plain, Observer), {})()
            yield view
            return
        with Live(console=out, refresh_per_second=8, transient=True) as live:
            view = type("View", (Screen, Observer), {})(live)
            yield view
    except KeyboardInterrupt as interrupt:
        raise Interrupted(go_on(view.run if view else None)) from interrupt
    except NothingCorrectError as error:  # since there was no time for it
        if not was_stopped():
            raise
        raise Interrupted(f"{error}\n{go_on(view.run)}") from error


def go_on(run: Run | None) -> str:
    """Say how to go on with an interrupted run, if there is one yet."""
    return f"interrupted\n  next: tune --resume {run.path}" if run else "interrupted"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; a second one ends at once.

    The second one is an exception, which may be raised where none can pass (a finaliser), or
    between a lock and its `with`, so that who waits for the lock waits for ever: a thread then
    ends the process. Its children die with it.
    """
    pressed: list[float] = []
    is_over = threading.Event()

    def end_anyway() -> None:
        while not is_over.wait(1.0):
            if len(pressed) > 1 and time.monotonic() - pressed[1] > GRACE_S:
                os.write(2, b"interrupted\n")
                os._exit(INTERRUPTED)

    def on_signal(number: int, frame: object) -> None:
        pressed.append(time.monotonic())
        if len(pressed) > 1:
            raise KeyboardInterrupt
        err.print(
            "stopping: what is in flight is finished, what was found is verified and exported; "
            "Ctrl-C again stops at once"
        )

    before = signal.signal(signal.SIGINT, on_signal)
    threading.Thread(target=end_anyway, daemon=True).start()
    try:
        yield lambda: bool(pressed)
    finally:
        is_over.set()
        signal.signal(signal.SIGINT, before)
