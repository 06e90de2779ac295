"""The text of a derived module's step of training: an autograd function around extra operators."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from itertools import compress

from tuner.capture.graph.autograd_leaves import ending_at
from tuner.capture.graph.graph import Graph, live
from tuner.capture.graph.seen import seen_in
from tuner.capture.graph.settings import shell_of
from tuner.capture.modules.module_text import (
    argument_of,
    given_in_step,
    given_of,
    made_whole,
    result_of,
    results_of,
    rows_of,
    view_of,
)
from tuner.capture.steps.by_reference import BY_REFERENCE
from tuner.capture.steps.gradients_text import gradients_text
from tuner.capture.steps.results_of_steps import results_text, whole_in_step
from tuner.capture.steps.step_plans import BackwardPlan, StepPlan, needed_by, numbers_text
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
    joint = plan.joint
    of_step = None if is_fixed else batch
    rows = batch if plan.forward is None else of_step
    given = given_in_step(graph)
    known = {t.name: t.name for t in graph.inputs}
    known |= {t.name: f"state_{i}" for i, t in enumerate(given[len(graph.inputs) :])}
    names = ", ".join(known.values())
    forward, stages = _forward_of(graph, own, plan)
    made = _made(forward, stages)
    lines = [f"{known[b]}.add_({n})" for b, n in stages.counters.items()]
    written = [o.name for o in results_of(stages)]
    for buffer, name in stages.updates.items():
        value = f"made[{written.index(name)}].view_as({known[buffer]})"
        unmarked = ".data" * (buffer in graph.unmarked)  # as PyTorch's own call leaves it
        lines.append(f"{known[buffer]}{unmarked}.copy_({value})")
    kept = {name: f"result_{i}" for i, name in enumerate(joint.forward.outputs)}
    kept |= {name: f"copy_{i}" for i, name in enumerate(joint.copies)}
    needed = [needed_by(each, joint) for each in plan.backwards]
    values = known | kept
    own_reads = [[values[name] for name in names] for names in needed]
    read = [*dict.fromkeys(text for texts in own_reads for text in texts)]
    whole = whole_in_step(joint, forward, stages)
    returned = [made[name] for name in forward.outputs[: joint.num_made]]
    is_made = made_whole(forward, stages)
    for i, name in enumerate(forward.outputs[: joint.num_made]):
        if whole[i] and not is_made[i]:
            lines.append(f"whole_{i} = {result_of(forward, name, made[name], is_own=True)}")
            returned[i] = f"whole_{i}"
    of_made = dict(zip([made[name] for name in forward.outputs], returned, strict=False))
    for i, name in enumerate(forward.outputs):
        if f"result_{i}" in read:
            # A view of what is returned would hold its step, which holds the view: for ever.
            source = of_made.get(made[name], made[name])
            source += ".detach()" * (made[name] in of_made)
            is_whole = whole[i] and (i < joint.num_made or made[name] not in of_made)
            lines.append(
                f"result_{i} = {source if is_whole else result_of(forward, name, source)}"
            )
    for name, steps in joint.copies.items():
        if kept[name] in read:
            source = known[steps[0].refs[0]] + "".join(map(view_of, steps))
            copy = f"{source}.clone(memory_format=torch.contiguous_format)"
            lines.append(f"{kept[name]} = {copy}")
    kept_state = _state_before(graph, {name for names in needed for name in names})
    lines += [f"{known[b]} = {known[b]}_before" for b in kept_state]
    # Inputs that are not read are saved behind what is.
    inputs = [known[t.name] for t in graph.inputs]
    packed = [[*dict.fromkeys([*texts, *inputs])] for texts in own_reads]
    backwards = ""
    for number, each in enumerate(plan.backwards):
        texts = own_reads[number]
        unpacked = f"    {', '.join(texts)}, = fused_saved[:{len(texts)}]\n"
        backwards += f"def gradients_{number}(ctx, fused_saved, fused_given, grad):\n"
        backwards += f"    {names}, = fused_given\n{unpacked if texts else ''}"
        is_whole = whole[each.of.place]
        backwards += _backward_text(graph, plan, number, values, of_step, is_whole) + "\n\n"
    calls = [
        costly(each.of, {call.name for call in each.stages.calls})
        for each in plan.backwards
        if each.stages is not None
    ]
    by_leaves = [
        [i for i, t in enumerate(given) if t.name in each.gradient_of] for each in joint.backwards
    ]
    frozen = [i for i, t in enumerate(given) if t.name in joint.frozen]
    return (_STEP + BY_REFERENCE).format(
        names=names,
        before="".join(f"    {known[b]}_before = {known[b]}.clone()\n" for b in kept_state),
        call="fused_op" if plan.forward is None else "fused_kept",
        arguments=_arguments(graph, forward, stages, known, rows),
        place_of_rows=next((i for i, t in enumerate(graph.inputs) if t.shape), 0),
        rows=joint.forward.batch if is_fixed else None,
        between=list(joint.between),
        if_between=_OF_VERSION.format(version=joint.version) if joint.between else "",
        seen_in=inspect.getsource(seen_in).rstrip(),
        ending_at=inspect.getsource(ending_at).rstrip(),
        if_frozen=_FROZEN.format(frozen=frozen) if frozen else "",
        lines="".join(f"    {line}\n" for line in lines),
        returned=", ".join(returned),
        kept="".join(f"{name}, " for name in read).rstrip(),
        reads=[[read.index(text) for text in texts] for texts in own_reads],
        inputs_at=[[texts.index(text) for text in inputs] for texts in packed],
        places=[each.place for each in joint.backwards],
        sources=[list(each.sources) for each in joint.backwards],
        by_leaves=by_leaves,
        backwards=backwards,
        functions=", ".join(f"gradients_{number}" for number in range(len(own_reads))),
        first=FIRST,
        num_results=joint.num_results,
        num_inputs=len(graph.inputs),
        state=[t.name for t in given[len(graph.inputs) :]],
        inputs_and_state=[t.name for t in given],
        updated=sorted(graph.buffer_updates),
        spares_inputs=any(each.of_weights is not None for each in plan.backwards),
        differentiable=sorted({place for places in by_leaves for place in places}),
        shell_of=inspect.getsource(shell_of).rstrip(),
        costly=[i for i, t in enumerate(given) if any(t.name in names for names in calls)],
    )


def _backward_text(
    graph: Graph,
    plan: StepPlan,
    number: int,
    values: Mapping[str, str],
    batch: int | None,
    is_whole: bool,
) -> str:
    """Return the call of a result's backward, and what it returns.

    Args:
        graph: of the module's forward.
        plan: of the step.
        number: of the backward.
        values: what is given and kept is called, by name.
        batch: as for `model_new`, of the step.
        is_whole: whether the call gives the result its own shape, which what comes in has then.
    """
    own = plan.backwards[number]
    leaves = [t.name for t in given_in_step(graph) if t.name in own.of.gradient_of]
    called = {id(each): name for name, each in plan.calls}

    def back(each: BackwardPlan, indent: str) -> str:
        asked, coming = each.of.graph, "grad.contiguous()"
        coming = coming if is_whole else result_of(asked, each.of.incoming, coming)
        known = {**values, each.of.incoming: coming}
        lines, done = list[str](), set[str]()
        if each.stages is None:
            made = numbers_text(asked, known) or {}
        else:
            made = _made(asked, each.stages)
            done = {*compress(asked.outputs, made_whole(asked, each.stages))}
            arguments = _arguments(graph, asked, each.stages, known, batch)
            lines.append(f"made = fused_{called[id(each)]}({arguments})")

        before, texts = gradients_text(each, FIRST, leaves, coming, made, done, is_whole)
        lines += before
        lines += ["return (", *(f"    {text}," for text in texts), ")"]
        return "".join(f"{indent}{line}\n" for line in lines)

    backward = back(own, "    ")
    if own.of_weights is not None:
        num_inputs = len({t.name for t in own.of.graph.inputs}.intersection(leaves))
        inputs = f"ctx.needs_input_grad[{FIRST}:{FIRST + num_inputs}]"
        backward = f"    if not any({inputs}):\n{back(own.of_weights, ' ' * 8)}{backward}"
    return backward


def stepped(graph: Graph, own: Stages, plan: StepPlan) -> tuple[str, list[str]]:
    """Return the lines in which a call makes results by steps, and the text of each then."""
    forward, stages = _forward_of(graph, own, plan)
    made = _made(forward, stages)
    saved = {made.get(name) for each in plan.backwards for name in needed_by(each, plan.joint)}
    shared = [made[name] in saved for name in forward.outputs[: plan.joint.num_made]]
    return results_text(graph, plan.joint, forward, stages, shared)


def _forward_of(graph: Graph, own: Stages, plan: StepPlan) -> tuple[Graph, Stages]:
    """Return the graph of a step's forward, and its tasks."""
    return (graph, own) if plan.forward is None else (plan.joint.forward, plan.forward)


