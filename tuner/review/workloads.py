"""What a verified file was timed on, each with its interval, and the least of them.

The headline is the least over the data that the file is for: the reference's own weights and
inputs, and others that were named. A step of training may be slower than that, and `torch.compile`
may be faster: who reads one number must read the least one as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tuner.by_batch import NO_ROWS
from tuner.problem.timed_data import GIVEN_ALONE
from tuner.review.formatting import count_words, ratio_words
from tuner.trial import SAME_SPEED, Compiled, Finalist, Interval, ProbeResult, Result
from tuner.wording import percent

__all__ = [
    "AS_GIVEN",
    "Tone",
    "Workload",
    "answer_words",
    "caveat_of",
    "error_ratio",
    "finalist_of",
    "headline_of",
    "interval_words",
    "least_of",
    "steps_of",
    "tone_of",
    "tone_words",
    "trust_of",
    "untimed_of",
    "workload_rows",
    "workloads_of",
]  # fmt: skip

AS_GIVEN = "as given"
FURTHER = 2.0  # times PyTorch's own error
MOST_ROWS = 8  # of workloads in a terminal

Tone = Literal["good", "caution", "even", "bad"]
STEP = "in a step of training"
IDLE = "where the device is idle before each call"


@dataclass(frozen=True, slots=True)
class Workload:
    """Speed over PyTorch in one situation; `is_ours` is False of torch.compile's own.

    The headline is the least of those that are `is_headline`. `note` is what must be known of it
    besides; `beside` the file's own speed-up in the situation of what is not ours.
    """

    name: str
    interval: Interval
    is_ours: bool = True
    note: str = ""
    is_headline: bool = True
    beside: Interval | None = None

    @property
    def words(self) -> str:
        """The speed-up, and what it is of."""
        ratio = ratio_words(self.interval.speedup)
        same = ": no difference" if self.interval.verdict == "no difference" else ""
        return f"{ratio} {self.name}{same}"


def finalist_of(result: Result | None) -> Finalist | None:
    """Return the race that counts: of the exported file, else of the winner; None without one."""
    if result is None:
        return None
    by_trial = (entry for entry in result.finalists if entry.trial == result.winner)
    return result.exported or next(by_trial, None)


def workloads_of(result: Result | None) -> tuple[Workload, ...]:
    """Return what was timed, the reference's own values first; nothing of what was rejected."""
    finalist = finalist_of(result)
    if result is None or finalist is None or finalist.interval is None:
        return ()
    if finalist.error or not finalist.check.is_accepted:
        return ()
    found = [Workload(AS_GIVEN, finalist.interval)]
    found += _on_other_data(finalist)
    if finalist.step is not None:
        step = Workload(STEP, finalist.step, is_headline=False)
        found.append(step)
    found += _of_idle_device(finalist)
    for size, race in finalist.at_sizes.items():
        if race.interval is not None and race.interval != finalist.interval:
            found.append(Workload(f"at {size}", race.interval))
        if race.others != finalist.others:
            found += _on_other_data(race, f" at {size}")
        if race.step is not None and race.step != finalist.step:
            name = f"{STEP} at {size}"
            found.append(Workload(name, race.step, is_headline=False))
    if result.compiled is not None:
        found += _of_compiled(result.compiled, finalist)
    return tuple(found)


def _of_idle_device(finalist: Finalist) -> list[Workload]:
    """Return calls of the tuned size that begin on an idle device, which waits for the host.

    They are timed in one process; a race hides the host's work.
    """
    known = finalist.by_batch
    if known is None or known.rows.get("call") == NO_ROWS:
        return []
    return [
        Workload(IDLE, Interval(at.speedup, at.low, at.high, 0.95, 1), is_headline=False)
        for at in known.measured
        if at.is_idle and at.way == "call" and at.num_rows == known.tuned_rows
        if not (at.data or at.is_disturbed)
    ]


