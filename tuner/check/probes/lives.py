"""What is asked of a module's history: its gradients, and long lives in a secret order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.check.calls.crossing import Action
from tuner.check.probes.asker import Asker
from tuner.check.probes.probe import Probe

__all__ = ["gradient_probes", "history_probes"]

NUM_FROZEN = 6  # parameters that are frozen in turn
INCOMING = {
    "large": "large", "small": "small", "nan": "nan", "NaN row": "nan_row",
    "cancelling": "cancelling",
}  # fmt: skip


def gradient_probes(ask: Asker) -> list[Probe]:
    """Return what is asked of gradients."""
    secret, usual = ask.secret, "gradients"
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
        ask.graded("gradients of weights", usual, gradients="plain_inputs"),
        ask.graded(
            "gradients", usual, calls=3, more_calls=secret.randrange(8, 20),
            backward=(earlier, 2, 1 - earlier, earlier),
        ),
        ask.graded("gradients, copied", usual, calls=2, before=((), ("copy",)), backward=(0, 1)),
        ask.graded(
            "gradients, eval", usual, calls=2, mode="eval",
            backward=(earlier, 1 - earlier, earlier),
        ),
        ask.graded("gradients of a sum", "incoming", gradient_layout="of_sum"),
        ask.graded("gradients of a sum, eval", "incoming", mode="eval", gradient_layout="of_sum"),
        ask.graded("gradients of row sums", "incoming", gradient_layout="of_row_sums"),
        ask.graded("gradients of a branch", "incoming", gradient_layout="shared"),
        ask.graded("gradients in another thread", "threads", gradient_layout="in_thread"),
        ask.graded("gradients to differentiate", "differentiable", gradient_layout="in_graph"),
        ask.graded("transposed gradients", "incoming", gradient_layout="transposed"),
        ask.graded("misaligned gradients", "incoming", gradient_layout="misaligned"),
        ask.graded("a parameter frozen", **frozen()),
        ask.graded("a parameter frozen, plain inputs", gradients="plain_inputs", **frozen()),
        # All of them, those of one submodule, none: before the first call as well.
        *(
            ask.graded(
                f"parameters frozen together{plain}", "frozen weight", calls=4,
                before=(("freeze all",), ("freeze module",), ("freeze module",), ("thaw",)),
                gradients="plain_inputs" if plain else "all", backward_at_once=True,
                first_place=secret.randrange(64),
            )
            for plain in ("", ", plain inputs")
        ),
        ask.graded(
            "gradients added up", "accumulated", calls=2, accumulates=True,
            first_place=secret.randrange(64),
        ),
        *(
            ask.graded(f"{name} gradients", "incoming values", gradient_values=kind)
            for name, kind in INCOMING.items()
        ),
        ask.graded("gradients of the first output", "one output", gradient_layout="of_first"),
        ask.graded("gradients of the last output", "one output", gradient_layout="of_last"),
        ask.graded("gradients of inner outputs", "one output", gradient_layout="of_inner"),
        ask.graded("weights edited before", "edited before", edits="weights"),
        ask.graded("output negated", "edited before", edits="output negated"),
        ask.graded("output edited", "edited before", edits="output"),
        ask.graded("input edited", "edited before", edits="input"),
        ask.graded("input freed", "freed", edits="input freed", gradients="plain_inputs"),
        ask.graded("gradients at kinks", "kinks", distribution="few_values", weights="dyadic"),
        ask.graded("gradients of faint rows", "faint", distribution="faint_rows"),
        ask.graded("gradients at constants", "kinks", distribution="constants", weights="dyadic"),
        ask.graded("gradients, special values", usual, distribution="special"),
        ask.graded("gradients, frozen submodules", "frozen", mode="frozen"),
        ask.graded("gradients, thawed submodules", "thawed", mode="thawed"),
    ]  # fmt: skip


def history_probes(ask: Asker) -> list[Probe]:
    """Return long lives of a module; in which order what happens to it is secret."""
    modes = ask.modes

    def lived(
        actions: Sequence[tuple[Action, ...]], after_last: Sequence[tuple[Action, ...]] = ()
    ) -> dict[str, Any]:
        """Put actions in a secret order; what follows the last one of them comes behind it."""
        order = ask.secret.sample(actions, len(actions))
        at = order.index(actions[-1]) + 1
        before = ((), *order[:at], *after_last, *order[at:])
        first = ask.secret.randrange(64)
        tells = "new tensors" if ("assign",) in actions else "history"
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
            ask.probe(f"{what}, training", mode="train", **lived([*ways, *more])),
            # After each call in training mode comes one in eval mode.
            ask.probe(
                f"{what}, eval", mode="eval", inputs="overwritten",
                **lived([*ways, *more, (modes.training,)], [("eval",)]),
            ),
            ask.probe(
                f"{what}, inference mode", mode="eval", is_inference=True,
                **lived([*ways, (modes.training,)], [("eval",)]),
            ),
            ask.graded(f"{what}, gradients", **lived([*ways, (modes.other,)], [(modes.own,)])),
        )
    ]  # fmt: skip
