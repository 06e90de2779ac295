"""A module's forward as data: inputs, weights, nodes in order, outputs, buffer updates.

A graph is for the shapes and the mode in which it was captured. `vocabulary` says what each
operation means. Each value has one name: an input's is that of forward's parameter, a
parameter's or buffer's its name in the state_dict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, prod
from typing import Annotated, Literal, TypeVar

from pydantic import JsonValue, PlainSerializer

from tuner.capture.graph.vocabulary import Kind, kind_of
from tuner.trial import content_key

__all__ = [
    "GRAPH_FILE",
    "MAX_CONSTANT",
    "Argument",
    "Graph",
    "Node",
    "Operand",
    "Ref",
    "Rewrite",
    "Tensor",
    "behind",
    "free_name",
    "in_order",
    "live",
    "num_bytes_of",
]

MAX_CONSTANT = 64  # elements up to which a graph holds the values of a constant

GRAPH_FILE = "graph.json"  # in the folder of an operator that was derived from a module

# PyTorch's dtypes whose name does not end in their number of bits.
_BYTES = {"bool": 1, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def _as_json(number: float) -> float | str:
    """Return infinity and NaN as words: `masked_fill` with -inf is common."""
    return number if isfinite(number) else str(number)


_Float = Annotated[float, PlainSerializer(_as_json, when_used="json")]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that no node computes: an input, a parameter, a buffer or a constant.

    `shape` is in elements, `dtype` PyTorch's name without `torch.`. `value` is a constant's, as a
    number or nested lists, where infinities and NaN are the words `inf`, `-inf` and `nan`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    value: JsonValue = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * num_bytes_of(self.dtype)


@dataclass(frozen=True, slots=True)
class Argument:
    """One positional argument of forward, in the order of `get_inputs`.

    A tensor's `value` is None, and `inputs` has the rest. Other arguments have their value as
    given; `is_fixed` says that the graph holds for that value only. A number that is not fixed is
    an input of shape () as well, and nodes refer to it by name.
    """

    name: str
    is_tensor: bool
    value: bool | int | _Float | str | None = None
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of the graph as an operand, by name."""

    name: str


Operand = Ref | bool | int | _Float


