"""The data that a speed-up is for, by name, and what ordinary data are."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal, get_args

from tuner.errors import ProblemError, says_no_memory
from tuner.problem.draws import ORDINARY, ORDINARY_WEIGHTS

if TYPE_CHECKING:
    import torch

    from tuner.problem.reference import Problem

__all__ = ["GIVEN_ALONE", "WORKLOADS", "WorkloadName", "made_ordinary"]

WorkloadName = Literal[
    "given",  # the reference's own weights, as it is constructed, and its own inputs
    "ordinary",  # weights as after training and normal inputs: `made_ordinary`
]
WORKLOADS: tuple[WorkloadName, ...] = get_args(WorkloadName)
GIVEN_ALONE = "on the reference's own weights and inputs alone"  # where nothing else was timed


def made_ordinary(
    problem: Problem, model: torch.nn.Module, seed: int, device: str
) -> tuple[list[Any], str]:
    """Give a model ordinary weights, in place; return ordinary inputs, and what they are in words.

    Floating-point inputs are standard normal, unless the reference then ends in an error, NaN or
    Inf (logarithms, probabilities): then they are the reference's own. Integers and bools are as
    given, weights are those of `fresh_values` for "trained".

    Args:
        problem: the reference.
        model: the reference's module, on that device.
        seed: equal seeds give equal values on one kind of device.
        device: as PyTorch names it.

    Raises:
        ProblemError: there is no memory for one more call.
    """
    import torch

    problem.randomise(model, seed, "trained")
    inputs = problem.make_inputs(seed, distribution="normal", device=device)
    try:
        with torch.no_grad():
            outputs = problem.call(copy.deepcopy(model), inputs)
        is_finite = all(bool(y.isfinite().all()) for y in outputs)
    except ProblemError as error:
        if says_no_memory(str(error)):  # which data it is does not depend on that
            raise
        is_finite = False
    if is_finite:
        return inputs, ORDINARY
    return problem.make_inputs(seed, device=device), ORDINARY_WEIGHTS
