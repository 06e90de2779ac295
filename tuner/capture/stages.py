"""A graph as loop nests, one after the other: what does not fit in the first is of a later one.

A value that a later nest reads is stored in between, as float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.capture.graph import Graph, Node, Ref
from tuner.capture.index_space import REDUCTIONS, NotOneNest, refusal
from tuner.capture.nest import DTYPES, Nest
from tuner.capture.nesting import nest_of, real_name
from tuner.capture.operations import OPERATIONS

__all__ = ["Stages", "stages_of"]

_OTHERS = {*REDUCTIONS, "gather", "cast"}  # what has loops and is no pointwise operation


@dataclass(frozen=True, slots=True)
class Stages:
    """Nests in order.

    Attributes:
        nests: each reads what is given and what those before it wrote.
        outputs: of the graph, by the name under which a nest writes each.
        updates: the buffers that a nest's value is written to, with that value's name.
        counters: buffers to which the call adds a whole number, with the number.
        between: what a nest writes for another one, with its number of elements.
    """

    nests: tuple[Nest, ...]
    outputs: tuple[str, ...]
    updates: Mapping[str, str]
    counters: Mapping[str, int]
    between: Mapping[str, int]


def stages_of(graph: Graph) -> Stages:
    """Return a graph as nests.

    Raises:
        NotOneNest: it names the line of the user's file and the operation.
    """
    counters = _counters(graph)
    nodes = {n.name: n for n in graph.nodes}
    updates = {
        b: real_name(graph, v) for b, v in graph.buffer_updates.items() if b not in counters
    }
    outputs = tuple(real_name(graph, name) for name in graph.outputs)
    for name, real in [*zip(graph.outputs, outputs, strict=True), *updates.items()]:
        if real not in nodes:
            raise refusal(None, f"the result {name} is {real} as it is")
    left = [
        n
        for n in graph.nodes
        if real_name(graph, n.name) == n.name
        and n.op != "full"
        and graph.buffer_updates.get(_counted(n)) != n.name
    ]
    left = _live(graph, left, {*outputs, *updates.values()})
    for node in left:
        if node.op not in OPERATIONS and node.op not in _OTHERS:
            raise refusal(node, f"no loop is generated for {node.op} yet")
    dtypes = dict(zip(outputs, (graph.value(n).dtype for n in graph.outputs), strict=True))
    nests: list[Nest] = []
    between: dict[str, int] = {}
    while left:
        nest, later = _first(graph, left, {*outputs, *updates.values()}, dtypes)
        nests.append(nest)
        read = {real_name(graph, r) for n in later for r in n.refs}
        between |= {o.name: o.count for o in nest.outputs if o.name in read}
        left = later
    if not nests:
        raise refusal(None, "nothing is computed")
    return Stages(tuple(nests), outputs, updates, counters, between)


def _first(
    graph: Graph, left: list[Node], results: set[str], dtypes: Mapping[str, str]
) -> tuple[Nest, list[Node]]:
    """Return the first nest, and the nodes that are not in it."""
    later: set[str] = set()
    first: NotOneNest | None = None
    while True:
        own = [n for n in left if n.name not in later]
        rest = [n for n in left if n.name in later]
        if not own:
            assert first is not None
            raise first
        read = {real_name(graph, r) for n in rest for r in n.refs}
        wanted = {
            n.name: dtypes.get(n.name, "float32")
            for n in own
            if n.name in results or n.name in read
        }
        for name in wanted:
            if dtypes.get(name, "float32") not in DTYPES:
                raise refusal(graph.value(name), f"a result is {dtypes[name]}")  # type: ignore[arg-type]
            if name in read and dtypes.get(name, "float32") != "float32":
                raise refusal(graph.value(name), f"{name} is read again")  # type: ignore[arg-type]
        if not wanted:
            # Of no use to anything but what comes later: then it is computed there.
            raise refusal(own[0], f"{own[0].op} is of no use")
        try:
            return nest_of(graph, own, wanted), rest
        except NotOneNest as error:
            first = first or error
            if error.node is None:
                raise
            fresh = _dependents(graph, error.node) - later
            if not fresh:
                raise
            later |= fresh


def _dependents(graph: Graph, node: Node) -> set[str]:
    users = graph.users()
    found: set[str] = set()
    left = [node.name]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [user.name for user in users[name]]
    return found


def _live(graph: Graph, nodes: list[Node], wanted: set[str]) -> list[Node]:
    found, left = set(), list(wanted)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        value = graph.value(name)
        if isinstance(value, Node):
            left += [real_name(graph, r) for r in value.refs]
    return [n for n in nodes if n.name in found]


def _counted(node: Node) -> str:
    """Return the tensor to which a node adds a whole number, or nothing."""
    is_counter = node.op == "add" and node.dtype == "int64" and len(node.args) == 2
    first, more = node.args if is_counter else (None, None)
    return first.name if isinstance(first, Ref) and type(more) is int else ""


def _counters(graph: Graph) -> dict[str, int]:
    found = {}
    for buffer, name in graph.buffer_updates.items():
        node = graph.value(name)
        if isinstance(node, Node) and _counted(node) == buffer and name not in graph.outputs:
            found[buffer] = int(str(node.args[1]))
    return found
