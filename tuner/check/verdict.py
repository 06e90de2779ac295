"""The judge's half of a check: the verdict on the answers.

    judge's process                          producer's process (imports the candidate)
    expected(problem, probe) -> Expected
        .question ---- pack / unpack ---->  answer(make_candidate, question) -> Answer
    judge(expected, answer)  <--------------------- pack / unpack ----
        -> ProbeResult ... merge -> Check

For screening both halves may share a process; then nothing is packed, and what is expected is
computed once for all candidates. `probes` holds what is asked and what crosses, `produce` the
other half, `exercise` what both do to a module, `expected` what the judge expects, `compare`
errors and their limits, `diagnosis` what is likely wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tuner.check.compare import (
    Error,
    Limits,
    compare,
    first_beyond,
    gradient_limits,
    index_of,
    limits_of,
)
from tuner.check.crossing import Answer
from tuner.check.diagnosis import diagnosis, received
from tuner.check.exercise import checksum_of
from tuner.check.expected import Expected
from tuner.check.probes import ROUNDING, Probe
from tuner.problem.accuracy import Accuracy
from tuner.trial import Check, ProbeResult
from tuner.wording import one_line, percent

if TYPE_CHECKING:
    pass

__all__ = ["judge", "merge"]

ROUNDED = 2.0**-6  # of a tensor's largest value: operands in bfloat16 are within 2^-8
CLOSE = 4.0  # times a limit that may be chance; TF32 is some 100 times, a wrong result far more


def judge(expected: Expected, answer: Answer, accuracy: Accuracy) -> ProbeResult:
    """Judge one answer: how it behaved, what it returned, how near to float64 it is."""
    probe = expected.probe
    reason = _judge_refusal(expected, answer)
    if reason is not None:
        return ProbeResult(probe.name, 0.0, 0.0, 0.0, 0.0, reason == "", _told(probe, reason))
    reason = _judge_form(expected, answer)
    if reason:
        return ProbeResult(
            probe.name, math.inf, math.inf, *_baseline_of(expected), False, _told(probe, reason)
        )
    errors = {
        # A poisoned buffer may be NaN or infinite: that depends on how sums are merged.
        name: compare(
            received(answer, want, name),
            want,
            expected.unjudged.get(name),
            accuracy,
            tells_nan_from_inf=not name.startswith("buffer."),
        )
        for name, want in expected.oracle.items()
        if name in answer.tensors
    }
    behaviour = _judge_behaviour(expected, answer)
    limits = _limits_of_all(expected, accuracy)
    values = _judge_values(expected, answer, errors, limits, accuracy)
    values = values or _judge_gradients(expected, answer, errors, limits, accuracy)
    bits = _judge_bits(expected, answer)
    reason = behaviour or values or bits
    is_exact = bool(behaviour or bits or limits.keys() - errors.keys())
    excess = max((limits[name].excess(error) for name, error in errors.items()), default=0.0)
    outputs = [error for name, error in errors.items() if name.startswith("call")]
    worst = max(outputs, key=lambda error: error.max_abs, default=Error())
    rms_rel = max((error.rms_rel for error in outputs), default=0.0)
    is_rounding = bool(values) and not behaviour and not is_exact and _is_rounding(errors)
    return ProbeResult(
        probe.name, rms_rel, worst.max_abs, *_baseline_of(expected), not reason,
        _told(probe, reason, is_rounding), _note(expected, answer),
        is_close=bool(values) and not is_exact and excess <= CLOSE,
    )  # fmt: skip


def _told(probe: Probe, reason: str, is_rounding: bool = False) -> str:
    """Return a reason with the probe's name, and what such a failure usually means.

    A layout that is not followed gives numbers of another place, not errors of rounding size.
    """
    if not reason:
        return ""
    tells = ROUNDING if is_rounding and probe.layout != "contiguous" else probe.tells
    return f"{probe.name}: {reason}" + (f" ({tells})" if tells else "")


def _is_rounding(errors: Mapping[str, Error]) -> bool:
    """Whether all errors are as small, for their tensor, as fewer bits of its operands make."""
    return all(
        not error.num_misplaced and error.max_abs <= ROUNDED * error.largest
        for error in errors.values()
    )


def _baseline_of(expected: Expected) -> tuple[float, float]:
    outputs = [error for name, error in expected.baseline.items() if name.startswith("call")]
    return (
        max((error.rms_rel for error in outputs), default=0.0),
        max((error.max_abs for error in outputs), default=0.0),
    )


def _judge_refusal(expected: Expected, answer: Answer) -> str | None:
    """Return None to judge on, "" to accept as it is, or why it is rejected."""
    report, probe = answer.report, expected.probe
    if expected.error and not report.error:
        # The reference's answer at such a batch is unknown, so any answer may be right.
        is_beyond_reference = probe.layout == "contiguous" and (probe.batch or 0) >= 2
        if is_beyond_reference:
            return ""
        return f"it returned an answer where the reference raises: {expected.error}"
    if not report.error:
        return None
    is_call = report.stage.startswith("call") or report.stage == "conversion"
    if is_call and (expected.error or probe.may_refuse or expected.may_refuse):
        return ""
    if report.stage == "a change of settings" and probe.mode == "cumulative":
        return ""  # refused aloud, as a scripted module does
    if report.stage == "load":
        return f"it does not load the reference's state_dict: {_shortened(report.error)}"
    if report.stage == "build":
        return f"ModelNew(*get_init_inputs()) raised {_shortened(report.error)}"
    return f"it raised in {report.stage}: {_shortened(report.error)}"


def _shortened(text: str, limit: int = 600) -> str:
    """Return what was raised in one line: PyTorch names missing keys in lines of their own."""
    text = one_line(text, len(text) + 4)
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({len(text) - limit} characters more)"


def _judge_form(expected: Expected, answer: Answer) -> str:
    """Judge the state_dict's keys and the outputs' number, type, dtype, shape and device."""
    report, reference = answer.report, expected.report
    mine, theirs = dict(_by_name(report.keys)), dict(_by_name(reference.keys))
    for name in theirs:
        if mine.get(name) != theirs[name]:
            found = mine.get(name, "missing")
            return f"state_dict: {name!r} is {found}; the reference's is {theirs[name]}"
    extra = [name for name in mine if name not in theirs]
    if extra:
        return f"state_dict: {extra[0]!r} is not in the reference's"
    weights = {name[7:] for name in reference.checksums if name.startswith("weight.")}
    order, wanted = ([name for name in keys if name in weights] for keys in (mine, theirs))
    if order != wanted:
        at = next(i for i, name in enumerate(order) if name != wanted[i])
        return (
            f"state_dict: parameter {at + 1} is {order[at]!r}, the reference's is {wanted[at]!r}: "
            "an optimiser's state goes by position"
        )
    for call, kinds in enumerate(reference.kinds):
        got = report.kinds[call] if call < len(report.kinds) else ()
        if got != kinds:
            is_disguised = any(not kind.startswith("torch.Tensor ") for kind in got)
            hint = ": a lazy or disguised tensor?" if is_disguised else ""
            return (
                f"call {call + 1} returned {', '.join(got) or 'nothing'}; "
                f"expected {', '.join(kinds)}{hint}"
            )
    for name, want in expected.oracle.items():
        got_tensor = answer.tensors.get(name)
        if got_tensor is None and not name.startswith("grad."):
            return f"{_label(name)} is missing from the answer"
        if got_tensor is not None and got_tensor.shape != want.shape:
            return f"{_label(name)} has shape {list(got_tensor.shape)}, not {list(want.shape)}"
        # Announced kinds were compared above; the received bytes must be of that kind as well.
        if got_tensor is not None and got_tensor.dtype != expected.dtypes[name]:
            return f"{_label(name)} is {got_tensor.dtype}, not {expected.dtypes[name]}"
    return ""


def _by_name(
    keys: Sequence[tuple[str, str, tuple[int, ...]]],
) -> Iterator[tuple[str, str]]:
    for name, dtype, shape in keys:
        yield name, f"{dtype.removeprefix('torch.')}{list(shape)}"


def _judge_behaviour(expected: Expected, answer: Answer) -> str:
    """Judge what must hold whatever the values: memory, edits, late work."""
    report = answer.report
    if report.changes:
        return report.changes[0]
    aliases = [text for text in report.aliases if text not in expected.report.aliases]
    if aliases:
        return aliases[0]
    if report.num_forks_left:
        return f"{report.num_forks_left} forks of its process outlived the call"
    for name, checksum in expected.report.checksums.items():
        if report.checksums.get(name) == checksum:
            continue
        kind, _, rest = name.partition(".")
        if kind == "input":
            return f"input {rest} was edited by the call"
        is_own = expected.question.script.own_seed is not None
        if is_own and report.checksums.get(f"drawn.{name}") != checksum:
            return (
                f"{rest} differs from the reference's initial value: with the same seed, the "
                "constructor must draw the same random numbers in the same order"
            )
        return f"the weight {rest} was edited by the call"
    for name, tensor in answer.tensors.items():
        if not name.startswith("call") or _is_view(expected, name):
            continue
        if report.checksums.get(f"late.{name}") != checksum_of(tensor):
            return (
                f"{_label(name)} changed after the call had returned: a later call or another "
                "thread or stream writes to it"
            )
    return ""


def _is_view(expected: Expected, name: str) -> bool:
    """Whether the reference itself returns memory of its input or state at that call."""
    call = int(name.partition(".")[0].removeprefix("call"))
    start = f"the output of call {call + 1} shares"
    return any(text.startswith(start) for text in expected.report.aliases)


def _limits_of_all(expected: Expected, accuracy: Accuracy) -> dict[str, Limits]:
    """Return the limits of every tensor that is compared, by name."""
    largest = max(
        (e.largest for n, e in expected.baseline.items() if _is_gradient(n)), default=0.0
    )
    return {
        name: gradient_limits(baseline, largest, accuracy)
        if _is_gradient(name)
        else limits_of(
            name,
            baseline,
            expected.num_rows,
            accuracy,
            is_double=str(expected.dtypes[name]) == "torch.float64",
        )
        for name, baseline in expected.baseline.items()
    }


def _is_gradient(name: str) -> bool:
    return name.startswith("grad.")


def _judge_values(
    expected: Expected,
    answer: Answer,
    errors: Mapping[str, Error],
    all_limits: Mapping[str, Limits],
    accuracy: Accuracy,
) -> str:
    """Judge outputs and buffers by the class of accuracy."""
    for name, error in errors.items():
        if _is_gradient(name):
            continue
        limits = all_limits[name]
        if not limits.accepts(error):
            where = _offence(expected, answer, name, error, limits, accuracy)
            told = diagnosis(expected, answer, name, error)
            return where + (f"; {told}" if told else "")
    return ""


def _judge_gradients(
    expected: Expected,
    answer: Answer,
    errors: Mapping[str, Error],
    all_limits: Mapping[str, Limits],
    accuracy: Accuracy,
) -> str:
    names = [name for name in expected.oracle if _is_gradient(name)]
    if names and answer.report.is_detached:
        return "the output is detached: it has no gradient, and nothing was raised"
    for name in names:
        if name not in errors:
            return f"{_label(name)} is missing: the output does not depend on it"
        limits, error = all_limits[name], errors[name]
        if not limits.accepts(error):
            return _offence(expected, answer, name, error, limits, accuracy)
    return ""


def _judge_bits(expected: Expected, answer: Answer) -> str:
    if not expected.probe.wants_same_bits:
        return ""
    for name, tensor in answer.tensors.items():
        if name.startswith("call1."):
            first = answer.tensors[name.replace("call1.", "call0.", 1)]
            if checksum_of(first) != checksum_of(tensor):
                return (
                    "the same input twice gave different bits, but the candidate is declared "
                    "deterministic"
                )
    return ""


def _label(name: str) -> str:
    """Return what a tensor of the answer is called in a message."""
    kind, _, rest = name.partition(".")
    if kind.startswith("call"):
        which = "" if rest == "output0" else f" {int(rest.removeprefix('output')) + 1}"
        return f"output{which} of call {int(kind[4:]) + 1}"
    return f"gradient of {rest}" if kind == "grad" else f"buffer {rest}"


def _offence(
    expected: Expected,
    answer: Answer,
    name: str,
    error: Error,
    limits: Limits,
    accuracy: Accuracy,
) -> str:
    """Say which element is the first beyond its limit, by how much, and what the limit was."""
    want = expected.oracle[name]
    got = received(answer, want, name)
    label = _label(name)
    if not want.is_floating_point():
        at = int((got != want).reshape(-1).nonzero()[0])
        return (
            f"{label}{index_of(at, want)}: got {got.reshape(-1)[at].item()}, "
            f"expected {want.reshape(-1)[at].item()}"
        )
    at, share = first_beyond(got, want, expected.unjudged.get(name), error, limits, accuracy)
    g, w = float(got.reshape(-1)[at]), float(want.reshape(-1)[at])
    text = f"{label}{index_of(at, want)}: got {g:.9g}, expected {w:.9g}"
    if error.num_misplaced:
        return f"{text}; {error.num_misplaced} elements have NaN or Inf at other places"
    if limits.is_elementwise:
        return (
            f"{text}, error {abs(g - w):.3g}; {percent(share, 3)} of elements are beyond "
            f"{limits.why}, and the largest error {error.max_abs:.3g} is beyond 2 x PyTorch's own "
            f"{limits.max_abs / 2:.3g}"
        )
    if error.max_abs > limits.max_abs:
        return (
            f"{text}, error {abs(g - w):.3g} with limit {limits.max_abs:.3g} ({limits.why}); "
            f"largest {error.max_abs:.3g}, {percent(share, 3)} of elements are beyond"
        )
    return (
        f"{label}: rms error {error.rms_abs:.3g} with limit {limits.rms_abs:.3g}; the largest "
        f"error is {error.max_abs:.3g}, at {index_of(at, want)}: got {g:.9g}, expected {w:.9g}"
    )


# What moves, makes or counts, and computes nothing.
_NO_WORK = {
    "add_",
    *("alias", "as_strided", "clone", "contiguous", "copy_", "detach", "empty", "empty_like"),
    *("empty_strided", "expand", "lift_fresh", "new_empty", "permute", "reshape", "select"),
    *("slice", "split", "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view"),
    *("_to_copy", "_local_scalar_dense"),
}


def _note(expected: Expected, answer: Answer) -> str:
    """Name an answer that comes from the operations of the reference, and is worth nothing."""
    theirs, mine = (
        [name for name in report.operations if name.removeprefix("aten.") not in _NO_WORK]
        for report in (expected.report, answer.report)
    )
    starts = range(len(mine) - len(theirs) + 1) if theirs else ()
    if not any(mine[i : i + len(theirs)] == theirs for i in starts):
        return ""
    shown = ", ".join(name.removeprefix("aten.") for name in theirs[:5])
    return (
        f"right, but it runs the reference's own operations ({shown}): it holds the reference, "
        "or falls back to it"
    )


def merge(results: Sequence[ProbeResult], accuracy: Accuracy, is_thorough: bool) -> Check:
    """Return the verdict over all probes: the first reason, and which other probes failed."""
    rejected = [result for result in results if not result.is_accepted]
    if not results:
        return Check(False, accuracy.label, "nothing was asked", (), is_thorough)
    reason = ""
    if rejected:
        reason = rejected[0].reason
        others = [result.probe for result in rejected[1:]]
        if others:
            shown = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
            reason += f"; also rejected on {len(others)} of {len(results) - 1} others: {shown}"
    notes = tuple(dict.fromkeys(result.note for result in results if result.note))
    return Check(not rejected, accuracy.label, reason, tuple(results), is_thorough, notes)
