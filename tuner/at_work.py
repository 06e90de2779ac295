"""Who works for a search at a moment: devices, and builders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["AtWork"]


@dataclass(frozen=True, slots=True)
class AtWork:
    """A device, or the builders of a host.

    Attributes:
        name: of the device or the host, "" of this host's builders.
        kind: which of both.
        num_slots: how many jobs it does at a time; 0 once it is lost.
        num_busy: how many it does.
    """

    name: str
    kind: Literal["device", "builders"]
    num_slots: int
    num_busy: int
