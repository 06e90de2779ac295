"""What is asked of a module in a user's hands: weights of 0, modes, parts, what is kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tuner.check.batches import MOST, Extent
from tuner.check.crossing import Action
from tuner.check.probe import Modes, Probe
from tuner.check.tells import TELLS
from tuner.check.traits import Traits

__all__ = ["handling_probes"]

NUM_ZEROED, NUM_PARTLY = 6, 3  # parameters that become 0 in turn, and in a part
NUM_KEPT = (13, 21)  # backwards whose gradients are all kept
MORE_ROWS = (17, 41)  # of NaN, that a workspace may have held before


def handling_probes(
    reduced: Callable[..., Probe],
    modes: Modes,
    extent: Extent,
    traits: Traits,
    secret: random.Random,
) -> list[Probe]:
    """Return what a user does with a module and with what it gives.

    `reduced` makes a probe on few rows; what cannot say anything with such `traits` is left out.
    """

    def probe(name: str, tells: str, **fields: Any) -> Probe:
        return reduced(name, tells=TELLS[tells], **fields)

    def graded(name: str, tells: str, **fields: Any) -> Probe:
        usual = {"distribution": "normal", "gradients": "all", "backward_at_once": True}
        return probe(name, tells, **{**usual, **fields})

    place = secret.randrange(64)
    return [
        *_weights(graded, traits, place),
        graded(
            "all gradients kept", "kept", calls=secret.randrange(*NUM_KEPT), inputs="nudged",
            keeps_gradients=True,
        ),
        *_modes(probe, modes, traits, place),
        *_offers(probe, modes, traits, place),
        probe("copied in a container", "container", calls=2, before=((), ("copy inside",))),
        probe(
            "others made before", "another", calls=2, before=(("others made",), (modes.other,)),
        ),
        *_memory(probe, graded, extent, traits, secret.randrange(*MORE_ROWS)),
    ]  # fmt: skip


def _weights(graded: Callable[..., Probe], traits: Traits, place: int) -> Iterator[Probe]:
    """Parameters that are 0, as those of a new residual branch are, and that a method froze."""
    if not traits.num_parameters:
        return
    whole = (("zero",),) * min(NUM_ZEROED, traits.num_parameters)
    partly = (("zero part",),) * min(NUM_PARTLY, traits.num_parameters)
    yield graded(
        "parameters of zeros", "zeros", calls=len(whole) + len(partly), before=(*whole, *partly),
        first_place=place,
    )  # fmt: skip
    inside = (("freeze inside",), ("thaw",)) * traits.has_parts
    frozen = (("freeze whole",), ("thaw",), *inside)
    yield graded(
        "frozen by a method", "frozen weight", calls=len(frozen), before=frozen, first_place=place
    )


def _modes(
    probe: Callable[..., Probe], modes: Modes, traits: Traits, place: int
) -> Iterator[Probe]:
    """The attribute `training` itself; what draws random numbers in a mode is left out."""
    if modes.random:
        return
    one: Action = "set eval part" if traits.has_parts else "set eval own"
    yield probe(
        "training set as an attribute", "attribute", mode="train", calls=6, first_place=place,
        before=((), ("set eval own",), ("set train",), (one,), ("set eval",), ("set train",)),
    )  # fmt: skip


def _offers(
    probe: Callable[..., Probe], modes: Modes, traits: Traits, place: int
) -> Iterator[Probe]:
    """Other methods than `forward`, attributes that it sets, and parts of another size."""
    turns = {"before": ((), (modes.other,), ()), "calls": 3, "is_extra": True}
    if traits.methods:
        yield probe("other methods", "methods", methods=traits.methods, **turns)
    if traits.attributes:
        yield probe(
            "attributes that a call sets", "attributes", attributes=traits.attributes, **turns
        )
    if traits.heads:
        before = ((), ("resize",), (modes.other,))
        yield probe(
            "a part of another size", "resized", paths=traits.heads, first_place=place,
            **{**turns, "before": before},
        )  # fmt: skip


def _memory(
    probe: Callable[..., Probe],
    graded: Callable[..., Probe],
    extent: Extent,
    traits: Traits,
    rows: int,
) -> Iterator[Probe]:
    """What an earlier call has left in memory, and what a user has written there."""
    if traits.has_numbers and extent.num_rows is not None and extent.holds(MOST + rows):
        nothing: dict[str, Any] = {"mild": ("eval",), "mild_more": rows}
        yield probe("after more rows of NaN, eval", "stale", mode="eval", **nothing)
        yield graded("after more rows of NaN, gradients", "stale", **nothing)
    if not traits.gives_itself:
        yield probe(
            "outputs edited, eval", "repeated", mode="eval", calls=3, inputs="repeated",
            spoils_outputs=True,
        )  # fmt: skip
