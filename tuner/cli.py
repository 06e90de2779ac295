"""`tune`: arguments, the live view, exit codes. The only room that prints.

Exit codes: 0 done; 1 nothing correct found, or a file is rejected; 2 the user's files or
arguments; 3 toolchain, device, disk, or a run locked by another process; 130 interrupted.

The first Ctrl-C ends the search: the best candidates until then are proved, exported and
reported, and the exit code is 130 all the same, since less was searched than was asked. The
second ends at once; `tune --resume` goes on in both cases.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tuner.errors import InputError, NothingCorrectError, TunerError

if TYPE_CHECKING:
    from tuner.run import Run
    from tuner.trial import Check, Finalist, Measurement, ProbeResult, Trial
    from tuner.tuning import Planned

__all__ = ["app", "main"]

app = typer.Typer(
    name="tune",
    help="Tune kernel templates for a PyTorch module; export the fastest one that is right.",
    epilog=(
        "Ctrl-C ends the search; what was found is still proved and exported. Twice: at once. "
        "Exit codes: 0 done; 1 nothing correct, or a file is rejected; 2 your files or arguments; "
        "3 toolchain, device, disk, or a locked run; 130 interrupted."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
# Colour and width come from the terminal; a pipe gets plain lines of any length.
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

INTERRUPTED = 130
SHOWN_TRIALS = 8  # of the latest, in the live view


class _Interrupted(Exception):
    """Ctrl-C; the text says how to go on."""


ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="What to tune: a YAML file.")
]
ResumeOption = Annotated[
    Path | None, typer.Option("--resume", help="Go on with this run where it stopped.")
]
TrialsOption = Annotated[str | None, typer.Option(help="At most this many trials.")]
TimeoutOption = Annotated[str | None, typer.Option(help="Search for at most this long, e.g. 10m.")]
SeedOption = Annotated[str | None, typer.Option(help="Seed of the sampler and the probes.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
AccuracyOption = Annotated[
    str | None, typer.Option(help="float32, tf32 or RTOL,ATOL such as 1e-4,1e-4.")
]
SamplerOption = Annotated[str | None, typer.Option(help="tpe, random or grid.")]
RunsDirOption = Annotated[Path, typer.Option("--runs-dir", help="Where run folders are made.")]
RunArgument = Annotated[Path, typer.Argument(help="A run folder, such as runs/20260101-...")]


@app.callback(invoke_without_command=True)
def tune(
    context: typer.Context,
    config: ConfigOption = None,
    resume: ResumeOption = None,
    trials: TrialsOption = None,
    timeout: TimeoutOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    accuracy: AccuracyOption = None,
    sampler: SamplerOption = None,
    runs_dir: RunsDirOption = Path("runs"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Validate, count, render one; run nothing.")
    ] = False,
    any_machine: Annotated[
        bool, typer.Option(help="With --resume: on another device or toolchain, too.")
    ] = False,
) -> None:
    """Tune a config, or resume a run."""
    if context.invoked_subcommand is not None:
        return
    if (config is None) == (resume is None):
        raise InputError("expected either --config X.yaml or --resume RUN\n  next: tune --help")
    if dry_run and resume is not None:
        raise InputError("--dry-run goes with --config, not with --resume\n  next: tune --help")
    from tuner import tuning
    from tuner.config import load_config

    overrides = {
        "trials": trials,
        "timeout": timeout,
        "seed": seed,
        "device": device,
        "accuracy": accuracy,
        "sampler": sampler,
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    if config is not None:
        loaded = load_config(config, given)
        if dry_run:
            _dry_run(tuning.plan(loaded, may_assume=True))
            return
    with _interruptible() as stop, _view(stop) as view:
        if config is not None:
            run = tuning.tune(
                loaded,
                runs_dir=runs_dir,
                observer=view,
                should_stop=stop,
                command=shlex.join(["tune", *sys.argv[1:]]),
                overrides=given,
            )
        else:
            assert resume is not None
            run = tuning.resume(
                resume,
                overrides=given,
                observer=view,
                should_stop=stop,
                may_move=any_machine,
            )
    _summarise(run)
    if stop():
        raise _Interrupted(_go_on(run))
    result = run.result()
    if result is None or result.exported is None or not result.exported.check.is_accepted:
        raise typer.Exit(1)  # the summary says why the exported file was rejected


@app.command()
def export(
    run: RunArgument,
    trial: Annotated[
        int | None, typer.Option(help="A trial's number; the winner's if none.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file.")] = None,
) -> None:
    """Write a trial of a run as a standalone module, and prove the file."""
    from tuner import tuning

    with _view() as view:
        path, check = tuning.export_trial(run, trial=trial, output=output, observer=view)
    _print_verdict(check)
    out.print(f"written: {path}")
    if not check.is_accepted:
        raise typer.Exit(1)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A Python file that holds ModelNew.")],
    reference: Annotated[Path, typer.Option("--reference", help="A KernelBench-format file.")],
    accuracy: AccuracyOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    timeout: Annotated[str, typer.Option(help="For one call of the module.")] = "30s",
) -> None:
    """Give the verdict on anybody's ModelNew: 0 accepted, 1 rejected, 2 unusable arguments."""
    from tuner import tuning
    from tuner.config import parse_accuracy, parse_device, parse_duration

    try:
        chosen = parse_accuracy(accuracy) if accuracy else None
        checked_device = parse_device(device)
        timeout_s = parse_duration(timeout)
    except ValueError as error:
        raise InputError(str(error)) from error
    with _view() as view:
        check = tuning.verify(
            file,
            reference,
            accuracy=chosen,
            device=checked_device,
            timeout_s=timeout_s,
            observer=view,
        )
    _print_verdict(check)
    if not check.is_accepted:
        raise typer.Exit(1)


