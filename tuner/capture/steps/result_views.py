"""Results that are another one, seen in another way: the last of all states, heads put in order.

No autograd function gives these. What a call returns in their place is a view that PyTorch's own
operations make of the other result, so that edits in place, hooks and gradients of gradients go
through it as they do in eager; what eager copies there is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tuner.capture.graph.autograd_leaves import Origins
from tuner.capture.graph.graph import Node, Ref
from tuner.capture.modules.module_text import view_of
from tuner.capture.nests.index_space import ALIASES
from tuner.capture.tasks.step_records import ResultView

__all__ = ["made_as", "result_views", "view_text", "way_to"]


def result_views(
    nodes: Sequence[Node], results: Sequence[str], origins: Sequence[Origins]
) -> dict[int, ResultView]:
    """Return which results are views of another one, or copies of such, by their places.

    Args:
        nodes: of the record of a step.
        results: of forward, by name.
        origins: of each of these.
    """
    by_name = {node.name: node for node in nodes}
    found = {}
    for place, origin in enumerate(origins):
        if origin.leaves or len(origin.results) != 1 or not origin.is_moved:
            continue
        (of,) = origin.results
        steps = _steps_between(by_name, results[of], results[place])
        if steps:
            found[place] = ResultView(of, steps, is_copy=not origin.is_view)
    return found


def made_as(place: int, views: Mapping[int, ResultView]) -> int:
    """Return which result a step makes for one, by places: that, or what it is a view of."""
    while place in views:
        place = views[place].of
    return place


def view_text(view: ResultView) -> str:
    """Return the text of a result that is another one, seen in another way."""
    *before, last = view.steps
    made = f"result_{view.of}" + "".join(map(view_of, before))
    if not view.is_copy:
        return made + view_of(last)
    copy = ".clone(memory_format=torch.contiguous_format)"
    if last.op != "view":
        return made + view_of(last) + copy
    # As PyTorch's own `reshape` does where it copies: the result is a view of nothing.
    return f"torch.ops.aten._unsafe_view.default({made}{copy}, {tuple(last.shape)})"


def _steps_between(by_name: Mapping[str, Node], source: str, name: str) -> tuple[Node, ...]:
    """Return the views that lead from one value to another; none where that takes other work."""
    ways = [way_to(by_name, value) for value in (source, name)]
    (start, back), (end, steps) = ways
    if start != end:
        return ()
    meeting = start
    while back and steps and back[0].name == steps[0].name:
        meeting = back.pop(0).name
        del steps[0]
    if back:
        # What lies in the same order may be seen as what both are views of.
        if meeting not in by_name or any(node.op != "view" for node in back):
            return ()
        steps = [replace(by_name[meeting], op="view", args=(Ref(source),), attrs={}), *steps]
    behind = [*steps[1:], None]
    return tuple(
        step
        for step, following in zip(steps, behind, strict=True)
        if step.op != "view" or following is None or following.op != "view"
    )


def way_to(by_name: Mapping[str, Node], name: str) -> tuple[str, list[Node]]:
    """Return of what a value is a view, and the views that lead to it, in order."""
    way: list[Node] = []
    while (node := by_name.get(name)) is not None and node.op in ALIASES:
        way.insert(0, node)
        name = node.refs[0]
    return name, way
