"""Whole numbers that rounding decides: which of two codes is nearer, which class is the largest.

Float64 and two honest float32 computations, each with an order of sums of its own, may find
another one of them. So where outputs of whole numbers differ from what is expected, the reference
is played again in float64 with each number of its forward moved by as much as float32 may have it
wrong, and an element may be what one of these replays has there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tuner.check.judge.compare import Error, compare
from tuner.check.judge.kinks import EXACT, REACHES, Replay
from tuner.errors import says_no_memory

if TYPE_CHECKING:
    import torch

__all__ = ["errors_at_ties"]


def errors_at_ties(
    replay: Replay | None,
    got: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
    unjudged: Mapping[str, torch.Tensor],
) -> dict[str, Error]:
    """Return the errors of whole numbers, beside what a near tie lets them be.

    Empty where that does not make all of them right, or where values are few: what is equal there
    is so exactly, and which of them comes first is no rounding.

    Args:
        replay: of the probe; None where it cannot be played again.
        got: outputs of whole numbers or bools that differ from what is expected, by name.
        oracle: what is expected.
        unjudged: elements that are not compared.
    """
    if replay is None or replay.probe.distribution in EXACT:
        return {}
    try:
        return _found(replay, got, oracle, unjudged)
    except (RuntimeError, MemoryError) as error:  # of a very large problem, or beside others
        if not says_no_memory(f"{type(error).__name__}: {error}"):
            raise
        return {}


def _found(
    replay: Replay,
    got: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
    unjudged: Mapping[str, torch.Tensor],
) -> dict[str, Error]:
    import torch

    want = {name: oracle[name] for name in got}
    results = replay.measured()
    for turn, reach in enumerate(each * sign for each in REACHES for sign in (1.0, -1.0)):
        report, moved = replay.moved(results, reach, turn // 2)
        if report.error:
            return {}
        want = {n: torch.where(moved[n] == got[n], got[n], w) for n, w in want.items()}
        errors = {n: compare(got[n], w, unjudged.get(n)) for n, w in want.items()}
        if not any(error.num_misplaced for error in errors.values()):
            return errors
    return {}
