"""What a forward may read beside inputs: as it was captured, or taken from a live module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["contents_of", "literal_of", "made_from", "settings_of"]


def settings_of(module: Any, has_modes: bool) -> dict[str, dict[str, object]]:
    """Return the settings of `contents_of`."""
    return contents_of(module, has_modes, {})[0]


def contents_of(
    module: Any,
    has_modes: bool,
    public: dict[tuple[str, ...], list[str]],
    known_settings: dict[str, dict[str, object]] | None = None,
) -> tuple[dict[str, dict[str, object]], dict[str, Any]]:
    """Return settings of a module and its submodules, by path, and their tensors, by name.

    Settings are numbers, words, lists and dicts of these, functions by their names, and classes,
    and which submodules have hooks. `public` is filled with which of an object's attributes may
    be settings; of `known_settings` those alone are looked up, since torch.compile lists no
    attributes before PyTorch 2.13, and no functions, whose names it cannot ask. All in one walk,
    which each call of an exported file takes: PyTorch's own generators take three times as long.
    Exported files hold this function's text, so it uses nothing from outside.
    """
    settings: dict[str, dict[str, object]] = {}
    tensors: dict[str, Any] = {}
    known: set[int] = set()  # a part or a tensor has the first of its names
    left = [("", module)]
    while left:
        path, part = left.pop()
        place = id(part)
        if place in known:
            continue
        known.add(place)
        held = vars(part)
        if known_settings is None:
            names = tuple(held)
            wanted = public.get(names)
            if wanted is None:
                wanted = [name for name in names if name[:1] != "_"]
                wanted = [name for name in wanted if has_modes or name != "training"]
                public[names] = wanted
        else:
            wanted = [name for name in known_settings.get(path, ()) if name in held]
        found: dict[str, object] = {}
        settings[path] = found
        for name in wanted:
            value = held[name]
            if isinstance(value, (bool, int, float, str)):
                found[name] = value if value == value else "nan"  # which equals nothing
            elif isinstance(value, (tuple, list)):  # a stride, say
                for item in value:
                    if not isinstance(item, (bool, int, float, str)):
                        break
                else:
                    found[name] = list(value)  # as JSON keeps it
            elif isinstance(value, dict):
                for key, item in value.items():
                    if not isinstance(key, str) or not isinstance(item, (bool, int, float, str)):
                        break
                else:
                    found[name] = dict(value)
            elif known_settings is None and callable(value):  # an activation, say
                found[name] = getattr(value, "__qualname__", type(value).__qualname__)
        if path:  # a wrapper, as LoRA's, or a class derived from its own computes something else
            found["is"] = type(part).__qualname__
            found["has its own forward"] = "forward" in held
            if (
                held["_forward_hooks"]
                or held["_forward_pre_hooks"]
                or held["_backward_hooks"]
                or held["_backward_pre_hooks"]
            ):
                found["has hooks"] = True
            path += "."
        for table in (held["_parameters"], held["_buffers"]):
            for name, tensor in table.items() if table else ():
                if tensor is not None and id(tensor) not in known:
                    known.add(id(tensor))
                    tensors[path + name] = tensor
        parts = held["_modules"]
        for name in reversed(parts) if parts else ():  # the first is taken from the end
            if parts[name] is not None:
                left.append((path + name, parts[name]))
    return settings, tensors


def literal_of(value: object) -> str:
    """Return a setting as Python, which has no literal for what is infinite."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {literal_of(x)}" for key, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal_of, value)) + "]"
    return f'float("{value}")' if value in (math.inf, -math.inf) else repr(value)


def made_from(cls: Any, module: Any, state: Any = None, reference: Any = None) -> Any:
    """Return a `cls` with the tensors, settings, hooks and modes of a live module.

    Parameters and buffers are shared, so that what trains or loads one is seen by both; all else
    is copied. `state` has dtype and shape of each of them, by name, that is expected, and
    `reference` is a class: the module is one of it or of its bases, or of a class with the same
    code. None takes any.
    Exported files hold this function's text, so it uses nothing from outside.
    """
    import copy
    import types

    import torch

    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"from_module: expected a torch.nn.Module, got {type(module).__name__}")

    def written(kind: Any, name: str) -> str:
        """Return what Python compiled a method to."""

        def parts(code: Any) -> tuple[object, ...]:
            inner = [parts(c) if isinstance(c, types.CodeType) else c for c in code.co_consts]
            return code.co_code, code.co_names, code.co_varnames, inner

        code = getattr(getattr(kind, name, None), "__code__", None)
        return repr(parts(code)) if code else ""

    kind = type(module)
    if reference is not None and kind not in cls.__mro__:
        methods = [name for name, held in vars(reference).items() if hasattr(held, "__code__")]
        for name in {"forward", *methods} - {"__init__"}:  # what that made is what is taken
            if written(kind, name) != written(reference, name):
                raise TypeError(
                    f"from_module: {kind.__module__}.{kind.__qualname__}.{name} is not the code "
                    "that was tuned\n  next: give a module of the class that was tuned; a class "
                    "that was edited since is tuned again"
                )
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
