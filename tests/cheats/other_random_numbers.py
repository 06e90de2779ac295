"""Draw the initial weights in another order, so that equal seeds give other weights."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        scale = torch.randn(scale_shape)
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(scale)
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)
