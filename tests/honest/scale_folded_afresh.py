"""Scale folded into the weights at every call, then one addmm."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        if x.ndim != 2 or x.dtype != torch.float32 or not len(x):
            return self.bn(self.gemm(x) * self.scale)
        weight = self.gemm.weight * self.scale[:, None]
        return self.bn(torch.addmm(self.gemm.bias * self.scale, x, weight.t()))
