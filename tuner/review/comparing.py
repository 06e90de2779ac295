"""Runs beside each other: which is better, with what confidence, and what differs between them.

What is compared is the speed-up over PyTorch that each run verified, since every one was raced
against the baseline of its own hour; latencies of different hours drift apart. Where the problem,
the accuracy or the device differs, the numbers stand side by side and there is no verdict.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuner.errors import InputError
from tuner.review.differences import (
    Difference,
    config_differences,
    machine_differences,
    tasks,
    winner_differences,
)
from tuner.review.formatting import (
    params_words,
    percent_words,
    ratio_words,
    us_words,
    wrapped_words,
)
from tuner.review.run_data import RunData
from tuner.review.summary import Summary, summary_of
from tuner.review.tables import speedup_of
from tuner.trial import Interval
from tuner.wording import percent

__all__ = [
    "Comparison",
    "Curve",
    "RunPair",
    "Side",
    "compare_runs",
    "confidence_words",
    "format_comparison",
    "lettered",
]

CONFIDENCE = 0.95
DRIFT = 0.05  # between the baselines of two runs of one problem: ten times the noise asked for
MOST_DRIFT = 1.25  # times: beyond it a load or clock need not have hit both sides of a race alike
MAX_RUNS = 12

Kind = Literal["better", "worse", "no difference", "unknown", "not comparable"]


@dataclass(frozen=True, slots=True)
class Curve:
    """The best so far: after trial `numbers[i]`, at `seconds[i]` of working time.

    `ratio` is the speed-up over the baseline that was timed shortly before the trial; the curve
    follows the best latency. The last entry repeats the best at the last trial.
    """

    numbers: tuple[int, ...]
    seconds: tuple[float, ...]
    latency_us: tuple[float, ...]
    ratio: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the runs that are compared."""

    name: str
    summary: Summary
    sizes: Mapping[str, Any]
    curve: Curve


