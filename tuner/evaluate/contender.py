"""Something to be verified: what it is, and how it gets into a fresh process of its own."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.errors import ProblemError
from tuner.evaluate.job_spec import JobSpec, asked, new_worker
from tuner.evaluate.worker import JobFailed, Worker, WorkerCrashed, WorkerTimeout
from tuner.kernel.compiler_words import require_disk
from tuner.trial import Build, Candidate, to_json

__all__ = [
    "CALL_TIMEOUT_S", "QUIET", "Contender", "Unedited", "get_ready", "import_ahead",
    "importing_later", "loaded", "started",
]  # fmt: skip

REFUSED_WITHIN_S = 6.0  # a file that cannot be captured, most often: processes start for 5 s
CALL_TIMEOUT_S = 300.0  # a finalist's probe; an exported file compiles in its first
# For processes that answer probes and are not timed. Threads that spin where they wait take the
# cores from the other process of a check: it took four times as long. Memory that is kept spares
# the page faults of each large temporary: half of a check on a CPU.
QUIET = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
}


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to be verified: a built candidate, or a file that holds a ModelNew.

    `env` are the variables of its process: where what was built for it is found. What
    `is_ours` is raced without being judged. `further_rows` are asked beside the problem's own.
    `version` tells texts that we have written to one path, one after the other.
    """

    name: str
    load: Mapping[str, Any]
    is_deterministic: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False
    further_rows: tuple[int, ...] = ()
    version: str = ""

    @classmethod
    def of_file(cls, path: Path, is_deterministic: bool) -> Contender:
        """Return a file as a contender; it is imported in the producer alone."""
        return cls(path.name, {"file": str(path.resolve())}, is_deterministic)

    @classmethod
    def of_compiled(cls, spec: JobSpec, mode: str) -> Contender:
        """Return the reference, compiled by `torch.compile` in that mode."""
        load = {"reference": spec.reference, "compile_mode": mode}
        return cls(f"torch.compile ({mode})", load, is_ours=True)

    @classmethod
    def of_candidate(
        cls,
        candidate: Candidate,
        build: Build,
        model_new: str,
        env: Mapping[str, str] | None = None,
    ) -> Contender:
        """Return a built candidate as a contender; `env` is `Builder.environment`."""
        load = {
            "candidate": to_json(candidate),
            "artefact": build.artefact,
            "model_new": model_new,
        }
        return cls(candidate.template, load, candidate.is_deterministic, dict(env or {}))


class Unedited:
    """What the files of a task and its contenders held before anything of them had run.

    What was verified is what was read; the next process would read another text.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._reference = spec.reference
        self._hashes = {(spec.reference, ""): _sha256(spec.reference)}
        self._beside: dict[str, str] = {}  # what the reference imports
        self._edited = ""  # one of these, between two processes' imports

    def remember(self, contender: Contender) -> None:
        """Note a contender's file as it is now, unless that version of it is known already."""
        if path := str(contender.load.get("file", "")):
            self._hashes.setdefault((path, contender.version), _sha256(path))

    def imported(self, beside: Mapping[str, str]) -> None:
        """Note files that a process of ours has imported, with their hashes there."""
        for path, sha256 in beside.items():
            if self._beside.setdefault(path, sha256) != sha256:
                self._edited = path

    def edited(self, contender: Contender) -> str:
        """Return which file is another now than before a contender ran, or nothing."""
        own = (str(contender.load.get("file", "")), contender.version)
        files = {
            path: self._hashes[path, version]
            for path, version in ((self._reference, ""), own)
            if path
        }
        found = [path for path, held in (files | self._beside).items() if _sha256(path) != held]
        edited = next(iter(found), self._edited)
        return edited and f"{edited} was rewritten while it was being verified"


def _sha256(path: str) -> str:
    """Return the hash of a file, nothing where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def started(
    stack: ExitStack,
    spec: JobSpec,
    contenders: Sequence[Contender],
    first: str = "",
    env: Mapping[str, str] | None = None,
) -> list[Worker]:
    """Start a process for each contender, side by side; none is loaded yet.

    Args:
        stack: ends them.
        spec: names the device.
        contenders: one process each.
        first: the name of a process of ours that comes before them, if one is wanted.
        env: variables of all of them; a contender's own come on top.
    """
    workers = _workers(spec, contenders, first, env)
    stack.callback(_ended, tuple(workers))
    where = {"device": spec.device}
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(lambda worker: asked(worker, "warm_up", where), workers))
    return workers


def _ended(workers: Sequence[Worker]) -> None:
    """End processes side by side: one that has a GPU open takes half a second."""
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(Worker.close, workers))


def import_ahead() -> None:
    """Begin to start what forks the processes of checks and of the search; does not wait."""
    for env in (QUIET, {}):
        new_worker("", env=env).get_ready()


@contextmanager
def importing_later() -> Iterator[None]:
    """Do as `import_ahead` where what is inside takes longer than files that are refused do."""
    timer = threading.Timer(REFUSED_WITHIN_S, import_ahead)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def get_ready(spec: JobSpec, contenders: Sequence[Contender], first: str = "") -> None:
    """Begin to start what forks the processes of `started`; does not wait."""
    for worker in _workers(spec, contenders, first, None):
        worker.get_ready()


def _workers(
    spec: JobSpec, contenders: Sequence[Contender], first: str, env: Mapping[str, str] | None
) -> list[Worker]:
    ours = [new_worker(spec.device, name=first, env=env, is_ours=True)] if first else []
    others = (
        new_worker(spec.device, name=c.name, env={**(env or {}), **c.env}) for c in contenders
    )
    return [*ours, *others]


def loaded(
    producer: Worker,
    spec: JobSpec,
    contender: Contender,
    about: Mapping[str, Any],
    timeout_s: float,
    notes: list[str] | None = None,
) -> str:
    """Load a contender into its process; return why that failed, or nothing.

    `about` is what `prepare` said of the problem. What the contender's text shows is added to
    `notes`.

    Raises:
        ProblemError: there is no ModelNew in it.
        StorageError: its compiler found no space on the disk.
    """
    payload = {
        "device": spec.device,
        "accuracy": spec.accuracy,
        "init_inputs": about["init_inputs"],
        "sizes": about["sizes"],
        **contender.load,
    }
    try:
        found = producer.call("load", payload, timeout_s=timeout_s).data
        if notes is not None:
            notes += [str(note) for note in found["notes"]]
    except (WorkerCrashed, WorkerTimeout) as error:
        return f"importing it: {error.reason}"
    except JobFailed as failure:
        require_disk(failure.message)
        if failure.error_type.endswith(".ProblemError"):  # no file of a module
            raise ProblemError(failure.message) from failure
        return f"importing it: {failure.error_type.rpartition('.')[2]}: {failure.message}"
    return ""
