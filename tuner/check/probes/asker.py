"""What the probes of one problem are made with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tuner.check.probes.batches import Extent
from tuner.check.probes.probe import Modes, Probe
from tuner.check.probes.tells import TELLS
from tuner.check.probes.traits import Traits

__all__ = ["Asker"]


@dataclass(frozen=True, slots=True)
class Asker:
    """Makes the probes of one problem.

    `reduced` makes one on few rows from its name and fields, `at_full_size` one of as many as
    there is room for; what cannot say anything with such `traits` is left out. What is drawn from
    `secret` no candidate knows before.
    """

    reduced: Callable[..., Probe]
    at_full_size: Callable[..., Probe]
    modes: Modes
    extent: Extent
    traits: Traits
    secret: random.Random

    def probe(self, name: str, tells: str, **fields: Any) -> Probe:
        """Return a probe on few rows; `tells` is a key of `TELLS`."""
        return self.reduced(name, tells=TELLS[tells], **fields)

    def full(self, name: str, tells: str, **fields: Any) -> Probe:
        """Return a probe at full size."""
        return self.at_full_size(name, tells=TELLS[tells], **fields)

    def graded(self, name: str, tells: str, **fields: Any) -> Probe:
        """Return one that asks for gradients."""
        return self.probe(name, tells, **{"distribution": "normal", "gradients": "all", **fields})
