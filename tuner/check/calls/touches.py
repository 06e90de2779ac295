"""What is done to the values of single tensors of a module: constants, scales, rows, offsets."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls.parts import vectors
from tuner.problem.draws import FAR_OFFSET

if TYPE_CHECKING:
    import torch

__all__ = ["OF_SCALARS", "TOUCHES", "Touches", "like_inputs", "matrices", "scalars"]

LARGE = 8.0  # times as large as they were are the vectors beside one that is small
OF_SCALARS = (3.0, -3.0, 0.3125, 8.0, -8.0)  # exp(8) is beyond what a scale is bounded by
# Powers of two, since the oracle holds what is changed in more bits: what guards may take for
# usual, what is far below, and of a row.
EXPONENTS = {"small": (-9, -7), "tiny": (-20, -9), "scale row": (10, 13)}
TOUCHES = (
    "mask", "zero", "zero part", "ones", "minus ones", "scalar", "small", "tiny", "edit row",
    "scale row", "shift",
)  # fmt: skip
Next = Callable[[list[str]], str]  # picks a name; "" where there is none


def matrices(model: torch.nn.Module) -> list[str]:
    """Return the names of floating-point parameters of two or more dimensions."""
    named = model.named_parameters()
    return [n for n, p in named if p.ndim > 1 and p.numel() and p.is_floating_point()]


def scalars(model: torch.nn.Module) -> list[str]:
    """Return the names of parameters that are one number."""
    return [n for n, p in model.named_parameters() if p.numel() == 1 and p.is_floating_point()]


def like_inputs(model: torch.nn.Module, arguments: Sequence[Any]) -> list[str]:
    """Return the names of parameters and buffers of the shape of a row of an input."""
    import torch

    shapes = {
        x.shape[at:]
        for x in arguments
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        for at in range(1, x.ndim)
    }
    named = [*model.named_buffers(), *model.named_parameters()]
    return [n for n, t in named if t.shape in shapes and t.is_floating_point()]


class Touches:
    """Changes of a module's tensors, each undone before the next one, but for edits."""

    def __init__(self, arguments: Callable[[], Sequence[Any]]) -> None:
        self._arguments = arguments
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def act(self, action: str, model: torch.nn.Module, pick: Next, place: int) -> None:
        """Do one of `TOUCHES`; `place` draws rows and sizes, and goes up with each."""
        while self._before:
            old, values = self._before.pop()
            old.data.copy_(values)
        names = [n for n, p in model.named_parameters() if p.is_floating_point() and p.numel()]
        of_action: dict[str, Callable[[Any], list[str]]] = {
            "mask": vectors, "scalar": scalars, "edit row": matrices, "scale row": matrices,
            "shift": lambda model: like_inputs(model, self._arguments()),
        }  # fmt: skip
        name = pick(of_action[action](model) if action in of_action else names)
        if not name:
            return
        held: Any = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if action != "edit row":
            beside = [held[n] for n in names if action in ("small", "tiny") and held[n].ndim < 2]
            for tensor in {id(t): t for t in (held[name], *beside)}.values():
                self._before.append((tensor, tensor.detach().clone()))
            for tensor in beside:
                tensor.data.mul_(LARGE)
        self._change(action, held[name].data, place)

    def _change(self, action: str, values: torch.Tensor, place: int) -> None:
        drawn = random.Random(place)
        if action == "mask":
            half = (len(values) + 1) // 2
            start = (0, half // 2, len(values) - half)[place % 3]
            values[start : start + half] = float("-inf")
        elif action == "zero" or (action == "zero part" and values.numel() == 1):
            values.zero_()
        elif action == "zero part":
            values[..., 1::2] = 0.0
            if values.ndim > 1:
                values[0] = 0.0
        elif action in ("ones", "minus ones"):
            values.fill_(1.0 if action == "ones" else -1.0)
        elif action == "scalar":
            values.fill_(OF_SCALARS[place % len(OF_SCALARS)])
        elif action in ("small", "tiny"):
            values.fill_(2.0 ** drawn.randrange(*EXPONENTS[action]))
        elif action == "shift":
            values.fill_(FAR_OFFSET)
        elif action == "scale row":
            dim = place % 2
            row = values.select(dim, drawn.randrange(values.shape[dim]))
            row.mul_(2.0 ** drawn.randrange(*EXPONENTS[action]))
        elif action == "edit row":
            row = values[drawn.choice(self._rows_of(len(values)))]
            part = row.reshape(-1) if drawn.randrange(2) else row.reshape(-1)[-1:]
            part.mul_(-2.0)

    def _rows_of(self, number: int) -> Sequence[int]:
        """Return the rows of a table that the inputs name, where they name any; else all."""
        import torch

        named = [
            x.unique()
            for x in self._arguments()
            if isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.numel()
        ]
        rows = [int(i) for ids in named for i in ids if 0 <= int(i) < number]
        return rows or range(number)
