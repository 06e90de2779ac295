"""Search a recorded space with 1, 8, 64 and 512 devices that are simulated, in simulated time.

    python -m benchmarks.fleet_simulation RECORDING [--devices 1,8,64,512] [--trials 1000] \
        [--sampler surrogate] [--seeds 3] [--think-ms 25] [--build-s 6] [--builders 32] \
        [--screen-s 1.5] [--job-ms 4] [--fails-per-hour 0.1]

The search, its sampler and the order of telling are the real ones; builds, devices and the
parent's own time are modelled. A build takes a time that is log-normally distributed about
`--build-s`, on one of `--builders`; a candidate occupies a device for `--screen-s` and 200 of its
calls, half of `--screen-s` where it fails. The parent needs `--think-ms` for each question and
`--job-ms` for each job, one after the other. A device is lost at random, `--fails-per-hour`; what
it was at is done again, after 2 s, by another one, and it is back after 10 minutes.

Prints a line a number of devices, medians over the seeds: questions in flight; trials a second;
the share of their time for which devices were busy; what they mostly waited for; seconds and
trials until the best was within 5 % of the optimum.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tuner.fleet.dispatch import QUEUED
from tuner.search.recorded import Recording, read_recording
from tuner.search.study import SearchBudget, search
from tuner.trial import Measurement, Outcome, Params, Status, Trial

CALLS = 200  # of a candidate, while it is checked and timed
SPREAD = 0.5  # of the logarithm of a build's time
SEEN_S, BACK_S = 2.0, 600.0  # until a lost device is noticed, and until it is back
NEAR = 0.05
Kind = Literal["built", "ended", "failed", "back"]


@dataclass(slots=True, eq=False)
class Flying:
    """A configuration on its way."""

    config_id: int
    ended_s: float = 0.0
    candidate_key: str = ""


class Simulation:
    """The evaluator: what each configuration's outcome is, and when it is there.

    Attributes:
        ahead: configurations in flight.
        now_s: simulated time of the parent.
        busy_s: of all devices.
        idle_s: of all devices, by what they waited for.
    """

    overlaps = False

    def __init__(
        self, recording: Recording, options: argparse.Namespace, num: int, seed: int
    ) -> None:
        self._recording = recording
        self._options = options
        self._rng = np.random.default_rng([seed, num])
        self._num_idle = num
        self._ready: deque[Flying] = deque()
        self._num_building = 0
        self._builders_s = [0.0] * options.builders  # when each is free, the soonest first
        self._events: list[tuple[float, int, Kind, Flying | None]] = []
        self._order = itertools.count()
        self._at_s = 0.0  # of the last event
        self.ahead = min(options.builders + QUEUED * num, options.trials)
        self.now_s = 0.0
        self.busy_s = 0.0
        self.idle_s = {"parent": 0.0, "builders": 0.0}

    def submit(self, params: Params) -> Flying:
        """Think of a configuration, and hand it to the builders."""
        self.now_s += (self._options.think_ms + self._options.job_ms) / 1e3
        config_id = self._recording.space.index(params)
        assert config_id is not None
        item = Flying(config_id)
        spread = math.exp(SPREAD * float(self._rng.standard_normal()))
        begins_s = max(self.now_s, heapq.heappop(self._builders_s))
        built_s = begins_s + self._options.build_s * spread
        heapq.heappush(self._builders_s, built_s)
        self._num_building += 1
        self._expect(built_s, "built", item)
        return item

    def first_ready(self, pending: Sequence[Flying], timeout_s: float | None = None) -> int:
        """Let time pass until a device ends with one of them; return its place."""
        while True:
            at_s, _, kind, item = heapq.heappop(self._events)
            cause = "builders" if self._num_building >= self._options.builders else "parent"
            self.idle_s[cause] += self._num_idle * max(0.0, at_s - self._at_s)
            self._at_s = max(self._at_s, at_s)
            if kind == "failed":
                self._expect(at_s + BACK_S, "back", None)
                self._num_building += 1  # as far as devices are concerned
                self._expect(at_s + SEEN_S, "built", item)
                continue
            if kind == "built":
                assert item is not None
                self._num_building -= 1
                self._ready.append(item)
            else:
                self._num_idle += 1
            while self._num_idle and self._ready:
                self._num_idle -= 1
                self._begin(self._ready.popleft(), at_s)
            if kind == "ended":
                assert item is not None
                item.ended_s = at_s
                return pending.index(item)

    def waits_for(self) -> str:
        """Return what devices waited for most, where that was a hundredth of their work."""
        cause = max(self.idle_s, key=lambda cause: self.idle_s[cause])
        return cause if self.idle_s[cause] > 0.01 * self.busy_s else "nothing"

    def _begin(self, item: Flying, at_s: float) -> None:
        takes_s = float(self._options.screen_s)
        if self._recording.statuses[item.config_id] is Status.CORRECT:
            takes_s += CALLS * float(self._recording.latency_us[item.config_id]) * 1e-6
        else:
            takes_s /= 2
        until_lost_s = float(self._rng.exponential(3600.0 / self._options.fails_per_hour))
        if until_lost_s < takes_s:
            self._expect(at_s + until_lost_s, "failed", item)
        else:
            self.busy_s += takes_s
            self._expect(at_s + takes_s, "ended", item)

    def _expect(self, at_s: float, kind: Kind, item: Flying | None) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), kind, item))

    def finish(self, pending: Flying, number: int, best_us: float | None) -> Outcome:
        """Return the recorded outcome."""
        self.now_s = max(self.now_s, pending.ended_s)
        status = self._recording.statuses[pending.config_id]
        if status is not Status.CORRECT:
            return Outcome(status)
        latency_us = float(self._recording.latency_us[pending.config_id])
        return Outcome(status, measurement=Measurement(latency_us, 0.0, (latency_us,), False))


@dataclass(frozen=True, slots=True)
class Found:
    """What one simulated search came to; infinite where it did not come near the optimum."""

    in_flight: int
    trials_per_s: float
    busy: float
    waits_for: str
    near_s: float
    near_trials: float


def simulated(recording: Recording, options: argparse.Namespace, num: int, seed: int) -> Found:
    """Search a recording on so many simulated devices."""
    simulation = Simulation(recording, options, num, seed)
    near_us = (1 + NEAR) * float(np.nanmin(recording.known_us))
    near: list[tuple[float, int]] = []

    def record(trial: Trial) -> None:
        latency_us = trial.outcome.latency_us
        if latency_us is not None and latency_us <= near_us and not near:
            near.append((simulation.now_s, trial.number + 1))

    search(
        recording.space,
        simulation,
        sampler=options.sampler,
        seed=seed,
        budget=SearchBudget(options.trials, math.inf),
        journal=None,
        previous=(),
        record=record,
        at_once=QUEUED * num,  # above 1: told as they come
    )
    num_trials = min(options.trials, recording.space.num_feasible)
    near_s, near_trials = near[0] if near else (math.inf, math.inf)
    return Found(
        simulation.ahead,
        num_trials / simulation.now_s,
        simulation.busy_s / (num * simulation.now_s),
        simulation.waits_for(),
        near_s,
        near_trials,
    )


def main() -> None:
    """Print what each number of devices comes to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("--devices", default="1,8,64,512")
    parser.add_argument("--sampler", default="surrogate")
    for name, count in {"trials": 1000, "seeds": 3, "builders": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    for name, number in {
        "think-ms": 25.0, "job-ms": 4.0, "build-s": 6.0, "screen-s": 1.5, "fails-per-hour": 0.1,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=float, default=number)
    options = parser.parse_args()
    recording = read_recording(options.recording)
    print("devices  in flight  trials/s   busy  waits for  within 5 %: s   trials")
    for num in map(int, options.devices.split(",")):
        found = [simulated(recording, options, num, seed) for seed in range(options.seeds)]
        rates = statistics.median(one.trials_per_s for one in found)
        busy = statistics.median(one.busy for one in found)
        near_s = statistics.median(one.near_s for one in found)
        near_trials = statistics.median(one.near_trials for one in found)
        print(
            f"{num:7}  {found[0].in_flight:9}  {rates:8.2f}  {busy:5.0%}  "
            f"{found[0].waits_for:9}  {near_s:13.0f}  {near_trials:7.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
