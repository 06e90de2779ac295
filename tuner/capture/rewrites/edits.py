"""A graph being rewritten: nodes are added, replaced, and put in order when all is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import JsonValue

from tuner.capture.graph.graph import Graph, Node, Operand, Ref, Tensor, in_order, live
from tuner.capture.graph.vocabulary import VOCABULARY
from tuner.capture.nests.batch_numbers import BatchNumber

__all__ = ["LARGEST", "Edit", "broadcast", "number_of", "with_number"]

LARGEST = 3.4e38  # about the largest float32: a number beyond it is Inf there


class Edit:
    """Changes of a graph, which stays as it is.

    Looks at values go to the graph as it was; `done` returns what it has become.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._values: dict[str, Tensor | Node] = {t.name: t for t in graph.given}
        self._values |= {n.name: n for n in graph.nodes}
        self._users = graph.users
        self._nodes = {n.name: n for n in graph.nodes}
        self._instead: dict[str, Ref] = {}
        self._results = {*graph.outputs, *graph.buffer_updates.values()}

    def value(self, operand: Operand) -> Tensor | Node:
        """Return what an operand refers to."""
        assert isinstance(operand, Ref), operand
        return self._values[operand.name]

    def node(self, operand: Operand) -> Node | None:
        """Return the node that an operand refers to, None where no node computes it."""
        value = self._values[operand.name] if isinstance(operand, Ref) else None
        return value if isinstance(value, Node) else None

    def seen(self, operand: Operand) -> Tensor | Node:
        """Return the value that an operand is, or is a reshaped one of."""
        value = self.value(operand)
        while isinstance(value, Node) and value.op == "view":
            value = self.value(value.args[0])
        return value

    def shape(self, operand: Operand) -> tuple[int, ...]:
        """Return an operand's shape in elements; () for a number."""
        return self._values[operand.name].shape if isinstance(operand, Ref) else ()

    def users(self, name: str) -> tuple[Node, ...]:
        """Return the nodes that use a value."""
        return self._users[name]

    def is_result(self, name: str) -> bool:
        """Whether a value is an output, or what a buffer gets."""
        return name in self._results

    def is_only_for(self, node: Node, user: Node) -> bool:
        """Whether nothing but one node needs a value."""
        return self._users[node.name] == (user,) and node.name not in self._results

    def add(
        self,
        op: str,
        *args: Operand,
        like: Node,
        shape: Sequence[int] | None = None,
        **attrs: JsonValue,
    ) -> Ref:
        """Add a node at the line of `like`, in its dtype unless it is a comparison.

        The shape of a pointwise one follows from its operands'.
        """
        name, number = op, 0
        while name in self._values:
            number += 1
            name = f"{op}_x{number}"
        found = broadcast(*(self.shape(arg) for arg in args)) if shape is None else tuple(shape)
        is_truth = VOCABULARY[op].is_comparison and op != "cast"
        node = Node(name, op, args, attrs, found, "bool" if is_truth else like.dtype, like.line)
        self._nodes[name] = self._values[name] = node
        return Ref(name)

    def view(self, operand: Ref, shape: Sequence[int], like: Node) -> Ref:
        """Return a value in another shape, by a node where need be."""
        if self.shape(operand) == tuple(shape):
            return operand
        return self.add("view", operand, like=like, shape=shape)

    def become(self, node: Node, op: str, *args: Operand, **attrs: JsonValue) -> None:
        """Compute a node in another way; its name, shape and dtype stay."""
        self._nodes[node.name] = replace(node, op=op, args=args, attrs=attrs)

    def drop(self, node: Node, instead: Ref) -> None:
        """Put another value in a node's place wherever it is used."""
        self._instead[node.name] = instead

    def done(self) -> Graph:
        """Return the graph with all changes, without nodes that nothing needs any more."""

        def meant(name: str) -> str:
            while name in self._instead:
                name = self._instead[name].name
            return name

        nodes = {}
        for name, node in self._nodes.items():
            args = (Ref(meant(a.name)) if isinstance(a, Ref) else a for a in node.args)
            nodes[name] = replace(node, args=tuple(args))
        order = in_order([*nodes], lambda n: nodes[n].refs if n in nodes else ())
        outputs = tuple(map(meant, self.graph.outputs))
        updates = {b: meant(name) for b, name in self.graph.buffer_updates.items()}
        left = live([nodes[n] for n in order if n in nodes], {*outputs, *updates.values()})
        return replace(self.graph, nodes=left, outputs=outputs, buffer_updates=updates)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that tensors of these shapes have together."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def number_of(operand: Operand) -> float | None:
    """Return an operand that is a number of Python's; None for tensors and truths.

    None for what is another number at another batch, too.
    """
    if isinstance(operand, Ref | bool | BatchNumber):
        return None
    try:
        return float(operand)
    except OverflowError:
        return None


def with_number(node: Node, ops: tuple[str, str]) -> tuple[Ref, float] | None:
    """Return the tensor and the number that a step of `ops` takes; None of any other step.

    Of the first operation, as of `mul` and `div`, the number may stand on either side.
    """
    if node.op not in ops or len(node.refs) != 1:
        return None
    one, other = node.args
    if node.op == ops[0] and isinstance(other, Ref):
        one, other = other, one
    number = number_of(other)
    return (one, number) if isinstance(one, Ref) and number is not None else None
