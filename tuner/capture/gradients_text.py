"""What the backward of a derived module's step returns: no two gradients in one memory.

PyTorch adds gradients up in the first that it gets, unless something else has that, too. So what
lies in one memory is returned as one tensor, or copied; and what comes in, which others may have,
goes on as it is, or is copied for a leaf.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest

from tuner.capture.index_space import viewed
from tuner.capture.module_text import result_of
from tuner.capture.step_plans import BackwardPlan

__all__ = ["COPIED", "gradients_text"]

COPIED = """\
def copied_for(x, gradient):
    # For what is no leaf PyTorch keeps what comes in as it is.
    return gradient.clone() if x.is_leaf else gradient


"""


def gradients_text(
    each: BackwardPlan,
    first: int,
    leaves: Sequence[str],
    values: Mapping[str, str],
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
        values: what these are called.
        coming: the text of what comes in.
        made: the texts of what kernels have made, by name.
        done: which of it has its own shape.
        is_whole: whether what comes in has that.
    """
    graph, incoming = each.of.graph, each.of.incoming
    found = [each.of.gradient_of.get(name) for name in leaves] + [*each.of.of_sources]
    names = [name for name in found if name]
    comes = {name for name in names if viewed(graph, name).name == incoming}
    sources = {name: coming if name in comes else made[name] for name in names}
    texts = dict[str, str]()
    for name, source in sources.items():
        is_same = is_whole and graph.value(name).shape == graph.value(incoming).shape
        if name in comes and is_same:
            texts[name] = "grad"
        elif name in done:
            texts[name] = source
        else:
            texts[name] = result_of(graph, name, source, is_own=name not in comes)
    lines = list[str]()
    for number, text in enumerate(dict.fromkeys(texts.values())):
        own = [name for name in names if texts[name] == text]
        ahead = {sources[name] for name in names[: names.index(own[0])]} - {coming}
        here = f"{text}.clone()" if sources[own[0]] in ahead else text
        if len(own) > 1 and text != "grad":
            lines.append(f"same_{number} = {here}")
            here = f"same_{number}"
        texts |= dict.fromkeys(own, here)
    returned = list[str]()
    for i, (leaf, wanted) in enumerate(zip_longest(leaves, found), first):
        if not wanted:
            returned.append("None")
            continue
        text = texts[wanted]
        if leaf and wanted in comes and text != "grad":
            text = f"copied_for({values[leaf]}, {text})"
        returned.append(f"{text} if ctx.needs_input_grad[{i}] else None")
    return lines, returned
