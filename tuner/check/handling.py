"""What is asked of a module in a user's hands: its weights, modes, parts, types, what is kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tuner.check.batches import FEWEST, MOST, Extent
from tuner.check.crossing import Action, Dtype, Layout
from tuner.check.probe import Modes, Probe
from tuner.check.tells import TELLS
from tuner.check.traits import Traits

__all__ = ["handling_probes"]

NUM_ZEROED, NUM_PARTLY = 6, 3  # parameters that become 0 in turn, and in a part
NUM_KEPT = (13, 21)  # backwards whose gradients are all kept
NUM_ROWS = 3  # of each matrix are edited
HALVES: tuple[Dtype, ...] = ("float16", "bfloat16")
MANY = 24  # threads of a user
MANY_OF_PYTORCH = (65, 97)  # threads
LONG_BITS = (10, 17)  # of numbers of rows
LONG_ELEMENTS = {"gpu": 2**24, "cpu": 2**20}  # that such a call may take and make
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
        *_values(probe, graded, modes, traits, place),
        *_types(probe, graded, modes, traits, secret),
        probe(
            "of a user's own class", "derived", calls=3, is_extra=True,
            before=(("derive", "read state"), ("copy",), (modes.other,)),
        ),
        *_threads(probe, graded, extent, secret),
        *_long(probe, extent, secret),
        graded(
            "forward derivatives of weights", "forward mode", gradients="forward weights",
            mode="eval", may_refuse=True, backward_at_once=False,
        ),
    ]  # fmt: skip


def _weights(graded: Callable[..., Probe], traits: Traits, place: int) -> Iterator[Probe]:
    """Parameters that are 0, as those of a new residual branch are, and that a method froze."""
    if not traits.num_parameters:
        return
    whole = (("zero",),) * min(NUM_ZEROED, traits.num_parameters)
    partly = (("zero part",),) * min(NUM_PARTLY, traits.num_parameters)
    ones = (("ones",),) * len(whole) + (("minus ones",),)
    odd = (
        (("scalar",),) * 3 * (traits.num_scalars > 0)
        + (("small",),) * len(whole)
        + (("tiny",),) * len(whole)
    )
    yield graded(
        "parameters of constants", "constants", calls=len(ones) + len(odd), before=(*ones, *odd),
        first_place=place,
    )  # fmt: skip
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


def _values(
    probe: Callable[..., Probe],
    graded: Callable[..., Probe],
    modes: Modes,
    traits: Traits,
    place: int,
) -> Iterator[Probe]:
    """Rows of weights that are edited, or large; weights that are as far from 0 as inputs are."""
    if traits.num_matrices:
        edits = (("edit row",),) * (NUM_ROWS * min(NUM_PARTLY, traits.num_matrices))
        yield probe(
            "rows of weights edited, eval", "edited", mode="eval", distribution="normal",
            calls=len(edits) + 1, inputs="repeated", before=((), *edits), first_place=place,
        )  # fmt: skip
        scaled = (("scale row",),) * (2 * min(NUM_PARTLY, traits.num_matrices))
        yield probe(
            "rows of weights scaled", "scaled", mode=modes.training, calls=len(scaled),
            distribution="normal", inputs="repeated", before=scaled, first_place=place,
        )  # fmt: skip
    if traits.num_like_inputs:
        shifts = (("shift",),) * min(NUM_ZEROED, traits.num_like_inputs)
        yield probe(
            "far from 0, as inputs are, eval", "far", mode="eval", distribution="far",
            calls=len(shifts), inputs="repeated", before=shifts, first_place=place,
        )  # fmt: skip


def _types(
    probe: Callable[..., Probe],
    graded: Callable[..., Probe],
    modes: Modes,
    traits: Traits,
    secret: random.Random,
) -> Iterator[Probe]:
    """Types in an order that is not usual, and what may be given in several types."""
    if traits.has_numbers:
        yield probe(
            "in 16 bits and in 32 again", "types in turn", distribution="normal", mode="eval",
            dtype=secret.choice(HALVES), calls=4, before=(("convert",), ("restore",)) * 2,
            is_extra=True,
        )  # fmt: skip
    layouts: tuple[Layout, ...] = (
        "bools as masks", "bools as float32", "bools as int64", "bools as uint8",
    )  # fmt: skip
    for layout in layouts * traits.has_bools:
        yield probe(layout, "bools", layout=layout, is_extra=True, **modes.in_turn)
    if traits.has_integers:
        yield graded("the last integers", "last", distribution="last_integers")
    if traits.takes_numbers:
        yield graded(
            "numbers as tensors", "arguments", other_arguments="tensors", weights="initial",
            is_extra=True,
        )  # fmt: skip
    if traits.has_sizes:
        yield probe(
            "half of each size", "sizes", distribution="normal", has_options="sizes",
            is_extra=True, **modes.in_turn,
        )  # fmt: skip


def _threads(
    probe: Callable[..., Probe],
    graded: Callable[..., Probe],
    extent: Extent,
    secret: random.Random,
) -> Iterator[Probe]:
    """More threads than places that a module may have for them: a user's, and PyTorch's."""
    few = extent.rows_each(4 * MANY)  # with its answers and copies of them
    is_heavy = extent.num_rows is not None and few < min(extent.num_rows, FEWEST)
    yield probe(
        "many threads, eval", "threads", mode="eval", distribution="normal", calls=MANY,
        at_once="one module", **{"batch": few} if is_heavy else {},
    )  # fmt: skip
    rows = 2 * MANY_OF_PYTORCH[1]
    if extent.num_rows is not None and extent.holds(rows):
        yield graded(
            "many of PyTorch's threads, gradients", "team", batch=rows, is_reduced=False,
            num_threads=secret.randrange(*MANY_OF_PYTORCH),
        )  # fmt: skip


def _long(probe: Callable[..., Probe], extent: Extent, secret: random.Random) -> Iterator[Probe]:
    """Rows that chunks of any usual size divide, in memory that held NaN."""
    most = extent.row_elements and LONG_ELEMENTS[extent.device] / extent.row_elements
    if extent.num_rows is None or not most:
        return
    powers = [2**bits for bits in range(*LONG_BITS)]
    others = [3 * 2**bits for bits in range(LONG_BITS[0] - 1, LONG_BITS[1] - 1)]
    thirds = [rows for rows in others if rows <= most]
    for rows in [n for n in powers if n <= most] + ([secret.choice(thirds)] if thirds else []):
        if rows != extent.num_rows and extent.holds(rows):
            yield probe(
                f"{rows} rows, eval", "chunks", batch=rows, mode="eval", distribution="normal",
                has_nan_memory=True, is_reduced=False,
            )  # fmt: skip
