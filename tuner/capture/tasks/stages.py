"""A graph as tasks, one after the other: loop nests, and calls of PyTorch's own operations.

What does not fit in a nest is of a later one. A value that a later task reads is stored in
between, in its own dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from tuner.capture.graph.graph import Graph, Node, in_order
from tuner.capture.nests.in_place import costly_of_few, with_parts_in_place
from tuner.capture.nests.index_space import (
    OVER_COLUMNS,
    NothingToGenerate,
    NotOneNest,
    refusal,
    viewed,
)
from tuner.capture.nests.nest import DTYPES, Nest
from tuner.capture.nests.nesting import nest_of
from tuner.capture.nests.permuted import with_permuted
from tuner.capture.nests.precision import stored_as, with_products
from tuner.capture.nests.ranges import computed_of_ranges, with_ranges
from tuner.capture.nests.recomputed import with_windows_of_operands
from tuner.capture.nests.scans import with_scans
from tuner.capture.nests.viewing import real_name, with_rows_copied
from tuner.capture.nests.windows import with_windows
from tuner.capture.tasks.grouping import grouped
from tuner.capture.tasks.half_products import makers_of
from tuner.capture.tasks.images import images_of, with_images_copied
from tuner.capture.tasks.library import Call, call_of, is_call, with_results_apart
from tuner.capture.tasks.whole_numbers import counters_of, with_whole_numbers_called

__all__ = ["Partition", "Stages", "stages_of"]


@dataclass(frozen=True, slots=True)
class Partition:
    """One way to cut a graph in tasks.

    In all but the default a nest computes again what an earlier one of its group did, where no
    reduction stands before that, instead of reading it.

    Attributes:
        is_channels_last: whether images lie so between tasks.
        is_recomputed: whether pointwise work before pooling is computed in its windows, and is
            not stored.
        is_apart: whether what follows a reduction, for all columns, is a nest of its own.
        is_in_place: whether parts of tensors, what is joined of such and what is permuted are
            read where they lie, not copied; what costs much of few numbers is computed once.
        is_permuted_apart: whether what is permuted is copied all the same.
    """

    is_channels_last: bool = False
    is_recomputed: bool = False
    is_apart: bool = False
    is_in_place: bool = False
    is_permuted_apart: bool = False

    @property
    def name(self) -> str:
        """What it is called, beside the default that has no name."""
        chosen = [choice.name for choice in fields(self) if getattr(self, choice.name)]
        return "_".join(name.removeprefix("is_") for name in chosen)


@dataclass(frozen=True, slots=True)
class Stages:
    """Tasks in order: nests, and calls of PyTorch's own operations between them.

    Attributes:
        tasks: each reads what is given and what those before it wrote.
        outputs: of the graph, by the name under which a task writes each.
        updates: the buffers that a task's value is written to, with that value's name.
        counters: buffers to which the call adds a whole number, with the number.
        between: what a nest writes for another task, with its shape.
        images: what lies channels last between tasks.
        zeros: tensors of zeros that calls read, or add a number to, with their shape and dtype.
    """

    tasks: tuple[Nest | Call, ...]
    outputs: tuple[str, ...]
    updates: Mapping[str, str]
    counters: Mapping[str, int]
    between: Mapping[str, tuple[int, ...]]
    images: frozenset[str] = frozenset()
    zeros: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    @property
    def nests(self) -> tuple[Nest, ...]:
        """The tasks that are nests, in order."""
        return tuple(task for task in self.tasks if isinstance(task, Nest))

    @property
    def calls(self) -> tuple[Call, ...]:
        """The tasks that are calls, in order."""
        return tuple(task for task in self.tasks if isinstance(task, Call))


_DEFAULT = Partition()


def stages_of(
    graph: Graph, partition: Partition = _DEFAULT, *, may_be_calls: bool = False
) -> Stages:
    """Return a graph as tasks.

    Args:
        graph: of the module.
        partition: how it is cut.
        may_be_calls: whether it may be nothing but PyTorch's own operations, as one of several
            that are computed together.

    Raises:
        NotOneNest: it names the line of the user's file and the operation.
        NothingToGenerate: it is nothing but PyTorch's own operations, and none is a product that
            a kernel of ours takes on a GPU.
    """
    try:
        return _cut_in_tasks(_prepared(graph, partition), partition, may_be_calls)
    except NotOneNest:
        if not partition.is_in_place or partition.is_permuted_apart:
            raise
    # What a permutation moves may fit in no nest.
    partition = replace(partition, is_permuted_apart=True)
    return _cut_in_tasks(_prepared(graph, partition), partition, may_be_calls)


def _cut_in_tasks(graph: Graph, partition: Partition, may_be_calls: bool) -> Stages:
    counters = {buffer: more for buffer, (more, _) in counters_of(graph).items()}
    updates = {
        b: real_name(graph, v) for b, v in graph.buffer_updates.items() if b not in counters
    }
    outputs = tuple(real_name(graph, name) for name in graph.outputs)
    _require_computed(graph, [*zip(graph.outputs, outputs, strict=True), *updates.items()])
    results = {*outputs, *updates.values()}
    left = _computed(graph, results, {graph.buffer_updates[buffer] for buffer in counters})
    memory = _memory_of(graph, left, outputs)
    images = images_of(graph, results) if partition.is_channels_last else frozenset[str]()
    tasks, between = _cut(graph, left, results, memory, partition, images)
    calls = [task for task in tasks if isinstance(task, Call)]
    if len(calls) == len(tasks) and not (calls and may_be_calls):
        _require_ours(graph, calls, left)
    operands = map(graph.value, dict.fromkeys(name for call in calls for name in call.reads))
    filled = [v for v in operands if isinstance(v, Node) and v.op == "full"]
    zeros = {node.name: (node.shape, node.dtype) for node in filled}
    return Stages(tuple(tasks), outputs, updates, counters, between, images, zeros)


def _prepared(graph: Graph, partition: Partition) -> Graph:
    """Return a graph whose nodes are what nests and calls compute."""
    graph = with_results_apart(graph)
    if partition.is_in_place:
        graph = graph if partition.is_permuted_apart else with_permuted(graph)
        graph = with_parts_in_place(graph)
    graph = with_whole_numbers_called(with_ranges(graph))
    graph = with_windows(with_rows_copied(graph))
    if partition.is_recomputed:
        names = {*graph.outputs, *graph.buffer_updates.values()} | computed_of_ranges(graph)
        graph = with_windows_of_operands(graph, {real_name(graph, name) for name in names})
    graph = with_products(with_scans(graph))
    return with_images_copied(graph) if partition.is_channels_last else graph


def _require_computed(graph: Graph, results: Sequence[tuple[str, str]]) -> None:
    """Require that no result is what is given; each has a name, and that of what it shows.

    The first are what forward returns, in order.
    """
    nodes = {n.name for n in graph.nodes}
    for place, (name, real) in enumerate(results):
        given = viewed(graph, real)
        if real in nodes and isinstance(given, Node):
            continue
        what = f"the result {name}"
        if place < len(graph.outputs):
            what = f"result {place + 1} of the {len(graph.outputs)} that forward returns"
        view = next((node for node in graph.nodes if node.name == name), None)
        is_view = "a view of " * (view is not None)
        raise refusal(
            view, f"{what} is {is_view}{given.name}, as it is given", "results that are computed",
            "leave it out of what forward returns, whose caller has it",
        )  # fmt: skip


def _computed(graph: Graph, results: set[str], counted: Collection[str]) -> list[Node]:
    """Return the nodes that tasks compute, in order; calls add numbers to those `counted`."""

    def read(name: str) -> list[str]:
        value = graph.value(name)
        return [real_name(graph, r) for r in value.refs] if isinstance(value, Node) else []

    live = {*in_order([*results], read)}.difference(counted)
    found = [n for n in graph.nodes if n.name in live and real_name(graph, n.name) == n.name]
    found = [n for n in found if n.op not in ("full", "index")]
    return _stored_or_read(graph, found, results)


def _cut(
    graph: Graph,
    nodes: Sequence[Node],
    results: set[str],
    memory: Mapping[str, str],
    partition: Partition,
    images: Collection[str],
) -> tuple[list[Nest | Call], dict[str, tuple[int, ...]]]:
    """Return nodes as tasks, and the shapes of what lies between these; as `Stages` has both."""
    by_name = {n.name: n for n in nodes}
    once = costly_of_few(graph, nodes) - results if partition.is_in_place else set[str]()
    groups = grouped(graph, nodes, once)
    last_reader = {real_name(graph, r): k for k, g in enumerate(groups) for n in g for r in n.refs}
    tasks: list[Nest | Call] = []
    between: dict[str, tuple[int, ...]] = {}
    for number, group in enumerate(groups):
        if is_call(group[0]):
            for node in group:
                tasks += _calls(graph, node, tasks)
            continue
        read = {name for name, reader in last_reader.items() if reader > number}
        while group:
            nest, later = _first(graph, group, results, memory, read, partition, images)
            tasks.append(nest)
            wanted = read | {real_name(graph, r) for n in later for r in n.refs}
            between |= {o.name: by_name[o.name].shape for o in nest.outputs if o.name in wanted}
            group = later
    return tasks, between


def _require_ours(graph: Graph, calls: Sequence[Call], nodes: Sequence[Node]) -> None:
    """Require that a kernel of ours makes one of these calls, which are all that `nodes` are."""
    if not calls:
        raise refusal(None, "nothing is computed")
    if makers_of(graph, calls):
        return
    what = " and ".join(dict.fromkeys(n.op.removeprefix("aten.") for n in nodes))
    number_words = "one call" if len(nodes) == 1 else f"{len(nodes)} calls"
    raise NothingToGenerate(
        f"nothing to generate: the forward is {number_words} of PyTorch's {what}"
    )


def _calls(graph: Graph, node: Node, before: Sequence[Nest | Call]) -> list[Call]:
    """Return a node's call, behind those of the views that it reads."""
    known = {task.name for task in before if isinstance(task, Call)}
    found: list[Call] = []

    def add(name: str) -> None:
        value = graph.value(name)
        if name in known or not isinstance(value, Node) or real_name(graph, name) == name:
            return
        known.add(name)
        for ref in value.refs:
            add(ref)
        found.append(call_of(graph, value))

    for ref in node.refs:
        add(ref)
    return [*found, call_of(graph, node)]


