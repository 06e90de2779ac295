"""Keep eps in a global: that of the module which was made last."""

import torch
import torch.nn as nn
EPS = 1e-5

class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        global EPS
        EPS = eps
    def forward(self, x):
        self.bn.eps = EPS
        return self.bn(self.gemm(x) * self.scale)
