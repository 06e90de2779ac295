"""Which outputs share memory with anything else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["aliases_of"]


def aliases_of(
    model: torch.nn.Module,
    arguments: Sequence[Any],
    earlier: Sequence[Sequence[Any]],
    outputs: Sequence[Any],
) -> list[str]:
    """Say which outputs share memory with the state, an input, or an output of `earlier` calls."""
    import torch

    number = len(earlier) + 1
    memory: dict[int, str] = {}

    def note(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor) and value.numel():
            memory.setdefault(value.untyped_storage().data_ptr(), name)

    for name, value in model.state_dict().items():
        note(value, f"{name} of the state_dict")
    for i, value in enumerate(arguments):
        note(value, f"input {i}")
    for call, values in enumerate(earlier):
        for value in values:
            note(value, f"the output of call {call + 1}")
    found = []
    for output in outputs:
        if isinstance(output, torch.Tensor) and output.numel():
            owner = memory.get(output.untyped_storage().data_ptr())
            if owner is not None:
                found.append(f"the output of call {number} shares memory with {owner}")
            if torch._debug_has_internal_overlap(output) == 1:
                found.append(
                    f"elements of the output of call {number} share memory with each other"
                )
    tensors = [(j, y) for j, y in enumerate(outputs, 1) if isinstance(y, torch.Tensor)]
    found += [
        f"outputs {i} and {j} of call {number} share memory"
        for (i, a), (j, b) in itertools.combinations(tensors, 2)
        if _overlap(a, b)
    ]
    return found


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share an element; columns of one matrix may lie between each other's."""
    import torch

    memory = a.untyped_storage()
    if not a.numel() or not b.numel() or memory.data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.dtype != b.dtype:
        return True
    is_taken = torch.zeros(memory.nbytes() // a.element_size(), dtype=torch.bool)
    is_taken.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(is_taken.as_strided(b.shape, b.stride(), b.storage_offset()).any())
