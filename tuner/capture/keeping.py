"""What a step of training keeps between forward and backward, and what it computes again."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

from tuner.capture.graph import Node, Tensor, in_order
from tuner.capture.index_space import ALIASES, REDUCTIONS
from tuner.capture.library import is_call

__all__ = ["divided", "reduced"]

PLACES = ("argmax", "argmin", "max_place")
WHOLE_FLOATS = ("float32", "float64")  # to keep a mean in 16 bits would round it once more
FEW = 64  # times fewer numbers than were reduced


def reduced(
    nodes: Sequence[Node],
    needed: Container[str],
    behind: Container[str],
    given: Mapping[str, Tensor],
) -> set[str]:
    """Return reductions of forward that a backward would do again, to far fewer numbers."""
    sizes = {name: math.prod(tensor.shape) for name, tensor in given.items()}
    found = set()
    for node in nodes:
        sizes[node.name] = math.prod(node.shape)
        is_again = node.op in REDUCTIONS and node.name in needed and node.name not in behind
        most = max((sizes.get(ref, 0) for ref in node.refs), default=0)
        if is_again and node.dtype in WHOLE_FLOATS and sizes[node.name] * FEW <= most:
            found.add(node.name)
    return found


def divided(
    nodes: Sequence[Node],
    wanted: Sequence[str],
    outputs: set[str],
    copied: set[str],
    few: Container[str],
) -> tuple[list[str], dict[str, Node]]:
    """Return what is kept for the backward, and the nodes that it computes; of `few` all is kept.

    Whatever it reads of what is given, PyTorch keeps as well: who edits something else between
    forward and backward is refused by neither. So a value is computed again where that needs
    nothing more, and is kept where it does; of a view that was copied PyTorch keeps the copy.
    """
    by_name = {n.name: n for n in nodes}
    # The record has all of forward first.
    end = 1 + max(at for at, n in enumerate(nodes) if n.name in outputs)
    while end < len(nodes) and nodes[end].op in PLACES:  # of a largest number that is returned
        end += 1
    backward = {n.name for n in nodes[end:]}
    # What PyTorch's own backward reads of the forward; of a view, what it is a view of.
    views = {n.name: n.refs[:1] for n in nodes if n.op in ALIASES}
    refs = [r for n in nodes[end:] for r in n.refs if r not in backward]
    for name in copied & views.keys():
        base = name
        while base in views:
            (base,) = views[base]
        if base not in by_name:
            views[name] = ()
    read = {*in_order(refs, lambda name: views.get(name, ()))}

    def again(name: str) -> tuple[set[str], set[str]] | None:
        """What has to be computed and kept for a value of forward; None where it is kept."""
        node = by_name.get(name)
        if node is None:
            return (set(), set()) if name in read else None
        if name in few:
            return set(), {name}
        is_own = node.op not in ALIASES and node.kind != "create"
        is_place = node.op in PLACES  # a nest reads those that lie in memory
        if is_own and (is_call(node) or is_place or (name in outputs and name in read)):
            return set(), {name}
        computed, held = {name}, set()
        for ref in node.refs:
            found = again(ref)
            if found is None:
                return (set(), {name}) if name in read else None
            computed |= found[0]
            held |= found[1]
        return computed, held

    kept: dict[str, None] = {}
    needed: dict[str, Node] = {}
    left = list(wanted)
    while left:
        name = left.pop()
        if name not in backward or name in needed:
            continue
        needed[name] = by_name[name]
        for ref in by_name[name].refs:
            if ref in backward:
                left.append(ref)
                continue
            computed, held = again(ref) or (set(), {ref})
            needed |= {n: by_name[n] for n in computed}
            kept |= dict.fromkeys(held)
    order = [n.name for n in nodes]
    return sorted(kept, key=order.index), needed
