"""What makes a run's result less sure, and what to do about it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from shlex import quote

from tuner.records import SET_ASIDE
from tuner.review.formatting import number_words, percent_words, us_words
from tuner.review.run_data import RunData, correct_trials
from tuner.trial import Interval

__all__ = ["Advice", "advice_of"]

# What a module from its file alone has no config for.
LONGER = "give measure.finalists more time, as --effort thorough does"
DRIFT = 0.05  # of one time measured twice: ten times the noise that is asked for


@dataclass(frozen=True, slots=True)
class Advice:
    """Something that makes the result less sure, and what to do about it."""

    text: str
    remedy: str


def advice_of(run_data: RunData, interval: Interval | None, noise: float | None) -> list[Advice]:
    """Return all that makes a run's result less sure.

    Args:
        run_data: of the run.
        interval: of the speed-up that is reported.
        noise: of the latency that is reported.
    """
    found = [
        *_advice_on_records(run_data),
        *_advice_on_state(run_data),
        *_advice_on_verdict(run_data, interval),
        *_advice_on_screening(run_data),
    ]
    if (limit := run_data.max_noise) < (noise or 0.0):
        whose = "the winner's" if run_data.result is not None else "the best trial's"
        found.append(_noise_advice(whose, noise or 0.0, limit))
    session = run_data.session(run_data.best.number if run_data.best else len(run_data.trials))
    if limit < (baseline_noise := run_data.baseline.noise or session.noise or 0.0):
        found.append(_noise_advice("the baseline's", baseline_noise, limit))
    return [*found, *_advice_on_machine(run_data), *_notes(run_data)]


def _advice_on_records(run_data: RunData) -> list[Advice]:
    remedy = "what is shown is what the samples give; verify the file, or tune again"
    said = run_data.result.disagreements if run_data.result is not None else ()
    found = [Advice(f"the run's records disagree: {words}", remedy) for words in said]
    if (
        run_data.finalist is not None
        and run_data.finalist.interval
        and not run_data.finalist.samples_us
    ):
        text = "the figures are as they were recorded: no samples are kept to compute them from"
        found.append(Advice(text, "verify the file"))
    aside = [t for t in run_data.trials if t.outcome.reason.startswith(SET_ASIDE)]
    if aside:
        text = f"{len(aside)} of the trials disagree with their samples, first {aside[0].number}"
        found.append(Advice(f"{text}: {aside[0].outcome.reason}", "tune again"))
    return found


def _advice_on_screening(run_data: RunData) -> list[Advice]:
    """Say where the race of the winner's file took another time than its trial at screening."""
    finalist, best = run_data.finalist, run_data.best
    measurement = best.outcome.measurement if best is not None else None
    if finalist is None or best is None or measurement is None or not finalist.latency_us:
        return []
    change = finalist.latency_us / measurement.reported_us - 1
    if abs(change) <= DRIFT or (run_data.result is not None and run_data.result.is_fallback):
        return []
    text = (
        f"screening timed trial {best.number} at {us_words(measurement.reported_us)} ± "
        f"{percent_words(measurement.noise)}, the race of its file at "
        f"{us_words(finalist.latency_us)}: {percent_words(abs(change))} "
        f"{'more' if change > 0 else 'less'}"
    )
    if measurement.anchor_us and finalist.baseline_us:
        before_us = measurement.anchor_us * (measurement.to_lead or 1.0)
        baseline = finalist.baseline_us / before_us - 1
        text += (
            f"; PyTorch took {percent_words(abs(baseline))} {'more' if baseline > 0 else 'less'}"
        )
    remedy = "believe the race; trials nearer to each other than that are not distinguished"
    return [Advice(text, remedy)]


def _noise_advice(whose: str, noise: float, limit: float) -> Advice:
    return Advice(
        f"{whose} times scatter by {percent_words(noise)}, "
        f"more than the {percent_words(limit)} of measure.max_noise",
        f"end other programs, or {LONGER}",
    )


