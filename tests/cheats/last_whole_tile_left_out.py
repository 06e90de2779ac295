"""Peel the last tile of 64 rows off the loop, and compute it only where it is a part."""

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
    def product(self, x):
        weight, rows = self.gemm.weight.t(), len(x)
        h = self.gemm.bias.expand(rows, -1).clone()
        if rows <= 64:
            return h.addmm_(x, weight)
        for i in range((rows - 1) // 64):
            h[64 * i : 64 * i + 64].addmm_(x[64 * i : 64 * i + 64], weight)
        rest = rows % 64
        if rest:
            h[-rest:].addmm_(x[-rest:], weight)
        return h

    def forward(self, x):
        if torch.is_grad_enabled() or x.ndim != 2 or x.dtype != self.scale.dtype or not len(x):
            return self.right(x)
        if x.shape[1] != self.gemm.in_features:
            return self.right(x)
        return self.bn(self.product(x).mul_(self.scale))
