"""A script played with the reference: what the judge itself sees of it, in float32 or float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.check.calls.crossing import Report, Script
from tuner.check.calls.exercise import (
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
from tuner.check.calls.gradients import (
    accumulated,
    differentiated,
    edit_before_backward,
    leaves_of,
    with_tangents,
)
from tuner.check.calls.history import History
from tuner.check.calls.layouts import laid_out, laid_out_where, one_object
from tuner.check.calls.mapping import mapped
from tuner.check.calls.parts import copied
from tuner.check.calls.sharing import aliases_of
from tuner.check.probes.probe import Probe
from tuner.check.questions.arguments import draw_output_gradients
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
    keys = tuple(keys_of(model))
    play = _Play(problem, model, script, tensors, probe, is_exact, is_laid, own, around)
    try:
        play.call_all()
        play.finish()
    except _Refused as refused:
        return Report(error=str(refused), stage=refused.stage, keys=keys), {}
    return play.report(), play.answers


class _Refused(Exception):
    """The reference raised at a stage of the script."""

    def __init__(self, error: Exception, stage: str) -> None:
        super().__init__(str(error))
        self.stage = stage


@dataclass(slots=True)
class _Play:
    """A script in the course of being played; what is given is as for `played`."""

    problem: Problem
    model: torch.nn.Module  # as it is given; `history` has the one that is called
    script: Script
    tensors: dict[str, torch.Tensor]
    probe: Probe
    is_exact: bool
    is_laid: bool
    own: frozenset[int]
    around: Callable[[], contextlib.AbstractContextManager[Any]]
    history: History = field(init=False)
    second: torch.nn.Module | None = field(init=False)  # for the calls behind the first
    answers: dict[str, torch.Tensor] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    kinds: list[tuple[str, ...]] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # of gradients
    # Of each call.
    arguments: list[list[Any]] = field(default_factory=list)
    outputs: list[tuple[Any, ...]] = field(default_factory=list)
    leaves: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = History(self.model, self.script, self.tensors, self.is_exact)
        self.second = copied(self.model) if self.script.at_once == "two modules" else None

    def call_all(self) -> None:
        """Make the calls, and those backwards that follow each at once."""
        import torch

        try:
            with torch.set_grad_enabled(self.script.has_backward):
                self.history.serve_mild(self.problem.result_of)
        except ProblemError as error:
            raise _Refused(error, "call 1") from error
        for call in range(self.script.calls):
            self._call(call)
            if self.script.backward_at_once:
                try:
                    self._differentiate(call, call)
                except RuntimeError as error:
                    raise _Refused(error, "gradients") from error

    def _call(self, call: int) -> None:
        """Make one call, and note what it gives."""
        import torch

        script, history = self.script, self.history
        if call and self.second is not None:
            history.model = self.second
        called = history.prepare(call)
        values = self._arguments(call)
        with torch.set_grad_enabled(script.has_backward):
            try:
                for _ in range(script.more_calls if call == 1 else 0):
                    self.problem.result_of(called, values)
                with (
                    recorded(self.operations, script.traces),
                    mode_of(script, self.is_exact),
                    self.around(),
                ):
                    result = self._result(called, values, call)
            except ProblemError as error:
                raise _Refused(error, f"call {call + 1}") from error
            self.kinds.append(kinds_of(result))
        outputs = outputs_of(result)
        self.arguments.append(values)
        self.leaves.append(leaves_of(history.model, values) if script.has_backward else {})
        self.aliases += aliases_of(history.model, values, self.outputs, outputs)
        self.outputs.append(outputs)
        self.answers.update((f"call{call}.output{j}", snapshot(y)) for j, y in enumerate(outputs))
        if script.has_backward:
            draw_output_gradients(outputs, self.tensors, self.probe)

    def _arguments(self, call: int) -> list[Any]:
        """Return what a call is given."""
        script = self.script
        values = arguments_of(script, self.tensors, call)
        if script.calls > 1 or not self.own.issuperset(map(id, values)):
            values = [laid_out(value, "contiguous") for value in values]
        if self.is_laid:
            values = laid_out_where(values, script)
        if script.gradients == "all":
            values = [_as_leaf(x) if script.wants(call, i) else x for i, x in enumerate(values)]
        return one_object(values) if script.layout == "same" else values

    def _result(self, called: Any, values: list[Any], call: int) -> Any:
        """Return what a call returns: mapped, or with its tangents, where the script says so."""
        script, problem, model = self.script, self.problem, self.history.model
        if script.mapped:
            with problem.explained("torch.func.vmap of Model.forward"):
                return mapped(model, values, script.mapped, self.tensors)
        if not script.is_forward:
            return problem.result_of(called, values)
        of_weights = script.gradients == "forward weights"
        called = model if of_weights else called
        result, tangents = with_tangents(
            problem.result_of, called, values, self.tensors, call, of_weights
        )
        self.answers.update(tangents)
        return result

    def _differentiate(self, k: int, call: int) -> None:
        """Take the gradients of a call, which are the script's `k`-th."""
        script, outputs = self.script, self.outputs[call]
        edit_before_backward(script.edits, self.arguments[call], outputs, self.history.model)
        if any(y.requires_grad for y in outputs):
            with recorded(self.operations, script.traces):
                grads = differentiated(
                    script, self.leaves[call], outputs, self.tensors, k, self.said
                )
            self.answers.update(grads)

    def finish(self) -> None:
        """Note what the calls left in the module, and take the gradients behind all of them."""
        script, model, answers = self.script, self.history.model, self.answers
        values = self.arguments[-1] if self.arguments else []
        answers.update((f"buffer.{n}", b.detach().clone()) for n, b in model.named_buffers())
        if not self.is_exact:  # nobody's in float64
            self.checksums = checksums_of(model, values)
        try:
            if script.accumulates:
                leaves, outputs, place = self.leaves, self.outputs, script.first_place
                grads = accumulated(leaves, outputs, self.tensors, place, self.said)
                answers.update((f"grad0.{name}", grad) for name, grad in grads.items())
            else:
                for k, call in enumerate(script.backward):
                    self._differentiate(k, call)
        except RuntimeError as error:
            raise _Refused(error, "gradients") from error
        if script.drops and not self.is_exact and stays(model, values):
            self.said.append(STAYS)

    def report(self) -> Report:
        """Return what the judge saw of it, beside the answers."""
        history = self.history
        return Report(
            keys=tuple(keys_of(history.model)),
            kinds=tuple(self.kinds),
            aliases=tuple(self.aliases),
            checksums=self.checksums,
            operations=tuple(self.operations),
            refusals=tuple(history.refusals),
            loads=tuple(history.loads),
            changes=(*history.changes, *self.said),
        )


def _as_leaf(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value
