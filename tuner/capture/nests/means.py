"""Where a nest takes a mean off what it has scaled already: x * s + (b - m * s)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from tuner.capture.nests.nest import Statement

__all__ = ["write_about_means"]

Operand = str | float | bool  # of a statement: a value's name, or a number


def write_about_means(
    statements: Mapping[str, Statement],
    order: list[str],
    add: Callable[[str, str, tuple[Operand, ...]], None],
) -> None:
    """Write x * s + (b - m * s), as GroupNorm is recorded, as (x - m) * s + b.

    Where the mean is far larger than what x differs from it, the first form has few right digits
    left.

    Args:
        statements: by name.
        order: of their names; `add` puts another one at its end.
        add: a statement, of a name, an operation and operands.
    """
    for name in list(order):
        for x, mean, scale, bias in islice(_about_mean(statements, name), 1):
            at = order.index(name)
            apart, scaled = f"{name}_apart", f"{name}_scaled"
            add(apart, "sub", (x, mean))
            add(scaled, "mul", (apart, scale))
            add(name, "add", (scaled, bias))
            order[at:] = [apart, scaled, *order[at:-3]]


def _about_mean(
    statements: Mapping[str, Statement], name: str
) -> Iterator[tuple[str, Operand, str, str]]:
    """Give (x, m, s, b) for each way to read a value as x * s + (b - m * s)."""
    for product, shift in _either(statements, name, "add"):
        for x, scale in _either(statements, product, "mul"):
            for less, bias in _either(statements, shift, "add"):
                for minus, again in _either(statements, less, "mul"):
                    found = statements.get(minus)
                    if again == scale and found is not None and found.op == "neg":
                        yield x, found.operands[0], scale, bias


def _either(statements: Mapping[str, Statement], name: str, op: str) -> list[tuple[str, str]]:
    """Return the operands of a value of that operation, in both orders."""
    found = statements.get(name)
    if found is None or found.op != op:
        return []
    one, other = found.operands
    if not isinstance(one, str) or not isinstance(other, str):
        return []
    return [(one, other), (other, one)]
