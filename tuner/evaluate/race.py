"""A race's times, of processes that took turns, and what follows for each contender."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tuner.intervals import rounds_of, speedup_of, with_figures
from tuner.problem.timed_data import GIVEN_ALONE
from tuner.trial import Check, Compiled, Finalist, Interval, OnData, ProbeResult

__all__ = ["Race", "compared_with_compiled", "finalist"]

SEEMS_FASTER = 1.1  # for less, no further processes are asked whether it is
BEHIND = 0.02  # in every set so far: no later one would make such a contender the fastest


@dataclass(slots=True)
class Race:
    """What processes that took turns reported of their times, the baseline in lane 0.

    `bursts` are samples in us, [lane][process][round][sample]; a lane that was clearly behind has
    fewer processes than the baseline. `race[lane]` is what counts of
    them, the median of each burst, [process][round]. `num_throttled` samples were dropped,
    and `num_disturbed` turns were repeated, since other programs took the processor meanwhile.
    In a process memory ran out `num_shortages` times, also where nothing said so; `lacks_others`
    where it did not hold other data that were asked for, `is_rough` where what timed calls
    returned was compared with PyTorch's own answers for lack of memory for float64.
    `others` are the same race on other data, by the workload's name, each of which says in words
    what it is `on`; `steps` is one of steps of training, forward and gradients, if they were asked
    for; `failure` says why there are none of those. `falls_back` says whose timed call ran the
    reference's own operations. `compiled` is the lane of the reference as torch.compile makes it,
    0 where it is in none, and `answer` the verdict on one of its calls.
    """

    bursts: list[list[list[list[float]]]]
    num_throttled: int = 0
    num_disturbed: int = 0
    num_shortages: int = 0
    lacks_others: bool = False
    is_rough: bool = False
    others: dict[str, Race] = field(default_factory=dict)
    on: str = ""
    steps: Race | None = None
    failure: str = ""
    falls_back: dict[int, bool] = field(default_factory=dict)  # by lane
    compiled: int = 0
    answer: ProbeResult | None = None

    def __getitem__(self, lane: int) -> list[list[float]]:
        return rounds_of(self.bursts[lane])

    def __len__(self) -> int:
        return len(self.bursts)

    @property
    def num_processes(self) -> int:
        """How many sets of processes raced."""
        return len(self.bursts[0])

    def __iter__(self) -> Iterator[list[list[float]]]:
        return (self[lane] for lane in range(len(self)))

    def notes(self) -> list[str]:
        """Say what disturbed it."""
        notes = []
        if self.num_disturbed:
            notes.append(
                f"{self.num_disturbed} turns of the race were repeated: other programs took the "
                "processor meanwhile"
            )
        if self.num_shortages:
            notes.append(
                "memory ran out while files raced: where a library found too little PyTorch may "
                "be slower than it is elsewhere"
            )
        if self.lacks_others:
            notes.append(f"raced {GIVEN_ALONE}: the device's memory does not hold others besides")
        if self.is_rough:
            notes.append(
                "what timed calls returned was compared with PyTorch's own answers, within 2^-8: "
                "there is no memory for float64 at this size"
            )
        return notes

    def clearly_behind(self, lanes: Sequence[int]) -> list[int]:
        """Return those of the lanes whose least speed-up was below the best one's in every set."""
        times = {n: self._relative_times(n) for n in lanes}
        best = min(lanes, key=lambda n: statistics.fmean(times[n]), default=0)
        return [
            n
            for n in lanes
            if all(t > (1.0 + BEHIND) * b for t, b in zip(times[n], times[best], strict=True))
        ]

    def leaves_open(self, lanes: Sequence[int]) -> bool:
        """Whether the fastest of the lanes seems faster by more than its processes agree on."""
        if not lanes:
            return False
        best = min(lanes, key=lambda n: statistics.fmean(self._relative_times(n)))
        races = (self, *self.others.values())
        least = min((speedup_of(race[0], race[best]) for race in races), key=lambda i: i.worth)
        return least.speedup >= SEEMS_FASTER and least.low < 1.0

    def _relative_times(self, lane: int) -> list[float]:
        """Return a lane's time over the baseline's in each set, on the data where that is most."""
        of_data = [
            [
                statistics.median(own) / statistics.median(baseline)
                for own, baseline in zip(race[lane], race[0], strict=True)
            ]
            for race in (self, *self.others.values())
        ]
        return [max(times) for times in zip(*of_data, strict=True)]


def finalist(number: int, check: Check, race: Race | None, lane: int) -> Finalist:
    """Summarise one lane of a race against lane 0, the baseline.

    Args:
        number: the trial's number.
        check: the verdict of all probes.
        race: what `Racer.race` returned, None for a contender that did not race.
        lane: which of them is the contender's.
    """
    if race is None:
        return Finalist(number, check, error=check.reason)
    own, steps = race.bursts[lane], race.steps
    entry = Finalist(
        number,
        check,
        samples_us=_frozen(own),
        baseline_samples_us=_frozen(race.bursts[0][: len(own)]),
        num_throttled=race.num_throttled,
        falls_back=race.falls_back.get(lane, False),
        others=tuple(_on_data(name, other, lane) for name, other in race.others.items()),
        step=None if steps is None or not steps.bursts[lane] else _of_lane(steps, lane),
        step_failure="" if steps is None else steps.failure,
    )
    return with_figures(entry)


def _on_data(name: str, race: Race, lane: int) -> OnData:
    own = race[lane]
    baseline = race.bursts[0][: len(own)]
    return OnData(
        name,
        race.on,
        speedup_of(rounds_of(baseline), own),
        _frozen(race.bursts[lane]),
        _frozen(baseline),
    )


def compared_with_compiled(mode: str, race: Race, lane: int) -> Compiled:
    """Summarise a race in which torch.compile is, as it is beside one contender's lane."""
    own = race[lane]
    baseline, compiled = race[0][: len(own)], race[race.compiled][: len(own)]
    return Compiled(
        mode,
        interval=speedup_of(baseline, compiled),
        ours=speedup_of(compiled, own),
        latency_us=statistics.median(value for process in compiled for value in process),
        answer=race.answer,
        others={
            each.on: _of_lane(each, race.compiled, len(each[lane]))
            for each in race.others.values()
        },
    )


def _of_lane(race: Race, lane: int, most: int | None = None) -> Interval:
    """Return a lane's speed-up, in so many sets of processes at most."""
    own = race[lane][:most]
    return speedup_of(race[0][: len(own)], own)


def _frozen(lane: list[list[list[float]]]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    return tuple(tuple(tuple(burst) for burst in rounds) for rounds in lane)
