"""The file of one trial: written as unverified, then accepted under its name, or rejected.

    trial_17.unverified.py   while it is checked and raced
    model_new.py             once it is accepted, with its certificate
    trial_17.rejected.py     with the reason in its first line

The first lines alone change; the code that was checked is the code that is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from shlex import quote

from tuner.by_batch import ByBatch, Way
from tuner.capture.modules.rows_text import has_rows, ways_in, with_rows
from tuner.choosing import Kernels
from tuner.errors import InputError, StorageError, TunerError
from tuner.evaluate.contender import QUIET, Contender
from tuner.evaluate.job_spec import asked, new_worker
from tuner.export.certificate import certify, code_sha256, whole_path
from tuner.export.module import UNVERIFIED, VERIFIED, export_text, fallback_text
from tuner.export.several import Dispatch
from tuner.kernel.toolchain import Toolchain
from tuner.machine.doctor import tuner_version
from tuner.planning.observing import Observer, Progress
from tuner.planning.planning import Planned
from tuner.problem.modes import MODE_WORDS
from tuner.problem.timed_data import GIVEN_ALONE, other_tensors
from tuner.storage import sha256_of, storage_errors, write_whole
from tuner.trial import Candidate, Finalist, Trial, content_key
from tuner.verification.claiming import certificate_of

__all__ = [
    "ExportCompiler", "ExportFile", "export_of", "fallback_of", "provenance", "rewrites_of",
    "text_maker", "ways_of",
]  # fmt: skip

HEARTBEAT_S = 2.0  # between two signs of life while a compiler works
COMPILE_TIMEOUT_S = 600.0
EFFORTS = {
    "quick": "  effort: quick: few candidates were tried, the race was short",
    "normal": "  effort: normal",
    "thorough": "  effort: thorough",
}


@dataclass(frozen=True, slots=True)
class ExportFile:
    """One trial's file on its way.

    `text_of` gives its text for a standing, the outcome of its race if there is one, and remarks;
    `rewrites` are the steps by which a graph was rewritten, in words; `path` is where it goes once
    it is accepted, `name` what it is called until then.
    `with_batches` gives the file that takes its kernels where that was measured to be worth it,
    None where it does already or its sizes are fixed; `ways` are those in which it has kernels.
    `kernels` are those of a file that has several.
    """

    planned: Planned
    run_path: Path
    name: str
    trial: int
    path: Path
    is_deterministic: bool
    text_of: Callable[[str, Finalist | None, Sequence[str]], str]
    rewrites: tuple[str, ...] = ()
    with_batches: Callable[[ByBatch], ExportFile] | None = None
    ways: tuple[Way, ...] = ()
    by_batch: ByBatch | None = None
    compiled_as: str = ""  # equal for files of the same kernels, at whichever rows they take them
    kernels: Kernels | None = None

    @property
    def unverified_path(self) -> Path:
        """Where it lies until it is accepted or rejected."""
        return self.run_path / "export" / f"{self.name}.unverified.py"

    @property
    def rejected_path(self) -> Path:
        """Where it lies after it was rejected."""
        return self.path.with_name(f"{self.path.stem}.rejected.py")

    @property
    def code_sha256(self) -> str:
        """The hash of its code, which begins below the header."""
        return code_sha256(self.text_of(UNVERIFIED, None, ()))

    @property
    def key(self) -> str:
        """Equal for equal code that is checked against the same reference on the same terms."""
        config, machine = self.planned.config, self.planned.environment
        versions = [f"{name} {machine[name]}" for name in sorted(machine) if name != "driver"]
        return content_key(
            self.code_sha256,
            sha256_of(self.planned.reference),
            config.accuracy.label,
            sorted(config.problem.sizes.items()),
            config.problem.mode,
            self.planned.device.torch_name,
            versions,
            tuner_version(),
            *([self.kernels.tuned] if self.kernels is not None else []),
        )

    def write(self) -> None:
        """Write it, as unverified, unless it lies there already."""
        text = self.text_of(UNVERIFIED, None, ())
        with storage_errors(self.unverified_path):
            is_there = self.unverified_path.is_file() and code_sha256(
                self.unverified_path.read_text(encoding="utf-8")
            ) == code_sha256(text)
        if not is_there:
            write_whole(self.unverified_path, text)

    @property
    def contender(self) -> Contender:
        """The file as a contender: imported in processes of its own, never here."""
        found = Contender.of_file(self.unverified_path, self.is_deterministic)
        further = () if self.kernels is None else self.kernels.rows
        name = self.name.replace("_", " ")
        return replace(found, name=name, further_rows=further, version=self.code_sha256)

    def accept(self, entry: Finalist, samples_s: float, remarks: Sequence[str] = ()) -> None:
        """Put it under its name, with what was found in its header, and certify it.

        `remarks` say what of the verification was less than was asked for.

        Raises:
            InputError: a file of tensors that it was timed on is another one now.
            StorageError: what was checked is not what would be kept.
        """
        config = self.planned.config
        for name, sha256 in config.tensors_sha256.items():
            if sha256_of(Path(config.others[name])) != sha256:
                raise InputError(other_tensors(config.others[name]))
        with storage_errors(self.unverified_path):
            is_there = self.unverified_path.is_file()
            text = self.unverified_path.read_text(encoding="utf-8") if is_there else ""
        if entry.key != self.key or (is_there and code_sha256(text) != self.code_sha256):
            raise StorageError(
                f"{self.unverified_path}: other code than was checked\n"
                "  next: `tune --resume`, which checks it again"
            )
        with storage_errors(self.path):
            whole_path(self.path).unlink(missing_ok=True)  # of an earlier file
        is_alone = entry.interval is not None and not entry.others
        standing = f"{VERIFIED}, timed {GIVEN_ALONE}" if is_alone else VERIFIED
        write_whole(self.path, self.text_of(standing, entry, remarks))
        certificate = certificate_of(
            self.planned, entry, path=self.path,
            origin=f"run {self.run_path.name}, trial {self.trial}",
            is_deterministic=self.is_deterministic, by_batch=self.by_batch,
            rewrites=self.rewrites, seconds=samples_s,
        )  # fmt: skip
        certify(self.path, certificate)
        with storage_errors(self.unverified_path):
            self.rejected_path.unlink(missing_ok=True)
            self.unverified_path.unlink(missing_ok=True)

    def reject(self, entry: Finalist) -> None:
        """Keep it to be looked at, with the reason in its first line."""
        reason = " ".join(entry.check.reason.split())
        write_whole(self.rejected_path, self.text_of(f"REJECTED: {reason}", entry, ()))
        with storage_errors(self.unverified_path):
            self.unverified_path.unlink(missing_ok=True)


class ExportCompiler:
    """Compiles exported files ahead, in throwaway processes: PyTorch keeps what they build.

    What goes wrong there goes wrong again where the file is checked, and is reported there.
    """

    def __init__(self, device: str, num_workers: int) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(max(1, num_workers))
        self._compiled: dict[tuple[str, str], Future[None]] = {}

    def submit(self, file: ExportFile) -> Future[None]:
        """Write the file and compile it, unless that is under way already.

        Then it lies there, maybe at other rows by now, and is checked.
        """
        path = str(file.unverified_path)
        this = (path, file.compiled_as or file.code_sha256)
        if this not in self._compiled:
            file.write()
            self._compiled[this] = self._pool.submit(self._compile, path)
        return self._compiled[this]

    def finish(self, file: ExportFile, observer: Observer, usual_s: float) -> None:
        """Wait until the file is compiled, which takes so long as a rule, and say so meanwhile."""
        if (compiled := self.submit(file)).done():
            return
        observer.on_stage(f"compiling {file.unverified_path.name}")
        start_s = time.monotonic()
        while not wait([compiled], HEARTBEAT_S).done:
            spent_s = time.monotonic() - start_s
            left_s = max(0.0, usual_s - spent_s)
            observer.on_progress(Progress("compiling", round(spent_s), None, left_s))

    def _compile(self, path: str) -> None:
        with new_worker(self._device, name="compile", env=QUIET) as worker:
            try:
                asked(worker, "import_file", {"file": path}, timeout_s=COMPILE_TIMEOUT_S)
            except TunerError:
                return

    def close(self) -> None:
        """Wait for nothing more; what is being compiled ends."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def export_of(
    planned: Planned,
    toolchain: Toolchain,
    trial: Trial,
    path: Path,
    run_path: Path,
    by_batch: ByBatch | None = None,
    candidate: Candidate | None = None,
) -> ExportFile:
    """Return the file of a trial; nothing is written yet.

    `by_batch` says at which numbers of rows it takes its kernels, where that was measured;
    `candidate` is the trial's, where it was rendered already.
    """
    candidate = candidate or planned.family.render(trial.params, planned.facts)
    model_new, steps = planned.family.model_new, planned.family.steps
    rows = None if by_batch is None else by_batch.stated
    family = replace(planned.family, model_new=with_rows(model_new, rows))
    again = partial(export_of, planned, toolchain, trial, path, run_path, candidate=candidate)
    ways = ways_of(model_new, candidate)

    def head(entry: Finalist | None) -> list[str]:
        return provenance(planned, toolchain, trial.number, entry, run_path)

    text_of = text_maker(replace(planned, family=family), toolchain, [candidate], head, by_batch)
    name = f"trial_{trial.number}"
    return ExportFile(
        planned, run_path, name, trial.number, path, candidate.is_deterministic, text_of,
        rewrites_of(planned),
        with_batches=again if by_batch is None and has_rows(model_new) else None,
        ways=ways,
        by_batch=by_batch,
        compiled_as=content_key(candidate.key, with_rows(model_new, None), steps is None),
    )  # fmt: skip


