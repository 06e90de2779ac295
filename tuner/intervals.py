"""Which of several calls is faster, computed from their times: intervals of ratios, and ties."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from tuner.trial import Finalist, Interval, OnData

__all__ = [
    "Pair", "are_same", "is_same", "median_error", "median_interval", "ratio_interval",
    "relative_noise", "robust_sigma", "rounds_of", "speedup_of", "speedups_by_process", "tie_set",
    "with_figures",
]  # fmt: skip

Pair = tuple[float, float]
"""Baseline and candidate of one interleaved round, in us."""

K = TypeVar("K", bound=Hashable)
Rounds = Sequence[Sequence[float]]
"""What counts of one lane of a race, [process][round] in us."""

SAME_NUMBER = 1e-6  # relative difference of a number computed twice


# ---- a race ---------------------------------------------------------------------------------


def with_figures(entry: Finalist, confidence: float = 0.95) -> Finalist:
    """Return a finalist with the figures that its samples give.

    Raises:
        ValueError: they give none.
    """
    own, baseline = rounds_of(entry.samples_us), rounds_of(entry.baseline_samples_us)
    rounds = [value for process in own for value in process]
    return replace(
        entry,
        interval=speedup_of(baseline, own, confidence),
        others=tuple(_on_data(each, confidence) for each in entry.others),
        latency_us=statistics.median(rounds),
        baseline_us=statistics.median(value for process in baseline for value in process),
        noise=relative_noise(rounds),
    )


def _on_data(data: OnData, confidence: float) -> OnData:
    if not data.samples_us:  # earlier releases kept none of these
        return data
    there, own = rounds_of(data.baseline_samples_us), rounds_of(data.samples_us)
    return replace(data, interval=speedup_of(there, own, confidence))


def rounds_of(bursts: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Return what counts of a lane, the median of each burst; [process][round][sample] in us."""
    return [[statistics.median(burst) for burst in rounds] for rounds in bursts]


def speedup_of(slow: Rounds, fast: Rounds, confidence: float = 0.95) -> Interval:
    """Return the interval of slow / fast of two lanes, as `ratio_interval`."""
    pairs = [list(zip(s, f, strict=True)) for s, f in zip(slow, fast, strict=True)]
    return ratio_interval(pairs, confidence)


def relative_noise(rounds: Sequence[float]) -> float:
    """Return a robust relative dispersion of times."""
    middle = statistics.median(rounds)
    return 1.4826 * statistics.median(abs(value - middle) for value in rounds) / middle


def are_same(one: Interval | None, other: Interval | None) -> bool:
    """Whether two intervals were computed from the same samples."""
    if one is None or other is None:
        return one is other
    names = ("speedup", "low", "high", "num_processes")
    return all(is_same(getattr(one, n), getattr(other, n)) for n in names)


