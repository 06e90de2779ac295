"""Slices, and what is padded, enlarged or joined, read where it lies by the work that needs it.

In place of a copy that a call of PyTorch's makes there are taps (`windows`), one for each part
that is joined, and the number of an element along the axis says which of them counts. So of two
halves of which one is multiplied by a function of the other, of halves that change places, and of
images that are enlarged. Functions of few numbers, which many elements are computed with, are
computed once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from pydantic import JsonValue

from tuner.capture.graph.graph import Graph, Node, Operand, Ref, free_name
from tuner.capture.nests.index_space import OVER_COLUMNS, REDUCTIONS, SAME_ORDER
from tuner.capture.nests.nest import Axis
from tuner.capture.nests.operations import OPERATIONS, operation_of
from tuner.capture.nests.precision import FLOATS
from tuner.capture.nests.viewing import is_read_by, real_name
from tuner.capture.nests.windows import is_spread, sliced_from

__all__ = ["costly_of_few", "with_parts_in_place"]

COSTLY_FLOP = 20  # of what is computed of few numbers, as of a sine: then it is stored
FEW = 8  # times as many elements read it
MOST_PARTS = 4  # that are joined: each is computed for all elements
# What costs little beside the read: it is computed again for elements that another part gives.
_NEAREST = {f"aten.upsample_nearest{n}d" for n in (1, 2, 3)}
_EXACT = (1, 2, 4, 8)  # times as large: of others PyTorch rounds where an element comes from
_MOVES = {"slice", "cat", "pad", "flip", *_NEAREST}
_OF_NESTS = {*OPERATIONS, "cast", "permuted"}
_OF_ANY = _OF_NESTS | REDUCTIONS
_CHEAP = {"neg", "abs", "add", "sub", "mul", "maximum", "minimum", "relu", "where"}


def with_parts_in_place(graph: Graph) -> Graph:
    """Return the graph with taps in place of moves that only nests read.

    Args:
        graph: of the module, before ranges are indices.
    """
    results = {*graph.outputs, *graph.buffer_updates.values()}
    taken = {t.name for t in graph.given} | {n.name for n in graph.nodes}
    nodes: list[Node] = []
    for node in graph.nodes:
        made: list[Node] = []
        is_float = node.op in _MOVES and node.dtype in FLOATS
        if is_float and _is_of_nests(graph, node, results):
            made = _Parts(graph, node, results, taken).nodes()
        nodes += made or [node]
    return replace(graph, nodes=tuple(nodes))


def _is_of_nests(graph: Graph, node: Node, results: Collection[str]) -> bool:
    """Whether only work of nests reads what a node moves, as it is or seen in another way.

    What a norm or a reduction reads is read more than once: of what is moved slices alone, of
    which that is as quick as of what they are of.
    """
    ops = _OF_ANY if node.op == "slice" else _OF_NESTS
    return is_read_by(graph, node.name, ops, results, SAME_ORDER | _MOVES)


def costly_of_few(graph: Graph, nodes: Sequence[Node]) -> set[str]:
    """Return what is better computed once and stored than for each element that reads it.

    So of sines of places and numbers, which each row of a batch is multiplied by. What follows
    from a reduction is of its nest, which computes it once for a row.

    Args:
        graph: that the nodes are of.
        nodes: without views, in order.
    """
    flop: dict[str, int] = {}  # of what is of few numbers, and all before it
    reduced = {node.name for node in nodes if node.op in OVER_COLUMNS}
    found: set[str] = set()
    own = {node.name for node in nodes}
    for node in nodes:
        refs = {real_name(graph, ref) for ref in node.refs}
        if refs & reduced:
            reduced.add(node.name)
        if node.op not in OPERATIONS or node.dtype not in FLOATS or node.name in reduced:
            continue
        flop[node.name] = operation_of(node.op).flop + sum(flop.get(ref, 0) for ref in refs)
        readers = _readers(graph, node.name)
        num = math.prod(node.shape)
        is_few = all(r.name in own and math.prod(r.shape) >= FEW * num for r in readers)
        is_row = node.shape[-1:] in ((), (1,))  # of which there is one for all columns
        if readers and is_few and not is_row and flop[node.name] >= COSTLY_FLOP:
            found.add(node.name)
    return found


def _readers(graph: Graph, name: str) -> list[Node]:
    """Return what reads a value, as it is or seen in another way."""
    found: list[Node] = []
    for user in graph.users[name]:
        found += _readers(graph, user.name) if user.op in SAME_ORDER else [user]
    return found


@dataclass(frozen=True, slots=True)
class _Way:
    """Where places along an axis come from: p from `(p * step + first) // every`."""

    step: int = 1
    first: int = 0
    every: int = 1


@dataclass(slots=True)
class _Parts:
    """The nodes that stand for a move; names that they take are noted."""

    graph: Graph
    node: Node
    results: Collection[str]
    taken: set[str]
    made: list[Node] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        """Return them, the last one under the node's name; none where it stays a call."""
        node = self.node
        if node.op == "cat":
            return self._joined()
        if node.op == "slice":
            self._at(Ref(node.name), [_Way() for _ in node.shape])
        elif (moved := self._moved()) is not None:
            self._tap(Ref(node.refs[0]), moved)
        if [made.op for made in self.made] != ["tap"]:
            return []
        # What is read is a value, which a nest can store for a later one.
        read = replace(node, op="mul", args=(Ref(self.made[0].name), 1.0), attrs={})
        return [*self.made, read]

    def _joined(self) -> list[Node]:
        node, ways = self.node, [_Way() for _ in self.node.shape]
        if not 2 <= len(node.args) <= MOST_PARTS or self._is_of_batch(_axis(node)):
            return []
        axis = _axis(node)
        shapes = [self.graph.value(a.name).shape if isinstance(a, Ref) else () for a in node.args]
        if any(len(shape) != len(node.shape) for shape in shapes):
            return []
        ends = [*accumulate(shape[axis] for shape in shapes)]
        parts = []
        for arg, end, shape in zip(node.args, ends, shapes, strict=True):
            own = list(ways)
            own[axis] = _Way(1, shape[axis] - end)
            part = self._at(arg, own)
            if part is None:
                return []
            parts.append(part)
        return [*self._chosen(axis, ends, parts)]

    def _moved(self) -> list[_Way] | None:
        """Return where the elements come from of what is padded with zeros, flipped or enlarged.

        None for other numbers than zeros, and where sizes are no exact multiples.
        """
        node, attrs = self.node, self.node.attrs
        if node.op == "pad":
            low = attrs["low"]
            if node.args[1] != 0 or not isinstance(low, list):
                return None
            return [_Way(1, -int(str(n))) for n in low]
        given = self.graph.value(node.refs[0]).shape
        if node.op == "flip":
            axes = attrs["axes"]
            assert isinstance(axes, list)
            return [_Way(-1, n - 1) if at in axes else _Way() for at, n in enumerate(given)]
        times = [size // has if has else 0 for size, has in zip(node.shape, given, strict=True)]
        asked = attrs.get("scale_factors")
        is_exact = asked is None or asked == [float(n) for n in times[2:]]
        is_whole = all(
            n in _EXACT and n * has == size
            for n, has, size in zip(times, given, node.shape, strict=True)
        )
        return [_Way(every=n) for n in times] if is_exact and is_whole else None

    def _chosen(self, axis: int, ends: list[int], parts: list[Operand]) -> Iterator[Node]:
        """Yield what was made, and which part each element is of, by its place along the axis."""
        node, length = self.node, self.node.shape[axis]
        yield from self.made
        place = replace(node, op="arange", args=(), attrs={"start": 0, "step": 1}, dtype="int64")
        place = replace(place, name=self._name("place"), shape=(length,))
        yield place
        if axis + 1 < len(node.shape):
            shape = (length, *[1] * (len(node.shape) - axis - 1))
            place = replace(
                place, name=self._name("places"), op="view", args=(Ref(place.name),), attrs={},
                shape=shape,
            )  # fmt: skip
            yield place
        found = parts[-1]
        for number in reversed(range(len(parts) - 1)):
            is_own = replace(
                place, name=self._name(f"is_{number}"), op="lt", attrs={},
                args=(Ref(place.name), ends[number]), dtype="bool",
            )  # fmt: skip
            name = self._name(f"from_{number}") if number else node.name
            args = (Ref(is_own.name), parts[number], found)
            yield is_own
            yield replace(node, name=name, op="where", args=args, attrs={})
            found = Ref(name)

    def _at(self, operand: Operand, ways: list[_Way]) -> Operand | None:
        """Return a value at the places that the axes come from; None where no tap can read it.

        What lies beyond its edges is any number: nothing chooses it.
        """
        if not isinstance(operand, Ref):
            return operand
        value = self.graph.value(operand.name)
        if isinstance(value, Node) and value.op == "slice":
            axis, way = _axis(value), ways[_axis(value)]
            if self._is_of_batch(axis):
                return None
            moved = _Way(*sliced_from(value, way.step, way.first))
            return self._at(value.args[0], [*ways[:axis], moved, *ways[axis + 1 :]])
        if isinstance(value, Node) and self._is_cheap(value):
            args: list[Operand] = []
            for arg in value.args:
                is_moved = isinstance(arg, Ref) and self.graph.value(arg.name).shape == value.shape
                found = self._at(arg, ways) if is_moved else arg
                if found is None:
                    return None
                args.append(found)
            return self._made("of", value, op=value.op, args=tuple(args), attrs=value.attrs)
        return self._tap(operand, ways)

    def _tap(self, source: Ref, ways: list[_Way]) -> Ref | None:
        value, made = self.graph.value(source.name), self.node.shape
        if value.dtype not in FLOATS or is_spread(self.graph, source.name):
            return None
        if isinstance(value, Node) and value.op in ("full", "arange", "cat"):
            return None
        axes = [
            (size, has, way.step, way.first, way.every, way.every)
            for size, has, way in zip(made, value.shape, ways, strict=True)
        ]
        own = [at for at, axis in enumerate(axes) if axis != (axis[0], axis[0], 1, 0, 1, 1)]
        if not own:
            return source
        if self._is_of_batch(own[0]):
            return None
        is_part = all(axis[4] == 1 and Axis(*axis).is_inside for axis in axes)
        attrs: dict[str, JsonValue] = {
            "axes": [list(axis) for axis in axes[own[0] :]],
            "kind": "inside" if is_part else "zeros",
        }
        return self._made("tap", value, op="tap", args=(source,), attrs=attrs)

    def _made(self, word: str, value: object, **fields: object) -> Ref:
        dtype = getattr(value, "dtype", self.node.dtype)
        found = replace(self.node, name=self._name(word), dtype=dtype, **fields)  # type: ignore[arg-type]
        self.made.append(found)
        return Ref(found.name)

    def _name(self, word: str) -> str:
        return free_name(f"{self.node.name}_{word}", self.taken)

    def _is_of_batch(self, axis: int) -> bool:
        return axis == 0 and self.graph.batch is not None

    def _is_cheap(self, value: Node) -> bool:
        """Whether a value is little work of floats of its own shape, and stored for nobody."""
        if value.op not in _CHEAP or value.name in self.results or value.dtype not in FLOATS:
            return False
        shapes = [self.graph.value(name).shape for name in value.refs]
        return (
            all(shape in (value.shape, ()) for shape in shapes)
            and len(self.graph.users[value.name]) == 1
        )


def _axis(node: Node) -> int:
    return int(str(node.attrs["axis"]))
