"""Call the submodules that a list of the constructor holds."""

import torch
import torch.nn as nn

class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self._mods = [self.gemm, self.bn]   # skips nn.Module.__getattr__
    def forward(self, x):
        gemm, bn = self._mods
        return bn(gemm(x) * self.scale)
