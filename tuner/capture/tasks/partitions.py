"""Ways to cut a module's graph in tasks, of which a search tries those that move few bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from tuner.capture.graph.graph import Graph, Tensor, num_bytes_of
from tuner.capture.nests.index_space import NotOneNest
from tuner.capture.nests.nest import Nest
from tuner.capture.nests.paired_sweeps import paired_sweeps
from tuner.capture.tasks.stages import Partition, Stages, stages_of

__all__ = ["partitions_of", "traffic_bytes", "worth_a_search"]

IN_PLACE = Partition(is_in_place=True).name
MOST_COLUMNS = 32768  # of a row that a program holds, and reads once


def partitions_of(graph: Graph, default: Stages) -> dict[str, Stages]:
    """Return the ways to cut a graph but the default, by name: 8 at most, no two alike.

    Args:
        graph: of the module.
        default: its tasks, cut in the default way.
    """
    found: dict[str, Stages] = {}
    choices = [Partition(*choice) for choice in itertools.product((False, True), repeat=3)]
    for partition in [*choices[1:], Partition(is_in_place=True)]:
        try:
            stages = stages_of(graph, partition)
        except NotOneNest:
            continue
        if all(stages.tasks != other.tasks for other in (default, *found.values())):
            found[partition.name] = stages
    return found


def worth_a_search(graph: Graph, found: Mapping[str, Stages]) -> list[str]:
    """Return the default, which has no name, and of both orders of images what moves least.

    Args:
        graph: of the module.
        found: the ways to cut it, by name.

    How much faster PyTorch's convolutions are channels last, traffic does not tell, nor what is
    saved where functions of few numbers are computed once: what is in place is tried anyway.
    """
    traffic = {name: traffic_bytes(graph, stages) for name, stages in found.items()}
    chosen = [""]
    for is_last in (False, True):
        own = [name for name in found if bool(found[name].images) is is_last]
        chosen += [min(own, key=lambda name: traffic[name])] if own else []
    chosen += [name for name in found if name == IN_PLACE]
    return list(dict.fromkeys(chosen))


def traffic_bytes(graph: Graph, stages: Stages) -> int:
    """Return the bytes that tasks read and write; a long row is read in each sweep over it."""
    written = {o.name: o.count * num_bytes_of(o.dtype) for n in stages.nests for o in n.outputs}
    written |= {c.name: math.prod(c.shape) * num_bytes_of(c.dtype) for c in stages.calls}
    total = sum(written.values())
    for call in stages.calls:
        sizes = (written.get(name) or graph.value(name).num_bytes for name in call.reads)
        total += sum(sizes)
    for nest in stages.nests:
        total += _num_sweeps(nest) * sum(_num_read(nest, tensor) for tensor in nest.arguments)
    return total


def _num_read(nest: Nest, tensor: Tensor) -> int:
    """Return how many bytes of a tensor a nest reads: of parts alone, theirs."""
    parts = [name for name, source in nest.parts.items() if source == tensor.name]
    read = {name for statement in nest.statements for name in statement.refs}
    read |= {r.value for r in nest.reductions} | {tap.source for tap in nest.taps.values()}
    if not parts or tensor.name in read:
        return tensor.num_bytes
    count = sum(nest.space.count(nest.space.varies[name]) for name in parts)
    return min(tensor.num_bytes, count * num_bytes_of(tensor.dtype))


def _num_sweeps(nest: Nest) -> int:
    if not nest.reductions or nest.space.cols <= MOST_COLUMNS:
        return 1
    return max(1, len(nest.passes) - len(paired_sweeps(nest)))
