"""Whether a module's forward is that of a family's own `reference.py`, and what is what there.

The reference is recorded twice: at sizes that nothing else has, which tells its sizes, and the
numbers of its modules, from those of the module; then at the module's, where all must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from tuner.capture.capture import capture
from tuner.capture.graph.graph import Graph, Node, Tensor
from tuner.capture.matching import Correspondence, correspondences
from tuner.errors import InputError
from tuner.problem.reference import Problem, load_problem

if TYPE_CHECKING:
    import torch

__all__ = ["Matched", "match_of"]

# Of each named size when the reference is recorded first: primes, far from usual sizes.
_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061)


@dataclass(frozen=True, slots=True)
class Matched:
    """What a family's reference is in terms of a module whose forward is the same.

    Attributes:
        arguments: names of the module's tensors, in the order of the family's forward.
        state: for each parameter or buffer of the family the module's name of it.
        absent: for each of them that the module lacks the number that stands for its elements.
        unused: buffers that the family updates, and the module lacks.
        settings: numbers of the family's modules, by `path.name`.
        init_inputs: arguments of the family's constructor, as JSON that tells tuples from lists.
        has_modes: whether the family computes something else in the other mode, as far as it
            updates buffers: its templates were made for this one.
        has_any_batch: whether it holds for another batch, too.
        sizes: of the family, by name, as they are in the module.
        shapes: in which the family takes the module's tensors, where that has more dimensions
            than its own; else empty.
    """

    arguments: tuple[str, ...]
    state: Mapping[str, str]
    absent: Mapping[str, float]
    unused: tuple[str, ...]
    settings: Mapping[str, float]
    init_inputs: JsonValue
    has_modes: bool = False
    has_any_batch: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def match_of(
    path: Path, names: Sequence[str], graph: Graph, resized: Graph | None
) -> Matched | None:
    """Return how a module's graph is that of a family's reference; None where it is another.

    Args:
        path: the family's `reference.py`.
        names: of its sizes.
        graph: of the module's forward, as captured.
        resized: the same with another batch, None where forward takes no other one.
    """
    if not all(argument.is_tensor for argument in graph.arguments):
        return None
    found = _match(path, names, graph)
    if found is None or resized is None:
        return found
    other = _match(path, names, resized)
    is_same = other is not None and _without_batch(other) == _without_batch(found)
    return replace(found, has_any_batch=is_same)


def _without_batch(found: Matched) -> Matched:
    """Return it without its sizes, of which those of inputs are of one batch."""
    inputs = {*found.arguments}
    shapes = {n: s[1:] if n in inputs else s for n, s in found.shapes.items()}
    return replace(found, sizes={}, shapes=shapes)


def _match(path: Path, names: Sequence[str], graph: Graph) -> Matched | None:
    try:
        return _compared(path, names, graph)
    except InputError:  # the reference cannot be recorded at such sizes
        return None


def _compared(path: Path, names: Sequence[str], graph: Graph) -> Matched | None:
    strange = dict(zip(names, _PRIMES, strict=False))
    probe = load_problem(path, strange, graph.mode)
    marked = {
        name: value * (1 + place / 100)
        for place, (name, value) in enumerate(_numbers_of(probe.model_without_memory()).items(), 1)
    }
    pattern, flat = _recorded(probe, marked), _flattened(graph)
    likely = next(correspondences(pattern, graph, is_exact=False), None)
    if likely is None and flat is not None:
        graph, likely = flat, next(correspondences(pattern, flat, is_exact=False), None)
    if likely is not None:
        sizes = {name: likely.sizes[p] for name, p in strange.items() if p in likely.sizes}
        settings = {
            name: likely.numbers[value]
            for name, value in marked.items()
            if value in likely.numbers
        }
        # Other ways to fit differ in what commutes, not in sizes.
        problem = load_problem(path, sizes, graph.mode)
        exact = _recorded(problem, settings)
        found = next(correspondences(exact, graph, is_exact=True), None)
        if found is not None:
            matched = _matched(problem, exact, found, settings, sizes)
            shapes = {t.name: t.shape for t in graph.given} if graph is flat else {}
            return None if matched is None else replace(matched, shapes=shapes)
    return None


def _matched(
    problem: Problem,
    pattern: Graph,
    found: Correspondence,
    settings: Mapping[str, float],
    sizes: Mapping[str, int],
) -> Matched | None:
    state = [t.name for t in (*pattern.parameters, *pattern.buffers)]
    unused = tuple(n for n in state if n not in found.names and n not in found.absent)
    inputs = [t.name for t in pattern.inputs]
    if not inputs or any(name not in found.names for name in inputs):
        return None
    if not {*unused} <= pattern.buffer_updates.keys():
        return None
    return Matched(
        tuple(found.names[name] for name in inputs),
        {name: found.names[name] for name in state if name in found.names},
        found.absent,
        unused,
        settings,
        _tagged(problem.init_inputs(0)),
        has_modes=bool(pattern.buffer_updates),
        sizes=sizes,
    )


def _numbers_of(model: torch.nn.Module) -> dict[str, float]:
    """Return the numbers that a module's parts hold, such as an eps, by path."""
    return {
        f"{path}.{name}": value
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if type(value) is float and name[:1] != "_"
    }


