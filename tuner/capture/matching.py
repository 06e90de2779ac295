"""Two graphs beside each other: whether one computes what the other does, whatever the names.

Names, lines, the order of independent steps and that of operands which commute do not count. A
parameter that is added or multiplied may be absent in the other graph: zeros or ones stand for it,
which is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.capture.graph.graph import Graph, Node, Operand, Ref, Tensor
from tuner.capture.graph.vocabulary import COMMUTING

__all__ = ["Correspondence", "correspondences"]

# What stands for a parameter that is absent, by the operation that takes it, and its place there.
_NEUTRAL = {("add", 0): 0.0, ("add", 1): 0.0, ("mul", 0): 1.0, ("mul", 1): 1.0, ("linear", 2): 0.0}
MAX_STEPS = 20_000  # pairs that are looked at: a graph of many equal parts has many ways to fit


@dataclass(frozen=True, slots=True)
class Correspondence:
    """How the values of one graph, the pattern, are those of another one.

    `names` gives for each tensor of the pattern that is used the other graph's name of it, and
    `absent` for each that the other graph lacks the number that stands for all its elements.
    Where sizes and numbers were not compared, `sizes` and `numbers` give for those of the pattern
    what the other graph has in their place.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[int, int] = field(default_factory=dict)
    numbers: Mapping[float, float] = field(default_factory=dict)


def correspondences(pattern: Graph, other: Graph, *, is_exact: bool) -> Iterator[Correspondence]:
    """Give the ways in which the other graph is the pattern.

    Args:
        pattern: the graph that may have more parameters, and more buffers that it only updates.
        other: the one that is compared with it.
        is_exact: whether sizes and numbers must be the same; else each size of the pattern
            stands for one of the other graph, and numbers for any.
    """
    if len(pattern.outputs) != len(other.outputs) or pattern.returns != other.returns:
        return
    search = _Search(pattern, other, is_exact)
    goals = tuple(zip(pattern.outputs, other.outputs, strict=True))
    start = _Bound({}, Correspondence())
    for found in search.solved(goals, start):
        for complete in search.updated(tuple(other.buffer_updates.items()), (), found):
            used = {t.name for t in pattern.given}
            names = {mine: its for mine, its in complete.pairs.items() if mine in used}
            so_far = complete.so_far
            yield Correspondence(names, so_far.absent, so_far.sizes, so_far.numbers)


@dataclass(frozen=True, slots=True)
class _Bound:
    """What is decided so far: pairs of values, and what follows for sizes and numbers."""

    pairs: Mapping[str, str]
    so_far: Correspondence


_Goals = tuple[tuple[str, str], ...]


