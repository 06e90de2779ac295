"""A graph as one loop nest over rows and columns: what each pass over a row computes.

    rows x cols     every tensor is whole (a value for each place), one value a row, one value a
                    column, or one value
    pass 0 .. p     sweeps over the columns of a row; a reduction over the columns ends a pass,
                    and what follows from it for the row is computed before the next one
    the last pass   writes what is whole

What is not whole is stored once a row. Tensors are contiguous, so that a view that keeps their
order changes nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tuner.capture.graph import Graph, Node, Operand, Ref, Tensor
from tuner.capture.index_space import (
    REDUCTIONS,
    SAME_ORDER,
    Place,
    axes_of,
    name_of,
    refusal,
    shapes_of,
    space_of,
)
from tuner.capture.operations import OPERATIONS

__all__ = ["Nest", "Pass", "Reduction", "Statement", "nest_of"]

Fold = Literal["sum", "amax", "amin"]


@dataclass(frozen=True, slots=True)
class Statement:
    """One operation on vectors of float32; operands are names of values, or numbers."""

    name: str
    op: str
    operands: tuple[str | float | bool, ...]
    attrs: Mapping[str, object]
    place: Place


@dataclass(frozen=True, slots=True)
class Reduction:
    """A value a row: `fold` over the columns of `value`."""

    name: str
    fold: Fold
    value: str


@dataclass(slots=True)
class Pass:
    """A sweep over the columns: what it computes, reduces and writes.

    `after` is computed once for the row when it is over.
    """

    statements: list[Statement] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    after: list[Statement] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Nest:
    """The loops of a graph.

    Attributes:
        rows, cols: the problem's own sizes; `row_shape` has the dimensions of the rows.
        arguments: what is read, in order, with its place.
        before: computed once a row, before the first pass.
        passes: in order; the last one has no reduction.
        outputs: what is written, by the name of the value, in the graph's order.
        row_strides: of values with one for each row, their strides in `row_shape`.
        inner: elements between two columns of a row: rows that lie behind the columns.
        num_outer: dimensions of the rows that lie before the columns.
    """

    rows: int
    cols: int
    row_shape: tuple[int, ...]
    arguments: tuple[tuple[Tensor, Place], ...]
    before: tuple[Statement, ...]
    passes: tuple[Pass, ...]
    outputs: tuple[tuple[str, Place], ...]
    flops: int
    row_strides: Mapping[str, tuple[int, ...]]
    inner: int = 1
    num_outer: int = 1


def nest_of(graph: Graph) -> Nest:
    """Return a graph as one nest.

    Raises:
        NotOneNest: it names the line of the user's file and the operation.
    """
    if graph.buffer_updates:
        name = next(iter(graph.buffer_updates))
        raise refusal(None, f"the buffer {name} is updated by the call")
    return _Builder(graph).build()


class _Builder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.users = graph.users()
        self.alias: dict[str, str] = {}
        self.numbers: dict[str, float] = {}  # what is one number everywhere
        self.places: dict[str, Place] = {}
        self.levels: dict[str, int] = {}
        self.statements: dict[str, Statement] = {}
        self.reductions: dict[str, Reduction] = {}
        self.order: list[str] = []
        self.row_strides: dict[str, tuple[int, ...]] = {}
        self.flops = 0
        self.space = space_of(graph, self.users)
        self.rows, self.cols = self.space.rows, self.space.cols

    def place_of(self, name: str, shape: tuple[int, ...], node: Node | None) -> Place:
        """Return how a value lies in the space; note the strides of one for each row."""
        place, strides = self.space.place_of(shape, node)
        if place == "row":
            self.row_strides[name] = strides
        return place

    # ---- nodes --------------------------------------------------------------------------------

    def build(self) -> Nest:
        arguments: list[tuple[Tensor, Place]] = []
        used = {name_of(a) for n in self.graph.nodes for a in n.args if isinstance(a, Ref)}
        for tensor in self.graph.given:
            if tensor.name not in used and tensor.name not in self.graph.outputs:
                continue
            if isinstance(tensor.value, int | float):
                self.numbers[tensor.name] = float(tensor.value)
                continue
            if tensor.value is not None:
                raise refusal(None, f"the constant {tensor.name} has several values")
            if tensor.dtype != "float32":
                raise refusal(None, f"{tensor.name} is {tensor.dtype}, float32 alone is read")
            shapes = sorted(shapes_of(self.users, tensor.name, tensor.shape))
            if len({self.place_of(tensor.name, shape, None) for shape in shapes}) > 1:
                raise refusal(None, f"{tensor.name} is used in several shapes")
            place = self.place_of(tensor.name, shapes[0], None)
            self.places[tensor.name], self.levels[tensor.name] = place, 0
            arguments.append((tensor, place))
        for node in self.graph.nodes:
            self._take(node)
        outputs: list[tuple[str, Place]] = []
        for name in self.graph.outputs:
            real = self._real(name)
            if real not in self.statements and real not in self.reductions:
                raise refusal(None, f"the output {name} is an input as it is")
            if self.places[real] not in ("whole", "row"):
                raise refusal(None, f"the output {name} has one value a {self.places[real]}")
            outputs.append((real, self.places[real]))
        names = [name for name, _ in outputs]
        return Nest(
            self.rows, self.cols, self.space.row_shape, tuple(arguments),
            tuple(self._of_rows(self._needed(names), 0)), tuple(self._passes(names)),
            tuple(outputs), self.flops, self.row_strides, math.prod(self.space.inner),
            len(self.space.outer),
        )  # fmt: skip

    def _real(self, name: str) -> str:
        while name in self.alias:
            name = self.alias[name]
        return name

    def _take(self, node: Node) -> None:
        if node.op in SAME_ORDER:
            self.alias[node.name] = self._real(name_of(node.args[0]))
            return
        if node.op in REDUCTIONS:
            self._reduce(node)
            return
        if node.op == "full" and not isinstance(node.args[0], Ref):
            self.numbers[node.name] = float(node.args[0])
            return
        op, own = _simpler(node)
        operation = OPERATIONS.get(op)
        if operation is None:
            raise refusal(node, f"no loop is generated for {node.op} yet")
        if node.dtype not in ("float32", "bool"):
            raise refusal(node, f"{node.op} gives {node.dtype}, float32 alone is computed")
        given = [self._operand(a) for a in own]
        operands = tuple(given[: operation.arity])
        constants = given[operation.arity :]
        if any(isinstance(constant, str) for constant in constants):
            raise refusal(node, f"{node.op} with a tensor where a number is expected")
        attrs = dict(zip(operation.attributes, constants, strict=False))
        names = [o for o in operands if isinstance(o, str)]
        place = self.place_of(node.name, node.shape, node)
        for operand in own[: operation.arity]:
            self._require_spread(operand, place, node)
        self._add(Statement(node.name, op, operands, attrs, place), names)
        self.flops += operation.flop * math.prod(node.shape)

    def _require_spread(self, operand: Operand, place: Place, node: Node) -> None:
        """Refuse one value for each row that is spread over the rows, not over the columns."""
        if place != "whole" or not isinstance(operand, Ref):
            return
        shape = self.graph.value(operand.name).shape
        if self.places.get(self._real(operand.name)) == "row" and not self.space.is_spread(shape):
            raise refusal(node, f"a tensor of shape {list(shape)}, one value a row, is spread")

    def _operand(self, operand: Operand) -> str | float | bool:
        if not isinstance(operand, Ref):
            return operand
        name = self._real(operand.name)
        return self.numbers.get(name, name)

    def _add(self, statement: Statement, names: Sequence[str]) -> None:
        self.statements[statement.name] = statement
        self.places[statement.name] = statement.place
        self.levels[statement.name] = max((self.levels[n] for n in names), default=0)
        self.order.append(statement.name)

    def _reduce(self, node: Node) -> None:
        source = self._real(name_of(node.args[0]))
        shape = self.graph.value(name_of(node.args[0])).shape
        axes = axes_of(node, len(shape))
        size = math.prod(shape[a] for a in axes)
        parts = shape[: axes[0]], shape[axes[0] : axes[-1] + 1], shape[axes[-1] + 1 :]
        space = self.space.outer, self.space.columns, self.space.inner
        is_same = [math.prod(part) for part in parts] == [math.prod(part) for part in space]
        if self.places[source] != "whole" or not is_same:
            raise refusal(node, f"a second kind of {node.op}, over {size} elements")
        self.flops += math.prod(shape) * (4 if node.op == "var" else 1)
        if node.op in ("sum", "amax", "amin"):
            self._fold(node.name, "sum" if node.op == "sum" else _fold(node.op), source)
            return
        mean = node.name if node.op == "mean" else f"{node.name}_mean"
        self._fold(f"{mean}_sum", "sum", source)
        self._row(mean, "mul", (f"{mean}_sum", 1.0 / self.cols))
        if node.op == "var":
            # About the mean, in a pass of its own: sums of squares cancel.
            whole: Place = "whole"
            apart, squared = f"{node.name}_apart", f"{node.name}_squared"
            self._add(Statement(apart, "sub", (source, mean), {}, whole), [source, mean])
            self._add(Statement(squared, "square", (apart,), {}, whole), [apart])
            self._fold(f"{node.name}_sum", "sum", squared)
            correction = float(str(node.attrs.get("correction", 1)))
            divisor = self.cols - correction
            scale = 1.0 / divisor if divisor > 0 else math.nan
            self._row(node.name, "mul", (f"{node.name}_sum", scale))

    def _fold(self, name: str, fold: Fold, source: str) -> None:
        self.reductions[name] = Reduction(name, fold, source)
        self.places[name] = "row"
        self.levels[name] = self.levels[source] + 1

    def _row(self, name: str, op: str, operands: tuple[str | float | bool, ...]) -> None:
        names = [o for o in operands if isinstance(o, str)]
        self._add(Statement(name, op, operands, {}, "row"), names)

    # ---- passes -------------------------------------------------------------------------------

    def _passes(self, outputs: Sequence[str]) -> list[Pass]:
        needed = self._needed(outputs)
        reductions = [r for name, r in self.reductions.items() if name in needed]
        whole = [o for o in dict.fromkeys(outputs) if self.places[o] == "whole"]
        levels = [self.levels[n] for n in (*(r.value for r in reductions), *whole)]
        passes = []
        for number in range(max(levels, default=-1) + 1):
            ends = [r for r in reductions if self.levels[r.value] == number]
            writes = [o for o in whole if self.levels[o] == number]
            wanted = self._needed([*(r.value for r in ends), *writes])
            own = [self.statements[n] for n in self.order if n in wanted]
            passes.append(
                Pass(
                    [s for s in own if s.place in ("whole", "column")],
                    ends,
                    writes,
                    self._of_rows(needed, number + 1),
                )
            )
        return passes

    def _of_rows(self, needed: set[str], level: int) -> list[Statement]:
        """Return what is computed once a row when all passes below that level are over."""
        own = [self.statements[n] for n in self.order if n in needed and self.levels[n] == level]
        return [s for s in own if s.place in ("row", "one")]

    def _needed(self, ends: Sequence[str]) -> set[str]:
        found: set[str] = set()
        left = list(ends)
        while left:
            name = left.pop()
            if name in found:
                continue
            found.add(name)
            if name in self.statements:
                left += [o for o in self.statements[name].operands if isinstance(o, str)]
            elif name in self.reductions:
                left.append(self.reductions[name].value)
        return found


_POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}


def _simpler(node: Node) -> tuple[str, tuple[Operand, ...]]:
    """Return an operation and its operands, of a power the one that PyTorch takes for it."""
    if node.op == "pow" and not isinstance(node.args[1], Ref) and node.args[1] in _POWERS:
        return _POWERS[node.args[1]], node.args[:1]
    return node.op, node.args


def _fold(op: str) -> Fold:
    return "amax" if op == "amax" else "amin"
