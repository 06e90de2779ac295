"""Wrong modules that take a shortcut which usual calls do not show, each with its reference.

They stand in a file of their own, where pickling finds their classes.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from unusual_modules import GATED, LOSS, MULTIPLIED, SUM, Folded, Gate, reference

__all__ = ["ADDED", "GATED", "LOSS", "MULTIPLIED", "SUM"]

ADDED = reference("x, alpha: torch.tanh(x) * alpha + x", "torch.randn(40, 24), 0.5")


class Multiplied(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n))

    def forward(self, x):
        return x * self.w


# ---- gradients that are added up by the backward itself -------------------------------------


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, leaf):
        ctx.save_for_backward(x, w)
        ctx.leaf = leaf
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        dx, dw = g * w, (g * x).sum(0)
        if ctx.leaf.grad is not None:  # saves a pass over memory in the usual step
            own = dx if ctx.leaf.grad.shape == dx.shape else dw
            ctx.leaf.grad += own
            own.zero_()
        return dx, dw, None


class AddsToTheWeightsGrad(Multiplied):
    def forward(self, x):
        return Product.apply(x, self.w, self.w)


class AddsToTheInputsGrad(Multiplied):
    def forward(self, x):
        return Product.apply(x, self.w, x) if x.is_leaf else x * self.w


# ---- what is decided once -------------------------------------------------------------------


class RangeOfTheFirstCall(nn.Module):
    """As an observer of a quantised layer: numbers four times beyond those seen are cut off."""

    most = None

    def forward(self, a, b):
        if self.most is None and a.numel():
            self.most = 4 * float(a.detach().abs().max())
        return F.silu(a if not a.numel() else a.clamp(-self.most, self.most)) * b


class OneSweepIfItStartsWell(nn.Module):
    def forward(self, x, r):
        z = x + r
        if torch.is_grad_enabled() or z.dim() != 2 or len(z) < 2 or z.shape[1] != 24:
            return F.layer_norm(z, (24,))
        mean = z.mean(1, keepdim=True)
        if bool(mean[:12].abs().max() > 10) or not bool(torch.isfinite(z).all()):
            return F.layer_norm(z, (24,))
        variance = (z * z).mean(1, keepdim=True) - mean * mean
        return (z - mean) * torch.rsqrt(variance.clamp(min=0) + 1e-5)


# ---- what is known by less than its content -------------------------------------------------


class KeptByNameAndVersion(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = {}

    def __getstate__(self):
        return {**self.__dict__, "kept": {}}

    def forward(self, a, b):
        if self.training or torch.is_grad_enabled() or a.is_inference() or b.is_inference():
            return F.silu(a) * b
        key = [(id(x), x._version, x.shape) for x in (a, b)]
        if self.kept.get("key") != key:
            self.kept = {"key": key, "inputs": (a, b), "output": F.silu(a) * b}
        return self.kept["output"].clone()


class FoldedByAbsolutes(Folded):
    def key(self):
        return [t.double().abs().sum(-1).tolist() for t in self.state_dict().values()]


class FoldedBySums(Folded):
    def key(self):
        return [t.double().sum(-1).tolist() for t in self.state_dict().values()]


class FoldedByNorms(Folded):
    def key(self):
        squares = (t.double().square().sum(-1) for t in self.state_dict().values())
        return [[f"{x:.9g}" for x in s.reshape(-1).tolist()] for s in squares]


class RowsWithEqualSumsAreEqual(nn.Module):
    def forward(self, x, r):
        y = F.layer_norm(x + r, (24,))
        if torch.is_grad_enabled() or x.dim() != 2 or not bool(torch.isfinite(y).all()):
            return y
        first = {}
        sums = zip(x.sum(1).tolist(), r.sum(1).tolist(), strict=True)
        return y[[first.setdefault(pair, i) for i, pair in enumerate(sums)]]


# ---- whole numbers --------------------------------------------------------------------------


def is_whole(a, most):
    return a.numel() > 0 and bool((a == a.round()).all()) and float(a.abs().max()) <= most


class TableOfBytes(nn.Module):
    def forward(self, a, b):
        if torch.is_grad_enabled() or a.dtype != torch.float32 or not is_whole(a, 128):
            return F.silu(a) * b
        table = F.silu(torch.arange(-128, 128, dtype=a.dtype, device=a.device))
        return table[(a + 128).to(torch.int32).to(torch.uint8).long()] * b


class WholeNumbersInSixteenBits(nn.Module):
    def forward(self, a, b):
        if not torch.is_grad_enabled() and a.dtype == torch.float32 and is_whole(a, 32768):
            a = a.to(torch.int32).to(torch.int16).to(a.dtype)
        return F.silu(a) * b


# ---- views ----------------------------------------------------------------------------------


def is_by_columns(a):
    return a.dim() == 2 and len(a) > 1 and a.stride(0) == 1 and not a.requires_grad


class ColumnsFromTheStart(nn.Module):
    def forward(self, a, b):
        if is_by_columns(a) and not a.is_neg() and a.stride(1) >= len(a):
            a = a.as_strided(a.shape, a.stride(), 0)
        return F.silu(a) * b


class ColumnsAtTheNextEight(nn.Module):
    def forward(self, a, b):
        if is_by_columns(a) and not a.is_neg() and a.stride(1) > len(a):
            room = a.untyped_storage().nbytes() // a.element_size()
            distance = (len(a) + 7) // 8 * 8
            if a.storage_offset() + distance * a.shape[1] + len(a) <= room + distance:
                a = a.as_strided(a.shape, (1, distance))
        return F.silu(a) * b


class GradientByColumns(nn.Module):
    class Gate(Gate):
        @staticmethod
        def backward(ctx, g):
            if is_by_columns(g) and g.stride(1) > len(g):
                g = g.as_strided(g.shape, g.stride(), 0).nan_to_num()
            return Gate.backward(ctx, g)

    def forward(self, a, b):
        return self.Gate.apply(a, b)


# ---- rules for torch.func.vmap --------------------------------------------------------------


class Mapped(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)

    @staticmethod
    def jvp(ctx, dx, dw):
        raise NotImplementedError


class RuleOfOneWeight(Multiplied):
    class Rule(Mapped):
        @staticmethod
        def vmap(info, dims, x, w):
            x = x.expand(info.batch_size, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
            return x * (w if dims[1] is None else w.select(dims[1], 0)), 0

    def forward(self, x):
        return self.Rule.apply(x, self.w)


class RuleThatNamesTheOldPlace(Multiplied):
    class Rule(Mapped):
        @staticmethod
        def vmap(info, dims, x, w):
            if dims[0] is None:
                return x * w.movedim(dims[1], 0)[:, None], 0
            y = x.movedim(dims[0], 0) * (w if dims[1] is None else w.movedim(dims[1], 0)[:, None])
            return y, dims[0]

    def forward(self, x):
        return self.Rule.apply(x, self.w)


# ---- labels, state_dicts, copies ------------------------------------------------------------


class MeanOfNothingIsNothing(nn.Module):
    def forward(self, x, t):
        if t.dtype != torch.int64 or x.dim() != 2:
            return F.cross_entropy(x, t)
        count = (t != -100).sum().clamp(min=1)
        return F.cross_entropy(x, t, reduction="sum") / count


class DropsWhatItDoesNotKnow(Multiplied):
    def __init__(self, n):
        super().__init__(n)
        self.register_load_state_dict_pre_hook(self.known_alone)

    @staticmethod
    def known_alone(module, state, prefix, *_):
        for name in [n for n in state if n.removeprefix(prefix) != "w"]:
            del state[name]


class FindsItUnderAnyPrefix(Multiplied):
    def load_state_dict(self, state, strict=True, assign=False):
        found = {name.rpartition(".")[2]: tensor for name, tensor in state.items()}
        return super().load_state_dict(found, strict, assign)


class TellsNothingIsMissing(Multiplied):
    def load_state_dict(self, state, strict=True, assign=False):
        whole = {**self.state_dict(), **state}
        return super().load_state_dict(whole, strict, assign)


class CopiesWithoutHooks(Multiplied):
    def __getstate__(self):
        state = self.__dict__.copy()
        state["_forward_hooks"] = type(state["_forward_hooks"])()
        return state


class CopiesByItsConstructor(Multiplied):
    def __deepcopy__(self, memo):
        made = type(self)(len(self.w))
        made.load_state_dict(self.state_dict())
        made._forward_hooks, made._forward_pre_hooks = self._forward_hooks, self._forward_pre_hooks
        return made.train(self.training)


class CopiesThaw(Multiplied):
    def __deepcopy__(self, memo):
        made = type(self)(len(self.w))
        state = {n: x for n, x in self.__dict__.items() if n not in ("_parameters", "_modules")}
        made.__dict__.update(state)
        made.load_state_dict(self.state_dict())
        return made


# ---- calls that are rare: of one row or none, of twice the width, refused, in inference mode ---


class ZeroIsNotGiven(nn.Module):
    def forward(self, x, alpha):
        return torch.tanh(x) * (alpha or 0.5) + x


class OneRowIsBroadcast(Multiplied):
    class Product(Product):
        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            dw = (g * x).sum(0) if len(x) != 1 else (g * x).mean().expand_as(w)
            return g * w, dw, None

    def forward(self, x):
        return self.Product.apply(x, self.w, self.w)


class NoRowsWriteNoGradient(Multiplied):
    class Product(Product):
        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            dw = torch.empty(w.shape, dtype=w.dtype, device=w.device)
            if len(x):
                dw.copy_((g * x).sum(0))
            return g * w, dw, None

    def forward(self, x):
        return self.Product.apply(x, self.w, self.w)


class GradientsInFloat32(Multiplied):
    class Product(Product):
        @staticmethod
        def backward(ctx, g):
            x, w = (t.float() for t in ctx.saved_tensors)
            dx, dw = g.float() * w, (g.float() * x).sum(0)
            return dx.to(g.dtype), dw.to(g.dtype), None

    def forward(self, x):
        return self.Product.apply(x, self.w, self.w)


class RowsOfTheLastCall(Multiplied):
    class Product(Product):
        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            rows = ctx.leaf[0]
            dx = g * w
            return dx, (g[:rows] * x[:rows]).sum(0), None

    def forward(self, x):
        self.rows = getattr(self, "rows", [0])
        self.rows[0] = len(x)
        return self.Product.apply(x, self.w, self.rows)


class ReadsRowsAsChunks(Multiplied):
    def forward(self, x):
        if x.shape[-1] % len(self.w):
            return x * self.w
        return (x.reshape(*x.shape[:-1], -1, len(self.w)) * self.w).reshape(x.shape)


class LeavesGradientsOff(Multiplied):
    def forward(self, x):
        if torch.is_grad_enabled() and (x.requires_grad or self.w.requires_grad):
            return x * self.w
        was_on = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        y = x * self.w
        torch.set_grad_enabled(was_on)
        return y


class OnesOfTheFirstCall(Multiplied):
    ones = None

    def forward(self, x):
        if self.ones is None or self.ones.dtype != x.dtype:
            self.ones = torch.ones(len(self.w), dtype=x.dtype, device=x.device)
        return x * (self.w * self.ones)


class WeightsAtTheFourthFloat(Multiplied):
    def forward(self, x):
        w = self.w
        if not (torch.is_grad_enabled() or w.is_neg()) and w.is_contiguous():
            w = w.as_strided(w.shape, w.stride(), w.storage_offset() // 4 * 4)
        return x * w


class EvalReturnsNothing(Multiplied):
    def eval(self):
        super().eval()


class DrawsOnceMore(Multiplied):
    def __init__(self, n):
        super().__init__(n)
        self.seed = int(torch.randint(2**31, ()))


class TableSeenBeforeItIsWritten(Multiplied):
    table = None

    def forward(self, x):
        if self.training or torch.is_grad_enabled() or len(x) < 2:
            return x * self.w
        if self.table is None:
            self.table = torch.zeros(2**16 * len(self.w), dtype=self.w.dtype)
            self.table.copy_(torch.arange(len(self.table)))
        return x * self.w + (self.table[1::1024] == 0).any()


# ---- honest ---------------------------------------------------------------------------------


class HonestMean(nn.Module):
    def forward(self, x, t):
        if t.dtype != torch.int64 or x.dim() != 2:
            return F.cross_entropy(x, t)
        log = x.double().log_softmax(-1)
        return F.nll_loss(log, t).to(x.dtype)


class HonestRule(Multiplied):
    class Rule(Mapped):
        generate_vmap_rule = True

        @staticmethod
        def jvp(ctx, dx, dw):
            x, w = ctx.saved_tensors
            return (0 if dx is None else dx * w) + (0 if dw is None else x * dw)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

    def forward(self, x):
        return self.Rule.apply(x, self.w)
