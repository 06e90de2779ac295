"""What a result has gradients by, as PyTorch's autograd knows it: not through `detach`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["NotGiven", "Origins", "gradients_of_each", "origins_of"]


class NotGiven(ValueError):
    """Why autograd functions cannot give the results of a step, each with its gradients."""


@dataclass(frozen=True, slots=True)
class Origins:
    """What a result has gradients by.

    Attributes:
        leaves: inputs and parameters, by name, but for those through `results` alone.
        results: the places of other results that it is computed from.
    """

    leaves: frozenset[str]
    results: frozenset[int]


def origins_of(
    results: Sequence[torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
    state: Sequence[torch.Tensor],
) -> list[Origins]:
    """Return what each result has gradients by.

    Raises:
        NotGiven: what forward has set a buffer to, in `state`, has gradients as well; or a
            result has gradients by something, another result too, both at once and through
            another result.
    """
    if any(buffer.requires_grad for buffer in state):
        raise NotGiven("forward sets a buffer to what has gradients")
    names = {id(leaf): name for name, leaf in leaves.items()}
    places = {(y.grad_fn, y.output_nr): place for place, y in enumerate(results) if y.grad_fn}
    found = []
    for result in results:
        own, others = _behind(result, places)
        found.append(Origins(frozenset(names[id(x)] for x in own if id(x) in names), others))
    for place, origins in enumerate(found):
        through, further = _through(origins, found)
        both = [*(origins.leaves & through), *(f"result {i}" for i in origins.results & further)]
        if both:
            raise NotGiven(
                f"result {place} (from 0) has gradients by {min(both)} both at once and through "
                "a further result"
            )
    return found


def _through(origins: Origins, every: Sequence[Origins]) -> tuple[set[str], set[int]]:
    """Return by which leaves, and by which results, a result has gradients through others."""
    leaves, others, left = set[str](), set[int](), [*origins.results]
    seen = set[int]()
    while left:
        place = left.pop()
        if place not in seen:
            seen.add(place)
            leaves |= every[place].leaves
            others |= every[place].results
            left += every[place].results
    return leaves, others


def gradients_of_each(
    results: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor | None],
    leaves: Mapping[str, torch.Tensor],
    origins: Sequence[Origins],
) -> list[torch.Tensor | None]:
    """Return the gradients of each result that has some: by its leaves, then by other results.

    Both in the order of `leaves` and of `results`.
    """
    import torch

    found: list[torch.Tensor | None] = []
    for result, grad, origin in zip(results, incoming, origins, strict=True):
        if result.requires_grad:
            by = [leaf for name, leaf in leaves.items() if name in origin.leaves]
            by += [results[place] for place in sorted(origin.results)]
            found += torch.autograd.grad(result, by, grad, retain_graph=True, allow_unused=True)
    return found


def _behind(
    result: torch.Tensor, places: Mapping[Any, int]
) -> tuple[list[torch.Tensor], frozenset[int]]:
    """Return the leaves that a result has gradients by, and the nearest results on the way."""
    leaves, others, seen, left = list[Any]([result]), set[int](), set[Any](), [result.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        for following in node.next_functions:
            if following in places:
                others.add(places[following])
            else:
                left.append(following[0])
    return leaves, frozenset(others)