def _recorded(problem: Problem, settings: Mapping[str, float]) -> Graph:
    """Record a reference with other numbers in its modules."""
    own: Any = problem.module.Model

    class Model(own):  # type: ignore[misc]
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            for place, value in settings.items():
                path, _, name = place.rpartition(".")
                setattr(self.get_submodule(path), name, value)

    vars(problem.module)["Model"] = Model
    try:
        return capture(problem)
    finally:
        vars(problem.module)["Model"] = own


def _tagged(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"tuple": [_tagged(item) for item in value]}
    return [_tagged(item) for item in value] if isinstance(value, list) else value


# ---- dimensions that nothing distinguishes --------------------------------------------------


def _flattened(graph: Graph) -> Graph | None:
    """Return a graph in which neighbouring dimensions are one where no value distinguishes them.

    So a norm of rows is the same in any number of dimensions. None where none can be joined.
    That is of pointwise work and reductions with one result of the largest shape, which update no
    buffer. The names stay; all shapes are of fewer dimensions.
    """
    values: list[Tensor | Node] = [*graph.given, *graph.nodes]
    rank = max((len(v.shape) for v in values), default=0)
    result, *more = [graph.value(name) for name in graph.outputs]
    if more or rank < 2 or len(result.shape) != rank or graph.buffer_updates or 1 in result.shape:
        return None
    for node in graph.nodes:
        is_kept = node.kind == "reduction" and node.attrs["keepdim"] is True
        is_kept &= all(len(graph.value(name).shape) == rank for name in node.refs)
        if not (is_kept or node.kind == "pointwise"):
            return None
    aligned = [_aligned(v.shape, rank, result.shape) for v in values]
    known = [varies for varies in aligned if varies is not None]
    if len(known) < len(aligned):
        return None
    runs: list[list[int]] = [[0]]
    for dim in range(1, rank):
        is_other = any(varies[dim] != varies[dim - 1] for varies in known)
        is_other |= any((dim in axes) != (dim - 1 in axes) for axes in map(_axes, graph.nodes))
        if is_other:
            runs.append([dim])
        else:
            runs[-1].append(dim)
    if len(runs) == rank:
        return None
    return replace(
        graph,
        inputs=tuple(_tensor(t, rank, runs) for t in graph.inputs),
        parameters=tuple(_tensor(t, rank, runs) for t in graph.parameters),
        buffers=tuple(_tensor(t, rank, runs) for t in graph.buffers),
        constants=tuple(_tensor(t, rank, runs) for t in graph.constants),
        nodes=tuple(_node(node, rank, runs) for node in graph.nodes),
    )


def _aligned(shape: Sequence[int], rank: int, full: Sequence[int]) -> tuple[bool, ...] | None:
    """Return over which dimensions a value varies; None where its sizes are others."""
    sizes = (1,) * (rank - len(shape)) + tuple(shape)
    if any(size not in (1, other) for size, other in zip(sizes, full, strict=True)):
        return None
    return tuple(size != 1 for size in sizes)


def _axes(node: Node) -> list[int]:
    """Return the dimensions that a step reduces; its operand has all of them."""
    axes = node.attrs.get("axes", [])
    return [int(str(axis)) for axis in axes] if isinstance(axes, list) else []


def _shape(shape: Sequence[int], rank: int, runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    found = []
    for run in runs:
        own = [dim - rank + len(shape) for dim in run if dim - rank + len(shape) >= 0]
        if own:
            found.append(math.prod(shape[dim] for dim in own))
    return tuple(found)


def _tensor(tensor: Tensor, rank: int, runs: Sequence[Sequence[int]]) -> Tensor:
    return replace(tensor, shape=_shape(tensor.shape, rank, runs))


def _node(node: Node, rank: int, runs: Sequence[Sequence[int]]) -> Node:
    attrs = node.attrs
    if node.kind == "reduction":
        reduced = _axes(node)
        attrs = {**attrs, "axes": [i for i, run in enumerate(runs) if run[0] in reduced]}
    return replace(node, attrs=attrs, shape=_shape(node.shape, rank, runs))
