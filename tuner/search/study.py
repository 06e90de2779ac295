"""The ask / evaluate / tell loop over a finite space; owns the Optuna study.

Knows nothing of devices or compilers: it hands parameters to an `Evaluator`, keeps several
of them in flight so that builders work ahead of the device, and records every outcome before
it asks again. Outcomes are told in the order of asking, and each question is asked when just as
many are told, so that the sequence of questions depends on the seed and the outcomes alone; while
the next one still builds, and while a question is thought out, the device works on those that are
built. A resumed search asks the questions of the earlier
sessions again and takes the recorded outcomes for answers; it then goes on exactly as it would
have without the interruption.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import optuna
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend
from optuna.trial import TrialState

from tuner.search.bayesian import JUDGE_EVERY
from tuner.search.drawn import CENSORED, distributions, encoded, params_of
from tuner.search.samplers import make_sampler
from tuner.search.surrogate import Remaining
from tuner.search.transfer import Source
from tuner.space.search_space import SearchSpace
from tuner.trial import Outcome, Params, Status, Trial

__all__ = ["Evaluator", "Pending", "SearchBudget", "StopRule", "search"]

STUDY_NAME = "tune"
LOOK_AGAIN_S = 0.05  # at what else was asked for, while nothing is built
SHARES = (0.01, 0.05)  # of the optimum, for which the chance to be there is told


class Pending(Protocol):
    """A candidate on its way: rendered, being built."""

    @property
    def candidate_key(self) -> str:
        """The candidate's content key, empty when it did not render."""


P = TypeVar("P", bound=Pending)


class Evaluator(Protocol[P]):
    """What the search needs of whatever turns parameters into outcomes."""

    def submit(self, params: Params) -> P:
        """Start working on a configuration; must not wait for it."""

    def first_ready(self, pending: Sequence[P], timeout_s: float | None = None) -> int | None:
        """Wait until one of them can be finished; return the place of the first that can.

        None where that takes longer than `timeout_s`: others may have been submitted meanwhile.
        """

    def finish(self, pending: P, number: int, best_us: float | None) -> Outcome:
        """Wait for a configuration and return what became of it."""

    @property
    def ahead(self) -> int:
        """How many submitted configurations keep the builders busy."""

    @property
    def overlaps(self) -> bool:
        """Whether the search may think, in another thread, while a configuration is finished."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stop when the best is within a share of the optimum (0.02 for 2 %) with a confidence."""

    within: float
    confidence: float


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """When to stop: whichever comes first. Both count what earlier sessions did."""

    trials: int
    timeout_s: float
    stop: StopRule | None = None


@dataclass(slots=True)
class _InFlight(Generic[P]):
    number: int
    trial: optuna.Trial
    params: Params
    position: int  # in `space.feasible`
    started_at: str
    pending: P | None = None  # None for a trial of an earlier session
    outcome: Outcome | None = None  # once there is one
    ended: float = 0.0  # when that was, by `time.monotonic`


class _Diverged(Exception):
    """The sampler asks something else than an earlier session recorded."""


