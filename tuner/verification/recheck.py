"""Repeat what a certificate claims, and say point by point what still holds.

The probes that the file was accepted on, whose seed is public now; the same kinds of probes with
a seed that nobody has seen; the race against the baseline. What the machine is belongs to the
answer: another driver or GPU explains a point that no longer holds, it does not excuse it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.errors import InputError, WorkerError, input_errors
from tuner.evaluate.contender import Contender
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.race import finalist
from tuner.evaluate.racing import Racer
from tuner.evaluate.verifier import Answered, Verifier
from tuner.export.certificate import AtSize, Certificate, Samples, code_sha256
from tuner.intervals import are_same, speedup_of
from tuner.kernel.family import known_reference
from tuner.machine.host import has_many_cores
from tuner.machine.platforms import is_gpu
from tuner.problem.accuracy import Accuracy
from tuner.problem.modes import MODE_WORDS
from tuner.problem.timed_data import FILE, GIVEN, data_words
from tuner.storage import sha256_of, storage_errors
from tuner.trial import SAME_SPEED, Check, Finalist, Interval

__all__ = ["Point", "Rechecked", "recheck", "reference_for"]

ERROR_SLACK = 1.25  # times the certified error: other hardware adds in another order
MAX_CLAIMED_WIDTH = 4.0  # high / low of a claim; a wider one says nothing that could be checked
MAX_TELLING_WIDTH = 2.0  # high / low of today's race, above which it cannot confirm a claim
MIN_PROCESSES = 3  # that race today: the interval of two is hopelessly wide


@dataclass(frozen=True, slots=True)
class Point:
    """One claim, then and now: whether it holds; None: it cannot be determined here.

    With `is_claim` False it is no claim, but worth knowing, and `holds` is None.
    """

    what: str
    holds: bool | None
    detail: str
    is_claim: bool = True


@dataclass(frozen=True, slots=True)
class Rechecked:
    """What became of a certificate's claims, all of them in its accuracy class."""

    points: tuple[Point, ...]
    accuracy: str = "float32"

    @property
    def holds(self) -> bool:
        """Whether every claim does; one that cannot be determined here does not."""
        return all(point.holds is True for point in self.points if point.is_claim)


def reference_for(certificate: Certificate, given: Path | None) -> Path:
    """Return the reference's path: the one given, or one that was installed with the tuner.

    The text in the certificate is for readers. It is never run: whoever wrote the certificate
    would choose what the file is judged by.

    Raises:
        InputError: none is given, and the certificate's is none of the installed ones.
    """
    found = given or known_reference(certificate.reference_sha256)
    if found is None:
        raise InputError(
            f"the certificate's reference (sha256 {certificate.reference_sha256[:16]}...) is none "
            "of those installed with the tuner, and code in a certificate is never run\n"
            "  next: --reference REF.py, a file that you trust"
        )
    return found


