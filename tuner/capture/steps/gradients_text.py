"""What the backward of a derived module's step returns: no two gradients in one memory.

PyTorch adds gradients up in the first that it gets, unless something else has that, too. So what
lies in one memory is returned as one tensor, or copied; and what comes in, which others may have,
goes on as it is, or in a copy: PyTorch does not see that the memory of a view is another's, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tuner.capture.modules.module_text import result_of, view_of
from tuner.capture.nests.index_space import viewed
from tuner.capture.steps.result_views import way_to
from tuner.capture.steps.step_plans import BackwardPlan

__all__ = ["gradients_text"]


def gradients_text(
    each: BackwardPlan,
    first: int,
    leaves: Sequence[str],
    coming: str,
    made: Mapping[str, str],
    done: Collection[str],
    is_whole: bool,
) -> tuple[list[str], list[str]]:
    """Return lines, and behind them what a backward returns for each leaf and each source.

    Args:
        each: of which backward.
        first: the place of what is asked for the first of these.
        leaves: what the module is given, by name.
        coming: the text of what comes in.
        made: the texts of what kernels have made, by name.
        done: which of it has its own shape.
        is_whole: whether what comes in has that.
    """
    graph, incoming = each.of.graph, each.of.incoming
    nodes = {node.name: node for node in graph.nodes}
    found = [each.of.gradient_of.get(name) for name in leaves] + [*each.of.of_sources]
    names = [name for name in found if name]
    comes = {name for name in names if viewed(graph, name).name == incoming}
    sources = {name: coming if name in comes else made[name] for name in names}
    texts = dict[str, str]()
    for name, source in sources.items():
        is_coming = name in comes
        if is_coming and is_whole and graph.value(name).shape == graph.value(incoming).shape:
            texts[name] = "grad"
        elif is_coming:
            texts[name] = f"{source}{''.join(map(view_of, way_to(nodes, name)[1]))}.clone()"
        else:
            is_done = name in done
            texts[name] = source if is_done else result_of(graph, name, source, is_own=True)
    lines = list[str]()
    for number, text in enumerate(dict.fromkeys(texts.values())):
        own = [name for name in names if texts[name] == text]
        ahead = {sources[name] for name in names[: names.index(own[0])]} - {coming}
        here = f"{text}.clone()" if sources[own[0]] in ahead else text
        if len(own) > 1 and text != "grad":
            lines.append(f"same_{number} = {here}")
            here = f"same_{number}"
        texts |= dict.fromkeys(own, here)
    returned = [
        f"{texts[name]} if ctx.needs_input_grad[{i}] else None" if name else "None"
        for i, name in enumerate(found, first)
    ]
    return lines, returned
