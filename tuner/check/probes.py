"""What is asked of a candidate: while it is screened, and when it is checked in full."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from tuner.check.asker import Asker
from tuner.check.batches import Extent, batch_probes, further_probes, odd_batch
from tuner.check.combined import combined_probes
from tuner.check.crossing import Action, Dtype, Mode
from tuner.check.handling import handling_probes
from tuner.check.lives import gradient_probes, history_probes
from tuner.check.pairings import paired_probes
from tuner.check.probe import OWN_WORK, Modes, Probe
from tuner.check.shortcuts import shortcut_probes
from tuner.check.tells import TELLS
from tuner.check.traits import Traits
from tuner.check.unusual import unusual_probes
from tuner.problem.draws import Distribution

__all__ = [
    "screening_probes",
    "thorough_probes",
]

TRAINING = Modes()
EVERYTHING = Traits()


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
    batch = None if extent.num_rows is None else odd_batch(extent)
    probe = _seeded(seed_inputs, seed_weights, mode=mode)
    return [
        probe("as given", weights="initial"),
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
    traits: Traits = EVERYTHING,
    further_rows: Sequence[int] = (),
) -> list[Probe]:
    """Return everything that is asked of finalists, exports and strangers' files.

    Few probes run at full size, since one tensor of the flagship is 256 MB. What names no mode is
    asked in the problem's own of `modes`.
    `is_deterministic` asks for the same bits from the same input. From `large_batch` rows on the
    module is known to take another way in eval mode. `row_elements` are as of `Extent`; what says
    nothing with such `traits` is left out. `further_rows` are asked besides.
    """
    secret = random.Random(seed)
    seed_full, seed_reduced = secret.getrandbits(31), secret.getrandbits(31)
    seed_weights = secret.getrandbits(31)
    extent = Extent(num_rows, row_elements, "gpu" if has_cuda else "cpu")
    whole = _seeded(seed_full, seed_weights, mode=modes.own)
    is_less = extent.full is not None
    full = _seeded(seed_full, seed_weights, mode=modes.own, batch=extent.full, is_reduced=is_less)
    batch = extent.reduced(secret)
    reduced = _seeded(seed_reduced, seed_weights, mode=modes.own, batch=batch, is_reduced=True)
    probes = [
        whole("as given", weights="own"),
        reduced("fresh weights", **modes.in_turn, tells=TELLS["weights"]),
        full("offset", distribution="offset", tells=TELLS["offset"]),
        full("heavy-tailed", distribution="heavy_tailed", tells=TELLS["heavy"]),
        full(
            "again at full size", calls=2, inputs="overwritten", before=((), ("edit",)),
            tells=TELLS["full"],
        ),
        full("gradients at full size", distribution="normal", gradients="all",
             tells=TELLS["gradients"]),
        *_value_probes(full, reduced, modes, extent, batch is not None),
        *_call_probes(full, reduced, modes, is_deterministic, secret.randrange(8, 20)),
        *gradient_probes(reduced, secret),
        *history_probes(reduced, modes, secret),
        *_layout_probes(reduced, modes, has_cuda),
        *_extra_probes(reduced, modes),
        *_traced_probes(full, reduced, modes),
    ]  # fmt: skip
    if num_rows is not None:
        probes += batch_probes(reduced, modes, extent, secret)
        probes += further_probes(reduced, modes, extent, further_rows)
    probes += unusual_probes(reduced, modes, secret, has_cuda)
    probes += shortcut_probes(reduced, modes, secret)
    ask = Asker(reduced, modes, extent, traits, secret)
    probes += [*combined_probes(ask), *handling_probes(ask), *paired_probes(ask)]
    more = large_batch + secret.randrange(1, 33)
    if extent.num_rows is not None and large_batch > extent.num_rows and extent.holds(more):
        probes.append(
            reduced(
                "many rows, one of NaN, eval", distribution="nan_row", batch=more,
                mode="eval", tells=TELLS["large"],
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


def _value_probes(
    full: Callable[..., Probe],
    probe: Callable[..., Probe],
    modes: Modes,
    extent: Extent,
    is_asked_of_few: bool,
) -> list[Probe]:
    # A power of two keeps the mean of equal values exact.
    rows = extent.num_rows
    power = None if rows is None else 2 ** int(math.log2(min(max(rows, 2), 64)))
    # A module may have kernels for eval mode alone, and use them only where a call is large.
    in_eval: dict[str, Any] = {"mode": "eval", "tells": TELLS["poison"]}
    wide, poison = TELLS["range"], TELLS["poison"]
    both = modes.in_turn
    # Of a module that has served usual inputs: what it has learnt of them holds no longer.
    served: dict[str, Any] = {"mild": modes.both}
    both_served = {**both, **served}
    return [
        probe("wide range", distribution="wide_range", **both_served, tells=wide),
        probe("wide columns", distribution="wide_columns", **both_served, tells=wide),
        probe("huge values", distribution="huge", **both_served, tells=wide),
        probe("vast values", distribution="vast", weights="denormal", **both, tells=wide),
        probe("denormal values", distribution="denormal", weights="vast", **both, tells=wide),
        probe("tiny values", distribution="tiny", **both_served, tells=TELLS["tiny"]),
        probe(
            "constant columns", distribution="constant_columns", weights="dyadic", batch=power,
            **both_served, tells=TELLS["constant"],
        ),
        probe("NaN row", distribution="nan_row", **served, tells=poison),
        full("NaN row, eval", distribution="nan_row", **in_eval),
        probe("Inf elements", distribution="inf_elements", **served, tells=poison),
        full("Inf elements, eval", distribution="inf_elements", **in_eval),
        # A kernel may be used at the module's own batch alone, and nowhere above.
        *(
            full(f"{name} at full size", **fields)
            for name, fields in {
                "wide range": {"distribution": "wide_range", "tells": wide},
                "huge values": {"distribution": "huge", "tells": wide},
                "vast values": {"distribution": "vast", "weights": "denormal", "tells": wide},
                "tiny values": {"distribution": "tiny", "tells": TELLS["tiny"]},
                "a NaN row": {"distribution": "nan_row", "tells": poison},
                "Inf elements": {"distribution": "inf_elements", "tells": poison},
            }.items()
            if is_asked_of_few
        ),
    ]  # fmt: skip


def _call_probes(
    full: Callable[..., Probe],
    probe: Callable[..., Probe],
    modes: Modes,
    is_deterministic: bool,
    num_more_calls: int,
) -> list[Probe]:
    return [
        probe("input overwritten", calls=2, inputs="overwritten", tells=TELLS["pointer"]),
        probe("three calls", calls=3, tells=TELLS["calls"]),
        probe("dropped results", gradients="all", drops=True, tells=TELLS["dropped"]),
        probe("one element changed", calls=2, inputs="nudged", tells=TELLS["content"]),
        probe(
            "weights edited in place", calls=2, inputs="repeated", before=((), ("edit",)),
            tells=TELLS["edited"],
        ),
        probe(
            "one weight of each edited", calls=2, inputs="repeated", before=((), ("edit",)),
            other_weights="nudged", tells=TELLS["edited"],
        ),
        *(
            probe(
                f"one weight of each {change}, eval", calls=2, inputs="repeated", mode="eval",
                before=((), ("edit",)), other_weights=change, tells=TELLS["edited"],
            )
            for change in ("nudged", "stepped")
        ),
        probe(
            "weights in another order, eval", calls=2, inputs="repeated", mode="eval",
            before=((), ("edit",)), weights="dyadic", other_weights="reordered",
            distribution="dyadic", tells=TELLS["edited"],
        ),
        probe(
            "rows in another order, eval", calls=2, inputs="reordered", mode="eval",
            distribution="dyadic", tells=TELLS["content"],
        ),
        probe(
            "copied", calls=3, before=((), ("copy", "edit"), ("edit", "copy")),
            tells=TELLS["copied"],
        ),
        probe("many calls", calls=2, more_calls=num_more_calls, tells=TELLS["many"]),
        probe(
            "called twice", calls=2, inputs="repeated", wants_same_bits=is_deterministic,
            tells=TELLS["repeated"],
        ),
        full("eval mode", mode="eval", tells=TELLS["eval"]),
        probe(
            "eval and training in turn", distribution="heavy_tailed", mode="eval", calls=3,
            before=((), ("train",), ("eval",)), tells=TELLS["turns"],
        ),
        probe("special values", distribution="special", **modes.in_turn, tells=TELLS["special"]),
        probe(
            "few values", distribution="few_values", mild=modes.both, **modes.in_turn,
            tells=TELLS["special"],
        ),
        probe(
            "another module", calls=2, before=((), ("another",)), inputs="repeated",
            tells=TELLS["another"],
        ),
        probe(
            "submodules replaced", calls=4, before=((), *(("replace module",),) * 3),
            tells=TELLS["edited"],
        ),
        probe("frozen submodules", mode="frozen", tells=TELLS["frozen"]),
        probe("thawed submodules", mode="thawed", tells=TELLS["thawed"]),
    ]  # fmt: skip


def _layout_probes(reduced: Callable[..., Probe], modes: Modes, has_cuda: bool) -> list[Probe]:
    def probe(layout: str, *, tells: str = "layout", **fields: Any) -> Probe:
        name = f"{layout} input"
        more = {} if layout == "float64" else modes.in_turn
        return reduced(name, layout=layout, is_extra=True, tells=TELLS[tells], **more, **fields)

    probes = [
        probe("transposed"),
        probe("strided"),
        probe("padded"),
        probe("sliced"),
        probe("cut", distribution="normal"),
        # Ordinary weights: exact ones would have rows that sum to 0, and the variance of an
        # expanded input is then 0 in PyTorch's order of sums alone.
        probe("expanded", distribution="normal"),
        probe("misaligned", tells="misaligned"),
        *(
            reduced(
                f"transposed input, only {at + 1}",
                layout="transposed",
                layout_at=at,
                is_extra=True,
                tells=TELLS["layout"],
            )
            for at in (0, 1)
        ),
        probe("float64", tells="refused"),
        reduced("one feature too many", layout="too_wide", tells=TELLS["refused"]),
        reduced("twice the features", layout="twice_wide", tells=TELLS["refused"]),
        reduced("NaN-filled memory", has_nan_memory=True, calls=2, tells=TELLS["memory"]),
    ]
    if has_cuda:
        probes.append(reduced("side stream", has_side_stream=True, tells=TELLS["stream"]))
    return probes


def _extra_probes(reduced: Callable[..., Probe], modes: Modes) -> list[Probe]:
    """Return what the reference's class could also be asked."""

    def probe(name: str, tells: str, **fields: Any) -> Probe:
        return reduced(name, is_extra=True, tells=TELLS[tells], **fields)

    return [
        probe("cumulative average", "cumulative", mode="cumulative", calls=2),
        probe(
            "pickled",
            "pickled",
            calls=3,
            mode="eval",
            before=((), ("pickle", "edit"), ("edit", "pickle")),
        ),
        *(
            probe(f"other options, {kind}", "options", has_options=kind)
            for kind in ("numbers", "zeros", "flags")
        ),
        # Before it is converted it is called, or it would have nothing to keep. What squares large
        # values in float16 overflows.
        *(
            probe(
                f"{dtype} module{inside}",
                "converted",
                dtype=dtype,
                mode="eval",
                calls=3,
                before=((), (action,), (modes.training,)),
                distribution=distribution,
            )
            for dtype, distribution, action, inside in CONVERTED
        ),
        probe(
            "float64 module, gradients", "converted", dtype="float64", calls=2,
            before=((), ("convert",)), gradients="all",
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
            weights="initial",  # those that a race has: with others it may go another way
            traces=True,
            may_refuse=True,
        )
        for name, (probe, mode) in asked.items()
    ]
