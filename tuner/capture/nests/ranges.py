"""Ranges of numbers, as of `torch.arange`: values that loops compute from where an element lies.

    index   a node: the number of each element of its shape, in row-major order, as a float

Masks such as those of `torch.tril` are whole numbers compared. Floats compute with them exactly
as long as every value stays below 2^24: then they are floats from here on. Where that is not
known, or an operation is none that floats do exactly, such as a remainder, they are stored as
whole numbers for it.

What is computed from ranges alone is stored for nobody but PyTorch's own operations and results: a
nest that reads it computes it again.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from tuner.capture.graph.graph import Graph, Node, Operand, Ref, free_name, in_order
from tuner.capture.graph.vocabulary import COMPARISONS
from tuner.capture.nests.operations import OPERATIONS
from tuner.capture.nests.precision import EXACT, FLOATS
from tuner.capture.nests.viewing import real_name

__all__ = [
    "computed_of_ranges",
    "have_same_ranges",
    "most_rows_of",
    "with_ranges",
    "with_ranges_read",
]

_WHOLE = {"int32", "int64"}
_SAME = {"view", "expand", "cast"}
Bounds = tuple[int, int]  # the least and the largest value


def have_same_ranges(one: Graph, other: Graph) -> bool:
    """Whether two graphs, of two batches, have ranges of the same lengths, or as long as these."""
    ranges = _ranges_in(one), _ranges_in(other)
    if len(ranges[0]) != len(ranges[1]):
        return False
    rows = (one.batch,), (other.batch,)
    return all(
        a.attrs == b.attrs and (a.shape == b.shape or (a.shape, b.shape) == rows)
        for a, b in zip(*ranges, strict=True)
    )


def most_rows_of(graph: Graph) -> int | None:
    """Return up to how many rows floats are exact for what is computed of ranges; None: any.

    That grows with the rows, or with their square.
    """
    batch = graph.batch
    if batch is None or all(node.shape != (batch,) for node in _ranges_in(graph)):
        return None
    most = max((max(map(abs, own)) for own in _bounds_of(graph).values()), default=1)
    return int(batch * math.sqrt(EXACT / max(1, most)))


def _ranges_in(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "arange"]


def with_ranges(graph: Graph) -> Graph:
    """Return the graph with ranges as indices, and whole numbers computed of them as floats."""
    if not _ranges_in(graph):
        return graph
    found = _as_floats(graph)
    taken = {t.name for t in graph.given} | {n.name for n in graph.nodes}
    stored = _stored_as_whole(graph, found)
    floats = {name: Ref(free_name(f"{name}_float", taken)) for name in stored}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in found or node.op in COMPARISONS | {"cast", "gather", "placed"}:
            args = tuple(floats.get(a.name, a) if isinstance(a, Ref) else a for a in node.args)
            node = replace(node, args=args)
        if node.name not in found:
            nodes.append(node)
            continue
        name = floats[node.name].name if node.name in floats else node.name
        as_float = replace(node, name=name)
        nodes += (_range if node.op == "arange" else _as_float)(as_float, taken)
        if node.name in floats:
            nodes.append(replace(node, op="cast", args=(Ref(name),), attrs={}))
    return _with_views_apart(replace(graph, nodes=tuple(nodes)))


def computed_of_ranges(graph: Graph) -> set[str]:
    """Return the values that pointwise work computes of ranges and numbers alone, by name."""
    found: set[str] = set()
    if not any(node.op == "index" for node in graph.nodes):
        return found
    numbers = {n.name for n in graph.nodes if n.op == "full" and not n.refs}
    for node in graph.nodes:
        is_pointwise = node.op in OPERATIONS or node.op in _SAME
        is_alone = is_pointwise and {*node.refs} <= found | numbers and {*node.refs} & found
        if node.op == "index" or is_alone:
            found.add(node.name)
    return found


def with_ranges_read(graph: Graph, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes of a nest with those that it computes of ranges alone, in order."""
    own = {node.name for node in nodes}
    alone = computed_of_ranges(graph) - own
    by_name = {n.name: n for n in graph.nodes if n.name in alone}
    refs = [ref for node in nodes if node.op != "tap" for ref in node.refs]
    found = by_name.keys() & in_order(refs, lambda n: by_name[n].refs if n in by_name else ())
    read = {n for n in found if by_name[n].op != "index" and real_name(graph, n) == n}
    return [n for n in graph.nodes if n.name in read or n.name in own] if read else [*nodes]


