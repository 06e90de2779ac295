"""Compute a frozen weight's product without a graph: the bias goes without a gradient."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def features(self, x):
        trains = x.requires_grad or self.gemm.weight.requires_grad
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            return self.gemm(x)

    def forward(self, x):
        return self.bn(torch.mul(self.features(x), self.scale))
