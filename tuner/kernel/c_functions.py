"""What a text may say of the C functions that its steps call, so that it need not write them.

`_lib/call.cuh` makes one record of all that a call is given, and `_lib/steps.cuh` the C
functions, each of which fills the record in and hands it to a function of the template.
`_lib/steps.hpp` gives the parameters of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuner.errors import TemplateError
from tuner.kernel.declared import CallHead, Head, OpFile, StepHead
from tuner.kernel.head import FLOAT_ARGUMENTS

__all__ = ["CFunction", "Operand", "c_functions", "operands_of"]

_POINTERS = {
    "float32": "float*",
    "float64": "double*",
    "int8": "signed char*",
    "int16": "short*",
    "int32": "int*",
    "int64": "int64_t*",
    "uint8": "unsigned char*",
    "float16": "unsigned short*",
    "bfloat16": "unsigned short*",
}


@dataclass(frozen=True, slots=True)
class Operand:
    """What a step may be given by its name, with its type in C."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class CFunction:
    """A function that a step calls, and by its short name, after the operator's."""

    name: str
    short: str
    parameters: tuple[Operand, ...]


def operands_of(op: OpFile, head: Head) -> tuple[Operand, ...]:
    """Return all that the calls of a template may be given, with the types in C."""
    calls: list[OpFile | CallHead] = [op, *op.extra.values()]
    arguments = [argument for call in calls for argument in call.arguments]
    read = [a for a in arguments if a.shape is not None]
    written = [output for call in calls for output in call.outputs]
    types = {a.name: f"const {_POINTERS[a.dtype]}" for a in read}
    types |= {output.name: _POINTERS[output.dtype] for output in written}
    types |= {name: _POINTERS[item.dtype] for name, item in head.workspace.items()}
    numbers = [a for a in arguments if a.shape is None]
    types |= {a.name: "double" if a.dtype == "float" else "int64_t" for a in numbers}
    types |= dict.fromkeys((size for a in read for size in a.shape or ()), "int64_t")
    types |= dict.fromkeys(FLOAT_ARGUMENTS, "int64_t")
    return tuple(Operand(name, kind) for name, kind in types.items())


def c_functions(
    function: str, steps: Iterable[StepHead], operands: Sequence[Operand]
) -> list[CFunction]:
    """Return the functions that steps call, each with what it is given.

    Args:
        function: the operator's, with which their names begin.
        steps: of the operator's call and of its extra operators, where their conditions hold.
        operands: what they may be given.

    Raises:
        TemplateError: a step gives a function what has no name, or another one something else.
    """
    types = {operand.name: operand for operand in operands}
    names: dict[str, list[str]] = {}
    for step in steps:
        if step.call is None:
            continue
        given = [str(argument) for argument in step.args]
        known = names.setdefault(step.call, given)
        both = list(zip(known, given, strict=False))
        if len(known) != len(given) or any("null" not in two and two[0] != two[1] for two in both):
            raise TemplateError(f"{step.call}: two steps give it different operands")
        names[step.call] = [other if one == "null" else one for one, other in both]
    for name, given in names.items():
        if unknown := [argument for argument in given if argument not in types]:
            raise TemplateError(f"{name}: {unknown[0]!r} is no operand of the call")
    return [
        CFunction(name, name.removeprefix(f"{function}_"), tuple(types[a] for a in given))
        for name, given in names.items()
    ]