def is_same(one: float | None, other: float | None) -> bool:
    """Whether two numbers are one that was computed twice."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=SAME_NUMBER, abs_tol=1e-12)


def speedups_by_process(own: Rounds, baseline: Rounds) -> list[float]:
    """Return baseline / candidate in each process, of the medians of its rounds."""
    medians = [[statistics.median(rounds) for rounds in lane] for lane in (baseline, own)]
    return [theirs / ours for theirs, ours in zip(*medians, strict=True)]


def ratio_interval(
    pairs_by_process: Sequence[Sequence[Pair]], confidence: float = 0.95
) -> Interval:
    """Return the speed-up baseline / candidate and where another process would find it.

    Each process gives the median d_p of its rounds' log-ratios. With mean m and standard
    deviation s of the P medians, the interval is

        exp(m ± t(P - 1) * max(s, w) * sqrt(1 + 1 / P)),

    Student's prediction interval for one future observation (Hahn and Meeker, "Statistical
    Intervals", 1991, section 4.8): memory layout, clocks and neighbours differ between processes
    more than between rounds, and a user is another process (Kalibera and Jones, "Rigorous
    benchmarking in reasonable time", ISMM 2013). w is the root mean square standard error of the
    d_p, from their rounds' scatter: already part of s in expectation, but a few processes may
    agree by luck, and none can be predicted better than its own rounds know it.

    With one process the rounds stand in for processes: an interval for one more round. It says
    nothing of other processes, and `num_processes` is 1.

    Args:
        pairs_by_process: for each process, (baseline_us, candidate_us) of interleaved rounds.
        confidence: chance that a future process falls into the interval.

    Raises:
        ValueError: no pairs, or a time that is not above 0.
    """
    logs = [_log_ratios(pairs) for pairs in pairs_by_process if pairs]
    if not logs:
        raise ValueError("ratio_interval: no pairs")
    spread: float
    if len(logs) == 1:
        observations, spread = logs[0], robust_sigma(logs[0])
        centre = statistics.median(observations)
    else:
        observations = [statistics.median(rounds) for rounds in logs]
        centre, spread = statistics.fmean(observations), _process_spread(observations, logs)
    count = len(observations)
    quantile = _student((1 + confidence) / 2, count - 1)
    half = quantile * spread * math.sqrt(1 + 1 / count) if count > 1 else math.inf
    return Interval(
        speedup=math.exp(centre),
        low=math.exp(centre - half),
        high=math.exp(centre + half) if half < math.inf else math.inf,
        confidence=confidence,
        num_processes=len(logs),
    )


def median_interval(pairs: Sequence[Pair], confidence: float = 0.95) -> Interval:
    """Return the speed-up of interleaved rounds of one process, and where its median lies.

    That is of this process alone; `ratio_interval` says what another one would find.

    Raises:
        ValueError: fewer than two pairs, or a time that is not above 0.
    """
    logs = _log_ratios(pairs)
    if len(logs) < 2:
        raise ValueError("median_interval: fewer than two pairs")
    centre = statistics.median(logs)
    half = _student((1 + confidence) / 2, len(logs) - 1) * median_error(logs)
    low, high = math.exp(centre - half), math.exp(centre + half)
    return Interval(math.exp(centre), low, high, confidence, num_processes=1)


def tie_set(
    rounds_us: Mapping[K, Sequence[Sequence[float]]],
    confidence: float = 0.95,
    best: K | None = None,
) -> list[K]:
    """Return the candidates that are not slower than the best one, beyond chance; it first.

    A candidate is slower when the mean of its paired log-differences to the best is above
    0 at this confidence (one-sided Student test over processes; over rounds where there is one
    process), which is shared among the comparisons (Bonferroni).

    Args:
        rounds_us: for each candidate and process, its times in us in interleaved rounds; round
            r of one candidate belongs to round r of another.
        confidence: chance that no candidate as fast as the best is left out.
        best: the one that others are compared with; the fastest if none.

    Raises:
        ValueError: candidates that differ in their processes or rounds, or times not above 0.
    """
    if not rounds_us:
        return []
    speeds = {key: _typical_log(processes) for key, processes in rounds_us.items()}
    ranked = sorted(rounds_us, key=lambda key: (key != best, speeds[key]))
    best = ranked[0]
    risk = (1 - confidence) / max(1, len(ranked) - 1)
    return [best] + [
        key for key in ranked[1:] if not _is_slower(rounds_us[best], rounds_us[key], risk)
    ]


def _typical_log(processes: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(math.log(statistics.median(rounds)) for rounds in processes)


def _is_slower(
    best: Sequence[Sequence[float]], other: Sequence[Sequence[float]], risk: float
) -> bool:
    paired = zip(best, other, strict=True)
    logs = [_log_ratios(list(zip(b, a, strict=True))) for a, b in paired]
    if len(logs) == 1:
        observations = logs[0]
        centre, error = statistics.median(observations), median_error(observations)
    else:
        observations = [statistics.median(rounds) for rounds in logs]
        centre = statistics.fmean(observations)
        error = _process_spread(observations, logs) / math.sqrt(len(logs))
    if len(observations) < 2:
        return False
    return centre > _student(1 - risk, len(observations) - 1) * error


# ---- statistics -----------------------------------------------------------------------------


def _log_ratios(pairs: Sequence[Pair]) -> list[float]:
    if any(not (0 < time_us < math.inf) for pair in pairs for time_us in pair):
        raise ValueError("times must be above 0 and finite")
    return [math.log(first / second) for first, second in pairs]


def _process_spread(medians: Sequence[float], logs: Sequence[Sequence[float]]) -> float:
    """Return the deviation over processes, at least what their rounds' scatter implies."""
    within = math.sqrt(statistics.fmean(median_error(rounds) ** 2 for rounds in logs))
    return max(statistics.stdev(medians), within)


# What makes the median absolute deviation of few normal samples unbiased: Croux and Rousseeuw,
# "Time-efficient algorithms for two highly robust estimators of scale", Compstat 1992.
_SMALL_SAMPLE = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}


def robust_sigma(values: Sequence[float]) -> float:
    """Return a robust standard deviation: 1.4826 times the median absolute deviation."""
    count = len(values)
    if count < 2:
        return 0.0
    centre = statistics.median(values)
    deviation = statistics.median(abs(value - centre) for value in values)
    return 1.4826 * _SMALL_SAMPLE.get(count, count / (count - 0.8)) * deviation


def median_error(values: Sequence[float]) -> float:
    """Return the standard error of the median, sqrt(pi / 2) times that of a normal mean."""
    return math.sqrt(math.pi / 2) * robust_sigma(values) / math.sqrt(len(values))


def _student(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t distribution."""
    from scipy.special import stdtrit  # `scipy.stats` takes 1 to 2 s to import

    return float(stdtrit(degrees, probability)) if degrees > 0 else math.inf
