"""The verdict on a run, the numbers behind it and the advice: what page and terminal both say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Literal

from tuner.by_batch import ELSEWHERE
from tuner.intervals import rounds_of, speedups_by_process
from tuner.problem.modes import MODE_WORDS
from tuner.review.advice import Advice, advice_of
from tuner.review.arithmetic import (
    accuracy_words,
    eager_words,
    least_words,
    products_words,
    race_words,
    roofline_words,
    throughput_words,
)
from tuner.review.formatting import (
    NONE,
    count_words,
    draws_words,
    outlook_words,
    params_words,
    percent_words,
    ratio_words,
    rejection_words,
    relative_path,
    sizes_words,
    us_words,
    wrapped_words,
)
from tuner.review.run_data import RunData
from tuner.review.workloads import (
    Tone,
    Workload,
    answer_words,
    caveat_of,
    error_ratio,
    headline_of,
    interval_words,
    steps_of,
    tone_of,
    tone_words,
    trust_of,
    untimed_of,
    workload_rows,
    workloads_of,
)  # fmt: skip
from tuner.run import Outlook, Run
from tuner.trial import Compiled, Finalist, Interval, ProbeResult, Result, Status, Trial

__all__ = [
    "LIKE_PYTORCH", "Summary", "format_summary", "summary", "summary_of", "trial_words",
]  # fmt: skip

LIKE_PYTORCH = 0.05  # a ratio within this of 1 is none to speak of
MOST_AS_PYTORCHS = 2.0  # times the error of PyTorch, of which nothing need be said

# ---- the summary ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """What the page and the terminal both say of a run.

    `latency_us`, `noise` and `baseline_us` come from the record of the exported file where there
    is one, else from the winner's race, else from screening; `measured` says which. `interval` is
    of the least speed-up over the data that were raced. `probes` are
    the errors against float64 beside the baseline's own. `workloads` are all that was timed of
    the file, `caveat` what is materially less than the headline, `tone` the colour of both,
    `tone_words` what that says, `trust` what stands behind them, in one line, `untimed` on what
    the speed was not verified. `accepts` is the accuracy class with what it accepts, `eager` what
    PyTorch's own modules compute in, `products` how the winner makes float32 products of others.
    `num_rejected` trials were correct at screening, and are not. `rewrites` are those of a
    module's graph and `rows` where its kernels run, in words. Paths are relative to `path`.
    """

    path: str
    op: str
    title: str
    device: str
    accuracy: str
    accepts: str
    eager: str
    products: str
    mode: str
    sizes: str
    verdict: str
    certainty: str
    caveat: str
    trust: str
    untimed: str
    tone: Tone
    tone_words: str
    workloads: tuple[Workload, ...]
    kind: Literal["faster", "slower", "no difference", "rejected", "open"]
    measured: str
    interval: Interval | None
    latency_us: float | None
    noise: float | None
    baseline_us: float | None
    baseline_noise: float | None
    best: Trial | None
    counts: Mapping[str, int]
    num_trials: int
    num_rejected: int
    num_feasible: int | None
    outlook: Outlook | None
    error: str
    probes: tuple[ProbeResult, ...]
    ties: tuple[int, ...]
    compiled: str
    throughput: str
    roofline: str
    least: str
    rewrites: tuple[str, ...]
    rows: str
    export_path: str
    reproduce: str
    export_command: str
    warnings: tuple[Advice, ...]


def summary(run: Run) -> Summary:
    """Say what a run found, finished or not.

    Raises:
        StorageError: a file of the run cannot be read.
    """
    return summary_of(RunData.of(run))


def summary_of(run_data: RunData) -> Summary:
    """Say what a run found, from its records."""
    result, finalist, best = run_data.result, run_data.finalist, run_data.best
    interval = finalist.least if finalist else None
    latency_us, noise, baseline_us, measured = _figures_of(run_data)
    headline, of_size = headline_of(finalist) if finalist else (None, "")
    kind, verdict = _verdict(run_data, headline, latency_us, baseline_us)
    verdict += of_size if kind != "rejected" else ""
    check = finalist.check if finalist else best.outcome.check if best else None
    if run_data.is_rejected:
        check = run_data.rejected[0].check
    workloads = workloads_of(result)
    counts = Counter(trial.outcome.status for trial in run_data.trials)
    environment = run_data.environment
    op = environment.op or run_data.run.path.name
    export_path = relative_path(result.export_path, run_data.run.path) if result else ""
    return Summary(
        path=str(run_data.run.path),
        op=op,
        title=environment.title or op,
        device=run_data.device_name,
        accuracy=environment.accuracy or "unknown",
        accepts=accuracy_words(run_data),
        eager=eager_words(run_data),
        products=products_words(run_data),
        mode=MODE_WORDS.get(environment.mode, ""),
        sizes=sizes_words(environment.sizes),
        verdict=verdict,
        certainty=interval_words(headline) if headline and kind != "rejected" else "",
        caveat=caveat_of(workloads),
        trust=trust_of(result),
        untimed=untimed_of(result),
        tone=(tone := tone_of(workloads, kind)),
        tone_words=tone_words(tone, kind),
        workloads=workloads,
        kind=kind,
        measured=measured,
        interval=interval,
        latency_us=latency_us,
        noise=noise,
        baseline_us=baseline_us,
        baseline_noise=run_data.baseline.noise,
        best=best,
        counts={status.value: counts[status] for status in Status if counts[status]},
        num_trials=len(run_data.trials),
        num_rejected=len(run_data.rejected),
        num_feasible=environment.num_feasible,
        outlook=run_data.outlooks[-1] if run_data.outlooks else None,
        error=_error_words(check.probes if check else ()),
        probes=check.probes if check else (),
        ties=tuple(n for n in result.ties if n != result.winner) if result else (),
        compiled=_compiled_words(result.compiled if result else None),
        throughput=throughput_words(run_data, latency_us),
        roofline=roofline_words(run_data, latency_us),
        least=least_words(run_data, latency_us, baseline_us),
        rewrites=tuple(r.words for r in run_data.module.outline.rewrites)
        if run_data.module
        else (),
        rows=_rows_words(result, finalist),
        export_path=export_path,
        reproduce=environment.command,
        export_command=f"tune export {quote(str(run_data.run.path))}",
        warnings=tuple(advice_of(run_data, interval, noise)),
    )


def _figures_of(run_data: RunData) -> tuple[float | None, float | None, float | None, str]:
    """Return latency, noise and baseline latency, and where they were measured."""
    finalist, best, baseline_us = run_data.finalist, run_data.best, run_data.baseline.latency_us
    if finalist is not None and finalist.latency_us is not None:
        is_export = run_data.result is not None and run_data.result.exported is finalist
        what = "the exported file" if is_export else "the winner"
        if finalist.least_on:  # the headline is of others
            what += ", on the reference's own weights and inputs"
        return finalist.latency_us, finalist.noise, baseline_us, race_words(what, run_data)
    measurement = best.outcome.measurement if best else None
    if measurement is None:
        return None, None, baseline_us, ""
    words = "screening only, " + ("and rejected since" if run_data.is_rejected else "not verified")
    return measurement.reported_us, measurement.noise, baseline_us, words


def _verdict(
    run_data: RunData,
    interval: Interval | None,
    latency_us: float | None,
    baseline_us: float | None,
) -> tuple[Literal["faster", "slower", "no difference", "rejected", "open"], str]:
    finalist = run_data.finalist
    if finalist is not None and (finalist.error or not finalist.check.is_accepted):
        return "rejected", f"Rejected: {finalist.error or finalist.check.reason}"
    if run_data.is_rejected:
        return "rejected", f"Rejected: {rejection_words(run_data.rejected)}"
    if interval is not None and run_data.result is not None and run_data.result.is_fallback:
        said = "No faster kernel found: the exported file holds PyTorch's own modules"
        return interval.verdict, said
    ratio = "" if interval is None else ratio_words(interval.speedup)
    if interval and finalist and finalist.falls_back and interval.verdict == "faster":
        said = f"No difference from PyTorch: the file runs its own operations ({ratio} timed)"
        return "no difference", said
    if interval is not None:
        words = {
            "faster": f"{ratio} faster than PyTorch",
            "slower": f"Slower than PyTorch: {ratio}",
            "no difference": f"No difference from PyTorch: {ratio}",
        }
        if interval.verdict == "no difference" and abs(interval.speedup - 1.0) > LIKE_PYTORCH:
            which = "faster" if interval.speedup > 1.0 else "slower"
            found = _by_process(finalist, interval) if finalist else []
            ends = f"{ratio_words(min(found))} to {ratio_words(max(found))}" if found else ""
            said = f"{which} in this race ({ratio}{'; ' * bool(ends)}{ends}), but its processes"
            if found and not min(found) <= interval.speedup <= max(found):  # on a busy machine
                said = f"{ratio} by its pairs of rounds, {ends} by its processes' medians, which"
            return interval.verdict, (
                f"Cannot be distinguished from PyTorch: {said} scatter so much that another one "
                "may show the opposite"
            )
        return interval.verdict, words[interval.verdict]
    if latency_us is None:
        return "open", "No trial yet" if not run_data.trials else "Nothing correct found so far"
    if baseline_us is None:
        return (
            "open",
            f"Best so far {us_words(latency_us)}; the baseline's latency is not recorded",
        )
    return "open", f"{ratio_words(baseline_us / latency_us)} PyTorch's speed so far, not verified"


def _by_process(finalist: Finalist, interval: Interval) -> list[float]:
    """Return the speed-up in each process of the race whose interval this is."""
    races = [(finalist.interval, finalist.samples_us, finalist.baseline_samples_us)]
    races += [(o.interval, o.samples_us, o.baseline_samples_us) for o in finalist.others]
    for known, own, baseline in races:
        if known == interval and len(own) > 1:
            return speedups_by_process(rounds_of(own), rounds_of(baseline))
    return []


def _error_words(probes: Sequence[ProbeResult]) -> str:
    """Compare the errors with the baseline's own: as given, and where they compare worst."""
    if not probes:
        return "not checked yet"
    accepted = sum(probe.is_accepted for probe in probes)
    ratios = [(ratio, p) for p in probes if (ratio := error_ratio(p)) is not None]
    if not ratios:
        return f"{accepted} of {len(probes)} probes accepted"
    worst, probe = max(ratios, key=lambda pair: pair[0])
    first = probes[0]  # the inputs as given
    which = f"{worst:.2f} times PyTorch's own on the worst probe ('{probe.probe}')"
    if worst > MOST_AS_PYTORCHS:  # of an error that may be a few roundings where PyTorch has none
        rms, own = f"{probe.rms_rel:.1e}", f"{probe.baseline_rms_rel:.1e}"
        which = f"relative rms {rms} on the worst probe ('{probe.probe}'), PyTorch's own {own}"
    return (
        f"against float64, {first.probe}: relative rms {first.rms_rel:.1e}, absolute max "
        f"{first.max_abs:.1e} (PyTorch's own {first.baseline_rms_rel:.1e}, "
        f"{first.baseline_max_abs:.1e}); {which}; "
        f"{accepted} of {len(probes)} probes accepted{draws_words(probes)}"
    )