@dataclass(frozen=True, slots=True)
class Node:
    """One operation and its result.

    `shape` (elements) and `dtype` are the result's, and `line` is where the user's file asks for
    it: 0 where that is not known.
    """

    name: str
    op: str
    args: tuple[Operand, ...]
    attrs: dict[str, JsonValue]
    shape: tuple[int, ...]
    dtype: str
    line: int = 0

    @property
    def refs(self) -> tuple[str, ...]:
        """Names of the operands that are tensors, in order, repeated as they are."""
        return tuple(arg.name for arg in self.args if isinstance(arg, Ref))

    @property
    def kind(self) -> Kind:
        """The kind of its operation."""
        return kind_of(self.op)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements of its result."""
        return prod(self.shape) * num_bytes_of(self.dtype)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """An exact step by which a graph was rewritten.

    `name` is its name in `rewriting`, `line` where the user's file asks for what was rewritten (0
    where that is not known), `text` one sentence. `collapses` says that a product of PyTorch's own
    became less work by an order: such a module says little of kernels.
    """

    name: str
    line: int
    text: str
    collapses: bool = False

    @property
    def words(self) -> str:
        """Name, line and sentence."""
        where = f", line {self.line}" if self.line else ""
        return f"{self.name}{where}: {self.text}"


V = TypeVar("V", Tensor, Node)


@dataclass(frozen=True)  # without slots: what is looked up often is kept beside the fields
class Graph:
    """What one call of a module computes; each node stands after those that it uses.

    `arguments` are forward's, all of them; `inputs` those that are tensors, and numbers that are
    not fixed. `buffer_updates` gives for each buffer that the call writes the value that it has
    afterwards. `rewrites` are the steps that led here from what was captured. `apart` names inputs
    that have no rows of the batch, however many are in dim 0. `returns` is how outputs stand in
    what forward returns, as Python for `str.format`; empty for a tensor, or a tuple of several.
    `containers` are the classes that it names, as `_CONTAINERS[0]` and so on. Of a graph for any
    batch, `fewest_rows` and `most_rows` are from and up to how many rows forward does the same.
    `unmarked` are the buffers that PyTorch's own call writes without counting it as an edit, as
    BatchNorm does: who saved them for a backward is not told.
    """

    arguments: tuple[Argument, ...]
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    buffer_updates: dict[str, str] = field(default_factory=dict)
    is_training: bool = True
    rewrites: tuple[Rewrite, ...] = ()
    apart: tuple[str, ...] = ()
    returns: str = ""
    containers: tuple[str, ...] = ()
    fewest_rows: int = 1
    most_rows: int | None = None
    unmarked: tuple[str, ...] = ()

    @property
    def mode(self) -> Literal["train", "eval"]:
        """The mode in which the module was captured."""
        return "train" if self.is_training else "eval"

    @property
    def given(self) -> tuple[Tensor, ...]:
        """Tensors that no node computes: inputs, parameters, buffers, constants."""
        return (*self.inputs, *self.parameters, *self.buffers, *self.constants)

    @property
    def batch(self) -> int | None:
        """Rows (dim 0) of the first input that has a dimension; None where none has."""
        return next((t.shape[0] for t in self.inputs if t.shape), None)

    def value(self, name: str) -> Tensor | Node:
        """Return the tensor or node of that name; KeyError where there is none."""
        return self._values[name]

    @cached_property
    def _values(self) -> dict[str, Tensor | Node]:
        everything: tuple[Tensor | Node, ...] = (*self.given, *self.nodes)
        return {value.name: value for value in reversed(everything)}  # the first of a name holds

    @cached_property
    def users(self) -> Mapping[str, tuple[Node, ...]]:
        """For each value, by name, the nodes that use it, in order."""
        names = [*(t.name for t in self.given), *(node.name for node in self.nodes)]
        found: dict[str, list[Node]] = {name: [] for name in names}
        for node in self.nodes:
            for name in dict.fromkeys(node.refs):
                found[name].append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    @property
    def key(self) -> str:
        """Content key: equal for graphs that compute the same in the same way, whatever names.

        Neither names, lines and `rewrites` count, nor the order of independent nodes. Inputs
        differ by their order in the call, parameters, buffers and constants by their first use.
        """
        return content_key(json.dumps(list(self._canonical())))

    def _canonical(self) -> Iterator[JsonValue]:
        """Describe all that outputs and updates depend on, each value by its number."""
        roles = {
            **{t.name: "parameter" for t in self.parameters},
            **{t.name: "buffer" for t in self.buffers},
            **{t.name: "constant" for t in self.constants},
        }
        given, nodes = _by_name(self.given), _by_name(self.nodes)
        numbers: dict[str, int] = {}

        def operands(name: str) -> Sequence[str]:
            return nodes[name].refs if name in nodes else ()

        yield [[a.is_tensor, repr(a.value) if a.is_fixed else ""] for a in self.arguments]
        for tensor in self.inputs:
            numbers[tensor.name] = len(numbers)
            yield ["input", *_form(tensor)]
        for wanted in (*self.outputs, *_updates_in_order(self)):
            for name in in_order([wanted], operands, numbers):
                line: list[JsonValue]
                if name in given:
                    line = [roles[name], *_form(given[name]), given[name].value]
                else:
                    node = nodes[name]
                    args: list[JsonValue] = [
                        f"%{numbers[arg.name]}" if isinstance(arg, Ref) else repr(arg)
                        for arg in node.args
                    ]
                    line = [node.op, args, dict(sorted(node.attrs.items())), *_form(node)]
                numbers[name] = len(numbers)
                yield line
        yield ["outputs", *(numbers[name] for name in self.outputs)]
        pairs = sorted((numbers[b], numbers[name]) for b, name in self.buffer_updates.items())
        if self.returns:
            yield ["returns", self.returns, *self.containers]
        yield ["updates", *(f"{buffer} {value}" for buffer, value in pairs)]


def behind(nodes: Sequence[Node], names: Collection[str]) -> set[str]:
    """Return these values and all that is computed from any of them."""
    found = {*names}
    for node in nodes:
        if found & {*node.refs}:
            found.add(node.name)
    return found


def live(nodes: Sequence[Node], wanted: set[str]) -> tuple[Node, ...]:
    """Return the nodes that `wanted` depends on, in their order."""
    needed = set(wanted)
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(node.refs)
    return tuple(node for node in nodes if node.name in needed)


def _updates_in_order(graph: Graph) -> list[str]:
    """Return buffers that are written, each before its new value, in an order without names.

    That order is the one of the nodes, which the capture keeps from one run to the next.
    """
    places = {node.name: place for place, node in enumerate(graph.nodes)}
    pairs = sorted(graph.buffer_updates.items(), key=lambda pair: places.get(pair[1], -1))
    return [name for pair in pairs for name in pair]


def in_order(
    wanted: Sequence[str], needs: Callable[[str], Sequence[str]], known: Collection[str] = ()
) -> list[str]:
    """Return `wanted` and all that it needs and is not known, what is needed first, each once."""
    order: list[str] = []
    seen = set(known)
    pending = [(name, False) for name in reversed(wanted)]
    while pending:
        name, is_ready = pending.pop()
        if is_ready:
            order.append(name)
        elif name not in seen:
            seen.add(name)
            pending.append((name, True))
            pending += [(other, False) for other in reversed(needs(name))]
    return order


def free_name(name: str, taken: set[str]) -> str:
    """Return a name that is not taken, the same where it can be; it is taken then."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def num_bytes_of(dtype: str) -> int:
    """Return the bytes of an element in memory."""
    bits = "".join(c for c in dtype if c.isdigit())
    return _BYTES[dtype] if dtype in _BYTES else int(bits) // 8


def _by_name(values: tuple[V, ...]) -> dict[str, V]:
    return {value.name: value for value in values}


def _form(value: Tensor | Node) -> tuple[JsonValue, JsonValue]:
    return list(value.shape), value.dtype
