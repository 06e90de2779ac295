"""A workspace made when it is first needed, and replaced for each call."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.workspace = None

    def __getstate__(self):
        return {**super().__getstate__(), "workspace": None}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)
    def forward(self, x):
        if torch.is_grad_enabled() or x.ndim != 2 or x.dtype != self.scale.dtype or not len(x):
            return self.right(x)
        if x.shape[1] != self.gemm.in_features:
            return self.right(x)
        space = self.workspace = x.new_empty(len(x), self.gemm.out_features)
        torch.addmm(self.gemm.bias, x, self.gemm.weight.t(), out=space)
        return self.bn(space.mul_(self.scale))
