"""What is shown while a run goes on: plain lines, lines of JSON, or a live screen.

A view follows the events of `observing`; each of its methods says what happened.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tuner.problem.modes import MODE_WORDS
from tuner.problem.timed_data import data_words
from tuner.wording import one_line, percent, terminal_us

if TYPE_CHECKING:
    from tuner.evaluate.verifier import Answered
    from tuner.planning.schedule import Schedule
    from tuner.review.run_data import RunData
    from tuner.run import Run
    from tuner.session.tuning import Planned, Progress
    from tuner.trial import Finalist, Measurement, Trial

__all__ = ["COLUMNS", "JsonLines", "Plain", "Screen"]

COLUMNS, LINES = 80, 20
SHOWN_TRIALS = 8  # of the latest, in the live view
PROGRESS_S = 3.0  # between two lines of progress where the output is no terminal


class Plain:
    """The view where the output is no terminal: one line an event."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.start_s = time.monotonic()
        self.run: Run | None = None
        self.best_us: float | None = None
        self.budget: Any = None
        self.shown_s = self.start_s

    def on_plan(self, planned: Planned) -> None:
        """What was asked for is understood."""
        self.budget = planned.config.search
        space = planned.space
        mode = MODE_WORDS[planned.config.problem.mode]
        self.line(
            f"{planned.family.op.title} on {planned.device.name}, accuracy"
            f" {planned.config.accuracy.label}{mode and f', {mode}'}:"
            f" {space.num_feasible} feasible configurations of {space.num_cartesian} combinations"
        )
        for warning in planned.warnings:
            self.line(f"warning: {warning}")

    def on_run(self, run: Run, baseline: Measurement, trials: Sequence[Trial]) -> None:
        """The run's folder is there; `trials` is what a resumed run has."""
        self.run = run
        self.line(f"run {run.path}")
        self.line(
            f"baseline: {terminal_us(baseline.latency_us)} (noise {baseline.noise:.1%},"
            f" {'cold' if baseline.is_cold else 'hot'} caches)"
        )
        for trial in trials:
            self._improve(trial)
        if trials:
            self.line(f"resumed after {len(trials)} trials")

    def on_trial(self, trial: Trial, num_building: int) -> None:
        """One more outcome is on disk."""
        self._improve(trial)
        self.line(_trial_line(trial))

    def on_remaining(self, improvement: float, within: Mapping[float, float]) -> None:
        """What the rest of the search is expected to bring is known anew."""
        self.line(_remaining_line(improvement, within))

    def on_schedule(self, schedule: Schedule) -> None:
        """How the time is shared is known, or known anew."""
        self.line(schedule.words)
        for reduction in schedule.reductions:
            self.line(f"  less than asked for: {reduction}")

    def on_stage(self, text: str) -> None:
        """Something that takes a while begins."""
        self.line(text)

    def on_probe(self, answered: Answered) -> None:
        """A contender answered one probe; why one was rejected the verdict says."""
        if not answered.result.is_accepted:
            self.line(f"  probe {answered.number} of {answered.total}: rejected")
            return
        progress = (answered.number, answered.total, answered.left_s)
        self.progress(f"  probe {answered.number} of {answered.total}", *progress)

    def on_progress(self, progress: Progress) -> None:
        """A wait is that far."""
        text = f"  {progress.what}: {progress.done} s"
        if progress.total is not None:
            text = f"  {progress.what}: {100 * progress.done // progress.total} %"
        self.progress(text, progress.done, progress.total, progress.left_s)

    def progress(self, text: str, done: int, total: int | None, left_s: float) -> None:
        """Say how far a wait is, not more often than every few seconds."""
        now_s = time.monotonic()
        if now_s - self.shown_s >= PROGRESS_S and done != total:
            self.shown_s = now_s
            self.counted(text, done, total, left_s)

    def counted(self, text: str, done: int, total: int | None, left_s: float) -> None:
        """Print how far a wait is."""
        self.line(f"{text}, about {left_s:.0f} s left")

    def on_finalist(self, entry: Finalist) -> None:
        """A finalist was checked or raced."""
        self.line(_finalist_line(entry))

    def line(self, text: str) -> None:
        """Print a line, with the time since the start."""
        self.console.print(f"{time.monotonic() - self.start_s:7.1f}s  {text}", markup=False)

    def _improve(self, trial: Trial) -> None:
        latency_us = trial.outcome.latency_us
        if latency_us is not None:
            self.best_us = min(self.best_us or latency_us, latency_us)


