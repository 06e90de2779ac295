"""What a user puts on a module: hooks and attributes, which its copies must have as well."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from tuner.check.calls.surroundings import is_pytorchs
from tuner.problem.returned import rebuilt

if TYPE_CHECKING:
    import torch

__all__ = ["copied_inside", "lost", "not_its_own", "put_on"]

NAME = "a_users_own"
NOTE = ("kept", 3)


def put_on(model: torch.nn.Module) -> None:
    """Put hooks that change inputs and outputs on a module, and an attribute on all of its parts.

    Raises:
        TypeError: PyTorch itself copies such a module without them: one that was traced.
        Exception: whatever the module raises.
    """
    if _is_copied_by_pytorch(model):
        raise TypeError(f"PyTorch's own copies of a {type(model).__name__} have none")
    model.register_forward_pre_hook(_halved_inputs)
    model.register_forward_hook(_halved_outputs)
    for part in model.modules():
        if not _is_copied_by_pytorch(part):
            setattr(part, NAME, NOTE)


def _is_copied_by_pytorch(part: torch.nn.Module) -> bool:
    copies = getattr(type(part), "__deepcopy__", None)
    return copies is not None and is_pytorchs(copies)


def lost(model: torch.nn.Module, what: str) -> list[str]:
    """Say which attribute a copy no longer has; hooks show in its outputs."""
    bare = [
        name
        for name, part in model.named_modules()
        if getattr(part, NAME, None) != NOTE and not _is_copied_by_pytorch(part)
    ]
    place = f"submodule {bare[0]}" if bare and bare[0] else "module"
    return [f"a {what} has lost an attribute that was set on the {place}"] if bare else []


def not_its_own(model: torch.nn.Module) -> list[str]:
    """Say which parameter `state_dict(keep_vars=True)` gives as another tensor."""
    kept = model.state_dict(keep_vars=True)
    return [
        f"state_dict(keep_vars=True) does not give the parameter {name} itself, with its .grad"
        for name, parameter in model.named_parameters()
        if name in kept and kept[name] is not parameter
    ][:1]


def copied_inside(model: torch.nn.Module, said: list[str]) -> torch.nn.Module:
    """Return a deep copy that was made in a container, beside what shares its parameters.

    Args:
        model: the module.
        said: a parameter that is shared no longer in the copies is added to it.

    Raises:
        Exception: whatever the module raises when it is copied.
    """
    import torch

    names = [name for name, _ in model.named_parameters()]
    holder = torch.nn.ParameterList(model.parameters())
    copied: Any = copy.deepcopy(torch.nn.ModuleList([model, holder]))
    theirs = [path for path, part in model.named_modules() if _is_copied_by_pytorch(part)]
    new = dict(copied[0].named_parameters())
    said += [
        f"a deep copy in a container no longer shares {name}: what ties it is not kept"
        for name, held in zip(names, copied[1], strict=True)
        if new.get(name) is not held and not any(name.startswith(path) for path in theirs)
    ]
    found: torch.nn.Module = copied[0]
    return found


def _halved_inputs(module: Any, arguments: Any) -> Any:
    return tuple(map(_halved, arguments))


def _halved_outputs(module: Any, arguments: Any, result: Any) -> Any:
    return rebuilt(_halved, result)


def _halved(value: Any) -> Any:
    import torch

    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return 0.5 * value if is_number else value
