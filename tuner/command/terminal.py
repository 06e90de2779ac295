"""What the terminal shows of a run: a view meanwhile, then summary and verdict; and Ctrl-C.

Colour and width come from the terminal. A pipe gets plain lines of any length, one an event.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live

from tuner.command.views import COLUMNS, JsonLines, Plain, Screen
from tuner.errors import NothingCorrectError, NothingToGainError
from tuner.problem.modes import MODE_WORDS
from tuner.wording import one_line, percent

if TYPE_CHECKING:
    from tuner.capture.by_hand import ByHand
    from tuner.machine.doctor import Finding
    from tuner.review.gain import Gain
    from tuner.review.listing import Shown
    from tuner.review.summary import Summary
    from tuner.run import Run
    from tuner.session.tuning import Planned
    from tuner.trial import Check, Params
    from tuner.verification.recheck import Rechecked

__all__ = [
    "INTERRUPTED",
    "Interrupted",
    "err",
    "go_on",
    "interruptible",
    "out",
    "print_either",
    "print_findings",
    "print_json",
    "print_nothing",
    "print_plan",
    "print_points",
    "print_runs",
    "print_start",
    "print_summary",
    "print_verdict",
    "watching",
]


class _Console(Console):
    """One that leaves a pipe which nobody reads to whoever ends the program."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


out = _Console(highlight=False, soft_wrap=True)
err = _Console(stderr=True, highlight=False, soft_wrap=True)

INTERRUPTED = 130  # exit code, as shells say it
GRACE_S = 15.0  # after the second Ctrl-C, to end by itself


class Interrupted(Exception):
    """Ctrl-C; the text says how to go on."""


# ---- what is printed ------------------------------------------------------------------------


def print_plan(
    planned: Planned,
    *,
    is_json: bool = False,
    gain: Gain | None = None,
    sources: Mapping[str, Path] | None = None,
) -> None:
    """Print what a config amounts to: counts, what rejects the rest, one rendered candidate.

    Of a module's operator also its graph, what could be gained, and where `sources` stand.
    """
    space, candidate = planned.space, planned.example()
    counts = space.count_by("template")
    (listed,) = (p.values for p in space.parameters if p.name == "template")
    by_template = {str(name): counts.get(name, 0) for name in listed}
    rejected = {why: count for why, count in space.rejections.items() if count}
    if is_json:
        of_module = {"graph": planned.outline, "gain": gain and gain.data, "sources": sources}
        print_json(
            {
                **{name: value for name, value in of_module.items() if value},
                "title": planned.family.op.title,
                "sizes": dict(planned.sizes),
                "device": planned.device.name,
                "is_assumed": planned.is_assumed,
                "accuracy": planned.config.accuracy.label,
                "mode": planned.config.problem.mode,
                "num_feasible": space.num_feasible,
                "num_cartesian": space.num_cartesian,
                "num_feasible_by_template": by_template,
                "num_rejected_by_reason": rejected,
                "warnings": list(planned.warnings),
                "first": [*planned.start.named.values()],
                "example": {"params": candidate.params, "source": candidate.source},
            }
        )
        return
    if planned.is_assumed:
        out.print(f"no GPU here: assuming {planned.device.name}", markup=False)
    for warning in planned.warnings:
        out.print(f"warning: {warning}", markup=False)
    sizes = ", ".join(f"{name} = {size}" for name, size in planned.sizes.items())
    out.print(f"problem: {planned.family.op.title}; {sizes}", markup=False)
    words = MODE_WORDS[planned.config.problem.mode]
    out.print(
        f"device: {planned.device.name}; accuracy: {planned.config.accuracy.label}"
        + (words and f"; {words}")
    )
    out.print(
        f"feasible: {space.num_feasible} of {space.num_cartesian} combinations"
        f" ({percent(space.num_feasible / space.num_cartesian)})"
    )
    for name, count in by_template.items():
        out.print(f"  {name}: {count}")
    for why, count in sorted(rejected.items(), key=lambda item: -item[1])[:10]:
        out.print(f"  {count} rejected: {why}", markup=False)
    if absent := space.num_cartesian - space.num_feasible - sum(space.rejections.values()):
        out.print(f"  {absent} differ in parameters that their template does not have")
    for params in planned.start.named.values():
        out.print(f"tried first: {_listed(params)}", markup=False)
    if planned.outline is not None and gain is not None:
        from tuner.review.gain import gain_lines, graph_lines

        for line in [*graph_lines(planned.outline), *gain_lines(gain), *_where(planned)]:
            out.print(line, markup=False)
    if sources:
        for name, path in sources.items():
            out.print(f"source of {name}, with its defaults: {path}", markup=False)
        return
    out.print(f"\none candidate ({_listed(candidate.params)}):\n", markup=False)
    out.print(candidate.source, markup=False)


