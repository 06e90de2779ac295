"""What is asked of a candidate: while it is screened, and when it is checked in full."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tuner.check.crossing import Layout, Mode
from tuner.problem.draws import Distribution

__all__ = [
    "ROUNDING",
    "Probe",
    "screening_probes",
    "thorough_probes",
]

# A module may have kernels for eval mode alone, and use them only where a call is large.
_FULL: dict[str, Any] = {"batch": None, "is_reduced": False}


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that is asked of a candidate.

    `batch` None is as given. `weights`: "own" are those that the candidate's constructor draws,
    "initial" those of the reference, "random" and "dyadic" fresh ones. With several `calls`,
    `inputs` says how the input of each relates to the one before: "fresh" (new content, new
    memory), "repeated", "overwritten" (new content in the same memory, same version counter),
    "nudged" (one element changed). Before the second call `edits_weights` replaces every parameter
    in place ("one": one element of each), `copies` goes on with a deep copy in other memory, and
    `more_calls` are made that nobody looks at. `mode` "frozen" is training with every submodule in
    eval mode, "cumulative" is training with momentum None, "in_turn" is eval at every other call.
    With `gradients`, "plain_inputs" asks for the parameters' alone, "of_sum" gives every row of an
    output the same gradient. `is_double` converts the module. `is_reduced`: the batch is smaller
    only to be quick, and as given where the reference refuses it. `is_drawn`: each call's inputs
    are a draw of the reference's own. `traces` lists PyTorch's operations that ran. `tells` is
    what a failure here usually means.
    """

    name: str
    distribution: Distribution = "as_given"
    batch: int | None = None
    seed_inputs: int = 0
    seed_weights: int = 0
    weights: Literal["own", "initial", "random", "dyadic"] = "random"
    calls: int = 1
    inputs: Literal["fresh", "repeated", "overwritten", "nudged"] = "fresh"
    edits_weights: Literal["", "all", "one"] = ""
    copies: bool = False
    more_calls: int = 0
    mode: Mode = "train"
    gradients: Literal["", "all", "plain_inputs", "of_sum"] = ""
    is_double: bool = False
    is_reduced: bool = False
    is_drawn: bool = False
    layout: Layout = "contiguous"
    has_nan_memory: bool = False
    has_side_stream: bool = False
    traces: bool = False
    wants_same_bits: bool = False
    may_refuse: bool = False
    tells: str = ""


def screening_probes(seed: int, num_rows: int | None) -> list[Probe]:
    """Return the short list that screens candidates while searching.

    `num_rows` is the problem's own batch (`Problem.num_rows`), None where it has none.
    """
    secret = random.Random(seed)
    seed_inputs, seed_weights = secret.getrandbits(31), secret.getrandbits(31)
    batch = None if num_rows is None else _odd_batch(num_rows)
    probe = _seeded(seed_inputs, seed_weights)
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


TELLS = {
    "weights": "is a weight ignored, or eps?",
    "offset": "a variance from sums of squares, or right only for the tested distribution?",
    "heavy": "is it right only for the tested distribution?",
    "range": "are operands split or rounded to a format of less range?",
    "tiny": "is eps dropped or changed?",
    "constant": "a variance of 0 must not turn negative or NaN",
    "poison": "a NaN or Inf of the input must reach what the reference lets it reach",
    "batch": "is it right only for the tested shape?",
    "rows": "are rows beyond those of the tested shape wrong?",
    "large": "are large calls in eval mode computed in a way of their own?",
    "full": "memoised, or weights folded and kept, at the full size?",
    "eval": "eval mode must use the stored statistics, and change nothing",
    "frozen": "submodules in eval mode inside a training parent",
    "cumulative": "momentum=None averages over all calls",
    "turns": "eval mode must use the statistics as they are now",
    "many": "is it right only in the first calls, or are outputs used again?",
    "copied": "does a copy, or a module that was moved, go on with the weights of old?",
    "converted": "a converted module must compute in its new type, or refuse",
    "calls": "is it right only on the first call, or replays it?",
    "repeated": "an input seen before",
    "pointer": "memoised by pointer or version counter, or kept from the first call?",
    "content": "memoised by a part of the content?",
    "edited": "are the weights folded once and kept?",
    "gradients": "is the backward wrong, or the output detached?",
    "layout": "are strides ignored?",
    "misaligned": "do vector loads assume 16-byte alignment?",
    "refused": "what the reference refuses must be refused, not computed",
    "memory": "is memory read that was never written?",
    "stream": "does it run on another stream than the current one?",
}

