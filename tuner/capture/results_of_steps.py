"""The results of a step: whether one autograd function can give them, and as what it gives them.

It gives all of its results side by side: none has a gradient by another one, and all have
gradients by everything that is given.
"""

from __future__ import annotations

from collections.abc import Container

from tuner.capture.graph import Graph, behind
from tuner.capture.joint import Joint
from tuner.capture.module_text import made_whole, result_of, spread_by
from tuner.capture.stages import Stages

__all__ = ["returned_by", "why_not_given"]


def why_not_given(joint: Joint) -> str:
    """Return why one autograd function cannot give a step's results; "" where it can."""
    outputs = zip(joint.forward.outputs, joint.incoming, strict=False)
    places = {o: place for place, (o, name) in enumerate(outputs) if name}
    own, nodes = {*places}, joint.forward.nodes
    # Else a result may have no gradient where another has one, which it cannot tell.
    for name in joint.gradient_of if len(own) > 1 else ():
        if without := own - behind(nodes, {name}):
            place = min(places[o] for o in without)
            return f"its {_ordinal(place)} result does not depend on {name}, as others do"
    for name, place in places.items():
        if others := (own & behind(nodes, {name})) - {name}:
            other = min(places[o] for o in others)
            return (
                f"its {_ordinal(other)} result is computed from the {_ordinal(place)}, "
                "which is returned as well"
            )
    if any(spread_by(joint.forward, name) for name in own):
        return "one of its results is a value that is expanded"
    return ""


def _ordinal(place: int) -> str:
    known = ("first", "second", "third")
    return known[place] if place < len(known) else f"{place + 1}th"


def returned_by(graph: Graph, forward: Graph, stages: Stages, saved: Container[str]) -> list[str]:
    """Return the text of each result of a module, in its own shape, of what its step made.

    What is not `saved` for the backward, by its name in the step's forward, is no view of that: an
    edit of it is nobody's affair, and it may be detached in place.
    """
    found = []
    outputs = zip(graph.outputs, forward.outputs, made_whole(forward, stages), strict=False)
    for i, (name, own, is_whole) in enumerate(outputs):
        value, source = graph.value(name), f"made[{i}]"
        if is_whole:
            found.append(source)
        elif "float" in value.dtype and own not in saved:
            shape = result_of(graph, name, "").removeprefix(".view(").removesuffix(")")
            found.append(f"torch.ops.aten._unsafe_view.default({source}, {shape})")
        else:
            found.append(result_of(graph, name, source))
    return found
