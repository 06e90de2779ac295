"""Parameters, constraints with reasons, and the finite list of feasible configurations.

`Expression` is the one small grammar that constraints, `when`, shapes and step arguments are
written in. It is parsed with Python's own parser and interpreted node by node: nothing that a
config says is ever evaluated as Python.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.errors import ExpressionError, did_you_mean
from tuner.trial import Value

__all__ = ["WORD", "Expression", "unknown_name"]

WORD = re.compile(r"[A-Za-z0-9_.-]+")  # what a word may be made of, since it reaches source text

MAX_LENGTH = 1000  # characters; the longest honest constraint seen is under 200
MAX_DEPTH = 60  # levels of the tree; far below Python's own recursion limit
MAX_EXPONENT = 64  # with MAX_NUMBER, no power is ever longer than 4096 bits
MAX_NUMBER = 2**63 - 1  # magnitude; what int64_t holds, so that C++ computes the same

Env = Mapping[str, Value]
Code = Callable[[Env], Value]


class _Refused(Exception):
    """Why an expression is refused; becomes an ExpressionError that names the text."""


# ---- expressions ----------------------------------------------------------------------------


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
    _tree: ast.expr = field(compare=False, repr=False)
    _code: Code = field(compare=False, repr=False)

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
            code = _compile(tree, names, 0)
        except _Refused as refusal:
            raise _error(stripped, str(refusal)) from None
        return cls(stripped, frozenset(names), tree, code)

    def evaluate(self, env: Env) -> Value:
        """Compute the value for the named values of `env`.

        Raises:
            ExpressionError: a name is unknown, or the value cannot be computed (division by
                zero, arithmetic on words, a number beyond 64 bits).
        """
        try:
            return self._code(env)
        except KeyError as missing:
            reason = unknown_name(str(missing.args[0]), env)
        except ZeroDivisionError:
            reason = "division by zero"
        except (OverflowError, ValueError):
            reason = "the result is not a finite number"
        except _Refused as refusal:
            reason = str(refusal)
        raise _error(self.text, reason)

    def holds(self, env: Env) -> bool:
        """Compute the value as a condition; a number other than 0 holds.

        Raises:
            ExpressionError: as for `evaluate`, or the value is a word.
        """
        value = self.evaluate(env)
        if isinstance(value, str):
            raise _error(self.text, f"a condition is needed, got the word {value!r}")
        return bool(value)

    def to_cpp(self, constants: Env) -> str:
        """Write the expression as C++ over `int64_t` variables.

        Names in `constants` become numbers; the others stay and must be `int64_t` in scope.
        `//`, `%` and `cdiv` are C++'s, equal to Python's where no operand is negative.

        Raises:
            ExpressionError: what is left has words, fractions, `/`, `**` or `log2`, which
                have no exact meaning in 64-bit integers, or a dotted name.
        """
        try:
            return _cpp(self._tree, constants)
        except ZeroDivisionError:
            raise _error(self.text, "division by zero") from None
        except (OverflowError, ValueError):
            raise _error(self.text, "the result is not a finite number") from None
        except _Refused as refusal:
            raise _error(self.text, str(refusal)) from None


def unknown_name(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """Return the message for an unknown name, with what is known and the closest of it."""
    names = sorted(known)
    lines = [f"unknown name {name!r}", "  known: " + (", ".join(names) or "nothing")]
    if hint := did_you_mean(name, names):
        lines.append("  " + hint)
    return "\n".join(lines)


def _error(text: str, reason: str) -> ExpressionError:
    shown = text if len(text) <= 120 else text[:100] + f"... ({len(text)} characters)"
    first, *more = reason.split("\n")
    return ExpressionError("\n".join([f"expression {shown!r}: {first}", *more]))


def _parse_tree(text: str) -> ast.expr:
    if not text:
        raise _Refused("nothing is written here")
    if len(text) > MAX_LENGTH:
        raise _Refused(f"longer than {MAX_LENGTH} characters")
    if not text.isascii():
        bad = next(character for character in text if not character.isascii())
        raise _Refused(f"column {text.index(bad) + 1}: {bad!a} is not an ASCII character")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # `1or 2` is refused, not warned about
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        where = f"column {error.offset}: " if error.offset else ""
        raise _Refused(f"{where}{error.msg}") from None
    except (ValueError, MemoryError, RecursionError):
        raise _Refused("cannot be read: too deeply nested, or no text") from None


# ---- from tree to nested functions ----------------------------------------------------------


def _place(node: ast.AST) -> str:
    return f"column {getattr(node, 'col_offset', 0) + 1}: "


def _compile(node: ast.expr, names: set[str], depth: int) -> Code:
    """Turn `node` into a function of the environment, adding the names it uses to `names`."""
    if depth > MAX_DEPTH:
        raise _Refused(f"{_place(node)}nested deeper than {MAX_DEPTH} levels")

    def inner(child: ast.expr) -> Code:
        return _compile(child, names, depth + 1)

    match node:
        case ast.Constant():
            constant = _constant(node)
            return lambda env: constant
        case ast.Name() | ast.Attribute():
            name = _name(node)
            names.add(name)
            return lambda env: env[name]
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return _arithmetic(type(node.op), inner(node.left), inner(node.right))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            sign = -1 if isinstance(node.op, ast.USub) else 1
            return _arithmetic(ast.Mult, lambda env: sign, inner(node.operand))
        case ast.UnaryOp(op=ast.Not()):
            operand = inner(node.operand)
            return lambda env: not _truth(operand(env))
        case ast.BoolOp():
            return _connective(node.op, [inner(value) for value in node.values])
        case ast.Compare():
            return _comparison(node, inner)
        case ast.IfExp():
            test, yes, no = inner(node.test), inner(node.body), inner(node.orelse)
            return lambda env: yes(env) if _truth(test(env)) else no(env)
        case ast.Call():
            function, arguments = _call(node)
            codes = [inner(argument) for argument in arguments]
            return lambda env: _bounded(function(*[_number(code(env)) for code in codes]))
    raise _Refused(f"{_place(node)}{_describe(node)} is not part of the grammar")


def _describe(node: ast.AST) -> str:
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        return f"the operator {type(node.op).__name__}"
    if isinstance(node, ast.List | ast.Tuple):
        return "a list (other than after `in`)"
    return f"a {type(node).__name__}"


def _constant(node: ast.Constant) -> Value:
    value = node.value
    if isinstance(value, str):
        if not WORD.fullmatch(value):
            raise _Refused(f"{_place(node)}a word is made of letters, digits and _ . - only")
        return value
    if isinstance(value, bool | int | float):
        if not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise _Refused(f"{_place(node)}a number beyond 64 bits")
        return value
    raise _Refused(f"{_place(node)}a {type(value).__name__} is not a number, boolean or word")


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise _Refused(f"{_place(node)}only names have dots in them, as in device.num_sms")


def _number(value: Value) -> int | float:
    if isinstance(value, str):
        raise _Refused(f"arithmetic on the word {value!r}")
    return value


def _truth(value: Value) -> bool:
    if isinstance(value, str):
        raise _Refused(f"the word {value!r} is neither true nor false; compare it")
    return bool(value)


def _bounded(number: int | float) -> int | float:
    if -MAX_NUMBER <= number <= MAX_NUMBER:  # false for NaN too
        return number
    raise _Refused("the result is a number beyond 64 bits")


def _power(base: int | float, exponent: int | float) -> int | float:
    if not -MAX_EXPONENT <= exponent <= MAX_EXPONENT:
        raise _Refused(f"an exponent beyond {MAX_EXPONENT}")
    power = base**exponent
    if isinstance(power, complex):
        raise _Refused("a root of a negative number")
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
        number = compute(_number(left(env)), _number(right(env)))
        return number if -MAX_NUMBER <= number <= MAX_NUMBER else _bounded(number)

    return run


def _connective(kind: ast.boolop, parts: list[Code]) -> Code:
    if isinstance(kind, ast.And):
        return lambda env: all(_truth(part(env)) for part in parts)
    return lambda env: any(_truth(part(env)) for part in parts)


def _is_equal(left: Value, right: Value) -> bool:
    return left == right


def _ordered(compare: Callable[[float, float], bool]) -> Callable[[Value, Value], bool]:
    def run(left: Value, right: Value) -> bool:
        if isinstance(left, str) or isinstance(right, str):
            raise _Refused(f"words have no order: {left!r} and {right!r}")
        return compare(left, right)

    return run


_COMPARISONS: dict[type[ast.cmpop], Callable[[Value, Value], bool]] = {
    ast.Eq: _is_equal,
    ast.NotEq: lambda left, right: left != right,
    ast.Lt: _ordered(operator.lt),
    ast.LtE: _ordered(operator.le),
    ast.Gt: _ordered(operator.gt),
    ast.GtE: _ordered(operator.ge),
}


def _comparison(node: ast.Compare, inner: Callable[[ast.expr], Code]) -> Code:
    links: list[tuple[ast.cmpop, Code | tuple[Value, ...]]] = []
    for op, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, ast.In | ast.NotIn):
            links.append((op, _members(right)))
        elif type(op) in _COMPARISONS:
            links.append((op, inner(right)))
        else:
            raise _Refused(f"{_place(node)}`is` is not part of the grammar; use ==")
    first = inner(node.left)
    if len(links) == 1:
        return _link(first, *links[0])
    if any(isinstance(right, tuple) for _, right in links):
        raise _Refused(f"{_place(node)}`in` cannot be chained with another comparison")
    chain = list(zip([first, *[right for _, right in links]], links, strict=False))
    parts = [_link(left, op, right) for left, (op, right) in chain]  # type: ignore[arg-type]
    return lambda env: all(part(env) for part in parts)


def _link(left: Code, op: ast.cmpop, right: Code | tuple[Value, ...]) -> Code:
    if isinstance(right, tuple):
        members, wanted = right, isinstance(op, ast.In)
        return lambda env: (left(env) in members) is wanted
    compare, other = _COMPARISONS[type(op)], right
    return lambda env: compare(left(env), other(env))


def _members(node: ast.expr) -> tuple[Value, ...]:
    if not isinstance(node, ast.List | ast.Tuple):
        raise _Refused(f"{_place(node)}`in` needs a list of values, as in x in [1, 2]")
    return tuple(_literal(element) for element in node.elts)


def _literal(node: ast.expr) -> Value:
    match node:
        case ast.Constant():
            return _constant(node)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as constant):
            return -_number(_constant(constant))
    raise _Refused(f"{_place(node)}a list after `in` holds numbers, booleans and words only")


def _cdiv(left: int | float, right: int | float) -> int | float:
    return -(-left // right)


def _log2(number: int | float) -> int | float:
    if number <= 0:
        raise _Refused(f"log2 of {number}")
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
        raise _Refused(f"{_place(node)}{name or 'this'} cannot be called; only {known} can")
    function, least, most = _FUNCTIONS[name]
    if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
        raise _Refused(f"{_place(node)}{name} takes plain arguments only")
    if not least <= len(node.args) <= most:
        takes = str(least) if least == most else f"{least} to {most}"
        raise _Refused(f"{_place(node)}{name} takes {takes} arguments, got {len(node.args)}")
    return function, node.args


# ---- from tree to C++ -----------------------------------------------------------------------

_CPP_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "/",
    ast.Mod: "%",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


def _cpp(node: ast.expr, constants: Env) -> str:
    """Write one node; what is constant is computed here, by the grammar's own rules."""
    names: set[str] = set()
    code = _compile(node, names, 0)
    if all(name in constants for name in names):
        return _cpp_number(code(constants))

    def inner(child: ast.expr) -> str:
        return _cpp(child, constants)

    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            raise _Refused(unknown_name(_name(node), constants))
        case ast.BinOp() if type(node.op) in _CPP_OPERATORS:
            return f"({inner(node.left)} {_CPP_OPERATORS[type(node.op)]} {inner(node.right)})"
        case ast.UnaryOp():
            sign = {ast.USub: "-", ast.UAdd: "+", ast.Not: "!"}[type(node.op)]
            return f"({sign}{inner(node.operand)})"
        case ast.BoolOp():
            word = " && " if isinstance(node.op, ast.And) else " || "
            return "(" + word.join(inner(value) for value in node.values) + ")"
        case ast.Compare():
            return _cpp_comparison(node, inner)
        case ast.IfExp():
            return _cpp_choice(node, constants)
        case ast.Call(func=ast.Name(id=name)):
            return _cpp_call(name, [inner(argument) for argument in node.args])
    raise _Refused(f"{_place(node)}{_describe(node)} has no exact meaning in whole numbers")


