"""The inputs of calls that are timed: other memory and new content for each."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["REPEATED_FROM", "RotatingInputs"]

NUM_INPUT_SETS = 3  # rotated while timing, so that no call finds its own input in a cache
ALONE_FROM_BYTES = 2**31  # what is larger fits in no cache, and memory may not hold three
REPEATED_FROM = 2**40  # numbers of calls that no timer reaches
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, are spread evenly


class RotatingInputs:
    """The inputs that a module is timed on: each call finds other memory, and new content.

    Three sets rotate (one of large inputs), the same rows in other orders. Before each call some
    numbers of its set's first row become what no earlier call had, so that an answer that was kept
    is never right.
    Both sides of a race know what call i was given, without asking each other.

    Attributes:
        given: the inputs of the first set.
        num_bytes: of all sets together.
    """

    def __init__(self, given: list[Any]) -> None:
        self.given = given
        num_bytes = sum(getattr(value, "nbytes", 0) for value in given)
        num_sets = NUM_INPUT_SETS if num_bytes < ALONE_FROM_BYTES else 1
        self.num_bytes = num_sets * num_bytes
        self._sets = [given, *([_rolled(v, n) for v in given] for n in range(1, num_sets))]
        self._rows = [[_few_numbers(value) for value in values] for values in self._sets]
        self._kept = [[None if r is None else r.clone() for r in rows] for rows in self._rows]
        self._next = REPEATED_FROM

    def __getitem__(self, call: int) -> list[Any]:
        return self._sets[call % len(self._sets)]

    def renew(self, call: int) -> None:
        """Give the inputs of that call their content."""
        import torch

        if not self.given:
            return  # nothing is timed yet
        # Never the same twice, nor above 1: larger numbers than were given may cost more.
        factor = 1.0 - 0.5 * ((call * _GOLDEN) % 1.0)
        place = call % len(self._sets)
        for row, kept in zip(self._rows[place], self._kept[place], strict=True):
            if row is not None:
                torch.mul(kept, factor, out=row)

    def fresh_call(self) -> int:
        """Return a number that no call had, not even a timer's."""
        self._next += 1
        return self._next

    def of_call(self, call: int) -> list[Any]:
        """Return what that call is given, as it is until the next one of its set."""
        self.renew(call)
        return self[call]


def _rolled(value: Any, shift: int) -> Any:
    import torch

    return value.roll(shift, 0) if isinstance(value, torch.Tensor) and value.ndim > 0 else value


def _few_numbers(value: Any) -> Any:
    """Return a view of the first numbers of a floating-point tensor, None where it has none.

    Few, since PyTorch's thread pool must not wake up for them just before a call is timed.
    """
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return None
    while value.ndim > 1:
        value = value[0]
    return value[:1024] if value.ndim else None
