"""The text of a derived module's step of training: an autograd function around extra operators."""

from __future__ import annotations

import re
from itertools import compress

from tuner.capture.graph.autograd_leaves import ending_at
from tuner.capture.graph.graph import Graph
from tuner.capture.graph.seen import seen_in
from tuner.capture.graph.settings import code_of, shell_of
from tuner.capture.modules.module_text import given_in_step, made_whole, result_of
from tuner.capture.steps.by_reference import BY_REFERENCE
from tuner.capture.steps.gradients_text import gradients_text
from tuner.capture.steps.results_of_steps import results_text
from tuner.capture.steps.step_forward import (
    StepValues,
    arguments_text,
    forward_text,
    made_by,
    values_of_step,
)
from tuner.capture.steps.step_plans import BackwardPlan, StepPlan, numbers_text
from tuner.capture.tasks.stages import Stages
from tuner.capture.tasks.step_records import costly

__all__ = ["rows_of_steps", "step_text", "stepped", "without_steps"]


def step_text(
    graph: Graph, own: Stages, plan: StepPlan, batch: int | None, *, is_fixed: bool = False
) -> str:
    """Return the text of `Step` and of what it needs.

    Args:
        graph: of the module's forward.
        own: its tasks.
        plan: of the step.
        batch: as for `model_new`.
        is_fixed: whether steps are for the batch of the plan alone, not for that of the forward.
    """
    values = values_of_step(graph, own, plan)
    of_step = None if is_fixed else batch
    sections = [
        _conditions_text(values, plan.joint.forward.batch if is_fixed else None),
        code_of(shell_of) + "\n\n\n",
        *(_backward_text(values, number, of_step) for number in range(len(plan.backwards))),
        _tables_text(values),
        forward_text(values, batch if plan.forward is None else of_step),
        _STEP.format(num_results=plan.joint.num_results, num_inputs=len(graph.inputs)),
        _by_reference_text(values),
    ]
    return "".join(sections)


def stepped(graph: Graph, own: Stages, plan: StepPlan) -> tuple[str, list[str]]:
    """Return the lines in which a call makes results by steps, and the text of each then."""
    values = values_of_step(graph, own, plan)
    forward, made = values.forward, values.made
    saved = {made.get(name) for names in values.needed for name in names}
    shared = [made[name] in saved for name in forward.outputs[: plan.joint.num_made]]
    return results_text(graph, plan.joint, forward, values.stages, shared)


def _conditions_text(values: StepValues, rows: int | None) -> str:
    """Return `can_step`, and what it asks; `rows` are all that steps are for, None for any."""
    graph, plan, joint = values.graph, values.plan, values.plan.joint
    given = given_in_step(graph)
    frozen = [i for i, t in enumerate(given) if t.name in joint.frozen]
    calls = [
        costly(each.of, {call.name for call in each.stages.calls})
        for each in plan.backwards
        if each.stages is not None
    ]
    return _CAN_STEP.format(
        differentiable=sorted({place for places in _leaves(values) for place in places}),
        costly=[i for i, t in enumerate(given) if any(t.name in names for names in calls)],
        rows=rows,
        place_of_rows=next((i for i, t in enumerate(graph.inputs) if t.shape), 0),
        if_between=_OF_VERSION.format(version=joint.version) if joint.between else "",
        if_frozen=_FROZEN.format(frozen=frozen) if frozen else "",
        spares_inputs=any(each.of_weights is not None for each in plan.backwards),
        num_inputs=len(graph.inputs),
    )


def _leaves(values: StepValues) -> list[list[int]]:
    """Return by what each result has gradients at once: places of what a step is given."""
    given = given_in_step(values.graph)
    return [
        [i for i, t in enumerate(given) if t.name in each.gradient_of]
        for each in values.plan.joint.backwards
    ]


