"""The calls of a derived operator, and what their texts call each value."""

from __future__ import annotations

import keyword
import re
from collections.abc import Container, Mapping

from tuner.capture.graph.graph import Graph
from tuner.capture.nests.own_parameters import NAMES, SECOND
from tuner.capture.steps.step_plans import StepPlan
from tuner.capture.tasks.stages import Stages
from tuner.capture.writers.templates import IN_EVAL, Part
from tuner.capture.writers.triton_loops import RESERVED
from tuner.space.reserved import refusal_of

__all__ = ["VARIED", "identifier", "names_of", "parts_of"]

# What a search varies, of the values that heads list. Not whether pointwise work behind a product
# has a kernel of its own: that stores and reads the product once more, and has so many blocks to
# choose from that a short search hardly tried another.
VARIED = (
    *("unroll", "stream_output", "huge_pages", "keep", "num_warps", "stages", "piece", "split"),
    *("tile_rows", "tile_columns", "block_rows", "block_columns"),
    *("chunk", "product_n", "product_k", "product_cluster"),
    *("image_pixels", "image_channels", "image_depth", "image_warps", "image_stages"),
    *("plane_pixels", "plane_warps"),
    *("image_consumers", "image_groups", "image_part", "image_blocks"),
    *("cluster_blocks", "cluster_threads", "cluster_chunk"),
    *(name + SECOND for name in NAMES),
)
# Parameters of templates that a search leaves as they are.
_FIXED = (
    "max_threads", "product_epilogue", "product_raster", "product_weight", "programs", "width",
)  # fmt: skip
_RESERVED = {
    *VARIED, *_FIXED,
    "i", "j", "k", "n", "s", "c", "t", "u", "w", "rows", "cols", "float", "double", "int", "step",
    "team", "tile", "tiles", "lanes", "first", "last", "from", "to", "begin", "end", "column",
    "batch", "chunk", *RESERVED,
}  # fmt: skip


def parts_of(
    graph: Graph, own: Stages, plan: StepPlan | None, in_eval: tuple[Graph, Stages] | None
) -> list[Part]:
    """Return the operator's calls; what the extra ones compute has names of its own.

    Args:
        graph: of the module's forward.
        own: its tasks.
        plan: of a step of training, where it has one.
        in_eval: the forward in eval mode and its tasks, where it has kernels of its own.
    """
    parts = [Part("", graph, own, names_of(own))]
    given = {t.name for t in graph.given}
    if in_eval is not None:
        names = names_of(in_eval[1], given, f"_{IN_EVAL}")
        parts.append(Part(IN_EVAL, *in_eval, names))
    if plan is not None:
        if plan.forward is not None:
            names = names_of(plan.forward, given, "_kept")
            parts.append(Part("kept", plan.joint.forward, plan.forward, names))
        for name, backward in plan.calls:
            assert backward.stages is not None
            names = names_of(backward.stages, given, f"_{name}")
            parts.append(Part(name, backward.of.graph, backward.stages, names))
    return parts


def identifier(name: str) -> str:
    """Return a name in lower case that Python and C++ take."""
    found = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "module"
    return f"m_{found}" if found[0].isdigit() or keyword.iskeyword(found) else found


def names_of(
    stages: Stages,
    given: Container[str] = (),
    more: str = "",
    known: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return a name of every value for the texts: short, and no two alike.

    Those that are not `given` end in `more`; those that are `known` keep theirs.
    """
    values = []
    for nest in stages.nests:
        values += [*nest.read, *nest.taps, *nest.indices]
        for each in nest.passes:
            values += [s.name for s in (*each.statements, *each.after)]
            values += [r.name for r in each.reductions]
        values += [s.name for s in nest.before]
    for call in stages.calls:
        values += [*call.reads, call.name]
    names = dict(known or {})
    for value in [value for value in dict.fromkeys(values) if value not in names]:
        base = identifier(value)
        if base in _RESERVED or refusal_of(base, {}):
            base += "_v"
        base += "" if value in given else more
        names[value] = base if base not in names.values() else f"{base}_{len(names)}"
    return names
