"""What both sides compute in, and how near that is to the device's rates, in words."""

from __future__ import annotations

from tuner.problem.accuracy import Accuracy
from tuner.review.formatting import rate_words, three_digits, us_words
from tuner.review.run_data import RunData

__all__ = ["accuracy_words", "eager_words", "least_words", "products_words", "race_words",
           "roofline_words", "throughput_words"]  # fmt: skip

NEAR_RATIO = 1.05  # of two speed-ups of one race

# How a float32 product is made of others, by precision.
_PRODUCTS = {
    "fp16x3": "each float32 product is made of three of float16, as exact as float32",
    "fp16x2": "each float32 product is made of one of float16 and two corrections in 8 bits",
    "tf32": "each float32 product is one of TF32",
    "fp16": "each float32 product is one of float16, which keeps as many bits as TF32",
}


def accuracy_words(run_data: RunData) -> str:
    """Return the accuracy class and what it accepts."""
    accuracy = _accuracy(run_data)
    label = run_data.environment.accuracy or "unknown"
    return f"{label} ({accuracy.words})" if accuracy else label


def eager_words(run_data: RunData) -> str:
    """Return what PyTorch's own modules compute in; empty where it is not known."""
    module, accuracy = run_data.module, _accuracy(run_data)
    dtypes = {given.dtype for given in module.outline.given} if module else {"float32"}
    floats = sorted(dtype for dtype in dtypes if "float" in dtype)
    if "float32" not in floats:
        return ", ".join(floats)
    others = [dtype for dtype in floats if dtype != "float32"]
    device = run_data.device
    if accuracy is None or device is None or device.kind != "cuda":
        return ", ".join([*others, "float32"])
    return ", ".join([*others, accuracy.arithmetic])


def products_words(run_data: RunData) -> str:
    """Return how the winner makes products of float32, where not in plain float32."""
    named, of_pytorch = run_data.precision, run_data.baseline_precision
    is_fallback = run_data.result is not None and run_data.result.is_fallback
    is_known = bool(of_pytorch) and named != of_pytorch and not is_fallback
    return _PRODUCTS.get(named, "") if is_known else ""


def race_words(what: str, run_data: RunData) -> str:
    """Return what the times of a raced file are of.

    Of two medians the ratio may be another one than the speed-up, whose ratios are each of times
    beside each other: on a machine that others use by much.
    """
    words = f"{what}, raced against PyTorch in fresh processes"
    finalist, baseline_us = run_data.finalist, run_data.baseline.latency_us
    interval = None if finalist is None else finalist.interval
    if finalist is None or interval is None or not (finalist.latency_us and baseline_us):
        return words
    if finalist.least_on:  # the speed-up is of other data
        return words
    of_medians = baseline_us / finalist.latency_us
    if max(of_medians / interval.speedup, interval.speedup / of_medians) > NEAR_RATIO:
        words += "; these are medians, the speed-up is of times beside each other"
    return words


def _accuracy(run_data: RunData) -> Accuracy | None:
    try:
        return Accuracy.parse(run_data.environment.accuracy)
    except ValueError:
        return None


def throughput_words(run_data: RunData, latency_us: float | None) -> str:
    """Return arithmetic and operands over the time; empty if they are not known."""
    flops, num_bytes = run_data.environment.flops, run_data.environment.bytes
    if not latency_us or not flops:
        return ""
    words = rate_words(flops / latency_us / 1e6)
    if num_bytes:
        words += f", {three_digits(num_bytes / latency_us / 1e3)} GB/s"
    return words


def roofline_words(run_data: RunData, latency_us: float | None) -> str:
    """Return the share of the roofline of the units that are used; empty if it is not known.

    Which units a kernel of PyTorch's own uses is not recorded: then the fastest that the accuracy
    class allows are named, the only ones that cannot be passed.
    """
    bounds = run_data.bounds()
    if not latency_us or not bounds:
        return ""
    used = next((b for b in bounds if b.precision == run_data.precision), None)
    bound = used or min(bounds, key=lambda bound: bound.latency_us)
    which = "which it computes in" if used else "the fastest that the accuracy class allows"
    limit = "memory" if bound.is_memory else "arithmetic"
    return (
        f"{100 * bound.latency_us / latency_us:.0f} % of {rate_words(bound.tflops)}, the roofline "
        f"({limit}) of {bound.words}, {which}"
    )


def least_words(run_data: RunData, latency_us: float | None, baseline_us: float | None) -> str:
    """Return how far a derived operator is from the device's bound; empty if not known.

    That is in the fastest units that the accuracy class allows. In the units that the winner
    computes in less may be left, which is said beside it.
    """
    bound_us = run_data.least_us
    if not bound_us:
        return ""
    is_fallback = run_data.result is not None and run_data.result.is_fallback
    ours_us = None if is_fallback else latency_us
    times = {"PyTorch takes": baseline_us, "what was found": ours_us}
    ratios = " times that, ".join(f"{who} {us / bound_us:.2f}" for who, us in times.items() if us)
    is_arithmetic = run_data.module is not None and bound_us != run_data.module.gain.bound_us
    units = "in the fastest units allowed" if is_arithmetic else "by the device's rates"
    words = f"{us_words(bound_us)} {units}" + (f": {ratios} times" if ratios else "")
    used_us = next(
        (b.latency_us for b in run_data.bounds() if b.precision == run_data.precision), 0
    )
    if ours_us and used_us > bound_us:
        words += f"; {us_words(used_us)} in the units it uses: {ours_us / used_us:.2f} times"
    return words
