"""What functions of PyTorch make on the way through a forward, in order."""

from __future__ import annotations

from typing import Any

__all__ = ["seen_in"]


def seen_in(call: Any) -> tuple[Any, list[Any]]:
    """Return what a call returns, and all tensors that functions made in it, in order.

    Exported files hold this function's text: there they are found again by their places, whatever
    has gradients.
    """
    import torch

    made: list[Any] = []
    kind: Any = torch.overrides.TorchFunctionMode

    class Seen(kind):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = function(*args, **(kwargs or {}))
            several = found if isinstance(found, (tuple, list)) else [found]
            made.extend(x for x in several if isinstance(x, torch.Tensor))
            return found

    with Seen():
        returned = call()
    return returned, made
