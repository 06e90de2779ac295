"""A convolution's bias as an addition of its own, where a nest follows that takes it up.

PyTorch adds it in a pass of its own on a GPU; the sum and its rounding are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tuner.capture.graph.graph import Graph, Node, Ref
from tuner.capture.nests.index_space import SAME_ORDER
from tuner.capture.tasks.library import is_call

__all__ = ["with_biases_apart"]


def with_biases_apart(graph: Graph) -> Graph:
    """Return the graph with biases of convolutions added by nodes where that saves a pass."""
    nodes: list[Node] = []
    users = graph.users
    for node in graph.nodes:
        has_bias = node.op.startswith("conv") and len(node.args) == 3
        if not has_bias or not _is_taken_up(graph, users, node):
            nodes.append(node)
            continue
        bias = node.args[2]
        assert isinstance(bias, Ref)
        product = replace(node, name=f"{node.name}_product", args=node.args[:2])
        num_axes = int(node.op[-2])  # of the image: conv2d has two
        shape = (node.shape[-1 - num_axes], *[1] * num_axes)
        spread = Node(f"{node.name}_bias", "view", (bias,), {}, shape, node.dtype, node.line)
        total = replace(node, op="add", args=(Ref(product.name), Ref(spread.name)), attrs={})
        nodes += [product, spread, total]
    return replace(graph, nodes=tuple(nodes))


def _is_taken_up(graph: Graph, users: Mapping[str, tuple[Node, ...]], node: Node) -> bool:
    """Whether nests alone read a value, in one view of it or another."""
    left, found = [node.name], False
    while left:
        name = left.pop()
        if name in graph.outputs or name in graph.buffer_updates.values():
            return False
        for user in users[name]:
            if user.op in SAME_ORDER:
                left.append(user.name)
            elif is_call(user):
                return False
            else:
                found = True
    return found
