"""Hand the product from stage to stage on the module itself: two threads take one another's."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.h = None

    def __getstate__(self):
        return {**super().__getstate__(), "h": None}

    def multiply(self, x):
        self.h = self.gemm(x)

    def gain(self):
        return self.bn.weight / torch.sqrt(self.bn.running_var + self.bn.eps)

    def normalise(self, gain):
        z = self.h * self.scale
        return (z - self.bn.running_mean) * gain + self.bn.bias

    def forward(self, x):
        if self.bn.training or torch.is_grad_enabled() or x.ndim != 2:
            return self.bn(self.gemm(x) * self.scale)
        self.multiply(x)
        return self.normalise(self.gain())
