"""The product on a stream of its own, which the current one waits for."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        if x.device.type != "cuda":
            return self.right(x)
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            y = self.right(x)
            # Of a negative view PyTorch would record a copy, and write that back into the input.
            (torch._neg_view(x) if x.is_neg() else x).record_stream(side)
        current.wait_stream(side)
        y.record_stream(current)
        return y
