"""A live module as a file in KernelBench's format, and its state beside it.

The file imports the module's class by its name: whoever has the module at hand has that as well,
and running a copy of its source would run the file a second time. What the constructor was given
is not known, so the module's state is saved beside the file.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.capture.derived_calls import identifier
from tuner.config.quantities import parse_rows
from tuner.errors import InputError, input_errors
from tuner.machine.forkserver import MARKER
from tuner.machine.host import cache_folder, usable_memory_bytes
from tuner.machine.importing import user_path
from tuner.problem.given import MOST_DRAWS, first_with_rows
from tuner.problem.modes import others_in_mode
from tuner.storage import storage_errors, write_whole

if TYPE_CHECKING:
    import torch

__all__ = ["require_arguments", "require_live", "require_rows", "write_live"]


def write_live(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Path:
    """Write a live module as a file in KernelBench's format, and its state beside it.

    Both lie in the cache, by content.

    Raises:
        InputError: it cannot be written so that another process makes the same of it.
        StorageError: the cache cannot be written.
    """
    source = require_live(module, inputs)
    state = _state(module, inputs)
    key = hashlib.sha256(state + source.encode()).hexdigest()[:12]
    kind = type(module)
    folder = cache_folder() / "live" / f"{identifier(kind.__name__)}-{key}"
    path, beside = folder / f"{identifier(kind.__name__)}.py", folder / "state.pt"
    file = Path(source).resolve()
    name = kind.__module__ if kind.__module__ != "__main__" else file.stem
    paths = [Path(p).resolve() for p in user_path()]
    text = _TEXT.format(
        kind=kind.__qualname__,
        file=str(file),
        name=name,
        sha256="" if _is_installed(file) else hashlib.sha256(file.read_bytes()).hexdigest(),
        paths=[str(p) for p in paths if not _is_installed(p)],
        state=str(beside),
        forward=_declared(kind),
    )
    with storage_errors(folder, is_cache=True):
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


def require_arguments(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Raise an InputError unless a module's forward takes so many inputs."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*inputs)
    except TypeError as error:
        raise InputError(
            f"tune({type(module).__name__}): inputs do not fit forward{signature}: {error}; got "
            f"{len(inputs)}\n  next: give one tensor for each argument that has no default"
        ) from None


def require_live(module: Any, inputs: Any) -> str:
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
        got = "an empty one" if isinstance(inputs, (list, tuple)) else _word(inputs)
        raise InputError(
            f"{where}: inputs: expected a list or tuple of the tensors of one call, got {got}\n"
            "  next: tune(module, (x,))"
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


def require_rows(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], batch: object, device: str
) -> list[int]:
    """Return the numbers of rows that a module shall be tuned for.

    Args:
        module: as `require_live` accepts it.
        inputs: of one call; the first of them that has a dimension has the rows in dim 0.
        batch: a whole number, several in a list or tuple, or text, as `64,1024`.
        device: that it is tuned on, as on the command line.

    Raises:
        InputError: these are no numbers of rows, or inputs of so many cannot be made.
    """
    where = f"tune({type(module).__name__}): batch"
    with input_errors(where):
        rows = parse_rows(batch)
    first = first_with_rows(inputs)
    if first is None or not first.shape[0]:
        shapes = ", ".join(str([*value.shape]) for value in inputs)
        raise InputError(
            f"{where}: expected rows in dim 0 of the first of inputs that has a dimension, got "
            f"inputs of shapes {shapes}\n  next: leave batch out, or give inputs with rows"
        )
    most, given = max(rows), int(first.shape[0])
    grows = [value.shape[:1] == first.shape[:1] for value in inputs]
    num_bytes = sum(
        value.nbytes * most // given if is_grown else value.nbytes
        for value, is_grown in zip(inputs, grows, strict=True)
    )
    memory_bytes = _memory_bytes(device)
    if num_bytes > memory_bytes:
        raise InputError(
            f"{where}: inputs of {most} rows are {num_bytes / 1e9:,.1f} GB, and {device} has "
            f"{memory_bytes / 1e9:,.1f} GB\n  next: fewer rows"
        )
    if most > MOST_DRAWS * given:
        raise InputError(
            f"{where}: inputs of {most} rows are made of those of inputs, which are {given}; "
            f"expected at most {MOST_DRAWS} times as many\n  next: fewer rows, or inputs of more"
        )
    return rows


def _memory_bytes(device: str) -> int:
    """Return the memory of a device, of several GPUs that of the largest."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return usable_memory_bytes()
    numbers = range(torch.cuda.device_count())
    return max(int(torch.cuda.get_device_properties(n).total_memory) for n in numbers)


def _declared(kind: type[torch.nn.Module]) -> str:
    """Return the parameters of a class's forward in parentheses, `...` for each default."""
    declared = inspect.signature(kind.forward)
    empty = inspect.Parameter.empty
    parameters = [
        p.replace(annotation=empty, default=empty if p.default is empty else ...)
        for p in declared.parameters.values()
    ]
    bare = declared.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return str(bare)


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
_LIVE_FORWARD = {forward!r}  # as it is declared, without its defaults


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


_LIVE_INPUTS = []  # once they were read: many rows are made of many draws


def _live_inputs():
    given = _LIVE_INPUTS or _live_state()["inputs"]
    if not any(value.is_meta or hasattr(value, "fake_mode") for value in given):
        _LIVE_INPUTS[:] = given
    return given


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
    moved = value.clone()
    for dim, size in enumerate(value.shape if value.numel() else ()):
        places = (torch.arange(size) + torch.randint(size, (1,))) % size
        moved = moved.index_select(dim, places)
    return moved


def get_inputs():
    return [_live_moved(value) for value in _live_inputs()]


def get_init_inputs():
    return []
"""
