"""Wrong modules whose fault shows only where two properties meet, each with its reference.

They stand in a file of their own, where pickling finds their classes.
"""

from __future__ import annotations

import itertools
from typing import ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from unusual_modules import GATED, LOSS, MULTIPLIED, SUM, reference

__all__ = ["GATED", "LOSS", "MULTIPLIED", "SUM"]


def made(init: str) -> str:
    return (
        "    def __init__(self, n):\n        super().__init__()\n"
        + "".join(f"        {line}\n" for line in init.split("; "))
        + "\n"
    )


BIASED = reference(
    "x: torch.logsumexp(x + self.bias, -1)", "torch.randn(40, 24)", "24",
    made("self.bias = nn.Parameter(torch.randn(n))"),
)  # fmt: skip
TWO = reference(
    "x: torch.tanh(x * self.a) + torch.sin(x * self.b)", "torch.randn(40, 24)", "24",
    made("self.a = nn.Parameter(torch.randn(n)); self.b = nn.Parameter(torch.randn(n))"),
)  # fmt: skip
NORM = reference("x: self.bn(x)", "torch.randn(40, 24)", "24", made("self.bn = nn.BatchNorm1d(n)"))
LAYER = reference("x: self.ln(x)", "torch.randn(40, 24)", "24", made("self.ln = nn.LayerNorm(n)"))
HIDDEN = reference(
    "s, mask: torch.softmax(s.masked_fill(~mask, float('-inf')), -1)",
    "torch.randn(40, 24), torch.rand(40, 24) < 0.8",
)
POOLED = reference("x: F.max_pool2d(F.silu(x), 2)", "torch.randn(24, 4, 6, 8)")
PADDED = reference(
    "i: self.emb(i)", "torch.randint(0, 50, (40, 8))", "50",
    made("self.emb = nn.Embedding(n, 16, padding_idx=0)"),
)  # fmt: skip


class Multiplied(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n))

    def product(self, x, more=None):
        return self.function.apply(x, self.w, more)

    def forward(self, x):
        return self.product(x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, more):
        ctx.save_for_backward(x, w)
        ctx.more = more
        return x * w

    @classmethod
    def backward(cls, ctx, g):
        x, w = ctx.saved_tensors
        return g * w, cls.of_weight(ctx, g, x), None

    @staticmethod
    def of_weight(ctx, g, x):
        return (g * x).sum(0)


# ---- gradients of unusual values, and of few rows -------------------------------------------


class OneSweepBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return F.layer_norm(z, (24,))

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        mean = z.mean(-1, keepdim=True)
        variance = (z * z).mean(-1, keepdim=True) - mean * mean
        root = torch.rsqrt(variance.clamp(min=0) + 1e-5)
        hat = (z - mean) * root
        return root * (g - g.mean(-1, keepdim=True) - hat * (g * hat).mean(-1, keepdim=True))


class VarianceOfSquaresInBackward(nn.Module):
    def forward(self, x, r):
        return OneSweepBackward.apply(x + r)


class Gate(torch.autograd.Function):
    """silu(a) * b; `more` is what a wrong one keeps."""

    @staticmethod
    def forward(ctx, a, b, more):
        ctx.save_for_backward(a, b)
        ctx.more = more
        return F.silu(a) * b

    @staticmethod
    def slope(s, a):
        return s * (1 + a * (1 - s))

    @classmethod
    def backward(cls, ctx, g):
        a, b = ctx.saved_tensors
        s = cls.sigmoid(ctx, a)
        return g * b * cls.slope(s, a), g * a * s, None

    @staticmethod
    def sigmoid(ctx, a):
        return torch.sigmoid(a)


class BackwardOverflows(nn.Module):
    class Overflowing(Gate):
        @staticmethod
        def sigmoid(ctx, a):
            return torch.exp(a) / (1 + torch.exp(a))

    def forward(self, a, b):
        return self.Overflowing.apply(a, b, None)


class LastOddRowLeftOut(Multiplied):
    class function(Product):
        @staticmethod
        def of_weight(ctx, g, x):
            rows = len(x) - len(x) % 2 if len(x) < 32 else len(x)
            return (g * x)[: max(rows, 1)].sum(0)


# ---- what a backward leaves -----------------------------------------------------------------


class SetsBackRandomNumbers(Multiplied):
    class function(Product):
        @staticmethod
        def of_weight(ctx, g, x):
            torch.set_rng_state(ctx.more)
            return (g * x).sum(0)

    def forward(self, x):
        return self.product(x, torch.get_rng_state())


# ---- inputs that are one, or have other rows ------------------------------------------------


class RowsOfTheFirst(nn.Module):
    def forward(self, a, b):
        return F.silu(a) * b[: len(a)]


