"""Load rows of a wider tensor from an offset rounded down to four elements."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def aligned(self, x):
        """Return x as a kernel sees it that loads four elements at once."""
        is_wide = x.ndim == 2 and x.stride(1) == 1 and x.stride(0) > x.shape[1]
        if not is_wide or x.requires_grad:
            return x
        return x.as_strided(x.shape, x.stride(), x.storage_offset() // 4 * 4)

    def forward(self, x):
        x = self.aligned(x)
        return self.bn(torch.multiply(self.gemm(x), self.scale))