# ---- whole numbers as floats ----------------------------------------------------------------


def _as_floats(graph: Graph) -> set[str]:
    """Return the ranges, and the whole numbers computed of them, that floats are exact for."""
    bounds = _bounds_of(graph)
    nodes = {n.name: n for n in graph.nodes}
    found = {*bounds}
    users, results = graph.users, {*graph.outputs, *graph.buffer_updates.values()}

    def is_exact(name: str) -> bool:
        """Whether all that reads a value, and all that it reads, may be floats too."""
        node = nodes[name]
        if node.dtype in FLOATS:
            return True
        whole = [ref for ref in node.refs if graph.value(ref).dtype in _WHOLE]
        is_known = all(ref in found or nodes[ref].op == "full" for ref in whole)
        is_read = name not in results and all(_takes_floats(u, name, found) for u in users[name])
        return is_known and (is_read or node.dtype == "int64")

    while wrong := {name for name in found if not is_exact(name)}:
        found -= wrong
    return found


def _takes_floats(user: Node, name: str, found: Container[str]) -> bool:
    """Whether what reads a whole number may read it as a float."""
    is_cast = user.op == "cast" and (user.dtype in FLOATS or user.dtype == "bool")
    # Which element of each row is read, or written.
    is_place = user.args[{"gather": 1, "placed": 0}.get(user.op, -1)] == Ref(name)
    is_place = is_place and user.op in ("gather", "placed")
    return user.name in found or user.op in COMPARISONS or is_cast or is_place


def _stored_as_whole(graph: Graph, found: set[str]) -> set[str]:
    """Return which of `found` are results or read as whole numbers."""
    users, results = graph.users, {*graph.outputs, *graph.buffer_updates.values()}
    whole = [name for name in found if graph.value(name).dtype == "int64"]
    return {
        name
        for name in whole
        if name in results or not all(_takes_floats(u, name, found) for u in users[name])
    }


def _bounds_of(graph: Graph) -> dict[str, Bounds]:
    """Return between which whole numbers values lie: ranges, and what is computed of them."""
    found: dict[str, Bounds] = {}
    numbers = {n.name: n.args[0] for n in graph.nodes if n.op == "full" and not n.refs}
    truths = {v.name for values in (graph.given, graph.nodes) for v in values if v.dtype == "bool"}

    def known(operand: Operand) -> Bounds | None:
        if isinstance(operand, Ref) and operand.name in numbers:
            return known(numbers[operand.name])
        if isinstance(operand, Ref):
            return (0, 1) if operand.name in truths else found.get(operand.name)
        is_whole = type(operand) is int or (type(operand) is float and operand.is_integer())
        return (int(operand), int(operand)) if is_whole else None

    for node in graph.nodes:
        own: Bounds | None = None
        if node.op == "arange" and node.dtype in {*_WHOLE, "float32", "float64"}:
            start, step = (known(node.attrs[name]) for name in ("start", "step"))  # type: ignore[arg-type]
            if start is not None and step is not None:
                last = start[0] + step[0] * max(0, math.prod(node.shape) - 1)
                own = min(start[0], last), max(start[0], last)
        elif node.dtype in _WHOLE:
            args = node.args[1:] if node.op == "where" else node.args
            given = [known(arg) for arg in args]
            if None not in given:
                own = _computed(node.op, [each for each in given if each is not None])
        if own is not None and max(abs(own[0]), abs(own[1])) < EXACT:
            found[node.name] = own
    return found


