"""One session on a run: check the defaults, search, verify the best, report."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from traceback import format_exception

from tuner.environment import SessionRecord
from tuner.errors import InputError, NothingCorrectError, TunerError
from tuner.evaluate.evaluator import DeviceEvaluator, Devices
from tuner.evaluate.runner import Terms
from tuner.evaluate.verifier import Verifier
from tuner.fleet.dispatch import QUEUED
from tuner.kernel.builder import Builder
from tuner.kernel.cache import keep
from tuner.kernel.toolchain import Toolchain
from tuner.machine.host import has_many_cores
from tuner.machine.platforms import is_gpu
from tuner.planning.earlier import Earlier, sources_from, starts_of, warm_starts
from tuner.planning.observing import Observer, Recorder
from tuner.planning.planning import Planned
from tuner.planning.schedule import COMPILE_S, START_S, Costs, check_s_on_cpu, scheduled
from tuner.records import SET_ASIDE
from tuner.review.report import write_report
from tuner.run import FAILURE_NAME, Outlook, Run, RunWriter
from tuner.search.study import SearchBudget, search
from tuner.search.surrogate import Remaining
from tuner.search.t4 import to_t4
from tuner.search.transfer import Source as WarmStart
from tuner.session.building import FewerRows, builder_of
from tuner.session.fleets import Screened, Source
from tuner.session.news import News
from tuner.storage import storage_errors, write_whole
from tuner.trial import Build, Candidate, Measurement, Outcome, Params, Status, Trial, Value
from tuner.verification.batching import seconds_of
from tuner.verification.defaults import check_defaults
from tuner.verification.exporting import ExportCompiler
from tuner.verification.ranking import ranked_trials, replaced, why_nothing_correct
from tuner.verification.referee import refereed
from tuner.verification.together import Tuned
from tuner.verification.verification import Verification

__all__ = ["Session"]

FLUSH_S = 0.02  # of a cold call on a CPU: what clears its caches
# From these shares of the search's time on, that many of the best trials' files are compiled
# ahead. Not on the processor that is being timed.
AHEAD = {0.5: 1, 0.8: 3}


@dataclass(frozen=True, slots=True)
class _Search:
    """What a session searches with."""

    devices: Devices
    evaluator: DeviceEvaluator
    builder: Builder
    writer: RunWriter
    verification: Verification | None


class Session:
    """One session on a run: from the first trial of it to the report.

    `started_s` is when the user began to wait, by `time.monotonic`; `overrides` are new totals
    that hold from this session on. `beside` are further sizes that the exported file is for,
    `sources` other runs that the search's model starts from. `builder` is the caller's own.
    """

    def __init__(
        self,
        planned: Planned,
        toolchain: Toolchain,
        run: Run,
        observer: Observer,
        should_stop: Callable[[], bool],
        *,
        verifies: bool = True,
        started_s: float | None = None,
        earlier: Earlier | None = None,
        source: Source | None = None,
        overrides: Mapping[str, Value] | None = None,
        beside: Sequence[Tuned] = (),
        sources: Sequence[WarmStart] = (),
        builder: Builder | None = None,
    ) -> None:
        self._builder = builder
        self._ahead: Future[None] | None = None  # a first report
        self.beside, self._sources = beside, sources
        self.planned = planned
        self.toolchain = toolchain
        self.run = run
        self.observer = Recorder(observer, run)
        self.should_stop = should_stop
        self.verifies = verifies
        self.started_s = time.monotonic() if started_s is None else started_s
        self._source = source or Source()
        self._overrides = overrides or {}
        self._earlier = earlier or Earlier()
        self.first = starts_of(planned, self._earlier)
        # What a quick run takes instead of a search.
        self._is_known = planned.config.effort == "quick" and bool(self._earlier.same)
        self.trials = list(run.trials())
        self.notes: list[str] = []
        self._news = News(self.observer, self.notes)
        self._load = os.getloadavg()[0]  # before we load it
        templates = {str(params["template"]) for params in self.first}
        languages = [planned.family.templates[name].language for name in templates]
        costs = Costs(
            max(COMPILE_S[language] for language in languages),
            num_cores=planned.num_workers,
            start_s=START_S[planned.device.kind],
            batches_s=seconds_of(planned),
            num_sizes=1 + len(beside) if beside else 0,
        )
        self.asked = self.schedule = scheduled(planned.config, costs)

    def work(self) -> Run:
        """Search; verify and export, unless the search is all that was asked for; report."""
        with ExitStack() as stack:
            writer = stack.enter_context(self.run.locked())
            self.trials = list(self.run.trials())  # after a half-written line was dropped
            self._name_set_aside()
            builder = self._builder
            if builder is None:
                fleet = self._source.builders()
                how = (fleet, self.run.path.name, self._news.take)
                builder = stack.enter_context(builder_of(self.planned, self.toolchain, *how))
            try:
                if self.verifies:
                    self._verified(stack, writer, builder)
                else:
                    self._search(writer, builder, None)
                    if not any(t.outcome.latency_us for t in self.trials):
                        raise NothingCorrectError(why_nothing_correct(self.trials, ()))
            except Exception as error:  # not Ctrl-C, which ends at once
                with suppress(TunerError):  # a full disk, say: the first error is the one
                    self._report()
                    if not isinstance(error, (InputError, NothingCorrectError)):
                        writer.write_text(FAILURE_NAME, "".join(format_exception(error)))
                raise
            self._report()
        return self.run

    def _name_set_aside(self) -> None:
        """Say which recorded trials disagree with their samples; they are no finalists."""
        for trial in self.trials:
            if trial.outcome.reason.startswith(SET_ASIDE):
                said = f"trials.jsonl, trial {trial.number}: {trial.outcome.reason}"
                self.observer.on_stage(f"warning: {said}\n  next: tune again, if it was the best")
                self.notes.append(said)

    def _verified(self, stack: ExitStack, writer: RunWriter, builder: Builder) -> None:
        """Search between a check of the defaults and the verification of what was found."""
        planned = self.planned
        seed = secrets.randbits(31)
        verifier = stack.enter_context(Verifier(planned.spec, seed=seed))
        if self.schedule.effort != "quick" and not self.trials:  # a resumed run had them
            check_defaults(planned, self.first, builder, verifier, self.observer)
        if verifier.seconds:
            self._learn(check_s=verifier.seconds)
        compiler = ExportCompiler(planned.spec.device, planned.num_workers)
        stack.callback(compiler.close)
        is_parallel = is_gpu(planned.device.kind) and has_many_cores() and planned.is_small
        checks_ahead = ThreadPoolExecutor(self.asked.num_finalists) if is_parallel else None
        if checks_ahead is not None:
            stack.callback(checks_ahead.shutdown, wait=False, cancel_futures=True)
        verification = Verification(
            planned, self.toolchain, self.run, writer, verifier, seed, compiler, self.observer,
            self.schedule, self._deadline_s, checks_ahead=checks_ahead, beside=self.beside,
        )  # fmt: skip
        stack.callback(verification.rival.close)
        getting_ready = ThreadPoolExecutor(1)
        stack.callback(getting_ready.shutdown, wait=False, cancel_futures=True)
        if self._is_known or is_parallel:  # while the first candidates are compiled
            getting_ready.submit(verifier.prepare)  # what goes wrong is raised by the check
        if self._is_known:  # the best until now is likely to stay the best
            verification.compile_ahead(Trial(0, "", self.first[0], "", Outcome(Status.CORRECT)))
        self._fewer_rows = FewerRows(planned, self.toolchain)
        stack.callback(self._fewer_rows.close)
        self._search(writer, builder, verification)
        self._fewer_rows.begin(ranked_trials(self.trials)[: self.asked.num_finalists])
        if is_parallel:
            verifier.open_ahead()
            # What a first report takes is loading what draws it.
            self._ahead = getting_ready.submit(self._report_ahead)
        was_stopped, trials = self.should_stop(), self.trials
        if not was_stopped and not self._is_late:
            trials = refereed(
                planned, self._terms, builder, trials, num_finalists=self.asked.num_finalists,
                writer=writer, observer=self.observer,
            )  # fmt: skip
        self._fit(is_searched=True)
        verification.schedule = self.schedule
        verification.is_hurried = lambda: not was_stopped and self.should_stop()
        with builder.paused():  # what was asked for ahead may still compile
            result, entries = verification.result(trials)
        if result is None:
            raise NothingCorrectError(why_nothing_correct(self.trials, entries))
        notes = (*self.notes, *result.notes, *replaced(self.run.result(), result))
        writer.write_result(replace(result, notes=notes))
        verification.profile(result)
        getting_ready.submit(verifier.close)  # while the report is written

    def _learn(self, **seconds: float) -> None:
        """Correct what the parts of the verification are expected to take."""
        costs = replace(self.asked.costs, **seconds)  # type: ignore[arg-type]
        self.asked = replace(self.asked, costs=costs)

    @property
    def _terms(self) -> Terms:
        config = self.planned.config
        how = config.measure
        return Terms(how.screen_s, how.max_noise, how.stop_slow, config.search.seed, config.others)

    @property
    def _is_late(self) -> bool:
        """Whether the time that is left is less than what the verification takes."""
        left_s = math.inf if self._deadline_s is None else self._deadline_s - time.monotonic()
        return left_s < self.schedule.verification_s

    @property
    def _deadline_s(self) -> float | None:
        time_s = self.planned.config.time_s
        return None if time_s is None else self.started_s + time_s

    def _fit(self, *, is_searched: bool) -> None:
        """Fit the schedule to the time that is left, and show it."""
        # From what was asked for: a search that ended early gives back what it was to take.
        self.schedule = self.asked
        if is_searched:
            self.schedule = replace(self.schedule, search_s=0.0)
        if self._deadline_s is not None:
            left_s = self._deadline_s - time.monotonic()
            self.schedule = self.schedule.fitted(left_s, is_searched=is_searched)
        self.observer.on_schedule(self.schedule)

    def _report(self) -> None:
        if self._ahead is not None and not self._ahead.cancel():
            wait([self._ahead])  # or it would be written over this one
        self.observer.on_stage("writing the report")
        t4 = to_t4(self.run.path.name, self.trials, self.run.environment())
        write_whole(self.run.path / "results.json", t4)
        write_report(self.run)

    def _report_ahead(self) -> None:
        """Report the search while its best are checked; what goes wrong, the last one says."""
        with suppress(TunerError):
            write_report(self.run)

    # ---- search --------------------------------------------------------------------------------

    def _search(
        self, writer: RunWriter, builder: Builder, verification: Verification | None
    ) -> None:
        planned = self.planned
        self.observer.on_stage("preparing the probes and timing the baseline")
        devices = self._source.devices(
            Screened(planned, self.run.path.name, self._terms, builder, self._news.take)
        )
        evaluator = DeviceEvaluator(
            planned.family, devices, facts=planned.facts, builder=builder, keep=self._keep
        )
        if evaluator.overlaps and not self.trials:  # compile while the worker gets ready
            for params in self.first:
                evaluator.submit(params)
        try:
            baseline = devices.start()
            self._begin(devices, evaluator, builder, baseline)
            if verification is not None:
                self._fit(is_searched=False)
            why = self._searched(_Search(devices, evaluator, builder, writer, verification))
            self.observer.on_stage(why)
            self._news.say_of_waiting(devices.waited_s)
            self._news.say_of_builds(self.trials)
        finally:
            devices.close()
            self._news.say_of_devices()

    def _begin(
        self,
        devices: Devices,
        evaluator: DeviceEvaluator,
        builder: Builder,
        baseline: Measurement,
    ) -> None:
        """Record the session, and how many candidates are in flight; say what the baseline is."""
        config = self.planned.config
        # Kept for later sessions: what is asked depends on how many are in flight.
        usual = builder.at_once + QUEUED * len(devices.baselines_us)
        environment = self.run.environment()
        evaluator.ahead = environment.in_flight or config.search.in_flight or usual
        if evaluator.ahead < len(devices.baselines_us):
            self._news.take("the run keeps", f"{evaluator.ahead} in flight: others are idle")
        self._news.say_of_devices()
        session = SessionRecord(
            len(self.trials), baseline.latency_us, baseline.noise,
            dict(devices.baselines_us), dict(devices.together_us),
        )  # fmt: skip
        replace(
            environment,
            overrides={**environment.overrides, **self._overrides},
            in_flight=evaluator.ahead,
            baseline_us=baseline.latency_us,
            baseline_noise=baseline.noise,
            sessions=(*environment.sessions, session),
        ).write(self.run.path)
        self.observer.on_run(self.run, baseline, self.trials)
        self._news.say_of_baseline(baseline, config.others, self._load)
        call_s, outline = baseline.latency_us * 1e-6, self.planned.outline
        is_cpu = not is_gpu(self.planned.device.kind)
        self._learn(call_s=call_s + is_cpu * FLUSH_S)
        if is_cpu and outline is not None and self.asked.costs.check_s == Costs().check_s:
            rows = self.planned.num_rows or 1
            least_s = min(baseline.samples_us) * 1e-6  # other programs stretch the rest
            self._learn(check_s=check_s_on_cpu(least_s, outline.num_bytes, rows))

    def _searched(self, work: _Search) -> str:
        """Search; return why it ended."""
        planned, config = self.planned, self.planned.config
        first, most = self._first_trials(), config.search.trials
        if self._is_known and work.verification is not None:
            most = min(most, len(first))
        earlier = sources_from(planned, self._earlier.runs, self.run.path.parent)
        sources = [*warm_starts(config, planned.family), *earlier, *self._sources]
        stop = config.search.stop or self.schedule.stop
        budget = SearchBudget(most, self._search_s(), stop, planned.least_trials)
        self.observer.on_budget(most, budget.timeout_s)
        with storage_errors(self.run.journal_path):  # Optuna's own file
            return search(
                planned.space,
                work.evaluator,
                sampler=config.search.sampler,
                seed=config.search.seed,
                budget=budget,
                sources=sources,
                journal=self.run.journal_path,
                previous=list(self.trials),
                record=partial(self._record, work),
                first=first,
                waited_s=lambda: work.devices.waited_s,
                should_stop=self.should_stop,
                on_remaining=partial(self._record_outlook, work.writer),
                at_once=work.devices.at_once,
            )

    def _record(self, work: _Search, trial: Trial) -> None:
        """Write a trial and show it; late in the search, compile the best files ahead."""
        work.writer.append(trial)
        self.trials.append(trial)
        if work.devices.at_once > 1:
            self.observer.on_work([*work.devices.at_work(), *work.builder.at_work()])
        self.observer.on_trial(trial, work.evaluator.num_building)
        self._news.say_of_devices()
        if work.verification is not None and work.devices.is_apart:
            self._compile_ahead(work.verification)

    def _record_outlook(self, writer: RunWriter, number: int, remaining: Remaining) -> None:
        """Write what the search expects of the rest, and show it."""
        if number >= len(self.trials):  # not of a time that is only repeated
            within = {f"{share:g}": chance for share, chance in remaining.within.items()}
            writer.append_outlook(Outlook(number, remaining.improvement, within))
            self.observer.on_remaining(remaining.improvement, remaining.within)

    def _first_trials(self) -> list[Params]:
        """Return what to try before the sampler is asked, and say whose it is."""
        suggested = self._earlier.ahead_of(self.planned, is_known=self._is_known)
        if not self.trials:
            for number, suggestion in enumerate(suggested):
                self.observer.on_stage(f"trial {number}: {suggestion.words}")
        found = [suggestion.params for suggestion in suggested]
        return found + [params for params in self.first if params not in found]

    def _search_s(self) -> float:
        """Return the search's time, over all sessions, as `search` counts it."""
        if self._deadline_s is None:
            return self.schedule.search_s
        spent_s = self.trials[-1].elapsed_s if self.trials else 0.0
        return min(self.planned.config.search.timeout_s, spent_s + self.schedule.search_s)

    def _compile_ahead(self, verification: Verification) -> None:
        """Compile the files of the best trials while the search goes on, late in the search."""
        elapsed_s, search_s = self.trials[-1].elapsed_s, self._search_s()
        for share, num_files in AHEAD.items():
            if elapsed_s > share * search_s:
                num_files = min(num_files, self.schedule.num_finalists)
                for trial in ranked_trials(self.trials)[:num_files]:
                    verification.compile_ahead(trial)
                    self._fewer_rows.begin([trial])

    def _keep(self, candidate: Candidate, build: Build) -> None:
        keep(self.run.path / "candidates" / candidate.key, candidate, build)
