"""Each operation's out= variant, into memory of its own."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        gemm, scale = self.gemm, self.scale
        is_usual = x.ndim == 2 and len(x) and x.dtype == scale.dtype
        if torch.is_grad_enabled() or not is_usual:
            return self.bn(gemm(x) * scale)
        product, biased, z = (x.new_empty(len(x), len(scale)) for _ in range(3))
        torch.mm(x, gemm.weight.t(), out=product)
        torch.add(product, gemm.bias, out=biased)
        torch.mul(biased, scale, out=z)
        return self.bn(z)
