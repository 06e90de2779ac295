"""Which trials become finalists, and what is said of one that was checked or raced."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tuner.by_batch import ELSEWHERE, FEW_ROWS_WORDS, MOST, WORST
from tuner.capture.modules.rows_text import has_rows, ways_in, why_no_steps
from tuner.errors import WorkerError, says_no_memory
from tuner.evaluate.process import describe_exit
from tuner.evaluate.worker import JobFailed, WorkerCrashed, WorkerTimeout
from tuner.intervals import rounds_of, tie_set
from tuner.trial import Check, Finalist, Interval, Result, Trial
from tuner.wording import one_line

__all__ = [
    "are_of_gradients", "blamed", "despite_kills", "is_behind", "judged", "ranked_trials",
    "remarks_on", "replaced", "structure", "tied", "why_nothing_correct",
]  # fmt: skip

KILLED = describe_exit(-signal.SIGKILL)
BADLY = 0.8  # of PyTorch's speed: slower than that, whatever the scatter
MAX_KILLED = 3  # times that a check or a race is begun whose processes something else kills
Verdict = TypeVar("Verdict")


def remarks_on(exported: Finalist, model_new: str) -> list[str]:
    """Say how fast a step of training is, where else it is slower, and where kernels run.

    `model_new` is the text of the operator's module.
    """
    remarks = []
    if (data := exported.depends_on) is not None:
        assert exported.interval is not None
        remarks.append(
            f"with {data.words} in place of the reference's own it runs at "
            f"{data.interval.speedup:.2f}x, not {exported.interval.speedup:.2f}x: its time "
            "depends on them"
        )
    if exported.step is not None:
        step = exported.step
        where = step.bounds(f"{step.low:.2f}, {step.high:.2f}")
        remarks.append(
            f"a step of training, forward and gradients, is {step.speedup:.2f}x [{where}]"
        )
    if why := why_no_steps(model_new):
        remarks.append(f"a step of training takes PyTorch's own operations: {why}")
    by_batch = exported.by_batch
    if by_batch is not None and (said := by_batch.brief):
        ends = any(most != MOST for _, most in by_batch.rows.values())
        notes = exported.check.notes
        if ends or not any(note.startswith(FEW_ROWS_WORDS) for note in notes):
            remarks.append(f"{said}; {ELSEWHERE}")
    elif by_batch is None and not has_rows(model_new):
        without = "" if "step" in ways_in(model_new) else " without gradients"
        remarks.append(f"kernels run{without} at the tuned sizes alone; {ELSEWHERE}")
    if exported.step_failure:
        remarks.append(f"a step of training was not timed: {exported.step_failure}")
    return remarks


def replaced(before: Result | None, now: Result) -> list[str]:
    """Say which file a run had before, where another one has taken its place."""
    if before is None or _held_by(before) == _held_by(now):
        return []
    least = None if before.exported is None else before.exported.least
    speedup = "" if before.is_fallback or least is None else f", {least.words}"
    return [f"the file of an earlier session, which held {_held_by(before)}{speedup}, is replaced"]


def _held_by(result: Result) -> str:
    return "PyTorch's own modules" if result.is_fallback else f"trial {result.winner}"


def is_behind(step: Interval | None) -> bool:
    """Whether calls or steps of training are slower, or seem so, by more than nobody would see.

    They are raced in two or three processes, whose interval nearly always holds 1: what is half
    as fast in each of them is no difference by it. An interval that ends below the inverse of the
    speed-up is one of processes that are all slower; on a machine whose times scatter by more,
    PyTorch's own steps seem to be as much slower than themselves.
    """
    if step is None or step.verdict == "faster":
        return False
    are_all_slower = step.speedup < WORST and step.high * step.speedup < 1.0
    return step.verdict == "slower" or are_all_slower or step.speedup < BADLY


def ranked_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Return correct trials, the greatest least speed-up over the data that were timed first.

    Of those with the same machine code there is one.
    """
    # One may be like a later one, which a stop dropped, or like one that was set aside.
    known = {t.number for t in trials if t.outcome.latency_us}
    correct = [t for t in trials if t.outcome.latency_us and t.outcome.same_as not in known]
    return sorted(correct, key=lambda t: t.outcome.ranked_us or 0.0)


