"""Autotuner for PyTorch modules: describe it, tune it, prove it, export it.

    from tuner import load_config, tune

    run = tune(load_config("search_spaces/quickstart.yaml"))
    print(run.result().exported.interval.speedup, run.export_path)

The names below are the whole Python API; the rest of the package may change.
"""

from __future__ import annotations

import importlib
from typing import Any

_API = {
    "Accuracy": "problem.accuracy",
    "ConfigError": "errors",
    "Observer": "tuning",
    "Run": "run",
    "RunConfig": "config.run_config",
    "TunerError": "errors",
    "doctor": "machine.doctor",
    "export_trial": "tuning",
    "load_config": "config.run_config",
    "load_run": "review.notebook",
    "open_run": "run",
    "parse_config": "config.run_config",
    "plan": "tuning",
    "resume": "tuning",
    "tune": "tuning",
    "verify": "tuning",
    "write_report": "review.report",
}
__all__ = sorted(_API)


def __getattr__(name: str) -> Any:
    """Load a name of the API when it is first used: `tune --help` must be instant."""
    if name not in _API:
        raise AttributeError(f"module 'tuner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tuner.{_API[name]}"), name)


def __dir__() -> list[str]:
    return __all__
