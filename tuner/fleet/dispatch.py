"""The parent's side of a fleet: jobs to devices, events to futures, each job done once.

A job goes to the device that has the least to do, which has one more than it runs, so that it does
not wait for the parent between two. Where a device is lost, or does not answer in time, what it
was given goes to others as another attempt. The first reply to the current attempt counts; all
others are dropped.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.errors import DeviceError
from tuner.fleet.fleet import OPEN, AttemptLost, Event, Failure, Fleet, Job, Joined, Lost, Reply

__all__ = ["QUEUED", "Dispatch", "JobRaised", "Opening"]

QUEUED = 2  # jobs that a device of one slot has: the one that runs, and the next
MAX_LOSSES = 3  # of devices under one and the same job, after which it is given up
LOOK_EVERY_S = 0.1  # at what is overdue, while nothing happens


class JobRaised(Exception):
    """A job raised on its device.

    Attributes:
        kind: name of the exception's class.
        message: its text.
    """

    def __init__(self, failure: Failure) -> None:
        self.kind, self.message = failure.kind, failure.message
        super().__init__(f"{failure.kind}: {failure.message}")


@dataclass(frozen=True, slots=True)
class Opening:
    """How a device begins to work for a run.

    Attributes:
        payload: of the job `open`, given the device's name.
        files: of it.
        limit_s: for it.
        refusal: why a device cannot be used, given its name and reply; "" where it can.
    """

    payload: Callable[[str], Mapping[str, Any]]
    files: Mapping[str, Path] = field(default_factory=dict)
    limit_s: float = 600.0
    refusal: Callable[[str, Mapping[str, Any]], str] = lambda device, reply: ""


@dataclass(slots=True, eq=False)
class _Task:
    """A job of the caller's, through all attempts."""

    job: Job
    future: Future[dict[str, Any]]
    wanted: str = ""  # the only device that may do it, if one is named
    num_losses: int = 0
    since_s: float = 0.0  # when it began to run, by `time.monotonic`; 0.0: it does not yet


@dataclass(slots=True, eq=False)
class _Device:
    """A device, and what it was given, in order; the first `num_slots` of these run."""

    num_slots: int = 1
    tasks: deque[_Task] = field(default_factory=deque)
    is_open: bool = False
    is_silent: bool = False  # it did not answer in time, and has not been heard of since

    @property
    def running(self) -> list[_Task]:
        return list(self.tasks)[: self.num_slots]

    @property
    def has_room(self) -> bool:
        return self.is_open and len(self.tasks) < self.num_slots + QUEUED - 1

    def note_begun(self) -> None:
        for task in self.running:
            task.since_s = task.since_s or time.monotonic()


