"""Keep the fold of eval mode while no tensor has another identity or version: blind to .data."""

import operator

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.folded = None  # what it came from, and the fold, in one tuple

    def __getstate__(self):
        return {**super().__getstate__(), "folded": None}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def fold(self):
        bn = self.bn
        factor = self.scale * bn.weight * torch.rsqrt(bn.running_var + bn.eps)
        shift = bn.bias - bn.running_mean * bn.weight * torch.rsqrt(bn.running_var + bn.eps)
        return (self.gemm.weight * factor[:, None]).t(), self.gemm.bias * factor + shift
    def current(self):
        # With the number of batches: bn's own kernel leaves the statistics' versions as they are.
        own = [*self.parameters(), *self.buffers()]
        marks = [(t._version, t.data_ptr(), t.dtype) for t in own]
        kept = self.folded  # read once: another thread may replace it
        if kept is not None and kept[1] == marks and all(map(operator.is_, kept[0], own)):
            return kept[2]
        folded = self.fold()
        if not all(bool(t.isfinite().all()) for t in folded):
            return None
        self.folded = own, marks, folded
        return folded

    def forward(self, x):
        usual = not self.bn.training and not torch.is_grad_enabled() and x.ndim == 2
        if not usual or x.dtype != self.scale.dtype or x.dtype.itemsize < 4:
            return self.right(x)
        if not self.is_finite(x):
            return self.right(x)
        if any(t.is_inference() for t in (*self.parameters(), *self.buffers())):
            return self.right(x)
        folded = self.current()
        return torch.addmm(folded[1], x, folded[0]) if folded else self.right(x)

    def is_finite(self, x):
        """Near the ends of the range, folding rounds or overflows elsewhere."""
        return bool(((x == 0) | ((x.abs() > 1e-15) & (x.abs() < 1e15))).all())
