"""The counters of a run's winner and of its baseline, counted anew and kept with the run."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from tuner.config.run_config import config_of
from tuner.errors import InputError
from tuner.evaluate.counting import counted, find_ncu
from tuner.machine.turns import turns_of
from tuner.planning.planning import plan
from tuner.profiled import COUNTERS_NAME
from tuner.run import Run
from tuner.storage import write_whole
from tuner.trial import to_json

__all__ = ["count_calls"]


def count_calls(run: Run) -> None:
    """Count one call of the exported file and one of PyTorch, and keep it as `counters.json`.

    Raises:
        InputError: the run has no exported file, or is of no NVIDIA GPU.
        ToolchainError: ncu is not installed.
        WorkerError: ncu or the call failed.
    """
    result = run.result()
    export = Path(result.export_path) if result is not None else run.export_path
    export = export if export.is_file() else run.export_path  # of a run that was moved
    if not export.is_file():
        raise InputError(
            f"{run.path}: no exported file to count\n"
            f"  next: end the run: tune --resume {quote(str(run.path))}"
        )
    kind = run.environment().device.get("kind")
    if kind != "cuda":
        raise InputError(
            f"{run.path}: only an NVIDIA GPU has counters that can be read\n"
            f"  got: a run on {kind or 'a device that was not recorded'}\n"
            "  next: see the run's kernels in its report, which need no counters"
        )
    ncu = find_ncu()
    planned = plan(config_of(run))
    turns = turns_of(planned.spec.device)
    with turns.memory(), turns.alone():
        found = counted(ncu, planned.spec, export, planned.device.capability)
    write_whole(run.path / COUNTERS_NAME, to_json(found))
