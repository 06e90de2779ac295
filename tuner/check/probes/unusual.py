"""What is asked of unusual calls: odd values, views, types and settings."""

from __future__ import annotations

from typing import Any

from tuner.check.calls.crossing import Layout
from tuner.check.probes.asker import Asker
from tuner.check.probes.probe import ILLEGAL, Probe

__all__ = ["unusual_probes"]

MOST_EDGES = 3  # inputs that have zeros and ones, one after the other
NUM_THREADS = 6  # more than the workspaces that a module may take in turn
# Of those that are no question of strides.
LAYOUT_TELLS: dict[Layout, str] = {"mixed": "types", "shared": "shared", "negated": "negated"}


def unusual_probes(ask: Asker) -> list[Probe]:
    """Return what a module meets seldom.

    On a GPU no index is asked that it would refuse: it would refuse all that follows.
    """

    def view(layout: Layout, **fields: Any) -> Probe:
        settings = {"distribution": "normal", "layout": layout, "is_extra": True, **fields}
        return ask.probe(f"{layout} input", LAYOUT_TELLS.get(layout, "layout"), **settings)

    return [
        # In eval mode: the square of such a number is in range in float64 alone.
        ask.probe(
            "values near the largest", "range", distribution="extreme", mode="eval",
            mild=ask.modes.both,
        ),
        ask.probe("rows of few values, eval", "special", distribution="filled", mode="eval"),
        ask.probe(
            "masked rows", "poison", distribution="masked", mild=ask.modes.both,
            **ask.modes.in_turn,
        ),
        ask.probe(
            "a row of -Inf", "poison", distribution="negative_inf_row", mild=ask.modes.both,
            **ask.modes.in_turn,
        ),
        ask.probe(
            "NaN in a weight", "poison", distribution="few_values", weights="nan", mode="eval",
            calls=2, inputs="repeated", before=((), (ask.modes.training,)),
        ),
        ask.probe(
            "rows exchanged, eval", "content", calls=2, inputs="exchanged", mode="eval",
            distribution="dyadic",
        ),
        *(
            ask.probe(
                f"zeros and ones in input {at}", "special", distribution="edges", layout_at=at,
                **ask.modes.in_turn,
            )
            for at in range(min(ask.traits.num_tensors, MOST_EDGES) * ask.traits.has_numbers)
        ),
        ask.probe("large integers", "special", distribution="large_integers", **ask.modes.in_turn),
        *(
            ask.probe(kind.replace("_", " "), "refused", distribution=kind, mode="eval")
            for kind in (() if ask.extent.device == "gpu" else ILLEGAL)
        ),
        *(
            ask.probe(
                f"{which} arguments", "arguments", other_arguments=kind, weights="initial",
                is_extra=True, **ask.modes.in_turn,
            )
            for which, kind in (
                ("other", "others"), ("zero", "zeros"),
                *((kind, kind) for kind in ("negative", "large") if ask.traits.takes_numbers),
            )
        ),
        ask.probe("after a refused call", "refused call", calls=2, before=((), ("refused call",))),
        ask.graded("mode changed before", "edited before", edits="mode"),
        ask.graded("called on fewer rows before", "history", edits="rows"),
        ask.graded("served in inference mode before", "inference", before=(("infer",),)),
        *(
            ask.probe(
                "threads, eval", "threads", mode="eval", calls=NUM_THREADS, at_once="one module",
                gradients="plain_inputs", backward=tuple(range(NUM_THREADS)),
            )
            for _ in range(not ask.traits.updates_in_eval)
        ),
        ask.probe(
            "arguments by keyword", "keywords", by_keyword=True, is_extra=True,
            **ask.modes.in_turn,
        ),
        ask.probe(
            "emptied and loaded", "empty", calls=2, inputs="repeated", before=((), ("empty",)),
            mode="eval", is_extra=True,
        ),
        ask.graded(
            "two modules in two threads", "threads", calls=2, at_once="two modules",
            backward=(0, 1),
        ),
        ask.probe("another module before", "another", has_predecessor=True, **ask.modes.in_turn),
        ask.probe(
            "saved and read elsewhere", "pickled", calls=3, mode="eval", has_options="numbers",
            before=((), ("read elsewhere",), (ask.modes.training,)), is_extra=True,
        ),
        *(
            ask.probe(
                f"forward derivatives, {mode}", "forward mode", distribution="normal", mode=mode,
                gradients="forward", may_refuse=True,
            )
            for mode in ("train", "eval")
        ),
        # Rows that are all alike have a variance of rounding errors alone in training mode.
        view("rows expanded", mode="eval"),
        view("overlapping", **ask.modes.in_turn),
        view("negated", **ask.modes.in_turn),
        view("shared", **ask.modes.in_turn),
        view("mixed", mode="eval"),
        *(
            ask.probe(
                f"default dtype {dtype}", "default dtype", default_dtype=dtype, is_extra=True,
                **ask.modes.in_turn,
            )
            for dtype in ("float64", "bfloat16")
        ),
        ask.probe(
            "a submodule wrapped", "wrapped", calls=4, before=((), *(("wrap module",),) * 3),
            first_place=ask.secret.randrange(64), mode="eval", is_extra=True, may_differ=True,
        ),
        ask.probe(
            "a weight parametrised", "wrapped", calls=2, before=((), ("parametrize",)),
            first_place=ask.secret.randrange(64), mode="eval", is_extra=True,
        ),
    ]  # fmt: skip