def search(
    space: SearchSpace,
    evaluator: Evaluator[P],
    *,
    sampler: str,
    seed: int,
    budget: SearchBudget,
    journal: Path | None,
    previous: Sequence[Trial],
    record: Callable[[Trial], None],
    first: Sequence[Params] = (),
    should_stop: Callable[[], bool] = lambda: False,
    sources: Sequence[Source] = (),
    on_remaining: Callable[[int, Remaining], None] = lambda number, remaining: None,
) -> str:
    """Search until the budget is used up, the space is exhausted, or `should_stop()`.

    Args:
        space: the feasible configurations.
        evaluator: turns configurations into outcomes.
        sampler: a name of `samplers.SAMPLERS`.
        seed: equal seeds and outcomes give equal sequences.
        budget: trials and seconds, counted from the run's first start.
        journal: Optuna's journal file; written anew from `previous`, which is the truth. None
            keeps the study in memory.
        previous: the trials that the run already holds; they are not evaluated again.
        record: called with each trial, in order; returns when it is on disk.
        first: configurations to try before the sampler is asked, such as known good ones.
        should_stop: asked before every question; what is in flight is then dropped.
        sources: earlier runs that the sampler starts from, where it can.
        on_remaining: called every ten trials with the number of the next and what the rest is
            expected to bring, where the sampler knows; the study's user attribute `remaining`
            holds the same.

    Returns:
        Why it ended, in words.
    """
    loop = partial(
        _loop,
        space=space,
        evaluator=evaluator,
        budget=budget,
        previous=previous,
        record=record,
        should_stop=should_stop,
        on_remaining=on_remaining,
    )
    with _quiet_optuna():
        store = _Journal(journal) if journal else None
        study = _new_study(store, space, sampler, seed, sources)
        for params in first:
            study.enqueue_trial(encoded(params, space))
        try:
            return _written(store, loop(study, store, replayed=previous))
        except _Diverged:  # more builders than then, an edited template, an older tuner's run
            store = _Journal(journal) if journal else None
            study = _new_study(store, space, sampler, seed + len(previous), sources)
            _add_previous(study, space, previous)
            tried = [trial.params for trial in previous]
            for params in first:
                if params not in tried:
                    study.enqueue_trial(encoded(params, space))
            return _written(store, loop(study, store, replayed=()))


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Keep Optuna's own log lines and experimental warnings out of ours."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def _loop(
    study: optuna.Study,
    store: _Journal | None,
    *,
    space: SearchSpace,
    evaluator: Evaluator[P],
    budget: SearchBudget,
    previous: Sequence[Trial],
    replayed: Sequence[Trial],
    record: Callable[[Trial], None],
    should_stop: Callable[[], bool],
    on_remaining: Callable[[int, Remaining], None],
) -> str:
    """Search; `replayed` are the trials of `previous` that are asked for again: all or none.

    Raises:
        _Diverged: the study asks for another configuration than the one recorded; nothing was
            evaluated yet.
    """
    known = {trial.number: trial for trial in replayed}
    number = asked = len(previous) - len(replayed)
    best_us = min((t.outcome.latency_us for t in previous if t.outcome.latency_us), default=None)
    tried = {space.index(trial.params) for trial in previous[:asked]} - {None}
    most, end = max(budget.trials, len(previous)), ""
    flying: deque[_InFlight[P]] = deque()
    clock = _WorkingTime(previous[-1].elapsed_s if previous else 0.0)
    with _Finisher(evaluator, best_us) as finisher:
        is_over = False  # what is finished, and next in order, is still told; the rest is dropped
        while True:
            if number >= len(previous) and not is_over:
                if store is not None:  # once an outcome
                    store.write()
                elapsed_s = clock.seconds()
                if should_stop():
                    is_over, end = True, "stopped by the user after {} trials"
                elif elapsed_s >= budget.timeout_s:
                    is_over, end = True, f"{{}} trials in {elapsed_s:.0f} s: the time is used up"
            if is_over:
                finisher.leave()
                if not flying or flying[0].outcome is None:
                    return _dropped(study, flying, end.format(number))
            while not end and len(flying) < evaluator.ahead:
                if asked >= most:
                    end = f"{budget.trials} trials: the budget is used up"
                    break
                # Counted here as well: where every parameter has one value, Optuna takes these
                # without asking the sampler, again and again.
                if len(tried) == space.num_feasible:
                    end = f"all {space.num_feasible} feasible configurations were tried"
                    break
                if asked not in known:
                    clock.start()
                flying.append(_ask(study, space, evaluator, asked, known.get(asked)))
                finisher.take(flying[-1])
                tried.add(flying[-1].position)
                asked += 1
            if not flying:
                if number in known:
                    raise _Diverged
                return end
            item = flying[0]
            is_held = item.outcome is not None
            if not is_held:
                finisher.wait(item)
            outcome = item.outcome
            if outcome is None:
                continue
            flying.popleft()
            if item.pending is not None:
                ended_s = clock.seconds(item.ended)
                elapsed_s = clock.seconds() if is_held else ended_s
                record(_trial_of(item, outcome, elapsed_s, elapsed_s - ended_s))
            _tell(study, item.trial, outcome)
            number += 1
            if not end and number % JUDGE_EVERY == 0:  # replayed as well: a model may learn
                end = _stopped(study, number, budget.stop, on_remaining)


