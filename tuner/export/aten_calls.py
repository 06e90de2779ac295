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

__all__ = ["header_of", "made_by", "written_by"]


def header_of(function: str, num_arguments: int, *, is_out: bool) -> str:
    """Return the header that declares an operation, "" where a tensor's does.

    Args:
        function: the operation's name in `torch.ops.aten`.
        num_arguments: that it is given.
        is_out: it writes into one more.
    """
    if _num_tensors(function, num_arguments, is_out=is_out):
        return f"ATen/ops/{function}_ops.h"
    return "" if not is_out and _is_method(function) else f"ATen/ops/{function}.h"


def made_by(function: str, words: Sequence[str]) -> str:
    """Return a call that gives a fresh result; `words` are its arguments in C++."""
    if number := _num_tensors(function, len(words), is_out=False):
        missing = ["std::nullopt"] * (number - len(words))
        return f"at::_ops::{function}::call({', '.join([*words, *missing])})"
    if _is_method(function):
        first = words[0] if re.fullmatch(r"[\w.()]+", words[0]) else f"({words[0]})"
        return f"{first}.{function}({', '.join(words[1:])})"
    return f"at::{function}({', '.join(words)})"


def written_by(function: str, out: str, words: Sequence[str]) -> str:
    """Return a call that writes into `out`."""
    if _num_tensors(function, len(words), is_out=True):
        return f"at::_ops::{function}_out::call({', '.join([*words, out])})"
    return f"at::{function}_out({', '.join([out, *words])})"


def _is_method(function: str) -> bool:
    """Whether it is one of its first argument, in C++ as in PyTorch's own part of Python."""
    import torch

    found = inspect.getattr_static(torch._C.TensorBase, function, None)
    firsts = {
        schema.arguments[0].name
        for name, schema in _schemas(function).items()
        if schema.arguments and not name.endswith("out")
    }
    return isinstance(found, MethodDescriptorType) and firsts == {"self"}


def _num_tensors(function: str, num_arguments: int, *, is_out: bool) -> int:
    """Return how many tensors an operation takes where it takes nothing else, otherwise 0.

    The last of them may be missing. What is made, a method may make, or one of several overloads.
    """
    schemas = _schemas(function)
    if not is_out and (_is_method(function) or sum(not n.endswith("out") for n in schemas) > 1):
        return 0
    schema = schemas.get("out" if is_out else "default")
    kinds = [str(argument.type) for argument in schema.arguments] if schema else []
    given, missing = kinds[: num_arguments + is_out], kinds[num_arguments + is_out :]
    takes_others = set(kinds) - {"Tensor", "Optional[Tensor]"}
    if takes_others or len(given) < num_arguments + is_out or "Tensor" in missing:
        return 0
    return len(kinds) if not (is_out and missing) else 0


def _schemas(function: str) -> dict[str, Any]:
    import torch

    packet = getattr(torch.ops.aten, function, None)
    names = [] if packet is None else packet.overloads()
    return {name: getattr(packet, name)._schema for name in names}
