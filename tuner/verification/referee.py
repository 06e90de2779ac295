"""The best trials of several devices, timed again on one: that on which finalists are raced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tuner.evaluate.runner import Runner, Terms
from tuner.kernel.builder import Builder
from tuner.planning.observing import Recorder
from tuner.planning.planning import Planned
from tuner.run import Refereed, RunWriter
from tuner.trial import Measurement, Status, Trial
from tuner.verification.ranking import ranked_trials

__all__ = ["refereed"]

NEAR = 0.05  # to the best, by which a trial may be the best of another device
MOST = 12  # trials that are timed again, each in about a second


def refereed(
    planned: Planned,
    terms: Terms,
    builder: Builder,
    trials: Sequence[Trial],
    *,
    num_finalists: int,
    writer: RunWriter,
    observer: Recorder,
) -> list[Trial]:
    """Return the trials with new times for those near the best, where several devices found them.

    Each is recorded in `referee.jsonl`, and not timed a second time. Nothing is timed where all of
    these are finalists anyway.

    Args:
        planned: the run's; its device is the referee.
        terms: of the screening.
        builder: has built all of them.
        trials: of the search, whose devices are at rest now.
        num_finalists: how many are raced.
        writer: of the run.
        observer: all is reported to it.

    Raises:
        TunerError: the device cannot be used.
    """
    ranked = ranked_trials(trials)
    best_us = min((t.outcome.ranked_us or 0.0 for t in ranked), default=0.0)
    near = [t for t in ranked if (t.outcome.ranked_us or 0.0) <= best_us * (1 + NEAR)][:MOST]
    if len({trial.outcome.device for trial in near}) < 2 or len(near) <= num_finalists:
        return list(trials)
    found = {entry.trial: entry.measurement for entry in writer.run.refereed()}
    left = [trial for trial in near if trial.number not in found]
    if left:
        device = planned.device.torch_name
        observer.on_stage(f"timing the best {len(left)} of all devices again on {device}")
        found |= _timed(planned, terms, builder, left, writer)
    return [_with(trial, found) for trial in trials]


def _timed(
    planned: Planned, terms: Terms, builder: Builder, trials: Sequence[Trial], writer: RunWriter
) -> dict[int, Measurement]:
    found: dict[int, Measurement] = {}
    runner = Runner(planned.spec, terms, env=builder.environment, paused=builder.paused)
    try:
        runner.start()
        for trial in trials:
            candidate = planned.family.render(trial.params, planned.facts)
            build = builder.submit(candidate).result()
            if build.status is not Status.CORRECT:
                continue
            outcome = runner.screen(candidate, build, None)
            if outcome.status is Status.CORRECT and outcome.measurement is not None:
                found[trial.number] = outcome.measurement
                writer.append_refereed(Refereed(trial.number, outcome.measurement))
    finally:
        runner.close()
    return found


def _with(trial: Trial, found: Mapping[int, Measurement]) -> Trial:
    if trial.number not in found:
        return trial
    outcome = replace(trial.outcome, measurement=found[trial.number])
    return replace(trial, outcome=outcome)