# Said in place of a question about the layout, where the error is too small for that.
ROUNDING = "an error of rounding size: are sums or operands rounded more than PyTorch's?"


def thorough_probes(
    seed: int,
    num_rows: int | None,
    *,
    is_deterministic: bool = True,
    has_cuda: bool = False,
    may_refuse_batches: bool = False,
    large_batch: int = 0,
) -> list[Probe]:
    """Return everything that is asked of finalists, exports and strangers' files.

    Few probes run at full size, since one tensor of the flagship is 256 MB.
    `is_deterministic` asks for the same bits from the same input. `may_refuse_batches` accepts
    an exception (never a wrong answer) at batches other than `num_rows`. From `large_batch` rows
    on the module is known to take another way in eval mode.
    """
    secret = random.Random(seed)
    seed_full, seed_reduced = secret.getrandbits(31), secret.getrandbits(31)
    seed_weights = secret.getrandbits(31)
    full = _seeded(seed_full, seed_weights)
    batch = None
    if num_rows is not None and num_rows > 256 and not may_refuse_batches:
        batch = secret.randrange(193, 257)  # a known one would be a shape to be right for
    reduced = _seeded(seed_reduced, seed_weights, batch=batch, is_reduced=True)
    probes = [
        full("as given", weights="own"),
        reduced("fresh weights", tells=TELLS["weights"]),
        full("offset", distribution="offset", tells=TELLS["offset"]),
        full("heavy-tailed", distribution="heavy_tailed", tells=TELLS["heavy"]),
        full(
            "again at full size", calls=2, inputs="overwritten", edits_weights="all",
            tells=TELLS["full"],
        ),
        full("gradients of weights", distribution="normal", gradients="plain_inputs",
             tells=TELLS["gradients"]),
        *_value_probes(reduced, num_rows, may_refuse_batches),
        *_call_probes(reduced, is_deterministic, num_more_calls=secret.randrange(8, 20)),
        *_layout_probes(reduced, has_cuda),
        reduced("own work", traces=True, may_refuse=True),
    ]  # fmt: skip
    if num_rows is not None:
        probes += _batch_probes(reduced, num_rows, may_refuse_batches, secret)
        if large_batch > num_rows and not may_refuse_batches:
            more = large_batch + secret.randrange(1, 33)
            probes.append(
                reduced(
                    "many rows, one of NaN, eval", distribution="nan_row", batch=more,
                    mode="eval", tells=TELLS["large"],
                )
            )  # fmt: skip
    return probes


def _seeded(seed_inputs: int, seed_weights: int, **common: Any) -> Callable[..., Probe]:
    def probe(name: str, **fields: Any) -> Probe:
        settings = {"seed_inputs": seed_inputs, "seed_weights": seed_weights, **common}
        return Probe(name, **{**settings, **fields})

    return probe


def _value_probes(
    probe: Callable[..., Probe], num_rows: int | None, is_fixed: bool
) -> list[Probe]:
    # A power of two keeps the mean of equal values exact.
    power = (
        None if num_rows is None or is_fixed else 2 ** int(math.log2(min(max(num_rows, 2), 64)))
    )
    wide = TELLS["range"]
    return [
        probe("wide range", distribution="wide_range", tells=wide),
        probe("wide columns", distribution="wide_columns", tells=wide),
        probe("tiny values", distribution="tiny", tells=TELLS["tiny"]),
        probe(
            "constant columns", distribution="constant_columns", weights="dyadic", batch=power,
            tells=TELLS["constant"],
        ),
        probe("NaN row", distribution="nan_row", tells=TELLS["poison"]),
        probe(
            "NaN row, eval", distribution="nan_row", mode="eval", **_FULL, tells=TELLS["poison"]
        ),
        probe("Inf element", distribution="inf_element", tells=TELLS["poison"]),
    ]  # fmt: skip


