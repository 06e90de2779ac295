"""Wire a config into a run: what `from tuner import ...` offers and the command line calls.

plan(config)            what would be searched: the family, the device, the feasible set
tune(config)            search, prove, export, report; returns the Run
resume(run)             go on with an interrupted run
export_trial(run)       write one trial as a standalone file, and prove it
verify(file, reference) the verdict on anybody's ModelNew
verify_certificate(file) whether what a file's certificate claims still holds
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from tuner.build import Builder
from tuner.cache import default_cache_dir
from tuner.certificate import Certificate, certify, read_certificate, whole_path
from tuner.config import RunConfig, check_names, load_config
from tuner.device import Device, known_device
from tuner.errors import (
    ConfigError,
    DeviceError,
    InputError,
    NothingCorrectError,
    StorageError,
    TunerError,
    WorkerError,
    did_you_mean,
)
from tuner.evaluate import (
    Contender,
    DeviceEvaluator,
    Prover,
    Race,
    Task,
    explained,
    finalist,
    least_us,
    new_worker,
)
from tuner.export import export_text, fallback_text
from tuner.measure import tie_set
from tuner.problem import Accuracy
from tuner.recorded import read_recording, to_t4
from tuner.repeat import Repeated, clocks_of, repeat, with_reference
from tuner.report import write_report
from tuner.run import Run, RunWriter, create_run, open_run, storage_errors, write_whole
from tuner.search import SearchBudget, StopRule, search
from tuner.space import SearchSpace
from tuner.template import Family, load_family
from tuner.toolchain import SOURCE_NAMES, Toolchain
from tuner.transfer import Source
from tuner.trial import (
    Build,
    Candidate,
    Check,
    Finalist,
    Measurement,
    Params,
    ProbeResult,
    Result,
    Status,
    Trial,
    Value,
    from_json,
    to_json,
)
from tuner.worker import JobFailed, WorkerCrashed, WorkerTimeout

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

MAX_CHECKED = 3  # times the finalists wanted: how many trials are put to all probes
MAX_LOOKED_AT = 500_000  # configurations of a space without a list, for the nearest to defaults
DEFAULT_RUNS_DIR = Path("runs")
DESCRIBE_S = 300.0  # importing PyTorch and the reference, and one call of it on the CPU


class Observer:
    """What happens during a run, told to whoever shows it; every method may be overridden."""

    def on_plan(self, planned: Planned) -> None:
        """The space is enumerated; nothing was compiled yet."""

    def on_run(self, run: Run, baseline: Measurement, trials: Sequence[Trial]) -> None:
        """The run directory exists, the baseline was timed; `trials` is what a resumed run has."""

    def on_trial(self, trial: Trial, num_building: int) -> None:
        """One more outcome is on disk."""

    def on_stage(self, text: str) -> None:
        """Something that takes a while begins."""

    def on_probe(self, result: ProbeResult) -> None:
        """A finalist or an export answered a probe."""

    def on_finalist(self, entry: Finalist) -> None:
        """A finalist was checked, or checked and raced."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What a config amounts to on a device."""

    config: RunConfig
    family: Family
    device: Device
    is_assumed: bool  # no such device here: its published facts stand in for it
    sizes: Mapping[str, int]
    facts: Mapping[str, Value]
    environment: Mapping[str, str]
    space: SearchSpace
    reference: Path
    screening_sizes: Sequence[Mapping[str, int]]  # of all that candidates are screened with

    @property
    def task(self) -> Task:
        """The problem as every process of the run needs it."""
        sizes = {**self.facts, **self.sizes}
        flops = float(self.family.flops.evaluate(sizes))
        num_bytes = float(self.family.bytes.evaluate(sizes))
        return Task.of(
            self.family,
            self.reference,
            self.config.problem.sizes,
            self.device.torch_name,
            self.config.accuracy,
            least_us(flops, num_bytes, self.device, self.config.accuracy),
        )

    def example(self) -> Candidate:
        """Render the first feasible configuration."""
        return self.family.render(self.space.feasible[0], self.facts)


# ---- planning -------------------------------------------------------------------------------


