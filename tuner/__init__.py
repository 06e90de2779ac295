"""Autotuner for PyTorch modules: describe it, tune it, verify it, export it.

    from tuner import load_config, tune

    run = tune(load_config("search_spaces/quickstart.yaml"))
    print(run.result().exported.least.speedup, run.export_path)

The names below are the whole Python API; the rest of the package may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what an editor and a type checker see of the names below
    from tuner.config.run_config import (
        RunConfig as RunConfig,
        load_config as load_config,
        parse_config as parse_config,
    )
    from tuner.errors import ConfigError as ConfigError, TunerError as TunerError
    from tuner.machine.doctor import doctor as doctor
    from tuner.problem.accuracy import Accuracy as Accuracy
    from tuner.review.notebook import load_run as load_run
    from tuner.review.report import write_report as write_report
    from tuner.run import Run as Run, open_run as open_run
    from tuner.session.live_module import Tuned as Tuned, tune as tune
    from tuner.session.tuning import (
        Observer as Observer,
        export_trial as export_trial,
        plan as plan,
        resume as resume,
        verify as verify,
    )

_API = {
    "Accuracy": "problem.accuracy",
    "ConfigError": "errors",
    "Observer": "session.tuning",
    "Run": "run",
    "RunConfig": "config.run_config",
    "Tuned": "session.live_module",
    "TunerError": "errors",
    "doctor": "machine.doctor",
    "export_trial": "session.tuning",
    "load_config": "config.run_config",
    "load_run": "review.notebook",
    "open_run": "run",
    "parse_config": "config.run_config",
    "plan": "session.tuning",
    "resume": "session.tuning",
    "tune": "session.live_module",
    "verify": "session.tuning",
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
