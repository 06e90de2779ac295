"""Compute an expression for many configurations at once, with NumPy.

The result is the one that `Expression.evaluate` has for each row, or there is none: where NumPy
could differ from Python (beyond 64 bits, a division by zero, words in arithmetic, powers of
fractions) `Unsure` is raised, and the caller asks row by row.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.space.grammar import (
    MAX_EXPONENT,
    MAX_NUMBER,
    Code,
    Env,
    Refused,
    compile_tree,
    members,
    name_of,
)
from tuner.trial import Value

__all__ = ["Array", "Bools", "Columns", "Unsure", "column_of", "compile_columns"]

EXACT = 2**53  # whole numbers up to here are exact as float64

Array = NDArray[Any]  # int64, float64 or object (words, or words among numbers)
Bools = NDArray[np.bool_]


class Unsure(Exception):
    """NumPy may not compute what Python would."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Named values of n rows, some of which may lack some of them.

    Attributes:
        num: n.
        values: arrays of shape (n,), by name; where a row lacks one, anything stands in.
        lacks: where rows lack a name, bool (n,); of names that none lacks there is nothing.
        asked: which of all rows were asked for a name that they lack, so that what comes out for
            them means nothing. It is written to.
        rows: where these rows are in `asked`.
    """

    num: int
    values: Mapping[str, Array]
    lacks: Mapping[str, Bools]
    asked: Bools
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, num: int, values: Mapping[str, Array], lacks: Mapping[str, Bools]) -> Columns:
        """Return all of `num` rows, none of which was asked for anything yet."""
        lacking = {name: where for name, where in lacks.items() if where.any()}
        return cls(num, values, lacking, np.zeros(num, dtype=bool), np.arange(num))

    def __getitem__(self, name: str) -> Array:
        if name in self.lacks:
            self.asked[self.rows[self.lacks[name]]] = True
        return self.values[name]

    def some(self, chosen: Bools) -> Columns:
        """Return the chosen rows alone."""
        return Columns(
            int(chosen.sum()),
            {name: column[chosen] for name, column in self.values.items()},
            {name: where[chosen] for name, where in self.lacks.items()},
            self.asked,
            self.rows[chosen],
        )


_Code = Callable[[Columns], Array]


def column_of(values: Sequence[Value]) -> Array:
    """Return the values as an array: int64, float64, or object where there are words."""
    if any(isinstance(value, str) for value in values):
        column = np.empty(len(values), dtype=object)
        column[:] = values
        return column
    if any(isinstance(value, float) for value in values):
        is_exact = all(abs(value) <= EXACT for value in values)  # type: ignore[arg-type]
        return np.array(values, dtype=np.float64 if is_exact else object)
    return np.array(values, dtype=np.int64)


def compile_columns(tree: ast.expr, facts: Env) -> _Code:
    """Turn an expression's tree into a function of columns.

    Args:
        tree: of a parsed expression.
        facts: the names that have one value for all rows.

    Returns:
        A function of n rows, which have the other names. It returns an array of shape (n,), or
        () where the value is the same for all, and raises Unsure.
    """
    names: set[str] = set()
    scalar = compile_tree(tree, names, 0)
    if names <= facts.keys():
        return _constant(scalar, facts)

    def inner(child: ast.expr) -> _Code:
        return compile_columns(child, facts)

    match tree:
        case ast.Name() | ast.Attribute():
            name = name_of(tree)
            return lambda columns: columns[name]
        case ast.BinOp():
            return _binary(_ARITHMETIC[type(tree.op)], inner(tree.left), inner(tree.right))
        case ast.UnaryOp(op=ast.Not()):
            operand = inner(tree.operand)
            return lambda columns: ~_truth(operand(columns))
        case ast.UnaryOp():
            sign = np.array(-1 if isinstance(tree.op, ast.USub) else 1)
            return _binary(_multiply, lambda columns: sign, inner(tree.operand))
        case ast.BoolOp():
            return _connective(tree.op, [inner(value) for value in tree.values])
        case ast.Compare():
            return _comparison(tree, inner)
        case ast.IfExp():
            return _choice(inner(tree.test), inner(tree.body), inner(tree.orelse))
        case ast.Call(func=ast.Name(id=name)):
            return _call(name, [inner(argument) for argument in tree.args])
    raise AssertionError("the grammar has no other node")


def _constant(scalar: Code, facts: Env) -> _Code:
    def run(columns: Columns) -> Array:
        try:
            return column_of([scalar(facts)])[0:1].reshape(())
        except (Refused, ArithmeticError, ValueError):  # row by row it says why, if it is reached
            raise Unsure from None

    return run


# ---- numbers --------------------------------------------------------------------------------


def _is_float(array: Array) -> bool:
    return array.dtype == np.float64


def _bounds(array: Array) -> tuple[Any, Any]:
    """Return the least and the greatest as Python's numbers."""
    return array.min().item(), array.max().item()


