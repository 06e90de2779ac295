"""What is asked where two properties meet: gradients and values, inputs that are one, ties."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tuner.check.calls.crossing import Layout
from tuner.check.probes.asker import Asker
from tuner.check.probes.probe import Probe
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
MANY_HALVES = (1050, 1300)  # rows whose sum of values near 100 is beyond float16
ALL, NONE, FIRST = -1, 0, 1  # bits of the inputs that want gradients


def combined_probes(ask: Asker) -> list[Probe]:
    """Return what tells a fault that only two properties at once show."""
    twice: dict[str, Any] = {**ask.modes.in_turn, "backward": (0, 1)}
    place = ask.secret.randrange(64)
    chained = ask.secret.randrange(*CHAIN)
    few = None
    if ask.extent.num_rows is not None:
        few = min(ask.secret.randrange(*CHAIN_ROWS), ask.extent.rows_each(chained))
    order = ask.secret.sample(range(4), 4)
    return [
        *(
            ask.graded(f"gradients, {of.replace('_', ' ')}", "values", distribution=of, **twice)
            for of in VALUES * ask.traits.has_numbers
        ),
        *(
            ask.graded(
                "gradients, constant columns", "values", distribution="constant_columns",
                weights="dyadic", batch=ask.extent.power, **twice,
            )
            for _ in range(ask.traits.has_numbers)
        ),
        *_changes(ask),
        ask.graded(
            "a chain of calls", "chain", calls=2, more_calls=chained, batch=few,
            backward=(1, 0), keeps_graphs=few is not None,
        ),
        ask.graded(
            "a copy beside the original", "beside", calls=4, backward=tuple(order),
            before=(("twin",), ("swap",), ("swap",), ("swap",)),
        ),
        ask.graded(
            "graphs that outlive their module", "outlived", calls=6, is_extra=True,
            before=((), *(("made anew",),) * 5), backward=tuple(ask.secret.sample(range(6), 6)),
        ),
        *(
            ask.graded(
                "tied weights", "tied", calls=2, before=(("tie",), ("tie",)), first_place=place,
                backward_at_once=True, is_extra=True,
            )
            for _ in range(ask.traits.has_like_weights)
        ),
        *(
            ask.probe(
                "a block of -Inf in a bias, eval", "blocks", mode="eval", calls=NUM_MASKED,
                inputs="repeated", before=(("mask",),) * NUM_MASKED, first_place=place,
            )
            for _ in range(ask.traits.has_vectors)
        ),
        *_integers(ask, twice),
        *_of_several(ask, twice),
        *_orders(ask, twice),
        *_conversions(ask),
    ]  # fmt: skip


def _changes(ask: Asker) -> Iterator[Probe]:
    """Calls of one instance after each of which other inputs want gradients."""
    if not ask.traits.has_numbers:
        return
    wanted = [ALL, NONE, FIRST] + [~FIRST] * (ask.traits.num_tensors > 1)
    order = tuple(ask.secret.sample(wanted, len(wanted)))
    if order[0] == ALL:  # of which a plan would be right for the others as well
        order = (*order[1:], ALL)
    yield ask.graded(
        "other inputs want gradients", "wanted", calls=len(order), wanted=order,
        backward_at_once=True,
    )  # fmt: skip


def _integers(ask: Asker, twice: dict[str, Any]) -> Iterator[Probe]:
    """What the types and values of integers and bools decide."""
    if ask.traits.has_integers:
        yield ask.graded(
            "int32, gradients", "narrow", layout="int32", distribution="special", is_extra=True,
            **twice,
        )  # fmt: skip
        if ask.traits.has_numbers:
            fields = {n: x for n, x in twice.items() if n != "backward"}
            yield ask.probe(
                "Inf where labels are ignored", "ignored", distribution="special_rows", **fields
            )
    if ask.traits.has_integers or ask.traits.has_bools:
        yield ask.graded("integers edited", "edited before", edits="integers")
    if ask.traits.has_bools:
        yield ask.graded("gradients, masked", "blocks", distribution="masked_bools", **twice)


def _of_several(ask: Asker, twice: dict[str, Any]) -> Iterator[Probe]:
    """Inputs that are one tensor, or of which one has other rows."""
    if ask.traits.num_alike > 1:
        yield ask.graded("one tensor for all", "shared", layout="same", is_extra=True, **twice)
    if ask.traits.num_tensors > 1:
        at = ask.secret.randrange(64)
        asked: tuple[tuple[Layout, int], ...] = (
            ("fewer rows", at), ("more rows", at), ("one row", 0), ("one row", 1),
        )  # fmt: skip
        for layout, which in asked:
            name = f"{layout} of input {which % ask.traits.num_tensors}"
            yield ask.probe(name, "refused", layout=layout, layout_at=which, mode=ask.modes.own)


def _orders(ask: Asker, twice: dict[str, Any]) -> Iterator[Probe]:
    """Other orders of three and more dimensions in memory."""
    layouts: tuple[Layout, ...] = ("channels_last", "reversed", "rows inside")
    for layout in layouts[ask.traits.dimensions == 3 :] if ask.traits.dimensions > 2 else ():
        yield ask.graded(f"{layout} input", "layout", layout=layout, is_extra=True, **twice)
    if ask.traits.dimensions == 2:  # a backward reads rows as far apart as they were
        flat: tuple[Layout, ...] = ("padded", "cut", "strided", "transposed")
        for layout in flat:
            yield ask.graded(f"{layout} input, gradients", "layout", layout=layout, is_extra=True)
    if ask.traits.dimensions > 3:
        yield ask.probe(
            "channels_last input, no gradients", "layout", layout="channels_last",
            distribution="normal", is_extra=True, **ask.modes.in_turn,
        )  # fmt: skip
        yield ask.graded(
            "channels_last gradients", "incoming", gradient_layout="channels_last", **twice
        )
        yield ask.graded(
            "chunked input and gradients", "layout", layout="chunked", gradient_layout="chunked",
            is_extra=True,
        )  # fmt: skip


def _conversions(ask: Asker) -> Iterator[Probe]:
    """Converted modules with large values, with many rows, or but for their normalisations."""

    def converted(name: str, **fields: Any) -> Probe:
        usual = {"before": ((), ("convert",), (ask.modes.training,)), "mode": "eval", "calls": 3}
        return ask.probe(name, "converted", is_extra=True, **{**usual, **fields})

    if ask.traits.has_numbers:
        yield converted("float16 module, wide range", dtype="float16", distribution="half_range")
        many = ask.secret.randrange(*MANY_HALVES)
        if ask.extent.num_rows is not None and ask.extent.holds(many):
            yield converted(
                "float16 module, many rows", dtype="float16", distribution="offset",
                batch=many, is_reduced=False, is_tall=True,
            )  # fmt: skip
    if ask.traits.has_norms:
        yield converted(
            "bfloat16 module but for its normalisations", dtype="bfloat16",
            before=((), ("convert part",), (ask.modes.training,), (), ()), calls=5,
        )  # fmt: skip
