"""What a step of training keeps between forward and backward, and what it computes again."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from tuner.capture.graph.graph import Graph, Node, Ref, Tensor, free_name, in_order
from tuner.capture.nests.index_space import ALIASES, REDUCTIONS, axes_of
from tuner.capture.nests.viewing import is_same
from tuner.capture.tasks.library import MATRIX_PRODUCTS, is_call

__all__ = ["divided", "reduced", "steps_from_given", "with_copies"]

PLACES = ("argmax", "argmin", "max_place")
WHOLE_FLOATS = ("float32", "float64")  # to keep a mean in 16 bits would round it once more
FEW = 64  # times fewer numbers than were reduced, or are computed again
LARGE = 2**13  # elements of a row, for which to keep a few numbers is worth a launch


def reduced(
    nodes: Sequence[Node],
    needed: Container[str],
    behind: Container[str],
    given: Mapping[str, Tensor],
    *,
    is_alone: bool,
) -> set[str]:
    """Return reductions of forward that a backward would do again, to far fewer numbers.

    `is_alone`: nothing else is kept, so that a forward of its own has to be worth its launch. How
    many rows there are tells nothing then: a step for any batch keeps the same at all.
    """
    shapes = {name: tensor.shape for name, tensor in given.items()}
    found = set()
    for node in nodes:
        shapes[node.name] = node.shape
        is_again = node.op in REDUCTIONS and node.name in needed and node.name not in behind
        if not is_again or node.dtype not in WHOLE_FLOATS:
            continue
        shape = max((shapes.get(ref, ()) for ref in node.refs), key=math.prod)
        if is_alone:
            is_few = math.prod(shape[axis] for axis in axes_of(node, len(shape)) if axis) >= LARGE
        else:
            is_few = math.prod(node.shape) * FEW <= math.prod(shape)
        if is_few:
            found.add(node.name)
    return found


def divided(
    nodes: Sequence[Node],
    wanted: Sequence[str],
    outputs: set[str],
    copied: set[str],
    few: Container[str] = (),
    before: Container[str] = (),
    given: Mapping[str, Tensor] | None = None,
    batch: int | None = None,
) -> tuple[list[str], dict[str, Node]]:
    """Return what is kept for the backward, and the nodes that it computes.

    Whatever it reads of what is given, PyTorch keeps as well: who edits something else between
    forward and backward is refused by neither. So a value is computed again where that needs
    nothing more, and is kept where it does; of a view that was copied PyTorch keeps the copy.

    Args:
        nodes: of the record.
        wanted: the gradients.
        outputs: what forward returns, and new values of buffers.
        copied: views that were copied.
        few: what is kept at any rate, where it is read.
        before: what is kept where none of these are.
        given: what may be kept as a copy, for a large value to be computed again from that: a few
            numbers, as a norm's bias, that PyTorch does not keep.
        batch: the first size of values that have rows, of which one tells how large they are: a
            step for any batch keeps the same at all.
    """
    by_name = {n.name: n for n in nodes}
    small = {name: math.prod(tensor.shape) * FEW for name, tensor in (given or {}).items()}
    # The record has all of forward first.
    end = 1 + max(at for at, n in enumerate(nodes) if n.name in outputs)
    while end < len(nodes) and nodes[end].op in PLACES:  # of a largest number that is returned
        end += 1
    backward = {n.name for n in nodes[end:]}
    products = {n.name for n in nodes if n.op in MATRIX_PRODUCTS}
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

    def again(name: str, count: int) -> tuple[set[str], set[str]] | None:
        """What has to be computed and kept for a value of forward; None where it is kept.

        It is needed for one of so many elements.
        """
        node = by_name.get(name)
        if node is None:
            is_copied = name in small and small[name] <= count >= LARGE
            held = {name} if is_copied and name not in read else set()
            return (set(), held) if name in read or is_copied else None
        if name in few:
            return set(), {name}
        is_own = node.op not in ALIASES and node.kind != "create"
        is_place = node.op in PLACES  # a nest reads those that lie in memory
        if is_own and (is_call(node) or is_place or (name in outputs and name in read)):
            return set(), {name}
        computed, held = {name}, set()
        for ref in node.refs:
            found = again(ref, count)
            if found is None:
                return (set(), {name}) if name in read else None
            computed |= found[0]
            held |= found[1]
        # PyTorch keeps it, and not the product that it is of: whose kernel makes it at its end.
        if name in read and any(h in products and h not in read for h in held):
            return set(), {name}
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
            shape = by_name[ref].shape if ref in by_name else (0,)
            count = math.prod(shape[shape[:1] == (batch,) :])
            computed, held = again(ref, count) or (set(), {ref})
            if any(h not in small and h not in few and h not in before for h in held):
                computed, held = again(ref, 0) or (set(), {ref})
            needed |= {n: by_name[n] for n in computed}
            kept |= dict.fromkeys(held)
    # What one reader would compute again, from a few numbers, and another one keeps, is read.
    again_of = {name: node.refs for name, node in needed.items() if name not in kept}
    reached = {*in_order(wanted, lambda name: again_of.get(name, ()))}
    order = [*small, *by_name]
    found = sorted(kept.keys() & reached, key=order.index)
    return found, {name: needed[name] for name in needed if name in again_of and name in reached}


def with_copies(
    nodes: list[Node], kept: Sequence[str], needed: Mapping[str, Node], given: Mapping[str, Tensor]
) -> tuple[list[Node], list[str], tuple[Node, ...]]:
    """Return a record with a view of what is given and kept as a copy, and what is kept then.

    And the nodes of the backward, which read the copy.
    """
    taken = {*given, *(n.name for n in nodes)}
    names = {name: free_name(f"{name}_copy", taken) for name in kept if name in given}
    views = [
        Node(copy, "view", (Ref(name),), {}, given[name].shape, given[name].dtype)
        for name, copy in names.items()
    ]
    again = tuple(
        replace(
            n,
            args=tuple(
                Ref(names.get(a.name, a.name)) if isinstance(a, Ref) else a for a in n.args
            ),
        )
        for n in nodes
        if n.name in needed
    )
    return [*views, *nodes], [names.get(name, name) for name in kept], again


def steps_from_given(name: str, graph: Graph) -> tuple[Node, ...]:
    """Return the steps to a view or a wider copy of what is given, else none."""
    steps: list[Node] = []
    while isinstance(node := graph.value(name), Node):
        if not (node.op in ALIASES or is_same(graph, node)):
            return ()
        steps.append(node)
        (name,) = node.refs
    return tuple(reversed(steps))
