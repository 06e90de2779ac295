"""What each part of a run's page shows: the views that its templates lay out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuner.capture.outline import Outline
from tuner.machine.ceilings import roofline_tflops
from tuner.machine.datasheets import bandwidth_gbps
from tuner.review.ablation import choices_brief, choices_of, choices_words, unvaried
from tuner.review.counters import counter_words, counters_brief, counters_table
from tuner.review.formatting import (
    NONE,
    flat,
    moment_words,
    percent_words,
    ratio_words,
    three_digits,
    time_unit,
)
from tuner.review.kernel_times import NUM_COLOURS, kernels_brief, kernels_view
from tuner.review.kernel_work import (
    NEAR,
    Work,
    is_cut_otherwise,
    makers_words,
    works_of,
    works_table,
    works_words,
)
from tuner.review.rows_figure import rows_table
from tuner.review.run_data import UNITS, RunData
from tuner.review.sources import highlighted, winner_source
from tuner.review.summary import Summary
from tuner.review.tables import contest, failures, strategies
from tuner.review.timeline import stages_of, workers_of
from tuner.review.workloads import AS_GIVEN, Workload
from tuner.trial import Finalist, Status, Trial

__all__ = ["PARTS", "shown"]

MOST_STEPS = 8  # of one piece of a module's picture
LEAST_BAR = 1.6  # % of a figure's width: less could not be seen behind its mark
_STATUS_MEANING = {
    Status.CORRECT: "accepted by the check, and timed",
    Status.CONSTRAINTS: "refused before anything ran",
    Status.COMPILE: "the compiler refused it",
    Status.RUNTIME: "it crashed, or a launch failed",
    Status.TIMEOUT: "it did not end in time",
    Status.CORRECTNESS: "its answers are wrong, so it was not timed",
}


def shown(name: str, run_data: RunData, summary: Summary) -> dict[str, Any]:
    """Return what a part, of `PARTS`, shows beside the summary."""
    return _SHOWN[name](run_data, summary)


def _shown_verdict(run_data: RunData, summary: Summary) -> dict[str, Any]:
    result = run_data.result
    finalists: Sequence[Finalist] = result.finalists if result else ()
    exported = result.exported if result else None
    rows = [exported, *finalists] if exported is not None else list(finalists)
    screened = {trial.number: trial.outcome.latency_us for trial in run_data.trials}
    times = [us for f in rows for us in (f.latency_us, f.baseline_us, screened.get(f.trial))]
    return {
        "intervals": _intervals(summary.workloads),
        "why": choices_brief(choices_of(run_data), run_data) if summary.kind == "faster" else "",
        "kernels_brief": kernels_brief(run_data) if summary.kind == "faster" else "",
        "bound": _bound_words(run_data, summary),
        "by_rows": _by_rows(run_data),
        "finalists": finalists,
        "exported": exported,
        "screened": screened,
        "unit": time_unit(times),
        "change": _change_words,
    }


def _by_rows(run_data: RunData) -> dict[str, Any] | None:
    found = run_data.finalist.by_batch if run_data.finalist is not None else None
    if found is None or not found.measured:
        return None
    head, rows = rows_table(found)
    return {"head": head, "numeric": ["rows"], "rows": rows}


def _change_words(before: float | None, after: float | None) -> str:
    return f"{round(100 * (after / before - 1)):+d} %" if before and after else NONE


def _intervals(workloads: Sequence[Workload]) -> list[dict[str, Any]]:
    """Return the intervals as places on one axis, in % of its width; `one` is PyTorch's."""
    if not workloads:
        return []

    most = 2 * max(1.0, *(w.interval.speedup for w in workloads))  # of an axis that can be read

    def high(workload: Workload) -> float:
        return min(workload.interval.high, most)

    ends = [1.0, *(w.interval.low for w in workloads), *map(high, workloads)]
    low, span = min(ends), (max(ends) - min(ends)) or 1.0
    low, span = low - 0.04 * span, 1.08 * span

    def place(ratio: float) -> float:
        return round(100 * (ratio - low) / span, 2)

    rows = []
    for w in workloads:
        left, right = place(w.interval.low), place(high(w))
        more = max(0.0, LEAST_BAR - (right - left)) / 2  # on either side
        name = "the reference's own weights and inputs" if w.name == AS_GIVEN else w.name
        row = {"name": name, "interval": w.interval, "is_ours": w.is_ours, "one": place(1.0)}
        row |= {"left": round(left - more, 2), "width": round(right - left + 2 * more, 2)}
        rows.append({**row, "at": place(w.interval.speedup)})
    return rows


