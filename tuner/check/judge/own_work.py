"""Where a module runs the reference's own operations: right, and worth nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.by_batch import FEW_ROWS_WORDS
from tuner.check.calls.crossing import Answer
from tuner.check.judge.expected import Expected
from tuner.check.probes.probe import OWN_WORK
from tuner.trial import ProbeResult

__all__ = ["note_of", "notes_of"]

_SAID = "runs the reference's own operations "
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
    return f"{_SAID}({_shown(theirs)}){others}"


def _shown(operations: Sequence[str]) -> str:
    names = [name.removeprefix("aten.") for name in operations]
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def notes_of(
    results: Sequence[ProbeResult], fewest: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """Say where a module runs the reference's own operations, and which of the first.

    Args:
        results: of all probes.
        fewest: of traced probes that were asked at fewer rows than those from which the file says
            that it takes kernels, that number of rows, by the probe's name: there it is no
            finding that it runs the reference's.
    """
    fewest = fewest or {}
    noted = [result for result in results if result.note]
    few = [result for result in noted if result.probe in fewest]
    found = [result for result in noted if result.probe not in fewest]
    return (*_few_rows_note(few, fewest), *_ways_note(found, results))


def _few_rows_note(few: Sequence[ProbeResult], fewest: Mapping[str, int]) -> tuple[str, ...]:
    limits: dict[int, list[str]] = {}
    for result in few:
        ways = limits.setdefault(fewest[result.probe], [])
        way = "for gradients" if "gradients" in result.probe else "in calls"
        if way not in ways:
            ways.append(way)
    if not limits:
        return ()
    below = ", ".join(f"below {rows} {' and '.join(ways)}" for rows, ways in limits.items())
    return (f"{FEW_ROWS_WORDS} {few[0].note.removeprefix(_SAID)}: {below}",)


def _ways_note(found: Sequence[ProbeResult], results: Sequence[ProbeResult]) -> tuple[str, ...]:
    if not found:
        return ()
    where = "; ".join(result.probe.removeprefix(OWN_WORK) for result in found)
    total = sum(result.probe.startswith(OWN_WORK) for result in results)
    ways = f"in {len(found)} of the {total} ways to call it that are traced"
    return (f"right, but it {found[0].note} {ways}: {where}",)