def _memory_of(graph: Graph, nodes: Sequence[Node], outputs: Sequence[str]) -> dict[str, str]:
    """Return the dtypes in memory of results, by name, and of what calls make or read.

    Whole numbers and truths that nests alone read between them are stored as floats.
    """
    found: dict[str, str] = {}
    for name, real in zip(graph.outputs, outputs, strict=True):
        dtype = graph.value(name).dtype
        if found.setdefault(real, dtype) != dtype:
            node = next(n for n in graph.nodes if n.name == real)
            raise refusal(node, f"{real} is returned as {found[real]} and as {dtype}")
    for node in nodes:
        if is_call(node):
            found.setdefault(node.name, node.dtype)
            for ref in node.refs:
                value = graph.value(real_name(graph, ref))
                if not isinstance(value, Node):
                    continue
                if (returned := found.setdefault(value.name, value.dtype)) != value.dtype:
                    what = f"{value.name}, which is {value.dtype} and returned as {returned}"
                    raise refusal(node, f"{node.op} of {what}")
        elif node.op in ("argmax", "argmin"):
            found.setdefault(node.name, node.dtype)
    return found


def _first(
    graph: Graph,
    left: list[Node],
    results: set[str],
    memory: Mapping[str, str],
    read_later: Container[str],
    partition: Partition,
    images: Collection[str],
) -> tuple[Nest, list[Node]]:
    """Return the first nest, and the nodes of later ones."""
    later: set[str] = set()
    users = graph.users
    first: NotOneNest | None = None
    while True:
        own = [n for n in left if n.name not in later]
        if not own:
            assert first is not None
            raise first
        again = set[str]()
        if partition != _DEFAULT:
            again = _computed_again(graph, left, later, results)
        rest = [n for n in left if n.name in later or n.name in again]
        if len(rest) == len(left):  # the same again, for ever
            raise first or refusal(own[0], f"{own[0].op}, which later nests compute again")
        read = {real_name(graph, r) for n in rest for r in n.refs}
        wanted = {
            n.name: memory.get(n.name, stored_as(n))
            for n in own
            if n.name in results
            or (n.name in read and n.name not in again)
            or n.name in read_later
        }
        for name in wanted:
            if wanted[name] not in DTYPES:
                raise refusal(graph.value(name), f"a result is {wanted[name]}")  # type: ignore[arg-type]
        if not wanted and first is not None and again:
            raise first
        if not wanted:
            # Of no use to anything but what comes later: then it is computed there.
            raise refusal(own[0], f"{own[0].op} is of no use")
        try:
            found = nest_of(graph, own, wanted, images, is_apart=partition.is_apart, memory=memory)
            return found, rest
        except NotOneNest as error:
            first = first or error
            if error.node is None:
                raise
            # Of a view that does not fit, only who reads it here: others read it before.
            readers = _readers(graph, own, error.node.name) or [error.node.name]
            behind = in_order(readers, lambda name: [user.name for user in users[name]])
            if later.issuperset(behind):
                raise
            later |= {*behind}
            # A tap is a read, which nothing stores for a later nest, nor whether it is a number.
            taps = {n.name for n in left if n.op == "tap"}
            masks = [n.name for n in left if n.dtype == "bool" and taps & {*n.refs}]
            for name in (*masks, *taps):
                later |= {name} if {user.name for user in users[name]} <= later else set()


