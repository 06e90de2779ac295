"""`tune`: arguments, the live view, exit codes. What is shown is in `terminal`.

Exit codes: 0 done, or nothing to gain; 1 nothing correct found, or a file is rejected; 2 the
user's files or arguments; 3 toolchain, device, disk, or a locked run; 130 interrupted.

The first Ctrl-C ends the search: the best candidates until then are verified and exported, and
the exit code is 130 all the same. The second ends at once; `tune --resume` goes on in both cases.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from tuner.command import many, options, reading
from tuner.command.streams import is_unwritable, print_no_more, usable_streams
from tuner.command.terminal import (
    INTERRUPTED,
    Interrupted,
    err,
    go_on,
    interruptible,
    out,
    print_either,
    print_findings,
    print_json,
    print_nothing,
    print_plan,
    print_points,
    print_start,
    print_summary,
    print_verdict,
    watching,
)
from tuner.errors import (
    InputError,
    NothingCorrectError,
    NothingToGainError,
    TunerError,
    input_errors,
)  # fmt: skip
from tuner.machine.host import has_many_cores
from tuner.machine.platforms import see_first_gpu

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="tune",
    help="Tune kernel templates for a PyTorch module; export the fastest one that is right.",
    epilog=(
        "Ctrl-C ends the search; what was found is still verified and exported. Twice: at once. "
        "Exit codes: 0 done, or nothing to gain; 1 nothing correct, or a file is rejected; "
        "2 your files or arguments; 3 toolchain, device, disk, or a locked run; 130 interrupted."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def tune(
    context: typer.Context,
    config: options.ConfigOption = None,
    module: options.ModuleOption = None,
    mode: options.ModeOption = None,
    rewrites: options.RewritesOption = None,
    match: options.MatchOption = None,
    batch: options.BatchOption = None,
    resume: options.ResumeOption = None,
    time: options.TimeOption = None,
    effort: options.EffortOption = None,
    trials: options.TrialsOption = None,
    timeout: options.TimeoutOption = None,
    seed: options.SeedOption = None,
    device: options.DeviceOption = None,
    devices: options.DevicesOption = None,
    cluster: options.ClusterOption = None,
    certificate: options.CertificateOption = None,
    accuracy: options.AccuracyOption = None,
    workloads: options.WorkloadsOption = None,
    sampler: options.SamplerOption = None,
    runs_dir: options.RunsDirOption = Path("runs"),
    dry_run: options.DryRunOption = False,
    force: options.ForceOption = False,
    record: options.RecordOption = False,
    any_machine: options.AnyMachineOption = False,
    json: options.JsonOption = False,
) -> None:
    """Tune a module or a config, or resume a run."""
    if context.invoked_subcommand is not None:
        return
    if sum(given is not None for given in (config, module, resume)) != 1:
        raise InputError("expected one of FILE.py, --config X.yaml, --resume RUN; see --help")
    if devices is not None and cluster is not None:
        raise InputError("expected --devices of this host, or --cluster, not both")
    chosen: dict[str, Any] = {"rewrites": rewrites, "match": match, "batch": batch}
    option = "dry-run" if dry_run else next(filter(chosen.get, chosen), "")
    if resume is not None and option:
        raise InputError(f"--{option} goes with --config, not with --resume\n  next: tune --help")
    is_first = devices is None and cluster is None and device in (None, "auto", "cuda", "cuda:0")
    if module is not None and is_first:
        see_first_gpu()  # before any process is started
    if module is not None and has_many_cores():
        from tuner.evaluate.contender import import_ahead

        import_ahead()  # PyTorch, while this process imports the rest
    from tuner.config.quantities import absolute_workloads
    from tuner.config.run_config import load_config
    from tuner.planning.planning import require_overrides
    from tuner.session import tuning

    with input_errors("--workloads"):
        data = workloads and absolute_workloads(workloads)
    overrides = {
        "time": time, "effort": effort, "trials": trials, "timeout": timeout, "seed": seed,
        "device": device, "mode": mode, "accuracy": accuracy, "sampler": sampler, "batch": batch,
        "workloads": data,
    }  # fmt: skip
    given: dict[str, str | bool] = {k: v for k, v in overrides.items() if v is not None}
    if module is not None:
        require_overrides({k: v for k, v in given.items() if k != "batch"})
    with watching(is_json=json) as first:
        if module is not None:
            config = tuning.derive_operator(module, first, mode=mode, **chosen).config
        elif config is not None:
            config = tuning.derive_config(config, first, mode=mode, **chosen)
    if config is not None:
        if record:  # a resumed run remembers it
            given["stop_slow"] = False
        loaded = load_config(config, given)
        if dry_run:
            planned = tuning.plan(loaded, may_assume=True)
            with watching(is_json=json, since=first) as view:
                gain, sources = tuning.preview(planned, view)
            print_plan(planned, is_json=json, gain=gain, sources=sources)
            return
    how: Any = {
        "overrides": given, "verifies": not record, "devices": devices, "cluster": cluster,
        "certificate": certificate,
    }  # fmt: skip
    with interruptible() as stop, watching(stop, is_json=json, since=first) as view:
        how |= {"observer": view, "should_stop": stop}
        if config is not None:
            command = shlex.join(["tune", *sys.argv[1:]])
            run = tuning.tune(loaded, runs_dir=runs_dir, command=command, force=force, **how)
        else:
            assert resume is not None
            run = tuning.resume(resume, may_move=any_machine, **how)
    print_summary(run, is_json=json)
    if stop():
        raise Interrupted(go_on(run))
    if record:
        return
    result = run.result()
    if result is None or result.exported is None or not result.exported.check.is_accepted:
        raise typer.Exit(1)  # the summary says why the exported file was rejected


@app.command()
def export(
    run: options.RunArgument,
    trial: Annotated[
        int | None, typer.Option(help="A trial's number; the winner's if none.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file.")] = None,
    json: options.JsonOption = False,
) -> None:
    """Write a trial of a run as a standalone module, and verify the file."""
    from tuner.session import tuning

    with watching(is_json=json) as view:
        path, check = tuning.export_trial(run, trial=trial, output=output, observer=view)
    if json:
        print_json({"path": str(path), "check": check})
    else:
        print_verdict(check)
        out.print(f"{'written' if check.is_accepted else 'put aside'}: {path}", markup=False)
    if not check.is_accepted:
        raise typer.Exit(1)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A Python file that holds ModelNew.")],
    reference: Annotated[
        Path | None, typer.Option("--reference", help="A KernelBench-format file.")
    ] = None,
    certificate: Annotated[
        bool, typer.Option("--certificate", help="Repeat what the file's own certificate claims.")
    ] = False,
    accuracy: options.AccuracyOption = None,
    workloads: options.ClaimedOption = None,
    mode: options.ModeOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    timeout: Annotated[str, typer.Option(help="For one call of the module.")] = "30s",
    strict: Annotated[
        bool, typer.Option("--strict", help="Reject what is right but no drop-in.")
    ] = False,
    json: options.JsonOption = False,
) -> None:
    """Give the verdict on anybody's ModelNew: 0 accepted, 1 rejected, 2 unusable arguments.

    Right: it computes what the reference computes as it is configured, forward and backward, in
    every mode, on all that is asked. Drop-in: it also does what the
    reference's class could be asked. What it refuses aloud there is listed as a difference.

    With --certificate: 0 when all that it claims still holds here, 1 when something does not or
    cannot be checked here. Without --reference only references installed with the tuner are used.
    """
    from tuner.config.quantities import (
        by_name,
        parse_accuracy,
        parse_device,
        parse_duration,
        parse_mode,
        parse_workloads,
    )
    from tuner.session import tuning

    with input_errors():
        chosen = parse_accuracy(accuracy) if accuracy else None
        checked_device = parse_device(device)
        timeout_s = parse_duration(timeout)
        chosen_mode = parse_mode(mode or "as_given")
        named = by_name(parse_workloads(workloads), Path()) if workloads else None
    if certificate:
        if chosen is not None:
            raise InputError("--accuracy: the certificate names its own accuracy class")
        if mode is not None:
            raise InputError("--mode: the certificate names its own mode")
        with watching(is_json=json) as view:
            rechecked = tuning.verify_certificate(
                file, reference=reference, device=checked_device, timeout_s=timeout_s,
                workloads=named, observer=view,
            )  # fmt: skip
        print_either(rechecked, print_points, is_json=json)
        raise typer.Exit(0 if rechecked.holds else 1)
    if named is not None:
        raise InputError("--workloads: without --certificate nothing is timed")
    if reference is None:
        raise InputError(
            "Missing option '--reference': a KernelBench-format file\n"
            "  next: name one, or --certificate for a file that this tuner exported"
        )
    with watching(is_json=json) as view:
        check = tuning.verify(
            file, reference, accuracy=chosen, device=checked_device, timeout_s=timeout_s,
            mode=chosen_mode, observer=view,
        )  # fmt: skip
    check = check.strictly() if strict else check
    print_either(check, print_verdict, is_json=json)
    if not check.is_accepted:
        raise typer.Exit(1)


@app.command()
def new(
    file: Annotated[Path, typer.Argument(help="A file with a Model.")],
    task: options.TaskOption = None,
    mode: options.ModeOption = None,
    rewrites: options.RewritesOption = None,
    output: options.FolderOption = None,
    json: options.JsonOption = False,
) -> None:
    """Write an operator's folder in which one task of a module is yours to write by hand."""
    from tuner.session import tuning

    with watching(is_json=json) as view:
        made = tuning.start_by_hand(file, task, output, view, mode=mode, rewrites=rewrites)
    print_either(made, print_start, is_json=json)


