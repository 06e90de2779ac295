"""What a result has gradients by, as PyTorch's autograd knows it: not through `detach`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "NotGiven", "Origins", "between_of", "ending_at", "gradients_of_each", "origins_of",
]  # fmt: skip


class NotGiven(ValueError):
    """Why autograd functions cannot give the results of a step, each with its gradients."""


@dataclass(frozen=True, slots=True)
class Origins:
    """What a result has gradients by.

    Attributes:
        leaves: inputs and parameters, by name, but for those through `results` alone.
        results: the places of other results that it is computed from.
        is_view: whether it lies in the memory of one of these.
        is_moved: whether views and copies of PyTorch's own, and nothing else, lead to it. Of
            several that one operation gives, as `chunk` does, eager lets none be edited in place.
    """

    leaves: frozenset[str]
    results: frozenset[int]
    is_view: bool
    is_moved: bool


def origins_of(
    results: Sequence[torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
    state: Sequence[torch.Tensor],
) -> list[Origins]:
    """Return what each result has gradients by.

    Raises:
        NotGiven: what forward has set a buffer to, in `state`, has gradients as well.
    """
    if any(buffer.requires_grad for buffer in state):
        raise NotGiven("forward sets a buffer to what has gradients")
    names = {id(leaf): name for name, leaf in leaves.items()}
    places = {(y.grad_fn, y.output_nr): place for place, y in enumerate(results) if y.grad_fn}
    found = []
    for result in results:
        own, others = _behind(result, places)
        leaves_of_it = frozenset(names[id(x)] for x in own if id(x) in names)
        is_view = any(_share_memory(result, results[place]) for place in others)
        is_moved = all(_MOVES.fullmatch(n.name()) for n in _nodes_behind(result, places))
        found.append(Origins(leaves_of_it, others, is_view, is_moved))
    return found


# PyTorch's own names end in a number, as those of a user's functions do not.
_MOVES = re.compile(
    r"(Alias|AsStrided|Clone|Expand|Permute|ReshapeAlias|Select|Slice|Squeeze|T|Transpose|"
    r"UnsafeView|Unsqueeze|View)Backward\d+"
)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether autograd knows two tensors as views of one, or one as a view of the other."""
    bases = [x if x._base is None else x._base for x in (one, other)]
    return bases[0] is bases[1]


def between_of(results: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> list[int]:
    """Return the places in `made` of what several results are computed from, where these part.

    To go back to it is each result's own affair, and to go on from there once that of all.

    Args:
        results: of forward.
        made: what functions of PyTorch made on the way, in order.
    """
    places = {(y.grad_fn, y.output_nr) for y in results if y.grad_fn}
    reached: dict[Any, set[int]] = {}  # by node the results that are computed from it
    users: dict[Any, set[Any]] = {}  # of what a node made
    for place, result in enumerate(results):
        for node in _nodes_behind(result, places):
            reached.setdefault(node, set()).add(place)
            for following in node.next_functions:
                users.setdefault(following, set()).add(node)
    found: dict[Any, int] = {}
    for place, tensor in enumerate(made):
        if tensor.grad_fn is None:
            continue
        edge = (tensor.grad_fn, tensor.output_nr)
        own = reached.get(edge[0], set())
        parts = any(reached[user] != own for user in users.get(edge, ()))
        if edge not in places and len(own) > 1 and parts:
            found.setdefault(edge, place)
    return sorted(found.values())


def gradients_of_each(
    results: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor | None],
    leaves: Mapping[str, torch.Tensor],
    origins: Sequence[Origins],
) -> list[torch.Tensor | None]:
    """Return the gradients of each result that has some: by its leaves, then by other results.

    Both in the order of `leaves` and of `results`. What goes through another result is that one's.
    """
    import torch

    found: list[torch.Tensor | None] = []
    for result, grad, origin in zip(results, incoming, origins, strict=True):
        if not result.requires_grad:
            continue
        others = [results[place] for place in sorted(origin.results)]
        by = [leaf for name, leaf in leaves.items() if name in origin.leaves] + others
        with ending_at(others):
            found += torch.autograd.grad(result, by, grad, retain_graph=True, allow_unused=True)
    return found


@contextlib.contextmanager
def ending_at(tensors: Any) -> Any:
    """Let backwards meanwhile end at what was computed, behind where its gradient is taken.

    Exported files hold this function's text.
    """

    def end(own: int) -> Any:
        return lambda grads: tuple(None if i == own else g for i, g in enumerate(grads))

    pairs = [(x.grad_fn, x.output_nr) for x in tensors if x.grad_fn is not None]
    hooks = [node.register_prehook(end(own)) for node, own in pairs]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _behind(
    result: torch.Tensor, places: Mapping[Any, int]
) -> tuple[list[torch.Tensor], frozenset[int]]:
    """Return the leaves that a result has gradients by, and the nearest results on the way."""
    nodes = [*_nodes_behind(result, places)]
    leaves = [leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None]
    edges = (edge for node in nodes for edge in node.next_functions)
    return [result, *leaves], frozenset(places[edge] for edge in edges if edge in places)


def _nodes_behind(result: torch.Tensor, ends: Container[Any]) -> Iterator[Any]:
    """Yield the nodes that a result is made by, once each, not beyond what others give."""
    seen, left = set[Any](), [result.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        left += [edge[0] for edge in node.next_functions if edge not in ends]
