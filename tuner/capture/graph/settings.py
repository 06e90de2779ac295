"""What a forward may read beside inputs: as it was captured, or taken from a live module."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "code_of",
    "contents_of",
    "literal_of",
    "made_from",
    "setting_of",
    "settings_of",
    "shell_of",
    "slots_of",
]


@functools.cache
def code_of(function: Callable[..., Any]) -> str:
    """Return the text of a function of ours, for exported files; Python takes 2 ms to find it."""
    return inspect.getsource(function).rstrip()


def settings_of(module: Any, has_modes: bool) -> dict[str, dict[str, object]]:
    """Return the settings of `contents_of`."""
    return contents_of(module, has_modes, {})[0]


def slots_of(cls: Any) -> list[str]:
    """Return the names under which objects of a class hold what is not in their dictionary.

    Exported files hold this function's text, so it uses nothing from outside.
    """
    found = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name[:2] == "__" != name[-2:]
            own = f"_{base.__name__.lstrip('_')}{name}" if is_private else name
            if own not in ("__dict__", "__weakref__"):
                found.append(own)
    return found


def shell_of(module: Any) -> Any:
    """Return a module of the same class, attributes and parts, but for results of calls.

    A graph that holds a module on which a result of it is kept, as a hook does, holds itself, for
    ever. A module with slots, or with a `__del__`, is returned as it is.
    Exported files hold this function's text; from outside it uses `slots_of` alone.
    """
    import torch

    kind = type(module)
    if hasattr(kind, "__del__") or slots_of(kind):
        return module
    shell = object.__new__(kind)
    held = vars(shell)
    held.update(vars(module))
    made = [n for n, x in held.items() if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    for name in made:
        del held[name]
    return shell


def setting_of(value: Any, depth: int = 5, room: list[int] | None = None) -> Any:
    """Return what a setting is that is no number and no flat list of these, as JSON has it.

    Objects by what they hold, `depth` deep and as many as there is `room` for; what is deeper, or
    changes by itself, by the name of its class. None for a tensor or a module. A user's objects
    may answer to any name, so that their classes are asked what they are.
    Exported files hold this function's text, so it uses nothing from outside but `slots_of`.
    """
    room = [500] if room is None else room
    room[0] -= 1
    if isinstance(value, (bool, int, float, str)):
        return value if value == value else "nan"
    cls = type(value)
    if isinstance(value, type) or "__qualname__" in vars(cls):  # a class, or a function
        kind: str = value.__qualname__
    else:
        kind = cls.__qualname__
    if hasattr(cls, "__torch_function__") or hasattr(cls, "named_parameters"):
        return None
    if isinstance(value, type) or not depth or room[0] < 0:
        return kind
    if hasattr(cls, "__members__"):  # of an enumeration
        return f"{kind}.{value.name}"
    is_words = isinstance(value, (complex, bytes, range, slice))
    if is_words or kind in ("dtype", "device", "memory_format", "layout"):
        return repr(value)
    if hasattr(cls, "__func__"):  # a method
        return [kind, value.__func__.__qualname__, setting_of(value.__self__, depth - 1, room)]
    if hasattr(cls, "__code__"):
        if not (value.__closure__ or value.__defaults__ or "<lambda>" in kind):
            return kind
        plain = [c for c in value.__code__.co_consts if isinstance(c, (int, float, str))]
        try:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:  # nothing yet
            cells = []
        return [kind, plain, setting_of([cells, value.__defaults__], depth, room)]
    if hasattr(cls, "tolist") and hasattr(cls, "size") and value.size <= 500:  # of NumPy
        return [kind, setting_of(value.tolist(), depth, room)]
    opaque = ("torch", "logging", "threading", "_thread", "io", "_io", "weakref")
    if cls.__module__.partition(".")[0] in opaque or cls.__name__ == "module":
        return kind
    held = {**getattr(value, "__dict__", {})}
    for name in slots_of(cls):
        held[name] = getattr(value, name, None)
    if hasattr(cls, "func") and hasattr(cls, "keywords"):  # functools.partial
        held.update(func=value.func, args=value.args, keywords=value.keywords)
    if isinstance(value, (set, frozenset)):
        held["items"] = sorted(map(repr, value))
    elif hasattr(cls, "popleft"):  # a deque
        held["items"] = list(value)
    elif isinstance(value, (tuple, list)):
        found = [setting_of(item, depth - 1, room) for item in value]
        return [found, setting_of(held, depth, room)] if held else found
    elif isinstance(value, dict):
        named = {str(key): setting_of(item, depth - 1, room) for key, item in value.items()}
        return [named, setting_of(held, depth, room)] if held else named
    return [kind, setting_of(held, depth, room)] if held else kind


def contents_of(
    module: Any,
    has_modes: bool,
    public: dict[tuple[str, ...], list[str]],
    known_settings: dict[str, dict[str, object]] | None = None,
) -> tuple[dict[str, dict[str, object]], dict[str, Any]]:
    """Return settings of a module and its submodules, by path, and their tensors, by name.

    Settings are numbers, words, lists and dicts of these, functions by their names and what they
    close over, objects by what they hold, and classes, and which submodules have hooks. Of private
    names there are numbers, words and objects of a user's alone. `public` is filled with which of
    an object's attributes may be settings; of `known_settings` those alone are looked up, since
    torch.compile lists no attributes before PyTorch 2.13, and no functions and objects, which it
    cannot ask. All in one walk, which each call of an exported file takes: PyTorch's own
    generators take three times as long.
    Exported files hold this function's text, so it uses nothing from outside but `setting_of`.
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
                plain = [name for name in names if isinstance(held[name], (bool, int, float, str))]
                # PyTorch's own, of hooks, compilers and wrappers, which come with a call.
                theirs = ("_is_full_", "_is_torch", "_is_fsdp", "_is_hf_", "_torch", "_dynamo")
                plain = [name for name in plain if not name.startswith(theirs)]
                # And objects of a config: what others set there comes and goes.
                others = ("builtins", "collections", "functools", "torch", "weakref")
                plain += [
                    name
                    for name in names
                    if name[:1] == "_"
                    and type(held[name]).__module__.partition(".")[0] not in others
                    and not hasattr(type(held[name]), "named_parameters")
                ]
                wanted = [name for name in names if name[:1] != "_" or name in plain]
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
            if name not in found and value is not None and known_settings is None:
                words = setting_of(value)
                if words is not None:
                    found[name] = words
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
    is copied. `state` has dtype and shape of each of them, by name, that is expected. The
    module's class, and its parts' classes of the same file, have the code of `reference`: that of
    forward, and of what this names of its class and file. None takes any.
    Exported files hold this function's text, so it uses nothing from outside.
    """
    import copy
    import dis
    import inspect
    import types

    import torch

    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"from_module: expected a torch.nn.Module, got {type(module).__name__}")

    def parts(code: Any, words: Any = None) -> tuple[object, ...]:
        """Return what a function is compiled to, but for what its docstring says."""
        held = [c for c in code.co_consts if c is not None and c != words]
        held = [parts(c) if isinstance(c, types.CodeType) else c for c in held]
        return code.co_code, code.co_names, code.co_varnames, repr(held)

    def reached(kind: Any) -> dict[str, object]:
        """Return what Python compiled forward to, and the functions and constants it names."""
        found: dict[str, object] = {}
        left = {"forward": kind.forward}
        while left:
            name, held = left.popitem()
            held = inspect.unwrap(held) if callable(held) else held
            if name in found or not isinstance(held, types.FunctionType):
                is_plain = isinstance(held, (bool, int, float, str, tuple))
                found.setdefault(name, repr(held) if is_plain else "")
                continue
            found[name] = parts(held.__code__, held.__doc__)
            codes, named = [held.__code__], []
            for code in codes:
                named += [
                    (i.opname.endswith("GLOBAL"), i.argval) for i in dis.get_instructions(code)
                ]
                codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
            words = [(is_global, n) for is_global, n in named if isinstance(n, str)]
            own = {f"self.{n}": getattr(kind, n, None) for is_global, n in words if not is_global}
            left |= {n: x for n, x in own.items() if isinstance(x, types.FunctionType)}
            left |= {n: held.__globals__.get(n) for is_global, n in words if is_global}
            cells = enumerate(cell.cell_contents for cell in held.__closure__ or ())
            left |= {f"{name} {i}": x for i, x in cells if isinstance(x, types.FunctionType)}
        return found

    kinds: dict[Any, Any] = {}
    if reference is not None:
        file = inspect.unwrap(reference.forward).__globals__
        kinds = {type(part): file.get(type(part).__name__) for part in module.modules()}
        kinds[type(module)] = reference
    for kind, tuned in kinds.items():
        # That of another file of ours is the reference there.
        kind = kind.__mro__[1] if kind.__name__ == "ModelNew" else kind
        is_own = isinstance(tuned, type) and kind.__module__ == type(module).__module__
        if is_own and kind.forward is not tuned.forward and reached(kind) != reached(tuned):
            raise TypeError(
                f"from_module: {kind.__module__}.{kind.__qualname__}.forward, or what it calls, "
                "is not the code that was tuned\n  next: give a module of the class that was "
                "tuned; a class that was edited since is tuned again"
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
