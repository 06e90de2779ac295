"""Whether a run's records agree with themselves: figures computed again from stored samples.

Whoever can edit a run's folder can edit a headline. What is shown is computed from the samples
whenever it is read, and a record that says otherwise is named. Samples that were edited to agree
with it cannot be found out so.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from tuner.intervals import are_same, is_same, with_figures
from tuner.trial import Finalist, Result, Status, Trial

__all__ = ["SET_ASIDE", "recomputed", "recomputed_result", "set_aside"]

SET_ASIDE = "set aside, its records disagree"
_FIGURES = ("latency_us", "baseline_us", "noise")


def recomputed(entry: Finalist) -> tuple[Finalist, str]:
    """Return a finalist with the figures that its samples give, and what it said instead.

    The second is empty where both agree. An entry without samples is left as it is: of an older
    run, say, whose figures nobody can compute again; what is shown of it says so. Where samples
    give no figures, interval and latencies are None.
    """
    if entry.at_sizes:
        main, *said = recomputed(replace(entry, at_sizes={}))
        each = {size: recomputed(race) for size, race in entry.at_sizes.items()}
        said += [f"at {size}, {words}" for size, (_, words) in each.items() if words]
        at_sizes = {size: race for size, (race, _) in each.items()}
        return replace(main, at_sizes=at_sizes), "; ".join(filter(None, said))
    if not entry.samples_us:
        return entry, ""
    who = f"trial {entry.trial}"
    try:
        found = with_figures(entry, entry.interval.confidence if entry.interval else 0.95)
    except (ValueError, OverflowError) as error:
        gone = replace(entry, interval=None, latency_us=None, baseline_us=None, noise=None)
        gone = replace(gone, others=())
        return gone, f"{who}: no figures can be computed from its samples: {error}"
    is_unchanged = all(is_same(getattr(entry, n), getattr(found, n)) for n in _FIGURES)
    is_unchanged &= all(
        are_same(one.interval, other.interval)
        for one, other in zip(entry.others, found.others, strict=True)
    )
    if is_unchanged and are_same(entry.interval, found.interval):
        return found, ""
    return found, f"{who}: recorded {_words(entry)}, its samples give {_words(found)}"


def recomputed_result(result: Result) -> Result:
    """Return a result with the figures that its samples give; `disagreements` are named."""
    pairs = [recomputed(entry) for entry in result.finalists]
    finalists, said = tuple(entry for entry, _ in pairs), [words for _, words in pairs]
    exported = result.exported
    if exported is not None:
        exported, words = recomputed(exported)
        said.append(words and f"the exported file, {words}")
    disagreements = tuple(words for words in said if words)
    return replace(result, finalists=finalists, exported=exported, disagreements=disagreements)


def set_aside(trial: Trial) -> Trial:
    """Return a trial as it is; without its measurement where that is not what its samples give.

    Such a one is shown and searched like a failure, and takes no finalist's place.
    """
    measurement = trial.outcome.measurement
    if measurement is None:
        return trial
    samples_us, latency_us = measurement.samples_us, measurement.latency_us
    if not samples_us:
        found = "there are no samples"
    elif not all(0.0 < sample < math.inf for sample in samples_us):
        found = "one of its samples is no time above 0"
    elif is_same(latency_us, statistics.median(samples_us)):
        return trial
    else:
        found = f"the median of its samples is {statistics.median(samples_us):g} us"
    reason = f"{SET_ASIDE}: latency {latency_us:g} us, but {found}"
    outcome = replace(trial.outcome, status=Status.RUNTIME, reason=reason, measurement=None)
    return replace(trial, outcome=outcome)


def _words(entry: Finalist) -> str:
    i = entry.interval
    speed = i.words if i else "no interval"
    speed += "".join(f", {data.interval.words} on {data.words}" for data in entry.others)
    return f"{speed}, {entry.latency_us or math.nan:.1f} us of {entry.baseline_us or math.nan:.1f}"
