"""Products that are rounded by themselves, since something is compared with their largest.

A softmax subtracts the largest product from each. Where a compiler joins a product with that
subtraction, it is not rounded first, and the largest may be less than itself: by one unit in the
last place, which of large numbers is large.
"""

from __future__ import annotations

from dataclasses import replace

from tuner.capture.graph import Graph
from tuner.capture.index_space import viewed

__all__ = ["with_products"]


def with_products(graph: Graph) -> Graph:
    """Return the graph with `product` for each `mul` whose largest or smallest is asked for."""
    asked = {viewed(graph, n.refs[0]).name for n in graph.nodes if n.op in ("amax", "amin")}
    nodes = [
        replace(n, op="product") if n.op == "mul" and n.name in asked else n for n in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))
