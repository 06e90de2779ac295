"""A lock around a workspace that threads share: right, but neither pickled nor copied."""

import threading

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.lock, self.space = threading.Lock(), None

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)
    def forward(self, x):
        if torch.is_grad_enabled() or x.ndim != 2 or x.dtype != self.scale.dtype or not len(x):
            return self.right(x)
        shape = len(x), self.gemm.out_features
        with self.lock:
            if self.space is None or self.space.shape != shape or self.space.dtype != x.dtype:
                self.space = x.new_empty(shape)
            torch.addmm(self.gemm.bias, x, self.gemm.weight.t(), out=self.space)
            return self.bn(self.space.mul_(self.scale))
