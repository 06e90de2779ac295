"""Pointwise steps that are one: factors, terms, bounds, and steps that change nothing.

Each is the same for every float that a tensor may hold: for Inf, NaN, and where a step in between
rounds to 0 or to Inf. What is not, such as `x * 1e30 * 1e-30`, stays as it is.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping

from tuner.capture.graph.graph import Graph, Node, Operand, Ref
from tuner.capture.graph.vocabulary import MOVES
from tuner.capture.rewrites.edits import Edit, number_of, with_number

__all__ = [
    "bounds_merged", "constant_outputs", "factors_merged", "logsumexp_of_one", "terms_merged",
    "without_effect_dropped",
]  # fmt: skip

Found = tuple[int, str] | None  # the line, and a sentence
Step = Callable[[Edit, Node], str | None]  # makes a change and says which, or leaves all as it is
Bounds = tuple[float, float]
# The smallest and the largest normal number; what is float16 or bfloat16 is computed in float32.
_NORMAL = {"float32": (2.0**-126, 3.4028234663852886e38), "float64": (2.0**-1022, 1.79e308)}
_NORMAL |= {"float16": _NORMAL["float32"], "bfloat16": _NORMAL["float32"]}


def _at_a_node(step: Step) -> Callable[[Edit], Found]:
    """Make of a step one that takes the first node at which it changes something."""

    @functools.wraps(step)
    def at_first(edit: Edit) -> Found:
        for node in edit.graph.nodes:
            if node.dtype in _NORMAL and (text := step(edit, node)) is not None:
                return node.line, text
        return None

    return at_first


# ---- numbers of Python ----------------------------------------------------------------------


@_at_a_node
def factors_merged(edit: Edit, node: Node) -> str | None:
    """Merge two steps that scale by numbers, as in `x * 2 / 3`; `x + x` is `x * 2`.

    Both factors are at least 1 or both at most 1 in magnitude: then the product overflows, or
    rounds to 0, where one of the two steps does; and it is a normal number.
    """
    if node.op == "add" and isinstance(node.args[0], Ref) and node.args[0] == node.args[1]:
        edit.become(node, "mul", node.args[0], 2.0)
        return f"a value added to itself is twice it ({node.name})"
    pair = _pair(edit, node, _factor)
    if pair is None:
        return None
    before, x, first, second = pair
    sizes = [abs(_effect(n, number)) for n, number in ((before, first), (node, second))]
    if not (min(sizes) >= 1 or max(sizes) <= 1):
        return None
    are_divided = node.op == before.op == "div"
    # Of numbers as they are written, so that it is rounded once.
    if node.op == before.op:
        merged = first * second
    else:
        merged = second / first if node.op == "mul" else first / second
    low, high = _NORMAL[node.dtype]
    if not low <= abs(merged) <= high:
        return None
    edit.become(node, "div" if are_divided else "mul", x, merged)
    steps = f"{_SIGNS[before.op]} {first:g} {_SIGNS[node.op]} {second:g}"
    return f"{steps} is {'/' if are_divided else '*'} {merged:.9g} ({node.name})"


_SIGNS = {"mul": "*", "div": "/", "add": "+", "sub": "-"}


def _pair(
    edit: Edit, node: Node, read: Callable[[Node], tuple[Ref, float] | None]
) -> tuple[Node, Ref, float, float] | None:
    """Return the step before one of its kind, its operand, and the numbers of both."""
    outer = read(node)
    before = edit.node(outer[0]) if outer is not None else None
    inner = read(before) if before is not None else None
    if outer is None or before is None or inner is None:
        return None
    if before.dtype != node.dtype or not edit.is_only_for(before, node):
        return None
    return before, inner[0], inner[1], outer[1]


def _effect(node: Node, number: float) -> float:
    """Return by how much a step multiplies."""
    return 1 / number if node.op == "div" else number


def _factor(node: Node) -> tuple[Ref, float] | None:
    """Return what a step scales, and its number."""
    found = with_number(node, ("mul", "div"))
    return found if found and found[1] and math.isfinite(found[1]) else None


@_at_a_node
def terms_merged(edit: Edit, node: Node) -> str | None:
    """Merge two steps that add numbers, as in `x + 2 + 3`.

    The numbers have one sign, so that the sum overflows where one of the two steps does; and their
    sum is exact in the tensor's dtype, so that nothing is lost where x is near to its opposite.
    """
    pair = _pair(edit, node, _term)
    if pair is None or node.dtype not in ("float32", "float64"):
        return None
    _, x, first, second = pair
    merged = first + second
    is_wide = node.dtype == "float64"
    is_exact = is_wide or all(_single(n) == n for n in (first, second, merged))
    if first * second <= 0 or not is_exact or math.fsum([first, second, -merged]) != 0:
        return None
    edit.become(node, "add", x, merged)
    return f"{first:+g} {second:+g} is {merged:+g} ({node.name})"


def _term(node: Node) -> tuple[Ref, float] | None:
    """Return what a number is added to, and the number."""
    found = with_number(node, ("add", "sub"))
    if found is None or not math.isfinite(found[1]):
        return None
    return found[0], found[1] if node.op == "add" else -found[1]


def _single(number: float) -> float:
    """Return the nearest float32."""
    try:
        found: float = struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    return found


# ---- bounds ---------------------------------------------------------------------------------


@_at_a_node
def bounds_merged(edit: Edit, node: Node) -> str | None:
    """Merge two steps that bound a value, such as `relu(x).clamp(max=6)`; NaN stays NaN."""
    outer = _bounds(edit, node)
    before = edit.node(outer[0]) if outer is not None else None
    inner = _bounds(edit, before) if before is not None else None
    if outer is None or before is None or inner is None:
        return None
    if before.dtype != node.dtype or not edit.is_only_for(before, node):
        return None
    low, high = _within(inner[1], outer[1])
    if math.isinf(high):
        edit.become(node, "maximum", inner[0], low)
    elif math.isinf(low):
        edit.become(node, "minimum", inner[0], high)
    else:
        edit.become(node, "clamp", inner[0], low, high)
    return f"{before.op} and {node.op} are bounds from {low:g} to {high:g} ({node.name})"


def _bounds(edit: Edit, node: Node) -> tuple[Ref, Bounds] | None:
    """Return what a step bounds, and by what."""
    if node.op not in ("relu", "clamp", "maximum", "minimum"):
        return None
    first, *others = node.args
    if others and _plain(edit, first) is not None:
        first, others = others[0], [first, *others[1:]]
    numbers = [_plain(edit, other) for other in others]
    if not isinstance(first, Ref) or None in numbers or any(n != n for n in numbers):
        return None
    known = [float(n) for n in numbers if n is not None]
    low, high = {
        "relu": [0.0, math.inf], "clamp": known, "maximum": [*known, math.inf],
        "minimum": [-math.inf, *known],
    }[node.op]  # fmt: skip
    return (first, (low, high)) if low <= high else None


def _within(ends: Bounds, bounds: Bounds) -> Bounds:
    """Return between which numbers a value is, of one between these ends, once it is bounded."""
    low, high = (min(max(end, bounds[0]), bounds[1]) for end in ends)
    return low, high


def _plain(edit: Edit, operand: Operand) -> float | None:
    """Return an operand that is one number everywhere; None where it is not known to be."""
    if not isinstance(operand, Ref):
        return number_of(operand)
    value = edit.seen(operand)
    if isinstance(value, Node):
        return number_of(value.args[0]) if value.op == "full" else None
    return float(value.value) if isinstance(value.value, int | float) else None


# ---- what changes nothing -------------------------------------------------------------------


def without_effect_dropped(edit: Edit) -> Found:
    """Drop a step that returns its operand for every value that this may have, as `x / 1`."""
    ranges = _ranges(edit)

    @_at_a_node
    def dropped(edit: Edit, node: Node) -> str | None:
        operand = _unchanged(edit, node, ranges)
        before = edit.node(operand) if operand is not None else None
        if before is None or not _can_stand_for(edit, before, node):
            return None
        edit.drop(node, Ref(before.name))
        return f"{node.op} changes nothing here ({node.name})"

    return dropped(edit)


def _can_stand_for(edit: Edit, value: Node, node: Node) -> bool:
    """Whether a value may be used in a node's place: an output is a tensor of its own."""
    is_alike = (value.dtype, value.shape) == (node.dtype, node.shape)
    is_own = value.kind != "index" and not edit.is_result(value.name)
    return is_alike and (is_own or not edit.is_result(node.name))


