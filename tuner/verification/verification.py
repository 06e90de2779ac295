"""From ranked trials to a verified file: compile, check and race each finalist's exported file.

Every verdict is on disk before the next question, in `checks.jsonl`: no later session repeats it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from tuner.errors import WorkerError
from tuner.evaluate.contender import Contender
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.profiling import profile_into
from tuner.evaluate.race import Race, finalist
from tuner.evaluate.racing import Racer
from tuner.evaluate.verifier import Answered, Verifier
from tuner.kernel.toolchain import Toolchain
from tuner.planning.gaining import bound_of
from tuner.planning.observing import Observer, Progress
from tuner.planning.planning import Planned
from tuner.planning.schedule import MIN_PROCESSES, Schedule
from tuner.run import Run, RunWriter
from tuner.trial import Check, Finalist, Result, Trial, content_key
from tuner.verification import ranking
from tuner.verification.batching import Batching
from tuner.verification.exporting import ExportCompiler, ExportFile, export_of
from tuner.verification.instead import Instead
from tuner.verification.ranking import despite_kills
from tuner.verification.rivals import Rival
from tuner.verification.together import Tuned, raced_at

__all__ = ["Verification"]

MAX_CHECKED = 3  # times the finalists wanted: how many trials are put to all probes
NUM_SPARES = 2  # files that are compiled before one of those that are checked is rejected
SEEN_SHARE = 0.2  # of a race, from which on its own speed tells what is left


@dataclass(slots=True)
class Verification:
    """The verification of one session.

    `deadline_s` is when it should be over, by `time.monotonic`; None: it takes its time.
    `is_hurried` says whether the user wants no more than what was begun (Ctrl-C).
    """

    planned: Planned
    toolchain: Toolchain
    run: Run
    writer: RunWriter
    verifier: Verifier
    seed: int
    compiler: ExportCompiler
    observer: Observer
    schedule: Schedule
    deadline_s: float | None = None
    is_hurried: Callable[[], bool] = lambda: False
    # Where a GPU is asked, and cores are plenty, side by side: most of a check is the host's work.
    checks_ahead: ThreadPoolExecutor | None = None
    ahead: dict[int, Future[Check]] = field(default_factory=dict)
    spares: list[ExportFile] = field(default_factory=list)  # to check where one is rejected
    shown: int = -1  # whose probes are reported
    files: dict[int, ExportFile] = field(default_factory=dict)  # by trial, as they are kept
    beside: Sequence[Tuned] = ()  # sizes that were tuned for the same file, the smallest first
    batching: Batching = field(init=False)
    instead: Instead = field(init=False)
    rival: Rival = field(init=False)

    def __post_init__(self) -> None:
        """Read what earlier sessions measured."""
        self.instead = Instead(self.planned, self.toolchain, self.run, self.observer, self.export)
        self.batching = Batching(self.run, self.writer, self.observer.on_stage)
        self.rival = Rival(self.planned, self.observer)

    def result(self, trials: Sequence[Trial]) -> tuple[Result | None, list[Finalist]]:
        """Check and race the best trials' files; put the winner under its name.

        Returns:
            The result, None where no file was accepted; and all that had their turn.
        """
        ranked = ranking.ranked_trials(trials)
        by_number = {trial.number: trial for trial in ranked}
        entries: dict[int, Finalist] = {}
        believed: dict[int, Finalist] = {}
        Racer(self.planned.spec).get_ready([self._file(t).contender for t in ranked[:1]])
        if self.checks_ahead:
            self.rival.get_ready(self.schedule.num_processes)
        rejected: list[Finalist] = []
        while not believed:
            chosen = self._checked(ranked, entries)
            if not chosen:
                rejected += (entry for entry in entries.values() if entry not in rejected)
                if not self._leaves_steps(rejected):
                    return None, rejected
                entries = self.instead.of_forward(entries)
                continue
            self._raced(chosen, entries)
            believed = {n: entries[n] for n in chosen if entries[n].interval is not None}
        ties = ranking.tied([*believed.values()])
        winner = ties[0]
        notes = [*self.schedule.reductions, *self.instead.words_of(rejected)]
        exported = entries[winner]
        is_fallback, together = False, None
        if self.beside:
            fastest = None if self.instead.is_wanted(exported) else by_number[winner]
            is_faster = exported.verdict == "faster"
            own = Tuned(self.planned, fastest, self.run.path.name, is_faster)
            together, more = self.instead.together([*self.beside, own])
            notes += more
        if together is not None:
            self._accept(believed, entries)
            exported = together
            notes += ranking.remarks_on(exported, self.planned.family.model_new)
        else:
            accept = partial(self._accept, believed, entries)
            exported, is_fallback, more = self.instead.settled(by_number[winner], exported, accept)
            notes += more
        compiled = None
        if exported.check.is_accepted:
            compiled = self.rival.result(exported, self.run.export_path, self.schedule)
        outline, baseline_us = self.planned.outline, exported.baseline_us
        least_us = None if outline is None else bound_of(self.planned, outline).bound_us
        result = Result(
            winner=winner,
            finalists=tuple(entries.values()),
            ties=tuple(ties),
            exported=exported,
            export_path=str(self.run.export_path),
            notes=tuple(notes),
            is_fallback=is_fallback,
            compiled=compiled,
            effort=self.schedule.effort,
            bound_us=least_us,
            baseline_over_bound=baseline_us / least_us if baseline_us and least_us else None,
        )
        return result, list(entries.values())

    def _accept(
        self, numbers: Iterable[int], entries: Mapping[int, Finalist], winner: int | None = None
    ) -> None:
        """Put files that were raced under their names, the winner under the usual one."""
        for number in numbers:
            file = self.batching.kept(self.files[number])
            if number == winner:
                file = replace(file, path=self.run.export_path)
            file.accept(entries[number], self.schedule.samples_s, self.schedule.reductions)

    def profile(self, result: Result) -> None:
        """Record the kernels of one call, where there is time; nothing else depends on them."""
        is_late = self.deadline_s is not None and time.monotonic() > self.deadline_s
        if not is_late and not self.is_hurried():
            self.observer.on_stage("profiling one call, kernel by kernel")
            if why := profile_into(self.run.path, self.planned.spec, result, self.rival.ready):
                self.observer.on_stage(f"  not profiled: {why}")

    def export(
        self, file: ExportFile, at: Mapping[str, JobSpec], *, is_of_pytorch: bool = False
    ) -> Finalist:
        """Check and race one file alone, and put it under its name, or beside it as rejected.

        It is raced `at` further problems as well, each with a name; of PyTorch's own modules the
        race is short.
        """
        if is_of_pytorch:
            self.schedule = self.schedule.of_pytorch
        Racer(self.planned.spec).get_ready([file.contender])
        entry = self._check(file)
        file = self.batching.known(file) or file
        races: dict[str, Finalist] = {}
        if entry.check.is_accepted and entry.interval is None:
            entries, before = {file.trial: entry}, self.files.get(file.trial, file)
            self.files[file.trial] = file
            self._raced([file.trial], entries)
            entry, self.files[file.trial] = entries[file.trial], before
        for words, spec in at.items() if entry.check.is_accepted and not entry.at_sizes else ():
            if spec.sizes == self.planned.spec.sizes:
                races[words] = replace(entry, check=Check(True, "", "", ()), by_batch=None)
                continue
            self.observer.on_stage(f"racing {file.unverified_path.name} at {words}")
            races[words] = raced_at(file, spec, self.schedule, self.deadline_s)
        if races:
            entry = replace(entry, at_sizes=races)
            self.writer.append_check(entry)
        if entry.check.is_accepted:
            file.accept(entry, self.schedule.samples_s, self.schedule.reductions)
        else:
            file.reject(entry)
        return entry

    def compile_ahead(self, trial: Trial) -> None:
        """Compile a trial's file while the search goes on."""
        self.compiler.submit(self._file(trial))

    def _leaves_steps(self, rejected: Sequence[Finalist]) -> bool:
        """Go on with PyTorch's steps of training where those of each file are what is rejected."""
        if (planned := self.instead.with_pytorchs_steps(rejected)) is None:
            return False
        self.planned, self.instead = planned, replace(self.instead, planned=planned)
        self.files, self.ahead, self.spares = {}, {}, []
        return True

    def _file(self, trial: Trial) -> ExportFile:
        """Return a trial's file, rendered once."""
        if trial.number not in self.files:
            path = self.run.path / "export" / f"trial_{trial.number}.py"
            file = export_of(self.planned, self.toolchain, trial, path, self.run.path)
            self.files[trial.number] = file
        return self.files[trial.number]

    def _checked(self, ranked: Sequence[Trial], entries: dict[int, Finalist]) -> list[int]:
        """Put all probes to the best trials until enough of them are accepted.

        What one probe rejects it mostly rejects in its likes, too, so those of another structure
        get their turn first. `entries` are those that had their turn; more are added.
        """
        wanted = self.schedule.num_finalists
        accepted: list[int] = []
        rejected = {ranking.structure(t) for t in ranked if t.number in entries}
        left = [trial for trial in ranked if trial.number not in entries]
        while left and len(entries) < MAX_CHECKED * wanted and len(accepted) < wanted:
            if accepted and (self.is_hurried() or self._is_late(len(accepted))):
                why = "stopped by the user" if self.is_hurried() else "the time was up"
                self._reduce(f"{len(accepted)} of {wanted} finalists: {why}")
                break
            # Stable: else the fastest first.
            left.sort(key=lambda t: (t.number not in self.ahead, ranking.structure(t) in rejected))
            self._begin(left, wanted - len(accepted))
            trial = left.pop(0)
            file = self._file(trial)
            entry = entries[trial.number] = self._check(file)
            file = self.files[trial.number] = self.batching.known(file) or file
            if entry.check.is_accepted:
                accepted.append(trial.number)
            else:
                file.reject(entry)
                rejected.add(ranking.structure(trial))
                if not accepted:
                    left = self.instead.worth_a_check(left, trial, entry)
        return accepted

    def _begin(self, left: Sequence[Trial], num: int) -> None:
        """Compile the first `num`; where cores are plenty also spares, and check side by side."""
        for file in map(self._file, left[:num]):
            self.compiler.submit(file)
            if self.checks_ahead and file.trial not in self.ahead and not self._known(file):
                self.ahead[file.trial] = self.checks_ahead.submit(self._verdict_ahead, file)
        if self.checks_ahead:
            likes = {ranking.structure(t) for t in left[:num]}
            others = sorted(left[num:], key=lambda t: ranking.structure(t) in likes)
            self.spares = [self._file(t) for t in others[:NUM_SPARES]]
            for spare in self.spares:
                self.compiler.submit(spare)

    def _verdict_ahead(self, file: ExportFile) -> Check:
        """Put all probes to a file; where one rejects it, begin with a spare in its place."""
        ahead, check = self.ahead, self._verdict(file)  # another, where PyTorch's steps are next
        if not check.is_accepted and self.checks_ahead:
            with contextlib.suppress(IndexError, RuntimeError):  # none is left; all is shut down
                spare = self.spares.pop(0)
                if spare.trial not in ahead and not self._known(spare):
                    ahead[spare.trial] = self.checks_ahead.submit(self._verdict_ahead, spare)
        return check

    def _check(self, file: ExportFile) -> Finalist:
        """Return the verdict on a file: that of an earlier session where there is one."""
        known = self._known(file)
        if known:
            verdict = "accepted" if known[-1].check.is_accepted else "rejected"
            self.observer.on_stage(f"{file.name}: {verdict} on every probe by an earlier session")
            if known[-1].check.is_accepted:  # in place of one that was compiled ahead
                self.batching.kept(file).write()
            self.observer.on_finalist(known[-1])
            return known[-1]
        self.compiler.finish(file, self.observer, self.schedule.costs.compile_s)
        ahead = self.ahead.pop(file.trial, None)
        file = self.batching.kept(file) if ahead is None else file
        self.observer.on_stage(f"checking {file.unverified_path.name} on every probe")
        self.shown = file.trial
        check = ahead.result() if ahead is not None else self._verdict(file)
        file = self.batching.known(file) or file
        entry = replace(finalist(file.trial, check, None, 0), key=file.key, seed=self.seed)
        entry = replace(entry, by_batch=file.by_batch)
        self.writer.append_check(entry)
        self.observer.on_finalist(entry)
        return entry

    def _known(self, file: ExportFile) -> list[Finalist]:
        key = kept.key if (kept := self.batching.known(file)) else ""
        return ranking.judged(key, self.run.checks())

    def _verdict(self, file: ExportFile) -> Check:
        """Put all probes to a file, as soon as it is compiled; report them while it is shown."""
        self.compiler.submit(file).result()
        (file := self.batching.kept(file)).write()
        self.compiler.submit(file).result()

        def on_probe(answered: Answered) -> None:
            if self.checks_ahead:
                self.rival.open_sets(self.schedule)
            if self.shown == file.trial:
                self.observer.on_probe(answered)

        # Strictly: it is a drop-in, too.
        return despite_kills(lambda: self.verifier.check(file.contender, on_probe)).strictly()

    def _is_late(self, num_accepted: int) -> bool:
        """Whether there is no time for one more check and the race behind it."""
        if self.deadline_s is None:
            return False
        one_more = replace(self.schedule, num_finalists=num_accepted + 1)
        check_s = self.verifier.seconds or one_more.costs.check_s
        needed_s = one_more.race_s + one_more.costs.batches_s + check_s
        return time.monotonic() + needed_s > self.deadline_s

    def _reduce(self, what: str) -> None:
        self.schedule = replace(self.schedule, reductions=(*self.schedule.reductions, what))
        self.observer.on_stage(what)

    def _raced(self, chosen: list[int], entries: dict[int, Finalist]) -> None:
        """Race files that were accepted; who crashes or hangs is out, and the others start again.

        `chosen` and `entries` are brought up to date.
        """
        keys = {entries[number].race_key for number in chosen}
        wanted = self.schedule.num_processes
        is_enough = any(len(entries[n].samples_us) >= wanted for n in chosen)
        if len(keys) == 1 and "" not in keys and is_enough:
            self.observer.on_stage("raced by an earlier session")
            return
        files = self.files
        while chosen:
            contenders = [files[number].contender for number in chosen]
            try:
                race = despite_kills(partial(self._race, contenders))
            except WorkerError as error:
                name, reason = ranking.blamed(error, [c.name for c in contenders])
                number = next(n for n in chosen if files[n].contender.name == name)
                chosen.remove(number)
                check = replace(entries[number].check, is_accepted=False, reason=reason)
                self._record(files[number], finalist(number, check, None, 0), "", entries)
                files[number].reject(entries[number])
                continue
            race_key = content_key(secrets.token_hex(8))
            for lane, number in enumerate(chosen, 1):
                entry = finalist(number, entries[number].check, race, lane)
                self._record(files[number], entry, race_key, entries)
                self.rival.keep(entries[number], race, lane)
            return

    def _record(
        self, file: ExportFile, entry: Finalist, race_key: str, entries: dict[int, Finalist]
    ) -> None:
        seed = entries[entry.trial].seed
        entry = replace(entry, key=file.key, seed=seed, race_key=race_key, by_batch=file.by_batch)
        self.writer.append_check(entry)
        entries[entry.trial] = entry
        self.observer.on_finalist(entry)

    def _race(self, contenders: Sequence[Contender]) -> Race:
        num_processes = MIN_PROCESSES if self.is_hurried() else self.schedule.num_processes
        files = f"{len(contenders)} file{'s' * (len(contenders) > 1)}"
        self.observer.on_stage(f"racing {files} against the baseline")
        start_s = time.monotonic()

        def on_round(share: float) -> None:
            spent_s = time.monotonic() - start_s
            planned_s, found_s = self.schedule.race_s, spent_s / max(share, 1e-3)
            left_s = (1.0 - share) * (found_s if share > SEEN_SHARE else max(planned_s, spent_s))
            self.observer.on_progress(Progress("racing", round(100 * share), 100, left_s))

        def goes_on(num_raced: int) -> bool:
            has_time = self.deadline_s is None and not self.is_hurried()
            if more := has_time and num_raced < num_processes + self.schedule.more_processes:
                self.observer.on_stage(f"{num_raced} sets leave open who is faster: one more")
            return more

        def race_of(contenders: list[Contender]) -> Race:
            planned, schedule = self.planned, self.schedule
            others, has_steps = schedule.raced_on(planned.config.others, planned.takes_steps)
            return Racer(planned.spec, self.rival.ready).race(
                contenders, num_processes=num_processes, seconds=schedule.samples_s, others=others,
                has_steps=has_steps, on_round=on_round, until_s=self.deadline_s, goes_on=goes_on,
            )  # fmt: skip

        self.verifier.free()  # what a race takes of a GPU may be nearly all of it
        on_round(0.0)  # the first round ends only once all processes are warm
        race = self.rival.beside(contenders, race_of)
        if race.num_processes < num_processes:
            raced = f"{race.num_processes} of {num_processes} sets of processes"
            self._reduce(f"{raced}: the time was up")
        for note in race.notes():
            self.observer.on_stage(note)
        return race
