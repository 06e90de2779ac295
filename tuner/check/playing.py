"""A script played with the reference: what the judge itself sees of it, in float32 or float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tuner.check.arguments import draw_output_gradients
from tuner.check.crossing import Report, Script
from tuner.check.exercise import (
    STAYS,
    arguments_of,
    checksums_of,
    keys_of,
    kinds_of,
    mode_of,
    outputs_of,
    recorded,
    snapshot,
    stays,
)
from tuner.check.gradients import (
    accumulated,
    differentiated,
    edit_before_backward,
    leaves_of,
    with_tangents,
)
from tuner.check.history import History
from tuner.check.layouts import laid_out, laid_out_where, one_object
from tuner.check.mapping import mapped
from tuner.check.parts import copied
from tuner.check.probe import Probe
from tuner.check.sharing import aliases_of
from tuner.errors import ProblemError
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["played"]


def played(
    problem: Problem,
    model: torch.nn.Module,
    script: Script,
    tensors: dict[str, torch.Tensor],
    probe: Probe,
    *,
    is_exact: bool = False,
    is_laid: bool = False,
    own: frozenset[int] = frozenset(),
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> tuple[Report, dict[str, torch.Tensor]]:
    """Play the script with the reference; draws `grad.*` into `tensors` when they are missing.

    With `is_laid` its inputs have the script's layout, for which PyTorch may compute otherwise. A
    single call may use up the tensors of which `own` has the `id`. Each call of the module is made
    inside `around()`, and no backward is.
    """
    import torch

    answers: dict[str, torch.Tensor] = {}
    kinds: list[tuple[str, ...]] = []
    keys = tuple(keys_of(model))
    values: list[Any] = []
    outputs: tuple[torch.Tensor, ...] = ()
    operations: list[str] = []
    aliases: list[str] = []
    earlier: list[tuple[Any, ...]] = []
    leaves: list[dict[str, torch.Tensor]] = []
    arguments_of_calls: list[list[Any]] = []
    said: list[str] = []  # of gradients
    history = History(model, script, tensors, is_exact)
    second = copied(model) if script.at_once == "two modules" else None

    def refused(error: Exception, stage: str) -> tuple[Report, dict[str, torch.Tensor]]:
        return Report(error=str(error), stage=stage, keys=keys), {}

    def differentiate(k: int, call: int) -> None:
        edit_before_backward(script.edits, arguments_of_calls[call], earlier[call], history.model)
        if any(y.requires_grad for y in earlier[call]):
            with recorded(operations, script.traces):
                grads = differentiated(script, leaves[call], earlier[call], tensors, k, said)
            answers.update(grads)

    def answered(called: Any, values: list[Any], call: int) -> Any:
        if script.mapped:
            with problem.explained("torch.func.vmap of Model.forward"):
                return mapped(history.model, values, script.mapped, tensors)
        if not script.is_forward:
            return problem.result_of(called, values)
        of_weights = script.gradients == "forward weights"
        called = history.model if of_weights else called
        result, tangents = with_tangents(
            problem.result_of, called, values, tensors, call, of_weights
        )
        answers.update(tangents)
        return result

    try:
        with torch.set_grad_enabled(script.has_backward):
            history.serve_mild(problem.result_of)
    except ProblemError as error:
        return refused(error, "call 1")
    for call in range(script.calls):
        if call and second is not None:
            history.model = second
        called = history.prepare(call)
        values = arguments_of(script, tensors, call)
        if script.calls > 1 or not own.issuperset(map(id, values)):
            values = [laid_out(value, "contiguous") for value in values]
        if is_laid:
            values = laid_out_where(values, script)
        if script.gradients == "all":
            values = [_as_leaf(x) if script.wants(call, i) else x for i, x in enumerate(values)]
        if script.layout == "same":
            values = one_object(values)
        with torch.set_grad_enabled(script.has_backward):
            try:
                for _ in range(script.more_calls if call == 1 else 0):
                    problem.result_of(called, values)
                with recorded(operations, script.traces), mode_of(script, is_exact), around():
                    result = answered(called, values, call)
            except ProblemError as error:
                return refused(error, f"call {call + 1}")
            kinds.append(kinds_of(result))
        outputs = outputs_of(result)
        arguments_of_calls.append(values)
        leaves.append(leaves_of(history.model, values) if script.has_backward else {})
        aliases += aliases_of(history.model, values, earlier, outputs)
        earlier.append(outputs)
        answers.update((f"call{call}.output{j}", snapshot(y)) for j, y in enumerate(outputs))
        if script.has_backward:
            draw_output_gradients(outputs, tensors, probe)
        if script.backward_at_once:
            try:
                differentiate(call, call)
            except RuntimeError as error:
                return refused(error, "gradients")
    answers.update((f"buffer.{n}", b.detach().clone()) for n, b in history.model.named_buffers())
    checksums = {} if is_exact else checksums_of(history.model, values)  # nobody's in float64
    try:
        if script.accumulates:
            grads = accumulated(leaves, earlier, tensors, script.first_place, said)
            answers.update((f"grad0.{name}", grad) for name, grad in grads.items())
        else:
            for k, call in enumerate(script.backward):
                differentiate(k, call)
    except RuntimeError as error:
        return refused(error, "gradients")
    if script.drops and not is_exact and stays(history.model, values):
        said.append(STAYS)
    report = Report(
        keys=tuple(keys_of(history.model)),
        kinds=tuple(kinds),
        aliases=tuple(aliases),
        checksums=checksums,
        operations=tuple(operations),
        refusals=tuple(history.refusals),
        loads=tuple(history.loads),
        changes=(*history.changes, *said),
    )
    return report, answers


def _as_leaf(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value
