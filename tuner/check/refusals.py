"""What a reference may refuse, or would take too long for, and what is asked then."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.crossing import Script
from tuner.check.exercise import num_elements
from tuner.check.layouts import laid_out_where
from tuner.check.probe import Probe
from tuner.errors import ProblemError
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["FEWER_ROWS", "is_cheap", "is_odd", "refuses_layout", "tamer"]

FEWER_ROWS = 321  # in place of 65,537 where these would cost too much
MOST_ELEMENTS = 5 * 10**7  # of all steps: some 0.2 s


def refuses_layout(
    problem: Problem, model: torch.nn.Module, probe: Probe, values: Sequence[Any]
) -> bool:
    """Whether the reference itself raises at such strides, as `view` does."""
    import torch

    if probe.layout in ("contiguous", "misaligned", "float64", "too_wide", "mixed"):
        return False
    try:
        with torch.no_grad():
            laid = laid_out_where(values, Script(layout=probe.layout))
            problem.call(copy.deepcopy(model), laid)
    except ProblemError:
        return True
    return False


def is_cheap(problem: Problem, probe: Probe, model: torch.nn.Module) -> bool:
    """Whether the numbers of all steps grow with the rows alone, and are few for so many rows."""
    import torch

    counts = []
    for rows in (64, 128):
        try:
            values = problem.make_inputs(probe.seed_inputs, batch=rows)
            with torch.no_grad():
                counts.append(num_elements(problem, copy.deepcopy(model).cpu(), values))
        except ProblemError:
            return False
    few, more = counts
    is_linear = more <= 2.2 * few
    return is_linear and (more - few) / 64 * (probe.batch or 0) <= MOST_ELEMENTS


def tamer(probe: Probe) -> Probe | None:
    """Return a probe that the reference may take where it raises at this one, if there is one.

    Not every number is legal for every reference (a probability is at most 1), nor is dim 0 the
    rows of a batch in each (a square matrix product).
    """
    if probe.may_be_refused or probe.dtype:
        return None
    if probe.calls > 1 and probe.inputs != "repeated" and not probe.is_drawn:
        return dataclasses.replace(probe, is_drawn=True)
    if probe.distribution != "as_given":
        return dataclasses.replace(probe, distribution="as_given")
    if probe.is_reduced and probe.batch is not None:
        return dataclasses.replace(probe, batch=None, is_reduced=False)
    return None


def is_odd(probe: Probe) -> bool:
    """Whether a reference may refuse what a probe asks."""
    return probe.may_be_refused or bool(
        probe.batch is not None or probe.dtype or probe.has_options
    )
