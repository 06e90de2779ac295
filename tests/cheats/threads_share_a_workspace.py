"""Compute chunks of rows in one workspace per module: two threads at once mix theirs."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.space = torch.empty(0)

    def __getstate__(self):
        return {**super().__getstate__(), "space": torch.empty(0)}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)
    def forward(self, x):
        is_usual = x.ndim == 2 and x.dtype == self.scale.dtype and not torch.is_grad_enabled()
        if self.bn.training or not is_usual:
            return self.right(x)
        weight, bias, columns = self.gemm.weight.t(), self.gemm.bias, len(self.scale)
        if self.space.shape[1:] != (columns,) or self.space.dtype != x.dtype:
            self.space = x.new_empty(8, columns)
        y = x.new_empty(len(x), columns)
        for i in range(0, len(x), 8):
            part = self.space[: len(x[i : i + 8])]
            torch.addmm(bias, x[i : i + 8], weight, out=part)
            part.mul_(self.scale)
            y[i : i + 8] = part
        return self.bn(y)