class _WorkingTime:
    """Seconds of a search's work, over all sittings: of this one, from its first question on.

    Args:
        before_s: of the earlier sittings.
    """

    def __init__(self, before_s: float) -> None:
        self._before_s = before_s
        self._started: float | None = None

    def start(self) -> None:
        """Begin to count, unless it does."""
        if self._started is None:
            self._started = time.monotonic()

    def seconds(self, moment: float | None = None) -> float:
        """Return what was worked until now, or until a moment of `time.monotonic`."""
        self.start()
        assert self._started is not None
        now = time.monotonic() if moment is None else moment
        return self._before_s + now - self._started


class _Finisher(Generic[P]):
    """Gets the outcomes of what is in flight, one after the other, of the first that is built.

    Where the evaluator lets it, a thread does so, and the device works while the sampler thinks.
    Leaving it drops what it works on: whoever owns the evaluator ends that by closing it.

    Args:
        evaluator: of the search.
        best_us: the least time that the search knows.
    """

    def __init__(self, evaluator: Evaluator[P], best_us: float | None) -> None:
        self._evaluator = evaluator
        self._best_us = best_us
        self._waiting: list[_InFlight[P]] = []  # without an outcome, in the order of asking
        self._num_done = 0
        self._error: BaseException | None = None
        self._is_left = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)

    def __enter__(self) -> _Finisher[P]:
        if self._evaluator.overlaps:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Begin with no more of what waits."""
        with self._change:
            self._is_left = True
            self._change.notify_all()

    def take(self, item: _InFlight[P]) -> None:
        """Get an outcome for it, unless it has one."""
        with self._change:
            if item.outcome is None:
                self._waiting.append(item)
                self._change.notify_all()

    def wait(self, item: _InFlight[P]) -> None:
        """Wait until it, or another one, has its outcome."""
        if not self._evaluator.overlaps:
            self._finish_first_ready(list(self._waiting))
            return
        with self._change:
            before = self._num_done
            self._change.wait_for(lambda: item.outcome or self._error or self._num_done > before)
            if item.outcome is None and self._error is not None:
                raise self._error

    def _work(self) -> None:
        try:
            while True:
                with self._change:
                    self._change.wait_for(lambda: self._waiting or self._is_left)
                    if self._is_left:
                        return
                    waiting = list(self._waiting)
                self._finish_first_ready(waiting, LOOK_AGAIN_S)
        except BaseException as error:  # told to who waits
            with self._change:
                self._error = error
                self._change.notify_all()

    def _finish_first_ready(
        self, waiting: Sequence[_InFlight[P]], timeout_s: float | None = None
    ) -> None:
        pending = [item.pending for item in waiting if item.pending is not None]
        place = self._evaluator.first_ready(pending, timeout_s)
        if place is None or self._is_left:
            return
        item = waiting[place]
        assert item.pending is not None  # or it had an outcome
        outcome = self._evaluator.finish(item.pending, item.number, self._best_us)
        with self._change:
            item.ended = time.monotonic()
            item.outcome = outcome
            if outcome.latency_us is not None:
                self._best_us = min(self._best_us or outcome.latency_us, outcome.latency_us)
            self._waiting.remove(item)
            self._num_done += 1
            self._change.notify_all()


def _trial_of(item: _InFlight[P], outcome: Outcome, elapsed_s: float, held_s: float) -> Trial:
    assert item.pending is not None
    if held_s > 0:
        outcome = replace(outcome, seconds={**outcome.seconds, "held": held_s})
    return Trial(
        number=item.number,
        template=str(item.params.get("template", "")),
        params=item.params,
        candidate_key=item.pending.candidate_key,
        outcome=outcome,
        started_at=item.started_at,
        elapsed_s=round(elapsed_s, 3),
    )


def _ask(
    study: optuna.Study,
    space: SearchSpace,
    evaluator: Evaluator[P],
    number: int,
    known: Trial | None,
) -> _InFlight[P]:
    trial = study.ask(fixed_distributions=distributions(space))
    params = params_of(trial, space)
    position = space.index(params)
    assert position is not None, "a sampler gave an infeasible configuration"
    if known is not None:
        if params != known.params:
            raise _Diverged
        at = known.started_at
        return _InFlight(number, trial, params, position, at, outcome=known.outcome)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return _InFlight(number, trial, params, position, now, evaluator.submit(params))


def _stopped(
    study: optuna.Study,
    number: int,
    stop: StopRule | None,
    on_remaining: Callable[[int, Remaining], None],
) -> str:
    """Say what is left to gain; return why to stop now, empty to go on."""
    shares = sorted({*SHARES, *([stop.within] if stop else [])})
    remaining = study.sampler.remaining(study, shares)
    if remaining is None:
        return ""
    shown = {f"{share:g}": round(p, 4) for share, p in remaining.within.items()}
    attributes = {"improvement": round(remaining.improvement, 6), "within": shown}
    study.set_user_attr("remaining", attributes)
    on_remaining(number, remaining)
    if stop is None or remaining.within[stop.within] < stop.confidence:
        return ""
    return (
        f"{number} trials: the best is within {stop.within:.3g} of the optimum "
        f"with a probability of {remaining.within[stop.within]:.2f}"
    )


def _dropped(study: optuna.Study, flying: Iterable[_InFlight[P]], end: str) -> str:
    """Leave no trial running in the journal; return `end`."""
    for item in flying:
        study.tell(item.trial, state=TrialState.FAIL)
    return end


def _tell(study: optuna.Study, trial: optuna.Trial, outcome: Outcome) -> None:
    for name, value in _attributes(outcome).items():
        trial.set_user_attr(name, value)
    if outcome.latency_us is not None:
        study.tell(trial, outcome.latency_us)
    else:
        study.tell(trial, state=_STATE[outcome.status])


def _attributes(outcome: Outcome) -> dict[str, Any]:
    attributes: dict[str, Any] = {"status": outcome.status.value}
    if outcome.reason:
        attributes["reason"] = outcome.reason[:500]
    if outcome.measurement is not None and outcome.measurement.is_censored:
        attributes[CENSORED] = True
    return attributes


# A failed candidate is an infeasible point, not a broken study: samplers that know pruned
# trials (TPE) then learn to stay away from it.
_STATE = {
    Status.CONSTRAINTS: TrialState.PRUNED,
    Status.COMPILE: TrialState.PRUNED,
    Status.RUNTIME: TrialState.PRUNED,
    Status.TIMEOUT: TrialState.PRUNED,
    Status.CORRECTNESS: TrialState.PRUNED,
    Status.CORRECT: TrialState.COMPLETE,
}


class _Journal(BaseJournalBackend):  # type: ignore[misc]  # optuna is not followed
    """Optuna's journal file, written anew by its only writer, and only when `write` is called.

    Optuna appends each parameter by itself and waits for the disk every time, which for thirty
    parameters took longer than to choose them. What was not written belongs to trials without an
    outcome, which a kill loses anyway, or is asked for again from the run's own trials.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        Path(f"{path}.lock").unlink(missing_ok=True)
        self._file = JournalFileBackend(str(path))
        self._num_written = 0
        self._held: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        if log_number_from >= self._num_written:
            return self._held[log_number_from - self._num_written :]
        return [*self._file.read_logs(log_number_from), *self._held]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self._held += json.loads(json.dumps(logs))  # as they are read back from a file

    def write(self) -> None:
        """Write what was held back, and wait for the disk."""
        if self._held:
            self._file.append_logs(self._held)
            self._num_written += len(self._held)
            self._held = []


def _written(store: _Journal | None, end: str) -> str:
    """Write what the end of a search still said; return why it ended."""
    if store is not None:
        store.write()
    return end


def _new_study(
    store: _Journal | None,
    space: SearchSpace,
    sampler: str,
    seed: int,
    sources: Sequence[Source] = (),
) -> optuna.Study:
    return optuna.create_study(
        study_name=STUDY_NAME,
        storage=JournalStorage(store) if store else InMemoryStorage(),
        sampler=make_sampler(sampler, space, seed, sources),
        direction="minimize",
    )


def _add_previous(study: optuna.Study, space: SearchSpace, previous: Sequence[Trial]) -> None:
    """Tell a study of trials that it did not ask for."""
    named = distributions(space)
    for trial in previous:
        if space.index(trial.params) is None:
            continue  # a template was edited since: it stays in the run, and is no point here
        study.add_trial(
            optuna.create_trial(
                state=_STATE[trial.outcome.status],
                value=trial.outcome.latency_us,
                params=encoded(trial.params, space),
                distributions=named,
                user_attrs=_attributes(trial.outcome),
            )
        )
