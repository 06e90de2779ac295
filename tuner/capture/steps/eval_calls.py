"""Calls in eval mode of a module that is tuned in training: their tasks, and the text of one."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.capture.graph.graph import Graph
from tuner.capture.graph.settings import literal_of
from tuner.capture.modules.module_text import call_arguments, call_result, has_batch
from tuner.capture.modules.rows_text import IN_EVAL_NAME
from tuner.capture.nests.index_space import NothingToGenerate, NotOneNest
from tuner.capture.nests.picking import picking_inputs
from tuner.capture.steps.step_plans import cut
from tuner.capture.tasks.stages import Stages
from tuner.capture.tasks.step_records import Captured

__all__ = ["changes_in_eval", "eval_call", "eval_text"]

Settings = Mapping[str, Mapping[str, object]]


def eval_call(captured: Captured, own: Stages) -> tuple[Graph, Stages] | None:
    """Return a forward in eval mode and its tasks; None where no loops are generated for it.

    Args:
        captured: the module's record.
        own: the tasks of its forward in training; one template has the loops of both.
    """
    graph = captured.in_eval
    if graph is None or picking_inputs(graph) != picking_inputs(captured.graph):
        return None
    try:
        found = cut(graph, is_permuted_apart=False)
    except (NotOneNest, NothingToGenerate):
        return None
    is_wide = {nest.is_wide for stages in (own, found) for nest in stages.nests}
    return (graph, found) if len(is_wide) == 1 else None


def changes_in_eval(settings: Settings, in_eval: Settings) -> Settings | None:
    """Return the settings that eval mode changes, by path; None where it has others.

    Those are `training` of each part, and what a module's own `train` sets or leaves besides.
    """
    pairs = {path: (known, in_eval.get(path, {})) for path, known in settings.items()}
    if settings.keys() != in_eval.keys() or any(a.keys() != b.keys() for a, b in pairs.values()):
        return None
    return {p: {n: x for n, x in b.items() if a[n] != x} for p, (a, b) in pairs.items()}


def eval_text(graph: Graph, stages: Stages, batch: int | None, changes: Settings) -> str:
    """Return the text of the function that takes calls in eval mode, and of the settings there.

    Args:
        graph: of the forward in eval mode.
        stages: its tasks.
        batch: as for `model_new`.
        changes: as of `changes_in_eval`.
    """
    batched = next(t.name for t in graph.inputs if has_batch(graph, t, batch))
    return _CALL.format(
        name=IN_EVAL_NAME,
        changes=literal_of(changes),
        names=", ".join(a.name for a in graph.arguments),
        batched=batched,
        arguments=call_arguments(graph, stages, batch),
        result=call_result(graph, stages),
    )


# Gradients in eval mode are the reference's, and so are rows at which that was faster.
_CALL = """\
_CHANGES = {changes}  # of settings, in eval mode
_IN_EVAL = {{path: {{**known, **_CHANGES[path]}} for path, known in _SETTINGS.items()}}


def {name}(self, {names}):
    if fused_eval is None:
        return Model.forward(self, {names})
    if torch.is_grad_enabled() and (wants_gradients(({names},)) or is_trained(self)):
        return Model.forward(self, {names})
    if _FUSED_ROWS and not _is_exporting():  # a comparison would fix the exported rows
        if isinstance({batched}, torch.Tensor) and not {batched}.is_nested:
            fused_shape = {batched}.shape
            if fused_shape and not is_within(fused_shape[0], *_FUSED_ROWS["eval"]):
                return Model.forward(self, {names})
    fused_state, fused_run = known_call(self, {names})
    if fused_state is None:
        fused_state = usual_state(self, ({names},))
        if fused_state is None or wants_gradients(fused_state.values()):  # of buffers as well
            return Model.forward(self, {names})
        fused_run = detached
        remember(self, fused_state, False, {names})
    made = fused_run(fused_eval, {arguments})
    return {result}


"""
