"""What is asked of a module in a user's hands: its weights, modes, parts, types, what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tuner.check.calls.crossing import Action, Dtype, Layout
from tuner.check.calls.touches import OF_SCALARS
from tuner.check.probes.asker import Asker
from tuner.check.probes.batches import FEWEST, MOST
from tuner.check.probes.probe import Probe

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


def handling_probes(ask: Asker) -> list[Probe]:
    """Return what a user does with a module and with what it gives."""
    place = ask.secret.randrange(64)
    return [
        *_weights(ask, place),
        _graded(
            ask, "all gradients kept", "kept", calls=ask.secret.randrange(*NUM_KEPT),
            inputs="nudged", keeps_gradients=True,
        ),
        *_modes(ask, place),
        *_offers(ask, place),
        ask.probe("copied in a container", "container", calls=2, before=((), ("copy inside",))),
        ask.probe(
            "others made before", "another", calls=2,
            before=(("others made",), (ask.modes.other,)),
        ),
        *_memory(ask, ask.secret.randrange(*MORE_ROWS)),
        *_values(ask, place),
        *_types(ask),
        ask.probe(
            "of a user's own class", "derived", calls=3, is_extra=True,
            before=(("derive", "read state"), ("copy",), (ask.modes.other,)),
        ),
        *_threads(ask),
        *_long(ask),
        _graded(
            ask, "forward derivatives of weights", "forward mode", gradients="forward weights",
            mode="eval", may_refuse=True, backward_at_once=False,
        ),
    ]  # fmt: skip


def _weights(ask: Asker, place: int) -> Iterator[Probe]:
    """Parameters that are 0, as those of a new residual branch are, and that a method froze."""
    if not ask.traits.num_parameters:
        return
    whole = (("zero",),) * min(NUM_ZEROED, ask.traits.num_parameters)
    partly = (("zero part",),) * min(NUM_PARTLY, ask.traits.num_parameters)
    ones = (("ones",),) * len(whole) + (("minus ones",),)
    odd = (
        (("scalar",),) * len(OF_SCALARS) * (ask.traits.num_scalars > 0)
        + (("small",),) * len(whole)
        + (("tiny",),) * len(whole)
    )
    yield _graded(
        ask, "parameters of constants", "constants", calls=len(ones) + len(odd),
        before=(*ones, *odd), first_place=place,
    )  # fmt: skip
    yield _graded(
        ask, "parameters of zeros", "zeros", calls=len(whole) + len(partly),
        before=(*whole, *partly), first_place=place,
    )  # fmt: skip
    inside = (("freeze inside",), ("thaw",)) * ask.traits.has_parts
    frozen = (("freeze whole",), ("thaw",), *inside)
    yield _graded(
        ask,
        "frozen by a method",
        "frozen weight",
        calls=len(frozen),
        before=frozen,
        first_place=place,
    )


def _modes(ask: Asker, place: int) -> Iterator[Probe]:
    """The attribute `training` itself; what draws random numbers in a mode is left out."""
    if ask.modes.random:
        return
    one: Action = "set eval part" if ask.traits.has_parts else "set eval own"
    yield ask.probe(
        "training set as an attribute", "attribute", mode="train", calls=6, first_place=place,
        before=((), ("set eval own",), ("set train",), (one,), ("set eval",), ("set train",)),
    )  # fmt: skip


def _offers(ask: Asker, place: int) -> Iterator[Probe]:
    """Other methods than `forward`, attributes that it sets, and parts of another size."""
    turns = {"before": ((), (ask.modes.other,), ()), "calls": 3, "is_extra": True}
    if ask.traits.methods:
        yield ask.probe("other methods", "methods", methods=ask.traits.methods, **turns)
    if ask.traits.attributes:
        yield ask.probe(
            "attributes that a call sets", "attributes", attributes=ask.traits.attributes, **turns
        )
    if ask.traits.heads:
        before = ((), ("resize",), (ask.modes.other,))
        yield ask.probe(
            "a part of another size", "resized", paths=ask.traits.heads, first_place=place,
            **{**turns, "before": before},
        )  # fmt: skip


def _memory(ask: Asker, rows: int) -> Iterator[Probe]:
    """What an earlier call has left in memory, and what a user has written there."""
    if (
        ask.traits.has_numbers
        and ask.extent.num_rows is not None
        and ask.extent.holds(MOST + rows)
    ):
        nothing: dict[str, Any] = {"mild": ("eval",), "mild_more": rows}
        yield ask.probe("after more rows of NaN, eval", "stale", mode="eval", **nothing)
        yield _graded(ask, "after more rows of NaN, gradients", "stale", **nothing)
    if not ask.traits.gives_itself:
        yield ask.probe(
            "outputs edited, eval", "repeated", mode="eval", calls=3, inputs="repeated",
            spoils_outputs=True,
        )  # fmt: skip


def _values(ask: Asker, place: int) -> Iterator[Probe]:
    """Rows of weights that are edited, or large; weights that are as far from 0 as inputs are."""
    if ask.traits.num_matrices:
        edits = (("edit row",),) * (NUM_ROWS * min(NUM_PARTLY, ask.traits.num_matrices))
        yield ask.probe(
            "rows of weights edited, eval", "edited", mode="eval", distribution="normal",
            calls=len(edits) + 1, inputs="repeated", before=((), *edits), first_place=place,
        )  # fmt: skip
        scaled = (("scale row",),) * (2 * min(NUM_PARTLY, ask.traits.num_matrices))
        yield ask.probe(
            "rows of weights scaled", "scaled", mode=ask.modes.training, calls=len(scaled),
            distribution="normal", inputs="repeated", before=scaled, first_place=place,
        )  # fmt: skip
    if ask.traits.num_like_inputs:
        shifts = (("shift",),) * min(NUM_ZEROED, ask.traits.num_like_inputs)
        yield ask.probe(
            "far from 0, as inputs are, eval", "far", mode="eval", distribution="far",
            calls=len(shifts), inputs="repeated", before=shifts, first_place=place,
        )  # fmt: skip


def _types(ask: Asker) -> Iterator[Probe]:
    """Types in an order that is not usual, and what may be given in several types."""
    if ask.traits.has_numbers:
        yield ask.probe(
            "in 16 bits and in 32 again", "types in turn", distribution="normal", mode="eval",
            dtype=ask.secret.choice(HALVES), calls=4, before=(("convert",), ("restore",)) * 2,
            is_extra=True,
        )  # fmt: skip
    layouts: tuple[Layout, ...] = (
        "bools as masks", "bools as float32", "bools as int64", "bools as uint8",
    )  # fmt: skip
    for layout in layouts * ask.traits.has_bools:
        yield ask.probe(layout, "bools", layout=layout, is_extra=True, **ask.modes.in_turn)
    if ask.traits.has_integers:
        yield _graded(ask, "the last integers", "last", distribution="last_integers")
    if ask.traits.has_integers or ask.traits.has_small_integers:
        yield _graded(ask, "integers of both signs", "last", distribution="wide_integers")
    if ask.traits.takes_numbers:
        yield _graded(
        ask, "numbers as tensors", "arguments", other_arguments="tensors", weights="initial",
            is_extra=True,
        )  # fmt: skip
    if ask.traits.has_sizes:
        yield ask.probe(
            "half of each size", "sizes", distribution="normal", has_options="sizes",
            is_extra=True, **ask.modes.in_turn,
        )  # fmt: skip


def _threads(ask: Asker) -> Iterator[Probe]:
    """More threads than places that a module may have for them: a user's, and PyTorch's."""
    few = ask.extent.rows_each(4 * MANY)  # with its answers and copies of them
    is_heavy = ask.extent.num_rows is not None and few < min(ask.extent.num_rows, FEWEST)
    if not ask.traits.updates_in_eval:
        yield ask.probe(
            "many threads, eval", "threads", mode="eval", distribution="normal", calls=MANY,
            at_once="one module", **{"batch": few} if is_heavy else {},
        )  # fmt: skip
    rows = 2 * MANY_OF_PYTORCH[1]
    if ask.extent.num_rows is not None and ask.extent.holds(rows):
        yield _graded(
        ask, "many of PyTorch's threads, gradients", "team", batch=rows, is_reduced=False,
            num_threads=ask.secret.randrange(*MANY_OF_PYTORCH),
        )  # fmt: skip


def _long(ask: Asker) -> Iterator[Probe]:
    """Rows that chunks of any usual size divide, in memory that held NaN."""
    most = ask.extent.row_elements and LONG_ELEMENTS[ask.extent.device] / ask.extent.row_elements
    if ask.extent.num_rows is None or not most:
        return
    powers = [2**bits for bits in range(*LONG_BITS)]
    others = [3 * 2**bits for bits in range(LONG_BITS[0] - 1, LONG_BITS[1] - 1)]
    thirds = [rows for rows in others if rows <= most]
    for rows in [n for n in powers if n <= most] + ([ask.secret.choice(thirds)] if thirds else []):
        if rows != ask.extent.num_rows and ask.extent.holds(rows):
            yield ask.probe(
                f"{rows} rows, eval", "chunks", batch=rows, mode="eval", distribution="normal",
                has_nan_memory=True, is_reduced=False,
            )  # fmt: skip


def _graded(ask: Asker, name: str, tells: str, **fields: Any) -> Probe:
    return ask.graded(name, tells, **{"backward_at_once": True, **fields})