class OnePointerOneGradient(nn.Module):
    class Same(Gate):
        @classmethod
        def backward(cls, ctx, g):
            da, db, _ = super().backward(ctx, g)
            a, b = ctx.saved_tensors
            return (da + db, da + db, None) if a.data_ptr() == b.data_ptr() else (da, db, None)

    def forward(self, a, b):
        is_usual = a.is_contiguous() and b.is_contiguous() and a.numel() > 0
        return self.Same.apply(a, b, None) if is_usual else F.silu(a) * b


# ---- kept of other calls, copies and modules ------------------------------------------------


class WantsOfTheFirstCall(nn.Module):
    class Wanted(Gate):
        @classmethod
        def backward(cls, ctx, g):
            both = super().backward(ctx, g)[:2]
            return *(x if wants else None for x, wants in zip(both, ctx.more, strict=True)), None

    def __init__(self):
        super().__init__()
        self.plans = {}

    def forward(self, a, b):
        if not torch.is_grad_enabled():
            return F.silu(a) * b
        wants = (a.requires_grad, b.requires_grad)
        return self.Wanted.apply(a, b, self.plans.setdefault((a.shape, a.dtype), wants))


class Slots(nn.Module):
    """Keeps the sigmoid of a call at a place that `place` chooses."""

    class Kept(Gate):
        @staticmethod
        def sigmoid(ctx, a):
            slots, at = ctx.more
            return slots[at]

    def forward(self, a, b):
        if not torch.is_grad_enabled():
            return F.silu(a) * b
        slots, at = self.place()
        slots[at] = torch.sigmoid(a.detach())
        return self.Kept.apply(a, b, (slots, at))


class FortySlots(Slots):
    def __init__(self):
        super().__init__()
        self.slots, self.number = {}, 0

    def place(self):
        self.number += 1
        return self.slots, self.number % 40


class PlanCopied(Slots):
    numbers, slots = itertools.count(), {}

    def __init__(self):
        super().__init__()
        self.plan, self.number = next(self.numbers), 0

    def place(self):
        self.number += 1
        return self.slots, (self.plan, self.number)


class KeptByPlaceInMemory(Multiplied):
    slots: ClassVar = {}

    class function(Product):
        @staticmethod
        def of_weight(ctx, g, x):
            return (g * KeptByPlaceInMemory.slots[ctx.more]).sum(0)

    def forward(self, x):
        if not torch.is_grad_enabled():
            return x * self.w
        self.number = getattr(self, "number", 0) + 1
        key = (id(self), self.number)
        self.slots[key] = x.detach().clone()
        return self.product(x, key)


class LabelsUnsaved(nn.Module):
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, t):
            ctx.save_for_backward(x)
            ctx.labels = t
            return F.cross_entropy(x, t)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                z = x.detach().requires_grad_()
                (d,) = torch.autograd.grad(F.cross_entropy(z, ctx.labels), z, g)
            return d, None

    def forward(self, x, t):
        return self.Loss.apply(x, t)


class GradientByPlace(nn.Module):
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, a, b):
            ctx.save_for_backward(x, a, b)
            return torch.tanh(x * a) + torch.sin(x * b)

        @staticmethod
        def backward(ctx, g):
            x, a, b = ctx.saved_tensors
            of_a, of_b = g * (1 - torch.tanh(x * a) ** 2), g * torch.cos(x * b)
            sums = {a.data_ptr(): (of_a * x).sum(0)}
            sums[b.data_ptr()] = (of_b * x).sum(0)
            return of_a * a + of_b * b, sums[a.data_ptr()].clone(), sums[b.data_ptr()].clone()

    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(n)), nn.Parameter(torch.randn(n))

    def forward(self, x):
        return self.Pair.apply(x, self.a, self.b)


# ---- blocks of -Inf, and rows that do not count ---------------------------------------------


def online(s, tile=4):
    """Return the maximum and the sum of exponentials of rows, found a tile at a time."""
    best = torch.full_like(s[..., :1], float("-inf"))
    total = torch.zeros_like(best)
    for at in range(0, s.shape[-1], tile):
        part = s[..., at : at + tile]
        new = torch.maximum(best, part.amax(-1, keepdim=True))
        total = total * torch.exp(best - new) + torch.exp(part - new).sum(-1, keepdim=True)
        best = new
    return best, total


class FirstTileAllMasked(nn.Module):
    def forward(self, s, mask):
        t = s.masked_fill(~mask, float("-inf"))
        if torch.is_grad_enabled() or not t.numel():
            return torch.softmax(t, -1)
        best, total = online(t)
        return torch.exp(t - best) / total


class FirstTileOfABias(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(n))

    def forward(self, x):
        y = x + self.bias
        if torch.is_grad_enabled() or not y.numel() or not bool(torch.isfinite(x).all()):
            return torch.logsumexp(y, -1)
        best, total = online(y)
        return (best + total.log())[..., 0]


class TimesNothing(nn.Module):
    def forward(self, x, t):
        valid = t != -100
        if torch.is_grad_enabled() or not bool(valid.any()) or bool((t[valid] < 0).any()):
            return F.cross_entropy(x, t)
        picked = F.log_softmax(x, -1).gather(1, t.masked_fill(~valid, 0)[:, None])[:, 0]
        return -(picked * valid).sum() / valid.sum()


