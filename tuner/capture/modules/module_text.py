"""The module around an operator that was derived: the text of its `ModelNew`.

It is the reference's own class. It takes the operator where shapes, types, modes and settings are
those that were captured, and `super().forward` everywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import indent
from typing import Any

from tuner.capture.graph.graph import Graph, Node, Tensor
from tuner.capture.graph.named import named_in_code
from tuner.capture.graph.returning import containers_text, returned_text
from tuner.capture.graph.settings import (
    code_of,
    contents_of,
    literal_of,
    made_from,
    setting_of,
    slots_of,
)
from tuner.capture.modules.known_text import KNOWN_TEXT
from tuner.capture.modules.parameters_text import parameters_of
from tuner.capture.modules.rows_text import IN_EVAL_NAME, ROWS_TEXT, asks_few, asks_rows
from tuner.capture.modules.usual_text import BESIDE_TEXT, USUAL_TEXT
from tuner.capture.nests.index_space import SAME_ORDER
from tuner.capture.nests.nest import Output
from tuner.capture.nests.picking import picking_inputs
from tuner.capture.nests.scalars import numbers_of
from tuner.capture.tasks.stages import Stages

__all__ = [
    "FROM_AND_TO_TEXT", "argument_of", "asks_rows_of", "call_arguments",
    "call_result", "given_in_step", "given_of", "has_batch", "made_whole", "model_new",
    "other_mode_text", "result_of", "results_of", "rows_of", "spread_by", "state_text",
    "updated_by", "usual_text", "view_of",
]  # fmt: skip


def has_batch(graph: Graph, tensor: Tensor, batch: int | None) -> bool:
    """Whether a tensor is an input whose rows are the batch."""
    is_given = tensor in graph.inputs and tensor.name not in graph.apart
    return batch is not None and is_given and tensor.shape[:1] == (batch,)


def given_of(graph: Graph, stages: Stages) -> list[Tensor]:
    """Return what the call gets, in order."""
    called = {name for call in stages.calls for name in call.reads}
    made = {call.name for call in stages.calls} | stages.between.keys() | {*stages.outputs}
    found = {t.name: t for t in graph.given if t.name in called}
    for nest in stages.nests:
        found |= {t.name: t for t in nest.arguments if t.name not in made}
    return list(found.values())


def results_of(stages: Stages) -> list[Output]:
    """Return what the call gives, once each: results, then new values of buffers."""
    written = {o.name: o for nest in stages.nests for o in nest.outputs}
    written |= {c.name: Output(c.name, c.dtype, math.prod(c.shape)) for c in stages.calls}
    return [written[n] for n in dict.fromkeys([*stages.outputs, *stages.updates.values()])]


def asks_rows_of(graph: Graph, batch: int | None) -> tuple[str, str]:
    """Return what a forward asks before all else, and of a call that it does not know yet.

    Few rows may be PyTorch's, and so may others.
    """
    names = [a.name for a in graph.arguments]
    batched = next((t.name for t in graph.inputs if has_batch(graph, t, batch)), "")
    return (asks_few(names, batched), asks_rows(names)) if batched else ("", "")


def rows_of(graph: Graph, batch: int | None) -> str:
    """Return the batch as the module's text has it."""
    return next((f"len({t.name})" for t in graph.inputs if has_batch(graph, t, batch)), "")


def argument_of(
    graph: Graph, stages: Stages, tensor: Tensor, source: str, batch: int | None, rows: str
) -> str:
    """Return what a call is given for a tensor that stands in `source`."""
    has_rows = has_batch(graph, tensor, batch)
    flat = f"{rows}, -1" if has_rows else "-1"
    as_bytes = ".view(torch.uint8)" if tensor.dtype == "bool" else ""
    is_flat = len(tensor.shape) == 1 + has_rows
    reshaped = "" if is_flat or (stages.calls and tensor.shape) else f".reshape({flat})"
    return f"{source}{as_bytes}{reshaped}"


