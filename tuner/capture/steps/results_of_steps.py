"""The results of a step, each given by an autograd function of its own.

So autograd itself does what PyTorch does for them: which have a gradient, by what, what hooks are
called with, what is freed and checked. What all results are made of is computed once, as the
first of them is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.capture.graph.graph import Graph
from tuner.capture.modules.module_text import made_whole, result_of, spread_by
from tuner.capture.steps.result_views import view_text
from tuner.capture.tasks.stages import Stages
from tuner.capture.tasks.step_records import Joint, why_shared

__all__ = ["results_text", "whole_in_step", "why_not_given"]


def why_not_given(joint: Joint) -> str:
    """Return why autograd functions cannot give a step's results; "" where they can."""
    forward = joint.forward
    if why := why_shared(joint):
        return why
    if any(spread_by(forward, forward.outputs[each.place]) for each in joint.backwards):
        return "one of its results is a value that is expanded"
    return ""


def _in_turn(joint: Joint) -> list[int]:
    """Return the places of results with gradients, each behind those that it is computed from."""
    sources = {each.place: [*each.sources] for each in joint.backwards}
    sources |= {place: [view.of] for place, view in joint.views.items()}
    found: list[int] = []

    def add(place: int) -> None:
        for source in sources[place]:
            add(source)
        if place not in found:
            found.append(place)

    for place in sorted(sources):
        add(place)
    return found


def whole_in_step(joint: Joint, forward: Graph, stages: Stages) -> list[bool]:
    """Return of each output whether a step makes it in its own shape.

    Also where a kernel does not: what is no view may be detached in place. Not of what is
    expanded, nor of several results in one memory, of which an edit of one is an edit of others.
    """
    found = made_whole(forward, stages)
    made = {i: name for i, name in enumerate(stages.outputs) if i < joint.num_made}
    own = [real for i, real in made.items() if i not in joint.views]
    for i, name in enumerate(forward.outputs[: joint.num_made]):
        is_one = own.count(made[i]) == 1
        is_bool = forward.value(name).dtype == "bool"
        found[i] = found[i] or (is_one and not is_bool and not spread_by(forward, name))
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
    whole = whole_in_step(joint, forward, stages)
    numbers = {each.place: number for number, each in enumerate(joint.backwards)}

    def shaped(place: int, source: str) -> str:
        of = graph if place < joint.num_results else forward
        name = of.outputs[place]
        if whole[place]:
            return source
        return result_of(of, name, source, is_own=place in numbers and not shared[place])

    lines = []
    in_turn = _in_turn(joint)
    for place in in_turn:
        if place in joint.views:
            lines.append(f"            result_{place} = {view_text(joint.views[place])}\n")
            continue
        number = numbers[place]
        sources = "".join(f", result_{source}" for source in joint.backwards[number].sources)
        call = (
            f"Step.apply({number}, self, held, given, *gradient_leaves({number}, given){sources})"
        )
        lines.append(f"            result_{place} = {shaped(place, call)}\n")
    found = [
        f"result_{place}" if place in in_turn else shaped(place, f"held[0][{place}]")
        for place in range(joint.num_results)
    ]
    return "".join(lines), found
