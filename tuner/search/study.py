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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

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
    loop = partial(
        _loop,
        space=space,
        evaluator=evaluator,
        budget=budget,
        previous=previous,
        record=record,
        should_stop=should_stop,
        on_remaining=on_remaining,
        waited_s=waited_s,
        at_once=at_once,
    )
    with quiet_optuna():
        store = Journal(journal) if journal else None
        study = new_study(store, space, sampler, seed, sources)
        for params in first:
            study.enqueue_trial(encoded(params, space))
        try:
            return _written(store, loop(study, store, replayed=previous))
        except _Diverged:  # more builders than then, an edited template, an older tuner's run
            store = Journal(journal) if journal else None
            study = new_study(store, space, sampler, seed + len(previous), sources)
            add_previous(study, space, previous)
            tried = [trial.params for trial in previous]
            for params in first:
                if params not in tried:
                    study.enqueue_trial(encoded(params, space))
            return _written(store, loop(study, store, replayed=()))


def _loop(
    study: optuna.Study,
    store: Journal | None,
    *,
    space: SearchSpace,
    evaluator: Evaluator[P],
    budget: SearchBudget,
    previous: Sequence[Trial],
    replayed: Sequence[Trial],
    record: Callable[[Trial], None],
    should_stop: Callable[[], bool],
    on_remaining: Callable[[int, Remaining], None],
    waited_s: Callable[[], float],
    at_once: int,
) -> str:
    """Search; `replayed` are the trials of `previous` that are asked for again: all or none.

    Raises:
        _Diverged: the study asks for another configuration than the one recorded; nothing was
            evaluated yet.
    """
    known = {trial.question: trial for trial in replayed}
    number = asked = len(previous) - len(replayed)
    best_us = min((t.outcome.ranked_us for t in previous if t.outcome.ranked_us), default=None)
    tried = {space.index(trial.params) for trial in previous[:asked]} - {None}
    most, end = max(budget.trials, len(previous), *(n + 1 for n in known)), ""
    flying: list[InFlight[P]] = []
    reported: dict[int, int] = {}  # number of the question, and of its trial
    clock = _WorkingTime(previous[-1].elapsed_s if previous else 0.0)
    waited_before_s = waited_s()

    def next_reported() -> InFlight[P] | None:
        """Return what is reported next, None where it has no outcome yet."""
        if number < len(previous):
            asked_then = previous[number].question
            found = next((item for item in flying if item.number == asked_then), None)
            if found is None:
                raise _Diverged
            return found
        if at_once == 1 and not is_late:
            for item in flying:
                if item.outcome or not item.is_overtaken(PATIENCE_S):
                    return item if item.outcome else None
            return None
        done = (i for i in flying if i.outcome and i.outcome.same_as in {None, *reported})
        return min(done, key=lambda item: item.ended, default=None)

    with Finisher(evaluator, best_us, at_once) as finisher:
        # Then only what is finished is still reported: what is next in order, or with the time
        # used up all.
        is_over = is_late = False
        while True:
            if number >= len(previous) and not is_over:
                if store is not None:  # once an outcome
                    store.write()
                elapsed_s = clock.seconds()
                if should_stop():
                    is_over, end = True, "stopped by the user after {} trials"
                elif (
                    elapsed_s >= budget.timeout_s + waited_s() - waited_before_s
                    and number >= min(budget.least, most)
                ):
                    is_over = is_late = True
                    end = f"{{}} trials in {elapsed_s:.0f} s: the time is used up"
            if is_over:
                finisher.leave()
                if next_reported() is None:
                    return _dropped(study, flying, end.format(number))
            while not end and len(flying) < _width(evaluator.ahead, number):
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
                tried.add(flying[-1].config_id)
                asked += 1
            if not flying:
                if number < len(previous):
                    raise _Diverged
                return end
            item = next_reported()
            is_held = item is not None
            if item is None:
                finisher.wait(*(flying[:1] if at_once == 1 else flying), timeout_s=LOOK_AT_CLOCK_S)
                overtake(flying)
                item = next_reported()
            if item is None:
                continue
            assert item.outcome is not None
            outcome = item.outcome
            flying.remove(item)
            reported[item.number] = number
            if item.pending is not None:
                if outcome.same_as is not None:
                    outcome = replace(
                        outcome, same_as=reported.get(outcome.same_as, outcome.same_as)
                    )
                ended_s = clock.seconds(item.ended)
                elapsed_s = clock.seconds() if is_held else ended_s
                record(_trial_of(item, number, outcome, elapsed_s, elapsed_s - ended_s))
            tell(study, item.trial, outcome)
            number += 1
            if not end and number % JUDGE_EVERY == 0:  # replayed as well: a model may learn
                end = _stopped(study, number, budget.stop, on_remaining)


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


def _ask(
    study: optuna.Study,
    space: SearchSpace,
    evaluator: Evaluator[P],
    number: int,
    known: Trial | None,
) -> InFlight[P]:
    trial = study.ask(fixed_distributions=distributions(space))
    params = params_of(trial, space)
    config_id = space.index(params)
    assert config_id is not None, "a sampler gave an infeasible configuration"
    if known is not None:
        if params != known.params:
            raise _Diverged
        at = known.started_at
        return InFlight(number, trial, params, config_id, at, outcome=known.outcome)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return InFlight(number, trial, params, config_id, now, evaluator.submit(params))


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


def _dropped(study: optuna.Study, flying: Iterable[InFlight[P]], end: str) -> str:
    """Leave no trial running in the journal; return `end`."""
    for item in flying:
        study.tell(item.trial, state=TrialState.FAIL)
    return end


def _written(store: Journal | None, end: str) -> str:
    """Write what the end of a search still said; return why it ended."""
    if store is not None:
        store.write()
    return end