def _backward_text(values: StepValues, number: int, batch: int | None) -> str:
    """Return the function of a result's gradients.

    Args:
        values: of the step.
        number: of the backward.
        batch: as for `model_new`, of the step.
    """
    own, reads = values.plan.backwards[number], values.reads[number]
    leaves = [t.name for t in given_in_step(values.graph) if t.name in own.of.gradient_of]
    lines = _gradient_lines(values, own, leaves, batch)
    if own.of_weights is not None:
        num_inputs = len({t.name for t in own.of.graph.inputs}.intersection(leaves))
        inputs = f"ctx.needs_input_grad[{FIRST}:{FIRST + num_inputs}]"
        of_weights = _gradient_lines(values, own.of_weights, leaves, batch)
        lines = [f"if not any({inputs}):", *(f"    {line}" for line in of_weights), *lines]
    if reads:
        lines = [f"{', '.join(reads)}, = fused_saved[:{len(reads)}]", *lines]
    return (
        f"def gradients_{number}(ctx, fused_saved, fused_given, grad):\n"
        f"    {values.arguments}, = fused_given\n"
        + "".join(f"    {line}\n" for line in lines)
        + "\n\n"
    )


def _gradient_lines(
    values: StepValues, each: BackwardPlan, leaves: list[str], batch: int | None
) -> list[str]:
    """Return the call of a backward, and what it returns for each of the leaves."""
    asked, coming = each.of.graph, "grad.contiguous()"
    is_whole = values.whole[each.of.place]  # what comes in has the result's shape
    if not is_whole:
        coming = result_of(asked, each.of.incoming, coming)
    known = {**values.given, **values.kept, each.of.incoming: coming}
    call, done = list[str](), set[str]()
    if each.stages is None:
        made = numbers_text(asked, known) or {}
    else:
        made = made_by(asked, each.stages)
        done = {*compress(asked.outputs, made_whole(asked, each.stages))}
        name = next(name for name, other in values.plan.calls if other is each)
        arguments = arguments_text(values.graph, asked, each.stages, known, batch)
        call = [f"made = known_gradients(ctx.run, fused_{name}, {arguments})"]
    before, texts = gradients_text(each, FIRST, leaves, coming, made, done, is_whole)
    return [*call, *before, "return (", *(f"    {text}," for text in texts), ")"]


def _tables_text(values: StepValues) -> str:
    """Return what is looked up of each result, by the number of its backward."""
    joint, reads, saved = values.plan.joint, values.reads, values.saved
    # Inputs that are not read are saved behind what is.
    inputs = [values.given[t.name] for t in values.graph.inputs]
    packed = [[*dict.fromkeys([*texts, *inputs])] for texts in reads]
    return _TABLES.format(
        functions=", ".join(f"gradients_{number}" for number in range(len(reads))),
        reads=[[saved.index(text) for text in texts] for texts in reads],
        inputs_at=[[texts.index(text) for text in inputs] for texts in packed],
        places=[each.place for each in joint.backwards],
        sources=[list(each.sources) for each in joint.backwards],
        by_leaves=_leaves(values),
    )


def _by_reference_text(values: StepValues) -> str:
    """Return `by_reference`, and what it needs."""
    graph, given = values.graph, given_in_step(values.graph)
    return BY_REFERENCE.format(
        between=list(values.plan.joint.between),
        seen_in=code_of(seen_in),
        ending_at=code_of(ending_at),
        inputs_and_state=[t.name for t in given],
        state=[t.name for t in given[len(graph.inputs) :]],
        updated=sorted(graph.buffer_updates),
        num_inputs=len(graph.inputs),
        first=FIRST,
    )


FIRST = 4  # of what `Step` is given the first that may want a gradient
_MARK = "_TAKES_STEPS = True  # with kernels of its own"
_LEFT = "_TAKES_STEPS = False  # its kernels were slower, or were rejected"


def rows_of_steps(model_new: str) -> int | None:
    """Return the one number of rows for which a module's text has steps; None for any number."""
    found = re.search(r"^_STEP_ROWS = (\d+)", model_new, re.MULTILINE)
    return int(found[1]) if found else None


def without_steps(model_new: str) -> str:
    """Return a module's text that leaves steps of training to the reference."""
    return model_new.replace(_MARK, _LEFT, 1)


