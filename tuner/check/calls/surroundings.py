"""What a candidate must leave as it found it: PyTorch's functions, the clocks, the settings."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import operator
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["changed", "functions", "is_pytorchs", "left_by_a_refusal", "replaced", "settings"]


def settings() -> dict[str, Any]:
    """Return what PyTorch and Python are set to, for this thread, by name.

    None stands for what there is not yet, such as CUDA's random numbers.
    """
    import torch

    cudnn, hooks = torch.backends.cudnn, vars(torch.nn.modules.module)
    numpy = sys.modules.get("numpy")
    cuda = _short(torch.cuda.get_rng_state().numpy()) if torch.cuda.is_initialized() else None
    return {
        "gradients enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "seed": torch.initial_seed(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "number of threads": torch.get_num_threads(),
        "matmul precision": _said(torch.get_float32_matmul_precision),
        # One register of the processor is for Python's numbers and PyTorch's, of all widths.
        "denormal numbers": "lost" if _TINY * _ONE == 0.0 else "kept",
        "cuDNN": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "oneDNN": torch._C._get_mkldnn_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "hooks of all modules": sum(
            len(x) for name in _places_of_hooks() if isinstance(x := hooks.get(name), dict)
        ),
        "state of PyTorch's random numbers": _short(torch.get_rng_state().numpy()),
        "state of CUDA's random numbers": cuda,
        # 625 numbers, of which the text would take five times as long.
        "state of Python's random numbers": f"{hash(random.getstate()) & 0xFFFFFFFF:08x}",
        "state of NumPy's random numbers": _of_numpy(numpy) if numpy else None,
        "garbage collection": gc.isenabled(),
        "logging below": logging.root.manager.disable,
        "working directory": os.readlink("/proc/self/cwd"),
    }


_TINY, _ONE = 5e-324, 1.0  # the least number above 0; by name, or Python would multiply only once


@functools.cache
def _places_of_hooks() -> tuple[str, ...]:
    """Return where PyTorch keeps the hooks of all modules, by name: another dict may be there."""
    import torch

    held = vars(torch.nn.modules.module)
    return tuple(n for n, x in held.items() if n.startswith("_global_") and isinstance(x, dict))


_MT19937_BYTES = 625 * 4  # NumPy's words and the place in them
_known: dict[bytes, str] = {}  # the last of them, where no number was kept back


def _of_numpy(numpy: Any) -> str:
    """Return eight digits that differ where the state of NumPy's random numbers does.

    `get_state` reads the words one by one, in 40 us: nearly half of a look at all settings. Where
    they are as they were, and no second normal number was kept for the next call, none was drawn.
    """
    generator = numpy.random.get_bit_generator()
    words = b""
    if type(generator) is numpy.random.MT19937:
        words = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    digits = _known.get(words)
    if digits is None:
        state = numpy.random.get_state()
        digits = _short(*state)
        _known.clear()
        if words and not state[3]:
            _known[words] = digits
    return digits


def _short(*state: Any) -> str:
    """Return eight digits that differ where a state of random numbers does."""
    parts = (x.tobytes() if hasattr(x, "tobytes") else repr(x).encode() for x in state)
    return f"{zlib.crc32(b''.join(parts)):08x}"


def _said(setting: Callable[[], Any]) -> Any:
    """Return a setting, or why PyTorch does not tell it: some of its parts contradict others."""
    try:
        return setting()
    except RuntimeError as error:
        return str(error).partition("\n")[0]


def left_by_a_refusal(model: Any, arguments: Sequence[Any]) -> list[str]:
    """Call a module with what it should refuse; say which settings it leaves changed.

    Once without gradients, and once with all parameters frozen although gradients are on.
    Whether it refuses is not asked here.
    """
    import torch

    was_on, left = torch.is_grad_enabled(), []
    trained = [p for p in model.parameters() if p.requires_grad]
    for is_on in (False, True):
        torch.set_grad_enabled(is_on)
        for parameter in trained:
            parameter.requires_grad_(not is_on)
        before = settings()
        with contextlib.suppress(Exception):
            model(*arguments)
        left += [f"refused, {text}" for text in changed(before)]
    torch.set_grad_enabled(was_on)
    for parameter in trained:
        parameter.requires_grad_()
    return left


def changed(before: Mapping[str, Any], what: str = "call") -> list[str]:
    """Say which settings are no longer what `settings` returned, and what left them so."""
    now = settings()
    return [
        f"the {what} left other settings: {name} is {now[name]}, was {value}"
        for name, value in before.items()
        if value is not None and now[name] != value
    ]


def functions() -> dict[str, dict[str, Any]]:
    """Return PyTorch's functions and the clocks as they are now, by place and name.

    What is there before a stranger's file is imported is theirs to call, not to replace: a tensor
    could be computed when it is copied, a clock stand still.
    """
    found = {}
    for place, room in _rooms().items():
        if isinstance(room, dict):
            found[place] = room
            continue
        held = _held(room)
        values = {name: held.get(name) for name in dir(room)}
        found[place] = {n: x for n, x in values.items() if callable(x) and not isinstance(x, type)}
    return found


def _rooms() -> dict[str, Any]:
    import torch

    return {
        "time": time,
        "torch": torch,
        "torch.Tensor": torch.Tensor,
        "torch.nn.functional": torch.nn.functional,
        "torch.nn": _classes(torch.nn),
        "torch.nn.Module": torch.nn.Module,
        "torch.nn.init": torch.nn.init,
        "torch.nn.utils": torch.nn.utils,
        "torch.autograd": torch.autograd,
        "torch.cuda": torch.cuda,
        "torch.cuda.Event": torch.cuda.Event,
        "torch.optim": _classes(torch.optim),
        "torch.testing": torch.testing,
    }


_DOING = ("__init__", "__call__", "forward", "step")


def _classes(room: Any) -> dict[str, Any]:
    """Return the classes of a module of PyTorch's, and what they do, by their names there."""
    found: dict[str, Any] = {}
    for name, kind in vars(room).items():
        if isinstance(kind, type):
            found[name] = kind
            found.update(
                (f"{name}.{n}", x) for n in _DOING if (x := vars(kind).get(n)) is not None
            )
    return found


def _held(room: Any) -> Mapping[str, Any]:
    """Return the attributes of a module or a class, those of a class's bases included.

    Without asking a `__getattr__`, which may import; all at once, since each question of a check
    asks for 2,300.
    """
    held: dict[str, Any] = {}
    if not isinstance(room, type):
        held = room if isinstance(room, dict) else vars(room)
        return held
    for place in reversed(room.__mro__):
        held.update(vars(place))
    return held


def replaced(before: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say which of these functions are others now."""
    said = []
    for place, room in _rooms().items():
        held, known = _held(room), before.get(place, {})
        # At once, since each question of a check asks for 2,300: in a fifth of the time.
        if all(map(operator.is_, map(held.get, known), known.values())):
            continue
        said += [
            f"it replaced {place}.{name}, which is not its own"
            for name, value in known.items()
            if (now := held.get(name)) is not value and not is_pytorchs(now)
        ]
    return said


def is_pytorchs(value: Any) -> bool:
    """Whether PyTorch defines it, and what it wraps: its compiler replaces a few by its own."""
    import torch

    folder = os.path.join(os.path.dirname(torch.__file__), "")
    while value is not None:
        code = getattr(value, "__code__", None)
        if code is None or not code.co_filename.startswith(folder):
            return False
        value = getattr(value, "__wrapped__", None)
    return True
