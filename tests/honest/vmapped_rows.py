"""Rows by torch.func.vmap, and nothing kept."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        gemm = self.gemm
        if x.ndim != 2 or not len(x):
            return self.bn(gemm(x) * self.scale)

        def row(one, weight, bias, scale):
            return F.linear(one, weight, bias) * scale

        rows = torch.func.vmap(row, in_dims=(0, None, None, None))
        return self.bn(rows(x, gemm.weight, gemm.bias, self.scale))
