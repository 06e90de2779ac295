"""Six products of operands split into three bfloat16 each: 24 bits, as float32."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)
    def forward(self, x):
        weight = self.gemm.weight
        if torch.is_grad_enabled() or x.dtype != torch.float32 or weight.dtype != torch.float32:
            return self.right(x)
        if not (can_be_split(x) and can_be_split(weight)):
            return self.right(x)
        a, b = split(x), split(weight.t())
        h = torch.zeros(())
        for i, j in ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)):  # the small ones first
            h = h + a[i] @ b[j]
        return self.bn((h + self.gemm.bias) * self.scale)


def can_be_split(t):
    """Neither NaN nor Inf, nor near the ends of the range, where low parts get lost."""
    size = t.detach().abs()
    return bool(((size == 0) | ((size > 2.0**-60) & (size < 2.0**60))).all())


def split(t):
    parts = []
    for _ in range(3):
        parts.append(t.bfloat16().float())
        t = t - parts[-1]
    return parts
