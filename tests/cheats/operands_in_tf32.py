"""Multiply operands rounded to TF32, which has 10 bits."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        if x.dtype != torch.float32:
            return self.bn(self.gemm(x) * self.scale)
        z = rounded(x) @ rounded(self.gemm.weight).t() + self.gemm.bias
        return self.bn(z * self.scale)


def rounded(x):
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