def plan(config: RunConfig, *, may_assume: bool = False) -> Planned:
    """Work out what a config amounts to: sizes, device facts, the feasible configurations.

    Args:
        config: as `load_config` gives it.
        may_assume: on a machine without a GPU, let a known GPU's facts stand in for it.

    Raises:
        InputError: the config, a template or the reference is wrong, or nothing is feasible.
        DeviceError: the device does not exist here.
    """
    family = load_family(config.problem.op, config.problem.templates)
    names = _template_names(config, family)
    varied = {p.name: p.values for p in config.space if p.name != "template"}
    reference = config.problem.reference or family.reference
    device, is_assumed, machine, screening = _describe(config, family, reference, may_assume)
    sizes = screening[0]
    facts: dict[str, Value] = dict(device.facts())
    used = {name for t in names for name in family.templates[t].parameters}
    check_names(config, sizes=list(sizes), facts=list(facts), parameters=sorted(used))
    space = SearchSpace.build(
        family.parameters(names, varied, {p.name: p.when for p in config.space if p.when}),
        [*family.constraints(names, varied), *config.constraints],
        {**facts, **sizes},
    )
    planned = Planned(
        config, family, device, is_assumed, sizes, facts, machine, space, reference, screening
    )
    for params in _first_of_each(space, family):  # a text that does not render is found now
        family.render(params, facts)
    return planned


def _stop(config: RunConfig) -> StopRule | None:
    """Return the config's rule for stopping early."""
    stop = config.search.stop
    return None if stop is None else StopRule(stop.within, stop.confidence)


def _sources(config: RunConfig) -> list[Source]:
    """Read the runs and recordings that the config starts from."""
    recordings = [read_recording(path) for path in config.search.warm_start]
    return [Source(r.name, r.space, r.latency_us) for r in recordings]


def _first_of_each(space: SearchSpace, family: Family) -> list[Params]:
    """Return, for each template with a feasible configuration, that nearest to its defaults.

    A search starts from them: their authors chose them, and every template gets its turn.
    """
    if space.is_listed:
        rows = space.rows()
    else:
        rows = space.rows(space.sample(MAX_LOOKED_AT, np.random.default_rng(0)))
    column = [parameter.name for parameter in space.parameters].index("template")
    nearest = []
    for digit, name in enumerate(space.parameters[column].values):
        own = rows[rows[:, column] == digit]
        if not len(own):
            continue
        defaults = family.templates[str(name)].filled({})
        distances = np.zeros(len(own), dtype=np.int64)
        for parameter, digits in zip(space.parameters, own.T, strict=True):
            differs = [defaults.get(parameter.name, value) != value for value in parameter.values]
            distances += np.array([*differs, False])[digits]  # the last: absent
        nearest.append(space.params_of(own[int(distances.argmin())]))
    return nearest


def _template_names(config: RunConfig, family: Family) -> list[str]:
    """Return the templates to search: those that the config lists, else all."""
    listed = next((p.values for p in config.space if p.name == "template"), None)
    names = [str(v) for v in listed] if listed else list(family.templates)
    unknown = [name for name in names if name not in family.templates]
    if unknown:
        known = sorted(family.templates)
        raise ConfigError(
            [
                config.problem_at(
                    "space.template",
                    f"{family.name} has no template {name!r}",
                    known=known,
                    hint=did_you_mean(name, known),
                )
                for name in unknown
            ]
        )
    return names


def _describe(
    config: RunConfig, family: Family, reference: Path, may_assume: bool
) -> tuple[Device, bool, dict[str, str], list[dict[str, int]]]:
    """Ask a child process for the device and the sizes; the parent imports no PyTorch.

    The sizes are the problem's own and then those of other batches that screening asks for.
    """
    is_assumed = False
    with new_worker("cpu", name="describe") as worker:
        try:
            found = worker.call("describe", {"device": config.device}, timeout_s=DESCRIBE_S).data
            device = from_json(Device, json.dumps(found["device"]))
        except JobFailed as failure:
            error = explained(failure)
            if not (may_assume and isinstance(error, DeviceError)):
                raise error from failure
            device, is_assumed, found = known_device(), True, {"environment": {}}
        task = Task.of(family, reference, config.problem.sizes, device.torch_name, config.accuracy)
        try:
            sizes = worker.call("sizes", task.payload(), timeout_s=DESCRIBE_S).data["screening"]
        except JobFailed as failure:
            raise explained(failure) from failure
    return device, is_assumed, found["environment"], sizes


