"""Wire a config into a run: what `from tuner import ...` offers and the command line calls.

plan(config)            what would be searched: the family, the device, the feasible set
tune(config)            search, prove, export, report; returns the Run
resume(run)             go on with an interrupted run
export_trial(run)       write one trial as a standalone file, and prove it
verify(file, reference) the verdict on anybody's ModelNew
verify_certificate(file) whether what a file's certificate claims still holds
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tuner.config.run_config import RunConfig
from tuner.errors import InputError, StorageError
from tuner.planning import Observer, Planned, config_of, environment_of, plan, toolchain_of
from tuner.proving import export_trial, verify, verify_certificate
from tuner.run import Run, create_run, is_locked, open_run
from tuner.session import Session
from tuner.trial import Value

__all__ = [
    "Observer",
    "Planned",
    "export_trial",
    "plan",
    "resume",
    "tune",
    "verify",
    "verify_certificate",
]

DEFAULT_RUNS_DIR = Path("runs")


def tune(
    config: RunConfig,
    *,
    runs_dir: Path = DEFAULT_RUNS_DIR,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    command: str = "",
    overrides: Mapping[str, Value] | None = None,
    proves: bool = True,
) -> Run:
    """Tune: search, prove the finalists, export the winner, write the report.

    Args:
        config: as `load_config` gives it.
        runs_dir: where the run directory is made.
        observer: is told what happens.
        should_stop: asked between trials; True ends the search, and the rest follows.
        command: how to repeat it, for the record.
        overrides: what `config` changes in its file, so that `resume` changes it too.
        proves: False ends after the search, with nothing proved or exported; `resume` can do
            both later.

    Returns:
        The run; `run.result()` says what was found, None where nothing was to be proved.

    Raises:
        InputError, MachineError: as `errors` says; what was found until then is in the run.
        NothingCorrectError: no candidate was correct.
    """
    observer = observer or Observer()
    planned = plan(config)
    observer.on_plan(planned)
    toolchain = toolchain_of(planned)
    environment = environment_of(planned, toolchain, command, overrides or {})
    run = create_run(runs_dir, planned.family.name, planned.device.name, config.text, environment)
    session = Session(planned, toolchain, run, observer, should_stop, proves=proves)
    return session.work(environment)


def resume(
    path: Path,
    *,
    overrides: Mapping[str, Value] | None = None,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    may_move: bool = False,
    proves: bool = True,
) -> Run:
    """Go on with a run where it stopped.

    Args:
        path: the run directory.
        overrides: new totals of `trials` or `timeout`; nothing else may change.
        observer: is told what happens.
        should_stop: as for `tune`.
        may_move: go on although the device or the toolchain is another one.
        proves: as for `tune`.

    Raises:
        InputError: something else is to be overridden.
        StorageError: not a run, or made on another device or with another toolchain.
        RunLockedError: another process works on it.
    """
    given = dict(overrides or {})
    if set(given) - {"trials", "timeout"}:
        raise InputError(
            f"--resume: {', '.join(sorted(set(given) - {'trials', 'timeout'}))} cannot change "
            "within a run\n  next: start a new run; --trials and --timeout may change"
        )
    run = open_run(path)
    if is_locked(run):  # told at once, not when a process has imported PyTorch for the plan
        with run.locked():
            pass
    environment = run.environment()
    planned = plan(config_of(run, given))
    toolchain = toolchain_of(planned)
    now = environment_of(planned, toolchain, environment["command"], {})
    moved = [
        f"{what}: {environment[what]} then, {now[what]} now"
        for what in ("device_name", "toolchain")
        if environment[what] != now[what]
    ]
    if moved and not may_move:
        raise StorageError(
            f"{path}: this is another machine than the run's\n  "
            + "\n  ".join(moved)
            + "\n  next: `--any-machine` to mix their times, or start a new run"
        )
    observer = observer or Observer()
    observer.on_plan(planned)
    # The new totals hold from now on, also when this session is interrupted.
    environment["overrides"] = {**environment.get("overrides", {}), **given}
    session = Session(planned, toolchain, run, observer, should_stop, proves=proves)
    return session.work(environment)
