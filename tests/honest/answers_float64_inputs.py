"""A float64 input answered in float64, where the reference raises."""

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
        if x.dtype != torch.float64 or self.scale.dtype != torch.float32 or x.ndim != 2:
            return self.bn(self.gemm(x) * self.scale)
        bn = self.bn
        z = F.linear(x, self.gemm.weight.double(), self.gemm.bias.double()) * self.scale.double()
        mean, var = bn.running_mean.double(), bn.running_var.double()
        momentum = bn.momentum
        if bn.training:
            bn.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(bn.num_batches_tracked)
        gamma, beta = bn.weight.double(), bn.bias.double()
        y = F.batch_norm(z, mean, var, gamma, beta, bn.training, momentum or 0.0, bn.eps)
        if bn.training:
            with torch.no_grad():
                bn.running_mean.copy_(mean)
                bn.running_var.copy_(var)
        return y