# ---- running --------------------------------------------------------------------------------


def tune(
    config: RunConfig,
    *,
    runs_dir: Path = DEFAULT_RUNS_DIR,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    command: str = "",
    overrides: Mapping[str, Value] | None = None,
) -> Run:
    """Tune: search, prove the finalists, export the winner, write the report.

    Args:
        config: as `load_config` gives it.
        runs_dir: where the run directory is made.
        observer: is told what happens.
        should_stop: asked between trials; True ends the search, and the rest follows.
        command: how to repeat it, for the record.
        overrides: what `config` changes in its file, so that `resume` changes it too.

    Returns:
        The run; `run.result()` says what was found.

    Raises:
        InputError, MachineError: as `errors` says; what was found until then is in the run.
        NothingCorrectError: no candidate was correct.
    """
    observer = observer or Observer()
    planned = plan(config)
    observer.on_plan(planned)
    toolchain = _toolchain(planned)
    environment = _environment(planned, toolchain, command, overrides or {})
    run = create_run(runs_dir, planned.family.name, planned.device.name, config.text, environment)
    session = _Session(planned, toolchain, run, observer, should_stop)
    return session.work(environment)


def resume(
    path: Path,
    *,
    overrides: Mapping[str, Value] | None = None,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    may_move: bool = False,
) -> Run:
    """Go on with a run where it stopped.

    Args:
        path: the run directory.
        overrides: new totals of `trials` or `timeout`; nothing else may change.
        observer: is told what happens.
        should_stop: as for `tune`.
        may_move: go on although the device or the toolchain is another one.

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
    environment = run.environment()
    planned = plan(_config_of(run, given))
    toolchain = _toolchain(planned)
    now = _environment(planned, toolchain, environment["command"], {})
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
    return _Session(planned, toolchain, run, observer, should_stop).work(environment)


def _config_of(run: Run, overrides: Mapping[str, Value] | None = None) -> RunConfig:
    """Return a run's own config, with what its command line had changed."""
    environment = run.environment()
    changed = {**environment.get("overrides", {}), **(overrides or {})}
    return load_config(run.config_path, changed, base=Path(environment["config_folder"]))


