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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.check.calls.crossing import Answer
from tuner.check.calls.exercise import DRAWN, checksum_of
from tuner.check.calls.history import BEFORE_CALL
from tuner.check.judge.compare import (
    ULP,
    Comparison,
    Error,
    Limits,
    compare,
    compare_all,
    first_beyond,
)
from tuner.check.judge.diagnosis import diagnosis, offence, received
from tuner.check.judge.expected import Expected
from tuner.check.judge.form import judge_behaviour, judge_form, label_of, refused_load
from tuner.check.judge.kinks import errors_at_kinks, note_at_kinks
from tuner.check.judge.luck import is_gradient, limits_of_all
from tuner.check.judge.near_ties import errors_at_ties
from tuner.check.judge.noise import UNUSUAL, is_noisy
from tuner.check.judge.own_work import note_of, notes_of
from tuner.check.probes.probe import Probe
from tuner.check.probes.tells import ROUNDING, TELLS
from tuner.problem.accuracy import Accuracy
from tuner.trial import Check, ProbeResult
from tuner.wording import one_line

__all__ = ["judge", "merge"]

ROUNDED = 2.0**-6  # of a tensor's largest value: operands in bfloat16 are within 2^-8
BEYOND_ULPS = 64  # of the largest value: an answer of which PyTorch's own error is not known
ULP_OF = {"": 0.0, "float64": ULP, "float32": ULP, "tf32": 2.0**-11,
          "pytorch": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # fmt: skip
OF_ROWS = [TELLS[name] for name in ("rows", "tiles", "batch")]  # of a forward's rows
MAX_RAISED_CHARS = 600  # of what was raised, in a verdict
CLOSE = 4.0  # times a limit that may be chance; TF32 is some 100 times, a wrong result far more
# Of the elements of an output, so many may lie at a kink by chance: where a sum of terms of 1e9 is
# clamped to 1, float32 has the wrong end for one in some millions.
RARE = 1e-6


def judge(expected: Expected, answer: Answer, accuracy: Accuracy) -> ProbeResult:
    """Judge one answer: how it behaved, what it returned, how near to float64 it is."""
    probe = expected.probe
    if answer.report.error:
        return _result(expected, *_judge_refusal(expected, answer), has_raised=True)
    if expected.error:
        return _result(expected, *_judge_beyond(expected, answer, accuracy))
    reason = judge_form(expected, answer)
    if reason:
        said = _said(probe, reason, has_hint=_asks_shape(probe))
        return ProbeResult(probe.name, math.inf, math.inf, *_baseline_of(expected), False, said)
    comparisons = {
        # A poisoned buffer may be NaN or infinite: that depends on how sums are merged.
        name: Comparison(
            received(answer, want, name), want, expected.unjudged.get(name),
            tells_nan_from_inf=not name.startswith("buffer."),
            beside=expected.baseline.get(name),
        )
        for name, want in expected.oracle.items()
        if name in answer.tensors
    }  # fmt: skip
    errors = compare_all(comparisons, accuracy)
    behaviour = judge_behaviour(expected, answer) or _unasked_gradient(expected, answer)
    limits = limits_of_all(expected, errors, accuracy)
    compared = _Compared(expected, answer, errors, limits, accuracy)
    values = compared.judge_values()
    of_gradient = "" if values else compared.judge_gradients()
    bits = _judge_bits(expected, answer)
    at_kinks: dict[str, Error] = {}
    is_rare = bool(values) and compared.is_rare()
    values = values or of_gradient
    may_be_right = of_gradient or is_rare or (bool(values) and compared.may_be_ties())
    if may_be_right and not behaviour and not bits:
        at_kinks, unknown = compared.at_kinks()
        if unknown:  # no wrong answer, but not one either
            values = f"{values}; whether kinks do that was not found out: {unknown}"
    if at_kinks:
        errors, values, of_gradient = errors | at_kinks, "", ""
    reason = behaviour or values or bits
    is_exact = bool(behaviour or bits or limits.keys() - errors.keys())
    excess = max((limits[name].excess(error) for name, error in errors.items()), default=0.0)
    # Rounding may choose another one of two maxima, or the other side of a kink.
    is_misplaced = any(error.num_misplaced for error in errors.values())
    is_chance = is_rare or (bool(of_gradient) and is_noisy(probe) and not is_misplaced)
    outputs = [error for name, error in errors.items() if name.startswith("call")]
    worst = max(outputs, key=lambda error: error.max_abs, default=Error())
    rms_rel = max((error.rms_rel for error in outputs), default=0.0)
    if values and probe.may_differ and not behaviour:
        return _result(expected, "", f"{TELLS['passed over']} ({one_line(values, 200)})")
    is_rounding = bool(values) and not behaviour and not is_exact and _is_rounding(errors)
    return ProbeResult(
        probe.name, rms_rel, worst.max_abs, *_baseline_of(expected), not reason,
        _said(
            probe, reason, is_rounding, has_hint=not behaviour or probe.asks_behaviour,
            is_gradient=bool(of_gradient),
        ),
        note_of(expected, answer),
        is_close=bool(values) and not is_exact and (excess <= CLOSE or is_chance),
        difference="" if reason else _undone(expected, answer),
        is_at_kinks=bool(at_kinks),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Compared:
    """The tensors of an answer beside those expected: their errors, and the limits of all."""

    expected: Expected
    answer: Answer
    errors: Mapping[str, Error]
    limits: Mapping[str, Limits]
    accuracy: Accuracy

    def judge_values(self) -> str:
        """Judge outputs and buffers by the class of accuracy."""
        for name, error in self.errors.items():
            if not is_gradient(name) and (where := self._offence(name)):
                said = diagnosis(self.expected, self.answer, name, error)
                return where + (f"; {said}" if said else "")
        return ""

    def judge_gradients(self) -> str:
        """Judge gradients, all of which must be there."""
        names = [name for name in self.expected.oracle if is_gradient(name)]
        if self._is_detached():
            return "the output is detached: it has no gradient, and nothing was raised"
        for name in names:
            if name not in self.errors:
                if self._is_of_nothing(name):
                    continue
                return f"{label_of(name)} is missing: the output does not depend on it"
            if where := self._offence(name):
                return where
        return ""

    def _is_of_nothing(self, name: str) -> bool:
        """Whether a gradient is of no rows, and 0: PyTorch's own operations may have none."""
        return self.expected.probe.batch == 0 and not self.expected.oracle[name].any()

    def _is_detached(self) -> bool:
        """Whether an output has no gradient where one is expected."""
        detached = tuple(f"grad{k}." for k in self.answer.report.detached)
        return any(name.startswith(detached) for name in self.expected.oracle)

    def _offence(self, name: str) -> str:
        """Say where a tensor is beyond its limits; nothing where it is within them."""
        error, limits = self.errors[name], self.limits[name]
        if limits.accepts(error):
            return ""
        return offence(self.expected, self.answer, name, error, limits, self.accuracy)

    def is_rare(self) -> bool:
        """Whether of outputs and buffers so few elements are beyond their limits as by chance."""
        probe = self.expected.probe
        if not is_noisy(probe) and probe.distribution not in UNUSUAL:
            return False
        for name, error in self.errors.items():
            limits = self.limits[name]
            if not is_gradient(name) and not limits.accepts(error):
                want, unjudged = self.expected.oracle[name], self.expected.unjudged.get(name)
                both = received(self.answer, want, name), want
                share = first_beyond(*both, unjudged, error, limits, self.accuracy)[1]
                if error.num_misplaced or share > RARE:
                    return False
        return True

    def may_be_ties(self) -> bool:
        """Whether outputs are wrong only in what rounding may choose.

        In whole numbers, or in one number that may count them, as an accuracy does.
        """
        is_noisy_probe = is_noisy(self.expected.probe)
        wrong = [n for n in self.errors if not is_gradient(n) and self._offence(n)]
        wants = [self.expected.oracle[name] for name in wrong]
        return all(
            not want.is_floating_point() or (want.numel() == 1 and is_noisy_probe)
            for want in wants
        )

    def at_kinks(self) -> tuple[dict[str, Error], str]:
        """Return new errors of what is beyond its limits, where kinks make it right.

        With them, what was said where memory ran out.
        """
        expected, errors, limits = self.expected, self.errors, self.limits
        is_whole = not limits.keys() - errors.keys() and not self._is_detached()
        beyond = [name for name, error in errors.items() if not limits[name].accepts(error)]
        wholes = {name for name in beyond if not expected.oracle[name].is_floating_point()}
        is_misplaced = any(errors[name].num_misplaced for name in beyond if name not in wholes)
        if not is_whole or is_misplaced:
            return {}, ""
        got = {name: received(self.answer, expected.oracle[name], name) for name in beyond}
        at_ties: dict[str, Error] = {}
        if wholes:
            ties = {name: got.pop(name) for name in wholes}
            at_ties = errors_at_ties(expected.replay, ties, expected.oracle, expected.unjudged)
            if not at_ties or not got:
                return at_ties, ""
        found, said = errors_at_kinks(
            expected.replay, got, expected.oracle, expected.unjudged, limits, self.accuracy
        )
        return (found | at_ties if found else {}), said


def _undone(expected: Expected, answer: Answer) -> str:
    """Name what the candidate refused between its calls and the reference did not."""
    if expected.drawn and answer.report.checksums.get(DRAWN) != expected.drawn:
        return (
            f"{expected.probe.name}: its constructor draws other random numbers than the "
            "reference's: with the same seed, what is made after it has other weights"
        )
    load = refused_load(expected, answer)
    if load:
        return f"{expected.probe.name}: {load}"
    if not answer.report.refusals or expected.report.refusals:
        return ""
    return f"{expected.probe.name}: {_shortened(answer.report.refusals[0])}"


def _said(
    probe: Probe,
    reason: str,
    is_rounding: bool = False,
    *,
    has_hint: bool = True,
    is_gradient: bool = False,
) -> str:
    """Return a reason with the probe's name, and what such a failure usually means.

    A layout that is not followed gives numbers of another place, not errors of rounding size.
    """
    if not reason:
        return ""
    tells = ROUNDING if is_rounding and probe.layout != "contiguous" else probe.tells
    if is_gradient and tells in OF_ROWS:
        tells = TELLS["gradients of rows"]
    return f"{probe.name}: {reason}" + (f" ({tells})" if tells and has_hint else "")


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


def _result(
    expected: Expected, reason: str, difference: str = "", has_raised: bool = False
) -> ProbeResult:
    """Return the verdict where no numbers are compared.

    What was raised says itself what is wrong, but where a shape is what the probe asks about.
    """
    probe = expected.probe
    is_backward = probe.gradients and "raised in gradients" in reason
    has_hint = (_asks_shape(probe) or not has_raised) and not is_backward
    said = _said(probe, reason, has_hint=has_hint)
    difference = difference and f"{probe.name}: {difference}"
    return ProbeResult(probe.name, 0.0, 0.0, 0.0, 0.0, not reason, said, difference=difference)


def _asks_shape(probe: Probe) -> bool:
    """Whether a shape is what a probe asks about: its hint fits what is no number as well."""
    is_shape = probe.batch is not None and not probe.is_reduced
    return is_shape or bool(probe.mapped) or probe.layout not in ("contiguous", "mixed")


def _judge_refusal(expected: Expected, answer: Answer) -> tuple[str, str]:
    """Return why an answer that is an exception is rejected, and what it is a difference of."""
    report, probe = answer.report, expected.probe
    error = _shortened(report.error)
    is_asked = report.stage.startswith(("call", "conversion"))
    if is_asked and (expected.error or probe.may_refuse or expected.may_refuse):
        return "", ""
    if expected.may_refuse_backward and report.stage == "gradients":
        return "", ""
    is_settings = report.stage == "a change of settings" or (
        report.stage in ("build", "load") and probe.has_options
    )
    # One that keeps what was edited refuses the backward, as PyTorch's own modules do.
    is_edited = probe.edits and report.stage == "gradients"
    is_other = probe.is_extra and (is_asked or is_settings)
    if report.stage.startswith(BEFORE_CALL) or is_edited or is_other:
        return "", f"it refuses what the reference's class does not: {error}"
    if report.stage == "load":
        return f"it does not load the reference's state_dict: {error}", ""
    if report.stage == "build":
        return f"ModelNew(*get_init_inputs()) raised {error}", ""
    return f"it raised in {report.stage}: {error}", ""


def _judge_beyond(expected: Expected, answer: Answer, accuracy: Accuracy) -> tuple[str, str]:
    """Judge an answer where the reference raises, as `_judge_refusal` does."""
    probe = expected.probe
    refused = f"it returned an answer where the reference raises: {expected.error}"
    if not expected.oracle:
        # The reference's answer at such a batch is unknown, so any answer may be right.
        # An answer of no rows has nothing in it that may be wrong; and what PyTorch has not
        # written yet for a type on this device is no refusal.
        if probe.batch == 0 or "not implemented for '" in expected.error:
            return "", refused
        is_batch = not probe.may_be_refused and (probe.batch or 0) >= 2
        return ("", "") if is_batch and not probe.dtype else (refused, "")
    ulp = ULP_OF.get(probe.dtype, 0.0)
    ulp = max(ulp, accuracy.rtol if accuracy.kind == "tolerance" else ULP_OF[accuracy.kind])
    for name, want in expected.oracle.items():
        if not name.startswith("call"):
            continue
        got = answer.tensors.get(name)
        if got is None or got.shape != want.shape:
            return f"{refused}; and {label_of(name)} is not the right one", ""
        error = compare(received(answer, want, name).to(want.dtype), want)
        limit = BEYOND_ULPS * ulp * error.largest
        if error.num_misplaced or error.max_abs > limit:
            return f"{refused}; and the answer is wrong by {error.max_abs:.3g}", ""
    return "", f"{refused}; the answer is right"


def _shortened(text: str) -> str:
    """Return what was raised in one line: PyTorch names missing keys in lines of their own."""
    text = one_line(text, len(text) + 4)
    if len(text) <= MAX_RAISED_CHARS:
        return text
    return f"{text[:MAX_RAISED_CHARS]} ... ({len(text) - MAX_RAISED_CHARS} characters more)"


def _unasked_gradient(expected: Expected, answer: Answer) -> str:
    """Name a gradient that the reference does not have: None and zeros are not the same."""
    more = [name for name in answer.tensors if is_gradient(name) and name not in expected.oracle]
    if not more or not any(map(is_gradient, expected.oracle)):
        return ""
    return f"{label_of(more[0])} is there, where the reference has none: weights would decay"


def _judge_bits(expected: Expected, answer: Answer) -> str:
    if not (expected.probe.wants_same_bits and expected.repeats):
        return ""
    for name, tensor in answer.tensors.items():
        first = name.replace("call1.", "call0.", 1)
        if first == name or checksum_of(answer.tensors[first]) == checksum_of(tensor):
            continue
        return (
            "the same input twice gave different bits, but the candidate is declared deterministic"
        )
    return ""


def merge(
    results: Sequence[ProbeResult],
    accuracy: Accuracy,
    is_thorough: bool,
    fewest: Mapping[str, int] | None = None,
) -> Check:
    """Return the verdict over all probes: the first reason, and which other probes failed.

    `fewest` are rows of traced probes, as `own_work.notes_of` takes them.
    """
    rejected = [result for result in results if not result.is_accepted]
    if not results:
        return Check(False, accuracy.label, "nothing was asked", (), is_thorough)
    reason = rejected[0].reason if rejected else ""
    if others := [result.probe for result in rejected[1:]]:
        shown = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
        reason += f"; also rejected on {len(others)} of {len(results) - 1} others: {shown}"
    differences = tuple(result.difference for result in results if result.difference)
    notes = () if rejected else (*notes_of(results, fewest), *note_at_kinks(results))
    return Check(
        not rejected, accuracy.label, reason, tuple(results), is_thorough, notes, differences
    )
