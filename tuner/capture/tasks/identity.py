"""What a task is, whatever it is called and wherever it stands: its canonical form and two keys.

Values are numbered in the order in which the results need them, so that neither names nor the
order of independent steps count, nor which module the task is part of. Neighbouring dimensions
that no value tells apart are one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.capture.graph.graph import in_order
from tuner.capture.graph.vocabulary import MOVES
from tuner.capture.nests.nest import Nest, Reduction, Scan, Statement, Tap
from tuner.capture.tasks.library import Call
from tuner.trial import content_key

__all__ = ["TaskKeys", "keys_of"]

FORMAT = 1  # of the canonical form; part of the keys
_NUMBER = "number"  # stands for any, where sizes do not count: many a number is made of sizes


@dataclass(frozen=True, slots=True)
class TaskKeys:
    """Content keys of a task, 16 digits each.

    `whole` is equal for tasks that do the same work: operations, dtypes, order in memory, sizes
    and numbers. `form` is of the same without sizes and numbers.
    """

    whole: str
    form: str


def keys_of(task: Nest | Call) -> TaskKeys:
    """Return the keys of a task."""
    return TaskKeys(_key(task, has_sizes=True), _key(task, has_sizes=False))


def _key(task: Nest | Call, *, has_sizes: bool) -> str:
    lines = (
        _call_lines(task, has_sizes) if isinstance(task, Call) else _nest_lines(task, has_sizes)
    )
    return content_key(json.dumps([FORMAT, *lines]))


# ---- nests ----------------------------------------------------------------------------------

_Step = tuple[str, Statement | Reduction]  # where it is computed, and what


def _nest_lines(nest: Nest, has_sizes: bool) -> Iterator[object]:
    dims = _merged(nest)
    sizes = [math.prod(nest.space.sizes[d] for d in run) for run in dims]
    yield [
        "nest",
        sizes if has_sizes else len(sizes),
        [i for i, run in enumerate(dims) if run[0] in nest.space.columns],
        nest.precision,
        *_order(nest, dims),
    ]
    steps = _steps(nest)
    given = {tensor.name: tensor for tensor in nest.arguments}
    numbers: dict[str, int] = {}

    def needs(name: str) -> Sequence[str]:
        if name in nest.taps:
            return [nest.taps[name].source]
        if name in nest.parts:
            return [nest.parts[name]]
        return steps[name][1].refs if name in steps else ()

    for name in in_order([output.name for output in nest.outputs], needs):
        own = nest.space.varies.get(name, frozenset())
        varies = [i for i, run in enumerate(dims) if run[0] in own]
        line: list[object]
        if name in nest.taps:
            line = ["tap", numbers[nest.taps[name].source], *_tap(nest.taps[name], has_sizes)]
        elif name in nest.parts:
            first, apart = nest.space.parts[name]
            places = [first, *(apart.get(run[0], 0) for run in dims)] if has_sizes else []
            line = ["part", numbers[nest.parts[name]], *places]
        elif name in steps:
            line = _step_line(*steps[name], numbers, has_sizes)
        elif name in given:
            # A window's source lies in no dimensions of the loops.
            line = ["given", given[name].dtype, math.prod(given[name].shape) if has_sizes else 0]
        else:
            line = ["index" if name in nest.indices else name]  # or which column it is
        numbers[name] = len(numbers)
        lies = nest.space.orders.get(name, ())
        turned = [i for dim in lies for i, run in enumerate(dims) if run[0] == dim]
        yield [*line, varies, *["channels last"] * (name in nest.space.last), *turned]
    yield ["gives", [[numbers[o.name], o.dtype] for o in nest.outputs]]


def _merged(nest: Nest) -> list[list[int]]:
    """Return the dimensions in runs that no value tells apart; vectors run along the last ones.

    A run is one in memory, too, of all values.
    """
    space = nest.space
    kinds = [set(space.columns), *map(set, space.varies.values())]
    if nest.taps or nest.parts:  # whose axes are dimensions by themselves
        return [[dim] for dim in range(len(space.sizes))]
    runs: list[list[int]] = []
    for dim in range(len(space.sizes)):
        is_alike = runs and all((dim in kind) == (runs[-1][0] in kind) for kind in kinds)
        if is_alike and space.is_run(dim):
            runs[-1].append(dim)
        else:
            runs.append([dim])
    return runs


def _order(nest: Nest, dims: Sequence[Sequence[int]]) -> list[object]:
    """Return the order in memory of what nothing moves, where that is not the dimensions'."""
    if not nest.space.last and nest.space.logical == tuple(range(len(nest.space.sizes))):
        return []
    return [sorted(range(len(dims)), key=lambda i: nest.space.logical.index(dims[i][0]))]


def _steps(nest: Nest) -> dict[str, _Step]:
    """Return what is computed, by name, with the pass in which it is."""
    found: dict[str, _Step] = {s.name: ("before", s) for s in nest.before}
    for number, each in enumerate(nest.passes):
        # A later pass computes anew what it needs of an earlier one: the first says where.
        for statement in each.statements:
            found.setdefault(statement.name, (f"pass {number}", statement))
        found |= {r.name: (f"end {number}", r) for r in each.reductions}
        found |= {s.name: (f"after {number}", s) for s in each.after}
    return found


def _step_line(
    place: str, step: Statement | Reduction, numbers: Mapping[str, int], has_sizes: bool
) -> list[object]:
    if isinstance(step, Reduction):
        scale = repr(step.scale) if has_sizes else _NUMBER
        return [step.fold, f"%{numbers[step.value]}", scale, step.is_wide, place]

    def constant(value: object) -> str:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return _NUMBER if is_number and not has_sizes else repr(value)

    operands = [f"%{numbers[o]}" if isinstance(o, str) else constant(o) for o in step.operands]
    attrs = {name: constant(value) for name, value in sorted(step.attrs.items())}
    scan = [step.fold, step.is_backwards] if isinstance(step, Scan) else []
    return [step.op, operands, attrs, *scan, place]


def _tap(tap: Tap, has_sizes: bool) -> list[object]:
    sizes = [[axis.made, axis.given] for axis in tap.axes] if has_sizes else []
    is_last = tap.channels > 1
    channels = [tap.channels if has_sizes else "channels"] * is_last
    steps = [
        [axis.stride, axis.first, *([axis.every, axis.reach] if axis.every > 1 else [])]
        for axis in tap.axes
    ]
    return [steps, sizes, repr(tap.fill), *channels]


def _call_lines(call: Call, has_sizes: bool) -> Iterator[object]:
    numbers: dict[str, int] = {}
    for name in call.reads:
        numbers.setdefault(name, len(numbers))
    args = call.written(lambda name: f"%{numbers[name]}")
    if not has_sizes and call.function in MOVES | {"reshape", "broadcast_to"}:
        args = [arg for arg in args if arg.startswith("%")]
    yield ["call", call.function, args, call.pick]
    read = dict(zip(call.reads, call.forms, strict=True))
    for number, (shape, dtype) in enumerate([*read.values(), (call.shape, call.dtype)]):
        flat = list(shape)
        if call.function == "linear" and number in (0, len(read)) and len(shape) > 1:
            flat = [math.prod(shape[:-1]), shape[-1]]  # rows are rows, in how many dimensions ever
        yield [flat if has_sizes else len(flat), dtype]
