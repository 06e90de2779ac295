"""Nodes of a graph, one after the other: names, lines, dtypes brought together.

A `Lowering` is at one of PyTorch's operators at a time; `rules` write its nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from tuner.capture.graph.graph import Node, Operand, Ref, Tensor
from tuner.capture.graph.vocabulary import VOCABULARY

if TYPE_CHECKING:
    import torch

__all__ = ["Lowering", "dtype_name", "plain"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def plain(value: Any) -> JsonValue:
    """Return an attribute as plain data: infinities and NaN, and PyTorch's own kinds, as words.

    A Ref stays for the caller to replace; so this must not see one.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value).removeprefix("torch.")


class Lowering:
    """The nodes so far, and where PyTorch's program is.

    `shape`, `dtype` and `line` are those of the operator's (first) result; `emit` gives them to a
    node unless given.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.nodes: list[Node] = []
        self.forms: dict[str, tuple[tuple[int, ...], str]] = {
            tensor.name: (tensor.shape, tensor.dtype) for tensor in given
        }
        self.shape: tuple[int, ...] = ()
        self.dtype = "float32"
        self.line = 0
        self._counts: dict[str, int] = {}

    def move_to(self, shape: Sequence[int], dtype: str, line: int) -> None:
        """Go on to an operator whose (first) result has this shape and dtype."""
        self.shape, self.dtype, self.line = tuple(int(n) for n in shape), dtype, line

    def shape_of(self, operand: Operand) -> tuple[int, ...]:
        """Return an operand's shape; () for a number."""
        return self.forms[operand.name][0] if isinstance(operand, Ref) else ()

    def node_of(self, operand: Ref) -> Node | None:
        """Return the node that makes a value, None of what is given."""
        return next((node for node in reversed(self.nodes) if node.name == operand.name), None)

    def emit(
        self,
        op: str,
        *args: Operand,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        **attrs: JsonValue,
    ) -> Ref:
        """Add a node and return it as an operand."""
        name = self._fresh(op.removeprefix("aten."))
        form = (self.shape if shape is None else tuple(shape), dtype or self.dtype)
        self.nodes.append(Node(name, op, args, attrs, *form, self.line))
        self.forms[name] = form
        return Ref(name)

    def pointwise(
        self, op: str, *args: Operand, shape: Sequence[int] | None = None, dtype: str | None = None
    ) -> Ref:
        """Add a pointwise node; tensors among its operands are brought to one dtype before.

        That is the dtype of the result; for a comparison it is the one that PyTorch promotes to,
        and for `where` the condition stays.
        """
        wanted = dtype or self.dtype
        first = 1 if op == "where" else 0
        if VOCABULARY[op].is_comparison:
            wanted = self._promoted(args)
        moved = [arg if i < first else self.cast(arg, wanted) for i, arg in enumerate(args)]
        return self.emit(op, *moved, shape=shape, dtype=dtype)

    def cast(self, operand: Operand, dtype: str) -> Operand:
        """Return a tensor in that dtype, by a node where need be; a number as it is."""
        if not isinstance(operand, Ref) or self.forms[operand.name][1] == dtype:
            return operand
        return self.emit("cast", operand, shape=self.shape_of(operand), dtype=dtype)

    def view(self, operand: Ref, shape: Sequence[int]) -> Ref:
        """Return a tensor in that shape, by a node where need be; of a view, what that is of."""
        before = self.node_of(operand)
        if before is not None and before.op == "view" and isinstance(before.args[0], Ref):
            operand = before.args[0]
        if self.shape_of(operand) == tuple(shape):
            return operand
        return self.emit("view", operand, shape=shape, dtype=self.forms[operand.name][1])

    def call(self, name: str, overload: str, arguments: Mapping[str, Any]) -> Ref:
        """Add a call of PyTorch's operator, as it is."""
        tensors: list[Operand] = []

        def packed(value: Any) -> JsonValue:
            if isinstance(value, Ref):
                tensors.append(value)
                return {"ref": len(tensors) - 1}
            if isinstance(value, (list, tuple)):
                return [packed(item) for item in value]
            return plain(value)

        attrs: dict[str, JsonValue] = {key: packed(value) for key, value in arguments.items()}
        return self._add_call(f"aten.{name}", tensors, {"overload": overload, **attrs})

    def library(self, op: str, arguments: Mapping[str, Any], names: Sequence[str]) -> Ref:
        """Add a call that the vocabulary knows: tensors are operands, `names` its attributes."""
        tensors = [value for value in arguments.values() if isinstance(value, Ref)]
        return self._add_call(op, tensors, {name: plain(arguments[name]) for name in names})

    def _add_call(self, op: str, args: Sequence[Operand], attrs: dict[str, JsonValue]) -> Ref:
        name = self._fresh(op.removeprefix("aten."))
        self.nodes.append(Node(name, op, tuple(args), attrs, self.shape, self.dtype, self.line))
        self.forms[name] = (self.shape, self.dtype)
        return Ref(name)

    def _promoted(self, args: Sequence[Operand]) -> str:
        """Return the dtype that PyTorch compares these operands in."""
        import torch

        def stand_in(arg: Operand) -> Any:
            if not isinstance(arg, Ref):
                return arg
            shape, dtype = self.forms[arg.name]
            return torch.empty([0] * min(len(shape), 1), dtype=getattr(torch, dtype))

        values = [stand_in(arg) for arg in args]
        if len(values) == 1:
            return dtype_name(values[0].dtype)
        return dtype_name(torch.result_type(*values))

    def _fresh(self, stem: str) -> str:
        """Return a name that no other value has: `mul`, then `mul_1` ..."""
        while True:
            number = self._counts.get(stem, 0)
            self._counts[stem] = number + 1
            name = f"{stem}_{number}" if number else stem
            if name not in self.forms:
                return name
