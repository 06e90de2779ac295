"""Nodes in groups of which each is calls of PyTorch's operations, or what loops compute."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tuner.capture.graph.graph import Graph, Node
from tuner.capture.nests.viewing import real_name
from tuner.capture.tasks.library import is_call

__all__ = ["grouped"]


def grouped(graph: Graph, nodes: Sequence[Node], once: Collection[str]) -> list[list[Node]]:
    """Return nodes in groups, each of calls alone or of what is computed; none is empty.

    A group reads what is given, and what groups before it gave; nodes of one that are computed
    read each other too. What is computed is put as late as what reads it allows: it is then
    computed where it is needed, from what it reads, instead of being stored and read again.

    Args:
        graph: that they are of.
        nodes: in order, without views.
        once: those that are stored for later groups, although these could compute them.
    """
    own = {n.name for n in nodes}
    calls = {n.name for n in nodes if is_call(n)}
    reads = {n.name: {real_name(graph, r) for r in n.refs} & own for n in nodes}
    first: dict[str, int] = {}  # calls have odd numbers
    for node in nodes:
        before = max((first[r] + 2 * (r in once) for r in reads[node.name]), default=0)
        first[node.name] = before + before % 2 + (node.name in calls)
    users: dict[str, list[str]] = {n.name: [] for n in nodes}
    for name, refs in reads.items():
        for ref in refs:
            users[ref].append(name)
    last = dict(first)
    for node in reversed(nodes):
        if node.name not in calls and users[node.name]:
            is_once = node.name in once
            last[node.name] = max(
                first[node.name],
                min(last[u] - (1 if u in calls else 2 * is_once) for u in users[node.name]),
            )
    found: dict[int, list[Node]] = {}
    for node in nodes:
        found.setdefault(last[node.name], []).append(node)
    return [found[number] for number in sorted(found)]
