"""A module made of a live one's parameters and buffers; exported files hold this text."""

from __future__ import annotations

from typing import Any

__all__ = ["made_from"]


def made_from(cls: Any, module: Any, state: Any = None) -> Any:
    """Return a `cls` with the tensors, settings, hooks and modes of a live module.

    Parameters and buffers are shared, so that what trains or loads one is seen by both; all else
    is copied. `state` has dtype and shape of each of them, by name, that is expected; None takes
    any.
    Exported files hold this function's text, so it uses nothing from outside.
    """
    import copy

    import torch

    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"from_module: expected a torch.nn.Module, got {type(module).__name__}")
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    found = {name: (str(t.dtype)[6:], list(t.shape)) for name, t in named.items()}
    if state is not None and found != state:
        words = {
            name: [
                "{} {}".format(*forms[name]) if name in forms else "none"
                for forms in (found, state)
            ]
            for name in sorted(found.keys() | state.keys())
        }
        wrong = ", ".join(f"{n}: {a}, not {b}" for n, (a, b) in words.items() if a != b)
        raise TypeError(
            f"from_module: {type(module).__name__} has other parameters and buffers: {wrong}\n"
            "  next: give a module of the class and the sizes that were tuned"
        )
    shared: dict[int, Any] = {}
    for part in module.modules():
        held = (*part._parameters.values(), *part._buffers.values(), *vars(part).values())
        shared |= {id(tensor): tensor for tensor in held if isinstance(tensor, torch.Tensor)}
    made = cls.__new__(cls)
    shared[id(module)] = made
    vars(made).update(copy.deepcopy(vars(module), shared))
    return made