def _rows_words(result: Result | None, finalist: Finalist | None) -> str:
    """Return where a file takes kernels; empty where it always does."""
    noted = next((n for n in result.notes if n.startswith("kernels run")), "") if result else ""
    by_batch = finalist.by_batch if finalist is not None else None
    brief = by_batch.brief if by_batch is not None else ""
    return noted or (f"{brief}; {ELSEWHERE}" if brief else "")


def _compiled_words(compiled: Compiled | None) -> str:
    """Return how torch.compile did beside the exported file; empty where it was not asked for."""
    if compiled is None:
        return ""
    if compiled.interval is None or compiled.ours is None:
        return f"torch.compile ({compiled.mode}) could not be raced: {compiled.error}"
    return (
        f"torch.compile ({compiled.mode}) takes {us_words(compiled.latency_us)}, "
        f"{ratio_words(compiled.interval.speedup)} PyTorch's speed{answer_words(compiled)}; the "
        f"exported file runs at {ratio_words(compiled.ours.speedup)} of that; "
        f"{interval_words(compiled.ours)}"
    )


# ---- the terminal ---------------------------------------------------------------------------

_MAX_LINES, _LABEL = 24, 10
_MOST_LINES_OF = {"verdict": 4, "error": 3, "run": 3}  # which a log has nowhere else


