"""One of PyTorch's recorded operators after the other, as nodes of a graph or as a refusal."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tuner.capture.graph.calls import is_random, is_view
from tuner.capture.graph.graph import Ref
from tuner.capture.graph.lowering import Lowering, dtype_name
from tuner.capture.graph.rules import lowered
from tuner.capture.graph.rules_reducing import Rule
from tuner.errors import CaptureError
from tuner.problem.reference import Problem

__all__ = ["Operators"]


class Operators:
    """Reads operators of a problem's forward; `is_training` is the mode it was recorded in.

    `rules` come before those that forwards have too.
    """

    rules: Mapping[str, Rule] = {}

    def __init__(self, problem: Problem, *, is_training: bool) -> None:
        self.problem = problem
        self.is_training = is_training
        # A user's line is the innermost one of the user's own file.
        self.line_pattern = re.compile(rf'File "{re.escape(str(problem.source))}", line (\d+)')

    def error(self, node: Any, reason: str, then: str) -> CaptureError:
        """Return the error that a forward cannot be captured, with the user's line."""
        line = self.line_of(node) if node is not None else 0
        place = f"{self.problem.source}:{line}" if line else str(self.problem.source)
        return CaptureError(f"{place}: {reason}\n  next: {then}")

    def line_of(self, node: Any) -> int:
        """Return the user's line that asked for an operator, 0 where it is not known."""
        lines = self.line_pattern.findall(node.meta.get("stack_trace") or "")
        return int(lines[-1]) if lines else 0

    def refuse(self, node: Any) -> None:
        """Raise where an operator draws numbers, asks for a value, or is not PyTorch's."""
        import torch

        target = node.target
        if target is operator.getitem:
            return
        name = str(getattr(target, "name", lambda: target)())
        if not isinstance(target, torch._ops.OpOverload):
            raise self.error(
                node,
                f"Model.forward uses {name}; expected PyTorch's operators on tensors only",
                "compute with tensors of fixed sizes, without torch.cond and its like",
            )
        if target.namespace not in ("aten", "prims"):
            raise self.error(
                node,
                f"Model.forward calls the operator {name}; expected PyTorch's own operators",
                "write it with PyTorch's operators",
            )
        if name.startswith(("aten::_local_scalar_dense", "aten::item")):
            raise self.error(
                node,
                "Model.forward reads a number out of a tensor; expected the same operations for "
                "all values",
                "keep it as a tensor, without .item() and .tolist()",
            )
        if not is_random(node):
            return
        is_dropout = "dropout" in name or "bernoulli" in name or "attention" in name
        advice = (
            "tune it in eval mode, where dropout does nothing: --mode eval, or module.eval()"
            if self.is_training and is_dropout
            else ""
        )
        raise self.error(
            node,
            f"Model.forward draws random numbers ({name.split('.')[0]}); expected the same "
            "answer for the same inputs",
            advice or "draw them in get_inputs() and pass them to forward",
        )

    def lower(self, low: Lowering, node: Any, values: dict[str, Any]) -> Any:
        """Write an operator's nodes; return its result as an operand, or a tuple of them.

        `values` are the results until now, by the names of PyTorch's nodes.
        """
        import torch

        def operand(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                found = values[value.name]
                return found[0] if isinstance(found, tuple) else found
            if isinstance(value, (list, tuple)):
                return [operand(item) for item in value]
            return value

        if node.target is operator.getitem:
            source, index = node.args
            return self.picked(low, node, values[source.name], index)
        result = node.meta["val"]
        first = result[0] if isinstance(result, (list, tuple)) else result
        if not isinstance(first, torch.Tensor):
            raise self.error(
                node,
                f"Model.forward computes {type(first).__name__} by {node.target}; expected "
                "tensors of fixed sizes",
                "compute with tensors of fixed sizes",
            )
        if any(isinstance(size, torch.SymInt) for size in first.shape):
            raise self.error(
                node,
                "Model.forward makes a tensor whose size depends on values; expected the same "
                "shapes for all values",
                "compute with a mask of fixed size, for example by torch.where",
            )
        low.move_to(first.shape, dtype_name(first.dtype), self.line_of(node))
        schema = node.target._schema.arguments
        given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
        arguments = {
            a.name: operand(given[a.name]) if a.name in given else a.default_value for a in schema
        }
        name, overload = node.target._opname, node.target._overloadname
        if name in ("native_dropout", "dropout"):
            return (arguments["input"], None)  # with p = 0: `refuse` has seen to it
        if name == "as_strided" and is_view(node):
            name = "view"
        rule = self.rules.get(name)
        found = rule(low, arguments) if rule is not None else None
        if found is None:
            found = lowered(low, name, overload, arguments)
        made = low.nodes[-1] if low.nodes else None
        has_several = len(node.target._schema.returns) > 1
        if has_several and made and isinstance(found, Ref) and made.op.startswith("aten."):
            low.nodes[-1] = replace(made, attrs=made.attrs | {"pick": 0})
        return found

    def picked(self, low: Lowering, node: Any, value: Any, index: int) -> Any:
        """Return one result of an operator with several."""
        if isinstance(value, tuple):
            return value[index]
        if index == 0:
            return value
        result = node.meta.get("val")
        if result is None:  # which this call leaves out
            return None
        low.move_to(result.shape, dtype_name(result.dtype), self.line_of(node))
        return low.emit("result", value, index=index)
