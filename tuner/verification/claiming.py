"""What an exported file claims once it is verified: its certificate, from what was found."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tuner.by_batch import ByBatch
from tuner.export.certificate import AtSize, Certificate, OnDataClaim, Samples
from tuner.intervals import rounds_of
from tuner.kernel.family import known_reference
from tuner.machine.doctor import tuner_version
from tuner.machine.limits import clocks_of
from tuner.planning.planning import Planned
from tuner.problem.timed_data import GIVEN
from tuner.storage import sha256_of
from tuner.trial import Finalist, OnData

__all__ = ["certificate_of"]


def certificate_of(
    planned: Planned,
    entry: Finalist,
    *,
    path: Path,
    origin: str,
    is_deterministic: bool,
    by_batch: ByBatch | None,
    rewrites: Sequence[str],
    seconds: float,
) -> Certificate:
    """Return the certificate of a file that was accepted, without the hash of its code.

    Args:
        planned: the problem; of several sizes the largest.
        entry: what check and races found.
        path: of the file.
        origin: its run and trial, in words.
        is_deterministic: whether it gives the same bits each time.
        by_batch: at which rows it takes kernels.
        rewrites: exact steps by which the module's graph was rewritten, in words.
        seconds: of samples, for each process of a race.
    """
    check = entry.check
    reference_sha256 = sha256_of(planned.reference)
    needed = "" if known_reference(reference_sha256) else " --reference REF.py"
    return Certificate(
        code_sha256="",  # of the file as it will be
        reference_sha256=reference_sha256,
        device=planned.device.torch_name,
        accuracy=check.accuracy,
        seed=entry.seed,
        num_probes=len(check.probes),
        is_deterministic=is_deterministic,
        sizes=dict(planned.config.problem.sizes),
        mode=planned.config.problem.mode,
        workloads=(GIVEN, *(data.name for data in entry.others)),
        interval=entry.interval,
        others=_on_others(planned, entry),
        latency_us=entry.latency_us,
        baseline_us=entry.baseline_us,
        num_throttled=entry.num_throttled,
        rewrites=tuple(rewrites),
        by_batch=by_batch,
        seconds=seconds,
        effort=planned.config.effort,
        clocks=clocks_of(planned.device.torch_name),
        versions={**planned.environment, "tuner": tuner_version()},
        origin=origin,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=f"tune verify {path.name} --certificate{needed}",
        probes=check.probes,
        reference=planned.reference.read_bytes().decode(),
        samples_us=_samples(entry.baseline_samples_us, entry.samples_us),
        at_sizes=_at_further_sizes(planned, entry),
    )


def _at_further_sizes(planned: Planned, entry: Finalist) -> tuple[AtSize, ...]:
    """Return the races of a file of several sizes at those that the rest is not of."""
    config = planned.config
    if config.listed is None:
        return ()
    found = []
    for size in config.listed.values:
        sizes = dict(config.at(size).problem.sizes)
        race = entry.at_sizes.get(config.listed.words(size))
        if race is not None and race.interval is not None and sizes != config.problem.sizes:
            found.append(
                AtSize(
                    sizes, race.interval, race.latency_us, race.baseline_us, race.num_throttled,
                    _samples(race.baseline_samples_us, race.samples_us),
                    _on_others(planned, race),
                )
            )  # fmt: skip
    return tuple(found)


def _on_others(planned: Planned, entry: Finalist) -> tuple[OnDataClaim, ...]:
    def claim(data: OnData) -> OnDataClaim:
        lanes = (data.baseline_samples_us, data.samples_us)
        samples_us = _samples(*lanes) if all(lanes) else ()
        sha256 = planned.config.tensors_sha256.get(data.name, "")
        return OnDataClaim(data.name, data.words, data.interval, samples_us, sha256)

    return tuple(map(claim, entry.others))


def _samples(*lanes: Samples) -> Samples:
    return tuple(tuple(map(tuple, rounds_of(lane))) for lane in lanes)
