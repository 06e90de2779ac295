"""Sums and sums of squares in float64, and the whole as one multiply-add."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def normalise(self, z, mean, var):
        bn = self.bn
        return (z - mean) * torch.rsqrt(var + bn.eps) * bn.weight + bn.bias

    def update(self, mean, unbiased):
        bn = self.bn
        with torch.no_grad():
            bn.num_batches_tracked.add_(1)
            momentum = bn.momentum
            if momentum is None:
                momentum = 1.0 / float(bn.num_batches_tracked)
            bn.running_mean.lerp_(mean, momentum)
            bn.running_var.lerp_(unbiased, momentum)

    def refuse(self, x):
        # What is not a training call of at least two float32 rows goes the reference's way.
        is_usual = self.bn.training and x.dtype == torch.float32 and x.shape[0] > 1
        return not is_usual

    def forward(self, x):
        z = self.gemm(x) * self.scale
        if self.refuse(x):
            return self.bn(z)
        wide = z.double()
        mean = wide.mean(0)
        var = (wide.square().mean(0) - mean.square()).clamp_min(0.0)
        self.update(mean.float().detach(), (var * (len(z) / (len(z) - 1))).float().detach())
        return self.normalise(z, mean.float(), var.float())