def spread_by(graph: Graph, name: str) -> list[Node]:
    """Return the views by which a result has more elements than what is made of it; or none."""
    value, steps = graph.value(name), list[Node]()
    while isinstance(value, Node) and value.op in SAME_ORDER:
        steps.insert(0, value)
        value = graph.value(value.refs[0])
    return steps if math.prod(value.shape) != math.prod(graph.value(name).shape) else []


def result_of(graph: Graph, name: str, source: str, *, is_own: bool = False) -> str:
    """Return a result in its own shape.

    What `is_own` is no view of what a kernel made, unless views expand it: without gradients, too,
    a user may write trained numbers into it, or detach it in place.
    """
    steps = spread_by(graph, name)
    value = graph.value(steps[0].refs[0] if steps else name)
    as_bool = ".view(torch.bool)" if value.dtype == "bool" else ""
    shape = f"({', '.join(map(str, value.shape))},)" if value.shape else "()"
    if is_own and not steps:
        return f"torch.ops.aten._unsafe_view.default({source}{as_bool}, {shape})"
    return f"{source}{as_bool}.view({shape}){''.join(map(view_of, steps))}"


def made_whole(graph: Graph, stages: Stages) -> list[bool]:
    """Return of each output whether what makes it gives it its own shape."""
    found = []
    for real, name in zip(stages.outputs, graph.outputs, strict=True):
        value = graph.value(name)
        is_whole = bool(value.shape) and value.dtype != "bool"
        found.append(is_whole and graph.value(real).shape == value.shape)
    return found


def updated_by(made: Sequence[int], source: str, held: Sequence[int], buffer: str) -> str:
    """Return what a buffer is to hold, whose text is `buffer`: what `source` is, in its shape."""
    return source if made == held != () else f"{source}.view_as({buffer})"


def view_of(step: Node) -> str:
    """Write a view or a cast of a tensor, behind it."""
    a: Any = step.attrs
    if step.op == "cast":
        return f".to(torch.{step.dtype})"
    if step.op == "slice":
        place = f"{a['start']}:{a['stop']}:{a['step']}"
        return f"[{':, ' * a['axis']}{place}]"
    given = a["axes"] if step.op == "permute" else step.shape
    name = "reshape" if step.op == "view" else step.op  # of what lies in another order, a copy
    return f".{name}({tuple(given)})"


def given_in_step(graph: Graph) -> list[Tensor]:
    """Return what a step of training is given, in order: what it may be differentiated by."""
    return [*graph.inputs, *graph.parameters, *graph.buffers]


