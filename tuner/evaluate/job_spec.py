"""What every process of a run must know, how such a process starts, and what its failure means."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.errors import TunerError, error_of
from tuner.evaluate.measure import below_floor
from tuner.evaluate.worker import JobFailed, Reply, Worker
from tuner.kernel.family import Family
from tuner.machine.forkserver import SERVER
from tuner.machine.platforms import is_gpu
from tuner.machine.turns import SOME
from tuner.problem.accuracy import Accuracy
from tuner.problem.modes import TuneMode
from tuner.trial import Value, to_json

__all__ = [
    "PREPARE_TIMEOUT_S",
    "JobSpec",
    "asked",
    "explained",
    "new_worker",
    "too_fast",
]

ENTRY = "tuner.evaluate.jobs:handle"
JOB_TIMEOUT_S = 300.0
PREPARE_TIMEOUT_S = 300.0  # importing PyTorch; the float64 oracle of a large problem


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What every process of a run must know of the problem; JSON-able."""

    reference: str
    sizes: Mapping[str, int]
    device: str
    accuracy: str
    family: str
    arguments: str
    model_new: str
    impossible_us: float = 0.0  # a shorter time is a lie; 0 where that is not known
    # The extra operators, each with a batch at which the module calls it; 0: nobody knows.
    extra: Mapping[str, int] = field(default_factory=dict)
    model_file: str = ""  # where `model_new` stands, for messages
    outputs: str = "[]"
    mode: TuneMode = "as_given"  # in which the reference is timed, and mostly asked
    memory_share: float = SOME  # of a GPU's memory, which a search or a race takes at least

    @property
    def is_gpu(self) -> bool:
        """Whether its device works beside the host."""
        return is_gpu(self.device)

    @classmethod
    def of(
        cls,
        family: Family,
        reference: Path,
        sizes: Mapping[str, int],
        device: str,
        acc: Accuracy,
        impossible_us: float = 0.0,
        facts: Mapping[str, Value] | None = None,
        mode: TuneMode = "as_given",
    ) -> JobSpec:
        """Collect a task from a family and what the config says.

        `facts` are the operator's sizes and the device's facts, once they are known.
        """
        rows = {name: call.rows if facts else None for name, call in family.extra.items()}
        return cls(
            str(reference),
            dict(sizes),
            device,
            acc.label,
            family.name,
            json.dumps([json.loads(to_json(a)) for a in family.call.arguments]),
            family.model_new,
            impossible_us,
            {n: 0 if r is None else int(r.evaluate(facts or {})) for n, r in rows.items()},
            str(family.model_file),
            json.dumps([json.loads(to_json(output)) for output in family.call.outputs]),
            mode,
        )

    @classmethod
    def of_any_file(
        cls,
        reference: str,
        sizes: Mapping[str, int],
        device: str,
        accuracy: str,
        mode: TuneMode = "as_given",
    ) -> JobSpec:
        """Return the task of files that are judged beside a reference, of whatever family."""
        return cls(reference, sizes, device, accuracy, "", "[]", "", mode=mode)

    def payload(self) -> dict[str, Any]:
        """Return the task as a job's payload."""
        return {name: getattr(self, name) for name in self.__slots__}


def new_worker(
    device: str,
    *,
    name: str = "",
    on_start: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    is_ours: bool = False,
) -> Worker:
    """Return a worker whose children run the jobs, with `env` on top of our environment.

    What `is_ours`, a judge say, is forked by another server than what runs a contender's code:
    who kills the process that forked it ends itself and its like, not the judge.
    """
    which = {} if is_ours else {SERVER: "contenders"}
    # An exported file is built by ninja, which pip puts beside Python; an environment that was
    # not activated lacks that folder on its PATH.
    beside = Path(sys.executable).parent
    path = {"PATH": os.pathsep.join([str(beside), os.environ.get("PATH", os.defpath)])}
    return Worker(
        ENTRY,
        name=name or device,
        env={**path, **(env or {}), **which},
        on_start=on_start,
        start_timeout_s=PREPARE_TIMEOUT_S,
    )


def asked(
    worker: Worker,
    job: str,
    payload: Mapping[str, Any],
    blobs: Sequence[Any] = (),
    timeout_s: float = JOB_TIMEOUT_S,
) -> Reply:
    """Run a job of ours; what it raises is explained.

    Raises:
        TunerError: as `explained`.
        WorkerError: its process crashed or did not answer.
    """
    try:
        return worker.call(job, dict(payload), blobs, timeout_s=timeout_s)
    except JobFailed as failure:
        raise explained(failure) from failure


def too_fast(latency_us: float, least_us: float) -> str:
    """Return why a time is impossible, or nothing."""
    if not below_floor(latency_us, least_us):
        return ""
    return (
        f"{latency_us:.1f} us is below the physical floor of {least_us:.1f} us: "
        "the work cannot have been done in that time"
    )


def explained(failure: JobFailed) -> TunerError:
    """Return the error of ours that a job raised, or a WorkerError that quotes its traceback."""
    name = failure.error_type.rpartition(".")[2]
    return error_of(name, failure.message, f"{failure.message}\n{failure.traceback}")
