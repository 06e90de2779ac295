"""What each node of an expression's tree means: from the tree to nested functions."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from tuner.trial import Value

__all__ = [
    "FUNCTIONS",
    "MAX_NUMBER",
    "WORD",
    "Code",
    "Env",
    "Refused",
    "bounded",
    "compile_tree",
    "describe",
    "members",
    "name_of",
    "place_of",
    "power",
    "truth",
]

WORD = re.compile(r"[A-Za-z0-9_.-]+")  # what a word may be made of, since it reaches source text

MAX_DEPTH = 60  # levels of the tree; far below Python's own recursion limit
MAX_EXPONENT = 64  # with MAX_NUMBER, no power is ever longer than 4096 bits
MAX_NUMBER = 2**63 - 1  # magnitude; what int64_t holds, so that C++ computes the same

Env = Mapping[str, Value]
Code = Callable[[Env], Value]


class Refused(Exception):
    """Why an expression is refused; becomes an ExpressionError that names the text."""


def place_of(node: ast.AST) -> str:
    """Return where `node` stands, as the start of a message."""
    return f"column {getattr(node, 'col_offset', 0) + 1}: "


def compile_tree(node: ast.expr, names: set[str], depth: int) -> Code:
    """Turn `node` into a function of the environment, adding the names it uses to `names`.

    Raises:
        Refused: it is outside the grammar. The function raises it too, or KeyError for a name
            that is missing, or an ArithmeticError.
    """
    if depth > MAX_DEPTH:
        raise Refused(f"{place_of(node)}nested deeper than {MAX_DEPTH} levels")

    def inner(child: ast.expr) -> Code:
        return compile_tree(child, names, depth + 1)

    match node:
        case ast.Constant():
            constant = _constant(node)
            return lambda env: constant
        case ast.Name() | ast.Attribute():
            name = name_of(node)
            names.add(name)
            return operator.itemgetter(name)
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return _arithmetic(type(node.op), inner(node.left), inner(node.right))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            sign = -1 if isinstance(node.op, ast.USub) else 1
            return _arithmetic(ast.Mult, lambda env: sign, inner(node.operand))
        case ast.UnaryOp(op=ast.Not()):
            operand = inner(node.operand)
            return lambda env: not truth(operand(env))
        case ast.BoolOp():
            return _connective(node.op, [inner(value) for value in node.values])
        case ast.Compare():
            return _comparison(node, inner)
        case ast.IfExp():
            test, yes, no = inner(node.test), inner(node.body), inner(node.orelse)
            return lambda env: yes(env) if truth(test(env)) else no(env)
        case ast.Call():
            function, arguments = _call(node)
            codes = [inner(argument) for argument in arguments]
            return lambda env: bounded(function(*[_number(code(env)) for code in codes]))
    raise Refused(f"{place_of(node)}{describe(node)} is not part of the grammar")


def describe(node: ast.AST) -> str:
    """Return what `node` is, for a message."""
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        return f"the operator {type(node.op).__name__}"
    if isinstance(node, ast.List | ast.Tuple):
        return "a list (other than after `in`)"
    return f"a {type(node).__name__}"


def _constant(node: ast.Constant) -> Value:
    value = node.value
    if isinstance(value, str):
        if not WORD.fullmatch(value):
            raise Refused(f"{place_of(node)}a word is made of letters, digits and _ . - only")
        return value
    if isinstance(value, bool | int | float):
        if not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise Refused(f"{place_of(node)}a number beyond 64 bits")
        return value
    raise Refused(f"{place_of(node)}a {type(value).__name__} is not a number, boolean or word")


def name_of(node: ast.expr) -> str:
    """Return the name, with its dots, that `node` is.

    Raises:
        Refused: it is none.
    """
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise Refused(f"{place_of(node)}only names have dots in them, as in device.num_sms")


def _number(value: Value) -> int | float:
    if isinstance(value, str):
        raise Refused(f"arithmetic on the word {value!r}")
    return value


def truth(value: Value) -> bool:
    """Return a value as a condition.

    Raises:
        Refused: it is a word.
    """
    if isinstance(value, str):
        raise Refused(f"the word {value!r} is neither true nor false; compare it")
    return bool(value)


def bounded(number: int | float) -> int | float:
    """Return a number that 64 bits hold.

    Raises:
        Refused: they do not.
    """
    if -MAX_NUMBER <= number <= MAX_NUMBER:  # false for NaN too
        return number
    raise Refused("the result is a number beyond 64 bits")


def power(base: int | float, exponent: int | float) -> int | float:
    """Return a power.

    Raises:
        Refused: the exponent could make it too long, or it is a complex number.
    """
    if not -MAX_EXPONENT <= exponent <= MAX_EXPONENT:
        raise Refused(f"an exponent beyond {MAX_EXPONENT}")
    power = base**exponent
    if isinstance(power, complex):
        raise Refused("a root of a negative number")
    return power


_ARITHMETIC: dict[type[ast.operator], Callable[[int | float, int | float], int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: power,
}


def _arithmetic(kind: type[ast.operator], left: Code, right: Code) -> Code:
    compute = _ARITHMETIC[kind]

    def run(env: Env) -> Value:
        first, second = left(env), right(env)
        if first.__class__ is str or second.__class__ is str:  # faster than calling _number
            _number(first), _number(second)
        number = compute(first, second)  # type: ignore[arg-type]
        return number if -MAX_NUMBER <= number <= MAX_NUMBER else bounded(number)

    return run


def _connective(kind: ast.boolop, parts: list[Code]) -> Code:
    if isinstance(kind, ast.And):
        return lambda env: all(truth(part(env)) for part in parts)
    return lambda env: any(truth(part(env)) for part in parts)


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _comparison(node: ast.Compare, inner: Callable[[ast.expr], Code]) -> Code:
    links: list[tuple[ast.cmpop, Code | tuple[Value, ...]]] = []
    for op, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, ast.In | ast.NotIn):
            links.append((op, members(right)))
        elif type(op) in _COMPARISONS:
            links.append((op, inner(right)))
        else:
            raise Refused(f"{place_of(node)}`is` is not part of the grammar; use ==")
    first = inner(node.left)
    if len(links) == 1:
        return _link(first, *links[0])
    if any(isinstance(right, tuple) for _, right in links):
        raise Refused(f"{place_of(node)}`in` cannot be chained with another comparison")
    chain = list(zip([first, *[right for _, right in links]], links, strict=False))
    parts = [_link(left, op, right) for left, (op, right) in chain]  # type: ignore[arg-type]
    return lambda env: all(part(env) for part in parts)


def _link(left: Code, op: ast.cmpop, right: Code | tuple[Value, ...]) -> Code:
    if isinstance(right, tuple):
        members, wanted = right, isinstance(op, ast.In)
        return lambda env: (left(env) in members) is wanted
    compare, other = _COMPARISONS[type(op)], right
    if isinstance(op, ast.Eq | ast.NotEq):
        return lambda env: compare(left(env), other(env))

    def ordered(env: Env) -> bool:
        first, second = left(env), other(env)
        if first.__class__ is str or second.__class__ is str:
            raise Refused(f"words have no order: {first!r} and {second!r}")
        return compare(first, second)

    return ordered


def members(node: ast.expr) -> tuple[Value, ...]:
    """Return the values of the list after `in`.

    Raises:
        Refused: it is no list of values.
    """
    if not isinstance(node, ast.List | ast.Tuple):
        raise Refused(f"{place_of(node)}`in` needs a list of values, as in x in [1, 2]")
    return tuple(_literal(element) for element in node.elts)


def _literal(node: ast.expr) -> Value:
    match node:
        case ast.Constant():
            return _constant(node)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as constant):
            return -_number(_constant(constant))
    raise Refused(f"{place_of(node)}a list after `in` holds numbers, booleans and words only")


def _cdiv(left: int | float, right: int | float) -> int | float:
    return -(-left // right)


def _log2(number: int | float) -> int | float:
    if number <= 0:
        raise Refused(f"log2 of {number}")
    exponent = math.log2(number)
    return int(exponent) if exponent.is_integer() else exponent


FUNCTIONS: dict[str, tuple[Callable[..., int | float], int, int]] = {
    "min": (min, 2, 8),  # the function, least and most arguments
    "max": (max, 2, 8),
    "abs": (abs, 1, 1),
    "cdiv": (_cdiv, 2, 2),
    "log2": (_log2, 1, 1),
}


def _call(node: ast.Call) -> tuple[Callable[..., int | float], list[ast.expr]]:
    name = node.func.id if isinstance(node.func, ast.Name) else None
    if name not in FUNCTIONS:
        known = ", ".join(FUNCTIONS)
        raise Refused(f"{place_of(node)}{name or 'this'} cannot be called; only {known} can")
    function, least, most = FUNCTIONS[name]
    if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
        raise Refused(f"{place_of(node)}{name} takes plain arguments only")
    if not least <= len(node.args) <= most:
        takes = str(least) if least == most else f"{least} to {most}"
        raise Refused(f"{place_of(node)}{name} takes {takes} arguments, got {len(node.args)}")
    return function, node.args
