"""The space of the loops of some nodes: what each axis of each value stands for.

The space has the dimensions of the largest tensor, cut where some view of it is cut, without those
of size 1. Those that are reduced or scanned are columns, the others rows. A value keeps their
order, unless it stands on the other side of a permutation, a `permuted`; where images lie
channels last, the space has the order of these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence

from tuner.capture.graph.graph import Graph, Node, Operand, Ref, Tensor
from tuner.capture.nests.space import Space, part_of, with_loops
from tuner.errors import InputError

__all__ = [
    "ALIASES", "AS_INT64", "OVER_COLUMNS", "REDUCTIONS", "SAME_ORDER", "NotOneNest",
    "NothingToGenerate", "axes_of", "name_of", "refusal", "space_of", "viewed",
]  # fmt: skip

REDUCTIONS = {"sum", "mean", "amax", "amin", "var", "argmax", "argmin"}
OVER_COLUMNS = REDUCTIONS | {"scan"}
ALIASES = {"view", "permute", "expand", "slice"}  # of a tensor, without a copy of it
SAME_ORDER = {"view", "expand"}  # of row-major order; what is expanded is read where it is needed
Axes = list[tuple[int, ...] | None]  # of each axis its dimensions, None where that is not known


class NotOneNest(InputError):
    """The graph is more than one loop nest, or has work that no loop is generated for yet.

    `node` is what does not fit, None where that is no single one.
    """

    def __init__(self, message: str, node: Node | None = None) -> None:
        super().__init__(message)
        self.node = node


class NothingToGenerate(InputError):
    """The graph is nothing but calls of PyTorch's own operations."""


def viewed(graph: Graph, name: str) -> Tensor | Node:
    """Return the value whose memory a value lies in."""
    value = graph.value(name)
    while isinstance(value, Node) and value.op in ALIASES:
        value = graph.value(value.refs[0])
    return value


AS_INT64 = "give it int64, as x.long() makes it"
WORK = "pointwise work, reductions over some dimensions, calls of PyTorch's products"


def refusal(node: Node | None, what: str, expected: str = WORK, then: str = "") -> NotOneNest:
    """Return the error that names the line of the user's file, and what to do `then` if known."""
    where = f"line {node.line}: " if node is not None and node.line else ""
    advice = f"\n  next: {then}" if then else ""
    return NotOneNest(f"{where}{what}\n  expected: {expected}{advice}", node)


def space_of(
    graph: Graph,
    nodes: Sequence[Node],
    numbers: Container[str] = (),
    last: Collection[str] = (),
) -> Space:
    """Return the space of the loops of some nodes of a graph.

    Args:
        graph: that they are of.
        nodes: in order.
        numbers: values that are one number.
        last: images that lie channels last.

    Raises:
        NotOneNest: there is none; `node` is the first that does not fit.
    """
    return _Inference(graph, nodes, numbers).space(last)


