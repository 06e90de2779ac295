"""The default configurations before the search: what all candidates share is found wrong there."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from tuner.errors import NothingCorrectError
from tuner.evaluate.contender import Contender
from tuner.evaluate.runner import SCREEN_TIMEOUT_S
from tuner.evaluate.verifier import Verifier
from tuner.kernel.builder import Builder
from tuner.planning.observing import Recorder
from tuner.planning.planning import Planned
from tuner.trial import Check, Params, Status
from tuner.verification.ranking import are_of_gradients

__all__ = ["check_defaults"]

MAX_FIRST_CHECKS = 3  # configurations that are put to all probes before the search


def check_defaults(
    planned: Planned,
    first: Sequence[Params],
    builder: Builder,
    verifier: Verifier,
    observer: Recorder,
) -> None:
    """Put the default configurations to every probe, until one is accepted.

    What all candidates have in common, the module around the kernel and its gradients, would
    else be found to be wrong after the search. Where it is gradients that can be PyTorch's own
    instead, the files will have these.

    Raises:
        NothingCorrectError: all of them are rejected, and by the same probe.
    """
    rejected: list[Check] = []
    for params in _tried_first(planned, first):
        candidate = planned.family.render(params, planned.facts)
        is_default = params in first
        what = "the defaults" if is_default else "another configuration"
        observer.on_stage(f"checking {what} of {candidate.template}, every probe")
        build = builder.submit(candidate).result()
        if build.status is not Status.CORRECT:
            error = planned.family.explained(candidate, build.error, planned.facts)
            observer.on_stage(f"  it does not compile: {error}")
            continue
        contender = Contender.of_candidate(
            candidate, build, planned.family.model_new, builder.environment
        )
        check = verifier.check(contender, observer.on_probe, SCREEN_TIMEOUT_S).strictly()
        if check.is_accepted:
            return
        rejected.append(check)
        observer.on_stage(f"  rejected: {check.reason}")
    alike = {re.sub(r"[\d.e+-]+", "", check.reason) for check in rejected}
    is_all = len(rejected) >= min(MAX_FIRST_CHECKS, planned.space.num_feasible)
    # Gradients that were written by hand are still what torch.compile takes.
    are_generated = planned.family.steps is None and planned.with_pytorchs_steps is not None
    if are_generated and are_of_gradients(rejected):
        observer.on_stage("  it is steps of training alone: the search is of the forward")
    elif is_all and len(alike) == 1:
        raise NothingCorrectError(
            f"rejected before the search: {rejected[0].reason}\n"
            f"  {len(rejected)} configurations were tried, and all fail alike\n"
            f"  next: mend what they share: model_new.py of {planned.family.name}, or the"
            " templates"
        )


def _tried_first(planned: Planned, first: Sequence[Params]) -> list[Params]:
    """Return each template's defaults, and others where those are few."""
    space = planned.space
    more = space.sample(MAX_FIRST_CHECKS, np.random.default_rng(planned.config.search.seed))
    others = [space.params_of(row) for row in space.rows(more)]
    chosen = [*first, *(params for params in others if params not in first)]
    return chosen[:MAX_FIRST_CHECKS]
