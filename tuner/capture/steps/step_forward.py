"""The text of a step's forward: the results, and what is kept for their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.capture.graph.graph import Graph, live
from tuner.capture.modules.module_text import (
    argument_of,
    given_in_step,
    given_of,
    made_whole,
    result_of,
    results_of,
    rows_of,
    updated_by,
    view_of,
)
from tuner.capture.steps.results_of_steps import whole_in_step
from tuner.capture.steps.step_plans import StepPlan, needed_by
from tuner.capture.tasks.stages import Stages

__all__ = ["StepValues", "arguments_text", "forward_text", "made_by", "values_of_step"]


@dataclass(frozen=True, slots=True)
class StepValues:
    """What a step computes with, and what its text calls each value.

    Attributes:
        graph: of the module's forward.
        plan: of the step.
        forward: what is called for its results: `graph`, or with what is kept as well.
        stages: the tasks of that.
        given: the text of what the step is given, by name.
        kept: the text of what may be kept for a backward, by name.
        needed: of each backward, the names of what it reads of both.
    """

    graph: Graph
    plan: StepPlan
    forward: Graph
    stages: Stages
    given: Mapping[str, str]
    kept: Mapping[str, str]
    needed: Sequence[Sequence[str]]

    @property
    def reads(self) -> list[list[str]]:
        """Of each backward, the texts of what it reads."""
        texts = {**self.given, **self.kept}
        return [[texts[name] for name in names] for names in self.needed]

    @property
    def saved(self) -> list[str]:
        """The texts of what any backward reads, once each."""
        return [*dict.fromkeys(text for texts in self.reads for text in texts)]

    @property
    def made(self) -> dict[str, str]:
        """The text of each output of `forward`, as its call made it."""
        return made_by(self.forward, self.stages)

    @property
    def whole(self) -> list[bool]:
        """Of each output of `forward` whether the step makes it in its own shape."""
        return whole_in_step(self.plan.joint, self.forward, self.stages)

    @property
    def arguments(self) -> str:
        """What the text's functions are given, with commas between."""
        return ", ".join(self.given.values())


def values_of_step(graph: Graph, own: Stages, plan: StepPlan) -> StepValues:
    """Return what a step computes with; `own` are the tasks of `graph`, the module's forward."""
    joint = plan.joint
    forward, stages = (graph, own) if plan.forward is None else (joint.forward, plan.forward)
    given = {t.name: t.name for t in graph.inputs}
    state = given_in_step(graph)[len(graph.inputs) :]
    given |= {t.name: f"state_{i}" for i, t in enumerate(state)}
    names = enumerate(joint.forward.outputs)
    kept = {name: f"result_{i}" for i, name in names if i not in joint.views}
    kept |= {name: f"copy_{i}" for i, name in enumerate(joint.copies)}
    needed = [needed_by(each, joint) for each in plan.backwards]
    return StepValues(graph, plan, forward, stages, given, kept, needed)


def made_by(graph: Graph, stages: Stages) -> dict[str, str]:
    """Return where each output of a graph is among what its call made."""
    written = [o.name for o in results_of(stages)]
    return {
        name: f"made[{written.index(real)}]"
        for name, real in zip(graph.outputs, stages.outputs, strict=True)
    }


def arguments_text(
    graph: Graph, asked: Graph, stages: Stages, known: Mapping[str, str], batch: int | None
) -> str:
    """Return what a call of a step is given.

    Args:
        graph: of the module's forward.
        asked: what is called.
        stages: the tasks of that.
        known: the text of each value, by name.
        batch: as for `model_new`, of the call.
    """
    rows = rows_of(graph, batch)
    more = ".contiguous()" if stages.calls else ""
    return ", ".join(
        argument_of(asked, stages, t, known[t.name] + more, batch, rows)
        for t in given_of(asked, stages)
    )


