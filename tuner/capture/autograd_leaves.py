"""What a result has gradients by, as PyTorch's autograd knows it: not through `detach`."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from tuner.capture.graph import Node, behind

if TYPE_CHECKING:
    import torch

__all__ = ["leaves_of_each", "require_attached"]


def leaves_of_each(
    results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], state: Sequence[torch.Tensor]
) -> list[set[int]]:
    """Return by which leaves, by place, each result has gradients.

    Raises:
        ValueError: what forward has set a buffer to, in `state`, has gradients as well.
    """
    if any(buffer.requires_grad for buffer in state):
        raise ValueError("forward sets a buffer to what has gradients")
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    return [{places[id(x)] for x in _leaves_of(y) if id(x) in places} for y in results]


def require_attached(
    nodes: Sequence[Node],
    results: Sequence[str],
    leaves: Sequence[set[int]],
    wanted: Sequence[str],
    gradient_of: Container[str],
) -> None:
    """Refuse a result that is computed from what has gradients, and has none by it itself.

    Args:
        nodes: of forward.
        results: their names.
        leaves: of each the places of what it has gradients by; of one without any an empty set.
        wanted: names of the leaves, in order.
        gradient_of: those by which some result has gradients.

    Raises:
        ValueError: a step gives each result gradients by all that it is computed from.
    """
    for place, given in enumerate(wanted):
        after = behind(nodes, {given}) if given in gradient_of else ()
        pairs = zip(results, leaves, strict=True)
        if any(name in after and found and place not in found for name, found in pairs):
            raise ValueError(f"one of its results is computed from {given}, and detached from it")


def _leaves_of(result: torch.Tensor) -> list[torch.Tensor]:
    found, seen, left = list[Any](), set[Any](), [result.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        left += [following for following, _ in node.next_functions]
    return found
