"""What PyTorch does anew for each program that is opened into core operators, in fewer steps.

`run_decompositions` looks through all operators for the composite ones, and registers twenty
functions for each of some 500, whatever the program is. That took 0.1 s of the 0.2 s of CPU of a
small module's record; here it is a fifth of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["registered_in_fewer_steps"]

_KINDS = ("CPU", "CUDA", "Meta")
_LOCK = threading.RLock()  # what is patched is the process's


@contextlib.contextmanager
def registered_in_fewer_steps() -> Iterator[None]:
    """Patch PyTorch for as long as a program is opened; where it has no such functions, nothing.

    No operator is registered with the dispatcher in the meantime, so that to look for them once
    is enough: PyTorch does so for each namespace of `torch.ops`. Of the kinds of devices we know
    two, and tensors without memory are a third.
    """
    import torch
    from torch._export import utils
    from torch._ops import OperatorBase
    from torch.export import exported_program

    patches: list[tuple[Any, str, Any]] = []
    if hasattr(utils, "_materialize_cpp_cia_ops"):
        patches.append((utils, "_materialize_cpp_cia_ops", _once(utils._materialize_cpp_cia_ops)))
    names = ("py_impl", "_dispatch_cache", "py_kernels")
    if all(hasattr(torch.ops.aten.add.Tensor, name) for name in names):
        patches.append((OperatorBase, "py_impl", _without_annotations(OperatorBase.py_impl)))
    for name in ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE"):
        keys = getattr(exported_program, name, [])
        patches.append((exported_program, name, [k for k in keys if k.name.endswith(_KINDS)]))
    with _LOCK, contextlib.ExitStack() as stack:
        for owner, name, quick in patches:
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, quick)
        yield


def _once(whole: Callable[[], None]) -> Callable[[], None]:
    is_done = False

    def once() -> None:
        nonlocal is_done
        if not is_done:
            whole()
        is_done = True

    return once


def _without_annotations(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return `py_impl` for a plain key; PyTorch's evaluates annotations, for 5 us."""
    from torch._C import DispatchKey

    def py_impl(operator: Any, key: Any) -> Any:
        is_plain = isinstance(key, DispatchKey) and key != DispatchKey.Python
        if not is_plain or key in operator.py_kernels:
            return whole(operator, key)

        def registered(function: Any) -> Any:
            operator.py_kernels[key] = function
            operator._dispatch_cache.clear()
            return function

        return registered

    return py_impl
