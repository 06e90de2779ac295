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
from tuner.capture.operations import OPERATIONS
from tuner.errors import InputError

__all__ = ["Nest", "NotOneNest", "Pass", "Place", "Reduction", "Statement", "nest_of"]

Place = Literal["whole", "row", "column", "one"]
Fold = Literal["sum", "amax", "amin"]
_REDUCTIONS = {"sum", "mean", "amax", "amin", "var"}
_SAME_ORDER = {"view", "expand"}  # of row-major order; what is expanded is read where it is needed


class NotOneNest(InputError):
    """The graph is more than one loop nest, or has work that no loop is generated for yet."""


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


def nest_of(graph: Graph) -> Nest:
    """Return a graph as one nest.

    Raises:
        NotOneNest: it names the line of the user's file and the operation.
    """
    if graph.buffer_updates:
        name = next(iter(graph.buffer_updates))
        raise _refusal(None, f"the buffer {name} is updated by the call", "--mode eval")
    return _Builder(graph).build()


def _refusal(node: Node | None, what: str, next_step: str = "") -> NotOneNest:
    where = f"line {node.line}: " if node is not None and node.line else ""
    text = f"{where}{what}\n  expected: pointwise work and reductions over the last dimensions"
    return NotOneNest(text + (f"\n  next: {next_step}" if next_step else ""))


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
        self.row_shape, self.col_shape = self._space()
        self.rows, self.cols = math.prod(self.row_shape), math.prod(self.col_shape)

    # ---- the space ----------------------------------------------------------------------------

    def _space(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the rows and of the columns."""
        for node in self.graph.nodes:
            if node.op in _REDUCTIONS:
                source = self.graph.value(_name(node.args[0]))
                axes = _axes(node, len(source.shape))
                first = len(source.shape) - len(axes)
                if axes != tuple(range(first, len(source.shape))):
                    raise _refusal(node, f"{node.op} over the dimensions {axes}")
                if not first:
                    raise _refusal(node, f"{node.op} over all of a tensor")
                return source.shape[:first], source.shape[first:]
        shape = max((n.shape for n in self.graph.nodes), key=math.prod, default=())
        if not shape:
            raise _refusal(None, "nothing is computed")
        return self._without_reductions(shape)

    def _without_reductions(
        self, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split so that in the columns every tensor is whole or has one value."""
        shapes = [s for t in self.graph.given for s in self._shapes_of(t.name, t.shape)]
        shapes += [n.shape for n in self.graph.nodes if n.op not in _SAME_ORDER]
        # Rows where there are any: another number of them is the same loop.
        for at in [*range(1, len(shape)), 0]:
            size = math.prod(shape[at:])
            ends = [_aligned(other, shape)[at:] for other in shapes]
            if all(math.prod(end) in (1, size) for end in ends):
                return shape[:at], shape[at:]
        return shape[:-1], shape[-1:]

    def _shapes_of(self, name: str, shape: tuple[int, ...]) -> set[tuple[int, ...]]:
        """Return the shapes in which a value takes part, through views of it.

        What is expanded takes part in the shape that it had before.
        """
        found: set[tuple[int, ...]] = set()
        for node in self.users[name]:
            if node.op == "view":
                found |= self._shapes_of(node.name, node.shape)
            elif node.op == "expand":
                found |= self._shapes_of(node.name, shape)
            else:
                found.add(shape)
        return found or {shape}

    def place_of(self, name: str, shape: tuple[int, ...], node: Node | None) -> Place:
        """Return how a value lies in the space; note the strides of one for each row."""
        num, space = math.prod(shape), (*self.row_shape, *self.col_shape)
        if num == 1:
            return "one"
        if num == self.rows * self.cols:
            return "whole"
        aligned = _aligned(shape, space)
        if len(aligned) == len(space):
            own_rows, own_cols = aligned[: len(self.row_shape)], aligned[len(self.row_shape) :]
            if own_cols == self.col_shape and math.prod(own_rows) == 1:
                return "column"
            if math.prod(own_cols) == 1:
                self.row_strides[name] = _strides(own_rows)
                return "row"
        if num == self.rows:  # of a reduction without keepdim
            self.row_strides[name] = _strides(self.row_shape)
            return "row"
        raise _refusal(node, f"a tensor of shape {list(shape)} beside {list(space)}")

    # ---- nodes --------------------------------------------------------------------------------

    def build(self) -> Nest:
        arguments: list[tuple[Tensor, Place]] = []
        used = {_name(a) for n in self.graph.nodes for a in n.args if isinstance(a, Ref)}
        for tensor in self.graph.given:
            if tensor.name not in used and tensor.name not in self.graph.outputs:
                continue
            if isinstance(tensor.value, int | float):
                self.numbers[tensor.name] = float(tensor.value)
                continue
            if tensor.value is not None:
                raise _refusal(None, f"the constant {tensor.name} has several values")
            if tensor.dtype != "float32":
                raise _refusal(None, f"{tensor.name} is {tensor.dtype}, float32 alone is read")
            shapes = sorted(self._shapes_of(tensor.name, tensor.shape))
            if len({self.place_of(tensor.name, shape, None) for shape in shapes}) > 1:
                raise _refusal(None, f"{tensor.name} is used in several shapes")
            place = self.place_of(tensor.name, shapes[0], None)
            self.places[tensor.name], self.levels[tensor.name] = place, 0
            arguments.append((tensor, place))
        for node in self.graph.nodes:
            self._take(node)
        outputs: list[tuple[str, Place]] = []
        for name in self.graph.outputs:
            real = self._real(name)
            if real not in self.statements and real not in self.reductions:
                raise _refusal(None, f"the output {name} is an input as it is")
            if self.places[real] not in ("whole", "row"):
                raise _refusal(None, f"the output {name} has one value a {self.places[real]}")
            outputs.append((real, self.places[real]))
        names = [name for name, _ in outputs]
        return Nest(
            self.rows, self.cols, self.row_shape, tuple(arguments),
            tuple(self._of_rows(self._needed(names), 0)), tuple(self._passes(names)),
            tuple(outputs), self.flops, self.row_strides,
        )  # fmt: skip

    def _real(self, name: str) -> str:
        while name in self.alias:
            name = self.alias[name]
        return name

    def _take(self, node: Node) -> None:
        if node.op in _SAME_ORDER:
            self.alias[node.name] = self._real(_name(node.args[0]))
            return
        if node.op in _REDUCTIONS:
            self._reduce(node)
            return
        if node.op == "full" and not isinstance(node.args[0], Ref):
            self.numbers[node.name] = float(node.args[0])
            return
        op, own = _simpler(node)
        operation = OPERATIONS.get(op)
        if operation is None:
            raise _refusal(node, f"no loop is generated for {node.op} yet")
        if node.dtype not in ("float32", "bool"):
            raise _refusal(node, f"{node.op} gives {node.dtype}, float32 alone is computed")
        given = [self._operand(a) for a in own]
        operands = tuple(given[: operation.arity])
        constants = given[operation.arity :]
        if any(isinstance(constant, str) for constant in constants):
            raise _refusal(node, f"{node.op} with a tensor where a number is expected")
        attrs = dict(zip(operation.attributes, constants, strict=False))
        names = [o for o in operands if isinstance(o, str)]
        place = self.place_of(node.name, node.shape, node)
        self._add(Statement(node.name, op, operands, attrs, place), names)
        self.flops += operation.flop * math.prod(node.shape)

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
        source = self._real(_name(node.args[0]))
        shape = self.graph.value(_name(node.args[0])).shape
        axes = _axes(node, len(shape))
        size = math.prod(shape[a] for a in axes)
        if self.places[source] != "whole" or size != self.cols:
            raise _refusal(node, f"a second kind of {node.op}, over {size} elements")
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


def _name(operand: Operand) -> str:
    assert isinstance(operand, Ref), operand
    return operand.name


def _fold(op: str) -> Fold:
    return "amax" if op == "amax" else "amin"


def _axes(node: Node, ndim: int) -> tuple[int, ...]:
    given = node.attrs.get("axes")
    axes = given if isinstance(given, list) and given else range(ndim)
    return tuple(sorted(int(str(axis)) % ndim for axis in axes))


def _aligned(shape: tuple[int, ...], space: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape as it broadcasts: with ones in front."""
    return (1,) * (len(space) - len(shape)) + shape


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return contiguous strides, 0 where the size is 1."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step if size > 1 else 0)
        step *= size
    return tuple(reversed(strides))