@app.command()
def report(run: RunArgument) -> None:
    """Write a run's HTML report and print its summary."""
    from tuner.report import write_report
    from tuner.run import open_run

    opened = open_run(run)
    write_report(opened)
    _summarise(opened)


@app.command()
def doctor() -> None:
    """Say what this machine can build and run, and what to install for the rest."""
    from tuner.device import doctor as findings

    worst = 0
    for finding in findings():
        mark = "[green]yes[/]" if finding.is_ok else "[red]no [/]"
        out.print(f"{mark}  {finding.name}: ", end="")
        out.print(finding.detail, markup=False)
        if not finding.is_ok and finding.remedy:
            out.print(f"     next: {finding.remedy}", markup=False)
        is_needed = finding.name in ("Python headers", "C++ compiler")
        worst = max(worst, 3 if is_needed and not finding.is_ok else 0)
    raise typer.Exit(worst)


# ---- what is printed ------------------------------------------------------------------------


def _dry_run(planned: Planned) -> None:
    space, candidate = planned.space, planned.example()
    if planned.is_assumed:
        out.print(f"no GPU here: assuming {planned.device.name}", markup=False)
    sizes = ", ".join(f"{name} = {size}" for name, size in planned.sizes.items())
    out.print(f"problem: {planned.family.title}; {sizes}", markup=False)
    out.print(f"device: {planned.device.name}; accuracy: {planned.config.accuracy.label}")
    out.print(
        f"feasible: {space.num_feasible} of {space.num_cartesian} combinations"
        f" ({100 * space.num_feasible / space.num_cartesian:.2g} %)"
    )
    by_template: dict[str, int] = {}
    for params in space.feasible:
        name = str(params["template"])
        by_template[name] = by_template.get(name, 0) + 1
    for name, count in by_template.items():
        out.print(f"  {name}: {count}")
    rejected = sorted(space.rejections.items(), key=lambda item: -item[1])
    for why, count in [item for item in rejected if item[1]][:10]:
        out.print(f"  {count} rejected: {why}", markup=False)
    chosen = ", ".join(f"{k} = {v}" for k, v in candidate.params.items())
    out.print(f"\none candidate ({chosen}):\n", markup=False)
    out.print(candidate.source, markup=False)


def _summarise(run: Run) -> None:
    from tuner.summary import format_summary, summary

    out.print(format_summary(summary(run)), markup=False)
    out.print(f"report: {run.report_path}\nrun:    {run.path}", markup=False)


def _print_verdict(check: Check) -> None:
    for probe in check.probes[:3]:
        out.print(
            f"  {probe.probe}: rms {probe.rms_rel:.2e}, max {probe.max_abs:.2e}"
            f" (PyTorch's own {probe.baseline_rms_rel:.2e}, {probe.baseline_max_abs:.2e})",
            markup=False,
        )
    if check.is_accepted:
        out.print(f"accepted: {len(check.probes)} probes, accuracy class {check.accuracy}")
    else:
        out.print(f"rejected: {check.reason}", markup=False)


