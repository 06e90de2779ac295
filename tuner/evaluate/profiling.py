"""One call of a file and one of the baseline, kernel by kernel, as PyTorch's profiler sees them.

In fresh processes, after all races: a profiler that has been at work slows what is launched later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tuner.errors import StorageError, WorkerError
from tuner.evaluate.contender import Contender
from tuner.evaluate.job_spec import JobSpec, asked
from tuner.evaluate.race_sets import RaceSets, Ready
from tuner.machine.turns import turns_of
from tuner.profiled import PROFILE_NAME, KernelTime, Launch, Profiled, Profiles
from tuner.storage import write_whole
from tuner.trial import Result, to_json
from tuner.wording import one_line

__all__ = ["call_of", "profile_into", "profiled"]

ON_A_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the profiler's own
ON_A_CPU = "cpu_op"


def profiled(
    spec: JobSpec, contender: Contender, trial: int, ready: Ready | None = None
) -> Profiles:
    """Profile one warm call of the baseline and one of a contender that was checked.

    `ready` are processes that were started before.

    Raises:
        WorkerError: a process failed; the message starts with the contender's name.
    """
    sets, turns = RaceSets(spec, ready), turns_of(spec.device)
    with turns.memory(spec.memory_share), closing(sets.each([contender], 1, [1])) as one:
        _, workers = next(one)
        sets.give(workers)
        with turns.shared():  # the profiler's first start in a process takes a second
            for worker in workers:
                asked(worker, "profile", {})
        with turns.alone():
            found = [asked(worker, "profile", {}).data["events"] for worker in workers]
    has_gpu = spec.is_gpu
    baseline, winner = (
        call_of(events, number, is_gpu=has_gpu)
        for events, number in zip(found, (None, trial), strict=True)
    )
    return Profiles(has_gpu, baseline, winner)


def profile_into(folder: Path, spec: JobSpec, result: Result, ready: Ready | None = None) -> str:
    """Keep the profile of a run's exported file in its folder; return why there is none, or ""."""
    contender = Contender.of_file(Path(result.export_path), is_deterministic=False)
    try:
        write_whole(
            folder / PROFILE_NAME, to_json(profiled(spec, contender, result.winner, ready))
        )
    except (WorkerError, StorageError) as error:
        return one_line(str(error))
    except (LookupError, TypeError, ValueError) as error:  # another version's trace
        return f"the profiler's trace cannot be read: {type(error).__name__}: {error}"
    return ""


def call_of(events: Sequence[Mapping[str, Any]], trial: int | None, *, is_gpu: bool) -> Profiled:
    """Return the shortest call of a trace: what else the machine does makes others longer.

    Args:
        events: of the Chrome trace that the profiler writes, times in us; those of the category
            `user_annotation` are the calls themselves, one after the other.
        trial: whose file it is; None of the baseline.
        is_gpu: whether what a GPU did is wanted, or PyTorch's operations on the CPU: of those that
            lie within another one, the other one.
    """
    known = sorted(events, key=lambda event: (float(event["ts"]), -float(event["dur"])))
    calls = [event for event in known if event["cat"] == "user_annotation"]
    call = min(calls, key=lambda event: float(event["dur"]))
    start_us, end_us = float(call["ts"]), float(call["ts"]) + float(call["dur"])
    chosen: list[Mapping[str, Any]] = []
    last_us = start_us
    for event in known:
        if not last_us <= float(event["ts"]) < end_us:
            continue
        if is_gpu and event["cat"] in ON_A_GPU:
            chosen.append(event)
        elif not is_gpu and event["cat"] == ON_A_CPU:
            chosen.append(event)
            last_us = float(event["ts"]) + float(event["dur"])
    if is_gpu and chosen:  # the host's part of the call is no time of the GPU's
        start_us = float(chosen[0]["ts"])
        end_us = max(float(event["ts"]) + float(event["dur"]) for event in chosen)
    kernels = tuple(
        KernelTime(
            str(event["name"]),
            float(event["ts"]) - start_us,
            float(event["dur"]),
            _launch(event.get("args") or {}),
        )
        for event in chosen
    )
    return Profiled(trial, end_us - start_us, kernels)


def _launch(args: Mapping[str, Any]) -> Launch | None:
    """Return how a kernel was launched, by the profiler's names; None where it does not say."""
    grid, block = args.get("grid"), args.get("block")
    if not grid or not block:
        return None
    occupancy = args.get("est. achieved occupancy %")
    return Launch(
        math.prod(map(int, grid)),
        math.prod(map(int, block)),
        int(args.get("registers per thread", 0)),
        int(args.get("shared memory", 0)),
        None if occupancy is None else float(occupancy) / 100,
    )
