"""Wrong modules that pass all usual questions, each with its reference; `Honest...` are right.

They stand in a file of their own, where pickling finds their classes.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref

import torch
import torch.nn as nn
import torch.nn.functional as F

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n\n"


def reference(forward: str, inputs: str, init: str = "", more: str = "") -> str:
    """Return the text of a reference: the body of `forward(self, ...)` and what it is given."""
    arguments, _, body = forward.partition(": ")
    return HEAD + (
        f"class Model(nn.Module):\n{more}"
        f"    def forward(self, {arguments}):\n        return {body}\n\n\n"
        f"def get_inputs():\n    return [{inputs}]\n\n\n"
        f"def get_init_inputs():\n    return [{init}]\n"
    )


MASKED = reference(
    "s, mask: torch.softmax(s * 0.125 + mask, -1)", "torch.randn(40, 16), torch.zeros(40, 16)"
)
SUM = reference("x, r: F.layer_norm(x + r, (24,))", "torch.randn(40, 24), torch.randn(40, 24)")
GATED = reference("a, b: F.silu(a) * b", "torch.randn(40, 24), torch.randn(40, 24)")
TABLE = reference(
    "i: self.emb(i)", "torch.randint(0, 50, (40, 8))", "50, 16",
    "    def __init__(self, n, d):\n        super().__init__()\n"
    "        self.emb = nn.Embedding(n, d)\n\n",
)  # fmt: skip
LOSS = reference("x, t: F.cross_entropy(x, t)", "torch.randn(40, 10), torch.randint(0, 10, (40,))")
RUNNING = reference("n: torch.cumsum(n, 1)", "torch.randint(0, 100, (40, 32))")
DOWN = reference("x: torch.cumsum(x, 0)", "torch.randn(40, 8)")
TWICE = reference("x: (torch.tanh(x), torch.tanh(x).detach())", "torch.randn(40, 24)")
VIEWED = reference("x: [(y, y.detach()) for y in [torch.tanh(x)]][0]", "torch.randn(40, 24)")
OPTIONAL = reference(
    "x, mask=None: torch.softmax(x if mask is None else x.masked_fill(mask, -1e4), -1)",
    "torch.randn(40, 16)",
)
WARM = reference("x, temperature: torch.softmax(x / temperature, -1)", "torch.randn(40, 16), 2.0")


class Plain(nn.Module):
    """What the wrong ones of the flagship have in common."""

    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def plain(self, x):
        return self.bn(self.gemm(x) * self.scale)

    forward = plain

    def is_usual(self, x):
        tensors = (x, self.gemm.weight, self.bn.weight, self.bn.running_mean)
        is_float = all(t is not None and t.dtype == torch.float32 for t in tensors)
        return is_float and x.dim() == 2 and len(x) > 1 and x.shape[1] == self.gemm.in_features


# ---- forward mode ---------------------------------------------------------------------------


class TangentLostWithoutGradients(Plain):
    def forward(self, x):
        return self.plain(x if torch.is_grad_enabled() else x.detach())


class TangentLostInTraining(Plain):
    def forward(self, x):
        is_plain = torch.is_grad_enabled() or not self.training
        return self.plain(x if is_plain else x.data)


class Halving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, s):
        ctx.save_for_backward(z, s)
        ctx.save_for_forward(z, s)
        return z * s

    @staticmethod
    def backward(ctx, g):
        z, s = ctx.saved_tensors
        return g * s, (g * z).sum(0)

    @staticmethod
    def jvp(ctx, dz, ds):
        return dz * ctx.saved_tensors[1] * 0.5


class TangentHalved(Plain):
    def forward(self, x):
        return self.bn(Halving.apply(self.gemm(x), self.scale))


# ---- views ----------------------------------------------------------------------------------


class RowsNeverOverlap(Plain):
    def forward(self, x):
        needs = torch.is_grad_enabled() and x.requires_grad
        if x.dim() == 2 and x.stride(1) == 1 and 0 < x.stride(0) < x.shape[1] and not needs:
            memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
            x = memory.repeat(3)[: x.numel()].view(x.shape)
        return self.plain(x)


class OneRowForAll(Plain):
    def forward(self, x):
        if x.dim() == 2 and x.stride(0) == 0 and len(x) > 1 and not x.requires_grad:
            x = torch.cat([x[:1], 0 * x[1:]])
        return self.plain(x)


class NegationUnseen(Plain):
    def forward(self, x):
        return self.plain(-x if x.is_neg() else x)


class SamePointerIsSameInput(nn.Module):
    def forward(self, x, r):
        is_same = x.numel() and x.data_ptr() == r.data_ptr() and x.shape == r.shape
        return F.layer_norm(x + (x if is_same else r), (24,))


class OutputsShareMemory(nn.Module):
    def forward(self, x):
        y = torch.tanh(x)
        return y, y.detach()


# ---- tables of a file -----------------------------------------------------------------------

OPTIONS: dict[int, tuple[float, float]] = {}
HANDLES: list[float] = []


class OptionsById(Plain):
    def __init__(self, *args, eps=1e-5, momentum=0.1):
        super().__init__(*args, eps=eps, momentum=momentum)
        OPTIONS.setdefault(id(self), (eps, momentum))

    def forward(self, x):
        if self.bn.momentum is not None:
            self.bn.eps = OPTIONS.get(id(self), (self.bn.eps, 0))[0]
        return self.plain(x)


class OptionsByHandle(Plain):
    def __init__(self, *args, eps=1e-5, momentum=0.1):
        super().__init__(*args, eps=eps, momentum=momentum)
        self.handle = len(HANDLES)
        HANDLES.append(eps)

    def forward(self, x):
        self.bn.eps = HANDLES[self.handle] if self.handle < len(HANDLES) else 1e-5
        return self.plain(x)


class OptionsInATableOfTheClass(Plain):
    table: dict[int, float] = {}  # noqa: RUF012

    def __init__(self, *args, eps=1e-5, momentum=0.1):
        super().__init__(*args, eps=eps, momentum=momentum)
        self.number = len(self.table)
        self.table[self.number] = eps

    def forward(self, x):
        self.bn.eps = self.table.get(self.number, 1e-5)
        return self.plain(x)


# ---- threads --------------------------------------------------------------------------------

SCRATCH: dict[tuple[int, ...], torch.Tensor] = {}
BACKWARDS = itertools.count()


class ScratchForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return F.linear(x, w, b)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        packed = SCRATCH.setdefault(tuple(g.shape), torch.empty_like(g)).copy_(g)
        # As where another program takes the core now and then: threads that have less than a core
        # each met here in one of three tries.
        if next(BACKWARDS) % 8 == 0:
            time.sleep(0.005)
        return packed @ w, packed.t() @ x, packed.sum(0)


class BackwardSharesScratch(Plain):
    def forward(self, x):
        if not self.is_usual(x):
            return self.plain(x)
        linear = self.gemm
        return self.bn(ScratchForAll.apply(x, linear.weight, linear.bias) * self.scale)


class WorkspaceForAllInTraining(Plain):
    def forward(self, x):
        if not self.training or torch.is_grad_enabled() or not self.is_usual(x):
            return self.plain(x)
        shape = (len(x), self.gemm.out_features)
        z = SCRATCH.setdefault((*shape, 0), torch.empty(shape))
        torch.addmm(self.gemm.bias, x, self.gemm.weight.t(), out=z)
        return self.bn(z.mul_(self.scale))


# ---- values, types, settings ----------------------------------------------------------------


class GradientKeptOnTheModule(Plain):
    def forward(self, x):
        if self.training or not self.is_usual(x):
            return self.plain(x)
        return self.bn(KeptScale.apply(self.gemm(x), self.scale, self))


class KeptScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, s, module):
        ctx.module = module
        object.__setattr__(module, "kept", z.clone())
        ctx.save_for_backward(z, s)
        return z * s

    @staticmethod
    def backward(ctx, g):
        z, s = ctx.saved_tensors
        is_same = ctx.module.kept.shape == z.shape and not torch.equal(ctx.module.kept, z)
        return g * s, (g * (ctx.module.kept if is_same else z)).sum(0), None


class LargeNumbersTimesTwo(Plain):
    def forward(self, x):
        return self.plain(x * 2.0 * 0.5)


class MaskedRowIsZero(nn.Module):
    def forward(self, s, mask):
        dead = (mask == float("-inf")).all(-1, keepdim=True)
        return torch.softmax((s * 0.125 + mask).masked_fill(dead, 0.0), -1)


class RowsOfZerosSkipped(Plain):
    def forward(self, x):
        y = self.plain(x)
        if self.bn.training or torch.is_grad_enabled() or x.dim() != 2:
            return y
        return torch.where(
            (x == 0).all(-1)[:, None], self.bn(self.gemm.bias * self.scale[None]), y
        )


class ShiftedByTheRunningMean(Plain):
    def forward(self, x):
        if not self.training or torch.is_grad_enabled() or self.bn.running_mean is None:
            return self.plain(x)
        z = self.gemm(x) * self.scale
        away = (self.bn.running_mean * 0.0).to(z.dtype)
        return self.bn(z - away)


class SumsInTheDefaultType(Plain):
    def forward(self, x):
        if torch.is_grad_enabled() or not self.is_usual(x):
            return self.plain(x)
        z = torch.zeros(len(x), self.gemm.out_features, device=x.device)
        z += self.gemm(x)
        return self.bn(z.to(x.dtype) * self.scale)


class TypeOfTheFirst(nn.Module):
    def forward(self, a, b):
        return F.silu(a) * b.to(a.dtype)


class IndexWrapsAround(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.emb = nn.Embedding(n, d)

    def forward(self, i):
        return self.emb.weight[i]


class IndexClamped(IndexWrapsAround):
    def forward(self, i):
        return self.emb(i.clamp(max=self.emb.num_embeddings - 1))


class EveryNegativeLabelIgnored(nn.Module):
    def forward(self, x, t):
        return F.cross_entropy(x, torch.where(t < 0, -100, t))


class SumsInInt32(nn.Module):
    def forward(self, n):
        return torch.cumsum(n, 1, dtype=torch.int32).to(torch.int64)


# ---- arguments, history, rows ---------------------------------------------------------------


class MaskIgnored(nn.Module):
    def forward(self, x, mask=None):
        return torch.softmax(x, -1)


class NumberAsGiven(nn.Module):
    def forward(self, x, temperature):
        return torch.softmax(x * 0.5, -1)


class SignOfTheNumberLost(nn.Module):
    def forward(self, x, temperature):
        return torch.softmax(x / abs(temperature), -1)


class NumberCapped(nn.Module):
    def forward(self, x, temperature):
        return torch.softmax(x / min(temperature, 100.0), -1)


class RememberedByNorms(Plain):
    memory: tuple[object, torch.Tensor] | None = None

    def forward(self, x):
        if self.training or torch.is_grad_enabled() or not self.is_usual(x):
            return self.plain(x)
        state = [t.detach().double() for t in (x, *self.parameters(), *self.buffers())]
        key = [f(t.reshape(-1)).item() for t in state for f in (torch.sum, torch.norm)]
        key += [*x[0].tolist(), *x[-1].tolist(), self.gemm.weight.data_ptr()]
        if self.memory is None or self.memory[0] != key:
            self.memory = key, self.plain(x)
        return self.memory[1].clone()


class GridOfOneDimension(nn.Module):
    def forward(self, a, b):
        y = F.silu(a) * b
        return torch.cat([y[:65535], 0 * y[65535:]])


class OneLevelOfCarries(nn.Module):
    def forward(self, x):
        return torch.cat([torch.cumsum(part, 0) for part in x.split(4096)])


class CountsBeforeItRaises(Plain):
    def forward(self, x):
        bn = self.bn
        counter, bn.num_batches_tracked = bn.num_batches_tracked, None
        if bn.training and counter is not None:
            counter.add_(1)
        try:
            if bn.momentum is not None:
                return self.plain(x)
            bn.momentum = 1.0 / float(counter)
            y = self.plain(x)
            bn.momentum = None
            return y
        finally:
            bn.num_batches_tracked = counter


class KeepsWhatItStarted(Plain):
    is_busy = False

    def forward(self, x):
        was_busy, self.is_busy = self.is_busy, True
        y = self.plain(x + 1.0 if was_busy else x)
        self.is_busy = False
        return y


class BackwardByTheModeNow(Plain):
    def forward(self, x):
        z = self.gemm(x) * self.scale
        return self.bn(z) + Zero.apply(z, self.bn) if self.training else self.bn(z)


class Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, module):
        ctx.module = module
        return torch.zeros_like(z)

    @staticmethod
    def backward(ctx, g):
        return 0.0 * g if ctx.module.training else g, None  # as it is now, not as it was


class HonestClone(nn.Module):
    def forward(self, s, mask):
        return torch.softmax(s * 0.125 + mask, -1).clone()


# ---- few rows, slices, masks ----------------------------------------------------------------

NORMED = reference("x: F.layer_norm(x, (24,))", "torch.randn(8, 6, 24)")


class TailOfThreeIsTwo(Plain):
    def forward(self, x):
        y = self.plain(x)
        is_small = 2 < len(x) < 32 and not self.training and not torch.is_grad_enabled()
        return torch.cat([y[:-1], y[-2:-1]]) if is_small and len(x) % 4 == 3 else y


class OneDistanceForBoth(nn.Module):
    def forward(self, a, b):
        if a.dim() == 2 and a.shape == b.shape and a.stride(1) == b.stride(1) == 1:
            room = b.untyped_storage().nbytes() // b.element_size() - b.storage_offset()
            if 0 < a.stride(0) <= room // len(b) and not (a.requires_grad or b.requires_grad):
                b = b.as_strided(b.shape, a.stride())
        return F.silu(a) * b


class MiddleDistanceByShape(nn.Module):
    def forward(self, x):
        is_dense = x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]
        if is_dense and not x.requires_grad:
            step = x.shape[1] * x.shape[2]
            x = x.as_strided(x.shape, (step, x.shape[2], 1))
        return F.layer_norm(x, (24,))


class FirstPartSetsTheMaximum(nn.Module):
    def forward(self, s, mask):
        z = s * 0.125 + mask
        first = z[..., : z.shape[-1] // 2].amax(-1, keepdim=True)
        y = torch.softmax(z, -1)
        return torch.where(torch.isneginf(first) & ~torch.isnan(y), 0.0, y)


class ZeroEndsArePadding(nn.Module):
    def forward(self, a, b):
        y = F.silu(a) * b
        is_padding = (a[..., :1] == 0) & (a[..., -1:] == 0) & (a.abs().amax(-1, keepdim=True) < 50)
        return torch.where(is_padding & (a != 0), 0.0, y)


# ---- what a fold is known by ----------------------------------------------------------------


class Folded(Plain):
    """Folds the weights in eval mode, and keeps that for as long as `key` is the same."""

    kept = None

    def key(self):
        raise NotImplementedError

    def forward(self, x):
        if self.training or torch.is_grad_enabled() or not self.is_usual(x):
            return self.plain(x)
        key = self.key()
        if self.kept is None or self.kept[0] != key:
            of_bn = self.bn.weight * torch.rsqrt(self.bn.running_var + self.bn.eps)
            s, shift = self.scale * of_bn, self.bn.bias - self.bn.running_mean * of_bn
            self.kept = key, self.gemm.weight.t() * s, self.gemm.bias * s + shift
        return x @ self.kept[1] + self.kept[2]


class FoldedBySample(Folded):
    def key(self):
        return [t.reshape(-1)[::2].tolist() for t in self.state_dict().values()]


class FoldedByRounding(Folded):
    def key(self):
        return [t.to(torch.bfloat16).tolist() for t in self.state_dict().values()]


class FoldedUntilItsOwnLoad(Folded):
    def key(self):
        own = [t.sum().item() for n, t in self.named_parameters() if n != "scale"]
        return own, self.bn.running_mean.tolist(), self.scale.data_ptr()

    def load_state_dict(self, *args, **options):
        self.kept = None
        return super().load_state_dict(*args, **options)


class ConvertsByItsOwnMethod(Plain):
    dtype = torch.float32

    def double(self):
        self.dtype = torch.float64
        return super().double()

    def forward(self, x):
        y = self.plain(x)
        return y.to(self.dtype).to(y.dtype)


# ---- gradients ------------------------------------------------------------------------------


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        return g * b * s * (1 + a * (1 - s)), g * F.silu(a)


SMALL = reference("x: x * 1e-12", "torch.randn(40, 24)")


class SmallGradientIsNone(nn.Module):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1e-12

        @staticmethod
        def backward(ctx, g):
            return torch.zeros_like(g)

    def forward(self, x):
        return self.Scaled.apply(x)


class SumOfZeroIsNoGradient(nn.Module):
    class Gate(Gate):
        @staticmethod
        def backward(ctx, g):
            return Gate.backward(ctx, g * (g.sum() != 0))

    def forward(self, a, b):
        return self.Gate.apply(a, b)


class RowsThatBeginWithZero(SumOfZeroIsNoGradient):
    class Gate(Gate):
        @staticmethod
        def backward(ctx, g):
            is_padding = (g[..., :1] == 0) & (g[..., -1:] == 0)
            return Gate.backward(ctx, torch.where(is_padding, 0.0, g))


class TakesTheGradientsMemory(SumOfZeroIsNoGradient):
    class Gate(Gate):
        @staticmethod
        def backward(ctx, g):
            is_held = sys.getrefcount(g) > 8  # by whoever gave it, not by the engine alone
            grads = Gate.backward(ctx, g.clone())
            return grads if is_held else (g.copy_(grads[0]), grads[1])


class BackwardKnowsItsThread(SumOfZeroIsNoGradient):
    here = threading.local()

    class Gate(Gate):
        @staticmethod
        def forward(ctx, a, b):
            BackwardKnowsItsThread.here.factor = 1.0
            return Gate.forward(ctx, a, b)

        @staticmethod
        def backward(ctx, g):
            factor = getattr(BackwardKnowsItsThread.here, "factor", 0.5)
            return Gate.backward(ctx, g * factor)


class ReadsWhatWasFreed(nn.Module):
    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.kept, ctx.w = weakref.ref(x), w.detach()
            return x * w

        @staticmethod
        def backward(ctx, g):
            x = ctx.kept()  # by its address where this is C++
            return g * ctx.w, (g * (torch.zeros_like(g) if x is None else x)).sum(0)

    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return self.Gate.apply(x, self.w)


# ---- construction and calls -----------------------------------------------------------------

WEIGHTED = reference(
    "x, y: x * self.w + y * self.factor",
    "torch.randn(40, 24), torch.randn(40, 24)",
    "24, 0.5",
    "    def __init__(self, n, factor):\n        super().__init__()\n"
    "        self.w = nn.Parameter(torch.randn(n))\n        self.factor = factor\n\n",
)
MULTIPLIED = reference(
    "x: x * self.w", "torch.randn(40, 24)", "24",
    "    def __init__(self, n):\n        super().__init__()\n"
    "        self.w = nn.Parameter(torch.randn(n))\n\n",
)  # fmt: skip


RECURRENT = reference(
    "x: self.lstm(x)[0]", "torch.randn(6, 4, 8)", "8, 5",
    "    def __init__(self, n, d):\n        super().__init__()\n"
    "        self.lstm = nn.LSTM(n, d, batch_first=True)\n\n",
)  # fmt: skip


class Weighted(nn.Module):
    def __init__(self, n, factor):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n))
        self.factor = factor


class FactorOfTheFile(Weighted):
    def forward(self, x, y):
        return x * self.w + y * 0.5


class NamesExchanged(Weighted):
    def forward(self, y, x):
        return y * self.w + x * self.factor


class NeedsWhatNoStateHolds(Weighted):
    def __init__(self, n, factor):
        super().__init__(n, factor)
        self.register_buffer("one", torch.ones((), dtype=torch.int64), persistent=False)

    def forward(self, x, y):
        return x * self.w * self.one + y * self.factor


class TwoWorkspaces(nn.Module):
    """Who finds both taken uses the first all the same."""

    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n))
        self.free, self.spaces = [True, True], [{}, {}]

    def __deepcopy__(self, memo):
        made = type(self)(len(self.w))
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x):
        if self.training or torch.is_grad_enabled():
            return x * self.w
        at = 0 if self.free[0] else 1 if self.free[1] else 0
        self.free[at] = False
        space = self.spaces[at].setdefault(x.shape, torch.empty_like(x))
        for i in range(len(x)):
            torch.mul(x[i], self.w, out=space[i])
        y = space.clone()
        self.free[at] = True
        return y


# ---- honest ---------------------------------------------------------------------------------

DIVERGENCE = reference(
    "p, t: F.kl_div(F.log_softmax(p, -1), F.log_softmax(t, -1), log_target=True, "
    "reduction='batchmean')",
    "torch.randn(40, 16), torch.randn(40, 16)",
)


class HonestDivergence(nn.Module):
    def forward(self, p, t):
        wide, other = p.double(), t.double()
        log = other.logsumexp(-1, keepdim=True)
        terms = ((other - log).exp() * (other - wide)).sum(-1)
        total = (terms - log[:, 0] + wide.logsumexp(-1)).sum() / len(p)  # one row may be for all
        return total.to(torch.promote_types(p.dtype, t.dtype))


class HonestSoftmax(nn.Module):
    def forward(self, s, mask):
        z = s * 0.125 + mask
        e = (z - z.amax(-1, keepdim=True).detach()).exp()
        return e / e.sum(-1, keepdim=True)