def _unchanged(edit: Edit, node: Node, ranges: Mapping[str, Bounds]) -> Operand | None:
    scaled, moved = _factor(node), _term(node)
    if scaled is not None and scaled[1] == 1:
        return scaled[0]
    if moved is not None and moved[1] == 0 and math.copysign(1, moved[1]) < 0:
        return moved[0]  # -0, or less 0: to add 0 would turn -0 into 0
    bounds = _bounds(edit, node)
    if bounds is not None:
        low, high = ranges.get(bounds[0].name, (-math.inf, math.inf))
        return bounds[0] if bounds[1][0] <= low and high <= bounds[1][1] else None
    is_lower = node.op in ("leaky_relu", "elu") and isinstance(node.args[0], Ref)
    return node.args[0] if is_lower and ranges.get(node.refs[0], (-1, 0))[0] >= 0 else None


def _ranges(edit: Edit) -> dict[str, Bounds]:
    """Return between which numbers values are, whatever is given, unless they are NaN.

    Only what holds in floating point as well: rounding keeps an order.
    """
    found: dict[str, Bounds] = {}
    for node in edit.graph.nodes:
        bounds, everything = _bounds(edit, node), (-math.inf, math.inf)
        if bounds is not None:
            found[node.name] = _within(found.get(bounds[0].name, everything), bounds[1])
        elif node.op in ("exp", "abs", "square"):
            found[node.name] = (0.0, math.inf)
        elif node.op in ("view", "expand", "permute", "slice", "flip", "amax", "amin"):
            found[node.name] = found.get(node.refs[0], everything)
    return found


