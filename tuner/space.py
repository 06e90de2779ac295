"""Parameters, constraints with reasons, and the finite list of feasible configurations.

`Expression` is the one small grammar that constraints, `when`, shapes and step arguments are
written in. It is parsed with Python's own parser and interpreted node by node: nothing that a
config says is ever evaluated as Python.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tuner.errors import ExpressionError, InputError, did_you_mean
from tuner.trial import Params, Value

__all__ = ["WORD", "Constraint", "Expression", "Parameter", "SearchSpace", "unknown_name"]

WORD = re.compile(r"[A-Za-z0-9_.-]+")  # what a word may be made of, since it reaches source text

MAX_LENGTH = 1000  # characters; the longest honest constraint seen is under 200
MAX_DEPTH = 60  # levels of the tree; far below Python's own recursion limit
MAX_EXPONENT = 64  # with MAX_NUMBER, no power is ever longer than 4096 bits
MAX_NUMBER = 2**63 - 1  # magnitude; what int64_t holds, so that C++ computes the same
MAX_VISITED = 40_000_000  # partial configurations judged; about 20 s at 0.5 us each
MAX_MEMO = 1_000_000  # remembered verdicts of one constraint; about 100 MB

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
    if hint := did_you_mean(name, names) or did_you_mean(name.lower(), names):
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
            return operator.itemgetter(name)
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
        first, second = left(env), right(env)
        if first.__class__ is str or second.__class__ is str:  # faster than calling _number
            _number(first), _number(second)
        number = compute(first, second)  # type: ignore[arg-type]
        return number if -MAX_NUMBER <= number <= MAX_NUMBER else _bounded(number)

    return run


def _connective(kind: ast.boolop, parts: list[Code]) -> Code:
    if isinstance(kind, ast.And):
        return lambda env: all(_truth(part(env)) for part in parts)
    return lambda env: any(_truth(part(env)) for part in parts)


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
    if isinstance(op, ast.Eq | ast.NotEq):
        return lambda env: compare(left(env), other(env))

    def ordered(env: Env) -> bool:
        first, second = left(env), other(env)
        if first.__class__ is str or second.__class__ is str:
            raise _Refused(f"words have no order: {first!r} and {second!r}")
        return compare(first, second)

    return ordered


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
    return (
        f"({links[0]})" if len(links) == 1 else "(" + " && ".join(map("({})".format, links)) + ")"
    )


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


# ---- the search space -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tunable name and its values; absent from `params` where `when` does not hold."""

    name: str
    values: tuple[Value, ...]
    when: Expression | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that every configuration obeys, and why there is such a rule.

    It is judged only where all its names exist and `when` (if given) holds; a fact that this
    device does not have (a CPU's `device.num_sms`) does not exist either. `origin` says who asks
    for it, such as `gemm.yaml:12` or `template wgmma`.
    """

    expression: Expression
    why: str
    origin: str = ""
    when: Expression | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names that must exist for the constraint to be judged."""
        return self.expression.names | (self.when.names if self.when else frozenset())


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Parameters, constraints, and every configuration that obeys them.

    A feasible configuration is kept as one whole number, its rank: the positions of its values
    are the digits, the first declared parameter's most significant. Sorted ranks are therefore
    the order of declaration, whatever order the enumeration visited.

    Attributes:
        facts: the named values that are not tuned: problem sizes and device facts.
        rejections: for each constraint, how many combinations of values it was the first to
            reject; its sum with `num_feasible` is `num_cartesian` where nothing is conditional.
    """

    parameters: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...]
    facts: Mapping[str, Value]
    rejections: Mapping[str, int]
    _ranks: list[int] = field(repr=False)
    _order: tuple[Parameter, ...] = field(repr=False)

    @classmethod
    def build(
        cls,
        parameters: Sequence[Parameter],
        constraints: Sequence[Constraint],
        facts: Mapping[str, Value],
        *,
        max_feasible: int = 2_000_000,
    ) -> SearchSpace:
        """Enumerate the feasible configurations.

        Raises:
            ExpressionError: a `when` or constraint uses an unknown name or cannot be computed.
            InputError: two parameters share a name, a parameter has no values or one of them
                twice, conditions go round in a circle, nothing is feasible (with what each
                constraint rejects), or more than `max_feasible` configurations are.
        """
        _check_declared(parameters, constraints, facts)
        order = _enumeration_order(parameters, constraints)
        walk = _Walk(tuple(parameters), order, tuple(constraints), facts, max_feasible)
        walk.run()
        if not walk.ranks:
            raise InputError(_explain_nothing(walk))
        walk.ranks.sort()
        rejections: dict[str, int] = {}
        for constraint, count in zip(constraints, walk.rejected, strict=True):
            rejections[constraint.why] = rejections.get(constraint.why, 0) + count
        return cls(
            tuple(parameters), tuple(constraints), dict(facts), rejections, walk.ranks, order
        )

    @classmethod
    def listed(cls, parameters: Sequence[Parameter], rows: NDArray[np.int64]) -> SearchSpace:
        """Make the space in which exactly the given configurations are feasible.

        Args:
            parameters: as declared; one with `when` may be absent.
            rows: int (n, d), each row different: the positions of the values by parameter; a
                parameter that is absent has the position after its last value.
        """
        weights = _weights(parameters)
        order = tuple(parameters)
        ranks = [
            sum(
                digit * weights[parameter.name]
                for parameter, digit in zip(order, row, strict=True)
            )
            for row in rows.tolist()
        ]
        return cls(order, (), {}, {}, sorted(ranks), order)

    @property
    def num_cartesian(self) -> int:
        """How many combinations of values there are before conditions and constraints."""
        return math.prod(len(parameter.values) for parameter in self.parameters)

    @property
    def num_feasible(self) -> int:
        """How many configurations are feasible; at least 1."""
        return len(self._ranks)

    @property
    def feasible(self) -> Sequence[Params]:
        """Every feasible configuration, in the order of declaration."""
        return _Feasible(self)

    def coordinates(self, position: int) -> tuple[int, ...]:
        """Return the positions of the values of `feasible[position]`, by parameter.

        A parameter that is absent has the position after its last value.
        """
        rank = self._ranks[position]
        digits = []
        for parameter in reversed(self.parameters):
            rank, digit = divmod(rank, _base(parameter))
            digits.append(digit)
        return tuple(reversed(digits))

    def index(self, params: Mapping[str, Value]) -> int | None:
        """Return the position of `params` in `feasible`, None when it is not there."""
        rank = 0
        for parameter in self.parameters:
            digit = len(parameter.values)
            if parameter.name in params:
                if params[parameter.name] not in parameter.values:
                    return None
                digit = parameter.values.index(params[parameter.name])
            elif parameter.when is None:
                return None
            rank = rank * _base(parameter) + digit
        position = bisect_left(self._ranks, rank)
        is_there = position < len(self._ranks) and self._ranks[position] == rank
        known = {parameter.name for parameter in self.parameters}
        return position if is_there and params.keys() <= known else None

    def reject(self, params: Mapping[str, Value]) -> str | None:
        """Say why `params` is no configuration of this space; None when it is feasible.

        The reason is the `why` of the first constraint that it violates, or which parameter
        is missing, unknown, absent by its condition, or has a value that is not declared.
        """
        env: dict[str, Value] = {**self.facts, **params}
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in params:
            if name not in known:
                return unknown_name(name, known)
        for parameter in self._order:
            exists = _exists(parameter, env)
            if parameter.name not in params:
                if exists:
                    return f"{parameter.name} has no value"
            elif not exists and parameter.when is not None:
                return f"{parameter.name} exists only when {parameter.when.text}"
            elif params[parameter.name] not in parameter.values:
                values = ", ".join(str(value) for value in parameter.values)
                return f"{parameter.name} = {params[parameter.name]} is not one of {values}"
        judges = ((constraint.why, _judge(constraint)) for constraint in self.constraints)
        return next((why for why, judge in judges if not judge(env)), None)

    def neighbours(self, params: Mapping[str, Value]) -> list[Params]:
        """Return the feasible configurations that differ from `params` in one parameter.

        Where that change makes other parameters vanish they are dropped; where it makes some
        appear they take the first values, in the order of declaration, that are feasible.
        """
        found = []
        for parameter in self.parameters:
            if parameter.name not in params:
                continue
            for value in parameter.values:
                if value != params[parameter.name]:
                    changed = self.complete({**params, parameter.name: value})
                    found.extend([] if changed is None else [changed])
        return found

    def complete(self, wanted: Mapping[str, Value]) -> Params | None:
        """Return the feasible configuration that `wanted` describes, None when there is none.

        What cannot exist beside the rest is dropped; what is missing takes the first values, in
        the order of declaration, that are feasible.
        """
        names = {parameter.name for parameter in self.parameters}

        def complete(depth: int, env: dict[str, Value]) -> Iterator[Params]:
            if depth == len(self._order):
                yield {p.name: env[p.name] for p in self.parameters if p.name in env}
                return
            parameter = self._order[depth]
            if not _exists(parameter, env):
                values: Sequence[Value] = ()
                yield from complete(depth + 1, env)
            elif parameter.name in wanted:
                values = (wanted[parameter.name],)
            else:
                values = parameter.values
            for value in values:
                yield from complete(depth + 1, {**env, parameter.name: value})

        facts = {name: value for name, value in self.facts.items() if name not in names}
        tries = itertools.islice(complete(0, facts), 1000)  # enough, and bounded
        return next((params for params in tries if self.index(params) is not None), None)


class _Feasible(Sequence[Params]):
    """The feasible configurations, each unpacked from its rank when it is looked at."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space

    def __len__(self) -> int:
        return self._space.num_feasible

    @overload
    def __getitem__(self, position: int) -> Params: ...
    @overload
    def __getitem__(self, position: slice) -> list[Params]: ...
    def __getitem__(self, position: int | slice) -> Params | list[Params]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        digits = self._space.coordinates(position)
        pairs = zip(self._space.parameters, digits, strict=True)
        return {p.name: p.values[digit] for p, digit in pairs if digit < len(p.values)}


def _base(parameter: Parameter) -> int:
    """How many digits a parameter has: its values, and absence where it is conditional."""
    return len(parameter.values) + (parameter.when is not None)


def _exists(parameter: Parameter, env: Env) -> bool:
    when = parameter.when
    return when is None or (all(name in env for name in when.names) and when.holds(env))


def _check_declared(
    parameters: Sequence[Parameter], constraints: Sequence[Constraint], facts: Env
) -> None:
    names: set[str] = set()
    for parameter in parameters:
        if parameter.name in names or parameter.name in facts:
            raise InputError(f"the name {parameter.name!r} is declared twice")
        if len(set(parameter.values)) < len(parameter.values) or not parameter.values:
            raise InputError(f"{parameter.name} needs values, each of them once")
        names.add(parameter.name)
    known = [*names, *facts]
    rules = [(p.when, f"{p.name}: when") for p in parameters if p.when]
    rules += [(c.expression, c.origin or "constraint") for c in constraints]
    rules += [(c.when, c.origin or "constraint") for c in constraints if c.when]
    for rule, place in rules:
        for name in sorted(rule.names - set(known)):
            if name.startswith("device."):  # a fact of another kind of device: never judged
                continue
            raise ExpressionError(f"{place}: {rule.text!r}: {unknown_name(name, known)}")


# ---- enumeration ----------------------------------------------------------------------------


def _enumeration_order(
    parameters: Sequence[Parameter], constraints: Sequence[Constraint]
) -> tuple[Parameter, ...]:
    """Order the parameters so that constraints can be judged early.

    Again and again, the constraint with the fewest combinations of values left to choose is
    completed. What a `when` needs comes before the parameter that has it.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    needs = {name: _needs(name, by_name, ()) for name in by_name}
    order: dict[str, None] = {}
    pending = [_with_needs(constraint.names, needs) for constraint in constraints]
    while pending := [left for names in pending if (left := names - order.keys())]:
        easiest = min(pending, key=lambda left: math.prod(len(by_name[n].values) for n in left))
        for name in sorted(easiest, key=lambda n: (len(needs[n]), len(by_name[n].values), n)):
            order[name] = None
    for name in sorted(by_name, key=lambda n: len(needs[n])):
        order[name] = None
    return tuple(by_name[name] for name in order)


def _with_needs(names: frozenset[str], needs: Mapping[str, frozenset[str]]) -> frozenset[str]:
    tuned = names & needs.keys()
    return tuned.union(*(needs[name] for name in tuned))


def _needs(name: str, by_name: Mapping[str, Parameter], path: tuple[str, ...]) -> frozenset[str]:
    """Return the parameters that `name` exists by, and what they exist by."""
    if name in path:
        circle = " -> ".join([*path[path.index(name) :], name])
        raise InputError(f"the conditions of parameters go round in a circle: {circle}")
    when = by_name[name].when
    direct = when.names & by_name.keys() if when else frozenset()
    return direct.union(*(_needs(other, by_name, (*path, name)) for other in direct))


class _Walk:
    """One depth-first walk over partial configurations, pruned by every constraint it can judge.

    `ranks` are the feasible configurations found, `rejected` counts by constraint the
    combinations of values that it cut off.
    """

    def __init__(
        self,
        parameters: tuple[Parameter, ...],
        order: tuple[Parameter, ...],
        constraints: tuple[Constraint, ...],
        facts: Env,
        max_feasible: int,
    ) -> None:
        self.parameters = parameters
        self.order = order
        self.constraints = constraints
        self.facts = facts
        self.max_feasible = max_feasible
        self.ranks: list[int] = []
        self.rejected = [0] * len(constraints)
        self.num_visited = 0
        self._env = dict(facts)
        self._weights = _weights(parameters)
        depths = {parameter.name: depth for depth, parameter in enumerate(order)}
        self._judges: list[list[tuple[int, Callable[[Env], bool]]]] = [[] for _ in order]
        self._first: list[tuple[int, Callable[[Env], bool]]] = []  # those of facts alone
        certain = facts.keys() | {p.name for p in order if p.when is None}
        for number, constraint in enumerate(constraints):
            tuned = constraint.names & depths.keys()
            depth = max((depths[name] for name in tuned), default=-1)
            comes_again = len(tuned) <= depth  # some parameter before is not among them
            judge = (number, _judge(constraint, sorted(tuned) if comes_again else (), certain))
            (self._judges[depth] if tuned else self._first).append(judge)
        sizes = [len(parameter.values) for parameter in order]
        self._below = [math.prod(sizes[depth + 1 :]) for depth in range(len(order))]
        self._num_cartesian = math.prod(sizes)

    def run(self) -> None:
        """Walk it all."""
        for number, judge in self._first:
            if not judge(self._env):
                self.rejected[number] += self._num_cartesian
                return
        try:
            self._visit(0, 0)
        except ExpressionError as error:
            at = {p.name: self._env[p.name] for p in self.parameters if p.name in self._env}
            where = ", ".join(f"{name} = {value}" for name, value in at.items())
            raise ExpressionError(f"{error}\n  where: {where}") from None

    def _visit(self, depth: int, rank: int) -> None:
        if depth == len(self.order):
            self.ranks.append(rank)
            if len(self.ranks) > self.max_feasible:
                raise InputError(_explain_too_many(self))
            return
        parameter, env = self.order[depth], self._env
        weight, judges = self._weights[parameter.name], self._judges[depth]
        if not _exists(parameter, env):
            self._visit(depth + 1, rank + weight * len(parameter.values))
            return
        self.num_visited += len(parameter.values)
        if self.num_visited > MAX_VISITED:
            raise InputError(_explain_too_long(self))
        for digit, value in enumerate(parameter.values):
            env[parameter.name] = value
            for number, judge in judges:
                if not judge(env):
                    self.rejected[number] += self._below[depth]
                    break
            else:
                self._visit(depth + 1, rank + weight * digit)
        del env[parameter.name]


def _weights(parameters: Sequence[Parameter]) -> dict[str, int]:
    """Return the worth of one step of each parameter's digit in a rank."""
    weights, weight = {}, 1
    for parameter in reversed(parameters):
        weights[parameter.name] = weight
        weight *= _base(parameter)
    return weights


def _judge(
    constraint: Constraint, tuned: Sequence[str] = (), certain: Set[str] = frozenset()
) -> Callable[[Env], bool]:
    """Return the constraint as a function that remembers its verdict by the values of `tuned`.

    Without `tuned` it remembers nothing. `certain` are names that exist in every environment.
    """
    compute, when = constraint.expression._code, constraint.when
    uncertain = constraint.names - certain

    def obeys(env: Env) -> bool:
        if uncertain and not uncertain <= env.keys():
            return True
        if when is not None and not when.holds(env):
            return True
        try:
            value = compute(env)
        except (_Refused, ArithmeticError, ValueError):
            value = ""
        if value.__class__ is str:  # fails again, and says why
            return constraint.expression.holds(env)
        return bool(value)

    if not tuned:
        return obeys
    key_of = operator.itemgetter(*tuned)
    memo: dict[object, bool] = {}

    def judge(env: Env) -> bool:
        try:
            key = key_of(env)
        except KeyError:  # a parameter is absent: not judged
            return True
        verdict = memo.get(key)
        if verdict is None:
            verdict = obeys(env)
            if len(memo) < MAX_MEMO:
                memo[key] = verdict
        return verdict

    return judge


# ---- why there is nothing, or too much ------------------------------------------------------


def _explain_nothing(walk: _Walk) -> str:
    lines = [f"no configuration is feasible: all {walk._num_cartesian:,} are rejected"]
    for constraint, count in zip(walk.constraints, walk.rejected, strict=True):
        if not count:
            continue
        origin = f", {constraint.origin}" if constraint.origin else ""
        lines.append(f"  {count:,} by: {constraint.why} ({constraint.expression.text}{origin})")
        facts = sorted(constraint.names & walk.facts.keys())
        if facts:
            lines.append("    with " + ", ".join(f"{n} = {walk.facts[n]}" for n in facts))
    lines.append("  " + _hint_to_loosen(walk))
    return "\n".join(lines)


def _hint_to_loosen(walk: _Walk) -> str:
    """Find the constraints any one of which, left out, would leave something feasible."""
    alone = []
    for number, constraint in enumerate(walk.constraints):
        if walk.rejected[number] and walk.num_visited < 200_000:  # each try costs as much again
            rest = (*walk.constraints[:number], *walk.constraints[number + 1 :])
            order = _enumeration_order(walk.parameters, rest)
            trial = _Walk(walk.parameters, order, rest, walk.facts, 100)
            try:
                trial.run()
            except ExpressionError:  # it guarded another one
                continue
            except InputError:
                pass
            if trial.ranks:
                alone.append(repr(constraint.why))
    if alone:
        return f"hint: loosen {' or '.join(alone)}, or give other values to its parameters"
    return "hint: no single constraint is the cause: loosen more than one, or give other values"


def _explain_too_many(walk: _Walk) -> str:
    used = frozenset[str]().union(*(constraint.names for constraint in walk.constraints))
    by_size = sorted(walk.parameters, key=lambda parameter: -len(parameter.values))
    free = [f"{p.name} ({len(p.values)} values)" for p in by_size if p.name not in used]
    most = [f"{p.name} ({len(p.values)} values)" for p in by_size]
    over = f"{', '.join(free[:3])}, which no constraint mentions" if free else ", ".join(most[:3])
    return (
        f"more than {walk.max_feasible:,} configurations are feasible, of "
        f"{walk._num_cartesian:,} combinations\n"
        f"  hint: add a constraint over {over}, or give fewer values"
    )


def _explain_too_long(walk: _Walk) -> str:
    largest = max(walk.constraints, key=lambda constraint: len(constraint.names), default=None)
    late = f"\n  the latest to judge: {largest.expression.text}" if largest else ""
    return (
        f"gave up after looking at {MAX_VISITED:,} partial configurations of "
        f"{walk._num_cartesian:,} combinations, with {len(walk.ranks):,} feasible so far{late}"
        "\n  hint: add constraints over fewer parameters, or give fewer values"
    )
