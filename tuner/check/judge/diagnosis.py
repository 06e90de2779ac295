"""Name the mistake behind wrong values, where they show it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tuner.check.calls.crossing import Answer
from tuner.check.judge.compare import FLOOR_ULPS, ULP, Error, Limits, first_beyond, index_of
from tuner.check.judge.expected import Expected
from tuner.check.judge.form import label_of
from tuner.problem.accuracy import Accuracy
from tuner.wording import percent

if TYPE_CHECKING:
    import torch

__all__ = ["diagnosis", "offence", "received"]

# Values of which neither squares nor differences leave what float32 holds.
USUAL = ("as_given", "normal", "dyadic", "few_values", "special", "all_special", "like_rows")


def received(answer: Answer, want: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor of the answer on the device of what it is compared with."""
    return answer.tensors[name].to(want.device)


def diagnosis(expected: Expected, answer: Answer, name: str, error: Error) -> str:
    """Return what is likely wrong with a tensor of an answer; empty where nothing shows it."""
    want = expected.oracle[name]
    got = received(answer, want, name)
    if name.startswith("buffer."):
        return _buffer_diagnosis(expected, name, got)
    return _output_diagnosis(expected, answer, name, got, error)


def offence(
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
    label = label_of(name)
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
            f"largest error {error.max_abs:.3g}, {percent(share, 3)} of elements are beyond"
        )
    return (
        f"{label}: rms error {error.rms_abs:.3g} with limit {limits.rms_abs:.3g}; the largest "
        f"error is {error.max_abs:.3g}, at {index_of(at, want)}: got {g:.9g}, expected {w:.9g}"
    )


def _output_diagnosis(
    expected: Expected, answer: Answer, name: str, got: torch.Tensor, error: Error
) -> str:
    import torch

    want = expected.oracle[name]
    if answer.report.num_threads_left:
        return f"{answer.report.num_threads_left} threads outlived the call: a late write?"
    call, _, which = name.partition(".")
    number = int(call[4:])
    for earlier in range(number):
        if torch.equal(got, received(answer, want, f"call{earlier}.{which}")):
            changed = "weights" if expected.probe.gives_weights else "input"
            return (
                f"the output of call {number + 1} equals that of call {earlier + 1} although the "
                f"{changed} changed: memoised, or replayed"
            )
    is_poisoned = expected.probe.distribution in ("nan_row", "inf_elements")
    if not is_poisoned and bool((torch.isnan(got) & torch.isfinite(want)).any()):
        memory = "part of the output was never written, or memory was read that was never written"
        cause = (
            memory if expected.probe.distribution in USUAL else "an overflow, or a negative root"
        )
        return f"NaN where a number is expected: {cause}"
    if not want.is_floating_point():
        is_few = int((got != want).sum()) * 100 < want.numel()
        return (
            "whole numbers and truths have to be PyTorch's own: did values that are nearly the "
            "same decide?"
            if is_few
            else ""
        )
    if error.num_misplaced:
        return "NaN and Inf must come through as they do in the reference" if is_poisoned else ""
    if got.numel() > 1 and bool((got == got.reshape(-1)[0]).all()):
        return "every element is the same: a constant output"
    return _place_diagnosis(expected, name, got) or _precision_diagnosis(expected, name, error)


def _place_diagnosis(expected: Expected, name: str, got: torch.Tensor) -> str:
    """Tell whether only some rows (dim 0) or columns (last dim) are wrong, as of a tail."""
    want = expected.oracle[name]
    if want.ndim < 2 or not want.numel():
        return ""
    floor = FLOOR_ULPS * ULP * expected.baseline[name].largest
    is_bad = (got - want).abs() > max(4.0 * expected.baseline[name].max_abs, floor)
    flat = is_bad.reshape(-1, want.shape[-1])
    for what, lines in (
        ("row", is_bad.flatten(1).any(1)),
        ("column", flat.any(0)),
    ):
        at = lines.nonzero().reshape(-1).tolist() if int(lines.sum()) * 2 < len(lines) else []
        if at and at[-1] - at[0] == len(at) - 1:
            which = f"{what} {at[0]} is" if len(at) == 1 else f"{what}s {at[0]} to {at[-1]} are"
            return f"only {which} wrong: a part that was never written?"
    return ""


def _precision_diagnosis(expected: Expected, name: str, error: Error) -> str:
    """Tell operands of fewer bits from plainly wrong values, on well-behaved inputs."""
    if expected.probe.distribution not in ("as_given", "normal", "heavy_tailed"):
        return ""
    if error.rms_rel < 4.0 * expected.baseline[name].rms_rel or not error.rms_rel:
        return ""
    if error.max_abs > 8.0 * error.rms_abs:  # rounding is spread evenly; a mistake is not
        return ""
    bits = -math.log2(error.rms_rel)
    for low, high, what in ((7.0, 10.5, "bfloat16"), (10.5, 14.0, "float16 or TF32")):
        if low <= bits < high:
            return (
                f"an rms error of 2^-{bits:.1f} is that of {what} operands: a lower precision "
                "than declared"
            )
    return ""


def _buffer_diagnosis(expected: Expected, name: str, got: torch.Tensor) -> str:
    import torch

    want = expected.oracle[name]
    start = expected.start[name.removeprefix("buffer.")]
    if not want.is_floating_point():
        return "the calls were not counted" if torch.equal(got, start) else ""
    if torch.equal(got.double(), start.to(torch.float32).double()):
        return "the running statistics were not updated"
    if expected.probe.mode == "eval":
        return "eval mode must not change the stored statistics"
    momentum = next(
        (m for prefix, m in expected.momenta.items() if name.startswith(f"buffer.{prefix}")), None
    )
    rows = expected.num_rows
    if momentum is not None and expected.probe.calls == 1 and rows > 1:
        # unbiased = biased * B / (B - 1), so a biased update lacks momentum * unbiased / B.
        unbiased = (want - (1.0 - momentum) * start) / momentum
        biased = want - momentum * unbiased / rows
        if bool(((got - biased).abs() <= 0.05 * (want - biased).abs() + 1e-6 * want.abs()).all()):
            return "it looks biased: the variance is off by the factor B/(B-1)"
    return ""
