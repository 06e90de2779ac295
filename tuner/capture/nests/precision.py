"""Floating-point types of a generated kernel: in memory, in arithmetic, and where it rounds.

What is loaded is widened to float32, in which the kernel computes, and rounded once where it is
stored. A graph in which some value is float64 is computed in float64 as a whole.

PyTorch rounds after every operation; nothing generated does. But a cast to fewer bits, which the
file or PyTorch's own definition of an operation asks for, is a rounding here too, also where the
value is widened again: it is part of what is computed. A cast of a single number is left out, as
PyTorch takes such an operand in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tuner.capture.graph.graph import Graph, Node, Ref, Tensor
from tuner.capture.nests.index_space import viewed

__all__ = [
    "CPP_TYPES",
    "EXACT",
    "FLOATS",
    "HALVES",
    "WHOLE",
    "Precision",
    "are_told_apart",
    "computed_in",
    "in_float64",
    "is_wider",
    "rounding_of",
    "stored_as",
    "stored_dtype",
    "with_products",
]

Precision = Literal["float32", "float64"]
HALVES = {"float16", "bfloat16"}
_RANKS = {"float16": 0, "bfloat16": 0, "float32": 1, "float64": 2}
FLOATS = frozenset(_RANKS)
WHOLE = frozenset({"int64", "int32", "int16", "int8", "uint8"})
EXACT = 2**24  # float32 tells whole numbers apart up to here
CPP_TYPES = {
    "float32": "float", "float64": "double", "bfloat16": "halves::Bfloat16",
    "float16": "halves::Float16", "int64": "int64_t", "int32": "int32_t", "int16": "int16_t",
    "int8": "int8_t", "uint8": "uint8_t", "bool": "uint8_t",
}  # fmt: skip


def computed_in(graph: Graph) -> Precision:
    """Return what the kernels of a graph compute in."""
    values: list[Tensor | Node] = [*graph.given, *graph.nodes]
    return "float64" if any(value.dtype == "float64" for value in values) else "float32"


def are_told_apart(dtype: str) -> bool:
    """Whether floats hold each number of a dtype, so that they compare as whole numbers do."""
    return dtype in WHOLE - {"int64", "int32"}


def stored_as(value: Tensor | Node) -> str:
    """Return the dtype of a value in memory between two tasks; truths are stored as floats."""
    return value.dtype if isinstance(value, Tensor) or value.dtype in FLOATS else "float32"


def stored_dtype(dtype: str) -> str:
    """Return what a plan says of a dtype: a truth is a byte."""
    return "uint8" if dtype == "bool" else dtype


def is_wider(before: str, after: str) -> bool:
    """Whether every number of the one dtype is one of the other; whole numbers count as such."""
    if after not in FLOATS:
        return False
    if before in WHOLE:
        return after not in HALVES or before in ("int8", "uint8")  # all of which halves have
    return before in FLOATS and _RANKS[before] < _RANKS[after]


def rounding_of(graph: Graph, node: Node) -> str | None:
    """Return the dtype to which a cast rounds what it is of; None where it rounds nothing.

    A cast to more bits rounds where its result is returned: the same value may be returned before
    it was widened, too.
    """
    (operand,) = node.args
    before = graph.value(operand.name).dtype if isinstance(operand, Ref) else ""
    if before in WHOLE and node.dtype in HALVES and not is_wider(before, node.dtype):
        return node.dtype
    if not {before, node.dtype} <= FLOATS or before == node.dtype:
        return None
    if is_wider(before, node.dtype):
        is_result = node.name in graph.outputs or node.name in graph.buffer_updates.values()
        return before if is_result else None
    return node.dtype if node.shape else None


def in_float64(text: str) -> str:
    """Return the text of Triton kernels that compute in float32 as one of float64.

    Triton's correctly rounded division and root are of float32 alone; its plain ones of float64
    are correctly rounded.
    """
    for name, wide in _WIDE.items():
        text = text.replace(name, wide)
    return text


_WIDE = {
    "tl.float32": "tl.float64",
    "tl.single": "tl.float32",  # as a rounding is written
    "tl.div_rn(": "divided(",
    "tl.sqrt_rn(": "tl.sqrt(",
}


def with_products(graph: Graph) -> Graph:
    """Return the graph with `product` for each `mul` that may be less its extremes or its mean.

    A softmax subtracts the largest product from each. Where a compiler joins a product with that
    subtraction, it is not rounded first, and the largest may be less than itself: by one unit in
    the last place, which of large numbers is large. A norm subtracts the mean: of products that
    are all alike nothing is left then but what the product lost by its rounding, and the norm
    enlarges that. Gradients of means add the sum of what is negative instead.
    """

    def of(name: str) -> str:
        """Return whose value it is, whatever its shape or sign."""
        value = viewed(graph, name)
        while isinstance(value, Node) and value.op == "neg" and value.refs:
            value = viewed(graph, value.refs[0])
        return value.name

    def asked(*ops: str) -> set[str]:
        """Return the operands of some operations."""
        return {of(name) for n in graph.nodes if n.op in ops for name in n.refs}

    apart = asked("amax", "amin", "var") | (asked("mean", "sum") & asked("sub", "add"))
    nodes = [
        replace(n, op="product") if n.op == "mul" and n.name in apart else n for n in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))
