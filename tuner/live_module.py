"""From Python: a live module and example inputs, tuned as a file in KernelBench's format is.

    fast = tune(module, (x, y), time="2m")
    fast.module(x, y)      a ModelNew that shares the module's parameters and buffers
    fast.path, fast.speedup

The file that is written imports the module's class by its name: whoever has the module at hand has
that as well, and running a copy of its source would run the file a second time. What the
constructor was given is not known, so the module's state is saved beside the file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import io
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import tuning
from tuner.capture.derive import identifier
from tuner.config.run_config import RunConfig, load_config
from tuner.deriving import derive_operator
from tuner.errors import InputError, NothingCorrectError
from tuner.machine.forkserver import MARKER
from tuner.machine.host import cache_folder
from tuner.observing import Observer
from tuner.problem.modes import others_in_mode
from tuner.run import Run
from tuner.storage import storage_errors, write_whole
from tuner.trial import Interval, Value

if TYPE_CHECKING:
    import torch

__all__ = ["Tuned", "tune", "tune_module", "write_live"]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What became of a live module.

    `path` is the verified file, `module` its `ModelNew.from_module` of the live one: parameters
    and buffers are shared, settings and modes are copied. `interval` is that of the file's
    speed-up over PyTorch eager; None where it was not raced.
    """

    path: Path
    run: Run
    interval: Interval | None
    module: torch.nn.Module

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
        overrides: time, effort, trials, timeout, seed, sampler, accuracy, rewrites, match or
            device, as on the command line; the device is that of the module's parameters by
            default.

    Raises:
        InputError: such a module, or such inputs cannot be tuned; the message says why.
        NothingCorrectError, NothingToGainError, MachineError: as `tuning.tune`.
    """
    unknown = sorted(overrides.keys() - _OVERRIDES)
    if unknown:
        known = ", ".join(sorted(_OVERRIDES))
        raise InputError(f"tune: unknown option {unknown[0]!r}\n  known: {known}")
    path = write_live(module, inputs)
    given = {"device": _device_of(module, inputs), **overrides}
    command = " ".join(["tune", str(path), *(f"--{k} {v}" for k, v in given.items())])
    chosen = {k: str(given.pop(k)) for k in ("rewrites", "match") if given.get(k) is not None}
    made = derive_operator(path, observer, **chosen)
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
    made = _imported(run.export_path).ModelNew.from_module(module)
    return Tuned(run.export_path, run, result.exported.interval, made)


_OVERRIDES = {
    "time", "effort", "trials", "timeout", "seed", "sampler", "accuracy", "device", "rewrites",
    "match",
}  # fmt: skip


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


# ---- the file -------------------------------------------------------------------------------


def write_live(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Path:
    """Write a live module as a file in KernelBench's format, and its state beside it.

    Both lie in the cache, by content.

    Raises:
        InputError: it cannot be written so that another process makes the same of it.
        StorageError: the cache cannot be written.
    """
    source = _checked(module, inputs)
    state = _state(module, inputs)
    key = hashlib.sha256(state + source.encode()).hexdigest()[:12]
    kind = type(module)
    folder = cache_folder() / "live" / f"{identifier(kind.__name__)}-{key}"
    path, beside = folder / f"{identifier(kind.__name__)}.py", folder / "state.pt"
    file = Path(source).resolve()
    name = kind.__module__ if kind.__module__ != "__main__" else file.stem
    text = _TEXT.format(
        kind=kind.__qualname__,
        file=str(file),
        name=name,
        sha256="" if _is_installed(file) else hashlib.sha256(file.read_bytes()).hexdigest(),
        paths=[str(Path(p).resolve()) for p in sys.path if not _is_installed(Path(p).resolve())],
        state=str(beside),
    )
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not beside.is_file():
            partial = beside.with_suffix(f".{os.getpid()}")
            partial.write_bytes(state)
            partial.replace(beside)
    write_whole(path, text)
    return path


def _is_installed(path: Path) -> bool:
    """Whether a file or folder belongs to Python or to an installed package."""
    roots = {Path(root).resolve() for root in (sys.prefix, sys.base_prefix)}
    return "site-packages" in path.parts or any(path.is_relative_to(root) for root in roots)


def _checked(module: Any, inputs: Any) -> str:
    """Return the file of a module's class, once it is known that it can be tuned.

    Raises:
        InputError: it cannot.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise InputError(
            f"tune: expected a config of load_config, or a torch.nn.Module; got {_word(module)}"
        )
    kind = type(module)
    where = f"tune({kind.__name__})"
    if MARKER in os.environ:
        raise InputError(
            f"{where}: called again where its file is imported to be tuned\n"
            "  next: put the call under `if __name__ == '__main__':`"
        )
    if not isinstance(inputs, (list, tuple)) or not inputs:
        raise InputError(
            f"{where}: inputs: expected a list or tuple of the tensors of one call, got "
            f"{_word(inputs)}\n  next: tune(module, (x,))"
        )
    for number, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"{where}: inputs[{number}]: expected a tensor, got {_word(value)}\n"
                "  next: let a module of your own hold what is no tensor, and take tensors alone"
            )
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        raise InputError(
            f"{where}: the module is compiled already\n  next: tune the one that it was made of"
        )
    if "forward" in vars(module):
        raise InputError(
            f"{where}: the instance has a forward of its own; expected that of its class\n"
            "  next: write it as the forward of a class"
        )
    others = others_in_mode(module)
    if others:
        modes = ["eval", "training"]
        raise InputError(
            f"{where}: it is in {modes[module.training]} mode, but {', '.join(others[:3])} in "
            f"{modes[not module.training]} mode; expected one mode for all of it\n"
            "  next: call .eval() or .train() on the module"
        )
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):
        file = None
    if file is None or not Path(file).is_file():
        raise InputError(
            f"{where}: its class is in no file (a notebook, or an interactive session): other "
            "processes could not import it\n  next: move the class to a file, and import it"
        )
    if "<locals>" in kind.__qualname__:
        raise InputError(
            f"{where}: its class is defined inside a function ({kind.__qualname__}): other "
            f"processes could not import it\n  next: move the class to the top level of {file}"
        )
    return file


