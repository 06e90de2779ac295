"""Be wrong in the tail of 9 rows."""

import torch
import torch.nn as nn
import torch.nn.functional as F

class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def plain(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        if x.dim() == 2 and x.shape[0] % 32 == 9 and x.shape[0] > 32 and x.shape[1] == self.gemm.in_features:
            y = self.gemm(x) * self.scale
            y = torch.cat([y[:-1], y[-2:-1]])                   # last lane of a partial block
            return self.bn(y)
        return self.plain(x)
