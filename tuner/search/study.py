"""The ask / evaluate / tell loop over a finite space; owns the Optuna study.

Knows nothing of devices or compilers: it hands parameters to an `Evaluator`, keeps several
of them in flight so that builders work ahead of the device, and records every outcome before
it asks again. Each question is asked when just as many outcomes are reported, so that the sequence
of questions depends on the seed, the outcomes and the order of reporting alone. With one device
that is the order of asking; while the next one still builds, and while a question is thought out,
the device works on those that are built. With several each outcome is reported as soon as it is
there, so that a slow candidate keeps none of the others waiting; trials are numbered, and
recorded, in the order of reporting. What is in flight the sampler knows of, too (`surrogate`).

A resumed search asks the questions of the earlier sessions again and takes the recorded outcomes
for answers, in their order; it then goes on exactly as it would have without the interruption,
provided that as many are in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

import optuna
from optuna.trial import TrialState

from tuner.config.schema import StopSection
from tuner.search.bayesian import JUDGE_EVERY, NUM_FIRST
from tuner.search.finishing import Evaluator, Finisher, InFlight, Pending, overtake
from tuner.search.journal import Journal, add_previous, new_study, quiet_optuna, tell
from tuner.search.optuna_codec import distributions, encoded, params_of
from tuner.search.surrogate import Remaining
from tuner.search.transfer import Source
from tuner.space.search_space import SearchSpace
from tuner.trial import Outcome, Params, Trial

__all__ = ["SearchBudget", "search"]

PATIENCE_S = 20.0  # after which what others have overtaken is reported behind them
LOOK_AT_CLOCK_S = 0.5  # while nothing is finished
NARROW = 8  # questions in flight that are never too many
SHARES = (0.01, 0.05)  # of the optimum, for which the chance to be there is reported

P = TypeVar("P", bound=Pending)


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """When to stop: whichever comes first. Both count what earlier sessions did.

    `least` trials are waited for, however slow the machine.
    """

    trials: int
    timeout_s: float
    stop: StopSection | None = None
    least: int = 1


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
    waited_s: Callable[[], float] = lambda: 0.0,
    at_once: int = 1,
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
        waited_s: seconds until now for which nothing could be evaluated, since others had the
            device: they do not count against the budget.
        at_once: how many candidates the evaluator finishes at the same time. With several,
            outcomes are reported as they come.

    Returns:
        Why it ended, in words.
    """
    given = _Given(
        space, evaluator, budget, previous, record, should_stop, on_remaining, waited_s, at_once
    )
    with quiet_optuna():
        store = Journal(journal) if journal else None
        study = new_study(store, space, sampler, seed, sources)
        for params in first:
            study.enqueue_trial(encoded(params, space))
        try:
            return _Loop(study, store, given, replayed=previous).run()
        except _Diverged:  # more builders than then, an edited template, an older tuner's run
            store = Journal(journal) if journal else None
            study = new_study(store, space, sampler, seed + len(previous), sources)
            add_previous(study, space, previous)
            tried = [trial.params for trial in previous]
            for params in first:
                if params not in tried:
                    study.enqueue_trial(encoded(params, space))
            return _Loop(study, store, given, replayed=()).run()


@dataclass(frozen=True, slots=True)
class _Given(Generic[P]):
    """What `search` is given, but for what the study is made of."""

    space: SearchSpace
    evaluator: Evaluator[P]
    budget: SearchBudget
    previous: Sequence[Trial]
    record: Callable[[Trial], None]
    should_stop: Callable[[], bool]
    on_remaining: Callable[[int, Remaining], None]
    waited_s: Callable[[], float]
    at_once: int


