"""The Optuna study of a search: made, with all trials reported to it, and its journal on disk."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend
from optuna.trial import TrialState

from tuner.search.optuna_codec import CENSORED, distributions, encoded
from tuner.search.samplers import make_sampler
from tuner.search.transfer import Source
from tuner.space.search_space import SearchSpace
from tuner.trial import Outcome, Status, Trial

__all__ = ["STUDY_NAME", "Journal", "add_previous", "new_study", "quiet_optuna", "tell"]

STUDY_NAME = "tune"


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Keep Optuna's own log lines and experimental warnings out of ours."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def new_study(
    store: Journal | None,
    space: SearchSpace,
    sampler: str,
    seed: int,
    sources: Sequence[Source] = (),
) -> optuna.Study:
    """Return an empty study, kept in `store`, or in memory."""
    return optuna.create_study(
        study_name=STUDY_NAME,
        storage=JournalStorage(store) if store else InMemoryStorage(),
        sampler=make_sampler(sampler, space, seed, sources),
        direction="minimize",
    )


def add_previous(study: optuna.Study, space: SearchSpace, previous: Sequence[Trial]) -> None:
    """Tell a study of trials that it did not ask for."""
    named = distributions(space)
    for trial in previous:
        if space.index(trial.params) is None:
            continue  # a template was edited since: it stays in the run, and is no point here
        study.add_trial(
            optuna.create_trial(
                state=_STATE[trial.outcome.status],
                value=trial.outcome.ranked_us,
                params=encoded(trial.params, space),
                distributions=named,
                user_attrs=_attributes(trial.outcome),
            )
        )


def tell(study: optuna.Study, trial: optuna.Trial, outcome: Outcome) -> None:
    """Tell a study what became of a trial that it asked for."""
    for name, value in _attributes(outcome).items():
        trial.set_user_attr(name, value)
    if outcome.ranked_us is not None:
        study.tell(trial, outcome.ranked_us)
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


class _NoLock:
    """The run's own lock keeps others away; Optuna's fails when Ctrl-C comes while it is held."""

    def acquire(self) -> bool:
        """Do nothing."""
        return True

    def release(self) -> None:
        """Do nothing."""


class Journal(BaseJournalBackend):  # type: ignore[misc]  # optuna is not followed
    """Optuna's journal file, written anew by its only writer, and only when `write` is called.

    Optuna appends each parameter by itself and waits for the disk every time, which for thirty
    parameters took longer than to choose them. What was not written belongs to trials without an
    outcome, which a kill loses anyway, or is asked for again from the run's own trials.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        Path(f"{path}.lock").unlink(missing_ok=True)
        self._file = JournalFileBackend(str(path), lock_obj=_NoLock())
        self._num_written = 0
        self._held: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Return the records from that number on, held back or not."""
        if log_number_from >= self._num_written:
            return self._held[log_number_from - self._num_written :]
        return [*self._file.read_logs(log_number_from), *self._held]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Hold records back until they are written."""
        self._held += json.loads(json.dumps(logs))  # as they are read back from a file

    def write(self) -> None:
        """Write what was held back, and wait for the disk."""
        if self._held:
            self._file.append_logs(self._held)
            self._num_written += len(self._held)
            self._held = []
