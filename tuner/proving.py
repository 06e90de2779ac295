"""Files that hold a ModelNew, ours and strangers': write one, prove it, certify it, judge it.

A file is imported in processes of its own, never here.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tuner.errors import (
    InputError,
    NothingCorrectError,
    WorkerError,
)
from tuner.evaluate.prover import Contender, Prover, finalist
from tuner.evaluate.task import Task, explained, new_worker
from tuner.evaluate.worker import JobFailed, WorkerCrashed, WorkerTimeout
from tuner.export.certificate import Certificate, certify, read_certificate, whole_path
from tuner.export.module import export_text
from tuner.export.repeat import Repeated, clocks_of, repeat, with_reference
from tuner.kernel.toolchain import Toolchain
from tuner.planning import (
    DESCRIBE_S,
    Observer,
    Planned,
    config_of,
    plan,
    toolchain_of,
    version_here,
)
from tuner.problem.accuracy import Accuracy
from tuner.run import Run, open_run, storage_errors, write_whole
from tuner.trial import (
    Check,
    Finalist,
    Status,
    Trial,
)

__all__ = [
    "blamed",
    "export_trial",
    "proved_export",
    "proved_file",
    "verify",
    "verify_certificate",
]


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
    planned = plan(config_of(run))
    toolchain = toolchain_of(planned)
    result = run.result()
    proved = [*result.finalists, *([result.exported] if result.exported else [])] if result else []
    raced = next((e for e in reversed(proved) if e.trial == chosen.number), None)
    is_winner = result is not None and chosen.number == result.winner
    default = run.export_path if is_winner else run.path / "export" / f"trial_{chosen.number}.py"
    target = output or default
    exported = proved_export(planned, toolchain, chosen, raced, target, path, observer)
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


def proved_export(
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
    return proved_file(planned, trial.number, path, run, is_deterministic, write, observer)


def proved_file(
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
            [contender],
            num_processes=measure.num_processes,
            seconds=measure.finalists_s,
            has_other_values=True,
        )
    except WorkerError as error:
        _, reason = blamed(error, [contender.name])
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
            versions={**planned.environment, "tuner": version_here()},
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
        f"  tuner {version_here()}, run {Path(run).name}, trial {trial.number}, "
        f"{datetime.now(UTC).isoformat(timespec='seconds')}",
        f"  device: {planned.device.name}; {versions}",
        f"  compiler: {toolchain.label}",
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
        if raced.depends_on_values:
            e = raced.elsewhere
            assert e is not None
            lines.append(
                "  speed-up with random weights and normal inputs in place of the reference's "
                f"own: {e.speedup:.3f}x [{e.low:.3f}, {e.high:.3f}]: its time depends on them"
            )
    if raced is not None:
        lines += [
            f"  error on probe '{p.probe}': rms {p.rms_rel:.2e}, max {p.max_abs:.2e} "
            f"(PyTorch's own: {p.baseline_rms_rel:.2e}, {p.baseline_max_abs:.2e})"
            for p in raced.check.probes[:3]
        ]
    return [*lines, f"  to reproduce: tune export {run} --trial {trial.number}"]


def _is_deterministic(planned: Planned, trial: Trial) -> bool:
    return planned.family.render(trial.params, planned.facts).is_deterministic


def blamed(error: WorkerError, names: Sequence[str]) -> tuple[str, str]:
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
            versions={**found["environment"], "tuner": version_here()},
            timeout_s=timeout_s,
            on_probe=observer.on_probe,
            on_stage=observer.on_stage,
        )
