"""Times of one call: samples with their summary, and what they say beside the baseline's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict, model_validator

__all__ = ["NUMBERS", "SAME_SPEED", "Bursts", "Interval", "Measurement", "OnData", "keys_of"]

SAME_SPEED = 0.05  # relative difference of speed-ups that nobody need know of
VAGUE = 16.0  # times as much as its lower bound: an upper one that tells nothing

# NaN (no error could be computed) and Infinity (an interval without end) survive as words.
NUMBERS = ConfigDict(ser_json_inf_nan="strings")


Bursts = tuple[tuple[tuple[float, ...], ...], ...]
"""Samples of one lane of a race in us, [process][round][sample]."""


def keys_of(values: Any) -> dict[str, Any]:
    """Return the keys of a record that is being read, for a validator to edit."""
    keys = getattr(values, "kwargs", values)  # pydantic wraps them for a dataclass
    return keys if isinstance(keys, dict) else {}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Samples of one call's time and their summary.

    `latency_us` is the median, `noise` a robust relative dispersion (0.005 = 0.5 %),
    `is_censored` says that sampling stopped early because the candidate is clearly slow
    (then `latency_us` is still the median of what was seen). `anchor_us` is the baseline's
    latency measured last before this one. `to_lead` is by how much times of this device are
    multiplied to be those of the leading one of several. `wall_us` cross-checks the clock.
    All of this is of the given data; `others_us` and `others_anchor_us` are the latency and the
    baseline's on each other workload that it was timed on, by its name.
    """

    __pydantic_config__ = NUMBERS

    latency_us: float
    noise: float
    samples_us: tuple[float, ...]
    is_cold: bool
    is_censored: bool = False
    num_throttled: int = 0
    anchor_us: float | None = None
    wall_us: float | None = None
    to_lead: float | None = None
    others_us: dict[str, float] = field(default_factory=dict)
    others_anchor_us: dict[str, float] = field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_releases(cls, values: Any) -> Any:
        """Read records of when there were ordinary data alone beside the given ones."""
        keys = keys_of(values)
        for name in ("ordinary_us", "ordinary_anchor_us"):
            if (us := keys.pop(name, None)) is not None:
                keys[name.replace("ordinary", "others")] = {"ordinary": us}
        return values

    @property
    def reported_us(self) -> float:
        """The latency as the leading device would have it."""
        return self.latency_us * (self.to_lead or 1.0)

    @property
    def slowdown(self) -> float:
        """How many times less the least speed-up on other data is than on the given; 1 or more.

        It is 1 where that is not known, and within `SAME_SPEED`: few samples tell no more.
        """
        if not self.slowest_on or not self.anchor_us:
            return 1.0
        ratio = self.anchor_us / self.latency_us / self.speedup_on(self.slowest_on)
        return ratio if ratio > 1.0 + SAME_SPEED else 1.0

    @property
    def slowest_on(self) -> str:
        """The name of the other data of the least speed-up; empty where none was timed."""
        timed = [n for n, us in self.others_us.items() if us and self.others_anchor_us.get(n)]
        return min(timed, key=self.speedup_on, default="")

    def speedup_on(self, name: str) -> float:
        """Return the speed-up on other data, by their name, on which both were timed."""
        return self.others_anchor_us[name] / self.others_us[name]


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio baseline / candidate with the interval that another process should fall into."""

    __pydantic_config__ = NUMBERS

    speedup: float
    low: float
    high: float
    confidence: float
    num_processes: int

    @property
    def verdict(self) -> Literal["faster", "slower", "no difference"]:
        """A ratio whose interval holds 1 is no difference."""
        if self.low > 1.0:
            return "faster"
        return "slower" if self.high < 1.0 else "no difference"

    @property
    def worth(self) -> tuple[bool, float]:
        """What intervals are ordered by, the worst first: those surely slower, then the ratio."""
        return self.verdict != "slower", self.speedup

    @property
    def is_vague(self) -> bool:
        """Whether its few processes differ so much that its bounds tell nothing."""
        return not self.high <= VAGUE * self.low

    @property
    def why_vague(self) -> str:
        """Say so in place of bounds, as `2 processes differ too much for bounds`."""
        if self.num_processes == 1:
            return "rounds of 1 process differ too much for bounds"
        return f"{self.num_processes} processes differ too much for bounds"

    def bounds(self, words: str) -> str:
        """Return the words of its bounds, or why these are not worth saying."""
        return self.why_vague if self.is_vague else words

    @property
    def words(self) -> str:
        """The ratio and where it lies, as `1.234x [1.200, 1.268]`."""
        return f"{self.speedup:.3f}x [{self.bounds(f'{self.low:.3f}, {self.high:.3f}')}]"

    def overlaps(self, other: Interval) -> bool:
        """Return whether some ratio lies in both."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True)
class OnData:
    """The speed-up on data beside the given ones, of samples in us of the same rounds.

    `name` is the workload's and `words` say what the data are: inputs that the reference has no
    finite answer to are replaced by its own. Earlier releases kept no samples of them.
    """

    __pydantic_config__ = NUMBERS

    name: str
    words: str
    interval: Interval
    samples_us: Bursts = ()
    baseline_samples_us: Bursts = ()

    def depends(self, given: Interval | None) -> bool:
        """Whether these data change the speed-up, by more than another process would."""
        if given is None or given.overlaps(self.interval):
            return False
        return abs(math.log(given.speedup / self.interval.speedup)) > SAME_SPEED
