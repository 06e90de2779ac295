"""What cannot be recorded whatever it computes: compiled modules, sparse inputs, empty ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.errors import CaptureError
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["require_list", "require_plain"]


def require_list(problem: Problem, function: str, given: Any, taker: str) -> None:
    """Refuse what a function of the file returned in place of a list of arguments.

    Raises:
        CaptureError: it is neither a list nor a tuple.
    """
    if not isinstance(given, (list, tuple)):
        kind = type(given).__name__.removeprefix("Fake")  # of tensors, while it is recorded
        named = ", in order, without their names" if isinstance(given, dict) else ""
        raise CaptureError(
            f"{problem.source}: {function}() returned {kind}; expected a list\n"
            f"  next: return the arguments of {taker} as a list{named}"
        )


def require_plain(problem: Problem, model: torch.nn.Module, given: Sequence[Any]) -> None:
    """Refuse a module that is compiled already, and inputs that are sparse or hold no numbers.

    Raises:
        CaptureError: it is, or they do.
    """
    import torch

    if not isinstance(problem.module.Model, type):
        raise CaptureError(
            f"{problem.source}: Model is no class; got {type(problem.module.Model).__name__}\n"
            "  next: derive class Model from torch.nn.Module; exported files derive theirs from it"
        )
    compiled = [path for path, part in model.named_modules() if _is_compiled(part)]
    if compiled:
        name = f"Model.{compiled[0]}".rstrip(".")
        raise CaptureError(
            f"{problem.source}: {name} is compiled by torch.compile; expected PyTorch's own "
            "operations, which are recorded\n"
            "  next: leave torch.compile out of the file"
        )
    tensors = [(i, x) for i, x in enumerate(given) if isinstance(x, torch.Tensor)]
    for place, tensor in tensors:
        if tensor.layout != torch.strided:
            raise CaptureError(
                f"{problem.source}: get_inputs() gives a tensor of {tensor.layout} at place "
                f"{place}; expected dense tensors\n"
                "  next: give it dense, as by to_dense()"
            )
    if tensors and not any(tensor.numel() for _, tensor in tensors):
        shapes = ", ".join(str([*tensor.shape]) for _, tensor in tensors)
        raise CaptureError(
            f"{problem.source}: get_inputs() gives tensors without any number: {shapes}\n"
            "  next: give it the shapes that the module is to be fast for"
        )


def _is_compiled(module: torch.nn.Module) -> bool:
    """Whether PyTorch has compiled a module, its forward or its class's."""
    is_called = getattr(module, "_compiled_call_impl", None) is not None
    forward = getattr(module.forward, "__func__", module.forward)
    return is_called or hasattr(forward, "_torchdynamo_orig_callable")
