"""The one small grammar that constraints, `when`, shapes and step arguments are written in.

It is parsed with Python's own parser. `grammar` makes a Python function of the tree, `cpp` writes
it as C++: what is outside the grammar reaches neither.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tuner.errors import ExpressionError, did_you_mean
from tuner.space.grammar import Code, Env, Refused, compile_tree
from tuner.trial import Value

__all__ = ["Expression", "expression_error", "unknown_name"]

MAX_LENGTH = 1000  # characters; the longest honest constraint seen is under 200


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
        return _parsed(text.strip())

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
            value = self.code(env)
        except KeyError:
            return None
        except Exception:  # for any reason, which this says
            value = self._compute(env)
        return value if isinstance(value, bool) else self._condition(value)

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


@functools.lru_cache(
    maxsize=16384
)  # heads of templates repeat each other's; a folder is read again
def _parsed(text: str) -> Expression:
    try:
        tree = _parse_tree(text)
        names: set[str] = set()
        code = compile_tree(tree, names)
    except Refused as refusal:
        raise expression_error(text, str(refusal)) from None
    return Expression(text, frozenset(names), tree, code)


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
