"""Build given configurations outside a search: what `sanitize` and `ablation` share.

Imports no PyTorch: a device is asked for its facts in a process of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import InputError, TunerError
from tuner.evaluate.job_spec import explained, new_worker
from tuner.evaluate.worker import JobFailed
from tuner.kernel.builder import Builder
from tuner.kernel.cache import default_cache_dir
from tuner.kernel.family import Family, load_family
from tuner.kernel.toolchain import Toolchain
from tuner.machine.device import Device
from tuner.space.search_space import SearchSpace
from tuner.trial import Candidate, Params, Status, from_json

DESCRIBE_S = 300.0


@dataclass(frozen=True, slots=True)
class Built:
    """A configuration on this machine: its candidate and artefact, or why there is none.

    `note` is the reason, or what is worth knowing of a build that succeeded (spills).
    """

    params: Params
    candidate: Candidate | None = None
    artefact: Path | None = None
    note: str = ""


def label(params: Mapping[str, Any]) -> str:
    """Return a configuration as `name=value, ...`, without its template."""
    return ", ".join(f"{k}={v}" for k, v in params.items() if k != "template") or "defaults"


def this_device(name: str) -> Device:
    """Return the facts of `cpu`, `cuda` or `cuda:N`.

    Raises:
        DeviceError: there is no such device here.
    """
    with new_worker("cpu", name="describe") as worker:
        try:
            found = worker.call("describe", {"device": name}, timeout_s=DESCRIBE_S).data
        except JobFailed as failure:
            raise explained(failure) from failure
    return from_json(Device, json.dumps(found["device"]))


def build_all(
    op: str,
    configurations: Sequence[Params],
    device: Device,
    sizes: Sequence[Mapping[str, int]],
) -> tuple[list[Built], dict[str, str]]:
    """Build configurations, as many at a time as there are cores.

    Args:
        op: the operator's family.
        configurations: `template` and the parameters that differ from its defaults.
        device: where they will run.
        sizes: of all the shapes that they will be called with; all must be feasible.

    Returns:
        What became of each, in order; and variables for the process that runs them.
    """
    family = load_family(op)
    refused = [refusal(family, params, device, sizes) for params in configurations]
    languages = {
        family.templates[str(params["template"])].language
        for params, reason in zip(configurations, refused, strict=True)
        if not reason
    }
    toolchain = Toolchain.find(device.kind, device.capability, sorted(languages))
    cores = len(os.sched_getaffinity(0))
    with Builder(
        toolchain, default_cache_dir(), num_workers=cores, triton_sizes=sizes, timeout_s=600.0
    ) as builder:
        found: list[Any] = []
        for params, reason in zip(configurations, refused, strict=True):
            if reason:
                found.append(Built(params, note=reason))
                continue
            candidate = family.render(params, device.facts())
            found.append((params, candidate, builder.submit(candidate)))
        return [b if isinstance(b, Built) else _built(*b) for b in found], builder.environment


def _built(params: Params, candidate: Candidate, future: Any) -> Built:
    try:
        build = future.result()
    except TunerError as error:
        return Built(params, note=f"{type(error).__name__}: {error}")
    if build.status is not Status.CORRECT:
        return Built(params, note=f"does not compile: {build.error}")
    spills = sum(kernel.spill_store_bytes for kernel in build.kernels)
    note = f"{spills} bytes spilled" if spills else ""
    return Built(params, candidate, Path(build.artefact), note)


def refusal(
    family: Family, params: Params, device: Device, sizes: Sequence[Mapping[str, int]]
) -> str:
    """Return why the configuration cannot run here, in one line, or nothing."""
    name = str(params["template"])
    varied = {k: (v,) for k, v in params.items() if k != "template"}
    for shape in sizes:
        facts = {**device.facts(), **family.op.sizes, **shape}
        try:
            SearchSpace.build(
                family.parameters([name], varied), family.constraints([name], varied), facts
            )
        except InputError as error:
            return f"infeasible: {' '.join(str(error).split())}"
    return ""