def _state_before(graph: Graph, needed: Collection[str]) -> list[str]:
    """Return the buffers that a call updates and whose value before it a backward may need.

    Gradients by the reference start from it, where the call's results depend on it.
    """
    behind = live(graph.nodes, {*graph.outputs})
    used = {*graph.outputs, *(name for node in behind for name in node.refs), *needed}
    return [t.name for t in graph.buffers if t.name in graph.buffer_updates and t.name in used]


def _arguments(
    graph: Graph, asked: Graph, stages: Stages, known: Mapping[str, str], batch: int | None
) -> str:
    rows = rows_of(graph, batch)
    more = ".contiguous()" if stages.calls else ""
    return ", ".join(
        argument_of(asked, stages, t, known[t.name] + more, batch, rows)
        for t in given_of(asked, stages)
    )


def _made(graph: Graph, stages: Stages) -> dict[str, str]:
    """Return where each output of a graph is among what its call made."""
    written = [o.name for o in results_of(stages)]
    return {
        name: f"made[{written.index(real)}]"
        for name, real in zip(graph.outputs, stages.outputs, strict=True)
    }


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
_STEP = """\
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


{shell_of}


{backwards}_GRADIENTS = ({functions},)  # of each result that has some
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


def made_in_step({names}):
    # The results of a step, and what is kept for their gradients.
{before}    made = detached({call}, {arguments})
{lines}    return ({returned},), ({kept}), ({names},)


class Step(torch.autograd.Function):
    # One result of a step of training, and its gradients by kernels of their own. What lies
    # between the two is computed again.
    @staticmethod
    def forward(ctx, number, module, held, given, *by):
        if not held:  # all of them are made at once
            held += made_in_step(*given)
        results, kept, given = held
        ctx.set_materialize_grads(False)
        ctx.number, ctx.module, ctx.given = number, shell_of(module), given
        # Nobody else has those that are not returned; a reference to others may be for ever.
        pairs = zip(_SOURCES[number], by[len(_LEAVES_OF[number]) :])
        ctx.others = [
            weakref.ref(x) if i < {num_results} else functools.partial(as_it_is, x)
            for i, x in pairs
        ]
        ctx.versions = [x._version for x in given]
        ctx.modes = [(part, part.training) for part in ctx.module.modules()]
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
