"""What a step of training keeps between forward and backward, and what it computes again."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tuner.capture.graph.graph import Graph, Node, Ref, Tensor, free_name, in_order
from tuner.capture.nests.index_space import ALIASES, REDUCTIONS, axes_of
from tuner.capture.nests.viewing import is_same
from tuner.capture.tasks.library import MATRIX_PRODUCTS, is_call

__all__ = ["Fewer", "divided", "reduced", "steps_from_given", "with_copies"]

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


@dataclass(frozen=True, slots=True)
class Fewer:
    """A few numbers from which a backward may compute large values again.

    Attributes:
        kept: values that are kept at any rate, where they are read.
        before: what is kept where none of these are.
        given: what may be kept as a copy, as a norm's bias, that PyTorch does not keep.
    """

    kept: Collection[str] = ()
    before: Collection[str] = ()
    given: Mapping[str, Tensor] = field(default_factory=dict)


_NONE = Fewer()


def divided(
    nodes: Sequence[Node],
    wanted: Sequence[str],
    outputs: set[str],
    copied: set[str],
    fewer: Fewer = _NONE,
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
        fewer: what is kept beside that, for more to be computed again.
    """
    record = _Record(nodes, outputs, copied, fewer)
    kept, needed = record.walked_back(wanted)
    # What one reader would compute again, from a few numbers, and another one keeps, is read.
    again_of = {name: needed[name].refs for name in needed if name not in kept}
    reached = {*in_order(wanted, lambda name: again_of.get(name, ()))}
    order = [*fewer.given, *(node.name for node in nodes)]
    found = sorted(kept & reached, key=order.index)
    return found, {name: needed[name] for name in needed if name in again_of and name in reached}


class _Sources(NamedTuple):
    """What a backward has of a value of forward: the nodes to compute, and what is kept."""

    computed: set[str]
    kept: set[str]


class _Record:
    """A record of forward and of gradients behind it, divided as by `divided`."""

    def __init__(
        self, nodes: Sequence[Node], outputs: set[str], copied: set[str], fewer: Fewer
    ) -> None:
        self._nodes = {n.name: n for n in nodes}
        self._outputs = outputs
        self._fewer = fewer
        # As a copy each is worth values of so many elements.
        self._worth = {name: math.prod(t.shape) * FEW for name, t in fewer.given.items()}
        self._products = {n.name for n in nodes if n.op in MATRIX_PRODUCTS}
        backward = _behind_forward(nodes, outputs)
        self._backward = {n.name for n in backward}
        self._read = _read_of_forward(nodes, backward, copied)

    def walked_back(self, wanted: Sequence[str]) -> tuple[set[str], dict[str, Node]]:
        """Return what is kept for gradients, and the nodes behind them that are computed."""
        kept: set[str] = set()
        needed: dict[str, Node] = {}
        left = list(wanted)
        while left:
            name = left.pop()
            if name not in self._backward or name in needed:
                continue
            needed[name] = self._nodes[name]
            for ref in needed[name].refs:
                if ref in self._backward:
                    left.append(ref)
                    continue
                sources = self._sources(ref)
                needed |= {n: self._nodes[n] for n in sources.computed}
                kept |= sources.kept
        return kept, needed

    def _sources(self, name: str) -> _Sources:
        """Return what a backward has of a value of forward that it reads."""
        count = math.prod(self._nodes[name].shape) if name in self._nodes else 0
        as_it_is = _Sources(set(), {name})
        found = self._again(name, count) or as_it_is
        if all(self._is_among_fewer(held) for held in found.kept):
            return found
        return self._again(name, 0) or as_it_is

    def _is_among_fewer(self, name: str) -> bool:
        fewer = self._fewer
        return name in fewer.given or name in fewer.kept or name in fewer.before

    def _again(self, name: str, count: int) -> _Sources | None:
        """Return from what a value of forward is computed again; None where it is kept.

        It is needed for one of `count` elements.
        """
        node = self._nodes.get(name)
        if node is None:
            return self._given(name, count)
        if name in self._fewer.kept or self._has_to_be_kept(node):
            return _Sources(set(), {name})
        found = _Sources({name}, set())
        for ref in node.refs:
            own = self._again(ref, count)
            if own is None:
                return _Sources(set(), {name}) if name in self._read else None
            found.computed.update(own.computed)
            found.kept.update(own.kept)
        # PyTorch keeps it, and not the product that it is of: whose kernel makes it at its end.
        if name in self._read and not found.kept.isdisjoint(self._products - self._read):
            return _Sources(set(), {name})
        return found

    def _given(self, name: str, count: int) -> _Sources | None:
        """Return the same of what is given: as PyTorch keeps it, or a copy for many elements."""
        if name in self._read:
            return _Sources(set(), set())
        is_copied = name in self._worth and self._worth[name] <= count >= LARGE
        return _Sources(set(), {name}) if is_copied else None

    def _has_to_be_kept(self, node: Node) -> bool:
        """Whether no nest computes a value again, or PyTorch keeps it as it is returned."""
        if node.op in ALIASES or node.kind == "create":
            return False
        is_place = node.op in PLACES  # a nest reads those that lie in memory
        is_returned = node.name in self._outputs and node.name in self._read
        return is_call(node) or is_place or is_returned


def _behind_forward(nodes: Sequence[Node], outputs: set[str]) -> Sequence[Node]:
    """Return the nodes of the backward. The record has all of forward first."""
    end = 1 + max(at for at, n in enumerate(nodes) if n.name in outputs)
    while end < len(nodes) and nodes[end].op in PLACES:  # of a largest number that is returned
        end += 1
    return nodes[end:]


def _read_of_forward(
    nodes: Sequence[Node], backward: Sequence[Node], copied: set[str]
) -> set[str]:
    """Return what PyTorch's own backward reads of forward; of a view, what it is a view of."""
    made = {n.name for n in nodes}
    views = {n.name: n.refs[:1] for n in nodes if n.op in ALIASES}
    for name in copied & views.keys():
        base = name
        while base in views:
            (base,) = views[base]
        if base not in made:
            views[name] = ()
    own = {n.name for n in backward}
    refs = [r for n in backward for r in n.refs if r not in own]
    return {*in_order(refs, lambda name: views.get(name, ()))}


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
