"""What is added before its own mean is subtracted: it cancels, as a bias before a norm does.

With t = u + c, and c one value along the dimensions of the mean and the variance:

    t - mean(t) = u - mean(u)        var(t) = var(u)        mean(t) = mean(u) + c

so that c is neither stored nor read for each element. A c that is Inf or NaN makes all of t, and
so of what is behind it, NaN: `c - c`, which is 0 for any other, is added to the mean and the
variance of u for that. Buffers get the mean with c.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuner.capture.graph.graph import Node, Operand, Ref
from tuner.capture.nests.index_space import axes_of
from tuner.capture.rewrites.edits import LARGEST, Edit, broadcast, number_of

__all__ = ["shift_cancelled"]

Axes = frozenset[int]  # of a value, those that mean and variance are over
Parts = tuple[Operand | None, Operand | None]  # what varies over these axes, and what does not


def shift_cancelled(edit: Edit) -> tuple[int, str] | None:
    """Take one such c out; return its line and a sentence, None where there is none."""
    means = (node for node in edit.graph.nodes if node.op == "mean")
    return next((found for mean in means if (found := _without_shift(edit, mean))), None)


def _without_shift(edit: Edit, first: Node) -> tuple[int, str] | None:
    whole = edit.node(first.args[0])
    if whole is None or whole.dtype not in ("float32", "float64", "bfloat16"):
        return None  # in float16 a product may be too large without what is added
    axes, uses = _axes(first, whole), edit.users(whole.name)
    means = [n for n in uses if n.op == "mean" and _axes(n, whole) == axes]
    variances = [n for n in uses if n.op == "var" and _axes(n, whole) == axes]
    apart = [n for n in uses if n.op == "sub" and _subtracts(edit, n, whole, means)]
    if not apart or len(means) + len(variances) + len(apart) < len(uses):
        return None
    is_kept = any(_is_used_beside(edit, mean, apart) for mean in means)
    rest, shift = _Shifts(edit, axes, is_kept).apart(whole)
    if not isinstance(rest, Ref) or shift is None or edit.is_result(whole.name):
        return None
    if edit.shape(rest) != whole.shape:
        return None  # what is added is what makes it that large
    number = number_of(shift)
    if number is not None and not abs(number) < LARGEST:
        return None
    # NaN of NaN and Inf, else 0. Of a product a difference from itself is no zero to a compiler
    # that fuses one of them with the subtraction: it is what the product was rounded by.
    nothing = edit.add("mul", shift, 0.0, like=whole) if isinstance(shift, Ref) else None
    of_rest: dict[str, Ref] = {}
    for mean in means:
        plain = edit.add("mean", rest, like=mean, shape=mean.shape, **mean.attrs)
        edit.become(mean, "add", plain, _reduced(edit, shift, mean, axes))
        if nothing is not None:
            less = _reduced(edit, nothing, mean, axes)
            plain = edit.add("add", plain, less, like=mean, shape=mean.shape)
        of_rest[mean.name] = plain
    for var in variances:
        if nothing is None:
            edit.become(var, "var", rest, **var.attrs)
            continue
        plain = edit.add("var", rest, like=var, shape=var.shape, **var.attrs)
        edit.become(var, "add", plain, _reduced(edit, nothing, var, axes))
    for node in apart:
        its_mean = of_rest[edit.seen(node.args[1]).name]
        less = edit.view(its_mean, edit.shape(node.args[1]), node)
        edit.become(node, "sub", rest, less)
    names = [*dict.fromkeys(_named(edit, shift))]
    cancel = f"{' and '.join(names)} cancel{'s' if len(names) == 1 else ''}"
    kept = "; the mean that is kept has it still" if is_kept else ""
    return whole.line, f"{cancel} where the mean is subtracted{kept}"


def _axes(node: Node, whole: Node) -> Axes:
    return frozenset(axes_of(node, len(whole.shape)))


def _is_used_beside(edit: Edit, value: Node, users: Sequence[Node]) -> bool:
    """Whether anything but `users` needs a value, in one view of it or another."""
    return edit.is_result(value.name) or any(
        _is_used_beside(edit, user, users) if user.op == "view" else user not in users
        for user in edit.users(value.name)
    )


def _subtracts(edit: Edit, node: Node, whole: Node, means: Sequence[Node]) -> bool:
    """Whether a node is a value minus its own mean, spread over the dimensions of the mean."""
    one, other = node.args
    if one != Ref(whole.name) or not isinstance(other, Ref) or node.shape != whole.shape:
        return False
    mean = next((m for m in means if m == edit.seen(other)), None)
    if mean is None:
        return False
    axes = _axes(mean, whole)
    spread = tuple(1 if a in axes else size for a, size in enumerate(whole.shape))
    shape = edit.shape(other)
    return (1,) * (len(spread) - len(shape)) + shape == spread


def _reduced(edit: Edit, shift: Operand, node: Node, axes: Axes) -> Operand:
    """Return a shift in a shape that is spread to that of a mean or variance."""
    if not isinstance(shift, Ref) or node.attrs.get("keepdim"):
        return shift
    rank = len(node.shape) + len(axes)
    shape = (1,) * (rank - len(edit.shape(shift))) + edit.shape(shift)
    return edit.view(shift, [n for a, n in enumerate(shape) if a not in axes], node)


def _named(edit: Edit, shift: Operand) -> list[str]:
    """Return the names of what a shift is made of, as the user knows them."""
    if not isinstance(shift, Ref):
        return [f"{shift:g}"]
    node = edit.node(shift)
    if node is None:
        return [shift.name]
    if node in edit.graph.nodes and node.op not in ("view", "expand"):
        return [node.name]  # of the graph as it was
    added = node.args[:1] if node.op in ("mul", "div") else node.args
    return [name for arg in added for name in _named(edit, arg)]


class _Shifts:
    """Takes values apart: into what varies over some axes, and what is added to it.

    Where the mean `is_kept`, not through a product with a tensor: where that is infinite, the mean
    is infinite or NaN by the signs of the whole, which its parts do not tell. All that is less its
    mean is NaN then in any case.
    """

    def __init__(self, edit: Edit, axes: Axes, is_kept: bool) -> None:
        self.edit, self.axes, self.is_kept = edit, axes, is_kept

    def apart(self, node: Node) -> Parts:
        """Return the two parts, of which it is the sum; either may be missing."""
        how = {
            "add": self._sum, "sub": self._sum, "mul": self._scaled, "div": self._scaled,
            "view": self._viewed, "linear": self._product,
        }  # fmt: skip
        found = how.get("linear" if node.op.startswith("conv") else node.op)
        parts = found(node) if found is not None else None
        return parts or (Ref(node.name), None)

    def _operand(self, operand: Operand, user: Node) -> Parts:
        if self._is_same(self.edit.shape(operand), user.shape):
            return (None, operand) if self._is_given(operand) else (operand, None)
        node = self.edit.node(operand)
        is_alike = node is not None and len(node.shape) == len(user.shape)
        if node is None or not is_alike or not self.edit.is_only_for(node, user):
            return operand, None
        return self.apart(node)

    def _is_same(self, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
        """Whether a tensor that is spread to `whole` has one value along the axes."""
        padded = (1,) * (len(whole) - len(shape)) + shape
        return all(padded[axis] == 1 for axis in self.axes)

    def _is_given(self, operand: Operand) -> bool:
        """Whether an operand is computed of what is given alone, element by element.

        A mean that was subtracted already stays where it is: large numbers lose digits without.
        """
        node = self.edit.node(operand)
        kinds = ("pointwise", "index", "create")
        return node is None or (node.kind in kinds and all(map(self._is_given, node.args)))

    def _sum(self, node: Node) -> Parts | None:
        (u, c), (v, d) = (self._operand(a, node) for a in node.args)
        if c is None and d is None:
            return None
        return self._joined(node, u, v), self._joined(node, c, d)

    def _joined(self, like: Node, one: Operand | None, other: Operand | None) -> Operand | None:
        if other is None:
            return one
        if one is None and like.op == "add":
            return other
        if one is None:
            less = number_of(other)
            return self.edit.add("neg", other, like=like) if less is None else -less
        numbers = number_of(one), number_of(other)
        if numbers[0] is not None and numbers[1] is not None:
            return numbers[0] + numbers[1] if like.op == "add" else numbers[0] - numbers[1]
        return self.edit.add(like.op, one, other, like=like)

    def _scaled(self, node: Node) -> Parts | None:
        x, factor = node.args
        if node.op == "mul" and self._is_same(self.edit.shape(x), node.shape):
            x, factor = factor, x
        if not self._is_same(self.edit.shape(factor), node.shape):
            return None
        number = number_of(factor)
        if self.is_kept if number is None else not 1 / LARGEST < abs(number) < LARGEST:
            return None
        u, c = self._operand(x, node)
        if u is None or c is None:
            return None
        if number is not None and (shift := number_of(c)) is not None:
            return self.edit.add(node.op, u, factor, like=node), (
                shift * number if node.op == "mul" else shift / number
            )
        return self.edit.add(node.op, u, factor, like=node), self.edit.add(
            node.op, c, factor, like=node
        )

    def _product(self, node: Node) -> Parts | None:
        """Take the bias of a Linear or of a convolution apart."""
        if len(node.args) != 3:
            return None
        x, weight, bias = node.args
        assert isinstance(bias, Ref)
        num_behind = 0 if node.op == "linear" else int(node.op[-2])
        shape = (*self.edit.shape(bias), *[1] * num_behind)
        if not self._is_same(shape, node.shape):
            return None
        plain = self.edit.add(node.op, x, weight, like=node, shape=node.shape, **node.attrs)
        return plain, self.edit.view(bias, shape, node)

    def _viewed(self, node: Node) -> Parts | None:
        """Take what is viewed apart, where no axis is cut or joined with one of another kind."""
        before = self.edit.node(node.args[0])
        if before is None or not self.edit.is_only_for(before, node):
            return None
        groups = _regrouped(before.shape, node.shape)
        old: set[int] = set()
        for own, new in groups:
            kinds = {axis in self.axes for axis in new if node.shape[axis] > 1}
            if len(kinds) > 1:
                return None
            old |= {*own} if kinds == {True} else set()
        if not old:
            return None
        u, c = _Shifts(self.edit, frozenset(old), self.is_kept).apart(before)
        if c is None or not isinstance(u, Ref) or self.edit.shape(u) != before.shape:
            return None
        rest = self.edit.view(u, node.shape, node)
        if not isinstance(c, Ref):
            return rest, c
        shape = self.edit.shape(c)
        shape = (1,) * (len(before.shape) - len(shape)) + shape
        full, wanted = [*shape], [1] * len(node.shape)
        for own, new in groups:
            if any(shape[a] > 1 for a in own):
                for a in own:
                    full[a] = before.shape[a]
                for a in new:
                    wanted[a] = node.shape[a]
        if broadcast(shape, tuple(full)) != shape:
            c = self.edit.add("expand", c, like=node, shape=full)
        return rest, self.edit.view(c, wanted, node)


def _regrouped(
    old: tuple[int, ...], new: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the fewest axes of each shape that hold the same elements, group by group."""
    found, at, to = [], 0, 0
    while at < len(old) and to < len(new):
        begin, start = at, to
        own, other = old[at], new[to]
        at, to = at + 1, to + 1
        while own != other:
            if own < other:
                own, at = own * old[at], at + 1
            else:
                other, to = other * new[to], to + 1
        found.append((tuple(range(begin, at)), tuple(range(start, to))))
    return found  # what is left has one element
