"""A run's trials in the community's T4 results format, which `recorded` reads again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from tuner.environment import Environment
from tuner.trial import Status, Trial

__all__ = ["LOWER_BOUND", "MS", "to_t4"]

MS = 1000.0  # in us
T4_VERSION = "1.0.0"
LOWER_BOUND = "is_lower_bound"  # our own measurement in a T4 file: 1 where a time is one


def to_t4(name: str, trials: Sequence[Trial], environment: Environment) -> str:
    """Return a run's trials in the community's T4 results format, version 1.0.0.

    Source: the results schema that Kernel Tuner 1.5 ships (`schema/T4/1.0.0`). Times are in
    milliseconds, as Kernel Tuner writes them; beyond the schema there are `metadata`, `reason`,
    and Kernel Tuner's own `benchmark`.

    Args:
        name: the run's.
        trials: in order.
        environment: as the run recorded it.
    """
    fields = ("device_name", "title", "sizes", "accuracy", "started_at", "command")
    recorded = environment.entries()
    metadata = {field: recorded[field] for field in fields if field in recorded}
    metadata = {"run": name, "kernel_name": environment.op, **metadata}
    results = [_t4_result(trial) for trial in trials]
    data = {"schema_version": T4_VERSION, "metadata": metadata, "results": results}
    return json.dumps(data, indent=1, allow_nan=False)


def _t4_result(trial: Trial) -> dict[str, Any]:
    outcome = trial.outcome
    build_s, device_s, check_s = (
        outcome.seconds.get(stage, 0.0) for stage in ("build", "device", "check")
    )
    result: dict[str, Any] = {
        "timestamp": trial.started_at,
        "configuration": trial.params,
        "objectives": ["time"],
        "times": {
            "compilation_time": build_s * 1e3,
            "validation": check_s * 1e3,
            "benchmark": max(0.0, device_s - check_s) * 1e3,
            "runtimes": [],
        },
        "invalidity": outcome.status.value,
        "correctness": float(outcome.status is Status.CORRECT),
        "measurements": [],
    }
    measured = outcome.measurement
    if outcome.latency_us is not None and measured is not None:
        result["times"]["runtimes"] = [us / MS for us in measured.samples_us if math.isfinite(us)]
        result["measurements"] = [
            {"name": "time", "value": outcome.latency_us / MS, "unit": "ms"},
            {"name": "noise", "value": _finite(measured.noise), "unit": ""},
            {"name": LOWER_BOUND, "value": int(measured.is_censored), "unit": ""},
        ]
        if measured.anchor_us is not None:
            anchor = {"name": "baseline_time", "value": measured.anchor_us / MS, "unit": "ms"}
            result["measurements"].append(anchor)
    if outcome.reason:
        result["reason"] = outcome.reason
    return result


def _finite(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
