"""PyTorch's time beside the least time that the device allows, measured before a search.

For operators that were derived from a module, whose graph is known.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.capture.half_products import PRODUCTS
from tuner.capture.outline import Outline
from tuner.errors import NothingToGainError
from tuner.evaluate.asking import with_memory
from tuner.evaluate.contender import QUIET
from tuner.evaluate.job_spec import PREPARE_TIMEOUT_S, asked, new_worker
from tuner.machine.ceilings import bound_us
from tuner.machine.platforms import is_gpu
from tuner.machine.turns import turns_of
from tuner.observing import Observer
from tuner.planning import Planned
from tuner.review.gain import Gain, ModuleRecord

__all__ = ["bound_of", "measured", "nothing", "worth_searching"]

PRECISION = "fp32"  # a nest has no products for tensor cores
OF_HALVES = "fp16x3"  # products by halves have
FIRST_SAMPLES = 3
TIMED_S = 0.5  # of samples, of PyTorch and of the copy each
FEWEST, MOST = 5, 100  # samples

# A module of as much traffic and no arithmetic, in KernelBench's format.
_COPY = """\
import torch

NUM_FLOATS = 1


class Model(torch.nn.Module):
    def forward(self, x):
        return x.clone()


def get_inputs():
    return [torch.arange(NUM_FLOATS, dtype=torch.float32)]


def get_init_inputs():
    return []
"""


def bound_of(planned: Planned, outline: Outline) -> Gain:
    """Return traffic and bound of a derived operator on a device, with nothing timed."""
    has_halves = not PRODUCTS.keys().isdisjoint(planned.family.templates)
    precision = OF_HALVES if has_halves else PRECISION
    return Gain(
        device=planned.device.name,
        is_gpu=is_gpu(planned.device.kind),
        read_bytes=outline.read_bytes,
        written_bytes=outline.written_bytes,
        flops=outline.flops,
        bound_us=bound_us(outline.flops, outline.num_bytes, planned.device, precision),
    )


def measured(planned: Planned, outline: Outline, observer: Observer | None = None) -> Gain:
    """Time PyTorch's forward, and a copy of as many bytes, in processes of their own.

    Takes seconds, most of them to open the device. On a machine without the device nothing is
    timed.

    Raises:
        ProblemError: the reference does not work on the device.
        WorkerError: its process died.
    """
    gain = bound_of(planned, outline)
    if planned.is_assumed:
        return gain
    (observer or Observer()).on_stage("timing PyTorch's forward, and a copy of as many bytes")
    task = planned.spec.payload()
    with tempfile.TemporaryDirectory(prefix="tuner-") as folder:
        path = Path(folder) / "copy.py"
        path.write_text(_COPY)
        sizes = {"NUM_FLOATS": max(1, outline.num_bytes // 8)}  # each is read and written
        copy = {**task, "reference": str(path), "sizes": sizes}
        return replace(gain, eager_us=_latency_us(task), copy_us=_latency_us(copy))


def worth_searching(
    planned: Planned, observer: Observer, *, force: bool = False
) -> ModuleRecord | None:
    """Return what is known of a derived operator before its search; None for any other.

    PyTorch is timed where the device's bound is known, unless the search is to be in any case.

    Raises:
        NothingToGainError: PyTorch is within 5 % of the bound, or of a copy of as many bytes.
        ProblemError, WorkerError: as for `measured`.
    """
    outline = planned.outline
    if outline is None:
        return None
    gain = bound_of(planned, outline)
    if gain.bound_us is None:
        observer.on_stage(f"the bound is not known: no datasheet's rates of {gain.device}")
    elif not force:
        gain = measured(planned, outline, observer)
        if gain.is_nothing:
            raise nothing(gain)
        observer.on_stage(f"to gain: {gain.words}")
    return ModuleRecord(outline, gain)


def nothing(gain: Gain) -> NothingToGainError:
    """Return, for the caller to raise, that PyTorch is as fast as the device allows."""
    advice = (
        "this is of the forward, not of steps of training; next: --force searches all the same"
    )
    return NothingToGainError(f"nothing to gain: {gain.words}\n  {advice}", gain.data)


def _latency_us(task: dict[str, Any]) -> float:
    """Return the median time of a reference's forward."""
    return with_memory(turns_of(task["device"]), lambda: _timed_us(task))


def _timed_us(task: dict[str, Any]) -> float:
    with new_worker(task["device"], name="gain", env=QUIET, is_ours=True) as worker:
        asked(worker, "prepare", task, timeout_s=PREPARE_TIMEOUT_S)
        with turns_of(task["device"]).alone():
            first = asked(worker, "time_model", {"num_samples": FIRST_SAMPLES}).data["samples_us"]
            number = round(TIMED_S * 1e6 / max(statistics.median(first), 1.0))
            wanted = {"num_samples": min(MOST, max(FEWEST, number))}
            samples_us = asked(worker, "time_model", wanted).data["samples_us"]
        return float(statistics.median(samples_us))
