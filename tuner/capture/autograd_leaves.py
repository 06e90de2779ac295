"""What a result has gradients by, as PyTorch's autograd knows it: not through `detach`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["leaves_of_each"]


def leaves_of_each(
    results: Sequence[torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
    state: Sequence[torch.Tensor],
) -> list[frozenset[str]]:
    """Return by which leaves, by name, each result has gradients.

    Raises:
        ValueError: what forward has set a buffer to, in `state`, has gradients as well.
    """
    if any(buffer.requires_grad for buffer in state):
        raise ValueError("forward sets a buffer to what has gradients")
    names = {id(leaf): name for name, leaf in leaves.items()}
    found = [_leaves_of(result) for result in results]
    return [frozenset(names[id(x)] for x in each if id(x) in names) for each in found]


def _leaves_of(result: torch.Tensor) -> list[torch.Tensor]:
    found, seen, left = list[Any]([result]), set[Any](), [result.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        left += [following for following, _ in node.next_functions]
    return found
