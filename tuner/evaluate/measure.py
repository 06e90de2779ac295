"""How long a call takes, how sure that is, and which of several calls is faster.

A *timer* (room `timers`) turns a call into samples. `measure`
takes samples until the median is known well enough, `interleave` times several calls in turn so
that drift hits all alike, and `ratio_interval` says what another process would measure.

Medians and median absolute deviations are used throughout: interrupts, stolen CPU time and
clock changes make samples late, never early, and a mean would follow them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

from tuner.evaluate.timers import Call, Timer
from tuner.intervals import median_error, ratio_interval, robust_sigma, tie_set
from tuner.trial import Measurement

__all__ = [
    "below_floor",
    "contradicted",
    "interleave",
    "is_clearly_slower",
    "measure",
    "ratio_interval",
    "tie_set",
    "unseen_work",
]


# ---- one call -------------------------------------------------------------------------------

_STEADY = 0.03  # two warm-up medians this close: the clock has settled
_MAX_WARM_UPS = 10
_WARM_UP_SHARE = 0.25  # of the budget, on top of it
MIN_SAMPLES, MAX_SAMPLES = 5, 1000
_MAX_OVERRUN = 10  # times the budget that `MIN_SAMPLES` may cost
_NUM_AGREEING = 2  # checks in a row that find the median known: few samples may agree by luck


def measure(
    timer: Timer,
    call: Call,
    *,
    budget_s: float,
    max_noise: float,
    stop_above_us: float | None = None,
) -> Measurement:
    """Time a call until its median is known to `max_noise`, or the budget is used up.

    The call is warmed up first, until two medians in a row agree within 3 %, on at most a
    quarter of the budget more. With `stop_above_us`, sampling stops as soon as
    `is_clearly_slower` says so, which a call whose true median is not above that time meets with
    a chance of at most 1 in 1000; the measurement is then censored. Give the best time so far
    with a margin for drift, since a candidate's clock is not the best one's.

    Args:
        timer: cold or hot; it decides what a sample is.
        call: takes the number of the rotating input set.
        budget_s: seconds for sampling; `MIN_SAMPLES` may cost up to ten times that.
        max_noise: relative standard error of the median to reach, 0.005 for 0.5 %.
        stop_above_us: time that a candidate must beat to matter, None to measure in full.

    Returns:
        Every sample, their median, their robust relative dispersion (`noise`: of one sample, not
        of the median), and the median by the host's clock where the timer can tell.
    """
    num_throttled = timer.num_throttled
    sample_s = _warm_up(timer, call, budget_s)
    begun = time.perf_counter()
    samples: list[float] = []
    is_censored, num_known = False, 0
    while not is_censored and num_known < _NUM_AGREEING:
        spent_s = time.perf_counter() - begun
        if _is_spent(len(samples), spent_s, budget_s):
            break
        chunk = _chunk(len(samples), sample_s, budget_s)
        samples += timer.samples(call, chunk)
        sample_s = (time.perf_counter() - begun) / len(samples)
        error = _relative(median_error(samples), statistics.median(samples))
        num_known = num_known + 1 if len(samples) >= MIN_SAMPLES and error <= max_noise else 0
        is_censored = stop_above_us is not None and is_clearly_slower(samples, stop_above_us)
    latency_us = statistics.median(samples)
    allowed_us = _allowed_hidden_us(latency_us)
    hidden_us = None if is_censored else timer.hidden_us(call, allowed_us)
    return Measurement(
        latency_us=latency_us,
        noise=_relative(robust_sigma(samples), latency_us),
        samples_us=tuple(samples),
        is_cold=timer.is_cold,
        is_censored=is_censored,
        num_throttled=timer.num_throttled - num_throttled,
        wall_us=None if hidden_us is None else latency_us + hidden_us,
    )


def _warm_up(timer: Timer, call: Call, budget_s: float) -> float:
    """Call until the times are steady; return the seconds that a sample costs in all."""
    timer.samples(call, 1)  # pays for loading, compiling and first allocations
    deadline = time.perf_counter() + _WARM_UP_SHARE * budget_s
    size, previous_us, sample_s = 1, math.inf, 0.0
    for _ in range(_MAX_WARM_UPS):
        begun = time.perf_counter()
        median_us = statistics.median(timer.samples(call, size))
        now = time.perf_counter()
        sample_s = (now - begun) / size
        if abs(median_us - previous_us) <= _STEADY * median_us or now > deadline:
            break
        previous_us = median_us
        size = _fit(0.05 * budget_s, sample_s, 25)
    return sample_s


def _is_spent(num_samples: int, spent_s: float, budget_s: float) -> bool:
    if num_samples < MIN_SAMPLES:
        return num_samples > 0 and spent_s >= _MAX_OVERRUN * budget_s
    return spent_s >= budget_s or num_samples >= MAX_SAMPLES


def _chunk(num_samples: int, sample_s: float, budget_s: float) -> int:
    """Return how many samples to take next: first the fewest, then a tenth of the budget."""
    if num_samples < MIN_SAMPLES:
        # one by one where a single sample is long, so that the overrun is noticed
        return MIN_SAMPLES - num_samples if sample_s < budget_s else 1
    return min(_fit(0.1 * budget_s, sample_s, 100), MAX_SAMPLES - num_samples)


def _fit(share_s: float, sample_s: float, most: int) -> int:
    return max(1, min(most, int(share_s / max(sample_s, 1e-7))))


_STOP_CHANCE = 1e-3  # of stopping a candidate that is not slower


def is_clearly_slower(samples_us: Sequence[float], limit_us: float) -> bool:
    """Whether samples, in the order they were taken, show a median above `limit_us`.

    May be asked after every sample: over all those occasions together, the chance that it is
    ever True for a call whose median is at or below `limit_us` is at most 1 in 1000, if samples
    are independent. It is a bet against "not slower", stopped when the stake has grown
    1000-fold (Ville's inequality); half of the stake plays each of two games, both fair or worse
    for a call that is not slower:

    - each sample is above the limit with a chance of at most 1/2, by the median's definition:
      0.9 of the stake on "above"; 12 samples in a row above suffice;
    - at most one sample in ten is above twice the limit: 5.5 for 1 against 0.5; 5 suffice.

    Source: Ville 1939; Ramdas, Grünwald, Vovk, Shafer, "Game-theoretic statistics and safe
    anytime-valid inference", Statistical Science 2023.
    """
    above, far_above = 1.0, 1.0
    for sample_us in samples_us:
        above *= 1.9 if sample_us > limit_us else 0.1
        far_above *= 5.5 if sample_us > 2 * limit_us else 0.5
        if (above + far_above) / 2 >= 1 / _STOP_CHANCE:
            return True
    return False


# ---- what cannot be true --------------------------------------------------------------------

_EVENT_RESOLUTION_US = 0.5  # CUDA Runtime API, cudaEventElapsedTime


def below_floor(latency_us: float, floor_us: float) -> bool:
    """Whether a time is physically impossible, which is a rejection and no record."""
    return latency_us + _EVENT_RESOLUTION_US < floor_us


_HOST_SHARE = 0.25  # by which two clocks on a busy machine may differ


def contradicted(
    latency_us: float, wall_us: float, *, slowdown: float = 1.0, allowed_us: float = 50.0
) -> str:
    """Return why another process's clock contradicts a time that a process reported, or nothing.

    Calls in a row, on warm caches, take no longer than the same calls each on cold ones; what a
    module that patches its timers tells is less.

    Args:
        latency_us: what the process reported of one call.
        wall_us: what the other one's clock says of one of many calls in a row.
        slowdown: the same ratio of a module that is trusted, at the same moment.
        allowed_us: the host's work for one call, which the device's clock does not see.
    """
    limit_us = (1 + _HOST_SHARE) * max(1.0, slowdown) * latency_us + allowed_us
    if wall_us <= limit_us:
        return ""
    return (
        f"its process tells {latency_us:.0f} us a call, another process's clock says "
        f"{wall_us:.0f} us: a patched timer, or work that is not waited for"
    )


def unseen_work(measurement: Measurement) -> str:
    """Return why the device's clock and the host's disagree, or nothing where they agree."""
    if measurement.wall_us is None:
        return ""
    hidden_us = measurement.wall_us - measurement.latency_us
    if hidden_us <= _allowed_hidden_us(measurement.latency_us):
        return ""
    return (
        f"the device works on for {hidden_us:.0f} us after the call's end of "
        f"{measurement.latency_us:.0f} us: work on a stream that the call does not wait for"
    )


def _allowed_hidden_us(latency_us: float) -> float:
    return max(50.0, 0.1 * latency_us)  # the host's clock is good to some 10 us


# ---- several calls --------------------------------------------------------------------------


def interleave(calls: Sequence[Call], timer: Timer, rounds: int) -> list[list[float]]:
    """Time several calls in turn; return for each call its time in us in each round.

    Over every 2n rounds of n calls, each call stands equally often at each place and directly
    follows each other one equally often, and every second round is its forerunner reversed: so
    neither position, nor a drift, nor what a call leaves behind favours one.

    Source: Williams, "Experimental designs balanced for the estimation of residual effects of
    treatments", Australian Journal of Scientific Research A 2, 1949.
    """
    for call in calls:
        timer.samples(call, 1)  # untimed: the caller may have warmed up long ago
    result: list[list[float]] = [[] for _ in calls]
    for number in range(rounds):
        for place in _round_order(len(calls), number):
            result[place] += timer.samples(calls[place], 1)
    return result


def _round_order(num_calls: int, number: int) -> list[int]:
    """Return row `number` of the design: zigzag 0, 1, n - 1, 2, ..., shifted, then reversed."""
    zigzag = [(i + 1) // 2 if i % 2 else num_calls - i // 2 for i in range(num_calls)]
    order = [(place + number // 2) % num_calls for place in zigzag]
    return order if number % 2 == 0 else order[::-1]


def _relative(spread: float, centre: float) -> float:
    return spread / centre if centre > 0 else 0.0