def _of_compiled(compiled: Compiled, finalist: Finalist) -> list[Workload]:
    """Return torch.compile's speed-ups where the file's are known, each with that beside it."""
    pairs = [("", compiled.interval, finalist.interval)]
    pairs += [
        (f" on {data.words}", compiled.others.get(data.words), data.interval)
        for data in finalist.others
    ]
    note = answer_words(compiled)
    return [
        Workload(f"torch.compile{where}", theirs, False, note, is_headline=False, beside=ours)
        for where, theirs, ours in pairs
        if theirs is not None
    ]


def _on_other_data(finalist: Finalist, at: str = "") -> list[Workload]:
    counting = finalist.counting
    return [
        Workload(f"on {data.words}{at}", data.interval, is_headline=data in counting)
        for data in finalist.others
    ]


def error_ratio(probe: ProbeResult) -> float | None:
    """Return a probe's error over the baseline's own; None if either is not a number."""
    if not probe.baseline_rms_rel > 0 or not math.isfinite(probe.baseline_rms_rel):
        return None
    return probe.rms_rel / probe.baseline_rms_rel if math.isfinite(probe.rms_rel) else None


def answer_words(compiled: Compiled) -> str:
    """Return how far off torch.compile is, where that is materially further than PyTorch."""
    if compiled.answer is None:
        return ""
    ratio = error_ratio(compiled.answer)
    further = "" if ratio is None or ratio < FURTHER else f" {ratio:,.0f} times PyTorch's error"
    if compiled.answer.is_accepted:
        return further and f", with{further}"
    return f", with{further or ' an answer'}, for which a file would be rejected"


def headline_of(finalist: Finalist) -> tuple[Interval | None, str]:
    """Return the interval that is shown first, and of which size and data it is.

    It is the least over the tuned sizes and the data; there are no words where that is of the one
    size, and on the reference's own data the same but for noise.
    """
    races = {size: race for size, race in finalist.at_sizes.items() if race.least is not None}
    size = min(races, key=lambda size: _worth(races[size]), default="")
    least = races.get(size, finalist)
    words = f" on {least.least_on}" if least.least_on else ""
    if size:
        return least.least, f"{words} at {size}, the least of {len(finalist.at_sizes)} tuned sizes"
    return least.least, words and f"{words}, the least of its workloads"


def _worth(finalist: Finalist) -> tuple[float, float]:
    return finalist.least.worth if finalist.least is not None else (math.inf, math.inf)


def caveat_of(workloads: Sequence[Workload]) -> str:
    """Return what is materially less than the headline says; empty where nothing is.

    That is a workload that does not count for it, whose interval lies below the headline's by more
    than another process would explain, or `torch.compile` above the file on the same data.
    """
    if not workloads:
        return ""
    less = _less_than_said(workloads)
    said = [w.words for w in sorted(less, key=lambda w: w.interval.speedup)]
    said += [
        f"{w.name.replace('torch.compile', 'torch.compile is faster', 1)}: "
        f"{ratio_words(w.interval.speedup)}{w.note}"
        for w in workloads
        if not w.is_headline and w.beside is not None and _is_below(w.beside, w.interval)
    ]
    return "; ".join(said)


def _less_than_said(workloads: Sequence[Workload]) -> list[Workload]:
    """Return the file's own that do not count for the headline, and are materially below it."""
    head = min((w for w in workloads if w.is_headline), key=lambda w: w.interval.worth)
    others = [w for w in workloads if w.is_ours and not w.is_headline]
    less = [w for w in others if _is_below(w.interval, head.interval)]
    # That an idle device gains less is usual; that it may gain nothing has to be said.
    return [w for w in less if w.name != IDLE or w.interval.verdict != "faster"]


def tone_of(workloads: Sequence[Workload], kind: str) -> Tone:
    """Return the verdict's colour: that of the least workload, whatever the headline says.

    Args:
        workloads: as `workloads_of` gives them.
        kind: the headline's, of `Summary.kind`.
    """
    if kind in ("slower", "rejected"):
        return "bad"
    if kind != "faster":
        return "even"
    verdicts = [w.interval.verdict for w in workloads if w.is_ours]
    if "slower" in verdicts:
        return "bad"
    return "caution" if "no difference" in verdicts or caveat_of(workloads) else "good"