class _Search:
    """Pairs of values, one after the other; what does not fit is taken back."""

    def __init__(self, pattern: Graph, other: Graph, is_exact: bool) -> None:
        self.pattern, self.other, self.is_exact = pattern, other, is_exact
        self.inputs = {t.name for t in pattern.inputs}, {t.name for t in other.inputs}
        self.weights = {t.name for t in pattern.parameters}
        self.constants = {t.name for t in pattern.constants}
        self.steps = 0

    def solved(self, goals: _Goals, bound: _Bound) -> Iterator[_Bound]:
        """Give all ways to pair the values of `goals` and all that they depend on."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            return
        if not goals:
            yield bound
            return
        (mine, its), rest = goals[0], goals[1:]
        if mine in bound.pairs:
            if bound.pairs[mine] == its:
                yield from self.solved(rest, bound)
            return
        if mine in bound.so_far.absent:
            return
        a, b = self.pattern.value(mine), self.other.value(its)
        paired = self._sized(a, b, bound)
        if paired is not None:
            paired = _Bound({**paired.pairs, mine: its}, paired.so_far)
            if isinstance(a, Node):
                if isinstance(b, Node):
                    for operands, more in self._operands(a, b, paired):
                        yield from self.solved((*operands, *rest), more)
            elif isinstance(b, Tensor) and self._is_like(a, b):
                yield from self.solved(rest, paired)
        if isinstance(a, Node):
            for remaining, weight, number in self._without_weight(a, bound):
                so_far = bound.so_far
                less = {**so_far.absent, weight: number}
                elided = Correspondence(so_far.names, less, so_far.sizes, so_far.numbers)
                if isinstance(remaining, str):
                    yield from self.solved(
                        ((remaining, its), *rest), _Bound({**bound.pairs, mine: its}, elided)
                    )
                elif isinstance(b, Node) and paired is not None:
                    without = _Bound(paired.pairs, elided)
                    for operands, more in self._operands(remaining, b, without):
                        yield from self.solved((*operands, *rest), more)

    def updated(self, wanted: _Goals, taken: Sequence[str], bound: _Bound) -> Iterator[_Bound]:
        """Give all ways to pair the buffers that the other graph updates, with their values."""
        if not wanted:
            # A buffer that is read must be updated where the pattern updates it.
            if all(b in taken or b not in bound.pairs for b in self.pattern.buffer_updates):
                yield bound
            return
        (buffer, value), rest = wanted[0], wanted[1:]
        for mine, new in self.pattern.buffer_updates.items():
            if mine not in taken:
                for found in self.solved(((mine, buffer), (new, value)), bound):
                    yield from self.updated(rest, (*taken, mine), found)

    # ---- one pair -----------------------------------------------------------------------------

    def _sized(self, a: Tensor | Node, b: Tensor | Node, bound: _Bound) -> _Bound | None:
        """Return what follows of two shapes, None where they differ."""
        if a.dtype != b.dtype or len(a.shape) != len(b.shape):
            return None
        if self.is_exact:
            return bound if a.shape == b.shape else None
        so_far = bound.so_far
        sizes = dict(so_far.sizes)
        for size, other in zip(a.shape, b.shape, strict=True):
            if sizes.setdefault(size, other) != other:
                return None
        return _Bound(
            bound.pairs, Correspondence(so_far.names, so_far.absent, sizes, so_far.numbers)
        )

    def _is_like(self, a: Tensor, b: Tensor) -> bool:
        """Whether a tensor that is given may stand for another one that is."""
        if a.name in self.constants or b.value is not None:
            return a.value == b.value
        return a.name not in self.inputs[0] or b.name in self.inputs[1]

    def _operands(self, a: Node, b: Node, bound: _Bound) -> Iterator[tuple[_Goals, _Bound]]:
        """Give the pairs of operands with which two steps are the same."""
        if a.op != b.op or len(a.args) != len(b.args) or a.attrs.keys() != b.attrs.keys():
            return
        if self.is_exact and a.attrs != b.attrs:
            return
        orders = [a.args]
        if a.op in COMMUTING and len(a.args) >= 2:
            orders.append((a.args[1], a.args[0], *a.args[2:]))
        for args in orders:
            goals: list[tuple[str, str]] = []
            numbers = dict(bound.so_far.numbers)
            if all(map(self._is_same, args, b.args)):
                for mine, its in zip(args, b.args, strict=True):
                    if isinstance(mine, Ref) and isinstance(its, Ref):
                        goals.append((mine.name, its.name))
                    elif isinstance(mine, float) and isinstance(its, int | float):
                        numbers.setdefault(mine, float(its))
                so_far = bound.so_far
                more = Correspondence(so_far.names, so_far.absent, so_far.sizes, numbers)
                yield tuple(goals), _Bound(bound.pairs, more)

    def _is_same(self, mine: Operand, its: Operand) -> bool:
        if isinstance(mine, Ref) or isinstance(its, Ref):
            return isinstance(mine, Ref) and isinstance(its, Ref)
        return mine == its or not self.is_exact

    def _without_weight(
        self, node: Node, bound: _Bound
    ) -> Iterator[tuple[str | Node, str, float]]:
        """Give what is left of a step without a parameter that it adds or multiplies by.

        It is another value's name where nothing else is left of the step.
        """
        for place, arg in enumerate(node.args):
            number = _NEUTRAL.get((node.op, place))
            if number is None or not isinstance(arg, Ref) or arg.name not in self.weights:
                continue
            if arg.name in bound.pairs or bound.so_far.absent.get(arg.name, number) != number:
                continue
            others = node.args[:place] + node.args[place + 1 :]
            if len(others) == 1:
                (kept,) = others
                value = self.pattern.value(kept.name) if isinstance(kept, Ref) else None
                if value is not None and (value.shape, value.dtype) == (node.shape, node.dtype):
                    yield value.name, arg.name, number
            elif node.op == "linear":
                less = Node(node.name, node.op, others, node.attrs, node.shape, node.dtype)
                yield less, arg.name, number