class _Loop(Generic[P]):
    """A study's questions and their outcomes, one after the other.

    `replayed` are the trials of `previous` that are asked for again: all or none.
    """

    def __init__(
        self,
        study: optuna.Study,
        store: Journal | None,
        given: _Given[P],
        *,
        replayed: Sequence[Trial],
    ) -> None:
        self._study, self._store, self._given = study, store, given
        previous = given.previous
        self._known = {trial.question: trial for trial in replayed}
        # As many trials are reported, and as many questions asked.
        self._number = self._asked = len(previous) - len(replayed)
        self._tried = {given.space.index(t.params) for t in previous[: self._asked]} - {None}
        self._most = max(given.budget.trials, len(previous), *(n + 1 for n in self._known))
        self._flying: list[InFlight[P]] = []
        self._reported: dict[int, int] = {}  # number of the question, and of its trial
        self._clock = _WorkingTime(previous[-1].elapsed_s if previous else 0.0)
        self._waited_before_s = given.waited_s()
        self._end = ""  # why nothing more is asked
        # Then only what is finished is still reported: what is next in order, or with the time
        # used up all.
        self._is_over = self._is_late = False

    def run(self) -> str:
        """Search; return why it ended.

        Raises:
            _Diverged: the study asks for another configuration than the one recorded; nothing was
                evaluated yet.
        """
        given = self._given
        known_us = [t.outcome.ranked_us for t in given.previous if t.outcome.ranked_us]
        with Finisher(given.evaluator, min(known_us, default=None), given.at_once) as finisher:
            while True:
                if not self._is_replaying and not self._is_over:
                    self._look_at_clock()
                if self._is_over:
                    finisher.leave()
                    if self._next_reported() is None:
                        self._drop()
                        break
                self._ask_ahead(finisher)
                if not self._flying:
                    if self._is_replaying:
                        raise _Diverged
                    break
                item = self._next_reported()
                is_held = item is not None
                if item is None:
                    ahead = self._flying[:1] if given.at_once == 1 else self._flying
                    finisher.wait(*ahead, timeout_s=LOOK_AT_CLOCK_S)
                    overtake(self._flying)
                    item = self._next_reported()
                if item is not None:
                    self._report(item, is_held)
        if self._store is not None:
            self._store.write()  # what the end still said
        return self._end

    @property
    def _is_replaying(self) -> bool:
        """Whether the next trial is one of an earlier session."""
        return self._number < len(self._given.previous)

    def _look_at_clock(self) -> None:
        """Write the journal, once an outcome; end where the user or the time says so."""
        given, budget = self._given, self._given.budget
        if self._store is not None:
            self._store.write()
        elapsed_s = self._clock.seconds()
        waited_s = given.waited_s() - self._waited_before_s
        if given.should_stop():
            self._is_over, self._end = True, "stopped by the user after {} trials"
        elif elapsed_s >= budget.timeout_s + waited_s and self._number >= min(
            budget.least, self._most
        ):
            self._is_over = self._is_late = True
            self._end = f"{{}} trials in {elapsed_s:.0f} s: the time is used up"

    def _drop(self) -> None:
        """Leave no trial running in the journal."""
        for item in self._flying:
            self._study.tell(item.trial, state=TrialState.FAIL)
        self._end = self._end.format(self._number)

    def _ask_ahead(self, finisher: Finisher[P]) -> None:
        """Ask until as many questions are in flight as may be, or there is an end."""
        given = self._given
        while not self._end and len(self._flying) < _width(given.evaluator.ahead, self._number):
            if self._asked >= self._most:
                self._end = f"{given.budget.trials} trials: the budget is used up"
            # Counted here as well: where every parameter has one value, Optuna takes these
            # without asking the sampler, again and again.
            elif len(self._tried) == given.space.num_feasible:
                self._end = f"all {given.space.num_feasible} feasible configurations were tried"
            else:
                item = self._ask()
                self._flying.append(item)
                finisher.take(item)
                self._tried.add(item.config_id)
                self._asked += 1

    def _ask(self) -> InFlight[P]:
        number, space = self._asked, self._given.space
        known = self._known.get(number)
        if known is None:
            self._clock.start()
        trial = self._study.ask(fixed_distributions=distributions(space))
        params = params_of(trial, space)
        config_id = space.index(params)
        assert config_id is not None, "a sampler gave an infeasible configuration"
        if known is not None:
            if params != known.params:
                raise _Diverged
            at = known.started_at
            return InFlight(number, trial, params, config_id, at, outcome=known.outcome)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        pending = self._given.evaluator.submit(params)
        return InFlight(number, trial, params, config_id, now, pending)

    def _next_reported(self) -> InFlight[P] | None:
        """Return what is reported next, None where it has no outcome yet."""
        if self._is_replaying:
            asked_then = self._given.previous[self._number].question
            found = next((item for item in self._flying if item.number == asked_then), None)
            if found is None:
                raise _Diverged
            return found
        if self._given.at_once == 1 and not self._is_late:
            for item in self._flying:
                if item.outcome or not item.is_overtaken(PATIENCE_S):
                    return item if item.outcome else None
            return None
        known = {None, *self._reported}
        done = (i for i in self._flying if i.outcome and i.outcome.same_as in known)
        return min(done, key=lambda item: item.ended, default=None)

    def _report(self, item: InFlight[P], is_held: bool) -> None:
        """Record an outcome, and tell the study; `is_held`: it was there before it was due."""
        assert item.outcome is not None
        outcome, number = item.outcome, self._number
        self._flying.remove(item)
        self._reported[item.number] = number
        if item.pending is not None:
            if outcome.same_as is not None:
                same_as = self._reported.get(outcome.same_as, outcome.same_as)
                outcome = replace(outcome, same_as=same_as)
            ended_s = self._clock.seconds(item.ended)
            elapsed_s = self._clock.seconds() if is_held else ended_s
            held_s = elapsed_s - ended_s
            self._given.record(_trial_of(item, number, outcome, elapsed_s, held_s))
        tell(self._study, item.trial, outcome)
        self._number += 1
        if not self._end and self._number % JUDGE_EVERY == 0:  # replayed too: a model may learn
            stop, on_remaining = self._given.budget.stop, self._given.on_remaining
            self._end = _stopped(self._study, self._number, stop, on_remaining)


def _width(ahead: int, number: int) -> int:
    """Return how many questions may be in flight when so many are reported.

    Half of them in the opening, then one more with each that is reported: what is asked before
    anything is known is asked blindly.
    """
    opening = max(min(ahead, NARROW), ahead // 2)
    return min(ahead, opening + max(0, number + 1 - NUM_FIRST))


class _WorkingTime:
    """Seconds of a search's work, over all sessions: of this one, from its first question on.

    Args:
        before_s: of the earlier sessions.
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


def _trial_of(
    item: InFlight[P], number: int, outcome: Outcome, elapsed_s: float, held_s: float
) -> Trial:
    assert item.pending is not None
    if held_s > 0:
        outcome = replace(outcome, seconds={**outcome.seconds, "held": held_s})
    return Trial(
        number=number,
        template=str(item.params.get("template", "")),
        params=item.params,
        candidate_key=item.pending.candidate_key,
        outcome=outcome,
        started_at=item.started_at,
        elapsed_s=round(elapsed_s, 3),
        asked=None if item.number == number else item.number,
    )


def _stopped(
    study: optuna.Study,
    number: int,
    stop: StopSection | None,
    on_remaining: Callable[[int, Remaining], None],
) -> str:
    """Report the estimated remaining improvement; return why to stop now, empty to go on."""
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
