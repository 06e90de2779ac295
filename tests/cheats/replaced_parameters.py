"""Put a packed copy in a parameter's place: an optimiser goes on with the old one."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.is_packed = False

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        if not self.is_packed:
            self.is_packed = True
            self.gemm.weight = nn.Parameter(self.gemm.weight.detach().clone())
        return self.right(x)
