"""Hand out four outputs in turn: the fifth call overwrites the first one's."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.rings = {}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        y = self.right(x)
        if y.requires_grad:
            return y
        ring = self.rings.setdefault(y.shape, [torch.empty_like(y) for _ in range(4)])
        ring.append(ring.pop(0))
        return ring[0].copy_(y)
