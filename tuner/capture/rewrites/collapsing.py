"""A sum over the outputs of a Linear as one product with the sum of its weights.

    sum_j (sum_k x[i, k] * W[j, k] + b[j])  =  sum_k x[i, k] * s[k] + sum_j b[j]

with s[k] = sum_j W[j, k], which is less work by as many times as there are outputs. A mean is the
same with all divided; numbers that scale in between are taken into s, what is added in between is
summed by itself.

Where x[i, k] is infinite the sum is NaN unless all of W[:, k] have one sign, and then it is
infinite, whatever s[k] is: so infinite elements are multiplied by 1, -1 or NaN instead, by the
smallest and the largest of W[:, k]. All else that is Inf or NaN shows in s and in the products.

And s[k] may be past the largest float32 where no product is: there a sum of smaller weights is
multiplied by larger x, both by a power of 2, which changes no digit of what is so large.
"""

from __future__ import annotations

import math

from pydantic import JsonValue

from tuner.capture.graph.graph import Node, Operand, Ref
from tuner.capture.nests.index_space import axes_of
from tuner.capture.rewrites.edits import LARGEST, Edit, number_of, with_number

__all__ = ["sum_of_linear"]


def sum_of_linear(edit: Edit) -> tuple[int, str] | None:
    """Replace one such sum; return its line and a sentence, None where there is none."""
    for node in edit.graph.nodes:
        if node.op not in ("sum", "mean") or node.dtype not in ("float32", "float64"):
            continue  # in float16 the sums of weights, which are stored, might be too large
        whole = edit.node(node.args[0])
        if whole is None or axes_of(node, len(whole.shape)) != (len(whole.shape) - 1,):
            continue
        count = whole.shape[-1]
        total = _Total(edit, node, count)
        scale = 1 / count if node.op == "mean" else 1.0
        if count > 1 and edit.is_only_for(whole, node) and total.add(whole, scale):
            total.finish()
            names = " and ".join(dict.fromkeys(total.products))
            text = f"a {node.op} of the outputs of {names} is one product with summed weights"
            return node.line, text
    return None


class _Total:
    """The sum over the last axis of a value, as a sum of what it is made of."""

    def __init__(self, edit: Edit, node: Node, count: int) -> None:
        self.edit, self.node, self.count = edit, node, count
        self.products: list[str] = []
        self._terms: list[Ref] = []
        self._number = 0.0

    def add(self, value: Node, scale: float) -> bool:
        """Add a value's sum times a number; whether there is a product in it."""
        if value.op in ("linear", "matmul"):
            return self._add_product(value, scale)
        if value.op in ("add", "sub"):
            one, other = value.args
            sign = 1.0 if value.op == "add" else -1.0
            return any([self._add(one, value, scale), self._add(other, value, sign * scale)])
        found = with_number(value, ("mul", "div"))
        if found is None or not found[1]:
            return False
        scaled, number = found
        scale = scale * number if value.op == "mul" else scale / number
        node = self.edit.node(scaled)
        is_plain = 2.0**-60 < abs(scale) < 2.0**60  # so that nothing is lost in s
        is_ours = node is not None and self.edit.is_only_for(node, value)
        return is_plain and is_ours and node is not None and self.add(node, scale)

    def _add(self, operand: Operand, user: Node, scale: float) -> bool:
        node = self.edit.node(operand)
        is_ours = node is not None and node.shape == user.shape
        if node is not None and is_ours and self.edit.is_only_for(node, user):
            kept = len(self._terms), self._number
            if self.add(node, scale):
                return True
            del self._terms[kept[0] :]
            self._number = kept[1]
        number = number_of(operand)
        if number is not None:
            single = number if abs(number) < LARGEST else number * math.inf
            self._number += self.count * scale * single
        elif isinstance(operand, Ref) and self.edit.shape(operand)[-1:] == (self.count,):
            self._terms.append(self._scaled(self._summed(operand, self._keeps), scale))
        elif isinstance(operand, Ref):
            shape = self.edit.shape(operand)
            kept_shape = shape if self._keeps else shape[:-1]
            plain = self.edit.view(operand, kept_shape, self.node)
            self._terms.append(self._scaled(plain, self.count * scale))
        return False

    @property
    def _keeps(self) -> bool:
        return bool(self.node.attrs.get("keepdim"))

    def _add_product(self, product: Node, scale: float) -> bool:
        x, weight, *bias = product.args
        outputs = 0 if product.op == "linear" else 1  # which axis of the weight has them
        turned = self.edit.node(weight)
        if turned is not None and turned.op == "permute" and turned.attrs["axes"] == [1, 0]:
            weight, outputs = turned.args[0], 1 - outputs
        shape = self.edit.shape(weight)
        if not isinstance(x, Ref) or not isinstance(weight, Ref) or len(shape) != 2:
            return False
        inner = shape[1 - outputs]
        if not self.edit.shape(x) or self.edit.shape(x)[-1] != inner:
            return False
        form = {"like": product, "shape": [inner]}
        over: dict[str, object] = {"axes": [outputs], "keepdim": False}
        add = self.edit.add
        summed, low, high = (add(op, weight, **form, **over) for op in ("sum", "amin", "amax"))  # type: ignore[arg-type]
        sign = math.copysign(1.0, scale)
        below = add("lt", high, 0.0, like=product)
        above = add("gt", low, 0.0, like=product)
        neither = add(
            "mul", low, math.nan, like=product
        )  # a tensor: no operation of numbers alone
        of_infinite = add("where", below, -sign, neither, like=product)
        of_infinite = add("where", above, sign, of_infinite, like=product)
        larger = 2.0 ** self.count.bit_length()
        less = add("mul", weight, 1 / larger, like=product)
        less = add("sum", less, **form, **over)  # type: ignore[arg-type]
        is_past = add("eq", add("abs", summed, like=product), math.inf, like=product)
        finite = add(
            "where", is_past, self._scaled(less, scale), self._scaled(summed, scale), like=product
        )
        is_infinite = add("eq", add("abs", x, like=product), math.inf, like=product)
        chosen = add("where", is_infinite, of_infinite, finite, like=product)
        given = add("where", is_past, add("mul", x, larger, like=product), x, like=product)
        self._terms.insert(0, self._summed(add("mul", given, chosen, like=product), self._keeps))
        for operand in bias:
            assert isinstance(operand, Ref)
            self._terms.append(self._scaled(self._summed(operand, self._keeps), scale))
        self.products.append(product.name)
        return True

    def _summed(self, operand: Ref, keepdim: bool) -> Ref:
        """Sum over the last axis."""
        *shape, _ = self.edit.shape(operand)
        axes: list[JsonValue] = [len(shape)]
        shape += [1] if keepdim else []
        return self.edit.add(
            "sum", operand, like=self.node, shape=shape, axes=axes, keepdim=keepdim
        )

    def _scaled(self, operand: Ref, scale: float) -> Ref:
        return operand if scale == 1 else self.edit.add("mul", operand, scale, like=self.node)

    def finish(self) -> None:
        """Put the sum in the node's place."""
        terms: list[Operand] = [*self._terms]
        if self._number:
            terms.append(self._number)
        if len(terms) == 1:
            (only,) = self._terms
            self.edit.drop(self.node, only)
            return
        *before, last = terms
        total = before[0]
        for term in before[1:]:
            total = self.edit.add("add", total, term, like=self.node)
        self.edit.become(self.node, "add", total, last)