def text_maker(
    planned: Planned,
    toolchain: Toolchain,
    candidates: Sequence[Candidate],
    head: Callable[[Finalist | None], list[str]],
    by_batch: ByBatch | None,
    dispatch: Dispatch | None = None,
) -> Callable[[str, Finalist | None, Sequence[str]], str]:
    """Return the `text_of` of a file.

    Args:
        planned: with the family whose module stands in the file.
        toolchain: of the kernels.
        candidates: these kernels.
        head: the first lines of its header, given what its race found.
        by_batch: what was measured at other numbers of rows.
        dispatch: which of several kernels is for how many rows.
    """
    reference, steps = planned.reference.read_text(encoding="utf-8"), planned.family.steps
    (first, flags), *more = [(each, toolchain.flags(each.language)) for each in candidates]
    steps_flags = toolchain.flags(steps.candidate.language) if steps else ()

    def written(standing: str, entry: Finalist | None, remarks: Sequence[str]) -> str:
        lines = [
            *head(entry),
            *(f"  {line}" for line in (by_batch.lines if by_batch else ())),
            *(f"  less than asked for: {remark}" for remark in remarks),
        ]
        return export_text(
            planned.family, first, reference=reference, sizes=planned.config.problem.sizes,
            flags=flags, provenance=lines, standing=standing, more=more, dispatch=dispatch,
            steps_flags=steps_flags,
        )  # fmt: skip

    @cache  # it is asked for wherever the code's hash is
    def unverified() -> str:
        return written(UNVERIFIED, None, ())

    def text_of(standing: str, entry: Finalist | None, remarks: Sequence[str]) -> str:
        if standing == UNVERIFIED and entry is None and not remarks:
            return unverified()
        return written(standing, entry, remarks)

    return text_of


