"""A step of training as one call that can be timed: forward, and gradients of all given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.exercise import outputs_of

if TYPE_CHECKING:
    import torch

__all__ = ["step_of"]


def step_of(model: torch.nn.Module) -> Callable[[Sequence[Any]], Any]:
    """Return a function of forward's inputs that takes a step and returns the gradients.

    It raises a RuntimeError without a message where nothing of what forward returns has a
    gradient. Gradients must be enabled.
    """
    import torch

    weights = [p for p in model.parameters() if p.requires_grad]

    def leaf(value: Any) -> Any:
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().requires_grad_() if is_number else value

    def step(inputs: Sequence[Any]) -> Any:
        given = [leaf(value) for value in inputs]
        made = [y for y in outputs_of(model(*given)) if getattr(y, "requires_grad", False)]
        if not made:
            raise RuntimeError
        leaves = [x for x in given if getattr(x, "requires_grad", False)]
        ones = [torch.ones_like(y) for y in made]
        return torch.autograd.grad(made, [*leaves, *weights], ones, allow_unused=True)

    return step
