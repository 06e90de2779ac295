"""The results of a step: whether one autograd function can give them, and as what it gives them.

It gives all of its results side by side: none has a gradient by another one. By what each has
gradients is PyTorch's own record of it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from tuner.capture.graph import Graph, behind
from tuner.capture.joint import Joint
from tuner.capture.module_text import made_whole, result_of, spread_by
from tuner.capture.stages import Stages

__all__ = ["gradients_of_results", "returned_by", "why_not_given"]


def why_not_given(joint: Joint) -> str:
    """Return why one autograd function cannot give a step's results; "" where it can."""
    outputs = zip(joint.forward.outputs, joint.incoming, strict=False)
    places = {o: place for place, (o, name) in enumerate(outputs) if name}
    own, nodes = {*places}, joint.forward.nodes
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


def gradients_of_results(joint: Joint, returned: Sequence[str]) -> tuple[str, str]:
    """Return what a step's forward and its backward say of the gradients of its results.

    Where all have them by the same, autograd does the rest.
    """
    pairs = [*zip(returned, joint.incoming, joint.leaves, strict=True)]
    if len({leaves for _, incoming, leaves in pairs if incoming}) > 1:
        return _BY_LEAVES.format(returned=", ".join(returned)), _ZEROS
    without = ", ".join(place for place, incoming, _ in pairs if not incoming)
    # In one call: of several the last one counts.
    return f"        ctx.mark_non_differentiable({without})\n" if without else "", ""


# A result has a gradient where something wants one that it has gradients by. Gradients of others
# are zeros, which reach nothing that is wanted. Where a gradient does not come that could, the
# reference's own operations run: what that result alone depends on has no gradient, which is no
# zero, and zeros times an Inf would be NaN.
_BY_LEAVES = """\
        results = [{returned}]
        wants = [any([ctx.needs_input_grad[1 + i] for i in places]) for places in _RESULTS_BY]
        ctx.mark_non_differentiable(*[y for y, is_wanted in zip(results, wants) if not is_wanted])
        ctx.set_materialize_grads(False)
        ctx.forms = [(wanted, y.shape, y.dtype, y.device) for wanted, y in zip(wants, results)]
"""
_ZEROS = """\
        if any([grad is None and form[0] for grad, form in zip(grads, ctx.forms)]):
            return (None, *by_reference(ctx, fused_given, grads))
        grads = [
            torch.zeros(size, dtype=dtype, device=device) if grad is None else grad
            for grad, (_, size, dtype, device) in zip(grads, ctx.forms)
        ]
"""


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