def ways_of(model_new: str, candidate: Candidate) -> tuple[Way, ...]:
    """Return the ways to call a module in which a candidate has kernels."""
    has_steps = candidate.plan.extra.get("gradients", True) is not None
    return tuple(way for way in ways_in(model_new) if has_steps or way != "step")


def fallback_of(planned: Planned, slower: Finalist, path: Path, run_path: Path) -> ExportFile:
    """Return a file of the reference's own modules, in place of a winner that is slower."""
    assert slower.least is not None
    again = f"tune export {quote(str(run_path))} --trial {slower.trial}"
    lines = [
        f"The best kernel, trial {slower.trial}: {slower.least_words}{_in_mode(planned)}",
        f"To see it: {again}",
    ]
    reference = planned.reference.read_text(encoding="utf-8")

    def text_of(standing: str, entry: Finalist | None, remarks: Sequence[str]) -> str:
        return fallback_text(
            planned.family,
            reference=reference,
            sizes=planned.config.problem.sizes,
            provenance=lines,
            standing=standing,
            has_from_module="\n    def from_module(" in planned.family.model_new,
        )

    return ExportFile(planned, run_path, "pytorch", slower.trial, path, False, text_of)


def rewrites_of(planned: Planned) -> tuple[str, ...]:
    """Return the exact steps by which a module's graph was rewritten, in words."""
    return tuple(step.words for step in planned.outline.rewrites) if planned.outline else ()


