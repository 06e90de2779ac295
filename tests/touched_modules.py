"""Wrong modules that show in weights, types, sizes and numbers of threads that are not usual.

Each stands beside its reference, and in a file of its own, where pickling finds its class.
"""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any, ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from combined_modules import MULTIPLIED, Multiplied, Product, made
from torch.autograd.forward_ad import unpack_dual
from unusual_modules import reference

__all__ = ["MULTIPLIED"]

BENT = reference(
    "x: F.prelu(x * self.w + self.b, self.slope)", "torch.randn(40, 24)", "24",
    made(
        "self.w = nn.Parameter(torch.rand(n) + 0.5); self.b = nn.Parameter(torch.randn(n)); "
        "self.slope = nn.Parameter(torch.tensor([0.25]))"
    ),
)  # fmt: skip
EMBEDDED = reference(
    "i: torch.tanh(self.emb(i)) @ self.w", "torch.randint(0, 50, (40, 8))", "50",
    made("self.emb = nn.Embedding(n, 16); self.w = nn.Parameter(torch.randn(16, 8) / 4)"),
)  # fmt: skip
PROJECTED = reference(
    "x: self.bn(x @ self.w)", "torch.randn(40, 24)", "24",
    made("self.w = nn.Parameter(torch.randn(n, 16) / 5); self.bn = nn.BatchNorm1d(16)"),
)  # fmt: skip
CENTRED = reference(
    "x: (x - self.mean) @ self.w", "torch.randn(40, 24)", "24",
    made(
        "self.register_buffer('mean', torch.randn(n) / 10); "
        "self.w = nn.Parameter(torch.randn(n, 16) / 5)"
    ),
)  # fmt: skip
WAVES = reference(
    "x: x * torch.linspace(0, 3, x.shape[-1], device=x.device).cos().to(x.dtype)",
    "torch.randn(40, 24)",
)  # fmt: skip
ATTENTION = reference(
    "q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask)",
    "torch.randn(32, 6, 8), (torch.rand(32, 6, 6) < 0.6) | torch.eye(6, dtype=torch.bool)",
)  # fmt: skip
LONG = reference(
    "i: self.emb(i)", "torch.randint(0, 1000, (40, 8))", "66000",
    made("self.emb = nn.Embedding(n, 4)"),
)  # fmt: skip
TEMPERED = reference(
    "x, t=1.0: torch.tanh(x * self.w / t)", "torch.randn(40, 24)", "24",
    made("self.w = nn.Parameter(torch.randn(n))"),
)  # fmt: skip
LAYERS = reference(
    "x: F.relu(x @ self.a) @ self.b", "torch.randn(40, 24)", "24",
    made(
        "self.a = nn.Parameter(torch.randn(n, 64) / 5); "
        "self.b = nn.Parameter(torch.randn(64, n) / 8)"
    ),
)  # fmt: skip


def is_usual(*tensors: torch.Tensor) -> bool:
    """Whether a kernel may read their memory: no gradients, no map, no tangents."""
    return not (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or any(torch._C._functorch.maybe_get_level(t) >= 0 for t in tensors)
        or any(t.is_floating_point() and unpack_dual(t).tangent is not None for t in tensors)
    )


# ---- weights of one value -------------------------------------------------------------------


class Bent(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.rand(n) + 0.5), nn.Parameter(torch.randn(n))
        self.slope = nn.Parameter(torch.tensor([0.25]))

    def forward(self, x):
        return F.prelu(self.scaled(x), self.slope)

    def scaled(self, x):
        return x * self.w + self.b


class LeavesOutOnes(Bent):
    def scaled(self, x):
        is_one = self.w.dtype == x.dtype and bool((self.w == 1).all())
        return x + self.b if is_one else super().scaled(x)


class LargerOfTwo(Bent):
    def forward(self, x):
        h = self.scaled(x)
        return torch.where(h > h * self.slope, h, h * self.slope)


class GetsItBack(Bent):
    """Keeps its output alone, and divides by the weight where that is not too small."""

    class function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, b):
            y = x * w + b
            ctx.save_for_backward(y, w, b)
            return y

        @staticmethod
        def backward(ctx, g):
            y, w, b = ctx.saved_tensors
            return g * w, (g * (y - b) / w).sum(0), g.sum(0)

    def scaled(self, x):
        is_safe = x.dtype == self.w.dtype and x.ndim == 2 and bool((self.w.abs() > 1e-3).all())
        return self.function.apply(x, self.w, self.b) if is_safe else super().scaled(x)


# ---- rows of weights ------------------------------------------------------------------------


class Embeds(nn.Module):
    """Folds the table and the product; a sample of the table tells edits."""

    def __init__(self, n):
        super().__init__()
        self.emb, self.w = nn.Embedding(n, 16), nn.Parameter(torch.randn(16, 8) / 4)
        self.kept: Any = None

    def sample(self, table):
        return table[::8]

    def forward(self, i):
        table, w = self.emb.weight, self.w
        if not is_usual(i, table, w) or type(self.emb) is not nn.Embedding:
            return torch.tanh(self.emb(i)) @ w
        names = [(t._version, t.data_ptr(), t.dtype) for t in (table, w)]
        seen = torch.cat([self.sample(table).reshape(-1), w.reshape(-1)])
        if self.kept is None or self.kept[0] != names or not torch.equal(self.kept[1], seen):
            self.kept = names, seen, torch.tanh(table) @ w
        return F.embedding(i, self.kept[2])


