"""The text of a derived module's step of training: an autograd function around extra operators."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress

from tuner.capture.graph import Graph, live
from tuner.capture.half_products import makers_of
from tuner.capture.index_space import NothingToGenerate, NotOneNest, viewed
from tuner.capture.joint import Joint, costly, of_weights
from tuner.capture.module_text import (
    argument_of,
    given_in_step,
    given_of,
    made_whole,
    result_of,
    results_of,
    rows_of,
    view_of,
)  # fmt: skip
from tuner.capture.partitions import traffic_bytes
from tuner.capture.results_of_steps import gradients_of_results, returned_by, why_not_given
from tuner.capture.settings import shell_of
from tuner.capture.stages import Partition, Stages, stages_of

__all__ = [
    "StepPlan", "planned", "rows_of_steps", "step_text", "stepped",
    "why_not_planned", "without_steps",
]  # fmt: skip

NOTHING = "its gradients are nothing but calls of PyTorch's own operations"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A joint record as tasks; `forward` is None where nothing is kept beside forward's own.

    `of_weights` is the same for a step whose inputs want no gradient, where that spares a call of
    PyTorch's own operation.
    """

    joint: Joint
    forward: Stages | None
    gradients: Stages
    of_weights: StepPlan | None = None


def planned(joint: Joint | None) -> StepPlan | None:
    """Return a step as tasks; None where no loops can be generated for it."""
    found = None if joint is None else _planned(joint)
    return None if isinstance(found, str) else found


def why_not_planned(joint: Joint | None) -> str:
    """Return why no loops are generated for a step that was recorded; "" where they are."""
    found = None if joint is None else _planned(joint)
    return found if isinstance(found, str) else ""


def _planned(joint: Joint) -> StepPlan | str:
    arguments = {a.name for a in joint.forward.arguments}
    if taken := arguments & {"ctx", "module", "made", "grads"}:  # names of the text below
        return f"an argument of forward is called {min(taken)}, as generated text calls its own"
    if why := why_not_given(joint):
        return why
    try:
        is_own = len(joint.forward.outputs) == len(joint.incoming)
        forward = None if is_own else _cut(joint.forward)
        gradients = _cut(joint.gradients)
    except NotOneNest as error:
        what = str(error).partition("\n")[0]
        return f"no kernels are generated for its gradients yet: {what}"
    except NothingToGenerate:
        return NOTHING
    nests = (*(forward.nests if forward else ()), *gradients.nests)
    if len({nest.is_wide for nest in nests}) > 1:
        return "some of its gradients are computed in float64 and some are not"
    makers = makers_of(joint.gradients, gradients.calls).values()
    if not nests and not any(products.takes_steps for products in makers):
        return NOTHING
    fewer = of_weights(joint) if gradients.calls else None
    of_data = planned(fewer) if fewer is not None else None
    return StepPlan(joint, forward, gradients, of_data)


