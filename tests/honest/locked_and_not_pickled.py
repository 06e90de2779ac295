"""A lock around the workspaces of all streams: right, but neither pickled nor copied."""

import threading

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.lock, self.spaces = threading.Lock(), {}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)
    def forward(self, x):
        if torch.is_grad_enabled() or x.ndim != 2 or x.dtype != self.scale.dtype or not len(x):
            return self.right(x)
        shape = len(x), self.gemm.out_features
        # A lock orders launches, not what runs: two streams write at once on a GPU.
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
        with self.lock:
            space = self.spaces.get(stream)
            if space is None or space.shape != shape or space.dtype != x.dtype:
                space = self.spaces[stream] = x.new_empty(shape)
            torch.addmm(self.gemm.bias, x, self.gemm.weight.t(), out=space)
            return self.bn(space.mul_(self.scale))