def _shown_why(run_data: RunData, summary: Summary) -> dict[str, Any]:
    choices, works = choices_of(run_data), works_of(run_data)
    counters, limits = run_data.counters, _limits(run_data, summary)
    op = run_data.environment.op
    return {
        "choices": choices,
        "choices_words": choices_words(choices),
        "unvaried": unvaried(run_data, choices),
        "most": max((choice.gain for choice in choices), default=1.0),
        "limits": limits,
        "limit_words": _limit_words(limits, has_parts=_has_parts(works)),
        "kernels": kernels_view(run_data),
        "works": works_table(works),
        "works_words": works_words(works) if _has_parts(works) else "",
        "counters": counters_table(counters, op) if counters else None,
        "counter_words": counter_words(counters, op) if counters else [],
    }


def _limits(run_data: RunData, summary: Summary) -> list[dict[str, Any]]:
    """Return how near one call comes to each of the device's rates, PyTorch's call beside it."""
    device, environment = run_data.device, run_data.environment
    flops, num_bytes = environment.flops, environment.bytes
    if device is None or not flops or not summary.latency_us:
        return []
    fastest = min(run_data.bounds(), key=lambda bound: bound.latency_us, default=None)
    units = run_data.precision or (fastest.precision if fastest else "fp16")
    known = [
        (UNITS[units], "TFLOPS", flops / 1e6, roofline_tflops(flops, 0.0, device, units)),
        ("memory", "GB/s", (num_bytes or 0.0) / 1e3, bandwidth_gbps(device)),
    ]
    return [
        {
            "what": what,
            "most": f"{three_digits(most)} {unit}",
            "reached": f"{three_digits(amount / summary.latency_us)} {unit}",
            "share": amount / summary.latency_us / most,
            "before": amount / summary.baseline_us / most if summary.baseline_us else None,
        }
        for what, unit, amount, most in known
        if most and amount
    ]


def _limit_words(limits: Sequence[Mapping[str, Any]], *, has_parts: bool = False) -> str:
    """Return which rate one call is nearest to, and what that means; empty where none is known.

    Args:
        limits: as `_limits` gives them.
        has_parts: the kernels of each task have a table of their own.
    """
    if not limits:
        return ""
    nearest = max(limits, key=lambda limit: float(limit["share"]))
    words = f"nearest is {nearest['what']}, at {percent_words(nearest['share'])} of their rate"
    if nearest["share"] >= 1:
        return f"{words}: in these units nothing is left without less work"
    if nearest["share"] >= NEAR:
        left = ratio_words(1 / nearest["share"])
        return f"{words}: in these units at most {left} is left without less work"
    if has_parts:
        return (
            f"{words} of the whole call, each operand counted once; above is how near each task is"
        )
    return (
        f"{words}: far from it, so time goes elsewhere, such as data read again, small grids, "
        "launches or waiting"
    )


def _has_parts(works: Sequence[Work]) -> bool:
    return sum(not work.is_whole for work in works) > 1


def _bound_words(run_data: RunData, summary: Summary) -> str:
    """Return what bounds it, for the verdict: by the kernels where they are known, else by calls.

    What a GPU's counters say of the longest kernel is added.
    """
    works, counters = works_of(run_data), run_data.counters
    by_task = works_words(works) if _has_parts(works) else ""
    words = by_task or _limit_words(_limits(run_data, summary))
    op = run_data.environment.op
    counted = counters_brief(counters, op, follows=bool(words)) if counters else ""
    return ". ".join(part for part in (words, counted) if part)


