"""What is asked of unusual calls: odd values, views, types and settings."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tuner.check.crossing import Layout
from tuner.check.probe import ILLEGAL, Modes, Probe
from tuner.check.tells import TELLS

__all__ = ["unusual_probes"]

NUM_THREADS = 6  # more than the workspaces that a module may take in turn
# Of those that are no question of strides.
LAYOUT_TELLS: dict[Layout, str] = {"mixed": "types", "shared": "shared", "negated": "negated"}


def unusual_probes(
    reduced: Callable[..., Probe], modes: Modes, secret: random.Random, has_cuda: bool
) -> list[Probe]:
    """Return what a module meets seldom; `reduced` makes a probe on few rows.

    With `has_cuda` no index is asked that a device would refuse: it would refuse all that follows.
    """

    def probe(name: str, tells: str, **fields: Any) -> Probe:
        return reduced(name, tells=TELLS[tells], **fields)

    def view(layout: Layout, **fields: Any) -> Probe:
        settings = {"distribution": "normal", "layout": layout, "is_extra": True, **fields}
        return probe(f"{layout} input", LAYOUT_TELLS.get(layout, "layout"), **settings)

    return [
        # In eval mode: the square of such a number is in range in float64 alone.
        probe(
            "values near the largest", "range", distribution="extreme", mode="eval",
            mild=modes.both,
        ),
        probe("rows of few values, eval", "special", distribution="filled", mode="eval"),
        probe("masked rows", "poison", distribution="masked", mild=modes.both, **modes.in_turn),
        probe(
            "a row of -Inf", "poison", distribution="negative_inf_row", mild=modes.both,
            **modes.in_turn,
        ),
        probe(
            "NaN in a weight", "poison", distribution="few_values", weights="nan", mode="eval",
            calls=2, inputs="repeated", before=((), (modes.training,)),
        ),
        probe(
            "rows exchanged, eval", "content", calls=2, inputs="exchanged", mode="eval",
            distribution="dyadic",
        ),
        probe("large integers", "special", distribution="large_integers", **modes.in_turn),
        *(
            probe(kind.replace("_", " "), "refused", distribution=kind, mode="eval")
            for kind in (() if has_cuda else ILLEGAL)
        ),
        *(
            probe(
                f"{which} arguments", "arguments", other_arguments=kind, weights="initial",
                is_extra=True, **modes.in_turn,
            )
            for which, kind in (("other", "others"), ("zero", "zeros"))
        ),
        probe("after a refused call", "refused call", calls=2, before=((), ("refused call",))),
        probe(
            "mode changed before", "edited before", distribution="normal", gradients="all",
            edits="mode",
        ),
        probe(
            "called on fewer rows before", "history", distribution="normal", gradients="all",
            edits="rows",
        ),
        probe(
            "served in inference mode before", "inference", distribution="normal",
            gradients="all", before=(("infer",),),
        ),
        probe(
            "threads, eval", "threads", mode="eval", calls=NUM_THREADS, at_once="one module",
            gradients="plain_inputs", backward=tuple(range(NUM_THREADS)),
        ),
        probe("arguments by keyword", "keywords", by_keyword=True, is_extra=True, **modes.in_turn),
        probe(
            "emptied and loaded", "empty", calls=2, inputs="repeated", before=((), ("empty",)),
            mode="eval", is_extra=True,
        ),
        probe(
            "two modules in two threads", "threads", calls=2, at_once="two modules",
            distribution="normal", gradients="all", backward=(0, 1),
        ),
        probe("another module before", "another", has_predecessor=True, **modes.in_turn),
        probe(
            "saved and read elsewhere", "pickled", calls=3, mode="eval", has_options="numbers",
            before=((), ("read elsewhere",), (modes.training,)), is_extra=True,
        ),
        *(
            probe(
                f"forward derivatives, {mode}", "forward mode", distribution="normal", mode=mode,
                gradients="forward", may_refuse=True,
            )
            for mode in ("train", "eval")
        ),
        # Rows that are all alike have a variance of rounding errors alone in training mode.
        view("rows expanded", mode="eval"),
        view("overlapping", **modes.in_turn),
        view("negated", **modes.in_turn),
        view("shared", **modes.in_turn),
        view("mixed", mode="eval"),
        *(
            probe(
                f"default dtype {dtype}", "default dtype", default_dtype=dtype, is_extra=True,
                **modes.in_turn,
            )
            for dtype in ("float64", "bfloat16")
        ),
        probe(
            "a submodule wrapped", "wrapped", calls=4, before=((), *(("wrap module",),) * 3),
            first_place=secret.randrange(64), mode="eval", is_extra=True, may_differ=True,
        ),
        probe(
            "a weight parametrised", "wrapped", calls=2, before=((), ("parametrize",)),
            first_place=secret.randrange(64), mode="eval", is_extra=True,
        ),
    ]  # fmt: skip