def _word(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def _state(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> bytes:
    """Return what the file's Model and inputs are made of, as `torch.save` writes it.

    Raises:
        InputError: something of it cannot be saved.
    """
    import torch

    given = [value.detach().cpu() for value in inputs]
    memory = io.BytesIO()
    try:
        torch.save({"module": vars(module), "inputs": given}, memory)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise InputError(
            f"tune({type(module).__name__}): the module cannot be saved for other processes: "
            f"{error}\n  next: keep functions and open files out of its attributes and hooks"
        ) from error
    return memory.getvalue()


_TEXT = """\
# {kind} of {file}, as it was when it was tuned from Python.
import hashlib
import importlib
import pickle
import sys
import types
from pathlib import Path

import torch

TUNED_FILE = {file!r}  # where forward stands
_LIVE_NAME, _LIVE_KIND = {name!r}, {kind!r}
_LIVE_SHA256 = {sha256!r}  # of the file; empty for an installed package
_LIVE_PATHS = {paths!r}
_LIVE_STATE = {state!r}


def _live_source():
    # The module that defines the class: the script that runs, or what its name imports.
    main = sys.modules.get("__main__")
    if Path(getattr(main, "__file__", None) or "/").resolve() == Path(TUNED_FILE):
        return main
    sys.path.extend(path for path in _LIVE_PATHS if path not in sys.path)
    return importlib.import_module(_LIVE_NAME)


def _live_kind(name=_LIVE_KIND):
    found = _live_source()
    text = Path(found.__file__).read_bytes()
    if _LIVE_SHA256 and hashlib.sha256(text).hexdigest() != _LIVE_SHA256:
        raise ImportError(f"{{found.__file__}} is another text than was tuned; tune it again")
    for part in name.split("."):
        found = getattr(found, part)
    return found


class _LiveUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        return _live_kind(name) if module == "__main__" else super().find_class(module, name)


def _live_state():
    if not Path(_LIVE_STATE).is_file():
        raise RuntimeError(
            f"{{_LIVE_STATE}}: no longer there; ModelNew.from_module(module) does without it"
        )
    reader = types.SimpleNamespace(__name__="pickle", Unpickler=_LiveUnpickler)
    _live_source()
    return torch.load(
        _LIVE_STATE, map_location="cpu", weights_only=False, pickle_module=reader
    )


class Model(_live_kind()):
    # The user's class, with the state that the module had.
    def __init__(self):
        vars(self).update(_live_state()["module"])


def _live_moved(value):
    # The example's values at other places, which PyTorch's seed decides.
    for dim, size in enumerate(value.shape if value.numel() else ()):
        places = (torch.arange(size) + torch.randint(size, (1,))) % size
        value = value.index_select(dim, places)
    return value


def get_inputs():
    return [_live_moved(value) for value in _live_state()["inputs"]]


def get_init_inputs():
    return []
"""
