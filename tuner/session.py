"""One sitting on a run: search, prove the finalists, export the winner, report."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.errors import NothingCorrectError, TunerError, WorkerError
from tuner.evaluate.evaluator import DeviceEvaluator
from tuner.evaluate.measure import tie_set
from tuner.evaluate.prover import Contender, Prover, Race, compared_with_compiled, finalist
from tuner.export.module import fallback_text
from tuner.kernel.builder import Builder
from tuner.kernel.cache import default_cache_dir
from tuner.kernel.toolchain import SOURCE_NAMES, Toolchain
from tuner.planning import Observer, Planned, first_of_each, num_workers, sources_of, stop_rule_of
from tuner.proving import blamed, proved_export, proved_file
from tuner.review.report import write_report
from tuner.run import Outlook, Run, RunWriter, storage_errors, write_whole
from tuner.search.recorded import to_t4
from tuner.search.study import SearchBudget, search
from tuner.search.surrogate import Remaining
from tuner.trial import Build, Candidate, Compiled, Finalist, Result, Trial

__all__ = ["Session", "compared"]

MAX_CHECKED = 3  # times the finalists wanted: how many trials are put to all probes


class Session:
    """One sitting on a run: from the first trial of it to the report."""

    def __init__(
        self,
        planned: Planned,
        toolchain: Toolchain,
        run: Run,
        observer: Observer,
        should_stop: Callable[[], bool],
        *,
        proves: bool = True,
    ) -> None:
        self.planned = planned
        self.toolchain = toolchain
        self.run = run
        self.observer = observer
        self.should_stop = should_stop
        self.proves = proves
        self.trials = list(run.trials())

    def work(self, environment: dict[str, Any]) -> Run:
        """Search; prove and export, unless the search is all that was asked for; report."""
        with self.run.locked() as writer:
            self.trials = list(self.run.trials())  # after a half-written line was dropped
            with Builder(
                self.toolchain,
                default_cache_dir(),
                num_workers=num_workers(self.planned),
                triton_sizes=self.planned.screening_sizes,
            ) as builder:
                try:
                    self._search(writer, builder, environment)
                    if self.proves:
                        writer.write_result(self._prove(writer, builder))
                    elif not _ranked(self.trials):
                        raise NothingCorrectError(_nothing_correct(self.trials, ()))
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
            stop_slow=config.measure.stop_slow,
            seed=config.search.seed,
            ahead=config.search.in_flight,
            num_workers=num_workers(planned),
            keep=self._keep,
        )
        try:
            baseline = evaluator.start()
            environment |= {
                "baseline_us": baseline.latency_us,
                "baseline_noise": baseline.noise,
                "sittings": [  # each with its own, which its trials are compared with
                    *environment.get("sittings", []),
                    {
                        "from_trial": len(self.trials),
                        "baseline_us": baseline.latency_us,
                        "baseline_noise": baseline.noise,
                    },
                ],
            }
            writer.write_text("environment.json", json.dumps(environment, indent=1))
            self.observer.on_run(self.run, baseline, self.trials)

            def record(trial: Trial) -> None:
                writer.append(trial)
                self.trials.append(trial)
                self.observer.on_trial(trial, evaluator.num_building)

            def told(number: int, remaining: Remaining) -> None:
                if number >= len(self.trials):  # not of a time that is only repeated
                    within = {f"{share:g}": chance for share, chance in remaining.within.items()}
                    writer.append_outlook(Outlook(number, remaining.improvement, within))
                    self.observer.on_remaining(remaining.improvement, remaining.within)

            with storage_errors(self.run.journal_path):  # Optuna's own file
                why = search(
                    planned.space,
                    evaluator,
                    sampler=config.search.sampler,
                    seed=config.search.seed,
                    budget=SearchBudget(
                        config.search.trials, config.search.timeout_s, stop_rule_of(config)
                    ),
                    sources=sources_of(config),
                    journal=self.run.journal_path,
                    previous=list(self.trials),
                    record=record,
                    first=first_of_each(planned.space, planned.family),
                    should_stop=self.should_stop,
                    on_remaining=told,
                )
            self.observer.on_stage(why)
        finally:
            evaluator.close()

    def _keep(self, candidate: Candidate, build: Build) -> None:
        """Keep what was compiled and what the compiler said."""
        folder = self.run.path / "candidates" / candidate.key
        if (folder / "log.txt").exists():  # it is written last
            return
        for left in folder.glob(".*"):  # by a tuner that was killed at this
            left.unlink()
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
        compiled = self._beside_compiled(prover) if exported.check.is_accepted else None
        return Result(
            winner=winner,
            finalists=tuple(entries),
            ties=tuple(ties),
            exported=exported,
            export_path=str(self.run.export_path),
            notes=tuple(notes),
            is_fallback=is_fallback,
            compiled=compiled,
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
                name, reason = blamed(error, [c.name for c in contenders.values()])
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
        exported = proved_export(
            self.planned, self.toolchain, trial, raced, self.run.export_path, self.run.path,
            self.observer,
        )  # fmt: skip
        if not exported.check.is_accepted:
            return exported, [f"the exported file was rejected: {exported.check.reason}"]
        return exported, compared(raced, exported)

    def _beside_compiled(self, prover: Prover) -> Compiled | None:
        """Race the exported file with torch.compile, where the config asks for that."""
        measure = self.planned.config.measure
        mode = measure.torch_compile
        if mode is None:
            return None
        self.observer.on_stage(f"racing the exported file and torch.compile ({mode})")
        file = Contender.of_file(self.run.export_path, is_deterministic=False)
        rival = Contender.of_compiled(self.planned.task, mode)
        try:
            race = prover.race(
                [file, rival], num_processes=measure.num_processes, seconds=measure.finalists_s
            )
        except WorkerError as error:  # the file was proved already, and stays so
            return Compiled(mode, error=str(error).strip().splitlines()[0])
        return compared_with_compiled(mode, race)

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
        exported = proved_file(
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


def compared(raced: Finalist, exported: Finalist) -> list[str]:
    """Say so when the file's speed is not its candidate's, or not the same on other values."""
    one, other, notes = raced.interval, exported.interval, []
    if one is not None and other is not None and not one.overlaps(other):
        notes.append(
            f"the exported file runs at {other.speedup:.2f}x where the candidate ran at "
            f"{one.speedup:.2f}x: the way it is called differs (launch work, allocations)"
        )
    if exported.depends_on_values:
        assert other is not None and exported.elsewhere is not None
        notes.append(
            f"with random weights and normal inputs in place of the reference's own it runs at "
            f"{exported.elsewhere.speedup:.2f}x, not {other.speedup:.2f}x: its time depends on "
            f"them"
        )
    return notes


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Return correct trials, fastest first; of those with the same machine code, one."""
    known = {t.number for t in trials}  # one may be like a later one, which a stop dropped
    correct = [t for t in trials if t.outcome.latency_us and t.outcome.same_as not in known]
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