def forward_text(values: StepValues, batch: int | None) -> str:
    """Return the text of `made_in_step`; `batch` as for `model_new`, of its call."""
    graph, forward, given = values.graph, values.forward, values.given
    before = _state_before(values)
    reshaped, returned = _returned(values)
    lines = [
        *_state_updates(values),
        *reshaped,
        *_kept_results(values, returned),
        *_kept_copies(values),
        *(f"{given[b]} = {given[b]}_before" for b in before),
    ]
    return _MADE_IN_STEP.format(
        names=values.arguments,
        before="".join(f"    {given[b]}_before = {given[b]}.clone()\n" for b in before),
        call="fused_op" if values.plan.forward is None else "fused_kept",
        arguments=arguments_text(graph, forward, values.stages, given, batch),
        lines="".join(f"    {line}\n" for line in lines),
        returned=", ".join(returned),
        kept="".join(f"{name}, " for name in values.saved).rstrip(),
    )


def _state_before(values: StepValues) -> list[str]:
    """Return the buffers that a call updates and whose value before it a backward may need.

    Gradients by the reference start from it, where the call's results depend on it.
    """
    graph = values.graph
    behind = live(graph.nodes, {*graph.outputs})
    used = {*graph.outputs, *(name for node in behind for name in node.refs)}
    used |= {name for names in values.needed for name in names}
    return [t.name for t in graph.buffers if t.name in graph.buffer_updates and t.name in used]


def _state_updates(values: StepValues) -> Iterator[str]:
    """Write new values of buffers."""
    stages, given = values.stages, values.given
    for buffer, number in stages.counters.items():
        yield f"{given[buffer]}.add_({number})"
    written = [o.name for o in results_of(stages)]
    for buffer, name in stages.updates.items():
        made, held = values.forward.value(name).shape, values.graph.value(buffer).shape
        value = updated_by(made, f"made[{written.index(name)}]", held, given[buffer])
        unmarked = ".data" * (buffer in values.graph.unmarked)  # as PyTorch's own call leaves it
        yield f"{given[buffer]}{unmarked}.copy_({value})"


def _returned(values: StepValues) -> tuple[list[str], list[str]]:
    """Return the lines that give results their own shape, and the text of each result then."""
    forward, made, whole = values.forward, values.made, values.whole
    is_made = made_whole(forward, values.stages)
    lines, texts = [], []
    for i, name in enumerate(forward.outputs[: values.plan.joint.num_made]):
        if i in values.plan.joint.views:
            texts.append("None")  # made behind the step
            continue
        text = made[name]
        if whole[i] and not is_made[i]:
            lines.append(f"whole_{i} = {result_of(forward, name, text, is_own=True)}")
            text = f"whole_{i}"
        texts.append(text)
    return lines, texts


def _kept_results(values: StepValues, returned: Sequence[str]) -> Iterator[str]:
    """Name the results that a backward reads, those that are not returned among them."""
    forward, made, whole, saved = values.forward, values.made, values.whole, values.saved
    pairs = zip(forward.outputs, returned, strict=False)
    of_made = {made[name]: text for name, text in pairs if text != "None"}
    for i, name in enumerate(forward.outputs):
        if f"result_{i}" not in saved:
            continue
        source = made[name]
        is_whole = whole[i]
        if source in of_made:
            # A view of what is returned would hold its step, which holds the view: for ever.
            is_whole = is_whole and i < len(returned)
            source = f"{of_made[source]}.detach()"
        yield f"result_{i} = {source if is_whole else result_of(forward, name, source)}"


def _kept_copies(values: StepValues) -> Iterator[str]:
    """Copy what is given and a backward reads in another order or dtype."""
    for name, steps in values.plan.joint.copies.items():
        if values.kept[name] in values.saved:
            source = values.given[steps[0].refs[0]] + "".join(map(view_of, steps))
            yield f"{values.kept[name]} = {source}.clone(memory_format=torch.contiguous_format)"


_MADE_IN_STEP = """\
def made_in_step(fused_run, {names}):
    # The results of a step, and what is kept for their gradients.
{before}    made = fused_run({call}, {arguments})
{lines}    return ({returned},), ({kept}), ({names},)


"""
