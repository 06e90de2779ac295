"""The results of a step: whether one autograd function can give them, and as what it gives them.

It gives all of its results side by side: none has a gradient by another one, and all have
gradients by everything that is given.
"""

from __future__ import annotations

from collections.abc import Container

from tuner.capture.graph import Graph
from tuner.capture.joint import Joint
from tuner.capture.module_text import made_whole, result_of
from tuner.capture.stages import Stages

__all__ = ["has_result_of_another", "is_seen_by_all", "returned_by"]


def is_seen_by_all(joint: Joint) -> bool:
    """Whether each result depends on everything that has a gradient.

    Else a result may have no gradient where another has one, and an autograd function cannot tell.
    """
    own = _with_gradients(joint)
    given = joint.gradient_of if len(own) > 1 else ()
    return all(own <= _behind(joint.forward, name) for name in given)


def has_result_of_another(joint: Joint) -> bool:
    """Whether a result that has a gradient is computed from another one."""
    own = _with_gradients(joint)
    return any(own & _behind(joint.forward, name) > {name} for name in own)


def _with_gradients(joint: Joint) -> set[str]:
    return {o for o, name in zip(joint.forward.outputs, joint.incoming, strict=False) if name}


def _behind(graph: Graph, name: str) -> set[str]:
    """Return what is computed from a value, and itself."""
    behind = {name}
    for node in graph.nodes:
        if behind & {*node.refs}:
            behind.add(node.name)
    return behind


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
            shape = result_of(value, "").removeprefix(".view(").removesuffix(")")
            found.append(f"torch.ops.aten._unsafe_view.default({source}, {shape})")
        else:
            found.append(result_of(value, source))
    return found