@dataclass(frozen=True, slots=True)
class RunPair:
    """One run against another.

    `ratio` is how many times faster the file of `one` is than that of `other`, typically; it lies
    between `low` and `high` with 95 % confidence, and `confidence` is the chance that the faster
    looking one is faster. None where it cannot be said; `words` then says why.
    """

    one: str
    other: str
    kind: Kind
    ratio: float | None
    low: float | None
    high: float | None
    confidence: float | None
    words: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two or more runs, in the order asked for; `best` is None where there is no verdict.

    `pairs` has the first against the second; with more runs, within each problem the best
    against each other one. `bests` are the best of each problem, `matrix` has each run against
    each, row by row, and None against itself. `tasks` are those of modules that were captured.
    """

    sides: tuple[Side, ...]
    best: str | None
    bests: tuple[str, ...]
    pairs: tuple[RunPair, ...]
    matrix: tuple[tuple[RunPair | None, ...], ...]
    notes: tuple[str, ...]
    tasks: tuple[Difference, ...]
    config: tuple[Difference, ...]
    winner: tuple[Difference, ...]
    environment: tuple[Difference, ...]


def compare_runs(runs: Sequence[RunData]) -> Comparison:
    """Compare two or more runs.

    Raises:
        InputError: fewer than two, more than twelve, or one of them twice.
    """
    names = [run_data.run.path.name for run_data in runs]
    if not 2 <= len(runs) <= MAX_RUNS or len({run_data.run.path for run_data in runs}) < len(runs):
        raise InputError(
            f"expected two to {MAX_RUNS} different runs, got {len(runs)}: {', '.join(names)}\n"
            "  next: tune runs lists them"
        )
    sides = tuple(_side(run_data) for run_data in runs)
    problems = _problems(sides)
    matrix = tuple(
        tuple(None if one is other else _against(one, other) for other in sides) for one in sides
    )
    pair, bests = _verdicts(problems, sides)
    return Comparison(
        sides=sides,
        best=bests[0] if len(problems) == 1 and bests else None,
        bests=bests,
        pairs=pair,
        matrix=matrix,
        notes=tuple(note for problem in problems for note in _notes(problem, sides)),
        tasks=tasks(runs),
        config=config_differences(runs),
        winner=winner_differences(runs),
        environment=machine_differences(runs),
    )


def _side(run_data: RunData) -> Side:
    return Side(
        run_data.run.path.name,
        summary_of(run_data),
        run_data.environment.sizes,
        _curve(run_data),
    )


def _curve(run_data: RunData) -> Curve:
    steps: list[tuple[int, float, float, float | None]] = []
    for trial in run_data.trials:
        latency_us = trial.outcome.latency_us
        if latency_us is not None and (not steps or latency_us < steps[-1][2]):
            ratio = speedup_of(trial, run_data)
            steps.append((trial.number, trial.elapsed_s, latency_us, ratio))
    if steps:
        last = run_data.trials[-1]
        steps.append((last.number, last.elapsed_s, *steps[-1][2:]))
    columns = list(zip(*steps, strict=True)) or [(), (), (), ()]
    return Curve(*columns)


# ---- which is better ------------------------------------------------------------------------


def _problems(sides: Sequence[Side]) -> list[list[Side]]:
    """Return the runs in groups that solve the same problem on the same terms."""
    groups: list[list[Side]] = []
    for side in sides:
        group = next((g for g in groups if not _mismatch(g[0], side)), None)
        if group is None:
            groups.append([side])
        else:
            group.append(side)
    return groups


def _verdicts(
    problems: Sequence[Sequence[Side]], sides: Sequence[Side]
) -> tuple[tuple[RunPair, ...], tuple[str, ...]]:
    """Return who is held against whom, and the best of each problem."""
    found: list[RunPair] = []
    bests: list[str] = []
    for group in problems:
        if len(group) == 2:
            pair = [_against(*group)]
            winner = {"better": group[0].name, "worse": group[1].name}.get(pair[0].kind)
        elif len(group) > 2:
            best = max(group, key=_speedup)
            pair = [_against(best, side) for side in group if side is not best]
            winner = best.name if all(v.kind == "better" for v in pair) else None
        else:
            continue
        found += pair
        bests += [winner] if winner else []
    if not found:  # as many problems as runs: say why
        found = [_against(sides[0], side) for side in sides[1:]]
    return tuple(found), tuple(bests)


def _interval(side: Side) -> Interval | None:
    return None if side.summary.kind == "rejected" else side.summary.interval


def _speedup(side: Side) -> float:
    interval = _interval(side)
    return interval.speedup if interval else 0.0


def _mismatch(one: Side, other: Side) -> str:
    """Return why the speeds of two runs say nothing of each other; empty if they do."""
    a, b = one.summary, other.summary
    if a.op != b.op:  # whose sizes have other names
        return f"different operators: {a.op} and {b.op}"
    pairs = [
        ("sizes", _sizes_words(one, other), _sizes_words(other, one)),
        ("accuracy classes", a.accuracy, b.accuracy),
        ("modes", a.mode or "as given", b.mode or "as given"),
        ("devices", a.device, b.device),
    ]
    return "; ".join(f"different {what}: {x} and {y}" for what, x, y in pairs if x != y)


def _sizes_words(side: Side, other: Side) -> str:
    """Return those of a run's sizes that are not the other's."""
    own = {name: size for name, size in side.sizes.items() if other.sizes.get(name) != size}
    return ", ".join(f"{name}={value}" for name, value in own.items()) or "not recorded"


def _against(one: Side, other: Side) -> RunPair:
    why = _mismatch(one, other)
    if why:
        why = f"{one.name} and {other.name} are not comparable: {why}"
        return RunPair(one.name, other.name, "not comparable", None, None, None, None, why)
    a, b = _interval(one), _interval(other)
    if a is None or b is None:
        which = " and ".join(s.name for s, i in ((one, a), (other, b)) if i is None)
        why = f"no verdict: {which} had no verification, and screening decides nothing"
        return RunPair(one.name, other.name, "unknown", None, None, None, None, why)
    drift = _drift([one, other])
    if drift > MOST_DRIFT:
        times = " and ".join(us_words(side.summary.baseline_us) for side in (one, other))
        why = (
            f"no verdict: PyTorch itself took {times}, {ratio_words(drift)} between the two: the "
            "machine, its clocks or its load changed too much for their speed-ups to be compared; "
            "next: tune both again on a quiet machine"
        )
        return RunPair(one.name, other.name, "unknown", None, None, None, None, why)
    ratio = a.speedup / b.speedup
    error, degrees = _error_of(a, b)
    if not math.isfinite(error):
        why = f"no verdict: {one.name} or {other.name} was raced in one process only"
        return RunPair(one.name, other.name, "unknown", ratio, None, None, None, why)
    from scipy import stats

    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees)) * error
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    confidence = 1.0 if error == 0 else float(stats.t.cdf(abs(math.log(ratio)) / error, degrees))
    kind: Kind = "better" if low > 1 else "worse" if high < 1 else "no difference"
    words = {
        "better": f"{one.name} is {ratio_words(ratio)} as fast as {other.name}",
        "worse": f"{other.name} is {ratio_words(1 / ratio)} as fast as {one.name}",
        "no difference": f"{one.name} and {other.name} cannot be distinguished",
    }[kind]
    bounds = (1 / high, 1 / low) if kind == "worse" else (low, high)
    words += f" ({ratio_words(bounds[0])} to {ratio_words(bounds[1])})"
    return RunPair(one.name, other.name, kind, ratio, low, high, confidence, words)


def _error_of(a: Interval, b: Interval) -> tuple[float, float]:
    """Return the standard error of the log of two speed-ups' ratio, and its degrees of freedom.

    Each interval is a prediction interval over P processes, exp(m ± t(P - 1) s sqrt(1 + 1/P)),
    which gives back s; the difference of the means m is then Welch's t test ("The generalization
    of Student's problem", Biometrika 1947). Infinite where a run had one process.
    """
    from scipy import stats

    parts = []
    for interval in (a, b):
        count = interval.num_processes
        if count < 2 or not (interval.low > 0 and math.isfinite(interval.high)):
            return math.inf, 0.0
        quantile = float(stats.t.ppf((1 + interval.confidence) / 2, count - 1))
        half = math.log(interval.high / interval.low) / 2
        parts.append(((half / quantile) ** 2 / (1 + 1 / count) / count, count - 1))
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return 0.0, float(min(degrees for _, degrees in parts))
    return math.sqrt(total), total**2 / sum(v**2 / degrees for v, degrees in parts)


def _drift(sides: Sequence[Side]) -> float:
    """Return how many times longer the slowest baseline took than the fastest."""
    times = [side.summary.baseline_us for side in sides if side.summary.baseline_us]
    return max(times) / min(times) if times else 1.0


def _notes(problem: Sequence[Side], sides: Sequence[Side]) -> list[str]:
    """Return what makes the comparison of runs of one problem less sure, or impossible."""
    notes = []
    if len(problem) == 1 and len(sides) > 2 and (why := _mismatch(sides[0], problem[0])):
        notes.append(f"{problem[0].name} and {sides[0].name} are not comparable: {why}")
    if 1 + DRIFT < _drift(problem) <= MOST_DRIFT:
        times = [side.summary.baseline_us for side in problem if side.summary.baseline_us]
        notes.append(
            f"PyTorch itself took {us_words(min(times))} in one run and {us_words(max(times))} in "
            "another: the machine, its clocks or its load changed; speed-ups are compared, which "
            "cancels most of it"
        )
    for side in problem:
        if side.summary.kind == "rejected":
            notes.append(f"{side.name}: its export was rejected, so it counts for nothing")
        elif side.summary.caveat:
            notes.append(f"{side.name}: but {side.summary.caveat}")
    return notes


# ---- the terminal ---------------------------------------------------------------------------

LABEL_WIDTH = 12


def format_comparison(found: Comparison) -> str:
    """Return a comparison as plain text of at most 80 columns; A, B, ... stand for the names."""
    wrapped = functools.partial(wrapped_words, width=LABEL_WIDTH)
    lines: list[str] = []
    letters = [chr(ord("A") + number) for number in range(len(found.sides))]
    names = [side.name for side in found.sides]
    for letter, side in zip(letters, found.sides, strict=True):
        s = side.summary
        lines += wrapped(letter, side.name)
        latency = f"{us_words(s.latency_us)}"
        latency += f" ± {percent_words(s.noise)}" if s.noise is not None else ""
        sure = f" ({s.certainty})" if s.certainty else ""
        lines += wrapped("", s.sizes)
        lines += wrapped("", f"{s.verdict}{sure}")
        lines += wrapped(
            "", f"{latency}, PyTorch {us_words(s.baseline_us)}; {s.num_trials} trials"
        )
        if s.best is not None:
            lines += wrapped("", params_words(s.best))
    for pair in found.pairs:
        sure = ""
        if pair.confidence is not None:
            sure = f"; confidence {confidence_words(pair.confidence)}"
        lines += wrapped("verdict", lettered(pair.words, names) + sure)
    for note in found.notes:
        lines += wrapped("note", lettered(note, names))
    for title, rows in (
        *((("task", found.tasks),) if found.tasks else ()),
        ("config", found.config),
        ("winner", found.winner),
        ("machine", found.environment),
    ):
        for row in rows:
            values = "; ".join(
                f"{letter} {value or '–'}"
                for letter, value in zip(letters, row.values, strict=True)
            )
            lines += wrapped(title, f"{row.key}: {values}")
        if not rows:
            lines += wrapped(title, "the same in all")
    return "\n".join(lines)


def lettered(text: str, names: Sequence[str]) -> str:
    """Put A, B, ... in place of names; the longest first, since one name may begin another."""
    letters = {name: chr(ord("A") + number) for number, name in enumerate(names)}
    for name in sorted(letters, key=len, reverse=True):
        text = text.replace(name, letters[name])
    return text


def confidence_words(confidence: float) -> str:
    """Return a chance as a percentage that never claims to be certain."""
    return percent(confidence, 3) if confidence < 0.9995 else "above 99.9 %"
