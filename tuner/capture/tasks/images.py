"""Which images lie channels last in memory: those that convolutions take and make.

PyTorch's convolutions make an image in the order of the one that they take. What is computed from
an image lies as it does, where it is stored for a later task; what forward returns does not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tuner.capture.graph.graph import Graph, Node, Ref
from tuner.capture.nests.index_space import name_of
from tuner.capture.nests.viewing import real_name
from tuner.capture.tasks.library import is_call

__all__ = ["images_of", "with_images_copied"]


def _is_convolution(node: Node) -> bool:
    """Whether it is a convolution of images or volumes, which may lie channels last."""
    return node.op.startswith("conv") and node.op[-2:] in ("2d", "3d")


def _is_pooling(node: Node) -> bool:
    return "_pool" in node.op and node.op[-2:] in ("2d", "3d")


def with_images_copied(graph: Graph) -> Graph:
    """Return the graph with a copy of each image that convolutions take, but no nest makes.

    A nest writes the copy channels last.
    """
    nodes: list[Node] = []
    copies: dict[str, str] = {}
    for node in graph.nodes:
        if _is_convolution(node):
            image = graph.value(real_name(graph, name_of(node.args[0])))
            is_made = isinstance(image, Node) and (not is_call(image) or _is_convolution(image))
            is_same = image.shape == graph.value(name_of(node.args[0])).shape
            if not is_made and is_same and image.shape[1] > 1:
                name = f"{image.name}_image"
                if image.name not in copies:
                    given, line = (Ref(image.name), 1.0), node.line
                    nodes.append(Node(name, "mul", given, {}, image.shape, image.dtype, line))
                copies[image.name] = name
                node = replace(node, args=(Ref(name), *node.args[1:]))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def images_of(graph: Graph, results: Collection[str]) -> frozenset[str]:
    """Return the values that lie channels last wherever they are stored, but `results`."""
    convolutions = [n for n in graph.nodes if _is_convolution(n)]
    taken = [graph.value(name_of(n.args[0])) for n in convolutions]
    # Batch and channels tell an image from a view of it as something else, such as groups.
    ends = {(len(v.shape), v.shape[:2]) for v in (*convolutions, *taken)}
    found = {v.name for v in taken if isinstance(v, Node) and not is_call(v)}
    behind: set[str] = set()  # what is computed from an image
    for node in graph.nodes:
        read = {real_name(graph, name) for name in node.refs}
        if _is_convolution(node) or (_is_pooling(node) and read & found):
            found.add(node.name)
        if node.name in found or (read & behind and not is_call(node)):
            behind.add(node.name)
            found |= {node.name} if (len(node.shape), node.shape[:2]) in ends else set()
    return frozenset({n for n in found if real_name(graph, n) == n} - {*results})
