"""Arguments of a step that calls PyTorch's own operation: tensors, numbers, lists of either.

They are written as in Python: `x`, `weight.t`, `x.channels_last` (the same, in that order of
memory), `x.channels_first` (of an image whose channels are the last dimension, a view in which
they are the second), `x.truths` (bytes as truths), `x.int64` (in another dtype), `x + 1.0`,
`null`, `0.5`, `True`, `'floor'`, `[1, 2]`, `[0.5, 2.0]`, `[x, y]`, `[null, x]` (what indexes each
dimension), and `scale=0.5` for what PyTorch takes by its name alone.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["as_cpp", "as_no_view", "as_python", "channels_last", "names_in", "problem_with"]

# Functions whose list has an index, or nothing, for each dimension.
_INDEXING = {"index", "index_put"}
_DTYPES = {
    "float32": "at::kFloat",
    "float64": "at::kDouble",
    "float16": "at::kHalf",
    "bfloat16": "at::kBFloat16",
    "int64": "at::kLong",
}


def names_in(text: str) -> set[str]:
    """Return the tensors that an argument names."""
    tree = _parsed(text)[1]
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return found - {"null", "inf"}


def problem_with(text: str) -> str:
    """Return what is wrong with an argument, or nothing."""
    try:
        as_cpp(text)
    except (SyntaxError, ValueError):
        return f"{text!r} is no tensor, number or list of them"
    return ""


def as_python(text: str) -> str:
    """Write an argument as Python."""
    keyword, tree = _parsed(text)
    written = _written(
        tree, {"None": "None", "True": "True", "False": "False"}, "[", 'float("inf")'
    )
    return f"{keyword}={written}" if keyword else written


def as_cpp(text: str, function: str = "") -> str:
    """Write an argument of a function as C++; one with a keyword has to stand in its place."""
    words = {"None": "std::nullopt", "True": "true", "False": "false"}
    infinity = "std::numeric_limits<double>::infinity()"
    tree = _parsed(text)[1]
    if isinstance(tree, ast.List) and function in _INDEXING:
        inside = ", ".join(_written(item, words, "{", infinity) for item in tree.elts)
        return f"c10::List<std::optional<at::Tensor>>{{{inside}}}"
    return _written(tree, words, "{", infinity)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return an image's or a volume's tensor (4 or 5 dimensions) with its channels adjacent."""
    import torch

    is_volume = tensor.dim() == 5
    order = torch.channels_last_3d if is_volume else torch.channels_last
    return tensor.contiguous(memory_format=order)


def as_no_view(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return what PyTorch gave, as no view of a tensor that nobody has: a user may edit it.

    What shares memory with `others`, arguments and other results, is copied: PyTorch refuses it
    of an operator.
    """
    import torch

    address = tensor.untyped_storage().data_ptr()
    if any(other.untyped_storage().data_ptr() == address for other in others):
        return tensor.clone()
    is_view = tensor._is_view()
    return torch.ops.aten._unsafe_view.default(tensor, tensor.shape) if is_view else tensor


def _parsed(text: str) -> tuple[str, ast.expr]:
    keyword, equals, rest = text.rpartition("=")
    if equals and not keyword.isidentifier():
        raise ValueError(text)
    return keyword, ast.parse(rest, mode="eval").body


def _written(tree: ast.expr, words: Mapping[str, str], bracket: str, infinity: str) -> str:
    match tree:
        case ast.Name(id="null"):
            return words["None"]
        case ast.Name(id="inf"):
            return infinity
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=name), attr="t"):
            return f"{name}.t()"
        case ast.Attribute(value=ast.Name(id=name), attr="channels_last"):
            return f"channels_last({name})"
        case ast.Attribute(value=ast.Name(id=name), attr="channels_first"):
            return f"{name}.movedim(-1, 1)"
        case ast.Attribute(value=ast.Name(id=name), attr="truths"):
            return f"{name}.view({'torch.bool' if bracket == '[' else 'at::kBool'})"
        case ast.Attribute(value=ast.Name(id=name), attr=dtype) if dtype in _DTYPES:
            return f"{name}.to({f'torch.{dtype}' if bracket == '[' else _DTYPES[dtype]})"
        case ast.Constant(value=str(text)):
            return json.dumps(text)
        case ast.BinOp(left=ast.Name(id=name), op=ast.Add(), right=number):
            return f"{name}.add({_written(number, words, bracket, infinity)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"-{_written(operand, words, bracket, infinity)}"
        case ast.Constant(value=bool() | None as value):
            return words[str(value)]
        case ast.Constant(value=int() | float() as value):
            return repr(value)
        case ast.List(elts=items):
            inside = ", ".join(_written(item, words, bracket, infinity) for item in items)
            if bracket == "[":
                return f"[{inside}]"
            values = [item.value for item in items if isinstance(item, ast.Constant)]
            if values and all(isinstance(value, bool) for value in values):
                return f"std::array<bool, {len(items)}>{{{{{inside}}}}}"
            if values and all(isinstance(value, float) for value in values):
                return f"at::ArrayRef<double>{{{inside}}}"
            kind = "TensorList" if names_in(ast.unparse(tree)) else "IntArrayRef"
            return f"at::{kind}{{{inside}}}"
    raise ValueError(ast.unparse(tree))