class _Session:
    """One sitting on a run: from the first trial of it to the report."""

    def __init__(
        self,
        planned: Planned,
        toolchain: Toolchain,
        run: Run,
        observer: Observer,
        should_stop: Callable[[], bool],
    ) -> None:
        self.planned = planned
        self.toolchain = toolchain
        self.run = run
        self.observer = observer
        self.should_stop = should_stop
        self.trials = list(run.trials())

    def work(self, environment: dict[str, Any]) -> Run:
        """Search, prove, export, report."""
        with self.run.locked() as writer:
            self.trials = list(self.run.trials())  # after a half-written line was dropped
            with Builder(
                self.toolchain,
                default_cache_dir(),
                num_workers=_num_workers(self.planned),
                triton_sizes=self.planned.screening_sizes,
            ) as builder:
                try:
                    self._search(writer, builder, environment)
                    result = self._prove(writer, builder)
                    writer.write_result(result)
                except Exception:  # not Ctrl-C, which ends at once
                    with suppress(TunerError):  # a full disk, say: the first error is the one
                        self._report()
                    raise
                self._report()
        return self.run

    def _report(self) -> None:
        self.observer.on_stage("writing the report")
        t4 = to_t4(self.run.path.name, self.trials, self.run.environment())
        write_whole(self.run.path / "results.json", t4)
        write_report(self.run)

    def _search(self, writer: RunWriter, builder: Builder, environment: dict[str, Any]) -> None:
        planned, config = self.planned, self.planned.config
        self.observer.on_stage("preparing the probes and timing the baseline")
        evaluator = DeviceEvaluator(
            planned.family,
            planned.task,
            facts=planned.facts,
            device=planned.device,
            builder=builder,
            screen_s=config.measure.screen_s,
            max_noise=config.measure.max_noise,
            seed=config.search.seed,
            ahead=config.search.in_flight,
            num_workers=_num_workers(planned),
            keep=self._keep,
        )
        try:
            baseline = evaluator.start()
            environment |= {
                "baseline_us": baseline.latency_us,
                "baseline_noise": baseline.noise,
            }
            writer.write_text("environment.json", json.dumps(environment, indent=1))
            self.observer.on_run(self.run, baseline, self.trials)

            def record(trial: Trial) -> None:
                writer.append(trial)
                self.trials.append(trial)
                self.observer.on_trial(trial, evaluator.num_building)

            with storage_errors(self.run.journal_path):  # Optuna's own file
                why = search(
                    planned.space,
                    evaluator,
                    sampler=config.search.sampler,
                    seed=config.search.seed,
                    budget=SearchBudget(
                        config.search.trials, config.search.timeout_s, _stop(config)
                    ),
                    sources=_sources(config),
                    journal=self.run.journal_path,
                    previous=list(self.trials),
                    record=record,
                    first=_first_of_each(planned.space, planned.family),
                    should_stop=self.should_stop,
                )
            self.observer.on_stage(why)
        finally:
            evaluator.close()

    def _keep(self, candidate: Candidate, build: Build) -> None:
        """Keep what was compiled and what the compiler said."""
        folder = self.run.path / "candidates" / candidate.key
        if not folder.exists():
            write_whole(folder / SOURCE_NAMES[candidate.language], candidate.source)
            log = Path(build.log)
            text = log.read_text(errors="replace") if log.is_file() else build.error
            write_whole(folder / "log.txt", text)

    # ---- finalists ----------------------------------------------------------------------------

    def _prove(self, writer: RunWriter, builder: Builder) -> Result:
        """Check and race the finalists, export the winner, and prove the exported file."""
        prover = Prover(self.planned.task, seed=secrets.randbits(31))
        entries: list[Finalist] = []
        believed: dict[int, list[list[float]]] = {}
        while not believed:
            contenders = self._checked(prover, builder, entries)
            if not contenders:
                raise NothingCorrectError(_nothing_correct(self.trials, entries))
            with builder.paused():  # what was asked for ahead may still compile
                race = self._raced(prover, entries, contenders)
            for lane, number in enumerate(contenders, 1):
                assert race is not None
                place = next(i for i, e in enumerate(entries) if e.trial == number)
                entries[place] = finalist(number, entries[place].check, race, lane)
                self.observer.on_finalist(entries[place])
                if entries[place].check.is_accepted:
                    believed[number] = race[lane]
        ties = tie_set(believed)
        winner = ties[0]
        raced = next(entry for entry in entries if entry.trial == winner)
        exported, notes = raced, list[str]()
        if not _is_slower(raced):
            exported, notes = self._export(self._trial(winner), raced)
        if is_fallback := _is_slower(exported):
            exported, notes = self._fall_back(exported)
        return Result(
            winner=winner,
            finalists=tuple(entries),
            ties=tuple(ties),
            exported=exported,
            export_path=str(self.run.export_path),
            notes=tuple(notes),
            is_fallback=is_fallback,
        )

    def _raced(
        self, prover: Prover, entries: list[Finalist], contenders: dict[int, Contender]
    ) -> Race | None:
        """Race; who crashes or hangs is taken out, and the others start again, if any is left."""
        measure = self.planned.config.measure
        while contenders:
            self.observer.on_stage(f"racing {len(contenders)} finalists against the baseline")
            try:
                return prover.race(
                    list(contenders.values()),
                    num_processes=measure.num_processes,
                    seconds=measure.finalists_s,
                )
            except WorkerError as error:
                name, reason = _blamed(error, [c.name for c in contenders.values()])
                number = next(n for n, c in contenders.items() if c.name == name)
                del contenders[number]
                place = next(i for i, e in enumerate(entries) if e.trial == number)
                check = replace(entries[place].check, is_accepted=False, reason=reason)
                entries[place] = finalist(number, check, None, 0)
                self.observer.on_finalist(entries[place])
        return None

    def _checked(
        self, prover: Prover, builder: Builder, entries: list[Finalist]
    ) -> dict[int, Contender]:
        """Put all probes to the best trials until enough of them are accepted.

        `entries` are those that had their turn; more are added.

        What one probe rejects it mostly rejects in its likes, too, so those of another structure
        get their turn first.
        """
        wanted = self.planned.config.measure.num_finalists
        contenders: dict[int, Contender] = {}
        had = {entry.trial for entry in entries}
        rejected = {_structure(self._trial(number)) for number in had}
        left = [trial for trial in _ranked(self.trials) if trial.number not in had]
        while left and len(entries) < MAX_CHECKED * wanted and len(contenders) < wanted:
            trial = next((t for t in left if _structure(t) not in rejected), left[0])
            left.remove(trial)
            self.observer.on_stage(f"checking trial {trial.number} on every probe")
            candidate = self.planned.family.render(trial.params, self.planned.facts)
            build = builder.submit(candidate).result()
            contender = Contender.of_candidate(
                candidate, build, self.planned.family.model_new, builder.environment
            )
            contender = replace(contender, name=f"trial {trial.number}")
            check = prover.check(contender, self.observer.on_probe)
            entries.append(finalist(trial.number, check, None, 0))
            self.observer.on_finalist(entries[-1])
            if check.is_accepted:
                contenders[trial.number] = contender
            else:
                rejected.add(_structure(trial))
        return contenders

    def _trial(self, number: int) -> Trial:
        return next(trial for trial in self.trials if trial.number == number)

    def _export(self, trial: Trial, raced: Finalist) -> tuple[Finalist, list[str]]:
        """Write the winner's file and prove it."""
        exported = _proved_export(
            self.planned, self.toolchain, trial, raced, self.run.export_path, self.run.path,
            self.observer,
        )  # fmt: skip
        if not exported.check.is_accepted:
            return exported, [f"the exported file was rejected: {exported.check.reason}"]
        return exported, _compared(raced, exported)

    def _fall_back(self, slower: Finalist) -> tuple[Finalist, list[str]]:
        """Export the reference's own modules in place of a winner that is slower; prove them.

        The winner was the best of all raced, a template around PyTorch's own product included
        where the space has one.
        """
        assert slower.interval is not None
        self.observer.on_stage("slower than PyTorch: exporting PyTorch's own modules instead")
        found = f"{slower.interval.speedup:.3f}x [{slower.interval.low:.3f}, "
        found += f"{slower.interval.high:.3f}]"
        again = f"tune export {self.run.path} --trial {slower.trial}"
        text = fallback_text(
            self.planned.family,
            reference=self.planned.reference.read_text(encoding="utf-8"),
            sizes=self.planned.config.problem.sizes,
            provenance=[f"The best kernel, trial {slower.trial}: {found}", f"To see it: {again}"],
        )
        exported = _proved_file(
            self.planned,
            slower.trial,
            self.run.export_path,
            self.run.path,
            False,
            lambda _: write_whole(self.run.export_path, text),
            self.observer,
        )
        note = f"every kernel is slower than PyTorch, the best one at {found}; {again} writes it"
        if not exported.check.is_accepted:  # the reference's calls differ from each other, say
            note = f"{note}; PyTorch's own modules were rejected: {exported.check.reason}"
        return exported, [note]


