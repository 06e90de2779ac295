"""What a result has gradients by, as PyTorch's autograd knows it: not through `detach`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["require_one_step"]


def require_one_step(results: Sequence[torch.Tensor], state: Sequence[torch.Tensor]) -> None:
    """Raise where one autograd function cannot give results, and buffers that forward sets.

    It gives all of its results gradients by everything, and buffers none.

    Raises:
        ValueError: a result has no gradient by a leaf that another one has, or a buffer has some.
    """
    leaves = [_leaves_of(result) for result in results]
    if any(each != leaves[0] for each in leaves):
        raise ValueError("not each of its results has gradients by every input and parameter")
    if any(buffer.requires_grad for buffer in state):
        raise ValueError("forward sets a buffer to what has gradients")


def _leaves_of(result: torch.Tensor) -> set[int]:
    found, seen, left = set[int](), set[Any](), [result.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        left += [following for following, _ in node.next_functions]
    return found