def _cut(graph: Graph) -> Stages:
    """Return the tasks of a graph that no search cuts: of two cuts what moves fewer bytes.

    Pointwise work before pooling, or that several nests read, is computed in each of them where
    that stores less.
    """
    found = stages_of(graph)
    with suppress(NotOneNest):
        other = stages_of(graph, Partition(is_recomputed=True))
        found = min(found, other, key=lambda stages: traffic_bytes(graph, stages))
    return found


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
    returned = [made[name] for name in forward.outputs[: len(joint.incoming)]]
    marked, zeros = gradients_of_results(joint, returned)
    results = [marked] if marked else []
    results += [f"        {known[b]}.add_({n})\n" for b, n in stages.counters.items()]
    written = [o.name for o in results_of(stages)]
    for buffer, name in stages.updates.items():
        value = f"made[{written.index(name)}].view_as({known[buffer]})"
        results.append(f"        {known[buffer]}.copy_({value})\n")
    kept = {name: f"result_{i}" for i, name in enumerate(joint.forward.outputs)}
    kept |= {name: f"copy_{i}" for i, name in enumerate(joint.copies)}
    # What comes in has the shape in which the call gave its result.
    whole = made_whole(forward, stages)
    incoming = {name: f"grads[{i}].contiguous()" for i, name in enumerate(joint.incoming) if name}
    incoming |= {
        name: result_of(joint.gradients, name, incoming[name])
        for name, is_whole in zip(joint.incoming, whole, strict=False)
        if name and not is_whole
    }
    needed = given_of(joint.gradients, plan.gradients)
    read = [(known | kept)[t.name] for t in needed if t.name not in incoming]
    for i, name in enumerate(forward.outputs):
        if f"result_{i}" in read:
            # A view of what is returned would hold this step, which holds the view: for ever.
            source = f"{made[name]}.detach()" if made[name] in returned else made[name]
            source = source if whole[i] else result_of(forward, name, source)
            results.append(f"        result_{i} = {source}\n")
    for name, steps in joint.copies.items():
        if kept[name] in read:
            source = known[steps[0].refs[0]] + "".join(map(view_of, steps))
            copy = f"{source}.clone(memory_format=torch.contiguous_format)"
            results.append(f"        {kept[name]} = {copy}\n")

    kept_state = _state_before(graph, joint, plan.gradients)
    results += [f"        {known[b]} = {known[b]}_before\n" for b in kept_state]
    packed = list(dict.fromkeys([*read, *(known[t.name] for t in graph.inputs)]))

    def back(plan: StepPlan, call: str, indent: str) -> str:
        """Write the call of a backward, and what it returns."""
        joint, found = plan.joint, ["None"]
        made = _made(joint.gradients, plan.gradients)
        done = {*compress(joint.gradients.outputs, made_whole(joint.gradients, plan.gradients))}
        values = known | kept | incoming
        arguments = _arguments(graph, joint.gradients, plan.gradients, values, of_step)
        for place, tensor in enumerate(given, 1):
            gradient = joint.gradient_of.get(tensor.name)
            if gradient is None:
                found.append("None")
                continue
            source = incoming.get(viewed(joint.gradients, gradient).name) or made[gradient]
            value = source if gradient in done else result_of(joint.gradients, gradient, source)
            found.append(f"{value} if ctx.needs_input_grad[{place}] else None")
        lines = [f"made = {call}({arguments})", "return ("]
        lines += [*(f"    {line}," for line in found), ")"]
        return "".join(f"{indent}{line}\n" for line in lines)

    calls = {call.name for call in plan.gradients.calls}
    backward = back(plan, "fused_gradients", "        ")
    if plan.of_weights is not None:
        less = back(plan.of_weights, "fused_weight_gradients", " " * 12)
        inputs = f"ctx.needs_input_grad[1:{1 + len(graph.inputs)}]"
        backward = f"        if not any({inputs}):\n{less}{backward}"
    return _STEP.format(
        names=names,
        before="".join(f"        {known[b]}_before = {known[b]}.clone()\n" for b in kept_state),
        call="fused_op" if plan.forward is None else "fused_kept",
        arguments=_arguments(graph, forward, stages, known, rows),
        place_of_rows=next((i for i, t in enumerate(graph.inputs) if t.shape), 0),
        rows=joint.forward.batch if is_fixed else None,
        results="".join(results),
        zeros=zeros,
        leaves=[[i for i, t in enumerate(given) if t.name in own] for own in joint.leaves],
        returned=", ".join(returned),
        read=", ".join(read),
        packed=", ".join(packed),
        inputs=", ".join(f"fused_saved[{packed.index(known[t.name])}]" for t in graph.inputs),
        unpacked=f"        {', '.join(read)}, = fused_saved[:{len(read)}]\n" if read else "",
        backward=backward,
        num_inputs=len(graph.inputs),
        state=[t.name for t in given[len(graph.inputs) :]],
        inputs_and_state=[t.name for t in given],
        updated=sorted(graph.buffer_updates),
        spares_inputs=plan.of_weights is not None,
        differentiable=[i for i, t in enumerate(given) if t.name in joint.gradient_of],
        shell_of=inspect.getsource(shell_of).rstrip(),
        costly=[i for i, t in enumerate(given) if t.name in costly(joint, calls)],
    )


def stepped(graph: Graph, own: Stages, plan: StepPlan) -> list[str]:
    """Return what forward returns of what `Step` makes, each result in its own shape."""
    saved = {t.name for t in given_of(plan.joint.gradients, plan.gradients)}
    return returned_by(graph, *_forward_of(graph, own, plan), saved)


def _forward_of(graph: Graph, own: Stages, plan: StepPlan) -> tuple[Graph, Stages]:
    """Return the graph of a step's forward, and its tasks."""
    return (graph, own) if plan.forward is None else (plan.joint.forward, plan.forward)


def _state_before(graph: Graph, joint: Joint, gradients: Stages) -> list[str]:
    """Return the buffers that a call updates and whose value before it a backward may need.

    Gradients by the reference start from it, where the call's results depend on it.
    """
    behind = live(graph.nodes, {*graph.outputs})
    used = {*graph.outputs, *(name for node in behind for name in node.refs)}
    used |= {t.name for t in given_of(joint.gradients, gradients)}
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


_MARK = "_TAKES_STEPS = True  # with kernels of its own"
_LEFT = "_TAKES_STEPS = False  # its kernels were slower, or were rejected"


def rows_of_steps(model_new: str) -> int | None:
    """Return the one number of rows for which a module's text has steps; None for any number."""
    found = re.search(r"^_STEP_ROWS = (\d+)", model_new, re.MULTILINE)
    return int(found[1]) if found else None


def without_steps(model_new: str) -> str:
    """Return a module's text that leaves steps of training to the reference."""
    return model_new.replace(_MARK, _LEFT, 1)