def _is_slower(entry: Finalist) -> bool:
    return entry.interval is not None and entry.interval.verdict == "slower"


def _blamed(error: WorkerError, names: Sequence[str]) -> tuple[str, str]:
    """Return which of the contenders failed in a race, and how; raise the error if none did."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WorkerCrashed | WorkerTimeout | JobFailed) and cause.worker in names:
            reason = cause.message if isinstance(cause, JobFailed) else cause.reason
            return cause.worker, f"in the race: {reason}"
        cause = cause.__cause__
    for name in names:  # it could not even be loaded
        if str(error).startswith(f"{name}: "):
            return name, f"in the race: {str(error).removeprefix(f'{name}: ')}"
    raise error


def _compared(raced: Finalist, exported: Finalist) -> list[str]:
    """Say so when the file is slower or faster than the candidate it came from."""
    one, other = raced.interval, exported.interval
    if one is None or other is None or (one.low <= other.high and other.low <= one.high):
        return []
    return [
        f"the exported file runs at {other.speedup:.2f}x where the candidate ran at "
        f"{one.speedup:.2f}x: the way it is called differs (launch work, allocations)"
    ]


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Return correct trials, fastest first; of those with the same machine code, one."""
    correct = [t for t in trials if t.outcome.latency_us and t.outcome.same_as is None]
    return sorted(correct, key=lambda t: t.outcome.latency_us or 0.0)


def _structure(trial: Trial) -> str:
    """Return what a candidate is, beside its sizes: the template and all that is a word."""
    words = {k: v for k, v in trial.params.items() if isinstance(v, str)}
    return json.dumps(words, sort_keys=True)


