"""Why nothing is feasible: what each constraint rejects, and which of them to loosen."""

from __future__ import annotations

from tuner.errors import ExpressionError, InputError
from tuner.space.enumeration import Walk

__all__ = ["explain_nothing"]


def explain_nothing(walk: Walk) -> str:
    """Return the message for a space in which nothing is feasible.

    Args:
        walk: as it ended; walks without one of its constraints tell which of them is the cause.
    """
    lines = [f"no configuration is feasible: all {walk.num_cartesian:,} are rejected"]
    for constraint, count in zip(walk.constraints, walk.rejected, strict=True):
        if not count:
            continue
        origin = f", {constraint.origin}" if constraint.origin else ""
        rule = f"({constraint.expression.text}{origin})"
        lines.append(f"  {round(count):,} by: {constraint.why} {rule}")
        facts = sorted(constraint.names & walk.facts.keys())
        if facts:
            lines.append("    with " + ", ".join(f"{n} = {walk.facts[n]}" for n in facts))
    lines.append("  " + _hint_to_loosen(walk))
    return "\n".join(lines)


def _hint_to_loosen(walk: Walk) -> str:
    """Find the constraints any one of which, left out, would leave something feasible."""
    alone = []
    for number, constraint in enumerate(walk.constraints):
        if walk.rejected[number] and walk.num_visited < 1_000_000:  # each try costs as much again
            rest = (*walk.constraints[:number], *walk.constraints[number + 1 :])
            try:
                if Walk(walk.parameters, rest, walk.facts).run() is not None:
                    alone.append(repr(constraint.why))
            except ExpressionError:  # it guarded another one
                continue
            except InputError:  # too many, so not nothing
                alone.append(repr(constraint.why))
    if alone:
        return f"hint: loosen {' or '.join(alone)}, or give other values to its parameters"
    return "hint: no single constraint is the cause: loosen more than one, or give other values"