class Dispatch:
    """Runs jobs on a fleet's devices.

    Args:
        fleet: closed with this.
        run: name of the run.
        opening: of each device that joins.
        on_change: called with a device's name and what became of it, in words.
        patience_s: how long jobs wait while there is no device.
    """

    def __init__(
        self,
        fleet: Fleet,
        run: str,
        opening: Opening,
        *,
        on_change: Callable[[str, str], None] = lambda device, words: None,
        patience_s: float,
    ) -> None:
        self.epoch = secrets.token_hex(8)
        self.num_dropped = 0  # replies that did not count
        self.refused: dict[str, JobRaised] = {}  # devices that cannot be used, and why
        self._fleet = fleet
        self._run = run
        self._opening = opening
        self._on_change = on_change
        self._patience_s = patience_s
        self._number = 0
        self._devices: dict[str, _Device] = {}
        self._waiting: deque[_Task] = deque()
        self._alone_since_s = time.monotonic()
        self._is_closed = self._is_left = False
        self._why_closed: Exception = DeviceError("the fleet is closed")
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="fleet", daemon=True)
        self._thread.start()

    @property
    def devices(self) -> list[str]:
        """The devices that work for the run now."""
        with self._change:
            return [name for name, device in self._devices.items() if device.is_open]

    @property
    def num_slots(self) -> int:
        """How many jobs these devices run at a time, all together."""
        with self._change:
            return sum(device.num_slots for device in self._devices.values() if device.is_open)

    def at_work(self) -> dict[str, tuple[int, int]]:
        """Return of each device that works for the run its slots, and how many are busy."""
        with self._change:
            known = [(name, device) for name, device in self._devices.items() if device.is_open]
            return {name: (device.num_slots, len(device.running)) for name, device in known}

    def wait_for_devices(self, num: int, timeout_s: float) -> None:
        """Wait until that many devices, and all that are there, are ready or refused.

        Or until that takes too long.
        """

        def is_so() -> bool:
            known = self._devices.values()
            is_over = all(device.is_open or device.is_silent for device in known)
            return is_over and len(known) + len(self.refused) >= num

        with self._change:
            self._change.wait_for(is_so, timeout_s)

    def call(
        self,
        name: str,
        payload: Mapping[str, Any],
        files: Mapping[str, Path] | None = None,
        *,
        limit_s: float,
        device: str = "",
    ) -> Future[dict[str, Any]]:
        """Have a job done, by any device if none is named; does not wait.

        The future holds what the job returned, and under `on` the device that did it. It raises
        JobRaised (it raised on its device), AttemptLost (device after device was
        lost under it), DeviceError (no device is left, or the one that is named is gone).
        """
        future: Future[dict[str, Any]] = Future()
        with self._change:
            self._number += 1
            job = Job(
                self._run, self.epoch, self._number, 0, device, name, payload, files or {}, limit_s
            )
            if self._is_closed:
                future.set_exception(self._why_closed)
            else:
                self._waiting.append(_Task(job, future, device))
                self._assign()
        return future

    def fetch(self, device: str, digest: str, timeout_s: float) -> bytes:
        """Return a file that a job made there; raises AttemptLost where it cannot be had."""
        return self._fleet.fetch(device, digest, timeout_s)

    def leave_out(self, name: str, reason: str) -> None:
        """Use a device no more; what it has is done by others."""
        with self._change:
            self._lose(name, reason)
            self.refused[name] = JobRaised(Failure("DeviceError", reason))

    def close(self) -> None:
        """End all work; futures that are not done raise DeviceError."""
        if self._is_left:
            return
        self._is_left = True
        self._end(DeviceError("the fleet is closed"))
        self._thread.join()
        self._fleet.close()

    def _end(self, error: Exception) -> None:
        with self._change:
            if not self._is_closed:
                self._why_closed = error
            self._is_closed = True
            left = [*self._waiting, *(t for d in self._devices.values() for t in d.tasks)]
            self._waiting.clear()
            self._devices.clear()
            self._change.notify_all()
        for task in left:
            self._fail(task, error)

    # ---- events, in a thread of their own --------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._is_closed:
                event = self._fleet.event(LOOK_EVERY_S)
                with self._change:
                    if self._is_closed:
                        return
                    if event is not None:
                        self._take(event)
                    self._look_at_time()
                    self._assign()
                    self._change.notify_all()
        except Exception as error:  # nobody may wait for what cannot come any more
            self._end(error)

    def _take(self, event: Event) -> None:
        if isinstance(event, Joined):
            self._lose(event.device, "it started anew")
            self._open(event.device, event.num_slots)
        elif isinstance(event, Lost):
            self._lose(event.device, event.reason)
        else:
            self._take_reply(event)

    def _take_reply(self, reply: Reply) -> None:
        device = self._devices.get(reply.device)
        is_ours = (reply.run, reply.epoch) == (self._run, self.epoch)
        if device is not None and is_ours and device.is_silent:  # it is back
            self.num_dropped += 1
            self._open(reply.device, device.num_slots)
            return
        task = None
        if device is not None and is_ours:
            asked = (reply.number, reply.attempt)
            task = next((t for t in device.tasks if (t.job.number, t.job.attempt) == asked), None)
        if device is None or task is None:
            self.num_dropped += 1
            return
        device.tasks.remove(task)
        device.note_begun()
        if task.job.name == OPEN:
            self._opened(reply, device)
        elif reply.failure is None:
            task.future.set_result({**reply.data, "on": reply.device})
        elif reply.failure.is_lost:
            self._try_again(task, reply.failure.message, is_suspect=True)
        else:
            task.future.set_exception(JobRaised(reply.failure))

    def _open(self, name: str, num_slots: int) -> None:
        self._number += 1
        opening = self._opening
        job = Job(
            self._run, self.epoch, self._number, 1, name, OPEN, opening.payload(name),
            opening.files, opening.limit_s,
        )  # fmt: skip
        self.refused.pop(name, None)
        self._devices[name] = _Device(num_slots, deque([_Task(job, Future())]))
        self._devices[name].note_begun()
        self._fleet.submit(job)

    def _opened(self, reply: Reply, device: _Device) -> None:
        failure = reply.failure
        if failure is None:
            reason = self._opening.refusal(reply.device, reply.data)
            failure = Failure("DeviceError", reason) if reason else None
        if failure is None:
            device.is_open = True
            self._on_change(reply.device, "ready")
            return
        self.refused[reply.device] = JobRaised(failure)
        del self._devices[reply.device]
        self._on_change(reply.device, f"left out: {failure.message}")

    def _lose(self, name: str, reason: str) -> None:
        """Give what a device had to others; what ran there may be why it is lost."""
        device = self._devices.pop(name, None)
        if device is None:
            return
        if device.is_open and not device.is_silent:
            self._on_change(name, f"lost: {reason}")
        self._alone_since_s = time.monotonic()
        running = device.running
        for task in reversed(device.tasks):
            if task.job.name != OPEN:
                self._try_again(task, reason, is_suspect=task in running)

    def _try_again(self, task: _Task, reason: str, *, is_suspect: bool) -> None:
        task.num_losses += is_suspect
        if task.num_losses >= MAX_LOSSES:
            times = f"lost {task.num_losses} times with the device that it ran on"
            self._fail(task, AttemptLost(f"{times}, at last: {reason}"))
        else:
            self._waiting.appendleft(task)

    def _fail(self, task: _Task, error: Exception) -> None:
        if task.job.name != OPEN and not task.future.done():
            task.future.set_exception(error)

    # ---- what follows ------------------------------------------------------------------------

    def _look_at_time(self) -> None:
        now_s = time.monotonic()
        for name, device in list(self._devices.items()):
            if not device.tasks or device.is_silent:
                continue
            late = [t for t in device.running if now_s > t.since_s + t.job.limit_s]
            if late:
                for task in device.tasks:
                    self._fleet.cancel(name, task.job.number)
                self._lose(name, f"no answer within {late[0].job.limit_s:g} s")
                self._devices[name] = _Device(device.num_slots, is_silent=True)
        is_alone = all(device.is_silent for device in self._devices.values())
        if not is_alone:
            self._alone_since_s = now_s
        elif self._waiting and now_s > self._alone_since_s + self._patience_s:
            for task in self._waiting:
                self._fail(task, DeviceError(self._no_device()))
            self._waiting.clear()

    def _no_device(self) -> str:
        left_out = [f"  {name}: {error.message}" for name, error in self.refused.items()]
        lines = ["no device of the fleet is left", *left_out]
        return "\n".join([*lines, "  next: `tune --resume`, once there is one"])

    def _assign(self) -> None:
        for task in list(self._waiting):
            if task.wanted and task.wanted not in self._devices:
                self._waiting.remove(task)
                self._fail(task, DeviceError(f"{task.wanted} is no device of the fleet any more"))
                continue
            free = [
                (len(device.tasks) / device.num_slots, name)
                for name, device in self._devices.items()
                if device.has_room and task.wanted in ("", name)
            ]
            if free:
                self._waiting.remove(task)
                self._hand(task, min(free)[1])

    def _hand(self, task: _Task, name: str) -> None:
        device = self._devices[name]
        task.job = replace(task.job, attempt=task.job.attempt + 1, device=name)
        task.since_s = 0.0
        device.tasks.append(task)
        device.note_begun()
        self._fleet.submit(task.job)