def _shown_module(run_data: RunData, summary: Summary) -> dict[str, Any]:
    """Return the module's graph, and the times of one call: before, after, the least."""
    module = run_data.module
    if module is None:
        return {"module": None}
    is_fallback = run_data.result is not None and run_data.result.is_fallback
    times = [
        ("PyTorch", summary.baseline_us),
        (
            "what was found: nothing faster" if is_fallback else "what was found",
            summary.latency_us,
        ),
        ("the least by the device's rates, in the fastest units allowed", run_data.least_us),
        ("a copy of as many bytes", module.gain.copy_us),
    ]
    known = [(what, time_us) for what, time_us in times if time_us]
    longest_us = max((time_us for _, time_us in known), default=1.0)
    unit = time_unit([us for _, us in known])
    return {
        "module": module,
        "times": known,
        "longest_us": longest_us,
        "unit": unit,
        "pieces": _pieces(module.outline, makers_words(run_data)),
        "is_cut_otherwise": is_cut_otherwise(run_data),
    }


def _pieces(outline: Outline, makers: Sequence[str]) -> list[dict[str, Any]]:
    """Return the graph's steps in order, cut where another kernel's begin; of long ones the ends.

    A step of several tasks, which compute it again each, is shown in the first of them.
    """
    of_step: dict[str, int] = {}
    for number, task in enumerate(outline.tasks):
        for name in task.steps:
            of_step.setdefault(name, number)
    pieces: list[dict[str, Any]] = []
    for step in outline.steps:
        place = of_step.get(step.name)
        if not pieces or pieces[-1]["number"] != place:
            found = None if place is None else outline.tasks[place]
            is_new = all(piece["number"] != place for piece in pieces)
            maker = "" if place is None else makers[place]
            new: dict[str, Any] = {"number": place, "task": found, "maker": maker}
            pieces.append({**new, "is_new": is_new, "steps": []})
        pieces[-1]["steps"].append(step)
    for piece in pieces:
        steps = piece["steps"]
        piece["left_out"] = max(0, len(steps) - MOST_STEPS)
        if piece["left_out"]:
            half = MOST_STEPS // 2
            piece["steps"] = [*steps[:half], *steps[-half:]]
        piece["colour"] = (piece["number"] or 0) % NUM_COLOURS
    return pieces


def _shown_contests(run_data: RunData, _: Summary) -> dict[str, Any]:
    trials = run_data.trials
    words = strategies(trials)
    return {
        "contests": [(name, contest(trials, [name])) for name in words],
        "together": contest(trials, words) if len(words) > 1 else None,
    }


def _shown_failures(run_data: RunData, _: Summary) -> dict[str, Any]:
    meaning = {status.value: text for status, text in _STATUS_MEANING.items()}
    return {"status_meaning": meaning, "failures": failures(run_data)}


def _shown_time(run_data: RunData, _: Summary) -> dict[str, Any]:
    trials = run_data.trials
    builds = [trial.outcome.build for trial in trials]
    return {
        "stages": stages_of(trials) if _is_timed(trials) else [],
        "workers": workers_of(trials),
        "num_cached": sum(build.is_cached for build in builds if build),
        "num_same": sum(t.outcome.same_as is not None for t in trials),
    }


def _shown_source(run_data: RunData, _: Summary) -> dict[str, Any]:
    name, text = winner_source(run_data)
    return {"source_name": name, "source": text}


def _shown_how(run_data: RunData, _: Summary) -> dict[str, Any]:
    facts = flat(run_data.environment.entries()).items()
    return {
        "config": highlighted(run_data.config, "yaml") if run_data.config else "",
        "environment": [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in facts],
    }


# What each part shows beside the summary.
_SHOWN: dict[str, Callable[[RunData, Summary], dict[str, Any]]] = {
    "head": lambda run_data, _: {"started_at": moment_words(run_data.environment.started_at)},
    "verdict": _shown_verdict,
    "module": _shown_module,
    "why": _shown_why,
    "contests": _shown_contests,
    "failures": _shown_failures,
    "time": _shown_time,
    "source": _shown_source,
    "how": _shown_how,
}
PARTS = tuple(_SHOWN)


def _is_timed(trials: Sequence[Trial]) -> bool:
    return any(trial.outcome.seconds for trial in trials)
