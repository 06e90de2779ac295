"""Probes that are put to a file once more, by kernels that it does not take for them itself.

A file says at which numbers of rows it takes its kernels, and which one of several. What is asked
on few rows says as much of a kernel for many rows, which a call of the file would not reach.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.by_batch import MOST as MOST_ROWS
from tuner.check.batches import MOST
from tuner.check.probe import OWN_WORK, Probe
from tuner.choosing import chosen_at
from tuner.trial import ProbeResult

__all__ = ["Again", "Taken", "until_rejected"]

MOST_BORDERS = 16  # of a file's ranges at which it is asked: ours have a few
MOST_KERNELS = 8  # that are asked: of a file of ours one a tuned size


@dataclass(frozen=True, slots=True)
class Again:
    """Probes that are asked once more: by a kernel, None for the only one."""

    probes: tuple[Probe, ...]
    kernel: int | None = None

    @property
    def ending(self) -> str:
        """What is added to the names of these probes."""
        return ", by kernels" if self.kernel is None else f", by kernel {self.kernel + 1}"

    @property
    def words(self) -> str:
        """Why a rejection is one all the same."""
        if self.kernel is None:
            return "so it is by the kernels, which the file takes at other rows alone"
        return f"so it is by kernel {self.kernel + 1}, which the file takes at other rows"

    def named(self, result: ProbeResult) -> ProbeResult:
        """Return the verdict on a probe's answer with that said."""
        reason = f"{result.reason}; {self.words}" if result.reason else ""
        return replace(result, probe=f"{result.probe}{self.ending}", reason=reason)


def _plain_name(name: str) -> str:
    """Return the name of the probe that a result is of."""
    return re.sub(r", by kernel(s| \d+)$", "", name)


def until_rejected(results: Sequence[ProbeResult], probes: Sequence[Probe]) -> list[ProbeResult]:
    """Return results in the order of the probes, as far as the first rejection."""
    places = {probe.name: place for place, probe in enumerate(probes)}
    ordered = sorted(results, key=lambda result: places[_plain_name(result.probe)])
    rejected = (place for place, result in enumerate(ordered, 1) if not result.is_accepted)
    return ordered[: next(rejected, len(ordered))]


@dataclass(frozen=True, slots=True)
class Taken:
    """What a file says that it takes, by way to call it.

    `rows` are the fewest and the most, and then ranges between in which it takes no kernels;
    `kernels` the most rows of each range, few rows first, and the kernel for them.
    """

    rows: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    kernels: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)

    @property
    def borders(self) -> list[int]:
        """The numbers of rows on both sides of each border between two kernels."""
        found = {most for ranges in self.kernels.values() for most, _ in ranges[:-1]}
        return sorted({rows for most in found for rows in (most, most + 1)})[: 2 * MOST_BORDERS]

    def leaves_out(self, probe: Probe, rows: int) -> bool:
        """Whether a file takes no kernels at so many rows, though it does at others.

        What asks for gradients is asked of kernels only where steps of training have any.
        """
        fewest, most, *gaps = self._rows_of(probe)
        is_gap = any(low <= rows <= high for low, high in gaps)
        return fewest <= most and (not fewest <= rows <= most or is_gap)

    def _rows_of(self, probe: Probe) -> Sequence[Any]:
        """Return the fewest and most rows, and gaps, of the way in which a probe calls a file."""
        is_step = bool(probe.gradients) and not probe.gradients.startswith("forward")
        way = "step" if is_step else "eval" if probe.mode == "eval" else "call"
        return self.rows.get(way) or self.rows.get("call") or (0, MOST_ROWS)

    def _at(self, rows: int) -> set[int]:
        """Return the kernels for so many rows: of calls, of steps, of eval mode."""
        return {chosen_at(rows, ranges) for ranges in self.kernels.values()}

    def fewest_rows(self, probes: Sequence[Probe]) -> dict[str, int]:
        """Return of traced probes at fewer rows than the file takes kernels at the fewest it does.

        What is traced at the problem's own size is not among them, whatever the file says.
        """
        found = {}
        for probe in probes:
            low, high, *_ = self._rows_of(probe)
            if probe.name.startswith(OWN_WORK) and (probe.batch or low) < low <= high:
                found[probe.name] = low
        return found

    def again(self, probes: Sequence[Probe], num_rows: int | None) -> list[Again]:
        """Return what is asked once more, and by which kernel.

        Args:
            probes: that were put to the file as it is.
            num_rows: of those that name no number of rows.
        """
        each = [(p, num_rows if p.batch is None else p.batch) for p in probes]
        asked = [(p, n) for p, n in each if n is not None and not p.name.startswith(OWN_WORK)]
        if not self.kernels:
            left_out = tuple(probe for probe, rows in asked if self.leaves_out(probe, rows))
            return [Again(left_out)] if left_out else []
        found = []
        known = sorted({kernel for ranges in self.kernels.values() for _, kernel in ranges})
        for kernel in known[:MOST_KERNELS]:
            mine = tuple(
                probe
                for probe, rows in asked
                if (self.leaves_out(probe, rows) or self._at(rows) != {kernel})
                # More rows than a probe needs, and the kernel never has them.
                and (rows <= MOST or kernel in self._at(rows))
            )
            found += [Again(mine, kernel)] if mine else []
        return found
