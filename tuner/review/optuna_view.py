"""Optuna's own dashboard over a folder of runs: one study a run, and nothing can be changed.

Optuna's dashboard can rename, delete and edit studies, and its notes are rendered as markup. Here
it is given a storage that refuses every change and shows no notes, reads each run's own journal
without ever locking or creating it, and sits behind a gate that lets nothing but GET and HEAD by.
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Container
from threading import RLock
from typing import Any, NoReturn

from a2wsgi import WSGIMiddleware
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tuner.errors import InputError
from tuner.review.run_index import RunIndex

__all__ = ["Studies", "optuna_app"]

PATHS = ("/dashboard", "/api", "/csv", "/static")  # Optuna's own; its scripts know no others
_KEPT_JOURNALS = 6


def _refused(*args: object, **kwargs: object) -> NoReturn:
    raise PermissionError("the dashboard only reads studies")


class _ReadOnlyJournal(JournalFileBackend):  # type: ignore[misc]  # optuna is not followed
    append_logs = _refused


class Studies(BaseStorage):  # type: ignore[misc]  # optuna is not followed
    """A storage of every run's study, for reading; a study's name is its run's."""

    create_new_study = delete_study = set_study_user_attr = set_study_system_attr = _refused
    create_new_trial = set_trial_param = set_trial_state_values = _refused
    set_trial_intermediate_value = set_trial_user_attr = set_trial_system_attr = _refused

    def __init__(self, run_index: RunIndex) -> None:
        self._run_index = run_index
        self._ids: dict[str, int] = {}  # a run keeps its number while the server runs
        self._journals: OrderedDict[str, tuple[int, JournalStorage]] = OrderedDict()
        self._lock = RLock()

    def id_of(self, name: str) -> int:
        """Return the study's number in addresses."""
        with self._lock:
            return self._ids.setdefault(name, len(self._ids))

    def get_all_studies(self) -> list[FrozenStudy]:
        """Return a study for every run that has a journal."""
        folder = self._run_index.folder
        names = [n for n in self._run_index.names() if (folder / n / "study.journal").exists()]
        return [
            FrozenStudy(
                study_name=name,
                direction=StudyDirection.MINIMIZE,
                user_attrs={},
                system_attrs={},
                study_id=self.id_of(name),
            )
            for name in names
        ]

    def get_study_id_from_name(self, study_name: str) -> int:
        """Return the number of a run's study; KeyError if there is no such run."""
        if study_name not in self._run_index.names():
            raise KeyError(study_name)
        return self.id_of(study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        """Return the run's name; KeyError if there is no such study."""
        with self._lock:
            for name, number in self._ids.items():
                if number == study_id:
                    return name
        raise KeyError(study_id)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Return that a latency is minimised."""
        self.get_study_name_from_id(study_id)
        return [StudyDirection.MINIMIZE]

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Return nothing: notes and plots of a stranger's journal are not shown."""
        return {}

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Refuse: a trial's number alone does not say which run's it is."""
        raise KeyError(trial_id)

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """Return a run's trials as its journal has them, without their system attributes."""
        with self._lock:
            journal = self._journal(self.get_study_name_from_id(study_id))
            if journal is None:
                return []
            found: list[FrozenTrial] = []
            for study in journal.get_all_studies():
                found += journal.get_all_trials(study._study_id, deepcopy=False, states=states)
        return [_without_notes(trial) for trial in found]

    def _journal(self, name: str) -> JournalStorage | None:
        try:
            path = self._run_index.run(name).journal_path
            inode = os.stat(path).st_ino
        except (InputError, OSError):
            return None
        kept = self._journals.pop(name, None)
        # A resumed run's journal is written anew.
        if kept is None or kept[0] != inode:
            kept = inode, JournalStorage(_ReadOnlyJournal(str(path)))
        self._journals[name] = kept
        while len(self._journals) > _KEPT_JOURNALS:
            self._journals.popitem(last=False)
        return kept[1]


def _without_notes(trial: FrozenTrial) -> FrozenTrial:
    seen = copy.copy(trial)
    seen._system_attrs = {}
    return seen


def optuna_app(studies: Studies) -> ASGIApp:
    """Return Optuna's dashboard over these studies, as an ASGI application for GET and HEAD."""
    from optuna_dashboard import wsgi

    inner = WSGIMiddleware(wsgi(studies))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            answer = PlainTextResponse("Optuna's dashboard is shown for reading only\n", 405)
            await answer(scope, receive, send)
            return
        await inner(scope, receive, send)  # type: ignore[arg-type]  # the same, named anew

    return app
