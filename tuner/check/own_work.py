"""Where a module runs the reference's own operations: right, and worth nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.check.crossing import Answer
from tuner.check.expected import Expected
from tuner.check.probe import OWN_WORK
from tuner.trial import ProbeResult

__all__ = ["note_of", "notes_of"]

# What moves, makes or counts, and computes nothing.
_NO_WORK = {
    "add_",
    *("alias", "as_strided", "clone", "contiguous", "copy_", "detach", "empty", "empty_like"),
    *("empty_strided", "expand", "lift_fresh", "new_empty", "permute", "reshape", "select"),
    *("slice", "split", "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view"),
    *("_to_copy", "_local_scalar_dense"),
}


def note_of(expected: Expected, answer: Answer) -> str:
    """Name an answer that comes from the operations of the reference, and is worth nothing.

    What else runs between them, such as a look at the values, does not hide them.
    """
    theirs, mine = (
        [name for name in report.operations if name.removeprefix("aten.") not in _NO_WORK]
        for report in (expected.report, answer.report)
    )
    rest = iter(mine)
    if not theirs or not all(name in rest for name in theirs):
        return ""
    more = list(dict.fromkeys(name for name in mine if name not in theirs))
    others = f" and others ({_shown(more)})" if more else ""
    return f"runs the reference's own operations ({_shown(theirs)}){others}"


def _shown(operations: Sequence[str]) -> str:
    names = [name.removeprefix("aten.") for name in operations]
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def notes_of(results: Sequence[ProbeResult]) -> tuple[str, ...]:
    """Say where a module runs the reference's own operations, and which of the first."""
    found = [result for result in results if result.note]
    if not found:
        return ()
    where = "; ".join(result.probe.removeprefix(OWN_WORK) for result in found)
    total = sum(result.probe.startswith(OWN_WORK) for result in results)
    ways = f"in {len(found)} of the {total} ways to call it that are traced"
    return (f"right, but it {found[0].note} {ways}: {where}",)