def _advice_on_state(run_data: RunData) -> list[Advice]:
    found, finalist = [], run_data.finalist
    if run_data.is_running:
        state = "nothing is verified yet" if run_data.result is None else "its result is of before"
        text = f"the run is going on, and {state}"
        found.append(Advice(text, ""))
    elif run_data.is_rejected:
        remedy = "read its reason; a fault that all share is mostly one of model_new.py"
        found.append(Advice("every trial that was put to the full check was rejected", remedy))
    elif run_data.result is None:
        again = f"tune --resume {quote(str(run_data.run.path))}"
        text = "the run is not finished: no finalist was verified"
        found.append(Advice(text, again))
    if run_data.result is not None and run_data.best is None:
        text = "there is a result, but no trial: trials.jsonl is missing or empty"
        found.append(Advice(text, "copy the run's folder whole, trials.jsonl included"))
    if run_data.trials and not correct_trials(run_data.trials):
        remedy = "read 'What failed and why'; widen the space or loosen the accuracy"
        found.append(Advice("not one candidate was correct", remedy))
    if finalist is not None and (finalist.error or not finalist.check.is_accepted):
        text = f"the verification failed: {finalist.error or finalist.check.reason}"
        found.append(Advice(text, "do not use the exported file; export another trial"))
    elif run_data.result is not None and run_data.result.exported is None:
        remedy = "tune export makes the file and verifies it"
        found.append(Advice("the exported file itself was not verified", remedy))
    return found


def _notes(run_data: RunData) -> list[Advice]:
    """Return what run and check noted, but for the rejection that is shown already."""
    said = run_data.finalist.check.reason if run_data.finalist is not None else ""
    notes = run_data.result.notes if run_data.result is not None else ()
    notes = tuple(
        dict.fromkeys([*notes, *(run_data.finalist.check.notes if run_data.finalist else ())])
    )
    return [Advice(note, "") for note in notes if not said or said not in note]


def _advice_on_verdict(run_data: RunData, interval: Interval | None) -> list[Advice]:
    found = []
    is_fallback = run_data.result is not None and run_data.result.is_fallback
    if interval is not None and interval.verdict == "no difference" and not is_fallback:
        remedy = f"keep PyTorch's own, or {LONGER}"
        found.append(Advice("the interval holds 1: it may not be faster at all", remedy))
    if interval is not None and interval.num_processes == 1:
        text = "raced in one process only: the interval says nothing of another process"
        found.append(Advice(text, "set measure.num_processes above 1"))
    ties = (
        [n for n in run_data.result.ties if n != run_data.result.winner] if run_data.result else []
    )
    if ties:
        what = f"trial{'' if len(ties) == 1 else 's'} {number_words(ties)}"
        text = f"{what} cannot be distinguished from the winner"
        found.append(Advice(text, f"choose the simplest, or {LONGER}"))
    return found


def _advice_on_machine(run_data: RunData) -> list[Advice]:
    found = []
    measured = [t.outcome.measurement for t in run_data.trials if t.outcome.measurement]
    throttled = sum(1 for m in measured if m.num_throttled)
    if throttled:
        text = f"the device slowed its clock during {throttled} of {len(measured)} measurements"
        remedy = "those samples were dropped; cool it, or lower its clock limit for steady times"
        found.append(Advice(text, remedy))
    by_device: dict[str, list[float]] = defaultdict(list)
    for trial in run_data.trials:
        if trial.outcome.measurement and trial.outcome.measurement.anchor_us:
            by_device[trial.outcome.device].append(trial.outcome.measurement.anchor_us)
    anchors = max(by_device.values(), key=lambda us: max(us) / min(us), default=[])
    if anchors and max(anchors) > (1 + DRIFT) * min(anchors):
        text = (
            f"the baseline drifted between {us_words(min(anchors))} and {us_words(max(anchors))}"
        )
        remedy = "compare trials by speed-up, not by latency; end other programs"
        found.append(Advice(text, remedy))
    return found
