"""The one small grammar that constraints, `when`, shapes and step arguments are written in.

It is parsed with Python's own parser and interpreted node by node: nothing that a config says is
ever evaluated as Python. `vectorised` computes the same for many configurations at once, `cpp`
writes it as C++.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.errors import ExpressionError, did_you_mean
from tuner.trial import Value

__all__ = [
    "MAX_EXPONENT",
    "MAX_NUMBER",
    "WORD",
    "Code",
    "Env",
    "Expression",
    "Refused",
    "compile_tree",
    "describe",
    "expression_error",
    "members",
    "name_of",
    "place_of",
    "truth",
    "unknown_name",
]

WORD = re.compile(r"[A-Za-z0-9_.-]+")  # what a word may be made of, since it reaches source text

MAX_LENGTH = 1000  # characters; the longest honest constraint seen is under 200
MAX_DEPTH = 60  # levels of the tree; far below Python's own recursion limit
MAX_EXPONENT = 64  # with MAX_NUMBER, no power is ever longer than 4096 bits
MAX_NUMBER = 2**63 - 1  # magnitude; what int64_t holds, so that C++ computes the same

Env = Mapping[str, Value]
Code = Callable[[Env], Value]


class Refused(Exception):
    """Why an expression is refused; becomes an ExpressionError that names the text."""


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression over named values: numbers, booleans and words.

    Two expressions are equal when their texts are.

    Attributes:
        text: as written, without white space around it.
        names: the names that it uses; a dotted one such as `device.num_sms` is one name.
    """

    text: str
    names: frozenset[str] = field(compare=False)
    tree: ast.expr = field(compare=False, repr=False)
    code: Code = field(compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Read an expression.

        Raises:
            ExpressionError: `text` is outside the grammar; the message says where and why.
        """
        stripped = text.strip()
        try:
            tree = _parse_tree(stripped)
            names: set[str] = set()
            code = compile_tree(tree, names, 0)
        except Refused as refusal:
            raise expression_error(stripped, str(refusal)) from None
        return cls(stripped, frozenset(names), tree, code)

    def evaluate(self, env: Env) -> Value:
        """Compute the value for the named values of `env`.

        Raises:
            ExpressionError: a name is unknown, or the value cannot be computed (division by
                zero, arithmetic on words, a number beyond 64 bits).
        """
        try:
            return self._compute(env)
        except KeyError as missing:
            name = str(missing.args[0])
        raise expression_error(self.text, unknown_name(name, env))

    def _compute(self, env: Env) -> Value:
        """Compute the value; KeyError where that asks for a name that `env` lacks."""
        try:
            return self.code(env)
        except ZeroDivisionError:
            reason = "division by zero"
        except (OverflowError, ValueError):
            reason = "the result is not a finite number"
        except Refused as refusal:
            reason = str(refusal)
        raise expression_error(self.text, reason)

    def holds(self, env: Env) -> bool:
        """Compute the value as a condition; a number other than 0 holds.

        Raises:
            ExpressionError: as for `evaluate`, or the value is a word.
        """
        return self._condition(self.evaluate(env))

    def holds_where_known(self, env: Env) -> bool | None:
        """Compute the value as a condition; None where that asks for a name that `env` lacks.

        What decides is computed from left to right, as in Python: `a or b` does not ask for `b`
        where `a` holds, nor `b if a else c` where it does not.

        Raises:
            ExpressionError: as for `holds`, but for names.
        """
        try:
            return self._condition(self._compute(env))
        except KeyError:
            return None

    def _condition(self, value: Value) -> bool:
        if isinstance(value, str):
            raise expression_error(self.text, f"a condition is needed, got the word {value!r}")
        return bool(value)


def unknown_name(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """Return the message for an unknown name, with what is known and the closest of it."""
    names = sorted(known)
    lines = [f"unknown name {name!r}", "  known: " + (", ".join(names) or "nothing")]
    if hint := did_you_mean(name, names) or did_you_mean(name.lower(), names):
        lines.append("  " + hint)
    return "\n".join(lines)


def expression_error(text: str, reason: str) -> ExpressionError:
    """Return the error for the expression `text`; `reason` may have several lines."""
    shown = text if len(text) <= 120 else text[:100] + f"... ({len(text)} characters)"
    first, *more = reason.split("\n")
    return ExpressionError("\n".join([f"expression {shown!r}: {first}", *more]))


def _parse_tree(text: str) -> ast.expr:
    if not text:
        raise Refused("nothing is written here")
    if len(text) > MAX_LENGTH:
        raise Refused(f"longer than {MAX_LENGTH} characters")
    if not text.isascii():
        bad = next(character for character in text if not character.isascii())
        raise Refused(f"column {text.index(bad) + 1}: {bad!a} is not an ASCII character")
    if "\0" in text:  # Python versions differ in what they say of it
        raise Refused(f"column {text.index(chr(0)) + 1}: a null character")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # `1or 2` is refused, not warned about
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        where = f"column {error.offset}: " if error.offset else ""
        raise Refused(f"{where}{error.msg}") from None
    except (ValueError, MemoryError, RecursionError):
        raise Refused("cannot be read: too deeply nested, or no text") from None


# ---- from tree to nested functions ----------------------------------------------------------


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
            return lambda env: _bounded(function(*[_number(code(env)) for code in codes]))
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


def _bounded(number: int | float) -> int | float:
    if -MAX_NUMBER <= number <= MAX_NUMBER:  # false for NaN too
        return number
    raise Refused("the result is a number beyond 64 bits")


def _power(base: int | float, exponent: int | float) -> int | float:
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
    ast.Pow: _power,
}


def _arithmetic(kind: type[ast.operator], left: Code, right: Code) -> Code:
    compute = _ARITHMETIC[kind]

    def run(env: Env) -> Value:
        first, second = left(env), right(env)
        if first.__class__ is str or second.__class__ is str:  # faster than calling _number
            _number(first), _number(second)
        number = compute(first, second)  # type: ignore[arg-type]
        return number if -MAX_NUMBER <= number <= MAX_NUMBER else _bounded(number)

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


_FUNCTIONS: dict[str, tuple[Callable[..., int | float], int, int]] = {
    "min": (min, 2, 8),  # the function, least and most arguments
    "max": (max, 2, 8),
    "abs": (abs, 1, 1),
    "cdiv": (_cdiv, 2, 2),
    "log2": (_log2, 1, 1),
}


def _call(node: ast.Call) -> tuple[Callable[..., int | float], list[ast.expr]]:
    name = node.func.id if isinstance(node.func, ast.Name) else None
    if name not in _FUNCTIONS:
        known = ", ".join(_FUNCTIONS)
        raise Refused(f"{place_of(node)}{name or 'this'} cannot be called; only {known} can")
    function, least, most = _FUNCTIONS[name]
    if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
        raise Refused(f"{place_of(node)}{name} takes plain arguments only")
    if not least <= len(node.args) <= most:
        takes = str(least) if least == most else f"{least} to {most}"
        raise Refused(f"{place_of(node)}{name} takes {takes} arguments, got {len(node.args)}")
    return function, node.args