def _cpp_number(value: Value) -> str:
    if isinstance(value, str):
        raise _Refused(f"the word {value!r} cannot be passed as a whole number")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not value.is_integer():
        raise _Refused(f"{value} is not a whole number")
    number = int(value)
    return f"int64_t{{{number}}}"  # typed, so that products of literals cannot overflow int


def _cpp_comparison(node: ast.Compare, inner: Callable[[ast.expr], str]) -> str:
    if isinstance(node.ops[0], ast.In | ast.NotIn):
        left = inner(node.left)
        members = _members(node.comparators[0])
        tests = [f"{left} == {_cpp_number(m)}" for m in members if not isinstance(m, str)]
        text = "(" + (" || ".join(tests) or "false") + ")"
        return text if isinstance(node.ops[0], ast.In) else f"(!{text})"
    terms = [inner(term) for term in (node.left, *node.comparators)]
    signs = [_CPP_OPERATORS[type(op)] for op in node.ops]
    links = [f"{terms[i]} {sign} {terms[i + 1]}" for i, sign in enumerate(signs)]
    return "(" + " && ".join(f"({link})" for link in links) + ")"


def _cpp_choice(node: ast.IfExp, constants: Env) -> str:
    names: set[str] = set()
    code = _compile(node.test, names, 0)
    if all(name in constants for name in names):  # the other branch may hold words
        return _cpp(node.body if _truth(code(constants)) else node.orelse, constants)
    test, yes, no = (_cpp(part, constants) for part in (node.test, node.body, node.orelse))
    return f"({test} ? {yes} : {no})"


def _cpp_call(name: str, arguments: list[str]) -> str:
    if name in ("min", "max"):
        text = arguments[0]
        for argument in arguments[1:]:
            text = f"std::{name}<int64_t>({text}, {argument})"
        return text
    if name == "cdiv":
        left, right = arguments
        return f"((({left}) + ({right}) - 1) / ({right}))"
    if name == "abs":
        return f"std::max<int64_t>({arguments[0]}, -({arguments[0]}))"
    raise _Refused(f"{name} has no exact meaning in whole numbers")