def _alike(*arrays: Array) -> tuple[Array, ...]:
    """Return numbers with one type: float64 if any is, which must then be exact for all."""
    for array in arrays:
        if array.dtype == object:
            raise Unsure
    if not any(_is_float(array) for array in arrays):
        return tuple(array.astype(np.int64, copy=False) for array in arrays)
    return tuple(_as_float(array) for array in arrays)


def _as_float(array: Array) -> Array:
    if _is_float(array):
        return array
    low, high = _bounds(array)
    if low < -EXACT or high > EXACT:
        raise Unsure
    return array.astype(np.float64)


def _fits(*extremes: int) -> None:
    if any(abs(extreme) > MAX_NUMBER for extreme in extremes):
        raise Unsure


def _checked(array: Array) -> Array:
    if _is_float(array) and not (np.abs(array) <= MAX_NUMBER).all():  # NaN and infinity too
        raise Unsure
    return array


def _add(left: Array, right: Array) -> Array:
    if not _is_float(left):
        (a, b), (c, d) = _bounds(left), _bounds(right)
        _fits(a + c, b + d)
    return left + right


def _subtract(left: Array, right: Array) -> Array:
    if not _is_float(left):
        (a, b), (c, d) = _bounds(left), _bounds(right)
        _fits(a - d, b - c)
    return left - right


def _multiply(left: Array, right: Array) -> Array:
    if not _is_float(left):
        (a, b), (c, d) = _bounds(left), _bounds(right)
        _fits(a * c, a * d, b * c, b * d)
    return left * right


def _no_zero(array: Array) -> None:
    if not array.all():
        raise Unsure


def _divide(left: Array, right: Array) -> Array:
    _no_zero(right)
    return _as_float(left) / _as_float(right)


def _floor_divide(left: Array, right: Array) -> Array:
    _no_zero(right)
    return left // right


def _modulo(left: Array, right: Array) -> Array:
    _no_zero(right)
    return left % right


