"""Return the same tensor at every call."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.output = None

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        y = self.right(x)
        if self.output is None or self.output.shape != y.shape or torch.is_grad_enabled():
            self.output = y
        else:
            self.output.copy_(y)
        return self.output
