"""What a fleet is: devices that run jobs, and what crosses between them and the parent.

    parent                                    agent, one a device
    ------                                    -------------------
    Fleet.submit(Job)           ---->         runs it, after those that it was given before
    Fleet.event()               <----         Reply, Lost, Joined

A job and its reply are JSON; files go beside them, named by their content. The parent fills
futures from the events (`dispatch`), so that nobody waits for an agent that may be gone; only
files that an agent made, such as compiled code, are fetched. An agent may run a job twice, or
answer for a parent that is no more: what counts is the first reply to the current attempt, of
this run and this epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

__all__ = ["OPEN", "AttemptLost", "Event", "Failure", "Fleet", "Job", "Joined", "Lost", "Reply"]

OPEN = "open"  # the job that an agent's work for a run begins with


@dataclass(frozen=True, slots=True)
class Job:
    """One thing that an agent is to do.

    Attributes:
        run: name of the run.
        epoch: of the parent that asks, drawn anew for each session.
        number: of the job, in this epoch.
        attempt: from 1 on; another one begins where the one before is given up.
        device: which is to do it.
        name: what to do.
        payload: anything that JSON can hold.
        files: by the name under which the job expects each beside the others: its path here.
        limit_s: seconds after which the parent gives the attempt up.
    """

    run: str
    epoch: str
    number: int
    attempt: int
    device: str
    name: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    limit_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Failure:
    """What a job raised, as text; `is_lost` says that its process was killed from outside."""

    kind: str
    message: str
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of an attempt."""

    run: str
    epoch: str
    number: int
    attempt: int
    device: str
    data: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """A device is gone, with all that it was given."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A device is there, and knows of no run yet; `num_slots` jobs run there at a time."""

    device: str
    num_slots: int = 1


Event = Reply | Lost | Joined


class AttemptLost(Exception):
    """Raised where a job's process was killed from outside: it is not the job's fault."""


class Fleet(Protocol):
    """Devices that run jobs; its methods may be called from any thread."""

    def submit(self, job: Job) -> None:
        """Hand a job to its device; does not wait. What cannot be delivered leads to `Lost`."""

    def event(self, timeout_s: float) -> Event | None:
        """Return what happened next, None where nothing does in that time."""

    def cancel(self, device: str, number: int) -> None:
        """Drop a job unless it runs already; it may be answered all the same."""

    def fetch(self, device: str, digest: str, timeout_s: float) -> bytes:
        """Return the bytes of a file that a job made there, by their sha256.

        Raises:
            AttemptLost: the device is gone, or slow, or what it gave are other bytes.
        """

    def close(self) -> None:
        """End the agents' work for this parent."""