class _Plain:
    """The view where the output is no terminal: one line an event."""

    def __init__(self) -> None:
        self.start_s = time.monotonic()
        self.run: Run | None = None
        self.best_us: float | None = None
        self.budget: Any = None

    def on_plan(self, planned: Planned) -> None:
        self.budget = planned.config.search
        space = planned.space
        self.line(
            f"{planned.family.title} on {planned.device.name}, accuracy"
            f" {planned.config.accuracy.label}: {space.num_feasible} feasible configurations"
            f" of {space.num_cartesian} combinations"
        )

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

    def on_stage(self, text: str) -> None:
        self.line(text)

    def on_probe(self, result: ProbeResult) -> None:
        if not result.is_accepted:
            self.line(f"  probe {result.probe}: {result.reason}")

    def on_finalist(self, entry: Finalist) -> None:
        self.line(_finalist_line(entry))

    def line(self, text: str) -> None:
        out.print(f"{time.monotonic() - self.start_s:7.1f}s  {text}", markup=False)

    def _improve(self, trial: Trial) -> None:
        latency_us = trial.outcome.latency_us
        if latency_us is not None:
            self.best_us = min(self.best_us or latency_us, latency_us)


class _Screen(_Plain):
    """The live view of a terminal: the latest trials, the best, what is left."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self.live = live
        self.rows: list[str] = []
        self.best: Trial | None = None
        self.num_trials = 0
        self.num_building = 0
        self.elapsed_s = 0.0
        self.stage = ""

    def on_trial(self, trial: Trial, num_building: int) -> None:
        is_better = trial.outcome.latency_us is not None and (
            self.best_us is None or trial.outcome.latency_us < self.best_us
        )
        self._improve(trial)
        self.best = trial if is_better else self.best
        self.num_trials, self.num_building = trial.number + 1, num_building
        self.elapsed_s = trial.elapsed_s
        self.rows = [*self.rows, _trial_line(trial)][-SHOWN_TRIALS:]
        self._draw()

    def on_stage(self, text: str) -> None:
        self.stage = text
        self._draw()

    def line(self, text: str) -> None:
        self.live.console.print(text, markup=False)

    def _draw(self) -> None:
        status = Table.grid(padding=(0, 3))
        left_s = max(0.0, self.budget.timeout_s - self.elapsed_s) if self.budget else 0.0
        best = _trial_line(self.best) if self.best else "none yet"
        status.add_row(
            f"trials {self.num_trials} of {self.budget.trials if self.budget else '?'}",
            f"time left {left_s:.0f} s",
            f"builds ahead {self.num_building}",
        )
        rows = [Text(row, overflow="ellipsis", no_wrap=True) for row in self.rows]
        self.live.update(
            Group(
                *rows,
                Text(f"best  {best}", style="bold", overflow="ellipsis", no_wrap=True),
                status,
                Text(self.stage, style="dim", overflow="ellipsis", no_wrap=True),
            )
        )


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
    return f"{text}: {outcome.reason.splitlines()[0]}" if outcome.reason else text


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
def _view(was_stopped: Callable[[], bool] = lambda: False) -> Iterator[Any]:
    """Yield what shows progress: live in a terminal, plain lines elsewhere."""
    from tuner.tuning import Observer

    view: Any = None
    try:
        if not out.is_terminal:
            view = type("View", (_Plain, Observer), {})()
            yield view
            return
        with Live(console=out, refresh_per_second=8, transient=True) as live:
            view = type("View", (_Screen, Observer), {})(live)
            yield view
    except KeyboardInterrupt as interrupt:
        raise _Interrupted(_go_on(view.run if view else None)) from interrupt
    except NothingCorrectError as error:  # since there was no time for it
        if not was_stopped():
            raise
        raise _Interrupted(f"{error}\n{_go_on(view.run)}") from error


def _go_on(run: Run | None) -> str:
    return f"interrupted\n  next: tune --resume {run.path}" if run else "interrupted"


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; a second one ends at once."""
    pressed: list[float] = []

    def on_signal(number: int, frame: object) -> None:
        pressed.append(time.monotonic())
        if len(pressed) > 1:
            raise KeyboardInterrupt
        err.print(
            "stopping the search after the trial in flight; what was found is proved and "
            "exported; Ctrl-C again stops at once"
        )

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """Run the command line; every failure of ours is a message and an exit code."""
    try:
        app(standalone_mode=True)
    except NothingCorrectError as error:
        err.print(f"error: {error}", markup=False)
        sys.exit(error.exit_code)
    except TunerError as error:
        lines = [f"error: {line}" for line in getattr(error, "problems", [str(error)])]
        err.print("\n".join(lines), markup=False)
        sys.exit(error.exit_code)
    except _Interrupted as interrupted:
        err.print(str(interrupted), markup=False)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(INTERRUPTED)
