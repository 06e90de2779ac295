"""Times of one call: samples with their summary, and what they say beside the baseline's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict

__all__ = ["NUMBERS", "SAME_SPEED", "Interval", "Measurement"]

SAME_SPEED = 0.05  # relative difference of speed-ups that nobody need know of

# NaN (no error could be computed) and Infinity (an interval without end) survive as words.
NUMBERS = ConfigDict(ser_json_inf_nan="strings")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Samples of one call's time and their summary.

    `latency_us` is the median, `noise` a robust relative dispersion (0.005 = 0.5 %),
    `is_censored` says that sampling stopped early because the candidate is clearly slow
    (then `latency_us` is still the median of what was seen). `anchor_us` is the baseline's
    latency measured last before this one. `to_lead` is by how much times of this device are
    multiplied to be those of the leading one of several. `wall_us` cross-checks the clock.
    All of this is of the given data; `ordinary_us` and `ordinary_anchor_us` are the same of
    ordinary ones, None where it was not timed on them.
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
    ordinary_us: float | None = None
    ordinary_anchor_us: float | None = None

    @property
    def reported_us(self) -> float:
        """The latency as the leading device would have it."""
        return self.latency_us * (self.to_lead or 1.0)

    @property
    def slowdown(self) -> float:
        """How many times less the speed-up is on ordinary data than on the given ones; 1 or more.

        It is 1 where that is not known, and within `SAME_SPEED`: few samples tell no more.
        """
        if not (self.ordinary_us and self.ordinary_anchor_us and self.anchor_us):
            return 1.0
        given = self.anchor_us / self.latency_us
        ratio = given / (self.ordinary_anchor_us / self.ordinary_us)
        return ratio if ratio > 1.0 + SAME_SPEED else 1.0


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
    def words(self) -> str:
        """The ratio and where it lies, as `1.234x [1.200, 1.268]`."""
        return f"{self.speedup:.3f}x [{self.low:.3f}, {self.high:.3f}]"

    def overlaps(self, other: Interval) -> bool:
        """Return whether some ratio lies in both."""
        return self.low <= other.high and other.low <= self.high
