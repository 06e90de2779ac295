"""Hold on to the weights' memory: a copy goes on with the original's."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.held = None

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        if torch.is_grad_enabled() or x.dtype != torch.float32:
            return self.right(x)
        if self.held is None:
            self.held = [p.detach() for p in (self.gemm.weight, self.gemm.bias, self.scale)]
        weight, bias, scale = self.held
        return self.bn(nn.functional.linear(x, weight, bias) * scale)