class JsonLines(Plain):
    """The view where a program reads: every event is a line of JSON."""

    def line(self, text: str) -> None:
        """Write a line as an event."""
        self._write({"text": text.strip()})

    def counted(self, text: str, done: int, total: int | None, left_s: float) -> None:
        """Write how far a wait is, in numbers as well."""
        left = {"done": done, "total": total, "left_s": round(left_s, 1)}
        self._write({"text": text.strip(), **left})

    def _write(self, event: dict[str, Any]) -> None:
        elapsed_s = round(time.monotonic() - self.start_s, 1)
        sys.stderr.write(json.dumps({"elapsed_s": elapsed_s, **event}) + "\n")
        sys.stderr.flush()


class Screen(Plain):
    """The live view of a terminal: what the summary would say now, and the latest trials.

    At most 20 lines of at most 80 columns, with nothing that needs colour.
    """

    def __init__(self, live: Live) -> None:
        super().__init__(live.console)
        self.live = live
        self.run_data: RunData | None = None
        self.trials: list[Trial] = []
        self.num_building = 0
        self.stage = self.remaining = self.waiting = ""
        self.schedule: Schedule | None = None

    def on_run(self, run: Run, baseline: Measurement, trials: Sequence[Trial]) -> None:
        """The run's folder is there; `trials` is what a resumed run has."""
        from tuner.review.run_data import RunData

        super().on_run(run, baseline, trials)
        self.trials = list(trials)
        self.run_data = RunData(run, run.environment(), self.trials, None, "")

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
        said = self._said()
        num_shown = max(1, min(SHOWN_TRIALS, LINES - len(said) - len(below)))
        rows = [_trial_line(trial) for trial in self.trials[-num_shown:]]
        lines = [Text(line[:COLUMNS], no_wrap=True) for line in (*said, *rows, *below)]
        self.live.update(Group(*lines))

    def _said(self) -> list[str]:
        """Return what the summary says of the trials until now, but for its warnings."""
        from tuner.review.summary import format_summary, summary_of

        if self.run_data is None:
            return []
        found = replace(summary_of(self.run_data), warnings=(), reproduce="", products="")
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


def _trial_line(trial: Trial) -> str:
    outcome = trial.outcome
    params = " ".join(f"{k}={v}" for k, v in trial.params.items() if k != "template")
    head = f"#{trial.number:<4} {outcome.status.value:<12} "
    if outcome.latency_us is not None and outcome.measurement is not None:
        measured = outcome.measurement
        mark = ">" if measured.is_censored else " "
        speed = f"{measured.anchor_us / measured.latency_us:5.2f}x" if measured.anchor_us else ""
        head += f"{mark}{terminal_us(outcome.latency_us):>10} ±{measured.noise:5.1%} {speed} "
        if measured.slowdown > 1.0 and measured.anchor_us:
            least = measured.anchor_us / measured.latency_us / measured.slowdown
            head += f"({least:.2f}x on {data_words(measured.slowest_on)}) "
    text = f"{head} {trial.template} {params}"
    if outcome.same_as is not None:
        text += f" (the machine code of #{outcome.same_as})"
    return f"{text}: {one_line(outcome.reason)}" if outcome.reason else text


def _remaining_line(improvement: float, within: Mapping[float, float]) -> str:
    sure = ", ".join(
        f"{percent(share, 3)}: {100 * p:.0f} %" for share, p in sorted(within.items())
    )
    words = f"{percent(improvement)} estimated; chance that the best is within {sure}"
    return f"{'remaining':<10}{words}"


def _finalist_line(entry: Finalist) -> str:
    head = f"finalist, trial {entry.trial}: "
    if entry.least is None or entry.latency_us is None:
        return head + (
            "accepted on every probe" if entry.check.is_accepted else f"rejected: {entry.error}"
        )
    from tuner.review.summary import LIKE_PYTORCH

    i, said = entry.least, str(entry.verdict)
    if i.verdict == "no difference" and abs(i.speedup - 1.0) > LIKE_PYTORCH:
        said = "not distinguished from PyTorch, its processes scatter too much"
    return f"{head}{terminal_us(entry.latency_us)}, {entry.least_words}: {said}"