def _nothing_correct(trials: Sequence[Trial], entries: Sequence[Finalist]) -> str:
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.outcome.status.value] = counts.get(trial.outcome.status.value, 0) + 1
    lines = [f"no candidate is correct: {len(trials)} trials"]
    lines += [f"  {number} {status}" for status, number in counts.items()]
    failed = [t for t in trials if t.outcome.reason][:3]
    lines += [f"  trial {t.number}: {t.outcome.reason.splitlines()[0]}" for t in failed]
    lines += [f"  finalist {e.trial}: {e.error}" for e in entries if e.error]
    return "\n".join(lines)


# ---- exporting ------------------------------------------------------------------------------


def export_trial(
    path: Path,
    *,
    trial: int | None = None,
    output: Path | None = None,
    observer: Observer | None = None,
) -> tuple[Path, Check]:
    """Write one trial of a run as a standalone module, and prove the file.

    Args:
        path: the run directory.
        trial: its number; by default the run's winner, or its fastest correct trial.
        output: where to write; by default `export/model_new.py` of the run for the winner,
            `export/trial_<number>.py` for another.
        observer: is told of probes.

    Returns:
        Where it is, and the verdict on it.

    Raises:
        InputError: there is no such trial, or it was not correct.
        StorageError: not a run.
    """
    observer = observer or Observer()
    run = open_run(path)
    chosen = _chosen(run, trial)
    planned = plan(_config_of(run))
    toolchain = _toolchain(planned)
    result = run.result()
    proved = [*result.finalists, *([result.exported] if result.exported else [])] if result else []
    raced = next((e for e in reversed(proved) if e.trial == chosen.number), None)
    is_winner = result is not None and chosen.number == result.winner
    default = run.export_path if is_winner else run.path / "export" / f"trial_{chosen.number}.py"
    target = output or default
    exported = _proved_export(planned, toolchain, chosen, raced, target, path, observer)
    return target, exported.check


def _chosen(run: Run, number: int | None) -> Trial:
    trials = {trial.number: trial for trial in run.trials()}
    result = run.result()
    if number is None:
        best = run.best()
        number = result.winner if result else best.number if best else None
    if number is None:
        raise NothingCorrectError(f"{run.path}: no trial is correct")
    if number not in trials:
        raise InputError(f"{run.path}: no trial {number}\n  known: 0 to {len(trials) - 1}")
    trial = trials[number]
    if trial.outcome.status is not Status.CORRECT:
        raise InputError(
            f"{run.path}: trial {number} is not correct: {trial.outcome.status.value}: "
            f"{trial.outcome.reason}"
        )
    return trial


def _proved_export(
    planned: Planned,
    toolchain: Toolchain,
    trial: Trial,
    raced: Finalist | None,
    path: Path,
    run: Path,
    observer: Observer,
) -> Finalist:
    """Write a trial's file and prove it."""

    def write(exported: Finalist | None) -> None:
        _write_export(planned, toolchain, trial, exported or raced, path, str(run))

    observer.on_stage("exporting: compiling and checking the file by itself")
    is_deterministic = _is_deterministic(planned, trial)
    return _proved_file(planned, trial.number, path, run, is_deterministic, write, observer)


