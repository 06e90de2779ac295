"""A file's module on fake tensors, and the numbers that its constructor gave to tensors."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tuner.capture.graph.explaining import depends_on_values
from tuner.capture.graph.graph import MAX_CONSTANT
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["constructed", "conversions_of_fakes"]


def constructed(
    problem: Problem, init: Sequence[Any], fake: FakeTensorMode
) -> tuple[torch.nn.Module, dict[int, torch.Tensor]]:
    """Return the module, and the numbers of its tensors that were made of given ones, by their id.

    A constructor that wants the numbers of tensors, such as rates of torch.linspace by `.item()`,
    runs on real tensors, of which the module gets fake copies.

    Args:
        problem: of the file.
        init: what `get_init_inputs` gave under `fake`.
        fake: the mode in force.

    Raises:
        Exception: whatever the constructor raises; where it would compute with other numbers at
            each call, what it raises on fake tensors.
    """
    try:
        with _given_numbers() as known:
            return problem.module.Model(*init), known
    except Exception as error:
        if not depends_on_values(error):
            raise
        real = _real(problem)
        if real is None:
            raise
    import torch
    from torch._subclasses.fake_tensor import FakeCopyMode

    with FakeCopyMode(fake):
        model = copy.deepcopy(real)
    known = {
        id(value): vars(own)[name]
        for own, module in zip(real.modules(), model.modules(), strict=True)
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.numel() <= MAX_CONSTANT
    }
    return model, known


def _real(problem: Problem) -> torch.nn.Module | None:
    """Return the module on real tensors; None where its numbers are drawn at random."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        made = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            made.append(problem.module.Model(*problem.module.get_init_inputs()))
    first, second = map(_numbers_of, made)
    return made[0] if repr(first) == repr(second) else None  # no NaN equals itself


def _numbers_of(model: torch.nn.Module) -> list[tuple[str, str, object]]:
    """Return what the module and its parts hold beside tensors and objects."""
    plain = (bool, int, float, str)
    return [
        (path, name, value)
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, plain)
        or (isinstance(value, list | tuple) and all(isinstance(x, plain) for x in value))
    ]


@contextlib.contextmanager
def _given_numbers() -> Iterator[dict[int, torch.Tensor]]:
    """Keep the numbers of tensors that code makes by torch.tensor([...]), by the tensor's id."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.overrides import TorchFunctionMode

    known: dict[int, torch.Tensor] = {}
    made: list[torch.Tensor] = []  # alive, so that no other tensor gets the id

    class Keeping(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.tensor and result.numel() <= MAX_CONSTANT:
                with unset_fake_temporarily():
                    known[id(result)] = func(*args, **(kwargs or {}))
                made.append(result)
            return result

    with Keeping():
        yield known
    for tensor in made:
        if tensor._version:
            del known[id(tensor)]  # written to since


@contextlib.contextmanager
def conversions_of_fakes() -> Iterator[None]:
    """Let modules with fake parameters be converted, in this process, while it is entered.

    PyTorch 2.13 swaps a fake parameter with the converted one, and then raises, since the fake
    mode refers to both. Here each parameter gets the converted one's data, as real ones do, so
    that it stays the same object wherever it is used.
    """
    from torch import no_grad
    from torch.nn import Module

    whole = Module._apply

    def apply(
        module: Any, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> Any:
        if recurse:
            for child in module.children():
                child._apply(function)
        with no_grad():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.data = function(parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = function(buffer)
        return module

    Module._apply = apply
    try:
        yield
    finally:
        Module._apply = whole
