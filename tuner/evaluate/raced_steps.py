"""Steps of training of the processes of a race, which take turns."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tuner.evaluate.race import Race
from tuner.evaluate.timed_calls import TimedCalls
from tuner.evaluate.worker import Worker

__all__ = ["race_steps", "warm_up_steps"]

NUM_ROUNDS = 8  # turns of each process: a large difference is looked for
NUM_SLOW_ROUNDS = 2
SLOW_STEP_S = 0.2  # of which few are timed,
MOST_STEP_S = 4.0  # and none


def warm_up_steps(calls: TimedCalls, racers: Sequence[Worker]) -> None:
    """Let each process make its first step, which loads and chooses kernels; nothing is timed."""
    for racer in racers:
        calls.steps(racer, 1)  # what fails fails again when it is raced


def race_steps(
    calls: TimedCalls,
    race: Race,
    racers: Sequence[Worker],
    lanes: Sequence[int],
    burst_s: float,
) -> None:
    """Add a few turns of steps of training; none where the reference has no gradients.

    Args:
        calls: asks the processes.
        race: of steps alone; its `failure` says why nothing was added.
        racers: the baseline's process, then those of contenders.
        lanes: of `race`, one each.
        burst_s: of samples from one process before the next one's turn.
    """
    slowest_s = 0.0  # of a step with all that its timing takes, once the process knows it
    for racer in racers:
        for _ in range(2):
            start_s = time.perf_counter()
            samples = calls.steps(racer, 1)
            if isinstance(samples, str):
                race.failure = samples
                return
            took_s = samples[0] / 1e6
            if took_s > MOST_STEP_S:
                race.failure = f"one takes {took_s:.0f} s: too long to be raced"
                return
        slowest_s = max(slowest_s, time.perf_counter() - start_s)
    num_samples = max(1, min(20, round(burst_s / slowest_s)))
    for lane in lanes:
        race.bursts[lane].append([])
    for number in range(NUM_ROUNDS if slowest_s < SLOW_STEP_S else NUM_SLOW_ROUNDS):
        order = list(zip(lanes, racers, strict=True))
        for lane, racer in reversed(order) if number % 2 else order:
            samples = calls.steps(racer, num_samples)
            race.bursts[lane][-1].append([] if isinstance(samples, str) else samples)
