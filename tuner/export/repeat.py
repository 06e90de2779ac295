"""Repeat what a certificate claims, and say point by point what still holds.

The probes that the file was accepted on, whose seed is public now; the same kinds of probes with
a seed that nobody has seen; the race against the baseline. What the machine is belongs to the
answer: another driver or GPU explains a point that no longer holds, it does not excuse it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tuner.errors import InputError, WorkerError
from tuner.evaluate.contender import Contender
from tuner.evaluate.racing import Racer, finalist
from tuner.evaluate.task import Task
from tuner.evaluate.verifier import Answered, Verifier
from tuner.export.certificate import Certificate, code_sha256
from tuner.kernel.family import builtin_folder
from tuner.problem.accuracy import Accuracy
from tuner.storage import sha256_of, storage_errors
from tuner.trial import Check, Finalist

__all__ = ["Point", "Repeated", "clocks_of", "repeat", "with_reference"]

ERROR_SLACK = 1.25  # times the certified error: other hardware adds in another order
ASKED_S = 10.0  # nvidia-smi


@dataclass(frozen=True, slots=True)
class Point:
    """One claim: whether it holds (None: it is no claim, but worth knowing), then and now."""

    what: str
    holds: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Repeated:
    """What became of a certificate's claims."""

    points: tuple[Point, ...]

    @property
    def holds(self) -> bool:
        """Whether every claim does."""
        return all(point.holds is not False for point in self.points)


@contextlib.contextmanager
def with_reference(certificate: Certificate, given: Path | None) -> Iterator[Path]:
    """Yield the reference's path: the one given, one that came with us, or the certificate's own.

    Raises:
        InputError: none is at hand.
    """
    wanted = certificate.reference_sha256
    if given is not None:
        yield given
        return
    for path in sorted(builtin_folder().glob("*/reference.py")):
        if hashlib.sha256(path.read_bytes()).hexdigest() == wanted:
            yield path
            return
    text = certificate.reference.encode()
    if hashlib.sha256(text).hexdigest() != wanted:
        raise InputError(
            f"the certificate's reference (sha256 {wanted[:16]}...) is not at hand\n"
            "  next: --reference REF.py, or put certificate.json beside the file"
        )
    with tempfile.TemporaryDirectory(prefix="tuner-reference-") as folder:
        path = Path(folder, "reference.py")
        with storage_errors(path):
            path.write_bytes(text)
        yield path