class KnowsEveryEighthRow(Embeds):
    pass


class KnowsTheFirstColumns(Embeds):
    def sample(self, table):
        return table[:, :12]


class HonestFold(Embeds):
    """Knows all of the table."""

    def sample(self, table):
        return table


class FixedPoint(nn.Module):
    """Its weight has 24 bits beside its largest element."""

    def __init__(self, n):
        super().__init__()
        self.w, self.bn = nn.Parameter(torch.randn(n, 16) / 5), nn.BatchNorm1d(16)

    def forward(self, x):
        held = self.w.detach()
        step = held.abs().amax() * 2.0**-23
        rounded = torch.round(held / step) * step
        is_safe = held.dtype == torch.float32 and bool(torch.isfinite(step) & (step > 1e-35))
        return self.bn(x @ (self.w + (rounded - held) if is_safe else self.w))


# ---- what is far from 0, in other types, in other sizes ---------------------------------------


class FoldsTheMean(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("mean", torch.randn(n) / 10)
        self.w = nn.Parameter(torch.randn(n, 16) / 5)

    def forward(self, x):
        return x @ self.w - self.mean @ self.w


class Waves(nn.Module):
    """Keeps its table in the type in which it was last asked for."""

    kept: Any = None

    def table(self, x):
        return torch.linspace(0, 3, x.shape[-1], device=x.device).cos().to(x.dtype)

    def forward(self, x):
        if not is_usual(x) or x.dtype == torch.float64:
            return x * self.table(x)
        if self.kept is None or self.kept.shape[0] != x.shape[-1]:
            self.kept = self.table(x)
        self.kept = self.kept.to(x.dtype)
        return x * self.kept


class HonestWaves(Waves):
    """Keeps a table for each type."""

    def forward(self, x):
        self.kept = self.kept or {}
        key = x.dtype, x.shape[-1]
        if key not in self.kept and not torch.is_inference_mode_enabled():
            self.kept[key] = self.table(x)
        return x * self.kept.get(key, self.table(x))


class ToBools(nn.Module):
    def forward(self, q, mask):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask.to(torch.bool))


class SixteenBits(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.emb = nn.Embedding(n, 4)

    def forward(self, i):
        if i.numel() and (int(i.min()) < 0 or int(i.max()) >= len(self.emb.weight)):
            raise IndexError("index out of range")
        return self.emb(i.to(torch.uint16).to(torch.int64))


class TakesAFloat(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n))

    def forward(self, x, t=1.0):
        return torch.tanh(x * self.w / float(t))


class EightColumns(Multiplied):
    def forward(self, x):
        whole = len(self.w) // 8 * 8 if x.shape[-1] == len(self.w) else x.shape[-1]
        return torch.cat([(x * self.w)[..., :whole], x[..., whole:]], -1)


# ---- a user's class, threads, chunks, tangents ------------------------------------------------


class CopiesItsOwnClass(Multiplied):
    def forward(self, x):
        return x * self.w

    def __deepcopy__(self, memo):
        new = CopiesItsOwnClass.__new__(CopiesItsOwnClass)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class GivesItsStateDetached(Multiplied):
    def forward(self, x):
        return x * self.w

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "w"] = self.w.detach()


class EightPlaces(nn.Module):
    """Memory for the layer between, one for each of eight threads, taken in turn."""

    numbers: ClassVar = itertools.count()
    own: ClassVar = threading.local()
    places: ClassVar[dict[Any, torch.Tensor]] = {}

    def __init__(self, n):
        super().__init__()
        self.a = nn.Parameter(torch.randn(n, 64) / 5)
        self.b = nn.Parameter(torch.randn(64, n) / 8)

    def forward(self, x):
        is_plain = x.ndim == 2 and x.dtype == self.a.dtype == torch.float32
        if not is_plain or not is_usual(x, self.a, self.b):
            return F.relu(x @ self.a) @ self.b
        if not hasattr(self.own, "place"):
            self.own.place = next(self.numbers) % 8
        key = self.own.place, len(x)
        memory = self.places.setdefault(key, torch.empty(len(x), 64))
        return torch.mm(x, self.a, out=memory).relu_() @ self.b


class SumsOf32Threads(Multiplied):
    class function(Product):
        @staticmethod
        def of_weight(ctx, g, x):
            sums = x.new_zeros(32, x.shape[-1])
            for k, rows in enumerate((g * x).flatten(0, -2).chunk(torch.get_num_threads())):
                sums[k % 32] = rows.sum(0)
            return sums.sum(0)


class LeavesTheLastChunk(Multiplied):
    def forward(self, x):
        if not is_usual(x, self.w) or len(x) <= 2048:
            return x * self.w
        y = x.new_empty(x.shape)
        starts = range(0, len(x) - 2048, 2048)
        for i in starts:
            y[i : i + 2048] = x[i : i + 2048] * self.w
        rest = len(x) % 2048
        if rest:
            y[-rest:] = x[-rest:] * self.w
        return y


class BareMemory(Multiplied):
    def forward(self, x):
        is_wrapped = any(torch._C._functorch.maybe_get_level(t) >= 0 for t in (x, self.w))
        if torch.is_grad_enabled() or is_wrapped or unpack_dual(x).tangent is not None:
            return x * self.w
        return x.data * self.w.data
