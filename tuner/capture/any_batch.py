"""What two records of a module, at two batches, tell of any batch: its numbers, its texts.

A number of a graph that depends on the batch becomes a quotient in which the batch is. In texts of
an operator a number that grows with the batch is written as a multiple of it. Where anything else
differs, such as a loop's own text, there is no such text, and the operator is for its own batch
alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tuner.capture.graph.graph import Graph, Node, Operand
from tuner.capture.nests.batch_numbers import BatchNumber, Linear
from tuner.capture.nests.index_space import axes_of
from tuner.capture.nests.indexing import SPLIT_COLUMNS
from tuner.capture.nests.precision import FLOATS
from tuner.capture.nests.ranges import most_rows_of
from tuner.capture.tasks.step_records import Captured

__all__ = [
    "another_batch",
    "any_batch",
    "if_size",
    "lacks_batch",
    "moved_rows",
    "numbers_of_columns",
    "quotient_of",
    "with_batch_numbers",
]

_RELATIVE = 1e-12  # by which numbers of float64 may differ that went another way

_NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.])")
_ESTIMATES = ("flops: ", "bytes: ")  # of which a part may not grow
_VIEWS = tuple(f"- {{aten: {name}, " for name in ("view", "reshape", "expand"))
_PLAN = ("- {call: ", "- {aten: ", "outputs: ", "extra: ")
# The sizes as given, and defaults of blocks and products: any of these is right for any batch.
_AS_GIVEN = re.compile(
    r"(extra_)?sizes: |_TUNED_ROWS = |  (block_|num_warps|product_)\w*: |    default: "
)
# In a module's text: what is seen in a shape, copies that a step keeps, and its results.
_SHAPED = re.compile(
    r"\.(view|reshape|expand)\(\(|_unsafe_view\.default\(|^ +(copy|result)_\d+ = "
)
_TENSOR = re.compile(r"  \w+: \{shape: ")


def another_batch(batch: int, sizes: Collection[int] = (), per_row: Collection[int] = ()) -> int:
    """Return the next prime that is none of a module's other sizes: it divides none of them.

    Loops are cut by how long they are: where those over all rows would be cut otherwise then, one
    below. `per_row` is of how many numbers of each row these may be.
    """
    above = max(3, batch + 1)
    while above in sizes or not _is_prime(above):
        above += 1

    def lengths(rows: int) -> list[bool]:
        return [count * rows >= SPLIT_COLUMNS for count in per_row]

    own = lengths(batch)
    if lengths(above) == own:
        return above
    for below in range(batch - 1, 2, -1):
        if _is_prime(below) and lengths(below) == own and all(size % below for size in sizes):
            return below
    return above


def _is_prime(number: int) -> bool:
    return all(number % d for d in range(2, math.isqrt(number) + 1))


def numbers_of_columns(graph: Graph) -> set[int]:
    """Return of how many numbers of each row reductions over all rows may be, as of a channel."""
    shapes = [node.shape for node in graph.nodes if node.shape[:1] == (graph.batch,)]
    return {math.prod(s) for shape in shapes for s in (shape[2:], shape[1:-1])}


def moved_rows(one: Graph, other: Graph) -> str:
    """Say in which lines rows are no first dimension, of a module recorded at two batches.

    Kernels may then be for one number of rows alone. Nothing where there is no such line.
    """
    lines = [
        node.line
        for node, same in zip(one.nodes, other.nodes, strict=False)
        if node.line and node.shape[:1] == same.shape[:1] and node.shape != same.shape
    ]
    places = [*dict.fromkeys(lines)]
    where = f"line{'s' * (len(places) > 1)} {', '.join(map(str, places))}"
    return f" (rows are not the first dimension of all that {where} has)" if places else ""


def if_size(graph: Graph, rows: int) -> str:
    """Say what to do where the number of rows is another of the sizes as well."""
    sizes = {size for t in graph.inputs for size in t.shape[1:]}
    sizes |= {size for t in (*graph.parameters, *graph.buffers) for size in t.shape}
    if rows not in sizes:
        return ""
    return (
        f": {rows} is another of its sizes, too, and it is not known which of both grows with the "
        "rows; with a number of rows that is none of its sizes (--batch N) a step may take any"
    )


def any_batch(one: str, other: str, batches: tuple[int, int], *, name: str) -> str | None:
    """Return the text for any batch, or None.

    Args:
        one: the text for the first of `batches`.
        other: the text for the second.
        batches: how many rows (dim 0) the inputs have.
        name: what the batch is called in the text.
    """
    lines = [one.split("\n"), other.split("\n")]
    if len(lines[0]) != len(lines[1]):
        return None
    found = [_line(a, b, batches, name) for a, b in zip(*lines, strict=True)]
    return None if None in found else "\n".join(line for line in found if line is not None)


def lacks_batch(op_yaml: str) -> bool:
    """Whether results of a further call have the batch, which none of its arguments has.

    So where a gradient is one number for all rows.
    """
    (extra,) = re.findall(r"^extra: (.*)$", op_yaml, re.MULTILINE) or ["{}"]
    for call in json.loads(extra).values():
        given, made = (
            json.dumps([t.get("shape") for t in call[k]]) for k in ("arguments", "outputs")
        )
        if re.search(r"\bbatch\b", made) and not re.search(r"\bbatch\b", given):
            return True
    return False


def _line(one: str, other: str, batches: tuple[int, int], name: str) -> str | None:
    if one == other or _AS_GIVEN.match(one):
        return one
    step = one.lstrip()
    is_view = step.startswith(_VIEWS)
    is_plan = step.startswith((*_PLAN, *_ESTIMATES)) or _TENSOR.match(one) is not None
    is_result = _SHAPED.search(one) is not None
    if not (is_plan or is_result):
        return None
    mine, its = _NUMBER.split(one), _NUMBER.split(other)
    if mine[::2] != its[::2]:
        return None
    numbers = list(_numbers(mine[1::2], its[1::2], batches, name, one.startswith(_ESTIMATES)))
    if None in numbers:
        return None
    if step.startswith("- {aten: "):  # PyTorch's operations take numbers, and views one -1
        changed = [i for i, n in enumerate(numbers) if n != mine[1::2][i]]
        if not is_view or len(changed) != 1:
            return None
        numbers[changed[0]] = "-1"
    parts = [*mine]
    parts[1::2] = [str(number) for number in numbers]
    return "".join(parts)


def _numbers(
    mine: list[str], its: list[str], batches: tuple[int, int], name: str, is_estimate: bool
) -> Iterator[str | None]:
    """Yield each number as an expression of the batch, None where it does not grow with it."""
    for one, other in zip(map(int, mine), map(int, its), strict=True):
        more = other - one
        each, rest = divmod(more, batches[1] - batches[0])
        fixed = one - each * batches[0]
        if not more:
            yield str(one)
        elif is_estimate and each > 0:
            yield f"{each} * {name} + {max(0, fixed)}"
        elif rest or fixed:
            yield None
        else:
            yield name if each == 1 else f"{each} * {name}"


# ---- numbers of graphs ------------------------------------------------------------------------


def with_batch_numbers(one: Captured, other: Captured) -> tuple[Captured, Captured]:
    """Return two records of a module with what they tell of numbers that depend on the batch.

    The first has then the rows between which both hold, which the second has.
    """
    batches = one.graph.batch, other.graph.batch
    if batches[0] is None or batches[1] is None or batches[0] == batches[1]:
        return one, other
    known = batches[0], batches[1]
    mine, its = _both(one.graph, other.graph, known)
    limits = [its.most_rows, *(most_rows_of(g) for g in (mine, one.in_eval) if g is not None)]
    most = [rows for rows in limits if rows is not None]
    fewest, up_to = max(its.fewest_rows, _fewest_of_variances(mine)), min(most, default=None)
    mine, its = (replace(g, fewest_rows=fewest, most_rows=up_to) for g in (mine, its))
    found = [replace(one, graph=mine), replace(other, graph=its)]
    if one.in_eval is not None and other.in_eval is not None:
        in_eval = _both(one.in_eval, other.in_eval, known)
        found = [replace(f, in_eval=g) for f, g in zip(found, in_eval, strict=True)]
    if one.joint is not None and other.joint is not None:
        forwards = _both(one.joint.forward, other.joint.forward, known)
        joints = one.joint, other.joint
        pairs = zip(*(joint.backwards for joint in joints), strict=False)
        graphs = [_both(a.graph, b.graph, known) for a, b in pairs]
        for n, joint in enumerate(joints):
            own = [g[n] for g in graphs] + [b.graph for b in joint.backwards[len(graphs) :]]
            backwards = [replace(b, graph=g) for b, g in zip(joint.backwards, own, strict=True)]
            joint = replace(joint, forward=forwards[n], backwards=tuple(backwards))
            found[n] = replace(found[n], joint=joint)
    return found[0], found[1]


def _fewest_of_variances(graph: Graph) -> int:
    """Return from how many rows on gradients of a variance over the rows are no mere rounding.

    Of two numbers all normalised ones are 1 or -1, whatever they are.
    """
    for node in graph.nodes:
        shape = graph.value(node.refs[0]).shape if node.op == "var" else ()
        if shape[:1] == (graph.batch,):
            axes = axes_of(node, len(shape))
            if 0 in axes and math.prod(shape[axis] for axis in axes) == graph.batch:
                return 3
    return 1


def _both(one: Graph, other: Graph, batches: tuple[int, int]) -> tuple[Graph, Graph]:
    """Return two graphs with such numbers; as they are where they are not of the same nodes."""
    if [(n.name, n.op) for n in one.nodes] != [(n.name, n.op) for n in other.nodes]:
        return one, other
    nodes = [_nodes(a, b, batches) for a, b in zip(one.nodes, other.nodes, strict=True)]
    return replace(one, nodes=tuple(a for a, _ in nodes)), replace(
        other, nodes=tuple(b for _, b in nodes)
    )


def _nodes(one: Node, other: Node, batches: tuple[int, int]) -> tuple[Node, Node]:
    is_float = one.dtype in FLOATS  # arithmetic on whole numbers stays what it is
    if not is_float or one.args == other.args or len(one.args) != len(other.args):
        return one, other
    args = [_operands(a, b, batches) for a, b in zip(one.args, other.args, strict=True)]
    return replace(one, args=tuple(a for a, _ in args)), replace(
        other, args=tuple(b for _, b in args)
    )


def _operands(one: Operand, other: Operand, batches: tuple[int, int]) -> tuple[Operand, Operand]:
    is_number = [isinstance(n, int | float) and not isinstance(n, bool) for n in (one, other)]
    if not all(is_number) or one == other:
        return one, other
    values = float(one), float(other)  # type: ignore[arg-type]
    found = quotient_of(values, batches)
    if found is None:
        return one, other
    made = [BatchNumber(v, *found, batch) for v, batch in zip(values, batches, strict=True)]
    return made[0], made[1]


def quotient_of(values: Sequence[float], batches: tuple[int, int]) -> tuple[Linear, Linear] | None:
    """Return the quotient in which the batch is that a number at two batches is, if any."""
    for above, below in _quotients(values, batches):
        if all(_is_near(_at(above, below, b), v) for b, v in zip(batches, values, strict=True)):
            return above, below
    return None


def _quotients(
    values: Sequence[float], batches: tuple[int, int]
) -> Iterator[tuple[Linear, Linear]]:
    """Yield what two numbers may be a quotient of, at any batch.

    With n elements in the batch: multiples of n, shares of it, n - 1, multiples of n / (n - 1)
    and shares of n - 1, of which the last three say how many elements a row has.
    """
    (one, other), (first, second) = values, batches
    if 0.0 in values or not all(map(math.isfinite, values)):
        return
    one_more = Linear(0.0, 1.0)
    yield Linear(one / first, 0.0), one_more
    yield Linear(0.0, one * first), Linear(1.0, 0.0)
    yield Linear(float(round((one + 1.0) / first)), -1.0), one_more
    # k n / (n - 1), whose inverse is 1 / k - 1 / (k n).
    slope = (1.0 / one - 1.0 / other) / (1.0 / first - 1.0 / second)
    if slope:
        each = float(round(1.0 / first - 1.0 / (one * slope)))
        less = Linear(each, -1.0)
        if each:
            yield Linear(one * less.at(first) / first, 0.0), less
    # k / (n - 1), whose inverse is n / k - 1 / k.
    slope = (1.0 / other - 1.0 / one) / (second - first)
    rest = slope * first - 1.0 / one
    if rest:
        less = Linear(float(round(slope / rest)), -1.0)
        yield Linear(0.0, one * less.at(first)), less


def _at(above: Linear, below: Linear, batch: int) -> float:
    """Return a quotient at a batch, NaN where it has none."""
    divisor = below.at(batch)
    return above.at(batch) / divisor if divisor else float("nan")


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) <= _RELATIVE * abs(other)
