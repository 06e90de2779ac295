"""What is asked of a candidate: while it is screened, and when it is checked in full."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from tuner.check.crossing import Action, Dtype, Mode
from tuner.check.lives import gradient_probes, history_probes
from tuner.check.probe import Modes, Probe
from tuner.check.tells import TELLS
from tuner.check.unusual import unusual_probes
from tuner.problem.draws import Distribution

__all__ = [
    "screening_probes",
    "thorough_probes",
]

# A module may have kernels for eval mode alone, and use them only where a call is large.
_FULL: dict[str, Any] = {"batch": None, "is_reduced": False}
TRAINING = Modes()


CONVERTED: tuple[tuple[Dtype, Distribution, Action, str], ...] = (
    ("float64", "as_given", "convert", ""),
    ("float64", "as_given", "convert inside", " inside another"),
    ("float16", "offset", "convert", ""),
    ("bfloat16", "as_given", "convert", ""),
)


def screening_probes(
    seed: int, num_rows: int | None, mode: Literal["train", "eval"] = "train"
) -> list[Probe]:
    """Return the short list that screens candidates while searching.

    `num_rows` is the problem's own batch (`Problem.num_rows`), None where it has none.
    """
    secret = random.Random(seed)
    seed_inputs, seed_weights = secret.getrandbits(31), secret.getrandbits(31)
    batch = None if num_rows is None else _odd_batch(num_rows)
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
    may_refuse_batches: bool = False,
    large_batch: int = 0,
) -> list[Probe]:
    """Return everything that is asked of finalists, exports and strangers' files.

    Few probes run at full size, since one tensor of the flagship is 256 MB. What names no mode is
    asked in the problem's own of `modes`.
    `is_deterministic` asks for the same bits from the same input. `may_refuse_batches` accepts
    an exception (never a wrong answer) at batches other than `num_rows`. From `large_batch` rows
    on the module is known to take another way in eval mode.
    """
    secret = random.Random(seed)
    seed_full, seed_reduced = secret.getrandbits(31), secret.getrandbits(31)
    seed_weights = secret.getrandbits(31)
    full = _seeded(seed_full, seed_weights, mode=modes.own)
    batch = None
    if num_rows is not None and num_rows > 256 and not may_refuse_batches:
        batch = secret.randrange(193, 257)  # a known one would be a shape to be right for
    reduced = _seeded(seed_reduced, seed_weights, mode=modes.own, batch=batch, is_reduced=True)
    probes = [
        full("as given", weights="own"),
        reduced("fresh weights", **modes.in_turn, tells=TELLS["weights"]),
        full("offset", distribution="offset", tells=TELLS["offset"]),
        full("heavy-tailed", distribution="heavy_tailed", tells=TELLS["heavy"]),
        full(
            "again at full size", calls=2, inputs="overwritten", before=((), ("edit",)),
            tells=TELLS["full"],
        ),
        full("gradients at full size", distribution="normal", gradients="all",
             tells=TELLS["gradients"]),
        *_value_probes(reduced, modes, num_rows, may_refuse_batches),
        *_call_probes(reduced, modes, is_deterministic, num_more_calls=secret.randrange(8, 20)),
        *gradient_probes(reduced, secret),
        *history_probes(reduced, modes, secret),
        *_layout_probes(reduced, modes, has_cuda),
        *_extra_probes(reduced, modes),
        *_traced_probes(full, reduced, modes),
    ]  # fmt: skip
    if num_rows is not None:
        probes += _batch_probes(reduced, modes, num_rows, may_refuse_batches, secret)
    probes += unusual_probes(reduced, modes, secret, has_cuda)
    if num_rows is not None and large_batch > num_rows and not may_refuse_batches:
        more = large_batch + secret.randrange(1, 33)
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
    probe: Callable[..., Probe], modes: Modes, num_rows: int | None, is_fixed: bool
) -> list[Probe]:
    # A power of two keeps the mean of equal values exact.
    power = (
        None if num_rows is None or is_fixed else 2 ** int(math.log2(min(max(num_rows, 2), 64)))
    )
    wide, poison = TELLS["range"], TELLS["poison"]
    both = modes.in_turn
    return [
        probe("wide range", distribution="wide_range", **both, tells=wide),
        probe("wide columns", distribution="wide_columns", **both, tells=wide),
        probe("huge values", distribution="huge", **both, tells=wide),
        probe("vast values", distribution="vast", weights="denormal", **both, tells=wide),
        probe("denormal values", distribution="denormal", weights="vast", **both, tells=wide),
        probe("tiny values", distribution="tiny", **both, tells=TELLS["tiny"]),
        probe(
            "constant columns", distribution="constant_columns", weights="dyadic", batch=power,
            **both, tells=TELLS["constant"],
        ),
        probe("NaN row", distribution="nan_row", tells=poison),
        probe("NaN row, eval", distribution="nan_row", mode="eval", **_FULL, tells=poison),
        probe("Inf elements", distribution="inf_elements", tells=poison),
        probe(
            "Inf elements, eval", distribution="inf_elements", mode="eval", **_FULL, tells=poison
        ),
    ]  # fmt: skip


def _call_probes(
    probe: Callable[..., Probe], modes: Modes, is_deterministic: bool, num_more_calls: int
) -> list[Probe]:
    return [
        probe("input overwritten", calls=2, inputs="overwritten", tells=TELLS["pointer"]),
        probe("three calls", calls=3, tells=TELLS["calls"]),
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
        probe("eval mode", mode="eval", **_FULL, tells=TELLS["eval"]),
        probe(
            "eval and training in turn", distribution="heavy_tailed", mode="eval", calls=3,
            before=((), ("train",), ("eval",)), tells=TELLS["turns"],
        ),
        probe("special values", distribution="special", **modes.in_turn, tells=TELLS["special"]),
        probe("few values", distribution="few_values", **modes.in_turn, tells=TELLS["special"]),
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
    ]


def _traced_probes(
    full: Callable[..., Probe], reduced: Callable[..., Probe], modes: Modes
) -> list[Probe]:
    """Return probes that find where a module runs the reference's own operations."""
    asked: dict[str, tuple[Callable[..., Probe], Mode]] = {
        "own work, training": (full, "train"),
        "own work, eval": (full, "eval"),
        "own work, fewer rows": (reduced, "train"),
        "own work, fewer rows, eval": (reduced, "eval"),
        "own work, gradients": (reduced, "train"),
        "own work, gradients, eval": (reduced, "eval"),
        "own work, transposed input": (reduced, modes.own),
    }
    return [
        probe(
            name,
            mode=mode,
            gradients="all" if "gradients" in name else "",
            layout="transposed" if "transposed" in name else "contiguous",
            distribution="normal",
            traces=True,
            may_refuse=True,
        )
        for name, (probe, mode) in asked.items()
    ]


