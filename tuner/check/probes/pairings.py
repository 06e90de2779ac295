"""Questions whose properties are drawn: any two that fit may meet in one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tuner.check.calls.crossing import Action, GradientLayout, Gradients, Layout
from tuner.check.probes.asker import Asker
from tuner.check.probes.probe import Modes, Probe
from tuner.problem.draws import Distribution

__all__ = ["NUM_DRAWN", "ORDERS", "paired_probes"]

NUM_DRAWN = 10  # of each check
FEW, SOME, MORE = (3, 9), (9, 33), (33, 129)  # rows
VALUES: tuple[Distribution, ...] = (
    "normal", "normal", "as_given", "offset", "heavy_tailed", "late_rows", "wide_range",
    "wide_columns", "tiny", "few_values", "special",
)  # fmt: skip
POISON: tuple[Distribution, ...] = (  # of which gradients are not asked
    "nan_row", "inf_elements", "negative_inf_row", "masked", "huge", "like_rows", "all_special",
)  # fmt: skip
VIEWS: tuple[Layout, ...] = (
    "transposed", "strided", "padded", "cut", "sliced", "misaligned", "transposed padded",
    "transposed cut", "negated",
)  # fmt: skip
ORDERS: tuple[Layout, ...] = ("channels_last", "reversed", "rows inside")
SHARED: tuple[Layout, ...] = ("shared", "same")
INCOMING: tuple[GradientLayout, ...] = (
    "contiguous", "contiguous", "transposed", "misaligned", "transposed cut", "shared",
    "in_thread", "channels_last",
)  # fmt: skip
WEIGHTS: tuple[Action, ...] = (  # which a module may not refuse
    "edit", "edit one", "load", "load inside", "load part", "edit state",
)  # fmt: skip
TENSORS: tuple[Action, ...] = ("assign", "rebind", "replace", "replace one", "made anew")
LIVES: tuple[Action, ...] = ("copy", "pickle", "infer", "another")
T = TypeVar("T")


def paired_probes(ask: Asker) -> list[Probe]:
    """Return probes whose rows, values, views, gradients and histories are drawn.

    Each draw fits together: no question is among them to which an honest answer in float32 could
    be far from the reference's. Half of them ask for gradients.
    """
    return [_drawn(number, ask) for number in range(1, NUM_DRAWN + 1)]


def _drawn(number: int, ask: Asker) -> Probe:
    def one(things: Sequence[T]) -> T:
        return things[ask.secret.randrange(len(things))]

    has_gradients = number % 2 == 0
    all_modes = (ask.modes.own, ask.modes.own, ask.modes.other, "frozen", "thawed")
    # In a mode whose numbers are chance, what was drawn would say little.
    fields: dict[str, Any] = {"mode": one([m for m in all_modes if m not in ask.modes.random])}
    rows = _rows(ask, one)
    if rows is not None:
        fields |= {"batch": rows, "is_reduced": False}
    is_few = rows is not None and rows < FEW[1]
    values: Distribution = one(VALUES if has_gradients else (*VALUES, *POISON))
    views = (*VIEWS, *ORDERS * (ask.traits.dimensions > 2))
    layout: Layout = one(("contiguous", *views))
    if ask.traits.num_alike > 1 and ask.secret.random() < 0.2:
        layout, values = one(SHARED), "normal"
        fields |= {"inputs": "repeated"}  # of another call they would not be alike
    if is_few:  # else two rows may be close, and a difference of them has few right bits
        fields |= {"weights": "dyadic"}
        values = "dyadic"
    if layout != "contiguous" and ask.secret.random() < 0.3:
        fields |= {"layout_at": ask.secret.randrange(64)}
    history = _history(one, ask.modes, str(fields["mode"]), is_few)
    fields |= {
        "distribution": values, "layout": layout, "calls": len(history) + 1,
        "before": ((), *history), "first_place": ask.secret.randrange(64),
        "mild": one(((), (), ask.modes.both)),
    }  # fmt: skip
    asked: Gradients = one(("all", "all", "plain_inputs")) if has_gradients else ""
    if asked and layout in ORDERS:
        asked = "all"  # PyTorch 2.13 itself ends in GroupNorm's backward for the weights alone
    if has_gradients:
        # What is edited past the version counter between a call and its backward is used anew by
        # some honest modules, and not by others.
        fields |= {"gradients": asked, "backward_at_once": True, "gradient_layout": one(INCOMING)}
    else:
        fields |= {"is_inference": ask.secret.random() < 0.25}
    met = [
        str(fields["mode"]), "" if rows is None else f"{rows} rows", values, layout,
        *(action for actions in history for action in actions), "gradients" * has_gradients,
    ]  # fmt: skip
    said = ", ".join(what for what in met if what and what != "contiguous")
    may_refuse = layout != "contiguous" or any(a in (*TENSORS, "pickle") for (a,) in history)
    return ask.probe(f"drawn {number}: {said}", "drawn", is_extra=may_refuse, **fields)


def _rows(ask: Asker, one: Callable[[Sequence[Any]], Any]) -> int | None:
    """Return a number of rows; None leaves that of the other probes on few rows."""
    kinds = [kind for kind in (FEW, SOME, MORE) if ask.extent.holds(kind[1])]
    kind = one((None, *kinds)) if ask.extent.num_rows is not None else None
    return None if kind is None else ask.secret.randrange(*kind)


def _history(
    one: Callable[[Sequence[Any]], Any], modes: Modes, mode: str, is_few: bool
) -> list[tuple[Action, ...]]:
    """Return what comes before each call after the first."""
    turns: tuple[Action, ...] = (modes.other, modes.own) * (mode in ("train", "eval"))
    # Others' weights are not exact, which few rows need.
    actions = (*turns, *LIVES, *(() if is_few else (*WEIGHTS, *TENSORS)))
    return [(one(actions),) for _ in range(one((0, 1, 2)))]
