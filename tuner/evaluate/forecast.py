"""How many rows a probe has, and how long the rest of a check is expected to take."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.check.judge.refusals import FEWER_ROWS, MOST_ELEMENTS
from tuner.check.probes.batches import Extent
from tuner.check.probes.probe import Probe

__all__ = ["asked_rows", "costs_of", "remaining_s"]

FIXED_S = 0.04  # of any probe: drawing it, talking to two processes, starting its operations
# For each number that a call takes or makes: by the reference, twice, and the candidate.
NUMBER_S = {"gpu": 5e-10, "cpu": 5e-8}
USUAL_NUMBERS = 2000.0  # of a row, where that is not known
GRADIENTS = 3.0  # a call and its backward, in calls
SURE_S = 3.0  # of probes, after which what they took counts as much as what was expected


def asked_rows(probe: Probe, extent: Extent) -> int:
    """Return at how many rows a probe is asked of a problem."""
    rows = (extent.num_rows or 1) if probe.batch is None else probe.batch
    is_whole = 0 < rows * extent.row_elements <= MOST_ELEMENTS
    return min(FEWER_ROWS, extent.most_rows) if probe.is_tall and not is_whole else rows


def costs_of(probes: Sequence[Probe], extent: Extent) -> list[float]:
    """Return the seconds that each probe, in any order, is expected to take of a problem."""
    row_s = (extent.row_elements or USUAL_NUMBERS) * NUMBER_S[extent.device]

    def cost_of(probe: Probe) -> float:
        rows = asked_rows(probe, extent)
        calls = probe.calls + probe.more_calls + len(probe.mild)
        return FIXED_S + calls * rows * row_s * (GRADIENTS if probe.gradients else 1.0)

    return [cost_of(probe) for probe in probes]


def remaining_s(costs: Sequence[float], number: int, elapsed_s: float) -> float:
    """Return how long what follows the `number`-th probe will take.

    What was expected counts as well as what has come to pass, so that a few slow probes at the
    start, or fast ones, do not decide alone.

    Args:
        costs: of all probes, as expected.
        number: of those that are answered, at least 1.
        elapsed_s: since the first was answered, before which imports and compilers work.
    """
    done = sum(costs[1:number])
    return sum(costs[number:]) * (elapsed_s + SURE_S) / (done + SURE_S)