@_at_a_node
def logsumexp_of_one(edit: Edit, node: Node) -> str | None:
    """Replace log(exp(x - m)) + m by x, with m = x, or 0 where x is infinite.

    So PyTorch writes `logsumexp` over a dimension of size 1.
    """

    def seen(operand: Operand) -> Operand:
        return Ref(edit.seen(operand).name) if isinstance(operand, Ref) else operand

    def operands(operand: Operand, op: str) -> tuple[Operand, ...]:
        found = edit.seen(operand) if isinstance(operand, Ref) else None
        is_it = isinstance(found, Node) and found.op == op
        return tuple(map(seen, found.args)) if isinstance(found, Node) and is_it else ()

    if node.op != "add":
        return None
    log, most = map(seen, node.args)
    chosen, size = operands(most, "where"), math.prod(node.shape)
    for x in chosen[2:]:  # what is chosen where the value is finite
        exp = [e for one in operands(log, "log") for e in operands(one, "exp")]
        is_apart = [operands(one, "sub") for one in exp] == [(x, most)]
        is_infinite = operands(chosen[0], "eq")
        before = edit.node(x)
        if not is_apart or len(is_infinite) != 2 or number_of(is_infinite[1]) != math.inf:
            return None
        if operands(is_infinite[0], "abs") != (x,) or _plain(edit, chosen[1]) != 0:
            return None
        if before is None or before.dtype != node.dtype or math.prod(before.shape) != size:
            return None
        if before.shape != node.shape and not edit.is_result(before.name):
            edit.become(node, "view", Ref(before.name))
        elif _can_stand_for(edit, before, node):
            edit.drop(node, Ref(before.name))
        else:
            return None
        return f"the logarithm of the sum of one exponential is the value itself ({node.name})"
    return None


# ---- constants ------------------------------------------------------------------------------


def constant_outputs(graph: Graph) -> tuple[str, ...]:
    """Return the outputs that are the same for all finite inputs and weights, such as x - x.

    They are computed all the same: Inf and NaN show in them.
    """
    edit = Edit(graph)
    ranges = _ranges(edit)
    constant = {t.name for t in graph.constants}

    def is_constant(node: Node) -> bool:
        low, high = ranges.get(node.name, (0.0, 1.0))
        if low == high or node.kind == "create":
            return True
        if node.op == "sub" and len(node.refs) == 2:
            one, other = (edit.seen(Ref(name)) for name in node.refs)
            shapes = {_packed(edit.shape(arg)) for arg in node.args} | {_packed(node.shape)}
            if one == other and len(shapes) == 1:
                return True
        is_plain = node.kind in ("pointwise", "reduction", "scan") or node.op in MOVES
        return is_plain and all(name in constant for name in node.refs)

    for node in graph.nodes:
        if is_constant(node):
            constant.add(node.name)
    return tuple(name for name in graph.outputs if name in constant)


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
