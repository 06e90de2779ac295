"""The space that a nest loops over: which dimensions are rows, which columns, and what lies where.

    outer ... | columns ... | inner ...      of the tensor that is reduced; rows are outer x inner

Without reductions the columns come last. Tensors are contiguous: column c of row i lies at
(i / inner) * columns * inner + i % inner + c * inner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tuner.capture.graph import Graph, Node, Operand, Ref
from tuner.errors import InputError

__all__ = [
    "REDUCTIONS", "SAME_ORDER", "NotOneNest", "Place", "Space", "axes_of", "name_of", "refusal",
    "shapes_of", "space_of",
]  # fmt: skip

Place = Literal["whole", "row", "column", "one"]
REDUCTIONS = {"sum", "mean", "amax", "amin", "var"}
SAME_ORDER = {"view", "expand"}  # of row-major order; what is expanded is read where it is needed


class NotOneNest(InputError):
    """The graph is more than one loop nest, or has work that no loop is generated for yet."""


def refusal(node: Node | None, what: str) -> NotOneNest:
    """Return the error that names the line of the user's file."""
    where = f"line {node.line}: " if node is not None and node.line else ""
    expected = "pointwise work and reductions over neighbouring dimensions"
    return NotOneNest(f"{where}{what}\n  expected: {expected}")


@dataclass(frozen=True, slots=True)
class Space:
    """The shapes of the rows, outer and inner, and of the columns between them."""

    outer: tuple[int, ...]
    columns: tuple[int, ...]
    inner: tuple[int, ...] = ()

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The dimensions of the rows, in the order of their indices."""
        return (*self.outer, *self.inner)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return math.prod(self.row_shape)

    @property
    def cols(self) -> int:
        """How many columns there are."""
        return math.prod(self.columns)

    def place_of(self, shape: tuple[int, ...], node: Node | None) -> tuple[Place, tuple[int, ...]]:
        """Return how a tensor of that shape lies here; of one for each row, its strides there.

        Raises:
            NotOneNest: it does not.
        """
        num, whole = math.prod(shape), (*self.outer, *self.columns, *self.inner)
        if num == 1:
            return "one", ()
        if num == self.rows * self.cols:
            return "whole", ()
        own = aligned(shape, whole)
        if len(own) == len(whole):
            end = len(self.outer) + len(self.columns)
            rows = (*own[: len(self.outer)], *own[end:])
            columns = own[len(self.outer) : end]
            if columns == self.columns and math.prod(rows) == 1:
                return "column", ()
            if math.prod(columns) == 1:
                return "row", strides(rows)
        if num == self.rows:  # of a reduction without keepdim
            return "row", strides(self.row_shape)
        raise refusal(node, f"a tensor of shape {list(shape)} beside {list(whole)}")

    def is_spread(self, shape: tuple[int, ...]) -> bool:
        """Whether broadcasting spreads a tensor of that shape over the columns."""
        own = aligned(shape, (*self.outer, *self.columns, *self.inner))
        end = len(self.outer) + len(self.columns)
        return math.prod(own[len(self.outer) : end]) == 1


def space_of(graph: Graph, users: Mapping[str, Sequence[Node]]) -> Space:
    """Return the space of a graph's loops.

    Raises:
        NotOneNest: there is none.
    """
    for node in graph.nodes:
        if node.op in REDUCTIONS:
            shape = graph.value(name_of(node.args[0])).shape
            axes = axes_of(node, len(shape))
            first, end = axes[0], axes[-1] + 1
            if axes != tuple(range(first, end)):
                raise refusal(node, f"{node.op} over the dimensions {axes}")
            if len(axes) == len(shape):
                raise refusal(node, f"{node.op} over all of a tensor")
            return Space(shape[:first], shape[first:end], shape[end:])
    shape = max((n.shape for n in graph.nodes), key=math.prod, default=())
    if not shape:
        raise refusal(None, "nothing is computed")
    return _without_reductions(graph, users, shape)


def _without_reductions(
    graph: Graph, users: Mapping[str, Sequence[Node]], shape: tuple[int, ...]
) -> Space:
    """Split so that in the columns every tensor is whole or has one value."""
    shapes = [s for t in graph.given for s in shapes_of(users, t.name, t.shape)]
    shapes += [n.shape for n in graph.nodes if n.op not in SAME_ORDER]
    # Rows where there are any: another number of them is the same loop.
    for at in [*range(1, len(shape)), 0]:
        size = math.prod(shape[at:])
        ends = [aligned(other, shape)[at:] for other in shapes]
        if all(math.prod(end) in (1, size) for end in ends):
            return Space(shape[:at], shape[at:])
    return Space(shape[:-1], shape[-1:])


def shapes_of(
    users: Mapping[str, Sequence[Node]], name: str, shape: tuple[int, ...]
) -> set[tuple[int, ...]]:
    """Return the shapes in which a value takes part, through views of it.

    What is expanded takes part in the shape that it had before.
    """
    found: set[tuple[int, ...]] = set()
    for node in users[name]:
        if node.op == "view":
            found |= shapes_of(users, node.name, node.shape)
        elif node.op == "expand":
            found |= shapes_of(users, node.name, shape)
        else:
            found.add(shape)
    return found or {shape}


def name_of(operand: Operand) -> str:
    """Return the name of a value that an operand refers to."""
    assert isinstance(operand, Ref), operand
    return operand.name


def axes_of(node: Node, ndim: int) -> tuple[int, ...]:
    """Return the dimensions that a reduction is over, in order."""
    given = node.attrs.get("axes")
    axes = given if isinstance(given, list) and given else range(ndim)
    return tuple(sorted(int(str(axis)) % ndim for axis in axes))


def aligned(shape: tuple[int, ...], space: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape as it broadcasts: with ones in front."""
    return (1,) * (len(space) - len(shape)) + shape


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return contiguous strides, 0 where the size is 1."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step if size > 1 else 0)
        step *= size
    return tuple(reversed(found))
