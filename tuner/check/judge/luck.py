"""What each tensor of an answer is allowed, also where PyTorch was lucky with a few numbers.

PyTorch's own error on one draw says how large such errors are where a tensor has many elements. Of
one number, as a loss, it may be nearly exact by chance: of two equally good sums of terms that
cancel, one is more than eight times as far off as the other in 8 % of all draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tuner.check.judge.compare import ZERO, Error, Limits, errors_of, gradient_limits, limits_of
from tuner.check.judge.expected import Expected
from tuner.errors import says_no_memory
from tuner.problem.accuracy import Accuracy

if TYPE_CHECKING:
    import torch

__all__ = ["FEW", "MOST_LUCK", "is_gradient", "limits_of_all"]

FEW = 8  # elements
EQUAL = 1e-9  # of the largest: what float64 leaves between sums of the same terms
NUM_DRAWS = 5  # of roundings: that none of them moves a number by a tenth of what is usual
MOST_LUCK = 64.0  # times a limit; a result in TF32 is some 8,192 / 16 times off


def limits_of_all(
    expected: Expected, errors: Mapping[str, Error], accuracy: Accuracy
) -> dict[str, Limits]:
    """Return the limits of every tensor that is compared, by name.

    Where a float32 tensor of few numbers is beyond its own, rounding moves PyTorch's results
    instead, and the largest error that this makes counts as PyTorch's. The limits of shorter types
    are wide enough, and the last bit of their own rounding is most of them.

    Args:
        expected: what the answer is compared with.
        errors: of the answer.
        accuracy: the class of the check.
    """
    import torch

    limits = _limits(expected, accuracy)
    beyond = [
        name
        for name, error in errors.items()
        if expected.dtypes[name] == torch.float32
        and 0.0 < limits[name].excess(error) <= MOST_LUCK
        and _is_of_few(expected.oracle[name])
    ]
    if not beyond or expected.replay is None:
        return limits
    baseline = dict(expected.baseline)
    try:
        for draw in range(1, NUM_DRAWS + 1):
            moved = expected.replay.rounded(draw)
            held = {name: moved[name] for name in beyond if name in moved}
            for name, error in errors_of(
                held, expected.oracle, expected.unjudged, accuracy
            ).items():
                own = baseline[name]
                most, rms = max(own.max_abs, error.max_abs), max(own.rms_abs, error.rms_abs)
                baseline[name] = replace(own, max_abs=most, rms_abs=rms)
    except (RuntimeError, MemoryError) as error:  # of a very large problem, or beside others
        if not says_no_memory(f"{type(error).__name__}: {error}"):
            raise
        return limits
    return _limits(replace(expected, baseline=baseline), accuracy)


def _is_of_few(tensor: torch.Tensor) -> bool:
    """Whether it has few numbers, or one alone in all places, as sums of equal columns have."""
    if tensor.numel() <= FEW:
        return True
    low, high = map(float, tensor.aminmax())
    return high - low <= EQUAL * max(abs(low), abs(high))


def _limits(expected: Expected, accuracy: Accuracy) -> dict[str, Limits]:
    largest = max((e.largest for n, e in expected.baseline.items() if is_gradient(n)), default=0.0)
    # Where those of a row or a column are equal all may cancel, as a softmax's do. Elsewhere what
    # is small has a size of its own.
    if expected.probe.gradient_layout in ("of_row_sums", "of_sum"):
        given = [t for n, t in expected.question.tensors.items() if n.startswith("grad.")]
        incoming = max((float(t.abs().max()) for t in given if t.numel()), default=0.0)
        largest = incoming if largest < ZERO * incoming else largest
    types = {name: str(dtype).removeprefix("torch.") for name, dtype in expected.dtypes.items()}
    return {
        name: gradient_limits(baseline, largest, accuracy, dtype=types[name])
        if is_gradient(name)
        else limits_of(
            name,
            baseline,
            expected.num_rows,
            accuracy,
            dtype=types[name],
            converted=expected.probe.dtype_at(
                int(name[4:].partition(".")[0])
                if name.startswith("call")
                else expected.probe.calls
            ),
        )
        for name, baseline in expected.baseline.items()
    }


def is_gradient(name: str) -> bool:
    """Whether a tensor of an answer is a gradient, by its name."""
    return name.startswith(("grad", "tangent"))
