"""The devices of this host as a fleet: one worker a device, each with an agent in this process."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from tuner.fleet.agent import Agent, Serve
from tuner.fleet.fleet import AttemptLost, Event, Fleet, Job, Joined
from tuner.fleet.wire import Blobs, Garbled

__all__ = ["local_fleet"]


class _LocalFleet:
    def __init__(self, devices: Sequence[str], serve: Serve, blobs: Blobs | None) -> None:
        self._blobs = blobs
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

        def send(event: Event, epoch: str) -> None:
            self._events.put(event)

        self._agents = {name: Agent(name, serve, send) for name in devices}
        for name in devices:
            self._events.put(Joined(name))

    def submit(self, job: Job) -> None:
        self._agents[job.device].submit(job)

    def event(self, timeout_s: float) -> Event | None:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def cancel(self, device: str, number: int) -> None:
        self._agents[device].cancel(number)

    def fetch(self, device: str, digest: str, timeout_s: float) -> bytes:
        if self._blobs is None:
            raise AttemptLost(f"{device} makes no files")
        try:
            return self._blobs.read(digest)
        except Garbled as error:
            raise AttemptLost(str(error)) from error

    def close(self) -> None:
        for agent in self._agents.values():
            agent.close()


def local_fleet(devices: Sequence[str], serve: Serve, blobs: Blobs | None = None) -> Fleet:
    """Return a fleet of devices of this host.

    Args:
        devices: their names.
        serve: what an agent can do, given the name of its device.
        blobs: where agents keep files that their jobs make, if they make any.
    """
    return _LocalFleet(devices, serve, blobs)