app.add_typer(many.cluster, name="cluster")
ELSEWHERE: tuple[Callable[..., None], ...] = (
    many.worker, many.campaign, reading.report, reading.runs, reading.compare, reading.replay,
)  # fmt: skip
for command in ELSEWHERE:
    app.command()(command)


@app.command()
def dashboard(
    folder: Annotated[Path, typer.Argument(help="A folder of runs.")] = Path("runs"),
    configs: Annotated[
        Path | None,
        typer.Option("--configs", help="A folder whose configs may be started from the page."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of 127.0.0.1; 0 takes any that is free.")
    ] = None,
) -> None:
    """Show the runs in a browser, live; the printed address holds the token of this start."""
    from tuner.review.serving import serve

    def ready(address: str) -> None:
        out.print(f"runs of {folder}; open (only you: the address holds the key)", markup=False)
        if not folder.is_dir():
            out.print("  there is no such folder yet: its runs are shown as they begin")
        out.print(f"  {address}\nCtrl-C ends it", markup=False)

    stopped = serve(folder, configs=configs, port=port, on_ready=ready)
    if stopped:
        out.print(f"{stopped} run was asked to stop; it verifies what it found and ends by itself")


@app.command()
def doctor(json: options.JsonOption = False) -> None:
    """Say what this machine can build and run, and what to install for the rest."""
    from tuner.machine.doctor import doctor as findings

    found = findings()
    print_either(found, print_findings, is_json=json)
    needed = [f for f in found if f.name in ("Python headers", "C++ compiler")]
    raise typer.Exit(0 if all(finding.is_ok for finding in needed) else 3)


def _option_for(word: str) -> str:
    """Return what a word stands behind that names no command: a config, or a module's file."""
    if word.endswith((".yaml", ".yml")):
        return "--config"
    return "--module" if _is_module(word) else ""


def _is_module(word: str) -> bool:
    """Whether a word is the name of a module's file; a folder is told that it is none."""
    commands = {
        "cluster",
        *(c.name or getattr(c.callback, "__name__", "") for c in app.registered_commands),
    }
    return word.endswith(".py") or (word not in commands and Path(word).is_dir())


def main() -> None:
    """Run the command line; every failure of ours is a message and an exit code."""
    usable_streams()
    at = options.place_of_file(sys.argv, app)
    option = _option_for(sys.argv[at]) if at else ""
    try:
        if option and any(map(_option_for, sys.argv[at + 1 : at + 2])):
            raise InputError(
                f"expected one file, got {sys.argv[at]} and {sys.argv[at + 1]}\n"
                "  next: tune campaign FOLDER tunes all modules and configs of a folder"
            )
        if option:
            sys.argv.insert(at, option)
        app(standalone_mode=True)
    except NothingToGainError as error:
        print_nothing(error, is_json="--json" in sys.argv)
    except NothingCorrectError as error:
        err.print(f"error: {error}", markup=False)
        sys.exit(error.exit_code)
    except TunerError as error:
        lines = [f"error: {line}" for line in getattr(error, "problems", [str(error)])]
        err.print("\n".join(lines), markup=False)
        sys.exit(error.exit_code)
    except Interrupted as interrupted:
        err.print(str(interrupted), markup=False)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        print_no_more()
        sys.exit(INTERRUPTED)
    except OSError as error:
        if not is_unwritable(error):
            raise
        print_no_more()
        err.print(f"error: what is printed cannot be written: {error.strerror}", markup=False)
        sys.exit(3)


def run() -> None:
    """Be the command `tune`: as `main`, but end at once when all is said and closed.

    Python's own end takes PyTorch apart object by object, for half a second and more, and waits
    for threads that wait for processes which die with this one.
    """
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    if not (code is None or isinstance(code, int)):
        sys.exit(str(code))
    atexit._run_exitfuncs()
    with suppress(OSError):  # of a pipe that nobody reads
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)