def recheck(
    file: Path,
    certificate: Certificate,
    reference: Path,
    *,
    device: str,
    versions: Mapping[str, str],
    timeout_s: float,
    workloads: Mapping[str, str] | None = None,
    on_probe: Callable[[Answered], None] = lambda _: None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Rechecked:
    """Put a certificate's claims to the test, here and now.

    Args:
        file: what it was made for; imported in processes of its own, never here.
        certificate: as `read_certificate` gives it.
        reference: a KernelBench-format file.
        device: as PyTorch names it.
        versions: of this machine, named as in the certificate.
        timeout_s: for each call of the file.
        workloads: of the certificate's, those that are raced again, with the paths of files of
            tensors; all if none, with these files beside the exported one.
        on_probe: every answer is reported to it.
        on_stage: what begins is reported to it.

    Raises:
        InputError: the certificate names what cannot be, or the reference does not work.
        MachineError: the machine, not the file.
    """
    with input_errors(f"{file}: the certificate is damaged"):
        accuracy = Accuracy.parse(certificate.accuracy)
    with storage_errors(file):
        code = code_sha256(file.read_text(encoding="utf-8", errors="replace"))
    points = [
        _same("the code", certificate.code_sha256, code),
        _same("the reference", certificate.reference_sha256, sha256_of(reference)),
    ]
    if certificate.sizes:
        sizes = ", ".join(f"{name} = {size}" for name, size in certificate.sizes.items())
        which = "what names no size is" if certificate.at_sizes else "all claims are"
        detail = f"{sizes}; they replace the reference's own, and {which} of them"
        points.append(Point("other sizes", None, detail, is_claim=False))
    claims = _claims(certificate)
    for claim in claims:
        points += [_own_samples(each) for each in (claim, *claim.others)]
    named = {*certificate.workloads} - {GIVEN}
    if any({each.name for each in claim.others} != named for claim in claims):
        detail = f"workloads name {', '.join(certificate.workloads)}; the speed-ups are of others"
        points.append(Point("the workloads", False, detail))
    others, said = _raced_again(claims, file.parent, workloads)
    points += said
    if rows := _without_claim(certificate):
        points.append(Point("other tuned rows", None, rows, is_claim=False))
    if certificate.mode != "as_given":
        detail = f"all claims are of {MODE_WORDS[certificate.mode]}"
        points.append(Point("the mode", None, detail, is_claim=False))
    spec = JobSpec.of_any_file(  # the certificate's sizes replace the reference's own
        str(reference), certificate.sizes, device, accuracy.label, certificate.mode
    )
    contender = Contender.of_file(file, certificate.is_deterministic)
    if certificate.by_batch is not None:
        contender = replace(contender, further_rows=certificate.by_batch.tuned)
    Racer(spec).get_ready([contender])

    def checked(seed: int, on_probe: Callable[[Answered], None] = lambda _: None) -> Check:
        with Verifier(spec, seed=seed, timeout_s=timeout_s) as verifier:
            return verifier.check(contender, on_probe)

    with ThreadPoolExecutor(1) as pool:
        is_side_by_side = is_gpu(device) and has_many_cores()
        secret = secrets.randbits(31)
        ahead = pool.submit(checked, secret) if is_side_by_side else None
        on_stage(f"the probes of the certificate, seed {certificate.seed}")
        check = checked(certificate.seed, on_probe)
        points.append(_accepted(f"right on the certified probes (seed {certificate.seed})", check))
        points.append(_errors(certificate, check))
        if check.is_accepted:
            on_stage("probes that nobody has seen")
            again = checked(secret, on_probe) if ahead is None else ahead.result()
            points.append(_accepted("right on probes that nobody has seen", again))
    for claim in claims if check.is_accepted else ():
        on_stage(f"racing the file against the baseline{claim.at}")
        racer = Racer(replace(spec, sizes=claim.sizes))
        points += _speeds(claim, certificate.seconds, racer, contender, check, others)
    for name in sorted({*certificate.versions, *versions}):
        then, now = certificate.versions.get(name, "none"), versions.get(name, "none")
        if then != now:
            detail = f"{then} then, {now} now"
            points.append(Point(f"another {name}", None, detail, is_claim=False))
    return Rechecked(tuple(points), accuracy.label)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A speed-up that a certificate claims; `at` says at which of several sizes, on which data.

    It is of the given data, and `others` the same of others, by their names.
    """

    at: str
    sizes: Mapping[str, int]
    interval: Interval
    samples_us: Samples
    others: tuple[_Claim, ...] = ()
    name: str = GIVEN
    tensors_sha256: str = ""  # of the file of tensors, if it is one


def _claims(certificate: Certificate) -> list[_Claim]:
    """Return what is claimed of speed at each size, the certificate's own first."""
    own, further = certificate.sizes, certificate.at_sizes
    found = [_claim(one, _at(one.sizes, own)) for one in further]
    if certificate.interval is not None:
        at = _at(own, further[0].sizes) if further else ""
        found.insert(0, _claim(certificate, at))
    return found


def _claim(of: Certificate | AtSize, at: str) -> _Claim:
    assert of.interval is not None
    others = tuple(
        _Claim(
            f"{at} on {data_words(each.name)}", of.sizes, each.interval, each.samples_us,
            name=each.name, tensors_sha256=each.tensors_sha256,
        )
        for each in of.others
    )  # fmt: skip
    return _Claim(at, of.sizes, of.interval, of.samples_us, others)


def _raced_again(
    claims: Sequence[_Claim], folder: Path, workloads: Mapping[str, str] | None
) -> tuple[dict[str, str], list[Point]]:
    """Return the data beside the given ones that are raced again, and what is said of the others.

    They are by name, with the path of a file of tensors, which `workloads` or the folder has.
    """
    named = {each.name: each for claim in claims for each in claim.others}
    for name in workloads or ():
        if name not in (GIVEN, *named):
            known = ", ".join((GIVEN, *named))
            raise InputError(f"--workloads: {name} is not in the certificate\n  known: {known}")
    found, points = {}, []
    for name, claim in named.items():
        what, path = f"the speed-up on {data_words(name)}", folder / name.removeprefix(FILE)
        if workloads is not None and name not in workloads:
            points.append(Point(what, None, "not asked for", is_claim=False))
        elif not name.startswith(FILE):
            found[name] = ""
        elif not (path := Path((workloads or {}).get(name, path))).is_file():
            all_of_them = ",".join(f"{FILE}PATH" if n == name else n for n in (GIVEN, *named))
            detail = f"there is no {path}; next: put it there, or --workloads {all_of_them}"
            points.append(Point(what, None, detail))
        elif (now := sha256_of(path)) != claim.tensors_sha256:
            points.append(_same(data_words(name), claim.tensors_sha256, now))
        else:
            found[name] = str(path.absolute())
    return found, points


def _told(sizes: Mapping[str, int], others: Mapping[str, int]) -> Mapping[str, int]:
    """Return those of some sizes that others do not have; all of them where there are none."""
    return {name: size for name, size in sizes.items() if others.get(name) != size} or sizes


def _at(sizes: Mapping[str, int], others: Mapping[str, int]) -> str:
    return " at " + ", ".join(f"{name} = {size}" for name, size in _told(sizes, others).items())


def _without_claim(certificate: Certificate) -> str:
    """Say at which tuned numbers of rows a certificate claims no speed-up; empty if nowhere."""
    if certificate.by_batch is None:
        return ""
    claimed = {certificate.by_batch.tuned_rows}
    for one in certificate.at_sizes:
        claimed |= set(_told(one.sizes, certificate.sizes).values())
    rows = [rows for rows in certificate.by_batch.tuned if rows not in claimed]
    words = f"{', '.join(map(str, rows))}: no speed-up is claimed there, so none is raced"
    return words if rows else ""


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


def _own_samples(claim: _Claim) -> Point:
    """Compute the claimed interval from the certificate's own samples."""
    what, claimed = f"the interval{claim.at}, from its own samples", claim.interval
    if not claim.samples_us:  # the short form, in the file's header
        detail = "no samples are at hand; next: put certificate.json beside the file"
        return Point(what, None, detail, is_claim=False)
    try:
        baseline, own = claim.samples_us
        found = speedup_of(baseline, own, claimed.confidence)
    except (ValueError, OverflowError) as error:
        return Point(what, False, f"they give none: {error}")
    said = f"claimed {claimed.words}, they give {found.words}"
    return Point(what, are_same(claimed, found), said)


def _speeds(
    claim: _Claim,
    seconds: float,
    racer: Racer,
    contender: Contender,
    check: Check,
    others: Mapping[str, str],
) -> list[Point]:
    """Race once more; return what became of the claims of the given data and of these others."""
    claimed = [each for each in claim.others if each.name in others]
    then, what = claim.interval, f"the speed-up{claim.at}"
    try:
        race = racer.race(
            [contender],
            num_processes=max(MIN_PROCESSES, min(then.num_processes, 20)),
            seconds=min(seconds, 60.0),
            others={each.name: others[each.name] for each in claimed},
        )
    except WorkerError as error:
        return [Point(what, False, f"{then.words} then; in the race now: {error}")]
    return _points_of(claim, claimed, finalist(0, check, race, 1))


def _points_of(claim: _Claim, claimed: Sequence[_Claim], entry: Finalist) -> list[Point]:
    """Say what became of the claims of the given data and of others, by a race."""
    then, what = claim.interval, f"the speed-up{claim.at}"
    if entry.interval is None:
        return [Point(what, False, f"{then.words} then; now: {entry.error}")]
    if entry.falls_back:
        return [
            replace(of_fallback(each.interval), what=f"the speed-up{each.at}")
            for each in (claim, *claimed)
        ]
    points = [replace(compared(then, entry.interval), what=what)]
    now = {data.name: data.interval for data in entry.others}
    for each in claimed:
        then, what = each.interval, f"the speed-up{each.at}"
        lacking = Point(what, None, f"{then.words} then; now not timed: no room on this device")
        known = each.name in now
        points.append(replace(compared(then, now[each.name]), what=what) if known else lacking)
    return points


def of_fallback(then: Interval) -> Point:
    """Say whether a claim holds of a file that runs the reference's own operations: if it is none.

    Where no kernel was faster, the exported file is PyTorch's own modules, and says so.
    """
    is_none = then.low <= 1.0 <= then.high and then.speedup <= 1.0 + SAME_SPEED
    detail = f"{then.words} then; now: it runs the reference's own operations, "
    end = "as fast as they are" if is_none else "which is no speed-up"
    return Point("the speed-up", is_none, detail + end)


def compared(then: Interval, now: Interval) -> Point:
    """Say whether a claimed speed-up is today's.

    It holds where each side's speed-up lies within the other's interval, give or take
    `SAME_SPEED`. A claim so wide that all would lie within it says nothing, and does not hold.
    Where today's interval is too wide to confirm anything, a claim that is twice what was seen,
    or half of it, does not hold; of another it cannot be determined.
    """
    detail = f"{then.words} then, {now.words} now"

    def point(holds: bool | None, why: str = "") -> Point:
        return Point("the speed-up", holds, f"{detail}{why and f': {why}'}")

    if not 0.0 < then.low <= then.speedup <= then.high < math.inf:
        return point(False, "the claim is no interval around a speed-up")
    if then.high / then.low > MAX_CLAIMED_WIDTH:
        return point(False, "the claimed interval is so wide that it claims nothing")
    if now.low <= 0.0 or now.high / now.low > MAX_TELLING_WIDTH:
        if then.low > 2.0 * now.speedup or 2.0 * then.high < now.speedup:
            return point(False, "another speed-up by a factor of two")
        return point(None, "today's interval is too wide to tell; next: end other programs")
    return point(_lies_in(then.speedup, now) and _lies_in(now.speedup, then))


def _lies_in(speedup: float, interval: Interval) -> bool:
    slack = 1.0 + SAME_SPEED
    return interval.low / slack <= speedup <= interval.high * slack