def _batch_probes(
    probe: Callable[..., Probe],
    modes: Modes,
    num_rows: int,
    may_refuse: bool,
    secret: random.Random,
) -> list[Probe]:
    fields: dict[str, Any] = {
        "may_refuse": may_refuse, "is_reduced": False, "tells": TELLS["batch"],
    }  # fmt: skip
    # Two rows that happen to be close have a difference with few right bits in any float32
    # arithmetic, so there the products and sums are made exact.
    exact = {"distribution": "dyadic", "weights": "dyadic", **fields}
    usual = {"distribution": "normal", **modes.in_turn, **fields}
    in_eval = {"distribution": "normal", "mode": "eval", **fields}
    wide = {"gradients": "all", "backward": (0, 1), **usual}
    small = {2: exact, 1: {"distribution": "normal", **fields}, 0: usual}
    probes = [
        probe(f"batch {batch}", batch=batch, **others)
        for batch, others in small.items()
        if batch != num_rows
    ]
    # Which ones is secret, or a module could know them.
    some = secret.choice([rows for rows in range(33, 64) if rows != num_rows])
    parity = secret.randrange(2)  # a part of the module's own tiles may be wrong
    remainders = {**usual, "tells": TELLS["remainders"]}
    for rows in range(3, 65):
        more: dict[str, Any] = {}
        if rows > 32:  # each in one mode; few rows, which have ways of their own, in both
            mode = modes.other if (rows + parity) % 2 else modes.own
            more = {"calls": 1, "before": (), "mode": mode}
        elif rows <= 8:
            more = exact
        if rows != num_rows:
            probes.append(probe(f"{rows} rows", batch=rows, **{**remainders, **more}))
    odd = _odd_batch(num_rows)
    if num_rows > 80:
        odd = 2 * secret.randrange(33, (min(num_rows, 1024) - 1) // 2) + 1
    longer = num_rows + secret.randrange(1, 65, 2)
    # Whole tiles of any kernel, and where the problem is small as many as fill a device.
    tiles = secret.choice([rows for rows in (128, 256) if rows != num_rows])
    whole = TELLS["tiles"]
    if num_rows <= 512:
        many = secret.choice([rows for rows in (1024, 2048) if rows != num_rows])
        odd_many = secret.randrange(513, 1024, 2)
        probes += [
            probe("whole tiles, many", batch=many, **{**usual, "tells": whole}),
            probe("gradients of many rows", batch=odd_many, **{**wide, "tells": whole}),
        ]
    # More than the blocks that a grid of CUDA has in its second dimension.
    tall = 65536 + secret.randrange(1, 64)
    if num_rows < tall and not may_refuse:
        probes.append(
            probe("very many rows", batch=tall, is_tall=True, **(usual | {"tells": whole}))
        )
    return [
        probe("some rows", batch=some, **usual),
        probe("an odd batch", batch=odd, **usual),
        probe("whole tiles", batch=tiles, **{**usual, "tells": whole}),
        probe(
            "another number of threads",
            batch=tiles,
            num_threads=secret.choice((3, 5, 7)),
            **{**usual, "tells": TELLS["team"]},
        ),
        probe("more rows", batch=longer, **{**wide, "tells": TELLS["rows"]}),
        probe("some rows, eval", batch=some + 1, **in_eval),
        probe("one row, eval", batch=1, **in_eval),
        *probes,
    ]


def _odd_batch(num_rows: int) -> int:
    """Return an odd batch other than the problem's own, at most 257 rows."""
    if num_rows > 257:
        return 257
    return num_rows - 1 if num_rows % 2 == 0 and num_rows > 2 else num_rows + 2