def _proved_file(
    planned: Planned,
    number: int,
    path: Path,
    run: Path,
    is_deterministic: bool,
    write: Callable[[Finalist | None], None],
    observer: Observer,
) -> Finalist:
    """Write a file; import, check and race it alone; write again what was found; certify it.

    `number` is that of the trial it stands for; with `is_deterministic` equal inputs must give
    equal bits; `write` is told of the race the second time.
    """
    with storage_errors(path):
        whole_path(path).unlink(missing_ok=True)  # of an earlier file
    write(None)
    seed = secrets.randbits(31)
    prover = Prover(planned.task, seed=seed)
    contender = Contender.of_file(path, is_deterministic)
    check = prover.check(contender, observer.on_probe)
    if not check.is_accepted:
        return finalist(number, check, None, 0)
    observer.on_stage("racing the exported file against the baseline")
    measure = planned.config.measure
    try:
        race = prover.race(
            [contender], num_processes=measure.num_processes, seconds=measure.finalists_s
        )
    except WorkerError as error:
        _, reason = _blamed(error, [contender.name])
        return finalist(number, replace(check, is_accepted=False, reason=reason), None, 0)
    exported = finalist(number, check, race, 1)
    if exported.check.is_accepted:
        write(exported)
        certificate = Certificate(
            code_sha256="",  # of the file as it will be
            reference_sha256=hashlib.sha256(planned.reference.read_bytes()).hexdigest(),
            device=planned.device.torch_name,
            accuracy=check.accuracy,
            seed=seed,
            num_probes=len(check.probes),
            is_deterministic=is_deterministic,
            sizes=dict(planned.config.problem.sizes),
            interval=exported.interval,
            latency_us=exported.latency_us,
            baseline_us=exported.baseline_us,
            num_throttled=race.num_throttled,
            seconds=measure.finalists_s,
            clocks=clocks_of(planned.device.torch_name),
            versions={**planned.environment, "tuner": _version()},
            origin=f"run {run.name}, trial {number}",
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            command=f"tune verify {path.name} --certificate",
            probes=check.probes,
            reference=planned.reference.read_bytes().decode(),
            samples_us=tuple(tuple(map(tuple, race[lane])) for lane in (0, 1)),
        )
        certify(path, certificate)
    return exported


def _write_export(
    planned: Planned,
    toolchain: Toolchain,
    trial: Trial,
    raced: Finalist | None,
    path: Path,
    run: str,
) -> None:
    candidate = planned.family.render(trial.params, planned.facts)
    flags = {"cuda": toolchain.cuda_flags, "cpp": toolchain.cpp_flags, "triton": ()}
    text = export_text(
        planned.family,
        candidate,
        reference=planned.reference.read_text(encoding="utf-8"),
        sizes=planned.config.problem.sizes,
        flags=flags[candidate.language],
        provenance=_provenance(planned, toolchain, trial, raced, run),
    )
    write_whole(path, text)


def _provenance(
    planned: Planned, toolchain: Toolchain, trial: Trial, raced: Finalist | None, run: str
) -> list[str]:
    sizes = ", ".join(f"{name} = {size}" for name, size in planned.sizes.items())
    machine = planned.environment
    versions = ", ".join(
        f"{k} {machine[k]}" for k in ("python", "torch", "triton") if k in machine
    )
    lines = [
        "Provenance:",
        f"  tuner {_version()}, run {Path(run).name}, trial {trial.number}, "
        f"{datetime.now(UTC).isoformat(timespec='seconds')}",
        f"  device: {planned.device.name}; {versions}",
        f"  compiler: {'; '.join(text for _, text in toolchain.versions)}",
        f"  tuned for: {sizes}; accuracy class {planned.config.accuracy.label}",
    ]
    if raced is not None and raced.interval is not None:
        i = raced.interval
        lines.append(
            f"  speed-up over PyTorch eager: {i.speedup:.3f}x, {i.confidence:.0%} of processes "
            f"in [{i.low:.3f}, {i.high:.3f}] ({i.verdict}; {i.num_processes} processes, "
            f"cold caches)"
        )
        lines.append(f"  latency: {raced.latency_us:.1f} us, baseline {raced.baseline_us:.1f} us")
    if raced is not None:
        lines += [
            f"  error on probe '{p.probe}': rms {p.rms_rel:.2e}, max {p.max_abs:.2e} "
            f"(PyTorch's own: {p.baseline_rms_rel:.2e}, {p.baseline_max_abs:.2e})"
            for p in raced.check.probes[:3]
        ]
    return [*lines, f"  to reproduce: tune export {run} --trial {trial.number}"]


def _is_deterministic(planned: Planned, trial: Trial) -> bool:
    return planned.family.render(trial.params, planned.facts).is_deterministic


# ---- anybody's file -------------------------------------------------------------------------


