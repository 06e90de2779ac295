"""A step of training as one call that can be timed: forward, and gradients of all given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls.exercise import outputs_of

if TYPE_CHECKING:
    import torch

__all__ = ["Upstream", "step_of"]

SEED = 1


class Upstream:
    """What steps are given as gradients of what forward returns: normal numbers, drawn once.

    Ones would be the gradient of a plain sum, which no training has: behind a softmax it is
    rounding's noise.
    """

    def __init__(self) -> None:
        self._form: list[tuple[Any, ...]] = []
        self._drawn: list[torch.Tensor] = []

    def of(self, made: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return them, the same at each call that returns as much."""
        import torch

        form = [(y.shape, y.stride(), y.dtype, y.device) for y in made]
        if form != self._form:
            self._drawn.clear()  # before others take as much memory
            generators = {y.device: torch.Generator(y.device).manual_seed(SEED) for y in made}
            self._drawn = [
                torch.empty_like(y.detach()).normal_(generator=generators[y.device]) for y in made
            ]
            self._form = form
        return self._drawn


def step_of(
    model: torch.nn.Module, upstream: Upstream | None = None
) -> Callable[[Sequence[Any]], Any]:
    """Return a function of forward's inputs that takes a step and returns the gradients.

    It raises a RuntimeError without a message where nothing of what forward returns has a
    gradient. Gradients must be enabled. `upstream` may be shared with other steps.
    """
    import torch

    weights = [p for p in model.parameters() if p.requires_grad]
    upstream = upstream or Upstream()

    def leaf(value: Any) -> Any:
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().requires_grad_() if is_number else value

    def step(inputs: Sequence[Any]) -> Any:
        given = [leaf(value) for value in inputs]
        made = [y for y in outputs_of(model(*given)) if getattr(y, "requires_grad", False)]
        if not made:
            raise RuntimeError
        leaves = [x for x in given if getattr(x, "requires_grad", False)]
        return torch.autograd.grad(made, [*leaves, *weights], upstream.of(made), allow_unused=True)

    return step
