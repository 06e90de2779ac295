"""What a forward may read beside tensors, and hence must be as it was when it was captured."""

from __future__ import annotations

from typing import Any

__all__ = ["settings_of"]


def settings_of(module: Any, has_modes: bool) -> dict[str, object]:
    """Return numbers, words and classes of a module and its submodules, and which have hooks.

    Exported files hold this function's text, so it uses nothing from outside.
    """
    found: dict[str, object] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            is_plain = isinstance(value, (bool, int, float, str)) and name[:1] != "_"
            if is_plain and (has_modes or name != "training"):
                found[f"{path}.{name}"] = value
        if path:  # a wrapper, as LoRA's, or a class derived from its own computes something else
            found[f"{path} is"] = type(part).__qualname__
            found[f"{path} has its own forward"] = "forward" in vars(part)
        if path and (part._forward_hooks or part._forward_pre_hooks):
            found[f"{path} has hooks"] = True
    return found
