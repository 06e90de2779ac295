"""The device's side of a fleet: begins jobs in order, for one parent at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tuner.errors import WorkerError
from tuner.fleet.fleet import OPEN, AttemptLost, Failure, Job, Lost, Reply

__all__ = ["Agent", "Serve", "Service"]


class Service(Protocol):
    """What an agent can do for a run on its device."""

    def run(
        self, job: str, payload: Mapping[str, Any], files: Mapping[str, Path]
    ) -> dict[str, Any]:
        """Do one job.

        Raises:
            AttemptLost: its process was killed from outside.
            WorkerError: the device cannot be used any more.
        """

    def close(self) -> None:
        """End all that was started, from any thread: what runs then fails."""


class Refused(Exception):
    """The job is none of the parent that this agent works for."""


Serve = Callable[[str], Service]  # of a device's name; the service's first job is `open`


class Agent:
    """Runs jobs on one device, each when the one before is done; builders have several at a time.

    A parent begins with `open`, which ends what an earlier one has left; jobs of any other epoch
    than that of the last `open` are refused.

    Args:
        device: its name.
        serve: returns a service that is then given the job `open`.
        send: takes what is reported to a parent, and the epoch of that one; from any thread.
        num_slots: how many jobs run at a time, each in a thread of its own.
    """

    def __init__(
        self,
        device: str,
        serve: Serve,
        send: Callable[[Reply | Lost, str], None],
        num_slots: int = 1,
    ) -> None:
        self.device = device
        self._serve = serve
        self._send = send
        self._jobs: deque[Job] = deque()
        self._service: Service | None = None
        self._epoch = ""
        self._is_closed = False
        self._change = threading.Condition()
        for slot in range(num_slots):
            name = f"agent_{device}_{slot}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, job: Job) -> None:
        """Take a job; does not wait."""
        with self._change:
            service, before = None, ""
            if job.name == OPEN:
                self._jobs.clear()
                service, self._service = self._service, None
                before, self._epoch = self._epoch, job.epoch
            self._jobs.append(job)
            self._change.notify_all()
        if before not in ("", job.epoch):
            self._send(Lost(self.device, "another run, or a later session, took it"), before)
        if service is not None:
            service.close()

    def cancel(self, number: int) -> None:
        """Drop a job that does not run yet."""
        with self._change:
            self._jobs = deque(job for job in self._jobs if job.number != number)

    def leave(self, epoch: str) -> None:
        """End what is done for a parent, unless another one has come meanwhile."""
        with self._change:
            if epoch != self._epoch:
                return
            self._jobs.clear()
            self._epoch = ""
            service, self._service = self._service, None
        if service is not None:
            service.close()

    def close(self) -> None:
        """End what runs, and the service."""
        with self._change:
            self._is_closed = True
            self._jobs.clear()
            service, self._service = self._service, None
            self._change.notify_all()
        if service is not None:
            service.close()

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._jobs or self._is_closed)
                if self._is_closed:
                    return
                job = self._jobs.popleft()
            data: dict[str, Any] = {}
            failure = None
            try:
                data = self._done(job)
            except AttemptLost as error:
                failure = Failure("AttemptLost", str(error), is_lost=True)
            except WorkerError as error:
                if job.name != OPEN:
                    self._tell(job, Lost(self.device, str(error)))
                    continue
                failure = Failure("WorkerError", str(error))
            except Exception as error:  # reported to the parent, which knows what to do about it
                failure = Failure(type(error).__name__, str(error))
            self._tell(
                job,
                Reply(job.run, job.epoch, job.number, job.attempt, self.device, data, failure),
            )

    def _done(self, job: Job) -> dict[str, Any]:
        with self._change:
            if job.epoch != self._epoch:
                raise Refused(f"{self.device} works for another run, or for a later session")
            if job.name == OPEN:
                self._service = self._serve(self.device)
            service = self._service
        if service is None:
            raise Refused(f"{self.device}: job {job.name!r} came before `open`")
        return service.run(job.name, job.payload, job.files)

    def _tell(self, job: Job, event: Reply | Lost) -> None:
        if not self._is_closed:
            self._send(event, job.epoch)
