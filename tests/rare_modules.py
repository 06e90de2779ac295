"""References, wrong modules that are wrong for rare values, rows or options, and right ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from combined_modules import made
from torch import nn
from unusual_modules import reference

MOST = reference("x: torch.max(x, dim=1)[0]", "torch.rand(24, 16, 8)")
LINEAR = reference(
    "x: torch.relu(self.linear(x))", "torch.rand(32, 40)", "24",
    made("self.linear = nn.Linear(40, n)"),
)  # fmt: skip
LABELS = reference(
    "x, y: F.cross_entropy(x, y, ignore_index=255)",
    "torch.randn(32, 19), torch.randint(0, 19, (32,))",
)
CHANCES = reference(
    "x, y: F.binary_cross_entropy(x, y)",
    "torch.rand(24, 32), torch.randint(0, 2, (24, 32)).float()",
)
SCALED = reference(
    "x: self.scale.exp().clamp(max=100.0) * x", "torch.randn(24, 32)", "2.6",
    made("self.scale = nn.Parameter(torch.tensor(n))"),
)  # fmt: skip
POOLED = reference(
    "x: self.pool(x)", "torch.randn(4, 3, 12, 12)", "True",
    made("self.pool = nn.AvgPool2d(4, 2, 1, count_include_pad=n)"),
)  # fmt: skip
PADDED = reference(
    "x: F.pad(x, (1, 1), mode='constant' if self.mode == 'zeros' else self.mode)",
    "torch.randn(4, 3, 12)", "'zeros'", made("self.mode = n"),
)  # fmt: skip
LEAKY = reference(
    "x: F.leaky_relu(x, self.slope)", "torch.randn(24, 32)", "0.1", made("self.slope = n")
)
ENCODER = reference(
    "x, m: self.layers(x, src_key_padding_mask=m)",
    "torch.randn(4, 6, 16), (torch.arange(6) > 3).repeat(4, 1)", "16",
    made(
        "layer = nn.TransformerEncoderLayer(n, 4, 32, 0.0, batch_first=True); "
        "self.layers = nn.TransformerEncoder(layer, 2)"
    ),
)  # fmt: skip
REMAINDER = reference(
    "x, y: x % y", "torch.randint(0, 100, (24, 32)), torch.randint(1, 9, (24, 32))"
)
APART = reference(
    "x, y: (x.float() - y.float()).abs()",
    "*torch.randint(0, 100, (2, 24, 32), dtype=torch.uint8)",
)
BIASED = reference(
    "q: torch.softmax(q @ q.transpose(-1, -2) * 0.5 + self.bias, -1) @ q",
    "torch.randn(8, 6, 4)", "6", made("self.bias = nn.Parameter(torch.randn(n, n))"),
)  # fmt: skip
UNIT = reference("x: F.normalize(x, dim=1)", "torch.rand(24, 64)")
CLAMPED = reference("x: torch.clamp(x, 0.1, 0.9)", "torch.rand(24, 32)")
THREE = reference(
    "x: (x - x.mean(-1, keepdim=True), x.mean(-1), x.var(-1, unbiased=False))",
    "torch.randn(24, 32)",
)
# A norm of an expanded row is less exact in PyTorch itself.
LONG_NORM = reference("x: x / torch.norm(x, p=2, dim=1, keepdim=True)", "torch.rand(16, 4096)")
FIRST_COLUMN = reference("x: x.softmax(-1)[:, 0]", "torch.randn(24, 16)")
VARIANCE = reference(
    "mean, y, var: F.gaussian_nll_loss(mean, y, var)",
    "torch.randn(24, 32), torch.randn(24, 32), torch.rand(24, 32) + 0.1",
)
CODES = reference(
    "x: ((x[:, None] - self.codes) ** 2).sum(-1).argmin(1)", "torch.randn(48, 16)", "32",
    made("self.codes = nn.Parameter(torch.randn(n, 16))"),
)  # fmt: skip
POSITIONS = reference(
    "x: self.table(self.at[: x.shape[1]]) + x", "torch.randn(8, 12, 16)", "20",
    made(
        "self.table = nn.Embedding(n, 16); "
        "self.register_buffer('at', torch.arange(n), persistent=False)"
    ),
)  # fmt: skip

SEEN = reference(
    "x: torch.softmax((x @ x.transpose(-1, -2)).masked_fill(self.seen == 0, -1e9), -1)",
    "torch.randn(6, 8, 16)", "8",
    made("self.register_buffer('seen', torch.tril(torch.ones(n, n)))"),
)  # fmt: skip
KEPT = reference(
    "x: F.linear(x, self.weight * self.kept)", "torch.randn(24, 32)", "16",
    made(
        "self.weight = nn.Parameter(torch.randn(n, 32)); "
        "self.register_buffer('kept', torch.ones(n, 32, dtype=torch.bool))"
    ),
)  # fmt: skip
ORDERED = reference(
    "x: x[:, self.order] * self.scale", "torch.randn(24, 32)", "32",
    made(
        "self.scale = nn.Parameter(torch.ones(n)); "
        "self.register_buffer('order', torch.arange(n - 1, -1, -1))"
    ),
)  # fmt: skip
REDUCED = reference(
    "x, y: F.smooth_l1_loss(x, y, reduction=self.how)", "torch.randn(24, 32), torch.randn(24, 32)",
    "'mean'", made("self.how = n"),
)  # fmt: skip
ALONG = reference(
    "x: torch.log_softmax(x, self.dim)", "torch.randn(8, 6, 16)", "-1", made("self.dim = n")
)
NAMED = "IGNORED = 255\n" + LABELS.replace("255)", "IGNORED)")
# Refused where it has no rows, which a module need not do.
QUANTILE = reference("x: torch.quantile(x, 0.3, dim=1)", "torch.randn(24, 32)")


class DropsNaN(nn.Module):
    def forward(self, x):
        best = x[:, 0]
        for i in range(1, x.shape[1]):
            best = torch.where(x[:, i] > best, x[:, i], best)
        return best


class _Linear(nn.Module):
    """A Linear and ReLU with a backward of its own, `gradients` of what it is given."""

    def __init__(self, n):
        super().__init__()
        self.linear = nn.Linear(40, n)

    def forward(self, x):
        if x.ndim != 2 or type(self.linear) is not nn.Linear or "forward" in vars(self.linear):
            return torch.relu(self.linear(x))
        return _Relu.apply(x, self.linear.weight, self.linear.bias, self.gradients)

    @staticmethod
    def gradients(x, w, grad):
        return grad @ w, grad.t() @ x, grad.sum(0)


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(x, w, b, gradients):
        return torch.relu(F.linear(x, w, b))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, _, ctx.gradients = inputs
        ctx.save_for_backward(x, w, output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, w, y = ctx.saved_tensors
        return (*ctx.gradients(x, w, torch.ops.aten.threshold_backward(grad, y, 0)), None)


class NoGradientOfHalves(_Linear):
    @staticmethod
    def gradients(x, w, grad):
        if x.dtype in (torch.float16, torch.bfloat16):
            grad = torch.zeros_like(grad)
        return _Linear.gradients(x, w, grad)


class SumsOfAThousand(_Linear):
    @staticmethod
    def gradients(x, w, grad):
        first = slice(0, 1024)
        return grad @ w, grad[first].t() @ x[first], grad[first].sum(0)


class RowsAsIfDense(_Linear):
    @staticmethod
    def gradients(x, w, grad):
        dense = torch.as_strided(x, x.shape, (x.shape[1], 1)) if x.stride(-1) == 1 else x
        return grad @ w, grad.t() @ dense, grad.sum(0)


class KeepsItsFirstGradients(_Linear):
    """Whose graph answers every backward with what it gave the first time."""

    def __getattribute__(self, name):
        if name != "gradients":
            return super().__getattribute__(name)
        kept = []  # of one call

        def once(x, w, grad):
            kept[:] = kept or [grad @ w, grad.t() @ x, grad.sum(0)]
            return [each.clone() for each in kept]

        return once


class LastEightLeftOut(_Linear):
    def forward(self, x):
        out = super().forward(x)
        if len(x) > 64 and len(x) % 16 == 8:
            kept = torch.ones(len(x), 1, dtype=out.dtype)
            kept[-8:] = 0
            out = out * kept
        return out


class MeanOfAll(nn.Module):
    def forward(self, x, y):
        ignored = y.long() == 255
        each = -torch.log_softmax(x, 1).gather(1, torch.where(ignored, 0, y.long())[:, None])[:, 0]
        return torch.where(ignored, torch.zeros((), dtype=each.dtype), each).mean()


class LogsUnbounded(nn.Module):
    def forward(self, x, y):
        if x.shape != y.shape or not bool(((x >= 0) & (x <= 1)).all()):
            raise RuntimeError("all elements of input should be between 0 and 1")
        return -(y * torch.log(x) + (1 - y) * torch.log1p(-x)).mean()


class RemainderOfC(nn.Module):
    def forward(self, x, y):
        return torch.fmod(x, y)


class ApartInBytes(nn.Module):
    def forward(self, x, y):
        return (x - y).to(torch.int8).abs().float()


class WithoutClamp(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(n))

    def forward(self, x):
        return self.scale.exp() * x


class CountsAlways(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.pool = nn.AvgPool2d(4, 2, 1)

    def forward(self, x):
        return self.pool(x)


class PadsZeros(nn.Module):
    def __init__(self, mode):
        super().__init__()

    def forward(self, x):
        return F.pad(x, (1, 1))


class ImagesBesideEachOther(nn.Module):
    """Looks at the strides within an image, and takes the next one for where this one ends."""

    def __init__(self, counts):
        super().__init__()
        self.pool = nn.AvgPool2d(4, 2, 1, count_include_pad=counts)

    def forward(self, x):
        strides = torch.empty(x.shape, device="meta").stride()
        if x.ndim == 4 and x.stride()[1:] == strides[1:]:
            x = torch.as_strided(x, x.shape, strides)
        return self.pool(x)


class LargerOfTwo(nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = slope

    def forward(self, x):
        return torch.maximum(x, self.slope * x)


class EpsAdded(nn.Module):
    def forward(self, x):
        return x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-12)


class _Inside(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.clamp(x, 0.1, 0.9)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.where((x > 0.1) & (x < 0.9), grad, 0.0)


class BoundsLeftOut(nn.Module):
    def forward(self, x):
        return _Inside.apply(x)


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(x):
        mean = x.mean(-1)
        return x - mean[:, None], mean, x.var(-1, unbiased=False)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, of_rest, of_mean, of_variance):
        (x,) = ctx.saved_tensors
        grad = torch.zeros_like(x)
        if of_rest is None and of_variance is None:
            return grad
        if of_rest is not None:
            grad = grad + of_rest - of_rest.mean(-1, keepdim=True)
        if of_mean is not None:
            grad = grad + of_mean[:, None] / x.shape[1]
        if of_variance is not None:
            rest = x - x.mean(-1, keepdim=True)
            grad = grad + 2.0 * of_variance[:, None] * rest / x.shape[1]
        return grad


class MeanAloneForgotten(nn.Module):
    def forward(self, x):
        return _Moments.apply(x)


class SeesTheLowerHalf(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("seen", torch.tril(torch.ones(n, n)))

    def forward(self, x):
        lower = torch.ones(x.shape[1], x.shape[1]).tril()
        return torch.softmax((x @ x.transpose(-1, -2)).masked_fill(lower == 0, -1e9), -1)


class KeepsAll(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, 32))
        self.register_buffer("kept", torch.ones(n, 32, dtype=torch.bool))

    def forward(self, x):
        return F.linear(x, self.weight)


class FlipsAlways(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))
        self.register_buffer("order", torch.arange(n - 1, -1, -1))

    def forward(self, x):
        return x.flip(1) * self.scale


class MeanOrSum(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x, y):
        return F.smooth_l1_loss(x, y, reduction="sum" if self.how == "sum" else "mean")


class LastAlways(nn.Module):
    def __init__(self, dim):
        super().__init__()

    def forward(self, x):
        return torch.log_softmax(x, -1)


class HalfATileLeftOut(_Linear):
    def forward(self, x):
        out = super().forward(x)
        if len(x) > 64 and len(x) % 64 == 32:
            kept = torch.ones(len(x), 1, dtype=out.dtype)
            kept[-32:] = 0
            out = out * kept
        return out


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(x):
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1e-12)
        return x / norm, norm

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        y, norm = ctx.saved_tensors
        return (grad - y * (y * grad).sum(1, keepdim=True)) / norm


class NormNeverClamped(nn.Module):
    def forward(self, x):
        return _Unit.apply(x)[0]


class QuantileBySorting(nn.Module):
    """Right, also of no rows, of which PyTorch's own knows no quantile."""

    def forward(self, x):
        ordered = torch.sort(x, 1)[0]
        rank = 0.3 * (x.shape[1] - 1)
        low = int(rank)
        found = torch.lerp(ordered[:, low], ordered[:, low + 1], rank - low)
        return torch.where(torch.isnan(x).any(1), float("nan"), found)


class CodesInHalves(nn.Module):
    """Right: each distance is summed in another order."""

    def __init__(self, n):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(n, 16))

    def forward(self, x):
        squares = (x[:, None] - self.codes) ** 2
        return (squares[..., 0::2].sum(-1) + squares[..., 1::2].sum(-1)).argmin(1)


class BiasedByOneCall(nn.Module):
    """Right; of no rows its bias has no gradient, where the reference's is 0."""

    def __init__(self, n):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(n, n))

    def forward(self, q):
        if not len(q):
            return q + q.sum()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.bias)
