"""Calls that threads make at once: of one module, or of one each."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.check.calls.exercise import checksum_of, outputs_of, snapshots
from tuner.check.calls.gradients import dense, gradients_of, leaves_of
from tuner.machine.platforms import is_gpu, platform_of

if TYPE_CHECKING:
    import torch

__all__ = ["Made", "called_at_once"]

MIN_AT_ONCE = 24  # calls of each thread, and more for as long as this
AT_ONCE_S = 0.1
FEW_THREADS = 6  # of more, the calls of each round begin together: few cores run few at once
NUM_ROUNDS = 3
NUM_FRESH = 6  # copies of a module that was never called: what it makes then is for all threads
MAX_KEPT = 4  # different answers of a thread: one that sums in no fixed order has many


@dataclass(frozen=True, slots=True)
class Made:
    """What a call returned, copies of its tensors, and its gradients where these are asked for."""

    result: Any
    copies: list[torch.Tensor | None]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def called_at_once(
    models: Sequence[torch.nn.Module],
    arguments: Sequence[Sequence[Any]],
    device: torch.device,
    given: Mapping[str, torch.Tensor],
    *,
    has_gradients: bool,
) -> list[Made]:
    """Call a module from one thread for each set of arguments, again and again at the same time.

    On a GPU each thread has a stream of its own. What calls write into buffers is undone before
    the next one.

    Args:
        models: of each thread, which may be one and the same.
        arguments: of each thread.
        device: of both.
        given: the question's tensors; `grad.<k>` is the gradient that output k gets.
        has_gradients: each call is followed by one with a backward.

    Returns:
        What each thread got most seldom.
    """
    platform_of(device).synchronize(device)  # what was made until now is of another stream
    together = threading.Barrier(len(arguments))
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # a call of a small module is over in 50 us
    fresh: list[torch.nn.Module] = []
    is_one = len(models) <= FEW_THREADS and all(model is models[0] for model in models)
    if is_one and not models[0].training:
        with contextlib.suppress(Exception):  # another probe asks for copies
            # With the same weights and buffers: an output may be one of them.
            held = [*models[0].parameters(), *models[0].buffers()]
            fresh = [copy.deepcopy(models[0], {id(t): t for t in held}) for _ in range(NUM_FRESH)]
    try:
        with ThreadPoolExecutor(len(arguments)) as pool:
            made = [
                pool.submit(_repeated, model, each, device, given, together, has_gradients, fresh)
                for model, each in zip(models, arguments, strict=True)
            ]
            found = [each.result() for each in made]
    finally:
        sys.setswitchinterval(interval_s)
    # As PyTorch's encoder with a mask does; then threads are asked for the answers with gradients.
    is_other = has_gradients and _answers_otherwise(models[0], arguments[0])
    return [with_gradients if is_other else without for without, with_gradients in found]


def _answers_otherwise(model: torch.nn.Module, arguments: Sequence[Any]) -> bool:
    """Whether a call without gradients, alone, gives other numbers than one with."""
    import torch

    def is_like(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        if one is None or other is None or one.shape != other.shape:
            return one is other
        wide = torch.complex128 if one.is_complex() else torch.float64
        first, second = (x.detach().to(wide) for x in (one, other))
        return bool(torch.allclose(first, second, rtol=0.01, atol=0.01, equal_nan=True))

    start = [(buffer, buffer.clone()) for buffer in model.buffers() if model.training]
    answers = []
    for is_trained in (False, True):
        with torch.set_grad_enabled(is_trained):
            answers.append(snapshots(outputs_of(model(*arguments))))
        with torch.no_grad():
            for buffer, value in start:
                buffer.copy_(value)
    return len(answers[0]) != len(answers[1]) or not all(map(is_like, *answers))


def _repeated(
    model: torch.nn.Module,
    arguments: Sequence[Any],
    device: torch.device,
    given: Mapping[str, torch.Tensor],
    together: threading.Barrier,
    has_gradients: bool,
    fresh: Sequence[torch.nn.Module],
) -> tuple[Made, Made]:
    """Return what was got most seldom: the answer without gradients and that with, if any."""
    import torch

    start: dict[str, torch.Tensor] = {}
    stream = torch.cuda.Stream(device) if is_gpu(device) else None
    num_seen: Counter[int] = Counter()
    kept: dict[int, tuple[Made, Made]] = {}

    def once(called: Any) -> tuple[Made, Made]:
        with torch.no_grad():
            undo()
            result = called(*arguments)
            copies = snapshots(outputs_of(result))
        alone = Made(result, copies)
        if not has_gradients:
            return alone, alone
        with torch.enable_grad():
            undo()
            trained = called(*arguments)
            outputs = [y for y in outputs_of(trained) if isinstance(y, torch.Tensor)]
            if not any(y.requires_grad for y in outputs):
                return alone, alone
            grads = dense(gradients_of(leaves_of(called, arguments), outputs, given), [])
            copies_of_it = snapshots(outputs_of(trained))
            return Made(result, copies, grads), Made(trained, copies_of_it, grads)

    def undo() -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():  # a call may put others in their place
                if name in start:
                    buffer.copy_(start[name])

    with torch.cuda.stream(stream):  # it is of the thread, as is the mode
        if model.training:
            start.update((name, buffer.clone()) for name, buffer in model.named_buffers())
        end_s = math.inf
        is_many = together.parties > FEW_THREADS
        num_calls = NUM_ROUNDS if is_many else MIN_AT_ONCE
        for called in itertools.chain(fresh, itertools.repeat(model)):
            if is_many or num_seen.total() <= len(fresh):  # the first call of each module
                with contextlib.suppress(threading.BrokenBarrierError):
                    together.wait()
                end_s = time.monotonic() + (0.0 if is_many else AT_ONCE_S)
            try:
                made = once(called)
                copies = (y for each in made for y in each.copies)
                tensors = [*(y for y in copies if y is not None), *made[0].gradients.values()]
                bits = hash(tuple(checksum_of(y) for y in tensors))
            except BaseException:  # memory may run out in either
                together.abort()  # who waits goes on
                raise
            num_seen[bits] += 1
            if len(kept) < MAX_KEPT:
                kept.setdefault(bits, made)
            if num_seen.total() >= num_calls and time.monotonic() >= end_s:
                break
        if stream is not None:
            stream.synchronize()
    return kept[min(kept, key=lambda bits: num_seen[bits])]