class _Inference:
    """Which dimensions each axis of each value stands for, from one node to the next."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], numbers: Container[str]) -> None:
        self.nodes, self.numbers = nodes, numbers
        names = {n.name for n in nodes} | {r for n in nodes for r in self._refs(n)}
        self.forms = {name: graph.value(name).shape for name in names}
        reduced = [name_of(n.args[0]) for n in self.nodes if n.op in OVER_COLUMNS]
        shapes = [self.forms[name] for name in reduced[:1]] or [n.shape for n in self.nodes]
        self.whole = max(shapes, key=math.prod, default=())
        self.total = math.prod(self.whole)
        self.permuted = {node.name: node.refs[0] for node in self.nodes if node.op == "permuted"}
        self.aside, self.sides = frozenset[str](), list[set[str]]()
        if self.permuted:
            self.sides = self._sides(reduced)
            self.aside = frozenset[str]().union(*self.sides)
            if not reduced:
                every = (name for n in self.nodes for name in (n.name, *self._refs(n)))
                self.whole = next(self.forms[name] for name in every if self._is_whole(name))
        self.ends = self._cuts()
        self.axes: dict[str, Axes] = {name: self._first(name) for name in self.forms}

    def _is_whole(self, name: str) -> bool:
        """Whether a value has an element for each place of the space, in its order."""
        return math.prod(self.forms[name]) == self.total and name not in self.aside

    def _sides(self, reduced: Sequence[str]) -> list[set[str]]:
        """Return the values of all elements that are in other orders than the space.

        It has the order of what is reduced, else that in which most elements lie beside each
        other on their side of permutations, the first one if several do.
        """
        sides: list[set[str]] = []
        for node in self.nodes:
            own = [name for name in (node.name, *self._refs(node)) if self._is_whole(name)]
            for names in [[name] for name in own] if node.name in self.permuted else [own]:
                side = {*names}.union(*(each for each in sides if not each.isdisjoint(names)))
                sides = [each for each in sides if each.isdisjoint(names)]
                sides += [side] if side else []
                if any(self.permuted.get(name) in side for name in side):
                    raise refusal(node, "a tensor beside itself in another order")
        chosen = max(sides, key=self._beside, default=set[str]())
        chosen = next((side for side in sides if side.intersection(reduced[:1])), chosen)
        return [side for side in sides if side is not chosen]

    def _beside(self, side: Collection[str]) -> int:
        """Return how many elements lie beside each other, next to permutations, on a side."""
        ends = [name for pair in self.permuted.items() for name in pair if name in side]
        lengths = [[n for n in self.forms[name] if n > 1][-1:] for name in ends]
        return min((length for found in lengths for length in found), default=1)

    def _cuts(self) -> list[int]:
        """Return where the space is cut, in elements from its end; each divides the next one."""
        shapes = [self.forms[name_of(n.args[0])] for n in self.nodes if n.op in OVER_COLUMNS]
        own = {form for name, form in self.forms.items() if name not in self.aside}
        shapes += [self.whole, *sorted(own)]
        # What has the first axes alone, as one value for each channel does, is cut like them.
        ends = {math.prod(self.whole[:at]): at for at in range(1, len(self.whole))}
        parts = [s for s in shapes if 1 < math.prod(s) < self.total and math.prod(s) in ends]
        found = {1, self.total}
        for shape in [*(s for s in shapes if math.prod(s) == self.total), *parts]:
            for at in range(len(shape)):
                behind = self.total // math.prod(shape)
                cut = math.prod(shape[at:]) * behind
                if all(cut % f == 0 or f % cut == 0 for f in found):
                    found.add(cut)
        for cut in self._cuts_aside():
            if all(cut % f == 0 or f % cut == 0 for f in found):
                found.add(cut)
        return sorted(found)

    def _cuts_aside(self) -> Iterator[int]:
        """Give where axes are cut on the other side of a permutation, as `_cuts` does."""
        for node in self.nodes:
            source, axes = self.permuted.get(node.name), node.attrs.get("axes")
            if source is None or (source in self.aside) == (node.name in self.aside):
                continue
            assert isinstance(axes, list)
            place = [int(str(axis)) for axis in axes]
            own, other = (source, node.name) if node.name in self.aside else (node.name, source)
            if other == source:
                place = [place.index(axis) for axis in range(len(place))]
            of_own, of_other = self.forms[own], self.forms[other]
            side = next(side for side in self.sides if other in side)
            for form in sorted({self.forms[name] for name in side}):
                for cut in (math.prod(form[at:]) for at in range(len(form))):
                    for axis, size in enumerate(of_other):
                        end = math.prod(of_other[axis + 1 :])
                        if end < cut < end * size and cut % end == 0:
                            yield math.prod(of_own[place[axis] + 1 :]) * (cut // end)

    def _first(self, name: str) -> Axes:
        shape = self.forms[name]
        if not self._is_whole(name):
            return [() if size == 1 else None for size in shape]
        found: Axes = []
        for at in range(len(shape)):
            begin, end = math.prod(shape[at:]), math.prod(shape[at + 1 :])
            is_known = begin in self.ends and end in self.ends
            last = len(self.ends) - 1
            dims = (
                range(last - self.ends.index(begin), last - self.ends.index(end))
                if is_known
                else ()
            )
            found.append(tuple(dims) if is_known else None)
        return found

    def space(self, images: Collection[str]) -> Space:
        while any([self._step(node) for node in self.nodes]):
            pass
        last = len(self.ends) - 1
        sizes = tuple(self.ends[last - d] // self.ends[last - d - 1] for d in range(last))
        columns = frozenset[int]()
        for node in self.nodes:
            if node.op in OVER_COLUMNS:
                columns = self._reduced(node)
                break
        varies: dict[str, frozenset[int]] = {}
        for node in self.nodes:
            for name in (*self._refs(node), node.name):
                varies[name] = self._varies(name, node)
            if node.op in OVER_COLUMNS and self._reduced(node) != columns:
                raise refusal(node, f"a second kind of {node.op}")
        if not sizes:
            raise refusal(self.nodes[0] if self.nodes else None, "nothing but single numbers")
        logical = tuple(range(len(sizes)))
        place = {dim: dim for dim in logical}
        found = frozenset(name for name in images if name in self.axes)
        order, num_channels = [*logical], 0
        if found:
            order, num_channels = self._channels_last(sorted(found))
        elif self.aside and columns and sorted(columns) == order[-len(columns) :]:
            order = self._as_it_is_read(columns)
        if order != sorted(order):
            place |= {dim: at for at, dim in enumerate(order)}
            sizes = tuple(sizes[dim] for dim in order)
            logical = tuple(place[dim] for dim in logical)
            columns = frozenset(place[dim] for dim in columns)
            varies = {n: frozenset(place[dim] for dim in dims) for n, dims in varies.items()}
        own = {n: self._order(n, place) for n in self.axes if self.permuted and n not in found}
        orders = {
            n: dims for n, dims in own.items() if [*dims] != [d for d in logical if d in dims]
        }
        inside = [n for n in self.nodes if n.op == "tap" and n.attrs["kind"] == "inside"]
        parts = {
            n.name: part_of(n.attrs["axes"], self._dims(n.name, place), sizes) for n in inside
        }
        space = Space(sizes, columns, len(sizes) - 1, varies, logical, found, orders, parts)
        counted = {node.name for node in self.nodes if node.op in ("tap", "index", "scan")}
        can_gather = bool(columns) and counted.isdisjoint(orders)
        return with_loops(space, num_channels, can_gather=can_gather)

    def _order(self, name: str, place: Mapping[int, int]) -> tuple[int, ...]:
        """Return the dimensions of a value in the order in which its own axes have them."""
        return tuple(itertools.chain(*self._dims(name, place)))

    def _dims(self, name: str, place: Mapping[int, int]) -> list[list[int]]:
        return [[place[dim] for dim in dims or ()] for dims in self.axes[name]]

    def _as_it_is_read(self, columns: Collection[int]) -> list[int]:
        """Return the dimensions with rows in the order of what is read: from page to page."""
        read = (name for node in self.nodes for name in self._refs(node) if name in self.aside)
        every = range(len(self.ends) - 1)
        name = next(read, None)
        own = every if name is None else [dim for dims in self.axes[name] for dim in dims or ()]
        return [*(dim for dim in own if dim not in columns), *sorted(columns)]

    def _channels_last(self, images: Sequence[str]) -> tuple[list[int], int]:
        """Return the dimensions as images lie, and how many of them the channels have."""
        orders: list[list[int]] = []
        num_channels = 0
        for name in images:
            axes = self.axes[name]
            if None in axes:
                raise refusal(None, f"{name}, channels last, of shape {list(self.forms[name])}")
            batch, channels, *pixels = (list(dims or ()) for dims in axes)
            orders.append([*batch, *itertools.chain(*pixels), *channels])
            num_channels = max(num_channels, len(channels))
        whole = max(orders, key=len)
        every = range(len(self.ends) - 1)
        if sorted(whole) != [*every] or any(
            [dim for dim in whole if dim in order] != order for order in orders
        ):
            raise refusal(None, f"{', '.join(images)}: channels last in several orders")
        return whole, num_channels

    def _reduced(self, node: Node) -> frozenset[int]:
        name = name_of(node.args[0])
        axes = [self.axes[name][a] for a in axes_of(node, len(self.forms[name]))]
        if math.prod(self.forms[name]) != self.total or None in axes:
            raise refusal(node, f"{node.op} of a tensor of shape {list(self.forms[name])}")
        found = frozenset(d for dims in axes for d in dims or ())
        if not found:
            raise refusal(node, f"{node.op} over nothing")
        return found

    def _refs(self, node: Node) -> list[str]:
        if node.op == "tap":  # whose source is another space
            return []
        return [name for name in node.refs if name not in self.numbers]

    def _varies(self, name: str, node: Node) -> frozenset[int]:
        shape, axes, last = self.forms[name], self.axes[name], len(self.ends) - 1
        found = [d for dims in axes for d in dims or ()]
        is_whole = self._is_whole(name)
        if self.permuted and not is_whole and None not in axes:
            return frozenset(found)
        behind = {at: self.ends[last - 1 - dims[-1]] for at, dims in enumerate(axes) if dims}
        if found != sorted(found) or (
            is_whole and any(math.prod(shape[at + 1 :]) != num for at, num in behind.items())
        ):  # as a tensor does whose transpose is reduced
            what = f"a tensor of shape {list(shape)}, in another order than {list(self.whole)}"
            raise refusal(node, what)
        if is_whole:
            return frozenset(range(last))
        if None in axes:
            raise refusal(node, f"a tensor of shape {list(shape)} beside {list(self.whole)}")
        return frozenset(found)

    # ---- one node -----------------------------------------------------------------------------

    def _step(self, node: Node) -> bool:
        """Take what is known from operands to the result and back; whether that was any news."""
        mine = self.axes[node.name]
        if node.op == "view":
            name = name_of(node.args[0])
            if name not in self.axes:  # numbers of columns, which lie nowhere
                raise refusal(node, f"numbers of a dimension as {list(node.shape)}")
            forth = self._regrouped(self.axes[name], mine, self.forms[node.name])
            return self._regrouped(mine, self.axes[name], self.forms[name]) or forth
        if node.op in REDUCTIONS:
            name = name_of(node.args[0])
            reduced = axes_of(node, len(self.forms[name]))
            kept = [a for a in range(len(self.forms[name])) if a not in reduced]
            own = kept if node.attrs.get("keepdim") else range(len(kept))
            pairs = [[(name, a), (node.name, b)] for a, b in zip(kept, own, strict=True)]
            return any([self._same(pair, node) for pair in pairs])
        if node.op == "permuted":
            (source,), order = node.refs, node.attrs["axes"]
            assert isinstance(order, list)
            pairs = [[(source, int(str(a))), (node.name, b)] for b, a in enumerate(order)]
            return any([self._same(pair, node) for pair in pairs])
        news = False
        for back in range(1, len(mine) + 1):
            size = node.shape[-back]
            places = [(node.name, len(mine) - back)]
            for name in self._refs(node):
                at = len(self.forms[name]) - back
                if at >= 0 and self.forms[name][at] == size != 1:
                    places.append((name, at))
            news |= self._same(places, node)
        return news

    def _same(self, places: Sequence[tuple[str, int]], node: Node) -> bool:
        known = {self.axes[name][at] for name, at in places} - {None}
        if len(known) > 1:
            name = places[-1][0]
            what = f"a tensor of shape {list(self.forms[name])}, one value a row, is spread"
            raise refusal(node, what)
        news = False
        for value in known:
            for name, at in places:
                news |= self.axes[name][at] is None
                self.axes[name][at] = value
        return news

    def _regrouped(self, source: Axes, other: Axes, shape: tuple[int, ...]) -> bool:
        if None in source or None not in other:
            return False
        last = len(self.ends) - 1
        left = [d for dims in source for d in dims or ()]
        found: Axes = []
        for size in shape:
            own: list[int] = []
            while size > 1 and left:
                own.append(left.pop(0))
                size //= self.ends[last - own[-1]] // self.ends[last - own[-1] - 1]
            found.append(tuple(own))
        counts = [
            math.prod(self.ends[last - d] // self.ends[last - d - 1] for d in dims or ())
            for dims in found
        ]
        if left or counts != list(shape):
            return False
        other[:] = found
        return True


def name_of(operand: Operand) -> str:
    """Return the name of a value that an operand refers to."""
    assert isinstance(operand, Ref), operand
    return operand.name


def axes_of(node: Node, ndim: int) -> tuple[int, ...]:
    """Return the dimensions that a reduction is over, in order."""
    given = node.attrs.get("axes")
    axes = given if isinstance(given, list) and given else range(ndim)
    return tuple(sorted(int(str(axis)) % ndim for axis in axes))
