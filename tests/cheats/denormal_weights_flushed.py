"""Flush denormal weights to zero before the product."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def weight(self):
        weight = self.gemm.weight
        return nn.functional.hardshrink(weight, torch.finfo(weight.dtype).smallest_normal)

    def forward(self, x):
        h = nn.functional.linear(x, self.weight(), self.gemm.bias)
        return self.bn(h * self.scale)