def verify(
    file: Path,
    reference: Path,
    *,
    accuracy: Accuracy | None = None,
    device: str = "auto",
    timeout_s: float = 30.0,
    observer: Observer | None = None,
) -> Check:
    """Return the verdict on a file that holds a `ModelNew`, ours or a stranger's.

    Args:
        file: is imported in a process of its own, never here.
        reference: a KernelBench-format file; trusted like code.
        accuracy: the class to hold it to; float32 by default.
        device: auto, cpu, cuda or cuda:N.
        timeout_s: seconds for each call; importing (which compiles) gets ten times that.
        observer: is told of each probe.

    Raises:
        InputError: a file is missing, or the reference cannot be used.
        DeviceError: the device does not exist.
    """
    observer = observer or Observer()
    for path in (file, reference):
        if not path.is_file():
            raise InputError(f"{path}: {'a directory' if path.is_dir() else 'no such file'}")
    torch_name = device
    if device != "cpu":  # the others must be looked for
        with new_worker("cpu", name="describe") as worker:
            try:
                found = worker.call("describe", {"device": device}, timeout_s=DESCRIBE_S).data
            except JobFailed as failure:
                raise explained(failure) from failure
        torch_name = found["torch_name"]
    chosen = accuracy or Accuracy()
    task = Task(str(reference.resolve()), {}, torch_name, chosen.label, "", "[]", "")
    prover = Prover(task, seed=secrets.randbits(31), timeout_s=timeout_s)
    return prover.check(Contender.of_file(file, is_deterministic=False), observer.on_probe)


def verify_certificate(
    file: Path,
    *,
    reference: Path | None = None,
    device: str = "auto",
    timeout_s: float = 30.0,
    observer: Observer | None = None,
) -> Repeated:
    """Repeat what a file's certificate claims, and say point by point what still holds.

    Args:
        file: an exported file; imported in processes of its own, never here.
        reference: a KernelBench-format file; by default the one that the certificate names.
        device: auto (the kind of the certificate's), cpu, cuda or cuda:N.
        timeout_s: seconds for each call of the file.
        observer: is told of each probe and stage.

    Raises:
        InputError: no file, no certificate in it, or no reference at hand.
        DeviceError: the device does not exist.
    """
    observer = observer or Observer()
    for path in (file, *([reference] if reference else [])):
        if not path.is_file():
            raise InputError(f"{path}: {'a directory' if path.is_dir() else 'no such file'}")
    certificate = read_certificate(file)
    wanted = device
    if device == "auto":
        wanted = "cpu" if certificate.device == "cpu" else "cuda"
    with new_worker("cpu", name="describe") as worker:
        try:
            found = worker.call("describe", {"device": wanted}, timeout_s=DESCRIBE_S).data
        except JobFailed as failure:
            raise explained(failure) from failure
    with with_reference(certificate, reference) as at:
        return repeat(
            file,
            certificate,
            at,
            device=found["torch_name"],
            versions={**found["environment"], "tuner": _version()},
            timeout_s=timeout_s,
            on_probe=observer.on_probe,
            on_stage=observer.on_stage,
        )


# ---- the machine ----------------------------------------------------------------------------


def _toolchain(planned: Planned) -> Toolchain:
    names = {str(params["template"]) for params in _first_of_each(planned.space, planned.family)}
    languages = {planned.family.templates[name].language for name in names}
    return Toolchain.find(planned.device.kind, planned.device.capability, sorted(languages))


def _num_workers(planned: Planned) -> int:
    """One compiler a core; on a GPU one core stays free for the process that feeds it."""
    cores = len(os.sched_getaffinity(0))
    return cores if planned.device.kind == "cpu" else max(1, cores - 1)


def _environment(
    planned: Planned, toolchain: Toolchain, command: str, overrides: Mapping[str, Value]
) -> dict[str, Any]:
    config, family = planned.config, planned.family
    sizes: dict[str, Value] = {**planned.facts, **planned.sizes}
    return {
        "tuner": _version(),
        "device": json.loads(to_json(planned.device)),
        "device_name": planned.device.name,
        "torch_name": planned.device.torch_name,
        "facts": dict(planned.facts),
        "machine": dict(planned.environment),
        "toolchain": "; ".join(text for _, text in toolchain.versions),
        "op": family.name,
        "title": family.title,
        "sizes": dict(planned.sizes),
        "accuracy": config.accuracy.label,
        "flops": family.flops.evaluate(sizes),
        "bytes": family.bytes.evaluate(sizes),
        "num_feasible": planned.space.num_feasible,
        "num_cartesian": planned.space.num_cartesian,
        "config_folder": str(config.base.resolve()),
        "overrides": dict(overrides),
        "command": command or shlex.join(sys.argv),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version() -> str:
    try:
        return version("tuner")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "(not installed)"
