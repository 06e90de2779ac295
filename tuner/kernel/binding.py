"""From a built candidate and its plan to something that can be called from Python.

No PyTorch header was compiled: the artefact's C functions are called with pointers. What kernels
rely on is kept here: contiguous, 16-byte aligned arguments on one device, fresh outputs
and workspace from PyTorch's allocator, everything on the current stream. An exported file keeps
the same promises in the text that `registration` and `python_operators` write.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.kernel import kept_memory
from tuner.kernel.operands import as_no_view, channels_last
from tuner.kernel.python_calls import call_lines
from tuner.kernel.triton_files import at_fixed_lines
from tuner.machine.platforms import platform_of
from tuner.plans import Argument, Plan
from tuner.space.grammar import FUNCTIONS
from tuner.trial import Language

if TYPE_CHECKING:
    import torch

__all__ = ["AT_ONCE", "CUDA_CODE", "BoundOp", "bind", "match_sizes"]

CUDA_CODE = "cuda_code"  # the global name of a Triton text for the CUDA C++ that it holds
# Of whether launches of one form, after the first, go past Triton's look at their arguments.
AT_ONCE = "LAUNCHES_AT_ONCE"

ALIGNMENT_BYTES = 16  # the widest vector load, and what the bulk copy engine needs


def match_sizes(
    arguments: Sequence[Argument], shapes: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Return the named sizes that make the arguments' declared shapes those given.

    Args:
        arguments: the call's arguments, as the family declares them.
        shapes: the actual shape of each tensor argument, by name.

    Raises:
        ValueError: a rank or a size does not fit; the message names the tensors.
    """
    sizes: dict[str, int] = {}
    for argument in arguments:
        if argument.shape is None:
            continue
        shape = tuple(shapes[argument.name])
        if len(shape) != len(argument.shape):
            raise ValueError(
                f"{argument.name} has shape {list(shape)}, expected {len(argument.shape)} "
                f"dimensions [{', '.join(argument.shape)}]"
            )
        for name, size in zip(argument.shape, shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise ValueError(
                    f"{argument.name} has shape {list(shape)}, expected "
                    f"[{', '.join(argument.shape)}] with {name} = {sizes[name]}"
                )
    return sizes


def bind(plan: Plan, language: Language, artefact: Path) -> BoundOp:
    """Load a built artefact and return the operator as a callable, with its extra operators.

    Args:
        plan: what to allocate and call, in order; `extra` of the extra operators.
        language: of the artefact: a shared object, or for "triton" a Python file.
        artefact: as the builder left it.

    Raises:
        OSError, AttributeError, ImportError: the artefact cannot be loaded, or lacks a step.
    """
    if language == "triton":
        spec = importlib.util.spec_from_file_location(
            f"candidate_{artefact.parent.name}", artefact
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        at_fixed_lines(vars(module))
        return BoundOp(plan, language, functools.partial(getattr, module), None, vars(module))
    library = ctypes.CDLL(str(artefact))

    def function_of(name: str) -> Callable[..., Any]:
        function = getattr(library, name)
        function.restype = ctypes.c_char_p
        found: Callable[..., Any] = function
        return found

    return BoundOp(plan, language, function_of, library)


class BoundOp:
    """A candidate's operator: tensors and numbers in, a tuple of fresh outputs out.

    An argument that does not fit, and a step that returns a message, raise a RuntimeError.

    Attributes:
        device: the kind of device that it runs on, "cpu" or "cuda".
        extra: the operators of the plan's extra operators, by name; None for what is not offered.
        globals: of a Triton text; its functions see what is changed there.
    """

    def __init__(
        self,
        plan: Plan,
        language: Language,
        function_of: Callable[[str], Callable[..., Any]],
        library: ctypes.CDLL | None,
        names: dict[str, Any] | None = None,
    ) -> None:
        import torch

        self.globals = {} if names is None else names
        platform = platform_of(language)
        self.device = platform.torch_type
        called = {s.function: function_of(s.function) for s in plan.steps if s.kind == "call"}
        space: dict[str, Any] = {**_HELPERS, "torch": torch, "_on": platform.chosen, **called}
        space["_stream"] = lambda: ctypes.c_void_p(platform.stream())
        parameters = ", ".join(argument.name for argument in plan.arguments)
        body = "\n".join(f"    {line}" for line in call_lines(plan, language))
        exec(f"def call({parameters}):\n{body}", space)
        self._call: Callable[..., tuple[torch.Tensor, ...]] = space["call"]
        self.extra: dict[str, BoundOp | None] = {
            name: None if more is None else BoundOp(more, language, function_of, None)
            for name, more in plan.extra.items()
        }
        self._library = library

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Run the plan on the operator's arguments, in their order; return its outputs."""
        return self._call(*args)

    @property
    def calls(self) -> tuple[BoundOp, ...]:
        """The operator itself and the extra ones that there are, in `Plan.calls`' order."""
        return (self, *(more for more in self.extra.values() if more is not None))

    def unload(self) -> None:
        """Unload the shared object; no call of the operator may be made again."""
        if self._library is not None:
            ctypes.CDLL(None).dlclose(ctypes.c_void_p(self._library._handle))
            self._library = None


def _prepared(
    tensor: Any, name: str, num_dims: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise RuntimeError(f"{name} is {type(tensor).__name__}, expected a tensor")
    if tensor.dtype is not dtype or tensor.device != device:
        raise RuntimeError(
            f"{name} is {tensor.dtype} on {tensor.device}, expected {dtype} on {device}"
        )
    if tensor.dim() != num_dims:
        raise RuntimeError(
            f"{name} has shape {list(tensor.shape)}, expected {num_dims} dimensions"
        )
    return _dense(tensor.detach())


def _expect(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise RuntimeError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.resolve_neg().contiguous()
    return made.clone() if made.data_ptr() % ALIGNMENT_BYTES else made


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _finished(step: str, message: bytes | None) -> None:
    if message is not None:
        raise RuntimeError(f"{step}: {message.decode(errors='replace')}")


_HELPERS: dict[str, Any] = {
    **{name: entry[0] for name, entry in FUNCTIONS.items()},
    **{f.__name__: f for f in (_prepared, _expect, _dense, _pointer, _finished)},
    "_kept": kept_memory.empty,
    "as_no_view": as_no_view,
    "channels_last": channels_last,
    "_index": operator.index,
    "_integer": ctypes.c_int64,
    "_double": ctypes.c_double,
}