def _listed(params: Params) -> str:
    return ", ".join(f"{name} = {value}" for name, value in params.items())


def _where(planned: Planned) -> list[str]:
    """Say at which sizes, and in which calls, a file of these kernels would take them."""
    from tuner.capture.modules.rows_text import has_rows
    from tuner.capture.steps.step_text import rows_of_steps

    text, own = planned.family.model_new, "PyTorch's own operations"
    lines = []
    if not has_rows(text):
        lines.append(f"the kernels are for these sizes alone: at others it takes {own}")
    if planned.example().plan.extra.get("gradients") is None:
        return [*lines, f"a step of training takes {own} for gradients"]
    rows = rows_of_steps(text)
    at_rows = "" if rows is None else f", at {rows} rows alone"
    return [*lines, f"a step of training takes kernels of its own for gradients{at_rows}"]


def print_start(made: ByHand) -> None:
    """Print what was written for somebody who writes a task by hand, and what comes next."""
    for stub in made.stubs:
        language = "Triton" if stub.name.endswith(".py.j2") else "C++"
        out.print(f"task {made.task} in {language}, yours to edit: {stub}", markup=False)
    out.print(f"config: {made.config}", markup=False)
    out.print("It runs as it is: what was generated is where you start.", markup=False)
    config = shlex.quote(str(made.config))
    out.print(f"next: tune --config {config} --dry-run, which finds most slips", markup=False)
    out.print(f"      tune --config {config} --effort quick, a verdict soon", markup=False)
    out.print(f"      tune --config {config}", markup=False)


def print_summary(run: Run, found: Summary | None = None, *, is_json: bool = False) -> None:
    """Print what a run found, in 24 lines, and where it is; `found` saves reading it again."""
    from tuner.review.summary import format_summary, summary

    found = found or summary(run)
    if is_json:
        print_json(found)
        return
    out.print(format_summary(found), markup=False)
    if found.export_path:
        out.print(f"file:   {run.path / found.export_path}", markup=False)
    out.print(f"report: {run.report_path}\nrun:    {run.path}", markup=False)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print what this machine can do, and what to install for the rest."""
    for finding in findings:
        mark = "[green]yes[/]" if finding.is_ok else "[red]no [/]"
        out.print(f"{mark}  {finding.name}: ", end="")
        out.print(finding.detail, markup=False)
        if not finding.is_ok and finding.remedy:
            out.print(f"     next: {finding.remedy}", markup=False)


def print_verdict(check: Check) -> None:
    """Print the first probes' errors, and whether all were accepted."""
    from tuner.review.formatting import draws_words

    compared = [p for p in check.probes if p.is_accepted or 0.0 < p.max_abs < math.inf]
    for probe in compared[:3]:
        out.print(
            f"  {probe.probe}: rms {probe.rms_rel:.2e}, max {probe.max_abs:.2e}"
            f" (PyTorch's own {probe.baseline_rms_rel:.2e}, {probe.baseline_max_abs:.2e})",
            markup=False,
        )
    if check.is_accepted:
        near = draws_words(check.probes)
        count = len(check.differences)
        degree = "right, and a drop-in"
        if count:
            what = "one difference" if count == 1 else f"{count} differences"
            degree = f"right, but no drop-in, with {what} from the reference's class"
        out.print(
            f"accepted: {degree}; {len(check.probes)} probes{near}, "
            f"accuracy class {check.accuracy}"
        )
        for difference in check.differences:
            out.print(f"difference: {difference}", markup=False)
    else:
        out.print(f"rejected: {check.reason}", markup=False)
    for note in check.notes:
        out.print(f"note: {note}", markup=False)


