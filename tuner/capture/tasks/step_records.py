"""A step of training as plain data: forward, and the gradients of each of its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.capture.graph.graph import Graph, Node, behind, in_order, live
from tuner.capture.graph.vocabulary import MOVES
from tuner.capture.tasks.library import is_call

__all__ = [
    "Backward", "Captured", "Joint", "ResultView", "costly", "of_weights", "part_of", "why_shared",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Backward:
    """The gradients of one result.

    Attributes:
        place: of the result among those of forward.
        incoming: the input of `graph` that is the result's own gradient.
        graph: of what is given and kept, and of incoming gradients; its outputs are gradients.
        gradient_of: for each input and parameter that the result has gradients by the output of
            `graph`, or the incoming gradient that it is, or "" where PyTorch gives none; but for
            those through `sources` alone.
        sources: places of other results that it is computed from.
        of_sources: the same for each of them.
    """

    place: int
    incoming: str
    graph: Graph
    gradient_of: Mapping[str, str]
    sources: tuple[int, ...] = ()
    of_sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResultView:
    """A result that is another one, seen in another way.

    Attributes:
        of: the place of the other one.
        steps: the views that lead from it to this one.
        is_copy: whether it lies in memory of its own.
    """

    of: int
    steps: tuple[Node, ...]
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class Joint:
    """What a step computes.

    Attributes:
        forward: as captured, with what is kept as further outputs behind its own. In the place of
            a result that is a view stands what it is of.
        num_results: how many outputs of `forward` are its own.
        backwards: of each result that has gradients and is no view of another one.
        views: results that are views of others, or copies of such, by their places.
        copies: views or casts of what is given that are kept as copies, with the steps to each.
        frozen: parameters that want no gradient as the constructor leaves them.
        between: further results behind those of forward, which others are computed from: their
            places among what functions of PyTorch make in forward (`seen_in`).
        version: of PyTorch, of which those places are.
    """

    forward: Graph
    num_results: int
    backwards: tuple[Backward, ...]
    views: Mapping[int, ResultView]
    copies: Mapping[str, tuple[Node, ...]]
    frozen: tuple[str, ...] = ()
    between: tuple[int, ...] = ()
    version: str = ""

    @property
    def num_made(self) -> int:
        """How many results there are with those that are not returned."""
        return self.num_results + len(self.between)


@dataclass(frozen=True, slots=True)
class Captured:
    """A forward's graph, and the record of a step of training, or why there is none.

    `in_eval` is the forward in eval mode, where `graph` is that of training mode and kernels are
    to be generated for both.
    """

    graph: Graph
    joint: Joint | None = None
    without_step: str = ""
    in_eval: Graph | None = None

    def with_forwards(self, change: Callable[[Graph], Graph]) -> Captured:
        """Return it with the forward in either mode changed so."""
        in_eval = None if self.in_eval is None else change(self.in_eval)
        return replace(self, graph=change(self.graph), in_eval=in_eval)


def why_shared(joint: Joint) -> str:
    """Return which call two results are made by, of which each would make the gradients again."""
    results, seen = joint.forward.outputs, dict[str, int]()
    nodes = {node.name: node for node in joint.forward.nodes}
    for each in joint.backwards if len(joint.backwards) > 1 else ():
        ends = {results[source] for source in each.sources}
        refs = {name: () if name in ends else node.refs for name, node in nodes.items()}
        given = {t.name: () for t in joint.forward.given}
        through = behind(joint.forward.nodes, {*each.gradient_of})
        for name in in_order([results[each.place]], {**given, **refs}.__getitem__):
            node = nodes.get(name)
            if node is None or name in ends or name not in through:
                continue
            if not is_call(node) or node.op in MOVES:
                continue
            if (other := seen.setdefault(name, each.place)) != each.place:
                return (
                    f"its {_ordinal(other)} and its {_ordinal(each.place)} result are made by the "
                    f"same {node.op.removeprefix('aten.')}, through which each would go back"
                )
    return ""


def _ordinal(place: int) -> str:
    known = ("first", "second", "third")
    return known[place] if place < len(known) else f"{place + 1}th"


def of_weights(backward: Backward) -> Backward | None:
    """Return a backward of a step whose inputs want no gradient, as data do not.

    None where weights have none, or inputs have none as it is.
    """
    weights = {t.name for t in backward.graph.parameters}
    gradient_of = {name: g for name, g in backward.gradient_of.items() if name in weights}
    if not gradient_of or gradient_of == backward.gradient_of:
        return None
    graph = part_of(backward.graph, [*gradient_of.values(), *backward.of_sources])
    return replace(backward, graph=graph, gradient_of=gradient_of) if graph.outputs else None


def part_of(graph: Graph, gradients: Sequence[str]) -> Graph:
    """Return the part of a graph that computes some gradients."""
    own = {node.name for node in graph.nodes}
    made = tuple(dict.fromkeys(name for name in gradients if name in own))
    return replace(graph, nodes=live(graph.nodes, {*made}), outputs=made)


def costly(backward: Backward, calls: Collection[str]) -> set[str]:
    """Return whose gradients take one of these calls, by name, that no other gradient takes."""

    def num_calls(gradients: set[str]) -> int:
        return sum(node.name in calls for node in live(backward.graph.nodes, gradients))

    found = backward.gradient_of.items()
    others = {*backward.of_sources}
    most = num_calls(others | {*backward.gradient_of.values()})
    return {n for n, _ in found if num_calls(others | {g for o, g in found if o != n}) < most}
