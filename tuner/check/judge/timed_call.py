"""What one timed call is expected to return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tuner.check.calls.crossing import Question, Report, Script
from tuner.check.calls.exercise import keys_of, kinds_of, outputs_of
from tuner.check.calls.parts import copied
from tuner.check.judge.compare import Error, are_close, errors_of
from tuner.check.judge.expected import Expected, rows_of
from tuner.check.judge.undecided import disputed_in
from tuner.check.judge.wide_convolutions import exact_convolutions
from tuner.check.probes.probe import Probe
from tuner.problem.accuracy import Accuracy, math_mode
from tuner.problem.draws import widened
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["expected_of_call"]

REPEATED = 1e-9  # of the largest element: what float64 sums may differ by in another order
ROUGH = 2.0**-8  # of the values: whether a call did its work shows in that


def expected_of_call(
    problem: Problem,
    model: torch.nn.Module,
    arguments: Sequence[Any],
    accuracy: Accuracy,
    *,
    buffers_before: Mapping[str, torch.Tensor] | None = None,
    is_rough: bool = False,
    on_wide: Callable[[], object] = lambda: None,
) -> Expected:
    """Compute what one call of `model`, which is left as it was, returns; buffers are not asked.

    How many calls came before it, and hence what they left in the buffers, is not known. A
    reference whose output depends on that cannot be compared; nothing is asked then.

    Args:
        problem: the reference.
        model: of it, with the weights of the call.
        arguments: of the call.
        accuracy: the baseline's arithmetic.
        buffers_before: of the model, before the first of all calls: what converges changes little
            from one call to the next, and much since then.
        is_rough: the baseline's own answer is expected, but for `ROUGH` of it, where there is no
            memory for float64. How exact answers are was asked at fewer rows.
        on_wide: is called when float64 begins, after the baseline's own calls.
    """
    import torch

    arguments = list(arguments)
    changed = _changed(model, buffers_before or {})
    with torch.no_grad(), math_mode(accuracy):
        own = copied(model)
        again = problem.call(own, arguments)
        result = problem.result_of(own, arguments)
        first = outputs_of(result)
        same = ROUGH if is_rough else 0.0
        is_stable = _are_close(first, again, same)
        del again  # the outputs of a large problem take gigabytes
        del own
        if changed and is_stable:
            is_stable = _are_close(
                first, problem.call(_as_before(model, changed), arguments), same
            )
        exact: Sequence[torch.Tensor] = first
        if not is_rough:
            on_wide()
            wide, given = copied(model, is_wide=True), [widened(value) for value in arguments]
            with exact_convolutions():
                exact = problem.call(wide, given)
                if not is_stable:  # by rounding, which float64 nearly has not, or by a call before
                    is_stable = _are_close(exact, problem.call(wide, given), REPEATED)
                    if changed and is_stable:
                        other = problem.call(_as_before(wide, changed), given)
                        is_stable = _are_close(exact, other, REPEATED)
    got = {f"call0.output{j}": y.detach() for j, y in enumerate(first)}
    oracle = {name: y.detach() for name, y in zip(got, exact, strict=True)}
    if not is_stable:
        got, oracle = {}, {}
    pairs = {} if is_rough else got
    unjudged = disputed_in(pairs, oracle)
    errors = errors_of(got, oracle, unjudged, accuracy)
    if is_rough:  # it was compared with itself
        errors = {name: _rough(error) for name, error in errors.items()}
    return Expected(
        Probe("after timing", tells="is it right only while it is being checked?"),
        Question(Script(num_inputs=len(arguments)), {}),
        rows_of(arguments),
        oracle,
        errors,
        Report(keys=tuple(keys_of(model)), kinds=(kinds_of(result),)),
        unjudged,
        dtypes={n: t.dtype for n, t in got.items()},
        is_rough=is_rough,
    )


def _changed(
    model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return those of earlier buffers that are others now, of the same shape."""
    import torch

    now = {n: b for n, b in model.named_buffers() if n in buffers and b.shape == buffers[n].shape}
    return {n: buffers[n] for n, b in now.items() if not torch.equal(buffers[n], b)}


def _as_before(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> Any:
    """Return what calls a model with copies of other buffers, in the model's own precision."""
    import torch

    lent = {
        name: buffers.get(name, buffer).to(buffer.dtype, copy=True)
        for name, buffer in model.named_buffers()
    }
    return lambda *inputs: torch.func.functional_call(model, lent, inputs)


def _are_close(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], share: float) -> bool:
    return all(are_close(a, b, share) for a, b in zip(left, right, strict=True))


def _rough(error: Error) -> Error:
    return replace(error, max_abs=ROUGH * error.largest, rms_abs=ROUGH * error.rms_value)