def tone_words(tone: Tone, kind: str) -> str:
    """Return what a colour says beside a headline; empty where the headline says it itself."""
    if kind != "faster":
        return ""
    return {
        "good": "in all that was timed",
        "caution": "with a reservation",
        "bad": "slower in part of what was timed",
    }.get(tone, "")


def workload_rows(workloads: Sequence[Workload]) -> list[str]:
    """Return the speed-up on each of the data that the headline is the least of, in rows.

    Two stand in one row; of more each has its own, and what goes beyond `MOST_ROWS`, the fastest
    of them, is counted.
    """
    counted = [w for w in workloads if w.is_headline]
    if len(counted) == 1:
        return [f"timed {GIVEN_ALONE}"]
    if len(counted) <= 2:
        return ["; ".join(w.words for w in counted)]
    shown = sorted(counted, key=lambda w: w.interval.speedup)[:MOST_ROWS]
    rows = [w.words for w in counted if w in shown]
    left = len(counted) - len(rows)
    return [*rows, f"{left} more in the report"] if left else rows


def steps_of(workloads: Sequence[Workload]) -> str:
    """Return the speed-up of steps of training, where it is no caveat and there is one."""
    steps = [w for w in workloads if w.name.startswith(STEP)]
    return "; ".join(
        f"{w.words} ({_ends_words(w.interval)})"
        for w in steps
        if w not in _less_than_said(workloads)
    )


def _ends_words(interval: Interval) -> str:
    return interval.bounds(f"{ratio_words(interval.low)} to {ratio_words(interval.high)}")


def interval_words(interval: Interval) -> str:
    """Say what other processes would find, or that those of the race differ too much."""
    if interval.is_vague:
        return f"uncertain: {interval.why_vague}"
    ends, share = _ends_words(interval), percent(interval.confidence, 3)
    if interval.num_processes == 1:
        return f"another round would find {ends} ({share}, from 1 process alone)"
    return f"another process would find {ends} ({share}, from {interval.num_processes} processes)"


def trust_of(result: Result | None) -> str:
    """Return what stands behind the figures, in one line; empty where nothing was verified."""
    finalist = finalist_of(result)
    if finalist is None or result is None:
        return ""
    probes, interval = finalist.check.probes, finalist.interval
    words = [
        f"{sum(p.is_accepted for p in probes)} of {count_words(len(probes), 'probe')} accepted"
    ]
    if interval is not None:
        words.append(f"raced in {count_words(interval.num_processes, 'process', 'processes')}")
        is_file = result.exported is finalist
        words.append("from the exported file" if is_file else "the trial, not its file")
    elif not finalist.error:
        words.append("not raced")
    if finalist.interval is not None and not finalist.samples_us:
        words.append("no samples kept")
    return ", ".join(words)


def untimed_of(result: Result | None) -> str:
    """Return on what the speed was not verified; empty where nothing was, or all."""
    finalist = finalist_of(result)
    if finalist is None or result is None:
        return ""
    on_others = next((each.interval for each in finalist.others), None)
    found = {
        "on other weights and inputs": on_others,
        STEP: finalist.step,
        "beside torch.compile": result.compiled and result.compiled.interval,
    }
    untimed = [what for what, interval in found.items() if interval is None]
    return f"the speed {', '.join(untimed)}" if untimed else ""


def least_of(workloads: Sequence[Workload]) -> Workload | None:
    """Return the workload with the least speed-up; None where nothing was timed."""
    return min((w for w in workloads if w.is_ours), key=lambda w: w.interval.speedup, default=None)


def _is_below(low: Interval, high: Interval) -> bool:
    if low.overlaps(high) or not 0 < low.speedup < high.speedup:
        return False
    return math.log(high.speedup / low.speedup) > SAME_SPEED
