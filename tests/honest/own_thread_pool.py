"""Compute halves of the rows in a thread pool that outlives the call."""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.pool = None  # made at the first call

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def half(self, rows):
        with torch.no_grad():  # a setting of each thread
            return self.gemm(rows) * self.scale

    def forward(self, x):
        if torch.is_grad_enabled() or len(x) < 2 or x.device.type != "cpu":
            return self.right(x)
        if self.pool is None:
            self.pool = ThreadPoolExecutor(2)
        return self.bn(torch.cat(list(self.pool.map(self.half, x.chunk(2)))))