def _readers(graph: Graph, own: Sequence[Node], view: str) -> list[str]:
    """Return which of these read a view, as it is or through others; none if it is one of them."""
    if view in {node.name for node in own}:
        return []

    def is_through(name: str) -> bool:
        value = graph.value(name)
        if name == view or not isinstance(value, Node):
            return name == view
        return real_name(graph, name) != name and any(map(is_through, value.refs))

    return [node.name for node in own if any(map(is_through, node.refs))]


def _computed_again(
    graph: Graph, left: Sequence[Node], later: Container[str], results: Container[str]
) -> set[str]:
    """Return what of a nest the later ones compute too.

    No reduction, window or turn stands before it, nor is it what a window is of, which is stored.
    """
    costly: set[str] = set()
    for node in left:
        read = {real_name(graph, ref) for ref in node.refs}
        is_costly = node.op in OVER_COLUMNS or node.op in ("gather", "placed", "tap", "permuted")
        if is_costly or read & costly:
            costly.add(node.name)
    own = {n.name: n for n in left if n.name not in later and n.name not in costly}

    def needed(node: Node) -> list[str]:
        names = [real_name(graph, ref) for ref in node.refs]
        return [name for name in names if name in own and name not in results]

    wanted = [name for n in left if n.name in later and n.op != "tap" for name in needed(n)]
    return set(in_order(wanted, lambda name: needed(own[name])))


def _stored_or_read(graph: Graph, nodes: list[Node], results: set[str]) -> list[Node]:
    """Leave out what each nest that reads it computes of ranges, and nothing else needs."""
    stored = set(results)
    for node in nodes:
        if is_call(node) or node.op == "tap":
            stored |= {real_name(graph, ref) for ref in node.refs}
    alone = computed_of_ranges(graph) - stored
    return [n for n in nodes if n.name not in alone]
