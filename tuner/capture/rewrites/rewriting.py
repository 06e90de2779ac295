"""Exact rewrites of a captured graph, by name: the same in real numbers, and less to compute.

None looks at the values of inputs or weights: only at operations, shapes, modes and numbers that
the file writes. What is Inf or NaN stays so. Steps of training are recorded by themselves, and
keep what the module says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tuner.capture.graph.graph import Graph, Rewrite
from tuner.capture.rewrites.cancelling import shift_cancelled
from tuner.capture.rewrites.collapsing import sum_of_linear
from tuner.capture.rewrites.edits import Edit
from tuner.capture.rewrites.merging import (
    bounds_merged,
    factors_merged,
    logsumexp_of_one,
    terms_merged,
    without_effect_dropped,
)

__all__ = ["RULES", "Rule", "rewritten"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of step: what it needs, and why the result is the same.

    `apply` takes it once, and returns the line of the file and a sentence; where it does not fit
    it changes nothing, and returns None. `collapses` as for a `Rewrite`.
    """

    apply: Callable[[Edit], tuple[int, str] | None]
    needs: str
    why: str
    collapses: bool = False


RULES: Mapping[str, Rule] = {
    "step-without-effect": Rule(
        without_effect_dropped,
        "x * 1, x / 1, x - 0, or bounds that x has already, by the steps before it",
        "the step returns x for every float, NaN included",
    ),
    "logsumexp-of-one": Rule(
        logsumexp_of_one,
        "a logsumexp over a dimension of size 1",
        "log(exp(x)) is x, as PyTorch computes it for Inf and NaN as well",
    ),
    "bounds-merged": Rule(
        bounds_merged,
        "a clamp, relu, maximum or minimum with numbers, of nothing but another one",
        "both are monotonic, and NaN stays NaN",
    ),
    "factors-merged": Rule(
        factors_merged,
        "numbers that scale one after the other, both at least 1 or both at most 1 in magnitude, "
        "whose product is a normal number",
        "multiplication is associative; nothing overflows or vanishes in between alone",
    ),
    "terms-merged": Rule(
        terms_merged,
        "numbers of one sign added one after the other, whose sum is exact in the dtype",
        "addition is associative; nothing overflows in between alone",
    ),
    "shift-cancelled": Rule(
        shift_cancelled,
        "a value that is needed for nothing but its mean, its variance and the difference from "
        "its mean, and in it something added that does not vary along the mean's dimensions, "
        "computed of what is given, such as the bias of a Linear before BatchNorm in training; "
        "scaled by numbers behind it, and by tensors where the mean itself is not kept",
        "u + c - mean(u + c) = u - mean(u), var(u + c) = var(u); the mean has c added back, and "
        "c - c, which is NaN where c is Inf or NaN, is added to mean and variance",
    ),
    "sum-of-linear": Rule(
        sum_of_linear,
        "a sum or mean over the outputs of a Linear, or of a product with a matrix, with nothing "
        "but additions and numbers that scale in between",
        "sums may be taken in another order; infinite x by the signs of the weights",
        collapses=True,
    ),
}


def rewritten(graph: Graph) -> Graph:
    """Return the graph after every step that fits; its `rewrites` list them in their order."""
    edit, before = Edit(graph), -1
    while before < len(graph.rewrites):
        before = len(graph.rewrites)
        for name, rule in RULES.items():
            while (found := rule.apply(edit)) is not None:
                step = Rewrite(name, *found, rule.collapses)
                graph = replace(edit.done(), rewrites=(*graph.rewrites, step))
                edit = Edit(graph)
    return graph