def model_new(
    graph: Graph,
    stages: Stages,
    reference: str,
    settings: Mapping[str, object],
    has_modes: bool,
    batch: int | None,
    step: str,
    stepped: tuple[str, Sequence[str]],
    beside: Mapping[str, str],
    without_step: str = "",
    in_eval: str = "",
    *,
    has_calls: bool,
) -> str:
    """Return the text of a module around an operator.

    Args:
        graph: of the module's forward.
        stages: what the operator computes of it.
        reference: the text of the module's file.
        settings: of `settings_of`, as they were.
        has_modes: whether those name modes.
        batch: how many rows inputs have that may have another number; None where none may.
        step: the text of `Step`, "" where the reference takes steps of training.
        stepped: the lines in which results are made by that, and what forward returns then.
        beside: modules that the file imports from its own folder, with their hashes.
        without_step: why the reference takes steps of training, where it does.
        in_eval: the text of calls in eval mode, "" where the reference takes them.
        has_calls: as for `usual_text`, of all that may be called.
    """
    names = [a.name for a in graph.arguments]
    listed = ", ".join(names)
    head, asks_more = parameters_of(reference, names)
    written = [o.name for o in results_of(stages)]
    updates = [f"{state_text(b)}.add_({number})" for b, number in stages.counters.items()]
    buffers = [state_text(b) + ".data" * (b in graph.unmarked) for b in stages.updates]
    copies = [
        updated_by(
            graph.value(name).shape, f"made[{written.index(name)}]",
            graph.value(buffer).shape, state_text(buffer),
        )
        for buffer, name in stages.updates.items()
    ]  # fmt: skip
    if copies:  # at once: the host takes as long for each copy as for a launch
        updates.append(f"torch._foreach_copy_([{', '.join(buffers)}], [{', '.join(copies)}])")
    given = ", ".join(_source_of(graph, tensor) for tensor in given_in_step(graph))
    usual = usual_text(
        graph, reference, settings, has_modes, batch, beside, has_calls=has_calls,
        has_eval=bool(in_eval),
    )  # fmt: skip
    takes_other = IN_EVAL_NAME if in_eval else "Model.forward"
    other_mode = other_mode_text(graph.is_training, listed, takes_other) if has_modes else ""
    asks_step = _ASKS_STEP.format(names=listed)
    asks_first, asks_rows = asks_rows_of(graph, batch)
    return _MODULE.format(
        usual=usual,
        known=KNOWN_TEXT,
        from_and_to=FROM_AND_TO_TEXT,
        names=listed,
        head=head,
        asks_first=asks_more + other_mode + asks_step + asks_first,
        asks_rows=indent(asks_rows, "    "),
        arguments=call_arguments(graph, stages, batch),
        in_eval=in_eval,
        step=f"{step or f'_TAKES_STEPS = False  # {without_step}'}\n\n",
        given=given,
        wants="fused_step and not can_step(given)" if step else "fused_step",
        stepped=_STEPPED.format(
            given=given, results=stepped[0], result=returned_text(graph.returns, stepped[1])
        )
        if step
        else "",
        updates="".join(f"        {line}\n" for line in updates),
        result=call_result(graph, stages),
    )


def call_arguments(graph: Graph, stages: Stages, batch: int | None) -> str:
    """Return what the operator's call is given; `batch` as for `model_new`."""
    numbers, rows = numbers_of(graph), rows_of(graph, batch)
    place = next((f"{a.name}.device" for a in graph.arguments if a.is_tensor), "fused_device")
    arguments = []
    for tensor in given_of(graph, stages):
        source = _source_of(graph, tensor)
        if tensor.name in numbers:
            source = f"torch.full((), {tensor.name}, device={place}, dtype=torch.{tensor.dtype})"
        arguments.append(argument_of(graph, stages, tensor, source, batch, rows))
    return ", ".join(arguments)


def call_result(graph: Graph, stages: Stages) -> str:
    """Return what forward returns, of what its call `made`."""
    written = [o.name for o in results_of(stages)]
    results = []
    whole = made_whole(graph, stages)
    for name, given, is_whole in zip(stages.outputs, graph.outputs, whole, strict=True):
        source = f"made[{written.index(name)}]"
        results.append(source if is_whole else result_of(graph, given, source, is_own=True))
    return returned_text(graph.returns, results)


def _source_of(graph: Graph, tensor: Tensor) -> str:
    is_argument = tensor in graph.inputs or tensor in graph.constants
    return tensor.name if is_argument else state_text(tensor.name)


