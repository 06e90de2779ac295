"""Wire a config into a run: what `from tuner import ...` offers and the command line calls.

plan(config)            what would be searched: the family, the device, the feasible set
tune(config)            search, verify, export, report; returns the Run
resume(run)             go on with an interrupted run
export_trial(run)       write one trial as a standalone file, and verify it
verify(file, reference) the verdict on anybody's ModelNew
verify_certificate(file) whether what a file's certificate claims still holds
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from tuner.capture.outline import MODULE_FILE
from tuner.config.run_config import RunConfig, config_of
from tuner.environment import Environment
from tuner.errors import InputError, NothingCorrectError, StorageError
from tuner.evaluate.contender import import_ahead
from tuner.kernel.builder import Builder
from tuner.kernel.toolchain import Toolchain
from tuner.machine.doctor import tuner_version
from tuner.planning.deriving import (
    derive_config,
    derive_operator,
    edited_since,
    start_by_hand,
    write_sources,
)
from tuner.planning.earlier import Earlier, earlier_of, starts_of
from tuner.planning.gaining import ROUNDING, measured, worth_searching
from tuner.planning.observing import Observer, Progress
from tuner.planning.own_steps import with_own_steps
from tuner.planning.planning import Planned, plan
from tuner.problem.timed_data import other_tensors
from tuner.review.gain import Gain
from tuner.run import Run, create_run, is_locked, open_run
from tuner.search.task_index import known_runs, versions_of
from tuner.session.building import begin, builder_of
from tuner.session.fleets import Source, source_of
from tuner.session.session import Session
from tuner.session.sizes import (
    beside_of,
    followed,
    planned_sizes,
    sources_beside,
    suggested,
    tuned_of,
    with_share,
)
from tuner.storage import write_whole
from tuner.trial import Value, from_json, to_json
from tuner.verification.together import Tuned
from tuner.verification.verifying import export_trial, verify, verify_certificate

__all__ = [
    "Observer",
    "Planned",
    "Progress",
    "derive_config",
    "derive_operator",
    "export_trial",
    "plan",
    "preview",
    "resume",
    "start_by_hand",
    "tune",
    "verify",
    "verify_certificate",
]

DEFAULT_RUNS_DIR = Path("runs")
MAY_CHANGE = {"trials", "timeout", "time", "effort"}  # within a run


def tune(
    config: RunConfig,
    *,
    runs_dir: Path = DEFAULT_RUNS_DIR,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    command: str = "",
    overrides: Mapping[str, Value] | None = None,
    verifies: bool = True,
    force: bool = False,
    devices: str | None = None,
    cluster: str | None = None,
    certificate: Path | None = None,
) -> Run:
    """Tune: search, verify the finalists' files, write the report.

    A config with several values of a size has a run of each, and the last one has the file of all.

    Args:
        config: as `load_config` gives it.
        runs_dir: where the run directory is made.
        observer: what happens is reported to it.
        should_stop: asked between trials; True ends the search, and the rest follows.
        command: how to repeat it, for the record.
        overrides: what `config` changes in its file, so that `resume` changes it too.
        verifies: False ends after the search, with nothing verified or exported; `resume` can
            do both later.
        force: search an operator that was derived from a module also where PyTorch is as fast as
            the device allows.
        devices: of this host, `all` or numbers such as `0,1`; None for the config's one.
        cluster: address of a cluster whose devices screen candidates in place of this host's.
        certificate: the tuner's of that cluster; where `tune cluster start` writes it if None.

    Returns:
        The run, of several the last; `run.result()` says what was found, None where nothing was
        to be verified.

    Raises:
        InputError, MachineError: as `errors` says; what was found until then is in the run.
        NothingCorrectError: no candidate was correct.
        NothingToGainError: nothing was searched, since nothing could be gained.
    """
    started_s = monotonic()
    observer = observer or Observer()
    with source_of(config.device, devices, cluster, certificate) as (source, device):
        config = config.model_copy(update={"device": device})
        plans = planned_sizes(config, lambda each: _planned(each, observer, verifies))
        sessions = _Sessions(
            observer, should_stop, runs_dir, source, command, overrides or {}, verifies, force
        )
        return sessions.each(plans, [], started_s)


@dataclass(frozen=True, slots=True)
class _Sessions:
    """The sessions of one command: one, or one for each of several sizes."""

    observer: Observer
    should_stop: Callable[[], bool]
    runs_dir: Path
    source: Source
    command: str
    overrides: Mapping[str, Value]
    verifies: bool
    force: bool

    def each(self, plans: Sequence[Planned], beside: Sequence[Tuned], started_s: float) -> Run:
        """Tune one size after the other, the smallest first; return the last run.

        Args:
            plans: of the sizes to go.
            beside: those that were tuned before.
            started_s: when the user began to wait, by `time.monotonic`.
        """
        time_s = plans[0].config.time_s
        deadline_s = None if time_s is None else started_s + time_s
        found = [*beside]
        for place, planned in enumerate(plans):
            num_left = len(plans) - place
            if planned.config.listed is not None:
                planned = with_share(planned, deadline_s, num_left)
                started_s = monotonic()
                size = f"size {len(found) + 1} of {len(found) + num_left}"
                self.observer.on_stage(f"{size}: {Tuned(planned, None).words}")
            self.observer.on_plan(planned)
            run = self._one(planned, found, started_s, is_last=num_left == 1)
            if num_left == 1 or self.should_stop():
                return run
            found.append(tuned_of(run, planned))
        raise AssertionError("there is a plan, and the last one returns")

    def _one(
        self, planned: Planned, beside: Sequence[Tuned], started_s: float, *, is_last: bool
    ) -> Run:
        toolchain = planned.find_toolchain()
        earlier = self._earlier(planned, toolchain)
        with ExitStack() as stack:
            builder = None
            if planned.outline is not None and not self.source.compiles_elsewhere:
                builder = stack.enter_context(builder_of(planned, toolchain))
                begin(builder, planned, starts_of(planned, earlier))
            return self._built(planned, toolchain, builder, earlier, beside, started_s, is_last)

    def _earlier(self, planned: Planned, toolchain: Toolchain) -> Earlier:
        if planned.outline is None and planned.config.effort != "quick":
            return Earlier()
        return earlier_of(
            planned, versions_of(planned.environment, toolchain.label), self.runs_dir
        )

    def _built(
        self,
        planned: Planned,
        toolchain: Toolchain,
        builder: Builder | None,
        earlier: Earlier,
        beside: Sequence[Tuned],
        started_s: float,
        is_last: bool,
    ) -> Run:
        """Tune one size; of a module compilers have begun with what the search starts from."""
        listed = planned.config.listed
        force = self.force or not self.verifies or listed is not None
        module = worth_searching(planned, self.observer, force=force)
        if module is not None and module.gain.facts:
            before, planned = planned, planned.knowing(module.gain.facts)
            for said in planned.warnings[len(before.warnings) :]:
                self.observer.on_stage(f"warning: {said}")
            earlier = self._earlier(planned, toolchain)  # of what is feasible now
        overrides = dict(self.overrides)
        if listed is not None:
            overrides["size"] = planned.config.problem.sizes[listed.name]
            earlier = suggested(planned, beside, earlier)
        environment = _environment(planned, toolchain, self.command, overrides, earlier)
        environment = replace(environment, beside=tuple(one.run for one in beside))
        config = planned.config
        run = create_run(
            self.runs_dir, planned.family.name, planned.device.name, config.text, environment
        )
        if module is not None:
            write_whole(run.path / MODULE_FILE, to_json(module))
        session = Session(
            planned, toolchain, run, self.observer, self.should_stop, verifies=self.verifies,
            started_s=started_s, earlier=earlier, source=self.source,
            beside=beside if is_last else (),
            sources=sources_beside(planned, beside, self.runs_dir), builder=builder,
        )  # fmt: skip
        try:
            session.work()
        except NothingCorrectError as error:
            if is_last:
                raise
            self.observer.on_stage(f"warning: no kernel for this size: {error}")
        known_runs(self.runs_dir)  # what this run found is known before the next one starts
        return run


def preview(planned: Planned, observer: Observer) -> tuple[Gain | None, dict[str, Path]]:
    """Return what could be gained, and where a source of each template stands.

    Of an operator that was derived from a module; of any other nothing. PyTorch is timed.
    """
    if planned.outline is None:
        return None, {}
    return measured(planned, planned.outline, observer), write_sources(planned)


def _planned(config: RunConfig, observer: Observer, verifies: bool) -> Planned:
    """Plan, while the processes that will fork the checks' and the search's get ready.

    Where nothing is verified no file is written, whose steps of training would be derived.
    """
    import_ahead()
    observer.on_stage(f"{config.path}: asking for the device and the sizes")
    planned = plan(config)
    return with_own_steps(planned, observer) if verifies else planned


def _environment(
    planned: Planned,
    toolchain: Toolchain,
    command: str,
    overrides: Mapping[str, Value],
    earlier: Earlier,
) -> Environment:
    """Return what a new run records of the machine and of how it was started."""
    config, family = planned.config, planned.family
    sizes: dict[str, Value] = {**planned.facts, **planned.sizes}
    return Environment(
        tuner=tuner_version(),
        device=json.loads(to_json(planned.device)),
        device_name=planned.device.name,
        torch_name=planned.device.torch_name,
        facts=dict(planned.facts),
        machine=dict(planned.environment),
        toolchain=toolchain.label,
        op=family.name,
        title=family.op.title,
        sizes=dict(planned.sizes),
        accuracy=config.accuracy.label,
        mode=config.problem.mode,
        flops=_number(family.flops.evaluate(sizes)),
        bytes=_number(family.bytes.evaluate(sizes)),
        num_feasible=planned.space.num_feasible,
        num_cartesian=planned.space.num_cartesian,
        config_folder=str(config.base.resolve()),
        overrides=dict(overrides),
        tensors_sha256=dict(config.tensors_sha256),
        command=command or shlex.join(sys.argv),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        earlier=json.loads(to_json(earlier)),  # for `resume`, which asks the same
    )


def _number(value: Value) -> int | float:
    assert not isinstance(value, str), value  # the family's formulas are of sizes
    return value


def resume(
    path: Path,
    *,
    overrides: Mapping[str, Value] | None = None,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    may_move: bool = False,
    verifies: bool = True,
    devices: str | None = None,
    cluster: str | None = None,
    certificate: Path | None = None,
) -> Run:
    """Go on with a run where it stopped, and with the sizes that were to come after it.

    Args:
        path: the run directory.
        overrides: new totals of `trials` or `timeout`, another `effort`, and the `time` of this
            session; nothing else may change.
        observer: what happens is reported to it.
        should_stop: as for `tune`.
        may_move: go on although the device or the toolchain is another one.
        verifies: as for `tune`.
        devices: as for `tune`; they may be others than before.
        cluster: as for `tune`.
        certificate: as for `tune`.

    Raises:
        InputError: something else is to be overridden, or a file of tensors is another one now.
        StorageError: not a run, or made on another device or with another toolchain.
        RunLockedError: another process works on it.
    """
    started_s = monotonic()
    given = dict(overrides or {})
    if set(given) - MAY_CHANGE:
        raise InputError(
            f"--resume: {', '.join(sorted(set(given) - MAY_CHANGE))} cannot change "
            "within a run\n  next: start a new run; --trials, --timeout, --time and --effort may"
            " change"
        )
    run = open_run(path)
    if is_locked(run):  # said at once, not when a process has imported PyTorch for the plan
        with run.locked():
            pass
    environment = run.environment()
    observer = observer or Observer()
    config = config_of(run, given)
    for name, then in environment.tensors_sha256.items():
        if then != config.tensors_sha256.get(name):
            raise InputError(other_tensors(config.others[name]))
    with source_of(config.device, devices, cluster, certificate) as (source, device):
        config = config.model_copy(update={"device": device})
        plans = planned_sizes(config, lambda each: _planned(each, observer, verifies))
        listed = config.listed
        place = 0 if listed is None else listed.values.index(config.problem.sizes[listed.name])
        seen = {n: v for n, v in environment.facts.items() if n in ROUNDING.values()}
        planned = plans[place].knowing(seen)
        if (edited := edited_since(planned.reference)) is not None:
            text = f"{edited} was edited since; this run goes on with the module as it was"
            planned = replace(planned, warnings=(*planned.warnings, text))
        observer.on_plan(planned)
        toolchain = planned.find_toolchain()
        moved = [
            f"{what}: {then} then, {now} now"
            for what, then, now in (
                ("device_name", environment.device_name, planned.device.name),
                ("toolchain", environment.toolchain, toolchain.label),
            )
            if then != now
        ]
        if moved and not may_move:
            raise StorageError(
                f"{path}: this is another machine than the run's\n  "
                + "\n  ".join(moved)
                + "\n  next: `--any-machine` to mix their times, or start a new run"
            )
        beside = beside_of(environment.beside, plans, path.parent)
        further, one, now_s = plans[place + 1 :], planned, started_s
        if further and config.time_s is not None:
            one, now_s = with_share(one, started_s + config.time_s, 1 + len(further)), monotonic()
        session = Session(
            one, toolchain, run, observer, should_stop, verifies=verifies, started_s=now_s,
            earlier=from_json(Earlier, json.dumps(environment.earlier)), source=source,
            overrides=given, beside=() if further else beside,
            sources=sources_beside(planned, beside, path.parent),
        )  # fmt: skip
        session.work()
        if not further or should_stop():
            return run
        if name := followed(run):
            again = shlex.quote(str(path.parent / name))
            observer.on_stage(f"the next size was begun: tune --resume {again}")
            return run
        overrides = {**environment.overrides, **given}
        sessions = _Sessions(
            observer, should_stop, path.parent, source, environment.command, overrides, verifies,
            force=True,
        )  # fmt: skip
        return sessions.each(further, [*beside, tuned_of(run, planned)], started_s)
