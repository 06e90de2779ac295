"""PyTorch's own operations as C++, by those headers that take least time to compile.

`<ATen/ops/NAME.h>`, which declares `at::NAME`, includes PyTorch's whole context: 4 s of 7 for the
compiler, once an exported file. Methods of a tensor need none of that, nor does what takes tensors
alone, by `<ATen/ops/NAME_ops.h>`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from types import MethodDescriptorType
from typing import Any

__all__ = ["header_of", "made_by"]


def header_of(function: str, num_arguments: int) -> str:
    """Return the header that declares what `made_by` writes, "" where a tensor's does.

    Args:
        function: the operation's name in `torch.ops.aten`.
        num_arguments: that it is given.
    """
    if _num_tensors(function, num_arguments):
        return f"ATen/ops/{function}_ops.h"
    return "" if _is_method(function) else f"ATen/ops/{function}.h"


def made_by(function: str, words: Sequence[str]) -> str:
    """Return a call that gives a fresh result; `words` are its arguments in C++."""
    if number := _num_tensors(function, len(words)):
        missing = ["std::nullopt"] * (number - len(words))
        return f"at::_ops::{function}::call({', '.join([*words, *missing])})"
    if _is_method(function):
        first = words[0] if re.fullmatch(r"[\w.()]+", words[0]) else f"({words[0]})"
        return f"{first}.{function}({', '.join(words[1:])})"
    return f"at::{function}({', '.join(words)})"


def _is_method(function: str) -> bool:
    """Whether it is one of its first argument, in C++ as in PyTorch's own part of Python."""
    import torch

    found = inspect.getattr_static(torch._C.TensorBase, function, None)
    schemas = _schemas(function)
    return (
        isinstance(found, MethodDescriptorType)
        and bool(schemas)
        and all(schema.arguments and schema.arguments[0].name == "self" for schema in schemas)
    )


def _num_tensors(function: str, num_arguments: int) -> int:
    """Return how many tensors an operation takes that takes nothing else, otherwise 0.

    The last of them may be missing. Methods, and what has several overloads, are none of these.
    """
    schemas = _schemas(function)
    if len(schemas) != 1 or schemas[0].name != f"aten::{function}" or _is_method(function):
        return 0
    kinds = [str(argument.type) for argument in schemas[0].arguments]
    is_of_tensors = set(kinds) <= {"Tensor", "Optional[Tensor]"}
    is_enough = len(kinds) >= num_arguments and "Tensor" not in kinds[num_arguments:]
    return len(kinds) if is_of_tensors and is_enough else 0


def _schemas(function: str) -> list[Any]:
    """Return those of an operation's overloads that make what they return."""
    import torch

    packet = getattr(torch.ops.aten, function, None)
    names = [] if packet is None else packet.overloads()
    return [getattr(packet, name)._schema for name in names if not name.endswith("out")]