def repeat(
    file: Path,
    certificate: Certificate,
    reference: Path,
    *,
    device: str,
    versions: Mapping[str, str],
    timeout_s: float,
    on_probe: Callable[[Answered], None] = lambda _: None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Repeated:
    """Put a certificate's claims to the test, here and now.

    Args:
        file: what it was made for; imported in processes of its own, never here.
        certificate: as `read_certificate` gives it.
        reference: a KernelBench-format file.
        device: as PyTorch names it.
        versions: of this machine, named as in the certificate.
        timeout_s: for each call of the file.
        on_probe: is told of every answer.
        on_stage: is told what begins.

    Raises:
        InputError: the certificate names what cannot be, or the reference does not work.
        MachineError: the machine, not the file.
    """
    try:
        accuracy = Accuracy.parse(certificate.accuracy)
    except ValueError as error:
        raise InputError(f"{file}: the certificate is damaged: {error}") from error
    with storage_errors(file):
        code = code_sha256(file.read_text(encoding="utf-8", errors="replace"))
    points = [
        _same("the code", certificate.code_sha256, code),
        _same("the reference", certificate.reference_sha256, sha256_of(reference)),
    ]
    task = Task(
        str(reference), certificate.sizes, device, accuracy.label, "", "[]", ""
    )  # its sizes replace the reference's own
    contender = Contender.of_file(file, certificate.is_deterministic)
    on_stage(f"the probes of the certificate, seed {certificate.seed}")
    with Verifier(task, seed=certificate.seed, timeout_s=timeout_s) as verifier:
        check = verifier.check(contender, on_probe)
    points.append(_accepted(f"right on the certified probes (seed {certificate.seed})", check))
    points.append(_errors(certificate, check))
    if check.is_accepted:
        on_stage("probes that nobody has seen")
        with Verifier(task, seed=secrets.randbits(31), timeout_s=timeout_s) as fresh:
            again = fresh.check(contender, on_probe)
        points.append(_accepted("right on probes that nobody has seen", again))
        if certificate.interval is not None:
            on_stage("racing the file against the baseline")
            points.append(_speed(certificate, Racer(task), contender, check))
    for name in sorted({*certificate.versions, *versions}):
        then, now = certificate.versions.get(name, "none"), versions.get(name, "none")
        if then != now:
            points.append(Point(f"another {name}", None, f"{then} then, {now} now"))
    return Repeated(tuple(points))


def _same(what: str, then: str, now: str) -> Point:
    if then == now:
        return Point(what, True, f"unchanged, sha256 {now[:16]}...")
    return Point(what, False, f"changed: sha256 {then[:16]}... then, {now[:16]}... now")


def _accepted(what: str, check: Check) -> Point:
    detail = f"{len(check.probes)} probes" if check.is_accepted else check.reason
    return Point(what, check.is_accepted, f"{detail}, accuracy class {check.accuracy}")


def _errors(certificate: Certificate, check: Check) -> Point:
    """Compare the errors of the probes that both know; the largest growth is the verdict."""
    now = {probe.probe: probe for probe in check.probes}
    pairs = [(then, now[then.probe]) for then in certificate.probes if then.probe in now]
    grown = [(_growth(then.rms_rel, again.rms_rel), then, again) for then, again in pairs]
    if not grown:
        return Point("the errors against float64", False, "no certified probe was answered")
    growth, then, again = max(grown, key=lambda item: item[0])
    detail = (
        f"{len(pairs)} probes compared; the largest change is on {then.probe!r}: "
        f"rms {then.rms_rel:.2e} then, {again.rms_rel:.2e} now "
        f"(PyTorch's own {then.baseline_rms_rel:.2e} then, {again.baseline_rms_rel:.2e} now)"
    )
    return Point("the errors against float64", growth <= ERROR_SLACK, detail)


def _growth(then: float, now: float) -> float:
    if math.isnan(then) or then == now:
        return 1.0
    if math.isnan(now) or not then:
        return math.inf
    return now / then


def _speed(certificate: Certificate, racer: Racer, contender: Contender, check: Check) -> Point:
    then = certificate.interval
    assert then is not None
    claim = f"{then.speedup:.3f}x [{then.low:.3f}, {then.high:.3f}] then"
    try:
        race = racer.race(
            [contender],
            num_processes=max(2, min(then.num_processes, 20)),
            seconds=min(certificate.seconds, 60.0),
        )
    except WorkerError as error:
        return Point("the speed-up", False, f"{claim}; in the race now: {error}")
    entry: Finalist = finalist(0, check, race, 1)
    now = entry.interval
    if now is None:
        return Point("the speed-up", False, f"{claim}; now: {entry.error}")
    detail = f"{claim}, {now.speedup:.3f}x [{now.low:.3f}, {now.high:.3f}] now"
    # Few or noisy processes make a wide interval; it cannot save a claim of twice what was seen.
    holds = now.high >= then.low and 2.0 * now.speedup >= then.low
    return Point("the speed-up", holds, detail)


def clocks_of(device: str) -> dict[str, str]:
    """Return the clocks of a device as they are now, with their limits; what is not told is left.

    Args:
        device: as PyTorch names it. Asks nvidia-smi; initialises no CUDA.
    """
    if device == "cpu":
        with contextlib.suppress(OSError, NotImplementedError):
            found = psutil.cpu_freq()
            if found is not None:
                return {"cpu_mhz": f"{found.current:.0f}", "cpu_mhz_max": f"{found.max:.0f}"}
        return {}
    names = ("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "temperature.gpu")
    number = device.partition(":")[2] or "0"
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            [*command, f"--id={number}"], capture_output=True, text=True, timeout=ASKED_S
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}