def _call_probes(
    probe: Callable[..., Probe], is_deterministic: bool, num_more_calls: int
) -> list[Probe]:
    return [
        probe("input overwritten", calls=2, inputs="overwritten", tells=TELLS["pointer"]),
        probe("three calls", calls=3, tells=TELLS["calls"]),
        probe("one element changed", calls=2, inputs="nudged", tells=TELLS["content"]),
        probe(
            "weights edited in place", calls=2, inputs="repeated", edits_weights="all",
            tells=TELLS["edited"],
        ),
        probe(
            "one weight of each edited", calls=2, inputs="repeated", edits_weights="one",
            tells=TELLS["edited"],
        ),
        probe("copied", calls=2, copies=True, edits_weights="all", tells=TELLS["copied"]),
        probe("many calls", calls=2, more_calls=num_more_calls, tells=TELLS["many"]),
        probe(
            "called twice", calls=2, inputs="repeated", wants_same_bits=is_deterministic,
            tells=TELLS["repeated"],
        ),
        probe("cumulative average", mode="cumulative", calls=2, tells=TELLS["cumulative"]),
        probe("eval mode", mode="eval", **_FULL, tells=TELLS["eval"]),
        probe(
            "eval and training in turn", distribution="heavy_tailed", mode="in_turn", calls=3,
            tells=TELLS["turns"],
        ),
        probe("frozen submodules", mode="frozen", tells=TELLS["frozen"]),
        probe(
            "gradients", distribution="normal", gradients="all", calls=2,
            tells=TELLS["gradients"],
        ),
        probe(
            "gradients, eval", distribution="normal", gradients="all", mode="eval",
            tells=TELLS["gradients"],
        ),
        probe(
            "gradients of a sum, eval", distribution="normal", gradients="of_sum", mode="eval",
            tells=TELLS["gradients"],
        ),
    ]  # fmt: skip


def _layout_probes(probe: Callable[..., Probe], has_cuda: bool) -> list[Probe]:
    probes = [
        probe("transposed input", layout="transposed", tells=TELLS["layout"]),
        probe("strided input", layout="strided", tells=TELLS["layout"]),
        probe("padded rows", layout="padded", tells=TELLS["layout"]),
        # Ordinary weights: exact ones would have rows that sum to 0, and the variance of an
        # expanded input is then 0 in PyTorch's order of sums alone.
        probe("expanded input", layout="expanded", distribution="normal", tells=TELLS["layout"]),
        probe("misaligned input", layout="misaligned", tells=TELLS["misaligned"]),
        probe("float64 input", layout="float64", may_refuse=True, tells=TELLS["refused"]),
        probe(
            "float64 module",
            layout="float64",
            is_double=True,
            may_refuse=True,
            tells=TELLS["converted"],
        ),
        probe("one feature too many", layout="too_wide", tells=TELLS["refused"]),
        probe("NaN-filled memory", has_nan_memory=True, calls=2, tells=TELLS["memory"]),
    ]
    if has_cuda:
        probes.append(probe("side stream", has_side_stream=True, tells=TELLS["stream"]))
    return probes


def _batch_probes(
    probe: Callable[..., Probe], num_rows: int, may_refuse: bool, secret: random.Random
) -> list[Probe]:
    fields: dict[str, Any] = {
        "may_refuse": may_refuse, "is_reduced": False, "tells": TELLS["batch"],
    }  # fmt: skip
    # Two rows that happen to be close have a difference with few right bits in any float32
    # arithmetic, so there the products and sums are made exact.
    exact = {"distribution": "dyadic", "weights": "dyadic", **fields}
    fields["distribution"] = "normal"
    settings = {2: exact, 1: fields, 0: fields}
    probes = [
        probe(f"batch {batch}", batch=batch, **others)
        for batch, others in settings.items()
        if batch != num_rows
    ]
    # Which ones is secret, or a module could know them.
    some = secret.choice([rows for rows in range(33, 64) if rows != num_rows])
    odd = _odd_batch(num_rows)
    if num_rows > 80:
        odd = 2 * secret.randrange(33, (min(num_rows, 1024) - 1) // 2) + 1
    more = num_rows + secret.randrange(1, 33)
    return [
        probe("some rows", batch=some, **fields),
        probe("an odd batch", batch=odd, **fields),
        probe("more rows", batch=more, **{**fields, "tells": TELLS["rows"]}),
        probe("some rows, eval", batch=some, mode="eval", **fields),
        probe("one row, eval", batch=1, mode="eval", **fields),
        *probes,
    ]


def _odd_batch(num_rows: int) -> int:
    """Return an odd batch other than the problem's own, at most 257 rows."""
    if num_rows > 257:
        return 257
    return num_rows - 1 if num_rows % 2 == 0 and num_rows > 2 else num_rows + 2
