"""Write an expression as C++ over `int64_t`, computing what Python computes.

Names are sizes: `int64_t` variables in scope, never negative. Where an operand
may be negative all the same (`batch - 1`), division is written so that it rounds down, as
Python's does; C++'s own rounds towards zero.
"""

from __future__ import annotations

import ast

from tuner.space.expression import Expression, expression_error, unknown_name
from tuner.space.grammar import (
    Refused,
    compile_tree,
    describe,
    members,
    name_of,
    place_of,
    truth,
)
from tuner.trial import Value

__all__ = ["to_cpp"]


def to_cpp(expression: Expression) -> str:
    """Write `expression` as C++.

    Raises:
        ExpressionError: what is left has words, fractions, `/`, `**` or `log2`, which have no
            exact meaning in 64-bit integers, or a dotted name.
    """
    try:
        return _write(expression.tree)
    except ZeroDivisionError:
        raise expression_error(expression.text, "division by zero") from None
    except (OverflowError, ValueError):
        raise expression_error(expression.text, "the result is not a finite number") from None
    except Refused as refusal:
        raise expression_error(expression.text, str(refusal)) from None


_OPERATORS: dict[type[ast.AST], str] = {
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

# Python's // and % for operands of any sign. Lambdas, so that each operand is computed once and
# the text needs no helper function beside it.
_FLOORED = {
    "/": "[](int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }",
    "%": "[](int64_t a, int64_t b) { return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0); }",
}


def _constant(node: ast.expr) -> Value | None:
    """Return the value of what has no names, by the grammar's own rules; else None."""
    names: set[str] = set()
    code = compile_tree(node, names)
    return None if names else code({})


def _write(node: ast.expr) -> str:
    """Write one node."""
    value = _constant(node)
    if value is not None:
        return _number(value)
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            raise Refused(unknown_name(name_of(node), ()))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            sign, left, right = _OPERATORS[type(node.op)], _write(node.left), _write(node.right)
            if sign in _FLOORED and not _none_negative([node.left, node.right]):
                return f"{_FLOORED[sign]}({left}, {right})"
            return f"({left} {sign} {right})"
        case ast.UnaryOp():
            sign = {ast.USub: "-", ast.UAdd: "+", ast.Not: "!"}[type(node.op)]
            return f"({sign}{_write(node.operand)})"
        case ast.BoolOp():
            word = " && " if isinstance(node.op, ast.And) else " || "
            return "(" + word.join(_write(value) for value in node.values) + ")"
        case ast.Compare():
            return _comparison(node)
        case ast.IfExp():
            return _choice(node)
        case ast.Call(func=ast.Name(id=name)):
            arguments = [_write(argument) for argument in node.args]
            if name == "cdiv" and not _none_negative(node.args):
                left, right = arguments
                return f"(-{_FLOORED['/']}(-({left}), {right}))"
            return _call(name, arguments)
    raise Refused(f"{place_of(node)}{describe(node)} has no exact meaning in whole numbers")


def _none_negative(nodes: list[ast.expr]) -> bool:
    return all(map(_is_not_negative, nodes))


def _is_not_negative(node: ast.expr) -> bool:
    """Whether the value is certainly 0 or more; a name is a size."""
    value = _constant(node)
    if value is not None:
        return isinstance(value, int | float) and value >= 0
    match node:
        case ast.Name() | ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.BinOp(op=ast.Mod()):  # has the sign of what it is divided by
            return _is_not_negative(node.right)
        case ast.BinOp(op=ast.Add() | ast.Mult() | ast.FloorDiv()):
            return _none_negative([node.left, node.right])
        case ast.IfExp():
            return _none_negative([node.body, node.orelse])
        case ast.Call(func=ast.Name(id="abs")):
            return True
        case ast.Call(func=ast.Name(id="max")):
            return any(_is_not_negative(argument) for argument in node.args)
        case ast.Call():
            return _none_negative(node.args)
    return False


def _number(value: Value) -> str:
    if isinstance(value, str):
        raise Refused(f"the word {value!r} cannot be passed as a whole number")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not value.is_integer():
        raise Refused(f"{value} is not a whole number")
    number = int(value)
    return f"int64_t{{{number}}}"  # typed, so that products of literals cannot overflow int


def _comparison(node: ast.Compare) -> str:
    if isinstance(node.ops[0], ast.In | ast.NotIn):
        left = _write(node.left)
        listed = members(node.comparators[0])
        tests = [f"{left} == {_number(m)}" for m in listed if not isinstance(m, str)]
        text = "(" + (" || ".join(tests) or "false") + ")"
        return text if isinstance(node.ops[0], ast.In) else f"(!{text})"
    terms = [_write(term) for term in (node.left, *node.comparators)]
    signs = [_OPERATORS[type(op)] for op in node.ops]
    links = [f"{terms[i]} {sign} {terms[i + 1]}" for i, sign in enumerate(signs)]
    return (
        f"({links[0]})" if len(links) == 1 else "(" + " && ".join(map("({})".format, links)) + ")"
    )


def _choice(node: ast.IfExp) -> str:
    value = _constant(node.test)
    if value is not None:  # the other branch may hold words
        return _write(node.body if truth(value) else node.orelse)
    test, yes, no = map(_write, (node.test, node.body, node.orelse))
    return f"({test} ? {yes} : {no})"


def _call(name: str, arguments: list[str]) -> str:
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
    raise Refused(f"{name} has no exact meaning in whole numbers")
