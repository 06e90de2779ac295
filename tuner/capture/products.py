"""Products that are rounded by themselves, since their largest or their mean is subtracted.

A softmax subtracts the largest product from each. Where a compiler joins a product with that
subtraction, it is not rounded first, and the largest may be less than itself: by one unit in the
last place, which of large numbers is large. A norm subtracts the mean: of products that are all
alike nothing is left then but what the product lost by its rounding, and the norm enlarges that.
"""

from __future__ import annotations

from dataclasses import replace

from tuner.capture.graph import Graph
from tuner.capture.index_space import viewed

__all__ = ["with_products"]


def with_products(graph: Graph) -> Graph:
    """Return the graph with `product` for each `mul` that may be less its extremes or its mean."""

    def asked(*ops: str) -> set[str]:
        """Return the first operands of some operations."""
        return {viewed(graph, n.refs[0]).name for n in graph.nodes if n.op in ops and n.refs}

    apart = asked("amax", "amin", "var") | (asked("mean") & asked("sub"))
    nodes = [
        replace(n, op="product") if n.op == "mul" and n.name in apart else n for n in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))