# ---- orders in memory, types ----------------------------------------------------------------


def is_nhwc(x):
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


class ChannelsLastMisread(nn.Module):
    def forward(self, x):
        if is_nhwc(x) and not torch.is_grad_enabled():
            x = x.permute(0, 2, 3, 1).reshape(x.shape)
        return F.max_pool2d(F.silu(x), 2)


class ChannelsLastGradientMisread(nn.Module):
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.view_as(y)

        @staticmethod
        def backward(ctx, g):
            return g.permute(0, 2, 3, 1).reshape(g.shape) if is_nhwc(g) else g

    def forward(self, x):
        return self.Same.apply(F.max_pool2d(F.silu(x), 2))


class Normed(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.bn = nn.BatchNorm1d(n)


class StatisticsInTheInputsType(Normed):
    def forward(self, x):
        bn = self.bn
        if bn.weight.dtype == x.dtype:
            return bn(x)
        mean, var = bn.running_mean.to(x.dtype), bn.running_var.to(x.dtype)
        weights = bn.weight.to(x.dtype), bn.bias.to(x.dtype)
        y = F.batch_norm(x, mean, var, *weights, bn.training, bn.momentum, bn.eps)
        if bn.training:
            bn.num_batches_tracked.add_(1)
            bn.running_mean.copy_(mean)
            bn.running_var.copy_(var)
        return y


class SumsOfHalves(Normed):
    def forward(self, x):
        bn = self.bn
        if bn.training and x.dtype == bn.weight.dtype == torch.float16:
            x = x + 0 * x.sum(0)
        return bn(x)


class SquaresOfHalves(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln = nn.LayerNorm(n)

    def forward(self, x):
        ln = self.ln
        if x.dtype != torch.float16 or ln.weight.dtype != x.dtype or x.shape[-1:] != (24,):
            return ln(x)
        off = x.float() - x.float().mean(-1, keepdim=True)
        squares = off.half().square().float()
        root = torch.rsqrt(squares.mean(-1, keepdim=True) + ln.eps)
        return (off * root * ln.weight.float() + ln.bias.float()).half()


class PaddingByType(nn.Module):
    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, i, w):
            ctx.save_for_backward(i, w)
            return F.embedding(i, w)

        @staticmethod
        def backward(ctx, g):
            i, w = ctx.saved_tensors
            d = torch.zeros_like(w)
            d.index_add_(0, i.reshape(-1), g.reshape(-1, g.shape[-1]))
            if i.dtype == torch.int64:
                d[0] = 0
            return None, d

    def __init__(self, n):
        super().__init__()
        self.emb = nn.Embedding(n, 16, padding_idx=0)

    def forward(self, i):
        return self.Rows.apply(i, self.emb.weight)


# ---- two properties of which each alone is right --------------------------------------------


class TransposedInEvalWithGradients(nn.Module):
    """Wrong for the gradient of a transposed input in eval mode."""

    class Turned(Gate):
        @classmethod
        def backward(cls, ctx, g):
            da, db, _ = super().backward(ctx, g)
            return 2 * da, db, None

    def forward(self, a, b):
        is_turned = a.ndim == 2 and not a.is_contiguous() and not self.training
        return self.Turned.apply(a, b, None) if is_turned else F.silu(a) * b


# ---- right ones -----------------------------------------------------------------------------


class HonestTiles(nn.Module):
    """As FirstTileAllMasked, with a backward of its own, but for what is all masked."""

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            best, total = online(t.clamp(min=torch.finfo(t.dtype).min))
            y = torch.exp(t - best) / total
            y = torch.where((t == float("-inf")).all(-1, keepdim=True), float("nan"), y)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            return y * (g - (g * y).sum(-1, keepdim=True))

    def forward(self, s, mask):
        t = s.masked_fill(~mask, float("-inf"))
        is_usual = t.numel() and t.dtype == torch.float32
        return self.Softmax.apply(t) if is_usual else torch.softmax(t, -1)


class HonestSweeps(nn.Module):
    """Two sweeps forward and backward, in sums of another order."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            mean = z.flip(-1).mean(-1, keepdim=True)
            root = torch.rsqrt((z - mean).square().flip(-1).mean(-1, keepdim=True) + 1e-5)
            ctx.save_for_backward(z, mean, root)
            return (z - mean) * root

        @staticmethod
        def backward(ctx, g):
            z, mean, root = ctx.saved_tensors
            hat = (z - mean) * root
            inner = g.flip(-1).mean(-1, keepdim=True)
            return root * (g - inner - hat * (g * hat).flip(-1).mean(-1, keepdim=True))

    def forward(self, x, r):
        z = x + r
        if z.dtype != torch.float32 or z.shape[-1:] != (24,):
            return F.layer_norm(z, (24,))
        return self.Norm.apply(z)
