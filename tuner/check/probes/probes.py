"""What is asked of a candidate: while it is screened, and when it is checked in full."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from tuner.check.calls.crossing import Action, Dtype, Mode
from tuner.check.probes.asker import Asker
from tuner.check.probes.batches import Extent, batch_probes, further_probes, odd_batch
from tuner.check.probes.combined import combined_probes
from tuner.check.probes.handling import handling_probes
from tuner.check.probes.lives import gradient_probes, history_probes
from tuner.check.probes.pairings import paired_probes
from tuner.check.probes.probe import OWN_WORK, Modes, Probe
from tuner.check.probes.shortcuts import shortcut_probes
from tuner.check.probes.tells import TELLS
from tuner.check.probes.traits import Traits
from tuner.check.probes.unusual import unusual_probes
from tuner.problem.constructor import Options
from tuner.problem.draws import Distribution

__all__ = [
    "screening_probes",
    "thorough_probes",
]

TRAINING = Modes()
EVERYTHING = Traits()


KINDS: tuple[Options, ...] = (
    "numbers", "zeros", "signs", "large", "flags", "last flag", "words", "other words", "few",
)  # fmt: skip
CONVERTED: tuple[tuple[Dtype, Distribution, Action, str], ...] = (
    ("float64", "as_given", "convert", ""),
    ("float64", "as_given", "convert inside", " inside another"),
    ("float16", "offset", "convert", ""),
    ("bfloat16", "as_given", "convert", ""),
)


def screening_probes(
    seed: int, extent: Extent, mode: Literal["train", "eval"] = "train"
) -> list[Probe]:
    """Return the short list that screens candidates while searching."""
    secret = random.Random(seed)
    seed_inputs, seed_weights = secret.getrandbits(31), secret.getrandbits(31)
    batch = None if extent.num_rows is None or extent.is_fixed else odd_batch(extent)
    # A finalist is asked at full size; of each candidate that took a GPU's whole memory.
    full = None if extent.is_fixed else extent.full
    probe = _seeded(seed_inputs, seed_weights, mode=mode)
    return [
        probe("as given", weights="initial", batch=full),
        probe(
            "offset, odd batch", distribution="offset", batch=batch, calls=2,
            inputs="overwritten", tells=TELLS["offset"],
        ),
        probe(
            "heavy-tailed, misaligned", distribution="heavy_tailed", batch=batch,
            layout="misaligned", tells=TELLS["misaligned"],
        ),
    ]  # fmt: skip


def thorough_probes(
    seed: int,
    num_rows: int | None,
    *,
    modes: Modes = TRAINING,
    is_deterministic: bool = True,
    has_cuda: bool = False,
    large_batch: int = 0,
    row_elements: float = 0.0,
    is_fixed: bool = False,
    traits: Traits = EVERYTHING,
    further_rows: Sequence[int] = (),
) -> list[Probe]:
    """Return everything that is asked of finalists, exports and strangers' files.

    Few probes run at full size, since one tensor of the flagship is 256 MB. What names no mode is
    asked in the problem's own of `modes`.
    `is_deterministic` asks for the same bits from the same input. From `large_batch` rows on the
    module is known to take another way in eval mode. `row_elements` and `is_fixed` are as of
    `Extent`; what says nothing with such `traits` is left out. `further_rows` are asked besides.
    """
    secret = random.Random(seed)
    seed_full, seed_reduced = secret.getrandbits(31), secret.getrandbits(31)
    seed_weights = secret.getrandbits(31)
    whole_extent = Extent(num_rows, row_elements, "gpu" if has_cuda else "cpu")
    # What takes no other number of rows is asked as what has none: with its own inputs' shapes.
    extent = replace(whole_extent, num_rows=None) if is_fixed else whole_extent
    whole = _seeded(seed_full, seed_weights, mode=modes.own)
    is_less = extent.full is not None
    full = _seeded(seed_full, seed_weights, mode=modes.own, batch=extent.full, is_reduced=is_less)
    batch = extent.reduced(secret)
    reduced = _seeded(seed_reduced, seed_weights, mode=modes.own, batch=batch, is_reduced=True)
    ask = Asker(reduced, full, modes, extent, traits, secret)
    probes = [
        whole("as given", weights="own"),
        ask.probe("fresh weights", "weights", **modes.in_turn),
        ask.full("offset", "offset", distribution="offset"),
        ask.full("heavy-tailed", "heavy", distribution="heavy_tailed"),
        ask.full(
            "again at full size", "full", calls=2, inputs="overwritten", before=((), ("edit",)),
        ),
        ask.full("gradients at full size", "gradients", distribution="normal", gradients="all"),
        *_value_probes(ask, batch is not None),
        *_call_probes(ask, is_deterministic, secret.randrange(8, 20)),
        *gradient_probes(ask),
        *history_probes(ask),
        *_layout_probes(ask),
        *_extra_probes(ask),
        *_traced_probes(full, reduced, modes),
    ]  # fmt: skip
    if num_rows is not None:
        probes += batch_probes(reduced, modes, whole_extent, secret)
        probes += further_probes(reduced, modes, whole_extent, further_rows)
    for kinds in (
        unusual_probes, shortcut_probes, combined_probes, handling_probes, paired_probes,
    ):  # fmt: skip
        probes += kinds(ask)
    more = large_batch + secret.randrange(1, 33)
    if extent.num_rows is not None and large_batch > extent.num_rows and extent.holds(more):
        probes.append(
            ask.probe(
                "many rows, one of NaN, eval", "large", distribution="nan_row", batch=more,
                mode="eval",
            )
        )  # fmt: skip
    return [
        replace(p, is_random=True, wants_same_bits=False) if modes.is_random(p) else p
        for p in probes
    ]


def _seeded(seed_inputs: int, seed_weights: int, **common: Any) -> Callable[..., Probe]:
    def probe(name: str, **fields: Any) -> Probe:
        settings = {"seed_inputs": seed_inputs, "seed_weights": seed_weights, **common}
        return Probe(name, **{**settings, **fields})

    return probe


def _value_probes(ask: Asker, is_asked_of_few: bool) -> list[Probe]:
    power = ask.extent.power
    both = ask.modes.in_turn
    # Of a module that has served usual inputs: what it has learnt of them holds no longer.
    served: dict[str, Any] = {"mild": ask.modes.both}
    both_served = {**both, **served}
    return [
        ask.probe("wide range", "range", distribution="wide_range", **both_served),
        ask.probe("wide columns", "range", distribution="wide_columns", **both_served),
        ask.probe("faint rows", "faint", distribution="faint_rows", **both),
        ask.probe("huge values", "range", distribution="huge", **both_served),
        ask.probe("vast values", "range", distribution="vast", weights="denormal", **both),
        ask.probe("denormal values", "range", distribution="denormal", weights="vast", **both),
        ask.probe("tiny values", "tiny", distribution="tiny", **both_served),
        ask.probe(
            "constant columns", "constant", distribution="constant_columns", weights="dyadic",
            batch=power, **both_served,
        ),
        ask.probe("NaN row", "poison", distribution="nan_row", **served),
        # A maximum by comparisons keeps a NaN that it begins with, and no other.
        ask.probe("NaN elements", "poison", distribution="nan_elements", **both_served),
        # A module may have kernels for eval mode alone, and use them only where a call is large.
        ask.full("NaN row, eval", "poison", distribution="nan_row", mode="eval"),
        ask.probe("Inf elements", "poison", distribution="inf_elements", **served),
        ask.full("Inf elements, eval", "poison", distribution="inf_elements", mode="eval"),
        # A kernel may be used at the module's own batch alone, and nowhere above.
        *(
            ask.full(f"{name} at full size", **fields)
            for name, fields in {
                "wide range": {"distribution": "wide_range", "tells": "range"},
                "huge values": {"distribution": "huge", "tells": "range"},
                "vast values": {"distribution": "vast", "weights": "denormal", "tells": "range"},
                "tiny values": {"distribution": "tiny", "tells": "tiny"},
                "a NaN row": {"distribution": "nan_row", "tells": "poison"},
                "Inf elements": {"distribution": "inf_elements", "tells": "poison"},
            }.items()
            if is_asked_of_few
        ),
    ]  # fmt: skip


def _call_probes(ask: Asker, is_deterministic: bool, num_more_calls: int) -> list[Probe]:
    return [
        ask.probe("input overwritten", "pointer", calls=2, inputs="overwritten"),
        ask.probe("three calls", "calls", calls=3),
        ask.probe("dropped results", "dropped", gradients="all", drops=True),
        ask.probe("one element changed", "content", calls=2, inputs="nudged"),
        ask.probe(
            "weights edited in place", "edited", calls=2, inputs="repeated",
            before=((), ("edit",)),
        ),
        ask.probe(
            "one weight of each edited", "edited", calls=2, inputs="repeated",
            before=((), ("edit",)), other_weights="nudged",
        ),
        *(
            ask.probe(
                f"one weight of each {change}, eval", "edited", calls=2, inputs="repeated",
                mode="eval", before=((), ("edit",)), other_weights=change,
            )
            for change in ("nudged", "stepped")
        ),
        ask.probe(
            "weights in another order, eval", "edited", calls=2, inputs="repeated", mode="eval",
            before=((), ("edit",)), weights="dyadic", other_weights="reordered",
            distribution="dyadic",
        ),
        ask.probe(
            "rows in another order, eval", "content", calls=2, inputs="reordered", mode="eval",
            distribution="dyadic",
        ),
        ask.probe("copied", "copied", calls=3, before=((), ("copy", "edit"), ("edit", "copy"))),
        ask.probe("many calls", "many", calls=2, more_calls=num_more_calls),
        ask.probe(
            "called twice", "repeated", calls=2, inputs="repeated",
            wants_same_bits=is_deterministic,
        ),
        ask.full("eval mode", "eval", mode="eval"),
        ask.probe(
            "eval and training in turn", "turns", distribution="heavy_tailed", mode="eval",
            calls=3, before=((), ("train",), ("eval",)),
        ),
        ask.probe("special values", "special", distribution="special", **ask.modes.in_turn),
        ask.probe(
            "few values", "special", distribution="few_values", mild=ask.modes.both,
            **ask.modes.in_turn,
        ),
        ask.probe(
            "another module", "another", calls=2, before=((), ("another",)), inputs="repeated",
        ),
        ask.probe(
            "submodules replaced", "edited", calls=4, before=((), *(("replace module",),) * 3),
        ),
        ask.probe("frozen submodules", "frozen", mode="frozen"),
        ask.probe("thawed submodules", "thawed", mode="thawed"),
    ]  # fmt: skip


def _layout_probes(ask: Asker) -> list[Probe]:
    def view(layout: str, tells: str = "layout", **fields: Any) -> Probe:
        more = {} if layout == "float64" else ask.modes.in_turn
        return ask.probe(f"{layout} input", tells, layout=layout, is_extra=True, **more, **fields)

    probes = [
        view("transposed"),
        view("strided"),
        view("padded"),
        view("sliced"),
        view("cut", distribution="normal"),
        # Ordinary weights: exact ones would have rows that sum to 0, and the variance of an
        # expanded input is then 0 in PyTorch's order of sums alone.
        view("expanded", distribution="normal"),
        view("misaligned", "misaligned"),
        *(
            ask.probe(
                f"transposed input, only {at + 1}", "layout", layout="transposed", layout_at=at,
                is_extra=True,
            )
            for at in (0, 1)
        ),
        view("float64", "refused"),
        ask.probe("one feature too many", "refused", layout="too_wide"),
        ask.probe("twice the features", "refused", layout="twice_wide"),
        ask.probe("NaN-filled memory", "memory", has_nan_memory=True, calls=2),
    ]  # fmt: skip
    if ask.extent.device == "gpu":
        probes.append(ask.probe("side stream", "stream", has_side_stream=True))
    return probes


def _extra_probes(ask: Asker) -> list[Probe]:
    """Return what the reference's class could also be asked."""

    def probe(name: str, tells: str, **fields: Any) -> Probe:
        return ask.probe(name, tells, is_extra=True, **fields)

    return [
        probe("cumulative average", "cumulative", mode="cumulative", calls=2),
        probe(
            "pickled", "pickled", calls=3, mode="eval",
            before=((), ("pickle", "edit"), ("edit", "pickle")),
        ),
        *(
            probe(f"other options, {kind}", "options", has_options=kind)
            for kind in KINDS
        ),
        # Before it is converted it is called, or it would have nothing to keep. What squares large
        # values in float16 overflows.
        *(
            probe(
                f"{dtype} module{inside}", "converted", dtype=dtype, mode="eval", calls=3,
                before=((), (action,), (ask.modes.training,)), distribution=distribution,
            )
            for dtype, distribution, action, inside in CONVERTED
        ),
        *(
            probe(
                f"{dtype} module, gradients", "converted", dtype=dtype, calls=2,
                before=((), ("convert",)), gradients="all",
            )
            for dtype in ("float64", "float16", "bfloat16")
        ),
    ]  # fmt: skip


def _traced_probes(
    full: Callable[..., Probe], reduced: Callable[..., Probe], modes: Modes
) -> list[Probe]:
    """Return probes that find where a module runs the reference's own operations."""
    asked: dict[str, tuple[Callable[..., Probe], Mode]] = {
        f"{OWN_WORK}training": (full, "train"),
        f"{OWN_WORK}eval": (full, "eval"),
        f"{OWN_WORK}fewer rows": (reduced, "train"),
        f"{OWN_WORK}fewer rows, eval": (reduced, "eval"),
        f"{OWN_WORK}gradients": (reduced, "train"),
        f"{OWN_WORK}gradients, eval": (reduced, "eval"),
        f"{OWN_WORK}transposed input": (reduced, modes.own),
    }
    return [
        probe(
            name,
            mode=mode,
            gradients="all" if "gradients" in name else "",
            layout="transposed" if "transposed" in name else "contiguous",
            distribution="normal",
            weights="initial",
            traces=True,
            may_refuse=True,
        )
        for name, (probe, mode) in asked.items()
    ]
