"""What is asked of a module's history: its gradients, and long lives in a secret order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tuner.check.crossing import Action
from tuner.check.probe import Modes, Probe
from tuner.check.tells import TELLS

__all__ = ["gradient_probes", "history_probes"]

NUM_FROZEN = 6  # parameters that are frozen in turn


def gradient_probes(reduced: Callable[..., Probe], secret: random.Random) -> list[Probe]:
    """Return what is asked of gradients; `reduced` makes a probe on few rows."""

    def probe(name: str, tells: str = "gradients", **fields: Any) -> Probe:
        settings = {"distribution": "normal", "gradients": "all", "tells": TELLS[tells]}
        return reduced(name, **{**settings, **fields})

    # Which call is differentiated first, and that it is asked again, is known to nobody before.
    earlier = secret.randrange(2)

    def frozen() -> dict[str, Any]:
        return {
            "tells": "frozen weight",
            "calls": NUM_FROZEN,
            "before": (("freeze",),) * NUM_FROZEN,
            "first_place": secret.randrange(64),
            "backward_at_once": True,
        }

    return [
        probe("gradients of weights", gradients="plain_inputs"),
        probe(
            "gradients", calls=3, more_calls=secret.randrange(8, 20),
            backward=(earlier, 2, 1 - earlier, earlier),
        ),
        probe("gradients, copied", calls=2, before=((), ("copy",)), backward=(0, 1)),
        probe("gradients, eval", calls=2, mode="eval", backward=(earlier, 1 - earlier, earlier)),
        probe("gradients of a sum", "incoming", gradient_layout="of_sum"),
        probe("gradients of a sum, eval", "incoming", mode="eval", gradient_layout="of_sum"),
        probe("gradients of row sums", "incoming", gradient_layout="of_row_sums"),
        probe("gradients of a branch", "incoming", gradient_layout="shared"),
        probe("gradients in another thread", "threads", gradient_layout="in_thread"),
        probe("transposed gradients", "incoming", gradient_layout="transposed"),
        probe("misaligned gradients", "incoming", gradient_layout="misaligned"),
        probe("a parameter frozen", **frozen()),
        probe("a parameter frozen, plain inputs", gradients="plain_inputs", **frozen()),
        # All of them, those of one submodule, none: before the first call as well.
        *(
            probe(
                f"parameters frozen together{plain}", "frozen weight", calls=4,
                before=(("freeze all",), ("freeze module",), ("freeze module",), ("thaw",)),
                gradients="plain_inputs" if plain else "all", backward_at_once=True,
                first_place=secret.randrange(64),
            )
            for plain in ("", ", plain inputs")
        ),
        probe(
            "gradients added up", "accumulated", calls=2, accumulates=True,
            first_place=secret.randrange(64),
        ),
        *(
            probe(f"{kind} gradients", "incoming values", gradient_values=kind)
            for kind in ("large", "small", "nan", "cancelling")
        ),
        probe("gradients of the first output", "one output", gradient_layout="of_first"),
        probe("gradients of the last output", "one output", gradient_layout="of_last"),
        probe("weights edited before", "edited before", edits="weights"),
        probe("output negated", "edited before", edits="output negated"),
        probe("output edited", "edited before", edits="output"),
        probe("input edited", "edited before", edits="input"),
        probe("input freed", "freed", edits="input freed", gradients="plain_inputs"),
        probe("gradients at kinks", "kinks", distribution="few_values", weights="dyadic"),
        probe("gradients, special values", distribution="special"),
        probe("gradients, frozen submodules", "frozen", mode="frozen"),
        probe("gradients, thawed submodules", "thawed", mode="thawed"),
    ]  # fmt: skip


def history_probes(
    reduced: Callable[..., Probe], modes: Modes, secret: random.Random
) -> list[Probe]:
    """Return long lives of a module; in which order what happens to it is secret."""

    def lived(
        actions: Sequence[tuple[Action, ...]], after_last: Sequence[tuple[Action, ...]] = ()
    ) -> dict[str, Any]:
        """Put actions in a secret order; what follows the last one of them comes behind it."""
        order = secret.sample(actions, len(actions))
        at = order.index(actions[-1]) + 1
        before = ((), *order[:at], *after_last, *order[at:])
        first = secret.randrange(64)
        tells = TELLS["new tensors" if ("assign",) in actions else "history"]
        return {"calls": len(before), "before": before, "first_place": first, "tells": tells}

    # A module may refuse to hold other tensors, or to compute with ones that are lent to it; in
    # place it must take others all the same.
    in_place: list[tuple[Action, ...]] = [
        ("edit",), ("load",), ("load inside",), ("load part",), ("edit state",), ("copy",)
    ]  # fmt: skip
    new_tensors: list[tuple[Action, ...]] = [
        ("assign",), ("rebind",), ("replace",), ("replace one",), ("replace one",), ("load",),
        ("edit",),
    ]  # fmt: skip
    lent: list[tuple[Action, ...]] = [("borrow",), ("borrow one",), ("borrow one",)]
    return [
        probe
        for what, ways, more in (
            ("a life", in_place, []),
            ("a life with new tensors", new_tensors, lent),
        )
        for probe in (
            reduced(f"{what}, training", mode="train", **lived([*ways, *more])),
            # After each call in training mode comes one in eval mode.
            reduced(
                f"{what}, eval", mode="eval", inputs="overwritten",
                **lived([*ways, *more, (modes.training,)], [("eval",)]),
            ),
            reduced(
                f"{what}, inference mode", mode="eval", is_inference=True,
                **lived([*ways, (modes.training,)], [("eval",)]),
            ),
            reduced(
                f"{what}, gradients", distribution="normal", gradients="all",
                **lived([*ways, (modes.other,)], [(modes.own,)]),
            ),
        )
    ]  # fmt: skip