def usual_text(
    graph: Graph,
    reference: str,
    settings: Mapping[str, object],
    has_modes: bool,
    batch: int | None,
    beside: Mapping[str, str],
    *,
    has_calls: bool,
    has_eval: bool = False,
) -> str:
    """Return the reference's text, and `usual_state`: whether a call is like the one captured.

    Args:
        graph: of the module's forward.
        reference: the text of the module's file.
        settings: of `settings_of`, as they were.
        has_modes: whether those name modes.
        batch: as for `model_new`.
        beside: as for `model_new`.
        has_calls: whether it looks at how operands lie in memory.
        has_eval: whether there are kernels for eval mode beside those for training.
    """
    numbers = numbers_of(graph)
    tensors = [t for t in graph.inputs if t.name not in numbers]
    names = [t.name for t in tensors]
    return USUAL_TEXT.format(
        reference=reference.rstrip(),
        inputs=[
            (t.dtype, ["batch", *t.shape[1:]] if has_batch(graph, t, batch) else [*t.shape])
            for t in tensors
        ],
        places={names.index(n): tuple(p) for n, p in picking_inputs(graph).items() if n in names},
        is_number=[not a.is_tensor for a in graph.arguments],
        tuned_rows=batch,
        fewest_rows=graph.fewest_rows,
        most_rows=graph.most_rows,
        state=_forms((*graph.parameters, *graph.buffers)),
        settings=literal_of(settings),
        known="_SETTINGS if module.training else _IN_EVAL" if has_eval else "_SETTINGS",
        names=_names_text(reference),
        default_dtype="get_default_dtype()" if "set_default_dtype" in reference else "float32",
        has_modes=has_modes,
        has_calls=has_calls,
        rows=ROWS_TEXT if batch is not None else "",
        containers=containers_text(graph.containers),
        slots_of=code_of(slots_of),
        setting_of=code_of(setting_of),
        contents_of=code_of(contents_of),
        beside=BESIDE_TEXT.format(beside=dict(beside)) if beside else "_IS_EDITED = False",
        made_from=code_of(made_from),
    )


def _names_text(reference: str) -> str:
    """Return `named_in_code` of a file's text as that of a set."""
    names = named_in_code(reference)
    return "None" if names is None else f"{{*{' '.join(sorted(names))!r}.split()}}"


def state_text(name: str) -> str:
    """Return how a parameter or buffer is reached among those that were just looked at."""
    return f"fused_state[{name!r}]"


def other_mode_text(is_training: bool, names: str, takes_other: str = "Model.forward") -> str:
    """Return what a forward of one mode begins with, so that a call in the other costs nothing.

    Args:
        is_training: the mode that there are kernels for.
        names: of the forward's arguments.
        takes_other: what takes calls in the other mode.
    """
    condition = "not self.training" if is_training else "self.training"
    return f"        if {condition}:\n            return {takes_other}(self, {names})\n"


# How a ModelNew is made of another module, and one of it: in every kind of module's text.
FROM_AND_TO_TEXT = """\
    @classmethod
    def from_module(cls, module):
        # A ModelNew of a live Model's parameters and buffers, which both then share.
        return made_from(cls, module, _STATE, Model)

    def __prepare_scriptable__(self):
        # What torch.jit.script takes: it reads the text of forward, and knows nothing of ours.
        return made_from(Model, self)
"""

_MODULE = """\
{usual}{known}{in_eval}{step}class ModelNew(Model):
    # The reference itself, with its forward in one loop where a call is as usual.
{from_and_to}
    {head}
{asks_first}        fused_state, fused_run = known_call(self, {names})
        fused_step = fused_run is not None and fused_run.is_step
        if fused_state is None:
{asks_rows}            fused_state = usual_state(self, ({names},))
            if fused_state is None:
                return super().forward({names})
            given = ({given},)
            fused_step, fused_run = wants_gradients(given), detached
            if {wants}:
                return super().forward({names})
            remember(self, fused_state, fused_step, {names})
{stepped}        made = fused_run(fused_op, {arguments})
{updates}        return {result}


def setup_context(ctx, inputs, output):
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


def backward(ctx, *grads):
    raise RuntimeError("calls that want gradients take Step or the reference")
"""


# Before all else: what a call asks besides takes longer than PyTorch's own operations may.
_ASKS_STEP = """\
        if not _TAKES_STEPS and torch.is_grad_enabled():
            if wants_gradients(({names},)) or is_trained(self):
                return Model.forward(self, {names})
"""
_STEPPED = """\
        if fused_step:
            given = ({given},)
            held = [fused_run]
{results}            return {result}
"""


def _forms(tensors: Iterable[Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {t.name: (t.dtype, list(t.shape)) for t in tensors}
