"""Calls under `torch.func.vmap`: mapped over inputs, or over weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls.crossing import Mapped
from tuner.check.calls.exercise import tensors_under

if TYPE_CHECKING:
    import torch

__all__ = ["mapped"]


def mapped(
    model: torch.nn.Module,
    arguments: Sequence[Any],
    over: Mapped,
    tensors: Mapping[str, torch.Tensor],
) -> Any:
    """Return what a module gives when it is mapped over one more dimension.

    Over "inputs": three orders of the rows of each tensor, in dimension 1 where there is one: a
    rule that takes the first one for granted is wrong there. Over "weights": the question's two
    sets of them, as an ensemble is.

    Raises:
        Exception: whatever it raises; not all operations can be mapped.
    """
    import torch

    if over == "weights":
        held = dict(model.named_parameters())
        state, other = tensors_under("state", tensors), tensors_under("other", tensors)
        both = {
            name: torch.stack([state[name], other[name]]).to(parameter.dtype)
            for name, parameter in held.items()
        }

        def with_weights(weights: dict[str, torch.Tensor]) -> Any:
            return torch.func.functional_call(model, weights, tuple(arguments))

        return torch.func.vmap(with_weights)(both)
    dims = tuple(min(1, v.ndim) if isinstance(v, torch.Tensor) else None for v in arguments)
    stacked = [
        value if dim is None else torch.stack(_orders(value), dim)
        for value, dim in zip(arguments, dims, strict=True)
    ]
    return torch.func.vmap(model, in_dims=dims)(*stacked)


def _orders(value: torch.Tensor) -> list[torch.Tensor]:
    if not value.ndim:
        return [value, value, value]
    return [value, value.flip(0), value.roll(1, 0)]
