"""PyTorch's time beside the least time that the device allows, measured before a search.

For operators that were derived from a module, whose graph is known.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tuner.capture.outline import Outline
from tuner.errors import NothingToGainError, TunerError
from tuner.evaluate.asking import with_memory
from tuner.evaluate.contender import QUIET
from tuner.evaluate.job_spec import PREPARE_TIMEOUT_S, asked, new_worker
from tuner.evaluate.worker import Worker
from tuner.machine.ceilings import bound_us
from tuner.machine.device import Device
from tuner.machine.platforms import is_gpu
from tuner.machine.turns import turns_of
from tuner.planning.observing import Observer
from tuner.planning.planning import Planned
from tuner.review.gain import Gain, ModuleRecord

__all__ = ["ROUNDING", "bound_of", "least_us", "measured", "nothing", "worth_searching"]

PRECISION = "fp32"  # a nest has no products for tensor cores
OF_HALVES = "fp16x3"  # products by halves have
ONE_HALF = "fp16"
FIRST_SAMPLES = 3
TIMED_S = {"gpu": 0.2, "cpu": 0.5}  # of samples, of PyTorch and of the copy each
FEWEST, MOST = 5, 100  # samples
TF32_CLASSES = ("pytorch", "tf32")  # of accuracy, in which PyTorch may take it
# What constraints call it that PyTorch rounds a module's convolutions, by layout.
ROUNDING = {
    "given": "device.rounds_convolutions", "channels_last": "device.rounds_channels_last",
}  # fmt: skip

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
    kind = planned.config.accuracy.kind
    return Gain(
        device=planned.device.name,
        is_gpu=is_gpu(planned.device.kind),
        read_bytes=outline.read_bytes,
        written_bytes=outline.written_bytes,
        flops=outline.flops,
        product_flops=outline.matrix_flops + outline.convolution_flops,
        bound_us=least_us(outline, planned.device, kind),
    )


def least_us(outline: Outline, device: Device, accuracy: str) -> float | None:
    """Return the time below which a device cannot do it in us, None where that is not known.

    Tensor cores and the plain ones work side by side, with the memory. Of float32 products a class
    of `accuracy` in which PyTorch may take TF32 allows one of float16, which rounds as much; but
    `pytorch` of convolutions alone, as PyTorch's own settings do. Others take three.
    """
    rest = outline.flops - outline.matrix_flops - outline.convolution_flops
    least = bound_us(rest, outline.num_bytes, device, PRECISION)
    dtypes = {given.dtype for given in outline.given}
    if least is None or "float64" in dtypes:
        return least
    is_short = bool(dtypes & {"float16", "bfloat16"})
    products_us = 0.0
    for flops, rounding in (
        (outline.matrix_flops, ("tf32", "tolerance")),
        (outline.convolution_flops, ("tf32", "tolerance", "pytorch")),
    ):
        precision = ONE_HALF if is_short or accuracy in rounding else OF_HALVES
        products_us += bound_us(flops, 0.0, device, precision) or 0.0
    return max(least, products_us)


def measured(planned: Planned, outline: Outline, observer: Observer | None = None) -> Gain:
    """Time PyTorch's forward, and a copy of as many bytes, in a process of their own.

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
        with new_worker(task["device"], name="gain", env=QUIET, is_ours=True) as worker:
            eager = _seen(worker, task, asks_rounding=_depends_on_rounding(planned))
            copy_us = _seen(worker, copy).us
        facts = {ROUNDING[layout]: rounds for layout, rounds in eager.rounds.items()}
        return replace(gain, eager_us=eager.us, copy_us=copy_us, facts=facts)


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
        if gain.facts.get(ROUNDING["given"]) is False:
            why = "PyTorch does not round this module's convolutions to TF32 here"
            observer.on_stage(f"{why}: kernels that do are not tried")
    return ModuleRecord(outline, gain)


def nothing(gain: Gain) -> NothingToGainError:
    """Return, for the caller to raise, that PyTorch is as fast as the device allows."""
    advice = (
        "this is of the forward, not of steps of training; next: --force searches all the same"
    )
    return NothingToGainError(f"nothing to gain: {gain.words}\n  {advice}", gain.data)


def _depends_on_rounding(planned: Planned) -> bool:
    """Whether configurations are feasible only where PyTorch rounds its convolutions."""
    may_round = is_gpu(planned.device.kind) and planned.config.accuracy.kind in TF32_CLASSES
    asked_of = {name for rule in planned.constraints for name in rule.names}
    return may_round and not asked_of.isdisjoint(ROUNDING.values())


class _Seen(NamedTuple):
    """What was seen of a reference: its forward's median time; by layout, whether it rounds."""

    us: float
    rounds: Mapping[str, bool]


def _seen(worker: Worker, task: Mapping[str, Any], *, asks_rounding: bool = False) -> _Seen:
    """Time a reference in a process, which has no other one from then on."""
    turns = turns_of(task["device"])

    def seen() -> _Seen:
        asked(worker, "prepare", task, timeout_s=PREPARE_TIMEOUT_S)
        with turns.alone():
            first = asked(worker, "time_model", {"num_samples": FIRST_SAMPLES}).data["samples_us"]
            timed_s = TIMED_S["gpu" if is_gpu(task["device"]) else "cpu"]
            number = round(timed_s * 1e6 / max(statistics.median(first), 1.0))
            wanted = {"num_samples": min(MOST, max(FEWEST, number))}
            samples_us = asked(worker, "time_model", wanted).data["samples_us"]
        rounds: dict[str, bool] = {}
        if asks_rounding:
            # Where it is not found out, for lack of memory say, no configuration is left out.
            with turns.shared(), suppress(TunerError):
                rounds = asked(worker, "rounding", {}).data["rounds"]
        return _Seen(float(statistics.median(samples_us)), rounds)

    def seen_or_ended() -> _Seen:
        try:
            return seen()
        except TunerError:
            worker.kill()  # with the memory that it holds, which the next try may lack
            raise

    return with_memory(turns, seen_or_ended, float(task["memory_share"]))
