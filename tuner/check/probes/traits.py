"""What a problem's inputs and weights are like: which questions can say anything about it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.check.calls.parts import alike, copied, is_norm, vectors
from tuner.check.calls.touches import like_inputs, matrices, scalars
from tuner.check.probes.offers import (
    attributes_of,
    gives_itself,
    heads_of,
    methods_of,
    takes_numbers,
)
from tuner.errors import ProblemError
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["Traits", "traits_of"]

FEW_ROWS = 4


@dataclass(frozen=True, slots=True)
class Traits:
    """By default all that is asked about is there."""

    num_tensors: int = 2
    num_alike: int = 2  # inputs of one shape and type
    dimensions: int = 4  # the most that an input has
    has_numbers: bool = True
    has_integers: bool = True  # of 32 or 64 bits
    has_bools: bool = True
    has_norms: bool = True
    has_vectors: bool = True  # among the parameters
    has_like_weights: bool = True  # two parameters of one shape and type
    num_parameters: int = 6
    has_parts: bool = True
    gives_itself: bool = False  # memory that later calls read
    methods: tuple[str, ...] = ()  # beside `forward`, which take the same
    attributes: tuple[str, ...] = ()  # tensors that a call leaves on the module
    heads: tuple[str, ...] = ()  # parts that may have another size
    num_matrices: int = 2  # parameters of two or more dimensions
    num_scalars: int = 1  # parameters that are one number
    num_like_inputs: int = 2  # tensors of the module that are as large as a row of an input
    takes_numbers: bool = True  # floats among the arguments of `forward`
    has_sizes: bool = True  # whole numbers among the arguments of the constructor
    updates_in_eval: bool = False  # buffers, so that calls in several threads race
    has_small_integers: bool = False  # of 8 or 16 bits


def traits_of(problem: Problem, model: torch.nn.Module, device: str) -> Traits:
    """Look at a problem's inputs and at its module."""
    import torch

    try:
        given = problem.make_inputs(0, batch=FEW_ROWS, device=device)
    except ProblemError:  # the first dimension is no batch
        given = problem.make_inputs(0, device=device)
    inputs = [x for x in given if isinstance(x, torch.Tensor)]
    kinds = [(x.dtype, x.shape) for x in inputs]
    return Traits(
        num_tensors=sum(x.ndim > 0 for x in inputs),
        num_alike=max((kinds.count(kind) for kind in kinds), default=0),
        dimensions=max((x.ndim for x in inputs), default=0),
        has_numbers=any(x.is_floating_point() for x in inputs),
        has_integers=any(x.dtype in (torch.int64, torch.int32) for x in inputs),
        has_small_integers=any(x.dtype in (torch.int8, torch.uint8, torch.int16) for x in inputs),
        has_bools=any(x.dtype == torch.bool for x in inputs),
        has_norms=any(map(is_norm, model.modules())),
        has_vectors=bool(vectors(model)),
        has_like_weights=bool(alike(model)),
        num_parameters=len(list(model.parameters())),
        has_parts=any(True for _ in model.children()),
        gives_itself=gives_itself(problem, model, given),
        methods=methods_of(problem, model, given),
        attributes=attributes_of(problem, model, given),
        heads=heads_of(problem, model, given),
        num_matrices=len(matrices(model)),
        num_scalars=len(scalars(model)),
        num_like_inputs=len(like_inputs(model, given)),
        takes_numbers=takes_numbers(model, given),
        has_sizes=bool(problem.options("sizes")),
        updates_in_eval=_updates_in_eval(problem, model, given),
    )


def _updates_in_eval(problem: Problem, model: torch.nn.Module, values: Sequence[Any]) -> bool:
    """Whether a call in eval mode changes a buffer."""
    import torch

    if next(model.buffers(), None) is None:
        return False
    called = copied(model).eval()
    with torch.no_grad(), contextlib.suppress(ProblemError):
        problem.call(called, values)
    pairs = zip(model.buffers(), called.buffers(), strict=False)
    return not all(torch.allclose(a, b, 0.0, 0.0, equal_nan=True) for a, b in pairs)
