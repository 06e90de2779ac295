"""Times of the baseline on each of several devices, by which their candidates' times compare.

Each device's is timed alone, then on all together, and again between candidates. A candidate's
time is reported as the leading device would take it: by the ratio of both baselines. On a busy
machine a baseline was seen to take five times as long, once; so it is the median of a device's
last three, and the ratio goes no further than what devices may differ by.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tuner.trial import Measurement
from tuner.wording import percent

__all__ = ["Anchors", "Off", "factor"]

FAR, TOO_FAR = 0.03, 0.10  # shares by which a baseline's time differs from others'
NUM_LAST = 3  # times of a baseline, of which the median counts
MANY_NOISES = 3  # a difference of so many times the noise is none of chance


@dataclass(frozen=True, slots=True)
class Off:
    """A device whose baseline differs, in words; whether its times cannot be compared."""

    device: str
    words: str
    is_too_far: bool


def factor(lead_us: float, own_us: float) -> float:
    """Return what a device's times are multiplied with, by its baseline and the leading one's."""
    return min(max(lead_us / own_us, 1 / (1 + TOO_FAR)), 1 + TOO_FAR)


class Anchors:
    """What the baseline takes on each device, from the start on. From any thread.

    Args:
        alone: as it was timed on each device while the others rested; the first one leads.
        leaves_out: whether a device may be too far off: not the parts of one processor.
    """

    def __init__(self, alone: Mapping[str, Measurement], *, leaves_out: bool) -> None:
        self.lead = next(iter(alone))
        self.lead_us = alone[self.lead].latency_us  # what others disturb only takes longer
        self.alone_us = {name: measured.latency_us for name, measured in alone.items()}
        self.together_us: dict[str, float] = {}
        self._noise = {name: measured.noise for name, measured in alone.items()}
        self._leaves_out = leaves_out
        self._last_us = {name: deque([us], NUM_LAST) for name, us in self.alone_us.items()}
        self._named: dict[str, bool] = {}  # that were reported to have changed; whether too far
        self._lock = threading.Lock()

    def off_at_start(self) -> list[Off]:
        """Return the devices that differ from the first one."""
        found = (self._off_lead(name, us) for name, us in self.alone_us.items())
        return [off for off in found if off is not None]

    def joined(self, name: str, baseline: Measurement) -> Off | None:
        """Take a device that came later; return how it differs from the first one, if it does."""
        with self._lock:
            self._noise[name] = baseline.noise
            self.alone_us[name] = baseline.latency_us
            self._last_us[name] = deque([baseline.latency_us], NUM_LAST)
        return self._off_lead(name, baseline.latency_us)

    def worked_together(self, measured: Mapping[str, Measurement]) -> list[Off]:
        """Take the times while all devices work; return those that others hold up."""
        found = []
        for name, one in measured.items():
            self.together_us[name] = one.latency_us
            self._last_us[name].append(one.latency_us)
            if name == self.lead:
                self.lead_us = min(self.lead_us, one.latency_us)
            off = one.latency_us / self.alone_us[name] - 1
            if off > max(FAR, MANY_NOISES * self._noise[name]):
                words = f"PyTorch takes {percent(off)} longer while the other devices work"
                found.append(Off(name, words, is_too_far=False))
        return found

    def noted(self, name: str, anchor_us: float, among: Collection[str]) -> Off | None:
        """Take what was timed between candidates; return how a device has changed, once.

        A change of all devices is none. Of two that move apart the one is too far off that moved.

        Args:
            name: of the device.
            anchor_us: the baseline's time on it.
            among: the devices that work now.
        """
        with self._lock:
            if name not in self.alone_us:
                return None
            if anchor_us != self._last_us[name][-1]:  # it is reported with each candidate
                self._last_us[name].append(anchor_us)
            others = [self._change(o) for o in self.alone_us if o != name and o in among]
            if not others:
                return None
            change, usual = self._change(name), statistics.median(others)
            off = abs(change / usual - 1)
            if off <= max(FAR, MANY_NOISES * self._noise[name]):
                self._named.pop(name, None)
                return None
            is_too_far = self._is_too_far(name, off) and abs(change - 1) >= abs(usual - 1)
            if self._named.get(name) == is_too_far:
                return None
            self._named[name] = is_too_far
        words = (
            f"PyTorch's time has moved by {percent(off)} from that on the others since the start"
        )
        return Off(name, words, is_too_far)

    def to_lead(self, name: str) -> float:
        """Return what times of a device are multiplied with to be the leading one's."""
        with self._lock:
            return factor(self.lead_us, statistics.median(self._last_us[name]))

    def leave(self, name: str) -> None:
        """Compare with this device no more."""
        with self._lock:
            self.alone_us.pop(name, None)

    def _change(self, name: str) -> float:
        now_us = statistics.median(self._last_us[name])
        return now_us / self.together_us.get(name, self.alone_us[name])

    def _off_lead(self, name: str, us: float) -> Off | None:
        off = us / self.lead_us - 1
        if abs(off) <= max(FAR, self._noise.get(self.lead, 0.0)):
            return None
        words = f"PyTorch's time is {percent(off)} off that on {self.lead}"
        return Off(name, words, self._is_too_far(self.lead, off))

    def _is_too_far(self, name: str, off: float) -> bool:
        return self._leaves_out and abs(off) > max(TOO_FAR, MANY_NOISES * self._noise[name])