def _in_mode(planned: Planned) -> str:
    """Return words for the mode in which a module is tuned; nothing where none was chosen."""
    words = MODE_WORDS[planned.config.problem.mode]
    return words and f"; in {words}"


def provenance(
    planned: Planned, toolchain: Toolchain, number: int, raced: Finalist | None, run_path: Path
) -> list[str]:
    """Return lines for a header: where a trial's file comes from, and what its race found."""
    sizes = ", ".join(f"{name} = {size}" for name, size in planned.sizes.items())
    machine: Mapping[str, str] = planned.environment
    versions = ", ".join(
        f"{k} {machine[k]}" for k in ("python", "torch", "triton") if k in machine
    )
    lines = [
        "Provenance:",
        f"  tuner {tuner_version()}, run {run_path.name}, trial {number}, "
        f"{datetime.now(UTC).isoformat(timespec='seconds')}",
        f"  device: {planned.device.name}; {versions}",
        f"  compiler: {toolchain.label}",
        f"  tuned for: {sizes}; accuracy class {planned.config.accuracy.label}{_in_mode(planned)}",
        EFFORTS[planned.config.effort],
        *(f"  exact rewrite: {words}" for words in rewrites_of(planned)),
    ]
    if raced is not None:
        lines += [
            *_speed_lines(raced),
            *(
                f"  error on probe '{p.probe}': rms {p.rms_rel:.2e}, max {p.max_abs:.2e} "
                f"(PyTorch's own: {p.baseline_rms_rel:.2e}, {p.baseline_max_abs:.2e})"
                for p in raced.check.probes[:3]
            ),
        ]
    return [*lines, f"  to reproduce: tune export {quote(str(run_path))} --trial {number}"]


def _speed_lines(raced: Finalist) -> list[str]:
    """Return lines for a header: the least speed-up, that on each of the data, and a step's."""
    if raced.interval is None or (i := raced.least) is None:
        return []
    of = ", the least of what follows" if raced.others else f", {GIVEN_ALONE}"
    ends = i.bounds(f"{i.confidence:.0%} of processes in [{i.low:.3f}, {i.high:.3f}]")
    lines = [
        f"  speed-up over PyTorch eager: {i.speedup:.3f}x, {ends} "
        f"({raced.verdict}; {i.num_processes} processes, cold caches){of}"
    ]
    if raced.others:
        own = raced.interval.words
        lines.append(f"  speed-up with the reference's own weights and inputs: {own}")
    for data in raced.others:
        depends = ": its time depends on them" if data.depends(raced.interval) else ""
        lines.append(
            f"  speed-up with {data.words} in place of the reference's own: "
            f"{data.interval.words}{depends}"
        )
    lines.append(
        f"  latency with the reference's own: {raced.latency_us:.1f} us, baseline "
        f"{raced.baseline_us:.1f} us"
    )
    if raced.step is not None:
        step = raced.step.words
        lines.append(f"  speed-up of a step of training, forward and gradients: {step}")
    return lines
