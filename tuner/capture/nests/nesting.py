"""Nodes of a graph as one loop nest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tuner.capture.graph.graph import Graph, Node, Operand, Ref, Tensor, in_order
from tuner.capture.nests.batch_numbers import as_float
from tuner.capture.nests.index_space import (
    REDUCTIONS,
    SAME_ORDER,
    name_of,
    refusal,
    space_of,
)
from tuner.capture.nests.means import write_about_means
from tuner.capture.nests.mixtures import refuse_inexact, refuse_mixtures, refuse_unread
from tuner.capture.nests.nest import COLUMN, Nest, Output, Pass, Reduction, Statement, Tap
from tuner.capture.nests.operations import OPERATIONS, Kind, operation_of, simpler
from tuner.capture.nests.precision import EXACT, computed_in, rounding_of, stored_as
from tuner.capture.nests.ranges import with_ranges_read
from tuner.capture.nests.scans import scan_of
from tuner.capture.nests.space import Space
from tuner.capture.nests.viewing import is_given_otherwise, is_same, real_name, views_read
from tuner.capture.nests.windows import tap_of

__all__ = ["nest_of"]


def nest_of(
    graph: Graph,
    nodes: Sequence[Node],
    wanted: Mapping[str, str],
    images: Collection[str] = (),
    *,
    is_apart: bool = False,
    memory: Mapping[str, str] | None = None,
) -> Nest:
    """Return nodes of a graph as one nest.

    Args:
        graph: that they are of.
        nodes: in order, without views.
        wanted: which values are stored, by their own names, and as which dtype.
        images: those that lie channels last in memory, where they are read or stored.
        is_apart: whether it may not both reduce and store what that gives for all columns.
        memory: dtypes of what lies in memory between tasks, by name, where it is not that of
            `stored_as`.

    Raises:
        NotOneNest: it names the line of the user's file and the operation.
    """
    nodes = with_ranges_read(graph, nodes)
    return _Builder(graph, nodes, wanted, images, memory or {}).build(is_apart=is_apart)


class _Builder:
    def __init__(
        self,
        graph: Graph,
        nodes: Sequence[Node],
        wanted: Mapping[str, str],
        images: Collection[str],
        memory: Mapping[str, str],
    ) -> None:
        self.graph, self.memory = graph, memory
        self.nodes = [n for n in nodes if not is_same(graph, n)]
        self.wanted, self.kinds = wanted, dict[str, Kind]()
        self.numbers: dict[str, float] = {}  # what is one number everywhere
        self.levels: dict[str, int] = {COLUMN: 0}
        self.statements: dict[str, Statement] = {}
        self.reductions: dict[str, Reduction] = {}
        self.is_about_means: set[str] = set()  # of what a variance is asked
        self.order: list[str] = []
        self.flops = 0
        self.at: Node | None = None
        self.precision = computed_in(graph)
        self.taps, self.parts = dict[str, Tap](), dict[str, str]()
        own = {n.name for n in nodes}
        refuse_mixtures(nodes, lambda name: real_name(graph, name))
        views = views_read(graph, nodes)
        self.last = self._last(images)
        if self.last:  # a nest cut from another one takes its dimensions, as of groups of channels
            every_view = [n for n in graph.nodes if n.op == "view"]
            known = self.last | own
            views |= {n.name: n for n in every_view if real_name(graph, n.name) in known}
        every = {n.name for n in self.nodes} | views.keys() | own
        in_order = [n for n in graph.nodes if n.name in every]
        for node in in_order:
            if node.op == "full" and not isinstance(node.args[0], Ref):
                self.numbers[node.name] = as_float(node.args[0])
        numbers = [t for t in graph.given if isinstance(t.value, int | float)]
        self.numbers |= {t.name: as_float(t.value) for t in numbers}  # type: ignore[arg-type]
        in_order = [n for n in in_order if n.name not in self.numbers]
        self.indices = tuple(n.name for n in in_order if n.op == "index")
        self.levels |= dict.fromkeys(self.indices, 0)
        self.space = space_of(graph, in_order, self.numbers, self.last)
        self.varies = dict(self.space.varies)
        self.varies[COLUMN] = self.space.columns
        self.cols = self.space.cols
        # A value has all dimensions over which some view of it varies.
        for node in in_order:
            if node.op in SAME_ORDER or is_same(graph, node):
                real = real_name(graph, node.name)
                num = math.prod(graph.value(real).shape)
                if math.prod(node.shape) != num:
                    continue  # it is spread
                dims = self.varies[node.name] | self.varies.get(real, frozenset())
                if self.space.count(dims) != num:
                    raise refusal(node, f"{real} is used in several shapes")
                self.varies[real] = dims

    def _last(self, images: Collection[str]) -> set[str]:
        """Return which of what is read and stored lies channels last; of windows each read."""
        own = {n.name for n in self.nodes}
        found = {name for name in self.wanted if name in own and name in images}
        for node in self.nodes:
            read = {real_name(self.graph, ref) for ref in node.refs} & {*images}
            found |= {node.name} if read and node.op == "tap" else read - own
        if found and any(node.op == "scan" for node in self.nodes):
            raise refusal(None, "a scan beside images that lie channels last")
        return found

    # ---- nodes --------------------------------------------------------------------------------

    def build(self, *, is_apart: bool) -> Nest:
        own = {n.name for n in self.nodes}
        known = own.union(self.numbers, self.indices)
        used: dict[str, Node] = {}
        for node in self.nodes:
            for real in (real_name(self.graph, name) for name in node.refs):
                if real not in known:
                    used.setdefault(real, node)
        arguments = []
        everything: tuple[Tensor | Node, ...] = (*self.graph.given, *self.graph.nodes)
        for value in everything:
            if value.name not in used:
                continue
            user = used[value.name]
            refuse_unread(user, value, self.precision)
            dtype = self.memory.get(value.name, stored_as(value))
            arguments.append(Tensor(value.name, value.shape, dtype))
            self.levels[value.name] = 0
        for node in self.nodes:
            self.at = node
            self._take(node)
        write_about_means(self.statements, self.order, self._add)
        outputs = []
        for name, dtype in self.wanted.items():
            if name not in own:
                continue
            node = next(n for n in self.nodes if n.name == name)
            count = math.prod(node.shape)
            if count != self.space.count(self.varies[name]):
                if self.space.count(range(len(self.space.sizes))) != count:
                    raise refusal(node, "a result that is the same number many times")
                self._spread(name)
            outputs.append(Output(name, dtype, count))
        space = replace(self.space, varies=self.varies)
        sources = [tap.source for tap in self.taps.values()]
        for source in (*sources, *self.parts.values()):  # which are read as a whole
            self.varies.setdefault(source, self.space.columns)
        if self.reductions:
            self._require_order(space, outputs, is_apart=is_apart)
        before = self._of_rows(self._needed([o.name for o in outputs]), 0)
        return Nest(
            space, tuple(arguments), tuple(before), tuple(self._passes(outputs)), tuple(outputs),
            self.flops, self.kinds, self.taps, self.precision, self.indices, self.parts,
        )  # fmt: skip

    def _spread(self, name: str) -> None:
        """Compute a value at each place, and what is computed of it."""
        self.varies[name] = frozenset(range(len(self.space.sizes)))
        if any(name == reduction.value for reduction in self.reductions.values()):
            raise refusal(self.at, f"{name}, which is stored and reduced")
        for user in [s for s in self.statements.values() if name in s.refs]:
            if self.varies[user.name] != self.varies[name]:
                if user.name in self.wanted:
                    raise refusal(self.at, f"{name}, which is stored, and {user.name}")
                self._spread(user.name)

    def _require_order(self, space: Space, outputs: Sequence[Output], *, is_apart: bool) -> None:
        """Refuse to store in another order of columns than that in which they are read."""
        for output in outputs:
            is_behind = is_apart and self._is_inner(output.name) and self.levels[output.name]
            if not is_behind and not space.is_moved(output.name, space.columns):
                continue
            behind = [n for n in self.nodes if self.levels.get(n.name) and self._is_inner(n.name)]
            node = next(iter(behind), self.graph.value(output.name))
            assert isinstance(node, Node)
            raise refusal(node, f"{output.name} is stored apart from what is reduced")

    def _is_inner(self, name: str) -> bool:
        return bool(self.varies[name] & self.space.columns)

    def _take(self, node: Node) -> None:
        if node.op in REDUCTIONS:
            self._reduce(node)
            return
        if node.op == "gather":
            self._gather(node)
            return
        if node.op == "placed":
            self._place(node)
            return
        if node.op == "scan":
            self._scan(node)
            return
        if node.op == "tap":
            self._read(node)
            return
        if node.op == "cast" and node.dtype == "bool":
            self._add(node.name, "ne", (self._operand(node.args[0]), 0.0))
            return
        rounded = rounding_of(self.graph, node) if node.op == "cast" else None
        if rounded is not None:
            refuse_inexact(self.graph, node, self.numbers, self.precision)
            self._add(node.name, f"as_{rounded}", (self._operand(node.args[0]),))
            return
        is_made = is_given_otherwise(self.graph, node)
        if is_made or (node.op == "cast" and node.dtype == "int64"):
            self._add(node.name, "trunc", (self._operand(node.args[0]),))
            return
        op, own = simpler(node.op, node.args)
        if op == "permuted":  # what is loaded stays where it is
            op, own = "mul", (*own, 1.0)
        operation = OPERATIONS.get(op)
        if operation is None:
            raise refusal(node, f"no loop is generated for {node.op} yet")
        refuse_inexact(self.graph, node, self.numbers, self.precision)
        given = [self._operand(a) for a in own]
        operands = tuple(given[: operation.arity])
        constants = given[operation.arity :]
        if any(isinstance(constant, str) for constant in constants):
            raise refusal(node, f"{node.op} with a tensor where a number is expected")
        attrs = dict(zip(operation.attributes, constants, strict=False))
        self._add(node.name, op, operands, attrs)
        self.flops += operation.flop * math.prod(node.shape)

    def _read(self, node: Node) -> None:
        source, is_last = real_name(self.graph, node.refs[0]), node.name in self.last
        self.levels[node.name] = 0
        if node.name in self.space.parts:
            self.parts[node.name] = source
        elif not self.space.varies[node.name] & self.space.columns:  # loops read along columns
            raise refusal(node, "what is the same in all columns is read from elsewhere")
        else:
            self.taps[node.name] = tap_of(self.graph, node, source, is_last=is_last)

    def _operand(self, operand: Operand) -> str | float | bool:
        if not isinstance(operand, Ref):
            return operand
        if operand.name in self.numbers:
            return self.numbers[operand.name]
        name = real_name(self.graph, operand.name)
        if name in self.reductions and self.reductions[name].is_index:
            raise refusal(self.at, f"{name}, which is a place, is computed with")
        return self.numbers.get(name, name)

    def _add(
        self,
        name: str,
        op: str,
        operands: tuple[str | float | bool, ...],
        attrs: Mapping[str, object] | None = None,
    ) -> None:
        names = [o for o in operands if isinstance(o, str)]
        self.statements[name] = Statement(name, op, operands, attrs or {})
        gives = operation_of(op).gives
        if gives != "float":
            self.kinds[name] = gives
        self.varies[name] = frozenset[int]().union(*(self.varies[n] for n in names))
        self.levels[name] = max((self.levels[n] for n in names), default=0)
        self.order.append(name)

    def _reduce(self, node: Node) -> None:
        source = self._operand(node.args[0])
        if not isinstance(source, str):
            raise refusal(node, f"{node.op} of a number")
        shape = self.graph.value(name_of(node.args[0])).shape
        self.flops += math.prod(shape) * (4 if node.op == "var" else 1)
        if node.op in ("argmax", "argmin", "amax", "amin", "sum"):
            if (
                node.dtype == "int64"
                and node.op == "sum"
                and (
                    (self.kinds.get(source) != "mask" and source in self.statements)
                    or self.cols > EXACT
                )
            ):
                raise refusal(node, "a sum of whole numbers")
            self._hold(Reduction(node.name, node.op, source))  # type: ignore[arg-type]
            return
        mean = node.name if node.op == "mean" else f"{node.name}_mean"
        found = self._divided(mean, source, 0.0)
        if node.op == "var":
            same = (r for r in self.reductions.values() if replace(r, name=mean) == found)
            mean = next((r.name for r in same), mean)
        if mean not in self.reductions:
            self._hold(found)
        if node.op == "var":
            self.is_about_means.add(source)
            # About the mean, in a pass of its own: sums of squares cancel.
            apart, squared = f"{node.name}_apart", f"{node.name}_squared"
            self._add(apart, "sub", (source, mean))
            self._add(squared, "square", (apart,))
            correction = float(str(node.attrs.get("correction", 1)))
            self._hold(self._divided(node.name, squared, correction))

    def _divided(self, name: str, source: str, less: float) -> Reduction:
        """Return a sum over the columns that is divided by their number, less so many."""
        divisor = self.cols - less
        scale = 1.0 / divisor if divisor > 0 else math.nan
        is_of_batch = self.space.rows == 1 or 0 in self.space.columns
        return Reduction(name, "sum", source, scale, is_mean=is_of_batch, less=less)

    def _gather(self, node: Node) -> None:
        """Of one place in each row: what lies there, with zeros elsewhere, summed."""
        source = self._operand(node.args[0])
        if not isinstance(source, str) or not self._is_inner(source):
            raise refusal(node, "gather of several places a row")
        self._is_at(node, node.args[1], self.graph.value(name_of(node.args[0])).shape)
        if node.shape[int(str(node.attrs["axis"]))] != 1:
            raise refusal(node, "gather of several places a row")
        self._add(f"{node.name}_picked", "where", (f"{node.name}_is_it", source, 0.0))
        self._hold(Reduction(node.name, "sum", f"{node.name}_picked"))

    def _place(self, node: Node) -> None:
        """Write one number of each row, with zeros elsewhere."""
        self._is_at(node, node.args[0], node.shape)
        number = float(str(node.attrs["value"]))
        self._add(node.name, "where", (f"{node.name}_is_it", number, 0.0))

    def _is_at(self, node: Node, place: Operand, shape: Sequence[int]) -> None:
        """Compute whether a column is the place that a row asks for."""
        index, size = self._operand(place), shape[int(str(node.attrs["axis"]))]
        if not isinstance(index, str) or self._is_inner(index):
            raise refusal(node, f"{node.op} of several places a row")
        if size != self.cols or size > EXACT:
            raise refusal(node, f"{node.op} over {size} of {self.cols} columns")
        self._add(f"{node.name}_is_it", "eq", (COLUMN, index))

    def _scan(self, node: Node) -> None:
        scan = scan_of(node, self._operand(node.args[0]))
        self.statements[node.name] = scan
        self.varies[node.name] = self.space.columns.union(*(self.varies[n] for n in scan.refs))
        self.levels[node.name] = 0
        self.order.append(node.name)
        self.flops += math.prod(node.shape)

    def _hold(self, reduction: Reduction) -> None:
        name, source = reduction.name, reduction.value
        self.reductions[name] = reduction
        self.varies[name] = self.varies[source] - self.space.columns
        self.levels[name] = self.levels[source] + 1

    # ---- passes -------------------------------------------------------------------------------

    def _passes(self, outputs: Sequence[Output]) -> list[Pass]:
        needed = self._needed([o.name for o in outputs])
        for name, found in self.reductions.items():
            is_wide = found.scale != 1.0 and found.value in self.is_about_means
            self.reductions[name] = replace(found, is_wide=is_wide)
        reductions = [r for name, r in self.reductions.items() if name in needed]
        inner = [o for o in outputs if self._is_inner(o.name)]
        levels = [
            self.levels[n] for n in (*(r.value for r in reductions), *(o.name for o in inner))
        ]
        passes = []
        for number in range(max(levels, default=-1) + 1):
            ends = [r for r in reductions if self.levels[r.value] == number]
            writes = [o for o in inner if self.levels[o.name] == number]
            wanted = self._needed([*(r.value for r in ends), *(o.name for o in writes)])
            own = [self.statements[n] for n in self.order if n in wanted]
            after = self._of_rows(needed, number + 1)
            passes.append(Pass([s for s in own if self._is_inner(s.name)], ends, writes, after))
        return passes

    def _of_rows(self, needed: set[str], level: int) -> list[Statement]:
        """Return what is computed once a row when all passes below that level are over."""
        own = [self.statements[n] for n in self.order if n in needed and self.levels[n] == level]
        return [s for s in own if not self._is_inner(s.name)]

    def _needed(self, ends: Sequence[str]) -> set[str]:
        def needs(name: str) -> list[str]:
            step = self.statements.get(name) or self.reductions.get(name)
            return [] if step is None else step.refs

        return set(in_order(ends, needs))
