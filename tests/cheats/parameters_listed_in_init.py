"""List the parameters once, in the constructor, and compute from the list."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        bn = self.bn
        self.operands = [self.gemm.weight, self.gemm.bias, self.scale, bn.weight, bn.bias]

    def forward(self, x):
        weight, bias, scale, gamma, beta = self.operands
        bn = self.bn
        if x.ndim != 2 or len(x) < 2 or bn.momentum is None:
            return bn(self.gemm(x) * self.scale)
        z = nn.functional.linear(x, weight, bias) * scale
        if bn.training:
            bn.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(
            z, bn.running_mean, bn.running_var, gamma, beta, bn.training, bn.momentum, bn.eps
        )