_OF_VERSION = """\
    if torch.__version__ != {version!r}:  # others may make something else on the way
        return False
"""
_FROZEN = """\
    if any([given[place].requires_grad for place in {frozen}]):  # they were frozen
        return False
"""
_CAN_STEP = """\
_TAKES_STEPS = True  # with kernels of its own
_DIFFERENTIABLE = {differentiable}  # of what a step is given, by place
_COSTLY = {costly}  # of these: their gradients take products, of which none is made in vain
_STEP_ROWS = {rows}  # None for any number


def can_step(given):
    # Whether a call that wants gradients is one that Step was written for.
    if not _TAKES_STEPS or fused_gradients is None or torch.compiler.is_compiling():
        return False
    if _STEP_ROWS not in (None, len(given[{place_of_rows}])):
        return False
{if_between}{if_frozen}    # Such cannot be saved; PyTorch may not need to.
    if any([x.is_inference() for x in given]):
        return False
    wanted = {{place for place in _DIFFERENTIABLE if given[place].requires_grad}}
    costly = _COSTLY
    if {spares_inputs} and not any([place < {num_inputs} for place in wanted]):  # as data
        costly = [place for place in _COSTLY if place >= {num_inputs}]
    return bool(wanted) and wanted.issuperset(costly)


"""
_TABLES = """\
_GRADIENTS = ({functions},)  # of each result that has some
_READS = {reads}  # by these: of what is kept
_INPUTS_AT = {inputs_at}  # where inputs are among what is saved where hooks take it
_RESULT_AT = {places}  # of the results
_SOURCES = {sources}  # the places of other results that each is computed from
_LEAVES_OF = {by_leaves}  # by which each has gradients at once: of what a step is given


def gradient_leaves(number, given):
    # What a result has gradients by.
    return [given[i] for i in _LEAVES_OF[number]]


def as_it_is(x):
    return x


def modes_of(module, found):
    # The mode of each part: `module.modules()` takes the host several times as long.
    if module not in found:
        found[module] = module.training
        for part in module._modules.values():
            if part is not None:
                modes_of(part, found)
    return found


"""
_STEP = """\
class Step(torch.autograd.Function):
    # One result of a step of training, and its gradients by kernels of their own. What lies
    # between the two is computed again.
    @staticmethod
    def forward(ctx, number, module, held, given, *by):
        if len(held) == 1:  # by what it holds, all of them are made at once
            held[:] = (*made_in_step(*held, *given), *held)
        results, kept, given, ctx.run = held
        ctx.set_materialize_grads(False)
        ctx.number, ctx.module, ctx.given = number, shell_of(module), given
        # Nobody else has those that are not returned; a reference to others may be for ever.
        pairs = zip(_SOURCES[number], by[len(_LEAVES_OF[number]) :])
        ctx.others = [
            weakref.ref(x) if i < {num_results} else functools.partial(as_it_is, x)
            for i, x in pairs
        ]
        ctx.versions = [x._version for x in given]
        ctx.modes = modes_of(ctx.module, {{}})
        ctx.has_inputs = not is_packed()
        read = [kept[i] for i in _READS[number]]
        if ctx.has_inputs:
            ctx.save_for_backward(*read)
        else:  # by checkpoint, say, which is to let go of what is computed between
            more = [x for x, i in zip(given, _INPUTS_AT[number]) if i >= len(read)]
            ctx.given = given[{num_inputs}:]
            ctx.save_for_backward(*read, *more)
        return results[_RESULT_AT[number]]  # no view, which could not be edited

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        fused_saved, fused_given, others = ctx.saved_tensors, ctx.given, ctx.others
        if not ctx.has_inputs:
            fused_given = (*[fused_saved[i] for i in _INPUTS_AT[ctx.number]], *fused_given)
        if fused_saved and not is_kept():
            ctx.given = ctx.others = ()  # else a result that is kept, as a loss, would hold them
        is_cast = torch.is_autocast_enabled(torch.device(fused_device).type)
        if torch.is_grad_enabled() or is_cast or is_batched(grad) or grad.is_sparse:
            found = by_reference(ctx, fused_given, others, grad)
        else:
            found = _GRADIENTS[ctx.number](ctx, fused_saved, fused_given, grad)
        return (None, None, None, None, *found)


"""
