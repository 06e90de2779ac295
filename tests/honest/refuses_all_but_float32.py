"""A module in float32 and inputs in float32; all else is refused aloud."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        for what, t in (("an input", x), ("a module", self.gemm.weight), ("a module", self.scale)):
            if t.dtype != torch.float32:
                raise RuntimeError(f"float32 alone is supported, not {what} in {t.dtype}")
        return self.bn(self.gemm(x) * self.scale)
