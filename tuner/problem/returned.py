"""What forward returns, taken apart: its tensors in order, and the containers around them.

Containers are tuples, lists, NamedTuples, dictionaries and dataclasses, one in another as well.
They are looked at without running code of their classes, which could compute when it is asked.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["is_plain", "rebuilt", "tensors_of", "words_of", "written"]


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what a container holds, each with its name; None for what is none.

    Names are those of fields, keys, or places.
    """
    kind = type(value)
    if dataclasses.is_dataclass(kind):  # before dictionaries: some are both
        return [(f.name, _field(value, f.name)) for f in dataclasses.fields(kind) if f.init]
    if issubclass(kind, dict):
        pairs = list(dict.items(value))
        return pairs if all(type(key) in (str, int) for key, _ in pairs) else None
    for sequence in (tuple, list):
        if issubclass(kind, sequence):
            items = list(sequence.__iter__(value))
            fields = getattr(kind, "_fields", None)
            if isinstance(fields, tuple) and len(fields) == len(items):
                return list(zip(fields, items, strict=True))
            return list(enumerate(items))
    return None


def _field(value: Any, name: str) -> Any:
    """Return a field as it is held; an attribute that is computed is None."""
    found = inspect.getattr_static(value, name, None)
    if isinstance(found, types.MemberDescriptorType):  # of a class with slots
        return found.__get__(value)
    return None if isinstance(found, property) else found


def tensors_of(result: Any) -> tuple[Any, ...]:
    """Return what a call returned, without its containers and without None in these.

    What is no tensor in a container stays, for the caller to refuse.
    """
    parts = _parts(result)
    return (result,) if parts is None else tuple(_leaves(parts))


def _leaves(parts: Sequence[tuple[Any, Any]]) -> Iterator[Any]:
    for _, value in parts:
        inner = _parts(value)
        if inner is not None:
            yield from _leaves(inner)
        elif value is not None:
            yield value


def is_plain(result: Any) -> bool:
    """Whether it is a tensor, or a tuple or a list of nothing but tensors."""
    parts = _parts(result)
    if parts is None:
        return True
    is_bare = type(result) in (tuple, list)
    return is_bare and all(x is not None and _parts(x) is None for _, x in parts)


def words_of(result: Any) -> str:
    """Describe a container with the names of what it holds: a dict of loss, aux=None."""
    said = []
    parts = _parts(result) or []
    for name, value in parts:
        inner = _parts(value)
        more = "=None" if value is None else "" if inner is None else f"=({words_of(value)})"
        said.append(f"{name}{more}")
    kind = type(result)
    article = "an" if kind.__qualname__[:1] in "AEIOU" else "a"
    names = "a named tuple" if hasattr(kind, "_fields") else f"{article} {kind.__qualname__}"
    return f"{names} of {', '.join(said) or 'nothing'}"


def rebuilt(function: Callable[[Any], Any], result: Any) -> Any:
    """Return the same containers with other values: what a function makes of each."""
    parts = _parts(result)
    if parts is None:
        return None if result is None else function(result)
    values = [rebuilt(function, value) for _, value in parts]
    kind = type(result)
    if dataclasses.is_dataclass(kind):
        return kind(**dict(zip((name for name, _ in parts), values, strict=True)))
    if issubclass(kind, dict):
        return kind(zip((key for key, _ in parts), values, strict=True))
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def written(result: Any, name_of: Callable[[type], str]) -> str:
    """Return the containers as Python for `str.format`, where {0} is the first tensor.

    `name_of` returns how a class is reached, and raises what it likes where it cannot be.
    """
    places = iter(range(len(tensors_of(result))))

    def text(value: Any) -> str:
        parts = _parts(value)
        if parts is None:
            return "None" if value is None else f"{{{next(places)}}}"
        kind, each = type(value), [(name, text(x)) for name, x in parts]
        items = ", ".join(x for _, x in each)
        if kind is list:
            return f"[{items}]"
        if kind is tuple:
            return f"({items},)" if items else "()"
        if dataclasses.is_dataclass(kind):
            return f"{name_of(kind)}({', '.join(f'{name}={x}' for name, x in each)})"
        if issubclass(kind, dict):
            keys = [repr(key).replace("{", "{{").replace("}", "}}") for key, _ in each]
            pairs = ", ".join(f"{key}: {x}" for key, (_, x) in zip(keys, each, strict=True))
            made = f"{{{{{pairs}}}}}"
            return made if kind is dict else f"{name_of(kind)}({made})"
        return f"{name_of(kind)}({items if hasattr(kind, '_fields') else f'({items},)'})"

    return text(result)