def _ceiling_divide(left: Array, right: Array) -> Array:
    _no_zero(right)
    return -(-left // right)


def _power(left: Array, right: Array) -> Array:
    (low, high), (least, most) = _bounds(left), _bounds(right)
    if least < -MAX_EXPONENT or most > MAX_EXPONENT:
        raise Unsure
    if _is_float(left) or least < 0:
        return _power_one_by_one(left, right)
    _fits(max(abs(low), abs(high)) ** most)
    return np.power(left, right)


def _power_one_by_one(left: Array, right: Array) -> Array:
    """Compute each different pair as Python does: NumPy's own power may differ in a bit."""
    bases, which_base = np.unique(_as_float(left), return_inverse=True)
    exponents, which_exponent = np.unique(_as_float(right), return_inverse=True)
    packed = which_base.reshape(left.shape) * len(exponents) + which_exponent.reshape(right.shape)
    different, where = np.unique(packed, return_inverse=True)
    pairs = zip(*np.divmod(different, len(exponents)), strict=True)
    try:
        powers = np.array([bases[i].item() ** exponents[j].item() for i, j in pairs])
    except ArithmeticError:
        raise Unsure from None
    if powers.dtype != np.float64:  # complex: a root of a negative number
        raise Unsure
    return powers[where].reshape(packed.shape)


_Operation = Callable[[Array, Array], Array]
_ARITHMETIC: dict[type[ast.operator], _Operation] = {
    ast.Add: _add,
    ast.Sub: _subtract,
    ast.Mult: _multiply,
    ast.Div: _divide,
    ast.FloorDiv: _floor_divide,
    ast.Mod: _modulo,
    ast.Pow: _power,
}


def _binary(operation: _Operation, left: _Code, right: _Code) -> _Code:
    return lambda columns: _checked(operation(*_alike(left(columns), right(columns))))


def _call(name: str, arguments: list[_Code]) -> _Code:
    if name == "cdiv":
        return _binary(_ceiling_divide, *arguments)
    if name == "log2":
        return lambda columns: _log2(arguments[0](columns))
    if name == "abs":
        return lambda columns: np.abs(_alike(arguments[0](columns))[0])
    fold = np.minimum if name == "min" else np.maximum

    def run(columns: Columns) -> Array:
        first, *rest = _alike(*[argument(columns) for argument in arguments])
        for other in rest:
            first = fold(first, other)
        return first

    return run


def _log2(array: Array) -> Array:
    if array.dtype == object or _bounds(array)[0] <= 0:
        raise Unsure
    different, where = np.unique(array, return_inverse=True)  # NumPy's own may differ in a bit
    exponents = np.array([math.log2(number) for number in different.tolist()])
    return exponents[where].reshape(array.shape)


# ---- conditions -----------------------------------------------------------------------------


def _truth(array: Array) -> Bools:
    if array.dtype == object:
        raise Unsure
    return array.astype(bool)


def _connective(kind: ast.boolop, parts: list[_Code]) -> _Code:
    """Judge each part only where those before it leave the verdict open, as Python does."""
    goes_on = isinstance(kind, ast.And)

    def run(columns: Columns) -> Array:
        is_open = np.ones(columns.num, dtype=bool)  # where the verdict is `goes_on` so far
        for part in parts:
            if not is_open.any():
                break
            here = columns if is_open.all() else columns.some(is_open)
            is_open[is_open] = _truth(part(here)) == goes_on
        return is_open if goes_on else ~is_open

    return run


def _choice(test: _Code, yes: _Code, no: _Code) -> _Code:
    def run(columns: Columns) -> Array:
        chosen = np.broadcast_to(_truth(test(columns)), columns.num)
        if chosen.all():
            return yes(columns)
        if not chosen.any():
            return no(columns)
        values = yes(columns.some(chosen)), no(columns.some(~chosen))
        if all(value.dtype != object for value in values):
            values = _alike(*values)  # type: ignore[assignment]
        kind = np.result_type(*values)
        result = np.empty(len(chosen), dtype=kind)
        result[chosen], result[~chosen] = values
        return result

    return run


def _comparison(node: ast.Compare, inner: Callable[[ast.expr], _Code]) -> _Code:
    first = inner(node.left)
    if isinstance(node.ops[0], ast.In | ast.NotIn):
        listed = [column_of([value]).reshape(()) for value in members(node.comparators[0])]
        is_in = isinstance(node.ops[0], ast.In)

        def contains(columns: Columns) -> Array:
            value = first(columns)
            found = np.zeros(value.shape, dtype=bool)
            for member in listed:
                found |= _equal(value, member)
            return found if is_in else ~found

        return contains
    terms = [first, *[inner(term) for term in node.comparators]]
    if len(node.ops) > 1:  # each link only where those before it hold
        links = [_link(terms[i], op, terms[i + 1]) for i, op in enumerate(node.ops)]
        return _connective(ast.And(), links)
    return _link(terms[0], node.ops[0], terms[1])


_ORDERED: dict[type[ast.cmpop], Callable[[Array, Array], Array]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
}


def _link(left: _Code, op: ast.cmpop, right: _Code) -> _Code:
    if isinstance(op, ast.Eq):
        return lambda columns: _equal(left(columns), right(columns))
    if isinstance(op, ast.NotEq):
        return lambda columns: ~_equal(left(columns), right(columns))
    compare = _ORDERED[type(op)]
    return lambda columns: compare(*_alike(left(columns), right(columns)))


def _equal(left: Array, right: Array) -> Array:
    if object in (left.dtype, right.dtype):  # Python's own ==, element by element
        return np.asarray(np.equal(left, right, dtype=object), dtype=bool)
    left, right = _alike(left, right)
    return np.asarray(left == right)