_STEP = """\
_TAKES_STEPS = True  # with kernels of its own
_DIFFERENTIABLE = {differentiable}  # of what a step is given, by place
_COSTLY = {costly}  # of these: their gradients take products, of which none is made in vain
_RESULTS_BY = {leaves}  # of these: by which each result has gradients
_STEP_ROWS = {rows}  # None for any number


def can_step(given):
    # Whether a call that wants gradients is one that Step was written for.
    if not _TAKES_STEPS or fused_gradients is None or torch.compiler.is_compiling():
        return False
    if _STEP_ROWS not in (None, len(given[{place_of_rows}])):
        return False
    if any([x.is_inference() for x in given]):  # which cannot be saved; PyTorch may not need to
        return False
    wanted = {{place for place in _DIFFERENTIABLE if given[place].requires_grad}}
    costly = _COSTLY
    if {spares_inputs} and not any([place < {num_inputs} for place in wanted]):  # as data
        costly = [place for place in _COSTLY if place >= {num_inputs}]
    return bool(wanted) and wanted.issuperset(costly)


{shell_of}


class AsReference(nn.Module):
    # Calls the reference's own forward of a module.
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return Model.forward(self.module, *inputs)


class Step(torch.autograd.Function):
    # A step of training: forward, and gradients by kernels of their own. What lies between the
    # two is computed again.
    @staticmethod
    def forward(ctx, module, {names}):
{before}        made = detached({call}, {arguments})
{results}        ctx.module, ctx.given = shell_of(module), ({names},)
        ctx.versions = [x._version for x in ctx.given]
        ctx.modes = [(part, part.training) for part in ctx.module.modules()]
        ctx.has_inputs = not is_packed()
        if ctx.has_inputs:
            ctx.save_for_backward({read})
        else:  # by checkpoint, say, which is to let go of what is computed between
            ctx.given = ctx.given[{num_inputs}:]
            ctx.save_for_backward({packed})
        return ({returned},)  # no views, which could not be edited

    @staticmethod
    def backward(ctx, *grads):
        fused_saved, fused_given = ctx.saved_tensors, ctx.given
        if not ctx.has_inputs:
            fused_given = ({inputs}, *fused_given)
        if fused_saved and not is_kept():
            ctx.given = ()  # else a result that is kept, as a loss, would hold them
        is_cast = torch.is_autocast_enabled(torch.device(fused_device).type)
        if torch.is_grad_enabled() or is_cast:
            return (None, *by_reference(ctx, fused_given, grads))
{zeros}        {names}, = fused_given
{unpacked}{backward}

def is_kept():
    # Whether the graph of a backward is used once more; where PyTorch does not tell, it may be.
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or asked()


def is_packed():
    # Whether what is saved for a backward goes through hooks; PyTorch 2.6 does not tell.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def tensors_in(made):
    # What a call of the reference returned, without its containers and without None in these.
    import dataclasses

    if made is None or isinstance(made, torch.Tensor):
        return [] if made is None else [made]
    if dataclasses.is_dataclass(made):
        held = [getattr(made, field.name) for field in dataclasses.fields(made) if field.init]
    else:
        held = made.values() if isinstance(made, dict) else made
    return [tensor for part in held for tensor in tensors_in(part)]


def by_reference(ctx, given, grads):
    # Gradients that are themselves differentiated, through the reference's own operations.
    is_differentiated = torch.is_grad_enabled()
    kind = torch.device(fused_device).type
    for place, (name, x, version) in enumerate(zip({inputs_and_state}, given, ctx.versions)):
        if name in {updated} or (place < {num_inputs} and not ctx.has_inputs):  # which were packed
            continue
        if x._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {{name}} is at version {{x._version}}; expected version "
                f"{{version}} instead. Gradients of gradients, and those of a backward under "
                "autocast, are computed from the values of the call"
            )
    now = [(part, part.training) for part in ctx.module.modules()]
    inputs, state = given[:{num_inputs}], given[{num_inputs}:]
    lent = {{f"module.{{name}}": x for name, x in zip({state}, state)}}
    lent |= {{f"module.{{name}}": lent[f"module.{{name}}"].clone() for name in {updated}}}
    wanted = [x for x, is_wanted in zip(given, ctx.needs_input_grad[1:]) if is_wanted]
    try:
        for part, is_training in ctx.modes:
            part.training = is_training
        with torch.enable_grad():
            with torch.autocast(kind, enabled=False):  # as the forward was
                made = torch.func.functional_call(AsReference(ctx.module), lent, inputs)
            made = zip(tensors_in(made), grads)
            pairs = [(y, g) for y, g in made if y.requires_grad and g is not None]
            pairs = [(y, grad.reshape(y.shape)) for y, grad in pairs]
            found = torch.autograd.grad(
                [y for y, _ in pairs], wanted, [grad for _, grad in pairs],
                create_graph=is_differentiated, allow_unused=True,
            )
    finally:
        for part, is_training in now:
            part.training = is_training
    found = iter(found)
    return [next(found) if is_wanted else None for is_wanted in ctx.needs_input_grad[1:]]
"""
