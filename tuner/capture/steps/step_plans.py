"""A step of training as tasks: what its calls compute, and why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from tuner.capture.graph.graph import Graph, Ref
from tuner.capture.modules.module_text import given_of
from tuner.capture.nests.index_space import NothingToGenerate, NotOneNest, viewed
from tuner.capture.steps.results_of_steps import why_not_given
from tuner.capture.tasks.half_products import makers_of
from tuner.capture.tasks.partitions import traffic_bytes
from tuner.capture.tasks.stages import Partition, Stages, stages_of
from tuner.capture.tasks.step_records import Backward, Joint, of_weights

__all__ = [
    "BackwardPlan", "StepPlan", "cut", "needed_by", "numbers_text", "planned", "why_not_planned",
]  # fmt: skip

NOTHING = "its gradients are nothing but calls of PyTorch's own operations"


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The gradients of one result as tasks; None where they take no kernel.

    So where they are what comes in, views of that, or single numbers (`numbers_text`).
    `of_weights` is the same for a step whose inputs want no gradient, where that spares a call of
    PyTorch's own operation.
    """

    of: Backward
    stages: Stages | None
    of_weights: BackwardPlan | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A joint record as tasks; `forward` is None where nothing is kept beside forward's own."""

    joint: Joint
    forward: Stages | None
    backwards: tuple[BackwardPlan, ...]

    @property
    def calls(self) -> list[tuple[str, BackwardPlan]]:
        """The calls of the backwards, by the name of each, in order."""
        found: list[tuple[str, BackwardPlan]] = []
        for number, each in enumerate(b for b in self.backwards if b.stages is not None):
            end = f"_{number}" if number else ""
            found.append((f"gradients{end}", each))
            if each.of_weights is not None:
                found.append((f"weight_gradients{end}", each.of_weights))
        return found


def planned(joint: Joint | None, *, is_permuted_apart: bool = False) -> StepPlan | None:
    """Return a step as tasks; None where no loops can be generated for it.

    Args:
        joint: the record of a step, where there is one.
        is_permuted_apart: whether what it permutes is copied, as in a `Partition`.
    """
    found = None if joint is None else _planned(joint, is_permuted_apart)
    return None if isinstance(found, str) else found


def why_not_planned(joint: Joint | None) -> str:
    """Return why no loops are generated for a step that was recorded; "" where they are."""
    found = None if joint is None else _planned(joint, is_permuted_apart=False)
    return found if isinstance(found, str) else ""


def _planned(joint: Joint, is_permuted_apart: bool) -> StepPlan | str:
    arguments = {a.name for a in joint.forward.arguments}
    if taken := arguments & {"ctx", "module", "made", "grad", "held"}:  # names of the text below
        return f"an argument of forward is called {min(taken)}, as generated text calls its own"
    if why := why_not_given(joint):
        return why
    try:
        # What a view of a result is of is made once, where forward alone makes each of the two.
        is_own = len(joint.forward.outputs) == joint.num_made == joint.num_results
        forward = None if is_own and not joint.views else cut(joint.forward, is_permuted_apart)
        backwards = tuple(
            _backward(each, is_permuted_apart, may_be_calls=True) for each in joint.backwards
        )
    except NotOneNest as error:
        what = str(error).partition("\n")[0]
        return f"no kernels are generated for its gradients yet: {what}"
    except NothingToGenerate:
        return NOTHING
    found = [(each.of.graph, each.stages) for each in backwards if each.stages is not None]
    parts = [*([forward] if forward else []), *(stages for _, stages in found)]
    nests = [nest for stages in parts for nest in stages.nests]
    if len({nest.is_wide for nest in nests}) > 1:
        return "some of its gradients are computed in float64 and some are not"
    makers = [maker for graph, own in found for maker in makers_of(graph, own.calls).values()]
    is_ours = any(own.nests for _, own in found) or any(made.takes_steps for made in makers)
    if not is_ours:
        return NOTHING
    return StepPlan(joint, forward, backwards)


def _backward(
    backward: Backward, is_permuted_apart: bool, *, may_be_calls: bool = False
) -> BackwardPlan:
    graph = backward.graph
    if numbers_text(graph, {}) is not None:
        return BackwardPlan(backward, None)
    # What is a view of what comes in no task makes.
    made = (name for name in graph.outputs if viewed(graph, name).name != backward.incoming)
    backward = replace(backward, graph=replace(graph, outputs=tuple(made)))
    if not backward.graph.outputs:
        return BackwardPlan(backward, None)
    # Of several results one may have gradients that are calls alone.
    stages = cut(backward.graph, is_permuted_apart, may_be_calls=may_be_calls)
    fewer = of_weights(backward) if stages.calls else None
    with suppress(NotOneNest, NothingToGenerate):
        own = None if fewer is None else _backward(fewer, is_permuted_apart)
        return BackwardPlan(backward, stages, own)
    return BackwardPlan(backward, stages)


def cut(graph: Graph, is_permuted_apart: bool, *, may_be_calls: bool = False) -> Stages:
    """Return the tasks of a graph that no search cuts: of three cuts what moves fewest bytes.

    Pointwise work before pooling, or that several nests read, is computed in each of them where
    that stores less; parts of tensors are read where they lie where that is.
    """
    found = stages_of(graph, may_be_calls=may_be_calls)
    in_place = Partition(is_in_place=True, is_permuted_apart=is_permuted_apart)
    for partition in (Partition(is_recomputed=True), in_place):
        with suppress(NotOneNest):
            other = stages_of(graph, partition, may_be_calls=may_be_calls)
            found = min(found, other, key=lambda stages: traffic_bytes(graph, stages))
    return found


def needed_by(plan: BackwardPlan, joint: Joint) -> list[str]:
    """Return what the call of a backward is given besides gradients, by name."""
    graph = plan.of.graph
    if plan.stages is None:
        own = {node.name for node in graph.nodes}
        names = [name for node in graph.nodes for name in node.refs if name not in own]
    else:
        names = [t.name for t in given_of(graph, plan.stages)]
    coming = {each.incoming for each in joint.backwards}
    return [name for name in dict.fromkeys(names) if name not in coming]


# Gradients of a sum of losses by each, say, are a few numbers, for which kernels are not worth it.
_OF_NUMBERS = {
    "mul": "({} * {})",
    "product": "({} * {})",
    "add": "({} + {})",
    "sub": "({} - {})",
    "div": "({} / {})",
    "neg": "(-{})",
}


def numbers_text(graph: Graph, names: Mapping[str, str]) -> dict[str, str] | None:
    """Return the text of each node of a graph of single numbers; None where it has others.

    Args:
        graph: the graph.
        names: what is given is called; by default as in the graph.
    """
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.shape or node.op not in _OF_NUMBERS or "float" not in node.dtype:
            return None
        texts = []
        for arg in node.args:
            if isinstance(arg, Ref):
                texts.append(found.get(arg.name) or names.get(arg.name, arg.name))
            elif isinstance(arg, int | float):
                texts.append(repr(arg))
            else:
                return None
        found[node.name] = _OF_NUMBERS[node.op].format(*texts)
    return found
