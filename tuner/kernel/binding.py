"""From a built candidate and its plan to something that can be called from Python.

No PyTorch header was compiled: the artefact's C functions are called with pointers. What kernels
rely on is kept here: contiguous, 16-byte aligned arguments on one device, fresh outputs
and workspace from PyTorch's allocator, everything on the current stream. An exported file keeps
the same promises in the text that `registration` writes.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.kernel.operands import channels_last, getter
from tuner.plans import Argument, Plan, Step, Tensor
from tuner.space.expression import Expression
from tuner.trial import Language

if TYPE_CHECKING:
    import torch

__all__ = ["CUDA_CODE", "BoundOp", "bind", "match_sizes"]

CUDA_CODE = "cuda_code"  # the global name of a Triton text for the CUDA C++ that it holds

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
    """Load a built artefact and return the operator as a callable, with its further calls.

    Args:
        plan: what to allocate and call, in order; `also` of the further calls.
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

    What depends on the shapes alone is worked out once per set of shapes.

    Attributes:
        device: the kind of device that it runs on, "cpu" or "cuda".
        also: the operators of the plan's further calls, by name; None for what is not offered.
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
        self.globals = {} if names is None else names
        self.device = "cpu" if language == "cpp" else "cuda"
        self._plan = plan
        self._language = language
        self._functions = {
            s.function: function_of(s.function) for s in plan.steps if s.kind == "call"
        }
        self.also: dict[str, BoundOp | None] = {
            name: None if more is None else BoundOp(more, language, function_of, None)
            for name, more in plan.also.items()
        }
        self._library = library
        self._by_shapes: dict[tuple[object, ...], _Prepared] = {}

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Run the plan on the operator's arguments, in their order; return its outputs.

        Raises:
            RuntimeError: an argument does not fit, or a step returned a message.
        """
        import torch

        values = self._checked(args)
        tensors = [values[a.name] for a in self._plan.arguments if a.shape is not None]
        device = tensors[0].device
        shapes = tuple(tensor.shape for tensor in tensors)
        prepared = self._by_shapes.get(shapes)
        if prepared is None:
            prepared = self._by_shapes[shapes] = _Prepared(self._plan, values)
        for tensor, shape in prepared.allocations:
            make = torch.zeros if tensor.zero else torch.empty
            values[tensor.name] = make(shape, dtype=getattr(torch, tensor.dtype), device=device)
        values["num_threads"] = torch.get_num_threads()
        if device.type == "cuda":
            with torch.cuda.device(device):
                stream = torch.cuda.current_stream().cuda_stream
                self._run(prepared, values, (ctypes.c_void_p(stream),))
        else:
            self._run(prepared, values, ())
        return tuple(values[output.name] for output in self._plan.outputs)

    @property
    def calls(self) -> tuple[BoundOp, ...]:
        """The operator itself and the further ones that there are, in `Plan.calls`' order."""
        return (self, *(more for more in self.also.values() if more is not None))

    def unload(self) -> None:
        """Unload the shared object; no call of the operator may be made again."""
        if self._library is not None:
            ctypes.CDLL(None).dlclose(ctypes.c_void_p(self._library._handle))
            self._library = None

    def _checked(self, args: Sequence[Any]) -> dict[str, Any]:
        import torch

        plan = self._plan
        if len(args) != len(plan.arguments):
            raise RuntimeError(
                f"{plan.function} takes {len(plan.arguments)} arguments, got {len(args)}"
            )
        values: dict[str, Any] = {}
        first: torch.Tensor | None = None
        for argument, value in zip(plan.arguments, args, strict=True):
            if argument.shape is None:
                # As PyTorch's schema does: an int is a float, but no float is an int.
                to_number = float if argument.dtype == "float" else operator.index
                values[argument.name] = to_number(value)
                continue
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise RuntimeError(
                    f"{plan.function}: {argument.name} is {kind}, expected a tensor"
                )
            first = value if first is None else first
            wanted = getattr(torch, argument.dtype)
            if value.dtype is not wanted or value.device != first.device:
                raise RuntimeError(
                    f"{plan.function}: {argument.name} is {value.dtype} on {value.device}, "
                    f"expected {wanted} on {first.device}"
                )
            values[argument.name] = _dense(value.detach())
        return values

    def _run(self, prepared: _Prepared, values: dict[str, Any], tail: tuple[Any, ...]) -> None:
        import torch

        for step, args in prepared.steps:
            if step.gives:
                values[step.gives] = self._given(step, prepared, values)
            elif step.kind == "aten":
                tensors = [_tensor(values, arg) for arg in args]
                getattr(torch.ops.aten, step.function).out(*tensors, out=values[str(step.out)])
            elif self._language == "triton":
                self._functions[step.function](*(_python(values, arg) for arg in args))
            else:
                message = self._functions[step.function](
                    *(_native(values, arg) for arg in args), *tail
                )
                if message is not None:
                    raise RuntimeError(f"{step.function}: {message.decode(errors='replace')}")

    def _given(self, step: Step, prepared: _Prepared, values: Mapping[str, Any]) -> torch.Tensor:
        """Return what PyTorch's own operation makes."""
        import torch

        operands = [(keyword, take(values)) for keyword, take in prepared.operands[step]]
        plain = [value for keyword, value in operands if not keyword]
        named = {keyword: value for keyword, value in operands if keyword}
        made = getattr(torch.ops.aten, step.function)(*plain, **named)
        made = made if step.pick is None else made[step.pick]
        if step.gives in prepared.dense:
            return _dense(made)
        return made if step.layout is None else channels_last(made)


class _Prepared:
    """A plan at given shapes: what to allocate, and each step's arguments.

    An argument is an int already, or the name of a value of the call, or None.
    """

    def __init__(self, plan: Plan, values: Mapping[str, Any]) -> None:
        shapes = {a.name: values[a.name].shape for a in plan.arguments if a.shape is not None}
        try:
            sizes = match_sizes(plan.arguments, shapes)
        except ValueError as error:
            raise RuntimeError(f"{plan.function}: {error}") from error
        self.allocations: list[tuple[Tensor, tuple[int, ...]]] = [
            (tensor, tuple(int(Expression.parse(d).evaluate(sizes)) for d in tensor.shape))
            for tensor in plan.made
        ]
        named = set(values) | {tensor.name for tensor, _ in self.allocations} | {"num_threads"}
        named |= plan.given
        self.dense = plan.dense
        self.operands = {s: [getter(arg) for arg in s.args] for s in plan.steps if s.gives}

        def argument(text: str) -> str | int | None:
            if text == "null":
                return None
            if text.removesuffix(".t") in named:
                return text
            return int(Expression.parse(text).evaluate(sizes))

        self.steps = [
            (step, () if step.gives else tuple(argument(a) for a in step.args))
            for step in plan.steps
        ]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.resolve_neg().contiguous()
    return made.clone() if made.data_ptr() % ALIGNMENT_BYTES else made


def _tensor(values: Mapping[str, Any], arg: str | int | None) -> Any:
    if not isinstance(arg, str):
        return arg
    return values[arg[:-2]].t() if arg.endswith(".t") else values[arg]


def _python(values: Mapping[str, Any], arg: str | int | None) -> Any:
    return values[arg] if isinstance(arg, str) else arg


def _native(values: Mapping[str, Any], arg: str | int | None) -> Any:
    if arg is None:
        return ctypes.c_void_p(None)
    if isinstance(arg, int):
        return ctypes.c_int64(arg)
    value = values[arg]
    if isinstance(value, float):
        return ctypes.c_double(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    return ctypes.c_void_p(value.data_ptr())
