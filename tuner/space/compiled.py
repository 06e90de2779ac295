"""An expression as a Python function of its own, for many configurations one after the other.

It returns what `Expression.evaluate` does or raises: where it raises, the caller asks the
expression itself, which says why. The tree has passed the grammar, so that it holds names,
literals and the grammar's operators only; nothing else is compiled.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from tuner.space.grammar import FUNCTIONS, MAX_NUMBER, Env, bounded, name_of, power

__all__ = ["ABSENT", "condition_of"]


class _Absent:
    """Stands for a value that a configuration lacks: all that asks for it raises."""

    def _raise(self, *_: object) -> bool:
        raise LookupError

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _raise


ABSENT: Any = _Absent()


def condition_of(
    rule: ast.expr, guard: ast.expr | None, otherwise: bool, names: Sequence[str], facts: Env
) -> Callable[..., bool]:
    """Compile a condition, judged where another one holds.

    Args:
        rule: the tree of a parsed expression.
        guard: of another; where it does not hold, the function returns `otherwise`.
        otherwise: see `guard`.
        names: the function's arguments; a value may be `ABSENT`.
        facts: the names with one value. A name that is neither is `ABSENT`.
    """
    write = _Writer(names, facts)
    body = write.condition(rule)
    if guard is not None:
        body = ast.IfExp(write.condition(guard), body, ast.Constant(otherwise))
    arguments = [ast.arg(f"n{i}") for i in range(len(names))]
    function = ast.Lambda(ast.arguments([], arguments, None, [], [], None, []), body)
    code = compile(ast.fix_missing_locations(ast.Expression(function)), "<condition>", "eval")
    known = {name: entry[0] for name, entry in FUNCTIONS.items()}
    found: Callable[..., bool] = eval(
        code, {"__builtins__": {}, "absent": ABSENT, "bounded": bounded, "power": power, **known}
    )
    return found


class _Writer(ast.NodeTransformer):
    """Writes the checks of the grammar into a tree: bounds of numbers, words where none may be.

    A word in arithmetic raises by itself, at the latest where its bounds are checked.
    """

    def __init__(self, names: Sequence[str], facts: Env) -> None:
        self._arguments = {name: f"n{i}" for i, name in enumerate(names)}
        self._facts = facts

    def condition(self, node: ast.expr) -> ast.expr:
        """Return the node as a boolean."""
        if isinstance(node, ast.Compare | ast.BoolOp):
            return self._written(node)
        return _not(_not(self._number(node)))

    def _written(self, node: ast.expr) -> ast.expr:
        found: ast.expr = self.visit(node)
        return found

    def _number(self, node: ast.expr) -> ast.expr:
        """Return the node, which raises if it is a word."""
        may_be_word = isinstance(node, ast.Name | ast.Attribute | ast.IfExp | ast.Constant)
        written = self._written(node)
        if isinstance(written, ast.Constant):
            may_be_word = isinstance(written.value, str)
        return ast.BinOp(written, ast.Sub(), ast.Constant(0)) if may_be_word else written

    def visit_Name(self, node: ast.Name | ast.Attribute) -> ast.expr:
        name = name_of(node)
        if name in self._facts and name not in self._arguments:
            return ast.Constant(self._facts[name])
        return ast.Name(self._arguments.get(name, "absent"), ast.Load())

    visit_Attribute = visit_Name

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        left, right = self._written(node.left), self._written(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(ast.Call(ast.Name("power", ast.Load()), [left, right], []))
        return _bounded(ast.BinOp(left, node.op, right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.Not):
            return _not(self.condition(node.operand))
        return _bounded(ast.UnaryOp(node.op, self._written(node.operand)))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        return ast.BoolOp(node.op, [self.condition(value) for value in node.values])

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        branches = self._written(node.body), self._written(node.orelse)
        return ast.IfExp(self.condition(node.test), *branches)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        arguments = [self._number(argument) for argument in node.args]
        return _bounded(ast.Call(node.func, arguments, []))

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        terms = [node.left, *node.comparators]
        pairs = zip(itertools.pairwise(terms), node.ops, strict=True)
        links = [self._link(left, op, right) for (left, right), op in pairs]
        return links[0] if len(links) == 1 else ast.BoolOp(ast.And(), links)

    def _link(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> ast.expr:
        if isinstance(op, ast.In | ast.NotIn):
            return ast.Compare(self._written(left), [op], [right])  # a list of literals
        if isinstance(op, ast.Eq | ast.NotEq):
            return ast.Compare(self._written(left), [op], [self._written(right)])
        return ast.Compare(self._number(left), [op], [self._number(right)])


def _not(node: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), node)


def _bounded(node: ast.expr) -> ast.expr:
    """Return the node, which raises beyond 64 bits, as the grammar's numbers do."""
    number, limit = ast.Name("number", ast.Load()), ast.Constant(MAX_NUMBER)
    kept = ast.NamedExpr(ast.Name("number", ast.Store()), node)
    test = ast.Compare(ast.UnaryOp(ast.USub(), limit), [ast.LtE(), ast.LtE()], [kept, limit])
    return ast.IfExp(test, number, ast.Call(ast.Name("bounded", ast.Load()), [number], []))