def tied(raced: Sequence[Finalist]) -> list[int]:
    """Return the trials that cannot be distinguished from the winner, which is the first.

    The winner is that of the greatest least speed-up over the data of the race. Another one can be
    distinguished where it is slower on any of these, beyond chance. Who has fewer sets of
    processes was clearly behind.

    Args:
        raced: one at least; each has an interval.
    """
    most = max(len(entry.samples_us) for entry in raced)
    level = {entry.trial: entry for entry in raced if len(entry.samples_us) == most}
    worths = {n: (False, 0.0) if e.least is None else e.least.worth for n, e in level.items()}
    winner, alike = max(worths, key=lambda number: worths[number]), set(level)
    lanes_of_data: dict[str, dict[int, list[list[float]]]] = {}  # by the data's name, then trial
    for number, entry in level.items():
        lanes_of_data.setdefault("given", {})[number] = rounds_of(entry.samples_us)
        for each in entry.others:
            lanes_of_data.setdefault(each.name, {})[number] = rounds_of(each.samples_us)
    for lanes in lanes_of_data.values():
        # Earlier releases kept no samples of others.
        if len(lanes) == len(level) and all(lanes.values()):
            found: list[int] = tie_set(lanes, best=winner)
            alike &= {*found}
    return sorted(alike, key=lambda number: worths[number], reverse=True)


def structure(trial: Trial) -> str:
    """Return what a candidate is, beside its sizes: the template and all that is a word."""
    words = {k: v for k, v in trial.params.items() if isinstance(v, str)}
    return json.dumps(words, sort_keys=True)


def are_of_gradients(rejected: Sequence[Check]) -> bool:
    """Whether checks, one at least, were rejected for what a step of training alone computes."""
    words = (
        ": gradient of ",
        ": the gradients of ",
        ": it raised in gradients",
        " of Step is a view",
    )
    return bool(rejected) and all(
        any(w in check.reason for w in words) and not says_no_memory(check.reason)
        for check in rejected
    )


def blamed(error: WorkerError, names: Sequence[str]) -> tuple[str, str]:
    """Return which of the contenders failed in a race, and how; raise the error if none did."""
    for cause in _causes(error):
        if isinstance(cause, WorkerCrashed | WorkerTimeout | JobFailed) and cause.worker in names:
            reason = cause.message if isinstance(cause, JobFailed) else cause.reason
            return cause.worker, f"in the race: {reason}"
    for name in names:  # it could not even be loaded
        if str(error).startswith(f"{name}: "):
            return name, f"in the race: {str(error).removeprefix(f'{name}: ')}"
    raise error


def judged(key: str, finalists: Iterable[Finalist]) -> list[Finalist]:
    """Return those with thorough verdicts on the file of a key, in order.

    That memory ran out is none: it may have been other tuners' doing, and is asked once more.
    """
    found = [e for e in finalists if key == e.key != "" and e.check.is_thorough]
    return [e for e in found if e.check.is_accepted or not says_no_memory(e.check.reason)]


def despite_kills(ask: Callable[[], Verdict]) -> Verdict:
    """Check or race again where something else killed a process of it: no fault of the file's.

    One that was killed by a user or the kernel cannot be told from one that killed itself, or
    takes all memory: what happens each time is believed at last.

    Args:
        ask: returns a check, or what a race found, or raises as a race does.
    """
    for _ in range(MAX_KILLED - 1):
        try:
            found = ask()
        except WorkerError as error:
            if not any(isinstance(c, WorkerCrashed) and c.was_killed for c in _causes(error)):
                raise
        else:
            if not isinstance(found, Check) or KILLED not in found.reason:
                return found
    return ask()


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def why_nothing_correct(trials: Sequence[Trial], entries: Sequence[Finalist]) -> str:
    """Say that no candidate is correct, or that none of the finalists was accepted, and why."""
    counts = Counter(trial.outcome.status.value for trial in trials)
    if entries:  # what screening accepted, the full check did not
        s = "s" if len(entries) > 1 else ""
        lines = [f"no file was accepted: {len(entries)} finalist{s} of {len(trials)} trials"]
        return "\n".join([*lines, *(f"  trial {e.trial} is rejected: {e.error}" for e in entries)])
    lines = [f"no candidate is correct: {len(trials)} trials"]
    lines += [f"  {number} {status}" for status, number in counts.items()]
    failed = [t for t in trials if t.outcome.reason][:3]
    lines += [f"  trial {t.number}: {one_line(t.outcome.reason)}" for t in failed]
    return "\n".join(lines)
