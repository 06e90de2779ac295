"""The ask / evaluate / tell loop over a finite space; owns the Optuna study.

Knows nothing of devices or compilers: it hands parameters to an `Evaluator`, keeps several
of them in flight so that builders work ahead of the device, and records every outcome before
it asks again. Outcomes are taken in the order of asking, so that the sequence of questions
depends on the seed and the outcomes alone.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tuner.samplers import distributions, encoded, make_sampler, params_of
from tuner.space import SearchSpace
from tuner.trial import Outcome, Params, Status, Trial

__all__ = ["Evaluator", "Pending", "SearchBudget", "search"]

STUDY_NAME = "tune"


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

    def finish(self, pending: P, number: int, best_us: float | None) -> Outcome:
        """Wait for a configuration and return what became of it."""

    @property
    def ahead(self) -> int:
        """How many submitted configurations keep the builders busy."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """When to stop: whichever comes first. Both count what earlier sessions did."""

    trials: int
    timeout_s: float


@dataclass(slots=True)
class _InFlight(Generic[P]):
    trial: optuna.Trial
    params: Params
    position: int  # in `space.feasible`
    pending: P
    started_at: str


def search(
    space: SearchSpace,
    evaluator: Evaluator[P],
    *,
    sampler: str,
    seed: int,
    budget: SearchBudget,
    journal: Path,
    previous: Sequence[Trial],
    record: Callable[[Trial], None],
    first: Sequence[Params] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> str:
    """Search until the budget is used up, the space is exhausted, or `should_stop()`.

    Args:
        space: the feasible configurations.
        evaluator: turns configurations into outcomes.
        sampler: a name of `samplers.SAMPLERS`.
        seed: equal seeds and outcomes give equal sequences.
        budget: trials and seconds, counted from the run's first start.
        journal: Optuna's journal file; written anew from `previous`, which is the truth.
        previous: the trials that the run already holds.
        record: called with each trial, in order; returns when it is on disk.
        first: configurations to try before the sampler is asked, such as known good ones.
        should_stop: asked before every question; what is in flight is then dropped.

    Returns:
        Why it ended, in words.
    """
    with _quiet_optuna():
        study = _study(space, sampler, seed, journal, previous)
        tried = [trial.params for trial in previous]
        for params in first:
            if params not in tried:
                study.enqueue_trial(encoded(params, space))
        return _loop(study, space, evaluator, budget, previous, record, should_stop)


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
    space: SearchSpace,
    evaluator: Evaluator[P],
    budget: SearchBudget,
    previous: Sequence[Trial],
    record: Callable[[Trial], None],
    should_stop: Callable[[], bool],
) -> str:
    start_s = time.monotonic() - (previous[-1].elapsed_s if previous else 0.0)
    best_us = min((t.outcome.latency_us for t in previous if t.outcome.latency_us), default=None)
    number, asked, end = len(previous), len(previous), ""
    tried = {space.index(trial.params) for trial in previous} - {None}
    flying: deque[_InFlight[P]] = deque()
    while True:
        elapsed_s = time.monotonic() - start_s
        if should_stop():
            return _dropped(study, flying, f"stopped by the user after {number} trials")
        if elapsed_s >= budget.timeout_s:
            end = f"{number} trials in {elapsed_s:.0f} s: the time is used up"
            return _dropped(study, flying, end)
        while not end and len(flying) < evaluator.ahead:
            if asked >= budget.trials:
                end = f"{budget.trials} trials: the budget is used up"
                break
            # Counted here as well: where every parameter has one value, Optuna takes these
            # without asking the sampler, again and again.
            if len(tried) == space.num_feasible:
                end = f"all {space.num_feasible} feasible configurations were tried"
                break
            flying.append(_ask(study, space, evaluator))
            tried.add(flying[-1].position)
            asked += 1
        if not flying:
            return end
        item = flying.popleft()
        outcome = evaluator.finish(item.pending, number, best_us)
        trial = Trial(
            number=number,
            template=str(item.params["template"]),
            params=item.params,
            candidate_key=item.pending.candidate_key,
            outcome=outcome,
            started_at=item.started_at,
            elapsed_s=round(time.monotonic() - start_s, 3),
        )
        record(trial)
        _tell(study, item.trial, outcome)
        number += 1
        if outcome.latency_us is not None:
            best_us = min(best_us or outcome.latency_us, outcome.latency_us)


def _ask(study: optuna.Study, space: SearchSpace, evaluator: Evaluator[P]) -> _InFlight[P]:
    trial = study.ask(fixed_distributions=distributions(space))
    params = params_of(trial, space)
    position = space.index(params)
    assert position is not None, "a sampler gave an infeasible configuration"
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return _InFlight(trial, params, position, evaluator.submit(params), now)


def _dropped(study: optuna.Study, flying: Iterable[_InFlight[P]], end: str) -> str:
    """Leave no trial running in the journal; return `end`."""
    for item in flying:
        study.tell(item.trial, state=TrialState.FAIL)
    return end


def _tell(study: optuna.Study, trial: optuna.Trial, outcome: Outcome) -> None:
    trial.set_user_attr("status", outcome.status.value)
    if outcome.reason:
        trial.set_user_attr("reason", outcome.reason[:500])
    if outcome.latency_us is not None:
        study.tell(trial, outcome.latency_us)
    else:
        study.tell(trial, state=_STATE[outcome.status])


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


def _study(
    space: SearchSpace, sampler: str, seed: int, journal: Path, previous: Sequence[Trial]
) -> optuna.Study:
    """Make the study, its journal rebuilt from the run's own trials."""
    journal.unlink(missing_ok=True)
    Path(f"{journal}.lock").unlink(missing_ok=True)
    study = optuna.create_study(
        study_name=STUDY_NAME,
        storage=JournalStorage(JournalFileBackend(str(journal))),
        sampler=make_sampler(sampler, space, seed + len(previous)),
        direction="minimize",
    )
    named = distributions(space)
    for trial in previous:
        if space.index(trial.params) is None:
            continue  # a template was edited since: it stays in the run, and is no point here
        latency_us = trial.outcome.latency_us
        study.add_trial(
            optuna.create_trial(
                state=_STATE[trial.outcome.status],
                value=latency_us,
                params=encoded(trial.params, space),
                distributions=named,
                user_attrs={"status": trial.outcome.status.value},
            )
        )
    return study
