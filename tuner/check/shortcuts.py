"""What is asked of shortcuts: decisions taken once, guards that look at a part, fingerprints."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tuner.check.crossing import Layout
from tuner.check.probe import Modes, Probe
from tuner.check.tells import TELLS

__all__ = ["shortcut_probes"]

NUM_RANGES = 5  # of whole numbers, one a call
NUM_TENSORS = 8  # parameters and buffers that are edited one by one, and a call before
NUM_EDITS = 4  # each of another kind, by another way


def shortcut_probes(
    reduced: Callable[..., Probe], modes: Modes, secret: random.Random
) -> list[Probe]:
    """Return what tells a shortcut that is right for usual calls; `reduced` makes a probe."""

    def probe(name: str, tells: str, **fields: Any) -> Probe:
        return reduced(name, tells=TELLS[tells], **fields)

    def crossed(layout: Layout) -> Probe:
        return probe(
            f"{layout} input", "layout", layout=layout, distribution="normal", is_extra=True,
            **modes.in_turn,
        )  # fmt: skip

    served: dict[str, Any] = {"mild": modes.both}
    in_place: dict[str, Any] = {"calls": NUM_EDITS, "inputs": "edited"}
    place = secret.randrange(64)
    other = modes.other
    return [
        probe("later rows", "guard", distribution="late_rows", **served, **modes.in_turn),
        probe("like rows", "alike", distribution="like_rows", **served, **modes.in_turn),
        *(
            probe(
                f"whole numbers{when}", "whole", distribution="whole_numbers", inputs="ranges",
                calls=NUM_RANGES, mode=mode, **served,
            )
            for when, mode in {"": modes.own, ", other mode": other}.items()
        ),
        probe("nothing but special", "special", distribution="all_special", **modes.in_turn),
        probe(
            "nothing but special, gradients", "special", distribution="all_special",
            gradients="all",
        ),
        *(
            probe(
                f"weights {change}, {'inference mode' if is_inference else 'eval'}", "fingerprint",
                calls=2, inputs="repeated", mode="eval", before=((), ("edit all",)),
                other_weights=change, weights="dyadic" if change == "shifted" else "random",
                is_inference=is_inference,
            )
            for change in ("negated", "shifted", "mirrored")
            for is_inference in (False, True)
        ),
        probe(
            "one tensor edited, eval", "fingerprint", calls=NUM_TENSORS, inputs="repeated",
            mode="eval", before=((), *(("edit one",),) * (NUM_TENSORS - 1)), first_place=place,
        ),
        probe("input edited in place, eval", "identity", mode="eval", **in_place),
        probe(
            "input edited in place, inference mode", "identity", mode="eval", is_inference=True,
            **in_place,
        ),
        probe(
            "input edited in place, gradients", "identity", gradients="all",
            backward_at_once=True, **in_place,
        ),
        crossed("transposed padded"),
        crossed("transposed cut"),
        probe(
            "gradients cut from columns", "incoming", distribution="normal", gradients="all",
            gradient_layout="transposed cut",
        ),
        *(
            probe(
                f"gradients beside .grad{when}", "grads kept", distribution="normal",
                holds_grads=True, first_place=place, **fields,
            )
            for when, fields in {
                "": {"gradients": "all"},
                ", other mode": {"gradients": "all", "mode": other},
                ", plain inputs": {"gradients": "plain_inputs"},
            }.items()
        ),
        *(
            probe(
                f"mapped over {over}", "mapped", mapped=over, mode="eval", distribution="normal",
                is_extra=True,
            )
            for over in ("inputs", "weights")
        ),
        probe("a wrong state_dict", "loads", mode="eval", before=(("load wrong",),)),
        # What a copy keeps: hooks, attributes, what is frozen, modes.
        probe(
            "copied with hooks", "hooks", calls=3, mode="frozen", distribution="normal",
            gradients="all", backward_at_once=True, first_place=place,
            before=((), ("hook", "freeze", "copy"), ("copy",)),
        ),
        probe(
            "pickled with hooks", "hooks", calls=2, mode="eval", is_extra=True,
            before=((), ("hook", "pickle")),
        ),
    ]  # fmt: skip
