"""From Python: a live module and example inputs, tuned as a file in KernelBench's format is.

fast = tune(module, (x, y), time="2m")
fast.module(x, y)      a ModelNew that shares the module's parameters and buffers
fast.path, fast.speedup
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config.quantities import absolute_workloads
from tuner.config.run_config import RunConfig, load_config
from tuner.errors import InputError, NothingCorrectError, input_errors
from tuner.planning.deriving import derive_operator
from tuner.planning.observing import Observer
from tuner.review.workloads import headline_of
from tuner.run import Run
from tuner.session import tuning
from tuner.session.live_file import require_arguments, require_live, require_rows, write_live
from tuner.trial import Finalist, Interval, Value

if TYPE_CHECKING:
    import torch

__all__ = ["Tuned", "tune", "tune_module"]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What became of a live module.

    `path` is the verified file, `module` its `ModelNew.from_module` of the live one: parameters
    and buffers are shared, settings and modes are copied. `interval` is that of the file's
    speed-up over PyTorch eager; None where it was not raced. Of several numbers of rows it is the
    least one, and `at_rows` has each; that is empty where the file is of the last of them alone,
    and `run.result().notes` says why.
    """

    path: Path
    run: Run
    interval: Interval | None
    module: torch.nn.Module
    at_rows: Mapping[int, Interval] = field(default_factory=dict)

    @property
    def speedup(self) -> float | None:
        """How many times as fast as PyTorch eager the file was, in fresh processes."""
        return None if self.interval is None else self.interval.speedup


def tune(what: Any, inputs: Any = None, **options: Any) -> Any:
    """Tune a config, as `tuning.tune` does, or a live module, as `tune_module` does.

    Args:
        what: a RunConfig, or a `torch.nn.Module`.
        inputs: of a module: the tensors of one call.
        options: those of `tuning.tune` or of `tune_module`.

    Returns:
        The Run of a config; the Tuned of a module.

    Raises:
        InputError: it is neither, or as for those two.
    """
    if isinstance(what, RunConfig):
        return tuning.tune(what, **options)
    return tune_module(what, inputs, **options)


def tune_module(
    module: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    runs_dir: Path | str = tuning.DEFAULT_RUNS_DIR,
    observer: Observer | None = None,
    force: bool = False,
    batch: int | str | Sequence[int] | None = None,
    **overrides: Value,
) -> Tuned:
    """Tune a live module, in the mode that it is in, with the weights that it has.

    Args:
        module: of a class that can be imported: defined in a file, at its top level. It is only
            read.
        inputs: the tensors of one call. Timed and checked calls get these values too, at other
            places, and others of the same shapes and dtypes.
        runs_dir: where the run directory is made.
        observer: what happens is reported to it.
        force: search also where PyTorch is as fast as the device allows.
        batch: the rows (dim 0 of inputs) to tune for, where they are not as many as `inputs` have;
            of several, as `[64, 1024]`, each is tuned, for one file. As `--batch`.
        overrides: time, effort, trials, timeout, seed, sampler, accuracy, workloads, rewrites,
            match or device, as on the command line; the device is that of the module's parameters
            by default.

    Raises:
        InputError: such a module, or such inputs cannot be tuned; the message says why.
        NothingCorrectError, NothingToGainError, MachineError: as `tuning.tune`.
    """
    unknown = sorted(overrides.keys() - _OVERRIDES)
    if unknown:
        known = ", ".join(sorted({"batch", *_OVERRIDES}))
        raise InputError(f"tune: unknown option {unknown[0]!r}\n  known: {known}")
    require_live(module, inputs)
    require_arguments(module, inputs)
    given = {"device": _device_of(module, inputs), **overrides}
    if batch is not None:
        rows = require_rows(module, inputs, batch, str(given["device"]))
        given["batch"] = ",".join(map(str, rows))
    if isinstance(named := given.get("workloads"), Sequence):
        with input_errors("tune: workloads"):  # as they are recorded, and on a command line
            given["workloads"] = absolute_workloads(named)
    path = write_live(module, inputs)
    command = " ".join(["tune", str(path), *(f"--{k} {v}" for k, v in given.items())])
    chosen: dict[str, Any] = {
        k: str(given.pop(k)) for k in ("rewrites", "match") if given.get(k) is not None
    }
    made = derive_operator(path, observer, batch=given.get("batch"), **chosen)
    config = load_config(made.config, given)
    run = tuning.tune(
        config,
        runs_dir=Path(runs_dir),
        observer=observer,
        overrides=given,
        command=command,
        force=force,
    )
    result = run.result()
    assert result is not None and result.exported is not None  # or it would have raised
    if not result.exported.check.is_accepted:
        reason = result.exported.check.reason
        raise NothingCorrectError(f"{run.path}: the exported file was rejected: {reason}")
    fast = _imported(run.export_path).ModelNew.from_module(module)
    interval, _ = headline_of(result.exported)
    return Tuned(run.export_path, run, interval, fast, _at_rows(config, result.exported))


_OVERRIDES = {
    "time", "effort", "trials", "timeout", "seed", "sampler", "accuracy", "device", "rewrites",
    "match", "workloads",
}  # fmt: skip


def _at_rows(config: RunConfig, exported: Finalist) -> dict[int, Interval]:
    """Return the speed-up at each of several numbers of rows, the fewest first."""
    if config.listed is None:
        return {}
    races = {
        rows: exported.at_sizes.get(config.listed.words(rows)) for rows in config.listed.values
    }
    return {n: race.least for n, race in races.items() if race and race.least}


def _device_of(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> str:
    held = [*module.parameters(), *module.buffers(), *inputs]
    return str(held[0].device)


def _imported(path: Path) -> Any:
    """Import the verified file under a name of its own, where pickling finds its class."""
    name = f"tuned_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found
