"""Files that hold a ModelNew, ours and strangers': export a trial, verify anybody's file.

A file is imported in processes of its own, never here.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.config.run_config import config_of
from tuner.errors import InputError, NothingCorrectError
from tuner.evaluate.contender import QUIET, Contender
from tuner.evaluate.job_spec import JobSpec, asked, new_worker
from tuner.evaluate.verifier import Verifier
from tuner.export.certificate import has_certificate, read_certificate
from tuner.machine.doctor import tuner_version
from tuner.machine.importing import import_from
from tuner.planning.observing import Observer
from tuner.planning.own_steps import with_own_steps
from tuner.planning.planning import DESCRIBE_S, plan
from tuner.planning.schedule import Costs, scheduled
from tuner.problem.accuracy import Accuracy
from tuner.problem.modes import TuneMode
from tuner.problem.packages import import_root
from tuner.run import Run, open_run
from tuner.storage import require_file
from tuner.trial import Check, Status, Trial
from tuner.verification.exporting import ExportCompiler, export_of
from tuner.verification.recheck import Rechecked, recheck, reference_for
from tuner.verification.verification import Verification

__all__ = ["export_trial", "verify", "verify_certificate"]


def export_trial(
    path: Path,
    *,
    trial: int | None = None,
    output: Path | None = None,
    observer: Observer | None = None,
) -> tuple[Path, Check]:
    """Write one trial of a run as a standalone module, and verify the file.

    Args:
        path: the run directory.
        trial: its number; by default the run's winner, or its fastest correct trial.
        output: where to write; by default `export/model_new.py` of the run for the winner,
            `export/trial_<number>.py` for another.
        observer: probes are reported to it.

    Returns:
        Where it is (where it was put aside, if it is rejected), and the verdict on it.

    Raises:
        InputError: there is no such trial, or it was not correct; `output` is a folder, or a file
            that is no export.
        StorageError: not a run.
        RunLockedError: another process works on the run.
    """
    if output is not None:
        _require_ours(output)
    observer = observer or Observer()
    run = open_run(path)
    with run.locked() as writer:
        chosen = _chosen(run, trial)
        observer.on_stage(f"exporting trial {chosen.number}: asking for the device and the sizes")
        planned = with_own_steps(plan(config_of(run)), observer)
        toolchain = planned.find_toolchain()
        result = run.result()
        # Where the winner was slower than PyTorch, another file has the name.
        is_winner = (
            result is not None and chosen.number == result.winner and not result.is_fallback
        )
        usual = run.path / "export" / f"trial_{chosen.number}.py"
        target = output or (run.export_path if is_winner else usual)
        file = export_of(planned, toolchain, chosen, target, run.path)
        compiler = ExportCompiler(planned.spec.device, planned.num_workers)
        compiler.submit(file)
        seed = secrets.randbits(31)
        with Verifier(planned.spec, seed=seed) as verifier:
            verification = Verification(
                planned, toolchain, run, writer, verifier, seed, compiler, observer,
                scheduled(planned.config, Costs()),
            )  # fmt: skip
            entry = verification.export(file, {})
    return (target if entry.check.is_accepted else file.rejected_path), entry.check


def _require_ours(output: Path) -> None:
    """Raise an InputError for a place at which somebody else's file or a folder is."""
    if output.is_dir():
        raise InputError(f"--output {output}: a folder\n  next: name a file in it")
    if output.exists() and not has_certificate(output):
        raise InputError(
            f"--output {output}: there is a file, and no exported one\n"
            "  next: choose another name, or remove it first"
        )


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


def verify(
    file: Path,
    reference: Path,
    *,
    accuracy: Accuracy | None = None,
    device: str = "auto",
    timeout_s: float = 30.0,
    mode: TuneMode = "as_given",
    observer: Observer | None = None,
) -> Check:
    """Return the verdict on a file that holds a `ModelNew`, ours or a stranger's.

    Args:
        file: is imported in a process of its own, never here.
        reference: a KernelBench-format file; trusted like code.
        accuracy: the class to hold it to; float32 by default.
        device: auto, cpu, cuda or cuda:N.
        timeout_s: seconds for each call; importing (which compiles) gets ten times that.
        mode: that of the modules where a probe names none: as the reference's constructor leaves
            them, or training or eval mode.
        observer: each probe is reported to it.

    Raises:
        InputError: a file is missing, or the reference cannot be used.
        DeviceError: the device does not exist.
    """
    observer = observer or Observer()
    require_file(file)
    require_file(reference)
    import_from(reference.parent, import_root(reference))
    observer.on_stage(f"checking {file} beside {reference}")
    torch_name = device if device == "cpu" else _described(device)["torch_name"]
    chosen = accuracy or Accuracy()
    task = JobSpec.of_any_file(str(reference.resolve()), {}, torch_name, chosen.label, mode)
    with Verifier(task, seed=secrets.randbits(31), timeout_s=timeout_s) as verifier:
        return verifier.check(Contender.of_file(file, is_deterministic=False), observer.on_probe)


def _described(device: str) -> dict[str, Any]:
    """Ask a child process what a device is; the parent imports no PyTorch."""
    with new_worker("cpu", name="describe", env=QUIET, is_ours=True) as worker:
        return asked(worker, "describe", {"device": device}, timeout_s=DESCRIBE_S).data


def verify_certificate(
    file: Path,
    *,
    reference: Path | None = None,
    device: str = "auto",
    timeout_s: float = 30.0,
    workloads: Mapping[str, str] | None = None,
    observer: Observer | None = None,
) -> Rechecked:
    """Repeat what a file's certificate claims, and say point by point what still holds.

    Args:
        file: an exported file; imported in processes of its own, never here.
        reference: a KernelBench-format file, trusted like code; by default the one that the
            certificate names, if it was installed with the tuner.
        device: auto (the kind of the certificate's), cpu, cuda or cuda:N.
        timeout_s: seconds for each call of the file.
        workloads: as for `recheck`.
        observer: each probe and stage is reported to it.

    Raises:
        InputError: no file, no certificate in it, a damaged one, or no reference to trust.
        DeviceError: the device does not exist.
    """
    observer = observer or Observer()
    require_file(file)
    if reference is not None:
        require_file(reference)
        import_from(reference.parent, import_root(reference))
    certificate = read_certificate(file)
    wanted = device
    if device == "auto":
        wanted = "cpu" if certificate.device == "cpu" else "cuda"
    trusted = reference_for(certificate, reference)
    observer.on_stage(f"repeating what the certificate of {file} claims")
    found = _described(wanted)
    return recheck(
        file,
        certificate,
        trusted,
        device=found["torch_name"],
        versions={**found["environment"], "tuner": tuner_version()},
        timeout_s=timeout_s,
        workloads=workloads,
        on_probe=observer.on_probe,
        on_stage=observer.on_stage,
    )