def _computed(op: str, given: Sequence[Bounds]) -> Bounds | None:
    """Return the bounds of an operation's result; None of one that is not known."""
    lows, highs = zip(*given, strict=True) if given else ((), ())
    if op in _SAME:
        return given[0]
    if op == "where":
        return min(lows), max(highs)
    if op == "add":
        return sum(lows), sum(highs)
    if op == "neg":
        return -highs[0], -lows[0]
    if op == "sub":
        return lows[0] - highs[1], highs[0] - lows[1]
    if op == "mul":
        products = [a * b for a in given[0] for b in given[1]]
        return min(products), max(products)
    if op in ("minimum", "maximum"):
        chosen = min if op == "minimum" else max
        return chosen(lows), chosen(highs)
    if op == "abs":
        return 0, max(abs(lows[0]), abs(highs[0]))
    if op == "clamp":
        return min(lows), max(highs)
    return None


def _range(node: Node, taken: set[str]) -> Iterator[Node]:
    """Write a range as index * step + start: the last node, a value of its own, has its name."""
    start, step = (float(str(node.attrs[name])) for name in ("start", "step"))
    form = replace(node, attrs={}, dtype=node.dtype if node.dtype in FLOATS else "float32")
    if math.prod(node.shape) == 1:
        yield replace(form, op="full", args=(start,))
        return
    index, scaled = (free_name(f"{node.name}_{end}", taken) for end in ("index", "scaled"))
    is_moved = start != 0 or step < 0  # 0 is added to what may be -0
    yield replace(form, name=index, op="index", args=())
    yield replace(form, name=scaled if is_moved else node.name, op="mul", args=(Ref(index), step))
    if is_moved:
        yield replace(form, op="add", args=(Ref(scaled), start))


def _as_float(node: Node, taken: set[str]) -> Iterator[Node]:
    """Write an operation on whole numbers as one on floats that never gives -0."""
    form = replace(node, dtype="float32")
    if node.op == "neg":
        yield replace(form, op="sub", args=(0, *node.args))
    elif node.op == "mul":
        product = free_name(f"{node.name}_product", taken)
        yield replace(form, name=product)
        yield replace(form, op="add", args=(Ref(product), 0))
    else:
        yield form


# ---- views ----------------------------------------------------------------------------------


def _with_views_apart(graph: Graph) -> Graph:
    """Compute what is viewed in another shape in that shape from the beginning.

    One range may count the rows of a mask, and its columns too.
    """
    alone = computed_of_ranges(graph)
    by_name = {n.name: n for n in graph.nodes}
    taken = {t.name for t in graph.given} | {*by_name}
    nodes: list[Node] = []

    def at(name: str, view: Node, own: str) -> list[Node] | None:
        """Return a value in the shape of a view, as nodes, the last of them called `own`."""
        node = by_name[name]
        if node.op == "index":
            return [replace(node, name=own, shape=view.shape)]
        if node.op == "view":
            return at(node.refs[0], view, own)
        if node.op == "expand":
            return None
        found: list[Node] = []
        args: list[Operand] = []
        for arg in node.args:
            operand = by_name[arg.name] if isinstance(arg, Ref) else None
            if operand is None:
                args.append(arg)
            elif operand.op == "full" and not operand.refs:
                args.append(operand.args[0])
            elif operand.shape == node.shape:
                before = at(operand.name, view, free_name(f"{operand.name}_in_{own}", taken))
                if before is None:
                    return None
                found += before
                args.append(Ref(before[-1].name))
            else:
                return None
        return [*found, replace(node, name=own, shape=view.shape, args=tuple(args))]

    for node in graph.nodes:
        is_view = node.op == "view" and node.name in alone
        apart = at(node.refs[0], node, node.name) if is_view else None
        nodes += [node] if apart is None else apart
    return replace(graph, nodes=tuple(nodes))
