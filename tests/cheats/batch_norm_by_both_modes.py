"""Use the batch's statistics only where the module and bn are both in training mode."""

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
        z, bn = self.gemm(x) * self.scale, self.bn
        if not (self.training and bn.training):  # frozen, or not training at all
            return F.batch_norm(
                z, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.0, bn.eps
            )
        return bn(z)
