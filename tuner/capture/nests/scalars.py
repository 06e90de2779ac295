"""Numbers among the arguments of forward, as tensors of one element."""

from __future__ import annotations

from dataclasses import replace

from tuner.capture.graph.graph import Graph
from tuner.capture.nests.index_space import NotOneNest
from tuner.capture.nests.precision import computed_in

__all__ = ["numbers_of", "with_numbers_as_tensors"]


def numbers_of(graph: Graph) -> set[str]:
    """Return the arguments of forward that are numbers."""
    return {argument.name for argument in graph.arguments if not argument.is_tensor}


def with_numbers_as_tensors(graph: Graph) -> Graph:
    """Return the graph with float arguments in float32, in which PyTorch computes with them.

    Beside tensors of float64 they are float64.

    Raises:
        NotOneNest: an argument is neither a tensor nor a float.
    """
    for argument in graph.arguments:
        if not argument.is_tensor and (argument.is_fixed or type(argument.value) is not float):
            what = f"the argument {argument.name} of forward is {argument.value!r}"
            then = (
                "leave it out of get_inputs() if it has a default, or give it to the constructor"
            )
            raise NotOneNest(f"{what}\n  expected: tensors and floats\n  next: {then}")
    numbers = numbers_of(graph)
    inputs = [replace(t, dtype="float32") if t.name in numbers else t for t in graph.inputs]
    found = replace(graph, inputs=tuple(inputs))
    precision = computed_in(found)
    inputs = [replace(t, dtype=precision) if t.name in numbers else t for t in graph.inputs]
    return replace(found, inputs=tuple(inputs))
