"""What the results of a step depend on, where one autograd function cannot give several of them.

It gives all of its results side by side: none has a gradient by another one, and all have
gradients by everything that is given.
"""

from __future__ import annotations

from tuner.capture.graph import Graph
from tuner.capture.joint import Joint

__all__ = ["has_result_of_another", "is_seen_by_all"]


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
