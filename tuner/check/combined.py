"""What is asked where two properties meet: gradients and values, inputs that are one, ties."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tuner.check.batches import Extent
from tuner.check.crossing import Layout
from tuner.check.probe import Modes, Probe
from tuner.check.tells import TELLS
from tuner.check.traits import Traits
from tuner.problem.draws import Distribution

__all__ = ["combined_probes"]

# Of which gradients are asked, with a batch of a power of two where equal values must have an
# exact mean.
VALUES: tuple[Distribution, ...] = (
    "offset", "heavy_tailed", "late_rows", "wide_range", "wide_columns", "huge", "tiny",
)  # fmt: skip
CHAIN = (50, 71)  # calls before one backward
CHAIN_ROWS = (33, 41)  # of two or three rows that are close no arithmetic keeps many digits
NUM_MASKED = 6  # vectors of which a block is -Inf, one after the other
MANY_HALVES = 1100  # rows whose sum of values near 100 is beyond float16
ALL, NONE, FIRST = -1, 0, 1  # bits of the inputs that want gradients


def combined_probes(
    reduced: Callable[..., Probe],
    modes: Modes,
    extent: Extent,
    traits: Traits,
    secret: random.Random,
) -> list[Probe]:
    """Return what tells a fault that only two properties at once show.

    `reduced` makes a probe on few rows; what cannot say anything with such `traits` is left out.
    """

    def probe(name: str, tells: str, **fields: Any) -> Probe:
        return reduced(name, tells=TELLS[tells], **fields)

    def graded(name: str, tells: str, **fields: Any) -> Probe:
        return probe(name, tells, **{"distribution": "normal", "gradients": "all", **fields})

    twice: dict[str, Any] = {**modes.in_turn, "backward": (0, 1)}
    place = secret.randrange(64)
    chained = secret.randrange(*CHAIN)
    few = None
    if extent.num_rows is not None:
        few = min(secret.randrange(*CHAIN_ROWS), extent.rows_each(chained))
    power = None if extent.num_rows is None else 2 ** min(6, extent.num_rows.bit_length() - 1)
    order = secret.sample(range(4), 4)
    return [
        *(
            graded(f"gradients, {what.replace('_', ' ')}", "values", distribution=what, **twice)
            for what in VALUES * traits.has_numbers
        ),
        *(
            graded(
                "gradients, constant columns", "values", distribution="constant_columns",
                weights="dyadic", batch=power, **twice,
            )
            for _ in range(traits.has_numbers)
        ),
        *_changes(graded, traits, secret),
        graded(
            "a chain of calls", "chain", calls=2, more_calls=chained, batch=few,
            backward=(1, 0), keeps_graphs=few is not None,
        ),
        graded(
            "a copy beside the original", "beside", calls=4, backward=tuple(order),
            before=(("twin",), ("swap",), ("swap",), ("swap",)),
        ),
        graded(
            "graphs that outlive their module", "outlived", calls=6, is_extra=True,
            before=((), *(("made anew",),) * 5), backward=tuple(secret.sample(range(6), 6)),
        ),
        *(
            graded(
                "tied weights", "tied", calls=2, before=(("tie",), ("tie",)), first_place=place,
                backward_at_once=True, is_extra=True,
            )
            for _ in range(traits.has_like_weights)
        ),
        *(
            probe(
                "a block of -Inf in a bias, eval", "blocks", mode="eval", calls=NUM_MASKED,
                inputs="repeated", before=(("mask",),) * NUM_MASKED, first_place=place,
            )
            for _ in range(traits.has_vectors)
        ),
        *_integers(probe, graded, traits, twice),
        *_of_several(probe, graded, modes, traits, secret, twice),
        *_orders(probe, graded, modes, traits, twice),
        *_conversions(probe, modes, extent, traits),
    ]  # fmt: skip


def _changes(
    graded: Callable[..., Probe], traits: Traits, secret: random.Random
) -> Iterator[Probe]:
    """Calls of one instance after each of which other inputs want gradients."""
    if not traits.has_numbers:
        return
    wanted = [ALL, NONE, FIRST] + [~FIRST] * (traits.num_tensors > 1)
    order = tuple(secret.sample(wanted, len(wanted)))
    if order[0] == ALL:  # of which a plan would be right for the others as well
        order = (*order[1:], ALL)
    yield graded(
        "other inputs want gradients", "wanted", calls=len(order), wanted=order,
        backward_at_once=True,
    )  # fmt: skip


def _integers(
    probe: Callable[..., Probe],
    graded: Callable[..., Probe],
    traits: Traits,
    twice: dict[str, Any],
) -> Iterator[Probe]:
    """What the types and values of integers and bools decide."""
    if traits.has_integers:
        yield graded(
            "int32, gradients", "narrow", layout="int32", distribution="special", is_extra=True,
            **twice,
        )  # fmt: skip
        if traits.has_numbers:
            fields = {n: x for n, x in twice.items() if n != "backward"}
            yield probe(
                "Inf where labels are ignored", "ignored", distribution="special_rows", **fields
            )
    if traits.has_integers or traits.has_bools:
        yield graded("integers edited", "edited before", edits="integers")
    if traits.has_bools:
        yield graded("gradients, masked", "blocks", distribution="masked_bools", **twice)


def _of_several(
    probe: Callable[..., Probe],
    graded: Callable[..., Probe],
    modes: Modes,
    traits: Traits,
    secret: random.Random,
    twice: dict[str, Any],
) -> Iterator[Probe]:
    """Inputs that are one tensor, or of which one has other rows."""
    if traits.num_alike > 1:
        yield graded("one tensor for all", "shared", layout="same", is_extra=True, **twice)
    if traits.num_tensors > 1:
        at = secret.randrange(64)
        asked: tuple[tuple[Layout, int], ...] = (
            ("fewer rows", at), ("more rows", at), ("one row", 0), ("one row", 1),
        )  # fmt: skip
        for layout, which in asked:
            name = f"{layout} of input {which % traits.num_tensors}"
            yield probe(name, "refused", layout=layout, layout_at=which, mode=modes.own)


def _orders(
    probe: Callable[..., Probe],
    graded: Callable[..., Probe],
    modes: Modes,
    traits: Traits,
    twice: dict[str, Any],
) -> Iterator[Probe]:
    """Other orders of three and more dimensions in memory."""
    layouts: tuple[Layout, ...] = ("channels_last", "reversed", "rows inside")
    for layout in layouts[traits.dimensions == 3 :] if traits.dimensions > 2 else ():
        yield graded(f"{layout} input", "layout", layout=layout, is_extra=True, **twice)
    if traits.dimensions > 3:
        yield probe(
            "channels_last input, no gradients", "layout", layout="channels_last",
            distribution="normal", is_extra=True, **modes.in_turn,
        )  # fmt: skip
        yield graded(
            "channels_last gradients", "incoming", gradient_layout="channels_last", **twice
        )


def _conversions(
    probe: Callable[..., Probe], modes: Modes, extent: Extent, traits: Traits
) -> Iterator[Probe]:
    """Converted modules with large values, with many rows, or but for their normalisations."""

    def converted(name: str, **fields: Any) -> Probe:
        usual = {"before": ((), ("convert",), (modes.training,)), "mode": "eval", "calls": 3}
        return probe(name, "converted", is_extra=True, **{**usual, **fields})

    if traits.has_numbers:
        yield converted("float16 module, wide range", dtype="float16", distribution="half_range")
        if extent.num_rows is not None and extent.holds(MANY_HALVES):
            yield converted(
                "float16 module, many rows", dtype="float16", distribution="offset",
                batch=MANY_HALVES, is_reduced=False, is_tall=True,
            )  # fmt: skip
    if traits.has_norms:
        yield converted(
            "bfloat16 module but for its normalisations", dtype="bfloat16",
            before=((), ("convert part",), (modes.training,), (), ()), calls=5,
        )  # fmt: skip