def print_points(rechecked: Rechecked) -> None:
    """Print point by point what of a certificate holds."""
    words = {True: "holds", False: "no longer holds", None: "cannot tell"}
    for point in rechecked.points:
        word = words[point.holds] if point.is_claim else "note"
        out.print(f"{word:<16} {point.what}: {point.detail}", markup=False)
    claims = [point.holds for point in rechecked.points if point.is_claim]
    num_broken, num_open = claims.count(False), claims.count(None)
    end = f"{num_broken} of its points no longer" if num_broken else "all of its points still"
    if num_open and not num_broken:
        end = f"not shown to hold, {num_open} of its points cannot be checked here"
    else:
        end += " hold here" + (f", {num_open} cannot be checked" if num_open else "")
    out.print(f"the certificate, accuracy class {rechecked.accuracy}: {end}", markup=False)


def print_runs(runs: Sequence[Shown], folder: Path) -> None:
    """Print a list of runs at 80 columns.

    A speed-up after ~ was not verified; one in brackets is not distinguished from PyTorch's.
    """
    if not runs:
        out.print(f"no runs in {folder}\n  next: tune --config X.yaml", markup=False)
        return
    out.print(f"{'state':<10} {'speed-up':>8} {'trials':>6} {'age':>7}  run")
    from tuner.review.formatting import NONE, ratio_words
    from tuner.review.listing import age_words

    for run in runs:
        speed = ratio_words(run.speedup) if run.speedup else NONE
        speed = speed if run.is_verified or not run.speedup else f"~{speed}"
        speed = f"({speed})" if run.doubt else speed
        head = f"{run.state:<10} {speed:>8} {run.num_trials:>6} {age_words(run.age_s):>7}  "
        fits = len(head) + len(run.name) <= COLUMNS
        out.print(f"{head}{run.name}" if fits else f"{head.rstrip()}\n  {run.name}", markup=False)
        about = [run.title, run.sizes, run.accuracy, run.caveat and f"but {run.caveat}"]
        about.append(run.doubt)
        for words in ("; ".join(filter(None, about)), run.problem, run.note):
            for line in wrap(one_line(words, 4 * COLUMNS), COLUMNS - 2, max_lines=3):
                out.print(f"  {line}", markup=False)


def print_json(record: object) -> None:
    """Print a record, or a list or mapping of them, as JSON alone on stdout."""
    from tuner.trial import to_json

    sys.stdout.write(to_json(record) + "\n")
    sys.stdout.flush()


def print_either(
    record: object, in_words: Callable[..., None], *more: object, is_json: bool
) -> None:
    """Print a record as JSON; or else in words, with what these need more."""
    print_json(record) if is_json else in_words(record, *more)


def print_nothing(error: NothingToGainError, *, is_json: bool = False) -> None:
    """Print that nothing was searched, since PyTorch is as fast as the device allows."""
    if is_json:
        print_json({"verdict": "nothing to gain", **error.numbers})
    else:
        out.print(str(error), markup=False)


# ---- running --------------------------------------------------------------------------------


@contextmanager
def watching(
    was_stopped: Callable[[], bool] = lambda: False, *, is_json: bool = False, since: Any = None
) -> Iterator[Any]:
    """Yield what shows progress: live in a terminal, plain lines elsewhere.

    With `is_json` it is lines of JSON on stderr; stdout is for the result. Seconds are counted
    from its beginning, or from that of the one before (`since`) where a command has several.
    """
    from tuner.session.tuning import Observer

    def view_of(kind: type, shown: Any) -> Any:
        made = type("View", (kind, Observer), {})(shown)
        if since is not None:
            made.start_s = since.start_s
        return made

    view: Any = None
    try:
        if is_json or not out.is_terminal:
            view = view_of(JsonLines if is_json else Plain, out)
            yield view
            return
        with Live(console=out, refresh_per_second=8, transient=True) as live:
            view = view_of(Screen, live)
            yield view
    except KeyboardInterrupt as interrupt:
        raise Interrupted(go_on(view.run if view else None)) from interrupt
    except NothingCorrectError as error:  # since there was no time for it
        if not was_stopped():
            raise
        raise Interrupted(f"{error}\n{go_on(view.run)}") from error


def go_on(run: Run | None) -> str:
    """Say how to go on with an interrupted run, if there is one yet."""
    return (
        f"interrupted\n  next: tune --resume {shlex.quote(str(run.path))}"
        if run
        else "interrupted"
    )


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
