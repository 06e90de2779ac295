"""Where nobody can say which number is right: numbers of a tensor that are not judged."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls.exercise import read_at_once, recorded
from tuner.check.calls.parts import copied
from tuner.errors import ProblemError
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = [
    "depends_on_order",
    "disputed_in",
    "is_near_overflow",
    "meet_in_products",
    "of_order",
    "undefined",
]


MULTIPLYING = frozenset({"aten.prod", "aten.cumprod"})  # many numbers, each with all others


def disputed_in(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return where tensors of an answer are `_disputed`, of those that are somewhere.

    A device is waited for once as long as all numbers are finite, as nearly always.
    """
    sums = [_sum(t) for n in got for t in (got[n], want[n]) if got[n].is_floating_point()]
    if all(math.isfinite(number) for number in read_at_once(sums)):
        got = {n: t for n, t in got.items() if not t.is_floating_point()}
    found = {name: _disputed(tensor, want[name]) for name, tensor in got.items()}
    return {name: mask for name, mask in found.items() if mask is not None}


def _disputed(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    """Return where the baseline is NaN or infinite and float64 is not, or the other way.

    Where it has an infinity of the other sign, what that was multiplied by is 0 up to rounding,
    which decides about the other infinities as well: none of them is judged.
    """
    import torch

    if not got.is_floating_point():
        # Where even the baseline's rounding decides, e.g. between two largest elements.
        mask = got != want
        return mask if bool(mask.any()) else None
    if math.isfinite(float(_sum(got))) and math.isfinite(float(_sum(want))):
        return None  # as nearly always, at a fourth of what follows
    got, want = _asked(got), _asked(want)
    mask = (torch.isnan(got) != torch.isnan(want)) | (torch.isinf(got) != torch.isinf(want))
    infinite = torch.isinf(got) & torch.isinf(want)
    if bool((infinite & (got != want)).any()):
        mask |= infinite
    return mask if bool(mask.any()) else None


def _asked(values: torch.Tensor) -> torch.Tensor:
    """Return numbers of which PyTorch says whether they are finite: of float8 it does not."""
    return values.double() if values.element_size() == 1 else values


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return a sum in float64 that is finite only where all numbers are.

    In another dtype most numbers would be copied first: of outputs of gigabytes, to twice as much.
    """
    import torch

    if values.dtype in (torch.float32, torch.float64):
        return values.sum().double()
    is_of_16_bits = values.dtype in (torch.float16, torch.bfloat16)
    return values.sum(dtype=torch.float32 if is_of_16_bits else torch.float64).double()


def undefined(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    """Return where either is no finite number: what a division by zero gives is nobody's."""
    import torch

    if not got.is_floating_point():
        return _disputed(got, want)
    got, want = _asked(got), _asked(want)
    mask = ~(torch.isfinite(got) & torch.isfinite(want))
    return mask if bool(mask.any()) else None


def is_near_overflow(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether numbers are so near the largest of their type that their order decides about Inf.

    Of a sum beyond a fourth of it, a partial sum may have been beyond the whole.
    """
    import torch

    if not got.is_floating_point() or got.dtype == torch.float64 or not want.numel():
        return False
    want = _asked(want)
    finite = torch.where(torch.isfinite(want), want.abs(), 0.0)
    return bool(finite.max() > torch.finfo(got.dtype).max / 4)


def of_order(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    """Return where the order in which many numbers are multiplied may decide about NaN and Inf.

    Beyond a float first and then times 0 it is NaN; times 0 first and then others it is 0. What is
    large may be the product of a part that is too large.
    """
    import torch

    mask = undefined(got, want)
    if mask is None or not got.is_floating_point():
        return mask
    return mask | (want == 0) | (want.abs() > math.sqrt(torch.finfo(got.dtype).max))


def depends_on_order(
    problem: Problem,
    model: torch.nn.Module,
    values: Sequence[Any],
    answers: Sequence[Mapping[str, torch.Tensor]],
    known: dict[Any, Any],
) -> bool:
    """Whether answers have NaN or Inf about which the order of products may decide.

    A scan by blocks has an order of its own. A NaN of the inputs comes through in any order.
    """
    import torch

    if MULTIPLYING.isdisjoint(_operations(problem, model, values, known)):
        return False  # as nearly all: no number is looked at
    made = [y for answer in answers for y in answer.values() if y.is_floating_point()]
    given = [x for x in (*values, *model.parameters()) if isinstance(x, torch.Tensor)]
    is_finite = all(bool(torch.isfinite(y).all()) for y in made)
    return not is_finite and not any(bool(torch.isnan(x).any()) for x in given)


def meet_in_products(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any], known: dict[Any, Any]
) -> bool:
    """Whether numbers of two inputs may meet in a matrix product or convolution.

    Where both are near the largest float a sum may be beyond it in one order of its terms alone.
    """
    import torch
    from torch.utils.flop_counter import flop_registry

    if sum(isinstance(x, torch.Tensor) and x.is_floating_point() for x in values) < 2:
        return False
    products = {str(function) for function in flop_registry}
    return not products.isdisjoint(_operations(problem, model, values, known))


def _operations(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any], known: dict[Any, Any]
) -> frozenset[str]:
    """Return what PyTorch's dispatcher runs in a call; nothing where a call fails."""
    import torch

    if "operations" not in known:
        operations: list[str] = []
        known["operations"] = frozenset[str]()
        with contextlib.suppress(ProblemError), torch.no_grad(), recorded(operations):
            problem.call(copied(model), values)
            known["operations"] = frozenset(operations)
    found: frozenset[str] = known["operations"]
    return found
