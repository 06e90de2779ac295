"""`space:` of a config: each parameter with its values and the condition under which it exists."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.config.document import Document, shown, with_known
from tuner.errors import ExpressionError
from tuner.space.constraints import Parameter
from tuner.space.expression import Expression
from tuner.space.grammar import WORD
from tuner.trial import Value

__all__ = ["read_parameters"]

MAX_VALUES = 10_000  # of one parameter
_WORDS_OF_OTHERS = """
    alignas alignof and_eq asm auto bitand bitor bool case catch char compl concept const
    consteval constexpr constinit const_cast decltype default delete do double dynamic_cast enum
    explicit export extern false float friend goto inline int int64_t long mutable namespace new
    noexcept not_eq nullptr operator or_eq private protected public register reinterpret_cast
    requires restrict short signed sizeof static static_assert static_cast struct switch
    this thread_local throw true typedef typeid typename union unsigned using virtual
    void volatile wchar_t xor xor_eq main std blockIdx blockDim gridDim threadIdx warpSize
    block call extends filter include is loop macro none self set
    device params op sizes stream num_threads min max abs cdiv log2
"""  # of C++ and CUDA, of Jinja, and of our own expressions and calls
_RESERVED = frozenset([*keyword.kwlist, *_WORDS_OF_OTHERS.split()])
_FORMS = ("values", "range", "pow2")


def read_parameters(document: Document) -> tuple[Parameter, ...]:
    """Return the parameters under `space`; what is wrong with them goes to the document."""
    declared = document.data.get("space")
    if not isinstance(declared, dict):
        return ()
    parameters = []
    for name, form in declared.items():
        place = f"space.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            document.report(place, "a parameter's name is made of letters, digits and _")
        elif name in _RESERVED or name.startswith("__"):
            document.report(place, f"{name!r} means something else in a template; rename it")
        if isinstance(form, list):
            values, when = _values(document, place, form), None
        elif isinstance(form, dict):
            values = _spread(document, place, form)
            when = _when(document, f"{place}.when", form["when"]) if "when" in form else None
        else:
            expected = "a list of values, or a mapping with values, range or pow2"
            document.report(place, f"expected {expected}, got {shown(form)}")
            continue
        if name == "template":
            _check_template(document, place, values, when)
        parameters.append(Parameter(name, values, when))
    return tuple(parameters)


def _check_template(
    document: Document, place: str, values: Sequence[Value], when: Expression | None
) -> None:
    if when is not None:
        document.report(f"{place}.when", "every configuration has a template; it takes no when")
    for value in values:
        if not isinstance(value, str):
            document.report(place, f"expected names of templates, got {shown(value)}")


def _spread(document: Document, place: str, form: Mapping[str, Any]) -> tuple[Value, ...]:
    """Return the values that a mapping describes."""
    known = [*_FORMS, "when", *(["step"] if "range" in form else [])]
    for key in form:
        if key not in known:
            message = with_known(f"unknown key {key!r}", key, known)
            document.report(f"{place}.{key}", message)
    forms = [key for key in _FORMS if key in form]
    if len(forms) != 1:
        got = " and ".join(forms) or "none"
        document.report(place, f"expected one of values, range and pow2, got {got}")
        return ()
    inner = f"{place}.{forms[0]}"
    if forms[0] == "values":
        if isinstance(form["values"], list):
            return _values(document, inner, form["values"])
        document.report(inner, f"expected a list, got {shown(form['values'])}")
        return ()
    bounds = form[forms[0]]
    if not isinstance(bounds, list) or len(bounds) != 2 or not all(map(_is_whole, bounds)):
        document.report(inner, f"expected two whole numbers [first, last], got {_listed(bounds)}")
        return ()
    if bounds[0] > bounds[1]:
        document.report(inner, f"the first, {bounds[0]}, is above the last, {bounds[1]}")
        return ()
    if forms[0] == "pow2":
        return _powers(document, inner, bounds)
    return _range(document, place, bounds, form.get("step", 1))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _listed(value: object) -> str:
    if isinstance(value, list) and len(value) <= 4:
        return "[" + ", ".join(shown(item) for item in value) + "]"
    return shown(value)


def _range(
    document: Document, place: str, bounds: Sequence[int], step: object
) -> tuple[Value, ...]:
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        message = f"expected a whole number of at least 1, got {shown(step)}"
        document.report(f"{place}.step", message)
        return ()
    values = range(bounds[0], bounds[1] + 1, step)
    if (bounds[1] - bounds[0]) // step >= MAX_VALUES:
        document.report(f"{place}.range", f"more than {MAX_VALUES} values; give a larger step")
        return ()
    return tuple(values)


def _powers(document: Document, place: str, bounds: Sequence[int]) -> tuple[Value, ...]:
    for bound in bounds:
        if bound < 1 or bound & (bound - 1):
            document.report(place, f"expected powers of two, got {bound}")
            return ()
    return tuple(2**e for e in range(bounds[0].bit_length() - 1, bounds[1].bit_length()))


def _values(document: Document, place: str, values: Sequence[Any]) -> tuple[Value, ...]:
    if not values:
        document.report(place, "a parameter needs at least one value")
    if len(values) > MAX_VALUES:
        document.report(place, f"more than {MAX_VALUES} values")
        return ()
    good: dict[Value, None] = {}
    for i, value in enumerate(values):
        if not _is_value(value):
            document.report(f"{place}[{i}]", f"{_VALUE_FORM}, got {shown(value)}")
        elif value in good:
            document.report(f"{place}[{i}]", f"the value {shown(value)} is there twice")
        else:
            good[value] = None
    return tuple(good)


_VALUE_FORM = "expected a number, true, false, or a word of letters, digits and _ . -"


def _is_value(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= 100 and WORD.fullmatch(value) is not None
    return isinstance(value, bool | int | float) and -(2**63) < value < 2**63


def _when(document: Document, place: str, when: object) -> Expression | None:
    """Read an expression, or a mapping from parameters to the values they must have."""
    text = when
    if isinstance(when, dict):
        terms = []
        for name, wanted in when.items():
            members = wanted if isinstance(wanted, list) else [wanted]
            if not members or not all(_is_value(member) for member in members):
                document.report(f"{place}.{name}", f"{_VALUE_FORM}, or a list of them")
                return None
            test = f"in {members!r}" if isinstance(wanted, list) else f"== {wanted!r}"
            terms.append(f"{name} {test}")
        text = " and ".join(terms)
    if not isinstance(text, str):
        expected = "a mapping from parameters to values, or an expression"
        document.report(place, f"expected {expected}, got {shown(when)}")
        return None
    try:
        return Expression.parse(text)
    except ExpressionError as error:
        document.report(place, str(error))
        return None
