"""The results of a step, each given by an autograd function of its own.

So autograd itself does what PyTorch does for them: which have a gradient, by what, what hooks are
called with, what is freed and checked. What all results are made of is computed once, as the
first of them is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.capture.graph import Graph, behind, in_order
from tuner.capture.joint import Joint
from tuner.capture.library import MOVES, is_call
from tuner.capture.module_text import made_whole, result_of, spread_by
from tuner.capture.stages import Stages

__all__ = ["in_turn", "results_text", "why_not_given"]


def why_not_given(joint: Joint) -> str:
    """Return why autograd functions cannot give a step's results; "" where they can."""
    forward = joint.forward
    if why := _shared(joint):
        return why
    if any(spread_by(forward, forward.outputs[each.place]) for each in joint.backwards):
        return "one of its results is a value that is expanded"
    return ""


def _shared(joint: Joint) -> str:
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


def in_turn(joint: Joint) -> list[int]:
    """Return the numbers of a step's backwards, each behind those of the results it reads."""
    numbers = {each.place: number for number, each in enumerate(joint.backwards)}
    found: list[int] = []

    def add(number: int) -> None:
        for source in joint.backwards[number].sources:
            add(numbers[source])
        if number not in found:
            found.append(number)

    for number in range(len(joint.backwards)):
        add(number)
    return found


def results_text(
    graph: Graph, joint: Joint, forward: Graph, stages: Stages, shared: Sequence[bool]
) -> tuple[str, list[str]]:
    """Return the lines in which a call makes the results of a step, and the text of each then.

    Args:
        graph: of the module's forward.
        joint: of the step.
        forward: what is called for it: `graph`, or with what is kept.
        stages: of that.
        shared: of each result whether it lies in memory that is kept for backwards. What does not
            is no view of that: an edit of it is nobody's affair, and it may be detached in place.
    """
    whole = made_whole(forward, stages)
    numbers = {each.place: number for number, each in enumerate(joint.backwards)}

    def shaped(place: int, source: str) -> str:
        value = graph.value(graph.outputs[place])
        if whole[place]:
            return source
        if place in numbers and not shared[place]:
            shape = result_of(graph, value.name, "").removeprefix(".view(").removesuffix(")")
            return f"torch.ops.aten._unsafe_view.default({source}, {shape})"
        return result_of(graph, value.name, source)

    lines = []
    for number in in_turn(joint):
        each = joint.backwards[number]
        sources = "".join(f", result_{source}" for source in each.sources)
        call = (
            f"Step.apply({number}, self, held, given, *gradient_leaves({number}, given){sources})"
        )
        lines.append(f"            result_{each.place} = {shaped(each.place, call)}\n")
    found = [
        f"result_{place}" if place in numbers else shaped(place, f"held[0][{place}]")
        for place in range(joint.num_results)
    ]
    return "".join(lines), found
