"""Probes as they are put to a file, also by kernels that it does not take for them itself.

A file says at which numbers of rows it takes its kernels, and which one of several. What is asked
on few rows says as much of a kernel for many rows, which a call of the file would not reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.by_batch import MOST as MOST_ROWS
from tuner.check.probes.batches import MOST
from tuner.check.probes.probe import OWN_WORK, Probe
from tuner.choosing import chosen_at
from tuner.trial import ProbeResult

__all__ = ["RACES", "Query", "Taken", "in_order", "parted", "unjudged"]

MOST_BORDERS = 16  # of a file's ranges at which it is asked: ours have a few
MOST_KERNELS = 8  # that are asked: of a file of ours one a tuned size
RACES = (
    "one module was not called by several threads at once: the reference changes its buffers in "
    "eval mode, so that they, and answers that read them, depend on which call is first"
)


@dataclass(frozen=True, slots=True)
class Query:
    """A probe as it is put to a file: to the file as it is, or to kernels at all rows.

    With `is_by_kernels` the file takes its kernels where it would not, of several the one whose
    number is `kernel`.
    """

    probe: Probe
    is_by_kernels: bool = False
    kernel: int | None = None

    @property
    def name(self) -> str:
        """The probe's name, and by which kernels it is answered where not as the file is."""
        if not self.is_by_kernels:
            return self.probe.name
        which = "kernels" if self.kernel is None else f"kernel {self.kernel + 1}"
        return f"{self.probe.name}, by {which}"

    def named(self, result: ProbeResult) -> ProbeResult:
        """Return the verdict on the probe's answer with that said."""
        if not self.is_by_kernels:
            return result
        words = (
            "so it is by the kernels, which the file takes at other rows alone"
            if self.kernel is None
            else f"so it is by kernel {self.kernel + 1}, which the file takes at other rows"
        )
        reason = f"{result.reason}; {words}" if result.reason else ""
        return replace(result, probe=self.name, reason=reason)

    def has_same_probe(self, other: Query | None) -> bool:
        """Whether another one is the same question, which a judge need not compute again."""
        return other is not None and other.probe == self.probe


def in_order(results: Sequence[ProbeResult], queries: Sequence[Query]) -> list[ProbeResult]:
    """Return results in the order of the probes, those by kernels last, up to a rejection."""
    ordered = sorted(queries, key=lambda query: (query.is_by_kernels, query.kernel or 0))
    places = {query.name: place for place, query in enumerate(ordered)}
    found = sorted(results, key=lambda result: places[result.probe])
    rejected = (place for place, result in enumerate(found, 1) if not result.is_accepted)
    return found[: next(rejected, len(found))]


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

    def queries(self, probes: Sequence[Probe], num_rows: int | None) -> list[Query]:
        """Return how probes are put to the file: each as it is, and then once more by kernels.

        Args:
            probes: in their order.
            num_rows: of those that name no number of rows.
        """
        return [
            query
            for probe in probes
            for query in (
                Query(probe),
                *self._by_kernels(probe, num_rows if probe.batch is None else probe.batch),
            )
        ]

    def _by_kernels(self, probe: Probe, rows: int | None) -> list[Query]:
        """Return a probe's further queries: by kernels that the file does not take for it."""
        if rows is None or probe.name.startswith(OWN_WORK):
            return []
        is_left_out = self.leaves_out(probe, rows)
        if not self.kernels:
            return [Query(probe, is_by_kernels=True)] if is_left_out else []
        taken = self._at(rows)
        known = sorted({kernel for ranges in self.kernels.values() for _, kernel in ranges})
        return [
            Query(probe, is_by_kernels=True, kernel=kernel)
            for kernel in known[:MOST_KERNELS]
            if (is_left_out or taken != {kernel})
            # More rows than a probe needs, and the kernel never has them.
            and (rows <= MOST or kernel in taken)
        ]


def parted(queries: Sequence[Query], places: Sequence[int]) -> tuple[list[Query], list[Query]]:
    """Return those at some places, and the others."""
    chosen = {*places}
    others = [query for place, query in enumerate(queries) if place not in chosen]
    return [queries[place] for place in places], others


def unjudged(probes: Sequence[Probe]) -> list[str]:
    """Name the probes whose numbers nobody can judge."""
    names = [probe.name for probe in probes if probe.is_random]
    said = (
        f"numbers were not compared on {len(names)} of {len(probes)} probes, since the reference "
        f"draws random numbers in their mode: {', '.join(names)}"
    )
    return [said] if names else []