def format_summary(summary: Summary) -> str:
    """Return the summary as plain text: at most 24 lines of at most 80 columns.

    It has a line or two more for each workload beyond the second, for where kernels run, and for
    a step of training.
    """
    s = summary
    rows, steps = workload_rows(s.workloads), steps_of(s.workloads)
    where = s.rows.removeprefix("kernels ").removesuffix(f"; {ELSEWHERE}")
    latency = us_words(s.latency_us) + (
        f" ± {percent_words(s.noise)}" if s.noise is not None else ""
    )
    eager = f" ({s.eager})" if s.eager else ""
    pairs = [
        ("verdict", s.verdict + (f"; {s.certainty}" if s.certainty else "")),
        ("but", s.caveat),
        ("kernels", where),
        ("workloads", rows[0]),
        *(("", row) for row in rows[1:]),
        ("training", steps),
        (
            "latency",
            f"{latency}, PyTorch {us_words(s.baseline_us)}{eager}; {s.measured}"
            if s.best
            else NONE,
        ),
        ("compiled", s.compiled),
        ("error", s.error),
        ("speed", "; ".join(words for words in (s.throughput, s.roofline) if words)),
        ("products", s.products),
        ("least", s.least),
        ("rewrites", "; ".join(s.rewrites)),
        ("trials", trial_words(s)),
        ("remaining", outlook_words(s.outlook)),
        ("best", f"trial {s.best.number}: {params_words(s.best)}" if s.best else NONE),
        ("run", s.path),
        ("again", s.reproduce),
    ]
    mode = s.mode and f", {s.mode}"
    sizes = s.sizes and f", {s.sizes}"
    head = f"{s.title}{sizes} on {s.device}, accuracy {s.accuracy}{mode}"
    lines = wrapped_words("", head, 0, 2)
    for label, text in pairs:
        if text:
            lines += wrapped_words(label, text, _LABEL, _MOST_LINES_OF.get(label, 2))
    more_rows = [*rows[1:], *filter(None, (where, steps))]
    most = _MAX_LINES + sum(len(wrapped_words("", row, _LABEL, 2)) for row in more_rows)
    warnings = [advice for advice in s.warnings if advice.text != s.rows]
    for number, advice in enumerate(warnings):
        text = advice.text + (f"; {advice.remedy}" if advice.remedy else "")
        more = wrapped_words("warning", text, _LABEL, 2)
        is_last = number == len(warnings) - 1
        if len(lines) + len(more) > most - (0 if is_last else 1):
            left = count_words(len(warnings) - number, "more warning")
            lines.append(f"{left} in the report")
            break
        lines += more
    return "\n".join(lines[:most])


def trial_words(s: Summary) -> str:
    """Return how many trials there were, by status."""
    of = f" tried of {s.num_feasible:,} possible" if s.num_feasible is not None else ""
    counts = ", ".join(f"{count:,} {status}" for status, count in s.counts.items())
    rejected = f", of them {s.num_rejected:,} rejected by the full check" if s.num_rejected else ""
    return f"{s.num_trials:,}{of}" + (f": {counts}{rejected}" if counts else "")
