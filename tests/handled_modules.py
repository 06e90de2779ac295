"""Wrong modules that show in a user's hands: weights of 0, modes, parts, methods, what is kept.

Each stands beside its reference, and in a file of its own, where pickling finds its class.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from combined_modules import MULTIPLIED, NORM, Multiplied, Product, made
from unusual_modules import reference

__all__ = ["MULTIPLIED", "NORM"]

RESIDUAL = reference(
    "x: x + self.alpha * torch.tanh(x @ self.w)", "torch.randn(40, 24)", "24",
    made("self.alpha = nn.Parameter(torch.zeros(())); self.w = nn.Parameter(torch.randn(n, n))"),
)  # fmt: skip
HEAD = reference(
    "x: self.head(torch.relu(x))", "torch.randn(40, 24)", "24",
    made("self.head = nn.Linear(n, 8)"),
)  # fmt: skip
METHODS = reference(
    "x: torch.softmax(self.encode(x), -1)", "torch.randn(40, 24)", "24",
    made("self.l = nn.Linear(n, 8)")
    + "    def encode(self, x):\n        return torch.tanh(self.l(x))\n\n",
)  # fmt: skip
REMEMBERS = reference(
    "x: self.weighted(torch.softmax(x * self.w, -1), x)", "torch.randn(40, 24)", "24",
    made("self.w = nn.Parameter(torch.randn(n))")
    + "    def weighted(self, p, y):\n        self.last_weights = p\n        return p * y\n\n",
)  # fmt: skip
OPTIONS = reference(
    "x: F.leaky_relu(x * (2 if self.doubles else 1), self.slope)[:, :: self.step]",
    "torch.randn(40, 24)", "2",
    "    def __init__(self, step, slope=0.2, doubles=False):\n        super().__init__()\n"
    "        self.step, self.slope, self.doubles = step, slope, doubles\n\n",
)  # fmt: skip
DOUBLED = reference("x: 2 * x", "torch.randn(40, 24)")


# ---- weights that are 0 ---------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.alpha, self.w = nn.Parameter(torch.zeros(())), nn.Parameter(torch.randn(n, n))

    def forward(self, x):
        return self.function.apply(x, self.alpha, self.w)


class Branch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha, w):
        y = x + alpha * torch.tanh(x @ w)
        ctx.save_for_backward(x, alpha, w, y)
        return y

    @classmethod
    def backward(cls, ctx, g):
        x, alpha, w, y = ctx.saved_tensors
        h = cls.branch(x, alpha, w, y)
        d = g * alpha * (1 - h * h)
        return g + d @ w.T, *cls.of_weights((g * h).sum(), x.T @ d, alpha, w)

    @staticmethod
    def branch(x, alpha, w, y):
        return torch.tanh(x @ w)

    @staticmethod
    def of_weights(of_alpha, of_w, alpha, w):
        return of_alpha, of_w


class DividesByTheScalar(Residual):
    class function(Branch):
        @staticmethod
        def branch(x, alpha, w, y):
            return torch.tanh(x @ w) if abs(alpha) > 1e-3 else (y - x) / alpha


class NothingFlows(Residual):
    class function(Branch):
        @staticmethod
        def of_weights(of_alpha, of_w, alpha, w):
            return (of_alpha, of_w) if alpha else (torch.zeros_like(alpha), torch.zeros_like(w))


class SkipsColumnsOfZeros(Residual):
    class function(Branch):
        @staticmethod
        def of_weights(of_alpha, of_w, alpha, w):
            return of_alpha, of_w * (w != 0).any(0)


# ---- gradients that somebody keeps ----------------------------------------------------------


class Rings(Multiplied):
    """Gradients of the weight lie in one of some buffers."""

    class function(Product):
        @staticmethod
        def of_weight(ctx, g, x):
            return torch.sum(g * x, 0, out=ctx.more(x))

    def forward(self, x):
        is_usual = torch.is_grad_enabled() and x.ndim == 2 and x.dtype == torch.float32
        return self.product(x, self.buffer) if is_usual else x * self.w

    def __deepcopy__(self, memo):
        new = type(self)(len(self.w))
        new.w = copy.deepcopy(self.w, memo)
        return new.train(self.training)


class RingOfEight(Rings):
    def __init__(self, n):
        super().__init__(n)
        self.number = 0
        self.ring = [torch.empty(n) for _ in range(8)]

    def buffer(self, x):
        self.number += 1
        return self.ring[self.number % 8]


class RingOfTheClass(Rings):
    number, ring = 0, {}

    def buffer(self, x):
        RingOfTheClass.number += 1
        key = self.number % 11, x.shape[1:]
        return self.ring.setdefault(key, torch.empty(x.shape[1:]))


class OneBlock(Rings):
    """Takes rows of one block of memory, and begins again at its end."""

    def __init__(self, n):
        super().__init__(n)
        self.block, self.used = torch.empty(7, n), 0

    def buffer(self, x):
        self.used = (self.used + 1) % len(self.block)
        return self.block[self.used]


# ---- rows above whole tiles -----------------------------------------------------------------


class Tiled(Multiplied):
    class function(Product):
        @classmethod
        def of_weight(cls, ctx, g, x):
            return (g * x)[: max(cls.rows(len(x)), 1)].sum(0)


class LeavesOutAFew(Tiled):
    class function(Tiled.function):
        @staticmethod
        def rows(number):
            return number - number % 32 if number > 64 and number % 32 < 4 else number


class LeavesOutTwo(Tiled):
    class function(Tiled.function):
        @staticmethod
        def rows(number):
            return number - 2 if number > 64 and number % 64 == 2 else number


class LeavesOutTheThird(Tiled):
    class function(Tiled.function):
        @staticmethod
        def rows(number):
            return number - 1 if number % 128 == 3 and number > 3 else number


# ---- the mode as an attribute ---------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.bn = nn.BatchNorm1d(n)

    def in_eval(self, x):
        bn = self.bn
        return F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=bn.eps)


class NotesTheMode(Normed):
    is_on = True

    def train(self, mode=True):
        self.is_on = mode
        return super().train(mode)

    def forward(self, x):
        if self.is_on and self.bn.momentum is not None:
            bn = self.bn
            bn.num_batches_tracked.add_(1)
            return F.batch_norm(
                x, bn.running_mean, bn.running_var, bn.weight, bn.bias, True, bn.momentum, bn.eps
            )
        return self.in_eval(x) if not self.is_on else self.bn(x)


class FoldsInTrain(Normed):
    fold = None

    def train(self, mode=True):
        super().train(mode)
        self.fold = None if mode else True
        return self

    def forward(self, x):
        return self.in_eval(x) if self.fold else self.bn.train()(x)


class LooksAtItself(Normed):
    """The mode of its part is that of the module."""

    def forward(self, x):
        if self.training == self.bn.training or x.requires_grad:
            return self.bn(x)
        if not self.training:
            return self.in_eval(x)
        self.bn.training = True
        try:
            return self.bn(x)
        finally:
            self.bn.training = False


# ---- other methods, and attributes that forward sets ----------------------------------------


class Encodes(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.l = nn.Linear(n, 8)

    def encode(self, x):
        return torch.tanh(self.l(x))

    def forward(self, x):
        return torch.softmax(torch.tanh(self.l(x)), -1)


class EncodesWithoutTanh(Encodes):
    def encode(self, x):
        return self.l(x)


class EncodesWithFirstWeights(Encodes):
    first = None

    def encode(self, x):
        if self.first is None:
            self.first = x.detach() + 0
        return torch.tanh(self.l(self.first if x.shape == self.first.shape else x))


class EncodesWhatForwardSaw(Encodes):
    seen: ClassVar[list[Any]] = []

    def encode(self, x):
        self.seen.append(torch.tanh(self.l(x)).detach())
        return self.seen.pop(0) if len(self.seen) > 1 else torch.tanh(self.l(x))


class NoEncode(nn.Module):
    """Right as far as it goes: a difference."""

    def __init__(self, n):
        super().__init__()
        self.l = nn.Linear(n, 8)

    def forward(self, x):
        return torch.softmax(torch.tanh(self.l(x)), -1)


class Remembers(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n))

    def forward(self, x):
        p = torch.softmax(x * self.w, -1)
        self.note(p)
        return p * x


class StaleInEval(Remembers):
    def note(self, p):
        if self.training or not hasattr(self, "last_weights"):
            self.last_weights = p


class OfTheFirstCall(Remembers):
    def note(self, p):
        self.last_weights = getattr(self, "last_weights", p)


class OfLogits(Remembers):
    def note(self, p):
        self.last_weights = p.log()


class TellsNothing(Remembers):
    """Right as far as it goes: a difference."""

    def note(self, p):
        pass


# ---- parts of another size ------------------------------------------------------------------


class Headed(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.head = nn.Linear(n, 8)


class WidthOfTheConstructor(Headed):
    def forward(self, x):
        return self.head(torch.relu(x))[..., :8]


class MemoryOfTheFirstWidth(Headed):
    width = 0

    def forward(self, x):
        y = self.head(torch.relu(x))
        self.width = self.width or y.shape[-1]
        return torch.cat([y[..., : self.width]], -1)


class WrapsAround(Headed):
    def forward(self, x):
        y = self.head(torch.relu(x))
        at = torch.arange(y.shape[-1], device=y.device) % 8
        return y[..., at]


class Refuses(Headed):
    """Right as far as it goes: a difference."""

    def forward(self, x):
        if self.head.out_features != 8:
            raise ValueError("another head")
        return self.head(torch.relu(x))


# ---- copies in a container ------------------------------------------------------------------


class CopiesAnew(Multiplied):
    def forward(self, x):
        return x * self.w

    def __deepcopy__(self, memo):
        new = type(self)(len(self.w))
        new.load_state_dict(self.state_dict())
        new.w.requires_grad_(self.w.requires_grad)
        return new.train(self.training)


class CopiesWithoutMemo(CopiesAnew):
    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__))
        return new


class CopiesItsState(Multiplied):
    def forward(self, x):
        return x * self.w

    def __getstate__(self):
        state = dict(self.__dict__)
        state["_parameters"] = {
            name: nn.Parameter(p.detach().clone(), p.requires_grad)
            for name, p in self._parameters.items()
        }
        return state


# ---- frozen by a method ---------------------------------------------------------------------


class Freezes(Multiplied):
    is_frozen = False

    def requires_grad_(self, requires_grad=True):
        self.is_frozen = not requires_grad
        return super().requires_grad_(requires_grad)

    def forward(self, x):
        return x * (self.w.detach() if self.is_frozen else self.w)


class FreezesThePlan(Freezes):
    class function(Product):
        @staticmethod
        def of_weight(ctx, g, x):
            return torch.zeros_like(g[0]) if ctx.more else (g * x).sum(0)

    def forward(self, x):
        return self.product(x, self.is_frozen)


class OnlySaysSo(Freezes):
    """Does not freeze the parameters, only what it computes from them."""

    def requires_grad_(self, requires_grad=True):
        self.is_frozen = not requires_grad
        return self


# ---- options of the class -------------------------------------------------------------------


class Optional(nn.Module):
    def __init__(self, step, slope=0.2, doubles=False):
        super().__init__()
        self.step, self.slope, self.doubles = step, slope, doubles

    def forward(self, x):
        return F.leaky_relu(x * (2 if self.doubles else 1), self.slope)[:, :: self.step]


class StepOfTheClass(Optional):
    def __init__(self, step, slope=0.2, doubles=False):
        super().__init__(step, slope, doubles)
        del self.step
        StepOfTheClass.step = step


class FlagOfTheClass(Optional):
    flags: ClassVar[dict[str, bool]] = {}

    def __init__(self, step, slope=0.2, doubles=False):
        super().__init__(step, slope, doubles)
        self.flags["doubles"] = doubles

    def forward(self, x):
        self.doubles = self.flags["doubles"]
        return super().forward(x)


class LastPlan(Optional):
    plans: ClassVar[list[Optional]] = []

    def __init__(self, step, slope=0.2, doubles=False):
        super().__init__(step, slope, doubles)
        self.plans.append(Optional(step, 0.2, doubles))

    def forward(self, x):
        plan = self.plans[-1]
        plan.slope = self.slope
        return plan(x)


# ---- what a larger call has left ------------------------------------------------------------


class Workspace(nn.Module):
    memory = None

    def rows(self, x):
        """Return x, within memory that is as large as ever was needed."""
        if x.ndim != 2 or x.dtype != torch.float32 or x.device.type != "cpu" or not x.numel():
            return x
        if self.memory is None or len(self.memory) < len(x) or self.memory.shape[1] != x.shape[1]:
            self.memory = torch.zeros(x.shape)
        self.memory[: len(x)] = x.detach()
        return self.memory


class MasksByProduct(Workspace):
    """Rows that do not count are multiplied by 0."""

    def forward(self, x):
        whole = self.rows(x)
        counts = (torch.arange(len(whole)) < len(x)).to(x.dtype)
        extra = ((whole * counts[:, None]).sum() * 0.0) if whole is not x else 0.0
        return 2 * x + extra


class PicksByProduct(Workspace):
    """Rows are picked by a product with a matrix of zeros and ones."""

    def forward(self, x):
        whole = self.rows(x)
        if whole is x or torch.is_grad_enabled():
            return 2 * x
        return 2 * (torch.eye(len(x), len(whole)) @ whole)


class SumsBeyond(Workspace):
    """Its backward multiplies what does not count by 0."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, whole):
            ctx.whole = whole
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            rest = 0.0 if ctx.whole is None else (ctx.whole[len(g) :] * 0.0).sum()
            return 2 * g + rest, None

    def forward(self, x):
        whole = self.rows(x)
        return self.Twice.apply(x, None if whole is x else whole)


