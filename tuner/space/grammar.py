"""What each node of an expression's tree means: from the tree to a Python function."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuner.trial import Value

__all__ = [
    "COMPILED_AS",
    "FUNCTIONS",
    "WORD",
    "Code",
    "Env",
    "Refused",
    "compile_tree",
    "describe",
    "members",
    "name_of",
    "place_of",
    "truth",
]

COMPILED_AS = "<expression>"  # the file that a compiled expression says it is from
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


def compile_tree(
    node: ast.expr, names: set[str], arguments: Sequence[str] = ()
) -> Callable[..., Value]:
    """Turn `node` into a function of the environment, adding the names it uses to `names`.

    Only what is part of the grammar is compiled: names, literals and its operators. The values of
    `arguments` are given to the function behind the environment, which has the other names.

    Raises:
        Refused: it is outside the grammar. The function raises it too, or KeyError for a name
            that is missing, or an ArithmeticError.
    """
    _check(node, names, 0)
    places = {name: f"n{place}" for place, name in enumerate(arguments)}
    takes = [ast.arg(name) for name in ("env", *places.values())]
    body = _Writer(places).visit(node)
    function = ast.Lambda(ast.arguments([], takes, None, [], [], None, []), body)
    text = ast.fix_missing_locations(ast.Expression(function))
    found: Callable[..., Value] = eval(compile(text, COMPILED_AS, "eval"), dict(_GLOBALS))
    return found


def _check(node: ast.expr, names: set[str], depth: int) -> None:
    """Refuse what is outside the grammar; add the names that are used to `names`."""
    if depth > MAX_DEPTH:
        raise Refused(f"{place_of(node)}nested deeper than {MAX_DEPTH} levels")
    inner: list[ast.expr]
    match node:
        case ast.Constant():
            _constant(node)
            return
        case ast.Name() | ast.Attribute():
            names.add(name_of(node))
            return
        case ast.BinOp() if isinstance(node.op, _ARITHMETIC):
            inner = [node.left, node.right]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not()):
            inner = [node.operand]
        case ast.BoolOp():
            inner = node.values
        case ast.Compare():
            inner = _compared(node)
        case ast.IfExp():
            inner = [node.test, node.body, node.orelse]
        case ast.Call():
            inner = _arguments(node)
        case _:
            raise Refused(f"{place_of(node)}{describe(node)} is not part of the grammar")
    for child in inner:
        _check(child, names, depth + 1)


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


def number(value: Value) -> int | float:
    """Return a value as a number.

    Raises:
        Refused: it is a word.
    """
    if isinstance(value, str):
        raise Refused(f"arithmetic on the word {value!r}")
    return value


def _ordered(value: Value) -> int | float:
    if isinstance(value, str):
        raise Refused(f"words have no order: {value!r}")
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


_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def _compared(node: ast.Compare) -> list[ast.expr]:
    """Return what a comparison computes: all of it but the list after `in`."""
    if any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
        if len(node.ops) > 1:
            raise Refused(f"{place_of(node)}`in` cannot be chained with another comparison")
        members(node.comparators[0])
        return [node.left]
    if not all(isinstance(op, (ast.Eq, ast.NotEq, *_ORDER)) for op in node.ops):
        raise Refused(f"{place_of(node)}`is` is not part of the grammar; use ==")
    return [node.left, *node.comparators]


class _Writer(ast.NodeTransformer):
    """Writes into a tree what the grammar asks: bounds of numbers, no words where none may be."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places  # names that are arguments, by what these are called

    def visit_Name(self, node: ast.Name | ast.Attribute) -> ast.expr:
        name = name_of(node)
        if name in self._places:
            return ast.Name(self._places[name], ast.Load())
        return ast.Subscript(ast.Name("env", ast.Load()), ast.Constant(name), ast.Load())

    visit_Attribute = visit_Name

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        operands = [self._no_word(each, "number") for each in (node.left, node.right)]
        if isinstance(node.op, ast.Pow):
            return _bounded(_call("power", *operands))
        return _bounded(ast.BinOp(operands[0], node.op, operands[1]))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, self._no_word(node.operand, "truth"))
        return _bounded(ast.UnaryOp(node.op, self._no_word(node.operand, "number")))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        parts = [self._no_word(value, "truth") for value in node.values]
        return _call("bool", ast.BoolOp(node.op, parts))

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        branches = self.visit(node.body), self.visit(node.orelse)
        return ast.IfExp(self._no_word(node.test, "truth"), *branches)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        arguments = [self._no_word(argument, "number") for argument in node.args]
        return _bounded(ast.Call(node.func, arguments, []))

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        terms = [node.left, *node.comparators]
        links: list[ast.expr] = []
        for (left, right), op in zip(itertools.pairwise(terms), node.ops, strict=True):
            if isinstance(op, ast.In | ast.NotIn):
                link = ast.Compare(self.visit(left), [op], [right])  # a list of literals
            elif isinstance(op, ast.Eq | ast.NotEq):
                link = ast.Compare(self.visit(left), [op], [self.visit(right)])
            else:
                ends = [self._no_word(each, "ordered") for each in (left, right)]
                link = ast.Compare(ends[0], [op], [ends[1]])
            links.append(link)
        return links[0] if len(links) == 1 else ast.BoolOp(ast.And(), links)

    def _no_word(self, node: ast.expr, check: str) -> ast.expr:
        """Return the node, which is given to a function where it might be a word."""
        written: ast.expr = self.visit(node)
        if isinstance(node, ast.Name | ast.Attribute | ast.IfExp):
            return _call_if_word(written, check)
        is_word = isinstance(node, ast.Constant) and isinstance(node.value, str)
        return _call(check, written) if is_word else written


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), [*arguments], [])


def _call_if_word(node: ast.expr, check: str) -> ast.expr:
    """Return the node, which is given to a function if it is a word: most are numbers."""
    kept = ast.NamedExpr(ast.Name("value", ast.Store()), node)
    kind = ast.Attribute(kept, "__class__", ast.Load())
    is_word = ast.Compare(kind, [ast.Is()], [ast.Name("str", ast.Load())])
    value = ast.Name("value", ast.Load())
    return ast.IfExp(is_word, _call(check, value), value)


def _bounded(node: ast.expr) -> ast.expr:
    """Return the node, which raises beyond 64 bits."""
    found, limit = ast.Name("found", ast.Load()), ast.Constant(MAX_NUMBER)
    kept = ast.NamedExpr(ast.Name("found", ast.Store()), node)
    test = ast.Compare(ast.UnaryOp(ast.USub(), limit), [ast.LtE(), ast.LtE()], [kept, limit])
    return ast.IfExp(test, found, _call("bounded", found))


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
            return -number(_constant(constant))
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


def _arguments(node: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call, of a function that there is."""
    name = node.func.id if isinstance(node.func, ast.Name) else None
    if name not in FUNCTIONS:
        known = ", ".join(FUNCTIONS)
        raise Refused(f"{place_of(node)}{name or 'this'} cannot be called; only {known} can")
    _, least, most = FUNCTIONS[name]
    if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
        raise Refused(f"{place_of(node)}{name} takes plain arguments only")
    if not least <= len(node.args) <= most:
        takes = str(least) if least == most else f"{least} to {most}"
        raise Refused(f"{place_of(node)}{name} takes {takes} arguments, got {len(node.args)}")
    return node.args


_GLOBALS: dict[str, Any] = {
    "__builtins__": {}, "str": str, "bool": bool, "bounded": bounded, "number": number,
    "ordered": _ordered, "power": power, "truth": truth,
    **{name: entry[0] for name, entry in FUNCTIONS.items()},
}  # fmt: skip
