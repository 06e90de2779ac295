"""What is asked of shortcuts: decisions taken once, guards that look at a part, fingerprints."""

from __future__ import annotations

from typing import Any

from tuner.check.calls.crossing import Layout
from tuner.check.probes.asker import Asker
from tuner.check.probes.probe import Probe

__all__ = ["shortcut_probes"]

NUM_RANGES = 5  # of whole numbers, one a call
NUM_TENSORS = 8  # parameters and buffers that are edited one by one, and a call before
NUM_EDITS = 4  # each of another kind, by another way


def shortcut_probes(ask: Asker) -> list[Probe]:
    """Return what tells a shortcut that is right for usual calls."""

    def crossed(layout: Layout) -> Probe:
        return ask.probe(
            f"{layout} input", "layout", layout=layout, distribution="normal", is_extra=True,
            **ask.modes.in_turn,
        )  # fmt: skip

    served: dict[str, Any] = {"mild": ask.modes.both}
    in_place: dict[str, Any] = {"calls": NUM_EDITS, "inputs": "edited"}
    place = ask.secret.randrange(64)
    other = ask.modes.other
    return [
        ask.probe("later rows", "guard", distribution="late_rows", **served, **ask.modes.in_turn),
        ask.probe("like rows", "alike", distribution="like_rows", **served, **ask.modes.in_turn),
        *(
            ask.probe(
                f"whole numbers{when}", "whole", distribution="whole_numbers", inputs="ranges",
                calls=NUM_RANGES, mode=mode, **served,
            )
            for when, mode in {"": ask.modes.own, ", other mode": other}.items()
        ),
        ask.probe(
            "nothing but special", "special", distribution="all_special", **ask.modes.in_turn,
        ),
        ask.probe(
            "nothing but special, gradients", "special", distribution="all_special",
            gradients="all",
        ),
        *(
            ask.probe(
                f"weights {change}, {'inference mode' if is_inference else 'eval'}", "fingerprint",
                calls=2, inputs="repeated", mode="eval", before=((), ("edit all",)),
                other_weights=change, weights="dyadic" if change == "shifted" else "random",
                is_inference=is_inference,
            )
            for change in ("negated", "shifted", "mirrored")
            for is_inference in (False, True)
        ),
        ask.probe(
            "one tensor edited, eval", "fingerprint", calls=NUM_TENSORS, inputs="repeated",
            mode="eval", before=((), *(("edit one",),) * (NUM_TENSORS - 1)), first_place=place,
        ),
        ask.probe("input edited in place, eval", "identity", mode="eval", **in_place),
        ask.probe(
            "input edited in place, inference mode", "identity", mode="eval", is_inference=True,
            **in_place,
        ),
        ask.probe(
            "input edited in place, gradients", "identity", gradients="all", backward_at_once=True,
            **in_place,
        ),
        crossed("transposed padded"),
        crossed("transposed cut"),
        ask.graded("gradients cut from columns", "incoming", gradient_layout="transposed cut"),
        *(
            ask.probe(
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
            ask.probe(
                f"mapped over {over}", "mapped", mapped=over, mode="eval", distribution="normal",
                is_extra=True,
            )
            for over in ("inputs", "weights")
        ),
        ask.probe("a wrong state_dict", "loads", mode="eval", before=(("load wrong",),)),
        # What a copy keeps: hooks, attributes, what is frozen, modes.
        ask.graded(
            "copied with hooks", "hooks", calls=3, mode="frozen", backward_at_once=True,
            first_place=place, before=((), ("hook", "freeze", "copy"), ("copy",)),
        ),
        ask.probe(
            "pickled with hooks", "hooks", calls=2, mode="eval", is_extra=True,
            before=((), ("hook", "pickle")),
        ),
    ]  # fmt: skip