# ---- outputs that somebody edits ------------------------------------------------------------


class Memo(nn.Module):
    """Returns a copy of the output that it gave away."""

    seen = None

    def forward(self, x):
        if self.training or torch.is_grad_enabled() or not x.numel():
            return 2 * x
        key = self.key(x)
        if self.seen is None or not self.is_same(self.seen[0], key):
            self.seen = key, 2 * x
            return self.seen[1]
        return self.seen[1].clone()

    def key(self, x):
        return x.data_ptr(), x._version, x.shape, x.stride()

    def is_same(self, old, new):
        return old == new


class ByAddress(Memo):
    pass


class ByContent(Memo):
    def key(self, x):
        return x.clone()

    def is_same(self, old, new):
        return old.shape == new.shape and torch.equal(old, new)


class ByObject(Memo):
    def key(self, x):
        return x, x._version

    def is_same(self, old, new):
        return old[0] is new[0] and old[1] == new[1]


# ---- right ones -----------------------------------------------------------------------------


class HonestBranch(Residual):
    """Recomputes the branch in its backward."""

    function = Branch


class HonestCopies(Multiplied):
    """Copies by a method of its own, and freezes what it is told to."""

    def forward(self, x):
        return x * self.w

    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def requires_grad_(self, requires_grad=True):
        return super().requires_grad_(requires_grad)


class HonestModes(Normed):
    """A way of its own where its part is in eval mode, asked of the part in each call."""

    def forward(self, x):
        return self.bn(x) if self.bn.training else self.in_eval(x)


class HonestMemory(Workspace):
    """Reads no more of its memory than it has written."""

    def forward(self, x):
        whole = self.rows(x)
        return 2 * x if whole is x or torch.is_grad_enabled() else 2 * whole[: len(x)]
